"""Probes: what a node saw of its fabric peers, as `plugins/modules/ppdeploy_pairs.py` returned it.

Names carry their unit. What could not be probed is None and has an entry with the reason in `NodeProbe.problems`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ppdeploy.errors import InputError
from ppdeploy.facts import NicCounters


class _Seen(BaseModel):
    """Base of all probes: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ProbeProblem(_Seen):
    """Something that could not be probed."""

    probe: str
    reason: str


class Route(_Seen):
    """How a connection that names no source address would leave for a peer."""

    interface: str | None
    """None when there is no route; `problem` says why."""
    source: str | None
    """The address that the connection would come from."""
    gateway: str | None
    """None when the peer is on the link."""
    problem: str | None


class Ping(_Seen):
    """ICMP echoes that may not be fragmented."""

    bytes: int
    """Of one packet, IP header included."""
    sent: int
    received: int
    problem: str | None
    """Why the kernel would not send one, such as `Message too long`."""
    smallest_s: float | None
    """Round trips in seconds; None when nothing came back."""
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None

    @property
    def lost(self) -> int:
        """Echoes without an answer."""
        return self.sent - self.received


class ClockDifference(_Seen):
    """The peer's clock minus this node's."""

    offset_s: float
    error_s: float
    """The most that `offset_s` can be wrong by."""


class Connect(_Seen):
    """One TCP connection to a port of the peer's listener."""

    port: int
    master: bool
    """It is the master port; the others are of the kernel's ephemeral range."""
    problem: str | None
    """None when our own listener answered."""
    seconds: float | None
    clock: ClockDifference | None


class PeerProbe(_Seen):
    """What a node saw of one peer."""

    route: Route | None
    macs: tuple[str, ...] | None
    """Who answers when the link is asked for the peer's address; None on a link without ARP."""
    ping: Ping | None
    whole: Ping | None
    """Echoes as large as the MTU of this node's fabric NIC."""
    connects: tuple[Connect, ...]
    """One for each port of the peer's listener; empty when it has none."""
    clock: ClockDifference | None
    bits_per_second: float | None
    """Payload that arrived in the best 50 ms of a short stream; None when none was sent."""


class DiskSpeed(_Seen):
    """How fast a file was read, past the page cache."""

    path: str
    bytes_per_second: float


class NodeProbe(_Seen):
    """All that one node saw in one call."""

    address: str
    interface: str
    closed: bool
    """This node's own listener has ended: all its peers are done."""
    claims: tuple[str, ...] | None
    """MAC addresses of other machines that say they have this node's own address."""
    counters_before: NicCounters | None
    counters_after: NicCounters | None
    disk: DiskSpeed | None
    peers: dict[str, PeerProbe]
    """By fabric address."""
    problems: tuple[ProbeProblem, ...]

    def problem(self, probe: str) -> str | None:
        """Return why a probe could not be made; None when it could."""
        return next((one.reason for one in self.problems if one.probe == probe), None)


class Listener(_Seen):
    """The listener that a node opened for its peers."""

    handle: str
    token: str
    ports: tuple[int, ...]
    master: bool
    """The last port is the master port."""
    master_problem: str | None
    """Why the master port could not be listened on, where it was to be."""


def probe_from_module(host: str, values: Mapping[str, Any]) -> NodeProbe:
    """Read what the module returned as `probe` on `host`; InputError when that is not a probe of this version."""
    return _read(NodeProbe, host, values)


def listener_from_module(host: str, values: Mapping[str, Any]) -> Listener:
    """Read what the module returned as `listener` on `host`; InputError when that is none of this version."""
    return _read(Listener, host, values)


_Read = TypeVar("_Read", bound=BaseModel)


def _read(kind: type[_Read], host: str, values: Mapping[str, Any]) -> _Read:
    try:
        # By way of JSON: Ansible's own string and mapping types become plain ones.
        return kind.model_validate_json(json.dumps(values))
    except (TypeError, ValueError, ValidationError) as error:
        raise InputError(
            f"these are not probes that this ppdeploy reads: {error}",
            where=f"host {host}",
            remedy="use the ppdeploy_pairs module and the ppdeploy package of one version",
        ) from error
