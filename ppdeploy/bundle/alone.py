"""One process at a time for a folder of the cache, which several labs and people may share."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Hold `FOLDER.lock`; call `waits` once and wait while another process holds it.

    The file stays: a lock on a file that another process removed would keep nobody out.
    """
    with folder.with_name(f"{folder.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
