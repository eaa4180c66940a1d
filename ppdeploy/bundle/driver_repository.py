"""NVIDIA's repository as a bundle is made from it, by apt or dnf, and whether it had the branch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.spec import BundledDriver

OPTION = "--nvidia-driver"


@dataclass(frozen=True)
class Repository:
    """NVIDIA's repository of a platform, or a mirror of it."""

    address: str
    also: str
    """How else such a repository is written in this machine's sources: it may be trusted there by another key."""
    preferences: str
    """Text of apt's preferences, which pin the branch."""
    key: Path | None = None
    """The key that a mirror is signed with; None: it is in the keyring."""
    keyring: str = ""
    """Address of the package that has the key of NVIDIA's own."""
    keyring_sha256: str = ""


def check_branch(wanted: BundledDriver, versions: Iterable[str]) -> None:
    """Refuse a driver of another branch: apt takes the newest where the pinned one is not there; InputError."""
    found = sorted(versions)
    if not any(version.startswith(f"{wanted.branch}.") for version in found):
        raise InputError(
            f"the repository has no branch {wanted.branch}, its nvidia-open is {', '.join(found) or 'not there'}",
            where="--nvidia-branch",
            remedy="name a branch that it has, and in the inventory as ppdeploy_nvidia_branch",
        )
