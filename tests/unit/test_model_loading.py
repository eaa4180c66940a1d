"""What options of `vllm serve` make of a checkpoint while it is loaded: number format, quantisation, other numbers."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.errors import InputError
from ppdeploy.model import Loading, ModelShape, Tensor, parse_config
from ppdeploy.model.quantisation import cache_dtype
from tests.factories_model import CONFIGS, TINY_LLAMA


def shape(name: str, *, weight_bytes: int = 0, **options: Any) -> ModelShape:
    args = {option.replace("_", "-"): value for option, value in options.items()}
    text = (CONFIGS / f"{name}.json").read_bytes()
    return parse_config(text, where=name, weight_bytes=weight_bytes, loading=Loading.from_options(args))


def tiny(changes: dict[str, Any] | None = None, **files: Any) -> ModelShape:
    text = json.dumps(TINY_LLAMA).encode()
    loading = Loading(overrides=changes or {})
    return parse_config(text, where="config.json", **{"weight_bytes": 0, "loading": loading, **files})


def test_nothing_said_changes_nothing() -> None:
    assert Loading.from_options({"max-num-seqs": 4, "dtype": "auto"}) == Loading()
    assert Loading().key() == ""
    assert Loading(dtype="half").key() not in ("", Loading(dtype="float32").key())


@pytest.mark.parametrize("name", ["qwen3-8b", "mixtral-8x7b", "gemma-3-4b"])
def test_float32_takes_twice_the_memory_and_other_16_bit_formats_the_same(name: str) -> None:
    stored = shape(name)
    assert shape(name, dtype="float32").loaded_bytes == 2 * stored.loaded_bytes
    assert shape(name, dtype="half").loaded_bytes == stored.loaded_bytes
    assert shape(name, dtype="float32").total_parameters == stored.total_parameters


def test_float32_of_a_quantised_checkpoint_widens_what_is_not_quantised() -> None:
    stored, wide = shape("qwen3-32b-fp8"), shape("qwen3-32b-fp8", dtype="float32")
    assert wide.embedding_bytes == 2 * stored.embedding_bytes
    norms = 2 * 5120 + 2 * 128
    assert wide.layers[0].weight_bytes - stored.layers[0].weight_bytes == 2 * norms


def test_a_checkpoint_in_32_bits_is_halved_unless_it_is_to_stay_so() -> None:
    text = json.dumps(TINY_LLAMA | {"dtype": "float32"}).encode()
    sizes = {
        dtype: parse_config(text, where="x", weight_bytes=0, loading=Loading(dtype=dtype)).loaded_bytes
        for dtype in ("auto", "bfloat16", "float32")
    }
    assert sizes["auto"] == sizes["bfloat16"] == sizes["float32"] // 2


def test_weight_files_win_and_are_widened_by_the_same_share() -> None:
    real = 17_000_000_000
    stored, wide = (shape("qwen3-8b", weight_bytes=real, **more) for more in ({}, {"dtype": "float32"}))
    assert stored.loaded_bytes == pytest.approx(real, rel=1e-6)
    assert wide.loaded_bytes == pytest.approx(2 * real, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "bits"), [("fp8", 8), ("fp8_per_tensor", 8), ("fp8_per_block", 8), ("mxfp8", 8.25), ("mxfp4", 4.25)]
)
def test_a_quantisation_at_loading_shrinks_linear_layers_alone(method: str, bits: float) -> None:
    stored, small = shape("qwen3-32b"), shape("qwen3-32b", quantization=method)
    assert (small.embedding_bytes, small.head_bytes) == (stored.embedding_bytes, stored.head_bytes)
    assert small.layers[0].weight_bytes == pytest.approx(stored.layers[0].weight_bytes * bits / 16, rel=2e-3)
    assert small.quantization == ("fp8_per_tensor" if method == "fp8" else method)


def test_experts_alone_are_quantised_by_the_methods_for_them() -> None:
    stored = shape("qwen3-30b-a3b")
    small = shape("qwen3-30b-a3b", quantization="int8_per_channel_weight_only")
    assert small.layers[0].expert_bytes == pytest.approx(stored.layers[0].expert_bytes / 2, rel=5e-3)
    rest = [one.layers[0].weight_bytes - one.layers[0].expert_bytes for one in (stored, small)]
    assert rest[0] == rest[1]


@pytest.mark.parametrize(("name", "method"), [("qwen3-32b-fp8", "awq"), ("qwen3-32b", "awq"), ("qwen3-32b", "foo")])
def test_what_vllm_does_not_quantise_by_itself_stays_as_it_is_stored(name: str, method: str) -> None:
    assert shape(name, quantization=method) == shape(name)


def test_numbers_that_are_replaced_make_another_model() -> None:
    assert shape("qwen3-32b", hf_overrides={"num_hidden_layers": 4}).num_hidden_layers == 4
    assert shape("qwen3-32b", hf_overrides={"max_position_embeddings": 9000}).max_position_embeddings == 9000
    # A section is changed in place, as vLLM changes a configuration within the configuration.
    inner = shape("gemma-3-4b", hf_overrides={"text_config": {"num_hidden_layers": 6}})
    assert (inner.num_hidden_layers, inner.hidden_size) == (6, shape("gemma-3-4b").hidden_size)
    assert shape("qwen3-32b", hf_overrides={"architectures": ["FooForCausalLM"]}).exact is False


def test_files_are_not_held_against_numbers_that_are_replaced() -> None:
    whole = tiny(weight_bytes=8_000_000)
    half = tiny({"num_hidden_layers": 2}, weight_bytes=8_000_000)
    assert half.layers[0].weight_bytes == tiny().layers[0].weight_bytes
    assert len(half.layers) == 2
    assert "hf-overrides" in half.note
    assert "hf-overrides" not in whole.note
    # A change that moves no size keeps the files' own.
    assert tiny({"max_position_embeddings": 99}, weight_bytes=8_000_000).layers == whole.layers
    # Layers that are left out are no layers for multi-token prediction.
    tensors = {f"model.layers.{i}.x": Tensor("BF16", 1000) for i in range(4)} | {"embed_tokens.w": Tensor("BF16", 10)}
    assert tiny({"num_hidden_layers": 2}, weight_bytes=4010, tensors=tensors).mtp_bytes == 0


def test_an_incomplete_configuration_may_be_completed() -> None:
    text = json.dumps({name: value for name, value in TINY_LLAMA.items() if name != "architectures"}).encode()
    with pytest.raises(InputError, match="names no model class"):
        parse_config(text, where="x", weight_bytes=0)
    loading = Loading(overrides={"architectures": ["LlamaForCausalLM"]})
    assert parse_config(text, where="x", weight_bytes=0, loading=loading).exact


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": "x"},
        {"num_hidden_layers": 0},
        {"hidden_size": 10**18},
        {"architectures": []},
        {"quantization_config": "fp8"},
        {"tie_word_embeddings": "no"},
    ],
)
def test_a_replaced_number_that_makes_no_sense_is_refused_with_its_place(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        tiny(changes)
    assert error.value.what.startswith("with hf-overrides, config.json ")
    assert error.value.remedy == "correct hf-overrides in ppdeploy_vllm_args"


@pytest.mark.parametrize(
    ("name", "options", "left"),
    [
        ("gemma-3-4b", {"language_model_only": True}, False),
        ("gemma-3-4b", {"limit_mm_per_prompt": {"image": 0}}, False),
        ("gemma-3-4b", {"limit_mm_per_prompt": {"image": {"count": 0}}}, False),
        ("gemma-3-4b", {"limit_mm_per_prompt": {"image": 1}}, True),
        ("qwen3-vl-32b", {"limit_mm_per_prompt": {"image": 0, "video": 0}}, False),
        # One tower for both.
        ("qwen3-vl-32b", {"limit_mm_per_prompt": {"image": 0}}, True),
        ("qwen3-vl-32b", {"limit_mm_per_prompt": {"image": False, "video": False}}, True),
    ],
)
def test_a_tower_without_input_is_not_loaded(name: str, options: dict[str, Any], left: bool) -> None:
    found = shape(name, **options)
    assert (found.other_first_bytes > 0, found.vision is not None) == (left, left)


def test_towers_know_their_largest_image() -> None:
    qwen, gemma, pixtral = (shape(name).vision for name in ("qwen3-vl-32b", "gemma-3-4b", "devstral-small-2-24b"))
    assert qwen is not None
    assert gemma is not None
    assert pixtral is not None
    # 16,777,216 pixels in squares of 32 x 32; 896 x 896 pixels become 256 tokens; 1540 pixels are 110 patches of 14.
    assert (qwen.item_tokens, qwen.patches_per_token, qwen.output_values) == (16384, 4, 5120 * 4)
    assert (gemma.item_tokens, gemma.patches_per_token) == (256, 16)
    assert (pixtral.item_tokens, pixtral.patches_per_token) == (3025, 4)
    assert shape("qwen3-32b").vision is None


@pytest.mark.parametrize(
    ("section", "format_"),
    [
        (None, None),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": 8}, None),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}, None),
    ],
)
def test_a_checkpoint_may_ask_for_a_format_of_the_kv_cache(section: dict[str, Any] | None, format_: str | None) -> None:
    assert cache_dtype(section) == format_


def test_the_layers_for_multi_token_prediction_are_counted() -> None:
    assert shape("deepseek-v3").mtp_layers == 1
    assert shape("qwen3.5-27b").mtp_layers == 1
    assert shape("qwen3-32b").mtp_layers == 0


REAL = ("qwen3-32b-fp8", "gemma-3-4b", "qwen3-vl-30b-a3b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b")
VALUES: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.text(max_size=5) | st.just({}) | st.just([])
)


@settings(max_examples=150)
@given(
    name=st.sampled_from(REAL),
    dtype=st.sampled_from(["auto", "float32", "half"]),
    quantization=st.sampled_from(["", "fp8", "mxfp4", "nvfp4_per_token", "awq", "x"]),
    weight_bytes=st.sampled_from([0, 1000, 2**36]),
    data=st.data(),
)
def test_whatever_is_replaced_is_a_shape_or_a_sentence(
    name: str, dtype: str, quantization: str, weight_bytes: int, data: st.DataObject
) -> None:
    text = (CONFIGS / f"{name}.json").read_bytes()
    config = json.loads(text)
    fields = [*sorted(config), "text_config", "vision_config", "rope_scaling"]
    inner = st.dictionaries(st.sampled_from(sorted(config.get("text_config", config))), VALUES, max_size=3)
    overrides = data.draw(st.dictionaries(st.sampled_from(fields), VALUES | inner, max_size=4))
    loading = Loading(dtype=dtype, quantization=quantization, overrides=overrides)
    with suppress(InputError):
        found = parse_config(text, where=name, weight_bytes=weight_bytes, loading=loading)
        assert len(found.layers) == found.num_hidden_layers
        assert all(0 <= layer.active_bytes <= layer.weight_bytes for layer in found.layers)
        assert all(0 <= layer.expert_bytes <= layer.weight_bytes for layer in found.layers)
