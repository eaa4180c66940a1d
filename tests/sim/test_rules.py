"""The simulator proves something only if it finds the known counterexamples once their rule is switched off.

The switches are these tests' own patches of the protocol's functions; nothing in the agent can reach them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppdeploy.agent import custody, head
from ppdeploy.agent.messages import ABSENT, Answer, Ask, GenerationId
from ppdeploy.agent.records import Memory, Record
from ppdeploy.agent.settings import Settings
from ppdeploy.agent.sight import Identity, RankSight
from tests.sim import faults
from tests.sim.world import BrokenRuleError, Switches, World

SLOW_WORKERS = (faults.kill_rank, faults.stall_agent)
HASTY = replace(faults.PATIENT, backoff_first=0.0, backoff_limit=0.0, gap=1e9, late_tick=1e9)
"""The pause between generations and the doubts after a gap would hide scenario 1 most of the time: without them."""


def _absence_only(answer: Answer, _generation: GenerationId) -> bool:
    return answer.rank.state == ABSENT


def _processes_only(rank: RankSight) -> bool:
    return rank.known and rank.processes == 0


def _whoever_asks(memory: Memory, ask: Ask, identity: Identity) -> bool:
    return ask.generation == memory.promised and ask.member(identity.node) is not None


def _own_count(record: Record, _heard: list[GenerationId], _salt: int) -> GenerationId:
    return GenerationId(record.generation.number + 1, 0)


def _heard_nothing(*_arguments: object, **_options: object) -> list[GenerationId]:
    return []


def _first_failure(
    throw: tuple[faults.Fault, ...],
    *,
    settings: Settings = faults.PATIENT,
    switches: Switches | None = None,
    pause: float = 4.0,
    runs: int = 150,
    of: type[AssertionError] = AssertionError,
) -> AssertionError | None:
    """Return the first failure of a kind; a gang that does not serve again is one of the general kind."""
    for seed in range(runs):
        world = World(seed, 2 + seed % 3, settings, slow=0.15, switches=switches)
        try:
            faults.story(world, throw, count=int(40 / pause), pause=pause)
        except AssertionError as error:
            if isinstance(error, of):
                return error
    return None


def test_1_without_the_promise_an_old_absence_passes_for_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "is_gone", _absence_only)
    found = _first_failure(SLOW_WORKERS, settings=HASTY, pause=0.7)
    assert isinstance(found, BrokenRuleError)
    assert "two generations at once" in str(found)


def test_2_without_tickets_a_queued_start_fires_after_absent_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custody, "is_absent", _processes_only)
    found = _first_failure((faults.kill_rank, faults.kill_agent), switches=Switches(tickets=False), of=BrokenRuleError)
    assert isinstance(found, BrokenRuleError)
    assert "at once" in str(found) or "twice" in str(found)


def test_4_without_boot_ids_and_a_memory_of_starts_a_generation_starts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custody, "may_start", _whoever_asks)
    found = _first_failure((faults.reboot, faults.forget))
    assert isinstance(found, BrokenRuleError)
    assert "twice" in str(found)


def test_6_a_head_that_counts_alone_never_gets_its_gang_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "next_generation", _own_count)
    monkeypatch.setattr(head, "_heard_above", _heard_nothing)
    assert _first_failure((faults.lose_disk, faults.corrupt_record, faults.kill_rank)) is not None


def test_with_all_rules_the_same_faults_find_nothing() -> None:
    assert _first_failure(SLOW_WORKERS, settings=HASTY, pause=0.7, runs=20) is None
    assert _first_failure((faults.reboot, faults.forget), runs=10) is None
    assert _first_failure((faults.lose_disk, faults.corrupt_record, faults.kill_rank), runs=10) is None
