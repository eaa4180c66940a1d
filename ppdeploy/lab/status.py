"""What is known of a lab and its hosts, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class NodeStatus:
    """One host. `system` is what `systemctl is-system-running` says, or `unreachable`, or `off`.

    `seconds` is the time since its last start; `rate` and `cut` say what was done to its NICs, by NIC.
    """

    name: str
    system: str
    management: str
    fabric: str
    boots: int
    seconds: float | None
    memory_bytes: int | None
    rate: dict[str, str]
    cut: dict[str, str]


@dataclass(frozen=True)
class LabStatus:
    """A lab. `phase` is `none`, `up`, or `starting` or `ending` (a command does it, or died at it).

    `owner` describes the process that keeps the lab for itself, where there is one.
    """

    name: str
    phase: str
    folder: str
    checkout: str | None
    owner: str | None
    namespace: str
    inventory: str | None
    nodes: list[NodeStatus]

    def as_json(self) -> dict[str, Any]:
        """Return the status as plain values."""
        return asdict(self)
