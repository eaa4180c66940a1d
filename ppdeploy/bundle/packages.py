"""System packages of a bundle: fetched by this machine's package manager, for nodes of the same release."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ppdeploy.bundle import apt, dnf
from ppdeploy.bundle.content import PACKAGES, BundlePackages, Manager
from ppdeploy.errors import InputError
from ppdeploy.facts import OperatingSystem


class _Fetcher(Protocol):
    """What apt and dnf do alike."""

    def require(self) -> None: ...

    def archives_have(self, name: str) -> bool: ...

    def fetch(self, names: Sequence[str], folder: Path) -> None: ...


_FETCHERS: Mapping[Manager, _Fetcher] = {"apt": apt, "dnf": dnf}


def this_system(os_release: Path = Path("/etc/os-release")) -> OperatingSystem:
    """Return this machine's system; InputError where its packages are neither apt's nor dnf's."""
    text = os_release.read_text(encoding="utf-8") if os_release.is_file() else ""
    known = dict(re.findall(r"""^([A-Z_]+)=["']?([^"'\n]*)["']?$""", text, re.MULTILINE))
    system = OperatingSystem(
        id=known.get("ID"),
        id_like=tuple(known.get("ID_LIKE", "").split()),
        version_id=known.get("VERSION_ID"),
        pretty_name=known.get("PRETTY_NAME"),
        kernel=platform.release(),
        machine=platform.machine(),
        glibc=None,
        systemd_version=None,
        system_state=None,
        selinux=None,
        apparmor=None,
    )
    there = {"apt": shutil.which("apt-get"), "dnf": dnf.program(), None: None}
    if there[system.package_manager] is None:
        raise InputError(
            "system packages are fetched by apt or dnf, and this machine, which runs "
            f"{system.pretty_name or 'an unknown system'}, has neither for its own",
            where="--packages",
            remedy="make the bundle on a machine of the nodes' release, or install the packages on the nodes",
        )
    return system


def archives_have(name: str) -> bool:
    """Tell whether this machine's archives have a package to install."""
    return _FETCHERS[_manager(this_system())].archives_have(name)


def require_fetchable(machine: str) -> None:
    """Raise InputError where this machine can fetch no packages for nodes that are a `machine`, such as `x86_64`."""
    system = this_system()
    if machine != platform.machine():
        raise InputError(
            f"system packages for {machine} cannot be fetched on {platform.machine()}",
            where="--packages",
            remedy="make the bundle on a machine like the nodes, or install the packages on the nodes",
        )
    _FETCHERS[_manager(system)].require()


def fetch_packages(names: Sequence[str], machine: str, partial: Path, tell: Callable[[str], None]) -> BundlePackages:
    """Fetch packages, and all that they need, into the folder `packages` of a bundle, and write its index.

    Raises InputError where this machine is of another kind than the nodes or its archives lack a package.
    """
    require_fetchable(machine)
    system = this_system()
    manager = _manager(system)
    tell(f"system packages: {', '.join(names)}")
    _FETCHERS[manager].fetch(names, partial / PACKAGES)
    return BundlePackages(
        manager=manager,
        system=system.release,
        machine=machine,
        names=tuple(names),
        architecture=apt.ARCHITECTURES[machine] if manager == "apt" else machine,
    )


def _manager(system: OperatingSystem) -> Manager:
    return "dnf" if system.package_manager == "dnf" else "apt"
