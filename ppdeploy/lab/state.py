"""Where a lab keeps what it is: its name, its folder, its lock, and its record on disk."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeGuard

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.lab.keeper import start_time
from ppdeploy.paths import data_root

VERSION = 1
"""Of the record; one that another version wrote is not read, and its lab is cleaned away and made anew."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


def labs_folder() -> Path:
    """Return the folder of all labs of this machine: `$PPDEPLOY_LAB_DIR` or /var/lib/ppdeploy-lab.

    Not the cache folder: it must be on a file system that an overlay can write to, and is root's.
    """
    return Path(os.environ.get("PPDEPLOY_LAB_DIR") or "/var/lib/ppdeploy-lab")


def default_name(root: Path | None = None) -> str:
    """Return the name of the lab of the checkout `root` (ours): its folder's name, a hash of its path.

    `$PPDEPLOY_LAB` names another one.
    """
    if root is None and os.environ.get("PPDEPLOY_LAB"):
        return os.environ["PPDEPLOY_LAB"]
    path = (root or data_root()).resolve()
    slug = re.sub(r"[^a-z0-9]+", "-", path.name.lower()).strip("-")[:24] or "lab"
    return f"{slug}-{hashlib.sha256(str(path).encode()).hexdigest()[:6]}"


def check_name(name: str) -> str:
    """Return `name` where it can name a lab (it becomes part of folder and group names)."""
    if not _NAME.fullmatch(name):
        raise InputError(f"'{name}' cannot name a lab", remedy="use 1 to 40 of a-z, 0-9 and -, no - at the start")
    return name


def boot_id() -> str:
    """Return what names this run of the machine's kernel; process ids of another run mean nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def describe_process(pid: int) -> str:
    """Return a process as a person knows it: its id and its command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return f"process {pid}"
    command = " ".join(b" ".join(words).decode(errors="replace").split())
    return f"process {pid}, {command[:80]}"


def identity(pid: int) -> dict[str, int | None]:
    """Return what names process `pid` among all of this run of the machine."""
    return {"pid": pid, "start": start_time(pid)}


def alive(process: Any) -> TypeGuard[dict[str, int]]:
    """Say whether the process recorded by `identity` still runs."""
    return bool(process) and start_time(process["pid"]) == process["start"]


@contextmanager
def locked(path: Path, action: str, seconds: float = 10) -> Iterator[IO[str]]:
    """Hold the lock file `path` for `action`; after `seconds` of waiting refuse, naming the holder.

    The kernel lets go of it when the holder ends, however it ends. The holder may remove the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            held = file.read().strip()
            file.close()
            if time.monotonic() > deadline:
                raise BlockedError(
                    f"this lab is in use by another command: {held or 'one that has not said its name yet'}",
                    where=str(path),
                    remedy="wait for it to end and try again",
                ) from None
            time.sleep(0.05)
            continue
        try:
            if path.exists() and os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                file.truncate(0)
                file.write(f"{describe_process(os.getpid())} ({action})\n")
                file.flush()
                yield file
                return
        finally:
            file.close()


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of the lab in `folder`; None where there is none, or none that can be read."""
    try:
        record = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("version") == VERSION else None
