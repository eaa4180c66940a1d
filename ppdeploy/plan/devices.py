"""What the GPUs of a node offer to its ranks: their memory, what others use of it, and the share that vLLM may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import Gpu as GpuFacts
from ppdeploy.facts import GpuProcess, NodeFacts
from ppdeploy.plan.gpus import Gpu, cpu_device, custom_gpu, find_gpu
from ppdeploy.plan.layout import Layout
from ppdeploy.plan.memory import CUDA_CONTEXT_BYTES, GIB, NCCL_BYTES, Place
from ppdeploy.plan.rules import HostGpus
from ppdeploy.plan.sidecars import taken_bytes
from ppdeploy.plan.support import UNKNOWN_CAPABILITY, Capability
from ppdeploy.spec import HostVars, Sidecar

MIB = 2**20

DEFAULT_UTILIZATION = 0.92
"""vLLM's own share (0.32.0, `vllm/config/cache.py`). It is always written, so no version's default matters."""

SHARED_UTILIZATION = 0.85
"""Where GPU and system share the memory (GB10, Jetson), the system needs more of it."""

DRIVER_BYTES = GIB // 4
DRIVER_SHARE = 0.0025
"""What CUDA does not have of the memory that nvidia-smi reports, in bytes and as a share.

From the totals in torch's public messages: RTX 4090 23.64 of 23.99 GiB, RTX 3090 23.69 of 24.00, A100 79.15 of 80.00,
H100 79.19 of 79.65, H200 139.81 of 140.40, RTX 5090 31.36 of 31.84. The rule is within 0.5 % of each.
"""

IGNORED_BYTES = 512 * MIB
"""Programs that use less than this together are not counted: a desktop's idle screen comes and goes."""


def cuda_bytes(gpu: GpuFacts) -> int:
    """Return the memory that CUDA has of a GPU, in bytes."""
    total = gpu.memory_total_mib * MIB
    return max(total - DRIVER_BYTES - int(total * DRIVER_SHARE), 0)


def others_bytes(gpu: GpuFacts, unit: str) -> int:
    """Return what programs other than the rank of `unit` use of a GPU, in whole GiB, in bytes.

    What the driver lists by process, and what it counts beside them (screens). Coarse on purpose: the share of the
    memory is part of a release, which must not change with every megabyte, nor because the rank itself runs.
    """
    own = [process for process in gpu.processes if _is_ours(process, unit)]
    listed = sum(process.memory_mib or 0 for process in gpu.processes if not _is_ours(process, unit))
    unlisted = 0
    if gpu.memory_used_mib is not None and all(process.memory_mib is not None for process in gpu.processes):
        unlisted = max(gpu.memory_used_mib - listed - sum(process.memory_mib or 0 for process in own), 0)
    used = (listed + (unlisted if unlisted * MIB >= IGNORED_BYTES else 0)) * MIB
    return ceil(used / GIB) * GIB if used >= IGNORED_BYTES else 0


def _is_ours(process: GpuProcess, unit: str) -> bool:
    # What sidecars may take is known from the inventory.
    return process.unit == unit or (process.unit or "").startswith("ppdeploy-sidecar@")


def used_bytes(gpu: GpuFacts, unit: str, sidecars: Sequence[Sidecar]) -> int:
    """Return what a GPU lacks for a rank: other programs' memory as it is, and sidecars' as they may take it."""
    return others_bytes(gpu, unit) + taken_bytes(sidecars, gpu.index, cuda_bytes(gpu))


def utilization(gpus: Sequence[GpuFacts], unit: str, sidecars: Sequence[Sidecar] = ()) -> float:
    """Return the share of each GPU's memory that vLLM may take: its default, less where others use some of it.

    One number for a node, since one process starts all its ranks. vLLM refuses to start when less than that share is
    free then (`request_memory`). Rounded down to 0.01.
    """
    shares = []
    for gpu in gpus:
        total = cuda_bytes(gpu)
        left = total - used_bytes(gpu, unit, sidecars) - CUDA_CONTEXT_BYTES - NCCL_BYTES
        default = SHARED_UTILIZATION if gpu.memory_shared else DEFAULT_UTILIZATION
        shares.append(min(default, left / total))
    return floor(max(min(shares), 0.0) * 100 + 1e-9) / 100


def devices_of(facts: NodeFacts, count: int) -> tuple[GpuFacts, ...]:
    """Return the GPUs that the ranks of a node use: the first ones, in PCI order."""
    return facts.gpus[:count]


def stage_places(
    *,
    device: str,
    hosts: Sequence[str],
    facts: Mapping[str, NodeFacts],
    wishes: Mapping[str, HostVars],
    layout: Layout,
    unit: str,
    kv_bytes: int | None,
) -> tuple[Place, ...]:
    """Return the place of each stage, in order. Raises BlockedError for a GPU without memory."""
    places = []
    tp = layout.tensor_parallel_size
    for rank, host in enumerate(hosts):
        if device == "cpu":
            total = facts[host].memory.total_bytes
            if total <= 0:
                raise BlockedError(
                    "the host reports no memory", where=f"host {host}", remedy="look at /proc/meminfo there"
                )
            beside = sum(int(total * sidecar.gpu_share) for sidecar in wishes[host].sidecars)
            places.append(Place(host, rank, "CPU", total, beside, None, kv_bytes))
            continue
        used = devices_of(facts[host], layout.ranks_per_node)
        for gpu in used:
            if cuda_bytes(gpu) <= 0:
                raise BlockedError(
                    f"GPU {gpu.index} ({gpu.name}) reports {gpu.memory_total_mib} MiB of memory",
                    where=f"host {host}",
                    remedy="look at `nvidia-smi` there; a GPU in this state cannot serve",
                )
        sidecars = wishes[host].sidecars
        share = wishes[host].gpu_memory_utilization or utilization(used, unit, sidecars)
        for start in range(0, layout.ranks_per_node, tp):
            group = used[start : start + tp]
            least = min(group, key=lambda gpu: cuda_bytes(gpu) - used_bytes(gpu, unit, sidecars))
            beside = used_bytes(least, unit, sidecars)
            places.append(Place(host, rank, least.name, cuda_bytes(least), beside, share, kv_bytes))
    return tuple(places)


def stage_gpus(
    *, device: str, hosts: Sequence[str], facts: Mapping[str, NodeFacts], wishes: Mapping[str, HostVars], layout: Layout
) -> tuple[Gpu, ...]:
    """Return the GPU that sets the pace of each stage: the one of its TP group with the least bandwidth.

    Raises InputError for a GPU that the table does not have and the inventory does not describe.
    """
    found: list[Gpu] = []
    tp = layout.tensor_parallel_size
    for host in hosts:
        if device == "cpu":
            found.append(cpu_device(facts[host].memory.total_bytes))
            continue
        known = [known_gpu(gpu, host, wishes[host]) for gpu in devices_of(facts[host], layout.ranks_per_node)]
        found += [
            min(known[start : start + tp], key=lambda gpu: gpu.bandwidth)
            for start in range(0, layout.ranks_per_node, tp)
        ]
    return tuple(found)


def known_gpu(gpu: GpuFacts, host: str, wishes: HostVars) -> Gpu:
    """Return the rates of a GPU: those that the inventory gives, else the table's; InputError when neither has any."""
    memory = gpu.memory_total_mib * MIB
    bandwidth, flops = wishes.gpu_bandwidth_gbs, wishes.gpu_bf16_tflops
    if bandwidth is not None and flops is not None:
        capability = _capability(gpu)
        return custom_gpu(gpu.name, memory, bandwidth_gbs=bandwidth, bf16_tflops=flops, capability=capability)
    found = find_gpu(gpu.name, memory)
    if found is None:
        raise InputError(
            f"the GPU {gpu.name} ({gpu.memory_total_mib} MiB) is not in ppdeploy's table",
            where=f"host {host}",
            remedy="set ppdeploy_gpu_bandwidth_gbs and ppdeploy_gpu_bf16_tflops (dense) there, from its data sheet",
        )
    return found


def lowest_gpu(facts: NodeFacts, count: int) -> HostGpus:
    """Return, for the rules, the GPU of the lowest compute capability among those that a node's ranks use."""
    least = min(devices_of(facts, count), key=_capability)
    return HostGpus(name=least.name, capability=_capability(least), driver=least.driver_version)


def _capability(gpu: GpuFacts) -> Capability:
    """Return what the driver says, else what the table does; UNKNOWN_CAPABILITY when neither says anything."""
    if gpu.compute_capability is None:
        found = find_gpu(gpu.name, gpu.memory_total_mib * MIB)
        return found.capability if found else UNKNOWN_CAPABILITY
    major, _, minor = gpu.compute_capability.partition(".")
    return int(major), int(minor or 0)
