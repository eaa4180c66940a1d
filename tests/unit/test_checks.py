"""Every check in a healthy and in a faulty situation: what it says, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ppdeploy.agent import ready
from ppdeploy.facts import (
    DefaultRoute,
    DkmsModule,
    GpuProcess,
    Kernel,
    Listener,
    ModelFolder,
    NicAddress,
    NvidiaDriver,
    PackageLock,
    PciAccelerator,
    Problem,
    RdmaDevice,
    Rival,
    Tuned,
    Venv,
)
from ppdeploy.plan.checks import (
    NODE,
    PAIR,
    PIPELINE,
    NodeSituation,
    Outcome,
    PairSituation,
    PipelineSituation,
    blocked_findings,
    catalogue,
)
from ppdeploy.plan.checks.situate import model_bytes
from ppdeploy.plan.checks.system import CHECK_LISTENER, MASTER_PORTS
from ppdeploy.probes import ClockDifference, DiskSpeed, ProbeProblem, Route
from tests.factories import make_address, make_facts, make_gpu, make_installation, make_nic, make_package
from tests.factories_checks import (
    GIB,
    PACKAGES,
    QUIET,
    RECEIVED,
    UNIT,
    VENV,
    a_connect,
    a_ping,
    a_way,
    facts_of,
    installed,
    mac,
    node,
    pair,
    whole,
    with_nic,
)

AnySituation = NodeSituation | PairSituation | PipelineSituation


@dataclass(frozen=True)
class Case:
    """A faulty situation of one check, what the evidence must tell, and what the remedy must name."""

    faulty: Callable[[], AnySituation]
    evidence: str
    remedy: str


def on(**changes: Any) -> Callable[[], NodeSituation]:
    """Return a node with other facts."""
    return lambda: node(facts=facts_of().model_copy(update=changes))


def system(**changes: Any) -> Callable[[], NodeSituation]:
    return on(os=facts_of().os.model_copy(update=changes))


def gpus(*cards: Any) -> Callable[[], NodeSituation]:
    return on(gpus=cards)


def installation(**changes: Any) -> Callable[[], NodeSituation]:
    """Return a node whose driver is installed otherwise."""
    return on(driver=make_installation(**changes))


def two(**second: Any) -> Callable[[], PipelineSituation]:
    """Return a pipeline whose second node has other facts."""
    return lambda: whole(node(1), node(2, facts_of(2).model_copy(update=second)))


def package(name: str, version: str) -> Callable[[], PipelineSituation]:
    venv = Venv(name=VENV, marker={}, python="3.11.2", packages={**PACKAGES, name: version})
    return two(venvs=(venv,))


def on_way(**way: Any) -> Callable[[], PairSituation]:
    return lambda: pair(way)


def route(**changes: Any) -> Route:
    return Route(**{"interface": "enp1s0", "source": None, "gateway": None, "problem": None, **changes})


def there_and_back() -> PairSituation:
    """Return a pair whose way back alone goes through a router."""
    head = node(1, probe={"peers": {"198.51.100.12": a_way(2, route=route(gateway="192.0.2.1"))}})
    return pair(receiver=head)


TAKEN = Listener(port=8000, address="0.0.0.0", pid=77, process="nginx", command="nginx", unit="nginx.service")  # noqa: S104  (a fact)
SMALL = facts_of(disks={"/opt/ppdeploy": 1.0, "/var/lib/ppdeploy/models": 1.0})

CASES: dict[str, Case] = {
    # -- the host
    "root": Case(on(user=facts_of().user.model_copy(update={"uid": 1000, "name": "bob"})), "runs as bob", "sudo"),
    "systemd": Case(system(systemd_version=241), "systemd 241 is too old", "247"),
    "system-state": Case(system(system_state="stopping"), "stopping", "is-system-running"),
    "user-namespaces": Case(
        on(sysctl=facts_of().sysctl.model_copy(update={"max_user_namespaces": 0})),
        "max_user_namespaces is 0",
        "PrivateUsers=no",
    ),
    "os-release": Case(system(id="arch", pretty_name="Arch Linux"), "Arch Linux was never tried", "debian 11"),
    "glibc": Case(system(glibc="2.27"), "glibc 2.27 is older", "upgrade"),
    "python": Case(on(pythons=()), "no Python 3.11 (found: none)", "python3.11"),
    "rsync": Case(on(tools={"rsync": None}), "rsync is missing", "install the package rsync"),
    "cpu-avx2": Case(
        lambda: node(
            facts=facts_of().model_copy(update={"cpu": facts_of().cpu.model_copy(update={"flags": ()})}), device="cpu"
        ),
        "no AVX2",
        "another host",
    ),
    "port-taken": Case(
        on(listeners=(TAKEN,)), "port 8000 is taken by nginx (nginx.service, pid 77)", "ppdeploy_api_port"
    ),
    "local-ports": Case(
        on(sysctl=facts_of().sysctl.model_copy(update={"ip_local_port_range": (1024, 60999)})),
        "1024-60999",
        "ip_local_reserved_ports=8000,29500,29501",
    ),
    "disk": Case(
        lambda: node(facts=SMALL, venv_bytes_missing=5 * GIB), "/opt/ppdeploy needs 5.0 GiB", "ppdeploy_models_dir"
    ),
    "disk-speed": Case(
        lambda: node(probe={"disk": DiskSpeed(path="/m/w", bytes_per_second=1e8)}), "429 s", "ppdeploy_models_dir"
    ),
    "memory": Case(
        on(memory=facts_of().memory.model_copy(update={"available_bytes": GIB})), "1.0 GiB of 64.0 GiB", "ps axo"
    ),
    "swap": Case(
        on(memory=facts_of().memory.model_copy(update={"swap_total_bytes": 16 * GIB, "swap_free_bytes": GIB})),
        "15.0 GiB of swap",
        "swapoff -a && swapon -a",
    ),
    "shm": Case(
        on(memory=facts_of().memory.model_copy(update={"shm_total_bytes": 64 << 20})),
        "64.0 MiB, 1.0 GiB are needed",
        "mount -o remount,size=2g /dev/shm",
    ),
    "memlock": Case(
        on(pipelines={"chat": installed(limit_memlock_bytes=65536)}), "0.1 MiB only", f"systemctl cat {UNIT}"
    ),
    "open-files": Case(on(pipelines={"chat": installed(limit_nofile=1024)}), "1024 files", f"systemctl cat {UNIT}"),
    "clock": Case(
        on(clock=facts_of().clock.model_copy(update={"node_time": RECEIVED + 30, "synchronised": False})),
        "30 s ahead or more; NTP does not keep it",
        "timedatectl set-ntp true",
    ),
    "hostname": Case(
        on(identity=facts_of().identity.model_copy(update={"addresses": None})), "node1 does not resolve", "/etc/hosts"
    ),
    "selinux": Case(system(selinux="enforcing"), "SELinux is enforcing", "ausearch"),
    "firewall": Case(on(firewalls=("ufw.service",)), "ufw.service is active", "ufw allow from 198.51.100.0/24"),
    "rivals": Case(
        on(rivals=(Rival(pid=9, kind="vllm", unit="my.service"),)),
        "vllm pid 9 (my.service)",
        "systemctl stop my.service",
    ),
    "cpu-governor": Case(
        on(cpu=facts_of().cpu.model_copy(update={"governor": "powersave"})), "powersave, by acpi-cpufreq", "tee"
    ),
    "environment": Case(
        on(venvs=(Venv(name=VENV, marker={}, python="3.11.2", packages={"vllm": "0.20.0"}),)),
        "has vLLM 0.20.0, not 0.33.0",
        f"rm -r /opt/ppdeploy/venvs/{VENV} on node1",
    ),
    "weights": Case(
        on(models=(ModelFolder(name="llama", digest=None, verified=False, deviation="x: size is 3", size_bytes=None),)),
        "llama: x: size is 3",
        "apply again",
    ),
    # -- GPUs
    "gpu": Case(gpus(make_gpu()), "2 GPUs are needed and 1 are visible", "nvidia-smi -L"),
    "gpu-machine": Case(
        gpus(make_gpu(name="NVIDIA GB10"), make_gpu(1)), "x86_64, and a NVIDIA GB10 is beside an aarch64", "aarch64"
    ),
    "gpu-driver": Case(
        on(nvidia_driver=NvidiaDriver(version="550.54", cuda_version="12.4", module_version="550.54")), "550.54", "580"
    ),
    "gpu-module": Case(
        on(nvidia_driver=NvidiaDriver(version="580.95", cuda_version="13.0", module_version="570.1")),
        "module 570.1 is loaded and driver 580.95 is installed",
        "reboot",
    ),
    "gpu-next-boot": Case(
        on(
            kernels=(
                Kernel(release="6.1.0-9-amd64", bootable=True, nvidia_module=True),
                Kernel(release="6.1.0-41-amd64", bootable=True, nvidia_module=False),
            )
        ),
        "6.1.0-41-amd64 boots next",
        "dkms autoinstall -k 6.1.0-41-amd64",
    ),
    "gpu-busy": Case(
        gpus(make_gpu(processes=[GpuProcess(pid=5, name="blender", memory_mib=900, unit="user.slice")]), make_gpu(1)),
        "GPU 0: blender pid 5 (user.slice, 900 MiB)",
        "kill 5",
    ),
    "gpu-ecc": Case(
        gpus(make_gpu(), make_gpu(1, "A100", ecc_uncorrected=3)), "GPU 1: 3 uncorrected", "--gpu-reset -i 1"
    ),
    "gpu-inforom": Case(
        on(problems=(Problem(fact="gpus.inforom", reason="infoROM is corrupted at gpu 0"),)),
        "corrupted",
        "nvidia-smi -q",
    ),
    "gpu-persistence": Case(gpus(make_gpu(persistence_mode=False), make_gpu(1)), "off on GPU 0", "nvidia-smi -pm 1"),
    "gpu-mig": Case(gpus(make_gpu(), make_gpu(1, "A100", mig_enabled=True)), "GPU 1 has MIG on", "-i 1 -mig 0"),
    "gpu-pcie": Case(gpus(make_gpu(), make_gpu(1, pcie_width_current=4)), "GPU 1 has x4 of x16", "16 lanes"),
    "gpu-kinds": Case(gpus(make_gpu(), make_gpu(1, "RTX 3060")), "RTX 3060 and NVIDIA GeForce RTX 4090", "one kind"),
    # -- the fabric NIC
    "fabric-up": Case(lambda: with_nic(operstate="down", carrier=None), "enp1s0 is down", "ip link set enp1s0 up"),
    "ipv4": Case(
        lambda: node(
            facts=facts_of(nics=(make_nic("eno1", "2001:db8::1/64"),)), fabric=node().fabric, probe={"problems": ()}
        ),
        "no NIC has a global IPv4 address",
        "dev eno1",
    ),
    "fabric-wired": Case(lambda: with_nic(wireless=True), "enp1s0 is Wi-Fi", "ppdeploy_fabric_interface"),
    "fabric-usb": Case(lambda: with_nic(usb=True), "USB adapter", "PCIe"),
    "fabric-tunnel": Case(lambda: with_nic(kind="wireguard"), "wireguard", "ppdeploy_fabric_interface"),
    "fabric-speed": Case(lambda: with_nic(speed_mbit=1000), "1 Gbit/s of 10 Gbit/s", "ethtool -s enp1s0 autoneg on"),
    "fabric-duplex": Case(lambda: with_nic(duplex="half"), "half duplex", "ethtool -s enp1s0"),
    "fabric-eee": Case(lambda: with_nic(eee=True), "on for enp1s0", "ethtool --set-eee enp1s0 eee off"),
    "fabric-mtu": Case(lambda: with_nic(mtu=1280), "MTU 1280", "ip link set enp1s0 mtu 1500"),
    "fabric-errors": Case(
        lambda: node(probe={"counters_after": QUIET.model_copy(update={"rx_crc_errors": 7})}),
        "rx_crc_errors rose by 7",
        "ethtool -S enp1s0",
    ),
    "fabric-flaps": Case(lambda: with_nic(carrier_changes=99), "99 times", "journalctl -k | grep enp1s0"),
    "one-nic-a-subnet": Case(
        on(nics=(*facts_of().nics, make_nic("enp2s0", "198.51.100.77/24", index=4))),
        "enp1s0 and enp2s0 both are in 198.51.100.0/24, arp_ignore is 0",
        "arp_ignore=1",
    ),
    "default-route": Case(
        on(
            nics=(*facts_of().nics, make_nic("docker0", "172.17.0.1/16", index=5, kind="bridge")),
            default_routes=(DefaultRoute(family=4, interface="docker0", gateway=None, metric=0),),
        ),
        "docker0, a bridge device",
        "ip route del default dev docker0",
    ),
    # -- the driver
    "driver": Case(
        lambda: node(facts=facts_of(driver="535.261.03").model_copy(update={"driver": make_installation()})),
        "driver 535.261.03 is older than 580, and to install one takes a reboot (the old module is loaded)",
        "set ppdeploy_allow_reboot: true",
    ),
    "driver-held": Case(
        installation(packages=(make_package("libcuda1"), make_package("nvidia-open", held=True))),
        "unattended upgrades are on, and libcuda1 may change",
        "apt-mark hold libcuda1",
    ),
    "packages": Case(
        installation(broken=(make_package("nvidia-open", state="half-configured"),)),
        "nvidia-open 580.95.05-1 is half-configured",
        "dpkg --configure -a",
    ),
    "package-lock": Case(
        installation(
            lock=PackageLock(
                file="/var/lib/dpkg/lock", pid=7, process="unattended-upgr", unit="apt-daily-upgrade.service"
            )
        ),
        "unattended-upgr pid 7 (apt-daily-upgrade.service) has /var/lib/dpkg/lock",
        "ppdeploy_package_lock_timeout",
    ),
    "driver-headers": Case(
        on(
            driver=make_installation(
                dkms=(DkmsModule(name="nvidia", version="580.95.05", kernel="6.1.0-40-amd64", state="installed"),)
            ),
            kernels=(Kernel(release="6.1.0-41-amd64", bootable=True, nvidia_module=False, headers=False),),
        ),
        "kernel 6.1.0-41-amd64 has neither NVIDIA's module nor headers",
        "linux-headers-6.1.0-41-amd64",
    ),
    "own-address": Case(lambda: node(probe={"claims": ("02:aa:bb:cc:dd:ee",)}), "02:aa:bb:cc:dd:ee", "another address"),
    "probes": Case(
        lambda: replace(node(), probe=None, probe_problem="198.51.100.11: Permission denied"),
        "Permission denied",
        "ppdeploy check --limit chat -v",
    ),
    "rdma": Case(
        on(
            rdma_devices=(
                RdmaDevice(name="mlx5_0", link_layer="Ethernet", state="DOWN", interfaces=("enp1s0",), gids=()),
            )
        ),
        "mlx5_0 is not active",
        "rdma link",
    ),
    # -- a pair
    "route": Case(on_way(route=route(interface="docker0")), "it leaves by docker0", "dev enp1s0 src 198.51.100.12"),
    "no-router": Case(on_way(route=route(gateway="192.0.2.1")), "through 192.0.2.1", "one switch"),
    "same-way-back": Case(there_and_back, "node1 alone leaves the fabric", "ip route get 198.51.100.12` on node1"),
    "reach": Case(
        on_way(ping=a_ping(received=0), connects=(a_connect(problem="no answer in 1.5 s"),)),
        "neither ping nor TCP comes back (no answer in 1.5 s)",
        "ping -I enp1s0 198.51.100.11",
    ),
    "mtu-passes": Case(
        on_way(whole=a_ping(bytes=9000, sent=3, received=0)), "9000 bytes do not pass, 84 bytes do", "mtu 1500"
    ),
    "latency": Case(on_way(ping=a_ping(smallest_s=0.02, p50_s=0.021)), "21.00 ms", "one wired switch"),
    "jitter": Case(on_way(ping=a_ping(p90_s=0.03)), "29.75 ms longer", "ip -s link"),
    "loss": Case(on_way(ping=a_ping(received=18)), "2 of 20 were lost", "cable"),
    "master-port": Case(
        on_way(connects=(a_connect(29501, master=True, problem="no answer in 1.5 s"),)),
        "29501: no answer in 1.5 s",
        "on node1: allow TCP from 198.51.100.0/24 to the ports 29501 to 29516",
    ),
    "ephemeral-ports": Case(
        on_way(connects=(a_connect(), a_connect(40001, problem="no answer in 1.5 s"))),
        "1 of 2 ports (40001: no answer in 1.5 s)",
        "ufw allow from 198.51.100.0/24",
    ),
    "right-machine": Case(
        on_way(macs=(mac(1), "02:aa:bb:cc:dd:ee")), "02:aa:bb:cc:dd:ee also answers for 198.51.100.11", "ip neigh show"
    ),
    "arp-flux": Case(on_way(macs=(mac(1), mac(1, 2))), "eno1 answers for 198.51.100.11", "on node1: sysctl -w"),
    "clocks-agree": Case(
        on_way(clock=ClockDifference(offset_s=-7.0, error_s=0.001)), "7.000 s behind", "timedatectl set-ntp true"
    ),
    "throughput": Case(on_way(bits_per_second=94e6), "94 Mbit/s of 10 Gbit/s", "ppdeploy net"),
    "tcp-window": Case(
        lambda: pair(
            sender=node(
                2,
                facts_of(2).model_copy(update={"sysctl": facts_of().sysctl.model_copy(update={"tcp_wmem_max": 65536})}),
            )
        ),
        "tcp_wmem of node2 ends at 65536",
        "on node2: sysctl -w net.ipv4.tcp_wmem",
    ),
    # -- a pipeline
    "fabric": Case(lambda: whole(fabric_problem="the hosts share no subnet: do this"), "share no subnet", ""),
    "plan": Case(lambda: whole(plan_problem="there is no lock: do that"), "there is no lock", ""),
    "architecture": Case(
        two(os=facts_of().os.model_copy(update={"machine": "aarch64"})),
        "node1 x86_64, node2 aarch64",
        "one architecture",
    ),
    "machine-id": Case(two(identity=facts_of().identity), "node1 and node2 have the same", "systemd-machine-id-setup"),
    "shared-machine": Case(
        lambda: whole(others={"small": [node(2)]}),
        "node2 and node2 of pipeline small",
        "leave the machine in one pipeline",
    ),
    "mtu-equal": Case(
        lambda: whole(node(1), with_nic(2, mtu=9000)), "node1 1500, node2 9000", "ip link set enp1s0 mtu 1500 on node2"
    ),
    "speeds-equal": Case(
        lambda: whole(node(1), with_nic(2, speed_mbit=1000)),
        "node2 1 Gbit/s",
        "give node2 a NIC, cable and switch port of 10",
    ),
    "same-os": Case(two(os=facts_of().os.model_copy(update={"pretty_name": "Debian 13"})), "Debian 13", "one release"),
    "same-glibc": Case(two(os=facts_of().os.model_copy(update={"glibc": "2.41"})), "glibc 2.41", "one release"),
    "same-python": Case(
        two(pythons=(facts_of().pythons[0].model_copy(update={"version": "3.11.9"}),)), "Python 3.11.9", "python3.11"
    ),
    "same-vllm": Case(package("vllm", "0.20.0"), "node2 has vllm 0.20.0", "on node1 and node2, and apply"),
    "same-torch": Case(package("torch", "2.9.0"), "node2 has torch 2.9.0", "apply"),
    "same-nccl": Case(package("nvidia-nccl-cu13", "2.28.0"), "node2 has nvidia-nccl-cu13 2.28.0", "apply"),
    "same-driver": Case(
        two(nvidia_driver=NvidiaDriver(version="590.1", cuda_version="13.0", module_version="590.1")),
        "590.1",
        "one driver",
    ),
    "same-cuda": Case(
        two(nvidia_driver=NvidiaDriver(version="590.1", cuda_version="13.1", module_version="590.1")),
        "CUDA 13.1",
        "driver",
    ),
    "same-gpus": Case(two(gpus=(make_gpu(0, "H200"),)), "NVIDIA H200", "ppdeploy plan"),
    "same-release": Case(two(pipelines={"chat": installed(current="b" * 64)}), "bbbbbbbbbbbb", "apply"),
}

#: Healthy situations other than the usual ones, for checks that need something that most nodes do not have.
HEALTHY: dict[str, Callable[[], AnySituation]] = {
    "cpu-avx2": lambda: node(device="cpu"),
    "gpu-next-boot": on(kernels=(Kernel(release="6.1.0-41-amd64", bootable=True, nvidia_module=True),)),
    "gpu-ecc": gpus(make_gpu(0, "A100"), make_gpu(1, "A100")),
}


def outcome(name: str, situation: AnySituation) -> Outcome:
    """Return what a check comes to."""
    if isinstance(situation, NodeSituation):
        return NODE[name].outcome(situation)
    if isinstance(situation, PairSituation):
        return PAIR[name].outcome(situation)
    return PIPELINE[name].outcome(situation)


def healthy(name: str) -> AnySituation:
    if name in HEALTHY:
        return HEALTHY[name]()
    scope = next(check.scope for check in catalogue() if check.id == name)
    if scope == "node":
        return node()
    return pair() if scope == "pair" else whole()


NAMES = [check.id for check in catalogue()]


def test_there_are_enough_checks_and_each_has_a_case() -> None:
    assert len(NAMES) >= 40
    assert sorted(CASES) == sorted(NAMES)
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_situation_is_ready(name: str) -> None:
    found = outcome(name, healthy(name))
    assert (found.verdict, found.judged, found.remedy) == ("ready", True, ""), found.evidence
    assert found.evidence


@pytest.mark.parametrize("name", NAMES)
def test_a_faulty_situation_is_told_with_its_remedy(name: str) -> None:
    case = CASES[name]
    found = outcome(name, case.faulty())
    check = next(check for check in catalogue() if check.id == name)
    assert (found.verdict, found.judged) == (check.verdict, True), found.evidence
    assert case.evidence in found.evidence
    assert case.remedy in found.remedy
    assert "{" not in found.remedy


@pytest.mark.parametrize("check", catalogue(), ids=lambda check: check.id)
def test_a_check_says_what_it_is(check: Any) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", check.id)
    assert check.looks_at
    assert check.source
    assert check.general_remedy()
    assert "{" not in check.general_remedy()
    assert check.verdict in ("slow", "blocked")


def test_healthy_nodes_let_a_run_start() -> None:
    assert list(blocked_findings(whole())) == []


@pytest.mark.parametrize(
    "check", [one for one in catalogue() if one.in_plan and one.verdict == "blocked"], ids=lambda c: c.id
)
def test_what_facts_alone_block_stops_a_run(check: Any) -> None:
    situation = CASES[check.id].faulty()
    if isinstance(situation, NodeSituation):
        # A node of cpu beside one of GPUs is no situation; the check of one node is what counts.
        situation = whole(situation, node(2), device=situation.device)
    assert isinstance(situation, PipelineSituation)
    assert check.id in [finding.id for finding in blocked_findings(situation)]


def test_probes_stop_no_run_by_themselves() -> None:
    assert all(not check.in_plan for check in PAIR)


@pytest.mark.parametrize("name", [check.id for check in catalogue() if check.id.startswith("gpu")])
def test_a_cpu_pipeline_has_no_gpus_to_judge(name: str) -> None:
    found = NODE[name].outcome(node(device="cpu"))
    assert (found.verdict, found.judged) == ("ready", False)


@pytest.mark.parametrize("check", [*NODE, *PAIR], ids=lambda check: check.id)
def test_without_a_probe_nothing_is_claimed(check: Any) -> None:
    blind = replace(node(1), probe=None), replace(node(2), probe=None)
    found = check.outcome(PairSituation("chat", *blind) if check.scope == "pair" else blind[0])
    assert found.verdict == "ready"
    # The plan has a rule of its own for the driver: facts are enough for it.
    assert check.in_plan or check.id == "gpu-driver" or not found.judged


@pytest.mark.parametrize("check", catalogue(), ids=lambda check: check.id)
def test_facts_that_an_older_module_saved_are_enough(check: Any) -> None:
    """Nothing is claimed of what such facts do not have, and nothing fails."""
    old = [node(n, make_facts(f"node{n}", number=n, gpus=2), probe={"peers": {}}) for n in (1, 2)]
    situations: dict[str, AnySituation] = {
        "node": old[0],
        "pair": PairSituation("chat", old[1], old[0]),
        "pipeline": whole(*old),
    }
    assert check.outcome(situations[check.scope]).verdict == "ready"


def test_a_port_of_our_own_rank_is_ready() -> None:
    ours = Listener(port=8000, address="127.0.0.1", pid=3, process="vllm", command="vllm", unit=UNIT)
    found = NODE["port-taken"].outcome(node(facts=facts_of().model_copy(update={"listeners": (ours,)})))
    assert (found.verdict, found.evidence) == ("ready", "8000, 29501: 8000 held by our own units")


def test_gpus_of_our_own_rank_are_ready() -> None:
    ours = make_gpu(processes=[GpuProcess(pid=3, name="vllm", memory_mib=20000, unit=UNIT)])
    found = NODE["gpu-busy"].outcome(node(facts=facts_of().model_copy(update={"gpus": (ours, make_gpu(1))})))
    assert (found.verdict, found.evidence) == ("ready", "our own rank alone uses them")


def test_the_master_port_of_a_running_head_is_ready() -> None:
    head = node(1, facts_of().model_copy(update={"pipelines": {"chat": installed(active="active")}}))
    found = PAIR["master-port"].outcome(pair({"connects": (a_connect(),)}, receiver=head))
    assert (found.verdict, found.judged, found.evidence) == ("ready", True, "our own rank runs, and has it")


def test_a_serving_pipeline_is_left_alone_and_said_so() -> None:
    head = node(1, facts_of().model_copy(update={"pipelines": {"chat": installed(active="active")}}))
    found = PAIR["throughput"].outcome(pair({"bits_per_second": None}, receiver=head))
    assert (found.judged, found.evidence) == (False, "the pipeline serves, and is left alone")


def test_an_own_name_on_loopback_is_said_to_be_harmless() -> None:
    facts = facts_of(loopback_name=True)
    found = NODE["hostname"].outcome(node(facts=facts))
    assert found.verdict == "ready"
    assert "127.0.1.1: harmless" in found.evidence


# ---- what is no fault, or not the one that it looks like -------------------------------------------------------------


def test_what_an_apply_makes_equal_does_not_stop_it() -> None:
    differ = [replace(node(1), mtu_wanted=9000), replace(with_nic(2, mtu=9000), mtu_wanted=9000)]
    found = PIPELINE["mtu-equal"].outcome(whole(*differ))
    assert (found.verdict, found.judged) == ("ready", False)
    assert "node1 1500, node2 9000; `ppdeploy apply` sets 9000" in found.evidence
    assert list(blocked_findings(whole(*differ))) == []


def test_an_mtu_that_an_apply_gives_back_does_not_stop_it() -> None:
    """A trial that was cut off left one NIC with it, and the variable is gone since."""
    tried = with_nic(2, mtu=9000)
    record = Tuned(interface="enp1s0", settings={"mtu": "1500"})
    found = PIPELINE["mtu-equal"].outcome(
        whole(node(1), replace(tried, facts=tried.facts.model_copy(update={"tuned": record})))
    )
    assert (found.judged, "`ppdeploy apply` sets 1500" in found.evidence) == (False, True)
    other = record.model_copy(update={"interface": "eno1"})
    found = PIPELINE["mtu-equal"].outcome(
        whole(node(1), replace(tried, facts=tried.facts.model_copy(update={"tuned": other})))
    )
    assert found.verdict == "blocked"


def test_an_environment_that_differs_is_built_anew_where_it_does() -> None:
    """An apply alone, which these checks stop, would have left it."""
    odd = Venv(name=VENV, marker={}, python="3.11.2", packages={**PACKAGES, "torch": "2.9.0"})
    nodes = [node(1), node(2), replace(node(2, facts_of(2).model_copy(update={"venvs": (odd,)})), host="node3")]
    found = PIPELINE["same-torch"].outcome(whole(*nodes))
    assert found.remedy == f"rm -r /opt/ppdeploy/venvs/{VENV} on node3, and apply: it is built anew there"


SPARE = make_gpu(
    1,
    "A100",
    mig_enabled=True,
    ecc_uncorrected=3,
    persistence_mode=False,
    pcie_width_current=4,
    processes=[GpuProcess(pid=5, name="blender", memory_mib=900, unit="user.slice")],
)


@pytest.mark.parametrize("name", ["gpu-mig", "gpu-ecc", "gpu-persistence", "gpu-pcie", "gpu-busy", "gpu-kinds"])
def test_a_card_that_no_rank_gets_is_left_alone(name: str) -> None:
    one = node(facts=facts_of().model_copy(update={"gpus": (make_gpu(), SPARE)}), gpus_needed=1)
    assert NODE[name].outcome(one).verdict == "ready"


def test_the_listener_of_a_check_does_not_stop_an_apply() -> None:
    left = Listener(
        port=29501, address="198.51.100.11", pid=9, process=CHECK_LISTENER, command="python3", unit="session-4.scope"
    )
    found = NODE["port-taken"].outcome(node(facts=facts_of().model_copy(update={"listeners": (left,)})))
    assert (found.verdict, found.evidence) == ("ready", "8000, 29501: free")


def test_a_systemd_that_gave_no_answer_is_not_said_to_be_absent() -> None:
    os = facts_of().os.model_copy(update={"systemd_version": None})
    silent = Problem(fact="os.systemd_version", reason="systemctl gave no answer in 15 s")
    found = NODE["systemd"].outcome(node(facts=facts_of().model_copy(update={"os": os, "problems": (silent,)})))
    assert (found.verdict, found.evidence) == ("blocked", "systemctl gave no answer in 15 s")


@pytest.mark.parametrize(("folder", "missing"), [("llama", 16 * GIB), ("llama.partial", 16 * GIB), ("other", 40 * GIB)])
def test_what_a_transfer_left_is_not_needed_once_more(folder: str, missing: int) -> None:
    left = ModelFolder(name=folder, digest=None, verified=False, deviation="unfinished", size_bytes=24 * GIB)
    assert model_bytes(facts_of().model_copy(update={"models": (left,)}), 40 * GIB, "llama") == missing


def test_ports_that_others_reserved_stay_in_the_remedy() -> None:
    sysctl = facts_of().sysctl.model_copy(
        update={"ip_local_port_range": (1024, 60999), "ip_local_reserved_ports": "30000-30010"}
    )
    found = NODE["local-ports"].outcome(node(facts=facts_of().model_copy(update={"sysctl": sysctl})))
    assert "ip_local_reserved_ports=30000-30010,8000,29500,29501" in found.remedy


def test_a_second_nic_that_keeps_to_its_own_address_is_harmless() -> None:
    second = make_nic("enp2s0", "198.51.100.77/24", index=4)
    sysctl = facts_of().sysctl.model_copy(update={"arp_ignore": 1})
    found = NODE["one-nic-a-subnet"].outcome(
        node(facts=facts_of().model_copy(update={"nics": (*facts_of().nics, second), "sysctl": sysctl}))
    )
    assert (found.verdict, "harmless" in found.evidence) == ("ready", True)


@pytest.mark.parametrize(("drops", "verdict"), [(2, "ready"), (500, "slow")])
def test_a_few_frames_that_nobody_wanted_are_no_fault_and_many_are_not_the_cables(drops: int, verdict: str) -> None:
    found = NODE["fabric-errors"].outcome(
        node(probe={"counters_after": QUIET.model_copy(update={"rx_dropped": drops})})
    )
    assert (found.verdict, found.evidence) == (verdict, f"rx_dropped rose by {drops}")
    assert "replace the cable" not in found.remedy


def test_an_empty_second_rdma_port_is_no_fault() -> None:
    ports = [
        RdmaDevice(name=f"mlx5_{n}", link_layer="Ethernet", state=state, interfaces=(), gids=())
        for n, state in enumerate(("ACTIVE", "DOWN"))
    ]
    found = NODE["rdma"].outcome(node(facts=facts_of().model_copy(update={"rdma_devices": tuple(ports)})))
    assert found.verdict == "ready"


def test_a_firewall_that_counts_pings_proves_nothing_of_the_mtu() -> None:
    few = {"ping": a_ping(received=6), "whole": a_ping(bytes=1500, sent=3, received=0)}
    found = PAIR["mtu-passes"].outcome(pair(few))
    assert (found.verdict, found.judged, found.evidence) == (
        "ready",
        False,
        "14 of 20 small pings were lost as well: the MTU is not proven",
    )
    too_long = {**few, "whole": a_ping(bytes=9000, sent=0, received=0, problem="Message too long")}
    assert PAIR["mtu-passes"].outcome(pair(too_long)).verdict == "blocked"


def test_a_peer_without_a_listener_that_drops_pings_is_not_out_of_reach() -> None:
    found = PAIR["reach"].outcome(pair({"connects": (), "ping": a_ping(received=0)}))
    assert (found.verdict, found.judged) == ("ready", False)


def test_one_who_answers_arp_for_all_is_no_second_machine() -> None:
    """As clouds and access points do; a connection to our own listener proves where the address leads."""
    proxy = {"macs": ("12:34:56:78:9a:bc",)}
    found = PAIR["right-machine"].outcome(pair(proxy))
    assert (found.verdict, "leads to the peer" in found.evidence) == ("ready", True)
    strange = a_connect(problem="another machine or program answers there")
    assert PAIR["right-machine"].outcome(pair({**proxy, "connects": (strange,)})).verdict == "blocked"
    silent = a_connect(problem="no answer in 1.5 s")
    assert PAIR["right-machine"].outcome(pair({**proxy, "connects": (silent,)})).verdict == "blocked"


def test_a_card_that_a_virtual_machine_has_is_told_as_that() -> None:
    lent = PciAccelerator(
        address="0000:01:00.0", vendor="nvidia", vendor_id="0x10de", device_id="0x1", driver="vfio-pci"
    )
    found = NODE["gpu-module"].outcome(
        node(facts=facts_of().model_copy(update={"gpus": (), "nvidia_driver": None, "pci_accelerators": (lent,)}))
    )
    assert (found.verdict, "virtual machine" in found.remedy) == ("blocked", True)


def test_a_card_without_its_driver_is_told() -> None:
    card = PciAccelerator(address="01:00.0", vendor="nvidia", vendor_id="0x10de", device_id="0x2684", driver="nouveau")
    without = facts_of().model_copy(update={"pci_accelerators": (card,), "gpus": (), "nvidia_driver": None})
    found = NODE["gpu-module"].outcome(node(facts=without))
    assert found.verdict == "blocked"
    assert "has the driver nouveau" in found.evidence
    # One that the pipeline does not need may belong to a virtual machine.
    spare = facts_of().model_copy(update={"pci_accelerators": (card,)})
    assert NODE["gpu-module"].outcome(node(facts=spare)).verdict == "ready"
    assert "blacklist nouveau" in found.remedy


def test_a_router_on_both_ways_is_no_asymmetry() -> None:
    routed = route(gateway="192.0.2.1")
    head = node(1, probe={"peers": {"198.51.100.12": a_way(2, route=routed)}})
    assert PAIR["same-way-back"].outcome(pair({"route": routed}, receiver=head)).verdict == "ready"


def test_a_stream_that_failed_is_not_taken_for_a_slow_one() -> None:
    sender = node(2, probe={"problems": (ProbeProblem(probe="throughput to 198.51.100.11", reason="timed out"),)})
    found = PAIR["throughput"].outcome(pair({"bits_per_second": None}, sender=sender))
    assert (found.judged, found.evidence) == (False, "the stream failed: timed out")


def test_a_blocked_icmp_leaves_the_mtu_unproven() -> None:
    way = {"ping": a_ping(received=0, smallest_s=None), "whole": a_ping(bytes=1500, received=0)}
    assert PAIR["reach"].outcome(pair(way)).evidence == "TCP came back"
    assert PAIR["mtu-passes"].outcome(pair(way)).judged is False


def test_one_node_has_no_fabric_to_judge() -> None:
    alone = node().fabric
    assert alone is not None
    found = NODE["fabric-up"].outcome(node(fabric=alone.model_copy(update={"interface": "lo", "address": "127.0.0.1"})))
    assert (found.judged, found.evidence) == (False, "one node: its ranks talk on loopback")


def test_an_address_of_link_scope_is_no_ipv4_address() -> None:
    nic = make_nic("eno1", "192.0.2.1/24").model_copy(
        update={
            "addresses": (NicAddress(address="169.254.3.3", prefix=16, scope="link"), make_address("2001:db8::1/64"))
        }
    )
    found = NODE["ipv4"].outcome(node(facts=facts_of(nics=(nic,)), fabric=node().fabric))
    assert found.verdict == "blocked"


def test_the_ports_of_all_generations_are_counted_as_the_agent_takes_them() -> None:
    assert {ready.master_port(0, generation) for generation in range(100)} == set(range(MASTER_PORTS))
