"""What vLLM's trial step holds, and the options that change the memory table."""

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.model import ModelShape, Vision
from ppdeploy.plan.fit import Fit
from ppdeploy.plan.memory import GIB, Place, Serving, Sizes
from ppdeploy.plan.scheduler import serving_of
from ppdeploy.plan.trial import forward_bytes, vision_bytes, vision_tokens
from tests.factories_model import make_shape, real_shape

TOWER = Vision(
    hidden_size=1000,
    intermediate_size=4000,
    patches_per_token=4,
    item_tokens=3000,
    output_values=5000,
    inputs=("image",),
)


def serve(shape: ModelShape, args: dict[str, Any] | None = None, *, tp: int = 1, length: int = 4096) -> Serving:
    return serving_of(
        device="cuda",
        shape=shape,
        tensor_parallel_size=tp,
        pipeline_parallel_size=2,
        max_model_len=length,
        defaults=[(2048, 256)],
        args=args or {},
    )


def fit(shape: ModelShape, args: dict[str, Any] | None = None, *, gib: float = 24, length: int = 4096) -> Fit:
    places = [Place(f"node{i}", i, "GPU", int(gib * GIB), 0, 0.92) for i in range(2)]
    return Fit(Sizes(shape, serve(shape, args, length=length)), places, lambda *_: 0.0, lambda *_: 0.0)


def test_one_image_is_tried_however_long_and_more_where_they_fit_into_a_step() -> None:
    assert vision_tokens(TOWER, 2048, 256) == 3000
    assert vision_tokens(TOWER, 8192, 256) == 6000
    assert vision_tokens(TOWER, 8192, 1) == 3000


def test_the_tower_works_on_patches_and_keeps_its_results() -> None:
    most, results = vision_bytes(TOWER, batched_tokens=2048, sequences=256, tensor_parallel_size=1, value_bytes=2)
    assert results == 3000 * 5000 * 2
    # 12,000 patches: input and norm, then the two widths of the feed-forward part.
    assert most == 12_000 * (2 * 1000 + 2 * 4000) * 2 + results
    shared, _ = vision_bytes(TOWER, batched_tokens=2048, sequences=256, tensor_parallel_size=4, value_bytes=2)
    assert shared == 12_000 * (2 * 1000 + 2 * 4000 // 4) * 2 + results
    # Three images, each GPU with a tower of its own: two on one, one on the other.
    apart, results = vision_bytes(
        TOWER, batched_tokens=9000, sequences=256, tensor_parallel_size=2, value_bytes=2, whole=True
    )
    assert apart == 24_000 * (2 * 1000 + 2 * 4000) * 2 + results
    assert results == 9000 * 5000 * 2


def test_the_trial_of_images_weighs_on_the_first_stage_alone() -> None:
    shape = real_shape("qwen3-vl-32b")
    sizes = Sizes(shape, serve(shape))
    # 65,536 patches of 1152 values and 4304 inside; with the results some 2 GiB.
    assert sizes.activations(0, 32) / GIB == pytest.approx(2.0, abs=0.25)
    assert sizes.activations(32, 64) < GIB / 2
    skipped = Sizes(shape, serve(shape, {"skip-mm-profiling": True}))
    assert skipped.activations(0, 32) == sizes.activations(32, 63)


def test_a_tower_that_each_gpu_has_whole_is_not_divided() -> None:
    shape = real_shape("qwen3-vl-32b")
    shared, whole = (Sizes(shape, serve(shape, args, tp=2)) for args in ({}, {"mm-encoder-tp-mode": "data"}))
    more = whole.weights(0, 32) - shared.weights(0, 32)
    assert more == pytest.approx(shape.other_first_bytes / 2, abs=2)
    assert whole.weights(32, 64) == shared.weights(32, 64)
    assert whole.activations(0, 32) > shared.activations(0, 32)


def test_float32_doubles_what_a_step_holds_and_the_kv_cache() -> None:
    shape = make_shape(layers=8)
    narrow, wide = (Sizes(shape, serve(shape, args)) for args in ({}, {"dtype": "float32"}))
    assert wide.activations(0, 4) == 2 * narrow.activations(0, 4)
    assert wide.kv.block_bytes(0, 4) == 2 * narrow.kv.block_bytes(0, 4)
    assert forward_bytes(shape, tokens=64, tensor_parallel_size=1, value_bytes=4) == 2 * forward_bytes(
        shape, tokens=64, tensor_parallel_size=1, value_bytes=2
    )


def test_a_number_of_blocks_that_is_asked_for_is_what_there_is() -> None:
    shape = make_shape(layers=8)
    asked = fit(shape, {"num-gpu-blocks-override": 300})
    assert asked.capacity((4, 4), 4096).kv_tokens == 300 * 16
    assert asked.fits((4, 4))
    assert [row.kv_used_bytes for row in asked.table((4, 4), 1)] == [
        300 * row.kv_block_bytes for row in asked.table((4, 4), 1)
    ]
    # Too few for one request of 4096 tokens, and more than the GPU has.
    assert not fit(shape, {"num-gpu-blocks-override": 256}).fits((4, 4))
    assert not fit(shape, {"num-gpu-blocks-override": 10**9}).fits((4, 4))


def test_the_checkpoints_own_format_of_the_kv_cache_holds_unless_the_inventory_says_another() -> None:
    shape = make_shape(layers=8).model_copy(update={"cache_dtype": "fp8"})
    assert (serve(shape).kv_cache_dtype, serve(shape).kv_value_bytes) == ("fp8", 1)
    told = serve(shape, {"kv-cache-dtype": "bfloat16"})
    assert (told.kv_cache_dtype, told.kv_value_bytes) == ("bfloat16", 2)


def test_layers_for_multi_token_prediction_keep_keys_and_values_on_the_last_stage() -> None:
    shape = real_shape("deepseek-v3")
    without, drafting = (Sizes(shape, serve(shape, args)) for args in ({}, {"speculative-config": {"method": "mtp"}}))
    place = Place("node1", 0, "GPU", 800 * GIB, 0, 0.92)
    assert drafting.need(place, 0, 31).block == without.need(place, 0, 31).block
    last = [sizes.need(place, 31, 61).block for sizes in (without, drafting)]
    assert last[1] == last[0] * 31 // 30
