"""System packages of a bundle: fetched by this machine's package manager, for nodes of the same release."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from ppdeploy.bundle import apt
from ppdeploy.bundle.content import PACKAGES, BundlePackages
from ppdeploy.errors import InputError
from ppdeploy.facts import OperatingSystem


def this_system(os_release: Path = Path("/etc/os-release")) -> OperatingSystem:
    """Return this machine's system; InputError where its packages are not apt's."""
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
    if system.package_manager != "apt" or shutil.which("apt-get") is None:
        raise InputError(
            f"system packages are fetched by apt, and this machine runs {system.pretty_name or 'an unknown system'}",
            where="--packages",
            remedy="make the bundle on a Debian or Ubuntu of the nodes' release, or install the packages on the nodes",
        )
    return system


def archives_have(name: str) -> bool:
    """Tell whether this machine's archives have a package to install."""
    return apt.archives_have(name)


def fetch_packages(names: Sequence[str], machine: str, partial: Path, tell: Callable[[str], None]) -> BundlePackages:
    """Fetch packages, and all that they need, into the folder `packages` of a bundle, and write its index.

    Raises InputError where this machine is of another kind than the nodes or its archives lack a package.
    """
    system = this_system()
    if machine != platform.machine():
        raise InputError(
            f"system packages for {machine} cannot be fetched on {platform.machine()}",
            where="--packages",
            remedy="make the bundle on a machine like the nodes, or install the packages on the nodes",
        )
    tell(f"system packages: {', '.join(names)}")
    apt.fetch(names, partial / PACKAGES)
    return BundlePackages(
        manager="apt",
        system=system.release,
        machine=machine,
        names=tuple(names),
        architecture=apt.ARCHITECTURES[machine],
    )
