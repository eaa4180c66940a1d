"""The model families that are known matrix by matrix, by the architecture that their configuration names.

Shapes and names are those of the published checkpoints; tests compare them with transformers' own classes, and with
published counts (tests/golden/models).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ppdeploy.model.blocks import (
    Gqa,
    Moe,
    Where,
    decoder,
    dense,
    experts_of,
    kinds_of,
    mlp,
    qwen_feed,
    same_kind,
)
from ppdeploy.model.config import Basics, Reader
from ppdeploy.model.deepseek import glm4_moe, mla, sparse_mla
from ppdeploy.model.hybrids import nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next
from ppdeploy.model.parts import Blueprint, Part
from ppdeploy.model.towers import TOWERS


def _llama(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    feed = dense(reader, basics, bias=reader.flag("mlp_bias", False))
    kinds = kinds_of(reader, basics.layers, lambda _: "full_attention")
    return decoder(reader, basics, Gqa(bias), kinds=kinds, feed=feed)


def _mistral(reader: Reader, basics: Basics) -> Blueprint:
    # transformers' class has a window of 4096 unless the configuration says null.
    silent = reader.model_type == "mistral" and "sliding_window" not in reader.section
    if silent:
        reader = Reader(reader.config, {**reader.section, "sliding_window": 4096}, reader.where)
    return decoder(reader, basics, Gqa(), kinds=same_kind(reader, basics), feed=dense(reader, basics))


def _mixtral(reader: Reader, basics: Basics) -> Blueprint:
    moe = experts_of(reader, inner="intermediate_size", names=("w1", "w3", "w2"))

    def feed(i: int, _: str) -> tuple[list[Part], Moe]:
        return moe.parts(f"layers.{i}.block_sparse_moe", basics.hidden), moe

    return decoder(reader, basics, Gqa(), kinds=same_kind(reader, basics), feed=feed)


def _qwen_kinds(reader: Reader, basics: Basics) -> list[str]:
    if not reader.flag("use_sliding_window", False):
        return ["full_attention"] * basics.layers
    first = reader.number("max_window_layers", 28, least=0)
    return kinds_of(reader, basics.layers, lambda i: "sliding_attention" if i >= first else "full_attention")


def _qwen2(reader: Reader, basics: Basics) -> Blueprint:
    return decoder(reader, basics, Gqa("qkv"), kinds=_qwen_kinds(reader, basics), feed=dense(reader, basics))


def _qwen3(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    attention = Gqa(bias, head_norms=True)
    return decoder(reader, basics, attention, kinds=_qwen_kinds(reader, basics), feed=dense(reader, basics))


def _qwen3_moe(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    attention, feed = Gqa(bias, head_norms=True), qwen_feed(reader, basics, experts_of(reader))
    return decoder(reader, basics, attention, kinds=_qwen_kinds(reader, basics), feed=feed)


def _minimax_m2(reader: Reader, basics: Basics) -> Blueprint:
    moe = experts_of(reader, inner="intermediate_size", names=("w1", "w3", "w2"), correction=True)

    def feed(i: int, _: str) -> tuple[list[Part], Moe]:
        return moe.parts(f"layers.{i}.block_sparse_moe", basics.hidden), moe

    kinds = kinds_of(reader, basics.layers, lambda _: "full_attention")
    return decoder(reader, basics, Gqa(wide_norms=True), kinds=kinds, feed=feed)


def _llama4(reader: Reader, basics: Basics) -> Blueprint:
    step = reader.number("interleave_moe_layer_step", 1)
    listed = set(reader.numbers("moe_layers"))
    inner, wide = reader.number("intermediate_size"), reader.number("intermediate_size_mlp", 16_384)
    moe = experts_of(reader, inner="intermediate_size", shared=inner, shared_name="shared_expert")

    def feed(i: int, _: str) -> tuple[list[Part], Moe | None]:
        at = f"layers.{i}.feed_forward"
        routed = i in listed if listed else (i + 1) % step == 0
        return (moe.parts(at, basics.hidden), moe) if routed else (mlp(at, basics.hidden, wide), None)

    # Every fourth layer has no positions and sees all of the past; the others see the chunk that they are in.
    chunked = reader.number("attention_chunk_size", 8192)
    reader = Reader(reader.config, {**reader.section, "attention_chunk_size": chunked}, reader.where)
    places = reader.numbers("no_rope_layers")
    if places and len(places) < basics.layers:
        raise reader.wrong("no_rope_layers", places, f"a list with an entry for each of the {basics.layers} layers")
    every = reader.number("no_rope_layer_interval", 4)
    chunks = [bool(places[i]) if places else bool((i + 1) % every) for i in range(basics.layers)]
    kinds = kinds_of(reader, basics.layers, lambda i: "chunked_attention" if chunks[i] else "full_attention")
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    return decoder(reader, basics, Gqa(bias), kinds=kinds, feed=feed)


def _gemma2(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    kinds = kinds_of(reader, basics.layers, lambda i: "full_attention" if i % 2 else "sliding_attention")
    if not reader.has("sliding_window"):
        reader = Reader(reader.config, {**reader.section, "sliding_window": 4096}, reader.where)
    feed = dense(reader, basics)
    return decoder(reader, basics, Gqa(bias), kinds=kinds, feed=feed, norms=4, tied=True)


def _gemma3(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "all" if reader.flag("attention_bias", False) else "none"
    every = reader.number("sliding_window_pattern", 6)
    kinds = kinds_of(reader, basics.layers, lambda i: "sliding_attention" if (i + 1) % every else "full_attention")
    attention = Gqa(bias, head_norms=True)
    return decoder(reader, basics, attention, kinds=kinds, feed=dense(reader, basics), norms=4, tied=True)


def _glm4(reader: Reader, basics: Basics) -> Blueprint:
    bias: Where = "qkv" if reader.flag("attention_bias", True) else "none"
    kinds = kinds_of(reader, basics.layers, lambda _: "full_attention")
    feed = dense(reader, basics, fused=True)
    # GLM 4 (0414) has norms after attention and feed-forward too; the GLM before it has not.
    return decoder(reader, basics, Gqa(bias), kinds=kinds, feed=feed, norms=2 if reader.model_type == "glm" else 4)


def _phi3(reader: Reader, basics: Basics) -> Blueprint:
    return decoder(
        reader,
        basics,
        Gqa(fused=True),
        kinds=same_kind(reader, basics),
        feed=dense(reader, basics, fused=True),
    )


def _gpt_oss(reader: Reader, basics: Basics) -> Blueprint:
    experts, per_token = reader.number("num_experts"), reader.number("num_experts_per_tok")
    if per_token > experts:
        raise reader.wrong("num_experts_per_tok", per_token, f"at most the {experts} experts")
    hidden, inner = basics.hidden, reader.number("intermediate_size")
    moe = Moe(experts, per_token, inner)

    def feed(_: int, at: str) -> tuple[list[Part], Moe]:
        return [
            Part(f"{at}.router", "router", experts, hidden),
            Part(f"{at}.router.bias", "plain", experts),
            Part(f"{at}.experts.gate_up_proj", "linear", 2 * inner, hidden, experts, routed=True),
            Part(f"{at}.experts.gate_up_proj_bias", "plain", 2 * inner, 1, experts, routed=True),
            Part(f"{at}.experts.down_proj", "linear", hidden, inner, experts, routed=True),
            Part(f"{at}.experts.down_proj_bias", "plain", hidden, 1, experts, routed=True),
        ], moe

    kinds = kinds_of(reader, basics.layers, lambda i: "full_attention" if i % 2 else "sliding_attention")
    bias: Where = "all" if reader.flag("attention_bias", True) else "none"
    return decoder(reader, basics, Gqa(bias, sinks=True), kinds=kinds, feed=feed)


Family = Callable[[Reader, Basics], Blueprint]

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4,
    "MixtralForCausalLM": _mixtral,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_moe,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GlmForCausalLM": _glm4,
    "Glm4ForCausalLM": _glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "Glm4MoeLiteForCausalLM": mla,
    "DeepseekV3ForCausalLM": mla,
    "DeepseekV32ForCausalLM": sparse_mla,
    "GlmMoeDsaForCausalLM": sparse_mla,
    "NemotronHForCausalLM": nemotron_h,
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
    "deepseek_v3": mla,
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
        return replace(found, first=first.parts, vision=first.vision)
    if name not in FAMILIES or (nested and vision is not None):
        return replace(found, unsure=f"what the architecture {name} has beside its language model is not known here")
    return found


def _guess(reader: Reader, name: str, basics: Basics) -> Blueprint:
    """Return Llama's layers with the configuration's numbers, for an architecture that is not known here."""
    experts = reader.number("num_experts", 0, least=0)
    wide = reader.number("intermediate_size", 4 * basics.hidden)
    moe: Moe | None = None
    if experts > 1:
        per_token = min(experts, reader.number("num_experts_per_tok", 2))
        moe = Moe(experts, per_token, reader.number("moe_intermediate_size", wide))

    def feed(_: int, at: str) -> tuple[list[Part], Moe | None]:
        return (moe.parts(at, basics.hidden), moe) if moe else (mlp(at, basics.hidden, wide), None)

    # Kinds of layer that are not known here keep all of the past, for all that is known.
    window = reader.number_or_none("sliding_window")
    sliding = [kind == "sliding_attention" and window is not None for kind in reader.words("layer_types")]
    kinds = ["sliding_attention" if i < len(sliding) and sliding[i] else "full_attention" for i in range(basics.layers)]
    found = decoder(reader, basics, Gqa(), kinds=kinds, feed=feed)
    return replace(found, unsure=f"the architecture {name} is not known here")
