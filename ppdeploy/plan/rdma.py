"""RDMA instead of TCP between the ranks, where the inventory asks for it: which device, port and GID of each node.

A rank's unit lets it pin memory without a limit, which is what CAP_IPC_LOCK would be for, and the device nodes that the
kernel makes for verbs are open to everyone.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Address, ip_address

from ppdeploy.errors import BlockedError
from ppdeploy.facts import NodeFacts, RdmaDevice
from ppdeploy.plan.types import Fabric, Rdma


def choose_rdma(pipeline: str, facts: Mapping[str, NodeFacts], fabric: Mapping[str, Fabric]) -> dict[str, Rdma]:
    """Return the RDMA port behind the fabric NIC of every node.

    On Ethernet (RoCE) it also takes the GID of the fabric address in version 2, whose packets are plain UDP: NCCL's own
    choice depends on its version, and a GID of version 1 does not pass a router or a switch with VLANs.

    Raises BlockedError that names every node which has none, since nothing would tell that NCCL had gone back to TCP.
    """
    if len(fabric) == 1:
        return {}
    found: dict[str, Rdma] = {}
    problems: list[str] = []
    for host, place in fabric.items():
        one = _port(facts[host], place)
        if isinstance(one, Rdma):
            found[host] = one
        else:
            problems.append(f"{host}: {one}")
    links = {one.link_layer for one in found.values()}
    if not problems and len(links) > 1:
        problems.append("the nodes have both InfiniBand and RoCE, which do not reach one another")
    if problems:
        raise BlockedError(
            f"RDMA is not to be had: {'; '.join(problems)}",
            where=f"pipeline {pipeline}, ppdeploy_transport",
            remedy="mend that, or take ppdeploy_transport: rdma out of the inventory: TCP needs none of it",
        )
    return found


def _port(facts: NodeFacts, place: Fabric) -> Rdma | str:
    """Return the port behind a fabric NIC, or why there is none."""
    device = next((one for one in facts.rdma_devices if place.interface in one.interfaces), None)
    if device is None:
        others = ", ".join(one.name for one in facts.rdma_devices)
        return f"{place.interface} is no port of an RDMA device" + (f" ({others} is of other NICs)" if others else "")
    if device.state != "ACTIVE":
        return f"the port of {device.name} is {device.state or 'of an unknown state'}, not ACTIVE"
    if facts.verbs_library is None:
        return (
            "libibverbs.so.1 is not installed (`apt-get install libibverbs1 ibverbs-providers`, "
            "or `dnf install rdma-core`)"
        )
    if device.link_layer == "InfiniBand":
        return Rdma(device=device.name, link_layer="InfiniBand", gid_index=None)
    index = _gid_index(device, place)
    if index is None:
        return f"{device.name} has no GID of type RoCE v2 for {place.address} of {place.interface}"
    return Rdma(device=device.name, link_layer="Ethernet", gid_index=index)


def _gid_index(device: RdmaDevice, place: Fabric) -> int | None:
    """Return where the fabric address is in the device's table of GIDs: as an IPv4-mapped address, on that NIC."""
    wanted = IPv4Address(place.address)
    for gid in device.gids:
        address = ip_address(gid.address)
        mapped = getattr(address, "ipv4_mapped", None)
        if gid.kind == "RoCE v2" and gid.interface == place.interface and mapped == wanted:
            return gid.index
    return None
