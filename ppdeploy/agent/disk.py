"""Whether the file system that holds the agent's state can still be written: said early, not at the next failure."""

from __future__ import annotations

import os
from pathlib import Path

LEAST = 1 << 20
"""Free bytes below which a file system counts as full: kept journals and a release no longer fit."""


def trouble(folder: Path) -> str:
    """Return why nothing more can be written to `folder`, empty when it can. What runs is not touched by either."""
    try:
        system = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"
    if system.f_flag & os.ST_RDONLY:
        return f"the file system of {folder} is read-only; see `dmesg`, then remount it"
    if system.f_bavail * system.f_frsize < LEAST:
        return f"the file system of {folder} is full; free some space"
    return ""
