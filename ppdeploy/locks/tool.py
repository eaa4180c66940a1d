"""The pinned uv that builds environments on nodes. It is no part of a lock: any uv makes the same venv."""

from __future__ import annotations

from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.locks.lock import Wheel, read_wheels

FOLDER = Path(__file__).resolve().parent / "files"


def uv_wheel(machine: str) -> Wheel:
    """Return the wheel that holds the uv program for a machine (x86_64, aarch64).

    Raises InputError for a machine that ppdeploy carries no pin for.
    """
    path = FOLDER / f"uv-{machine}.txt"
    if not path.is_file():
        raise InputError(f"ppdeploy carries no uv for {machine} machines", remedy="use x86_64 or aarch64 nodes")
    return read_wheels(path, path.read_text(encoding="utf-8"))[0]
