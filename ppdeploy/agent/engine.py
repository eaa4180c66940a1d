"""The head's own API, watched from loopback: health, the iteration counter, and canaries (rules 19 and 20).

Two threads, so that a canary that hangs does not keep the counter from being read.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace

from ppdeploy.agent import wire
from ppdeploy.agent.clock import later, now
from ppdeploy.agent.progress import ApiSight

COUNTER = b"vllm:iteration_tokens_total_count"
_METRICS_LIMIT = 8 << 20
_READ_SECONDS = 5.0
_CANARY_SECONDS = 120.0
_NOTE = 200
_PREFILL = 2048
"""Tokens of one chunk when the release does not say (vLLM's default for online serving is at least this)."""


@dataclass(frozen=True)
class Target:
    """Where the API is, and how large one prefill step is (tokens)."""

    address: str
    port: int
    model: str
    chunk: int = _PREFILL
    key: str = ""


class Engine:
    """Watches one API while told to. `watch(None)` ends the watch."""

    def __init__(self) -> None:
        self._target: Target | None = None
        self._sight = ApiSight()
        self._wanted = (0, False)
        self._lock = threading.Lock()
        self._go = threading.Event()
        self._send = threading.Event()
        self.interval = 1.0
        threading.Thread(target=self._read_forever, name="metrics", daemon=True).start()
        threading.Thread(target=self._canary_forever, name="canary", daemon=True).start()

    def watch(self, target: Target | None) -> None:
        """Watch this API from now on; a change of target, or none, forgets what was seen."""
        with self._lock:
            if target == self._target:
                return
            self._target = target
            self._sight = ApiSight()
            self._wanted = (0, False)
        if target is None:
            self._go.clear()
        else:
            self._go.set()

    def forget(self) -> None:
        """Begin anew with the same target, for another generation."""
        with self._lock:
            self._sight = ApiSight()
            self._wanted = (0, False)

    def sight(self) -> ApiSight:
        """Return what was seen since the last call; a counter is told once."""
        with self._lock:
            seen = self._sight
            self._sight = replace(seen, counter=None)
            return seen

    def canary(self, number: int, *, full_size: bool) -> None:
        """Send a canary; an older one that is still out counts no more."""
        with self._lock:
            self._wanted = (number, full_size)
        self._send.set()

    def _read_forever(self) -> None:
        while True:
            self._go.wait()
            target = self._target
            if target is not None:
                self._read(target)
            threading.Event().wait(self.interval)

    def _read(self, target: Target) -> None:
        try:
            healthy = wire.get(target.address, target.port, "/health", _READ_SECONDS).status == 200
            metrics = wire.get(target.address, target.port, "/metrics", _READ_SECONDS, _METRICS_LIMIT)
            counter = read_counter(metrics.body) if metrics.status == 200 else None
            error = "" if healthy else "/health of the API is not 200"
        except (OSError, ValueError) as problem:
            healthy, counter, error = False, None, f"the API does not answer: {problem}"
        with self._lock:
            if target == self._target:
                fresh = counter if counter is not None else self._sight.counter
                self._sight = replace(self._sight, healthy=healthy, counter=fresh, error=error)

    def _canary_forever(self) -> None:
        while True:
            self._send.wait()
            self._send.clear()
            wanted, target = self._wanted, self._target
            number, full_size = wanted
            if not number or target is None:
                continue
            began = now()
            if not self._try_canary(target, number, full_size):
                # Until this one is answered or another one wanted, it is tried again: only proof counts.
                later(1.0, self._send.set)
                continue
            with self._lock:
                if wanted is self._wanted and target == self._target:
                    self._sight = replace(self._sight, canary_id=number, canary_seconds=now() - began)

    def _try_canary(self, target: Target, number: int, full_size: bool) -> bool:
        try:
            tokens = self._prompt_tokens(target) if full_size else 4
            # Other tokens each time, else the prefix cache would answer for the stages.
            prompt = [(number * 31 + index * 7) % 89 + 3 for index in range(tokens)]
            body = json.dumps({"model": target.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
            reply = wire.exchange(target.address, target.port, _post(target, body), _CANARY_SECONDS)
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as problem:
            # What /v1/models says comes from the rank, which may be in any state: it must not end this thread.
            self._note(target, f"a canary failed: {problem!r}"[:_NOTE])
            return False
        if reply.status != 200:
            self._note(target, f"a canary was answered with {reply.status}")
            return False
        return True

    def _prompt_tokens(self, target: Target) -> int:
        """Return the tokens of one full prefill step that still fits into the model's length."""
        reply = wire.exchange(target.address, target.port, _get(target, "/v1/models"), _READ_SECONDS)
        length = int(json.loads(reply.body)["data"][0].get("max_model_len") or _PREFILL)
        return max(1, min(target.chunk, length - 8))

    def _note(self, target: Target, text: str) -> None:
        with self._lock:
            if target == self._target:
                self._sight = replace(self._sight, error=text)


def read_counter(metrics: bytes) -> float | None:
    """Return the sum of the iteration counters of a Prometheus text, None when it has none."""
    values = [line.rsplit(b" ", 1)[-1] for line in metrics.splitlines() if line.startswith(COUNTER)]
    try:
        return sum(float(value) for value in values) if values else None
    except ValueError:
        return None


def _authorization(target: Target) -> str:
    return f"Authorization: Bearer {target.key}\r\n" if target.key else ""


def _get(target: Target, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{_authorization(target)}\r\n".encode()


def _post(target: Target, body: bytes) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{_authorization(target)}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
