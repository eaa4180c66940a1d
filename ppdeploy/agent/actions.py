"""What the protocol wants done. Each action is safe to repeat, to lose in a crash, and to carry out late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ppdeploy.agent.messages import GenerationId
from ppdeploy.agent.records import Memory, Record


@dataclass(frozen=True)
class SaveMemory:
    """Write the node's memory to /run. Nothing relies on it before `Local.stored_memory` shows it."""

    memory: Memory


@dataclass(frozen=True)
class SaveRecord:
    """Write the head's record to disk. Nothing relies on it before `Local.stored_record` shows it."""

    record: Record


@dataclass(frozen=True)
class StartRank:
    """Issue the one ticket for this generation and release, then queue the unit's start."""

    generation: GenerationId
    release: str


@dataclass(frozen=True)
class KillRank:
    """Revoke the ticket, cancel the start job and kill every process of the unit."""

    reason: str


@dataclass(frozen=True)
class DrainRank:
    """Stop the unit gently: vLLM finishes the requests it has, within its own limit."""

    reason: str


@dataclass(frozen=True)
class SendCanary:
    """Ask the head's own API for one token; the first canary of a generation is a full-size prefill."""

    number: int
    full_size: bool


@dataclass(frozen=True)
class KeepJournal:
    """Keep the journal of the local rank of a generation that failed; that of `series` outlives the later ones."""

    generation: GenerationId
    series: GenerationId
    reason: str


@dataclass(frozen=True)
class Say:
    """Write one line to the agent's journal."""

    text: str


Action = Union[SaveMemory, SaveRecord, StartRank, KillRank, DrainRank, SendCanary, KeepJournal, Say]
