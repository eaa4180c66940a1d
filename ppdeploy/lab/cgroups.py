"""Control groups of the lab: a host's own group in every mounted hierarchy, cgroup v1, hybrid and v2 alike.

Without a group of its own in each hierarchy, hosts share one tree and two units of one name are one group.
The groups also say exactly which processes are the lab's, whatever happened to the process that started them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from ppdeploy.errors import ApplyError, BlockedError
from ppdeploy.lab.keeper import start_time


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup hierarchy: its folder, whether it is v2, and its v1 controllers."""

    folder: Path
    v2: bool
    controllers: frozenset[str]


def parse_hierarchies(mountinfo: str) -> list[Hierarchy]:
    """Return the cgroup hierarchies in the text of /proc/self/mountinfo (its format: proc(5))."""
    found: dict[Path, Hierarchy] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or len(tail) < 3 or tail[0] not in {"cgroup", "cgroup2"}:
            continue
        folder = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4]))
        options = frozenset(tail[2].split(",")) - {"rw", "ro"}
        found[folder] = Hierarchy(folder, tail[0] == "cgroup2", options)
    return list(found.values())


class CgroupTree:
    """The groups of one lab: `NAME` in every hierarchy, and one group a host (or purpose) below it."""

    def __init__(self, name: str, hierarchies: list[Hierarchy] | None = None) -> None:
        if hierarchies is None:
            mounts = Path("/proc/self/mountinfo")
            # No Linux, no such file: the verbs say so themselves, in a sentence.
            hierarchies = parse_hierarchies(mounts.read_text(encoding="utf-8")) if mounts.exists() else []
        self.name = name
        self.hierarchies = hierarchies

    def create(self, group: str) -> None:
        """Make `group` in every hierarchy; one that exists stays as it is."""
        if not self.hierarchies:
            raise BlockedError(
                "no control groups are mounted on this machine", remedy="mount cgroup2 on /sys/fs/cgroup"
            )
        for hierarchy in self.hierarchies:
            parent = hierarchy.folder
            for part in (self.name, group):
                if hierarchy.v2:
                    self._enable_controllers(parent)
                folder = parent / part
                folder.mkdir(exist_ok=True)
                if "cpuset" in hierarchy.controllers:
                    # A new v1 cpuset is empty, and refuses processes until it has processors and memory
                    # nodes.
                    for name in ("cpuset.cpus", "cpuset.mems"):
                        (folder / name).write_text((parent / name).read_text(encoding="ascii"), encoding="ascii")
                parent = folder

    @staticmethod
    def _enable_controllers(folder: Path) -> None:
        """Pass all controllers of a v2 group on to the groups below it; the kernel may refuse one."""
        for controller in (folder / "cgroup.controllers").read_text(encoding="ascii").split():
            # Refused where processes sit in the group itself; a limit that needs it then says so.
            with contextlib.suppress(OSError):
                (folder / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")

    def procs_files(self, group: str) -> list[str]:
        """Return the files to write a process id to, to put it into `group` in every hierarchy."""
        return [str(hierarchy.folder / self.name / group / "cgroup.procs") for hierarchy in self.hierarchies]

    def children(self) -> set[str]:
        """Return the names of the lab's groups."""
        tops = [hierarchy.folder / self.name for hierarchy in self.hierarchies]
        return {child.name for top in tops if top.is_dir() for child in top.iterdir() if child.is_dir()}

    def pids(self, group: str = "") -> set[int]:
        """Return the processes in `group` and below it (in the whole lab where none is given)."""
        found: set[int] = set()
        for hierarchy in self.hierarchies:
            for folder, _, _ in os.walk(hierarchy.folder / self.name / group):
                with contextlib.suppress(OSError):
                    found.update(map(int, (Path(folder) / "cgroup.procs").read_text(encoding="ascii").split()))
        # 0 stands for a process outside our process id namespace, which the lab never has.
        return found - {0, os.getpid()}

    def kill(self, group: str = "", seconds: float = 20) -> None:
        """Kill every process of `group` and wait until all are gone, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        seen: dict[int, int | None] = {}
        while True:
            pids = self.pids(group)
            for pid in pids:
                seen.setdefault(pid, start_time(pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # A group no longer lists a process that has begun to die and still holds its files and locks.
            pids |= {pid for pid, start in seen.items() if start is not None and start_time(pid) == start}
            if not pids:
                return
            if time.monotonic() > deadline:
                raise ApplyError(
                    "processes of the lab do not end",
                    where=f"process ids {', '.join(map(str, sorted(pids)))}",
                    remedy="see what they wait for in /proc/PID/stack, then run ppdeploy lab down again",
                )
            time.sleep(0.02)

    def remove(self, seconds: float = 10) -> None:
        """Remove all groups of the lab, which must have no process any more, within `seconds`."""
        deadline = time.monotonic() + seconds
        for hierarchy in self.hierarchies:
            top = hierarchy.folder / self.name
            while top.exists():
                for folder, _, _ in os.walk(top, topdown=False):
                    # A group stays busy for a moment after its last process: tried again below.
                    with contextlib.suppress(OSError):
                        Path(folder).rmdir()
                if top.exists() and time.monotonic() > deadline:
                    raise ApplyError("a control group cannot be removed", where=str(top))
                if top.exists():
                    time.sleep(0.02)

    def exists(self) -> bool:
        """Say whether any group of the lab exists."""
        return any((hierarchy.folder / self.name).exists() for hierarchy in self.hierarchies)

    def _memory(self, group: str) -> tuple[Path, bool]:
        for hierarchy in self.hierarchies:
            folder = hierarchy.folder / self.name / group
            if "memory" in hierarchy.controllers and not hierarchy.v2:
                return folder, False
            if hierarchy.v2 and (folder / "memory.max").exists():
                return folder, True
        raise BlockedError(
            "this machine's kernel gives the lab no memory controller",
            where=group,
            remedy="boot it with cgroup_enable=memory",
        )

    def set_memory_limit(self, group: str, limit: int | None) -> None:
        """Limit the memory of `group` to `limit` bytes, page cache included; None lifts the limit."""
        folder, v2 = self._memory(group)
        name, unlimited = ("memory.max", "max") if v2 else ("memory.limit_in_bytes", "-1")
        try:
            (folder / name).write_text(unlimited if limit is None else str(limit), encoding="ascii")
        except OSError as error:
            raise ApplyError(
                f"the memory limit of {limit} bytes was refused by the kernel",
                where=group,
                remedy=f"choose more than the host uses now ({self.memory_used(group)} bytes)",
            ) from error

    def memory_used(self, group: str) -> int | None:
        """Return the memory that `group` uses, in bytes with page cache; None where it cannot be known."""
        try:
            folder, v2 = self._memory(group)
            name = "memory.current" if v2 else "memory.usage_in_bytes"
            return int((folder / name).read_text(encoding="ascii"))
        except (BlockedError, OSError):
            return None
