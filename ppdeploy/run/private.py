"""The folder where one run of Ansible keeps its events: fresh, private, in memory, gone afterwards."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "ppdeploy-run-"

#: Age in seconds from which a folder that nobody holds is a leftover; a younger one may not be locked yet.
_LEFTOVER_AGE = 60


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

    What a killed process (SIGKILL, power) could not remove is removed here by the next run: a folder in use
    is held by a lock that the kernel drops with its process.
    """
    parent = memory_folder()
    _remove_leftovers(parent)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(held)
        shutil.rmtree(path)


def _remove_leftovers(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or another run removes it at this moment
            state = path.lstat()
            if state.st_uid != os.getuid() or time.time() - state.st_mtime < _LEFTOVER_AGE:
                continue
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(held)
