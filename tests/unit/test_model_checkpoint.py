"""Sizes that were computed, brought together with those of the weight files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.model import ModelShape, Tensor, parse_config, tensors_of
from ppdeploy.sources import resolve_source
from tests.factories_model import CONFIGS, TINY_LLAMA, make_shape, real_shape
from tests.hub_standin import HubStandin, Repository


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def header(file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    found: dict[str, Any] = json.loads(content[8 : 8 + length])
    return found


def shape_of(config: dict[str, Any], **files: Any) -> ModelShape:
    return parse_config(json.dumps(config).encode(), where="x", **{"weight_bytes": 0, **files})


# --- a real checkpoint


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_headers_of_a_real_checkpoint_agree_with_the_formula(tmp_path: Path, architecture: Any, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "tiny", architecture=architecture, layers=3, tied=tied)
    tensors = tensors_of(header(folder / "model.safetensors"))
    config = (folder / "config.json").read_bytes()
    computed = parse_config(config, where="x", weight_bytes=0)
    read = parse_config(
        config, where="x", weight_bytes=sum(tensor.size for tensor in tensors.values()), tensors=tensors
    )
    assert read.model_copy(update={"weight_bytes": 0}) == computed
    assert read.loaded_bytes == sum(tensor.size for tensor in tensors.values())
    assert resolve_source(str(folder), None, Path()).shape.layers == computed.layers


def test_the_hub_gives_the_sizes_without_the_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", layers=3)
    with HubStandin({"org/tiny": Repository(folder)}) as hub:
        shape = resolve_source("org/tiny", None, Path(), hub.endpoint).shape
        assert hub.sent_of("model.safetensors") == 0
    size = (folder / "model.safetensors").stat().st_size
    assert shape.weight_bytes == size
    # The file's own header is all that the total has more than the weights.
    assert size - 12_000 < shape.loaded_bytes <= size
    assert shape.note == ""


def test_a_known_commit_of_an_older_version_is_asked_for_again(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", layers=3)
    with HubStandin({"org/tiny": Repository(folder)}) as hub:
        commit = hub.repositories["org/tiny"].commit
        first = resolve_source("org/tiny", commit, Path(), hub.endpoint)
        kept = next((tmp_path / "cache").rglob(f"*{commit}*.json"))
        known = json.loads(kept.read_text())
        del known["shape"]["layers"]
        kept.write_text(json.dumps(known))
        asked = len(hub.requests)
        assert resolve_source("org/tiny", commit, Path(), hub.endpoint) == first
        assert len(hub.requests) > asked


# --- files and formula


def test_real_layers_win_over_the_formula() -> None:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": Tensor("BF16", 1_000 + i) for i in range(4)}
    tensors |= {"model.embed_tokens.weight": Tensor("BF16", 500), "lm_head.weight": Tensor("BF16", 400)}
    tensors |= {"model.norm.weight": Tensor("BF16", 7)}
    shape = shape_of(TINY_LLAMA, weight_bytes=5_000, tensors=tensors)
    assert [layer.weight_bytes for layer in shape.layers] == [1_000, 1_001, 1_002, 1_003]
    assert (shape.embedding_bytes, shape.head_bytes, shape.other_last_bytes) == (500, 400, 7)
    assert "100% smaller than the configuration says; sizes are scaled to the files" in shape.note
    assert shape.layers[0].parameters == make_shape().layers[0].parameters


def test_a_head_that_is_stored_beside_tied_embeddings_is_not_loaded() -> None:
    tensors = {f"model.layers.{i}.x.weight": Tensor("BF16", 1_000) for i in range(4)}
    tensors |= {"model.embed_tokens.weight": Tensor("BF16", 500), "lm_head.weight": Tensor("BF16", 500)}
    shape = shape_of(TINY_LLAMA | {"tie_word_embeddings": True}, weight_bytes=5_000, tensors=tensors)
    assert shape.loaded_bytes == 4_500
    assert shape.head_bytes == 500


def test_experts_towers_and_prediction_layers_are_told_apart_by_name() -> None:
    config = json.loads((CONFIGS / "qwen3.5-35b-a3b.json").read_text())
    at = "model.language_model.layers"
    tensors = {f"{at}.{i}.mlp.experts.{e}.up_proj.weight": Tensor("BF16", 10) for i in range(40) for e in range(256)}
    tensors |= {f"{at}.{i}.mlp.shared_expert.up_proj.weight": Tensor("BF16", 300) for i in range(40)}
    tensors |= {"model.language_model.embed_tokens.weight": Tensor("BF16", 5), "lm_head.weight": Tensor("BF16", 5)}
    tensors |= {"mtp.layers.0.mlp.experts.0.up_proj.weight": Tensor("BF16", 70)}
    tensors |= {"model.visual.blocks.3.mlp.linear_fc1.weight": Tensor("BF16", 90)}
    shape = shape_of(config, weight_bytes=1, tensors=tensors)
    layer = shape.layers[7]
    assert (layer.weight_bytes, layer.expert_bytes, layer.active_bytes) == (2_860, 2_560, 300 + 2_560 * 8 // 256)
    assert (shape.other_first_bytes, shape.mtp_bytes) == (90, 70)


def test_prediction_layers_stored_as_more_layers() -> None:
    names = [f"model.layers.{i}.mlp.gate.weight" for i in range(62)]
    config = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    assert shape_of(config, tensor_names=names).mtp_bytes > 0
    assert shape_of(config, tensor_names=names[:61]).mtp_bytes == 0
    assert shape_of(config, tensor_names=names[:61]).mtp_parameters == 0
    # A tower's layers are not those of the model.
    tower = [*names[:61], "vision_tower.encoder.layers.70.mlp.fc1.weight"]
    assert shape_of(config, tensor_names=tower).mtp_bytes == 0


@given(st.integers(min_value=10_000, max_value=2**45))
def test_the_total_of_the_files_wins(total: int) -> None:
    shape = make_shape(weight_bytes=total)
    assert total - 20 < shape.loaded_bytes <= total
    assert shape.weight_bytes == total
    assert ("than the configuration says" in shape.note) == (abs(total / make_shape().loaded_bytes - 1) > 0.03)


def test_a_small_difference_is_not_worth_a_word() -> None:
    exact = make_shape().loaded_bytes
    assert make_shape(weight_bytes=int(exact * 1.02)).note == ""
    assert "5% larger" in make_shape(weight_bytes=int(exact * 1.05)).note


# --- an architecture that is not known here


UNKNOWN = TINY_LLAMA | {"architectures": ["BrandNewForCausalLM"], "model_type": "brand_new"}


def test_unknown_architecture_from_its_configuration_alone() -> None:
    shape = shape_of(UNKNOWN)
    assert not shape.exact
    assert shape.note == "the architecture BrandNewForCausalLM is not known here: sizes are estimated"
    assert shape.layers == make_shape().layers


def test_unknown_architecture_spreads_the_files_evenly() -> None:
    shape = shape_of(UNKNOWN, weight_bytes=10_000_000)
    assert not shape.exact
    assert shape.note.endswith("sizes are estimated. the weight files' bytes are spread evenly over the layers")
    assert {layer.weight_bytes for layer in shape.layers} == {(10_000_000 - 2 * 2048 * 256 * 2 - 512) // 4}
    assert shape.loaded_bytes == pytest.approx(10_000_000, abs=4)
    assert shape.total_parameters == pytest.approx(5_000_000, rel=0.001)


def test_unknown_architecture_with_headers_has_its_real_layers() -> None:
    tensors = {f"transformer.h.{i}.w": Tensor("BF16", 1_000 * (i + 1)) for i in range(4)}
    tensors |= {"transformer.wte.weight": Tensor("BF16", 500)}
    shape = shape_of(UNKNOWN, weight_bytes=10_500, tensors=tensors)
    assert [layer.weight_bytes for layer in shape.layers] == [1_000, 2_000, 3_000, 4_000]
    assert "bytes are those of the weight files, layer by layer" in shape.note


def test_unknown_architecture_with_experts_reads_some_of_them() -> None:
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    layer = shape_of(UNKNOWN | more, weight_bytes=10**9).layers[0]
    assert (layer.experts, layer.experts_per_token) == (8, 2)
    assert layer.active_bytes == pytest.approx(layer.weight_bytes - layer.expert_bytes * 3 / 4, abs=2)


def test_an_unknown_tower_takes_what_is_left() -> None:
    text = {key: value for key, value in TINY_LLAMA.items() if key != "architectures"}
    config = {"architectures": ["NewForConditionalGeneration"], "text_config": text, "vision_config": {"depth": 3}}
    plain = make_shape()
    shape = shape_of(config, weight_bytes=plain.loaded_bytes + 123_456)
    assert not shape.exact
    assert shape.layers == plain.layers
    assert shape.other_first_bytes == 123_456
    assert shape.note.endswith("what the weight files hold beyond it is taken for its tower")


def test_a_window_of_an_unknown_architecture() -> None:
    kinds = ["sliding_attention", "full_attention", "something", "sliding_attention"]
    shape = shape_of(UNKNOWN | {"layer_types": kinds, "sliding_window": 64})
    assert [layer.kv_window for layer in shape.layers] == [64, None, None, 64]


def test_files_never_change_what_is_kept_of_the_past() -> None:
    plain, scaled = real_shape("gemma-3-4b"), real_shape("gemma-3-4b", weight_bytes=10**10)
    assert [layer.kv_values for layer in plain.layers] == [layer.kv_values for layer in scaled.layers]
    assert plain.total_parameters == scaled.total_parameters
