"""One process at a time for a folder of the cache, which several labs and people may share."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def alone(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Hold `FOLDER.lock`; call `waits` once and wait while another process holds it.

    The file stays, except where nothing was begun before an error: who waited for a file that was removed takes the
    one that is there then, so that two never believe to be alone.
    """
    lock = folder.with_name(f"{folder.name}.lock")
    with contextlib.ExitStack() as stack:
        while not _is_there(stack.enter_context(lock.open("w")), lock, waits):
            pass
        try:
            yield
        except BaseException:
            if not folder.with_name(f"{folder.name}.partial").exists():
                lock.unlink(missing_ok=True)
            raise


def _is_there(stream: IO[str], lock: Path, waits: Callable[[], None]) -> bool:
    """Lock an open file; tell whether it is still the one that lies there under its name."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waits()
        fcntl.flock(stream, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(stream.fileno()), lock.stat())
    except FileNotFoundError:
        return False
