"""The module `ppdeploy_gang`: whether a word changes anything, which node may be forgotten, and when a wait is over."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_gang as module
from tests.unit.gang_views import RELEASE, node, without_rank

STATUS: dict[str, Any] = node("node1")["agent"]["status"]


def status(**changes: Any) -> dict[str, Any]:
    return {**STATUS, **changes}


DOWN = {"healthy": False, "phase": "waiting", "remark": "node2 is not heard"}


@pytest.mark.parametrize(
    ("word", "left", "told", "needed"),
    [
        ("start", "start", {}, False),
        ("start", "restart", {"phase": "probing"}, False),
        ("start", "start", {"release": "other"}, True),  # an apply was interrupted before its word
        ("start", "stop", {"phase": "stopped", "wanted": "stop"}, True),
        ("start", "start", {"phase": "failed", "failed": "6 failures"}, True),
        ("start", "start", {**DOWN, "remark": "the next start is in 60 s: x"}, True),  # ends the pause
        ("start", "start", {**DOWN, "failures": [{"age": 1.0, "reason": "x"}]}, True),
        ("start", "start", DOWN, False),
        ("start", "restart", {"phase": "draining"}, False),
        ("stop", "start", {}, True),
        ("stop", "stop", {"phase": "draining", "wanted": "stop"}, False),
        ("stop", "stop", {"wanted": "run"}, True),  # left for an agent that has not read it
        ("restart", "start", {}, True),
        ("restart", "stop", {"phase": "stopped", "wanted": "stop"}, True),
    ],
)
def test_a_word_is_left_on_the_head_where_it_changes_something(
    word: str, left: str, told: dict[str, Any], needed: bool
) -> None:
    assert module.is_needed(word, RELEASE, {"verb": left}, status(**told), leads=True) is needed


@pytest.mark.parametrize(
    ("word", "left", "needed"),
    [
        ("start", "start", False),
        ("start", "stop", True),
        ("restart", "restart", False),
        ("restart", "stop", True),
        ("stop", "start", True),
        ("stop", "stop", False),
    ],
)
def test_a_worker_is_told_of_a_stop_and_of_its_end_alone(word: str, left: str, needed: bool) -> None:
    assert module.is_needed(word, RELEASE, {"verb": left}, None, leads=False) is needed


@pytest.mark.parametrize(("word", "left", "needed"), [("stop", "stop", False), ("start", "start", True)])
def test_a_silent_agent_is_left_every_word_that_its_file_does_not_have(word: str, left: str, needed: bool) -> None:
    # What it will find is unknown: a start also ends a gang that has failed.
    assert module.is_needed(word, RELEASE, {"verb": left}, None, leads=True) is needed


# ---- forgetting --------------------------------------------------------------------------------------------


def test_a_removed_node_that_is_waited_for_may_be_forgotten() -> None:
    view = node("node1", agent__status__members=["node1", "node2", "node3"])
    assert module.refusal_to_forget(["node3"], view) == ""


def test_a_node_of_the_release_may_not() -> None:
    refused = module.refusal_to_forget(["node2"], node("node1"))
    assert "node2 is a node of the release" in refused
    assert "ppdeploy apply --forget node2" in refused


def test_a_node_that_nobody_waits_for_is_a_slip_of_the_pen() -> None:
    assert module.refusal_to_forget(["node9"], node("node1")) == (
        "the gang waits for no node called node9, it knows node1, node2"
    )


def test_a_node_that_was_replaced_under_its_name_may_be_forgotten() -> None:
    view = node("node1", agent__status__members=["node1", "node2", "node2"])
    assert module.refusal_to_forget(["node2"], view) == ""


# ---- leaving a word ----------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words left, as command lines; the node is a head whose gang serves."""
    left: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        left.append(command[3:])
        return subprocess.CompletedProcess(command, 0, json.dumps({"serial": 8, "verb": "x"}), "")

    monkeypatch.setattr(module, "look", lambda _: node("node1", agent__status__members=["node1", "node2", "node3"]))
    monkeypatch.setattr(module, "last_word", lambda: {"verb": "start", "serial": 7})
    monkeypatch.setattr(subprocess, "run", run)
    return left


def leave(**changes: Any) -> dict[str, Any]:
    check_mode = changes.pop("check_mode", False)
    params = {"pipeline": "tiny", "word": "start", "release": "", "forget": [], "force": False, **changes}
    return module.order(params, check_mode=check_mode)


def test_a_start_of_what_serves_leaves_nothing(told: list[list[str]]) -> None:
    answer = leave()
    assert (answer["changed"], answer["serial"], answer["leads"], told) == (False, 7, True, [])


def test_a_word_is_left_with_the_release_and_the_nodes_to_forget(told: list[list[str]]) -> None:
    answer = leave(forget=["node3"])
    assert (answer["changed"], answer["serial"]) == (True, 8)
    assert told == [["order", "start", "--release", RELEASE, "--forget", "node3"]]


def test_a_refused_word_is_not_left(told: list[list[str]]) -> None:
    answer = leave(forget=["node2"])
    assert (answer["changed"], told) == (False, [])
    assert answer["refused"]


def test_check_mode_says_that_it_would_and_leaves_nothing(told: list[list[str]]) -> None:
    assert leave(word="stop", check_mode=True)["changed"]
    assert told == []


def test_an_apply_leaves_its_word_in_any_case(told: list[list[str]]) -> None:
    assert leave(force=True)["changed"]
    assert told == [["order", "start", "--release", RELEASE]]


# ---- waiting -----------------------------------------------------------------------------------------------


def run_wait(until: str, views: list[tuple[float, dict[str, Any]]], *, serial: int = 1, seconds: float = 600) -> Any:
    """Return how a wait ends that sees the views at these times; None when it goes on."""
    waiting = module.Wait(until, serial, seconds)
    for passed, view in views:
        ended = waiting.take(view, passed)
        if ended is not None:
            return ended
    return None


def head(**changes: Any) -> dict[str, Any]:
    return node("node1", **{f"agent__status__{name}": value for name, value in changes.items()})


def test_it_serves_once_the_word_has_been_read() -> None:
    before, after = head(serial=0), head(serial=1)
    ended = run_wait("serving", [(0.0, before), (1.0, before), (9.0, after)])
    assert (ended["reached"], ended["seconds"], ended["phase"]) == (True, 9.0, "serving")


def test_a_failed_gang_ends_the_wait_but_not_before_the_word_was_read() -> None:
    failed = {"phase": "failed", "healthy": False, "failed": "6 failures, the last: killed"}
    ended = run_wait("serving", [(0.0, head(serial=0, **failed)), (2.0, head(serial=1, **failed))])
    assert (ended["reached"], ended["seconds"], ended["reason"]) == (False, 2.0, "failed: 6 failures, the last: killed")


def test_what_is_missing_ends_the_wait_after_a_while() -> None:
    missing = head(**DOWN)
    assert run_wait("serving", [(0.0, missing), (29.0, missing)]) is None
    ended = run_wait("serving", [(0.0, missing), (31.0, missing)])
    assert (ended["reached"], ended["reason"]) == (False, "waiting: node2 is not heard")


def test_a_pause_and_a_check_that_goes_on_are_nothing_that_is_missing() -> None:
    views = [
        (float(second), head(phase="waiting", healthy=False, remark="node1: what the rank needs is being checked"))
        for second in range(0, 200, 10)
    ]
    assert run_wait("serving", views) is None


def test_failing_three_times_while_starting_ends_the_wait() -> None:
    def failed(*generations: int) -> dict[str, Any]:
        failures = [{"generation": number, "age": 1.0, "reason": f"exited in {number}"} for number in generations]
        return head(phase="starting", healthy=False, failures=failures)

    assert run_wait("serving", [(1.0, failed(4)), (9.0, failed(4, 5))]) is None
    ended = run_wait("serving", [(1.0, failed(4)), (9.0, failed(4, 5)), (15.0, failed(5, 6))])
    assert ended["reason"] == "it failed 3 times while starting, the last time: exited in 6"


def test_a_release_is_waited_for_while_the_last_one_still_serves() -> None:
    waiting = module.Wait("serving", 0, 60, "new")
    assert waiting.take(head(release="old"), 0.0) is None
    assert waiting.take(head(release="new", phase="starting", healthy=False), 1.0) is None
    ended = waiting.take(head(release="new"), 30.0)
    assert ended is not None
    assert ended["reached"]


def test_what_failed_before_a_wait_without_a_word_does_not_end_it() -> None:
    failures = [{"generation": number, "age": 99.0, "reason": "killed"} for number in (1, 2, 3)]
    recovering = head(phase="starting", healthy=False, failures=failures)
    assert run_wait("serving", [(0.0, recovering), (9.0, recovering)], serial=0) is None
    again = [*failures, *({"generation": number, "age": 1.0, "reason": "killed"} for number in (4, 5, 6))]
    later = head(phase="starting", healthy=False, failures=again)
    ended = run_wait("serving", [(0.0, recovering), (9.0, later)], serial=0)
    assert ended["reason"] == "it failed 3 times while starting, the last time: killed"


def test_a_wait_has_an_end() -> None:
    starting = head(phase="starting", healthy=False, remark="waiting for the API")
    ended = run_wait("serving", [(0.0, starting), (601.0, starting)])
    assert ended["reason"] == "not serving after 601 s: starting: waiting for the API"


def test_an_agent_that_does_not_answer_ends_it_with_where_to_look() -> None:
    silent = node("node1", agent__status=None, agent__problem="its agent does not answer: refused")
    assert run_wait("serving", [(0.0, silent), (20.0, silent), (25.0, head(phase="starting", healthy=False))]) is None
    ended = run_wait("serving", [(0.0, silent), (31.0, silent)])
    assert not ended["reached"]
    assert "its agent does not answer: refused" in ended["reason"]
    assert "ppdeploy logs --agent" in ended["reason"]


def test_it_has_stopped_when_no_rank_is_left_and_the_word_was_read() -> None:
    here = {"agent__status__phase": "stopped", "agent__status__wanted": "stop"}
    running, gone = head(phase="draining"), without_rank("node1", **here)
    ended = run_wait("stopped", [(0.0, running), (4.0, gone)])
    assert (ended["reached"], ended["seconds"], ended["reason"]) == (True, 4.0, "")
    assert run_wait("stopped", [(0.0, gone)], serial=2) is None


def test_a_worker_has_stopped_when_its_rank_is_gone() -> None:
    assert run_wait("stopped", [(0.0, node("node2"))]) is None
    assert run_wait("stopped", [(0.0, without_rank("node2"))])["reached"]


def test_a_head_that_cannot_hear_a_node_says_so_and_does_not_hide_it() -> None:
    waits = without_rank("node1", agent__status__phase="waiting", agent__status__remark="node2 is not heard (gone)")
    assert run_wait("stopped", [(0.0, waits), (10.0, waits)]) is None
    ended = run_wait("stopped", [(0.0, waits), (16.0, waits)])
    assert (ended["reached"], ended["reason"]) == (True, "node2 is not heard (gone)")


def test_a_rank_without_its_agent_has_not_stopped_until_its_processes_are_gone() -> None:
    silent = {"agent__status": None, "agent__problem": "its agent does not answer: refused"}
    left = node("node1", **silent)
    assert not run_wait("stopped", [(0.0, left), (31.0, left)])["reached"]
    gone = without_rank("node1")
    gone["agent"] |= {"status": None, "problem": "its agent does not answer: refused"}
    ended = run_wait("stopped", [(0.0, gone), (31.0, gone)])
    assert ended["reached"]
    assert "no rank is left, but its agent does not answer" in ended["reason"]


# ---- the node itself ---------------------------------------------------------------------------------------


def test_a_node_without_anything_is_told_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AGENT", "ROOT"):
        monkeypatch.setattr(module, name, str(tmp_path / name))
    monkeypatch.setattr(module, "unit_state", lambda _: {})
    with pytest.raises(module.NotHereError, match="no agent is installed"):
        module.configuration(str(tmp_path / "agent.json"))
    assert module.last_word(str(tmp_path / "command.json")) == {"verb": "start", "serial": 0}
    view = module.look({"pipeline": "tiny"})
    assert (view["current"], view["release_nodes"], view["agent"]["installed"]) == (None, [], False)
    assert (view["rank"]["installed"], view["rank"]["processes"]) == (False, 0)


def test_rank_and_stages_come_from_the_drop_in_that_the_template_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    golden = Path(__file__).parents[1] / "golden" / "gpu-two-by-two" / "node2"
    (drop_in,) = golden.rglob("rank.conf")
    folder = tmp_path / "tiny" / "releases" / RELEASE
    folder.mkdir(parents=True)
    for name in ("rank.conf", "release.json"):
        (folder / name).write_text((drop_in.parent / name).read_text())
    (tmp_path / "tiny" / "current").symlink_to(f"releases/{RELEASE}")
    monkeypatch.setattr(module, "ROOT", str(tmp_path))
    assert module.place("tiny", RELEASE) == {
        "rank": 1,
        "nodes": 2,
        "role": "worker",
        "stages": "stage 1 with layers 33-63",
    }
    assert [one["host"] for one in module.release_nodes("tiny", RELEASE)] == ["node1", "node2"]
    assert module.link_name(str(tmp_path / "tiny" / "current")) == RELEASE
    assert module.link_name(str(tmp_path / "tiny" / "previous")) == ""


def test_memory_is_that_of_all_processes_of_the_group_and_below(tmp_path: Path) -> None:
    below = tmp_path / "system.slice" / "rank" / "engine"
    below.mkdir(parents=True)
    (below / "cgroup.procs").write_text(f"{os.getpid()}\n")
    pids = module.processes("/system.slice/rank", (str(tmp_path),))
    assert pids == [os.getpid()]
    assert module.resident_bytes(pids) > 1 << 20
    assert module.resident_bytes([2**22 + 1]) == 0
    assert module.processes("", (str(tmp_path),)) == []


def test_peers_are_told_without_all_that_they_said() -> None:
    raw = {
        **STATUS,
        "peers": {
            "node2": {
                "heard": True,
                "age": 0.2,
                "error": "",
                "answer": {"phase": "worker", "rank": {"state": "running"}, "known": ["x"] * 100},
            }
        },
        "own": {"ask": {"members": [{"name": "node1"}, {"name": "node2"}]}, "known": [], "rank": {"state": "absent"}},
    }
    told = module.trimmed(raw)
    assert told["peers"]["node2"] == {
        "heard": True,
        "age": 0.2,
        "error": "",
        "answer": None,
        "rank": "running",
        "phase": "worker",
    }
    assert told["members"] == ["node1", "node2"]
    assert "ask" not in told["own"]
