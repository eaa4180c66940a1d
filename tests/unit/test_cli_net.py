"""`ppdeploy net`: what it runs, prints and returns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.cli import session
from ppdeploy.run import Failure, RunResult, plays
from tests.unit.cli_support import Cluster, Command, Play, load, loaded_once, make_cluster_on_disk
from tests.unit.net_views import report


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = make_cluster_on_disk(tmp_path_factory.mktemp("cluster"))
    with loaded_once(load(made)):
        yield made


def measured(*, lost: list[str] | None = None, **changes: Any) -> RunResult:
    found = {"report": report().document(), "kept": {}, "lost": lost or []}
    values: dict[str, Any] = {
        "status": "ok",
        "return_code": 0,
        "seconds": 20.0,
        "facts": {"node1": {plays.NET_FOUND: found}},
    }
    return RunResult(**{**values, **changes})


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    found = Play(measured())
    monkeypatch.setattr(session, "run_playbook", found)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return found


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def values_of(play: Play) -> dict[str, Any]:
    """What the verb handed to its play."""
    found: dict[str, Any] = json.loads(play.options.extra_vars[-1])
    return found


def test_it_shows_the_matrix(cluster: Cluster, command: Command, play: Play) -> None:
    done = command("net", "-i", cluster.inventory)
    assert done.code == 0, done.err
    assert "953 Mbit/s, 0.2 ms" in done.out
    assert play.calls[0]["playbook"] == "playbooks/net.yml"
    assert values_of(play) == {"ppdeploy__net_seconds": 3, "ppdeploy__net_force": False, "ppdeploy__net_show": False}


def test_its_options_reach_the_play(cluster: Cluster, command: Command, play: Play) -> None:
    done = command("net", "-i", cluster.inventory, "-l", "tiny", "--seconds", "10", "--force")
    assert done.code == 0, done.err
    assert play.options.limit == "tiny"
    assert values_of(play) == {"ppdeploy__net_seconds": 10, "ppdeploy__net_force": True, "ppdeploy__net_show": False}


@pytest.mark.parametrize("seconds", ["0", "61", "x"])
def test_seconds_have_their_limits(cluster: Cluster, command: Command, play: Play, seconds: str) -> None:
    done = command("net", "-i", cluster.inventory, "--seconds", seconds)
    assert done.code == 2
    assert play.calls == []


def test_json_is_one_document_with_its_version(cluster: Cluster, command: Command, play: Play) -> None:
    assert play.calls == []
    done = command("net", "-i", cluster.inventory, "--json")
    found = json.loads(done.out)
    assert found["schema"] == 1
    assert {way["verdict"] for way in found["pipelines"][0]["ways"]} == {"ready"}


def test_the_page_is_written(cluster: Cluster, command: Command, play: Play, tmp_path: Path) -> None:
    assert play.calls == []
    page = tmp_path / "net.html"
    done = command("net", "-i", cluster.inventory, "--html", page)
    assert done.code == 0, done.err
    assert page.read_text().startswith("<!doctype html>")
    assert command("net", "-i", cluster.inventory, "--html", tmp_path / "no" / "page.html").code == 2


def test_a_node_that_vanished_is_named_and_the_rest_is_shown(cluster: Cluster, command: Command, play: Play) -> None:
    gone = Failure("node2", "Measure a pair", "unreachable", "it does not answer", play="Measure the network")
    play.result = measured(lost=["node2"], status="unreachable", return_code=4, failures=(gone,))
    done = command("net", "-i", cluster.inventory)
    assert done.code == 7
    assert "953 Mbit/s" in done.out
    assert "lost during the test: node2: it does not answer" in done.err


def test_a_task_that_was_ended_with_its_node_is_a_lost_node_too(cluster: Cluster, command: Command, play: Play) -> None:
    gone = Failure("node2", "Measure a pair", "task", "Timed out after 82 second(s).", play="Measure the network")
    play.result = measured(lost=["node2"], status="failed", return_code=2, failures=(gone,))
    done = command("net", "-i", cluster.inventory)
    assert done.code == 7
    assert "node2: Timed out after 82 second(s)." in done.err


def test_a_pipeline_that_serves_is_left_alone(cluster: Cluster, command: Command, play: Play) -> None:
    told = "a rank of pipeline tiny runs on node1, node2, and a test would slow its requests: stop it first"
    refused = Failure("node1", "Refuse to disturb a pipeline that runs", "task", told, action="ansible.builtin.assert")
    play.result = measured(status="failed", return_code=2, failures=(refused,), facts={})
    done = command("net", "-i", cluster.inventory)
    assert done.code == 3
    assert "a rank of pipeline tiny runs on node1, node2" in done.err
    assert done.out == ""


def test_an_interrupted_one_is_ended_on_the_hosts(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = measured(status="interrupted", return_code=-1, facts={})
    assert command("net", "-i", cluster.inventory, "-l", "tiny").code == 130
    assert [call["playbook"] for call in play.calls] == ["playbooks/net.yml", "playbooks/net_stop.yml"]
    assert play.options.limit == "tiny"
