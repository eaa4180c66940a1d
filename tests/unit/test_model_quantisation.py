"""Bytes of quantised weights: layouts by hand, lists of exceptions, and published sizes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppdeploy.model import ModelShape, parse_config
from ppdeploy.model.parts import Part
from ppdeploy.model.quantisation import read_quantisation
from tests.factories_model import CONFIGS, real_shape

# A matrix of 256 x 512 in a layer, and what it takes in 16 bits.
MATRIX = Part("layers.3.mlp.down_proj", "linear", 256, 512)
PLAIN = 256 * 512 * 2


def matrix_bytes(section: dict[str, Any], part: Part = MATRIX) -> int:
    return read_quantisation(section, "the file").bytes_of(part, 2)


def group(**weights: Any) -> dict[str, Any]:
    """A section of compressed-tensors with one group for all linear layers."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 256 * 512 + 2 * 4 * 4),
        ({"quant_method": "fp8", "weight_block_size": [100, 128]}, 256 * 512 + 3 * 4 * 4),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, 256 * 512 + 4),
        ({"quant_method": "fp8", "activation_scheme": "static"}, 256 * 512 + 8),
        ({"quant_method": "fbgemm_fp8"}, 256 * 512 + 256 * 4),
        # packed values, zero points of 4 bits, scales of 16
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 256 * 512 // 2 + 4 * 256 // 2 + 4 * 256 * 2),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 256 * 512 // 2 + 8 * 256 // 2 + 8 * 256 * 2),
        # and the order of the inputs
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 256 * 512 // 2 + 512 + 2048 + 512 * 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 256 * 512 + 256 + 512 + 512 * 4),
        ({"quant_method": "GPTQ", "bits": 3, "group_size": 128}, 256 * 512 * 3 // 8 + 4 * 256 * 3 // 8 + 2048 + 2048),
        (group(num_bits=4, type="int", strategy="group", group_size=128), 256 * 512 // 2 + 4 * 256 * 2 + 16),
        (
            group(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
            256 * 512 // 2 + 16 * 256 * 2 + 16 * 256 // 2 + 16,
        ),
        (group(num_bits=8, type="int", strategy="channel"), 256 * 512 + 256 * 2),
        (group(num_bits=8, type="float", strategy="channel"), 256 * 512 + 256 * 2),
        (group(num_bits=8, type="float", strategy="tensor"), 256 * 512 + 8),
        (group(num_bits=8, type="float", block_structure=[128, 128]), 256 * 512 + 2 * 4 * 2),
        (group(num_bits=4, type="float", group_size=16), 256 * 512 // 2 + 32 * 256 + 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 256 * 512 // 2 + 32 * 256 + 8),
        ({"quant_algo": "FP8"}, 256 * 512 + 8),
        ({"quant_algo": "MXFP8"}, 256 * 512 + 16 * 256),
        ({"quant_method": "mxfp4"}, PLAIN),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 256 * 512 + 256 * 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 256 * 512 // 2 + 8 * 256 * 4 + 160),
        ({}, PLAIN),
    ],
    ids=str,
)
def test_bytes_of_a_matrix(section: dict[str, Any], expected: int) -> None:
    assert matrix_bytes(section) == expected


def test_mxfp4_is_for_experts() -> None:
    experts = Part("layers.3.mlp.experts.gate_up_proj", "linear", 256, 512, copies=4, routed=True)
    assert matrix_bytes({"quant_method": "mxfp4"}, experts) == 4 * (256 * 512 // 2 + 16 * 256)


@pytest.mark.parametrize("kind", ["plain", "router", "embedding"])
@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "modelopt", "bitsandbytes"])
def test_what_is_never_quantised(kind: Any, method: str) -> None:
    assert matrix_bytes({"quant_method": method}, MATRIX._replace(kind=kind)) == PLAIN


@pytest.mark.parametrize(
    ("section", "quantised"),
    [
        ({"quant_method": "fp8"}, False),
        ({"quant_method": "awq"}, False),
        ({"quant_method": "gptq"}, False),
        ({"quant_method": "gptq", "lm_head": True}, True),
        (group(num_bits=8), False),
        (group(num_bits=8) | {"ignore": []}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, False),
    ],
    ids=str,
)
def test_the_head_is_left_alone_unless_said(section: dict[str, Any], quantised: bool) -> None:
    assert (matrix_bytes(section, Part("lm_head", "head", 256, 512)) < PLAIN) == quantised


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_towers_are_not_quantised_by_methods_for_text(method: str) -> None:
    tower = MATRIX._replace(name="visual.blocks.0.mlp.linear_fc1")
    assert matrix_bytes({"quant_method": method}, tower) == PLAIN
    assert matrix_bytes({"quant_method": "fp8"}, tower) < PLAIN
    assert matrix_bytes({"quant_method": "fp8", "modules_to_not_convert": ["model.visual"]}, tower) == PLAIN


DOWN = "layers.3.mlp.down_proj"


@pytest.mark.parametrize(
    ("entry", "strict", "fits"),
    [
        (f"model.{DOWN}", True, True),
        (f"model.language_model.{DOWN}", True, True),
        (f"language_model.model.{DOWN}", True, True),
        ("re:.*down_proj$", True, True),
        (r"re:model\.layers\.3\.", True, True),
        ("re:.*language_model.*", True, True),
        ("model.layers.3.mlp", False, True),
        ("mlp.down_proj", False, True),
        ("down_proj", False, True),
        ("model.layers.*.mlp", False, True),
        ("*mlp*", False, True),
        # a list of compressed-tensors names modules that hold others, which stay quantised
        ("model.layers.3.mlp", True, False),
        ("down_proj", True, False),
        ("model.layers.33.mlp.down_proj", False, False),
        ("own_proj", False, False),
        ("mlp.down", False, False),
        ("layers.*.self_attn", False, False),
        ("", False, False),
    ],
)
def test_lists_of_modules(entry: str, strict: bool, fits: bool) -> None:
    section = group(num_bits=8) | {"ignore": [entry]} if strict else {"quant_method": "fp8", "ignored_layers": [entry]}
    assert (matrix_bytes(section) == PLAIN) == fits


def test_names_that_vllm_gives_to_matrices_it_joins() -> None:
    section = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["model.layers.3.self_attn.qkv_proj"],
    }
    for name in ("q_proj", "k_proj", "v_proj"):
        assert matrix_bytes(section, MATRIX._replace(name=f"layers.3.self_attn.{name}")) == PLAIN
    assert matrix_bytes(section, MATRIX._replace(name="layers.3.self_attn.o_proj")) < PLAIN


def test_groups_with_targets_of_their_own() -> None:
    section: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "a": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
            "b": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
        },
    }
    assert matrix_bytes(section, MATRIX._replace(name="layers.3.self_attn.o_proj")) == 256 * 512 + 8
    assert matrix_bytes(section) == 256 * 512 // 2 + 32 * 256 + 8
    assert read_quantisation(section, "x").block == 16


def test_gptq_rules_for_single_modules() -> None:
    section: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    apart = section | {"dynamic": {r"-:.*\.mlp\..*": {}}}
    finer = section | {"dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 32}}}
    assert matrix_bytes(apart) == PLAIN
    assert matrix_bytes(finer) == 256 * 512 + 16 * 256 + 16 * 256 * 2 + 512 * 4
    rounded = {"quant_method": "auto-round", "bits": 4, "extra_config": {"model.layers.3.mlp.down_proj": {"bits": 16}}}
    assert matrix_bytes(rounded) == PLAIN


def test_mixed_precision_names_each_layer() -> None:
    layers = {"model.layers.3.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    section = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert matrix_bytes(section) == 256 * 512 // 2 + 32 * 256 + 8
    assert matrix_bytes(section, MATRIX._replace(name="layers.4.mlp.down_proj")) == PLAIN


def with_quantisation(name: str, section: dict[str, Any] | None, **files: Any) -> ModelShape:
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | {"quantization_config": section}
    return parse_config(json.dumps(config).encode(), where=name, **{"weight_bytes": 0, **files})


@pytest.mark.parametrize(
    ("name", "gibibytes"),
    # gpt-oss model card (arXiv 2508.10925), table 1: "Checkpoint Size"
    [("gpt-oss-120b", 60.8), ("gpt-oss-20b", 12.8)],
)
def test_published_sizes_of_quantised_checkpoints(name: str, gibibytes: float) -> None:
    assert real_shape(name).loaded_bytes / 2**30 == pytest.approx(gibibytes, rel=0.002)


def test_what_fp8_leaves_alone_in_a_model_with_experts() -> None:
    plain, small = real_shape("qwen3-235b-a22b"), real_shape("qwen3-235b-a22b-fp8")
    layer, other = small.layers[0], plain.layers[0]
    # All matrices but the router have 1 byte a value and 4 for each 128 x 128.
    router, norms = 128 * 4096, 2 * 4096 + 2 * 128
    values = other.parameters - router - norms
    assert layer.weight_bytes == values + values // 4096 + 2 * (router + norms)
    assert (small.embedding_bytes, small.head_bytes) == (plain.embedding_bytes, plain.head_bytes)
    assert small.quantization_block == 128
    assert small.layers[0].parameters == plain.layers[0].parameters


def test_the_head_of_deepseek_and_its_prediction_layer_keep_16_bits() -> None:
    shape = real_shape("deepseek-v3")
    assert shape.head_bytes == 2 * shape.head_parameters
    ends = 2 * (shape.embedding_parameters + shape.head_parameters)
    projection = 2 * 7168 * 7168 * 2
    assert shape.mtp_bytes == pytest.approx(ends + projection + shape.layers[-1].weight_bytes, rel=1e-4)


def test_nvidias_own_file_is_read_when_config_is_silent() -> None:
    extra = (CONFIGS.parent / "hf_quant_config" / "qwen3-235b-a22b-nvfp4.json").read_bytes()
    shape = with_quantisation("qwen3-235b-a22b-nvfp4", None, quantization=extra)
    assert shape.quantization == "modelopt_fp4"
    assert shape.exact
    assert shape.loaded_bytes / 1e9 == pytest.approx(134.6, rel=0.01)
    # config.json wins where it says something itself.
    said = with_quantisation("qwen3-235b-a22b-nvfp4", {"quant_method": "fp8"}, quantization=extra)
    assert said.quantization == "fp8"


def test_a_mix_of_formats_as_published() -> None:
    # FP8 attention, NVFP4 feed-forward parts and head; tower, embedding and prediction layer in 16 bits.
    shape, plain = real_shape("qwen3.6-27b-nvfp4"), real_shape("qwen3.5-27b")
    assert (shape.quantization, shape.quantization_block) == ("modelopt_mixed", 16)
    assert (shape.other_first_bytes, shape.mtp_bytes) == (plain.other_first_bytes, plain.mtp_bytes)
    assert shape.embedding_bytes == plain.embedding_bytes
    assert shape.head_bytes == 248_320 * 5120 // 2 + 248_320 * 5120 // 16 + 8
    feed = 3 * 5120 * 17_408
    queries, keys = 2 * 24 * 256, 4 * 256
    attention = 5120 * (queries + 2 * keys + queries // 2)
    expected = feed // 2 + feed // 16 + 3 * 8 + attention + 4 * 8 + 2 * (2 * 5120 + 2 * 256)
    assert shape.layers[3].weight_bytes == expected


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt_fp4"),
        ({"quant_algo": "NVFP4"}, "modelopt_fp4"),
        ({"quant_method": "AWQ"}, "awq"),
        (group(num_bits=8), "compressed-tensors"),
        ({"config_groups": {}}, "compressed-tensors"),
        ({}, None),
    ],
    ids=str,
)
def test_methods_are_named_as_vllm_names_them(section: dict[str, Any], name: str | None) -> None:
    assert read_quantisation(section, "x").method == name


def test_an_unknown_method_is_a_guess_and_says_so() -> None:
    shape = with_quantisation("llama-3.1-8b", {"quant_method": "newquant", "bits": 4})
    assert not shape.exact
    assert shape.quantization == "newquant"
    assert shape.note == "the quantization newquant is not known here: sizes are estimated"
    assert shape.loaded_bytes < real_shape("llama-3.1-8b").loaded_bytes / 2
