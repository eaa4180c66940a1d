"""The tunnel of a pipeline, where `ppdeploy_fabric_encryption` asks for one: its fabric, inside WireGuard.

What talks between the nodes then does so on the tunnel's addresses: agents, ranks, and what fetches weights. The NIC
below it, the wire, carries nothing of theirs but UDP that its peers alone can read. The private key is made on the
node and stays there; the plan has the public ones, as the nodes' facts tell them. No key is part of a release: the
addresses are, so that switching the tunnel on or off is a new one.

60 bytes of each packet are WireGuard's over IPv4: 20 of IP, 8 of UDP, 16 of header and 16 of the authenticator
(https://www.wireguard.com/protocol/, "Subsequent Messages: Exchange of Data Packets").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network

from ppdeploy.errors import InputError
from ppdeploy.facts import NodeFacts
from ppdeploy.plan.environment import OF_TUNNELS, lacking, packages_from
from ppdeploy.plan.types import Fabric, Finding, PlannedFile, SystemPackage, TunnelPeer, TunnelPlan
from ppdeploy.spec import PipelineSpec

INTERFACE = "ppdeploy0"
PORT = 29500
"""UDP port of every node's tunnel: the agents' number, which is TCP's there."""

OVERHEAD = 60
"""Bytes of a packet that are WireGuard's, over IPv4."""

USUAL_MTU = 1500
"""Of a NIC that does not tell its own."""

UNIT_NAME = "ppdeploy-tunnel.service"
UNIT = f"/etc/systemd/system/{UNIT_NAME}"
FOLDER = "/etc/ppdeploy/tunnel"
PRIVATE_KEY = f"{FOLDER}/private.key"
PUBLIC_KEY = f"{FOLDER}/public.key"
PEERS = f"{FOLDER}/peers.conf"
"""The peers' public keys: apart from the unit, so that another peer does not open the tunnel anew."""


def plan_tunnels(
    spec: PipelineSpec, facts: Mapping[str, NodeFacts], wires: Mapping[str, Fabric]
) -> dict[str, TunnelPlan]:
    """Return the tunnel of each host; none where the inventory asks for none, or the pipeline has one node.

    `wires` is the fabric as `fabric_of` chose it. A node's address follows from that on its wire. Raises InputError
    where the tunnel's network has too few addresses.
    """
    kind, network = spec.vars.fabric_encryption, spec.vars.fabric_encryption_subnet
    hosts = [host.name for host in spec.hosts]
    if kind == "none" or len(hosts) == 1:
        return {}
    addresses = _addresses(spec.name, network, {host: wires[host] for host in hosts})
    # The same on every node, and small enough for each: a packet for the node with the smallest must fit too.
    mtu = min(spec.vars.mtu or wires[host].mtu or USUAL_MTU for host in hosts) - OVERHEAD
    ends = {
        host: TunnelPeer(
            host=host,
            address=addresses[host],
            endpoint=wires[host].address,
            public_key=_public_key(facts[host]),
        )
        for host in hosts
    }
    return {
        host: TunnelPlan(
            kind=kind,
            interface=INTERFACE,
            address=ends[host].address,
            network=str(network),
            mtu=mtu,
            port=PORT,
            public_key=ends[host].public_key,
            wire=wires[host],
            open=_is_open(facts[host], ends[host].address),
            peers=tuple(ends[other] for other in hosts if other != host),
        )
        for host in hosts
    }


def through(tunnel: TunnelPlan | None, wire: Fabric) -> Fabric:
    """Return where the node's ranks and its agent talk: on the tunnel where there is one, else on the wire itself.

    The rate is the wire's; what WireGuard makes of it, `ppdeploy net` measures.
    """
    if tunnel is None:
        return wire
    return Fabric(
        interface=tunnel.interface,
        address=tunnel.address,
        network=tunnel.network,
        speed_mbit=wire.speed_mbit,
        mtu=tunnel.mtu,
        reason=f"{tunnel.kind} over {wire.interface} {wire.address}; {wire.reason}",
    )


def tunnel_files(tunnel: TunnelPlan | None) -> tuple[PlannedFile, ...]:
    """Return the files of the role fabric_encryption, without the keys, which are made on the node."""
    if tunnel is None:
        return ()
    return (
        PlannedFile(path=UNIT, template="ppdeploy-tunnel.service.j2", part="tunnel", in_release=False),
        PlannedFile(path=PEERS, template="ppdeploy-tunnel-peers.conf.j2", part="tunnel", mode="0600", in_release=False),
    )


def tunnel_packages(tunnel: TunnelPlan | None) -> tuple[SystemPackage, ...]:
    """Return what the tunnel needs of a node's system: the same names with apt and dnf."""
    return OF_TUNNELS[tunnel.kind] if tunnel else ()


def tunnel_findings(
    spec: PipelineSpec, facts: Mapping[str, NodeFacts], tunnels: Mapping[str, TunnelPlan]
) -> Iterator[Finding]:
    """Yield what forbids the tunnel on a host, or to switch it on or off now, or to give it another address."""
    for host in (one.name for one in spec.hosts):
        wanted = tunnels.get(host)
        told = [
            *(_lacking(facts[host], wanted) if wanted else ()),
            *(_not_installed(facts[host], wanted) if wanted and packages_from(spec.vars) == "none" else ()),
            *(_clashes(facts[host], wanted) if wanted else ()),
            *(_cloned(wanted) if wanted else ()),
            *_moved_while_running(spec.name, facts[host], wanted),
        ]
        for reason, remedy in told:
            yield Finding(
                id="fabric-encryption", verdict="blocked", pipeline=spec.name, host=host, reason=reason, remedy=remedy
            )


def moved(facts: NodeFacts, wanted: TunnelPlan | None) -> str:
    """Return what the next apply does to the addresses that the release before it has, in words; empty: nothing."""
    there = facts.files.get(UNIT) is not None
    if there != (wanted is not None):
        return f"encryption of the fabric is to be switched {'on' if wanted else 'off'}"
    now = _address_now(facts)
    if wanted is not None and now and now != wanted.address:
        return f"its address in the tunnel is to change from {now} to {wanted.address}"
    return ""


def keyless(tunnels: Sequence[TunnelPlan | None]) -> bool:
    """Return whether a node's key is still to be made, so that its peers' files are not known yet."""
    return any(tunnel is not None and not tunnel.public_key for tunnel in tunnels)


def _addresses(pipeline: str, network: IPv4Network, wires: Mapping[str, Fabric]) -> dict[str, str]:
    """Return each host's address in the tunnel: with the host's part of its address on the wire.

    So nobody else's changes where a node comes or goes, while ranks of the others run. Where the wire's network is the
    larger one, the part is taken modulo the tunnel's, and two hosts that would meet are refused.
    """
    room = max(network.num_addresses - 2, 0)
    if room < len(wires):
        raise InputError(
            f"{network} has {room} addresses for {len(wires)} nodes",
            where=f"pipeline {pipeline}, ppdeploy_fabric_encryption_subnet",
            remedy="name a larger private network, such as one with /24",
        )
    taken: dict[str, str] = {}
    for host, wire in wires.items():
        place = int(IPv4Address(wire.address)) - int(IPv4Network(wire.network).network_address)
        address = str(network.network_address + 1 + (place - 1) % room)
        if address in taken:
            raise InputError(
                f"{taken[address]} and {host} would both have {address} in the tunnel, by their fabric addresses "
                f"{wires[taken[address]].address} and {wire.address}",
                where=f"pipeline {pipeline}, ppdeploy_fabric_encryption_subnet",
                remedy=f"name a private network as large as the fabric's, {wire.network}",
            )
        taken[address] = host
    return {host: address for address, host in taken.items()}


def _address_now(facts: NodeFacts) -> str:
    """Return the host's address in the tunnel that it has open; empty where it has none."""
    nic = facts.nic(INTERFACE)
    return next((one.address for one in nic.addresses if "." in one.address), "") if nic else ""


def _is_open(facts: NodeFacts, address: str) -> bool:
    return _address_now(facts) == address


def _public_key(facts: NodeFacts) -> str:
    return (facts.tunnel.public_key if facts.tunnel else None) or ""


_OTHER_KERNEL = (
    "boot a kernel that has it (Linux 5.6 or newer, as distributions build it), or set ppdeploy_fabric_encryption to "
    "wireguard-go, which is slower, or to none"
)
_NO_TUN = (
    "load the kernel's module `tun` (in a container: give it the device), or set ppdeploy_fabric_encryption to none"
)


def _lacking(facts: NodeFacts, wanted: TunnelPlan) -> Iterator[tuple[str, str]]:
    """Yield what the host lacks for a tunnel of this kind, with the remedy."""
    known = facts.tunnel
    if known is None:
        yield "its facts do not say whether it can have a tunnel", "take the facts anew with this ppdeploy"
    elif wanted.kind == "wireguard" and not known.kernel:
        yield f"its kernel {facts.os.kernel} has no WireGuard", _OTHER_KERNEL
    elif wanted.kind == "wireguard-go" and not known.tun:
        yield "it has no /dev/net/tun, which wireguard-go needs", _NO_TUN


def _not_installed(facts: NodeFacts, wanted: TunnelPlan) -> Iterator[tuple[str, str]]:
    """Yield the packages that the host lacks for the tunnel, where an apply may not install them."""
    absent = ", ".join(one.package for one in lacking(tunnel_packages(wanted), facts.tools))
    ways = "set ppdeploy_system_packages to archives, or to bundle with `ppdeploy bundle --packages`"
    if absent:
        yield (
            f"it lacks {absent} for the tunnel, and an apply may not install packages",
            f"install {absent} there, or {ways}",
        )


def _clashes(facts: NodeFacts, wanted: TunnelPlan) -> Iterator[tuple[str, str]]:
    """Yield the networks of the host's other NICs that the tunnel's would hide."""
    for nic in facts.nics:
        for there in (address.interface.network for address in nic.addresses):
            if nic.name != INTERFACE and isinstance(there, IPv4Network) and there.overlaps(wanted.ip_network):
                yield (
                    f"the tunnel's network {wanted.network} overlaps {there} of its NIC {nic.name}",
                    "set ppdeploy_fabric_encryption_subnet to a private network that no host of the pipeline is in",
                )


def _cloned(wanted: TunnelPlan) -> Iterator[tuple[str, str]]:
    """Yield the peers that have this node's own key: WireGuard takes what they send for its own, and drops it."""
    twins = [peer.host for peer in wanted.peers if wanted.public_key and peer.public_key == wanted.public_key]
    if twins:
        yield (
            f"it has the same WireGuard key as {', '.join(twins)}: one is a clone of the other",
            "remove /etc/ppdeploy/tunnel on it, and apply again, which makes another key",
        )


def _moved_while_running(pipeline: str, facts: NodeFacts, wanted: TunnelPlan | None) -> Iterator[tuple[str, str]]:
    """Yield that a rank runs where its agent and peers are about to move to other addresses."""
    if facts.rank_runs(pipeline) and (what := moved(facts, wanted)):
        yield f"{what} while a rank runs, whose peers would lose it", "run `ppdeploy stop`, then `ppdeploy apply`"
