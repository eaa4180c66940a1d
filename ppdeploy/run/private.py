"""The folder where one run of Ansible keeps its events: fresh, private, in memory, gone afterwards."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ppdeploy.run.interrupt import end_processes

#: Names a run in the environment of all its processes; see `interrupt.processes_marked`.
RUN_VARIABLE = "PPDEPLOY_RUN"

_PREFIX = "ppdeploy-run-"


def run_marker(folder: Path) -> str:
    """Return the assignment that every process of the run in `folder` has in its environment."""
    return f"{RUN_VARIABLE}={folder}"


def memory_folder() -> Path:
    """Return a folder in memory where one exists, so that not even deleted events reach a disk."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm"]  # noqa: S108  (mkdtemp makes the name)
    for candidate in candidates:
        if candidate and Path(candidate).is_dir() and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    return Path(tempfile.gettempdir())


@contextmanager
def private_folder() -> Iterator[Path]:
    """Give a fresh folder of mode 0700 and remove it whatever happens.

    What a killed process (SIGKILL, power) could not clean up, its folder and an Ansible that runs on without
    it, is cleaned up by the next run: the kernel drops the lock on a folder together with its holder.
    """
    parent = memory_folder()
    _end_leftovers(parent)
    fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    held = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
    path = fresh.with_name(fresh.name.removeprefix("."))
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        fresh.rename(path)  # only now may others look at it: a folder of that name without a lock is a leftover
        yield path
    finally:
        os.close(held)
        for left in (fresh, path):
            if left.exists():
                shutil.rmtree(left)


def _end_leftovers(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, in use, or being removed by another run at this moment
            if path.lstat().st_uid != os.getuid():
                continue
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_processes(run_marker(path))
                shutil.rmtree(path)
            finally:
                os.close(held)
