"""What is done about a node's NVIDIA driver, and why: kept, installed, only rebooted for, or why that cannot be.

A driver that works and is new enough is left alone, whoever installed it. None of it is part of a release.

What is installed is what NVIDIA's Driver Installation Guide says (docs.nvidia.com/datacenter/tesla/
driver-installation-guide, page kernel-modules.html of release 620; pins: version-locking.html), and for Ubuntu's own
modules, which Canonical has signed, NVIDIA/gpu-driver-container, ubuntu24.04/precompiled/nvidia-driver.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from packaging.version import InvalidVersion, Version

from ppdeploy.facts import DriverInstallation, NodeFacts, PciAccelerator
from ppdeploy.plan.driver_packages import (
    ORIGINS,
    bundle_command,
    bundle_packages,
    bundle_words,
    driver_packages,
    driver_words,
    stream_of,
)
from ppdeploy.plan.driver_systems import (
    EL_SYSTEMS,
    KEYRING,
    NEW_ENOUGH,
    SUPPORTED,
    VENDOR_UPDATE,
    Platform,
    branch_of,
    is_outdated,
    is_unknown,
    platform_of,
    repository_of,
)
from ppdeploy.plan.environment import packages_from
from ppdeploy.plan.types import DriverPlan, DriverSource, Keyring, PlannedFile
from ppdeploy.spec import BundledDriver, PipelineVars, Wheelhouse

BLACKLIST = "/etc/modprobe.d/ppdeploy-nouveau.conf"
PREFERENCES = "/etc/apt/preferences.d/ppdeploy-nvidia"
SOURCES = "/etc/apt/sources.list.d/ppdeploy-nvidia.sources"
REPOSITORY = "/etc/yum.repos.d/ppdeploy-nvidia.repo"
FILES = (BLACKLIST, PREFERENCES, SOURCES, REPOSITORY)
"""All that we ever write for the driver; the first is there wherever we installed one."""

KEYS = {"apt": "/etc/apt/keyrings/ppdeploy-nvidia.asc", "dnf": "/etc/pki/rpm-gpg/RPM-GPG-KEY-ppdeploy-nvidia"}
"""Where the key of a mirror lies on a host."""

HELD = r"nvidia|^libcuda\d|^cuda-drivers"
NOT_HELD = r"container"
"""Packages that an upgrade by itself must not touch: a library of another version than the loaded module's answers
nothing. The container toolkit has versions of its own."""

KERNEL_HELD = r"^linux-(?:image-|headers-)?(?:{flavour})$"
"""Beside them, where the modules come built: a newer kernel would boot without one."""


def plan_driver(
    facts: NodeFacts,
    wants: PipelineVars,
    pipeline: str,
    wheelhouse: Wheelhouse | None = None,
    others: Iterable[NodeFacts] = (),
) -> DriverPlan:
    """Decide what is done about the driver of a node; `wheelhouse` is what the pipeline's bundle has.

    `others` are the facts of its nodes: the command that makes a bundle which lacks a driver is then one for them all.
    """
    place = _Place(facts, wants, pipeline, wheelhouse or Wheelhouse())
    made = _decide(place)
    if not place.lacked:
        return made
    (own,) = place.lacked
    kernels: list[str] = []
    for one in others:
        other = replace(place, facts=one, lacked=[])
        _decide(other)
        kernels += [kernel for driver in other.lacked if driver.is_like(own) for kernel in driver.kernels]
    return _decide(replace(place, lacked=[], kernels_of_others=tuple(kernels)))


def _decide(place: _Place) -> DriverPlan:
    if place.wants.device != "cuda":
        return place.kept("the pipeline runs on cpu", action="none")
    if place.state and place.state.vendor:
        return _vendor(place)
    if place.works:
        return _working(place)
    if not place.cards:
        return _no_card(place)
    if place.state is None:
        return place.blocked("the facts do not say how the driver is installed", "take the facts anew")
    return _not_working(place, place.state)


def driver_files(plan: DriverPlan) -> tuple[PlannedFile, ...]:
    """Return the files that keep the driver as it was installed, where we installed it."""
    if not plan.ours:
        return ()
    files = [_file(BLACKLIST, "driver-nouveau.conf.j2")]
    if plan.source == "nvidia" and plan.manager == "apt":
        files.append(_file(PREFERENCES, "driver-apt-preferences.j2"))
        if plan.mirror:
            files.append(_file(SOURCES, "driver-apt.sources.j2"))
    elif plan.source == "nvidia" and not plan.from_bundle:
        files.append(_file(REPOSITORY, "driver-yum.repo.j2"))
    return tuple(files)


def driver_texts(plan: DriverPlan) -> Iterator[str]:
    """Yield in words what is done about a node's driver; nothing where nothing is."""
    if plan.action == "blocked":
        yield f"blocked: {plan.reason}: {plan.remedy}"
    elif plan.action == "install":
        of = "the bundle" if plan.from_bundle else ORIGINS[plan.source or "nvidia"]
        yield f"install {', '.join(plan.packages)} (branch {plan.branch}) from {of}: {plan.reason}"
    elif plan.action in ("load", "settle"):
        yield f"{plan.action}: {plan.reason}"
    if plan.reboot:
        yield f"reboot: {plan.reboot_reason}"


def driver_source(state: DriverInstallation | None, files: frozenset[str]) -> DriverSource | None:
    """Return whose packages the installed driver is of, None where none is; `files` are those of ours on the host."""
    packages = state.packages if state else ()
    names = {package.name for package in packages}
    of_driver = [one for one in packages if re.search(HELD, one.name) and not re.search(NOT_HELD, one.name)]
    if not of_driver:
        return None
    if files & {SOURCES, REPOSITORY, PREFERENCES} or names & {"nvidia-open", "cuda-drivers"}:
        return "nvidia"
    # Canonical's revisions are such as 0ubuntu0.24.04.1, NVIDIA's such as 0ubuntu1; both may be known to apt.
    if any("ubuntu0." in one.version for one in of_driver):
        return "distribution"
    return "nvidia" if any(name.startswith(("cuda-keyring", "cuda-repo")) for name in names) else "distribution"


def _file(path: str, template: str) -> PlannedFile:
    return PlannedFile(path=path, template=template, part="driver", in_release=False)


# ---- what the decisions look at --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    facts: NodeFacts
    wants: PipelineVars
    pipeline: str
    wheelhouse: Wheelhouse
    kernels_of_others: tuple[str, ...] = ()
    """Of nodes that lack the same driver in the bundle."""
    lacked: list[BundledDriver] = field(default_factory=list)
    """Filled by a decision: the driver for which the bundle was refused."""

    @property
    def from_bundle(self) -> bool:
        """Whether an installation takes the bundle's packages alone; a mirror that the inventory names comes first."""
        mirror = self.wants.nvidia_repository is not None and self.wants.nvidia_driver == "nvidia"
        return packages_from(self.wants) == "bundle" and not mirror

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that the driver must be there for: the one that runs, and the one that boots next."""
        following = self.state.next_kernel if self.state else None
        return tuple(dict.fromkeys((self.facts.os.kernel, following or self.facts.os.kernel)))

    @property
    def state(self) -> DriverInstallation | None:
        return self.facts.driver

    @property
    def cards(self) -> list[PciAccelerator]:
        """NVIDIA's cards that are for us: one with vfio-pci is given to a virtual machine, and some are too old."""
        own = [card for card in self.facts.pci_accelerators if card.vendor == "nvidia" and card.driver != "vfio-pci"]
        return [card for card in own if not is_outdated(card)]

    @property
    def version(self) -> str | None:
        """The driver's version: what answers, else what lies on the disk."""
        driver = self.facts.nvidia_driver
        return (driver.version if driver else None) or (self.state.library_version if self.state else None)

    @property
    def works(self) -> bool:
        return bool(self.facts.gpus)

    @property
    def written(self) -> frozenset[str]:
        """The files of ours that are on the host."""
        return frozenset(path for path in FILES if self.facts.files.get(path))

    @property
    def platform(self) -> Platform | None:
        return platform_of(self.facts.os)

    def branch(self, source: str) -> int:
        """Return the branch that is installed from a source."""
        return branch_of(self.platform, source, self.wants.nvidia_branch)

    def kept(self, reason: str, *, action: Literal["none", "keep"] = "keep") -> DriverPlan:
        source = driver_source(self.state, self.written)
        ours = action == "keep" and BLACKLIST in self.written and self.platform is not None
        return DriverPlan(
            action=action,
            reason=reason,
            version=self.version,
            ours=ours,
            cards=len(self.cards),
            **(self.choice(source or "nvidia") if ours else {}),
        )

    def choice(self, source: DriverSource) -> dict[str, object]:
        """Return the fields of a plan that say what is installed from where, of a platform that is known."""
        platform = self.platform
        assert platform is not None
        mirror = self.wants.nvidia_repository if source == "nvidia" else None
        repository = repository_of(platform, mirror)
        apt = platform.manager == "apt"
        own = {
            "source": source,
            "manager": platform.manager,
            "branch": self.branch(source),
            "platform": platform.name,
        }
        if self.from_bundle:
            return {**own, "from_bundle": True}
        return {
            **own,
            "repository": repository if source == "nvidia" else "",
            "mirror": mirror is not None,
            # apt is told it while an apply fetches, dnf has no other way than the repository's file.
            "ca_bundle": "" if apt or source != "nvidia" else self.wants.ca_bundle or "",
            "key": KEYS[platform.manager] if mirror else "" if apt else f"{repository}/{platform.key}",
            "keyring": Keyring(url=f"{repository}/{KEYRING}", sha256=platform.keyring)
            if source == "nvidia" and apt and not mirror
            else None,
        }

    def blocked(self, reason: str, remedy: str) -> DriverPlan:
        return DriverPlan(
            action="blocked", reason=reason, remedy=remedy, version=self.version, ours=False, cards=len(self.cards)
        )

    def too_old(self, version: str) -> bool:
        branch = _branch(version)
        return branch is not None and branch < NEW_ENOUGH


def _branch(version: str) -> int | None:
    try:
        return Version(version.partition("-")[0]).major
    except InvalidVersion:
        return None


# ---- a driver that answers -------------------------------------------------------------------------------------------


def _vendor(place: _Place) -> DriverPlan:
    """Keep the driver of an image of NVIDIA's own, whatever the inventory wants."""
    vendor = place.state.vendor if place.state else None
    assert vendor is not None
    name = f"{vendor.name} {vendor.version}" if vendor.version else vendor.name
    if not place.works or place.version is None:
        return place.blocked(f"{name} brings its own driver, and no GPU answers", "check `nvidia-smi` on the host")
    if place.too_old(place.version):
        return place.blocked(
            f"{name} brings driver {place.version}, which is older than {NEW_ENOUGH}", VENDOR_UPDATE[vendor.kind]
        )
    return place.kept(f"{name} brings driver {place.version}")


def _working(place: _Place) -> DriverPlan:
    version = place.version or ""
    wanted, own = place.wants.nvidia_branch, _branch(version)
    if place.too_old(version) or (wanted is not None and own is not None and own < wanted):
        least = f"branch {wanted}, which ppdeploy_nvidia_branch asks for" if wanted else f"{NEW_ENOUGH}"
        return _install(place, f"driver {version} is older than {least}")
    if lacking := _unsettled(place):
        left = place.kept(lacking)
        return left.model_copy(update={"action": "settle", "held": held_pattern(place, left.source)})
    return place.kept(f"driver {version} works and is new enough")


def _unsettled(place: _Place) -> str:
    """Return what is lacking of how we left a driver; empty where nothing is."""
    left = place.kept("")
    if not left.ours or place.state is None:
        return ""
    missing = [file.path for file in driver_files(left) if file.path not in place.written]
    if missing:
        return f"{missing[0]} is missing, which keeps the driver as it is"
    held = held_pattern(place, left.source)
    loose = [
        package.name
        for package in place.state.packages
        if re.search(held, package.name) and not re.search(NOT_HELD, package.name) and not package.held
    ]
    if place.state.manager == "apt" and loose:
        return f"{loose[0]} is not held, so an upgrade could part it from the loaded module"
    return ""


def held_pattern(place: _Place, source: DriverSource | None) -> str:
    """Return what names of packages are held, as a regular expression."""
    flavour = _flavour(place)
    if source == "distribution" and flavour:
        return f"{HELD}|{KERNEL_HELD.format(flavour=re.escape(flavour))}"
    return HELD


# ---- none that answers -----------------------------------------------------------------------------------------------


def _no_card(place: _Place) -> DriverPlan:
    others = {card.vendor for card in place.facts.pci_accelerators} - {"nvidia"}
    for card in place.facts.pci_accelerators:
        if card.vendor == "nvidia" and is_outdated(card):
            return place.blocked(
                f"the card at {card.address} ({card.device_id}) is older than Turing: CUDA 13 and NVIDIA's open kernel "
                "modules are not made for it",
                "use a card of the Turing generation (RTX 20, T4) or newer",
            )
        if card.vendor == "nvidia":
            return place.blocked(
                f"the card at {card.address} is given to virtual machines (vfio-pci)",
                "give it back to the host, and reboot",
            )
    if "amd" in others:
        return place.blocked(
            "its cards are AMD's, and ppdeploy runs vLLM on NVIDIA GPUs or on processors: there is no ROCm",
            "use a host with NVIDIA GPUs, or set ppdeploy_device: cpu for a rehearsal",
        )
    return place.blocked(
        "there is no NVIDIA card on its PCI bus", "put one in, or set ppdeploy_device: cpu for a rehearsal"
    )


def _not_working(place: _Place, state: DriverInstallation) -> DriverPlan:
    broken = [package for package in state.broken if re.search(HELD, package.name)]
    if broken:
        one = broken[0]
        return _install(place, f"{one.name} {one.version} is {one.state}: its installation did not end")
    told = place.facts.problem("gpus") or ""
    loaded = place.facts.nvidia_driver.module_version if place.facts.nvidia_driver else None
    if "mismatch" in told.lower() or (loaded and state.library_version and loaded != state.library_version):
        return _reboot(place, f"driver {place.version} is installed and module {loaded} is loaded")
    if state.library_version is None and driver_source(state, place.written) is None:
        return _install(place, "there is no NVIDIA driver")
    if place.too_old(place.version or ""):
        return _install(place, f"driver {place.version} is older than {NEW_ENOUGH}, and does not answer")
    if "nouveau" in state.loaded and _has_module(place, state.next_kernel or place.facts.os.kernel):
        return _reboot(place, f"driver {place.version} is installed and nouveau is loaded")
    if state.next_kernel not in (None, place.facts.os.kernel) and _has_module(place, state.next_kernel):
        return _reboot(place, f"driver {place.version} is built for {state.next_kernel}, which boots next")
    if "nvidia" in state.loaded:
        return place.blocked(
            f"driver {place.version} is loaded and no GPU answers" + (f" ({told})" if told else ""),
            "see `journalctl -k -g 'NVRM|Xid'` on the host, and whether the card sits right",
        )
    if _has_module(place, place.facts.os.kernel):
        if state.secure_boot and not state.signing_enrolled:
            return place.blocked(
                "Secure Boot is on, and the firmware does not know the key that NVIDIA's module is signed with",
                _enrol(place, state),
            )
        return place.kept(f"driver {place.version} is installed and its module is not loaded").model_copy(
            update={"action": "load"}
        )
    return _install(place, f"driver {place.version} has no module for kernel {place.facts.os.kernel}")


def _has_module(place: _Place, kernel: str | None) -> bool:
    return any(one.release == kernel and one.nvidia_module for one in place.facts.kernels or ())


def _reboot(place: _Place, reason: str) -> DriverPlan:
    """Plan a reboot alone: all that is needed is installed."""
    if stop := _serving(place):
        return stop
    if not place.wants.allow_reboot:
        return place.blocked(f"{reason}: it takes a reboot", _permission(place))
    return place.kept(reason).model_copy(update={"action": "reboot", "reboot": True, "reboot_reason": reason})


def _permission(place: _Place) -> str:
    return "set ppdeploy_allow_reboot: true, or reboot the host yourself" + ("" if place.works else " and apply again")


def _serving(place: _Place) -> DriverPlan | None:
    """Return the refusal where something uses the GPUs, or a rank of ours runs: neither is ever taken away."""
    for name, pipeline in place.facts.pipelines.items():
        if pipeline.unit and pipeline.unit.active_state in ("active", "activating", "deactivating"):
            return place.blocked(
                f"the driver is to be changed, and a rank of pipeline {name} runs",
                "run `ppdeploy stop`, then `ppdeploy apply`",
            )
    for gpu in place.facts.gpus:
        for user in gpu.processes:
            return place.blocked(
                f"the driver is to be changed, and {user.name or 'a program'} (pid {user.pid}, "
                f"{user.unit or 'no unit'}) computes on GPU {gpu.index}",
                "stop it",
            )
    return None


# ---- an installation -------------------------------------------------------------------------------------------------


def _install(place: _Place, reason: str) -> DriverPlan:
    """Plan an installation, or say what forbids it; `reason` is why there must be one."""
    state, platform = place.state, place.platform
    if place.wants.nvidia_driver == "none":
        return place.blocked(
            f"{reason}, and ppdeploy_nvidia_driver is none",
            f"install driver {NEW_ENOUGH} or newer yourself, or set ppdeploy_nvidia_driver: nvidia",
        )
    if state is None:
        return place.blocked(f"{reason}, and the facts do not say how it is installed", "take the facts anew")
    refused = _unsupported(place, reason) or _unfit(place, state, reason) or _serving(place)
    if refused:
        return refused
    assert platform is not None
    source: DriverSource = place.wants.nvidia_driver
    branch, choice = place.branch(source), place.choice(source)
    wait = _reboot_reason(place, state)
    if wait and not place.wants.allow_reboot:
        return place.blocked(f"{reason}, and to install one takes a reboot ({wait})", _permission(place))
    return DriverPlan(
        action="install",
        reason=reason,
        version=place.version,
        ours=True,
        cards=len(place.cards) or len(place.facts.gpus),
        packages=_packages(place, platform, source),
        stream=stream_of(platform, branch) if source == "nvidia" and not place.from_bundle else "",
        # With a bundle it is ended by its packages, not by what happens to be there.
        finish=bool(state.broken) and not place.from_bundle,
        # A driver that was there before has a module for no kernel that was not there when it came.
        rebuild=tuple(kernel for kernel in place.kernels if state.dkms and not _has_module(place, kernel)),
        held=held_pattern(place, source) if platform.manager == "apt" else "",
        initramfs=state.initramfs or "",
        reboot=bool(wait),
        reboot_reason=wait,
        **choice,
    )


def _unsupported(place: _Place, reason: str) -> DriverPlan | None:
    """Return the refusal of a system, a processor or a card for which nothing can be installed."""
    system = place.facts.os
    name = system.pretty_name or system.id or "this system"
    if system.id in EL_SYSTEMS and (system.version_id or "").split(".")[0] == "8":
        return place.blocked(
            f"{reason}, and {name} is too old: its Python 3.6 and systemd 239 are not enough for ppdeploy",
            "install release 9 or 10",
        )
    if place.platform is None:
        return place.blocked(
            f"{reason}, and ppdeploy does not know how {name} gets one",
            f"install driver {NEW_ENOUGH} or newer yourself (it is known for {SUPPORTED})",
        )
    if system.machine != "x86_64":
        return place.blocked(
            f"{reason}, and ppdeploy installs it on x86_64 alone, not on {system.machine}",
            f"install driver {NEW_ENOUGH} or newer as the machine's vendor says",
        )
    if place.wants.nvidia_driver == "nvidia" and place.wants.nvidia_repository is None and _is_shut(place.wants):
        return place.blocked(
            f"{reason}, and with ppdeploy_wheelhouse no archive is asked for one, nor the bundle",
            f"set ppdeploy_system_packages: bundle, with a bundle made by `ppdeploy bundle --nvidia-driver nvidia`, or "
            f"install driver {NEW_ENOUGH} or newer yourself, or set ppdeploy_nvidia_repository to a mirror within the "
            "site; where the nodes reach NVIDIA's own, set ppdeploy_system_packages: archives",
        )
    card = next((one for one in place.cards if is_unknown(one)), None)
    if place.wants.nvidia_branch is None and card:
        return place.blocked(
            f"the card at {card.address} ({card.device_id}) is of a generation after Blackwell, and which branch "
            "drives it is not known here",
            "set ppdeploy_nvidia_branch to the one that NVIDIA names for it",
        )
    branch = place.branch(place.wants.nvidia_driver)
    if place.wants.nvidia_driver == "nvidia" and branch < place.platform.branch:
        return place.blocked(
            f"NVIDIA has no branch {branch} for {name}, whose oldest is {place.platform.branch}",
            f"set ppdeploy_nvidia_branch: {place.platform.branch} or remove it",
        )
    if place.wants.nvidia_driver == "distribution" and place.platform.own:
        return place.blocked(f"{reason}, and {name} {place.platform.own}", "set ppdeploy_nvidia_driver: nvidia")
    return _unbundled(place, place.platform, reason) if place.from_bundle else None


def _unbundled(place: _Place, platform: Platform, reason: str) -> DriverPlan | None:
    """Return the refusal of a host for which the bundle has no driver, with the command that makes one which has."""
    system, held = place.facts.os, place.wheelhouse.driver
    source: DriverSource = "distribution" if place.wants.nvidia_driver == "distribution" else "nvidia"
    needed = BundledDriver(
        system=system.release,
        machine=system.machine,
        manager=platform.manager,
        source=source,
        branch=place.branch(source),
        kernels=place.kernels,
        names=(),
    )
    if held is not None and held.serves(needed):
        return None
    place.lacked.append(needed)
    every = needed.model_copy(update={"kernels": (*place.kernels_of_others, *needed.kernels)})
    mirror = ", or set ppdeploy_nvidia_repository to a mirror within the site" if source == "nvidia" else ""
    return place.blocked(
        f"{reason}, and the bundle in ppdeploy_wheelhouse {bundle_words(place.wheelhouse)}, where the node needs "
        f"{driver_words(needed)}",
        f"run `{bundle_command(every, held, place.wants.wheelhouse or '')}` on a machine with internet and "
        f"{system.pretty_name or needed.system} and carry the bundle here, or install driver {NEW_ENOUGH} or newer "
        f"yourself{mirror}",
    )


def _is_shut(wants: PipelineVars) -> bool:
    """Return whether no package is installed from anywhere: no node is to open a connection beyond the cluster then."""
    return wants.wheelhouse is not None and packages_from(wants) == "none"


def _unfit(place: _Place, state: DriverInstallation, reason: str) -> DriverPlan | None:
    """Return the refusal of a host that would not become right by installing packages."""
    source = place.wants.nvidia_driver
    foreign = [package for package in state.broken if not re.search(HELD, package.name)]
    # What an interrupted installation from a bundle left is ended with the bundle: it has what these need.
    if foreign and not place.from_bundle:
        one = foreign[0]
        return place.blocked(
            f"{reason}, and {one.name} {one.version} is {one.state}, so that nothing can be installed",
            "run `dpkg --configure -a` and `apt-get --fix-broken install` on the host, and see what they say",
        )
    if state.runfile:
        return place.blocked(
            f"{reason}, and NVIDIA's own installer (a .run file) installed the one that is there, which packages would "
            "overwrite in part",
            "run `nvidia-uninstall` on the host, then apply",
        )
    installed = driver_source(state, place.written)
    if installed is not None and installed != source:
        remove = "apt-get purge" if state.manager == "apt" else "dnf remove"
        own = "the distribution" if state.manager == "apt" else "another repository"
        whose = {"nvidia": "NVIDIA's repository", "distribution": own}
        return place.blocked(
            f"{reason}, and its packages are of {whose[installed]}, which do not mix with those of {whose[source]}",
            f"run `{remove} '*nvidia*'` on the host, then apply"
            + (f", or set ppdeploy_nvidia_driver: {installed}" if not (place.platform and place.platform.own) else ""),
        )
    if state.secure_boot and source == "nvidia" and not state.signing_enrolled:
        return place.blocked(
            f"{reason}, and Secure Boot is on: a module that is built on the host loads only once the firmware knows "
            "the host's own key",
            _enrol(place, state),
        )
    # A bundle has what NVIDIA's packages depend on.
    bring = source == "nvidia" and not place.from_bundle
    if bring and place.facts.os.id == "debian" and "contrib" not in state.components:
        return place.blocked(
            f"{reason}, and Debian's component contrib is off, which has what NVIDIA's packages depend on",
            "add `contrib` behind `main` in /etc/apt/sources.list.d/debian.sources (or /etc/apt/sources.list)",
        )
    has_dkms = any(package.name in ("dkms", "epel-release") for package in state.packages)
    if bring and place.facts.os.id in EL_SYSTEMS and not has_dkms:
        release = (place.facts.os.version_id or "").partition(".")[0]
        url = f"https://dl.fedoraproject.org/pub/epel/epel-release-latest-{release}.noarch.rpm"
        return place.blocked(
            f"{reason}, and dkms, which builds its module, is in EPEL, which the host does not have",
            f"run `dnf install {url}` on the host (`dnf install epel-release` on Rocky and AlmaLinux)",
        )
    return None


def _enrol(place: _Place, state: DriverInstallation) -> str:
    """Return what a person does to have the firmware trust the host's key; none of it can be done from afar."""
    ubuntu = place.facts.os.id == "ubuntu"
    path = state.signing_certificate or ("/var/lib/shim-signed/mok/MOK.der" if ubuntu else "/var/lib/dkms/mok.pub")
    make = "update-secureboot-policy --new-key" if ubuntu else "dkms generate_mok"
    first = "" if state.signing_certificate else f"install dkms and mokutil and run `{make}`, then "
    signed = ", or set ppdeploy_nvidia_driver: distribution, whose modules Canonical has signed"
    return (
        f"on the host, {first}run `mokutil --import {path}` with a password for once, reboot, choose Enroll MOK on the "
        "machine's own screen and give the password, then apply; or switch Secure Boot off in the firmware"
        + (signed if ubuntu and place.wants.nvidia_driver == "nvidia" else "")
    )


def _reboot_reason(place: _Place, state: DriverInstallation) -> str:
    """Return why the driver works only after a reboot; empty where its module can be loaded at once."""
    if "nouveau" in state.loaded or "nova_core" in state.loaded:
        return f"{'nouveau' if 'nouveau' in state.loaded else 'nova_core'} has the card"
    if "nvidia" in state.loaded:
        return "the old module is loaded"
    if state.next_kernel not in (None, place.facts.os.kernel):
        return f"kernel {state.next_kernel} boots next, and {place.facts.os.kernel} runs"
    return ""


def _flavour(place: _Place) -> str:
    """Return what the kernel's metapackages end with, such as `generic-hwe-24.04` or `amd64`; empty without one."""
    names = [package.name for package in place.state.packages] if place.state else []
    found = sorted(name.removeprefix("linux-image-") for name in names if name.startswith("linux-image-"))
    # The running kernel's own flavour, where a host has several.
    own = place.facts.os.kernel.rsplit("-", 1)[-1]
    return next((flavour for flavour in found if flavour.split("-")[0] == own), found[0] if found else "")


def _packages(place: _Place, platform: Platform, source: DriverSource) -> tuple[str, ...]:
    """Return what is installed, as the package manager takes it."""
    branch = place.branch(source)
    every = tuple(driver_packages(platform, source, branch, place.kernels, [_flavour(place)]))
    if not place.from_bundle:
        return every
    needed = tuple(bundle_packages(platform, source, branch, place.kernels))
    # The headers of kernels to come, where the bundle has them for such nodes.
    held = place.wheelhouse.driver.names if place.wheelhouse.driver else ()
    return (*needed, *(name for name in every if name in held and name not in needed))
