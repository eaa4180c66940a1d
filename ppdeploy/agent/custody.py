"""One agent and its own rank: when to start it, when to stop it, and what to say of it (head and workers alike).

Safety is a promise and a confirmed stop. A node records the promise of a generation before it shows it,
starts nothing lower, and starts that generation at most once and only in the boot that the ask names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppdeploy.agent.actions import Action, DrainRank, KeepJournal, KillRank, SaveMemory, Say, StartRank
from ppdeploy.agent.messages import (
    ABSENT,
    DRAIN,
    NONE,
    RUN,
    RUNNING,
    STARTING,
    STOP,
    STOPPING,
    Ask,
    GenerationId,
    Member,
    Outcome,
    RankView,
)
from ppdeploy.agent.records import Memory
from ppdeploy.agent.settings import Settings
from ppdeploy.agent.sight import STOP as STOP_VERB
from ppdeploy.agent.sight import Identity, Local, RankSight

_NEVER = float("-inf")
_MAIN_GONE = "its main process ended"


@dataclass(frozen=True)
class Custody:
    """The agent's hold on its rank. Only `memory` outlives the agent; the rest is rebuilt by looking.

    `pending` is a start that was decided but waits for its memory to be stored. `alive` is the generation
    whose rank was there when last seen. `ending` says why the agent is stopping the rank; `own_end`: for
    a fault of its own. `drained` is the generation whose stop was wished for: its end is no failure.
    """

    memory: Memory
    pending: GenerationId = NONE
    pending_release: str = ""
    alive: GenerationId = NONE
    ending: str = ""
    own_end: bool = False
    drained: GenerationId = NONE
    killed_at: float = _NEVER
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Orders:
    """Where this node's orders come from: the ask of the head it obeys, and whether that head is lost to it."""

    ask: Ask | None = None
    is_head: bool = False
    head: Member | None = None
    lost: str = ""


def is_absent(rank: RankSight) -> bool:
    """Whether nothing of the rank is left and nothing can still start: no ticket, no job, no process, no residue."""
    return rank.known and rank.ticket == NONE and not rank.job and rank.processes == 0 and not rank.residue


def may_start(memory: Memory, ask: Ask, identity: Identity) -> bool:
    """Whether the ask may be obeyed here: it is the promised generation, never started, and names this very boot."""
    member = ask.member(identity.node)
    return (
        ask.generation == memory.promised
        and memory.started < ask.generation
        and member is not None
        and member.machine_id == identity.machine_id
        and member.boot_id == identity.boot_id
    )


def obeyed_head(local: Local) -> Member | None:
    """Return the head that this node obeys: its running rank's until that is absent, then its release's (rule 9)."""
    memory = local.stored_memory
    if not is_absent(local.rank) and memory.started != NONE and memory.head is not None:
        return memory.head
    return local.release.head()


def step(
    custody: Custody, local: Local, orders: Orders, now: float, settings: Settings
) -> tuple[Custody, list[Action]]:
    """Return the custody after one loop and what to do about the rank."""
    actions: list[Action] = []
    custody = _remember(custody, local, orders)
    if is_absent(local.rank):
        custody = _note_end(custody, local, orders, actions)
        custody = _start(custody, local, orders, actions)
    else:
        custody = _stop(custody, local, orders, now, settings, actions)
    if custody.memory != local.stored_memory:
        actions.insert(0, SaveMemory(custody.memory))
    return custody, actions


def view(custody: Custody, local: Local) -> RankView:
    """Return what to tell of the rank."""
    rank = local.rank
    if is_absent(rank):
        return RankView(ABSENT)
    generation = rank.running if rank.ticket == NONE and rank.running != NONE else custody.memory.started
    if custody.ending:
        stuck = f" (stuck: {rank.stuck or rank.residue})" if rank.stuck or rank.residue else ""
        return RankView(STOPPING, generation, rank.release, custody.ending + stuck, rank.memory_bytes)
    state = RUNNING if rank.processes and rank.running == custody.memory.started != NONE else STARTING
    return RankView(state, generation, rank.release, "", rank.memory_bytes)


def outcome(custody: Custody, local: Local) -> Outcome | None:
    """Return how the last rank started in this boot ended, None while it lives or is about to start."""
    started = local.stored_memory.started
    if started in (NONE, custody.pending, custody.alive) or not is_absent(local.rank):
        return None
    if custody.outcome is not None and custody.outcome.generation == started:
        return custody.outcome
    return Outcome(started, None, "lost: its end was not seen by this agent", own=False)


def _remember(custody: Custody, local: Local, orders: Orders) -> Custody:
    """Note the promise that the orders call for, and what another life of this agent did and forgot to note.

    A consumed ticket proves that its generation was started in this boot, whether its rank still lives or
    not.
    """
    memory = custody.memory
    running = local.rank.running
    if running > memory.started:
        memory = replace(memory, started=running, release=local.rank.release, promised=max(memory.promised, running))
    ask = orders.ask
    if ask is not None and ask.generation > memory.promised:
        # Members of an earlier gang are remembered until the next one is launched, which names all there are.
        memory = replace(memory, promised=ask.generation, known=_union(ask.members, memory.known))
    return custody if memory is custody.memory else replace(custody, memory=memory)


def _union(first: tuple[Member, ...], second: tuple[Member, ...]) -> tuple[Member, ...]:
    names = {(member.name, member.machine_id) for member in first}
    return first + tuple(member for member in second if (member.name, member.machine_id) not in names)


def _note_end(custody: Custody, local: Local, orders: Orders, actions: list[Action]) -> Custody:
    """Turn a rank that was there and is gone into an outcome, once."""
    if custody.alive == NONE:
        return replace(custody, ending="", own_end=False) if custody.ending else custody
    own = custody.own_end or not custody.ending
    reason = "" if custody.ending == _MAIN_GONE else custody.ending
    reason = reason or local.dying or local.rank.end or "the rank ended without a trace"
    result = Outcome(custody.alive, local.rank.code, reason, own)
    series = orders.ask.series if orders.ask else NONE
    actions.append(Say(f"rank of generation {custody.alive} is gone: {reason}"))
    if own or custody.drained != custody.alive:
        # What an operator's stops leave would push out what tells of failures.
        actions.append(KeepJournal(custody.alive, series, reason))
    return replace(custody, outcome=result, alive=NONE, ending="", own_end=False)


def _start(custody: Custody, local: Local, orders: Orders, actions: list[Action]) -> Custody:
    """Start the rank if the orders say so: first the memory of it, then, when that is stored, the ticket."""
    ask = orders.ask
    if ask is None or ask.want != RUN or not _startable(local, ask) or (orders.is_head and not ask.start_head):
        return _not_now(custody)
    if custody.pending == ask.generation:
        if local.stored_memory.started != ask.generation:
            return custody
        actions.append(StartRank(ask.generation, ask.release))
        return replace(custody, pending=NONE, alive=ask.generation, outcome=None, ending="")
    if not may_start(local.stored_memory, ask, local.identity) or orders.head is None:
        return _not_now(custody)
    memory = replace(custody.memory, started=ask.generation, release=ask.release, head=orders.head, known=ask.members)
    return replace(custody, memory=memory, pending=ask.generation)


def _not_now(custody: Custody) -> Custody:
    return replace(custody, pending=NONE) if custody.pending != NONE else custody


def _startable(local: Local, ask: Ask) -> bool:
    held = local.command.verb == STOP_VERB
    return local.ready and not held and not local.release.problem and local.release.digest == ask.release


def _stop(
    custody: Custody, local: Local, orders: Orders, now: float, settings: Settings, actions: list[Action]
) -> Custody:
    """Stop the rank if anything speaks against it; otherwise it is left alone."""
    rank = local.rank
    if not rank.known and not rank.stuck and not rank.processes:
        # Looked at too early after a change, or just begun: nothing speaks for or against it yet.
        return custody
    # With a ticket still out, the consumed one is of an earlier rank.
    consumed = rank.processes > 0 and rank.ticket == NONE and rank.running != NONE
    alive = rank.running if consumed else custody.alive
    if custody.alive != alive or custody.pending != NONE:
        custody = replace(custody, alive=alive, pending=NONE)
    if orders.ask is not None and (orders.ask.want, orders.ask.generation) == (DRAIN, alive):
        custody = replace(custody, drained=alive)
    reason, gentle = _reason_to_stop(custody, local, orders)
    if not reason:
        return _finish(custody, now, settings, actions) if custody.ending else custody
    if not custody.ending:
        actions.append(Say(f"stopping the rank of generation {alive}: {reason}"))
        if gentle:
            actions.append(DrainRank(reason))
        custody = replace(custody, ending=reason, own_end=reason in {local.dying, _MAIN_GONE})
    return custody if gentle else _finish(custody, now, settings, actions)


def _finish(custody: Custody, now: float, settings: Settings, actions: list[Action]) -> Custody:
    """Kill what is there, again and again, until nothing is: a rank once condemned does not come back."""
    if now - custody.killed_at < settings.kill_repeat:
        return custody
    actions.append(KillRank(custody.ending))
    return replace(custody, killed_at=now)


def _reason_to_stop(custody: Custody, local: Local, orders: Orders) -> tuple[str, bool]:
    """Return why the rank must go, and whether it may finish its requests first."""
    rank, memory, ask = local.rank, custody.memory, orders.ask
    if rank.processes and rank.ticket == NONE and rank.running != memory.started:
        return "foreign: it was not started by this agent", False
    running = memory.started
    if running < memory.promised:
        return f"generation {memory.promised} has been promised", False
    if local.dying:
        return local.dying, False
    if rank.main_gone:
        # systemd ends the others too, but later, and some of vLLM's processes outlive their parent for seconds.
        return _MAIN_GONE, False
    if ask is not None and ask.generation == running:
        if ask.want == STOP:
            return "the head asks for a stop", False
        if ask.want == RUN and ask.member(local.identity.node) is None:
            return "the head does not name this node", False
        if ask.want == DRAIN and orders.is_head:
            return "draining", True
    if local.command.verb == STOP_VERB and (orders.lost or ask is None):
        # A head that is heard reads the word here, and lets all requests finish before it stops the gang.
        return "stopped by the operator on this node", False
    if orders.lost:
        return f"lost the head: {orders.lost}", False
    return "", False
