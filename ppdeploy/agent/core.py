"""The whole protocol of one agent as one pure function: `step(state, polls, local, now) -> (state, actions)`.

No clock is read and nothing is touched here, so that a simulation can run the very code that runs on the
nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ppdeploy.agent import contact, custody, head
from ppdeploy.agent.actions import Action
from ppdeploy.agent.contact import Contact, Poll
from ppdeploy.agent.custody import Custody, Orders
from ppdeploy.agent.head import Head, Room
from ppdeploy.agent.messages import Answer, Ask, Member, clip
from ppdeploy.agent.settings import Settings
from ppdeploy.agent.sight import STOP as STOP_VERB
from ppdeploy.agent.sight import Local


@dataclass(frozen=True)
class State:
    """Everything an agent holds in its mind. `unsure`: it stood still, and not every peer has answered since."""

    custody: Custody
    head: Head
    contacts: Mapping[str, Contact]
    ticked_at: float
    unsure: bool = False


def begin(local: Local, now: float, settings: Settings) -> State:
    """Return the state of an agent that has just begun, with whatever it stored in an earlier life."""
    return State(
        custody=Custody(memory=local.stored_memory),
        head=head.begin(local.stored_record, now, settings),
        contacts={},
        ticked_at=now,
    )


def step(
    state: State, polls: Sequence[Poll], local: Local, now: float, settings: Settings
) -> tuple[State, list[Action]]:
    """Return the state after one loop and the actions, to be carried out in order."""
    state = _hear(state, polls, local, now, settings)
    answers = _believed(state, now, settings)
    orders = _orders(state, local, answers, now, settings)
    new_custody, actions = custody.step(state.custody, local, orders, now, settings)
    state = replace(state, custody=new_custody)
    # The head sees its own node by the same words as all others, and its custody reads the ask in the
    # next loop.
    own = answer(state, local)
    answers[local.identity.node] = own
    new_head, decisions = head.step(state.head, Room(local, own, answers, state.contacts, now, settings))
    return replace(state, head=new_head, ticked_at=now), [*decisions, *actions]


def answer(state: State, local: Local) -> Answer:
    """Return what this agent says of its node: only what is stored, and what was seen in this loop."""
    memory, identity = local.stored_memory, local.identity
    held = local.command.verb == STOP_VERB
    problem = local.release.problem
    obeyed = custody.obeyed_head(local)
    rank, outcome = custody.view(state.custody, local), custody.outcome(state.custody, local)
    return Answer(
        cluster=identity.cluster,
        pipeline=identity.pipeline,
        node=identity.node,
        machine_id=identity.machine_id,
        boot_id=identity.boot_id,
        loop_age=0.0,
        prepared="" if problem else local.release.digest,
        ready=local.ready and not held and not problem,
        remark=clip("stopped by the operator on this node" if held else problem or local.remark),
        promised=memory.promised,
        started=memory.started,
        rank=replace(rank, detail=clip(rank.detail)),
        outcome=replace(outcome, reason=clip(outcome.reason)) if outcome else None,
        known=memory.known,
        obeys=obeyed.name if obeyed else "",
        ask=head.ask(state.head, local.stored_record),
        phase=state.head.phase,
        held=held,
    )


def peers(state: State, local: Local) -> dict[str, Member]:
    """Return the nodes to ask, by name: a worker asks the heads it may have to obey, a head asks everyone."""
    found: dict[str, Member] = {}
    if local.stored_memory.head is not None:
        found[local.stored_memory.head.name] = local.stored_memory.head
    release_head = local.release.head()
    if state.head.phase != head.WORKER:
        found.update((member.name, member) for member in state.head.record.members)
        found.update((member.name, member) for member in local.release.nodes)
    if release_head is not None:
        found[release_head.name] = release_head
    found.pop(local.identity.node, None)
    return found


def may_serve(state: State, now: float, settings: Settings) -> bool:
    """Whether a gateway may send requests here (`GET /healthz`)."""
    return not state.unsure and head.serving_fresh(state.head, now, settings)


def _hear(state: State, polls: Sequence[Poll], local: Local, now: float, settings: Settings) -> State:
    """Take in the ended polls, and doubt all of them when this agent itself was late (rules 13 and 21)."""
    names = peers(state, local)
    contacts = {name: state.contacts.get(name, contact.begin(now)) for name in names}
    unsure = state.unsure
    late = now - state.ticked_at
    if late > settings.gap:
        unsure = True
        contacts = {name: contact.after_gap(known, now) for name, known in contacts.items()}
        polls = [poll for poll in polls if poll.sent >= now]
    elif late > settings.late_tick:
        contacts = {name: contact.restart_count(known, now, settings) for name, known in contacts.items()}
    for poll in polls:
        if poll.peer in contacts:
            contacts[poll.peer] = contact.update(contacts[poll.peer], poll, now, settings)
    if unsure:
        # Of a gang that runs, its own members have to answer; one that a prepared release adds may not be there yet.
        record = state.head.record
        running = {member.name for member in record.members} if record.launched else set(contacts)
        unsure = any(known.answer is None for name, known in contacts.items() if name in running)
    return replace(state, contacts=contacts, unsure=unsure)


def _believed(state: State, now: float, settings: Settings) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for name, known in state.contacts.items():
        heard = contact.fresh(known, now, settings)
        if heard is not None:
            answers[name] = heard
    return answers


def _orders(state: State, local: Local, answers: Mapping[str, Answer], now: float, settings: Settings) -> Orders:
    """Return what the obeyed head wants of this node; on the head itself that is its own ask."""
    obeyed = custody.obeyed_head(local)
    if obeyed is None:
        return Orders()
    if obeyed.name == local.identity.node:
        own: Ask | None = None if state.unsure else head.ask(state.head, local.stored_record)
        return Orders(ask=own, is_head=True, head=obeyed, lost=_without_office(state.head.phase, obeyed))
    heard = answers.get(obeyed.name)
    known = state.contacts.get(obeyed.name)
    if known is not None and contact.lost(known, now, settings):
        return Orders(head=obeyed, lost=known.error)
    if heard is None or heard.machine_id != obeyed.machine_id:
        return Orders(head=obeyed)
    return Orders(ask=heard.ask, head=obeyed, lost=_without_office(heard.phase, obeyed))


def _without_office(phase: str, obeyed: Member) -> str:
    """Return why a head that says that it is none, having lost its record, will never end what it began."""
    return f"{obeyed.name} says that it is no head" if phase == head.WORKER else ""
