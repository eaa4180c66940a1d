#!/usr/bin/env python3
"""A stand-in for `vllm serve` on hosts that have none, for the timing of faults; it fails the way vLLM was seen to.

From reference/vllm-cpu-experiment.md, section 3: the head waits for its workers at the master port
without a limit; a dead worker leaves /health at 200, and the next request hangs until
VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, after which the head answers 500 and exits 0; a worker never notices
that its head is gone; SIGTERM ends a head at 0, after the requests it has when --shutdown-timeout is
given, and a worker at 0. Failures before it is ready exit 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOAD = float(os.environ.get("FAKE_LOAD_SECONDS", "2"))
LIMIT = float(os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300"))
TOKEN_SECONDS = float(os.environ.get("FAKE_TOKEN_SECONDS", "0.02"))


def log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Engine:
    def __init__(self, workers: list[socket.socket]) -> None:
        self.workers = workers
        self.lock = threading.Lock()
        self.steps = 0
        self.running = 0

    def step(self) -> None:
        """One token: every stage must answer."""
        end = time.monotonic() + LIMIT
        with self.lock:
            for worker in self.workers:
                try:
                    worker.settimeout(max(0.01, end - time.monotonic()))
                    worker.sendall(b"s")
                    if not worker.recv(1):
                        raise OSError("closed")
                except OSError as error:
                    # The engine waits for the reply although the connection is gone.
                    log(f"(Worker_PP0) INFO a worker is gone: {error}")
                    time.sleep(max(0.0, end - time.monotonic()))
                    raise TimeoutError("RPC call to sample_tokens timed out.") from error
            time.sleep(TOKEN_SECONDS)
            self.steps += 1


def make_api(engine: Engine, options: argparse.Namespace) -> type[BaseHTTPRequestHandler]:
    class Api(BaseHTTPRequestHandler):
        def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            if self.path == "/health":
                self.reply(200, b"")
            elif self.path == "/v1/models":
                data = [{"id": options.served_model_name, "max_model_len": options.max_model_len}]
                self.reply(200, json.dumps({"data": data}).encode())
            elif self.path == "/metrics":
                text = f'vllm:iteration_tokens_total_count{{engine="0"}} {float(engine.steps)}\n'
                self.reply(200, text.encode(), "text/plain")
            else:
                self.reply(404, b"{}")

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            engine.running += 1
            try:
                for _ in range(int(request.get("max_tokens", 16))):
                    engine.step()
            except TimeoutError:
                self.reply(500, b'{"error":{"message":"EngineCore encountered an issue.","code":500}}')
                log("(EngineCore pid=1) ERROR 11-29 19:12:12 [core.py:1] EngineDeadError")
                os._exit(0)
            finally:
                engine.running -= 1
            self.reply(200, json.dumps({"choices": [{"text": "x", "finish_reason": "length"}]}).encode())

        def log_message(self, *_: object) -> None:
            return

    return Api


def serve(engine: Engine, options: argparse.Namespace) -> None:

    server = ThreadingHTTPServer((options.host, options.port), make_api(engine, options))
    server.daemon_threads = True

    def end(*_: object) -> None:
        def drain() -> None:
            until = time.monotonic() + options.shutdown_timeout
            while engine.running and time.monotonic() < until:
                time.sleep(0.05)
            os._exit(0)

        threading.Thread(target=drain).start()

    signal.signal(signal.SIGTERM, end)
    log("INFO Application startup complete.")
    server.serve_forever()


def head(options: argparse.Namespace) -> None:
    store = socket.socket()
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        store.bind(("", options.master_port))
    except OSError as error:
        log(f"ERROR {error}")
        sys.exit(1)
    store.listen(16)
    workers = [store.accept()[0] for _ in range(options.nnodes - 1)]
    time.sleep(LOAD)
    serve(Engine(workers), options)


def worker(options: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    end = time.monotonic() + 1800
    while True:
        link = socket.socket()
        try:
            link.connect((options.master_addr, options.master_port))
            break
        except OSError:
            link.close()
            if time.monotonic() > end:
                sys.exit(1)
            time.sleep(0.2)
    while True:
        try:
            asked = link.recv(1)
        except OSError:
            asked = b""
        if not asked:
            # The head is gone, and a worker waits on: `dequeue(indefinite=True)`.
            time.sleep(3600)
            continue
        link.sendall(b"r")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("model")
    parser.add_argument("--served-model-name", default="fake")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr")
    parser.add_argument("--master-port", type=int)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0)
    options = parser.parse_args()
    # Other processes of the unit: all of them must go with it.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    if options.headless:
        worker(options)
    else:
        head(options)


main()
