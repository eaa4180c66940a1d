"""One apply at a time per cluster: a lock that names its holder and that the kernel drops with it."""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from ppdeploy.errors import BlockedError


def lock_folder() -> Path:
    """Return the folder of all locks: state, no cache, for a deleted lock would let a second apply in."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ppdeploy" / "locks"


@contextmanager
def cluster_lock(inventory: Path, verb: str) -> Iterator[None]:
    """Hold the lock of the cluster that `inventory` describes, or raise BlockedError naming who holds it.

    A cluster is an inventory folder, so a file of it and the folder itself share one lock, by whatever path.
    """
    real = inventory.resolve()
    cluster = real if real.is_dir() else real.parent
    folder = lock_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{hashlib.sha256(str(cluster).encode()).hexdigest()[:16]}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockedError(
                f"another ppdeploy is at work on this cluster: {_holder(handle)}",
                where=str(cluster),
                remedy="wait for it, or end it with Ctrl-C in its terminal",
            ) from None
        os.ftruncate(handle, 0)
        holder = {
            "pid": os.getpid(),
            "user": getpass.getuser(),
            "verb": verb,
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        os.pwrite(handle, json.dumps(holder).encode(), 0)
        # The file stays: removing it would let a waiting process lock a file that nobody else sees.
        yield
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
        return f"`ppdeploy {holder['verb']}` of {holder['user']}, pid {holder['pid']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # locked, but not yet written
        return "it has just started"
