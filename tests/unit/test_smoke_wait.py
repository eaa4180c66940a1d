"""When the smoke test's wait ends: the gang serves the release, or waiting longer is of no use."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from plugins.modules import ppdeploy_smoke as smoke


class _Agent(BaseHTTPRequestHandler):
    told: list[dict[str, Any]]

    def do_GET(self) -> None:
        answers = type(self).told
        body = json.dumps(answers.pop(0) if len(answers) > 1 else answers[0]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def agent() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Agent)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _wait(agent: str, told: list[dict[str, Any]], timeout: float = 5) -> dict[str, Any]:
    _Agent.told = told
    return smoke._wait({"agent": agent, "release": "new", "timeout": timeout})


def test_it_waits_for_the_new_release_while_the_old_one_still_serves(agent: str) -> None:
    old = {"healthy": True, "release": "old", "phase": "serving"}
    starting = {"healthy": False, "release": "new", "phase": "starting", "failures": []}
    new = {"healthy": True, "release": "new", "phase": "serving"}
    answer = _wait(agent, [old, starting, new])
    assert (answer["ready"], answer["reason"]) == (True, "")


def test_it_ends_when_the_gang_has_failed_for_good(agent: str) -> None:
    told = {"healthy": False, "phase": "failed", "failures": [{"reason": "exited with code 1"}]}
    answer = _wait(agent, [told])
    assert not answer["ready"]
    assert "exited with code 1" in answer["reason"]


def test_it_ends_when_every_start_fails(agent: str) -> None:
    told = {"healthy": False, "phase": "starting", "failures": [{"reason": "exited with code 1"}] * 3}
    assert "failed 3 times" in _wait(agent, [told])["reason"]


def test_it_ends_when_the_gang_waits_for_what_an_apply_does_not_bring(agent: str) -> None:
    told = {"phase": "waiting", "phase_age": 121.0, "remark": "node2: GPU 1 is not there", "failures": []}
    assert _wait(agent, [told])["reason"] == "waiting: node2: GPU 1 is not there"


def test_it_ends_with_the_time_and_says_what_was_last(agent: str) -> None:
    told = {"phase": "probing", "remark": "waiting for the first token", "failures": []}
    assert "probing: waiting for the first token" in _wait(agent, [told], timeout=0.2)["reason"]


def test_an_agent_that_does_not_answer_is_told() -> None:
    answer = smoke._wait({"agent": "http://127.0.0.1:1", "release": "new", "timeout": 0.2})
    assert "the agent does not answer" in answer["reason"]
