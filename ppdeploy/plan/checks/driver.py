"""Node checks on how the NVIDIA driver is installed, and on what would part it from its module. Not for cpu."""

from __future__ import annotations

import re

from ppdeploy.facts import DriverInstallation
from ppdeploy.plan.checks.types import NODE, Answer, Fault, Fine, NodeSituation, Unknown
from ppdeploy.plan.driver import HELD, NOT_HELD

NO_GPU = "the pipeline runs on cpu"
NOT_ASKED = "the facts do not say how the driver is installed"


@NODE.add(
    "driver",
    "blocked",
    "the NVIDIA driver works and is new enough, or an apply can make it so",
    remedy="{remedy}",
    source="docs/driver.md",
)
def _driver(s: NodeSituation) -> Answer:
    plan = s.driver
    if plan is None or plan.action == "none":
        return Unknown(NO_GPU)
    if s.facts.driver is None and not s.facts.gpus:
        return Unknown(NOT_ASKED)
    if plan.action == "blocked":
        return Fault(plan.reason, {"remedy": plan.remedy})
    reboot = ", with a reboot" if plan.reboot else ""
    return Fine(f"{plan.reason}: an apply sees to it{reboot}" if plan.pending else plan.reason)


def _state(s: NodeSituation) -> DriverInstallation | Unknown:
    """Return how the driver is installed, or why that is not known."""
    if s.device != "cuda":
        return Unknown(NO_GPU)
    return s.facts.driver or Unknown(NOT_ASKED)


@NODE.add(
    "driver-held",
    "slow",
    "no upgrade by itself parts the driver's libraries from the loaded module",
    remedy="apt-mark hold {packages} (and `apt-mark unhold` before an upgrade of your own)",
    source="nvidia-smi: `Driver/library version mismatch` after unattended-upgrades took a newer library",
)
def _held(s: NodeSituation) -> Answer:
    state = _state(s)
    if isinstance(state, Unknown):
        return state
    if state.manager != "apt" or not state.unattended_upgrades:
        return Fine("packages are not upgraded by themselves" if state.manager == "apt" else "dnf holds no packages")
    of_driver = [one for one in state.packages if re.search(HELD, one.name) and not re.search(NOT_HELD, one.name)]
    loose = [one.name for one in of_driver if not one.held]
    if loose:
        return Fault(f"unattended upgrades are on, and {', '.join(loose)} may change", {"packages": " ".join(loose)})
    return Fine("its packages are held" if of_driver else "no package of it is there")


@NODE.add(
    "packages",
    "slow",
    "no package is half installed",
    remedy="dpkg --configure -a && apt-get --fix-broken install",
    source="dpkg(1), package states: while there is one, apt installs nothing",
)
def _packages(s: NodeSituation) -> Answer:
    state = _state(s)
    if isinstance(state, Unknown):
        return state
    listed = ", ".join(f"{one.name} {one.version} is {one.state}" for one in state.broken)
    return Fault(listed) if listed else Fine("every package is whole")


@NODE.add(
    "package-lock",
    "slow",
    "no other program installs packages",
    remedy="wait for it: an apply that installs a driver waits as long as ppdeploy_package_lock_timeout says",
    source="fcntl(2), F_GETLK, on the locks of dpkg, apt and rpm",
)
def _lock(s: NodeSituation) -> Answer:
    state = _state(s)
    if isinstance(state, Unknown):
        return state
    if state.lock is None:
        return Fine("nobody installs packages")
    lock = state.lock
    who = (
        f"{lock.process or 'a program'} pid {lock.pid} ({lock.unit or 'no unit'})" if lock.pid else "another container"
    )
    return Fault(f"{who} has {lock.file}")


@NODE.add(
    "driver-headers",
    "slow",
    "a driver that DKMS builds finds the kernels' headers",
    remedy="install the headers of {kernel} ({packages})",
    source="dkms(8): without headers it builds nothing, and that kernel boots without GPUs",
)
def _headers(s: NodeSituation) -> Answer:
    state = _state(s)
    if isinstance(state, Unknown):
        return state
    if not state.dkms:
        return Fine("DKMS builds no driver here")
    wanted = {s.facts.os.kernel, state.next_kernel or s.facts.os.kernel}
    known = [one for one in s.facts.kernels or () if one.release in wanted]
    lacking = [one.release for one in known if one.headers is False and not one.nvidia_module]
    if lacking:
        name = "linux-headers" if state.manager == "apt" else "kernel-devel"
        return Fault(
            f"kernel {lacking[0]} has neither NVIDIA's module nor headers",
            {"kernel": lacking[0], "packages": f"{name}-{lacking[0]}"},
        )
    return Fine(f"{', '.join(sorted(wanted))} can have it")
