"""The driver's packages by name, for a node and for a bundle alike, and what is said of those in a bundle."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ppdeploy.plan.driver_systems import Platform
from ppdeploy.spec import BundledDriver, Wheelhouse

ORIGINS: Mapping[str, str] = {"nvidia": "NVIDIA's repository", "distribution": "the distribution"}
"""Whose packages they are, in words, by `ppdeploy_nvidia_driver`."""

_MATCHED = "kernel-devel-matched"
"""Brings the newest kernel with its headers."""


def driver_packages(
    platform: Platform,
    source: str,
    branch: int,
    kernels: Sequence[str],
    flavours: Iterable[str],
) -> Iterator[str]:
    """Yield what is installed of a branch for these kernels, as the package manager takes it.

    `flavours` are what the kernels' metapackages end with, such as `generic`; empty ones stand for none.
    """
    if source == "distribution":
        yield from (f"linux-modules-nvidia-{branch}-server-open-{kernel}" for kernel in kernels)
        yield from (f"linux-modules-nvidia-{branch}-server-open-{flavour}" for flavour in flavours if flavour)
        yield f"nvidia-headless-no-dkms-{branch}-server-open"
        yield f"nvidia-utils-{branch}-server"
        yield f"nvidia-compute-utils-{branch}-server"
        return
    if platform.manager == "apt":
        yield from (f"linux-headers-{kernel}" for kernel in kernels)
        yield from (f"linux-headers-{flavour}" for flavour in flavours if flavour)
        yield "nvidia-open"
        return
    yield from (f"kernel-devel-{kernel}" for kernel in kernels)
    yield _MATCHED
    yield "kernel-headers"
    # Without streams, the version is in the name: dnf takes the newest of all branches otherwise.
    yield "nvidia-open" if platform.streams else f"nvidia-open-{branch}.*"


def bundle_packages(platform: Platform, source: str, branch: int, kernels: Sequence[str]) -> Iterator[str]:
    """Yield what a bundle must have of the same, and its nodes install.

    No package is among them that brings another kernel than these, as metapackages of modules do. The folder has no
    module streams. EPEL's and Fedora's dkms requires `kernel-devel-matched` where there is a `kernel-core` (dkms.spec),
    as on every node, and a folder that is resolved for an empty system lacks it unless it is asked for.
    """
    for name in driver_packages(platform, source, branch, kernels, ()):
        if name == "nvidia-open" and platform.streams:
            yield f"nvidia-open-{branch}.*"
        elif name == _MATCHED:
            yield from (f"{_MATCHED}-{kernel}" for kernel in kernels)
        else:
            yield name


def stream_of(platform: Platform, branch: int) -> str:
    """Return the module stream of a branch in NVIDIA's own repository; empty where it has none."""
    return f"nvidia-driver:{branch}-open" if platform.streams else ""


def bundle_command(needed: BundledDriver, held: BundledDriver | None, folder: str) -> str:
    """Return the command that puts the driver into a bundle; kernels that it has are kept."""
    kernels = held.kernels if held is not None and held.is_like(needed) else ()
    words = ["ppdeploy", "bundle", "--out", folder, "--nvidia-driver", needed.source]
    words += ["--nvidia-branch", str(needed.branch)]
    words += [word for kernel in dict.fromkeys((*kernels, *needed.kernels)) for word in ("--kernel", kernel)]
    return shlex.join(words)


def driver_words(driver: BundledDriver) -> str:
    """Return a driver of a bundle, or one that is to be, in words."""
    kernels = f"kernel{'s' if len(driver.kernels) > 1 else ''} {', '.join(driver.kernels)}"
    return f"branch {driver.branch} of {ORIGINS[driver.source]} for {driver.system} on {driver.machine}, {kernels}"


def bundle_words(wheelhouse: Wheelhouse) -> str:
    """Return what a bundle has of a driver, as the end of a sentence about it."""
    if wheelhouse.problem:
        return f"cannot be read ({wheelhouse.problem})"
    return f"has {driver_words(wheelhouse.driver)}" if wheelhouse.driver else "has none"
