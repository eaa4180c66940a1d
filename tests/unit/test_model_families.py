"""The layers of real models: against transformers' own classes, published counts and published checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.model import ModelShape, parse_config
from tests.factories_model import CONFIGS, make_shape, real_shape

GOLDEN = CONFIGS.parent
COUNTS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "counts.json").read_text())["models"]
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))


def as_counts(shape: ModelShape) -> dict[str, Any]:
    """The shape in the form of counts.json."""
    tall = [(len(list(alike)), each) for each, alike in groupby(layer.parameters for layer in shape.layers)]
    return {
        "embedding": shape.embedding_parameters,
        "head": shape.head_parameters,
        "other": shape.other_parameters,
        "layers": [list(pair) for pair in tall],
        "total": shape.total_parameters,
    }


def expected(counts: dict[str, Any]) -> dict[str, Any]:
    kept = {key: counts[key] for key in ("embedding", "head", "layers", "total")}
    return {**kept, "other": counts["towers"] + counts["rest"]}


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_has_as_many_parameters_as_in_transformers(name: str) -> None:
    shape = real_shape(name)
    assert shape.exact
    assert shape.note == ""
    assert as_counts(shape) == expected(COUNTS[name])


def test_the_kept_counts_are_those_of_transformers() -> None:
    """The kept table made anew. Where transformers is not installed, the table above stands for it."""
    found = importlib.util.find_spec("transformers") and importlib.util.find_spec("torch")
    python = os.environ.get("PPDEPLOY_TRANSFORMERS_PYTHON") or (sys.executable if found else None)
    if python is None:
        pytest.skip("transformers is not installed; its kept counts are compared by the test above (docs/models.md)")
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "import reference\n"
        "names = sys.argv[2:]\n"
        "read = lambda name: json.loads((reference.CONFIGS / f'{name}.json').read_text())\n"
        "print(json.dumps({name: reference.counts(read(name)) for name in names}))\n"
    )
    # One of each kind; regenerating all takes a minute and is done by hand.
    some = ["gemma-3-4b", "glm-4.7-flash", "gpt-oss-20b", "llama-3.2-1b", "qwen3-0.6b", "qwen3.5-35b-a3b"]
    done = subprocess.run([python, "-c", program, str(GOLDEN), *some], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {name: COUNTS[name] for name in some}


# What publishers say of total and active parameters, in billions, with the place. `embedded` says that the active
# count includes the embedding, as most do; the model cards of gpt-oss and DeepSeek leave it out, and so do we.
PUBLISHED = {
    # meta-llama/llama-models, models/llama3_1/MODEL_CARD.md, and the counts that the hub shows
    "llama-3.1-8b": (8.03, None, False),
    "llama-3.1-70b": (70.55, None, False),
    "llama-3.1-405b": (405.85, None, False),
    "llama-3.2-1b": (1.24, None, False),
    # QwenLM/Qwen2.5 and Qwen3: the model cards' "Number of Parameters"
    "qwen2.5-7b": (7.61, None, False),
    "qwen2.5-72b": (72.7, None, False),
    "qwen3-0.6b": (0.6, None, False),
    "qwen3-8b": (8.2, None, False),
    "qwen3-32b": (32.8, None, False),
    "qwen3-30b-a3b": (30.5, 3.3, True),
    "qwen3-235b-a22b": (235, 22, True),
    "qwen3-next-80b-a3b": (80, 3.9, True),
    "qwen3.5-397b-a17b": (397, 17, True),
    "qwen3.5-122b-a10b": (122, 10, True),
    # mistral.ai/news: "46.7B total parameters but only uses 12.9B", "39B active parameters out of 141B"
    "mixtral-8x7b": (46.7, 12.9, True),
    "mixtral-8x22b": (141, 39, True),
    "mistral-7b-v0.3": (7.25, None, False),
    # deepseek-ai/DeepSeek-V3, README_WEIGHTS.md: "671B", "36.6B (including 0.9B for the output Head)"
    "deepseek-v3": (671, 36.6, False),
    # MoonshotAI/Kimi-K2, README.md: "1T", "32B"
    "kimi-k2": (1026, 32.9, True),
    # gpt-oss model card (arXiv 2508.10925), table 1: "116.83B", "5.13B", "20.91B", "3.61B"
    "gpt-oss-120b": (116.83, 5.13, False),
    "gpt-oss-20b": (20.91, 3.61, False),
    # zai-org/GLM-4.5, README.md: "106 billion", "12 billion active"; GLM-4.5 (the same layers as 4.7) "355", "32"
    "glm-4.5-air": (106.9, 12.8, False),
    "glm-4.7": (352.8, 32.9, False),
    "glm-4-9b-0414": (9.4, None, False),
    # Gemma 2 report (arXiv 2408.00118), table 2: embedding 918M + 8,324M, and 1,180M + 26,047M
    "gemma-2-9b": (0.918 + 8.324, None, False),
    "gemma-2-27b": (1.180 + 26.047, None, False),
    # Gemma 3 report (arXiv 2503.19786), table 1: vision 417M + embedding 1,416M + 25,600M
    "medgemma-27b": (0.417 + 1.416 + 25.600, None, False),
    # keras-team/keras-hub, phi3_presets.py: 3821079552; microsoft/phi-4: "14B"
    "phi-3-mini-4k": (3.821079552, None, False),
    "phi-4": (14.66, None, False),
    "phi-4-mini": (3.84, None, False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    total, active, embedded = PUBLISHED[name]
    shape = real_shape(name)
    assert shape.total_parameters / 1e9 == pytest.approx(total, rel=0.008)
    if active is not None:
        extra = shape.embedding_parameters if embedded else 0
        assert (shape.active_parameters + extra) / 1e9 == pytest.approx(active, rel=0.03)


def test_multi_token_prediction_is_counted_apart() -> None:
    # deepseek-ai/DeepSeek-V3, README.md: "685B, which includes 671B of the Main Model weights and 14B of the MTP";
    # README_WEIGHTS.md: "11.5B unique parameters" beside the copies of embedding and head.
    shape = real_shape("deepseek-v3")
    assert (shape.total_parameters + shape.mtp_parameters) / 1e9 == pytest.approx(684.5, rel=0.001)
    copies = shape.embedding_parameters + shape.head_parameters
    assert (shape.mtp_parameters - copies) / 1e9 == pytest.approx(11.5, rel=0.01)
    # The hub counts 358B for GLM-4.7 and 81B for Qwen3-Next-80B, which store theirs too.
    assert real_shape("glm-4.7").mtp_parameters / 1e9 == pytest.approx(358.3 - 352.8, rel=0.02)
    assert real_shape("qwen3-next-80b-a3b").mtp_parameters / 1e9 == pytest.approx(81.3 - 79.67, rel=0.02)


@pytest.mark.parametrize(
    ("name", "total_size"),
    [
        # `metadata.total_size` of the index files: fetchwiki/mistralai-Devstral-Small-2507 at 2074b22f,
        # Ibtasam-98/medgemma-27b-it at 351f31de, bryce-hoehn/Qwen3.5-25B-REAP-A3B-Coding at 2714ffdf.
        ("devstral-small-2507", 47_144_806_400),
        ("medgemma-27b", 54_864_813_280),
        ("qwen3.5-25b-a3b-reap", 50_182_743_296),
    ],
)
def test_bytes_are_those_of_published_checkpoints(name: str, total_size: int) -> None:
    assert real_shape(name).loaded_bytes == total_size


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        # the sums of a token over all layers, and how many layers there are of each kind
        ("llama-3.1-70b", (80 * 2 * 8 * 128, {"full": 80})),
        ("gemma-2-9b", (42 * 2 * 8 * 256, {"sliding": 21, "full": 21})),
        ("gemma-3-4b", (34 * 2 * 4 * 256, {"sliding": 29, "full": 5})),
        ("medgemma-27b", (62 * 2 * 16 * 128, {"sliding": 52, "full": 10})),
        ("gpt-oss-120b", (36 * 2 * 8 * 64, {"sliding": 18, "full": 18})),
        ("deepseek-v3", (61 * (512 + 64), {"mla": 61})),
        ("glm-4.7-flash", (47 * (512 + 64), {"mla": 47})),
        ("qwen3-next-80b-a3b", (12 * 2 * 2 * 256, {"linear": 36, "full": 12})),
        ("qwen3.5-27b", (16 * 2 * 4 * 256, {"linear": 48, "full": 16})),
        ("mistral-7b-v0.3", (32 * 2 * 8 * 128, {"full": 32})),
        ("phi-3-mini-4k", (32 * 2 * 32 * 96, {"sliding": 32})),
        ("qwen2.5-7b", (28 * 2 * 4 * 128, {"full": 28})),
    ],
)
def test_what_layers_keep_of_the_past(name: str, kept: tuple[int, dict[str, int]]) -> None:
    shape = real_shape(name)
    kinds: dict[str, int] = {}
    for layer in shape.layers:
        kinds[layer.attention] = kinds.get(layer.attention, 0) + 1
        assert (layer.kv_window is not None) == (layer.attention == "sliding")
        assert (layer.state_bytes > 0) == (layer.attention in ("linear", "mamba"))
        assert (layer.kv_values == 0) == (layer.attention in ("linear", "mamba"))
    assert (sum(layer.kv_values for layer in shape.layers), kinds) == kept


@pytest.mark.parametrize(
    ("name", "window"), [("gemma-2-9b", 4096), ("gemma-3-4b", 1024), ("gpt-oss-20b", 128), ("phi-3-mini-4k", 2047)]
)
def test_windows(name: str, window: int) -> None:
    assert {layer.kv_window for layer in real_shape(name).layers} <= {window, None}


def test_the_order_of_sliding_layers_is_the_models() -> None:
    assert [layer.attention for layer in real_shape("gemma-2-9b").layers[:3]] == ["sliding", "full", "sliding"]
    assert [layer.attention for layer in real_shape("gemma-3-4b").layers[:6]] == ["sliding"] * 5 + ["full"]
    assert [layer.attention for layer in real_shape("qwen3.5-27b").layers[:4]] == ["linear"] * 3 + ["full"]


def test_state_of_linear_attention() -> None:
    # vLLM: 3 inputs of the convolution in 16 bits, and heads x 128 x 128 in 32 bits (Qwen3.5) or 16 (Qwen3-Next).
    new, old = real_shape("qwen3.5-27b").layers[0], real_shape("qwen3-next-80b-a3b").layers[0]
    assert new.state_bytes == 2 * 3 * (2 * 16 * 128 + 48 * 128) + 4 * 48 * 128 * 128
    assert old.state_bytes == 2 * 3 * (2 * 16 * 128 + 32 * 128) + 2 * 32 * 128 * 128
    assert real_shape("qwen3.5-27b").linear_key_heads == 16


def test_experts() -> None:
    shape = real_shape("deepseek-v3")
    assert [layer.experts for layer in shape.layers[:4]] == [0, 0, 0, 256]
    assert (shape.num_experts, shape.experts_per_token, shape.moe_intermediate_size) == (256, 8, 2048)
    moe = shape.layers[3]
    assert moe.expert_bytes == 256 * 3 * (7168 * 2048 + 56 * 16 * 4)
    assert moe.active_bytes == moe.weight_bytes - moe.expert_bytes * 248 // 256
    dense = shape.layers[0]
    assert (dense.expert_bytes, dense.experts_per_token, dense.active_bytes) == (0, 0, dense.weight_bytes)
    assert real_shape("llama-3.1-8b").num_experts == 0
    assert real_shape("llama-3.1-8b").moe_intermediate_size is None


def test_tied_embeddings_are_counted_once_and_held_by_both_ends() -> None:
    shape = real_shape("llama-3.2-1b")
    assert shape.tied
    assert shape.head_parameters == 0
    assert shape.head_bytes == shape.embedding_bytes == 128_256 * 2048 * 2
    layers = sum(layer.weight_bytes for layer in shape.layers)
    assert shape.loaded_bytes == layers + shape.embedding_bytes + shape.other_last_bytes


def test_a_vision_tower_lies_on_the_first_stage() -> None:
    shape = real_shape("gemma-3-4b")
    assert shape.other_first_bytes / 2 == pytest.approx(417e6, rel=0.02)  # Gemma 3 report, table 1
    assert shape.other_last_bytes == 2 * 2560


def test_float32_is_loaded_in_16_bits() -> None:
    assert make_shape(dtype="float32").loaded_bytes == make_shape(dtype="bfloat16").loaded_bytes
    assert make_shape(dtype="float32", weight_bytes=4_000_000).loaded_bytes == pytest.approx(2_000_000, rel=1e-4)


def test_a_mistral_that_does_not_mention_its_window_has_one() -> None:
    config = json.loads((CONFIGS / "mistral-7b-v0.3.json").read_text())
    del config["sliding_window"]
    shape = parse_config(json.dumps(config).encode(), where="x", weight_bytes=0)
    assert {layer.kv_window for layer in shape.layers} == {4096}


def test_all_configurations_have_their_source() -> None:
    sources = (GOLDEN / "SOURCES.md").read_text()
    listed = {line.split("|")[1].strip() for line in sources.splitlines() if line.startswith("| ")}
    assert set(NAMES) <= listed
    assert set(NAMES) == set(COUNTS)


def test_the_scripts_folder_is_where_the_docs_say() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    assert "python tests/golden/models/reference.py" in page
    assert (GOLDEN / "reference.py").is_file()
