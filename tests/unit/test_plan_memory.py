"""The memory of a stage against vLLM's own figures, and what must hold for any model and split."""

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.model import ModelShape
from ppdeploy.plan.fit import Fit
from ppdeploy.plan.memory import GIB, Place, Serving, Sizes
from ppdeploy.plan.scheduler import batch_default, batch_flags, kv_value_bytes, serving_of
from tests.factories_model import make_shape

MEASURED: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
"""The model of reference/measurements.md: 64 layers, 30.75 B parameters."""


def measured_shape() -> ModelShape:
    return make_shape(layers=64, **MEASURED)


def serve(
    shape: ModelShape, args: dict[str, Any] | None = None, *, tp: int = 1, pp: int = 2, length: int | None = None
) -> Serving:
    return serving_of(
        device="cuda",
        shape=shape,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        max_model_len=length,
        defaults=[batch_default("cuda", "NVIDIA H200", 140 * GIB, tp * pp)],
        args=args or {},
    )


def places(count: int, gib: float, utilization: float = 0.92) -> list[Place]:
    return [Place(f"node{i}", i, "GPU", int(gib * GIB), 0, utilization) for i in range(count)]


def no_time(*_: int) -> float:
    return 0.0


def test_the_kv_cache_of_the_measured_pipeline_within_five_percent() -> None:
    # vLLM 0.26.0 on two H200 (139.81 GiB for CUDA), share 0.85: 28.65 GiB of weights a stage, 725,104 tokens.
    shape = measured_shape()
    fit = Fit(Sizes(shape, serve(shape)), places(2, 139.81, 0.85), no_time, no_time)
    rows = fit.table((32, 32), 1)
    assert [row.weight_bytes / GIB for row in rows] == pytest.approx([28.65, 28.65], rel=0.005)
    assert fit.capacity((32, 32), 32768).kv_tokens == pytest.approx(725_104, rel=0.05)


def test_the_parts_of_a_row_are_the_whole_memory() -> None:
    shape = measured_shape()
    fit = Fit(Sizes(shape, serve(shape, tp=2)), places(2, 47), no_time, no_time)
    for row in fit.table((33, 31), 2):
        parts = (
            row.others_bytes
            + row.runtime_bytes
            + row.weight_bytes
            + row.activation_bytes
            + row.graph_bytes
            + row.kv_used_bytes
            + row.free_bytes
        )
        assert parts == row.memory_bytes


def test_the_first_stage_has_the_embedding_and_the_last_one_the_head() -> None:
    shape = measured_shape()
    sizes = Sizes(shape, serve(shape))
    table = 151936 * 5120 * 2
    middle = sizes.weights(1, 9)
    assert sizes.weights(0, 8) == middle + table
    assert sizes.weights(56, 64) == pytest.approx(middle + table, rel=1e-4)


def test_tied_embeddings_cost_twice_on_two_stages_and_once_on_one() -> None:
    shape = make_shape(layers=64, **MEASURED | {"tie_word_embeddings": True})
    sizes = Sizes(shape, serve(shape))
    table = 151936 * 5120 * 2
    assert sizes.weights(0, 32) + sizes.weights(32, 64) == sizes.weights(0, 64) + table


def test_the_logits_of_many_sequences_weigh_on_the_last_stage_only() -> None:
    shape = make_shape(layers=8, vocab_size=500_000)
    sizes = Sizes(shape, serve(shape))
    assert sizes.activations(4, 8) == 1024 * 500_000 * 10
    assert sizes.activations(0, 4) < sizes.activations(4, 8)


def test_tensor_parallelism_divides_weights_but_for_copied_heads() -> None:
    shape = make_shape(layers=8, num_attention_heads=8, num_key_value_heads=2)
    by_four, by_one = (Sizes(shape, serve(shape, tp=tp)).weights(1, 7) for tp in (4, 1))
    # Keys and values have two heads, so four GPUs hold each of them twice: half of them each, not a quarter.
    key_value = 6 * 256 * shape.layers[0].kv_values * 2
    assert by_four == pytest.approx((by_one - key_value) / 4 + key_value / 2, rel=1e-4)


def test_an_fp8_cache_holds_twice_the_tokens() -> None:
    shape = measured_shape()
    half, whole = (
        Fit(Sizes(shape, serve(shape, args)), places(2, 139.81), no_time, no_time).capacity((32, 32), 32768).kv_tokens
        for args in (None, {"kv-cache-dtype": "fp8"})
    )
    assert whole == pytest.approx(2 * half, rel=0.001)


def test_a_given_kv_cache_is_what_there_is_and_must_itself_fit() -> None:
    shape = measured_shape()
    sizes = Sizes(shape, serve(shape, length=4096))
    given = Place("node1", 0, "GPU", 40 * GIB, 0, 0.92, 2 * GIB)
    assert sizes.need(given, 0, 32).available == 2 * GIB
    assert sizes.need(given, 0, 32).lacking == 0
    small = Place("node1", 0, "GPU", 31 * GIB, 0, 0.92, 2 * GIB)
    assert sizes.need(small, 0, 32).lacking > 0


def test_a_cpu_rank_gets_four_gib_of_cache_or_what_its_host_has_left() -> None:
    shape = make_shape(weight_bytes=8_400_000)
    serving = serving_of(
        device="cpu",
        shape=shape,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
        max_model_len=1024,
        defaults=[batch_default("cpu", "", 0, 2)],
        args={},
    )
    sizes = Sizes(shape, serving)
    big, small = (Place("node", 0, "CPU", gib * GIB, 0, None) for gib in (64, 4))
    assert sizes.need(big, 0, 2).available == 4 * GIB
    assert sizes.need(small, 0, 2).available == 1.25 * GIB


@pytest.mark.parametrize(
    ("name", "gib", "batch"),
    [
        ("NVIDIA GeForce RTX 4090", 23.6, (2048, 256)),
        ("NVIDIA A100-SXM4-80GB", 79.2, (2048, 256)),
        ("NVIDIA H100 80GB HBM3", 79.2, (8192, 1024)),
        ("NVIDIA B200", 178.0, (16384, 1024)),
    ],
)
def test_the_batch_is_the_one_that_vllm_takes_on_that_gpu(name: str, gib: float, batch: tuple[int, int]) -> None:
    assert batch_default("cuda", name, int(gib * GIB), 2) == batch


def test_nodes_with_different_defaults_are_made_to_agree() -> None:
    assert batch_flags([(2048, 256), (2048, 256)], {}) == {}
    assert batch_flags([(8192, 1024), (2048, 256)], {}) == {"max-num-batched-tokens": 2048, "max-num-seqs": 256}
    assert batch_flags([(8192, 1024), (2048, 256)], {"max-num-seqs": 64}) == {"max-num-batched-tokens": 2048}


@pytest.mark.parametrize(
    ("cache", "dtype", "checkpoint", "size"),
    [
        ("auto", "auto", "bfloat16", 2),
        ("auto", "auto", None, 2),
        ("auto", "float32", "bfloat16", 4),
        ("auto", "auto", "float32", 2),
        ("fp8_e5m2", "auto", "bfloat16", 1),
        ("bfloat16", "auto", "float32", 2),
        ("nvfp4", "auto", "bfloat16", 0.5625),
        ("int8_per_token_head", "auto", "bfloat16", 1 + 4 / 128),
        ("int4_per_token_head", "auto", "bfloat16", 0.5 + 4 / 128),
        # Not worked out: never less than it takes.
        ("turboquant_k8v4", "auto", "bfloat16", 2),
    ],
)
def test_the_bytes_of_a_cached_value(cache: str, dtype: str, checkpoint: str | None, size: float) -> None:
    assert kv_value_bytes(cache, dtype, checkpoint, 128) == size


def test_options_of_the_inventory_set_the_batch_and_the_rest() -> None:
    shape = measured_shape()
    options = {
        "max-num-batched-tokens": 2048,
        "max-num-seqs": 64,
        "enforce-eager": True,
        "block-size": 32,
        "speculative-config": {"method": "mtp"},
        "enable-prefix-caching": False,
    }
    serving = serve(shape, options)
    assert (serving.batched_tokens, serving.sequences, serving.block_tokens) == (2048, 64, 32)
    assert (serving.eager, serving.draft, serving.prefix_caching) == (True, True, False)
