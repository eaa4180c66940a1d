"""Models whose layers are of several kinds: most keep a state of fixed size, a few all of the past."""

from __future__ import annotations

from ppdeploy.model.blocks import Gqa, Moe, Where, dense, experts_of, kinds_of, kv_values, qwen_feed, with_ends
from ppdeploy.model.config import Basics, Reader
from ppdeploy.model.parts import Blueprint, LayerPlan, Part, linear, norm


def _hybrid(reader: Reader, basics: Basics, *, split: bool, mtp_layers: int, moe: Moe | None) -> Blueprint:
    key_heads, value_heads = reader.number("linear_num_key_heads", 16), reader.number("linear_num_value_heads", 32)
    key_dim, value_dim = reader.number("linear_key_head_dim", 128), reader.number("linear_value_head_dim", 128)
    kernel = reader.number("linear_conv_kernel_dim", 4)
    keys, values, hidden = key_heads * key_dim, value_heads * value_dim, basics.hidden
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    gqa = Gqa(bias, head_norms=True, gated=True)
    every = reader.number("full_attention_interval", 4)
    kinds = kinds_of(reader, basics.layers, lambda i: "linear_attention" if (i + 1) % every else "full_attention")
    feed = qwen_feed(reader, basics, moe) if moe else dense(reader, basics)
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

    def block(at: str, i: int, *, full: bool) -> tuple[list[Part], Moe | None]:
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
            kv_values=kv_values(basics) if full else 0,
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
    return with_ends(reader, basics, layer, tied=False, mtp=extra)


def _hybrid_moe(reader: Reader) -> Moe:
    return experts_of(
        reader,
        shared=reader.number("shared_expert_intermediate_size", 0, least=0),
        shared_gate=True,
        shared_name="shared_expert",
    )


def qwen3_next(reader: Reader, basics: Basics) -> Blueprint:
    """Qwen3-Next, always with experts."""
    # The checkpoints have a layer for multi-token prediction that the configuration does not mention.
    mtp_layers = reader.number("num_nextn_predict_layers", 1, least=0)
    return _hybrid(reader, basics, split=False, mtp_layers=mtp_layers, moe=_hybrid_moe(reader))


def qwen3_5(reader: Reader, basics: Basics) -> Blueprint:
    """Qwen3.5 and 3.6 without experts."""
    mtp_layers = reader.number("mtp_num_hidden_layers", 0, least=0)
    return _hybrid(reader, basics, split=True, mtp_layers=mtp_layers, moe=None)


def qwen3_5_moe(reader: Reader, basics: Basics) -> Blueprint:
    """Qwen3.5 and 3.6 with experts."""
    mtp_layers = reader.number("mtp_num_hidden_layers", 0, least=0)
    return _hybrid(reader, basics, split=True, mtp_layers=mtp_layers, moe=_hybrid_moe(reader))


# --- NVIDIA's hybrids: each layer is one thing, Mamba 2, attention, a feed-forward part or routed experts


_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _nemotron_kinds(reader: Reader, basics: Basics) -> str:
    """Return one letter for each layer, as the configuration writes them."""
    pattern = reader.text_or_none("hybrid_override_pattern")
    if pattern is None:
        letters = {
            "mamba": "M",
            "linear_attention": "M",
            "attention": "*",
            "full_attention": "*",
            "mlp": "-",
            "moe": "E",
        }
        listed = reader.words("layers_block_type")
        unknown = sorted(set(listed) - set(letters))
        if unknown:
            raise reader.wrong("layers_block_type", unknown[0], "a kind of layer that this family has")
        pattern = "".join(letters[word] for word in listed)
    if len(pattern) != basics.layers or set(pattern) - set(_NEMOTRON):
        expected = f"a letter of {''.join(_NEMOTRON)} for each of the {basics.layers} layers"
        raise reader.wrong("hybrid_override_pattern", pattern, expected)
    return pattern


def nemotron_h(reader: Reader, basics: Basics) -> Blueprint:
    """NVIDIA Nemotron-H and Nemotron 3: Mamba 2 with a few layers of attention; feed-forward parts are not gated."""
    hidden, pattern = basics.hidden, _nemotron_kinds(reader, basics)
    bias, mlp_bias = reader.flag("use_bias", False), reader.flag("mlp_bias", False)
    heads, size = reader.number("mamba_num_heads", 128), reader.number("mamba_head_dim", 64)
    groups, state = reader.number("n_groups", 8), reader.number("ssm_state_size", 128)
    kernel, wide = reader.number("conv_kernel", 4), heads * size
    mixed = wide + 2 * groups * state
    # vLLM: the convolution's inputs in 16 bits, the state as the configuration says, else in 32 bits
    # (vllm/model_executor/models/config.py, NemotronHForCausalLMConfig).
    precise = (reader.text_or_none("mamba_ssm_cache_dtype") or "float32") in ("float32", "float")
    state_bytes = 2 * (kernel - 1) * mixed + (4 if precise else 2) * heads * size * state
    gqa = Gqa("all" if reader.flag("attention_bias", False) else "none")
    experts = per_token = inner = latent = shared = 0
    if "E" in pattern:
        moe = experts_of(reader)
        experts, per_token, inner = moe.experts, moe.per_token, moe.inner
        latent = reader.number("moe_latent_size", 0, least=0)
        shared = reader.number("moe_shared_expert_intermediate_size", 0, least=0)

    def plain(at: str, width: int) -> list[Part]:
        return [
            *linear(f"{at}.up_proj", width, hidden, bias=mlp_bias),
            *linear(f"{at}.down_proj", hidden, width, bias=mlp_bias),
        ]

    def mamba(at: str) -> list[Part]:
        return [
            *linear(f"{at}.in_proj", wide + mixed + heads, hidden, bias=bias),
            Part(f"{at}.conv1d", "plain", mixed, kernel + int(reader.flag("use_conv_bias", True))),
            *(Part(f"{at}.{name}", "plain", heads) for name in ("dt_bias", "A_log", "D")),
            norm(f"{at}.norm", wide),
            *linear(f"{at}.out_proj", hidden, wide, bias=bias),
        ]

    def routed(at: str) -> list[Part]:
        width = latent or hidden
        between: list[Part] = []
        if latent:
            between += linear(f"{at}.fc1_latent_proj", latent, hidden, bias=mlp_bias)
            between += linear(f"{at}.fc2_latent_proj", hidden, latent, bias=mlp_bias)
        return [
            Part(f"{at}.gate", "router", experts, hidden),
            Part(f"{at}.gate.e_score_correction_bias", "plain", experts),
            Part(f"{at}.experts.0.up_proj", "linear", inner, width, experts, routed=True),
            Part(f"{at}.experts.0.down_proj", "linear", width, inner, experts, routed=True),
            *(plain(f"{at}.shared_experts", shared) if shared else []),
            *between,
        ]

    def layer(i: int) -> LayerPlan:
        at, kind = f"layers.{i}.mixer", _NEMOTRON[pattern[i]]
        before = norm(f"layers.{i}.norm", hidden)
        if kind == "mamba":
            return LayerPlan([before, *mamba(at)], "mamba", 0, state_bytes=state_bytes)
        if kind == "attention":
            return LayerPlan([before, *gqa.parts(at, basics)], "full", kv_values(basics))
        if kind == "moe":
            return LayerPlan([before, *routed(at)], "none", 0, experts=experts, experts_per_token=per_token)
        return LayerPlan([before, *plain(at, reader.number("intermediate_size"))], "none", 0)

    return with_ends(reader, basics, layer, tied=False)
