"""The module that plays a load on the head: what it looks at first, its unit, and what it reads of its end."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_bench as bench

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} RUNNING
vllm:num_requests_waiting{engine="0",model_name="tiny"} WAITING
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
"""


class _Node(BaseHTTPRequestHandler):
    """The agent and the API of a head."""

    status: dict[str, Any]
    running: list[int]
    code: int
    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        if self.path == "/v1/status":
            self._say(200, json.dumps(type(self).status))
            return
        counts = type(self).running
        running = counts.pop(0) if len(counts) > 1 else counts[0]
        self._say(type(self).code, METRICS.replace("RUNNING", f"{running}.0").replace("WAITING", "0.0"))

    def do_POST(self) -> None:
        type(self).asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._say(type(self).code, '{"error": "no such model"}')

    def _say(self, code: int, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setattr(bench, "PAUSE", 0.0)
    _Node.status = {"healthy": True, "release": "new", "phase": "serving"}
    _Node.running, _Node.code, _Node.asked = [0], 200, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Node)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = tmp_path / "agent.json"
    config.write_text(json.dumps({"listen": [["192.0.2.1", 29500], ["127.0.0.1", server.server_port]]}))
    monkeypatch.setattr(bench.agent_url, "__defaults__", (str(config),))
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def look(node: str) -> dict[str, Any]:
    return bench.look({"url": node, "release": "new"})


def test_a_pipeline_that_serves_and_is_not_asked_can_be_measured(node: str) -> None:
    assert look(node) == {"serves": True, "in_flight": 0, "reason": ""}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"healthy": False, "phase": "waiting", "remark": "node2 is not heard"}, "it is waiting: node2 is not heard"),
        ({"healthy": False}, "it is None: no reason"),
        ({"healthy": True, "release": "old"}, "it serves release old, and the inventory says new"),
    ],
)
def test_one_that_does_not_serve_the_release_cannot(node: str, status: dict[str, Any], reason: str) -> None:
    _Node.status = status
    found = look(node)
    assert (found["serves"], found["reason"]) == (False, reason)


def test_nor_one_whose_agent_or_api_is_silent(node: str, tmp_path: Path) -> None:
    assert "its API does not answer" in look("http://127.0.0.1:9")["reason"]
    _Node.code = 404
    assert "does not count the requests" in look(node)["reason"]
    (tmp_path / "agent.json").write_text(json.dumps({"listen": [["127.0.0.1", 9]]}))
    assert look(node)["reason"].startswith("its agent does not answer: [Errno ")
    (tmp_path / "agent.json").unlink()
    assert look(node)["reason"] == "no agent is installed"


def test_requests_in_flight_are_told_but_not_the_agents_own_short_one(node: str) -> None:
    _Node.running = [3]
    assert look(node)["in_flight"] == 3
    _Node.running = [0, 1, 0]
    assert look(node)["in_flight"] == 0


def test_people_who_pause_between_their_requests_are_seen(node: str) -> None:
    _Node.running = [0, 2, 0, 0, 2, 0]
    assert look(node)["in_flight"] == 2


def test_requests_of_all_engines_are_counted() -> None:
    text = METRICS.replace("RUNNING", "2.0").replace("WAITING", "1.0")
    assert bench.requests_in_flight(text) == 3
    assert bench.requests_in_flight(text + text.replace('engine="0"', 'engine="1"')) == 6
    assert bench.requests_in_flight("# nothing\n") is None


def test_warming_sends_different_prompts_of_the_loads_size(node: str) -> None:
    asked = {"url": node, "model": "tiny", "users": 32, "input_tokens": 100, "timeout": 10}
    assert bench.warm(asked) == {"ok": True, "reason": ""}
    assert len(_Node.asked) == bench.MOST_WARM
    assert {len(body["prompt"]) for body in _Node.asked} == {100}
    assert len({tuple(body["prompt"]) for body in _Node.asked}) == bench.MOST_WARM
    _Node.code = 500
    found = bench.warm(asked)
    assert not found["ok"]
    assert found["reason"].startswith("a request was answered with HTTP 500: ")


def test_the_unit_is_the_users_and_reaches_loopback_alone() -> None:
    words = bench.unit_command(
        {"pipeline": "tiny", "user": "ppdeploy", "timeout": 60, "argv": ["/x/vllm", "bench"], "seed": 7}, "/run/b/tiny"
    )
    for word in (
        "--unit=ppdeploy-bench-tiny.service",
        "--property=User=ppdeploy",
        "--property=RuntimeMaxSec=60",
        "--property=IPAddressDeny=any",
        "--property=IPAddressAllow=localhost",
        "--property=ProtectSystem=strict",
        "--setenv=HF_HUB_OFFLINE=1",
    ):
        assert word in words
    command = words[words.index("--") + 1 :]
    assert command[:4] == ["/x/vllm", "bench", "--seed", "7"]
    assert command[-4:] == ["--result-dir", "/run/b/tiny/work", "--result-filename", "result.json"]


def test_progress_is_the_clients_own_bar(tmp_path: Path) -> None:
    err = tmp_path / "err"
    assert bench.progress(str(err)) == "the client starts"
    err.write_text(
        "INFO starting 3/4 things\n  0%|   | 0/64 [00:00<?, ?it/s]\r 25%|##  | 16/64 [00:05<00:14, 3.2it/s]\r"
    )
    assert bench.progress(str(err)) == "16 of 64 requests"


def test_a_result_is_read_without_lists_and_never_through_a_link(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"completed": 4, "ttfts": [1.0], "label": None, "date": "x"}))
    assert bench.result(str(file)) == {"completed": 4, "label": None, "date": "x"}
    link = tmp_path / "link.json"
    link.symlink_to(file)
    assert bench.result(str(link)) == {}
    file.write_text("[1]")
    assert bench.result(str(file)) == {}
    assert bench.result(str(tmp_path / "none")) == {}


@pytest.mark.parametrize(
    ("state", "has_result", "reason"),
    [
        ({"LoadState": "loaded", "Result": "success"}, True, ""),
        ({"LoadState": "loaded", "Result": "success"}, False, "wrote no result: ValueError: no such model"),
        ({"LoadState": "loaded", "Result": "timeout"}, False, "did not end within 60 s"),
        ({"LoadState": "loaded", "Result": "exit-code", "ExecMainStatus": "1"}, False, "code 1: ValueError: no such"),
        ({"LoadState": "loaded", "Result": "oom-kill"}, True, "ended with oom-kill"),
        ({"LoadState": "not-found"}, False, "ended by somebody"),
    ],
)
def test_the_end_of_the_client_is_told_in_a_sentence(
    tmp_path: Path, state: dict[str, str], has_result: bool, reason: str
) -> None:
    (tmp_path / "err").write_text(
        "Traceback (most recent call last):\n  x\nValueError: no such model\nleaked 3 types!\n"
    )
    found = bench.ending(state, str(tmp_path), 60, has_result)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_unit_that_remains_after_its_end_does_not_run() -> None:
    assert bench.is_running({"ActiveState": "active", "SubState": "running"})
    assert bench.is_running({"ActiveState": "deactivating", "SubState": "stop-sigterm"})
    assert not bench.is_running({"ActiveState": "active", "SubState": "exited"})
    assert not bench.is_running({"ActiveState": "failed", "SubState": "failed"})
    assert not bench.is_running({})
