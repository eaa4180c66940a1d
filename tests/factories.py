"""Realistic facts for tests of the plan, render and checks: change one thing, the rest stays true.

Host number N of a cluster is 192.0.2.(10+N) on its management NIC `eno1`, which has the default route, and
198.51.100.(10+N) on its fabric NIC `enp1s0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ppdeploy.facts import (
    Clock,
    Cpu,
    DefaultRoute,
    DriverInstallation,
    Gpu,
    GpuProcess,
    Identity,
    Listener,
    Memory,
    ModelFolder,
    Nic,
    NicAddress,
    NicCounters,
    NicKind,
    NodeFacts,
    NumaNode,
    NvidiaDriver,
    OperatingSystem,
    Package,
    PathSpace,
    PciAccelerator,
    Problem,
    Python,
    ResolvedAddress,
    Sysctl,
    User,
)

GIB = 1024**3

GPU_KINDS: dict[str, tuple[str, int, str, int]] = {
    "T4": ("Tesla T4", 15360, "7.5", 3),
    "RTX 3060": ("NVIDIA GeForce RTX 3060", 12288, "8.6", 4),
    "RTX 3090": ("NVIDIA GeForce RTX 3090", 24576, "8.6", 4),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", 24564, "8.9", 4),
    "RTX 5090": ("NVIDIA GeForce RTX 5090", 32607, "12.0", 5),
    "A100": ("NVIDIA A100-SXM4-80GB", 81920, "8.0", 4),
    "H200": ("NVIDIA H200", 143771, "9.0", 5),
    "GTX 1080 Ti": ("NVIDIA GeForce GTX 1080 Ti", 11264, "6.1", 3),
}
"""Kind -> name, memory in MiB, compute capability, PCIe generation, as nvidia-smi prints them."""


def make_gpu(
    index: int = 0,
    kind: str = "RTX 4090",
    *,
    driver: str = "580.95.05",
    processes: Sequence[GpuProcess] = (),
    **changes: Any,
) -> Gpu:
    """Return a healthy idle GPU of a kind of `GPU_KINDS`; `changes` replace fields."""
    name, memory, capability, generation = GPU_KINDS[kind]
    datacentre = not name.startswith("NVIDIA GeForce")
    values: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-00000000-0000-4000-8000-{index:012x}",
        "name": name,
        "memory_total_mib": memory,
        "memory_shared": False,
        "memory_used_mib": 1,
        "driver_version": driver,
        "compute_capability": capability,
        "pci_address": f"00000000:{index + 1:02X}:00.0",
        "pcie_gen_current": generation,
        "pcie_gen_max": generation,
        "pcie_width_current": 16,
        "pcie_width_max": 16,
        "ecc_enabled": True if datacentre else None,
        "ecc_uncorrected": 0 if datacentre else None,
        "persistence_mode": True,
        "mig_enabled": False if kind in ("A100", "H200") else None,
        "processes": tuple(processes),
    }
    return Gpu(**{**values, **changes})


def make_nic(
    name: str = "enp1s0",
    *addresses: str,
    index: int = 2,
    speed_mbit: int | None = 10000,
    mtu: int = 1500,
    kind: NicKind = "ethernet",
    driver: str | None = "ixgbe",
    wireless: bool = False,
    up: bool = True,
    **changes: Any,
) -> Nic:
    """Return a NIC with addresses such as `198.51.100.11/24`; a wireless or virtual one gets what fits."""
    virtual = kind not in ("ethernet", "loopback")
    values: dict[str, Any] = {
        "name": name,
        "index": index,
        "mac": f"02:00:5e:00:53:{index:02x}",
        "addresses": tuple(make_address(a) for a in addresses),
        "mtu": mtu,
        "operstate": "up" if up else "down",
        "carrier": True if up else None,
        "speed_mbit": speed_mbit if up and not wireless else None,
        "duplex": "full" if up and not wireless else None,
        "driver": "iwlwifi" if wireless else None if virtual else driver,
        "kind": kind,
        "virtual": virtual,
        "wireless": wireless,
        "usb": False,
        "master": None,
        "parent": None,
        "counters": NicCounters(rx_errors=0, rx_crc_errors=0, rx_dropped=0, tx_errors=0, tx_dropped=0, collisions=0),
    }
    return Nic(**{**values, **changes})


def make_address(text: str) -> NicAddress:
    """Return the NicAddress of `ADDRESS/PREFIX`, with the scope that the kernel would give it."""
    address, prefix = text.split("/")
    scope = "host" if address.startswith("127.") or address == "::1" else "global"
    return NicAddress(address=address, prefix=int(prefix), scope="link" if address.startswith("fe80:") else scope)


def loopback() -> Nic:
    """Return the NIC that every host has."""
    return make_nic(
        "lo",
        "127.0.0.1/8",
        "::1/128",
        index=1,
        mtu=65536,
        kind="loopback",
        driver=None,
        mac="00:00:00:00:00:00",
        operstate="unknown",
        speed_mbit=None,
        duplex=None,
    )


def make_facts(
    name: str = "node1",
    *,
    number: int = 1,
    gpus: int | Sequence[Gpu] = 0,
    gpu: str = "RTX 4090",
    driver: str = "580.95.05",
    cores: int = 16,
    memory_gib: float = 64,
    management: str | None = None,
    management_speed_mbit: int = 1000,
    fabric: str | None = None,
    fabric_name: str = "enp1s0",
    fabric_speed_mbit: int = 10000,
    mtu: int = 1500,
    nics: Sequence[Nic] | None = None,
    extra_nics: Sequence[Nic] = (),
    loopback_name: bool = False,
    machine: Literal["x86_64", "aarch64"] = "x86_64",
    disks: dict[str, float] | None = None,
    listeners: Sequence[Listener] = (),
    models: Sequence[ModelFolder] = (),
    problems: Sequence[Problem] = (),
    **changes: Any,
) -> NodeFacts:
    """Return the facts of a healthy Debian 12 host with a management and a fabric NIC.

    `gpus` is a number of GPUs of kind `gpu`, or the GPUs themselves. `management` and `fabric` are
    `ADDRESS/PREFIX` (default: by host `number`); `nics` replaces both NICs, `extra_nics` adds to them.
    `loopback_name` is Debian's `127.0.1.1 HOST`. `disks` maps a path to its free GiB. `changes` replace whole
    fields of NodeFacts.
    """
    management = management or f"192.0.2.{10 + number}/24"
    fabric = fabric or f"198.51.100.{10 + number}/24"
    cards = tuple(make_gpu(i, gpu, driver=driver) for i in range(gpus)) if isinstance(gpus, int) else tuple(gpus)
    own = (
        make_nic("eno1", management, speed_mbit=management_speed_mbit, mtu=mtu, driver="igc"),
        make_nic(fabric_name, fabric, index=3, speed_mbit=fabric_speed_mbit, mtu=mtu),
    )
    all_nics = (loopback(), *(own if nics is None else nics), *extra_nics)
    total = int(memory_gib * GIB)
    resolved = "127.0.1.1" if loopback_name else management.split("/")[0]
    space = {"/opt/ppdeploy": 200.0, "/var/lib/ppdeploy": 200.0} if disks is None else disks
    values: dict[str, Any] = {
        "schema_version": 1,
        "elapsed_s": 0.3,
        "problems": tuple(problems),
        "clock": Clock(node_time=1_800_000_000.4, controller_time=1_800_000_000.0, offset_s=0.4),
        "identity": Identity(
            hostname=name,
            addresses=(ResolvedAddress(address=resolved, loopback=loopback_name),),
            machine_id=f"{number:032x}",
            boot_id=f"00000000-0000-4000-8000-{number:012x}",
        ),
        "user": User(name="root", uid=0, login="admin"),
        "os": OperatingSystem(
            id="debian",
            id_like=(),
            version_id="12",
            pretty_name="Debian GNU/Linux 12 (bookworm)",
            kernel="6.1.0-41-amd64" if machine == "x86_64" else "6.1.0-41-arm64",
            machine=machine,
            glibc="2.36",
            systemd_version=252,
            system_state="running",
            selinux="disabled",
            apparmor="enabled",
        ),
        "cpu": Cpu(
            model="AMD Ryzen 9 7950X 16-Core Processor",
            logical=2 * cores,
            usable=2 * cores,
            usable_list=f"0-{2 * cores - 1}",
            cores=cores,
            sockets=1,
            flags=("avx2", "avx512f") if machine == "x86_64" else ("asimd",),
            numa=(NumaNode(node=0, cpus=f"0-{2 * cores - 1}", memory_bytes=total),),
        ),
        "memory": Memory(total_bytes=total, available_bytes=int(total * 0.9), swap_total_bytes=0, swap_free_bytes=0),
        "gpus": cards,
        "nvidia_driver": NvidiaDriver(version=driver, cuda_version="13.0", module_version=driver) if cards else None,
        "pci_accelerators": tuple(
            PciAccelerator(
                address=(c.pci_address or "")[4:].lower(),
                vendor="nvidia",
                vendor_id="0x10de",
                device_id="0x2684",
                driver="nvidia",
            )
            for c in cards
        ),
        "nics": all_nics,
        "default_routes": (DefaultRoute(family=4, interface=all_nics[1].name, gateway="192.0.2.1", metric=0),),
        "peer_routes": (),
        "rdma_devices": (),
        "verbs_library": None,
        "sysctl": Sysctl(ip_local_port_range=(32768, 60999), ip_local_reserved_ports=""),
        "pythons": (Python(path="/usr/bin/python3.11", version="3.11.2"),),
        "tools": {"rsync": "/usr/bin/rsync", "ip": "/usr/sbin/ip", "ethtool": "/usr/sbin/ethtool"},
        "rsync_version": "3.2.7",
        "disks": tuple(
            PathSpace(
                path=path,
                measured_at="/",
                mount_device=2049,
                total_bytes=500 * GIB,
                free_bytes=int(free * GIB),
            )
            for path, free in space.items()
        ),
        "listeners": tuple(listeners),
        "pipelines": {},
        "files": {},
        "venvs": (),
        "models": tuple(models),
    }
    if not cards and "problems" not in changes:
        values["problems"] = (*problems, Problem(fact="gpus", reason="nvidia-smi is not installed"))
    return NodeFacts(**{**values, **changes})


def make_package(name: str, version: str = "580.95.05-1", state: str = "installed", *, held: bool = False) -> Package:
    """Return a package of a host."""
    return Package(name=name, version=version, state=state, held=held)


def make_installation(**changes: Any) -> DriverInstallation:
    """Return how the driver of a Debian host is that has NVIDIA's packages, held; `changes` replace fields."""
    values: dict[str, Any] = {
        "manager": "apt",
        "packages": (make_package("linux-image-amd64", "6.1"), make_package("nvidia-open", held=True)),
        "broken": (),
        "lock": None,
        "components": ("contrib", "main"),
        "unattended_upgrades": True,
        "dkms": (),
        "loaded": ("nvidia",),
        "library_version": "580.95.05",
        "runfile": False,
        "secure_boot": False,
        "signing_certificate": None,
        "signing_enrolled": None,
        "next_kernel": None,
        "initramfs": "update-initramfs",
        "vendor": None,
    }
    return DriverInstallation(**{**values, **changes})


def make_cluster(size: int = 2, **options: Any) -> dict[str, NodeFacts]:
    """Return facts of hosts node1, node2, ..., all made by `make_facts` with the same options."""
    return {f"node{n}": make_facts(f"node{n}", number=n, **options) for n in range(1, size + 1)}
