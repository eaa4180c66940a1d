"""A stand-in of vLLM's API and of the agent's `/healthz`, for proofs of the gateway; the standard library alone.

    stand_in_api.py RECORD MODEL [ADDRESS [API_PORT [AGENT_PORT]]]

It answers as vLLM 0.32 does, with words instead of a model. A prompt says what becomes of its request, as words
`name=value`: `words` of the answer, `pause` seconds between them, `slow` seconds before the first, `status` of a
refusal, `die` after so many words (the whole engine goes at once, as a rank does that is killed). Every request that
arrives is a line of RECORD, with its headers' names and without what is in them.

The agent's part is a process of its own: it answers 200 while the engine lives and there is no file RECORD.draining.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar


class Api(BaseHTTPRequestHandler):
    """One request to the stand-in's engine."""

    protocol_version = "HTTP/1.1"
    server_version = "uvicorn"
    record: ClassVar[Path]
    model: ClassVar[str]
    lock: ClassVar[threading.Lock] = threading.Lock()
    running: ClassVar[int] = 0
    most: ClassVar[int] = 0

    def do_GET(self) -> None:
        """Answer what vLLM answers without a body; everything is open, as it is there."""
        self._note("")
        if self.path == "/v1/models":
            entry = {"id": self.model, "object": "model", "created": int(time.time()), "owned_by": "vllm"}
            self._reply(200, {"object": "list", "data": [entry]})
        elif self.path in {"/health", "/metrics", "/openapi.json", "/version", "/load", "/ping"}:
            self._reply(200, {})
        else:
            self._reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """Answer a completion, in one piece or as a stream, or what reaches the engine beside the API."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        asked: dict[str, Any] = {}
        if self.path in {"/v1/completions", "/v1/chat/completions"}:
            asked = json.loads(body)
        prompt = str(asked.get("prompt") or "".join(str(m["content"]) for m in asked.get("messages", [])))
        wish = dict(word.split("=", 1) for word in prompt.split() if "=" in word)
        self._note(wish.get("mark", ""))
        with self.lock:
            Api.running += 1
            Api.most = max(Api.most, Api.running)
        try:
            self._complete(asked, wish)
        except (BrokenPipeError, ConnectionResetError):
            self._note("gone:" + wish.get("mark", ""))
            self.close_connection = True
        finally:
            with self.lock:
                Api.running -= 1

    def _complete(self, asked: dict[str, Any], wish: dict[str, str]) -> None:
        time.sleep(float(wish.get("slow", 0)))
        if "status" in wish:
            error = {"message": "the stand-in was asked to fail", "type": "InternalServerError", "code": 500}
            self._reply(int(wish["status"]), {"error": error})
            return
        words, pause = int(wish.get("words", 3)), float(wish.get("pause", 0))
        die = int(wish.get("die", -1))
        mark = wish.get("mark", "word")
        if not asked.get("stream"):
            for _ in range(words):
                time.sleep(pause)
            if die >= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            text = " ".join(f"{mark}-{index}" for index in range(words))
            choice = {"index": 0, "text": text, "finish_reason": "length"}
            self._reply(200, {"object": "text_completion", "model": self.model, "choices": [choice], "most": Api.most})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for index in range(words):
            if index == die:
                os.kill(os.getpid(), signal.SIGKILL)
            choice = {"index": 0, "text": f"{mark}-{index}"}
            self._chunk(f"data: {json.dumps({'object': 'text_completion', 'choices': [choice]})}\n\n")
            time.sleep(pause)
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _reply(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _note(self, mark: str) -> None:
        seen = {
            "method": self.command,
            "path": self.path,
            "headers": sorted(name.lower() for name in self.headers),
            "from": self.headers.get("x-forwarded-for"),
            "id": self.headers.get("x-request-id"),
            "mark": mark,
        }
        with self.lock, self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(seen) + "\n")

    def log_message(self, *_: object) -> None:
        """Keep silent: what arrives is in the record."""


class Agent(BaseHTTPRequestHandler):
    """The agent's `/healthz`: one request for each connection, as the agent has it."""

    engine: ClassVar[subprocess.Popen[bytes]]
    draining: ClassVar[Path]

    def do_GET(self) -> None:
        """Say whether requests may be sent here."""
        well = self.engine.poll() is None and not self.draining.exists()
        data = b"ok\n" if well else b"the gang does not serve\n"
        self.send_response(200 if self.path == "/healthz" and well else 404 if self.path != "/healthz" else 503)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keep silent: HAProxy asks every second."""


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as uvicorn does."""

    request_queue_size = 2048
    daemon_threads = True


def main() -> None:
    """Run the agent's part, and the engine as its child."""
    record, model, *more = sys.argv[1:]
    address, ports = (more or ["127.0.0.1"])[0], more[1:]
    engine_port, agent_port = (int(port) for port in (*ports, *("8000", "29500")[len(ports) :]))
    if os.environ.get("STAND_IN_ENGINE"):
        Api.record, Api.model = Path(record), model
        Server((address, engine_port), Api).serve_forever()
        return
    Agent.draining = Path(record + ".draining")
    Agent.engine = subprocess.Popen(
        [sys.executable, *sys.argv], env={**os.environ, "STAND_IN_ENGINE": "1"}, stdin=subprocess.DEVNULL
    )
    Server(("127.0.0.1", agent_port), Agent).serve_forever()


if __name__ == "__main__":
    main()
