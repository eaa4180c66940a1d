"""How the rows of the fault table look at a gang: how long what took, and what a client got."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from tests.faults.deploy import API_PORT, Gang

BACK = 15.0
"""Seconds that a recovery may take beside the start of the ranks itself."""

SLACK = 3.0
"""Times the seconds aimed at, after which a test fails: the machines are shared. The figures are printed always."""

PATIENCE = 300.0
"""Seconds in which ranks start on a busy machine; a hang of the gang is what exceeds it."""

MEASURED: list[tuple[str, str]] = []
"""What each row of this run came to: the fault, and the figures. `conftest.py` prints it as the table."""


@dataclass
class Course:
    """How the gang went through a fault, in seconds: until it was seen, from there to the launch, the start itself."""

    seen: float
    pause: float
    start: float

    def __str__(self) -> str:
        return f"seen {self.seen:.1f} s, launched {self.pause:.1f} s later, serving {self.start:.1f} s after that"


def tell(fault: str, what: object) -> None:
    """Note what a row came to, and print it at once."""
    MEASURED.append((fault, str(what)))
    sys.stdout.write(f"\n{fault}: {what}\n")
    sys.stdout.flush()


def generation(gang: Gang) -> int:
    """Return the number of the gang's generation."""
    return int(gang.status(gang.head)["generation"][0])


def failures(gang: Gang) -> int:
    """Return how many failures count against the budget."""
    return len(gang.status(gang.head)["failures"])


def lost(gang: Gang) -> bool:
    """Whether the gang no longer serves."""
    return gang.phase() != "serving"


def at(gang: Gang, node: str, script: str) -> float:
    """Run a script on a host and return when, in seconds since boot; all lab hosts share that clock."""
    return float(gang.shell(node, f"cut -d' ' -f1 /proc/uptime; {script}").split()[0])


def kill_main(gang: Gang, node: str) -> float:
    """Kill the main process of a host's rank, and return when."""
    return at(gang, node, f"kill -KILL {gang.main_pid(node)}")


def course(gang: Gang, since: float) -> Course:
    """Wait until the gang serves again after a fault at `since`, and return its course by the head's own clock."""

    def recovered() -> list[dict[str, Any]]:
        changes = [change for change in gang.history() if change["at"] > since]
        done = changes and changes[-1]["phase"] == "serving" and any(c["phase"] == "starting" for c in changes)
        return changes if done else []

    gang.wait(lambda: bool(recovered()), PATIENCE)
    changes = recovered()
    launched = max(change["at"] for change in changes if change["phase"] == "starting")
    return Course(changes[0]["at"] - since, launched - changes[0]["at"], changes[-1]["at"] - launched)


_ASK = """
import http.client, sys
c = http.client.HTTPConnection("127.0.0.1", {port}, timeout={seconds})
try:
    c.request("POST", "/v1/completions", {body!r}, {{"Content-Type": "application/json"}})
    print(c.getresponse().status)
except TimeoutError:
    print("timeout")
except (OSError, http.client.HTTPException):
    print("000")
"""


def ask_for(gang: Gang, tokens: int, seconds: float = 60.0) -> str:
    """Ask for tokens on the head and return the status, `000` for a broken connection, or `timeout`."""
    body = json.dumps({"model": gang.model, "prompt": "x", "max_tokens": tokens, "ignore_eos": True})
    script = _ASK.format(port=API_PORT, seconds=seconds, body=body)
    return gang.lab.exec_ssh(gang.head, ["python3", "-c", script], check=False, timeout=seconds + 60).stdout.strip()


class Stream:
    """A request that takes longer than a fault: it is under way when the fault strikes."""

    def __init__(self, gang: Gang, tokens: int | None = None) -> None:
        self.status = ""
        self.ended = 0.0
        self._gang = gang
        self._tokens = tokens or gang.long_request
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        time.sleep(2.0)

    def _ask(self) -> None:
        self.status = ask_for(self._gang, self._tokens)
        self.ended = time.monotonic()

    def end(self, seconds: float) -> None:
        """Wait until the request has ended."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"a client still hangs after {seconds:.0f} s"
