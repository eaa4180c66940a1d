"""The faults of the simulated world, thrown at random, and the story of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ppdeploy.agent.records import Memory, Record
from ppdeploy.agent.settings import Settings
from tests.sim.world import Node, World

PATIENT = Settings(budget=10_000, backoff_limit=20.0, start_timeout=120.0, drain_timeout=8.0)
"""Faults come by the minute here, so the budget is set aside (it has its own tests)."""

Fault = Callable[[World, Node], None]


def kill_rank(world: World, node: Node) -> None:
    """A rank exits; half of the time with code 0, as vLLM does."""
    world.kill_rank(node, world.random.choice((0, 1, -9)))


def hang_rank(_world: World, node: Node) -> None:
    """A rank lives on and does nothing."""
    if node.unit.process is not None:
        node.unit.process.hung = True


def kill_agent(world: World, node: Node) -> None:
    """An agent dies."""
    world.kill_agent(node)


def stall_agent(world: World, node: Node) -> None:
    """A control loop stands still behind a living HTTP thread."""
    if node.agent is not None:
        node.agent.stalled_until = world.now + world.random.uniform(1, 12)


def reboot(world: World, node: Node) -> None:
    """A host dies and comes back."""
    world.power_off(node, world.random.choice((0.5, 3.0, 15.0)))


def isolate(world: World, node: Node) -> None:
    """A node's cable is pulled."""
    world.isolate(node, world.random.choice((1.0, 3.0, 8.0, 20.0)))


def split(world: World, node: Node) -> None:
    """One link is cut."""
    other = world.random.choice([n for n in world.nodes if n != node.name] or [node.name])
    world.cut([frozenset((node.name, other))], world.random.choice((2.0, 10.0, 25.0)))


def suspend(world: World, node: Node) -> None:
    """A virtual machine stands still; its clock does not."""
    node.frozen_until = world.now + world.random.uniform(1, 15)


def start_by_hand(world: World, node: Node) -> None:
    """Someone types `systemctl start`."""
    world.start_unit(node, None, by_hand=True)


def forget(world: World, node: Node) -> None:
    """The agent dies and what it kept in /run is gone, while the rank lives on."""
    node.memory = Memory(boot_id=node.boot_id)
    world.kill_agent(node)


def lose_disk(world: World, node: Node) -> None:
    """The host comes back with an empty disk."""
    node.record = Record()
    world.power_off(node, 2.0)


def corrupt_record(world: World, node: Node) -> None:
    """The agent dies and finds its record unreadable."""
    node.record = Record()
    world.kill_agent(node)


def fill_disk(world: World, node: Node) -> None:
    """Nothing can be written for a while."""
    node.disk_full = True

    def free() -> None:
        node.disk_full = False

    world.at(world.random.uniform(2, 20), free)


def unready(world: World, node: Node) -> None:
    """The driver or NIC of a node is not there for a while."""
    node.ready = False

    def mend() -> None:
        node.ready = True

    world.at(world.random.uniform(2, 20), mend)


def operate(world: World, node: Node) -> None:
    """An operator stops or restarts, here or there, and starts again later."""
    verb = world.random.choice(("stop", "restart"))
    world.order_start(node, verb=verb)
    world.at(world.random.uniform(2, 15), lambda: world.order_start(node, verb="start"))


def reorder(world: World, _node: Node) -> None:
    """An apply makes another node the head, node by node."""
    count = world.random.randrange(1_000_000)
    order = list(world.nodes)
    world.random.shuffle(order)
    world.apply(f"r{count}", order, spread=world.random.choice((0.0, 3.0, 10.0)))
    head = world.nodes[order[0]]
    world.at(11.0, lambda: world.order_start(head, verb="start", release=f"r{count}"))


ALL: tuple[Fault, ...] = (
    kill_rank, hang_rank, kill_agent, stall_agent, reboot, isolate, split, suspend, start_by_hand, forget,
    lose_disk, corrupt_record, fill_disk, unready, operate, reorder,
)  # fmt: skip


def story(world: World, faults: Sequence[Fault], *, count: int, pause: float, recover: float = 150.0) -> None:
    """Bring a gang up, throw `count` faults at it, and see that it serves again once they have stopped.

    Raises `BrokenRuleError` for what must never happen, `AssertionError` when it does not come back.
    """
    world.apply("r0", list(world.nodes))
    if world.random.random() < 0.5:
        assert world.run(60.0, until=lambda: world.serving_head() is not None), explain(world, "never served")
    for _ in range(count):
        world.run(world.random.expovariate(1 / pause))
        fault = world.random.choice(faults)
        node = world.random.choice(list(world.nodes.values()))
        world.say(f"--- {fault.__name__} {node.name}")
        fault(world, node)
    world.run(30.0)
    settle(world)
    assert world.run(recover, until=lambda: world.serving_head() is not None), explain(world, "not serving again")


def settle(world: World) -> None:
    """End every fault: heal links, thaw hosts, apply one release everywhere, start."""
    world.say("--- faults end")
    world.cuts.clear()
    world.loss = world.slow = 0.0
    order = list(next(iter(world.nodes.values())).release.nodes)
    names = [member.name for member in order] or list(world.nodes)
    world.apply("final", names)
    world.run(1.0)
    for node in world.nodes.values():
        node.disk_full, node.ready = False, True
        world.order_start(node, verb="start", release="final")


def explain(world: World, what: str) -> str:
    """Return what each node thought at the end, after the last events."""
    lines = [what, *world.log[-60:]]
    for node in world.nodes.values():
        agent = node.agent
        if agent is None:
            lines.append(f"{node.name}: no agent, up={node.up}")
            continue
        head = agent.state.head
        lines.append(
            f"{node.name}: {head.phase} {head.record.generation}: {head.remark}; promised {node.memory.promised}"
        )
        lines.append(f"    rank {node.unit.process}; shown {agent.published.rank if agent.published else None}")
    return "\n".join(lines)
