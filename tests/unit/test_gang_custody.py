"""One agent and its rank, in the moments that the simulation's simple ranks do not have."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ppdeploy.agent import contact, core, custody, loop
from ppdeploy.agent.actions import KeepJournal, KillRank
from ppdeploy.agent.custody import Custody, Orders
from ppdeploy.agent.messages import DRAIN, RUN, STOP, Ask, Outcome, answer_from_json, clip, to_json
from ppdeploy.agent.records import Memory
from ppdeploy.agent.settings import Settings
from ppdeploy.agent.sight import Identity, Local, RankSight, ReleaseSight
from tests.unit.gang_factories import G1, A, B, answer

ME = Identity("c", "p", "a", A.machine_id, A.boot_id)
MEMORY = Memory(A.boot_id, promised=G1, started=G1, release="d", head=A, known=(A, B))
ORDERS = Orders(Ask(G1, RUN, "d", (A, B), start_head=True), is_head=True, head=A)
RUNNING = RankSight(processes=5, running=G1, release="d")


def _local(rank: RankSight, dying: str = "") -> Local:
    return Local(ME, salt=1, rank=rank, stored_memory=MEMORY, dying=dying)


def test_a_rank_whose_main_process_ended_is_killed_at_once_and_is_its_own_fault() -> None:
    held, actions = custody.step(Custody(MEMORY), _local(RUNNING), ORDERS, 1.0, Settings())
    assert actions == []
    held, actions = custody.step(held, _local(replace(RUNNING, main_gone=True)), ORDERS, 2.0, Settings())
    assert any(isinstance(action, KillRank) for action in actions)
    gone = RankSight(running=G1, code=0, end="exited with code 0")
    held, actions = custody.step(held, _local(gone), ORDERS, 3.0, Settings())
    assert any(isinstance(action, KeepJournal) for action in actions)
    ended = custody.outcome(held, _local(gone))
    assert ended is not None
    assert (ended.own, ended.code, ended.reason) == (True, 0, "exited with code 0")


def test_a_dead_engine_in_the_log_ends_its_rank_as_its_own_fault() -> None:
    held, _ = custody.step(Custody(MEMORY), _local(RUNNING), ORDERS, 1.0, Settings())
    held, actions = custody.step(held, _local(RUNNING, "its log says: EngineDeadError"), ORDERS, 2.0, Settings())
    assert any(isinstance(action, KillRank) for action in actions)
    held, _ = custody.step(held, _local(RankSight(running=G1)), ORDERS, 3.0, Settings())
    ended = custody.outcome(held, _local(RankSight(running=G1)))
    assert ended is not None
    assert (ended.own, ended.reason) == (True, "its log says: EngineDeadError")


def _orders(want: str) -> Orders:
    """What a worker hears of a head that drains and then stops the gang."""
    return Orders(Ask(G1, want, "d", (A, B)), head=B)


def test_of_a_wished_stop_no_journal_is_kept() -> None:
    held, _ = custody.step(Custody(MEMORY), _local(RUNNING), _orders(DRAIN), 1.0, Settings())
    held, actions = custody.step(held, _local(RUNNING), _orders(STOP), 2.0, Settings())
    assert any(isinstance(action, KillRank) for action in actions)
    held, actions = custody.step(held, _local(RankSight(running=G1)), _orders(STOP), 3.0, Settings())
    assert not any(isinstance(action, KeepJournal) for action in actions)
    assert custody.outcome(held, _local(RankSight(running=G1))) is not None


def test_of_a_rank_that_dies_while_it_is_drained_the_journal_is_kept() -> None:
    held, _ = custody.step(Custody(MEMORY), _local(RUNNING), _orders(DRAIN), 1.0, Settings())
    held, _ = custody.step(held, _local(RUNNING, "its log says: EngineDeadError"), _orders(DRAIN), 2.0, Settings())
    _, actions = custody.step(held, _local(RankSight(running=G1)), _orders(STOP), 3.0, Settings())
    assert any(isinstance(action, KeepJournal) for action in actions)


def test_a_look_that_is_too_early_decides_nothing() -> None:
    unknown = RankSight(known=False)
    held, actions = custody.step(Custody(replace(MEMORY, promised=G1)), _local(unknown), ORDERS, 1.0, Settings())
    assert actions == []
    assert custody.outcome(held, _local(unknown)) is None
    assert custody.view(held, _local(unknown)).state != "absent"


def test_processes_without_a_ticket_of_ours_are_foreign() -> None:
    foreign = RankSight(processes=1)
    _, actions = custody.step(Custody(MEMORY), _local(foreign), ORDERS, 1.0, Settings())
    assert any(isinstance(action, KillRank) and "foreign" in action.reason for action in actions)


def test_what_is_left_of_a_rank_keeps_it_from_being_absent() -> None:
    for sight in (
        RankSight(job=True),
        RankSight(ticket=G1),
        RankSight(processes=1),
        RankSight(residue="GPU memory of process 7"),
        RankSight(known=False),
    ):
        assert not custody.is_absent(sight)
    assert custody.is_absent(RankSight(running=G1))


def test_what_a_node_says_fits_into_an_answer_however_much_its_driver_complains() -> None:
    """An answer that peers refuse as malformed would hide the reason, and end the gang by the lease."""
    long = "GPU 0000:1B:00.0 is lost\n" * 100
    local = replace(_local(RankSight()), remark=long, ready=False, release=ReleaseSight(problem=""))
    state = core.begin(local, 1.0, Settings())
    state = replace(state, custody=replace(state.custody, outcome=Outcome(G1, 1, long, own=True)))
    said = core.answer(state, local)
    assert said.outcome is not None
    assert said.remark.startswith("GPU 0000:1B:00.0 is lost")
    assert answer_from_json(json.loads(json.dumps(to_json(said)))) == said
    assert len(clip("x" * 400)) == len(clip("x" * 401)) == 400


def test_a_peer_is_judged_in_the_end_although_every_loop_is_late() -> None:
    settings = Settings()
    heard = contact.Contact(answer=answer(), heard_at=0.0, since=0.0, kind=contact.OK)
    now, known = 0.0, heard
    while not contact.lost(known, now, settings) and now < 600:
        # A loop takes 1.5 s instead of 0.4 s, and one poll ends in each.
        now += 1.5
        known = contact.restart_count(known, now, settings)
        known = contact.update(known, contact.Poll("b", now - 1, contact.SILENT, error="timed out"), now, settings)
    assert settings.late_limit <= now < settings.late_limit + 2 * settings.lease
    # Of a machine that was suspended nothing counts, however long it slept.
    assert not contact.lost(contact.after_gap(known, now), now + settings.lease, settings)


def test_an_agent_that_cannot_start_a_follower_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_unit: str) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(loop, "Follower", full)
    agent = object.__new__(loop.Agent)
    vars(agent).update(_config=SimpleNamespace(unit="u"), _follower=None)
    agent._follow()
    assert agent._follower is None
    assert "the rank's journal cannot be followed: [Errno 11]" in "".join(capsys.readouterr())


def test_the_memory_of_an_adopted_rank_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "resident_bytes", lambda pids: 1000 * len(pids))
    agent = object.__new__(loop.Agent)
    unit = SimpleNamespace(pids=set())
    vars(agent).update(_unit=unit, _rank_memory=(float("-inf"), 0))
    assert agent._resident() == 0
    unit.pids = {1, 2}
    assert agent._resident() == 2000
    # Reading it costs something: the next looks say the same.
    unit.pids = {1, 2, 3}
    assert agent._resident() == 2000
