"""The rank's systemd unit: seen through the kernel, started with a ticket, ended by SIGKILL or gently.

`systemctl` runs in a thread of its own, one call after the other, and always with --no-block: the control
loop never waits for it (rule 24). What systemd said before the last change counts as not known.
"""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppdeploy.agent import cgroup, ticket
from ppdeploy.agent.clock import later, now
from ppdeploy.agent.ready import gpu_residue
from ppdeploy.agent.sight import RankSight
from ppdeploy.agent.ticket import BLANK, Ticket

_PROPERTIES = "ActiveState,SubState,Job,MainPID,Result,ExecMainCode,ExecMainStatus,ControlGroup"
_SETTLING = ("activating", "deactivating", "reloading")
_REFRESH = 30.0
_RETRY = 0.3
_CALL_LIMIT = 20.0
_SHOW_FAILED = "systemctl show: "


@dataclass(frozen=True)
class Shown:
    """What `systemctl show` said, and when it was asked."""

    asked_at: float
    active: str = ""
    job: str = ""
    main_pid: int = 0
    result: str = ""
    code: str = ""
    status: str = ""
    group: str = ""

    @property
    def busy(self) -> bool:
        """Whether systemd still has something to do for the unit."""
        return self.job not in {"", "0"} or self.active in _SETTLING


class RankUnit:
    """The one rank unit of this node. All methods return at once."""

    def __init__(
        self, unit: str, ticket_path: Path, consumed_path: Path, device: str, wake: Callable[[], None]
    ) -> None:
        self._unit = unit
        self._ticket = ticket_path
        self._consumed = consumed_path
        self._device = device
        self._wake = wake
        self._root: Path | None = None
        self._shown = Shown(asked_at=float("-inf"))
        self._dirty_at = now()
        self._pids: set[int] = set()
        self._last_pids: set[int] = set()
        self._had_ticket = False
        self._killed_at = float("-inf")
        self._residue = ""
        self._trouble = ""
        self._calls: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        self._queued: set[str] = set()
        self._again_soon = False
        self._group = ""
        threading.Thread(target=self._work, name="systemctl", daemon=True).start()
        self._refresh()

    # What the control loop uses.

    def look(self) -> RankSight:
        """Return the rank as it is now. The order matters: first the ticket, then systemd, then the processes."""
        lying = ticket.read(self._ticket)
        if self._had_ticket and lying == BLANK:
            self._changed()
        self._had_ticket = lying != BLANK
        consumed = ticket.read(self._consumed)
        shown = self._shown
        try:
            pids = self._read_pids(shown)
        except (OSError, cgroup.NoCgroupError) as error:
            return RankSight(known=False, stuck=f"the unit's processes cannot be read: {error}")
        if self._pids and not pids:
            self._last_pids = self._pids
            self._changed()
        self._pids = pids
        fresh = shown.asked_at > self._dirty_at
        known = bool(pids) or fresh
        if known and not pids and now() - shown.asked_at > _REFRESH:
            self._refresh()
        lingering = bool(pids) and now() - self._killed_at > 2.0 and self._killed_at > self._dirty_at - 60.0
        return RankSight(
            known=known,
            processes=len(pids),
            # A unit that systemd still counts as running is not over, whatever the kernel lists: no start would start.
            job=not pids and (shown.busy or shown.active == "active"),
            ticket=lying.generation,
            running=consumed.generation,
            release=consumed.release,
            main_gone=fresh and bool(pids) and shown.main_pid != 0 and shown.main_pid not in pids,
            residue=self._residue,
            stuck=cgroup.stuck(pids) if lingering else "",
            code=_code(shown),
            end=self._trouble or _end(shown),
            memory_bytes=0,
        )

    @property
    def main_pid(self) -> int:
        """The main process as systemd last named it, 0 for none."""
        return self._shown.main_pid

    @property
    def pids(self) -> set[int]:
        """The processes at the last look."""
        return self._pids

    def start(self, one: Ticket) -> None:
        """Issue the ticket and queue the start; raise `OSError` when the ticket cannot be written."""
        ticket.issue(self._ticket, one)
        self._had_ticket = True
        self._trouble = ""
        self._killed_at = float("-inf")
        self._changed()
        # A stop that comes after this start must not count as queued already.
        self._queued.discard("stop")
        self._calls.put(("start", "--no-block", self._unit))

    def kill(self) -> None:
        """Revoke the ticket, and have systemd kill every process of the unit and drop its job.

        The agent itself has no right to signal another user's processes.
        """
        ticket.revoke(self._ticket)
        self._killed_at = now()
        self._changed()
        self._queue("kill", "--signal=SIGKILL", self._unit)
        self._queue("stop", "--no-block", self._unit)

    def drain(self) -> None:
        """Stop the unit gently, within its own time limit."""
        ticket.revoke(self._ticket)
        self._changed()
        self._queue("stop", "--no-block", self._unit)

    # The thread that talks to systemd.

    def _changed(self) -> None:
        """Note that what systemd said is old now, and ask again."""
        self._dirty_at = now()
        self._refresh()

    def _refresh(self) -> None:
        self._queue("show")

    def _refresh_soon(self, seconds: float) -> None:
        """Ask again in a while. One timer is enough: with one for each answer they would become more and more."""
        if not self._again_soon:
            self._again_soon = True
            later(seconds, self._again)

    def _again(self) -> None:
        self._again_soon = False
        self._refresh()

    def _queue(self, *call: str) -> None:
        """Queue a call, unless the same one waits already: a slow systemd must not be owed ever more of them."""
        if call[0] not in self._queued:
            self._queued.add(call[0])
            self._calls.put(call)

    def _read_pids(self, shown: Shown) -> set[int]:
        if shown.group:
            self._group = shown.group
        if not self._group:
            return set()
        if self._root is None:
            # A group that cannot be looked into may be full: nothing seen is not nothing there.
            raise cgroup.NoCgroupError("the control groups' root is not known yet")
        return cgroup.processes(Path(f"{self._root}{self._group}"))

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            # From here on the next such call is another one.
            self._queued.discard(call[0])
            if call != ("show",):
                problem = _systemctl(*call)[1]
                if problem and call[0] == "start":
                    # No job means no start: without its ticket the rank is absent, and the reason is told.
                    ticket.revoke(self._ticket)
                    self._trouble = f"systemctl start: {problem}"
                self._dirty_at = now()
            self._show()
            self._wake()

    def _show(self) -> None:
        if self._root is None:
            self._find_root()
        asked = now()
        text, problem = _systemctl("show", "-p", _PROPERTIES, self._unit)
        if problem:
            self._trouble = f"{_SHOW_FAILED}{problem}"
            self._refresh_soon(_RETRY * 10)
            return
        if self._trouble.startswith(_SHOW_FAILED):
            # It answers again, so how the rank ended is not unknown for that.
            self._trouble = ""
        values = dict(line.partition("=")[::2] for line in text.splitlines())
        shown = Shown(
            asked_at=asked,
            active=values.get("ActiveState", ""),
            job=values.get("Job", ""),
            main_pid=int(values.get("MainPID", "0") or 0),
            result=values.get("Result", ""),
            code=values.get("ExecMainCode", ""),
            status=values.get("ExecMainStatus", ""),
            group=values.get("ControlGroup", ""),
        )
        if self._device == "cuda" and not shown.main_pid and self._last_pids:
            self._residue = gpu_residue(self._last_pids)
            if not self._residue:
                self._last_pids = set()
        self._shown = shown
        if shown.busy or self._residue or (shown.active == "active" and not self._pids):
            self._refresh_soon(_RETRY)
        elif self._root is None:
            self._refresh_soon(_RETRY * 10)

    def _find_root(self) -> None:
        own = _own_unit()
        text, _ = _systemctl("show", "-p", "ControlGroup", own) if own else ("", "")
        try:
            self._root = cgroup.find_root(text.strip().partition("=")[2])
        except (OSError, cgroup.NoCgroupError) as error:
            self._trouble = str(error)


def _own_unit() -> str:
    """Return the unit that this process runs in, by its control group."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        name = line.rsplit("/", 1)[-1]
        if name.endswith(".service"):
            return name
    return ""


def _systemctl(*words: str) -> tuple[str, str]:
    """Return what systemctl printed and, when it failed, why."""
    try:
        done = subprocess.run(["systemctl", *words], capture_output=True, text=True, timeout=_CALL_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    return done.stdout, "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def _code(shown: Shown) -> int | None:
    if not shown.status.isdigit():
        return None
    # CLD_EXITED is 1; 2 and 3 are ends by a signal, told as a negative number as elsewhere in Python.
    return int(shown.status) if shown.code in {"", "0", "1"} else -int(shown.status)


def _end(shown: Shown) -> str:
    """Say in words how the last main process ended."""
    if shown.result == "oom-kill":
        return "the kernel killed it for want of memory (OOM)"
    code = _code(shown)
    if code is None:
        return ""
    if shown.result not in {"", "success"} and code == 0 and shown.code == "0":
        # The main process never began: the step before it refused, and said why.
        return "its start was refused, see the journal of its unit"
    return f"killed by signal {-code}" if code < 0 else f"exited with code {code}"
