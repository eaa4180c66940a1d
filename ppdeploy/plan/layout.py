"""How a model is cut: tensor and pipeline parallel sizes, layers per stage, world ranks per node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.plan.types import Stage


def default_partition(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage as vLLM splits them by itself.

    Every stage gets `layers // stages`; the remainder goes to the stages before the last one, from the back, since the
    last stage also holds the final norm and the head (vLLM 0.33.0, `vllm/distributed/utils.py`, `get_pp_indices`).
    Raises ValueError when a stage would be empty.
    """
    if stages < 1 or layers < stages:
        raise ValueError(f"{layers} layers cannot fill {stages} stages")
    partition = [layers // stages] * stages
    for position in range(2, layers % stages + 2):
        partition[-position] += 1
    return tuple(partition)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallelism and the layers of each stage."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    partition: tuple[int, ...]
    nodes: int

    @property
    def ranks_per_node(self) -> int:
        """World ranks on each node; the same everywhere (vLLM's `mp` backend knows no other way)."""
        return self.tensor_parallel_size * self.pipeline_parallel_size // self.nodes

    def world_ranks(self, node_rank: int) -> tuple[int, ...]:
        """Return the world ranks of a node; the first one is `ranks_per_node * node_rank`."""
        first = self.ranks_per_node * node_rank
        return tuple(range(first, first + self.ranks_per_node))

    def stages(self, node_rank: int) -> tuple[Stage, ...]:
        """Return the stages that lie on a node."""
        starts = [0, *accumulate(self.partition)]
        indices = sorted({rank // self.tensor_parallel_size for rank in self.world_ranks(node_rank)})
        return tuple(Stage(index=i, first_layer=starts[i], layers=self.partition[i]) for i in indices)


def choose_layout(
    *,
    pipeline: str,
    device: str,
    hosts: Sequence[str],
    gpus: Sequence[int],
    layers: int,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    partition: Sequence[int] | None = None,
) -> Layout:
    """Choose TP inside a node and PP across the nodes, unless the inventory says otherwise.

    `gpus` holds the number of GPUs of each host in rank order (unused on cpu). Raises InputError for sizes that the
    inventory asks for and that cannot be, BlockedError for what the hosts do not have.
    """
    nodes = len(hosts)
    where = f"pipeline {pipeline}"
    if device == "cpu":
        ranks = 1
        if (tensor_parallel_size or 1) != 1:
            raise InputError(
                "vLLM runs one rank a node on cpu, so the tensor parallel size must be 1",
                where=f"{where}, ppdeploy_tensor_parallel_size",
                remedy="remove the variable",
            )
        tp = 1
    else:
        tp, ranks = _gpu_sizes(where, hosts, gpus, tensor_parallel_size, pipeline_parallel_size)
    pp = pipeline_parallel_size or nodes * ranks // tp
    world = tp * pp
    if world % nodes:
        raise InputError(
            f"tensor parallel size {tp} times pipeline parallel size {pp} is {world} ranks, which {nodes} nodes "
            "cannot share evenly",
            where=f"{where}, ppdeploy_pipeline_parallel_size",
            remedy=f"make the product a multiple of {nodes}",
        )
    if world // nodes > ranks:
        have = "one rank a node on cpu" if device == "cpu" else f"{ranks} usable GPUs a node"
        raise BlockedError(
            f"tensor parallel size {tp} times pipeline parallel size {pp} needs {world // nodes} ranks on each "
            f"node, and there is room for {have}",
            where=where,
            remedy="lower ppdeploy_pipeline_parallel_size or ppdeploy_tensor_parallel_size, or add nodes",
        )
    if (world // nodes) % tp:
        raise InputError(
            f"tensor parallel size {tp} does not fit into the {world // nodes} ranks of a node; a tensor parallel "
            "group must lie on one node",
            where=f"{where}, ppdeploy_tensor_parallel_size",
            remedy="choose a tensor parallel size that divides the GPUs of a node",
        )
    return Layout(tp, pp, _partition(where, layers, pp, partition), nodes)


def _gpu_sizes(
    where: str, hosts: Sequence[str], gpus: Sequence[int], tp: int | None, pp: int | None
) -> tuple[int, int]:
    """Return the tensor parallel size and the number of GPUs that every node can give."""
    without = [host for host, count in zip(hosts, gpus, strict=True) if count == 0]
    if without:
        raise BlockedError(
            "no NVIDIA GPU is visible",
            where=", ".join(without),
            remedy="install the driver so that nvidia-smi lists the GPUs, or set ppdeploy_device: cpu",
        )
    fewest = min(gpus)
    if tp is None and pp is None and len(set(gpus)) > 1:
        counts = ", ".join(f"{host} {count}" for host, count in zip(hosts, gpus, strict=True))
        raise BlockedError(
            f"the nodes have different numbers of GPUs ({counts}), and every node must run the same number of ranks",
            where=where,
            remedy=f"set ppdeploy_tensor_parallel_size: {fewest} to use {fewest} on each node (vLLM can use uneven "
            "numbers with Ray only, which ppdeploy does not run)",
        )
    if tp is None:
        per_node = pp // len(hosts) if pp and pp % len(hosts) == 0 else 1
        tp = max(fewest // max(per_node, 1), 1)
    if tp > fewest:
        least = hosts[list(gpus).index(fewest)]
        raise BlockedError(
            f"tensor parallel size {tp} needs {tp} GPUs on each node and {least} has {fewest}",
            where=f"{where}, ppdeploy_tensor_parallel_size",
            remedy=f"lower it to {fewest} or less",
        )
    return tp, (tp if pp is None else fewest)


def _partition(where: str, layers: int, stages: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    if stages > layers:
        raise InputError(
            f"pipeline parallel size {stages} is larger than the model's {layers} layers",
            where=where,
            remedy=f"use at most {layers} stages (fewer nodes, or a smaller ppdeploy_pipeline_parallel_size)",
        )
    if asked is None:
        return default_partition(layers, stages)
    if len(asked) != stages or sum(asked) != layers or min(asked) < 1:
        raise InputError(
            f"the layer partition {','.join(map(str, asked))} must have {stages} stages of at least one layer that sum "
            f"to {layers}, and sums to {sum(asked)} in {len(asked)}",
            where=f"{where}, ppdeploy_layer_partition",
            remedy=f"vLLM's own split would be {','.join(map(str, default_partition(layers, stages)))}",
        )
    return tuple(asked)
