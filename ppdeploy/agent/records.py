"""What an agent must not forget: the node's memory (for one boot, in /run) and the head's record (on disk)."""

from __future__ import annotations

from dataclasses import dataclass

from ppdeploy.agent.messages import NONE, RUN, GenerationId, Member


@dataclass(frozen=True)
class Memory:
    """A node's promises of this boot. Losing it to a reboot is safe: the ranks are gone with it (rule 4).

    `promised`: nothing lower will be started. `started`: the highest generation that was started in this
    boot, with its release and the head to obey while that rank lives. `known`: the members of that gang
    and of the last ask.
    """

    boot_id: str = ""
    promised: GenerationId = NONE
    started: GenerationId = NONE
    release: str = ""
    head: Member | None = None
    known: tuple[Member, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A failure of the gang's own making; `at` is in seconds of the agent's clock.

    `boots` are the machines that the generation was launched on, each with its boot then: only those of the latest
    failure, until the next launch.
    """

    generation: GenerationId
    at: float
    reason: str
    boots: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Record:
    """The head's decisions. A generation is used only once its record lies on disk.

    `members` are all nodes that may hold a rank of this generation or, while it is not launched, of an
    earlier one. `wanted` is `run` or `stop`; `serial` is the last operator command handled; `failed` is
    the terminal reason. `streak` counts generations in a row that did not settle; `series` is the first
    of the generations that failed since all was last well, whose journals are kept. `stall_limit` (seconds) is how
    long a canary may take in this generation, 0 before it was measured.
    """

    generation: GenerationId = NONE
    launched: bool = False
    release: str = ""
    members: tuple[Member, ...] = ()
    draining: str = ""
    wanted: str = RUN
    serial: int = 0
    failed: str = ""
    failures: tuple[Failure, ...] = ()
    streak: int = 0
    series: GenerationId = NONE
    forgotten: tuple[str, ...] = ()
    last_reason: str = ""
    stall_limit: float = 0.0
