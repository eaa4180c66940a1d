"""What `ppdeploy bundle` fetches of an NVIDIA driver: what a plan would name for a node of this machine's release."""

from __future__ import annotations

import re
from pathlib import Path

from ppdeploy.bundle.driver import DriverWish
from ppdeploy.bundle.driver_apt import flavours
from ppdeploy.bundle.driver_repository import OPTION, Repository
from ppdeploy.bundle.packages import this_system
from ppdeploy.errors import InputError
from ppdeploy.facts import OperatingSystem
from ppdeploy.plan.driver_packages import bundle_packages, driver_packages
from ppdeploy.plan.driver_systems import (
    KEYRING,
    NEW_ENOUGH,
    SUPPORTED,
    Platform,
    branch_of,
    pin_of,
    platform_of,
    repository_of,
)
from ppdeploy.plan.types import DriverSource
from ppdeploy.render import MANAGED, render
from ppdeploy.spec import BundledDriver

_KERNEL = r"[0-9][A-Za-z0-9.+~_-]*"


def driver_wish(
    source: str | None,
    branch: int | None,
    kernels: list[str],
    mirror: str | None,
    key: Path | None,
    *,
    machine: str,
    held: BundledDriver | None = None,
) -> DriverWish | None:
    """Return the driver that these options ask for, None where they ask for none.

    `held` is what the bundle has already: of the same system and source its branch stays where none is named, and of
    that branch its kernels stay. Raises InputError for what cannot be, before anything is fetched.
    """
    others = {"--nvidia-branch": branch, "--kernel": kernels, "--nvidia-repository": mirror}
    others["--nvidia-repository-key"] = str(key or "")
    if source is None:
        if alone := next((option for option, value in others.items() if value), None):
            raise InputError("it is of no driver", where=alone, remedy=f"name the driver with {OPTION}")
        return None
    if source not in ("nvidia", "distribution"):
        raise InputError(f"{source} is no source of drivers", where=OPTION, remedy="use nvidia or distribution")
    whose: DriverSource = "nvidia" if source == "nvidia" else "distribution"
    _check_mirror(whose, mirror, key)
    if wrong := next((one for one in kernels if not re.fullmatch(_KERNEL, one)), None):
        raise InputError(f"{wrong!r} is no kernel", where="--kernel", remedy="name it as `uname -r` prints it there")
    system = this_system()
    if branch is None and held and (held.system, held.machine, held.source) == (system.release, machine, whose):
        branch = held.branch
    return _wish(system, whose, branch, tuple(kernels), mirror, key, machine, held)


def _wish(
    system: OperatingSystem,
    source: DriverSource,
    branch: int | None,
    kernels: tuple[str, ...],
    mirror: str | None,
    key: Path | None,
    machine: str,
    held: BundledDriver | None,
) -> DriverWish:
    platform = _platform(system, source, branch, machine)
    chosen = branch_of(platform, source, branch)
    wanted = BundledDriver(
        system=system.release,
        machine=machine,
        manager=platform.manager,
        source=source,
        branch=chosen,
        kernels=(),
        names=(),
    )
    # Nodes with the kernels that it has are not to lose theirs.
    kept = held.kernels if held is not None and held.is_like(wanted) else ()
    kernels = tuple(dict.fromkeys((*kept, *kernels))) or (system.kernel,)
    names = tuple(bundle_packages(platform, source, chosen, kernels))
    wanted = wanted.model_copy(update={"kernels": kernels, "names": names})
    if source == "distribution":
        return DriverWish(wanted)
    address = repository_of(platform, mirror)
    driver = {"branch": chosen, "pin": pin_of(platform.name, chosen)}
    repository = Repository(
        address=address,
        also=repository_of(platform),
        preferences=render("driver-apt-preferences.j2", {"managed": MANAGED, "driver": driver}),
        key=key,
        keyring=f"{address}/{KEYRING if platform.manager == 'apt' else platform.key}",
        keyring_sha256=platform.keyring,
    )
    if platform.manager == "dnf":
        return DriverWish(wanted, repository=repository)
    # A kernel that comes later has its headers by the metapackage of its flavour.
    every = dict.fromkeys(driver_packages(platform, source, chosen, kernels, flavours(kernels)))
    return DriverWish(wanted, tuple(name for name in every if name not in names), repository)


def _platform(system: OperatingSystem, source: DriverSource, branch: int | None, machine: str) -> Platform:
    """Return this machine's platform; InputError where it is none, or has no such driver."""
    name = system.pretty_name or system.release
    found = platform_of(system)
    if found is None or system.machine != "x86_64" or machine != system.machine:
        raise InputError(
            f"a driver for {machine} cannot be fetched on {name} on {system.machine}",
            where=OPTION,
            remedy=f"make the bundle on a machine of the nodes' release ({SUPPORTED}, on x86_64)",
        )
    if source == "distribution" and found.own:
        raise InputError(f"{name} {found.own}", where=OPTION, remedy="take nvidia")
    oldest = found.branch if source == "nvidia" else NEW_ENOUGH
    if branch is not None and branch < oldest:
        raise InputError(
            f"there is no branch {branch} for {name} that is new enough, the oldest is {oldest}",
            where="--nvidia-branch",
            remedy=f"take {oldest} or leave it out",
        )
    return found


def _check_mirror(source: DriverSource, mirror: str | None, key: Path | None) -> None:
    if (mirror is None) != (key is None) or (mirror and source == "distribution"):
        raise InputError(
            "a mirror is of NVIDIA's repository, and its key is needed",
            where="--nvidia-repository",
            remedy="name both with --nvidia-repository and --nvidia-repository-key, or none",
        )
    if mirror and not re.fullmatch(r"https?://[^/\s@]+[^\s@]*", mirror):
        raise InputError(
            f"{mirror} is no address without a password",
            where="--nvidia-repository",
            remedy="name one, such as http://mirror.corp.example/cuda",
        )
    if key is not None and not key.is_file():
        raise InputError(
            "there is no such file", where=f"--nvidia-repository-key {key}", remedy="name the one that has the key"
        )
