"""Where verbs print: reports on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from ppdeploy.run import Redactor

#: Width of a report that goes into a file or a pipe, in characters: enough that no cell is cut.
_FILE_WIDTH = 160


class Out(Console):
    """A console on stdout that lets a closed pipe be a closed pipe: rich would end the command with code 1."""

    def on_broken_pipe(self) -> None:
        """Leave the end to `main`, which ends quietly: whoever read our output has enough."""
        raise BrokenPipeError


def program() -> str:
    """Return how this command is called here: by name where the shell finds it, else by its path, as in a new .venv."""
    called = Path(sys.argv[0])
    return os.path.relpath(called) if called.name == "ppdeploy" and not shutil.which("ppdeploy") else "ppdeploy"


def print_report(*parts: RenderableType) -> None:
    """Print tables and text on stdout."""
    console = Out(highlight=False)
    if not console.is_terminal:
        console = Out(highlight=False, width=_FILE_WIDTH)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str), markup=False)


def print_json(document: Any, redactor: Redactor | None = None, *, line: bool = False) -> None:
    """Print a document on stdout; on one line where it is the last of a stream of events."""
    safe = redactor.data(document) if redactor else document
    sys.stdout.write(json.dumps(safe, indent=None if line else 1) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a line for the person at the terminal, on stderr."""
    Console(stderr=True, highlight=False).print(text, soft_wrap=True, markup=False)
