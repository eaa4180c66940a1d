"""Links between hosts as `ppdeploy net` measured them, and which of them still tell of the network as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ppdeploy.plan.types import Fabric

ALIKE = 0.1
"""Measured rates that differ by less than this share are one rate: no two runs of iperf3 agree better."""


@dataclass(frozen=True)
class MeasuredLink:
    """The way from one host to another, as it was measured."""

    sender: str
    receiver: str
    addresses: tuple[str, str]
    """Fabric addresses of sender and receiver at that time."""
    negotiated_mbit: int | None
    """The lower of both NICs' negotiated rates at that time."""
    rate_mbit: float
    """Payload that TCP carried, Mbit/s."""
    latency_seconds: float | None
    """One way: half of ping's median; None where no ping came back."""
    time: str
    """When, ISO 8601 in UTC."""


def still_true(links: Iterable[MeasuredLink], fabric: Mapping[str, Fabric]) -> dict[tuple[str, str], MeasuredLink]:
    """Return the measured links by sender and receiver, without those whose hosts now have another NIC or rate.

    `fabric` has the NIC of each host. An address or a negotiated rate that changed says that a cable, port or card
    did, and nothing is known of the new one.
    """
    return {
        (link.sender, link.receiver): link
        for link in links
        if link.sender in fabric
        and link.receiver in fabric
        and link.addresses == (fabric[link.sender].address, fabric[link.receiver].address)
        and link.negotiated_mbit == negotiated_mbit(fabric[link.sender], fabric[link.receiver])
    }


def negotiated_mbit(sender: Fabric, receiver: Fabric) -> int | None:
    """Return the lower of two NICs' negotiated rates in Mbit/s; None where one does not say it."""
    if sender.speed_mbit is None or receiver.speed_mbit is None:
        return None
    return min(sender.speed_mbit, receiver.speed_mbit)


def alike(rates: Iterable[float]) -> dict[float, float]:
    """Return for each measured rate the lowest of those that count as equal to it.

    What is said of "all links of this rate" then holds for links that differ only by what no measurement can tell.
    """
    found: dict[float, float] = {}
    lowest = 0.0
    for rate in sorted(set(rates)):
        if rate > lowest * (1 + ALIKE):
            lowest = rate
        found[rate] = lowest
    return found
