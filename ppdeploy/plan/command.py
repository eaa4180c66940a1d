"""The exact command line and environment of every rank."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ppdeploy.plan.types import Rdma

SHUTDOWN_SECONDS = 30
"""How long a head that is told to stop finishes its requests; less than `TimeoutStopSec=` of the rank's unit."""

ONE_THREAD_MBIT = 25_000
TWO_THREADS_MBIT = 40_000
"""Rates from which NCCL's own thread, which carries 25 Gbit/s at best, is not enough; see `socket_threads`."""


def rank_argv(
    *,
    vllm: str,
    model: str,
    served_model_name: str,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    nodes: int,
    node_rank: int,
    master_addr: str,
    master_port: int,
    api_port: int,
    max_model_len: int | None,
    gpu_memory_utilization: float | None,
    kv_cache_bytes: int | None,
    extra: Mapping[str, Any],
) -> tuple[str, ...]:
    """Return the argv of one rank process (vLLM's `mp` backend, flags as of 0.33.0 `vllm/engine/arg_utils.py`).

    `kv_cache_bytes` is the KV cache of each world rank; None: what the memory fraction leaves. The head's API listens
    on loopback only; what guards it stands in front of it.
    """
    argv = [vllm, "serve", model, "--served-model-name", served_model_name]
    argv += ["--tensor-parallel-size", str(tensor_parallel_size)]
    argv += ["--pipeline-parallel-size", str(pipeline_parallel_size)]
    if nodes > 1:
        argv += [
            "--distributed-executor-backend",
            "mp",
            "--nnodes",
            str(nodes),
            "--node-rank",
            str(node_rank),
        ]
        argv += ["--master-addr", master_addr, "--master-port", str(master_port)]
    if node_rank == 0:
        argv += ["--host", "127.0.0.1", "--port", str(api_port)]
        # By default a wanted stop kills the engine at once and leaves the API hanging on the requests it has.
        argv += ["--shutdown-timeout", str(SHUTDOWN_SECONDS)]
    else:
        argv += ["--headless"]
    if max_model_len is not None:
        argv += ["--max-model-len", str(max_model_len)]
    if kv_cache_bytes is not None:
        argv += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    if gpu_memory_utilization is not None:
        argv += ["--gpu-memory-utilization", f"{gpu_memory_utilization:g}"]
    return (*argv, *extra_arguments(extra))


REPEATED = frozenset({"middleware"})
"""Options that vLLM wants once more for each further value."""


def extra_arguments(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """Turn `ppdeploy_vllm_args` into arguments, sorted by name.

    True is the bare flag, False its `--no-` form, null leaves it out, a list puts its values behind one flag (behind
    one each for REPEATED), a map becomes one JSON value.
    """
    argv: list[str] = []
    for name in sorted(extra):
        value = extra[name]
        flag = f"--{name}"
        if value is None:
            continue
        if value is True:
            argv.append(flag)
        elif value is False:
            argv.append(f"--no-{name}")
        elif isinstance(value, Mapping):
            argv += [flag, json.dumps(value, sort_keys=True, separators=(",", ":"))]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            argv += (
                [word for one in value for word in (flag, str(one))] if name in REPEATED else [flag, *map(str, value)]
            )
        else:
            argv += [flag, str(value)]
    return tuple(argv)


def rank_env(
    *,
    pipeline: str,
    device: str,
    devices: Sequence[int],
    address: str,
    partition: Sequence[int],
    partition_is_default: bool,
    omp_threads_bind: str | None,
    handoff: str,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of one rank, without what steers NCCL and gloo.

    `address` is the node's own fabric address: vLLM binds its message queues to it and would otherwise take that of
    the default route (0.33.0, `network_utils.py`, `get_ip`).
    """
    cache = f"/var/cache/ppdeploy/{pipeline}"
    env = {
        "HOME": f"/var/lib/ppdeploy/{pipeline}",
        "XDG_CACHE_HOME": cache,
        "VLLM_CACHE_ROOT": f"{cache}/vllm",
        "VLLM_HOST_IP": address,
        # The weights are in place and checked; nothing may be fetched behind our back, and nothing reported.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if device == "cuda":
        # Exactly the ranks' GPUs: vLLM tells 'same node' by the number of visible ones (reference, 1.4).
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    elif omp_threads_bind is not None:
        env["VLLM_CPU_OMP_THREADS_BIND"] = omp_threads_bind
    if not partition_is_default:
        env["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, partition))
    if handoff != "off":
        env["PPDEPLOY_HANDOFF"] = handoff
    return {**env, **extra}


def nccl_env(
    interface: str,
    *,
    rate_mbit: int | None = None,
    rdma: Rdma | None = None,
    debug: str | None = None,
    extra: Collection[str] = (),
) -> dict[str, str]:
    """Return what keeps NCCL and gloo on the fabric NIC; the names may differ from node to node.

    The leading `=` makes NCCL's match exact: a bare name is a prefix (NCCL's documentation of `NCCL_SOCKET_IFNAME`).
    On cpu only gloo reads its part; the rest does nothing there and lets the lab show that it lands.

    `rate_mbit` is that of the pipeline's slowest NIC, in Mbit/s, or None where one does not say its own: all nodes get
    the same threads. `extra` has the names that the inventory sets by itself: they stay as it says.
    """
    env = {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "NCCL_SOCKET_FAMILY": "AF_INET",
        **_rdma_env(rdma),
    }
    threads = socket_threads(rate_mbit) if rdma is None else {}
    env |= {name: value for name, value in threads.items() if name not in extra}
    if debug is not None:
        env["NCCL_DEBUG"] = debug
    return env


def _rdma_env(rdma: Rdma | None) -> dict[str, str]:
    """Return what has NCCL use RDMA or leave it; its documentation of NCCL_IB_HCA, NCCL_IB_GID_INDEX and NCCL_NET."""
    if rdma is None:
        return {"NCCL_IB_DISABLE": "1"}
    # Without the name of the network NCCL would go back to TCP in silence when the device fails.
    env = {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB", "NCCL_IB_HCA": f"={rdma.device}:1"}
    return env if rdma.gid_index is None else {**env, "NCCL_IB_GID_INDEX": str(rdma.gid_index)}


def socket_threads(rate_mbit: int | None) -> dict[str, str]:
    """Return how many threads NCCL serves a connection's sockets with, where another number than its own is faster.

    Measured with scripts/nccl_sockets.py on two H200 (docs/measured.md): at 10 Gbit/s nothing that is set changes a
    handoff of 256 tokens or more by over 3 %, and each thread keeps a core busy; at 25 Gbit/s one helper thread saves
    8 % of a large one; on a link without a limit two halve it, and more sockets or four threads bring no more.
    """
    if rate_mbit is None or rate_mbit < ONE_THREAD_MBIT:
        return {}
    threads = 1 if rate_mbit < TWO_THREADS_MBIT else 2
    return {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": "1"}
