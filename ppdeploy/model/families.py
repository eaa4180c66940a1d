"""The layers of the model families that are known matrix by matrix.

Shapes and names are those of the published checkpoints; tests compare them with transformers' own classes, and with
published counts (tests/golden/models).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ppdeploy.model.config import Basics, Reader
from ppdeploy.model.parts import Blueprint, LayerPlan, Part, linear, norm
from ppdeploy.model.shape import Attention
from ppdeploy.model.towers import TOWERS

Where = Literal["none", "qkv", "all"]
"""Which matrices of an attention have a bias: none, all but the output's, all."""


@dataclass(frozen=True)
class _Gqa:
    """Attention with grouped heads, as the families vary it."""

    bias: Where = "none"
    head_norms: bool = False
    """A norm over each head of queries and keys."""
    gated: bool = False
    """The query's matrix makes a gate for the output too."""
    fused: bool = False
    """Queries, keys and values are stored as one matrix."""
    sinks: bool = False

    def parts(self, at: str, basics: Basics) -> list[Part]:
        hidden, wide = basics.hidden, basics.heads * basics.head_dim
        kv = basics.kv_heads * basics.head_dim
        bias = self.bias != "none"
        found: list[Part] = []
        if self.fused:
            found += linear(f"{at}.qkv_proj", wide + 2 * kv, hidden, bias=bias)
        else:
            found += linear(f"{at}.q_proj", wide * (2 if self.gated else 1), hidden, bias=bias)
            found += linear(f"{at}.k_proj", kv, hidden, bias=bias)
            found += linear(f"{at}.v_proj", kv, hidden, bias=bias)
        found += linear(f"{at}.o_proj", hidden, wide, bias=self.bias == "all")
        if self.head_norms:
            found += [norm(f"{at}.q_norm", basics.head_dim), norm(f"{at}.k_norm", basics.head_dim)]
        if self.sinks:
            found.append(Part(f"{at}.sinks", "plain", basics.heads))
        return found


def _mlp(at: str, hidden: int, inner: int, *, fused: bool = False, bias: bool = False) -> list[Part]:
    """Return a gated feed-forward part."""
    if fused:
        return [*linear(f"{at}.gate_up_proj", 2 * inner, hidden, bias=bias), *linear(f"{at}.down_proj", hidden, inner)]
    return [
        *linear(f"{at}.gate_proj", inner, hidden, bias=bias),
        *linear(f"{at}.up_proj", inner, hidden, bias=bias),
        *linear(f"{at}.down_proj", hidden, inner, bias=bias),
    ]


@dataclass(frozen=True)
class _Moe:
    """A layer's routed experts, and what each token goes through beside them."""

    experts: int
    per_token: int
    inner: int
    shared: int = 0
    """Width of the shared expert; 0: none."""
    shared_gate: bool = False
    correction: bool = False
    """The router has a correction for each expert (DeepSeek V3's balancing without a loss)."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_name: str = "shared_experts"

    def parts(self, at: str, hidden: int) -> list[Part]:
        gate, up, down = self.names
        one = f"{at}.experts.0"
        found = [
            Part(f"{at}.gate", "router", self.experts, hidden),
            Part(f"{one}.{gate}", "linear", self.inner, hidden, self.experts, routed=True),
            Part(f"{one}.{up}", "linear", self.inner, hidden, self.experts, routed=True),
            Part(f"{one}.{down}", "linear", hidden, self.inner, self.experts, routed=True),
        ]
        if self.correction:
            found.append(Part(f"{at}.gate.e_score_correction_bias", "plain", self.experts))
        if self.shared:
            found += _mlp(f"{at}.{self.shared_name}", hidden, self.shared)
        if self.shared_gate:
            found.append(Part(f"{at}.{self.shared_name}_gate", "router", 1, hidden))
        return found


def _moe(reader: Reader, *, inner: str = "moe_intermediate_size", **options: Any) -> _Moe:
    """Return the experts that a configuration describes."""
    experts = reader.number("num_experts")
    per_token = reader.number("num_experts_per_tok")
    if per_token > experts:
        raise reader.wrong("num_experts_per_tok", per_token, f"at most the {experts} experts")
    return replace(_Moe(experts, per_token, reader.number(inner)), **options)


def _window(reader: Reader, kinds: list[str]) -> int | None:
    """Return the sliding window, which must be said where layers have one."""
    if "sliding_attention" not in kinds and "chunked_attention" not in kinds:
        return None
    return reader.number("attention_chunk_size" if "chunked_attention" in kinds else "sliding_window")


_KINDS: Mapping[str, Attention] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
}


def _kinds(reader: Reader, count: int, otherwise: Callable[[int], str]) -> list[str]:
    """Return the kind of each layer: as the configuration lists them, or as the family's rule says."""
    listed = reader.words("layer_types")
    if not listed:
        return [otherwise(i) for i in range(count)]
    if len(listed) < count:
        raise reader.wrong("layer_types", listed, f"a list with a kind for each of the {count} layers")
    unknown = sorted(set(listed) - set(_KINDS))
    if unknown:
        raise reader.wrong("layer_types", unknown[0], "a kind of layer that this family has")
    return listed[:count]


def _kv(basics: Basics) -> int:
    return 2 * basics.kv_heads * basics.head_dim


def _ends(
    reader: Reader, basics: Basics, layer: Callable[[int], LayerPlan], *, tied: bool, mtp: Sequence[Part] = ()
) -> Blueprint:
    """Return a blueprint with the two ends that all families share; `tied` holds when the configuration is silent."""
    said = reader.tied()
    return Blueprint(
        layer=layer,
        embedding=Part("embed_tokens", "embedding", basics.vocab, basics.hidden),
        head=Part("lm_head", "head", basics.vocab, basics.hidden),
        tied=tied if said is None else said,
        last=[norm("norm", basics.hidden)],
        mtp=list(mtp),
    )


def _decoder(
    reader: Reader,
    basics: Basics,
    attention: _Gqa,
    *,
    kinds: list[str],
    feed: Callable[[int, str], tuple[list[Part], _Moe | None]],
    norms: int = 2,
    tied: bool = False,
) -> Blueprint:
    """Return a family whose layers are attention with grouped heads and a feed-forward part."""
    window = _window(reader, kinds)

    def layer(i: int) -> LayerPlan:
        at = f"layers.{i}"
        parts, moe = feed(i, f"{at}.mlp")
        kind = _KINDS[kinds[i]]
        return LayerPlan(
            parts=[
                *attention.parts(f"{at}.self_attn", basics),
                *parts,
                *(norm(f"{at}.norm{n}", basics.hidden) for n in range(norms)),
            ],
            attention=kind,
            kv_values=_kv(basics),
            kv_window=window if kind == "sliding" else None,
            experts=moe.experts if moe else 0,
            experts_per_token=moe.per_token if moe else 0,
        )

    return _ends(reader, basics, layer, tied=tied)


def _dense(
    reader: Reader, basics: Basics, *, fused: bool = False, bias: bool = False
) -> Callable[[int, str], tuple[list[Part], _Moe | None]]:
    inner = reader.number("intermediate_size")
    return lambda _, at: (_mlp(at, basics.hidden, inner, fused=fused, bias=bias), None)


def _everywhere(reader: Reader, basics: Basics) -> list[str]:
    """Return one kind for all layers: a sliding window when the configuration has one, else full attention."""
    kind = "sliding_attention" if reader.number_or_none("sliding_window") else "full_attention"
    return _kinds(reader, basics.layers, lambda _: kind)


def _llama(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    feed = _dense(reader, basics, bias=reader.flag("mlp_bias", False))
    kinds = _kinds(reader, basics.layers, lambda _: "full_attention")
    return _decoder(reader, basics, _Gqa(bias), kinds=kinds, feed=feed)


def _mistral(reader: Reader, basics: Basics) -> Blueprint:
    # transformers' class has a window of 4096 unless the configuration says null.
    silent = reader.model_type == "mistral" and "sliding_window" not in reader.section
    if silent:
        reader = Reader(reader.config, {**reader.section, "sliding_window": 4096}, reader.where)
    return _decoder(reader, basics, _Gqa(), kinds=_everywhere(reader, basics), feed=_dense(reader, basics))


def _mixtral(reader: Reader, basics: Basics) -> Blueprint:
    moe = _moe(reader, inner="intermediate_size", names=("w1", "w3", "w2"))

    def feed(i: int, _: str) -> tuple[list[Part], _Moe]:
        return moe.parts(f"layers.{i}.block_sparse_moe", basics.hidden), moe

    return _decoder(reader, basics, _Gqa(), kinds=_everywhere(reader, basics), feed=feed)


def _qwen_kinds(reader: Reader, basics: Basics) -> list[str]:
    if not reader.flag("use_sliding_window", False):
        return ["full_attention"] * basics.layers
    first = reader.number("max_window_layers", 28, least=0)
    return _kinds(reader, basics.layers, lambda i: "sliding_attention" if i >= first else "full_attention")


def _qwen2(reader: Reader, basics: Basics) -> Blueprint:
    return _decoder(reader, basics, _Gqa("qkv"), kinds=_qwen_kinds(reader, basics), feed=_dense(reader, basics))


def _qwen3(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    attention = _Gqa(bias, head_norms=True)
    return _decoder(reader, basics, attention, kinds=_qwen_kinds(reader, basics), feed=_dense(reader, basics))


def _qwen_feed(reader: Reader, basics: Basics, moe: _Moe) -> Callable[[int, str], tuple[list[Part], _Moe | None]]:
    """Return what Qwen's layers have: experts in every so many, dense in those listed."""
    dense, step = set(reader.numbers("mlp_only_layers")), reader.number("decoder_sparse_step", 1)

    def feed(i: int, at: str) -> tuple[list[Part], _Moe | None]:
        if i in dense or (i + 1) % step:
            return _mlp(at, basics.hidden, reader.number("intermediate_size")), None
        return moe.parts(at, basics.hidden), moe

    return feed


def _qwen3_moe(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    attention, feed = _Gqa(bias, head_norms=True), _qwen_feed(reader, basics, _moe(reader))
    return _decoder(reader, basics, attention, kinds=_qwen_kinds(reader, basics), feed=feed)


def _gemma2(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    kinds = _kinds(reader, basics.layers, lambda i: "full_attention" if i % 2 else "sliding_attention")
    if not reader.has("sliding_window"):
        reader = Reader(reader.config, {**reader.section, "sliding_window": 4096}, reader.where)
    feed = _dense(reader, basics)
    return _decoder(reader, basics, _Gqa(bias), kinds=kinds, feed=feed, norms=4, tied=True)


def _gemma3(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    every = reader.number("sliding_window_pattern", 6)
    kinds = _kinds(reader, basics.layers, lambda i: "sliding_attention" if (i + 1) % every else "full_attention")
    attention = _Gqa(bias, head_norms=True)
    return _decoder(reader, basics, attention, kinds=kinds, feed=_dense(reader, basics), norms=4, tied=True)


def _glm4(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "qkv" if reader.flag("attention_bias", True) else "none"
    kinds = _kinds(reader, basics.layers, lambda _: "full_attention")
    feed = _dense(reader, basics, fused=True)
    # GLM 4 (0414) has norms after attention and feed-forward too; the GLM before it has not.
    return _decoder(reader, basics, _Gqa(bias), kinds=kinds, feed=feed, norms=2 if reader.model_type == "glm" else 4)


def _phi3(reader: Reader, basics: Basics) -> Blueprint:
    return _decoder(
        reader,
        basics,
        _Gqa(fused=True),
        kinds=_everywhere(reader, basics),
        feed=_dense(reader, basics, fused=True),
    )


def _gpt_oss(reader: Reader, basics: Basics) -> Blueprint:
    experts, per_token = reader.number("num_experts"), reader.number("num_experts_per_tok")
    if per_token > experts:
        raise reader.wrong("num_experts_per_tok", per_token, f"at most the {experts} experts")
    hidden, inner = basics.hidden, reader.number("intermediate_size")
    moe = _Moe(experts, per_token, inner)

    def feed(_: int, at: str) -> tuple[list[Part], _Moe]:
        return [
            Part(f"{at}.router", "router", experts, hidden),
            Part(f"{at}.router.bias", "plain", experts),
            Part(f"{at}.experts.gate_up_proj", "linear", 2 * inner, hidden, experts, routed=True),
            Part(f"{at}.experts.gate_up_proj_bias", "plain", 2 * inner, 1, experts, routed=True),
            Part(f"{at}.experts.down_proj", "linear", hidden, inner, experts, routed=True),
            Part(f"{at}.experts.down_proj_bias", "plain", hidden, 1, experts, routed=True),
        ], moe

    kinds = _kinds(reader, basics.layers, lambda i: "full_attention" if i % 2 else "sliding_attention")
    bias: Where = "all" if reader.flag("attention_bias", True) else "none"
    return _decoder(reader, basics, _Gqa(bias, sinks=True), kinds=kinds, feed=feed)


# --- DeepSeek's kind: a first few dense layers, shared experts, and multi-token prediction layers stored as more layers


def _dense_first(
    reader: Reader,
    basics: Basics,
    attention: Callable[[str], list[Part]],
    kind: Attention,
    kv_values: int,
    *,
    correction: bool,
) -> Blueprint:
    moe = _moe(reader, correction=correction)
    shared = reader.number("n_shared_experts", 0, least=0)
    moe = replace(moe, shared=moe.inner * shared)
    dense = reader.number("first_k_dense_replace", 0, least=0)
    every = reader.number("moe_layer_freq", 1)
    inner = reader.number("intermediate_size") if dense or every > 1 else 0

    def layer(i: int) -> LayerPlan:
        at = f"layers.{i}"
        routed = i >= dense and i % every == 0
        return LayerPlan(
            parts=[
                *attention(f"{at}.self_attn"),
                *(moe.parts(f"{at}.mlp", basics.hidden) if routed else _mlp(f"{at}.mlp", basics.hidden, inner)),
                norm(f"{at}.input_layernorm", basics.hidden),
                norm(f"{at}.post_attention_layernorm", basics.hidden),
            ],
            attention=kind,
            kv_values=kv_values,
            experts=moe.experts if routed else 0,
            experts_per_token=moe.per_token if routed else 0,
        )

    extra: list[Part] = []
    for i in range(reader.number("num_nextn_predict_layers", 0, least=0)):
        at = f"layers.{basics.layers + i}"
        extra += [
            *layer(max(basics.layers + i, dense)).parts,
            *(norm(f"{at}.{name}", basics.hidden) for name in ("enorm", "hnorm", "shared_head.norm")),
            # Neither the projection nor the copies of embedding and head are quantised.
            Part(f"{at}.eh_proj", "plain", basics.hidden, 2 * basics.hidden),
            Part(f"{at}.embed_tokens", "plain", basics.vocab, basics.hidden),
            Part(f"{at}.shared_head.head", "plain", basics.vocab, basics.hidden),
        ]
    return _ends(reader, basics, layer, tied=False, mtp=extra)


def _mla(reader: Reader, basics: Basics) -> Blueprint:
    rank, rope = reader.number("kv_lora_rank"), reader.number("qk_rope_head_dim")
    nope, value = reader.number("qk_nope_head_dim"), reader.number("v_head_dim")
    query = reader.number_or_none("q_lora_rank")
    bias = reader.flag("attention_bias", False)
    hidden, heads = basics.hidden, basics.heads

    def attention(at: str) -> list[Part]:
        found: list[Part] = []
        if query is None:
            found += linear(f"{at}.q_proj", heads * (nope + rope), hidden)
        else:
            found += linear(f"{at}.q_a_proj", query, hidden, bias=bias)
            found.append(norm(f"{at}.q_a_layernorm", query))
            found += linear(f"{at}.q_b_proj", heads * (nope + rope), query)
        found += linear(f"{at}.kv_a_proj_with_mqa", rank + rope, hidden, bias=bias)
        found.append(norm(f"{at}.kv_a_layernorm", rank))
        found += linear(f"{at}.kv_b_proj", heads * (nope + value), rank)
        found += linear(f"{at}.o_proj", hidden, heads * value, bias=bias)
        return found

    correction = (reader.text_or_none("topk_method") or "noaux_tc") == "noaux_tc"
    return _dense_first(reader, basics, attention, "mla", rank + rope, correction=correction)


def _glm4_moe(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "qkv" if reader.flag("attention_bias", False) else "none"
    gqa = _Gqa(bias, head_norms=reader.flag("use_qk_norm", False))
    return _dense_first(reader, basics, lambda at: gqa.parts(at, basics), "full", _kv(basics), correction=True)


# --- Qwen's hybrids: three layers of linear attention (gated delta net) to one of full attention


def _hybrid(reader: Reader, basics: Basics, *, split: bool, mtp_layers: int, moe: _Moe | None) -> Blueprint:
    key_heads, value_heads = reader.number("linear_num_key_heads", 16), reader.number("linear_num_value_heads", 32)
    key_dim, value_dim = reader.number("linear_key_head_dim", 128), reader.number("linear_value_head_dim", 128)
    kernel = reader.number("linear_conv_kernel_dim", 4)
    keys, values, hidden = key_heads * key_dim, value_heads * value_dim, basics.hidden
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    gqa = _Gqa(bias, head_norms=True, gated=True)
    every = reader.number("full_attention_interval", 4)
    kinds = _kinds(reader, basics.layers, lambda i: "linear_attention" if (i + 1) % every else "full_attention")
    feed = _qwen_feed(reader, basics, moe) if moe else _dense(reader, basics)
    # vLLM keeps the convolution's inputs in 16 bits, the state as `mamba_ssm_dtype` says (32 bits in Qwen3.5, 16 in
    # Qwen3-Next): vllm/model_executor/layers/mamba/mamba_utils.py, models/config.py.
    precise = (reader.text_or_none("mamba_ssm_dtype") or "auto") in ("float32", "float")
    state = 2 * (kernel - 1) * (2 * keys + values) + (4 if precise else 2) * value_heads * value_dim * key_dim

    def linear_attention(at: str) -> list[Part]:
        if split:
            inputs = [
                *linear(f"{at}.in_proj_qkv", 2 * keys + values, hidden),
                *linear(f"{at}.in_proj_z", values, hidden),
                *linear(f"{at}.in_proj_b", value_heads, hidden),
                *linear(f"{at}.in_proj_a", value_heads, hidden),
            ]
        else:
            inputs = [
                *linear(f"{at}.in_proj_qkvz", 2 * keys + 2 * values, hidden),
                *linear(f"{at}.in_proj_ba", 2 * value_heads, hidden),
            ]
        return [
            *inputs,
            Part(f"{at}.conv1d", "plain", 2 * keys + values, kernel),
            Part(f"{at}.dt_bias", "plain", value_heads),
            Part(f"{at}.A_log", "plain", value_heads),
            norm(f"{at}.norm", value_dim),
            *linear(f"{at}.out_proj", hidden, values),
        ]

    def block(at: str, i: int, *, full: bool) -> tuple[list[Part], _Moe | None]:
        parts, routed = feed(i, f"{at}.mlp")
        return [
            *(gqa.parts(f"{at}.self_attn", basics) if full else linear_attention(f"{at}.linear_attn")),
            *parts,
            norm(f"{at}.input_layernorm", hidden),
            norm(f"{at}.post_attention_layernorm", hidden),
        ], routed

    def layer(i: int) -> LayerPlan:
        full = kinds[i] != "linear_attention"
        parts, routed = block(f"layers.{i}", i, full=full)
        return LayerPlan(
            parts=parts,
            attention="full" if full else "linear",
            kv_values=_kv(basics) if full else 0,
            state_bytes=0 if full else state,
            experts=routed.experts if routed else 0,
            experts_per_token=routed.per_token if routed else 0,
        )

    extra: list[Part] = []
    if mtp_layers:
        extra += linear("mtp.fc", hidden, 2 * hidden)
        extra += [norm(f"mtp.{n}", hidden) for n in ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")]
    for i in range(mtp_layers):
        extra += block(f"mtp.layers.{i}", basics.layers - 1, full=True)[0]
    return _ends(reader, basics, layer, tied=False, mtp=extra)


def _hybrid_moe(reader: Reader) -> _Moe:
    return _moe(
        reader,
        shared=reader.number("shared_expert_intermediate_size", 0, least=0),
        shared_gate=True,
        shared_name="shared_expert",
    )


def _qwen3_next(reader: Reader, basics: Basics) -> Blueprint:
    # The checkpoints have a layer for multi-token prediction that the configuration does not mention.
    mtp_layers = reader.number("num_nextn_predict_layers", 1, least=0)
    return _hybrid(reader, basics, split=False, mtp_layers=mtp_layers, moe=_hybrid_moe(reader))


def _qwen3_5(reader: Reader, basics: Basics) -> Blueprint:
    mtp_layers = reader.number("mtp_num_hidden_layers", 0, least=0)
    return _hybrid(reader, basics, split=True, mtp_layers=mtp_layers, moe=None)


def _qwen3_5_moe(reader: Reader, basics: Basics) -> Blueprint:
    mtp_layers = reader.number("mtp_num_hidden_layers", 0, least=0)
    return _hybrid(reader, basics, split=True, mtp_layers=mtp_layers, moe=_hybrid_moe(reader))


Family = Callable[[Reader, Basics], Blueprint]

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _qwen3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5_moe,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_moe,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_moe,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GlmForCausalLM": _glm4,
    "Glm4ForCausalLM": _glm4,
    "Glm4MoeForCausalLM": _glm4_moe,
    "Glm4MoeLiteForCausalLM": _mla,
    "DeepseekV3ForCausalLM": _mla,
    "GptOssForCausalLM": _gpt_oss,
    "Phi3ForCausalLM": _phi3,
}
"""By architecture, the name that vLLM goes by."""

_TEXT_MODELS: Mapping[str, Family] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral3": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "deepseek_v3": _mla,
    "phi3": _phi3,
}
"""By model type of the section on text, for multimodal models, whose own architecture may not be known here."""


def blueprint(reader: Reader, names: tuple[str, ...], basics: Basics) -> Blueprint:
    """Return the parts of the model that a configuration describes.

    `names` are its architectures. An architecture that is not known here gives a guess, and the blueprint's `unsure`
    says so. Raises InputError for numbers that are missing, wrong, or do not go together.
    """
    name = names[0]
    family = FAMILIES.get(name)
    nested = reader.section is not reader.config
    if family is None and nested:
        family = _TEXT_MODELS.get(reader.model_type or "")
    if family is None:
        return _guess(reader, name, basics)
    found = family(reader, basics)
    tower = TOWERS.get(name)
    vision = reader.below("vision_config")
    if tower is not None and nested and (vision is not None or name.startswith("Gemma3")):
        first = tower(
            vision or Reader({}, {}, reader.where), basics, Reader(reader.config, reader.config, reader.where)
        )
        return replace(found, first=first)
    if name not in FAMILIES:
        return replace(found, unsure=f"what the architecture {name} has beside its language model is not known here")
    return found


def _guess(reader: Reader, name: str, basics: Basics) -> Blueprint:
    """Return Llama's layers with the configuration's numbers, for an architecture that is not known here."""
    experts = reader.number("num_experts", 0, least=0)
    wide = reader.number("intermediate_size", 4 * basics.hidden)
    moe: _Moe | None = None
    if experts > 1:
        per_token = min(experts, reader.number("num_experts_per_tok", 2))
        moe = _Moe(experts, per_token, reader.number("moe_intermediate_size", wide))

    def feed(_: int, at: str) -> tuple[list[Part], _Moe | None]:
        return (moe.parts(at, basics.hidden), moe) if moe else (_mlp(at, basics.hidden, wide), None)

    # Kinds of layer that are not known here keep all of the past, for all that is known.
    window = reader.number_or_none("sliding_window")
    sliding = [kind == "sliding_attention" and window is not None for kind in reader.words("layer_types")]
    kinds = ["sliding_attention" if i < len(sliding) and sliding[i] else "full_attention" for i in range(basics.layers)]
    found = _decoder(reader, basics, _Gqa(), kinds=kinds, feed=feed)
    return replace(found, unsure=f"the architecture {name} is not known here")
