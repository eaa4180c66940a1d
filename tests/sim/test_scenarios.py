"""What an operator sees of single events: the faults of docs/gang.md one by one, on the protocol's own clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ppdeploy.agent import core, head
from ppdeploy.agent.actions import Action, SaveRecord
from ppdeploy.agent.messages import NONE, Member
from ppdeploy.agent.settings import Settings
from ppdeploy.agent.sight import Local, ReleaseSight
from tests.sim import faults
from tests.sim.world import LOAD, TICK, Agent, Node, World

CALM = Settings(start_timeout=120.0, drain_timeout=8.0)


def _gang(count: int = 3, settings: Settings = CALM, seed: int = 1) -> World:
    world = World(seed, count, settings, loss=0.0, slow=0.0, stuck=0.0)
    world.apply("r0", list(world.nodes))
    assert world.run(60.0, until=lambda: world.serving_head() is not None), faults.explain(world, "never served")
    world.run(5.0)
    return world


def _head(node: Node) -> head.Head:
    assert node.agent is not None
    return node.agent.state.head


def _phase(node: Node) -> str:
    return _head(node).phase


def _remark(node: Node) -> str:
    return _head(node).remark


def _seconds(world: World, until: Callable[[], bool], limit: float) -> float:
    start = world.now
    assert world.run(limit, until=until), faults.explain(world, "it never happened")
    return world.now - start


def _serving(world: World) -> Callable[[], bool]:
    return lambda: world.serving_head() is not None


def _alive(world: World) -> int:
    return sum(1 for node in world.nodes.values() if node.unit.process is not None)


@pytest.mark.parametrize("victim", ["n0", "n1", "n2"])
def test_a_rank_that_exits_takes_all_others_with_it_and_they_come_back(victim: str) -> None:
    world = _gang()
    first = world.nodes["n0"].record.generation
    world.kill_rank(world.nodes[victim], 0)
    assert _seconds(world, lambda: _phase(world.nodes["n0"]) == head.STOPPING, 3.0) < 3.0
    assert _seconds(world, lambda: _alive(world) == 0, 5.0) < 5.0
    assert _seconds(world, _serving(world), 60.0) < LOAD + 15.0
    assert world.nodes["n0"].record.generation.number == first.number + 1
    assert len(world.nodes["n0"].record.failures) == 1


@pytest.mark.parametrize("victim", ["n1", "n2"])
def test_a_host_that_goes_down_in_good_order_spends_no_budget(victim: str) -> None:
    # The others' ranks end first, since their connections break; then the host is gone.
    world = _gang(settings=replace(CALM, budget=2))
    for _ in range(3):
        world.kill_rank(world.nodes["n0"], 1)
        world.run(0.3)
        world.power_off(world.nodes[victim], 40.0)
        world.run(20.0)
        assert _phase(world.nodes["n0"]) == head.WAITING
        assert _seconds(world, _serving(world), 90.0) < 20.0 + LOAD + 15.0
        assert world.nodes["n0"].record.failures == ()
        world.run(30.0)


def test_only_the_failure_of_the_reboot_is_forgiven() -> None:
    world = _gang()
    world.kill_rank(world.nodes["n1"], 1)
    assert _seconds(world, lambda: _phase(world.nodes["n0"]) != head.SERVING, 5.0) < 5.0
    assert _seconds(world, _serving(world), 60.0) < LOAD + 15.0
    world.run(30.0)
    world.kill_rank(world.nodes["n0"], 1)
    world.run(0.3)
    world.power_off(world.nodes["n2"], 40.0)
    assert _seconds(world, _serving(world), 120.0) < 40.0 + LOAD + 15.0
    assert len(world.nodes["n0"].record.failures) == 1


@pytest.mark.parametrize("victim", ["n0", "n1"])
def test_a_hung_rank_is_found_within_thirty_seconds_on_an_idle_gang(victim: str) -> None:
    world = _gang(2)
    world.run(60.0)
    faults.hang_rank(world, world.nodes[victim])
    assert _seconds(world, lambda: _phase(world.nodes["n0"]) != head.SERVING, 40.0) < 30.0
    assert "canary" in _remark(world.nodes["n0"]) or "unreadable" in _remark(world.nodes["n0"])
    assert _seconds(world, _serving(world), 60.0) < LOAD + 15.0


def test_a_cut_shorter_than_the_lease_is_no_fault() -> None:
    world = _gang()
    starts = dict(world.starts)
    world.isolate(world.nodes["n1"], 3.0)
    world.run(60.0)
    assert world.starts == starts
    assert world.serving_head() is not None


@pytest.mark.parametrize("victim", ["n0", "n1"])
def test_a_longer_cut_stops_both_sides_and_costs_no_budget(victim: str) -> None:
    world = _gang()
    world.isolate(world.nodes[victim], 60.0)
    assert _seconds(world, lambda: _alive(world) == 0, 15.0) < 15.0
    world.run(30.0)
    assert _phase(world.nodes["n0"]) == head.WAITING
    assert "is not heard" in _remark(world.nodes["n0"])
    assert _seconds(world, _serving(world), 120.0) < 60.0
    assert world.nodes["n0"].record.failures == ()


@pytest.mark.parametrize("victims", [("n0",), ("n1",), ("n0", "n1", "n2")])
def test_hosts_that_lose_power_come_back_with_a_higher_generation_and_no_budget_spent(victims: tuple[str, ...]) -> None:
    world = _gang()
    first = world.nodes["n0"].record.generation
    for victim in victims:
        world.power_off(world.nodes[victim], 20.0)
    assert _seconds(world, _serving(world), 120.0) < 20.0 + LOAD + 20.0
    assert world.nodes["n0"].record.generation > first
    assert world.nodes["n0"].record.failures == ()


def test_an_agent_killed_again_and_again_leaves_its_rank_alone() -> None:
    world = _gang()
    starts = dict(world.starts)
    for index in range(20):
        world.kill_agent(world.nodes[f"n{index % 3}"])
        world.run(3.0)
    world.run(10.0)
    assert world.starts == starts
    assert world.serving_head() is not None


def test_the_budget_ends_in_failed_with_the_first_reason_kept_and_start_clears_it() -> None:
    world = _gang(2, replace(CALM, budget=3, backoff_limit=4.0))
    node = world.nodes["n0"]
    first = node.record.generation
    for _ in range(3):
        assert world.run(60.0, until=_serving(world))
        world.kill_rank(world.nodes["n1"], 1)
        world.run(3.0)
    world.run(120.0)
    assert _phase(node) == head.FAILED
    assert "3 failures" in _remark(node)
    assert node.record.series == first
    world.power_off(node, 5.0)
    world.run(60.0)
    assert _phase(node) == head.FAILED, "failed outlives a reboot"
    world.order_start(node, verb="start")
    assert _seconds(world, _serving(world), 60.0) < LOAD + 15.0
    assert node.record.failures == ()


def test_ten_good_minutes_forgive_earlier_failures() -> None:
    world = _gang(2)
    world.kill_rank(world.nodes["n1"], 1)
    world.run(5.0)
    assert len(world.nodes["n0"].record.failures) == 1
    world.run(700.0)
    assert not world.nodes["n0"].record.failures


def test_waiting_has_no_deadline_and_names_what_is_missing() -> None:
    world = World(3, 3, CALM, loss=0.0, slow=0.0, stuck=0.0)
    world.nodes["n2"].ready = False
    world.apply("r0", list(world.nodes))
    world.run(2000.0)
    assert _phase(world.nodes["n0"]) == head.WAITING
    assert _remark(world.nodes["n0"]) == "n2: GPUs are missing"
    assert world.nodes["n0"].record.failures == ()
    world.nodes["n2"].ready = True
    assert _seconds(world, _serving(world), 60.0) < LOAD + 12.0


def test_a_node_whose_files_differ_never_starts_and_is_named() -> None:
    world = World(4, 2, CALM, loss=0.0, slow=0.0, stuck=0.0)
    world.apply("r0", list(world.nodes))
    world.run(0.5)
    bad = world.nodes["n1"]
    bad.release = replace(bad.release, problem="rank.env differs from the release")
    world.run(100.0)
    assert world.starts == {}
    assert _remark(world.nodes["n0"]) == "n1: rank.env differs from the release"


def test_half_an_apply_starts_nothing() -> None:
    world = _gang(2)
    world.kill_rank(world.nodes["n1"], 0)
    members = world.nodes["n1"].release.nodes
    world.nodes["n1"].release = ReleaseSight("r1", members, "")
    starts = len(world.starts)
    world.run(60.0)
    assert len(world.starts) == starts
    assert "has release r1 prepared, not r0" in _remark(world.nodes["n0"])


def test_an_apply_that_is_not_told_to_start_leaves_the_running_release_alone() -> None:
    world = _gang(2)
    starts = dict(world.starts)
    world.apply("r1", ["n0", "n1"])
    world.run(60.0)
    assert world.starts == starts
    world.order_start(world.nodes["n0"], verb="start", release="r1")
    assert _seconds(world, _serving(world), 60.0) < LOAD + 25.0
    assert {p.release for n in world.nodes.values() if (p := n.unit.process)} == {"r1"}
    starts = dict(world.starts)
    world.order_start(world.nodes["n0"], verb="start", release="r1")
    world.run(30.0)
    assert world.starts == starts, "a start of what already runs does nothing"


def test_stop_drains_and_stays_stopped_over_a_reboot_until_start() -> None:
    world = _gang(2)
    node = world.nodes["n0"]
    world.order_start(node, verb="stop")
    world.run(20.0)
    assert _phase(node) == head.STOPPED
    assert _alive(world) == 0
    world.power_off(node, 5.0)
    world.run(60.0)
    assert _phase(node) == head.STOPPED
    world.order_start(node, verb="start")
    assert _seconds(world, _serving(world), 60.0) < LOAD + 12.0


def test_stop_on_a_worker_works_without_a_head() -> None:
    world = _gang(2)
    world.power_off(world.nodes["n0"], 500.0)
    world.order_start(world.nodes["n1"], verb="stop")
    world.run(10.0)
    assert world.nodes["n1"].unit.process is None


def test_stop_on_a_worker_drains_the_gang_and_start_there_brings_it_back() -> None:
    world = _gang(2)
    worker = world.nodes["n1"]
    world.order_start(worker, verb="stop")
    assert _seconds(world, lambda: _phase(world.nodes["n0"]) == head.DRAINING, 5.0) < 5.0
    assert worker.unit.process is not None, "requests in flight need it"
    assert _seconds(world, lambda: _alive(world) == 0, 20.0) < 20.0
    world.run(30.0)
    assert _remark(world.nodes["n0"]) == "n1: stopped by the operator on this node"
    world.order_start(worker, verb="start")
    assert _seconds(world, _serving(world), 60.0) < LOAD + 12.0


def test_a_node_that_leaves_stops_its_rank_and_the_rest_goes_on() -> None:
    world = _gang(3)
    world.apply("r1", ["n0", "n1"])
    world.run(1.0)
    world.order_start(world.nodes["n0"], verb="start", release="r1")
    assert _seconds(world, _serving(world), 60.0) < LOAD + 25.0
    assert world.nodes["n2"].unit.process is None


def test_a_node_that_leaves_unreachable_blocks_by_name_until_it_is_forgotten() -> None:
    world = _gang(3)
    world.isolate(world.nodes["n2"], 1e6)
    world.apply("r1", ["n0", "n1"])
    world.run(1.0)
    world.order_start(world.nodes["n0"], verb="start", release="r1")
    world.run(120.0)
    assert _phase(world.nodes["n0"]) == head.WAITING
    assert "n2 is not heard" in _remark(world.nodes["n0"])
    world.order_start(world.nodes["n0"], verb="start", release="r1", forget=("n2",))
    assert _seconds(world, _serving(world), 60.0) < LOAD + 25.0


def test_a_replaced_machine_of_the_same_name_does_not_speak_for_the_old_one() -> None:
    world = _gang(2)
    old = world.nodes["n1"]
    world.power_off(old, 1e6)
    new = world.add_node("n1", "another-machine")
    world.apply("r1", ["n0", "n1"])
    world.run(1.0)
    world.order_start(world.nodes["n0"], verb="start", release="r1")
    world.run(60.0)
    assert new.unit.process is None
    assert "answers as another machine" in _remark(world.nodes["n0"])
    world.order_start(world.nodes["n0"], verb="start", release="r1", forget=("n1",))
    assert _seconds(world, _serving(world), 60.0) < LOAD + 25.0


@pytest.mark.parametrize("old", ["n0", "n1"])
def test_a_node_that_is_renamed_is_not_waited_for_under_its_old_name(old: str) -> None:
    world = _gang(2)
    node = world.nodes.pop(old)
    node.name = "renamed"
    world.nodes["renamed"] = node
    world.kill_agent(node)
    order = ["renamed" if name == old else name for name in ("n0", "n1")]
    world.apply("r1", order)
    world.run(1.0)
    world.order_start(world.nodes[order[0]], verb="start", release="r1")
    assert _seconds(world, _serving(world), 120.0) < 60.0


def test_a_node_of_the_next_release_that_is_not_there_yet_leaves_a_gang_that_stood_still_healthy() -> None:
    world = _gang(2)
    node = world.nodes["n0"]
    away = world.add_node("n2")
    world.isolate(away, 1e6)
    world.apply("r1", ["n0", "n1", "n2"])
    world.run(5.0)
    assert node.agent is not None
    node.agent.stalled_until = world.now + 3.0
    world.run(10.0)
    agent = node.agent
    assert agent is not None
    assert not agent.state.unsure
    assert core.may_serve(agent.state, world.clock(node), world.settings)


def test_no_deadline_runs_before_the_ask_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, 2, CALM, loss=0.0, slow=0.0, stuck=0.0)
    act, slow = world.act, [30.0]

    def store_slowly(node: Node, agent: Agent, action: Action) -> None:
        if isinstance(action, SaveRecord) and action.record.launched and slow[0] > 0:
            slow[0] -= TICK
            return
        act(node, agent, action)

    monkeypatch.setattr(world, "act", store_slowly)
    world.apply("r0", list(world.nodes))
    assert world.run(90.0, until=lambda: world.serving_head() is not None), faults.explain(world, "never served")
    assert not _head(world.nodes["n0"]).restarts


def test_an_agent_that_begins_anew_still_knows_how_long_a_prefill_takes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own first canary is a small one: by that alone, the next large prefill would be taken for a stall."""
    world = World(1, 2, CALM, loss=0.0, slow=0.0, stuck=0.0)
    answer = world.try_canary
    monkeypatch.setattr(world, "try_canary", lambda *about: world.at(4.0, lambda: answer(*about)))
    world.apply("r0", list(world.nodes))
    assert world.run(90.0, until=lambda: world.serving_head() is not None), faults.explain(world, "never served")
    world.run(3.0)
    monkeypatch.setattr(world, "try_canary", answer)
    node = world.nodes["n0"]
    starts = dict(world.starts)
    world.kill_agent(node)
    world.run(40.0)
    assert world.serving_head() is node
    assert world.starts == starts
    assert node.agent is not None
    assert node.agent.state.head.progress.limit >= 40.0


def test_requests_of_others_do_not_keep_the_first_proof_from_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their steps would make the canary that is out obsolete, and the next one too."""
    world = World(1, 2, CALM, loss=0.0, slow=0.0, stuck=0.0)
    look = world.look

    def busy(node: Node) -> Local:
        seen = look(node)
        return replace(seen, api=replace(seen.api, counter=world.now)) if seen.api.healthy else seen

    monkeypatch.setattr(world, "look", busy)
    answer = world.try_canary
    monkeypatch.setattr(world, "try_canary", lambda *about: world.at(3.0, lambda: answer(*about)))
    world.apply("r0", list(world.nodes))
    assert world.run(60.0, until=lambda: world.serving_head() is not None), faults.explain(world, "never served")


def test_another_head_takes_over_only_after_the_old_gang_is_gone() -> None:
    world = _gang(3)
    world.apply("r1", ["n1", "n0", "n2"], spread=5.0)
    world.run(6.0)
    world.order_start(world.nodes["n1"], verb="start", release="r1")
    assert _seconds(world, _serving(world), 90.0) < 60.0
    serving = world.serving_head()
    assert serving is not None
    assert serving.name == "n1"
    assert _phase(world.nodes["n0"]) == head.RETIRED
    world.apply("r0", ["n0", "n1", "n2"], spread=5.0)
    world.run(6.0)
    world.order_start(world.nodes["n0"], verb="start", release="r0")
    assert _seconds(world, lambda: getattr(world.serving_head(), "name", "") == "n0", 90.0) < 60.0


def test_a_full_disk_stops_nothing_that_runs_and_starts_nothing_new() -> None:
    world = _gang(2)
    node = world.nodes["n0"]
    starts = dict(world.starts)
    node.disk_full = True
    world.run(100.0)
    assert world.starts == starts
    assert world.serving_head() is node
    world.kill_rank(world.nodes["n1"], 1)
    world.run(60.0)
    assert world.starts == starts
    assert _alive(world) == 0, "what is left of the gang is stopped even so"
    node.disk_full = False
    assert _seconds(world, _serving(world), 60.0) < LOAD + 15.0


def test_a_restart_waits_for_a_disk_that_can_store_what_comes_after_it_and_a_stop_does_not() -> None:
    world = _gang(2)
    node = world.nodes["n0"]
    starts = dict(world.starts)
    node.disk_full = True
    world.order_start(node, verb="restart")
    world.run(30.0)
    assert world.serving_head() is node
    assert world.starts == starts
    node.disk_full = False
    assert _seconds(world, lambda: world.serving_head() is None, 10.0) < 10.0
    assert _seconds(world, _serving(world), 60.0) < LOAD + 15.0
    node.disk_full = True
    world.order_start(node, verb="stop")
    assert _seconds(world, lambda: _alive(world) == 0, 30.0) < 30.0


def test_tokens_outrank_an_agent_that_is_not_heard() -> None:
    world = _gang(2, replace(CALM, canary_idle=1.0))
    starts = dict(world.starts)
    world.end_agent(world.nodes["n1"])
    world.run(45.0)
    assert world.serving_head() is not None
    world.begin_agent(world.nodes["n1"])
    world.run(20.0)
    assert world.starts == starts


def test_a_rank_started_by_hand_gets_no_ticket() -> None:
    world = _gang(2)
    world.order_start(world.nodes["n0"], verb="stop")
    world.run(20.0)
    starts = dict(world.starts)
    for node in world.nodes.values():
        faults.start_by_hand(world, node)
    world.run(20.0)
    assert world.starts == starts


def test_a_suspended_machine_says_so_and_starts_nothing_before_it_heard_all_again() -> None:
    world = _gang(3)
    world.nodes["n0"].frozen_until = world.now + 10.0
    world.run(60.0)
    assert world.serving_head() is not None


def test_a_release_without_nodes_names_no_head() -> None:
    assert ReleaseSight().head() is None
    assert ReleaseSight("d", (Member("a", "m", "x"),), "broken").head() == Member("a", "m", "x")
    assert NONE < (1, 0)
