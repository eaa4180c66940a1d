"""`make soak`: a random fault each minute under steady load, with real vLLM ranks.

It passes with no wrong answer (greedy text compared with what the same ranks wrote before the first fault), no request
that hangs, and a gang that serves at the end. The budget is far above what so many faults spend: a fault a minute is
no operation, and the default of six in half an hour would rightly end it.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ppdeploy.lab import Lab
from ppdeploy.lab.state import default_name
from tests.faults.course import PATIENCE
from tests.faults.deploy import API_PORT, UNIT, Gang, VllmGang

HANG = 60.0
"""Seconds without any answer after which a request counts as one that hangs."""
PROMPTS = ("Hello", "The capital of France is", "1, 2, 3, 4,", "Once upon a time there was a machine that")
_LOAD = (Path(__file__).parent / "load.py").read_text(encoding="utf-8")


class Load:
    """Keeps a client on the head's host, also after the host lost power, and collects its answers."""

    def __init__(self, gang: Gang) -> None:
        self.answers: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.slowest = 0.0
        self._expected: dict[str, str] = {}
        self._gang = gang
        self._ended = False
        self._client: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def learn(self) -> None:
        """Wait until every prompt was answered once; those answers are what later ones must be."""
        deadline = time.monotonic() + PATIENCE
        while len(self._expected) < len(PROMPTS):
            assert time.monotonic() < deadline, "the load got no answers before the first fault"
            time.sleep(0.5)

    def end(self) -> None:
        """Stop asking."""
        self._ended = True
        if self._client:
            self._client.terminate()
        self._thread.join()

    def _work(self) -> None:
        words = ["python3", "-c", _LOAD, str(API_PORT), self._gang.model, str(HANG), *PROMPTS]
        while not self._ended:
            command = self._gang.lab.ssh_command(self._gang.head, words)
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ) as self._client:
                assert self._client.stdout is not None
                for line in self._client.stdout:
                    self._note(json.loads(line))
            time.sleep(1.0)

    def _note(self, answer: dict[str, str]) -> None:
        self.answers[answer["status"]] += 1
        self.slowest = max(self.slowest, float(answer["seconds"]))
        if answer["status"] != "200":
            return
        expected = self._expected.setdefault(answer["prompt"], answer["text"])
        if answer["text"] != expected:
            self.wrong.append(f"{answer['prompt']!r}: {answer['text']!r} instead of {expected!r}")


def faults(gang: Gang) -> dict[str, Callable[[], object]]:
    """Return each kind of fault by its name."""
    head, worker = gang.nodes[:2]

    def stop(node: str) -> None:
        gang.shell(node, f"kill -STOP {' '.join(map(str, gang.pids(node)))}")

    def cut(seconds: float) -> None:
        gang.lab.cut(worker)
        time.sleep(seconds)
        gang.lab.heal(worker)

    def power(node: str) -> None:
        gang.lab.kill(node)
        time.sleep(5)
        gang.lab.boot(node)

    return {
        "head's rank killed": lambda: gang.shell(head, f"kill -KILL {gang.main_pid(head)}"),
        "worker's rank killed": lambda: gang.shell(worker, f"kill -KILL {gang.main_pid(worker)}"),
        "engine core killed": lambda: gang.shell(
            head, "pgrep -u ppdeploy -f '[E]ngineCor' | head -1 | xargs kill -KILL"
        ),
        "head's unit killed": lambda: gang.shell(head, f"systemctl kill --signal=SIGKILL {UNIT}"),
        "head's rank stopped": lambda: stop(head),
        "worker's rank stopped": lambda: stop(worker),
        "link cut 3 s": lambda: cut(3),
        "link cut 20 s": lambda: cut(20),
        "agents killed": lambda: [gang.shell(n, "systemctl kill -s KILL ppdeploy-agent") for n in gang.nodes],
        "worker's host lost power": lambda: power(worker),
        "head's host lost power": lambda: power(head),
    }


def soak(gang: Gang, minutes: float, seed: int) -> bool:
    """Run the soak and print its course; return whether it passed."""
    chance = random.Random(seed)  # noqa: S311  (a course that can be had again, not a secret)
    load = Load(gang)
    load.learn()
    kinds = faults(gang)
    struck: collections.Counter[str] = collections.Counter()
    end = time.monotonic() + minutes * 60
    bag: list[str] = []
    while time.monotonic() < end:
        turn = time.monotonic()
        # Each kind once before any comes again.
        bag = bag or chance.sample(sorted(kinds), len(kinds))
        fault = bag.pop()
        _say(f"{(minutes * 60 - (end - turn)):6.0f} s  {gang.phase() or '-':9} {fault}")
        if gang.healthy() or "stopped" not in fault:
            try:
                kinds[fault]()
            except Exception as error:
                # A rank that is just being started has no process to kill; anything else ends the soak.
                if gang.healthy():
                    raise
                _say(f"         there was nothing to strike: {error}"[:160])
            else:
                struck[fault] += 1
        time.sleep(max(0.0, min(60.0 - (time.monotonic() - turn), end - time.monotonic())))
    back = gang.wait(gang.healthy, PATIENCE)
    time.sleep(10)
    load.end()
    hangs = load.answers["timeout"]
    passed = not load.wrong and not hangs and gang.healthy()
    _say(
        f"soak of {minutes:.0f} min, seed {seed}: {sum(struck.values())} faults ({dict(struck)}); "
        f"answers {dict(load.answers)}, slowest {load.slowest:.1f} s; wrong {len(load.wrong)}, hangs {hangs}; "
        f"serving {back:.0f} s after the last minute; generation {gang.status(gang.head)['generation'][0]}"
    )
    for line in load.wrong[:10]:
        _say(f"wrong: {line}")
    return passed


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Boot a lab, apply, and soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    asked = parser.parse_args()
    lab = Lab(f"{default_name()}-soak")
    lab.down()
    gang = VllmGang(lab, settings={"budget": 1000, "backoff_limit": 5.0})
    try:
        gang.install()
        gang.wait(gang.healthy, PATIENCE)
        passed = soak(gang, asked.minutes, asked.seed)
    finally:
        lab.down()
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
