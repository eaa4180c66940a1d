"""The agent on real systemd hosts: when each fault is seen and mended, row by row of docs/gang.md.

`make faults` runs the rows with real vLLM ranks that `ppdeploy apply` has set up (PPDEPLOY_FAULTS=vllm).
Without that the ranks are stand-ins that fail as vLLM was seen to: quick, and they say how much of the
time is the gang's own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ppdeploy.lab import Lab
from ppdeploy.lab.state import default_name
from tests.faults.deploy import AGENT_PORT, API_PORT, MASTER_PORT, PIPELINE, UNIT, Gang, VllmGang

BACK = 15.0
"""Seconds that a recovery may take beside the start of the ranks itself."""


REAL = os.environ.get("PPDEPLOY_FAULTS", "") == "vllm"
needs_stand_in = pytest.mark.skipif(REAL, reason="it makes a release of its own, for the stand-in")


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    lab = Lab(f"{default_name()}-faults")
    lab.down()
    settings = {"budget": 1000, "backoff_limit": 2.0}
    found: Gang = VllmGang(lab, settings=settings) if REAL else Gang(lab, settings=settings)
    try:
        found.install()
        found.wait(found.healthy, 300.0 if REAL else 60.0)
        yield found
    finally:
        lab.down()


@pytest.fixture(autouse=True)
def _serving(gang: Gang) -> Iterator[None]:
    gang.wait(gang.healthy, 240.0)
    yield
    for node in gang.nodes:
        gang.lab.heal(node)


def _generation(gang: Gang) -> int:
    return int(gang.status(gang.head)["generation"][0])


def _kill_main(gang: Gang, node: str) -> float:
    return _shell_at(gang, node, f"kill -KILL {gang.main_pid(node)}")


@dataclass
class Course:
    """How the gang went through a fault, in seconds: until it was seen, from there to the launch, the start itself."""

    seen: float
    pause: float
    start: float

    def __str__(self) -> str:
        return f"seen {self.seen:.1f} s, launched {self.pause:.1f} s later, serving {self.start:.1f} s after that"


def _course(gang: Gang, since: float) -> Course:
    """Wait until the gang serves again after a fault at `since`, and return its course by the head's own clock."""

    def recovered() -> list[dict[str, Any]]:
        changes = [change for change in gang.history() if change["at"] > since]
        done = changes and changes[-1]["phase"] == "serving" and any(c["phase"] == "starting" for c in changes)
        return changes if done else []

    gang.wait(lambda: bool(recovered()), 300.0)
    changes = recovered()
    launched = max(change["at"] for change in changes if change["phase"] == "starting")
    return Course(changes[0]["at"] - since, launched - changes[0]["at"], changes[-1]["at"] - launched)


def _shell_at(gang: Gang, node: str, script: str) -> float:
    """Run a script on a host and return when, in seconds since boot."""
    return float(gang.shell(node, f"cut -d' ' -f1 /proc/uptime; {script}").split()[0])


def _tell(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")


def _lost(gang: Gang) -> bool:
    return gang.phase() != "serving"


def _ask_for(gang: Gang, tokens: int, seconds: float = 60.0) -> str:
    """Ask for tokens on the head and return the status, `000` for a broken connection, or `timeout`."""
    body = json.dumps({"model": gang.model, "prompt": "x", "max_tokens": tokens, "ignore_eos": True})
    script = (
        "import http.client, sys\n"
        f"c = http.client.HTTPConnection('127.0.0.1', {API_PORT}, timeout={seconds})\n"
        "try:\n"
        f"    c.request('POST', '/v1/completions', {body!r}, {{'Content-Type': 'application/json'}})\n"
        "    print(c.getresponse().status)\n"
        "except TimeoutError:\n"
        "    print('timeout')\n"
        "except (OSError, http.client.HTTPException):\n"
        "    print('000')\n"
    )
    return gang.lab.exec_ssh(gang.head, ["python3", "-c", script], check=False).stdout.strip()


def _stream(gang: Gang) -> tuple[threading.Thread, list[tuple[str, float]]]:
    """Begin a request that takes long, and collect how and when it ends."""
    ended: list[tuple[str, float]] = []
    thread = threading.Thread(target=lambda: ended.append((_ask_for(gang, gang.long_request), time.monotonic())))
    thread.start()
    time.sleep(2.0)
    return thread, ended


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("who", ["head", "worker"])
def test_a_killed_rank_is_seen_in_3_s_and_all_serve_again(gang: Gang, who: str, busy: bool) -> None:
    before = _generation(gang)
    stream = _stream(gang) if busy else None
    killed = time.monotonic()
    course = _course(gang, _kill_main(gang, gang.head if who == "head" else gang.nodes[1]))
    _tell(f"{who} killed {'busy' if busy else 'idle'}: {course}")
    assert course.seen < 3.0
    assert course.seen + course.pause < BACK
    assert _generation(gang) == before + 1
    if stream is not None:
        stream[0].join(30)
        status, ended = stream[1][0]
        assert status in {"000", "500"}
        assert ended - killed < 15.0


def test_the_death_of_the_heads_whole_unit_ends_the_worker_in_10_s(gang: Gang) -> None:
    worker = gang.nodes[1]
    old = gang.main_pid(worker)
    at = _shell_at(gang, gang.head, f"systemctl kill --signal=SIGKILL {UNIT}")
    gone = gang.wait(lambda: gang.main_pid(worker) != old, 20.0)
    assert gone < 10.0
    course = _course(gang, at)
    _tell(f"head's unit killed: {course}")
    assert course.seen + course.pause < BACK


@pytest.mark.parametrize("who", ["head", "worker"])
def test_a_stopped_rank_is_found_in_30_s(gang: Gang, who: str) -> None:
    node = gang.head if who == "head" else gang.nodes[1]
    time.sleep(3)
    stop = " ".join(str(pid) for pid in gang.pids(node))
    course = _course(gang, _shell_at(gang, node, f"kill -STOP {stop}"))
    _tell(f"{who} stopped: {course}")
    assert course.seen < 30.0
    assert course.pause < BACK


@pytest.mark.parametrize("who", ["head", "worker"])
def test_a_host_that_loses_power_comes_back_into_the_gang(gang: Gang, who: str) -> None:
    node = gang.head if who == "head" else gang.nodes[1]
    before, spent = _generation(gang), len(gang.status(gang.head)["failures"])
    gang.lab.kill(node)
    if who == "head":
        time.sleep(12)
        assert not gang.pids(gang.nodes[1]), "the worker's rank outlives its head"
    else:
        assert gang.wait(lambda: _lost(gang), 20.0) < 12.0
    gang.lab.boot(node)
    back = gang.wait(gang.healthy, 240.0)
    _tell(f"{who} host booted again: serving {back:.1f} s after its boot")
    assert _generation(gang) > before
    assert len(gang.status(gang.head)["failures"]) <= spent, "a host's or a link's fault spends no budget"


def test_a_cut_of_3_s_loses_nothing(gang: Gang) -> None:
    before = _generation(gang)
    stream = _stream(gang)
    gang.lab.cut(gang.nodes[1])
    time.sleep(3.0)
    gang.lab.heal(gang.nodes[1])
    time.sleep(8.0)
    assert _generation(gang) == before
    assert gang.healthy()
    stream[0].join(90)
    assert stream[1][0][0] in {"200", "timeout"}


def test_a_cut_of_20_s_stops_both_sides_and_heals(gang: Gang) -> None:
    before, spent = _generation(gang), len(gang.status(gang.head)["failures"])
    gang.lab.cut(gang.nodes[1])
    seen = gang.wait(lambda: _lost(gang), 20.0)
    gang.wait(lambda: not gang.main_pid(gang.nodes[1]) and not gang.main_pid(gang.head), 20.0)
    time.sleep(max(0.0, 20.0 - seen))
    assert "is not heard" in gang.remark()
    healed = float(gang.shell(gang.head, "cut -d' ' -f1 /proc/uptime"))
    gang.lab.heal(gang.nodes[1])
    course = _course(gang, healed)
    _tell(f"cut of 20 s: seen {seen:.1f} s; after the healing {course}")
    assert seen < 12.0
    assert course.seen + course.pause < BACK
    assert _generation(gang) > before
    assert len(gang.status(gang.head)["failures"]) <= spent, "a host's or a link's fault spends no budget"


def test_an_agent_killed_again_and_again_adopts_its_rank(gang: Gang) -> None:
    pids = {node: gang.main_pid(node) for node in gang.nodes}
    before = _generation(gang)
    for index in range(10):
        gang.shell(gang.nodes[index % 2], "systemctl kill --signal=SIGKILL ppdeploy-agent.service")
        time.sleep(2.0)
    gang.wait(gang.healthy, 30.0)
    assert {node: gang.main_pid(node) for node in gang.nodes} == pids
    assert _generation(gang) == before


def test_a_file_edited_by_hand_keeps_the_gang_down_and_is_named(gang: Gang) -> None:
    worker = gang.nodes[1]
    path = f"/opt/ppdeploy/{PIPELINE}/current/rank.env"
    gang.shell(worker, f"echo VLLM_LOGGING_LEVEL=DEBUG >>{path}")
    time.sleep(6.0)
    assert gang.healthy(), "what runs goes on"
    _kill_main(gang, worker)
    gang.wait(lambda: "rank.env differs" in gang.remark(), 20.0)
    assert worker in gang.remark()
    time.sleep(5.0)
    assert gang.main_pid(worker) == 0
    gang.shell(worker, f"sed -i '$d' {path}")
    gang.wait(gang.healthy, 240.0)


@needs_stand_in
def test_another_vllm_on_one_node_keeps_the_gang_down_and_is_named(gang: Gang) -> None:
    worker = gang.nodes[1]
    site = "/opt/ppdeploy/venvs/*/lib/python3.11/site-packages"
    gang.shell(worker, f"cd {site} && mv vllm-0.32.0.dist-info vllm-0.31.0.dist-info")
    _kill_main(gang, worker)
    gang.wait(lambda: "vllm 0.31.0 is installed, 0.32.0 is locked" in gang.remark(), 20.0)
    assert worker in gang.remark()
    gang.shell(worker, f"cd {site} && mv vllm-0.31.0.dist-info vllm-0.32.0.dist-info")
    gang.wait(gang.healthy, 240.0)


def test_a_rank_started_by_hand_ends_at_once(gang: Gang) -> None:
    worker = gang.nodes[1]
    gang.order("stop")
    try:
        gang.wait(lambda: gang.phase() == "stopped", 30.0)
        # Without its agent, which would kill it at sight, so that the missing ticket is what ends it.
        gang.shell(worker, f"systemctl stop ppdeploy-agent; systemctl start {UNIT}", check=False)
        assert gang.main_pid(worker) == 0
        assert "only the agent starts it" in gang.shell(worker, f"journalctl -u {UNIT} -n 20 --no-pager")
    finally:
        gang.shell(worker, "systemctl start ppdeploy-agent")
        gang.order("start")


def test_a_stop_lets_requests_finish(gang: Gang) -> None:
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(_ask_for(gang, gang.short_request)))
    thread.start()
    time.sleep(1.5)
    gang.order("restart")
    thread.join(60)
    assert ended == ["200"]
    gang.wait(lambda: gang.phase() != "draining", 40.0)
    gang.wait(gang.healthy, 240.0)


@needs_stand_in
def test_a_new_release_runs_on_all_nodes_once_it_is_ordered(gang: Gang) -> None:
    release = gang.release(extra=" of another release")
    pids = {node: gang.main_pid(node) for node in gang.nodes}
    digest = ""
    for node in gang.nodes:
        digest = gang.push_release(node, release)
    time.sleep(8.0)
    assert {node: gang.main_pid(node) for node in gang.nodes} == pids
    gang.order(f"start --release {digest}")
    gang.wait(lambda: gang.healthy() and gang.status(gang.head)["release"] == digest, 90.0)
    ports = {gang.shell(node, f"tr '\\0' ' ' </proc/{gang.main_pid(node)}/cmdline") for node in gang.nodes}
    wanted = f"--master-port {MASTER_PORT + _generation(gang) % 16} "
    assert all(wanted in command for command in ports)


def test_forged_unsigned_and_endless_answers_change_nothing(gang: Gang) -> None:
    before = _generation(gang)
    address = gang.lab.fabric_address(gang.head)
    script = (
        f"import socket, time\nagent = ('{address}', {AGENT_PORT})\n"
        "held = []\n"
        "for n in range(1000):\n"
        "    s = socket.create_connection(agent, 2); s.send(b'GET /v1/state?no')\n"
        "    held.append(s)\n"
        "time.sleep(5)\n"
        "s = socket.create_connection(agent, 2); s.sendall(b'POST /v1/stop HTTP/1.1\\r\\n\\r\\n')\n"
        "print(s.recv(100).split()[1].decode())\n"
        "s = socket.create_connection(agent, 2); s.sendall(bytes(range(256)) * 64 + b'\\r\\n\\r\\n')\n"
        "time.sleep(1)\n"
    )
    said = gang.lab.exec_ssh(gang.nodes[1], ["python3", "-c", script]).stdout
    assert said.strip() == "405"
    assert gang.healthy()
    assert _generation(gang) == before
    pid = gang.shell(gang.head, "systemctl show -P MainPID ppdeploy-agent").strip()
    rss = int(gang.shell(gang.head, f"awk '/VmHWM/ {{print $2}}' /proc/{pid}/status"))
    _tell(f"the agent's peak memory: {rss} kB")
    assert rss < 30_000


def test_an_agent_with_another_key_is_unknown_not_gone(gang: Gang) -> None:
    worker = gang.nodes[1]
    pids = {node: gang.main_pid(node) for node in gang.nodes}
    gang.shell(worker, "cp -p /etc/ppdeploy/agent.key /root/key; tr '0-9' '5-90-4' </root/key >/etc/ppdeploy/agent.key")
    gang.shell(worker, "systemctl restart ppdeploy-agent")
    gang.wait(lambda: "not signed" in gang.status(gang.head)["peers"][worker]["error"], 10.0)
    gang.shell(worker, "cp -p /root/key /etc/ppdeploy/agent.key; systemctl restart ppdeploy-agent")
    gang.wait(gang.healthy, 20.0)
    assert {node: gang.main_pid(node) for node in gang.nodes} == pids


def test_a_full_disk_keeps_what_runs_and_says_so(gang: Gang) -> None:
    head = gang.head
    pids = {node: gang.main_pid(node) for node in gang.nodes}
    # A file system of its own, full to the last byte, below the agent's folder only.
    gang.shell(
        head,
        "systemctl stop ppdeploy-agent; mount -t tmpfs -o size=64k none /var/lib/ppdeploy/agent;"
        "chmod 700 /var/lib/ppdeploy/agent; dd if=/dev/zero of=/var/lib/ppdeploy/agent/fill bs=1k count=64 2>&1;"
        "systemctl start ppdeploy-agent",
    )
    gang.wait(lambda: "cannot be stored" in gang.status(head).get("storage_problem", ""), 30.0)
    gang.shell(head, "systemctl stop ppdeploy-agent; umount /var/lib/ppdeploy/agent; systemctl start ppdeploy-agent")
    gang.wait(gang.healthy, 240.0)
    assert gang.main_pid(gang.nodes[1]) != 0
    assert set(pids) == set(gang.nodes)


def test_the_fence_ends_a_rank_whose_agent_is_gone(gang: Gang) -> None:
    worker = gang.nodes[1]
    old = gang.main_pid(worker)
    gang.shell(worker, "systemctl stop ppdeploy-agent")
    gone = gang.wait(lambda: gang.main_pid(worker) != old, 100.0)
    _tell(f"fenced after {gone:.0f} s")
    gang.shell(worker, "systemctl start ppdeploy-agent")
    gang.wait(lambda: gang.healthy() and gang.main_pid(worker) not in {0, old}, 90.0)


def test_what_an_idle_agent_costs(gang: Gang) -> None:
    for node in gang.nodes:
        pid = gang.shell(node, "systemctl show -P MainPID ppdeploy-agent").strip()
        script = f"cut -d' ' -f14,15 /proc/{pid}/stat; sleep 20; cut -d' ' -f14,15 /proc/{pid}/stat"
        ticks = [int(word) for word in gang.shell(node, script).split()]
        share = (ticks[2] + ticks[3] - ticks[0] - ticks[1]) / 20.0
        rss = int(gang.shell(node, f"awk '/VmRSS/ {{print $2}}' /proc/{pid}/status"))
        _tell(f"{node}: agent {share:.2f} % of a core, {rss} kB")
        assert rss < 30_000
        assert share < 1.5
