"""What the agent sees of its own node in one loop: the input of the protocol besides the peers' answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ppdeploy.agent.messages import NONE, GenerationId, Member
from ppdeploy.agent.progress import ApiSight
from ppdeploy.agent.records import Memory, Record

START, STOP, RESTART = "start", "stop", "restart"


@dataclass(frozen=True)
class Identity:
    """Who this agent is. The boot id changes with every boot, the machine id never."""

    cluster: str
    pipeline: str
    node: str
    machine_id: str
    boot_id: str


@dataclass(frozen=True)
class RankSight:
    """The rank's unit, as systemd and the kernel show it.

    `known` is false when any part could not be read, or is older than the last change: then the rank
    counts as there. `processes` are those in the unit's cgroup, all levels. `job`: systemd holds a job
    for the unit or is still starting or stopping it. `ticket` is a start ticket that nobody has consumed;
    `running` and `release` come from the consumed one. `main_gone`: the main process has ended, others of
    the unit have not. `residue` is what the rank left behind on the node, such as GPU memory. `stuck`
    tells of processes that do not die. `code` and `end` tell how the last main process ended.
    """

    known: bool = True
    processes: int = 0
    job: bool = False
    ticket: GenerationId = NONE
    running: GenerationId = NONE
    release: str = ""
    main_gone: bool = False
    residue: str = ""
    stuck: str = ""
    code: int | None = None
    end: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True)
class ReleaseSight:
    """The release that the `current` link names, with its ordered nodes; none when release.json itself is unusable.

    `problem` names the first file, version or weight on this node that differs from what the release lists.
    """

    digest: str = ""
    nodes: tuple[Member, ...] = ()
    problem: str = "no release has been applied yet"

    def head(self) -> Member | None:
        """Return the head that the release names, or None when there is no usable release."""
        return self.nodes[0] if self.nodes else None


@dataclass(frozen=True)
class Command:
    """The operator's last word on this node, a local file with a rising serial.

    `release`, when given, is the one that is to run: a start while it already runs does nothing.
    """

    serial: int = 0
    verb: str = START
    release: str = ""
    forget: tuple[str, ...] = ()


@dataclass(frozen=True)
class Local:
    """All of one look at the node. `stored_*` are what lies on disk (head) and in /run (every node) for certain.

    `salt` is 64 fresh random bits, so that the protocol itself stays deterministic.
    """

    identity: Identity
    salt: int
    rank: RankSight = field(default_factory=RankSight)
    release: ReleaseSight = field(default_factory=ReleaseSight)
    ready: bool = True
    remark: str = ""
    command: Command = field(default_factory=Command)
    api: ApiSight = field(default_factory=ApiSight)
    dying: str = ""
    stored_memory: Memory = field(default_factory=Memory)
    stored_record: Record = field(default_factory=Record)
    storage_problem: str = ""
    disk_problem: str = ""
