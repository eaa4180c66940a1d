"""What is tuned on a node: each setting with its reason, or why it stays as it is. None of it is part of a release.

Whether a setting is needed is judged by what the host had before ppdeploy tuned anything: else a second apply would
find that nothing is needed any more, and take it back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from ppdeploy.facts import Nic, NicTuning, NodeFacts
from ppdeploy.plan.types import Finding, NicSetting, PlannedFile, TuningPlan
from ppdeploy.spec import PipelineVars

RECORD = "/var/lib/ppdeploy/nic-before.json"
"""What a node had before; `ppdeploy_nic` writes it, once for each setting, and restores from it."""

SCRIPT = "/opt/ppdeploy/nic/nic.py"
CONFIG = "/etc/ppdeploy/nic.json"
UNIT = "/etc/systemd/system/ppdeploy-nic.service"
SYSCTL_FILE = "/etc/sysctl.d/99-ppdeploy.conf"
HOOKS = {
    "NetworkManager": "/etc/NetworkManager/dispatcher.d/90-ppdeploy-nic",
    "ifupdown": "/etc/network/if-up.d/ppdeploy-nic",
}
"""Where a network manager that has no drop-ins looks for what is to follow when it brings a NIC up."""

RTT = 1e-3
"""Seconds there and back that a TCP buffer must cover: ten times a switch's own, since a loaded port queues."""

SLOW_INTERRUPT_US, INTERRUPT_US = 50, 20
"""An interrupt that is held back longer than the first is set to the second: each token waits for it at each boundary.
A handoff of one token took 160 us between two GPUs (docs/measured.md), so the second stays an eighth of it."""

CORE_MBIT = 10_000
USB_CORE_MBIT = 1_000
"""What one core receives before it is the limit: with a NIC that puts packets together in hardware, and with a USB
adapter, whose driver copies each one."""

RFS_FLOWS = 4096
"""Connections whose core is remembered; a pipeline has dozens."""

DEFAULT_QDISCS = frozenset({"pfifo_fast", "fq_codel", "pfifo", "noqueue"})
"""Those that the kernel itself gives a NIC of one queue, and gives back when another one is removed."""

NIC_KEYS = frozenset({"mtu", "rings", "eee", "rx_usecs", "rps", "rfs", "qdisc"})
"""Settings of one NIC; the others are the host's."""

Judged = tuple[Literal["set", "kept", "unsupported", "off"], str, str]
"""Verdict, value and reason."""


@dataclass(frozen=True)
class _Place:
    """What the decisions look at."""

    facts: NodeFacts
    nic: Nic
    tuning: NicTuning
    wants: PipelineVars
    rate_mbit: int | None
    ports: tuple[int, ...]

    def before(self, key: str, now: str) -> str:
        """Return what the host had before ppdeploy set anything; `now` where it set nothing."""
        tuned = self.facts.tuned
        if tuned is None or (tuned.interface != self.nic.name and key in NIC_KEYS):
            # Of another NIC: the host gets that one's settings back before this one is tuned.
            return now
        return tuned.settings.get(key, now)

    def kernel(self, name: str) -> str | None:
        """Return what a kernel setting was before; None where it cannot be set here."""
        now = self.facts.sysctl.tunable.get(name)
        return None if now is None else self.before(f"sysctl.{name}", now)


def plan_tuning(
    facts: NodeFacts,
    interface: str,
    wants: PipelineVars,
    *,
    rate_mbit: int | None,
    ports: Collection[int],
    running: bool,
) -> TuningPlan:
    """Decide what is tuned on a node.

    `rate_mbit` is the negotiated rate of its fabric NIC, `ports` are those that ranks and agents listen on with a fixed
    number. While a rank is `running`, what takes the link down for seconds waits: peers would take the node for dead.
    """
    nic = facts.nic(interface)
    tuning = nic.tuning if nic else None
    if nic is None or tuning is None or interface == "lo":
        reason = "one node: nothing leaves it" if interface == "lo" else f"the facts do not say what {interface} can"
        kept = NicSetting(key="nic", verdict="unsupported", reason=reason)
        return TuningPlan(interface=interface, manager=None, settings=(kept,))
    place = _Place(facts, nic, tuning, wants, rate_mbit, tuple(sorted(ports)))
    settings = []
    for key, current, interrupts, judge in _questions(place):
        before = place.before(key, current) if current is not None else ""
        verdict, value, reason = judge(place)
        aim = value if verdict == "set" else before
        waits = interrupts and running and current is not None and current != aim
        if waits:
            # What is to be given back stays as it is until then.
            value = value if verdict == "set" else str(current)
            reason = f"{reason}; it takes the link down for seconds and a rank runs"
        settings.append(
            NicSetting(key=key, verdict="waits" if waits else verdict, before=before, value=value, reason=reason)
        )
    return TuningPlan(interface=interface, manager=tuning.manager, settings=tuple(settings))


def tuning_files(plan: TuningPlan, network_file: str | None) -> tuple[PlannedFile, ...]:
    """Return the files that keep what is tuned over a reboot; `network_file` is networkd's own for the NIC."""
    wanted = plan.wanted()
    files = [_file(SYSCTL_FILE, "nic-sysctl.conf.j2")] if any(key.startswith("sysctl.") for key in wanted) else []
    if any(not key.startswith("sysctl.") for key in wanted):
        files += [_file(CONFIG, "nic.json.j2"), _file(UNIT, "ppdeploy-nic.service.j2")]
    if "mtu" in wanted and plan.manager == "networkd" and network_file:
        # A drop-in in /etc stands above the file itself wherever that lies (systemd.network(5)): netplan's is in /run.
        name = network_file.rsplit("/", 1)[-1]
        files.append(_file(f"/etc/systemd/network/{name}.d/90-ppdeploy.conf", "nic-networkd.conf.j2"))
    elif "mtu" in wanted and plan.manager in HOOKS:
        files.append(_file(HOOKS[plan.manager], "nic-hook.sh.j2", mode="0755"))
    return tuple(files)


def mtu_findings(pipeline: str, host: str, facts: NodeFacts, interface: str, mtu: int | None) -> Iterator[Finding]:
    """Yield what forbids the wanted MTU on a host; whether it passes between hosts only a trial tells."""
    nic = facts.nic(interface)
    if mtu is None or nic is None or interface == "lo" or nic.mtu == mtu:
        return
    most = nic.tuning.max_mtu if nic.tuning else None
    if most is not None and most < mtu:
        reason = f"{interface} cannot have the MTU {mtu}: its driver allows {most} at most"
        remedy = f"set ppdeploy_mtu to {most} or less, or remove it"
    elif facts.rank_runs(pipeline):
        reason = f"the MTU of {interface} is {nic.mtu} and is to be {mtu}, which takes the link down while a rank runs"
        remedy = "run `ppdeploy stop`, then `ppdeploy apply`"
    else:
        return
    yield Finding(id="mtu-wanted", verdict="blocked", pipeline=pipeline, host=host, reason=reason, remedy=remedy)


def _file(path: str, template: str, mode: str = "0644") -> PlannedFile:
    return PlannedFile(path=path, template=template, part="tuning", mode=mode, in_release=False)


# ---- the settings ----------------------------------------------------------------------------------------------------

Question = tuple[str, str | None, bool, Callable[[_Place], Judged]]
"""Key, what it is now, whether setting it takes the link down, and who decides."""


def _questions(place: _Place) -> Iterator[Question]:
    rings = place.tuning.rings
    eee, usecs = place.nic.eee, place.tuning.rx_usecs
    kernel = place.facts.sysctl.tunable
    yield "mtu", str(place.nic.mtu), True, _mtu
    yield "rings", f"rx={rings.rx} tx={rings.tx}" if rings else None, True, _rings
    yield "eee", None if eee is None else "on" if eee else "off", True, _eee
    yield "rx_usecs", None if usecs is None else str(usecs), False, _coalescing
    yield "rps", place.tuning.rps, False, _rps
    yield "rfs", place.tuning.rfs, False, _rfs
    yield "qdisc", place.tuning.qdisc, False, _qdisc
    name = "net.ipv4.ip_local_reserved_ports"
    yield f"sysctl.{name}", kernel.get(name), False, _reserved_ports
    for name in ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem", "net.core.rmem_max", "net.core.wmem_max"):
        yield f"sysctl.{name}", kernel.get(name), False, _buffer(name)
    name = "net.core.rps_sock_flow_entries"
    yield f"sysctl.{name}", kernel.get(name), False, _flow_entries
    name = "net.ipv4.tcp_congestion_control"
    yield f"sysctl.{name}", kernel.get(name), False, _congestion
    yield "governor", place.facts.cpu.governors, False, _governor
    yield "gpu_persistence", _persistence_now(place), False, _persistence


_OFF: Judged = ("off", "", "ppdeploy_nic_tuning is false")


def _mtu(place: _Place) -> Judged:
    wanted, now = place.wants.mtu, place.before("mtu", str(place.nic.mtu))
    if wanted is None:
        return "off", "", "ppdeploy_mtu is not set"
    if place.tuning.max_mtu is not None and place.tuning.max_mtu < wanted:
        return "unsupported", "", f"its driver allows {place.tuning.max_mtu} at most"
    if now == str(wanted):
        return "kept", "", "it has it"
    return "set", str(wanted), "ppdeploy_mtu asks for it: fewer packets for the same bytes"


def _rings(place: _Place) -> Judged:
    rings = place.tuning.rings
    if not place.wants.nic_tuning:
        return _OFF
    if rings is None or not (rings.rx_max and rings.tx_max):
        return "unsupported", "", "its driver does not say how large its rings are"
    value = f"rx={rings.rx_max} tx={rings.tx_max}"
    if place.before("rings", f"rx={rings.rx} tx={rings.tx}") == value:
        return "kept", "", "they are as large as the NIC has them"
    return "set", value, "a handoff comes as one burst: what does not fit into the ring is dropped and sent again"


def _eee(place: _Place) -> Judged:
    if not place.wants.nic_tuning:
        return _OFF
    if place.nic.eee is None:
        return "unsupported", "", "it has no Energy-Efficient Ethernet"
    if place.before("eee", "on" if place.nic.eee else "off") == "off":
        return "kept", "", "it is off"
    return "set", "off", "the link sleeps between two tokens and takes time to wake up for each handoff"


def _coalescing(place: _Place) -> Judged:
    usecs = place.tuning.rx_usecs
    if not place.wants.nic_tuning:
        return _OFF
    if usecs is None:
        return "unsupported", "", "its driver does not say how long it holds back interrupts"
    if place.tuning.adaptive_rx:
        return "kept", "", "its driver adapts it to the traffic by itself"
    now = int(place.before("rx_usecs", str(usecs)))
    if now <= SLOW_INTERRUPT_US:
        return "kept", "", f"an interrupt waits for {now} us at most"
    return "set", str(INTERRUPT_US), f"an interrupt waits for {now} us, which each token does at each boundary"


def _steers(place: _Place) -> Judged | None:
    """Return why packets are not spread over cores; None: one core is the limit."""
    queues, cores = place.tuning.rx_queues, place.facts.cpu.usable
    if not place.wants.nic_tuning:
        return _OFF
    if place.tuning.rps is None or place.tuning.rfs is None:
        return "unsupported", "", "its receive queues cannot be set here"
    if queues >= cores:
        return "kept", "", f"it has {queues} receive queues for {cores} cores"
    if place.rate_mbit is None:
        return "kept", "", "its rate is not known"
    each, most = place.rate_mbit / max(queues, 1), USB_CORE_MBIT if place.nic.usb else CORE_MBIT
    if each <= most:
        return "kept", "", f"{each:.0f} Mbit/s for each of its receive queues is no more than one core takes ({most})"
    return None


def _of_each_queue(text: str, value: str) -> str:
    return " ".join(f"{word.partition('=')[0]}={value}" for word in text.split())


def _rps(place: _Place) -> Judged:
    not_needed = _steers(place)
    if not_needed:
        return not_needed
    rate = f"{place.rate_mbit} Mbit/s on {place.tuning.rx_queues} receive queue(s)"
    reason = f"{rate} is more than one core for each takes: packets are spread over all {place.facts.cpu.usable}"
    return "set", _of_each_queue(place.tuning.rps or "", cpu_mask(place.facts.cpu.usable_list)), reason


def _rfs(place: _Place) -> Judged:
    not_needed = _steers(place)
    if not_needed:
        return not_needed
    if "net.core.rps_sock_flow_entries" not in place.facts.sysctl.tunable:
        return "unsupported", "", "this kernel keeps net.core.rps_sock_flow_entries from this host"
    flows = RFS_FLOWS // max(place.tuning.rx_queues, 1)
    return "set", _of_each_queue(place.tuning.rfs or "", str(flows)), "packets go to the core on which they are read"


def _flow_entries(place: _Place) -> Judged:
    verdict, _, reason = _rfs(place)
    if verdict != "set":
        return verdict, "", reason
    return "set", str(RFS_FLOWS), reason


def _qdisc(place: _Place) -> Judged:
    if place.wants.tcp_pacing is None:
        return "off", "", "ppdeploy_tcp_pacing is not set (it was not measured to be better)"
    before = place.before("qdisc", place.tuning.qdisc or "")
    if before == "fq":
        return "kept", "", "it has it"
    if "sch_fq" not in place.facts.sysctl.pacing_modules:
        return "unsupported", "", "this kernel has no sch_fq"
    if before not in DEFAULT_QDISCS:
        return "unsupported", "", f"it has {before or 'none'}, which would not come back when it is restored"
    return "set", "fq", f"ppdeploy_tcp_pacing is {place.wants.tcp_pacing}"


def _congestion(place: _Place) -> Judged:
    if place.wants.tcp_pacing != "bbr":
        return "off", "", "ppdeploy_tcp_pacing is not bbr (it was not measured to be better)"
    before = place.kernel("net.ipv4.tcp_congestion_control")
    if before is None or "tcp_bbr" not in place.facts.sysctl.pacing_modules:
        return "unsupported", "", "this kernel has no tcp_bbr"
    if before == "bbr":
        return "kept", "", "it has it"
    return "set", "bbr", "ppdeploy_tcp_pacing is bbr"


def _reserved_ports(place: _Place) -> Judged:
    name = "net.ipv4.ip_local_reserved_ports"
    if not place.wants.nic_tuning:
        return _OFF
    # What others added since is kept too.
    now, before = place.facts.sysctl.tunable.get(name), place.kernel(name)
    if now is None or before is None:
        return "unsupported", "", "this kernel keeps it from this host"
    listed = port_ranges(place.ports)
    if set(place.ports) <= ports_in(before):
        return "kept", "", f"{listed} are reserved"
    reason = f"{listed} are listened on: an outgoing connection that got one by chance would keep a rank from starting"
    return "set", port_ranges(ports_in(now) | ports_in(before) | set(place.ports)), reason


def _buffer(name: str) -> Callable[[_Place], Judged]:
    """Return who decides on one of the limits of TCP's buffers."""

    def judge(place: _Place) -> Judged:
        before = place.kernel(name)
        if not place.wants.nic_tuning:
            return _OFF
        if before is None:
            return "unsupported", "", "this kernel keeps it from this host"
        if place.rate_mbit is None:
            return "kept", "", "the NIC's rate is not known"
        need = buffer_bytes(place.rate_mbit)
        *start, most = before.split()
        if int(most) >= need:
            return "kept", "", f"{most} bytes are enough for {place.rate_mbit} Mbit/s ({need} are needed)"
        reason = (
            f"{place.rate_mbit} Mbit/s for {RTT * 1000:g} ms there and back, and as much for the kernel's own share"
        )
        return "set", " ".join([*start, str(need)]), reason

    return judge


def _governor(place: _Place) -> Judged:
    wanted, cpu = place.wants.cpu_governor, place.facts.cpu
    if wanted is None:
        return "off", "", "ppdeploy_cpu_governor is not set"
    if cpu.governors is None:
        return "unsupported", "", "this host cannot set the frequency of its cores"
    if wanted not in cpu.governors_available:
        return "unsupported", "", f"it has no such governor (it has {', '.join(cpu.governors_available) or 'none'})"
    value = _of_each_queue(cpu.governors, wanted)
    if place.before("governor", cpu.governors) == value:
        return "kept", "", "all cores have it"
    return "set", value, "ppdeploy_cpu_governor asks for it"


def _persistence_now(place: _Place) -> str | None:
    modes = [(gpu.index, gpu.persistence_mode) for gpu in place.facts.gpus]
    if not modes or any(mode is None for _, mode in modes):
        return None
    return " ".join(f"{index}={'on' if mode else 'off'}" for index, mode in modes)


def _persistence(place: _Place) -> Judged:
    now = _persistence_now(place)
    if not place.wants.gpu_persistence:
        return "off", "", "ppdeploy_gpu_persistence is false"
    if now is None:
        return "unsupported", "", "it has no NVIDIA GPU that has a persistence mode"
    value = _of_each_queue(now, "on")
    if place.before("gpu_persistence", now) == value:
        return "kept", "", "it is on"
    return "set", value, "ppdeploy_gpu_persistence asks for it"


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def buffer_bytes(rate_mbit: int) -> int:
    """Return the TCP buffer that keeps a link full: a power of two of bytes, twice rate x RTT.

    Twice, since the kernel offers half of a receive buffer as window at first (tcp(7), tcp_adv_win_scale).
    """
    need = int(2 * rate_mbit * 1e6 / 8 * RTT)
    return 1 << max(need - 1, 1).bit_length()


def cpu_mask(listed: str) -> str:
    """Return CPUs such as `0-3,8` as the kernel's mask: words of 32 bits in hex, highest first, comma between."""
    mask = sum(1 << cpu for cpu in ports_in(listed))
    words: list[int] = []
    while mask or not words:
        words.append(mask & 0xFFFFFFFF)
        mask >>= 32
    first, *rest = reversed(words)
    return ",".join([f"{first:x}", *(f"{word:08x}" for word in rest)])


def ports_in(listed: str) -> set[int]:
    """Return the numbers of a list such as `29500-29501,8000`."""
    found: set[int] = set()
    for part in listed.split(","):
        if part.strip():
            first, _, last = part.strip().partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def port_ranges(ports: Collection[int]) -> str:
    """Return numbers as the kernel lists them: `8000,29500-29501`."""
    runs: list[list[int]] = []
    for port in sorted(ports):
        if runs and port == runs[-1][1] + 1:
            runs[-1][1] = port
        else:
            runs.append([port, port])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
