"""The systems on which a driver can be installed, their repositories and branches, and the cards that it drives.

Systems and the names of their repositories: NVIDIA's Driver Installation Guide (docs.nvidia.com/datacenter/tesla/
driver-installation-guide/610/introduction.html). Keys of the RPM repositories: NVIDIA/gpu-driver-container,
rhel9/Dockerfile and rhel10/Dockerfile (commit 06a208c) and the .repo files of Fedora's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ppdeploy.facts import OperatingSystem, PciAccelerator
from ppdeploy.plan.rules import CUDA13_DRIVER

NEW_ENOUGH = CUDA13_DRIVER.major

ORIGIN = "https://developer.download.nvidia.com/compute/cuda/repos"

KEYRING = "cuda-keyring_1.1-1_all.deb"
"""The package of a repository for apt that makes a host trust and list it."""

OLDEST_DEVICE = 0x1E02
"""PCI device id of the first Turing card (NVIDIA/open-gpu-kernel-modules, README.md at 595.45.04, commit df1c9a3): ids
rise with the generations. Older cards have no open modules, and CUDA 13 is not made for them."""

NEWEST_DEVICE = 0x31FF
"""The last id of Blackwell, the newest generation that the same README knows."""


@dataclass(frozen=True)
class Platform:
    """A system on which a driver can be installed."""

    name: str
    """As NVIDIA calls its repository."""
    manager: Literal["apt", "dnf"]
    branch: int = NEW_ENOUGH
    """The branch that is installed where the inventory names none: the oldest that is there and new enough."""
    keyring: str = ""
    """With apt, sha256 of `cuda-keyring_1.1-1_all.deb` (GoogleCloudPlatform/compute-gpu-installation,
    linux/cuda_installer/config.py, commit e4d32d9)."""
    key: str = ""
    """With dnf, the name of the key's file in the repository."""
    streams: bool = False
    """The repository has a module stream for each branch (dnf module enable)."""
    own: str = ""
    """What the distribution has itself; empty: packages of every branch."""


_NO_OWN = "has no NVIDIA driver of its own"
DEBIAN = {
    12: Platform(
        "debian12",
        "apt",
        keyring="e7f219eab6fe4819cdb5c15b98233dc3420302d9c00883219cd3d896857cf48d",
        own="has driver 535 itself, which is older than 580",
    ),
    13: Platform(
        "debian13",
        "apt",
        # The guide names Debian 13 from release 590 on.
        branch=590,
        keyring="dd28f1f6ba0038180d6b23f846cefca1e3de4c9327751665241370bacea452a1",
        own="has driver 550 itself, which is older than 580",
    ),
}
UBUNTU = {
    "22.04": Platform("ubuntu2204", "apt", keyring="d93190d50b98ad4699ff40f4f7af50f16a76dac3bb8da1eaaf366d47898ff8df"),
    "24.04": Platform("ubuntu2404", "apt", keyring="d2a6b11c096396d868758b86dab1823b25e14d70333f1dfa74da5ddaf6a06dba"),
    "26.04": Platform(
        "ubuntu2604",
        "apt",
        # NVIDIA/gpu-driver-container, ubuntu26.04/nvidia-driver: all branches there are 595 or newer.
        branch=595,
        keyring="f7f474b5f6a4adf987aa587920df00e713285958ef6a913dda1945a544a3099e",
    ),
}
EL = {
    9: Platform("rhel9", "dnf", key="D42D0685.pub", streams=True, own=_NO_OWN),
    10: Platform("rhel10", "dnf", key="CDF6BA43.pub", own=_NO_OWN),
}
FEDORA = {
    42: Platform("fedora42", "dnf", key="D42D0685.pub", own=_NO_OWN),
    43: Platform("fedora43", "dnf", branch=590, key="1940C73E.pub", own=_NO_OWN),
    # Its repository began with 610.
    44: Platform("fedora44", "dnf", branch=610, key="73CD9B30.pub", own=_NO_OWN),
}
EL_SYSTEMS = ("rhel", "rocky", "almalinux", "centos", "ol")
SUPPORTED = "Ubuntu 22.04, 24.04 and 26.04, Debian 12 and 13, RHEL and its kin 9 and 10, Fedora 42 to 44"

VENDOR_UPDATE = {
    "dgx": "update it as DGX OS does: `apt full-upgrade`, and reboot",
    "dgx-spark": "update it as DGX OS does: `apt full-upgrade`, `fwupdmgr upgrade`, and reboot",
    "jetson": "install the JetPack release whose driver is new enough (Jetson Linux brings driver and kernel together)",
    "gb10": "update the system image of the machine's vendor",
}


def platform_of(system: OperatingSystem) -> Platform | None:
    """Return the platform that a system is, None for one on which nothing can be installed."""
    major = (system.version_id or "").partition(".")[0]
    number = int(major) if major.isdigit() else 0
    if system.id == "ubuntu":
        return UBUNTU.get(system.version_id or "")
    if system.id == "debian":
        return DEBIAN.get(number)
    if system.id == "fedora":
        return FEDORA.get(number)
    return EL.get(number) if system.id in EL_SYSTEMS else None


def repository_of(platform: Platform, mirror: str | None = None) -> str:
    """Return the address of a platform's repository, NVIDIA's own or that of a mirror."""
    return f"{(mirror or ORIGIN).rstrip('/')}/{platform.name}/x86_64"


def branch_of(platform: Platform | None, source: str, wanted: int | None) -> int:
    """Return the branch that is installed; Ubuntu has packages of every one, NVIDIA's repositories do not."""
    return wanted or (platform.branch if platform and source == "nvidia" else NEW_ENOUGH)


def pin_of(platform: str, branch: int) -> str:
    """Return the versions of a branch in a platform's repository, as apt's preferences write them."""
    # On Ubuntu, NVIDIA's packages end with ubuntu1 and Canonical's of the same branch do not.
    return f"{branch}.*ubuntu1" if platform.startswith("ubuntu") else f"{branch}.*"


def is_outdated(card: PciAccelerator) -> bool:
    """Return whether a card is too old for CUDA 13 and for NVIDIA's open kernel modules."""
    return 0 < _device_number(card) < OLDEST_DEVICE


def is_unknown(card: PciAccelerator) -> bool:
    """Return whether a card is of a generation that came after those that are known here."""
    return _device_number(card) > NEWEST_DEVICE


def _device_number(card: PciAccelerator) -> int:
    """Return the PCI device id as a number; 0 where the host does not say it."""
    return int(card.device_id, 16) if re.fullmatch(r"0x[0-9a-f]{1,4}", card.device_id) else 0
