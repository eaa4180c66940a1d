"""Facts of machines with a card, of many systems, with and without a driver: change one thing, the rest stays true."""

from __future__ import annotations

from typing import Any

from ppdeploy.facts import FileState, NodeFacts, NvidiaDriver, PciAccelerator
from ppdeploy.plan.driver import BLACKLIST, plan_driver
from ppdeploy.plan.types import DriverPlan
from ppdeploy.spec import PipelineVars, Wheelhouse
from tests.factories import make_facts, make_gpu, make_installation, make_package

SYSTEMS: dict[str, tuple[str, str, str, str]] = {
    "debian12": ("debian", "12", "Debian GNU/Linux 12 (bookworm)", "6.1.0-41-amd64"),
    "debian13": ("debian", "13", "Debian GNU/Linux 13 (trixie)", "6.12.57+deb13-amd64"),
    "ubuntu2204": ("ubuntu", "22.04", "Ubuntu 22.04.5 LTS", "6.8.0-90-generic"),
    "ubuntu2404": ("ubuntu", "24.04", "Ubuntu 24.04.4 LTS", "6.8.0-90-generic"),
    "ubuntu2604": ("ubuntu", "26.04", "Ubuntu 26.04 LTS", "7.0.0-30-generic"),
    "rhel9": ("rhel", "9.8", "Red Hat Enterprise Linux 9.8 (Plow)", "5.14.0-687.51.1.el9_8.x86_64"),
    "rocky9": ("rocky", "9.7", "Rocky Linux 9.7 (Blue Onyx)", "5.14.0-611.5.1.el9_7.x86_64"),
    "almalinux10": ("almalinux", "10.1", "AlmaLinux 10.1", "6.12.0-124.8.1.el10_1.x86_64"),
    "rhel10": ("rhel", "10.1", "Red Hat Enterprise Linux 10.1 (Coughlan)", "6.12.0-124.8.1.el10_1.x86_64"),
    "fedora43": ("fedora", "43", "Fedora Linux 43 (Server Edition)", "6.17.8-300.fc43.x86_64"),
    "fedora44": ("fedora", "44", "Fedora Linux 44 (Server Edition)", "6.19.10-300.fc44.x86_64"),
}
"""ID, VERSION_ID and PRETTY_NAME of /etc/os-release as these systems write them, and the form of their kernels."""

META = {
    "debian": "linux-image-amd64",
    "ubuntu": "linux-image-generic",
}

RTX_4090 = "0x2684"


def card(device: str = RTX_4090, driver: str | None = "nouveau", vendor: Any = "nvidia") -> PciAccelerator:
    return PciAccelerator(address="0000:01:00.0", vendor=vendor, vendor_id="0x10de", device_id=device, driver=driver)


def bare(system: str = "debian12", *, cards: Any = None, **changes: Any) -> NodeFacts:
    """Facts of a machine with a card and without a driver; `changes` replace fields of its DriverInstallation."""
    name, version, pretty, kernel = SYSTEMS[system]
    facts = make_facts(pci_accelerators=(card(),) if cards is None else tuple(cards))
    fields = ("gpus", "pipelines", "files", "problems", "nvidia_driver", "kernels", "os")
    own = {field: changes.pop(field) for field in fields if field in changes}
    packages = (
        [make_package(META[name], "1")]
        if name in META
        else [make_package("kernel-core", "1"), make_package("epel-release", "9")]
    )
    values: dict[str, Any] = {
        "manager": "apt" if name in META else "dnf",
        "packages": tuple(packages),
        "loaded": ("nouveau",),
        "library_version": None,
        "next_kernel": kernel,
        "initramfs": "update-initramfs" if name in META else "dracut",
    }
    system_facts = facts.os.model_copy(
        update={"id": name, "version_id": version, "pretty_name": pretty, "kernel": kernel, **own.pop("os", {})}
    )
    state = make_installation(**{**values, **changes})
    return facts.model_copy(update={"os": system_facts, "driver": state, **own})


OURS = {
    BLACKLIST: FileState(
        path=BLACKLIST, type="file", mode="0644", owner="root", group="root", size=1, sha256="0" * 64, target=None
    )
}


def working(system: str = "debian12", version: str = "580.95.05", **changes: Any) -> NodeFacts:
    """Facts of a machine whose driver answers, of NVIDIA's packages."""
    facts = bare(system, cards=[card(driver="nvidia")])
    state = facts.driver
    assert state is not None
    own: dict[str, Any] = {field: changes.pop(field) for field in ("files", "pipelines", "gpus") if field in changes}
    packages = (*state.packages, make_package("nvidia-open", f"{version}-1"), make_package("libcuda1", f"{version}-1"))
    update = {"loaded": ("nvidia",), "library_version": version, "packages": packages, **changes}
    values: dict[str, Any] = {
        "gpus": (make_gpu(0, driver=version),),
        "nvidia_driver": NvidiaDriver(version=version, cuda_version="13.0", module_version=version),
        "driver": state.model_copy(update=update),
        **own,
    }
    return facts.model_copy(update=values)


def plan(facts: NodeFacts, *, bundle: Wheelhouse | None = None, **wants: Any) -> DriverPlan:
    """Return what is decided for a host, with a reboot allowed; a refusal always has a remedy."""
    found = plan_driver(facts, PipelineVars(model="./tiny", **{"allow_reboot": True, **wants}), "chat", bundle)
    assert found.reason
    assert (found.action == "blocked") == bool(found.remedy)
    return found
