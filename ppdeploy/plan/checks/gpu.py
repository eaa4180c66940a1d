"""Node checks on GPUs and their driver. On cpu they have nothing to judge."""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from ppdeploy.facts import Gpu
from ppdeploy.plan.checks.types import NODE, Answer, Fault, Fine, NodeSituation, Unknown
from ppdeploy.plan.rules import CUDA13_DRIVER

ARM_GPUS = ("GB10", "Thor", "Orin (nvgpu)", "GH200")
"""Beginnings of names of GPUs that share a chip or a board with an aarch64 processor."""

NO_GPU = "the pipeline runs on cpu"
NONE_SEEN = "no GPU answers"


def _used(s: NodeSituation) -> tuple[Gpu, ...]:
    """Return the cards that the ranks get, the first ones (`NodePlan.devices`); the others are none of our business."""
    return s.facts.gpus[: s.gpus_needed]


@NODE.add(
    "gpu",
    "blocked",
    "as many GPUs are visible as the node has ranks",
    remedy="check `nvidia-smi -L` on the host",
    source="vLLM: every node has world_size / nnodes ranks, one GPU each",
)
def _gpu(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    if s.gpus_needed is None:
        return Unknown(f"no plan says how many are needed ({len(s.facts.gpus)} are visible)")
    if len(s.facts.gpus) < s.gpus_needed:
        return Fault(f"{s.gpus_needed} GPUs are needed and {len(s.facts.gpus)} are visible")
    more = len(s.facts.gpus) - s.gpus_needed
    hidden = f"; CUDA_VISIBLE_DEVICES hides {more} more" if more else ""
    return Fine(f"{s.gpus_needed} of {len(s.facts.gpus)} GPUs are used{hidden}")


@NODE.add(
    "gpu-machine",
    "blocked",
    "the GPUs exist beside this kind of processor",
    remedy="read the plan for what would fit; with machine: aarch64 it says whether it can be applied",
    source="NVIDIA: GB10, Thor, Orin and GH200 have an aarch64 processor; only facts written by hand can say otherwise",
)
def _machine(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    arm = [gpu.name for gpu in s.facts.gpus if gpu.name.removeprefix("NVIDIA ").startswith(ARM_GPUS)]
    if arm and s.facts.os.machine != "aarch64":
        return Fault(f"the facts say {s.facts.os.machine}, and a {arm[0]} is beside an aarch64 processor only")
    return Fine(f"{s.facts.os.machine}")


@NODE.add(
    "gpu-driver",
    "blocked",
    f"the NVIDIA driver is {CUDA13_DRIVER} or newer, which CUDA 13 needs",
    remedy="install driver 580 or newer, and reboot",
    source="NVIDIA CUDA compatibility guide: CUDA 13.x needs driver 580 (the plan's rule driver-cuda13)",
    # The plan has a rule of its own for it, which knows the pinned vLLM.
    in_plan=False,
)
def _driver(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    version = s.facts.nvidia_driver.version if s.facts.nvidia_driver else None
    if version is None:
        return Unknown(NONE_SEEN)
    try:
        old = Version(version) < CUDA13_DRIVER
    except InvalidVersion:
        return Unknown(f"driver {version} has no version that can be compared")
    return Fault(f"the driver is {version}") if old else Fine(f"driver {version}")


@NODE.add(
    "gpu-module",
    "blocked",
    "the loaded NVIDIA module is the installed driver's, and the card has it",
    remedy="reboot",
    source="nvidia-smi: `Driver/library version mismatch` after an update without a reboot",
)
def _module(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    # A card that is not needed may be given to a virtual machine.
    lacking = len(s.facts.gpus) < (s.gpus_needed or 1)
    for card in s.facts.pci_accelerators if lacking else ():
        if card.vendor == "nvidia" and card.driver != "nvidia":
            lent = "take the card back from the virtual machine that has it: out of vfio-pci's ids, and reboot"
            return Fault(
                f"the card at {card.address} has {f'the driver {card.driver}' if card.driver else 'no driver'}",
                remedy=lent if card.driver == "vfio-pci" else "install NVIDIA's driver, blacklist nouveau, and reboot",
            )
    driver = s.facts.nvidia_driver
    if driver is None:
        return Unknown("there is no NVIDIA driver")
    if driver.version and driver.module_version and driver.version != driver.module_version:
        return Fault(f"module {driver.module_version} is loaded and driver {driver.version} is installed")
    mismatch = s.facts.problem("gpus")
    if mismatch and "mismatch" in mismatch.lower():
        return Fault(mismatch)
    return Fine(f"module {driver.module_version or 'unknown'}, driver {driver.version or 'unknown'}")


@NODE.add(
    "gpu-next-boot",
    "slow",
    "the kernel that boots next has NVIDIA's module too",
    remedy="install the kernel's headers (linux-headers-{kernel}, or kernel-devel-{kernel} on a RHEL-like system), and "
    "`dkms autoinstall -k {kernel}`, or the driver's package again where it has no DKMS",
    source="a host that boots a kernel without the module comes back without GPUs",
)
def _next_boot(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    bootable = [kernel for kernel in s.facts.kernels or () if kernel.bootable]
    if not bootable:
        return Unknown("no kernel with modules was found in /boot")
    told = s.facts.driver.next_kernel if s.facts.driver else None
    newest = next(
        (kernel for kernel in bootable if kernel.release == told),
        max(bootable, key=lambda kernel: _order(kernel.release)),
    )
    if newest.nvidia_module:
        return Fine(f"{newest.release} has NVIDIA's module")
    return Fault(f"{newest.release} boots next and has no NVIDIA module", {"kernel": newest.release})


def _order(release: str) -> list[tuple[int, int, str]]:
    """Return what orders kernels as their numbers do: 6.1.0-9 before 6.1.0-41."""
    parts = release.replace("-", ".").split(".")
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts]


@NODE.add(
    "gpu-busy",
    "slow",
    "no other program computes on the GPUs",
    remedy="stop it: `{command}`",
    source="nvidia-smi --query-compute-apps; the plan counts what others use as taken",
)
def _busy(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    if not s.facts.gpus:
        return Unknown(NONE_SEEN)
    ours = {s.unit, *s.sidecar_ports.values()}
    users = [(gpu, user) for gpu in _used(s) for user in gpu.processes]
    others = [(gpu, user) for gpu, user in users if user.unit not in ours]
    if not others:
        return Fine("our own rank alone uses them" if users else "no program uses them")
    listed = ", ".join(
        f"GPU {gpu.index}: {user.name or 'a program'} pid {user.pid} ({user.unit or 'no unit'}"
        f"{f', {user.memory_mib} MiB' if user.memory_mib is not None else ''})"
        for gpu, user in others
    )
    unit = others[0][1].unit or ""
    return Fault(
        listed,
        {"command": f"systemctl stop {unit}" if unit.endswith(".service") else f"kill {others[0][1].pid}"},
    )


@NODE.add(
    "gpu-ecc",
    # No more: the card computes on, the damaged page being set aside (NVIDIA GPU memory error management), and a rank
    # starts on it or says why not.
    "slow",
    "no uncorrected memory error since the driver was loaded",
    remedy="nvidia-smi --gpu-reset -i {gpu}, or reboot; if they come back, replace the card",
    source="NVIDIA GPU memory error management: an uncorrected error needs a reset before the row is remapped",
)
def _ecc(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    if not s.facts.gpus:
        return Unknown(NONE_SEEN)
    bad = [gpu for gpu in _used(s) if gpu.ecc_uncorrected]
    if bad:
        listed = ", ".join(f"GPU {gpu.index}: {gpu.ecc_uncorrected} uncorrected errors" for gpu in bad)
        return Fault(listed, {"gpu": bad[0].index})
    with_ecc = [gpu for gpu in _used(s) if gpu.ecc_uncorrected is not None]
    return Fine("no uncorrected errors" if with_ecc else "the cards do not count errors")


@NODE.add(
    "gpu-inforom",
    "slow",
    "nvidia-smi warns of nothing",
    remedy="nvidia-smi -q shows more; a damaged infoROM means: replace the card when you can",
    source="nvidia-smi, exit status 14",
)
def _inforom(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    warning = s.facts.problem("gpus.inforom")
    return Fault(warning) if warning else Fine("nvidia-smi warns of nothing")


@NODE.add(
    "gpu-persistence",
    "slow",
    "the driver stays loaded between runs",
    # Not nvidia-persistenced: Ubuntu's unit starts it with --no-persistence-mode.
    remedy="nvidia-smi -pm 1, which holds until the next boot; ppdeploy_gpu_persistence: true has it set at each",
    source="NVIDIA driver persistence: without it each start initialises the cards, which takes seconds",
)
def _persistence(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    if not s.facts.gpus:
        return Unknown(NONE_SEEN)
    off = [str(gpu.index) for gpu in _used(s) if gpu.persistence_mode is False]
    return Fault(f"persistence mode is off on GPU {', '.join(off)}") if off else Fine("persistence mode is on")


@NODE.add(
    "gpu-mig",
    "blocked",
    "no card is cut into MIG slices",
    remedy="nvidia-smi -i {gpu} -mig 0, and reset the card",
    source="ppdeploy counts whole cards; CUDA shows one MIG slice to a process",
)
def _mig(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    cut = [gpu.index for gpu in _used(s) if gpu.mig_enabled]
    return Fault(f"GPU {cut[0]} has MIG on", {"gpu": cut[0]}) if cut else Fine("no card has MIG on")


@NODE.add(
    "gpu-pcie",
    "slow",
    "each card has all PCIe lanes that it can have",
    remedy="seat the card anew, or put it into a slot with {lanes} lanes",
    source="nvidia-smi pcie.link.width; the generation falls on an idle card, the width does not",
)
def _pcie(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    known = [gpu for gpu in _used(s) if gpu.pcie_width_current and gpu.pcie_width_max]
    if not known:
        return Unknown("no card tells its PCIe width")
    narrow = [gpu for gpu in known if (gpu.pcie_width_current or 0) < (gpu.pcie_width_max or 0)]
    if narrow:
        listed = ", ".join(f"GPU {g.index} has x{g.pcie_width_current} of x{g.pcie_width_max}" for g in narrow)
        return Fault(listed, {"lanes": narrow[0].pcie_width_max})
    return Fine(", ".join(f"GPU {gpu.index} x{gpu.pcie_width_current}" for gpu in known))


@NODE.add(
    "gpu-kinds",
    "slow",
    "the GPUs of one node are of one kind",
    remedy="put cards of one kind into a node: the slowest and smallest sets the pace of its tensor parallel group",
    source="vLLM: the ranks of a tensor parallel group do the same work in step",
)
def _kinds(s: NodeSituation) -> Answer:
    if s.device != "cuda":
        return Unknown(NO_GPU)
    used = _used(s)
    if not used:
        return Unknown(NONE_SEEN)
    kinds = sorted({gpu.name for gpu in used})
    return Fault(f"the node uses {' and '.join(kinds)}") if len(kinds) > 1 else Fine(kinds[0])
