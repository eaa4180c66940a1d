"""`ppdeploy bench`: what it runs, prints and returns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.cli import session
from ppdeploy.plan import BenchRun, Plan
from ppdeploy.plan.bench import circumstances
from ppdeploy.play import bench_of_play, plan_of_play
from ppdeploy.run import Failure, HostStats, RunResult, plays
from tests.factories import make_cluster
from tests.unit.cli_support import Cluster, Command, Play, load, loaded_once, make_cluster_on_disk
from tests.unit.test_bench import NOW, seen

FACTS: dict[str, Mapping[str, Any]] = {host: own.model_dump(mode="json") for host, own in make_cluster(2).items()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = make_cluster_on_disk(tmp_path)
    with loaded_once(load(made)):
        yield made


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    found = Play(RunResult(status="ok", return_code=0, seconds=1.0))
    monkeypatch.setattr(session, "run_playbook", found)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return found


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def benched(cluster: Cluster, *, write: bool = True, **outcomes: dict[str, Any]) -> RunResult:
    """Return the result of a benchmark of that cluster as its play gives it; its file is written as the play does."""
    values = {
        host: {
            "ppdeploy_model": str(cluster.folder / "tiny"),
            "ppdeploy_device": "cpu",
            "ansible_host": f"198.18.0.1{host[-1]}",
        }
        for host in ("node1", "node2")
    }
    directory = str(cluster.inventory)
    inventory = {
        "pipelines": {"tiny": ["node1", "node2"]},
        "hosts": ["node1", "node2"],
        "values": values,
        "directory": directory,
    }
    planned = plan_of_play(inventory, FACTS, None, {"users": [1, 4], "input": 64, "output": 8})
    found = bench_of_play(planned, seen(planned, **outcomes), directory, NOW)
    for file in found["files"].values() if write else ():
        Path(file["path"]).parent.mkdir(parents=True, exist_ok=True)
        Path(file["path"]).write_text(file["text"])
    facts: dict[str, dict[str, Any]] = {host: {plays.VALUES: own} for host, own in values.items()}
    facts["node1"] |= {plays.PLAN: planned, plays.BENCHES: found}
    failures = (failure(plays.BENCH_FAILED_TASK, "\n".join(found["failures"])),) if found["failures"] else ()
    return RunResult(
        status="failed" if failures else "ok",
        return_code=2 if failures else 0,
        seconds=33.0,
        stats={host: HostStats(ok=9, failed=len(failures)) for host in values},
        results={plays.FACTS_TASK: FACTS},
        facts=facts,
        failures=failures,
    )


def failure(task: str, sentence: str) -> Failure:
    return Failure("node1", task, "task", sentence, play="Bench every pipeline", action="ansible.builtin.assert")


def test_it_shows_measured_and_predicted_and_keeps_the_result(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = benched(cluster)
    words = ("-l", "tiny", "--users", "1,4", "--input", "64", "--output", "8", "--force", "--timeout", "60")
    outcome = command("bench", "-i", cluster.inventory, *words)
    assert outcome.code == 0, outcome.err
    assert play.calls[0]["playbook"] == "playbooks/bench.yml"
    assert play.options.limit == "tiny"
    given = json.loads(play.options.extra_vars[-1])
    asked = {"users": [1, 4], "input": 64, "output": 8, "prompts": None, "timeout": 60, "force": True}
    assert given == {plays.BENCH_ASK: asked, plays.SHOW: False}
    for heading in ("users", "tokens/s", "predicted", "ratio", "first token", "p99 of it", "each further", "refined"):
        assert heading in outcome.out
    assert outcome.out.count(" 0.33 ") == 2
    assert "refined by 1 benchmark of 2026-11-30: factor" in outcome.out
    assert "kept in " in outcome.err


def test_json_ends_with_the_runs_their_files_and_what_the_plan_makes_of_them(
    cluster: Cluster, command: Command, play: Play
) -> None:
    play.result = benched(cluster)
    outcome = command("bench", "-i", cluster.inventory, "--json")
    document = json.loads(outcome.out.splitlines()[-1])
    assert (document["event"], document["schema"], document["verb"]) == ("result", 1, "bench")
    assert (document["ok"], document["exit_code"], document["error"]) == (True, 0, None)
    (pipeline,) = document["pipelines"]
    assert Path(pipeline.pop("file")).is_file()
    refinement = pipeline.pop("refinement")
    run = BenchRun.model_validate(pipeline)
    assert [load.users for load in run.loads] == [1, 4]
    assert refinement["benchmarks"] == 1
    errors = {
        kind: sum(
            abs(load[kind]["tokens_per_second"] - load["measured"]["tokens_per_second"]) for load in refinement["loads"]
        )
        for kind in ("plain", "refined")
    }
    assert errors["refined"] < errors["plain"] / 5


def test_a_later_plan_from_saved_facts_is_refined_and_has_the_same_release(
    cluster: Cluster, command: Command, play: Play
) -> None:
    words = ("plan", "-i", cluster.inventory, "--facts", cluster.facts)
    plain = json.loads(command(*words, "--json").out)
    benched(cluster)
    found = json.loads(command(*words, "--json").out)
    assert found["pipelines"][0]["outlook"]["refinement"]["benchmarks"] == 1
    assert found["pipelines"][0]["release"] == plain["pipelines"][0]["release"]
    assert "refined by 1 benchmark of 2026-11-30" in command(*words).out
    assert play.calls == []


def test_play_and_command_line_refine_alike(cluster: Cluster, command: Command) -> None:
    benched(cluster)
    again = benched(cluster, write=False)
    of_play = again.facts["node1"][plays.PLAN]["plan"]["pipelines"][0]["outlook"]["refinement"]
    words = ("plan", "-i", cluster.inventory, "--facts", cluster.facts, "--json")
    of_command = json.loads(command(*words).out)["pipelines"][0]["outlook"]["refinement"]
    assert of_play is not None
    assert of_command == of_play


@pytest.mark.parametrize(
    "words",
    [
        ("--users", "1,x"),
        ("--users", ""),
        ("--users", "0"),
        ("--users", "99999"),
        ("--input", "0"),
        ("--output", "-3"),
        ("--prompts", "0"),
        ("--timeout", "1"),
        ("--limit", " "),
    ],
)
def test_what_makes_no_sense_touches_no_host(
    cluster: Cluster, command: Command, play: Play, words: tuple[str, ...]
) -> None:
    outcome = command("bench", "-i", cluster.inventory, *words)
    assert (outcome.code, play.calls) == (2, []), outcome.err


def test_a_pipeline_that_cannot_be_measured_now_is_3(cluster: Cluster, command: Command, play: Play) -> None:
    told = (
        "pipeline tiny has 3 requests in flight, which would be slowed down: wait until they are done, or add --force"
    )
    play.result = RunResult(
        status="failed",
        return_code=2,
        seconds=1.0,
        stats={"node1": HostStats(ok=3, failed=1)},
        failures=(failure("Refuse to measure beside other requests", told),),
    )
    outcome = command("bench", "-i", cluster.inventory)
    assert outcome.code == 3
    assert "add --force" in outcome.err
    assert outcome.out == ""


def test_failed_requests_are_5_and_what_was_measured_is_shown_and_kept(
    cluster: Cluster, command: Command, play: Play
) -> None:
    play.result = benched(
        cluster, users4={"ok": False, "reason": "it did not end within 60 s", "users": 4, "measured": {}}
    )
    outcome = command("bench", "-i", cluster.inventory)
    assert outcome.code == 5
    assert "pipeline tiny with 4 users: it did not end within 60 s" in outcome.err
    assert "refined by 1 benchmark" in outcome.out


def test_an_interrupted_one_ends_its_client_on_the_hosts(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = RunResult(status="interrupted", return_code=-1, seconds=2.0)
    assert command("bench", "-i", cluster.inventory).code == 130
    assert [call["playbook"] for call in play.calls] == ["playbooks/bench.yml", "playbooks/bench_stop.yml"]


def test_circumstances_are_read_from_the_plan_alone(cluster: Cluster) -> None:
    result = benched(cluster)
    (pipeline,) = Plan.model_validate(result.facts["node1"][plays.PLAN]["plan"]).pipelines
    run = BenchRun.model_validate(result.facts["node1"][plays.BENCHES]["runs"][0])
    assert run.circumstances == circumstances(pipeline)
