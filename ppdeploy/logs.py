"""The lines of all ranks on one time axis: what the nodes returned, merged by time, and clocks that are wrong."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class Line:
    """One line of a node's journal.

    `time` is seconds since 1970 by the controller's clock; `unit` is rank, agent or systemd (what systemd says of one
    of them); `priority` is syslog's (3 and less are errors).
    """

    time: float
    host: str
    unit: str
    message: str
    priority: int = 6
    pid: int = 0
    pipeline: str = ""


def clock_offset(before: float, node: Sequence[float], after: float) -> float:
    """Return by how many seconds a node's clock is wrong for certain, 0 where it may be right.

    `node` is its clock at the start and end of a call that the controller made between `before` and `after`, by its
    own. How long the way there and back takes is not known, so an offset within these bounds proves nothing.
    """
    least, most = node[1] - after, node[0] - before
    if least > 0:
        return least
    return most if most < 0 else 0.0


def lines_of(host: str, raw: Iterable[Mapping[str, Any]], *, pipeline: str = "", offset: float = 0.0) -> list[Line]:
    """Return a node's lines as `ppdeploy_journal` returned them, by the controller's clock."""
    return [
        Line(
            time=float(line["time"]) - offset,
            host=host,
            unit=str(line["unit"]),
            message=str(line["message"]),
            priority=int(line["priority"]),
            pid=int(line["pid"]),
            pipeline=pipeline,
        )
        for line in raw
    ]


def merged(nodes: Iterable[Sequence[Line]]) -> Iterator[Line]:
    """Yield the lines of all nodes by time. A node's own lines keep their order, whatever its clock did meanwhile."""
    for _, line in heapq.merge(*map(_rising, nodes), key=lambda timed: timed[0]):
        yield line


def _rising(lines: Sequence[Line]) -> Iterator[tuple[float, Line]]:
    latest = float("-inf")
    for line in lines:
        latest = max(latest, line.time)
        yield latest, line


class Axis:
    """Lines that come in over time, handed on by time: what may still be preceded by another node's is held back."""

    def __init__(self) -> None:
        self._held: dict[str, list[Line]] = {}

    def add(self, host: str, lines: Iterable[Line]) -> None:
        """Take a node's next lines."""
        self._held.setdefault(host, []).extend(lines)

    def take(self, until: float = float("inf")) -> list[Line]:
        """Return the lines up to a time, at which every node that is heard was read or later."""
        ready: list[list[Line]] = []
        for host, lines in self._held.items():
            count = next((place for place, line in enumerate(lines) if line.time > until), len(lines))
            ready.append(lines[:count])
            self._held[host] = lines[count:]
        return list(merged(ready))


@dataclass(frozen=True)
class KeptFailure:
    """A failing generation whose journals are kept: on which nodes, each with the reason that it saw."""

    name: str
    generation: int
    time: float
    reasons: Mapping[str, str]
    first: bool


def kept_failures(nodes: Mapping[str, Mapping[str, Any]]) -> list[KeptFailure]:
    """Return the failures that the nodes of a pipeline kept, the last one first.

    `nodes` has for each host what `ppdeploy_journal` returned for `failures`.
    """
    first = {told["first"] for told in nodes.values() if told.get("first")}
    times: dict[str, list[float]] = {}
    reasons: dict[str, dict[str, str]] = {}
    for host, told in nodes.items():
        for one in told["failures"]:
            times.setdefault(one["name"], []).append(float(one["time"]))
            reasons.setdefault(one["name"], {})[host] = str(one["reason"])
    return [
        KeptFailure(name, int(name.partition("-")[0]), min(times[name]), reasons[name], name in first)
        for name in sorted(reasons, reverse=True)
    ]
