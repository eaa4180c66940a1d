"""The towers for images that lie before the layers of multimodal models, matrix by matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ppdeploy.model.config import Basics, Reader
from ppdeploy.model.parts import Part, linear, norm
from ppdeploy.model.shape import Vision


class Tower(NamedTuple):
    """A tower for images: what it is made of, and what it works on."""

    parts: list[Part]
    vision: Vision


TowerOf = Callable[[Reader, Basics, Reader], Tower]

QWEN3_PIXELS = 16_777_216
"""The largest image of Qwen3-VL to 3.6 in pixels: `size.longest_edge` in the preprocessor_config.json that all of them
are published with (read in Qwen3.5-2B-Base's and Qwen3.6-35B-A3B-FP8's); config.json does not say it."""


def _repeated(parts: list[Part], count: int) -> list[Part]:
    """Return the parts of one block as those of `count` equal ones, named by the first."""
    return [part._replace(copies=part.copies * count) for part in parts]


def _siglip(vision: Reader, prefix: str) -> list[Part]:
    """SigLIP without its head (transformers, models/siglip): defaults are those of its configuration class."""
    hidden, inner = vision.number("hidden_size", 768), vision.number("intermediate_size", 3072)
    patch, channels = vision.number("patch_size", 16), vision.number("num_channels", 3)
    places = (vision.number("image_size", 224) // patch) ** 2
    layers = vision.number("num_hidden_layers", 12)
    block: list[Part] = [norm(f"{prefix}.layers.0.layer_norm{i}", hidden, bias=True) for i in (1, 2)]
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        block += linear(f"{prefix}.layers.0.self_attn.{name}", hidden, hidden, bias=True)
    block += linear(f"{prefix}.layers.0.mlp.fc1", inner, hidden, bias=True)
    block += linear(f"{prefix}.layers.0.mlp.fc2", hidden, inner, bias=True)
    return [
        Part(f"{prefix}.patch_embedding", "plain", hidden, channels * patch * patch + 1),
        Part(f"{prefix}.position_embedding", "plain", places, hidden),
        *_repeated(block, layers),
        norm(f"{prefix}.post_layernorm", hidden, bias=True),
    ]


def gemma3_tower(vision: Reader, basics: Basics, whole: Reader) -> Tower:
    """Gemma 3: SigLIP and a projection with a norm."""
    width = vision.number("hidden_size", 768)
    places = (vision.number("image_size", 224) // vision.number("patch_size", 16)) ** 2
    tokens = whole.number("mm_tokens_per_image", 256)
    parts = [
        *_siglip(vision, "vision_tower.vision_model.encoder"),
        Part("multi_modal_projector.mm_input_projection_weight", "plain", width, basics.hidden),
        norm("multi_modal_projector.mm_soft_emb_norm", width),
    ]
    return Tower(
        parts,
        Vision(
            hidden_size=width,
            intermediate_size=vision.number("intermediate_size", 3072),
            patches_per_token=max(places // tokens, 1),
            item_tokens=tokens,
            output_values=basics.hidden,
            inputs=("image",),
        ),
    )


def pixtral_tower(vision: Reader, basics: Basics, whole: Reader) -> Tower:
    """Mistral 3: Pixtral's encoder, which has no biases, and a projector that merges patches."""
    hidden, inner = vision.number("hidden_size", 1024), vision.number("intermediate_size", 4096)
    patch, channels = vision.number("patch_size", 16), vision.number("num_channels", 3)
    at = "vision_tower.transformer.layers.0"
    block = [norm(f"{at}.attention_norm", hidden), norm(f"{at}.ffn_norm", hidden)]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        block += linear(f"{at}.attention.{name}", hidden, hidden)
    for name in ("gate_proj", "up_proj"):
        block += linear(f"{at}.feed_forward.{name}", inner, hidden)
    block += linear(f"{at}.feed_forward.down_proj", hidden, inner)
    merge = whole.number("spatial_merge_size", 2)
    bias = whole.flag("multimodal_projector_bias", False)
    to = "multi_modal_projector"
    # The projector merges squares of patches.
    side = max(vision.number("image_size", 1540) // (patch * merge), 1)
    parts = [
        Part("vision_tower.patch_conv", "plain", hidden, channels * patch * patch),
        norm("vision_tower.ln_pre", hidden),
        *_repeated(block, vision.number("num_hidden_layers", 24)),
        norm(f"{to}.norm", hidden),
        *linear(f"{to}.patch_merger.merging_layer", hidden, hidden * merge * merge),
        *linear(f"{to}.linear_1", basics.hidden, hidden, bias=bias),
        *linear(f"{to}.linear_2", basics.hidden, basics.hidden, bias=bias),
    ]
    return Tower(
        parts,
        Vision(
            hidden_size=hidden,
            intermediate_size=inner,
            patches_per_token=merge * merge,
            item_tokens=side * side,
            output_values=basics.hidden,
            inputs=("image",),
        ),
    )


def qwen3_tower(vision: Reader, basics: Basics, whole: Reader) -> Tower:
    """Qwen3-VL and Qwen3.5: a ViT with learned places, a merger, and mergers for the layers in between."""
    del whole
    hidden, inner = vision.number("hidden_size", 1152), vision.number("intermediate_size", 4304)
    patch, channels = vision.number("patch_size", 16), vision.number("in_channels", 3)
    frames, merge = vision.number("temporal_patch_size", 2), vision.number("spatial_merge_size", 2)
    out = vision.number("out_hidden_size", basics.hidden)
    at = "visual.blocks.0"
    block = [norm(f"{at}.norm1", hidden, bias=True), norm(f"{at}.norm2", hidden, bias=True)]
    block += linear(f"{at}.attn.qkv", 3 * hidden, hidden, bias=True)
    block += linear(f"{at}.attn.proj", hidden, hidden, bias=True)
    block += linear(f"{at}.mlp.linear_fc1", inner, hidden, bias=True)
    block += linear(f"{at}.mlp.linear_fc2", hidden, inner, bias=True)
    merged = hidden * merge * merge

    def merger(name: str, width: int) -> list[Part]:
        return [
            norm(f"visual.{name}.norm", width, bias=True),
            *linear(f"visual.{name}.linear_fc1", merged, merged, bias=True),
            *linear(f"visual.{name}.linear_fc2", out, merged, bias=True),
        ]

    deep = len(vision.numbers("deepstack_visual_indexes"))
    parts = [
        Part("visual.patch_embed.proj", "plain", hidden, channels * frames * patch * patch + 1),
        Part("visual.pos_embed", "plain", vision.number("num_position_embeddings", 2304), hidden),
        *_repeated(block, vision.number("depth", 27)),
        *merger("merger", hidden),
        *_repeated(merger("deepstack_merger_list.0", merged), deep),
    ]
    return Tower(
        parts,
        Vision(
            hidden_size=hidden,
            intermediate_size=inner,
            patches_per_token=merge * merge,
            item_tokens=max(QWEN3_PIXELS // (patch * merge) ** 2, 1),
            output_values=out * (1 + deep),
            inputs=("image", "video"),
        ),
    )


TOWERS: Mapping[str, TowerOf] = {
    "Gemma3ForConditionalGeneration": gemma3_tower,
    "Mistral3ForConditionalGeneration": pixtral_tower,
    "Qwen3VLForConditionalGeneration": qwen3_tower,
    "Qwen3VLMoeForConditionalGeneration": qwen3_tower,
    "Qwen3_5ForConditionalGeneration": qwen3_tower,
    "Qwen3_5MoeForConditionalGeneration": qwen3_tower,
}
"""By architecture. The first reader is the section on vision, the second the whole configuration."""
