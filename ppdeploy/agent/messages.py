"""What agents say to each other: generations, asks and answers, with their strict JSON form.

An answer comes from a network that anyone may write to; signing (`signing`) proves who said it, and the
readers here refuse every shape that an agent would not have sent.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

RUN, STOP, DRAIN = "run", "stop", "drain"
ABSENT, STARTING, RUNNING, STOPPING = "absent", "starting", "running", "stopping"

_MAX_TEXT = 400
_MAX_MEMBERS = 64


class GenerationId(NamedTuple):
    """One attempt to run the gang: a number and 64 random bits, compared as a whole.

    The random part tells apart two heads that arrive at one number, for example after one lost its disk.
    """

    number: int
    salt: int

    def __str__(self) -> str:
        return f"{self.number}.{self.salt:016x}"[:12]


NONE = GenerationId(0, 0)


@dataclass(frozen=True)
class Member:
    """A node as a part of a gang. `boot_id` is empty where no boot in particular is meant."""

    name: str
    machine_id: str
    address: str
    boot_id: str = ""


@dataclass(frozen=True)
class Ask:
    """What the head wants of every node; a wish that nodes read, never a command that they receive.

    `members` name the boot of each node as it was when it confirmed that its rank is gone: another boot
    must not start this generation. `start_head` lets the head's own rank start, once every worker has a
    live process.
    """

    generation: GenerationId
    want: str
    release: str = ""
    members: tuple[Member, ...] = ()
    start_head: bool = False
    series: GenerationId = NONE

    def member(self, name: str) -> Member | None:
        """Return the member called `name`, or None."""
        return next((member for member in self.members if member.name == name), None)


@dataclass(frozen=True)
class Outcome:
    """How the rank of a generation ended. `own` is true when it ended by itself, not by its agent's hand."""

    generation: GenerationId
    code: int | None
    reason: str
    own: bool


@dataclass(frozen=True)
class RankView:
    """The local rank as its agent shows it: state, the generation and release of the process, a remark."""

    state: str
    generation: GenerationId = NONE
    release: str = ""
    detail: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True)
class Answer:
    """Everything an agent says of its node. `promised`: no rank of a lower generation will be started here.

    `prepared` is the digest of a release that checked out on this node; `obeys` names the head whose asks
    count here.

    `loop_age` (seconds) is the age of the last finished control loop: a living HTTP thread proves nothing.
    """

    cluster: str
    pipeline: str
    node: str
    machine_id: str
    boot_id: str
    loop_age: float
    prepared: str
    ready: bool
    remark: str
    promised: GenerationId
    started: GenerationId
    rank: RankView
    outcome: Outcome | None = None
    known: tuple[Member, ...] = ()
    obeys: str = ""
    ask: Ask | None = None
    phase: str = ""
    held: bool = False
    version: str = ""


def clip(text: str) -> str:
    """Return the beginning of a text, as much as an answer may hold: a driver may complain at any length."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


class MalformedError(ValueError):
    """A message that no agent would send; `str()` says which field is wrong."""


def to_json(answer: Answer) -> dict[str, Any]:
    """Return the answer as plain JSON data (generation ids are pairs)."""
    return asdict(answer)


def answer_from_json(data: Any) -> Answer:
    """Read an answer; raise `MalformedError` for anything else than exactly that."""
    fields = _Fields(data)
    return Answer(
        cluster=fields.text("cluster"),
        pipeline=fields.text("pipeline"),
        node=fields.text("node"),
        machine_id=fields.text("machine_id"),
        boot_id=fields.text("boot_id"),
        loop_age=fields.seconds("loop_age"),
        prepared=fields.text("prepared"),
        ready=fields.flag("ready"),
        remark=fields.text("remark"),
        promised=fields.generation("promised"),
        started=fields.generation("started"),
        rank=_rank(fields.value("rank")),
        outcome=_outcome(fields.value("outcome")),
        known=fields.members("known"),
        obeys=fields.text("obeys"),
        ask=_ask(fields.value("ask")),
        phase=fields.text("phase"),
        held=fields.flag("held"),
        version=fields.text("version"),
    )


def ask_from_json(data: Any) -> Ask | None:
    """Read an ask, or None for null; raise `MalformedError`."""
    return _ask(data)


def member_from_json(data: Any) -> Member:
    """Read a member; raise `MalformedError`."""
    fields = _Fields(data)
    return Member(fields.text("name"), fields.text("machine_id"), fields.text("address"), fields.text("boot_id"))


def generation_from_json(data: Any) -> GenerationId:
    """Read a generation id from its pair; raise `MalformedError`."""
    if not isinstance(data, (list, tuple)) or len(data) != 2 or any(type(part) is not int for part in data):
        raise MalformedError("a generation id is a pair of whole numbers")
    number, salt = data
    if not (0 <= number < 2**53 and 0 <= salt < 2**64):
        raise MalformedError("a generation id is out of range")
    return GenerationId(number, salt)


class _Fields:
    """A JSON object of which every field is checked when it is read."""

    def __init__(self, data: Any) -> None:
        if not isinstance(data, dict):
            raise MalformedError("not an object")
        self._data = data

    def value(self, name: str) -> Any:
        if name not in self._data:
            raise MalformedError(f"{name} is missing")
        return self._data[name]

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str) or len(value) > _MAX_TEXT:
            raise MalformedError(f"{name} is not a short text")
        return value

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise MalformedError(f"{name} is not true or false")
        return value

    def whole(self, name: str) -> int:
        value = self.value(name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise MalformedError(f"{name} is not a whole number")
        return value

    def seconds(self, name: str) -> float:
        value = self.value(name)
        # The upper bound also refuses infinity and NaN, which Python's JSON reader accepts.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise MalformedError(f"{name} is not a number of seconds")
        return float(value)

    def generation(self, name: str) -> GenerationId:
        return generation_from_json(self.value(name))

    def members(self, name: str) -> tuple[Member, ...]:
        value = self.value(name)
        if not isinstance(value, (list, tuple)) or len(value) > _MAX_MEMBERS:
            raise MalformedError(f"{name} is not a list of members")
        found: list[Member] = [member_from_json(item) for item in value]
        return tuple(found)


def _rank(data: Any) -> RankView:
    fields = _Fields(data)
    state = fields.text("state")
    if state not in (ABSENT, STARTING, RUNNING, STOPPING):
        raise MalformedError("rank.state is unknown")
    return RankView(
        state,
        fields.generation("generation"),
        fields.text("release"),
        fields.text("detail"),
        fields.whole("memory_bytes"),
    )


def _outcome(data: Any) -> Outcome | None:
    if data is None:
        return None
    fields = _Fields(data)
    code = fields.value("code")
    if code is not None and type(code) is not int:
        raise MalformedError("outcome.code is not a whole number")
    return Outcome(fields.generation("generation"), code, fields.text("reason"), fields.flag("own"))


def _ask(data: Any) -> Ask | None:
    if data is None:
        return None
    fields = _Fields(data)
    want = fields.text("want")
    if want not in (RUN, STOP, DRAIN):
        raise MalformedError("ask.want is unknown")
    return Ask(
        fields.generation("generation"),
        want,
        fields.text("release"),
        fields.members("members"),
        fields.flag("start_head"),
        fields.generation("series"),
    )
