"""Facts: what a node reports of itself, as `plugins/modules/ppdeploy_facts.py` returned it.

Nothing here touches a host. Names carry their unit: `_bytes`, `_mib`, `_mbit` (Mbit/s), `_s` (seconds). A
fact that the node could not read is None and has an entry with the reason in `NodeFacts.problems`, so "there
is none" (an empty tuple) and "nobody knows" (None) never look alike.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ppdeploy.errors import InputError

SCHEMA_VERSION: Final = 1
"""Raised whenever a field changes its meaning or goes; the module reports the version that it writes."""

NO_LIMIT: Final = 2**63 - 1
"""What stands for systemd's `infinity`."""

FILE_KIND: Final = "ppdeploy-facts"
"""What a saved facts file says it is, so that another JSON file is not taken for one."""

NicKind = Literal[
    "loopback",
    "ethernet",
    "infiniband",
    "bridge",
    "bond",
    "vlan",
    "veth",
    "tun",
    "wireguard",
    "macvlan",
    "dummy",
    "tunnel",
    "other",
]
"""`ethernet` is a device of a bus (Wi-Fi too, see `Nic.wireless`); all others are made by software."""


class _Fact(BaseModel):
    """Base of all facts: immutable, no unknown fields, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Problem(_Fact):
    """A fact that could not be read."""

    fact: str
    """Dotted name of the fact, such as `gpus` or `os.systemd_version`."""
    reason: str
    """One sentence, for people."""


class Clock(_Fact):
    """The node's wall clock."""

    node_time: float
    """Seconds since 1970, read as the first thing that the module does."""
    controller_time: float | None
    """What the controller's clock said when it made the call; None when the caller gave none."""
    offset_s: float | None
    """node_time - controller_time. It holds the time from there to here too (login, start of Python: 0.2 to
    1.5 s, several on a busy controller), so a right clock shows a small positive offset: judge by
    `offset_bounds`."""
    synchronised: bool | None = None
    """Whether NTP keeps the kernel's clock right (adjtimex); None: not known."""

    def offset_bounds(self, received: float) -> tuple[float, float] | None:
        """Return the smallest and the largest offset in seconds that the node's clock can have.

        `received` is the controller's clock at any time after the answer came: the node's was read between
        the two, so it is surely wrong when 0 lies outside. None when the call gave no controller_time.
        """
        if self.controller_time is None:
            return None
        return self.node_time - received, self.node_time - self.controller_time


class ResolvedAddress(_Fact):
    """An address that the node's own host name resolves to, on the node."""

    address: str
    loopback: bool
    """127.0.0.0/8 or ::1, as Debian's `127.0.1.1 HOST` in /etc/hosts gives."""


class Identity(_Fact):
    """Who the node is."""

    hostname: str
    addresses: tuple[ResolvedAddress, ...] | None
    """What `hostname` resolves to (getaddrinfo); None when it does not resolve."""
    machine_id: str | None
    """/etc/machine-id; equal on two nodes when one was cloned from the other."""
    boot_id: str | None
    """Changes at each boot."""

    @property
    def resolves_to_loopback(self) -> bool:
        """True when the host's own name leads to a loopback address, in any place."""
        return any(a.loopback for a in self.addresses or ())


class User(_Fact):
    """As whom the module ran."""

    name: str | None
    uid: int
    """Effective user id; 0 after `become`. Anything else cannot see other users' processes and sockets."""
    login: str | None
    """The user that became root (SUDO_USER, DOAS_USER), else None."""


class OperatingSystem(_Fact):
    """The operating system, from /etc/os-release, uname and systemd."""

    id: str | None
    """Such as `debian`, `ubuntu`, `rocky`."""
    id_like: tuple[str, ...]
    """Its relatives, such as `('rhel', 'centos', 'fedora')`."""
    version_id: str | None
    """Such as `12` or `24.04`; rolling ones have none."""
    pretty_name: str | None
    kernel: str
    """uname -r."""
    machine: str
    """uname -m: `x86_64`, `aarch64`."""
    glibc: str | None
    """Such as `2.36`; None on another C library."""
    systemd_version: int | None
    """Such as 252; None when systemd is not the service manager."""
    system_state: str | None
    """`systemctl is-system-running`: running, degraded, starting, maintenance, stopping, offline, unknown."""
    selinux: Literal["enforcing", "permissive", "disabled"] | None
    apparmor: Literal["enabled", "disabled"] | None

    @property
    def package_manager(self) -> Literal["apt", "dnf"] | None:
        """What installs packages: None where the system is neither Debian's kin nor Red Hat's."""
        kin = {self.id or "", *self.id_like}
        if kin & {"debian", "ubuntu"}:
            return "apt"
        return "dnf" if kin & {"rhel", "fedora", "centos", "rocky", "almalinux", "ol"} else None

    @property
    def release(self) -> str:
        """The release that packages are made for, such as `debian 12`, `ubuntu 24.04` or `rocky 9`.

        Of Red Hat's kin it is the major one: a machine goes from 9.4 to 9.5 by an ordinary update, and what was built
        for the one runs on the other.
        """
        version = self.version_id or ""
        if self.package_manager == "dnf":
            version = version.partition(".")[0]
        return f"{self.id or 'an unknown system'} {version}".strip()


class NumaNode(_Fact):
    """A NUMA node that has memory or CPUs."""

    node: int
    cpus: str
    """A kernel list such as `0-7,16-23`; empty for memory without CPUs."""
    memory_bytes: int | None


class Cpu(_Fact):
    """The node's processors."""

    model: str | None
    logical: int
    """Online logical CPUs."""
    usable: int
    """Logical CPUs that this process may run on (a container or cpuset may allow fewer)."""
    usable_list: str
    """The same as a kernel list, such as `0-15`."""
    cores: int | None
    """Physical cores, all sockets."""
    sockets: int | None
    flags: tuple[str, ...]
    """Those that vLLM's kernels care about: avx2, avx512f, avx512_bf16, avx512_vnni, amx_bf16, amx_tile,
    asimd, bf16, sve."""
    numa: tuple[NumaNode, ...]
    governor: str | None = None
    """Frequency governor of the first CPU, such as `schedutil`; None where the kernel scales none."""
    scaling_driver: str | None = None
    """Such as `intel_pstate`, whose `powersave` is no saving at all."""
    governors: str | None = None
    """That of each frequency policy, `policy0=schedutil policy4=schedutil`; None where none can be set."""
    governors_available: tuple[str, ...] = ()


class Memory(_Fact):
    """Main memory, from /proc/meminfo."""

    total_bytes: int
    available_bytes: int
    """What a new program can have without swapping, as the kernel estimates it."""
    swap_total_bytes: int
    swap_free_bytes: int
    shm_total_bytes: int | None = None
    """Size of /dev/shm; None when it is not mounted apart, or not known."""


class GpuProcess(_Fact):
    """A process that has a compute context on a GPU."""

    pid: int
    name: str | None
    """The program, as the driver names it."""
    memory_mib: int | None
    """None when the driver does not say (a MIG slice, a container)."""
    unit: str | None
    """The systemd unit or scope that the process belongs to; else its control group's path."""


class Gpu(_Fact):
    """An NVIDIA GPU, from nvidia-smi."""

    index: int
    uuid: str
    """`GPU-...`: the same at each boot and in each slot."""
    name: str
    """Such as `NVIDIA GeForce RTX 4090`."""
    memory_total_mib: int
    memory_shared: bool
    """The GPU uses main memory (GB10, Jetson): the total is main memory's, of which the system needs some."""
    memory_used_mib: int | None
    driver_version: str
    compute_capability: str | None
    """Such as `8.9`."""
    pci_address: str | None
    """Such as `00000000:01:00.0`."""
    pcie_gen_current: int | None
    """An idle card may show a lower generation than under load; width does not change so."""
    pcie_gen_max: int | None
    pcie_width_current: int | None
    pcie_width_max: int | None
    ecc_enabled: bool | None
    """None when the card has no ECC."""
    ecc_uncorrected: int | None
    """Errors since the driver was loaded; None when ECC is off or absent."""
    persistence_mode: bool | None
    mig_enabled: bool | None
    """None when the card has no MIG."""
    processes: tuple[GpuProcess, ...]


class PciAccelerator(_Fact):
    """A display or compute device on the PCI bus: how an AMD card, or one without its driver, is seen."""

    address: str
    vendor: Literal["nvidia", "amd", "intel"]
    vendor_id: str
    """Such as `0x10de`."""
    device_id: str
    driver: str | None
    """Kernel driver bound to it: nvidia, nouveau, vfio-pci, amdgpu; None when there is none."""


class NvidiaDriver(_Fact):
    """The NVIDIA driver as a whole."""

    version: str | None
    """What nvidia-smi, so the user-space library, says."""
    cuda_version: str | None
    """The newest CUDA that the driver runs, such as `13.0`."""
    module_version: str | None
    """The kernel module that is loaded; another one than `version` means that an update waits for a
    reboot."""


class NicAddress(_Fact):
    """An address of a NIC."""

    address: str
    prefix: int
    scope: str
    """global, link or host."""

    @property
    def interface(self) -> IPv4Interface | IPv6Interface:
        """The address with its network, as the standard library's type."""
        return ip_interface(f"{self.address}/{self.prefix}")


class NicCounters(_Fact):
    """Faults since the NIC came up, from /sys/class/net/NIC/statistics."""

    rx_errors: int
    rx_crc_errors: int
    rx_dropped: int
    tx_errors: int
    tx_dropped: int
    collisions: int


class Rings(_Fact):
    """The rings of a NIC, in packets: how many each holds now and at most."""

    rx: int
    rx_max: int
    tx: int
    tx_max: int


class NicTuning(_Fact):
    """What can be tuned of a NIC; None: its driver does not have it, or this host may not set it."""

    rx_queues: int
    """Receive queues, each of which one core serves."""
    rings: Rings | None
    rx_usecs: int | None
    """How long the NIC may hold back an interrupt for more packets to come, in microseconds."""
    adaptive_rx: bool | None
    """Whether the driver chooses that time itself."""
    rps: str | None
    """The CPUs that packets of each receive queue are spread over, as masks: `rx-0=0 rx-1=0`; 0: not spread."""
    rfs: str | None
    """Flows that each receive queue remembers the CPU of."""
    min_mtu: int | None
    max_mtu: int | None
    qdisc: str | None
    """The root queueing discipline, such as `mq` or `fq_codel`."""
    manager: Literal["networkd", "NetworkManager", "ifupdown"] | None
    """Who configures it (netplan writes files for one of the first two)."""
    network_file: str | None
    """With networkd, the .network file that does."""


class Nic(_Fact):
    """A network interface."""

    name: str
    index: int
    mac: str | None
    addresses: tuple[NicAddress, ...]
    mtu: int
    operstate: str
    """up, down, unknown (loopback, tun), dormant, lowerlayerdown, ..."""
    carrier: bool | None
    """Whether the link has a partner; None when the NIC is down."""
    speed_mbit: int | None
    """Negotiated, in Mbit/s; None when unknown or down. A veth or virtio NIC says what its driver
    pretends."""
    duplex: Literal["full", "half"] | None
    driver: str | None
    kind: NicKind
    virtual: bool
    """Made by software. A veth with an address is what a container has for its own NIC, so this alone rules
    nothing out."""
    wireless: bool
    usb: bool
    """Sits on a USB bus, as many 2.5 Gbit adapters do."""
    master: str | None
    """The bridge or bond that it belongs to."""
    parent: str | None
    """The NIC that it sits on (vlan, macvlan)."""
    counters: NicCounters | None
    max_speed_mbit: int | None = None
    """The fastest rate of its link modes, in Mbit/s; None when the driver lists none, or not known."""
    eee: bool | None = None
    """Whether Energy-Efficient Ethernet is on; None when it has none, or not known."""
    carrier_changes: int | None = None
    """How often the link came or went since the NIC was made; None: not known."""
    tuning: NicTuning | None = None
    """None: not known."""

    @property
    def up(self) -> bool:
        """True when traffic can pass: operstate up, or unknown with a carrier, as many virtual NICs say."""
        return self.operstate == "up" or (self.operstate == "unknown" and self.carrier is not False)


class DefaultRoute(_Fact):
    """A default route of the main routing table."""

    family: Literal[4, 6]
    interface: str
    gateway: str | None
    metric: int


class PeerRoute(_Fact):
    """How the node would send to a peer; nothing is sent to find out."""

    peer: str
    interface: str | None
    """None when there is no route; `problem` says why."""
    source: str | None
    """The address that a connection would come from."""
    gateway: str | None
    """None when the peer is on the link."""
    neighbour: str | None
    """State of its neighbour (ARP) entry: REACHABLE, STALE, FAILED, ...; None when the peer was never spoken
    to."""
    problem: str | None


class Gid(_Fact):
    """An address of an RDMA port."""

    index: int
    address: str
    """As an IPv6 address: an IPv4 one is mapped into it."""
    kind: str
    """IB/RoCE v1 or RoCE v2."""
    interface: str | None
    """The NIC that has the address, on Ethernet."""


class RdmaDevice(_Fact):
    """An RDMA device (InfiniBand, RoCE)."""

    name: str
    link_layer: str | None
    """Ethernet or InfiniBand."""
    state: str | None
    """ACTIVE, DOWN, ..."""
    interfaces: tuple[str, ...]
    """The NICs of the same PCI device."""
    gids: tuple[Gid, ...]
    """The addresses of its first port that are in use."""


class Python(_Fact):
    """A Python interpreter on the node's PATH or in the usual folders."""

    path: str
    version: str
    """Such as `3.11.7`."""


class PathSpace(_Fact):
    """Room on the file system that holds a path."""

    path: str
    measured_at: str
    """The nearest parent that exists."""
    mount_device: int
    """st_dev: equal for two paths on one file system, whose needs add up."""
    total_bytes: int
    free_bytes: int
    """For unprivileged users."""


class Listener(_Fact):
    """A listening TCP socket on a port that was asked for."""

    port: int
    address: str
    """`0.0.0.0` and `::` are all addresses."""
    pid: int | None
    """None when the module may not see the owner (not root, or in another container)."""
    process: str | None
    """Name of the process (comm)."""
    command: str | None
    """First word of its command line; never the arguments, which may hold secrets."""
    unit: str | None
    """Its systemd unit or scope, such as `ppdeploy-rank@tiny.service`; else its control group's path."""


class FileState(_Fact):
    """A file, folder or link."""

    path: str
    type: Literal["file", "directory", "link", "other"]
    mode: str
    """Four octal digits, such as `0644`."""
    owner: str
    """Name, or the number when it has none."""
    group: str
    size: int
    """Bytes."""
    sha256: str | None
    """None for anything but a readable file (a link's target is not followed)."""
    target: str | None
    """Where a link points, as written in it."""


class Release(_Fact):
    """A release folder on the node."""

    digest: str
    """Its folder's name."""
    files: tuple[FileState, ...]


class UnitState(_Fact):
    """A systemd unit, from one `systemctl show`."""

    load_state: str
    """loaded, not-found, ..."""
    active_state: str
    """active, inactive, failed, activating, ..."""
    sub_state: str
    result: str
    """success, exit-code, oom-kill, ..."""
    main_pid: int
    """0 when it does not run."""
    restarts: int
    active_since_monotonic_us: int
    """Microseconds of the node's monotonic clock; 0 when it never ran in this boot."""
    unit_file_state: str
    """enabled, disabled, ...; empty when there is no such unit."""
    needs_daemon_reload: bool
    limit_memlock_bytes: int | None = None
    """Memory that the unit may pin, `NO_LIMIT` for any; None: not known."""
    limit_nofile: int | None = None
    """Open files that the unit may have."""


class PipelineState(_Fact):
    """What of a pipeline lies on the node."""

    current: str | None
    """Digest that the link `current` leads to; None when there is no link."""
    previous: str | None
    started_release: str | None
    """Digest of the release that the agent started the node's rank by last, in this boot; None: it started none."""
    releases: tuple[Release, ...]
    unit_files: tuple[FileState, ...]
    """Files of ours in /etc/systemd/system that this pipeline uses: the generic unit and the drop-in link."""
    unit: UnitState | None
    """State of `ppdeploy-rank@PIPELINE.service`; None when systemd did not answer."""


class Venv(_Fact):
    """A folder of /opt/ppdeploy/venvs."""

    name: str
    """16 hex digits of the lock digest."""
    marker: dict[str, Any] | None
    """`.ppdeploy.json`, written last by the install; None means that the folder is unfinished or damaged."""
    python: str | None
    """Version of its interpreter, from pyvenv.cfg."""
    packages: dict[str, str]
    """Versions of what must be equal on all nodes, by its installed metadata: vllm, torch, NCCL."""


class ModelFolder(_Fact):
    """A folder of the model store."""

    name: str
    digest: str | None
    """Manifest digest that `.ppdeploy-manifest.json` names; None when there is no readable manifest."""
    verified: bool
    """Every file has the size, mtime and inode that it had when its sha256 was checked."""
    deviation: str | None
    """The first file that has not, and in what; None when verified."""
    size_bytes: int | None
    """Sum of the sizes that the manifest names; without one, of what lies there. None: neither can be read."""


class Sysctl(_Fact):
    """Kernel settings that the plan depends on."""

    ip_local_port_range: tuple[int, int] | None
    """Ports that outgoing connections take; a listener's port inside it can be taken by chance."""
    ip_local_reserved_ports: str | None
    """Ports kept out of it, as the kernel lists them, such as `29500-29501`."""
    tcp_rmem_max: int | None = None
    """Bytes that the receive buffer of a TCP connection may grow to."""
    tcp_wmem_max: int | None = None
    arp_ignore: int | None = None
    """net.ipv4.conf.all.arp_ignore: 0 answers for any address of the host on any NIC."""
    arp_filter: int | None = None
    max_user_namespaces: int | None = None
    """Of each user, root too; 0 keeps systemd from starting a unit with `PrivateUsers=`. None: the kernel has none."""
    tunable: dict[str, str] = {}
    """Settings that nic_tuning may set and that can be set here, by name; a container's kernel keeps some from it."""
    pacing_modules: tuple[str, ...] = ()
    """Of sch_fq and tcp_bbr, those that the kernel has."""


class Kernel(_Fact):
    """A kernel whose modules are installed."""

    release: str
    """As `uname -r` would print it."""
    bootable: bool
    """/boot has its image."""
    nvidia_module: bool
    """NVIDIA's module was built for it."""
    headers: bool | None = None
    """What modules are built against is there for it; None: not known."""


class Package(_Fact):
    """A package of the host's package manager, of which more than its configuration is there."""

    name: str
    version: str
    state: str
    """dpkg's: installed, unpacked, half-installed, half-configured, ...; always installed of an RPM."""
    held: bool
    """No upgrade takes another version (`apt-mark hold`)."""


class PackageLock(_Fact):
    """Who installs packages at this moment."""

    file: str
    """What it has locked."""
    pid: int | None
    """None for a process of another container."""
    process: str | None
    unit: str | None


class DkmsModule(_Fact):
    """A kernel module of NVIDIA's that DKMS builds."""

    name: str
    version: str
    kernel: str | None
    """None while it was built for none."""
    state: str
    """added, built or installed."""


class VendorImage(_Fact):
    """An image or a board of NVIDIA's own, which brings its driver with it."""

    kind: Literal["dgx", "dgx-spark", "jetson", "gb10"]
    name: str
    version: str | None


class DriverInstallation(_Fact):
    """How the NVIDIA driver is installed, and what an installation of it would meet."""

    manager: Literal["apt", "dnf"] | None
    packages: tuple[Package, ...]
    """Those with the driver, DKMS and kernels' metapackages."""
    broken: tuple[Package, ...]
    """Packages of any kind whose installation did not end."""
    lock: PackageLock | None
    components: tuple[str, ...]
    """Components of apt's archives, such as `main` and `contrib`."""
    unattended_upgrades: bool | None
    """Whether packages are upgraded without anybody asking for it."""
    dkms: tuple[DkmsModule, ...]
    loaded: tuple[str, ...]
    """Of nvidia, nouveau, nova_core, nvgpu and amdgpu, the kernel modules that are loaded."""
    library_version: str | None
    """Of libcuda on the disk: the version that is installed, whatever is loaded."""
    runfile: bool
    """NVIDIA's own installer (the .run file) installed a driver."""
    secure_boot: bool | None
    """The kernel loads signed modules alone."""
    signing_certificate: str | None
    """The file that holds the certificate which DKMS signs modules with."""
    signing_enrolled: bool | None
    """The firmware trusts it; None: not known, or there is none."""
    next_kernel: str | None
    """What the next boot starts; None: not known."""
    initramfs: Literal["update-initramfs", "dracut"] | None
    """The program that makes the image which a boot starts from."""
    vendor: VendorImage | None


class Rival(_Fact):
    """A process of vLLM or Ray that is in no unit of ours; of several in one unit, the first."""

    pid: int
    kind: Literal["vllm", "ray"]
    unit: str | None


class Tuned(_Fact):
    """What a host had before the role nic_tuning set anything; it is given back from there."""

    interface: str
    """The NIC that is tuned."""
    settings: dict[str, str]
    """By what was set, as plugins/modules/ppdeploy_nic.py names it."""


class Tunnelling(_Fact):
    """What the node can do about an encrypted fabric, and what it has of it."""

    kernel: bool
    """The kernel has WireGuard: loaded, built in, or as a module that it can load."""
    tun: bool
    """/dev/net/tun is there, by which a program makes a tunnel."""
    public_key: str | None
    """Of the private key that apply made on the node; None where there is none."""


class NodeFacts(_Fact):
    """All that one node reports in one call."""

    schema_version: Literal[1]
    elapsed_s: float
    """Wall-clock time that the module took."""
    problems: tuple[Problem, ...]
    clock: Clock
    identity: Identity
    user: User
    os: OperatingSystem
    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...]
    """Empty without GPU, driver or nvidia-smi; `problems` tells which."""
    nvidia_driver: NvidiaDriver | None
    pci_accelerators: tuple[PciAccelerator, ...]
    nics: tuple[Nic, ...]
    default_routes: tuple[DefaultRoute, ...]
    """Lowest metric first, so the one that is used comes first within its family."""
    peer_routes: tuple[PeerRoute, ...]
    """One for each of the `peers` asked for."""
    rdma_devices: tuple[RdmaDevice, ...]
    verbs_library: str | None
    """Where libibverbs.so.1 lies, without which NCCL has no RDMA."""
    sysctl: Sysctl
    pythons: tuple[Python, ...]
    """Newest first."""
    tools: dict[str, str | None]
    """Path of each tool that ppdeploy uses, None when it is not installed."""
    rsync_version: str | None
    disks: tuple[PathSpace, ...]
    """One for each of the `paths` asked for."""
    listeners: tuple[Listener, ...]
    """Who listens on the `ports` asked for."""
    pipelines: dict[str, PipelineState]
    """One for each of the `pipelines` asked for."""
    files: dict[str, FileState | None]
    """One for each of the `files` asked for; None when it does not exist."""
    venvs: tuple[Venv, ...]
    models: tuple[ModelFolder, ...]
    driver: DriverInstallation | None = None
    """None: not asked for (the pipeline runs on cpu), or not known."""
    kernels: tuple[Kernel, ...] | None = None
    """None here and below: not known."""
    rivals: tuple[Rival, ...] | None = None
    tuned: Tuned | None = None
    """What nic_tuning found before it set anything; None: it set nothing."""
    tunnel: Tunnelling | None = None
    """None: not known."""
    firewalls: tuple[str, ...] | None = None
    """Units that filter packets and are active, such as `ufw.service`."""

    @classmethod
    def from_module(cls, host: str, values: Mapping[str, Any]) -> NodeFacts:
        """Read what the module returned on `host`: the task's whole result, or its `facts`.

        Raises InputError naming the host when the task failed there, or when the values are not facts of this
        version.
        """
        if not isinstance(values, Mapping):
            raise InputError("what the module returned is not a mapping", where=f"host {host}", remedy=_RETRY)
        if values.get("unreachable") or values.get("failed") or values.get("skipped"):
            reason = str(values.get("msg") or "the task was skipped")
            raise InputError(f"no facts were read: {reason}", where=f"host {host}", remedy=_RETRY)
        raw = values.get("facts", values)
        try:
            # By way of JSON: Ansible's own string and mapping types become plain ones.
            text = json.dumps(raw)
        except (TypeError, ValueError) as error:
            raise InputError(f"its facts are not plain data: {error}", where=f"host {host}", remedy=_RETRY) from error
        return _validated(f"host {host}", text)

    def nic(self, name: str) -> Nic | None:
        """Return the NIC of that name, or None."""
        return next((n for n in self.nics if n.name == name), None)

    def rank_runs(self, pipeline: str) -> bool:
        """Return whether a rank of the pipeline runs or starts here."""
        state = self.pipelines.get(pipeline)
        return bool(state and state.unit and state.unit.active_state in {"active", "activating"})

    def nic_with(self, address: str) -> Nic | None:
        """Return the NIC that has the address (without prefix), or None."""
        return next((n for n in self.nics if any(a.address == address for a in n.addresses)), None)

    def problem(self, fact: str) -> str | None:
        """Return why `fact`, or a part of it, could not be read; None when it could."""
        return next((p.reason for p in self.problems if p.fact == fact or p.fact.startswith(fact + ".")), None)


_RETRY: Final = "run `ppdeploy check` on this host to see what it answers"


def _validated(where: str, text: str) -> NodeFacts:
    """Return the facts in a JSON text; `where` is what an InputError names as the place."""
    try:
        return NodeFacts.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        told = _told_by_node(text, field)
        if told is not None:
            raise InputError(f"{field} cannot be read there: {told}", where=where, remedy=_RETRY) from error
        more = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
        raise InputError(
            f"these are not facts that this ppdeploy reads: {field}: {first['msg']}{more}",
            where=where,
            remedy="use the ppdeploy_facts module and the ppdeploy package of one version",
        ) from error


def _told_by_node(text: str, field: str) -> str | None:
    """Return the reason that the node itself gives for a field that should have a value and has none."""
    raw = json.loads(text)
    if not isinstance(raw, dict) or raw.get(field, "") is not None:
        return None
    problems = raw.get("problems")
    known = [p for p in problems if isinstance(p, dict)] if isinstance(problems, list) else []
    return next((str(p.get("reason")) for p in known if p.get("fact") == field), None)


def save_facts(path: Path, facts: Mapping[str, NodeFacts]) -> None:
    """Write facts of many hosts as one JSON file, whole or not at all.

    Raises InputError when the file cannot be written.
    """
    document = {
        "kind": FILE_KIND,
        "schema_version": SCHEMA_VERSION,
        "hosts": {host: facts[host].model_dump(mode="json") for host in sorted(facts)},
    }
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(document, stream, indent=1, sort_keys=True)
                stream.write("\n")
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(
            f"the facts cannot be written: {error.strerror}",
            where=str(path),
            remedy="name a folder you may write to",
        ) from error


def load_facts(path: Path) -> dict[str, NodeFacts]:
    """Read a file that `save_facts` wrote.

    Raises InputError naming the file, and the host where one is at fault.
    """
    remedy = "name a file that `ppdeploy plan --save-facts FILE` wrote"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the facts file cannot be read: {error.strerror}", where=str(path), remedy=remedy) from error
    except ValueError as error:
        raise InputError(f"the facts file is not JSON: {error}", where=str(path), remedy=remedy) from error
    hosts = document.get("hosts") if isinstance(document, dict) else None
    if not isinstance(hosts, dict) or document.get("kind") != FILE_KIND:
        raise InputError("this is not a facts file", where=str(path), remedy=remedy)
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"the facts file has version {version}, this ppdeploy reads {SCHEMA_VERSION}",
            where=str(path),
            remedy="take the facts anew with this ppdeploy",
        )
    return {host: _validated(f"{path}, host {host}", json.dumps(values)) for host, values in hosts.items()}
