"""The operator's verbs on real systemd hosts whose ranks are stand-ins: what they say, and what becomes of the gang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.lab import Lab
from ppdeploy.paths import data_root
from ppdeploy.run.environment import search_path
from tests.faults.deploy import REAL, UNIT, Gang

pytestmark = pytest.mark.skipif(REAL, reason="tests/lab/test_gang_verbs.py does this with real ranks")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Gang]:
    """A gang of two with the budget that anyone has."""
    lab = Lab("gangverbs")
    lab.down()
    gang = Gang(lab, settings={"backoff_limit": 2.0})
    try:
        gang.install()
        gang.wait(gang.healthy, 120.0)
        yield gang
    finally:
        lab.down()


def ppdeploy(gang: Gang, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ppdeploy", *words, "-i", str(gang.lab.inventory.parent)]
    return subprocess.run(
        command, cwd=data_root(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def outcome(gang: Gang, *words: str) -> dict[str, Any]:
    """Run a verb with --json and return its last line."""
    done = ppdeploy(gang, *words, "--json")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["exit_code"] == done.returncode, done.stderr
    return found


def changed(found: dict[str, Any]) -> int:
    return sum(int(stats["changed"]) for stats in found["hosts"].values())


def status(gang: Gang) -> dict[str, Any]:
    done = ppdeploy(gang, "status", "--json")
    assert done.returncode == 0, done.stderr
    pipelines: list[dict[str, Any]] = json.loads(done.stdout)["pipelines"]
    return pipelines[0]


def test_status_tells_phase_ranks_and_memory(hosts: Gang) -> None:
    told = status(hosts)
    assert (told["phase"], told["healthy"], told["head"]) == ("serving", True, "node1")
    assert told["budget"]["left"] == 6
    assert [row["state"] for row in told["nodes"]] == ["running", "running"]
    assert [row["stages"] for row in told["nodes"]] == ["stage 0", "stage 1"]
    assert all(row["memory"]["resident_bytes"] > 1 << 20 for row in told["nodes"])
    assert told["nodes"][1]["heard_by_head"]["heard"]
    assert {row["release"]["running"] for row in told["nodes"]} == {told["release"]}


def test_the_play_alone_tells_it_too(hosts: Gang) -> None:
    program = Path(sys.executable).with_name("ansible-playbook")
    done = subprocess.run(
        [program, "-i", hosts.lab.inventory, "playbooks/status.yml"],
        cwd=data_root(), env={**os.environ, "PATH": search_path()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "pipeline tiny: serving for " in done.stdout


def test_a_start_of_what_serves_changes_nothing(hosts: Gang) -> None:
    pids = [hosts.main_pid(node) for node in hosts.nodes]
    found = outcome(hosts, "start")
    assert (found["exit_code"], changed(found)) == (0, 0)
    assert found["pipelines"][0]["reached"]
    assert [hosts.main_pid(node) for node in hosts.nodes] == pids


def test_stop_ends_every_rank_and_a_second_one_changes_nothing(hosts: Gang) -> None:
    found = outcome(hosts, "stop")
    assert (found["exit_code"], found["pipelines"][0]["reached"], changed(found)) == (0, True, 2)
    assert [hosts.pids(node) for node in hosts.nodes] == [[], []]
    assert hosts.phase() == "stopped"
    assert changed(outcome(hosts, "stop")) == 0
    assert status(hosts)["phase"] == "stopped"


def test_start_takes_it_back_and_waits_until_it_serves(hosts: Gang) -> None:
    found = outcome(hosts, "start")
    assert (found["exit_code"], found["pipelines"][0]["reached"]) == (0, True)
    assert hosts.healthy()


def test_restart_gives_every_rank_a_new_process(hosts: Gang) -> None:
    pids = {hosts.main_pid(node) for node in hosts.nodes}
    done = ppdeploy(hosts, "restart")
    assert done.returncode == 0, done.stderr
    assert "tiny: serving after " in done.stdout
    assert pids.isdisjoint({hosts.main_pid(node) for node in hosts.nodes})


def test_a_node_of_the_release_cannot_be_forgotten(hosts: Gang) -> None:
    pids = [hosts.main_pid(node) for node in hosts.nodes]
    found = outcome(hosts, "start", "--forget", "node2", "--yes")
    assert (found["exit_code"], changed(found)) == (3, 0)
    assert "node2 is a node of the release" in found["error"]
    assert [hosts.main_pid(node) for node in hosts.nodes] == pids


def test_logs_of_all_nodes_lie_on_one_time_axis(hosts: Gang) -> None:
    done = ppdeploy(hosts, "logs", "--json", "--agent", "-n", "60")
    assert done.returncode == 0, done.stderr
    lines = [event for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "line"]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert {line["host"] for line in lines} == {"node1", "node2"}
    assert {line["unit"] for line in lines} == {"rank", "agent", "systemd"}


def test_a_reader_that_has_enough_ends_logs_quietly(hosts: Gang) -> None:
    command = [sys.executable, "-m", "ppdeploy", "logs", "--agent", "-i", str(hosts.lab.inventory.parent)]
    with subprocess.Popen(command, cwd=data_root(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
        process.wait(timeout=60)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert "error" not in said


def test_following_shows_what_comes_and_ends_by_ctrl_c(hosts: Gang) -> None:
    # Whoever runs the tests may ignore the signal (a background job), and what is ignored is inherited.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "ppdeploy", "logs", "-f", "-n", "0", "--json"]
    command += ["-i", str(hosts.lab.inventory.parent)]
    with subprocess.Popen(
        command, cwd=data_root(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        try:
            assert process.stdout is not None
            # The first look says that there are earlier lines; from then on it goes on.
            assert json.loads(process.stdout.readline())["event"] == "left_out"
            hosts.order("restart")
            for text in process.stdout:
                event = json.loads(text)
                if event["event"] == "line" and "Application startup complete" in event["message"]:
                    break
            else:
                pytest.fail("it ended before the new rank's line came")
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130


def test_a_gang_that_failed_is_told_kept_and_started_again(hosts: Gang) -> None:
    hosts.wait(hosts.healthy, 60.0)

    def failed() -> bool:
        hosts.shell("node2", f"p=$(systemctl show -P MainPID {UNIT}); test $p = 0 || kill -9 $p", check=False)
        return hosts.phase() == "failed"

    hosts.wait(failed, 180.0, pause=1.0)
    told = status(hosts)
    assert (told["phase"], told["budget"]["left"]) == ("failed", 0)
    assert told["last_failure"]["reason"].startswith("the rank of node2 ended")

    done = ppdeploy(hosts, "logs", "--failure", "list", "--json")
    listed = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["first"] for one in listed] == [False] * (len(listed) - 1) + [True]
    done = ppdeploy(hosts, "logs", "--failure", str(len(listed)), "--json")
    assert done.returncode == 0, done.stderr
    lines = [event for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "line"]
    assert any(line["host"] == "node2" and "status=9/KILL" in line["message"] for line in lines)

    found = outcome(hosts, "start")
    assert (found["exit_code"], found["pipelines"][0]["reached"]) == (0, True)
    assert status(hosts)["budget"]["left"] == 6


def test_a_silent_agent_is_told_and_its_rank_is_seen_all_the_same(hosts: Gang) -> None:
    hosts.shell("node1", "systemctl stop ppdeploy-agent")
    try:
        told = status(hosts)
        assert told["phase"] == "unknown"
        assert "its agent does not answer" in told["remark"]
        assert told["nodes"][0]["state"] == "running"
    finally:
        hosts.shell("node1", "systemctl start ppdeploy-agent")
    hosts.wait(hosts.healthy, 120.0)


def test_a_node_without_power_is_shown_and_a_removed_one_is_forgotten(hosts: Gang) -> None:
    hosts.lab.kill("node2")
    told = status(hosts)
    assert [row["reachable"] for row in told["nodes"]] == [True, False]
    assert any(problem.startswith("node2 is unreachable: ") for problem in told["problems"])
    assert ppdeploy(hosts, "logs", "-n", "5").returncode == 0
    # What an apply without the node leaves on the head; its gang waits for the word of the dead one.
    alone = hosts.release(order=["node1"])
    hosts.push_release("node1", alone)
    hosts.wait(lambda: "node2 is not heard" in hosts.remark(), 60.0)
    found = outcome(hosts, "start", "--forget", "node2", "--yes")
    assert (found["exit_code"], found["pipelines"][0]["reached"]) == (0, True)
    assert "node2" not in found["hosts"] or found["hosts"]["node2"]["unreachable"] == 0
    assert hosts.healthy()
