"""The operator's verbs with real ranks: status, logs, stop, start and restart, and the variables of the gang."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab.cluster import PIPELINE, Cluster, no_change

RANK = f"ppdeploy-rank@{PIPELINE}.service"


def status(cluster: Cluster) -> dict[str, Any]:
    done = cluster.ppdeploy("status", "--json")
    assert done.code == 0, done.said
    pipelines: list[dict[str, Any]] = json.loads(done.out)["pipelines"]
    return pipelines[0]


def lines(cluster: Cluster, *words: str) -> list[dict[str, Any]]:
    done = cluster.ppdeploy("logs", "--json", *words)
    assert done.code == 0, done.said
    events = [json.loads(line) for line in done.out.splitlines()]
    return [event for event in events if event["event"] == "line"]


def test_status_tells_each_ranks_stage_release_and_memory(served: Cluster) -> None:
    told = status(served)
    assert (told["phase"], told["healthy"], told["head"]) == ("serving", True, "node1")
    current = served.out("node1", f"readlink /opt/ppdeploy/{PIPELINE}/current").removeprefix("releases/")
    assert told["release"] == current
    assert [(row["rank"], row["role"], row["state"]) for row in told["nodes"]] == [
        (0, "head", "running"),
        (1, "worker", "running"),
    ]
    for row in told["nodes"]:
        assert row["release"]["running"] == row["release"]["prepared"] == current
        assert row["stages"].startswith("stage ")
        # A rank of vLLM on cpu has half a GiB for its libraries alone.
        assert row["memory"]["resident_bytes"] > 1 << 28
    # Tests before this one may have spent some of it.
    assert told["budget"]["limit"] == 6
    assert told["budget"]["left"] == 6 - len(told["failures"])
    page = served.ppdeploy("status")
    assert f"pipeline {PIPELINE}: serving for " in page.out, page.said


def test_logs_have_both_ranks_on_one_time_axis(served: Cluster) -> None:
    # A request leaves lines of the API on the head.
    served.complete("Hello", tokens=2)
    found = lines(served, "--since", "2h", "--agent")
    assert [line["time"] for line in found] == sorted(line["time"] for line in found)
    assert {(line["host"], line["unit"]) for line in found} >= {
        ("node1", "rank"), ("node2", "rank"), ("node1", "agent"), ("node2", "agent"),
    }  # fmt: skip
    assert any("/v1/completions" in line["message"] for line in found if line["host"] == "node1")
    newest = lines(served, "-n", "3")
    assert [sum(line["host"] == host for line in newest) for host in served.lab.nodes] == [3, 3]


def test_a_start_of_what_serves_changes_nothing(served: Cluster) -> None:
    pids = served.pids()
    done = served.ppdeploy("start", "--json")
    assert done.code == 0, done.said
    assert done.changed() == no_change()
    assert served.pids() == pids


@pytest.mark.long
def test_a_limit_of_the_gang_restarts_the_agents_and_no_rank(served: Cluster) -> None:
    pids = served.pids()
    agents = "systemctl show -P MainPID ppdeploy-agent"
    before = [served.out(node, agents) for node in served.lab.nodes]
    done = served.ppdeploy("apply", "--json", "-e", "ppdeploy_gang_failures=4")
    assert done.code == 0, done.said
    assert min(done.changed().values()) > 0
    assert all(served.out(node, agents) != pid for node, pid in zip(served.lab.nodes, before, strict=True))
    assert served.pids() == pids
    assert status(served)["budget"]["limit"] == 4
    back = served.ppdeploy("apply", "--json")
    assert back.code == 0, back.said
    assert served.pids() == pids
    assert status(served)["budget"]["limit"] == 6


def test_stop_leaves_no_rank_and_a_second_one_changes_nothing(served: Cluster) -> None:
    done = served.ppdeploy("stop", "--json")
    assert done.code == 0, done.said
    assert done.result["pipelines"][0]["reached"]
    assert set(served.pids().values()) == {0}
    for node in served.lab.nodes:
        assert served.out(node, "pgrep -fc '[v]llm serve' || true") == "0"
    assert status(served)["phase"] == "stopped"
    again = served.ppdeploy("stop", "--json")
    assert (again.code, again.changed()) == (0, no_change()), again.said


@pytest.mark.timeout(600)
def test_start_waits_until_tokens_are_proven(served: Cluster) -> None:
    done = served.ppdeploy("start")
    assert done.code == 0, done.said
    assert f"{PIPELINE}: serving after " in done.out
    assert served.complete("Hello", tokens=4)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_restart_gives_each_rank_a_new_process_of_the_same_release(served: Cluster) -> None:
    pids, release = served.pids(), status(served)["release"]
    done = served.ppdeploy("restart", "--json")
    assert done.code == 0, done.said
    assert done.result["pipelines"][0]["reached"]
    assert all(pid not in (0, pids[node]) for node, pid in served.pids().items())
    told = status(served)
    assert (told["phase"], told["release"]) == ("serving", release)


@pytest.mark.timeout(600)
def test_a_failure_is_told_and_its_journals_are_kept(served: Cluster) -> None:
    generation = status(served)["generation"]
    served.out("node2", f"kill -KILL $(systemctl show -P MainPID {RANK})")
    # A start waits for the gang, which comes back by itself; it finds a failure to forgive, or all well again.
    done = served.ppdeploy("start", "--json")
    assert done.code == 0, done.said
    told = status(served)
    assert told["generation"] > generation
    assert told["restarts"]["by_reason"]["exit"] >= 1
    assert " ended" in told["last_failure"]["reason"]
    listed = served.ppdeploy("logs", "--failure", "list", "--json")
    events = [json.loads(line) for line in listed.out.splitlines()]
    (kept,) = [event for event in events if event["generation"] == generation]
    assert set(kept["reasons"]) == {"node1", "node2"}
    found = lines(served, "--failure", str(kept["number"]))
    assert {line["host"] for line in found} == {"node1", "node2"}
    assert any("status=9/KILL" in line["message"] for line in found if line["host"] == "node2")
