"""A unit's processes as the kernel lists them, whatever systemd says of the unit (rule 3)."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_ROOTS = ("/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup")


class NoCgroupError(Exception):
    """No mounted hierarchy shows this process where systemd says that it is."""


def find_root(own_group: str) -> Path:
    """Return the folder below which systemd's control groups lie; `own_group` is this unit's `ControlGroup`.

    Hosts have one hierarchy, two, or a part of another machine's (containers): the right one lists this
    process.
    """
    own = str(os.getpid())
    shown = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    prefixes = {""}
    prefixes |= {path[: -len(own_group)] for _, _, path in shown if own_group and path.endswith(own_group)}
    for root in _ROOTS:
        for prefix in sorted(prefixes):
            base = Path(root + prefix)
            with contextlib.suppress(OSError):
                if own in (Path(f"{base}{own_group}") / "cgroup.procs").read_text(encoding="ascii").split():
                    return base
    raise NoCgroupError(f"no control group hierarchy lists this process in {own_group or '/'}")


def processes(group: Path) -> set[int]:
    """Return the process ids in a control group and all groups below it; none when it does not exist.

    Raises `OSError` when a group is there but cannot be read: then nothing is known.
    """
    found: set[int] = set()
    for folder, _, names in os.walk(group, onerror=_unless_gone):
        if "cgroup.procs" in names:
            try:
                found.update(int(word) for word in (Path(folder) / "cgroup.procs").read_text().split())
            except OSError as error:
                _unless_gone(error)
    return found


def stuck(pids: set[int]) -> str:
    """Return the first of some processes with its state, such as `process 4711 vllm, state D`."""
    for pid in sorted(pids):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            name, _, rest = text.partition("(")[2].rpartition(")")
            return f"process {pid} {name}, state {rest.split()[0]}"
    return ""


def resident_bytes(pids: set[int]) -> int:
    """Return the resident memory of some processes in bytes; memory that they share counts once for each."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _unless_gone(error: OSError) -> None:
    # A group that is removed between opening and reading its list says ENODEV.
    if error.errno not in {errno.ENOENT, errno.ENODEV}:
        raise error
