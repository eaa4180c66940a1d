"""`ppdeploy prune` and `check --weights` as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ppdeploy.run import HostStats, RunResult, plays
from tests.factories import make_cluster
from tests.unit.cli_support import Cluster, Command, Play, load, loaded_once, make_cluster_on_disk
from tests.unit.test_cli_check import looked


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return make_cluster_on_disk(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def command(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with loaded_once(load(cluster)):
        yield Command(capsys)


def kept(name: str, *needed_by: str, damaged: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"name": name, "bytes": 2_000_000_000, "needed_by": list(needed_by), "damaged": list(damaged)}


def found(**told: Any) -> RunResult:
    results = {plays.MODELS_TASK: told}
    return RunResult(
        status="ok", return_code=0, seconds=1.0, stats={host: HostStats(ok=1) for host in told}, results=results
    )


TWO = {
    "node1": {"models": [kept("now", "the current release of pipeline tiny"), kept("old")]},
    "node2": {"models": [kept("now", "the current release of pipeline tiny")]},
}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    stand_in = Play(found(**TWO))
    monkeypatch.setattr("ppdeploy.cli.session.run_playbook", stand_in)
    return stand_in


def asked(play: Play) -> list[dict[str, Any]]:
    return [json.loads(call["options"].extra_vars[-1])[plays.MODELS_ASK] for call in play.calls]


def test_the_answer_can_be_given_in_one_letter_and_is_explained(command: Command) -> None:
    said = " ".join(command("prune", "--help").out.split())
    assert "-y, --yes" in said
    assert "without a question" in said
    assert "--no-yes" not in said


def test_it_lists_first_and_removes_what_nothing_needs(cluster: Cluster, command: Command, play: Play) -> None:
    outcome = command("prune", "-i", cluster.inventory, "--yes")
    assert outcome.code == 0, outcome.err
    assert asked(play) == [
        {"action": "list", "folders": {}},
        {"action": "remove", "folders": {"node1": ["old"]}},
    ]
    assert "the current release of pipeline tiny" in outcome.out
    assert "nothing: to be removed" in outcome.out
    assert "removed 2.00 GB on 1 nodes" in outcome.err


def test_without_a_person_nothing_is_removed(cluster: Cluster, command: Command, play: Play) -> None:
    outcome = command("prune", "-i", cluster.inventory)
    assert outcome.code == 2
    assert "nobody is here to confirm" in outcome.err
    listed = command("prune", "-i", cluster.inventory, "--json")
    assert listed.code == 0
    document = json.loads(listed.out)
    assert [one["name"] for one in document["models"]] == ["now", "old", "now"]
    assert document["removed"] == []
    assert [one["action"] for one in asked(play)] == ["list", "list"]


def test_nothing_to_remove_asks_nothing(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = found(node2=TWO["node2"])
    outcome = command("prune", "-i", cluster.inventory)
    assert outcome.code == 0, outcome.err
    assert len(play.calls) == 1


def test_a_node_out_of_reach_is_named_and_ends_with_7(cluster: Cluster, command: Command, play: Play) -> None:
    away = {"unreachable": True, "msg": "Failed to connect to the host via ssh: Connection refused"}
    play.result = found(node1=TWO["node1"], node2=away)
    outcome = command("prune", "-i", cluster.inventory, "--yes")
    assert outcome.code == 7
    assert "node2: no ssh server answers there" in outcome.err


def test_check_weights_names_the_damaged_file(
    cluster: Cluster, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = looked(cluster, make_cluster(2))
    damaged = {"node2": {"models": [kept("now", damaged=("model.safetensors",))]}, "node1": {"models": [kept("now")]}}

    class Both(Play):
        def __call__(self, playbook: str, **arguments: Any) -> RunResult:
            super().__call__(playbook, **arguments)
            return found(**damaged) if playbook == plays.MODELS else checked

    play = Both(checked)
    monkeypatch.setattr("ppdeploy.cli.session.run_playbook", play)
    outcome = command("check", "-i", cluster.inventory, "--weights")
    assert outcome.code == 3
    assert "model.safetensors of model now is not what was placed (node2)" in outcome.err
    assert [call["playbook"] for call in play.calls] == [plays.CHECK, plays.MODELS]
    assert command("check", "-i", cluster.inventory).code == 0
