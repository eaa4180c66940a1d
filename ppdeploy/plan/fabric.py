"""Which NIC and address the ranks of each node talk on; never guessed from the default route."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network, ip_interface

from ppdeploy.errors import BlockedError
from ppdeploy.facts import Nic, NodeFacts
from ppdeploy.plan.types import Fabric
from ppdeploy.spec import PipelineSpec

_SOFTWARE_NAMES = re.compile(
    r"^(docker|br-[0-9a-f]{12}|virbr|lxcbr|lxdbr|podman|cni|flannel|cali|tailscale|zt|wg|tun|tap)"
)
"""NICs that container engines, VPNs and hypervisors make: they never lead straight to a peer."""
_SOFTWARE_KINDS = frozenset({"loopback", "tun", "wireguard", "dummy", "tunnel"})


@dataclass(frozen=True)
class Wish:
    """What the inventory says about the fabric of one host."""

    interface: str | None = None


@dataclass(frozen=True)
class _Place:
    """An address of a host that could be its place on a fabric."""

    nic: Nic
    interface: IPv4Interface


def fabric_of(spec: PipelineSpec, facts: Mapping[str, NodeFacts]) -> dict[str, Fabric]:
    """Return the fabric of those hosts of a pipeline that have facts, as its variables say; see `choose_fabric`."""
    hosts = [host for host in spec.hosts if host.name in facts]
    return choose_fabric(
        pipeline=spec.name,
        hosts=[host.name for host in hosts],
        facts=facts,
        wishes={host.name: Wish(interface=host.vars.fabric_interface) for host in hosts},
        subnet=str(spec.vars.fabric_subnet) if spec.vars.fabric_subnet else None,
        allow_wireless=spec.vars.fabric_allow_wireless,
    )


def choose_fabric(
    *,
    pipeline: str,
    hosts: Sequence[str],
    facts: Mapping[str, NodeFacts],
    wishes: Mapping[str, Wish],
    subnet: str | None = None,
    allow_wireless: bool = False,
) -> dict[str, Fabric]:
    """Choose the subnet that all hosts of a pipeline share, and on each host the NIC and address in it.

    Of several shared subnets the one whose slowest NIC is fastest wins; two of one speed, or none, are refused with
    the list. Wireless NICs count only when asked for. A one-node pipeline stays on loopback.

    Raises BlockedError, since only the hosts' own facts tell.
    """
    if len(hosts) == 1:
        reason = "one node: its ranks talk on loopback"
        return {
            hosts[0]: Fabric(
                interface="lo",
                address="127.0.0.1",
                network="127.0.0.0/8",
                speed_mbit=None,
                mtu=None,
                reason=reason,
            )
        }
    wanted = IPv4Network(subnet) if subnet else None
    places = {
        host: _places(host, facts[host], wishes.get(host, Wish()), wanted, allow_wireless=allow_wireless)
        for host in hosts
    }
    shared = _shared_networks(hosts, places)
    if not shared:
        raise BlockedError(
            f"the hosts share no subnet on a usable NIC: {_list_places(places)}",
            where=f"pipeline {pipeline}, ppdeploy_fabric_subnet",
            remedy="give each host an address in one subnet, or name the NIC with ppdeploy_fabric_interface"
            + ("" if allow_wireless else " (Wi-Fi counts only with ppdeploy_fabric_allow_wireless: true)"),
        )
    doubles = {network: double for network, chosen in shared.items() if (double := _double(chosen))}
    distinct = {network: chosen for network, chosen in shared.items() if network not in doubles}
    if not distinct:
        network, (first, second, address) = next(iter(doubles.items()))
        raise BlockedError(
            f"{first} and {second} both have the address {address} in {network}",
            where=f"pipeline {pipeline}, host {second}, interface {shared[network][second].nic.name}",
            remedy="give one of them another address, or name the fabric with ppdeploy_fabric_subnet",
        )
    network, reason = _best(pipeline, distinct, named=subnet is not None)
    return {
        host: Fabric(
            interface=place.nic.name,
            address=str(place.interface.ip),
            network=str(network),
            speed_mbit=place.nic.speed_mbit,
            mtu=place.nic.mtu,
            reason=reason,
        )
        for host, place in distinct[network].items()
    }


def _places(
    host: str, facts: NodeFacts, wish: Wish, subnet: IPv4Network | None, *, allow_wireless: bool
) -> list[_Place]:
    """Return the addresses of a host that may be on the fabric; refuse what the inventory names and is not there."""
    named = None
    if wish.interface is not None:
        named = facts.nic(wish.interface)
        if named is None:
            raise BlockedError(
                f"there is no interface {wish.interface}",
                where=f"host {host}, ppdeploy_fabric_interface",
                remedy=f"choose one of {', '.join(nic.name for nic in facts.nics if nic.name != 'lo')}",
            )
        if not named.up:
            raise BlockedError(
                f"interface {named.name} is {named.operstate}",
                where=f"host {host}, ppdeploy_fabric_interface",
                remedy=f"plug the cable in or run `ip link set {named.name} up`",
            )
    nics = [named] if named else [nic for nic in facts.nics if _usable(nic, allow_wireless=allow_wireless)]
    places = [
        _Place(nic, interface)
        for nic in nics
        for interface in (ip_interface(f"{a.address}/{a.prefix}") for a in nic.addresses if a.scope == "global")
        if isinstance(interface, IPv4Interface)
    ]
    if named and not places:
        raise BlockedError(
            f"interface {named.name} has no IPv4 address",
            where=f"host {host}, ppdeploy_fabric_interface",
            remedy="give it one in the subnet of the peers",
        )
    if subnet is None:
        return places
    inside = [place for place in places if place.interface.ip in subnet]
    if not inside:
        have = ", ".join(f"{place.nic.name} {place.interface}" for place in places) or "no usable address"
        raise BlockedError(
            f"no usable NIC has an address in the fabric subnet {subnet} (it has {have})",
            where=f"host {host}, ppdeploy_fabric_subnet",
            remedy="correct the subnet or give the host an address in it",
        )
    return inside


def is_software(nic: Nic) -> bool:
    """Return whether container engines, VPNs or hypervisors made the NIC: it never leads straight to a peer."""
    return nic.kind in _SOFTWARE_KINDS or _SOFTWARE_NAMES.match(nic.name) is not None


def _usable(nic: Nic, *, allow_wireless: bool) -> bool:
    if not nic.up or is_software(nic):
        return False
    return allow_wireless or not nic.wireless


def _shared_networks(
    hosts: Sequence[str], places: Mapping[str, Sequence[_Place]]
) -> dict[IPv4Network, dict[str, _Place]]:
    """Return the networks in which every host has an address, with each host's place in it."""
    networks = [{place.interface.network: place for place in reversed(places[host])} for host in hosts]
    common = set(networks[0]).intersection(*networks[1:])
    return {network: {host: networks[i][network] for i, host in enumerate(hosts)} for network in sorted(common)}


def _double(chosen: Mapping[str, _Place]) -> tuple[str, str, str] | None:
    """Return two hosts with one address, and the address; a bridge that software made looks so on every host."""
    seen: dict[str, str] = {}
    for host, place in chosen.items():
        address = str(place.interface.ip)
        if address in seen:
            return seen[address], host, address
        seen[address] = host
    return None


def _best(pipeline: str, shared: Mapping[IPv4Network, Mapping[str, _Place]], *, named: bool) -> tuple[IPv4Network, str]:
    if len(shared) == 1:
        network = next(iter(shared))
        why = "named by ppdeploy_fabric_subnet" if named else "the only subnet that all hosts share"
        return network, f"{network}: {why}"
    # A wired network beats a wireless one of any speed; an unknown speed is the slowest.
    rank = {
        network: (
            all(not place.nic.wireless for place in chosen.values()),
            min(place.nic.speed_mbit or 0 for place in chosen.values()),
        )
        for network, chosen in shared.items()
    }
    ordered = sorted(rank, key=lambda network: rank[network], reverse=True)
    if rank[ordered[0]] == rank[ordered[1]]:
        tied = [network for network in ordered if rank[network] == rank[ordered[0]]]
        listed = "; ".join(
            f"{network} on " + ", ".join(f"{host} {place.nic.name}" for host, place in shared[network].items())
            for network in tied
        )
        raise BlockedError(
            f"the hosts share {len(tied)} subnets of the same speed and the fabric is not guessed: {listed}",
            where=f"pipeline {pipeline}, ppdeploy_fabric_subnet",
            remedy=f"name one of them, such as ppdeploy_fabric_subnet: {tied[0]}",
        )
    others = ", ".join(f"{network} at {rank[network][1] or 'unknown'}" for network in ordered[1:])
    return ordered[0], f"{ordered[0]}: the fastest shared wired subnet, {rank[ordered[0]][1]} Mbit/s (also {others})"


def _list_places(places: Mapping[str, Sequence[_Place]]) -> str:
    return "; ".join(
        f"{host} has " + (", ".join(f"{place.nic.name} {place.interface}" for place in found) or "no usable address")
        for host, found in places.items()
    )
