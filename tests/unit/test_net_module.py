"""The module `ppdeploy_net`: it reads what ping and iperf3 print, and what it starts ends and goes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_net as module

PING = """\
PING 192.0.2.12 (192.0.2.12) from 192.0.2.11 : 56(84) bytes of data.
64 bytes from 192.0.2.12: icmp_seq=1 ttl=64 time=0.210 ms
64 bytes from 192.0.2.12: icmp_seq=2 ttl=64 time=0.190 ms
64 bytes from 192.0.2.12: icmp_seq=4 ttl=64 time=4.50 ms

--- 192.0.2.12 ping statistics ---
4 packets transmitted, 3 received, 25% packet loss, time 60ms
rtt min/avg/max/mdev = 0.190/1.633/4.500/2.027 ms
"""

SILENT = """\
PING 192.0.2.13 (192.0.2.13) from 192.0.2.11 : 56(84) bytes of data.

--- 192.0.2.13 ping statistics ---
4 packets transmitted, 0 received, 100% packet loss, time 60ms
"""


def test_round_trips_and_losses_are_read_from_ping() -> None:
    assert module.read_ping(PING) == pytest.approx({"sent": 4, "lost": 1, "p50": 0.00021, "p99": 0.0045})
    assert module.read_ping(SILENT) == {"sent": 4, "lost": 4}
    assert module.read_ping("ping: connect: Network is unreachable\n") == {
        "error": "ping: connect: Network is unreachable"
    }


def test_throughput_is_the_receivers_and_what_was_sent_again_the_senders() -> None:
    end = {
        "sum_sent": {"bits_per_second": 960e6, "bytes": 360_000_000, "seconds": 3.0, "retransmits": 17},
        "sum_received": {"bits_per_second": 949e6, "bytes": 355_875_000, "seconds": 3.0},
    }
    assert module.read_iperf3(json.dumps({"end": end})) == {
        "mbit": 949.0,
        "bytes": 355_875_000,
        "seconds": 3.0,
        "retransmits": 17,
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"error": "unable to connect to server: Connection refused"}', "unable to connect to server"),
        ("iperf3: parameter error - unrecognized option\n", "parameter error"),
        ('{"end": {}}', "without a result"),
        ("", "it said nothing"),
    ],
)
def test_what_iperf3_complains_of_is_told(text: str, error: str) -> None:
    assert error in module.read_iperf3(text)["error"]


@pytest.mark.parametrize(("share", "value"), [(0.5, 3.0), (0.99, 5.0), (0.2, 1.0), (0.21, 2.0)])
def test_a_quantile_is_one_of_the_values(share: float, value: float) -> None:
    assert module.quantile([5.0, 1.0, 3.0, 2.0, 4.0], share) == value


def test_the_kernel_says_who_listens() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert not module.listens(port)
        sock.listen()
        assert module.listens(port)


def test_a_foreign_address_is_refused_in_words() -> None:
    with pytest.raises(module.NetError, match=r"192\.0\.2\.1 is not on this host"):
        module.free_port("192.0.2.1")


# ---- what is started


class Node:
    """Stands in for the node's programs: notes every command, and answers as it is told."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.answer: Callable[[list[str]], str] = lambda _: ""

    def run(self, argv: list[str], timeout: float = 20) -> subprocess.CompletedProcess[str]:
        del timeout
        self.commands.append(argv)
        return subprocess.CompletedProcess(argv, 0, self.answer(argv), "")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    found = Node()
    monkeypatch.setattr(module, "run", found.run)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "ppdeploy-net")
    monkeypatch.setattr(module, "listens", lambda _: True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return found


def asked(**changes: Any) -> dict[str, Any]:
    base = {
        "address": "127.0.0.1",
        "peers": ["192.0.2.12"],
        "files": {},
        "limit": 300,
        "seconds": 3,
        "flows": 4,
        "brought": [],
        "wire": "",
        "wire_peers": [],
        "wire_peer": "",
    }
    return {**base, "peer": "node2", "peer_address": "192.0.2.12", "port": 40001, "config": {}, **changes}


def test_a_listener_ends_by_itself_and_only_peers_reach_it(node: Node) -> None:
    opened = module.open_test(asked(files={"nccl.env": "A=1\n"}))
    assert opened["port"] > 0
    assert opened["rendezvous"] > 0
    assert (module.FOLDER / "nccl.env").read_text() == "A=1\n"
    (server,) = [words for words in node.commands if f"--unit={module.SERVER}" in words]
    assert "--property=RuntimeMaxSec=300" in server
    assert "--property=IPAddressDeny=any" in server
    assert "--property=IPAddressAllow=127.0.0.0/8 127.0.0.1 192.0.2.12" in server
    assert "--property=DynamicUser=yes" in server
    (guard,) = [words for words in node.commands if f"--unit={module.GUARD}" in words]
    assert "--on-active=300" in guard
    assert f"rm -rf {module.FOLDER}" in guard[-1]


def test_a_file_is_never_written_elsewhere(node: Node) -> None:
    module.open_test(asked(files={"../../outside": "x"}))
    assert sorted(path.name for path in module.FOLDER.iterdir()) == ["brought", "outside"]
    assert node.commands


def test_without_iperf3_the_test_goes_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "iperf3" else f"/usr/bin/{name}")
    opened = module.open_test(asked())
    assert (opened["port"], opened["problem"]) == (0, "iperf3 is not installed")
    node.answer = lambda argv: PING if argv[0] == "ping" else ""
    found = module.measure(asked())
    assert found["ping"]["lost"] == 1
    assert (found["flows"], found["problem"]) == ({}, "iperf3 is not installed")


def test_closing_ends_everything_and_says_whether_there_was_anything(node: Node) -> None:
    module.open_test(asked())
    node.commands.clear()
    assert module.close()
    assert not module.FOLDER.exists()
    (stop,) = [words for words in node.commands if words[:2] == ["systemctl", "stop"]]
    assert {f"{name}.service" for name in (module.SERVER, module.PROBE, module.GUARD)} <= set(stop)
    assert f"{module.GUARD}.timer" in stop
    assert not module.close()


@pytest.mark.usefixtures("node")
def test_whoever_ends_a_test_is_told_what_came_for_it() -> None:
    module.open_test(asked(brought=["iperf3", "libiperf0"]))
    assert module.work({"action": "close"}) == {"brought": ["iperf3", "libiperf0"]}
    assert module.work({"action": "close"}) == {"brought": []}


def test_a_pair_is_measured_both_ways_with_one_connection_and_several(node: Node) -> None:
    end = {"sum_sent": {"retransmits": 0}, "sum_received": {"bits_per_second": 9e8, "bytes": 1, "seconds": 3.0}}
    node.answer = lambda argv: PING if argv[0] == "ping" else json.dumps({"end": end})
    found = module.measure(asked())
    assert set(found["flows"]) == {"out_one", "in_one", "out_many", "in_many"}
    runs = [(words[words.index("-P") + 1], "-R" in words) for words in node.commands if words[0] == "iperf3"]
    assert runs == [("1", False), ("1", True), ("4", False), ("4", True)]


def test_with_a_tunnel_a_pair_is_measured_beside_it_too(node: Node) -> None:
    end = {"sum_sent": {"retransmits": 0}, "sum_received": {"bits_per_second": 9e8, "bytes": 1, "seconds": 3.0}}
    node.answer = lambda argv: PING if argv[0] == "ping" else json.dumps({"end": end})
    wire = {"wire": "198.51.100.11", "wire_peers": ["198.51.100.12"], "wire_peer": "198.51.100.12"}
    found = module.measure(asked(**wire))
    assert list(found["flows"])[4:] == ["out_wire", "in_wire"]
    runs = [words for words in node.commands if words[0] == "iperf3"]
    assert [words[words.index("-c") + 1] for words in runs] == ["192.0.2.12"] * 4 + ["198.51.100.12"] * 2
    assert [words[words.index("-B") + 1] for words in runs[4:]] == ["198.51.100.11"] * 2
    assert [words[words.index("-P") + 1] for words in runs[4:]] == ["4", "4"]


def test_with_a_tunnel_the_listener_is_reached_by_the_peers_on_both(node: Node) -> None:
    module.open_test(asked(wire="198.51.100.11", wire_peers=["198.51.100.12"]))
    (server,) = [words for words in node.commands if f"--unit={module.SERVER}" in words]
    allowed = "127.0.0.0/8 127.0.0.1 192.0.2.12 198.51.100.11 198.51.100.12"
    assert f"--property=IPAddressAllow={allowed}" in server
    assert "--property=IPAddressDeny=any" in server
    assert "-B" not in server


def test_a_peer_that_cannot_be_reached_is_tried_once(node: Node) -> None:
    node.answer = lambda argv: SILENT if argv[0] == "ping" else '{"error": "unable to connect to server"}'
    found = module.measure(asked())
    assert list(found["flows"]) == ["out_one"]
    assert found["problem"] == ""


def test_a_busy_server_is_asked_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    end = {"sum_sent": {}, "sum_received": {"bits_per_second": 9e8, "bytes": 1, "seconds": 3.0}}
    answers = ['{"error": "the server is busy running a test. try again later"}', json.dumps({"end": end})]
    node.answer = lambda _: answers.pop(0)
    assert module.iperf3(asked(), back=False, flows=1)["mbit"] == 900.0


def test_the_probe_runs_under_the_ranks_environment(node: Node, tmp_path: Path) -> None:
    python = tmp_path / "python"
    assert module.probe(asked(python=str(python)))["problem"].startswith("vLLM is not installed")
    python.touch()
    assert module.probe(asked(python=str(python), config={"rank": 1})) == {"started": True, "problem": ""}
    command = node.commands[-1]
    for name in ("rank.env", "nccl.env"):
        assert f"--property=EnvironmentFile={module.FOLDER}/{name}" in command
    assert command[-3:] == [str(python), f"{module.FOLDER}/handoff.py", '{"rank": 1}']


@pytest.mark.parametrize(
    ("out", "err", "problem"),
    [
        ('{"sender": "node1"}\n{"done": true}\n', "", ""),
        ('{"error": "the nodes did not find each other: timed out"}\n', "", "the nodes did not find each other: timed"),
        ('{"sender": "node1"}\n{"send', "Killed\n", "the handoff probe ended early (oom-kill): Killed"),
    ],
)
def test_what_the_probe_told_is_kept_whatever_became_of_it(node: Node, out: str, err: str, problem: str) -> None:
    node.answer = lambda _: "ActiveState=failed\nResult=oom-kill\nExecMainStatus=9\n"
    module.FOLDER.mkdir()
    (module.FOLDER / "handoff.out").write_text(out)
    (module.FOLDER / "handoff.err").write_text(err)
    found = module.collect(asked())
    assert found["problem"].startswith(problem)
    assert bool(found["problem"]) == bool(problem)
    assert found["lines"] == [json.loads(line) for line in out.splitlines() if line.endswith("}")]


def test_what_nccl_says_between_the_probes_lines_is_none_of_them() -> None:
    text = 'node1:7:7 [0] NCCL INFO comm {0x1}\n{"sender": "node1"}\n{"sender": "no\n7\n{"done": true}\n'
    assert list(module.read_lines(text)) == [{"sender": "node1"}, {"done": True}]
