"""A small world in which the protocol's own code runs: nodes, their systemd, their ranks, and a bad network.

Time is virtual and every choice comes from one seed, so a run that breaks a rule can be repeated. The
world knows nothing of the protocol beyond what a node offers to it; `check_*` look at the ranks
themselves, never at what agents claim.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from ppdeploy.agent import contact, core
from ppdeploy.agent.actions import (
    Action,
    DrainRank,
    KillRank,
    SaveMemory,
    SaveRecord,
    SendCanary,
    StartRank,
)
from ppdeploy.agent.contact import Poll
from ppdeploy.agent.messages import NONE, Answer, GenerationId, Member
from ppdeploy.agent.progress import ApiSight
from ppdeploy.agent.records import Memory, Record
from ppdeploy.agent.settings import Settings
from ppdeploy.agent.sight import Command, Identity, Local, RankSight, ReleaseSight

TICK = 0.4
POLL = 0.4
LOAD = 6.0
"""Seconds that a gang needs from its last rank's start to its first token."""


class BrokenRuleError(AssertionError):
    """The ranks did what must never happen."""


@dataclass
class Process:
    """One rank process."""

    generation: GenerationId
    release: str
    born: float
    hung: bool = False
    dying: bool = False


@dataclass
class Unit:
    """A node's systemd unit of the rank, with its ticket. `jobs` are start jobs that systemd still holds."""

    ticket: tuple[GenerationId, str] | None = None
    consumed: tuple[GenerationId, str] | None = None
    jobs: set[int] = field(default_factory=set)
    process: Process | None = None
    code: int | None = None


@dataclass
class Agent:
    """One life of a node's agent."""

    state: core.State
    polls: list[Poll] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    published: Answer | None = None
    looped_at: float = 0.0
    stalled_until: float = 0.0
    canary: int = 0
    canary_born: float = 0.0
    canary_back: tuple[int, float] = (0, 0.0)


class Node:
    """One host. What is in `memory` is lost at a reboot, what is in `record` only with its disk."""

    def __init__(self, name: str, machine_id: str) -> None:
        self.name = name
        self.machine_id = machine_id
        self.boot = 0
        self.up = True
        self.frozen_until = 0.0
        self.record = Record()
        self.memory = Memory()
        self.unit = Unit()
        self.agent: Agent | None = None
        self.release = ReleaseSight()
        self.ready = True
        self.disk_full = False
        self.command = Command()
        self.offset = 0.0

    @property
    def boot_id(self) -> str:
        return f"{self.machine_id}-boot{self.boot}"


@dataclass
class Switches:
    """Rules that live in the world rather than in the protocol; a test turns one off to see that it is needed."""

    tickets: bool = True


class World:
    """The nodes, the time and the dice."""

    def __init__(
        self,
        seed: int,
        nodes: int,
        settings: Settings,
        *,
        loss: float = 0.02,
        slow: float = 0.03,
        stuck: float = 0.02,
        switches: Switches | None = None,
    ) -> None:
        self.random = random.Random(seed)  # noqa: S311  (dice, not secrets)
        self.settings = settings
        self.loss = loss
        self.slow = slow
        self.stuck = stuck
        self.switches = switches or Switches()
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.cuts: set[frozenset[str]] = set()
        self.nodes: dict[str, Node] = {}
        self.starts: dict[tuple[str, str, GenerationId], float] = {}
        self.log: list[str] = []
        self.served = 0
        for index in range(nodes):
            self.add_node(f"n{index}")

    # Building and driving.

    def add_node(self, name: str, machine_id: str = "") -> Node:
        """Add a host that boots now."""
        node = Node(name, machine_id or f"machine-{name}-{len(self.nodes)}")
        node.offset = self.random.uniform(0, 1000)
        self.nodes[name] = node
        self.begin_agent(node)
        return node

    def at(self, delay: float, event: Callable[[], None]) -> None:
        """Let something happen in `delay` seconds."""
        heapq.heappush(self.events, (self.now + delay, next(self.order), event))

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Let time pass; stop early when `until` holds, and say whether it did."""
        end = self.now + seconds
        while self.events and self.events[0][0] <= end:
            self.now, _, event = heapq.heappop(self.events)
            event()
            if until is not None and until():
                return True
        self.now = end
        return until is not None and until()

    def say(self, text: str) -> None:
        """Note what happened, for the reader of a failed run."""
        self.log.append(f"{self.now:9.2f} {text}")

    def clock(self, node: Node) -> float:
        """The node's own clock: it never jumps, and no two nodes agree on it."""
        return self.now + node.offset

    # The agent's life.

    def begin_agent(self, node: Node) -> None:
        """Start the node's agent; it finds what it stored."""
        if node.memory.boot_id != node.boot_id:
            node.memory = Memory(boot_id=node.boot_id)
        node.agent = Agent(core.begin(self.look(node), self.clock(node), self.settings))
        agent = node.agent
        self.at(self.random.uniform(0, TICK), lambda: self.loop(node, agent))

    def end_agent(self, node: Node) -> None:
        """Kill the agent; its rank lives on."""
        node.agent = None

    def loop(self, node: Node, agent: Agent) -> None:
        """One control loop, then the next one."""
        if node.agent is not agent or not node.up:
            return
        held = max(agent.stalled_until, node.frozen_until)
        if held > self.now:
            self.at(held - self.now, lambda: self.loop(node, agent))
            return
        now = self.clock(node)
        local = self.look(node)
        polls, agent.polls = agent.polls, []
        agent.state, actions = core.step(agent.state, polls, local, now, self.settings)
        for action in actions:
            self.act(node, agent, action)
            if node.agent is not agent:
                return
        after = replace(local, stored_memory=node.memory, stored_record=node.record)
        agent.published = core.answer(agent.state, after)
        agent.looped_at = self.now
        for peer in core.peers(agent.state, after):
            self.poll(node, agent, peer)
        if core.may_serve(agent.state, now, self.settings):
            self.served += 1
        self.at(TICK * self.random.uniform(0.9, 1.2), lambda: self.loop(node, agent))

    def look(self, node: Node) -> Local:
        """What the node's agent sees now."""
        unit, process = node.unit, node.unit.process
        agent = node.agent
        canary, seconds = agent.canary_back if agent else (0, 0.0)
        healthy = process is not None and not process.hung and self.engine_answers(node)
        return Local(
            identity=Identity("c", "p", node.name, node.machine_id, node.boot_id),
            salt=self.random.getrandbits(64),
            rank=RankSight(
                processes=0 if process is None else 3,
                job=bool(unit.jobs),
                ticket=unit.ticket[0] if unit.ticket else NONE,
                running=unit.consumed[0] if unit.consumed else NONE,
                release=unit.consumed[1] if unit.consumed else "",
                code=unit.code,
                end="exited",
            ),
            release=node.release,
            ready=node.ready,
            remark="" if node.ready else "GPUs are missing",
            command=node.command,
            api=ApiSight(healthy, float(canary) if healthy else None, canary, seconds),
            stored_memory=node.memory,
            stored_record=node.record,
            storage_problem="the disk is full" if node.disk_full else "",
        )

    def act(self, node: Node, agent: Agent, action: Action) -> None:
        """Carry out an action; the agent may die between any two."""
        if self.random.random() < 0.0005:
            self.say(f"{node.name}: agent dies before {type(action).__name__}")
            self.end_agent(node)
            self.at(1.0, lambda: self.begin_agent(node) if node.up and node.agent is None else None)
            return
        if isinstance(action, SaveMemory):
            node.memory = action.memory
        elif isinstance(action, SaveRecord):
            if not node.disk_full:
                node.record = action.record
        elif isinstance(action, StartRank):
            self.start_unit(node, (action.generation, action.release), by_hand=False)
        elif isinstance(action, KillRank):
            self.kill_unit(node)
        elif isinstance(action, DrainRank):
            self.at(self.random.uniform(0.2, 3), lambda: self.kill_unit(node))
        elif isinstance(action, SendCanary):
            agent.canary, agent.canary_born = action.number, self.now
            self.at(0.2, lambda: self.try_canary(node, agent, action.number))

    def try_canary(self, node: Node, agent: Agent, number: int) -> None:
        """Let the engine answer a canary as soon as all ranks of its gang work."""
        if node.agent is not agent or agent.canary != number:
            return
        if self.gang_works(node):
            agent.canary_back = (number, self.now - agent.canary_born)
        else:
            self.at(1.0, lambda: self.try_canary(node, agent, number))

    # The unit and its processes.

    def start_unit(self, node: Node, ticket: tuple[GenerationId, str] | None, *, by_hand: bool) -> None:
        """Queue a start job, which systemd runs whenever it gets to it."""
        job = next(self.order)
        if not by_hand:
            node.unit.ticket = ticket
        node.unit.jobs.add(job)
        delay = self.random.choice((0.02, 0.1, 0.4, 1.5, 4.0))
        boot = node.boot
        self.at(delay, lambda: self.run_job(node, boot, job, ticket))

    def run_job(self, node: Node, boot: int, job: int, asked: tuple[GenerationId, str] | None) -> None:
        """The start job runs: the unit consumes its ticket, or exits without a rank."""
        unit = node.unit
        if node.boot != boot or not node.up or job not in unit.jobs:
            return
        if node.frozen_until > self.now:
            self.at(node.frozen_until - self.now, lambda: self.run_job(node, boot, job, asked))
            return
        unit.jobs.discard(job)
        if unit.process is not None:
            return
        if self.switches.tickets:
            if unit.ticket is None:
                return
            unit.consumed, unit.ticket = unit.ticket, None
        elif asked is not None:
            unit.consumed, unit.ticket = asked, None
        if unit.consumed is None:
            return
        self.begin_rank(node, *unit.consumed)

    def begin_rank(self, node: Node, generation: GenerationId, release: str) -> None:
        """A rank process begins; this is the moment that safety is about."""
        self.say(f"{node.name}: rank of {generation} ({release}) begins")
        node.unit.process = Process(generation, release, self.now)
        node.unit.code = None
        key = (node.name, node.machine_id, generation)
        if key in self.starts:
            raise BrokenRuleError(f"{node.name} started generation {generation} twice")
        self.starts[key] = self.now
        self.check_ranks()

    def check_ranks(self) -> None:
        """Never two generations at once, on any nodes, and never two releases."""
        alive = [
            (node.name, process)
            for node in self.nodes.values()
            if node.up and (process := node.unit.process) is not None
        ]
        generations = {process.generation for _, process in alive}
        releases = {process.release for _, process in alive}
        if len(generations) > 1 or len(releases) > 1:
            shown = ", ".join(f"{name}: {process.generation} {process.release}" for name, process in alive)
            raise BrokenRuleError(f"ranks of two generations at once: {shown}")

    def kill_unit(self, node: Node) -> None:
        """Revoke the ticket, cancel the jobs, kill the processes; a process may take its time to die."""
        node.unit.ticket = None
        process = node.unit.process
        jobs = set(node.unit.jobs)

        def cancel() -> None:
            node.unit.jobs -= jobs

        self.at(self.random.choice((0.0, 0.3)), cancel)
        if process is not None and not process.dying:
            process.dying = True
            stuck = self.random.random() < self.stuck
            self.at(self.random.uniform(5, 20) if stuck else 0.2, lambda: self.end_rank(node, process, -9))

    def end_rank(self, node: Node, process: Process, code: int) -> None:
        """A rank process is gone."""
        if node.unit.process is process:
            self.say(f"{node.name}: rank of {process.generation} ends ({code})")
            node.unit.process = None
            node.unit.code = code

    # What ranks do among themselves.

    def gang_of(self, node: Node) -> list[Node]:
        """Return all nodes whose rank is of this node's generation."""
        process = node.unit.process
        if process is None:
            return []
        return [
            other
            for other in self.nodes.values()
            if other.up and other.unit.process and other.unit.process.generation == process.generation
        ]

    def gang_works(self, node: Node) -> bool:
        """Whether a request at this head would be answered now."""
        gang = self.gang_of(node)
        if len(gang) != len(node.release.nodes) or not self.engine_answers(node):
            return False
        healthy = all(not n.unit.process.hung and n.frozen_until <= self.now for n in gang if n.unit.process)
        names = [n.name for n in gang]
        linked = all(frozenset(pair) not in self.cuts for pair in itertools.combinations(names, 2))
        return healthy and linked

    def engine_answers(self, node: Node) -> bool:
        """Whether the head's API is up: it was loaded with all of its gang, and stays up after a worker's death."""
        process = node.unit.process
        if process is None:
            return False
        started = [when for (_, _, generation), when in self.starts.items() if generation == process.generation]
        return len(started) >= len(node.release.nodes) and self.now - max(started) >= LOAD

    # The network.

    def linked(self, one: str, other: str) -> bool:
        """Whether a packet sent now arrives."""
        return frozenset((one, other)) not in self.cuts and self.random.random() >= self.loss

    def poll(self, node: Node, agent: Agent, peer: str) -> None:
        """Ask a peer, one question at a time; an answer after a second is nobody's."""
        if peer in agent.asked:
            return
        number = next(self.order)
        agent.asked[peer] = number
        sent = self.clock(node)
        start = self.now

        def end(poll: Poll) -> None:
            if agent.asked.get(peer) == number and node.agent is agent:
                del agent.asked[peer]
                agent.polls.append(poll)

        self.at(1.0, lambda: end(Poll(peer, sent, contact.SILENT, error="no answer within 1 s")))

        def deliver() -> None:
            other = self.nodes.get(peer)
            if other is None or not other.up or other.frozen_until > self.now or not self.linked(node.name, peer):
                return
            there = other.agent
            poll = Poll(peer, sent, contact.REFUSED, error="connection refused")
            if there is not None and there.published is not None:
                age = self.now - there.looped_at
                poll = Poll(peer, sent, contact.OK, answer=replace(there.published, loop_age=age))
            back = self.delay()
            if self.linked(peer, node.name) and self.now + back - start < 1.0:
                self.at(back, lambda: end(poll))

        self.at(self.delay(), deliver)

    def delay(self) -> float:
        """How long a packet takes; some take so long that answers overtake each other."""
        return self.random.uniform(0.3, 1.2) if self.random.random() < self.slow else self.random.uniform(0.001, 0.05)

    # What goes wrong.

    def kill_agent(self, node: Node) -> None:
        """The agent dies and systemd starts it again."""
        self.end_agent(node)
        self.at(self.random.uniform(0.2, 3), lambda: self.begin_agent(node) if node.up and node.agent is None else None)

    def kill_rank(self, node: Node, code: int = 0) -> None:
        """The rank ends by itself; vLLM exits 0 after a fault."""
        if node.unit.process is not None:
            self.end_rank(node, node.unit.process, code)

    def power_off(self, node: Node, seconds: float) -> None:
        """The host dies and boots again: /run, processes and jobs are gone, the disk is not."""
        node.up = False
        self.end_agent(node)
        node.unit = Unit()

        def boot() -> None:
            if node.up:
                return
            node.up = True
            node.boot += 1
            node.memory = Memory()
            self.begin_agent(node)

        self.at(seconds, boot)

    def cut(self, pairs: Iterable[frozenset[str]], seconds: float) -> None:
        """Cut links for a while."""
        fresh = set(pairs) - self.cuts
        self.cuts |= fresh

        def heal() -> None:
            self.cuts -= fresh

        self.at(seconds, heal)

    def isolate(self, node: Node, seconds: float) -> None:
        """Cut a node from all others."""
        self.cut([frozenset((node.name, other)) for other in self.nodes if other != node.name], seconds)

    def apply(self, release: str, order: list[str], *, spread: float = 0.0) -> None:
        """Switch `current` on the nodes of a release, one after the other, then tell the head."""
        members = tuple(Member(name, self.nodes[name].machine_id, f"addr-{name}") for name in order)

        def prepare(node: Node) -> None:
            node.release = ReleaseSight(release, members, "")

        for name in order:
            self.at(self.random.uniform(0, spread), lambda node=self.nodes[name]: prepare(node))  # type: ignore[misc]

    def order_start(self, node: Node, **change: object) -> None:
        """Write the operator's command file on a node."""
        node.command = Command(serial=node.command.serial + 1, **change)  # type: ignore[arg-type]

    # What must come back.

    def serving_head(self) -> Node | None:
        """Return the node that serves, if its gang is whole and of the release that is prepared."""
        for node in self.nodes.values():
            agent = node.agent
            if agent is None or not node.up:
                continue
            if core.may_serve(agent.state, self.clock(node), self.settings) and self.gang_works(node):
                process = node.unit.process
                if process and process.release == node.release.digest:
                    return node
        return None
