"""The checks that stop a run before anything is touched: what a node's facts must say for its rank to start there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.version import Version

from ppdeploy.facts import NodeFacts
from ppdeploy.plan.types import Finding
from ppdeploy.plan.words import gib_text

OLDEST_SYSTEMD = 247
"""systemd of Debian 11; older ones lack directives of our units (`ProtectProc=`, `LoadCredential=`)."""

OLDEST_GLIBC = Version("2.28")
"""The wheels of vLLM are manylinux_2_28."""


@dataclass(frozen=True)
class NodeSituation:
    """What the node checks look at."""

    pipeline: str
    device: str
    facts: NodeFacts
    node_rank: int
    python: str
    master_port: int
    api_port: int
    venv_bytes_missing: int
    model_bytes_missing: int
    models_dir: str
    unit: str
    gpus_needed: int
    sidecar_ports: Mapping[int, str] = field(default_factory=dict)
    """Unit of the sidecar that is to have each port."""


NodeCheck = Callable[[NodeSituation], tuple[str, str] | None]
"""Returns (reason, remedy) where the node cannot serve, else None."""


def _system(s: NodeSituation) -> tuple[str, str] | None:
    system = s.facts.os
    if system.systemd_version is None:
        return (
            "systemd is not the service manager",
            "use a host that boots with systemd (a container without it cannot run units)",
        )
    if system.systemd_version < OLDEST_SYSTEMD:
        return (
            f"systemd {system.systemd_version} is too old",
            f"upgrade the host to one with {OLDEST_SYSTEMD} or newer",
        )
    return None


def _glibc(s: NodeSituation) -> tuple[str, str] | None:
    glibc = s.facts.os.glibc
    if glibc is None:
        return (
            "the C library is not glibc",
            "vLLM's wheels need glibc 2.28 or newer: use Debian, Ubuntu or a RHEL-like host",
        )
    if Version(glibc) < OLDEST_GLIBC:
        return (f"glibc {glibc} is older than 2.28", "upgrade the host's operating system")
    return None


def _python(s: NodeSituation) -> tuple[str, str] | None:
    if any(python.version.startswith(f"{s.python}.") for python in s.facts.pythons):
        return None
    have = ", ".join(python.version for python in s.facts.pythons) or "none"
    return (f"there is no Python {s.python} (found: {have})", f"install the package python{s.python}")


def _root(s: NodeSituation) -> tuple[str, str] | None:
    if s.facts.user.uid == 0:
        return None
    return (
        f"the play runs as {s.facts.user.name or s.facts.user.uid}, not as root",
        "allow the user to use sudo, and give its password with --ask-become-pass if it needs one",
    )


def _tools(s: NodeSituation) -> tuple[str, str] | None:
    if s.facts.tools.get("rsync"):
        return None
    return ("rsync is missing, which moves the weights", "install the package rsync")


def _ports(s: NodeSituation) -> tuple[str, str] | None:
    wanted = {s.api_port: "ppdeploy_api_port", s.master_port: "ppdeploy_master_port"} if s.node_rank == 0 else {}
    owners = {**dict.fromkeys(wanted, s.unit), **s.sidecar_ports}
    wanted |= dict.fromkeys(s.sidecar_ports, "the port in ppdeploy_sidecars")
    for listener in s.facts.listeners:
        variable = wanted.get(listener.port)
        if variable and listener.unit != owners[listener.port]:
            who = listener.command or listener.process or "another program"
            pid = f", pid {listener.pid}" if listener.pid else ""
            return (
                f"port {listener.port} is taken by {who} ({listener.unit or 'no unit'}{pid})",
                f"stop that program or set {variable} to a free port",
            )
    return None


def _disk(s: NodeSituation) -> tuple[str, str] | None:
    needs: dict[int, int] = {}
    places = {place.path: place for place in s.facts.disks}
    for path, size in (
        ("/opt/ppdeploy", s.venv_bytes_missing),
        (s.models_dir, s.model_bytes_missing),
    ):
        place = places.get(path)
        if place is None or size == 0:
            continue
        # Two folders on one file system need the sum.
        needs[place.mount_device] = needs.get(place.mount_device, 0) + size
        if needs[place.mount_device] > place.free_bytes:
            return (
                f"{path} needs {gib_text(needs[place.mount_device])} and {gib_text(place.free_bytes)} are free",
                f"free space on the file system of {place.measured_at}, or set ppdeploy_models_dir to a larger one",
            )
    return None


def _gpu(s: NodeSituation) -> tuple[str, str] | None:
    if s.device != "cuda":
        return None
    if len(s.facts.gpus) < s.gpus_needed:
        return (
            f"{s.gpus_needed} GPUs are needed and {len(s.facts.gpus)} are visible",
            "check `nvidia-smi -L` on the host",
        )
    return None


def _cpu_flags(s: NodeSituation) -> tuple[str, str] | None:
    if s.device != "cpu" or s.facts.os.machine != "x86_64" or "avx2" in s.facts.cpu.flags:
        return None
    return ("the processor has no AVX2, which vLLM on cpu needs", "use another host")


NODE_CHECKS: dict[str, NodeCheck] = {
    "root": _root,
    "systemd": _system,
    "glibc": _glibc,
    "python": _python,
    "rsync": _tools,
    "cpu-avx2": _cpu_flags,
    "gpu": _gpu,
    "port-taken": _ports,
    "disk": _disk,
}


def check_node(situation: NodeSituation, host: str) -> Iterator[Finding]:
    """Yield a blocked finding for each check that the node does not pass."""
    for name, check in NODE_CHECKS.items():
        failed = check(situation)
        if failed:
            reason, remedy = failed
            yield Finding(
                id=name,
                verdict="blocked",
                pipeline=situation.pipeline,
                host=host,
                reason=reason,
                remedy=remedy,
            )


ARM_GPUS = ("GB10", "Thor", "Orin (nvgpu)", "GH200")
"""Beginnings of names of GPUs that share a chip or a board with an aarch64 processor."""


def check_pipeline(pipeline: str, hosts: Sequence[str], facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield blocked findings on what the nodes of a pipeline must have in common."""
    machines = {host: facts[host].os.machine for host in hosts}
    if len(set(machines.values())) > 1:
        listed = ", ".join(f"{host} {machine}" for host, machine in machines.items())
        yield Finding(
            id="architecture",
            verdict="blocked",
            pipeline=pipeline,
            reason=f"the nodes have different processor architectures ({listed})",
            remedy="vLLM sends pickled objects between nodes: use one architecture in a pipeline",
        )
    for host in hosts:
        arm = [gpu.name for gpu in facts[host].gpus if gpu.name.removeprefix("NVIDIA ").startswith(ARM_GPUS)]
        if arm and machines[host] != "aarch64":
            # Only facts written by hand can say so; the plan is worth reading, and no host like that will be met.
            yield Finding(
                id="gpu-machine",
                verdict="blocked",
                pipeline=pipeline,
                host=host,
                reason=f"the facts say {machines[host]}, and a {arm[0]} is beside an aarch64 processor only",
                remedy="read the plan for what would fit; with machine: aarch64 it says whether it can be applied",
            )
    seen: dict[str, str] = {}
    for host in hosts:
        machine_id = facts[host].identity.machine_id or ""
        if machine_id and machine_id in seen:
            yield Finding(
                id="machine-id",
                verdict="blocked",
                pipeline=pipeline,
                host=host,
                reason=f"{seen[machine_id]} and {host} have the same /etc/machine-id: one is a clone or both are one",
                remedy="run `rm /etc/machine-id && systemd-machine-id-setup` on the clone and reboot it",
            )
        seen[machine_id] = host


def check_cluster(pipelines: Mapping[str, Sequence[str]], facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield blocked findings on machines that two pipelines use under two names; `pipelines` names hosts of each.

    The inventory's own names and addresses are disjoint already (`ppdeploy.spec`); only facts tell one machine.
    """
    seen: dict[str, tuple[str, str]] = {}
    for pipeline, hosts in pipelines.items():
        for host in hosts:
            machine_id = facts[host].identity.machine_id or ""
            other, name = seen.setdefault(machine_id, (pipeline, host)) if machine_id else (pipeline, host)
            if other != pipeline:
                yield Finding(
                    id="shared-machine",
                    verdict="blocked",
                    pipeline=pipeline,
                    host=host,
                    reason=f"{host} and {name} of pipeline {other} have the same /etc/machine-id: one is a clone, or "
                    "one machine is in two pipelines",
                    remedy="leave the machine in one pipeline, or run `rm /etc/machine-id && systemd-machine-id-setup` "
                    "on the clone and reboot it",
                )
