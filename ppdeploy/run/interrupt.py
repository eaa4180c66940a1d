"""Ending Ansible cleanly when this process is told to stop: it, its workers and their ssh children."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

#: Signals that mean "stop": Ctrl-C, a service manager or CI, a closed terminal.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: Seconds that Ansible gets to end its workers after it was told to stop.
GRACE = 10.0


class Interruption:
    """Counts stop signals while it is entered, so that clean-up runs to its end.

    Only a process's main thread may set handlers; elsewhere nothing is caught and the main thread decides.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for stop in STOP_SIGNALS:
                if signal.getsignal(stop) != signal.SIG_IGN:  # nohup ignores SIGHUP: keep it so
                    self._before[stop] = signal.signal(stop, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for stop, handler in self._before.items():
            signal.signal(stop, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1


def processes_marked(marker: str) -> Iterator[int]:
    """Yield the ids of this user's processes whose environment holds the assignment `marker`.

    Ansible's workers leave its session, and an ssh master leaves its parent: the environment they inherit is
    the one trace that leads back to the run.
    """
    wanted = marker.encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError):  # another user's, or already gone
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


class Stopper:
    """ansible-runner's `cancel_callback`: one signal asks Ansible to stop, a second one kills it."""

    def __init__(
        self,
        interruption: Interruption,
        marker: str,
        *,
        grace: float = GRACE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interruption = interruption
        self._marker = marker
        self._grace = grace
        self._clock = clock
        self._deadline: float | None = None

    def __call__(self) -> bool:
        """Return True when ansible-runner shall kill the play's process group."""
        if not self._interruption.count:
            return False
        if self._deadline is None:
            self._deadline = self._clock() + self._grace
            for pid in processes_marked(self._marker):
                if _parent(pid) == os.getpid():
                    _send(pid, signal.SIGINT)  # Ansible passes it on to its workers and prints nothing more
        return self._interruption.count > 1 or self._clock() > self._deadline


def end_processes(marker: str, *, grace: float = 2.0) -> None:
    """End every process of a run that is still there, ssh masters included; return when none is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_marked(marker):
            _send(pid, number)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            if not any(True for _ in processes_marked(marker)):
                return
            time.sleep(0.05)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _parent(pid: int) -> int:
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    return 0
