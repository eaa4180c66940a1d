"""The only clock of the agent: seconds since boot, suspension included (rule 13). Wall time is never read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path


def now() -> float:
    """Return CLOCK_BOOTTIME in seconds: it never steps, and it goes on while a machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def later(seconds: float, what: Callable[[], None]) -> None:
    """Call `what` in some seconds, from a thread that does not keep the agent from ending when it is told to."""
    timer = threading.Timer(seconds, what)
    timer.daemon = True
    timer.start()


def machine_id() -> str:
    """Return this machine's id, as facts and releases name it."""
    return Path("/etc/machine-id").read_text(encoding="ascii").strip()
