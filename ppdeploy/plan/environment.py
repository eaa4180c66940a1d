"""The environment of a pipeline: which lock all its nodes get, and which system packages that takes on each.

Which systems have which Pythons: packages.debian.org and packages.ubuntu.com (main and universe), AppStream of RHEL 9
and 10, Fedora's package database; names as there. A package that an archive does not have after all is told by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from packaging.version import Version

from ppdeploy import locks
from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import NodeFacts, OperatingSystem
from ppdeploy.plan.types import SystemPackage
from ppdeploy.spec import PipelineSpec
from ppdeploy.spec.variables import PipelineVars

_EL = {9: ("3.11", "3.12"), 10: ("3.12",)}

PYTHONS: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "debian": {12: ("3.11",), 13: ("3.13",)},
    # 22.04 itself is Python 3.10; universe has 3.11 beside it.
    "ubuntu": {22: ("3.11",), 24: ("3.12",), 26: ("3.14",)},
    **dict.fromkeys(("rhel", "rocky", "almalinux", "centos", "ol"), _EL),
    "fedora": dict.fromkeys(range(42, 46), ("3.11", "3.12", "3.13", "3.14")),
}
"""Minor versions that the archives of a system have, by its major release, of those that there are locks for."""

ALWAYS: Mapping[str, frozenset[str]] = {"cuda": frozenset({"fastsafetensors"}), "cpu": frozenset()}
"""Extras that every lock for a device has already."""

READERS: Mapping[str, str] = {
    "fastsafetensors": "fastsafetensors",
    "runai_streamer": "runai-model-streamer",
    "runai_streamer_sharded": "runai-model-streamer",
}
"""The package that a load-format of vLLM reads with (vLLM 0.33.0, model_executor/model_loader/__init__.py)."""


OF_ROLES: Mapping[str, SystemPackage] = {
    "model_store": SystemPackage(package="rsync", kind="program", value="rsync"),
    "gateway": SystemPackage(package="haproxy", kind="daemon", value="haproxy"),
    "firewall": SystemPackage(package="nftables", kind="program", value="nft"),
}
"""What other roles take from the system; Debian's and Red Hat's kin name these packages alike."""

_WIREGUARD = SystemPackage(package="wireguard-tools", kind="program", value="wg")

OF_TUNNELS: Mapping[str, tuple[SystemPackage, ...]] = {
    "wireguard": (_WIREGUARD,),
    "wireguard-go": (_WIREGUARD, SystemPackage(package="wireguard-go", kind="program", value="wireguard-go")),
}
"""The same of the role fabric_encryption, by the kind of tunnel."""


RARE: Mapping[str, str] = {"wireguard-go": "ppdeploy_fabric_encryption: wireguard-go"}
"""Of these the packages that a bundle may lack, with what asks for them: some archives do not have them."""


def installable(system: OperatingSystem) -> tuple[str, ...]:
    """Return the minor versions of Python that the system's own archives have."""
    major = (system.version_id or "").partition(".")[0]
    return PYTHONS.get(system.id or "", {}).get(int(major), ()) if major.isdigit() else ()


def packages_from(wants: PipelineVars) -> Literal["archives", "bundle", "none"]:
    """Return where system packages come from: with a bundle, no archive is asked unless the inventory says so."""
    return wants.system_packages or ("none" if wants.wheelhouse else "archives")


def choose_lock(spec: PipelineSpec, facts: Mapping[str, NodeFacts]) -> locks.Lock:
    """Choose the lock of the wanted vLLM version, with the handoff plugin where it is wanted.

    For the newest Python that every node has and a lock is for; else, where packages may be installed, the newest that
    every node has or can install. InputError for a version or an extra without a lock, BlockedError without a Python.
    """
    wants = spec.vars
    version = wants.vllm_version or locks.default_version(wants.device)
    if not locks.is_tested(wants.device, version) and not wants.allow_untested_version:
        raise InputError(
            f"vLLM {version} was not tested with ppdeploy on {wants.device}",
            where=f"pipeline {spec.name}, ppdeploy_vllm_version",
            remedy=f"use {locks.default_version(wants.device)}, or set ppdeploy_allow_untested_version: true",
        )
    machine = facts[spec.hosts[0].name].os.machine
    extras = set(wants.vllm_extras) - ALWAYS[wants.device]
    made_for = {
        lock.python
        for lock in locks.available()
        if (lock.device, lock.vllm_version, lock.machine, set(lock.extras)) == (wants.device, version, machine, extras)
    }
    have = {host.name: minors(facts[host.name]) for host in spec.hosts}
    could = {host: set(own) for host, own in have.items()}
    if packages_from(wants) != "none":
        for host, own in could.items():
            own |= set(installable(facts[host].os))
    python = _newest(made_for, have) or _newest(made_for, could)
    if python is None and made_for:
        raise BlockedError(
            f"the nodes have no Python in common that vLLM {version} is locked for ({_listed(have)})",
            where=f"pipeline {spec.name}",
            remedy=_remedy(made_for, facts, [host.name for host in spec.hosts], packages_from(wants)),
        )
    lock = locks.find(wants.device, version, python or "3.12", machine, extras)
    _check_reader(spec, lock)
    return lock if wants.handoff == "off" else locks.with_handoff(lock)


def _check_reader(spec: PipelineSpec, lock: locks.Lock) -> None:
    """Refuse a reader of weights that the environment would not have: vLLM would end at every start."""
    chosen = str(spec.vars.vllm_args.get("load-format") or "auto")
    project = READERS.get(chosen)
    if project is None or lock.version_of(project) is not None:
        return
    extra = "runai" if project.startswith("runai") else project
    raise InputError(
        f"load-format {chosen} needs the package {project}, which the environment does not have",
        where=f"pipeline {spec.name}, ppdeploy_vllm_args",
        remedy=f"add {extra} to ppdeploy_vllm_extras (for CUDA), or remove load-format",
    )


def _newest(made_for: set[str], by_host: Mapping[str, set[str]]) -> str | None:
    """Return the newest of the minor versions that every host has."""
    return max(made_for.intersection(*by_host.values()), key=Version, default=None)


def _remedy(made_for: set[str], facts: Mapping[str, NodeFacts], hosts: list[str], source: str) -> str:
    if source == "none":
        named = {host: [minor for minor in installable(facts[host].os) if minor in made_for] for host in hosts}
        if all(named.values()):
            packages = "; ".join(f"python{own[-1]} on {host}" for host, own in named.items())
            return (
                f"install the packages {packages}, or let an apply do it: ppdeploy_system_packages: archives, or "
                "bundle with `ppdeploy bundle --packages`"
            )
    return f"install Python {' or '.join(sorted(made_for, key=Version))} on every node"


def _listed(have: Mapping[str, set[str]]) -> str:
    return "; ".join(f"{host} has {', '.join(sorted(own, key=Version)) or 'none'}" for host, own in have.items())


def minors(facts: NodeFacts) -> set[str]:
    """Return the minor versions of Python that a node has."""
    return {".".join(python.version.split(".")[:2]) for python in facts.pythons}


def system_packages(system: OperatingSystem, python: str, device: Literal["cuda", "cpu"]) -> tuple[SystemPackage, ...]:
    """Return what a node's environment takes from its system, each with the name of its package there.

    Whether the node has it is asked there, right before the environment is built.
    """
    if system.package_manager == "apt":
        return _packages(python, device, f"python{python}", f"python{python}-dev", "libnuma1")
    # Red Hat's own Python, which other packages need, has no number in its name.
    own = {"10": "3.12"}.get((system.version_id or "").partition(".")[0])
    name = "python3" if system.id != "fedora" and own == python else f"python{python}"
    return _packages(python, device, name, f"{name}-devel", "numactl-libs")


def packages_of_roles(roles: Collection[str], tools: Mapping[str, str | None]) -> tuple[SystemPackage, ...]:
    """Return what these roles take from a node's system and its facts do not show; `tools` are those facts."""
    return lacking((one for role, one in OF_ROLES.items() if role in roles), tools)


def lacking(programs: Iterable[SystemPackage], tools: Mapping[str, str | None]) -> tuple[SystemPackage, ...]:
    """Return the packages of those programs that a node's facts do not show; `tools` are those facts."""
    return tuple(one for one in programs if not tools.get(one.value))


def bundled() -> tuple[SystemPackage, ...]:
    """Return all that roles other than vllm_install may take from a node's system: a bundle is for any of them."""
    return tuple(dict.fromkeys((*OF_ROLES.values(), *(one for kind in OF_TUNNELS.values() for one in kind))))


def _packages(python: str, device: str, name: str, headers: str, libnuma: str) -> tuple[SystemPackage, ...]:
    interpreter = SystemPackage(package=name, kind="python", value=python)
    if device == "cpu":
        # vLLM's kernels for the CPU are linked to it.
        return interpreter, SystemPackage(package=libnuma, kind="library", value="libnuma.so.1")
    # Triton compiles a small C file against Python's headers when vLLM starts on a GPU.
    return (
        interpreter,
        SystemPackage(package=headers, kind="headers", value=python),
        SystemPackage(package="gcc", kind="program", value="gcc,cc,clang"),
    )
