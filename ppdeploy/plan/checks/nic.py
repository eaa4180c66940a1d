"""Node checks on the fabric NIC and on what else the network of a node is made of."""

from __future__ import annotations

from ipaddress import IPv4Interface

from ppdeploy.facts import Nic
from ppdeploy.plan.checks.types import NODE, Answer, Fault, Fine, NodeSituation, Unknown
from ppdeploy.plan.fabric import is_software
from ppdeploy.plan.words import rate_text

TUNNELS = frozenset({"tun", "wireguard", "tunnel"})
MANY_DROPS = 10
"""Dropped packets from which something is too slow; a few frames of protocols that a host does not speak (LLDP, STP)
count as dropped too."""
MANY_CHANGES = 20
"""Losses and returns of a link since its NIC was made, from which a cable or port is likely bad."""

ONE_NODE = "one node: its ranks talk on loopback"


def _none(s: NodeSituation) -> Unknown:
    """Return why there is no fabric NIC to judge."""
    return Unknown(ONE_NODE if s.fabric else "no fabric was found")


@NODE.add(
    "fabric-up",
    "blocked",
    "the fabric NIC is up and has a partner",
    remedy="plug the cable in, or run `ip link set {interface} up`",
    source="Linux operstates: up, and carrier 1",
)
def _up(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None:
        return _none(s)
    if nic.up and nic.carrier is not False:
        return Fine(f"{nic.name} is up")
    return Fault(f"{nic.name} is {nic.operstate}, without a partner", {"interface": nic.name})


@NODE.add(
    "ipv4",
    "blocked",
    "a NIC has a global IPv4 address",
    remedy="ip address add ADDRESS/PREFIX dev {interface} (and in the network's configuration)",
    source="the fabric is IPv4: vLLM's coordination sockets are AF_INET",
)
def _ipv4(s: NodeSituation) -> Answer:
    ours = [nic for nic in s.facts.nics if nic.kind != "loopback"]
    if s.facts.problem("nics.addresses"):
        return Unknown("the addresses could not be read")
    if s.fabric and s.fabric.interface == "lo":
        return Unknown(ONE_NODE)
    found = [f"{nic.name} {a.address}" for nic in ours for a in nic.addresses if _is_ipv4(nic, a.address)]
    if found:
        return Fine(", ".join(found))
    name = next((nic.name for nic in ours if nic.up), "NIC")
    return Fault("no NIC has a global IPv4 address", {"interface": name})


def _is_ipv4(nic: Nic, address: str) -> bool:
    return any(
        a.address == address and a.scope == "global" and isinstance(a.interface, IPv4Interface) for a in nic.addresses
    )


@NODE.add(
    "fabric-wired",
    "slow",
    "the fabric is wired",
    remedy="use a cable: set ppdeploy_fabric_interface to a wired NIC",
    source="Wi-Fi shares the air: its rate and latency change by the second",
)
def _wired(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None:
        return _none(s)
    return Fault(f"{nic.name} is Wi-Fi") if nic.wireless else Fine(f"{nic.name} is wired")


@NODE.add(
    "fabric-usb",
    "slow",
    "the fabric NIC is not on USB",
    remedy="use a NIC on PCIe, or see that the adapter sits on a USB 3 port of its own",
    source="USB adapters take a core's time for each packet, and share the bus",
)
def _usb(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None:
        return _none(s)
    return Fault(f"{nic.name} is a USB adapter") if nic.usb else Fine(f"{nic.name} is not on USB")


@NODE.add(
    "fabric-tunnel",
    "slow",
    "the fabric is no tunnel",
    remedy="name the NIC below it with ppdeploy_fabric_interface",
    source="a VPN encrypts each packet on one core, and its MTU is small",
)
def _tunnel(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None:
        return _none(s)
    return Fault(f"{nic.name} is a {nic.kind} device") if nic.kind in TUNNELS else Fine(f"{nic.name} is {nic.kind}")


@NODE.add(
    "fabric-speed",
    "slow",
    "the fabric NIC negotiated the fastest rate that it can",
    remedy="see cable and switch port; then `ethtool -s {interface} autoneg on` and `ethtool {interface}`",
    source="ethtool's supported link modes against /sys/class/net/NIC/speed",
)
def _speed(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None:
        return _none(s)
    if nic.speed_mbit is None or nic.virtual:
        return Unknown(f"{nic.name} does not say how fast it is" + (": it is virtual" if nic.virtual else ""))
    if nic.max_speed_mbit is None:
        return Unknown(f"{nic.name} runs at {rate_text(nic.speed_mbit)} and does not list what it can")
    told = f"{nic.name} runs at {rate_text(nic.speed_mbit)} of {rate_text(nic.max_speed_mbit)}"
    return Fault(told, {"interface": nic.name}) if nic.speed_mbit < nic.max_speed_mbit else Fine(told)


@NODE.add(
    "fabric-duplex",
    "slow",
    "the fabric NIC is full duplex",
    remedy="ethtool -s {interface} autoneg on, on both ends",
    source="half duplex comes of one end without autonegotiation: collisions at every load",
)
def _duplex(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None:
        return _none(s)
    if nic.duplex is None:
        return Unknown(f"{nic.name} does not say")
    return Fault(f"{nic.name} is half duplex", {"interface": nic.name}) if nic.duplex == "half" else Fine("full duplex")


@NODE.add(
    "fabric-eee",
    "slow",
    "Energy-Efficient Ethernet is off",
    remedy="ethtool --set-eee {interface} eee off",
    source="IEEE 802.3az: a sleeping link wakes in microseconds, and decoding sends a small packet each time",
)
def _eee(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None:
        return _none(s)
    if nic.eee is None:
        return Unknown(f"{nic.name} has none, or does not say")
    return Fault(f"it is on for {nic.name}", {"interface": nic.name}) if nic.eee else Fine(f"off on {nic.name}")


@NODE.add(
    "fabric-mtu",
    "slow",
    "the fabric's MTU is 1500 or more",
    remedy="ip link set {interface} mtu 1500 (and in the network's configuration)",
    source="IEEE 802.3; each packet costs the processor the same",
)
def _mtu(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None:
        return _none(s)
    told = f"{nic.name} has MTU {nic.mtu}"
    return Fault(told, {"interface": nic.name}) if nic.mtu < 1500 else Fine(told)


@NODE.add(
    "fabric-errors",
    "slow",
    "no packet is damaged or dropped while the peers are probed",
    remedy="replace the cable, then the port: `ethtool -S {interface}` tells more",
    source="/sys/class/net/NIC/statistics before and after the probes",
    in_plan=False,
)
def _errors(s: NodeSituation) -> Answer:
    if s.nic is None:
        return _none(s)
    before = s.probe.counters_before if s.probe else None
    after = s.probe.counters_after if s.probe else None
    if before is None or after is None:
        return Unknown("the counters were not read before and after a probe")
    names = ("rx_errors", "rx_crc_errors", "tx_errors", "collisions", "rx_dropped", "tx_dropped")
    risen = {name: getattr(after, name) - getattr(before, name) for name in names}
    grown = {name: count for name, count in risen.items() if count > 0}
    told = ", ".join(f"{name} rose by {count}" for name, count in grown.items())
    if not grown.keys() <= {"rx_dropped", "tx_dropped"}:
        return Fault(told, {"interface": s.nic.name})
    if sum(grown.values()) < MANY_DROPS:
        return Fine(told or "no counter rose during the probes")
    small = f"no cable does that: a ring too small, or a core too busy; see `ethtool -g {s.nic.name}` and `top`"
    return Fault(told, remedy=f"{small}, and ppdeploy_nic_tuning in docs/tuning.md")


@NODE.add(
    "fabric-flaps",
    "slow",
    "the fabric's link stays up",
    remedy="replace the cable, then the port: `journalctl -k | grep {interface}` tells when it went",
    source="/sys/class/net/NIC/carrier_changes",
)
def _flaps(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None:
        return _none(s)
    if nic.carrier_changes is None:
        return Unknown(f"{nic.name} does not count")
    told = f"the link of {nic.name} came or went {nic.carrier_changes} times"
    return Fault(told, {"interface": nic.name}) if nic.carrier_changes > MANY_CHANGES else Fine(told)


@NODE.add(
    "one-nic-a-subnet",
    "slow",
    "no second NIC has an address in the fabric's subnet",
    remedy="take {other} out of the subnet, or `sysctl -w net.ipv4.conf.all.arp_ignore=1 "
    "net.ipv4.conf.all.arp_announce=2`",
    source="Linux answers ARP for any of its addresses on any NIC (ARP flux), and sends by the first route",
)
def _one_nic(s: NodeSituation) -> Answer:
    nic = s.nic
    if nic is None or s.fabric is None:
        return _none(s)
    others = [
        other.name
        for other in s.facts.nics
        if other.name != nic.name and other.up
        for address in other.addresses
        if str(address.interface.network) == s.fabric.network
    ]
    if others:
        told = f"{nic.name} and {others[0]} both are in {s.fabric.network}"
        if s.facts.sysctl.arp_ignore:
            return Fine(f"{told}: harmless, arp_ignore is {s.facts.sysctl.arp_ignore}, each answers for its own")
        return Fault(f"{told}, arp_ignore is {s.facts.sysctl.arp_ignore}", {"other": others[0]})
    return Fine(f"{nic.name} alone is in {s.fabric.network}")


@NODE.add(
    "default-route",
    "slow",
    "the default route leaves by a real NIC",
    remedy="ip route del default dev {interface}, or give the real one a lower metric",
    source="downloads leave by it; ranks do not: VLLM_HOST_IP and the interface variables name the fabric",
)
def _default_route(s: NodeSituation) -> Answer:
    route = next((one for one in s.facts.default_routes if one.family == 4), None)
    if route is None:
        return Fine("there is none: harmless, the ranks need the fabric alone")
    nic = s.facts.nic(route.interface)
    if nic is not None and is_software(nic):
        return Fault(f"it leaves by {route.interface}, a {nic.kind} device", {"interface": route.interface})
    return Fine(f"it leaves by {route.interface}")


@NODE.add(
    "own-address",
    "blocked",
    "no other machine has the node's fabric address",
    remedy="give one of them another address; the other one's NIC is {mac}: `ip neigh` and the switch tell which it is",
    source="RFC 5227: an ARP probe for the own address must stay without an answer",
    in_plan=False,
)
def _own_address(s: NodeSituation) -> Answer:
    if s.nic is None or s.fabric is None:
        return _none(s)
    claims = s.probe.claims if s.probe else None
    if claims is None:
        reason = s.probe.problem("duplicate address") if s.probe else None
        return Unknown(f"nobody could be asked ({reason or 'no probe was made, or the link has no ARP'})")
    own = {nic.mac for nic in s.facts.nics}
    others = [mac for mac in claims if mac not in own]
    if others:
        return Fault(f"{s.fabric.address} is also answered for by {', '.join(others)}", {"mac": others[0]})
    return Fine(f"nobody else answers for {s.fabric.address}")


@NODE.add(
    "probes",
    "slow",
    "the node can look at its peers",
    remedy="run `ppdeploy check --limit {pipeline} -v` to see what the module says",
    source="module ppdeploy_pairs: a listener, ICMP and ARP sockets, `ip route get`",
    in_plan=False,
)
def _probes(s: NodeSituation) -> Answer:
    if s.nic is None:
        return _none(s)
    if s.probe is None:
        return Fault(s.probe_problem, {"pipeline": s.pipeline}) if s.probe_problem else Unknown("it was not asked to")
    if s.probe.problems:
        listed = "; ".join(f"{one.probe}: {one.reason}" for one in s.probe.problems if one.probe != "disk")
        if listed:
            return Fault(listed, {"pipeline": s.pipeline})
    return Fine(f"it looked at {len(s.probe.peers)} peers")


@NODE.add(
    "rdma",
    "slow",
    "of the RDMA devices, where there are any, one is active",
    remedy="see `rdma link`, and the port's cable; on plain TCP nothing is lost",
    source="/sys/class/infiniband",
)
def _rdma(s: NodeSituation) -> Answer:
    if not s.facts.rdma_devices:
        return Fine("there is none: ranks talk by TCP")
    down = [one.name for one in s.facts.rdma_devices if one.state != "ACTIVE"]
    # The other port of a card is often left empty. The port that ranks are to use is the plan's to judge.
    if len(down) == len(s.facts.rdma_devices):
        return Fault(f"{', '.join(down)} is not active")
    listed = ", ".join(f"{one.name} ({one.link_layer})" for one in s.facts.rdma_devices)
    if s.rdma is not None:
        return Fine(f"{listed} is there, and ranks talk through {s.rdma.device}")
    return Fine(f"{listed} is there and not used: ranks talk by TCP unless ppdeploy_transport is rdma")
