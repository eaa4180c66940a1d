"""The NVIDIA driver of a bundle: what nodes of this machine's release would install of it, for kernels that are named.

It has a folder of its own: the packages are many, and no other role's resolve or copy has to do with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppdeploy.bundle import dnf, driver_apt, driver_dnf
from ppdeploy.bundle.content import DRIVER
from ppdeploy.bundle.driver_repository import OPTION, Repository
from ppdeploy.spec import BundledDriver


@dataclass(frozen=True)
class DriverWish:
    """A driver that is to be in a bundle, for a machine like this one."""

    wanted: BundledDriver
    """What it is, with the names of its packages."""
    optional: tuple[str, ...] = ()
    """Names of packages beside these, which an archive may not have."""
    repository: Repository | None = None
    """Where the packages come from that this machine's own archives do not have; None: they have all."""


def require_driver(wish: DriverWish) -> None:
    """Raise InputError where this machine cannot fetch a driver."""
    if wish.wanted.manager == "dnf":
        dnf.require(OPTION)
    else:
        driver_apt.require(wish.wanted, wish.repository)


def fetch_driver(wish: DriverWish, partial: Path, tell: Callable[[str], None]) -> BundledDriver:
    """Fetch a driver, and all that it needs, into the folder `driver` of a bundle, and write its index.

    `require_driver` was asked before. Returns it with the names of what was asked for. Raises InputError where an
    archive lacks a package or a repository is not believed, PpdeployError for any other failure of the package manager.
    """
    wanted = wish.wanted
    tell(f"the NVIDIA driver {wanted.branch} for {', '.join(wanted.kernels)}")
    folder = partial / DRIVER
    if wanted.manager == "dnf" and wish.repository is not None:
        names = driver_dnf.fetch(wanted, wish.repository, folder)
    else:
        names = driver_apt.fetch(wanted, wish.optional, wish.repository, folder)
    return wanted.model_copy(update={"names": names})
