"""The head of a gang: it decides the generation and the phase, from what every node shows of itself.

    waiting -> starting -> probing -> serving        any failure: the next generation, from stopping
       ^------- stopping <-------/ (draining, stopped, failed)

The head changes nothing on other nodes. It publishes an ask; nodes read it and act on their own rank. A
generation's record lies on disk before any node can see it, and a generation is launched only when every
node that may still hold a rank has promised it and shown that no rank is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ppdeploy.agent import budget, contact, progress
from ppdeploy.agent.actions import Action, SaveRecord, Say, SendCanary
from ppdeploy.agent.contact import Contact
from ppdeploy.agent.messages import ABSENT, DRAIN, NONE, RUN, RUNNING, Answer, Ask, GenerationId, Member
from ppdeploy.agent.messages import STOP as STOP_ASK
from ppdeploy.agent.progress import Progress
from ppdeploy.agent.records import Failure, Record
from ppdeploy.agent.settings import Settings
from ppdeploy.agent.sight import RESTART, STOP, Local

WAITING, STOPPING, STARTING, PROBING, SERVING = "waiting", "stopping", "starting", "probing", "serving"
DRAINING, STOPPED, FAILED, RETIRED, WORKER = "draining", "stopped", "failed", "retired", "worker"
_LAUNCHED = (STARTING, PROBING, SERVING, DRAINING)
_HISTORY = 40
_NEVER, _NOT_YET = float("-inf"), float("inf")


class Change(NamedTuple):
    """A change of phase: when (seconds of the agent's clock), to which, of which generation, and why."""

    at: float
    phase: str
    generation: GenerationId
    remark: str


@dataclass(frozen=True)
class Head:
    """The head's mind. Only `record` outlives the agent; the rest is rebuilt from what the nodes show (rule 24).

    `resumed`: this agent took over a generation that was launched before it began. `failed_at` and
    `recovered` time the last recovery; `restarts` counts generations ended, by the kind of reason;
    `history` has the last phases.
    """

    record: Record
    phase: str = WORKER
    since: float = 0.0
    remark: str = ""
    launched_at: float = _NEVER
    serving_since: float = _NEVER
    claimed: tuple[str, ...] = ()
    start_head: bool = False
    head_asked_at: float = _NOT_YET
    resumed: bool = False
    retry_at: float = _NEVER
    drain_until: float = _NEVER
    failed_at: float = _NEVER
    recovered: float = 0.0
    restarts: Mapping[str, int] = field(default_factory=dict)
    history: tuple[Change, ...] = ()
    progress: Progress = field(default_factory=lambda: Progress(began=0.0))


@dataclass(frozen=True)
class Room:
    """What the head sees in one loop. `answers` are those of nodes that may be believed now, its own among them."""

    local: Local
    own: Answer
    answers: Mapping[str, Answer]
    contacts: Mapping[str, Contact]
    now: float
    settings: Settings


@dataclass(frozen=True)
class Fault:
    """Why a generation ends. `own`: of the gang's own making, so that it spends budget."""

    reason: str
    kind: str
    own: bool


def is_gone(answer: Answer, generation: GenerationId) -> bool:
    """Whether a node can hold no rank below `generation`, now and for ever: a promise, not an absence (rule 1)."""
    return answer.promised == generation and answer.rank.state == ABSENT


def next_generation(record: Record, heard: list[GenerationId], salt: int) -> GenerationId:
    """Return a generation above everything this head decided and everything it hears of (rule 6)."""
    return GenerationId(max([record.generation, *heard]).number + 1, salt)


def begin(record: Record, now: float, settings: Settings) -> Head:
    """Return the head of an agent that has just begun, which takes over whatever its record says."""
    head = Head(record=record, since=now, progress=progress.begin(now, settings, record.stall_limit))
    if record.launched:
        # No deadline is older than this agent; a rank that is there is adopted, never restarted.
        head = replace(head, launched_at=now, start_head=True, head_asked_at=now, resumed=True, retry_at=now)
        if record.draining:
            return replace(head, phase=DRAINING, remark=record.draining, drain_until=now + settings.drain_timeout)
        return replace(head, phase=STARTING)
    return replace(head, phase=STOPPING if record.generation != NONE else WORKER, retry_at=now)


def ask(head: Head, stored: Record) -> Ask | None:
    """Return what nodes are to read. Until the record is stored, only a stop of the stored generation (rule 18)."""
    record = head.record
    if head.phase == WORKER or stored.generation == NONE:
        return None
    if _decision(record) != _decision(stored):
        return Ask(stored.generation, STOP_ASK, stored.release, stored.members, series=record.series)
    want = STOP_ASK
    if record.launched and head.phase in _LAUNCHED:
        want = DRAIN if head.phase == DRAINING else RUN
    return Ask(record.generation, want, record.release, record.members, head.start_head, record.series)


def step(head: Head, room: Room) -> tuple[Head, list[Action]]:
    """Return the head after one loop and its actions."""
    actions: list[Action] = []
    before = head.phase
    head = _take_office(head, room)
    if head.phase != WORKER:
        head = _obey_operator(head, room)
        head = _advance(head, room, actions)
    if head.phase != before:
        change = Change(room.now, head.phase, head.record.generation, head.remark)
        head = replace(head, since=room.now, history=(*head.history, change)[-_HISTORY:])
        actions.append(Say(f"generation {head.record.generation}: {before} -> {head.phase}; {head.remark}"))
    if head.phase != WORKER and head.record != room.local.stored_record:
        actions.append(SaveRecord(head.record))
    return head, actions


def serving_fresh(head: Head, now: float, settings: Settings) -> bool:
    """Whether the API may be sent requests: serving, and the last proof of tokens is fresh."""
    return head.phase == SERVING and progress.fresh(head.progress, now, settings)


def _decision(record: Record) -> tuple[GenerationId, bool, str, tuple[Member, ...]]:
    return record.generation, record.launched, record.release, record.members


def _take_office(head: Head, room: Room) -> Head:
    """Become head when the prepared release says so; retire when it names another one (rule 9)."""
    release_head = room.local.release.head()
    me = room.local.identity.node
    if release_head is None:
        # A release that does not check out names nobody. Whoever was head stays it; nobody becomes it.
        return head
    if release_head.name == me:
        return replace(head, phase=WAITING, remark="") if head.phase in (WORKER, RETIRED) else head
    if head.phase in (WORKER, RETIRED):
        return head
    if not head.record.launched:
        return replace(head, phase=RETIRED, remark=f"{release_head.name} is the head now")
    successor = room.answers.get(release_head.name)
    takes_over = (
        successor is not None
        and successor.ask is not None
        and successor.ask.release == room.local.release.digest
        and head.phase != DRAINING
    )
    return _drain(head, room, f"{release_head.name} is the head now") if takes_over else head


def _obey_operator(head: Head, room: Room) -> Head:
    """Handle the operator's last command, once (rule 17)."""
    command, record = room.local.command, head.record
    if command.serial <= record.serial:
        return head
    if command.verb != STOP and record.launched and (room.local.disk_problem or room.local.storage_problem):
        # What cannot be stored cannot be launched: ending what runs now would leave nothing. It is obeyed later.
        return head
    record = replace(record, serial=command.serial)
    if command.verb == STOP:
        head = replace(head, record=replace(record, wanted=STOP))
        return _drain(head, room, "stopped by the operator") if record.launched else head
    named = {node.machine_id for node in room.local.release.nodes}
    forgotten = [machine for machine in record.forgotten if machine not in named]
    forgotten += [m.machine_id for m in record.members if m.name in command.forget and m.machine_id not in named]
    # A new start is a new life: earlier failures are forgiven, and nothing waits for a pause.
    record = replace(
        record,
        wanted=RUN,
        failed="",
        failures=(),
        streak=0,
        series=NONE,
        forgotten=tuple(dict.fromkeys(forgotten)),
    )
    head = replace(head, record=record, retry_at=room.now)
    other = bool(command.release) and command.release != record.release
    if record.launched and head.phase != DRAINING and (command.verb == RESTART or other):
        return _drain(head, room, "restarted by the operator")
    return head


def _advance(head: Head, room: Room, actions: list[Action]) -> Head:
    if head.phase == DRAINING:
        return _while_draining(head, room)
    if head.record.launched:
        return _while_launched(head, room, actions)
    return _while_down(head, room)


# Down: make sure that nothing is left, wait for what is missing, launch.


def _while_down(head: Head, room: Room) -> Head:
    record = head.record
    if head.phase == RETIRED:
        return head
    higher = _heard_above(record.generation, room, obeying=True)
    if higher or record.generation == NONE:
        reason = f"heard of generation {max(higher)}" if higher else "first generation"
        return _bump(head, room, reason)
    record = _without_reboot(record, room)
    head = replace(head, record=record)
    members, digest = _with_news(record, room), room.local.release.digest
    if members != record.members or digest != record.release:
        record = replace(record, members=members, release=digest)
        head = replace(head, record=record)
    unheard, present = _not_gone(record, room)
    if present:
        return replace(head, phase=STOPPING, remark="; ".join(present))
    if unheard:
        return replace(head, phase=WAITING, remark="; ".join(unheard))
    if record.failed:
        return replace(head, phase=FAILED, remark=record.failed)
    if record.wanted == STOP:
        return replace(head, phase=STOPPED, remark="stopped by the operator")
    obstacles = _obstacles(head, room)
    if obstacles:
        return replace(head, phase=WAITING, remark="; ".join(obstacles))
    return _launch(head, room)


def _without_reboot(record: Record, room: Room) -> Record:
    """Return the record without the failure that was a host's going down, as its new boot shows.

    What has `failed` outlives reboots: only a person's `start` ends that.
    """
    if record.failed:
        return record
    boots = {answer.machine_id: answer.boot_id for answer in room.answers.values()}
    failures = budget.without_reboot(record.failures, boots)
    # The same object while nothing changes: this is asked in every loop, and a new one would wake the storer.
    return record if failures is record.failures else replace(record, failures=failures)


def _not_gone(record: Record, room: Room) -> tuple[list[str], list[str]]:
    """Return the nodes that cannot be asked, and those that have not confirmed that their rank is gone."""
    unheard: list[str] = []
    present: list[str] = []
    for member in record.members:
        answer = room.answers.get(member.name)
        if answer is None:
            unheard.append(f"{member.name} is not heard ({_why_unheard(member.name, room)})")
        elif answer.machine_id != member.machine_id:
            unheard.append(f"{member.name} answers as another machine; the old one may still run a rank")
        elif not is_gone(answer, record.generation):
            present.append(f"{member.name} has not confirmed that its rank is gone ({_state_of(answer, room)})")
    return unheard, present


def _state_of(answer: Answer, room: Room) -> str:
    if answer.rank.state != ABSENT:
        return answer.rank.detail or answer.rank.state
    if answer.obeys != room.local.identity.node:
        return f"it obeys {answer.obeys or 'no head'}"
    return "it has not read the ask yet"


def _why_unheard(name: str, room: Room) -> str:
    known = room.contacts.get(name)
    return known.error or "its answer is too old" if known else "it is not in the release"


def _obstacles(head: Head, room: Room) -> list[str]:
    """Return everything that speaks against a launch now, each with its node; a launch needs an empty list."""
    local, release = room.local, room.local.release
    found: list[str] = []
    if release.problem or not release.nodes:
        found.append(f"{local.identity.node}: {release.problem or 'no release'}")
    if release.head() is not None and release.nodes[0].name != local.identity.node:
        found.append(f"{release.nodes[0].name} is the head of this release")
    if local.storage_problem:
        found.append(f"{local.identity.node}: {local.storage_problem}")
    if local.stored_record != head.record:
        found.append("the record is being stored")
    for node in release.nodes:
        found.extend(_node_obstacles(node, release.digest, head.record, room))
    if not found and room.now < head.retry_at:
        found.append(f"the next start is in {head.retry_at - room.now:.0f} s: {head.record.last_reason}")
    return found


def _node_obstacles(node: Member, digest: str, record: Record, room: Room) -> list[str]:
    answer = room.answers.get(node.name)
    if answer is None:
        return [f"{node.name} is not heard ({_why_unheard(node.name, room)})"]
    if node.machine_id in record.forgotten:
        return [f"{node.name} was forgotten; `ppdeploy start` takes it back"]
    if answer.machine_id != node.machine_id:
        return [f"{node.name} is another machine than the release names"]
    if not answer.ready:
        return [f"{node.name}: {answer.remark or 'not ready'}"]
    if answer.prepared != digest:
        return [f"{node.name} has release {answer.prepared[:12] or 'none'} prepared, not {digest[:12]}"]
    if not is_gone(answer, record.generation) or answer.started >= record.generation:
        return [f"{node.name} has not confirmed that its rank is gone"]
    return []


def _launch(head: Head, room: Room) -> Head:
    release = room.local.release
    members = tuple(replace(node, boot_id=room.answers[node.name].boot_id) for node in release.nodes)
    failures = budget.closed(head.record.failures)
    record = replace(
        head.record, launched=True, release=release.digest, members=members, stall_limit=0.0, failures=failures
    )
    return replace(
        head,
        record=record,
        phase=STARTING,
        remark="every rank is gone and every node is ready",
        launched_at=room.now,
        start_head=False,
        head_asked_at=_NOT_YET,
        claimed=(),
        resumed=False,
        serving_since=_NEVER,
        progress=progress.begin(room.now, room.settings),
    )


# Launched: workers first, then the head, then the proof of tokens, then watch.


def _while_launched(head: Head, room: Room, actions: list[Action]) -> Head:
    if head.phase == STARTING and _decision(head.record) != _decision(room.local.stored_record):
        # Nobody can read the ask before it is stored, so no deadline runs while a slow disk takes its time.
        head = replace(head, launched_at=room.now)
    fault = _fault(head, room)
    if fault is not None:
        return _fail(head, room, fault)
    held = [member.name for member in head.record.members if _held(room.answers.get(member.name))]
    if held:
        return _drain(head, room, f"stopped by the operator on {', '.join(held)}")
    generation = head.record.generation
    claimed = tuple(m.name for m in head.record.members if _holds(room.answers.get(m.name), generation))
    if not set(claimed) <= set(head.claimed):
        head = replace(head, claimed=tuple(dict.fromkeys(head.claimed + claimed)))
    if head.phase == STARTING:
        return _while_starting(head, room)
    seen = progress.observe(head.progress, room.local.api, room.now, room.settings)
    head = replace(head, progress=seen)
    if head.phase == PROBING:
        return _while_probing(head, room, actions)
    return _while_serving(head, room, actions)


def _holds(answer: Answer | None, generation: GenerationId) -> bool:
    return answer is not None and answer.rank.state != ABSENT and answer.rank.generation == generation


def _held(answer: Answer | None) -> bool:
    return answer is not None and answer.held


def _runs(answer: Answer | None, generation: GenerationId) -> bool:
    return answer is not None and answer.rank.state == RUNNING and answer.rank.generation == generation


def _while_starting(head: Head, room: Room) -> Head:
    generation, me = head.record.generation, room.local.identity.node
    missing = [m.name for m in head.record.members if not _runs(room.answers.get(m.name), generation)]
    if not missing:
        remark = "every rank has a live process; waiting for the API"
        began = progress.begin(room.now, room.settings, head.record.stall_limit)
        return replace(head, phase=PROBING, remark=remark, progress=began)
    head = replace(head, remark=f"waiting for the rank of {', '.join(missing)} to start")
    if missing == [me] and not head.start_head:
        return replace(head, start_head=True, head_asked_at=room.now)
    return head


def _while_probing(head: Head, room: Room, actions: list[Action]) -> Head:
    proof, api = head.progress, room.local.api
    if proof.returned or (head.resumed and proof.moved_at >= proof.began):
        recovered = room.now - head.failed_at if head.failed_at > _NEVER else head.recovered
        return replace(
            head,
            # Stored, since the next life of this agent sees no full-size prefill before it judges.
            record=replace(head.record, stall_limit=proof.limit),
            phase=SERVING,
            serving_since=room.now,
            recovered=recovered,
            failed_at=_NEVER,
            remark=f"tokens proven; a canary may take {proof.limit:.0f} s",
        )
    if api.healthy and proof.canary_id == proof.returned:
        # One that is out is tried until it is answered. Steps that others cause do not make it obsolete: a new one
        # each time would never come back on a busy engine.
        proof = progress.sent(proof, room.now)
        actions.append(SendCanary(proof.canary_id, full_size=True))
    return replace(head, progress=proof, remark=api.error or "waiting for the first token")


def _while_serving(head: Head, room: Room, actions: list[Action]) -> Head:
    served = room.now - head.serving_since
    record, proof = head.record, head.progress
    if served >= room.settings.budget_reset and record.failures:
        record = replace(record, failures=())
    if served >= room.settings.settle and record.streak:
        record = replace(record, streak=0)
    if record is not head.record:
        head = replace(head, record=record)
    if progress.wants_canary(proof, room.now, room.settings):
        proof = progress.sent(proof, room.now)
        actions.append(SendCanary(proof.canary_id, full_size=False))
        head = replace(head, progress=proof)
    return head


def _fault(head: Head, room: Room) -> Fault | None:
    """Return the first thing that ends this generation, or None."""
    record, now, settings = head.record, room.now, room.settings
    higher = _heard_above(record.generation, room)
    if higher:
        return Fault(f"heard of generation {max(higher)}", "superseded", own=False)
    faults = [fault for member in record.members for fault in _member_faults(head, member, room)]
    if faults:
        # A rank that ended by itself is the cause; what the others show is the consequence.
        return next((fault for fault in faults if fault.own), faults[0])
    if head.phase in (STARTING, PROBING) and now - head.launched_at >= settings.start_timeout:
        return Fault(f"no token within {settings.start_timeout:.0f} s of the start ({head.remark})", "start", own=True)
    if head.phase == SERVING:
        stalled = progress.failure(head.progress, now, settings)
        if stalled:
            return Fault(stalled[0], "stall", own=True)
    return None


def _member_faults(head: Head, member: Member, room: Room) -> list[Fault]:
    generation, name = head.record.generation, member.name
    answer = room.answers.get(name)
    if answer is None:
        return _unheard_faults(head, name, room)
    if answer.boot_id != member.boot_id:
        return [Fault(f"{name} was booted again", "reboot", own=False)]
    if answer.machine_id != member.machine_id:
        return [Fault(f"{name} is another machine", "identity", own=False)]
    ended = answer.outcome
    if ended is not None and ended.generation == generation:
        code = "" if ended.code is None else f" (code {ended.code})"
        return [Fault(f"the rank of {name} ended{code}: {ended.reason}", "exit" if ended.own else "stop", ended.own)]
    if _holds(answer, generation):
        return []
    if name in head.claimed:
        return [Fault(f"the rank of {name} has vanished", "lost", own=False)]
    asked_at = head.head_asked_at if name == room.local.identity.node else head.launched_at
    if room.now - asked_at >= room.settings.claim:
        return [Fault(f"{name} did not start its rank: {answer.remark or answer.rank.state}", "claim", own=False)]
    return []


def _unheard_faults(head: Head, name: str, room: Room) -> list[Fault]:
    known = room.contacts.get(name)
    if known is None or not contact.lost(known, room.now, room.settings):
        return []
    if head.phase == SERVING and progress.proof_age(head.progress, room.now) < room.settings.lease:
        # Tokens prove every stage, so they outrank an agent that is not heard (rule 22).
        return []
    return [Fault(f"{name} is not heard ({known.error})", "unheard", own=False)]


def _while_draining(head: Head, room: Room) -> Head:
    """Wait for the head's own rank to finish its requests; only the deadline counts here (rule 24)."""
    if room.own.rank.state != ABSENT and room.now < head.drain_until:
        return head
    return _bump(head, room, head.remark)


# Changes of generation.


def _drain(head: Head, room: Room, reason: str) -> Head:
    """End a launched generation gently; this is stored, since an agent's death must not undo it."""
    until = room.now + room.settings.drain_timeout
    record = replace(head.record, draining=reason)
    return replace(head, record=record, phase=DRAINING, remark=reason, drain_until=until, retry_at=room.now)


def _fail(head: Head, room: Room, fault: Fault) -> Head:
    now, settings, record = room.now, room.settings, head.record
    failures, series, failed = budget.recent(record.failures, now, settings), record.series, record.failed
    if fault.own:
        series = series if failures else record.generation
        boots = tuple((member.machine_id, member.boot_id) for member in record.members if member.boot_id)
        failures = budget.with_failure(failures, Failure(record.generation, now, fault.reason, boots))
    if fault.own and budget.exhausted(failures, now, settings):
        failed = (
            f"{len(failures)} failures in {settings.budget_window / 60:.0f} minutes, the last: {fault.reason};"
            f" the first generation's journals are kept; `ppdeploy start` tries again"
        )
    streak = record.streak + 1
    record = replace(record, failures=failures, series=series, failed=failed, streak=streak)
    restarts: dict[str, int] = dict(head.restarts)
    restarts[fault.kind] = restarts.get(fault.kind, 0) + 1
    head = replace(
        head,
        record=record,
        restarts=restarts,
        retry_at=now + budget.pause(streak, settings),
        failed_at=head.failed_at if head.failed_at > _NEVER else now,
    )
    return _bump(head, room, fault.reason)


def _bump(head: Head, room: Room, reason: str) -> Head:
    """Go to the next generation, which begins by stopping whatever runs."""
    heard = [g for answer in room.answers.values() for g in (answer.promised, answer.started, answer.rank.generation)]
    generation = next_generation(head.record, heard, room.local.salt)
    record = replace(
        head.record,
        generation=generation,
        launched=False,
        draining="",
        last_reason=reason,
        members=_with_news(head.record, room),
    )
    release_head = room.local.release.head()
    retired = release_head is not None and release_head.name != room.local.identity.node
    return replace(
        head,
        record=record,
        phase=RETIRED if retired else STOPPING,
        remark=reason,
        start_head=False,
        head_asked_at=_NOT_YET,
        claimed=(),
        resumed=False,
        serving_since=_NEVER,
    )


def _heard_above(generation: GenerationId, room: Room, obeying: bool = False) -> list[GenerationId]:
    """Return the higher generations that nodes tell of, or only those of nodes that obey this head.

    While down, going above a node that obeys another head would only make two heads chase each other.
    """
    me = room.local.identity.node
    answers = [a for a in room.answers.values() if a.obeys == me or not obeying]
    return [g for a in answers for g in (a.promised, a.started, a.rank.generation) if g > generation]


def _with_news(record: Record, room: Room) -> tuple[Member, ...]:
    """Return the nodes that may hold a rank: of the release, of the record, and known to nodes (rules 9, 10)."""
    told = tuple(member for answer in room.answers.values() for member in answer.known)
    members: dict[tuple[str, str], Member] = {}
    # A machine that the release names otherwise was renamed: under its new name it speaks for the same rank, and under
    # its old one nobody ever answers again.
    named = {node.machine_id for node in room.local.release.nodes}
    told_of = [member for member in (*record.members, *told) if not _renamed(member, room.local.release.nodes, named)]
    # The release comes first, since it has the newest address of a node.
    for member in (*room.local.release.nodes, *told_of):
        if member.machine_id not in record.forgotten:
            key = (member.name, member.machine_id)
            if key not in members:
                members[key] = replace(member, boot_id="") if member.boot_id else member
    return tuple(members.values())


def _renamed(member: Member, nodes: tuple[Member, ...], named: set[str]) -> bool:
    """Whether the release has this very machine under another name (a plan refuses two nodes of one machine id)."""
    if not member.machine_id or member.machine_id not in named:
        return False
    return all(node.machine_id != member.machine_id or node.name != member.name for node in nodes)
