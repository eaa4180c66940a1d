"""Pair checks: the way from one node of a pipeline to another, as it was probed. Each way is judged by itself."""

from __future__ import annotations

from ppdeploy.plan.checks.system import MASTER_PORTS
from ppdeploy.plan.checks.types import PAIR, Answer, Fault, Fine, PairSituation, Unknown, millis
from ppdeploy.plan.fabric import is_software
from ppdeploy.plan.words import rate_text
from ppdeploy.probes import Connect, Ping

SLOW_LATENCY = 0.002
"""Seconds there and back. A switched LAN takes 0.1 to 0.5 ms; each token crosses each link once."""
WIDE_JITTER = 0.005
"""Seconds between the median and the ninth of ten round trips."""
MANY_LOST = 0.25
"""Share of lost small pings from which large ones that do not come back prove nothing."""
CLOCKS_APART = 1.0
"""Seconds from which logs of two nodes cannot be laid side by side."""
ENOUGH_MBIT = 2500.0
"""A short stream of one connection from Python proves no more than half of this; `ppdeploy net` measures exactly."""


def _no_probe(s: PairSituation) -> Unknown:
    """Return why the sender did not look at the receiver."""
    if s.sender.fabric is None or s.receiver.fabric is None:
        return Unknown("no fabric was found")
    if s.sender.probe is None:
        return Unknown(f"{s.sender.host} could not look ({s.sender.probe_problem or 'it was not asked to'})")
    return Unknown(f"{s.receiver.host} was not probed")


@PAIR.add(
    "route",
    "blocked",
    "the route to the peer leaves by the fabric NIC and address",
    remedy="ip route replace {network} dev {interface} src {source}",
    source="ip route get, on the sender: unbound connections of gloo and ZMQ leave so",
    in_plan=False,
)
def _route(s: PairSituation) -> Answer:
    seen, fabric = s.seen, s.sender.fabric
    if seen is None or fabric is None:
        return _no_probe(s)
    if seen.route is None:
        return Unknown(s.sender.probe.problem("route") or "ip did not say" if s.sender.probe else "ip did not say")
    values = {"network": fabric.network, "interface": fabric.interface, "source": fabric.address}
    if seen.route.interface is None:
        return Fault(f"there is no route: {seen.route.problem}", values)
    if seen.route.interface != fabric.interface:
        nic = s.sender.facts.nic(seen.route.interface)
        kind = f", a {nic.kind} device" if nic and is_software(nic) else ""
        return Fault(f"it leaves by {seen.route.interface}{kind}, not by {fabric.interface}", values)
    if seen.route.source not in (None, fabric.address):
        return Fault(f"it leaves with the address {seen.route.source}, not {fabric.address}", values)
    return Fine(f"it leaves by {fabric.interface}")


@PAIR.add(
    "no-router",
    "slow",
    "no router stands between the nodes",
    remedy="put both into one subnet on one switch",
    source="a router adds latency to each token, and a firewall in it may forget idle connections",
    in_plan=False,
)
def _no_router(s: PairSituation) -> Answer:
    seen = s.seen
    if seen is None or seen.route is None or seen.route.interface is None:
        return _no_probe(s)
    gateway = seen.route.gateway
    return Fault(f"it goes through {gateway}") if gateway else Fine("the peer is on the link")


@PAIR.add(
    "same-way-back",
    "slow",
    "the way there is the way back",
    remedy="see `ip route get {address}` on {host}: routes to one peer have crept in",
    source="asymmetric routes: strict rp_filter and firewalls drop what comes back another way",
    in_plan=False,
)
def _same_way_back(s: PairSituation) -> Answer:
    there, back = s.seen, s.back().seen
    if there is None or back is None or there.route is None or back.route is None:
        return _no_probe(s)
    ways = []
    for route, node in ((there.route, s.sender), (back.route, s.receiver)):
        ways.append(route.gateway is None and node.fabric is not None and route.interface == node.fabric.interface)
    if ways[0] == ways[1]:
        return Fine("both go over the fabric" if ways[0] else "both leave the fabric")
    odd, peer = (s.sender, s.receiver) if not ways[0] else (s.receiver, s.sender)
    address = peer.fabric.address if peer.fabric else peer.host
    return Fault(f"{odd.host} alone leaves the fabric", {"address": address, "host": odd.host})


@PAIR.add(
    "reach",
    "blocked",
    "the peer answers over the fabric",
    remedy="check cable, subnet and firewall between them: `ping -I {interface} {address}` on {host}",
    source="ICMP and TCP from the fabric address",
    in_plan=False,
)
def _reach(s: PairSituation) -> Answer:
    seen = s.seen
    if seen is None or s.receiver.fabric is None or s.sender.fabric is None:
        return _no_probe(s)
    connected = any(one.problem is None for one in seen.connects)
    refused = any(_refused(one) for one in seen.connects)
    pinged = seen.ping is not None and seen.ping.received > 0
    if connected or refused or pinged:
        how = [word for word, true in (("ping", pinged), ("TCP", connected or refused)) if true]
        return Fine(f"{' and '.join(how)} came back")
    if not seen.connects:
        # Firewalls drop pings; without a listener there was nothing else to try.
        return Unknown(f"no ping comes back, and {s.receiver.host} has no listener to connect to")
    reason = (seen.ping.problem if seen.ping else None) or next((one.problem for one in seen.connects), "no answer")
    values = {"interface": s.sender.fabric.interface, "address": s.receiver.fabric.address, "host": s.sender.host}
    return Fault(f"neither ping nor TCP comes back ({reason})", values)


def _refused(one: Connect) -> bool:
    return one.problem is not None and "refused" in one.problem.lower()


@PAIR.add(
    "mtu-passes",
    "blocked",
    "packets as large as the MTU pass",
    remedy="set one MTU on both nodes and on the switch: `ip link set {interface} mtu {mtu}`",
    source="ICMP with `don't fragment`; a black-holed large packet looks like a hang (NVIDIA/nccl 1524, 2135)",
    in_plan=False,
)
def _mtu_passes(s: PairSituation) -> Answer:
    seen = s.seen
    if seen is None or s.sender.fabric is None or s.receiver.fabric is None:
        return _no_probe(s)
    if seen.whole is None or seen.ping is None:
        return Unknown(f"no ping could be sent ({_ping_problem(s)})")
    if seen.ping.received == 0:
        return Unknown("no ping comes back at all: the MTU is not proven")
    if seen.whole.received > 0:
        return Fine(f"{seen.whole.bytes} bytes pass")
    if seen.whole.problem is None and seen.ping.lost > seen.ping.sent * MANY_LOST:
        # A firewall that lets a few pings a second through has none left for the large ones.
        return Unknown(f"{seen.ping.lost} of {seen.ping.sent} small pings were lost as well: the MTU is not proven")
    mtu = min(s.sender.fabric.mtu or 1500, s.receiver.fabric.mtu or 1500)
    larger = s.sender if (s.sender.fabric.mtu or 0) >= (s.receiver.fabric.mtu or 0) else s.receiver
    interface = larger.fabric.interface if larger.fabric else "INTERFACE"
    reason = f" ({seen.whole.problem})" if seen.whole.problem else ""
    return Fault(
        f"{seen.whole.bytes} bytes do not pass, {seen.ping.bytes} bytes do{reason}",
        {"interface": interface, "mtu": mtu if mtu != seen.whole.bytes else 1500},
    )


@PAIR.add(
    "latency",
    "slow",
    "a packet there and back takes less than 2 ms",
    remedy="join both to one wired switch; `ppdeploy plan` says what the latency does to a token",
    source="20 ICMP echoes, median",
    in_plan=False,
)
def _latency(s: PairSituation) -> Answer:
    ping = _answered(s)
    if isinstance(ping, Unknown):
        return ping
    smallest, middle, late = ping.smallest_s or 0.0, ping.p50_s or 0.0, ping.p99_s or 0.0
    told = f"{millis(middle)} there and back (least {millis(smallest)}, p99 {millis(late)})"
    # The least one: a busy host answers late, and that is no matter of the link.
    return Fault(told) if smallest > SLOW_LATENCY else Fine(told)


@PAIR.add(
    "jitter",
    "slow",
    "packets take about the same time",
    remedy="see what else uses the link and the cores: `ip -s link`, `top`",
    source="20 ICMP echoes, ninth of ten against the median",
    in_plan=False,
)
def _jitter(s: PairSituation) -> Answer:
    ping = _answered(s)
    if isinstance(ping, Unknown):
        return ping
    spread = (ping.p90_s or 0.0) - (ping.p50_s or 0.0)
    told = f"one in ten takes {millis(spread)} longer"
    return Fault(told) if spread > WIDE_JITTER else Fine(told)


@PAIR.add(
    "loss",
    "slow",
    "no packet is lost",
    remedy="replace the cable, then the port; on Wi-Fi use a cable",
    source="20 ICMP echoes",
    in_plan=False,
)
def _loss(s: PairSituation) -> Answer:
    ping = _answered(s)
    if isinstance(ping, Unknown):
        return ping
    told = f"{ping.lost} of {ping.sent} were lost"
    return Fault(told) if ping.lost else Fine(told)


def _answered(s: PairSituation) -> Ping | Unknown:
    """Return the small echoes, where any came back."""
    seen = s.seen
    if seen is None:
        return _no_probe(s)
    if seen.ping is None:
        return Unknown(f"no ping could be sent ({_ping_problem(s)})")
    return seen.ping if seen.ping.received else Unknown("no ping comes back")


def _ping_problem(s: PairSituation) -> str:
    """Return why no echo could be sent."""
    known = s.sender.probe and s.receiver.fabric and s.sender.probe.problem(f"ping of {s.receiver.fabric.address}")
    return known or "the reason is not known"


@PAIR.add(
    "master-port",
    "blocked",
    "the head's master port can be reached",
    remedy="on {host}: allow TCP from {network} to the ports {port} to {last}, such as `ufw allow from {network}`",
    source="torch's TCPStore on the head; a real connection to our own listener",
    in_plan=False,
)
def _master_port(s: PairSituation) -> Answer:
    if s.receiver.node_rank != 0:
        return Unknown("the peer is no head")
    seen, fabric = s.seen, s.receiver.fabric
    if seen is None or fabric is None:
        return _no_probe(s)
    one = next((one for one in seen.connects if one.master), None)
    port = s.receiver.master_port
    if one is None:
        # A gang takes one of its ports from this one on, by its generation.
        if s.receiver.serving:
            return Fine("our own rank runs, and has it")
        state = s.receiver.facts.pipelines.get(s.pipeline)
        if state is not None and state.current:
            return Unknown("a release is installed: the port is left to its ranks")
        problem = s.receiver.listener.master_problem if s.receiver.listener else None
        return Unknown(f"{s.receiver.host} could not listen on {port} ({problem or 'no listener'})")
    values = {"host": s.receiver.host, "network": fabric.network, "port": port, "last": port + MASTER_PORTS - 1}
    return Fault(f"{port}: {one.problem}", values) if one.problem else Fine(f"{port} connects")


@PAIR.add(
    "ephemeral-ports",
    "blocked",
    "any port of the peer can be reached",
    remedy="on {host}: allow all TCP ports from {network}, such as `ufw allow from {network}`",
    source="vLLM's queues, gloo and NCCL listen on ports that the kernel chooses; five real connections",
    in_plan=False,
)
def _ephemeral_ports(s: PairSituation) -> Answer:
    seen, fabric = s.seen, s.receiver.fabric
    if seen is None or fabric is None:
        return _no_probe(s)
    tried = [one for one in seen.connects if not one.master]
    if not tried:
        return Unknown(f"{s.receiver.host} has no listener")
    failed = [one for one in tried if one.problem]
    if failed:
        listed = ", ".join(f"{one.port}: {one.problem}" for one in failed)
        return Fault(
            f"{len(failed)} of {len(tried)} ports ({listed})", {"host": s.receiver.host, "network": fabric.network}
        )
    return Fine(f"{', '.join(str(one.port) for one in tried)} connect")


@PAIR.add(
    "right-machine",
    "blocked",
    "the peer's address leads to the peer",
    remedy="give one of them another address: `ip neigh show {address}` on {host} tells who answers",
    source="our listener's own token, and ARP: one address on two machines",
    in_plan=False,
)
def _right_machine(s: PairSituation) -> Answer:
    seen, fabric = s.seen, s.receiver.fabric
    if seen is None or fabric is None:
        return _no_probe(s)
    values = {"address": fabric.address, "host": s.sender.host}
    strange = [one for one in seen.connects if one.problem and "another machine" in one.problem]
    if strange:
        return Fault(f"on port {strange[0].port} of {fabric.address} another machine answers", values)
    if seen.macs is None:
        return Unknown("the link has no ARP")
    known = {nic.mac for nic in s.receiver.facts.nics}
    others = [mac for mac in seen.macs if mac not in known]
    if others == list(seen.macs) and len(others) == 1 and any(one.problem is None for one in seen.connects):
        # A second machine with the address would be one more that answers; clouds and access points answer for all.
        return Fine(f"{fabric.address} leads to the peer, though {others[0]} answers for it, and is no NIC of the peer")
    if others:
        return Fault(f"{', '.join(others)} also answers for {fabric.address}, and is no NIC of the peer", values)
    return Fine(f"{fabric.address} is {', '.join(seen.macs)}" if seen.macs else "nobody answers ARP")


@PAIR.add(
    "arp-flux",
    "slow",
    "the fabric NIC alone answers for the peer's address",
    remedy="on {host}: sysctl -w net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2",
    source="Linux ip-sysctl, arp_ignore: by default every NIC on the link answers for every address",
    in_plan=False,
)
def _arp_flux(s: PairSituation) -> Answer:
    seen, fabric, nic = s.seen, s.receiver.fabric, s.receiver.nic
    if seen is None or fabric is None or nic is None:
        return _no_probe(s)
    if not seen.macs:
        return Unknown("nobody answers ARP, or the link has none")
    names = {one.mac: one.name for one in s.receiver.facts.nics}
    wrong = [names[mac] for mac in seen.macs if mac in names and mac != nic.mac]
    if wrong:
        return Fault(
            f"{', '.join(wrong)} answers for {fabric.address}, which is {nic.name}'s", {"host": s.receiver.host}
        )
    return Fine(f"{nic.name} alone answers")


@PAIR.add(
    "clocks-agree",
    "slow",
    "the nodes' clocks agree within a second",
    remedy="timedatectl set-ntp true, on both",
    source="the peer's clock in the answer of our listener, and half of the round trip",
    in_plan=False,
)
def _clocks_agree(s: PairSituation) -> Answer:
    seen = s.seen
    if seen is None:
        return _no_probe(s)
    if seen.clock is None:
        return Unknown("the peer did not tell its clock")
    offset, error = seen.clock.offset_s, seen.clock.error_s
    told = f"the peer's clock is {abs(offset):.3f} s {'ahead' if offset > 0 else 'behind'} (within {millis(error)})"
    return Fault(told) if abs(offset) - error > CLOCKS_APART else Fine(told)


@PAIR.add(
    "throughput",
    "slow",
    "a short stream gets a good part of the link's rate",
    remedy="measure it: `ppdeploy net`; then see cable, port, `tc qdisc show dev {interface}`, and who else sends",
    source="a quarter of a second of one TCP stream, best 50 ms; a serving pipeline is left alone",
    in_plan=False,
)
def _throughput(s: PairSituation) -> Answer:
    seen, fabric = s.seen, s.sender.fabric
    if seen is None or fabric is None or s.receiver.fabric is None:
        return _no_probe(s)
    if seen.bits_per_second is None:
        reason = s.sender.probe.problem(f"throughput to {s.receiver.fabric.address}") if s.sender.probe else None
        if reason is None:
            serves = s.sender.serving or s.receiver.serving
            return Unknown("the pipeline serves, and is left alone" if serves else "no handoff goes this way")
        return Unknown(f"the stream failed: {reason}")
    measured = seen.bits_per_second / 1e6
    rates = [fabric.speed_mbit, s.receiver.fabric.speed_mbit]
    rate = min((float(one) for one in rates if one), default=ENOUGH_MBIT)
    told = f"{rate_text(float(f'{measured:.3g}'))} of {rate_text(rate)}"
    return Fault(told, {"interface": fabric.interface}) if measured < min(rate, ENOUGH_MBIT) * 0.4 else Fine(told)


@PAIR.add(
    "tcp-window",
    "slow",
    "TCP's buffers hold what the link holds",
    remedy='on {host}: sysctl -w net.ipv4.{setting}="4096 131072 {bytes}" (and a line of it in /etc/sysctl.d)',
    source="rate x round trip; Linux tcp(7), tcp_rmem and tcp_wmem",
    in_plan=False,
)
def _tcp_window(s: PairSituation) -> Answer:
    ping = _answered(s)
    if isinstance(ping, Unknown):
        return ping
    rate = s.sender.fabric.speed_mbit if s.sender.fabric else None
    if rate is None:
        return Unknown("the NIC does not say how fast it is")
    # Twice what is on the way: half of the receive buffer is the kernel's own (tcp_adv_win_scale).
    needed = int(2 * rate * 1e6 / 8 * (ping.smallest_s or 0.0))
    for node, setting, have in (
        (s.sender, "tcp_wmem", s.sender.facts.sysctl.tcp_wmem_max),
        (s.receiver, "tcp_rmem", s.receiver.facts.sysctl.tcp_rmem_max),
    ):
        if have is not None and have < needed:
            values = {"host": node.host, "setting": setting, "bytes": max(needed, 6291456)}
            return Fault(f"{setting} of {node.host} ends at {have} bytes, {needed} are on the way", values)
    return Fine(f"{needed} bytes are on the way at most")
