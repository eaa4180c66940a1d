"""What the tests of `ppdeploy.run` share: a project of small playbooks, and a look at processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from ppdeploy.run.events import Step

PROJECT = Path(__file__).resolve().parent / "run_project"
INVENTORY = PROJECT / "inventory.yml"


class Recorder:
    """A display that keeps its steps."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, step: Step) -> None:
        self.steps.append(step)

    def tick(self) -> None:
        pass


def command_lines() -> list[str]:
    """Return the command line of every process that can be read."""
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return lines


def wait_until(condition: Callable[[], bool], *, seconds: float = 30, what: str = "it") -> None:
    """Wait for `condition`; AssertionError when it does not come true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"{what} did not happen in {seconds} s")
