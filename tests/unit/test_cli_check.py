"""`ppdeploy check` as a user calls it: what it prints, its JSON, and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.facts import NodeFacts
from ppdeploy.plan.checks import catalogue
from ppdeploy.run import HostStats, RunResult, plays
from tests.factories import make_cluster
from tests.unit.cli_support import Cluster, Command, Play, load, loaded_once, make_cluster_on_disk


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return make_cluster_on_disk(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def command(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    with loaded_once(load(cluster)):
        yield Command(capsys)


def looked(cluster: Cluster, facts: dict[str, NodeFacts], away: str = "") -> RunResult:
    """Return what a play saw of healthy hosts without probes; `away` is out of reach."""
    values = {"ppdeploy_model": str(cluster.folder / "tiny"), "ppdeploy_device": "cpu"}
    told: dict[str, Any] = {host: {"facts": one.model_dump(mode="json")} for host, one in facts.items()}
    if away:
        told[away] = {"unreachable": True, "msg": "Failed to connect to the host via ssh: Connection refused"}
    return RunResult(
        status="ok",
        return_code=0,
        seconds=3.0,
        stats={host: HostStats(ok=3) for host in facts},
        results={plays.FACTS_TASK: told},
        facts={
            host: {plays.VALUES: {"ansible_host": host, **values}, plays.RECEIVED: 1_800_000_001.0} for host in facts
        },
    )


@pytest.fixture
def play(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Play:
    stand_in = Play(looked(cluster, make_cluster(2)))
    monkeypatch.setattr("ppdeploy.cli.session.run_playbook", stand_in)
    return stand_in


def test_healthy_hosts_end_with_0(cluster: Cluster, command: Command, play: Play) -> None:
    outcome = command("check", "-i", cluster.inventory)
    assert outcome.code == 0, outcome.err
    assert play.calls[0]["playbook"] == "playbooks/check.yml"
    assert json.loads(play.options.extra_vars[-1]) == {plays.TELL: False}
    assert "pipeline tiny: ready" in outcome.out
    assert "not judged" in outcome.out
    assert "an apply can start" in outcome.err


def test_all_shows_what_is_ready(cluster: Cluster, command: Command, play: Play) -> None:
    assert "systemd 252" not in command("check", "-i", cluster.inventory).out
    assert "systemd 252" in command("check", "-i", cluster.inventory, "--all").out
    assert len(play.calls) == 2


def test_what_is_blocked_ends_with_3_and_is_told(cluster: Cluster, command: Command, play: Play) -> None:
    facts = make_cluster(2)
    facts["node2"] = facts["node2"].model_copy(update={"tools": {"rsync": None}})
    play.result = looked(cluster, facts)
    outcome = command("check", "-i", cluster.inventory)
    assert outcome.code == 3
    assert "rsync: rsync is missing, which moves the weights (node2): install the package rsync" in outcome.err
    assert "blocked" in outcome.out
    found = command("check", "-i", cluster.inventory, "--json")
    document = json.loads(found.out)
    assert (found.code, document["exit_code"], document["ok"], document["counts"]["blocked"]) == (3, 3, False, 1)
    assert [one["id"] for one in document["results"] if one["verdict"] == "blocked"] == ["rsync"]


def test_what_is_slow_lets_an_apply_start(cluster: Cluster, command: Command, play: Play) -> None:
    facts = make_cluster(2)
    facts["node2"] = facts["node2"].model_copy(update={"firewalls": ("firewalld.service",)})
    play.result = looked(cluster, facts)
    outcome = command("check", "-i", cluster.inventory)
    assert outcome.code == 0
    assert "firewall-cmd --permanent" in " ".join(outcome.out.split())


def test_a_host_out_of_reach_ends_with_7_and_the_others_are_checked(
    cluster: Cluster, command: Command, play: Play
) -> None:
    facts = make_cluster(2)
    facts["node1"] = facts["node1"].model_copy(update={"tools": {"rsync": None}})
    play.result = looked(cluster, facts, away="node2")
    outcome = command("check", "-i", cluster.inventory, "--json")
    assert outcome.code == 7
    assert "node2: no ssh server answers there" in outcome.err
    document = json.loads(outcome.out)
    assert document["exit_code"] == 7
    assert document["unasked"]["node2"]["unreachable"] is True
    assert [one["host"] for one in document["results"] if one["verdict"] == "blocked"] == ["node1"]


def test_a_host_that_gives_no_facts_is_blocked(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = looked(cluster, make_cluster(2))
    play.result.results[plays.FACTS_TASK]["node2"] = {"failed": True, "msg": "Missing sudo password"}
    outcome = command("check", "-i", cluster.inventory)
    assert outcome.code == 3
    assert "node2: sudo asks for a password there" in outcome.err


def test_no_secret_is_printed(cluster: Cluster, command: Command, play: Play) -> None:
    facts = make_cluster(2)
    facts["node1"] = facts["node1"].model_copy(update={"firewalls": ("hf_verysecret.service",)})
    play.result = looked(cluster, facts)
    assert "hf_verysecret" not in command("check", "-i", cluster.inventory, "--json").out


def test_explain_asks_no_host(command: Command, play: Play, tmp_path: Path) -> None:
    one = command("check", "--explain", "mtu-passes", "-i", tmp_path / "nowhere")
    assert one.code == 0
    assert "ip link set INTERFACE mtu MTU" in one.out
    every = json.loads(command("check", "--explain", "all", "--json").out)
    assert every["schema"] == 2
    assert [told["id"] for told in every["checks"]] == [check.id for check in catalogue()]
    assert all(told["remedy"] for told in every["checks"])
    assert play.calls == []


def test_a_check_that_there_is_not(command: Command) -> None:
    outcome = command("check", "--explain", "mtu")
    assert outcome.code == 2
    assert "there is no check mtu (--explain): run `ppdeploy check --explain all`" in outcome.err
