"""The split of one pipeline: from what the nodes have and the inventory wants to layers per stage and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from ppdeploy.facts import NodeFacts
from ppdeploy.model import ModelShape
from ppdeploy.plan.changes import Today, nearest_changes
from ppdeploy.plan.devices import cuda_bytes, devices_of, stage_gpus, stage_places
from ppdeploy.plan.fit import Fit, place_kind
from ppdeploy.plan.gpus import Gpu
from ppdeploy.plan.layout import Layout
from ppdeploy.plan.load import Loads
from ppdeploy.plan.memory import GIB, Place, Serving, Sizes
from ppdeploy.plan.memory_findings import memory_findings
from ppdeploy.plan.orders import MOST_NODES, Orders
from ppdeploy.plan.scheduler import batch_default, batch_flags, serving_of
from ppdeploy.plan.speed import StageLoad
from ppdeploy.plan.split import Cost, costs, smallest_maximum
from ppdeploy.plan.types import Capacity, Finding, Goal, StageMemory
from ppdeploy.spec import HostVars, PipelineSpec

FP8_CACHE = (8, 9)
"""Compute capability from which the KV cache can be kept in fp8 whatever the attention backend."""


@dataclass(frozen=True)
class Decision:
    """What was decided on the split of a pipeline."""

    layout: Layout
    serving: Serving
    places: tuple[Place, ...]
    gpus: tuple[Gpu, ...]
    loads: tuple[StageLoad, ...]
    """What each stage reads and computes, for predictions of speed."""
    memory: tuple[StageMemory, ...]
    capacity: Capacity
    flags: dict[str, int]
    """Options of `vllm serve` that the nodes must agree on and would not by themselves."""
    findings: tuple[Finding, ...]

    def utilization(self, node_rank: int) -> float | None:
        """Return the share of its GPUs that a node's ranks may take; None on cpu."""
        return next(place.utilization for place in self.places if place.node_rank == node_rank)

    def kv_bytes(self, node_rank: int) -> int | None:
        """Return the KV cache of each rank of a node where it is a fixed number of bytes, as always on cpu."""
        rows = [row for row in self.memory if row.node_rank == node_rank]
        asked = next(place.kv_bytes for place in self.places if place.node_rank == node_rank)
        if asked is not None or rows[0].utilization is not None:
            return asked
        return max(min(row.kv_bytes for row in rows), 1)


def decide(
    spec: PipelineSpec, facts: Mapping[str, NodeFacts], shape: ModelShape, layout: Layout, unit: str
) -> Decision:
    """Choose the layers of each stage for the inventory's goal, and say what memory that leaves.

    `layout` has the sizes, and the inventory's split where it gives one. Raises InputError for a GPU that nobody
    describes, BlockedError for one without memory.
    """
    wants = spec.vars
    hosts = [host.name for host in spec.hosts]
    wishes: dict[str, HostVars] = {host.name: host.vars for host in spec.hosts}
    kv_bytes = round(wants.kv_cache_gib * GIB) if wants.kv_cache_gib else None
    places = stage_places(
        device=wants.device, hosts=hosts, facts=facts, wishes=wishes, layout=layout, unit=unit, kv_bytes=kv_bytes
    )
    gpus = stage_gpus(device=wants.device, hosts=hosts, facts=facts, wishes=wishes, layout=layout)
    world_size = layout.tensor_parallel_size * layout.pipeline_parallel_size
    defaults = [
        batch_default(wants.device, gpu.name, cuda_bytes(gpu), world_size)
        for host in hosts
        for gpu in devices_of(facts[host], 1)
    ] or [batch_default(wants.device, "", 0, world_size)]
    serving = serving_of(
        device=wants.device,
        shape=shape,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        max_model_len=wants.max_model_len,
        defaults=defaults,
        args=wants.vllm_args,
    )
    loads = Loads(
        shape,
        tensor_parallel_size=layout.tensor_parallel_size,
        stages=layout.pipeline_parallel_size,
        kv_value_bytes=serving.kv_value_bytes,
    )
    fit = Fit(
        Sizes(shape, serving),
        places,
        lambda stage, first, stop: loads.busy_step(gpus[stage], first, stop),
        lambda stage, first, stop: loads.lone_request(gpus[stage], first, stop),
    )
    asked = wants.layer_partition is not None
    partition = layout.partition if asked else fit.choose(wants.goal)
    limit = max(shape.max_position_embeddings or 0, serving.max_model_len)
    capacity = fit.capacity(partition, limit)
    if not capacity.fits:
        fp8_cache = wants.device == "cuda" and all(gpu.capability >= FP8_CACHE for gpu in gpus)
        today = Today(shape, serving, places, partition, asked, limit, fp8_cache)
        capacity = capacity.model_copy(update={"changes": nearest_changes(today)})
    memory = fit.table(partition, layout.tensor_parallel_size)
    findings = list(memory_findings(spec.name, fit, memory, capacity))
    if not asked:
        findings += better_order(spec.name, hosts, fit, wants.goal, partition)
    return Decision(
        layout=replace(layout, partition=partition),
        serving=serving,
        places=places,
        gpus=gpus,
        loads=tuple(loads.load(gpus[row.stage], row.first_layer, row.first_layer + row.layers) for row in memory),
        memory=memory,
        capacity=capacity,
        flags=batch_flags(defaults, wants.vllm_args),
        findings=tuple(findings),
    )


def better_order(
    pipeline: str, hosts: Sequence[str], fit: Fit, goal: Goal, partition: Sequence[int]
) -> Iterator[Finding]:
    """Yield a finding where another order of the nodes serves the goal better; the inventory's order is kept."""
    nodes: dict[str, list[int]] = {}
    for stage, place in enumerate(fit.places):
        nodes.setdefault(place.host, []).append(stage)
    kinds = [tuple(place_kind(fit.places[stage]) for stage in nodes[host]) for host in hosts]
    if not 2 <= len(hosts) <= MOST_NODES or len(set(kinds)) == 1:
        return
    cost = _order_cost(fit, goal)
    orders = Orders([nodes[host] for host in hosts], kinds, fit.layers, cost)
    if goal == "latency":
        today = sum(costs(partition, cost))
        found = orders.best_sum(today)
    else:
        today = smallest_maximum(fit.stages, fit.layers, cost)
        found = orders.best_maximum(today)
    if found is None:
        return
    best, order = found
    names = [hosts[index] for index in order]
    yield Finding(
        id="node-order",
        verdict="ready",
        pipeline=pipeline,
        reason=f"with the nodes in the order {', '.join(names)} (head {names[0]}) {_gain(goal, today, best)}",
        remedy="change their order in the inventory if nothing else speaks for this one",
    )


def _order_cost(fit: Fit, goal: Goal) -> Cost:
    if goal == "latency":
        return fit.lone
    scarcity = smallest_maximum(fit.stages, fit.layers, fit.scarcity)
    if goal == "context" or scarcity == inf:
        return fit.scarcity
    return fit.busy(fit.blocks_for_load(scarcity))


def _gain(goal: Goal, today: float, best: float) -> str:
    if today == inf:
        return "the model fits"
    if goal == "context":
        return f"there is {today / best * 100 - 100:.0f} % more room for the KV cache"
    what = "the slowest stage takes" if goal == "throughput" else "one request alone takes"
    return f"{what} {100 - best / today * 100:.0f} % less time"
