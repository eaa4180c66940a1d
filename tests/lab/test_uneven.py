"""Two hosts of unequal memory: an uneven split, the worker with the files of its own layers, and vLLM that serves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.plan import PipelinePlan
from tests.lab.cluster import PROMPTS, Cluster

GIB = 1024**3

MEMORY = {"node1": int(3.25 * GIB), "node2": int(4.25 * GIB)}
"""Of this a cpu rank takes 2.5 GiB beside weights and KV cache: twice as much is left on the second host."""

TOLERANCE = 0.05
"""What the size of the KV cache in the plan may differ by from that in vLLM's own log."""


@pytest.fixture(scope="module")
def evenly(served: Cluster) -> list[str]:
    """What the even split completes the prompts with."""
    assert served.plan().pipelines[0].partition == (2, 2)
    return [served.complete(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def uneven(served: Cluster, evenly: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same weights, a file for each layer, on hosts with a memory limit each, set up for the longest context."""
    assert len(set(evenly)) == len(PROMPTS)
    folder = tmp_path_factory.mktemp("uneven")
    model = make_tiny_model(folder / tiny_model().name, sharded=True, tied=True)
    # The size of the cache is to come from the plan.
    inventory = served.variant(folder / "hosts.yml", kv_cache_gib=None, goal="context", model=str(model))
    cluster = replace(served, inventory=inventory)
    stop = served.ppdeploy("stop")
    assert stop.code == 0, stop.said
    try:
        for node, limit in MEMORY.items():
            served.lab.memory_limit(node, limit)
        done = cluster.ppdeploy("apply", "--json")
        assert done.code == 0, done.said
        # It goes on serving: the next test compares what it writes with what one host writes.
        yield cluster
    finally:
        for node in MEMORY:
            served.lab.memory_limit(node, None)


@pytest.fixture(scope="module")
def planned(uneven: Cluster) -> PipelinePlan:
    """The plan that runs."""
    (pipeline,) = uneven.plan().pipelines
    return pipeline


def test_the_larger_host_gets_more_layers(uneven: Cluster, planned: PipelinePlan) -> None:
    assert planned.partition == (1, 3)
    assert [row.memory_bytes for row in planned.memory] == list(MEMORY.values())
    for node, pid in uneven.pids().items():
        environment = uneven.out(node, f"tr '\\0' '\\n' < /proc/{pid}/environ").splitlines()
        assert "VLLM_PP_LAYER_PARTITION=1,3" in environment


def test_the_worker_has_the_files_of_its_own_layers_and_the_tied_embedding(
    uneven: Cluster, planned: PipelinePlan
) -> None:
    head, worker = planned.nodes
    for node, shards in ((head, range(1, 7)), (worker, (2, 3, 4, 5, 6))):
        found = uneven.out(node.host, f"ls {node.model.directory}").split()
        assert [name for name in found if name.endswith(".safetensors")] == [
            f"model-{shard:05d}-of-00006.safetensors" for shard in shards
        ]
    done, failed = uneven.testinfra("test_model_store")
    assert (done.code, failed) == (0, set()), done.said


def test_an_apply_has_nothing_left_to_do(uneven: Cluster, planned: PipelinePlan) -> None:
    assert {node.host: node.work.restart for node in planned.nodes} == {"node1": False, "node2": False}
    assert uneven.status()["own"]["prepared"] == planned.release


def test_vllm_keeps_as_many_tokens_as_planned(uneven: Cluster, planned: PipelinePlan) -> None:
    journal = uneven.out("node1", f"journalctl --output=cat --unit={planned.nodes[0].unit}")
    logged = int(re.findall(r"KV cache size: ([\d,]+) tokens", journal)[-1].replace(",", ""))
    assert logged == pytest.approx(planned.capacity.kv_tokens, rel=TOLERANCE)


def test_the_text_is_that_of_the_even_split_which_has_all_files(uneven: Cluster, evenly: list[str]) -> None:
    assert [uneven.complete(prompt) for prompt in PROMPTS] == evenly
