"""A config.json, an index or a weight file that is damaged, absurd or hostile is one sentence, never a traceback."""

from __future__ import annotations

import copy
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.errors import InputError
from ppdeploy.model import ModelShape, Tensor, parse_config, tensors_of
from tests.factories_model import CONFIGS, TINY_LLAMA

CONFIG = TINY_LLAMA | {"torch_dtype": "bfloat16"}
# One of each family, tower and quantisation; without the one whose lists of modules are long.
REAL: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text())
    for path in sorted(CONFIGS.glob("*.json"))
    if path.stem not in {"qwen3.6-27b-nvfp4", "qwen3-235b-a22b-fp8"}
}
QUANTISED: list[dict[str, Any]] = [
    {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["visual"]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*mtp.*": {}, "+:.*down.*": {"bits": 8}}},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*mlp.gate*"]},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
        "ignore": ["lm_head", "re:.*gate$"],
    },
]


def parse(config: object, **files: Any) -> ModelShape:
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    return parse_config(text, where="the file", **{"weight_bytes": 0, **files})


def refused(config: object, **files: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse(config, **files)
    sentence = str(caught.value)
    assert caught.value.exit_code == 2
    assert "the file" in sentence
    assert "\n" not in sentence
    assert len(sentence) < 500
    return sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not valid JSON"),
        (b'{"architectures": ["Lla', "not valid JSON"),
        (b"\xff\xfe\0", "not UTF-8"),
        (b"[1]", "holds a list, not an object"),
        (b"null", "holds null"),
        (b'"x"', "holds a string"),
        (b"7", "holds a number"),
        (b"{}", "names no model class"),
        (b"[" * 200_000, "nests values too deep"),
        (b'{"hidden_size": NaN}', "NaN is not JSON"),
        (b'{"hidden_size": -Infinity}', "-Infinity is not JSON"),
        (b'{"hidden_size": ' + b"9" * 10_000 + b"}", "a number that is none"),
    ],
    ids=str,
)
def test_what_is_no_configuration(text: bytes, said: str) -> None:
    assert said in refused(text)


NUMBERS = ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"]
NUMBERS += ["intermediate_size", "max_position_embeddings"]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [0, -1, 10**18, 2**60, 1.5, 1e18, "4", [], {}, True, [4]], ids=str)
def test_numbers_that_no_model_has(field: str, value: object) -> None:
    said = refused(CONFIG | {field: value})
    assert said.startswith(f"config.json says {field} = {json.dumps(value)}, which is not ")


@pytest.mark.parametrize(
    ("base", "change", "said"),
    [
        ({}, {"architectures": "LlamaForCausalLM"}, "names no model class"),
        ({}, {"architectures": [""]}, "names no model class"),
        ({}, {"architectures": [7]}, "names no model class"),
        ({}, {"intermediate_size": None}, "does not say intermediate_size"),
        ({}, {"num_key_value_heads": 8}, "at most the 4 query heads"),
        ({}, {"torch_dtype": None, "dtype": "float7"}, "a number format that vLLM loads (bfloat16, float16, float32)"),
        ({}, {"torch_dtype": 16, "dtype": None}, "name of a number format"),
        ({}, {"tie_word_embeddings": "no"}, "true or false"),
        ({}, {"attention_bias": 1}, "true or false"),
        ({}, {"quantization_config": "fp8"}, "not a section"),
        ({}, {"quantization_config": {"quant_method": 8}}, "quant_method of the quantization is not a word"),
        ({}, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}, "two whole numbers"),
        ({}, {"quantization_config": {"quant_method": "fp8", "weight_block_size": 7}}, "two whole numbers"),
        ({}, {"quantization_config": {"quant_method": "awq", "bits": "4"}}, "a whole number from 1 to 16"),
        ({}, {"quantization_config": {"quant_method": "gptq", "dynamic": []}}, "dynamic of the quantization"),
        ({}, {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [1]}}, "a list of names"),
        ({}, {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:("]}}, "regular expressions"),
        ({}, {"quantization_config": {"quant_method": "fp8", "ignored_layers": ["*a" * 9]}}, "with few `*`"),
        ({}, {"layer_types": ["full_attention"]}, "a kind for each of the 4 layers"),
        ({}, {"layer_types": ["full_attention", "x", "x", "x"]}, "a kind of layer that this family has"),
        ({}, {"layer_types": 4}, "a list of words"),
        ("mixtral-8x7b", {"num_local_experts": None}, "does not say num_experts"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "at most the 8 experts"),
        ("gpt-oss-20b", {"num_experts_per_tok": 33, "experts_per_token": 33}, "at most the 32 experts"),
        ("gpt-oss-20b", {"sliding_window": None}, "does not say sliding_window"),
        ("deepseek-v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0"),
        ("deepseek-v3", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers"),
        ("qwen3-30b-a3b", {"mlp_only_layers": ["a"]}, "a list of whole numbers"),
        ("nemotron-3-nano", {"hybrid_override_pattern": "MX"}, "a letter of M*-E for each of the 52 layers"),
        ("qwen3-vl-32b", {"vision_config": [1]}, "not a section"),
        ("qwen3-vl-32b", {"vision_config": {"depth": 0}}, "depth = 0"),
    ],
    ids=str,
)
def test_what_does_not_go_together(base: str, change: dict[str, Any], said: str) -> None:
    assert said in refused((REAL[base] if base else CONFIG) | change)


def test_hf_quant_config_that_is_none() -> None:
    assert "not valid JSON" in refused(CONFIG, quantization=b"{")
    assert "no section `quantization`" in refused(CONFIG, quantization=b'{"quantization": 7}')
    assert parse(CONFIG, quantization=b"[]").quantization is None


def test_the_largest_model_that_is_read_fits_into_memory() -> None:
    assert len(parse(CONFIG | {"num_hidden_layers": 2_000}).layers) == 2_000
    assert "num_hidden_layers = 2001" in refused(CONFIG | {"num_hidden_layers": 2_001})
    # What a tenth of it takes; the parts of a layer are let go before the next is made.
    tracemalloc.start()
    try:
        parse(CONFIG | {"num_hidden_layers": 200})
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        [],
        {},
        {"data_offsets": [0, 4]},
        {"dtype": "BF16"},
        {"dtype": "BF16", "data_offsets": [4, 0]},
        {"dtype": 1, "data_offsets": [0, 4]},
        {"dtype": "BF16", "data_offsets": ["0", 4]},
    ],
    ids=str,
)
def test_entries_of_a_header_that_are_none(entry: object) -> None:
    good = {"dtype": "BF16", "shape": [2], "data_offsets": [4, 8]}
    assert tensors_of({"a": entry, "b": good, "__metadata__": {}}) == {"b": Tensor("BF16", 4)}


# --- fuzz


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([0, 1, 2, 3, 7, 64, -1, 2_000, 2**26, 2**31, 2**60, 10**18]),
        st.floats(allow_nan=False),
        st.text(max_size=12),
        st.sampled_from(
            ["float32", "full_attention", "sliding_attention", "linear_attention", "gptq", "mxfp4", "re:["]
        ),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=6,
)


def paths(value: object, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places in a JSON value, of lists the first two entries only."""
    found = [at] if at else []
    if isinstance(value, dict):
        found += [path for key, inner in value.items() for path in paths(inner, (*at, key))]
    elif isinstance(value, list):
        found += [path for i, inner in enumerate(value[:2]) for path in paths(inner, (*at, i))]
    return found


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A real configuration, some with another quantisation, with a few values replaced, removed or moved."""
    config = copy.deepcopy(REAL[draw(st.sampled_from(sorted(REAL)))])
    if draw(st.booleans()):
        config["quantization_config"] = copy.deepcopy(draw(st.sampled_from(QUANTISED)))
    for _ in range(draw(st.integers(1, 4))):
        *steps, last = draw(st.sampled_from(paths(config)))
        holder: Any = config
        for step in steps:
            holder = holder[step]
        what = draw(st.sampled_from(["replace", "replace", "remove", "copy"]))
        if what == "remove":
            del holder[last]
        elif what == "copy":
            holder[last] = copy.deepcopy(draw(st.sampled_from(list(config.values()) or [None])))
        else:
            holder[last] = draw(JSON)
        if not paths(config):
            break
    return config


TENSORS = st.dictionaries(
    st.sampled_from(
        [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1, 2, 3, 4, 61, 10**20)]
        + ["model.embed_tokens.weight", "lm_head.weight", "mtp.fc.weight", "visual.layers.3.x", "x", ""]
    ),
    st.builds(Tensor, st.sampled_from(["BF16", "F32", "I32", "?"]), st.integers(0, 2**50)),
    max_size=8,
)


def shape_or_sentence(config: object, **files: Any) -> ModelShape | None:
    """The shape, or None when a sentence was told; anything else that is raised fails the test."""
    try:
        return parse(config, **files)
    except InputError as exc:
        told = str(exc)
    assert "\n" not in told
    assert len(told) < 600
    return None


@settings(max_examples=120)
@given(config=mutated(), weight_bytes=st.integers(0, 2**45), tensors=TENSORS, names=st.booleans())
def test_a_changed_configuration_is_a_shape_or_a_sentence(
    config: dict[str, Any], weight_bytes: int, tensors: dict[str, Tensor], names: bool
) -> None:
    files = {"tensor_names": list(tensors)} if names else {"tensors": tensors}
    shape = shape_or_sentence(config, weight_bytes=weight_bytes, **files)
    if shape is None:
        return
    assert len(shape.layers) == shape.num_hidden_layers
    assert all(0 <= layer.active_bytes <= layer.weight_bytes for layer in shape.layers)
    assert all(layer.expert_bytes <= layer.weight_bytes for layer in shape.layers)
    assert all(0 < layer.active_parameters <= layer.parameters for layer in shape.layers)
    assert shape.loaded_bytes >= sum(layer.weight_bytes for layer in shape.layers)
    assert ModelShape.model_validate_json(shape.model_dump_json()) == shape


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(REAL)), cut=st.floats(0, 1), byte=st.integers(0, 255))
def test_a_damaged_file_is_a_shape_or_a_sentence(name: str, cut: float, byte: int) -> None:
    text = json.dumps(REAL[name]).encode()
    at = int(cut * (len(text) - 1))
    for damaged in (text[:at], text[:at] + bytes([byte]) + text[at + 1 :]):
        shape_or_sentence(damaged)
