"""Further models beside a rank: a plain `vllm serve` each, on a share of the memory that the rank leaves."""

from __future__ import annotations

from collections.abc import Sequence

from ppdeploy.errors import BlockedError
from ppdeploy.plan.command import extra_arguments
from ppdeploy.plan.types import PlannedFile, SidecarPlan
from ppdeploy.spec import Sidecar

HOME = "/var/lib/ppdeploy"
CACHE = "/var/cache/ppdeploy"


def sidecar_unit(name: str) -> str:
    """Return the systemd unit of a sidecar."""
    return f"ppdeploy-sidecar@{name}.service"


def sidecar_file(sidecar: SidecarPlan) -> PlannedFile:
    """Return the only file of a sidecar: its unit. It is no part of a release, and changing it restarts no rank."""
    path = f"/etc/systemd/system/{sidecar.unit}"
    return PlannedFile(
        path=path, template="ppdeploy-sidecar@.service.j2", part="sidecar", sidecar=sidecar.name, in_release=False
    )


def plan_sidecars(
    wanted: Sequence[Sidecar], *, host: str, device: str, vllm: str, gpu_bytes: Sequence[int], host_bytes: int
) -> tuple[SidecarPlan, ...]:
    """Return the sidecars of a host.

    `gpu_bytes` is the memory of each of its GPUs as CUDA has it. Raises BlockedError for a GPU that is not there.
    """
    found = []
    for sidecar in wanted:
        missing = [index for index in sidecar.devices if index >= len(gpu_bytes)]
        if device == "cuda" and missing:
            raise BlockedError(
                f"sidecar {sidecar.name} is to use GPU {missing[0]} and the host has {len(gpu_bytes)}",
                where=f"host {host}, ppdeploy_sidecars",
                remedy="correct its devices (they count from 0, as nvidia-smi does)",
            )
        devices = sidecar.devices if device == "cuda" else ()
        whole = min((gpu_bytes[index] for index in devices), default=host_bytes)
        found.append(
            SidecarPlan(
                name=sidecar.name,
                unit=sidecar_unit(sidecar.name),
                model=sidecar.model,
                port=sidecar.port,
                devices=devices,
                memory_bytes=int(whole * sidecar.gpu_share),
                argv=_argv(sidecar, vllm, devices),
                env=_env(sidecar, devices),
            )
        )
    return tuple(found)


def taken_bytes(wanted: Sequence[Sidecar], index: int, memory_bytes: int) -> int:
    """Return what the sidecars of a host may take of one of its GPUs, in bytes."""
    return sum(int(memory_bytes * sidecar.gpu_share) for sidecar in wanted if index in sidecar.devices)


def _argv(sidecar: Sidecar, vllm: str, devices: Sequence[int]) -> tuple[str, ...]:
    argv = [vllm, "serve", sidecar.model, "--served-model-name", sidecar.name]
    argv += ["--host", "127.0.0.1", "--port", str(sidecar.port)]
    argv += ["--gpu-memory-utilization", f"{sidecar.gpu_share:g}"]
    if len(devices) > 1:
        argv += ["--tensor-parallel-size", str(len(devices))]
    if sidecar.max_model_len is not None:
        argv += ["--max-model-len", str(sidecar.max_model_len)]
    trusted = {"trust-remote-code": True} if sidecar.trust_remote_code else {}
    return (*argv, *extra_arguments({**sidecar.vllm_args, **trusted}))


def _env(sidecar: Sidecar, devices: Sequence[int]) -> dict[str, str]:
    folder = f"sidecar-{sidecar.name}"
    env = {
        "HOME": f"{HOME}/{folder}",
        "XDG_CACHE_HOME": f"{CACHE}/{folder}",
        "VLLM_CACHE_ROOT": f"{CACHE}/{folder}/vllm",
        # Alone on its host's loopback, whatever the rank beside it uses.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if devices:
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return env
