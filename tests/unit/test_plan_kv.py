"""Blocks of KV cache by vLLM's rule: groups, pages, windows, states, and heads that tensor parallelism copies."""

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.model import Layer
from ppdeploy.plan.kv import KvLayout, kv_layout


def layer(**changes: Any) -> Layer:
    values = {
        "attention": "full",
        "parameters": 1000,
        "active_parameters": 1000,
        "weight_bytes": 2000,
        "active_bytes": 2000,
        "kv_values": 2048,
    }
    return Layer(**{**values, **changes})


def layout(layers: list[Layer], **changes: Any) -> KvLayout:
    values = {
        "value_bytes": 2,
        "tensor_parallel_size": 1,
        "kv_heads": 8,
        "block_tokens": 16,
        "in_flight_tokens": 4096,
        "state_blocks": 2,
    }
    return kv_layout(layers, **{**values, **changes})


def test_equal_layers_share_one_group_whose_block_is_the_sum_of_their_pages() -> None:
    kv = layout([layer()] * 8)
    assert len(kv.groups) == 1
    assert kv.block_bytes(0, 4) == 4 * 16 * 2048 * 2
    assert kv.blocks(1000) == 63


@pytest.mark.parametrize(("tp", "share"), [(1, 1), (2, 2), (8, 8), (16, 8)])
def test_heads_are_divided_until_each_gpu_has_one(tp: int, share: int) -> None:
    assert layout([layer()], tensor_parallel_size=tp).block_bytes(0, 1) == 16 * 2048 * 2 // share


def test_mlas_latent_is_on_every_gpu() -> None:
    latent = [layer(attention="mla", kv_values=576)]
    one, eight = (layout(latent, tensor_parallel_size=tp).block_bytes(0, 1) for tp in (1, 8))
    assert one == eight == 16 * 576 * 2


def test_windows_and_full_attention_take_groups_of_one_size_from_one_pool() -> None:
    # gpt-oss: every other layer has a window of 128 tokens.
    kv = layout([layer(), layer(attention="sliding", kv_window=128)] * 6, in_flight_tokens=0)
    assert [len(group.layers) for group in kv.groups] == [6, 6]
    # All of a request's tokens, and the window's 127 with a block for where it starts.
    assert kv.blocks(4096) == 256 + (8 + 1)


def test_five_windows_to_one_full_layer_make_six_groups_spread_over_the_stages() -> None:
    # Gemma 3's pattern: 5 windows, 1 full.
    kv = layout(([layer(attention="sliding", kv_window=512)] * 5 + [layer()]) * 4)
    assert [len(group.layers) for group in kv.groups] == [4] * 6
    # Half of the layers are about half of every group.
    assert kv.block_bytes(0, 12) == kv.block_bytes(12, 24) == 2 * 16 * 2048 * 2


def test_states_raise_the_block_until_a_page_holds_one() -> None:
    # Qwen3-Next's pattern: three linear layers, one with attention.
    kv = layout(([layer(attention="linear", kv_values=0, state_bytes=1_000_000)] * 3 + [layer()]) * 2)
    attention = next(group for group in kv.groups if not group.state)
    assert attention.tokens * 2048 * 2 >= 1_000_000
    assert attention.tokens % 16 == 0
    # One group of attention, three of states with two blocks each whatever the length.
    assert kv.blocks(attention.tokens * 5) == 5 + 3 * 2


def test_layers_that_keep_nothing_need_no_blocks() -> None:
    kv = layout([layer(kv_values=0)] * 2)
    assert (kv.block_bytes(0, 2), kv.blocks(4096)) == (0, 0)


def test_the_longest_request_takes_all_blocks_but_no_more() -> None:
    kv = layout([layer()] * 4)
    assert kv.longest(100, 10**6) == 1600
    assert kv.longest(100, 1000) == 1000
    assert kv.longest(0, 1000) == 0


FULL = {"kv_values": 8 * 64 * 2}
GEMMA = {"kv_values": 4 * 256 * 2}


@pytest.mark.parametrize(
    ("layers", "groups", "blocks", "stages"),
    [
        # gpt-oss-120b: a window of 128 in every other layer.
        (
            [layer(attention="sliding", kv_window=128, **FULL), layer(**FULL)] * 18,
            [18, 18],
            3593,
            {(0, 9): 163_840, (27, 36): 163_840},
        ),
        # Gemma 3 4B: five windows of 1024, one full, and four windows at the end.
        (
            ([layer(attention="sliding", kv_window=1024, **GEMMA)] * 5 + [layer(**GEMMA)]) * 5
            + [layer(attention="sliding", kv_window=1024, **GEMMA)] * 4,
            [5, 5, 5, 5, 5, 4, 5],
            11_654,
            {(0, 17): 196_608, (17, 34): 196_608},
        ),
        # Nearly as many of one kind as of the other: groups of the larger number.
        (
            [layer(**FULL)] * 13 + [layer(attention="sliding", kv_window=512, **FULL)] * 12,
            [13, 12],
            3617,
            {(0, 10): 327_680, (10, 25): 393_216},
        ),
        ([layer(attention="sliding", kv_window=4096, **FULL)] * 10, [10], 1793, {(0, 4): 131_072, (4, 10): 196_608}),
        # Three states to one attention layer, as in Qwen3-Next.
        (
            ([layer(attention="linear", kv_values=0, state_bytes=1_000_000)] * 3 + [layer(kv_values=2 * 256 * 2)]) * 12,
            [12, 12, 12, 12],
            73,
            {(0, 20): 5_079_040, (20, 48): 7_110_656},
        ),
    ],
)
def test_groups_blocks_and_bytes_are_those_of_vllms_own_functions(
    layers: list[Layer], groups: list[int], blocks: int, stages: dict[tuple[int, int], int]
) -> None:
    # Recorded from vLLM 0.32.0: get_kv_cache_groups, _project_kv_cache_groups_to_worker and _pool_bytes_per_block of
    # vllm/v1/core/kv_cache_utils.py, with specs of these layers, 32768 tokens, 24576 of them in flight.
    kv = layout(layers, in_flight_tokens=24_576)
    assert sorted(len(group.layers) for group in kv.groups) == sorted(groups)
    assert kv.blocks(32_768) == blocks
    assert {run: kv.block_bytes(*run) for run in stages} == stages
