"""`status`, `logs`, `start`, `stop` and `restart`: what they run, print and return."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from ppdeploy.cli import forgetting, session
from ppdeploy.cli import logs as logs_verb
from ppdeploy.cli import status as status_verb
from ppdeploy.errors import InputError
from ppdeploy.run import Failure, HostStats, RunResult, plays
from tests.unit.cli_support import Cluster, Command, Outcome, Play, load, loaded_once, make_cluster_on_disk
from tests.unit.gang_views import node, seen

UNREACHABLE = {"unreachable": True, "msg": "Failed to connect to the host via ssh: Connection refused"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = make_cluster_on_disk(tmp_path_factory.mktemp("cluster"))
    with loaded_once(load(made)):
        yield made


def played(results: dict[str, dict[str, Any]], **changes: Any) -> RunResult:
    values: dict[str, Any] = {
        "status": "ok",
        "return_code": 0,
        "seconds": 1.0,
        "stats": {"node1": HostStats(ok=2), "node2": HostStats(ok=2)},
        "results": results,
    }
    return RunResult(**{**values, **changes})


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    found = Play(played({}))
    monkeypatch.setattr(session, "run_playbook", found)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return found


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


class Plays(list[RunResult]):
    """Stands in for `run_playbook`: one result after the other, then Ctrl-C."""

    def __init__(self, *results: RunResult) -> None:
        super().__init__(results)
        self.values: list[dict[str, Any]] = []

    def __call__(self, _playbook: str, **arguments: Any) -> RunResult:
        self.values.append(json.loads(arguments["options"].extra_vars[-1]) if arguments["options"].extra_vars else {})
        return self.pop(0) if self else played({}, status="interrupted")


# ---- status ------------------------------------------------------------------------------------------------


def looked(**nodes: dict[str, Any]) -> RunResult:
    return played({plays.GANG_TASK: seen(**nodes)})


def test_status_shows_phase_and_nodes(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = looked()
    outcome = command("status", "-i", cluster.inventory)
    assert outcome.code == 0, outcome.err
    assert play.calls[0]["playbook"] == "playbooks/status.yml"
    assert "pipeline tiny: serving for 2 h 5 min" in outcome.out
    document = json.loads(command("status", "-i", cluster.inventory, "--json").out)
    assert document["schema"] == 2
    assert [row["state"] for row in document["pipelines"][0]["nodes"]] == ["running", "running"]


def test_a_node_out_of_reach_is_shown_and_the_code_is_0(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = looked(node2=UNREACHABLE)
    outcome = command("status", "-i", cluster.inventory)
    assert outcome.code == 0
    assert "node2 is unreachable: no ssh server answers there" in outcome.out


def test_a_host_where_sudo_refuses_is_shown_too(cluster: Cluster, command: Command, play: Play) -> None:
    refused = {"failed": True, "msg": "Missing sudo password"}
    failure = Failure("node2", plays.GANG_TASK, "login", "sudo asks for a password there")
    play.result = played({plays.GANG_TASK: {**seen(), "node2": refused}}, status="failed", failures=(failure,))
    outcome = command("status", "-i", cluster.inventory)
    assert outcome.code == 0
    assert "node2 is unreachable: sudo asks for a password there" in outcome.out


def test_it_is_7_when_no_host_answers(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = looked(node1=UNREACHABLE, node2=UNREACHABLE)
    outcome = command("status", "-i", cluster.inventory)
    assert (outcome.code, outcome.out) == (7, "")
    assert "node1: no ssh server answers there" in outcome.err
    assert "node2: no ssh server answers there" in outcome.err


def test_status_of_no_host_is_wrong_input(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = played({}, status="no_hosts", stats={}, limit="nobody")
    assert command("status", "-i", cluster.inventory, "--limit", "nobody").code == 2


def test_secrets_of_the_inventory_are_hidden(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = looked(node1=node("node1", agent__status__storage_problem="cannot store hf_verysecret"))
    for words in ([], ["--json"]):
        outcome = command("status", "-i", cluster.inventory, *words)
        assert "hf_verysecret" not in outcome.out
        assert "[hidden]" in outcome.out


def test_watching_looks_until_interrupted_and_outlives_a_look_without_answer(
    cluster: Cluster, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_verb, "PAUSE", 0.0)
    looks = (looked(), looked(node1=UNREACHABLE, node2=UNREACHABLE), looked(node2=UNREACHABLE))
    monkeypatch.setattr(session, "run_playbook", Plays(*looks))
    outcome = command("status", "-i", cluster.inventory, "--watch", "--json")
    assert outcome.code == 130
    first, second, third = map(json.loads, outcome.out.splitlines())
    assert first["pipelines"][0]["phase"] == "serving"
    assert "no ssh server answers there" in second["error"]
    assert not third["pipelines"][0]["nodes"][1]["reachable"]
    monkeypatch.setattr(session, "run_playbook", Plays(*looks))
    outcome = command("status", "-i", cluster.inventory, "--watch")
    assert outcome.code == 130
    assert outcome.out.count("-- 20") == 3
    assert outcome.err == "error: interrupted\n"


# ---- logs --------------------------------------------------------------------------------------------------


CLOCK = 1_796_000_000.0
"""The time at which every look of these tests happens, by this machine's clock."""


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still, so that a busy machine makes no node's clock look wrong."""
    clock = SimpleNamespace(time=lambda: CLOCK, monotonic=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(logs_verb, "time", clock)


def told(*lines: tuple[float, str], cursor: str | None = "s=1", **changes: Any) -> dict[str, Any]:
    """Return what a node's journal told just now; lines are seconds ago and message."""
    shown = [
        {"time": CLOCK - ago, "unit": "rank", "priority": 6, "pid": 4, "message": message} for ago, message in lines
    ]
    return {"lines": shown, "left_out": 0, "more": False, "cursor": cursor, "time": [CLOCK, CLOCK], **changes}


def logged(**nodes: dict[str, Any]) -> RunResult:
    return played({plays.JOURNAL_TASK: nodes})


@pytest.mark.usefixtures("still")
def test_logs_are_merged_by_time_and_say_what_is_left_out(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = logged(
        node1=told((30.0, "first"), (10.0, "third\nand more"), left_out=12),
        node2=told((20.0, "second hf_verysecret"), more=True),
    )
    outcome = command("logs", "-i", cluster.inventory)
    assert outcome.code == 0, outcome.err
    lines = [line for line in outcome.out.splitlines() if not line.startswith("-- ")]
    assert [line.split(maxsplit=3)[1:] for line in lines] == [
        ["node1", "rank", "first"],
        ["node2", "rank", "second [hidden]"],
        ["node1", "rank", "third"],
        ["node1", "rank", "and more"],
    ]
    assert "node1: 12 earlier lines are left out" in outcome.err
    assert "node2: it has earlier lines" in outcome.err


@pytest.mark.usefixtures("still")
def test_logs_for_programs(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = logged(node1=told((5.0, "x"), left_out=3), node2=UNREACHABLE)
    outcome = command("logs", "-i", cluster.inventory, "--json", "--agent", "--since", "10min")
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert [event["event"] for event in events] == ["note", "left_out", "line"]
    assert events[1]["lines"] == 3
    line = events[2]
    assert (line["host"], line["unit"], line["pipeline"], line["message"]) == ("node1", "rank", "tiny", "x")
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    asked = json.loads(play.options.extra_vars[-1])["ppdeploy__journal"]
    assert asked == {"agent": True, "lines": 20000, "since": 600.0}


@pytest.mark.usefixtures("still")
def test_a_wrong_clock_is_corrected_and_named(cluster: Cluster, command: Command, play: Play) -> None:
    ahead = CLOCK + 3600
    late = {**told(), "lines": [{"time": ahead - 20, "unit": "rank", "priority": 6, "pid": 1, "message": "middle"}]}
    play.result = logged(node1=told((30.0, "first"), (10.0, "last")), node2={**late, "time": [ahead, ahead + 0.1]})
    outcome = command("logs", "-i", cluster.inventory)
    assert [line.split()[-1] for line in outcome.out.splitlines()[1:]] == ["first", "middle", "last"]
    assert "the clock of node2 is at least 1 h ahead: its lines are shifted by that" in outcome.err


@pytest.mark.usefixtures("still")
def test_following_goes_on_from_each_cursor_until_interrupted(
    cluster: Cluster, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Plays(
        logged(node1=told((9.0, "one")), node2=told((8.0, "two"), cursor="s=20")),
        logged(node1=told((5.0, "three"), cursor="s=2"), node2=UNREACHABLE),
        logged(node1=told(), node2=told((1.0, "four"), cursor="s=21")),
    )
    monkeypatch.setattr(session, "run_playbook", found)
    outcome = command("logs", "-i", cluster.inventory, "--follow")
    assert outcome.code == 130
    assert [line.split()[-1] for line in outcome.out.splitlines()[1:]] == ["one", "two", "three", "four"]
    assert [values["ppdeploy__cursors"] for values in found.values] == [
        {},
        {"node1": "s=1", "node2": "s=20"},
        {"node1": "s=2", "node2": "s=20"},
        {"node1": "s=1", "node2": "s=21"},
    ]
    assert "node2 cannot be read: no ssh server answers there" in outcome.err
    assert "node2 can be read again" in outcome.err


@pytest.mark.usefixtures("still")
def test_logs_of_nobody_are_7(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = logged(node1=UNREACHABLE, node2=UNREACHABLE)
    assert command("logs", "-i", cluster.inventory).code == 7


def failures_of(*generations: int) -> dict[str, Any]:
    kept = [
        {"name": f"{number:09d}-{'0' * 16}", "generation": number, "time": 1e9 + number, "reason": f"broke in {number}"}
        for number in generations
    ]
    return {"failures": kept, "first": kept[0]["name"], "time": [0.0, 0.0]}


def test_failures_are_listed_and_shown(
    cluster: Cluster, command: Command, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    play.result = logged(node1=failures_of(3, 8), node2=failures_of(3))
    outcome = command("logs", "-i", cluster.inventory, "--failure", "list")
    assert outcome.code == 0, outcome.err
    assert "pipeline tiny: 2 kept failures" in outcome.out
    last, first = (line for line in outcome.out.splitlines() if "generation" in line)
    assert "generation 8" in last
    assert "first of its series" not in last
    assert first.endswith("generation 3  the first of its series")

    journals = {"node1": told((5.0, "it broke"), kept=True), "node2": told(kept=False)}
    found = Plays(play.result, logged(**journals))
    monkeypatch.setattr(session, "run_playbook", found)
    outcome = command("logs", "-i", cluster.inventory, "--failure", "1")
    assert outcome.code == 0, outcome.err
    assert "failure 1 of 2, generation 8" in outcome.out
    assert outcome.out.splitlines()[-1].endswith("node1 rank    it broke")
    assert "node2 kept no journal of it" in outcome.err
    assert found.values[1]["ppdeploy__failures"] == dict.fromkeys(("node1", "node2"), f"{8:09d}-{'0' * 16}")


def test_a_failure_that_is_not_kept_is_wrong_input(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = logged(node1=failures_of(3), node2=failures_of(3))
    outcome = command("logs", "-i", cluster.inventory, "--failure", "2")
    assert outcome.code == 2
    assert "--failure list" in outcome.err


@pytest.mark.parametrize(
    "words", [("--failure", "0"), ("--failure", "x"), ("--failure", "1", "--follow"), ("--since", "soon")]
)
def test_what_makes_no_sense_touches_no_host(
    cluster: Cluster, command: Command, play: Play, words: tuple[str, ...]
) -> None:
    assert (command("logs", "-i", cluster.inventory, *words).code, play.calls) == (2, [])


NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=timezone(timedelta(hours=1)))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5 h", 5400),
        ("10min", 600),
        ("2d", 172800),
        ("11:00", 3600),
        ("11:59:50", 10),
        ("2026-11-29 12:00", 86400),
        ("2026-11-30T10:00:00+00:00", 3600),
        ("13:00", 0),
    ],
)
def test_a_beginning_is_a_span_or_a_time(text: str, seconds: float) -> None:
    assert logs_verb.since_seconds(text, NOW) == pytest.approx(seconds)


# ---- start, stop, restart ----------------------------------------------------------------------------------


def ordered(*, changed: bool = True, wait: dict[str, Any] | None = None, verb: str = "start", **more: Any) -> RunResult:
    orders = {
        host: {"changed": changed, "refused": "", "serial": 3, "leads": host == "node1", "agent": ""}
        for host in ("node1", "node2")
    }
    results: dict[str, Any] = {plays.ORDER_TASK: orders}
    if wait is not None:
        task = plays.STOPPED_TASK if verb == "stop" else plays.SERVING_TASK
        results[task] = {"node1": {"reached": True, "reason": "", "seconds": 34.2, "phase": "x", **wait}}
    return played(results, **more)


@pytest.mark.parametrize(
    ("verb", "result", "text"),
    [
        ("start", ordered(wait={}), "tiny: serving after 34 s"),
        ("start", ordered(changed=False, wait={"seconds": 0.0}), "tiny: serving already"),
        ("start", ordered(), "tiny: the word is left on node1, node2"),
        ("restart", ordered(wait={}), "tiny: serving after 34 s"),
        ("stop", ordered(verb="stop", wait={}), "tiny: stopped after 34 s, no rank is left on node1, node2"),
        (
            "stop",
            ordered(verb="stop", changed=False, wait={}),
            "tiny: stopped already, no rank is left on node1, node2",
        ),
        (
            "stop",
            ordered(verb="stop", wait={"reason": "node3 is not heard (gone)"}),
            "tiny: stopped after 34 s, no rank is left on node1, node2; node1: node3 is not heard (gone)",
        ),
    ],
)
def test_a_verb_says_what_became_of_its_word(
    cluster: Cluster, command: Command, play: Play, verb: str, result: RunResult, text: str
) -> None:
    play.result = result
    outcome = command(verb, "-i", cluster.inventory, "--limit", "tiny")
    assert (outcome.code, outcome.out) == (0, f"{text}\n")
    assert play.calls[0]["playbook"] == f"playbooks/{verb}.yml"
    assert play.options.limit == "tiny"
    document = json.loads(command(verb, "-i", cluster.inventory, "--json").out)
    assert (document["ok"], document["schema"], document["pipelines"][0]["pipeline"]) == (True, 2, "tiny")


def test_a_pipeline_that_does_not_come_to_serve_is_5(cluster: Cluster, command: Command, play: Play) -> None:
    told_why = Failure(
        "node1", plays.SERVES_NOT_TASK, "task", "pipeline tiny does not serve: waiting: node2 is not heard"
    )
    play.result = ordered(wait={"reached": False, "reason": "x"}, status="failed", failures=(told_why,))
    outcome = command("start", "-i", cluster.inventory)
    assert (outcome.code, outcome.out) == (5, "")
    assert "pipeline tiny does not serve: waiting: node2 is not heard" in outcome.err


def values_of(play: Play) -> dict[str, Any]:
    return dict(json.loads(play.options.extra_vars[-1]))


def test_start_waits_unless_told_not_to(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = ordered(wait={})
    command("start", "-i", cluster.inventory)
    assert values_of(play) == {"ppdeploy__forget": [], "ppdeploy__wait": True}
    command("start", "-i", cluster.inventory, "--no-wait")
    assert values_of(play)["ppdeploy__wait"] is False


def test_forgetting_a_node_is_confirmed(
    cluster: Cluster, command: Command, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*words: str) -> Outcome:
        return command("start", "-i", cluster.inventory, "--forget", "node3", *words)

    monkeypatch.setattr(sys, "stdin", io.StringIO())
    outcome = start()
    assert (outcome.code, play.calls) == (2, [])
    assert "you say that the rank on node3 is dead" in outcome.err
    assert "add --yes" in outcome.err

    play.result = ordered(wait={})
    outcome = start("--yes")
    assert outcome.code == 0
    assert "you say that the rank on node3 is dead" in outcome.err
    assert values_of(play)["ppdeploy__forget"] == ["node3"]


def test_at_a_terminal_it_is_asked_and_no_is_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda _: True})())
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: True)
    forgetting.confirm_forgotten(["node3"], yes=False)
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: False)
    with pytest.raises(InputError, match="nothing was done"):
        forgetting.confirm_forgotten(["node3"], yes=False)


# ---- the whole way -----------------------------------------------------------------------------------------


@pytest.fixture
def nobody(tmp_path: Path) -> Path:
    """An inventory of two hosts of which none is there."""
    path = tmp_path / "hosts.yml"
    path.write_text(
        "vllm: {children: {tiny: {hosts: {node1: {ansible_host: 127.0.0.1, ansible_port: 1},"
        " node2: {ansible_host: 127.0.0.2, ansible_port: 1}}, vars: {ppdeploy_model: ./m, ppdeploy_device: cpu}}}}\n"
    )
    return path


def test_a_forgotten_node_is_not_contacted(nobody: Path) -> None:
    """Nothing is replaced: the playbook runs, and only the other node is found to be out of reach."""
    done = subprocess.run(
        [sys.executable, "-m", "ppdeploy", "start", "--forget", "node2", "--yes", "-i", nobody],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: node1: ")
    assert "node2" not in error


def test_logs_of_hosts_that_are_not_there_say_so(nobody: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ppdeploy", "logs", "-i", nobody], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, "")
    assert "no ssh server answers there" in done.stderr.splitlines()[-1]
