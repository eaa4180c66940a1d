"""Programs of this machine that a bundle is made with."""

from __future__ import annotations

import os
import subprocess


class CommandError(Exception):
    """A program that ended with an error; whoever ran it says in a sentence what that means."""

    def __init__(self, out: str, err: str) -> None:
        """Keep what it said: `said` is stderr, or stdout where that is all, and `everything` is both."""
        super().__init__(err or out)
        self.said = err.strip() or out.strip()
        self.everything = f"{out}\n{err}".strip()


def run(command: list[str]) -> str:
    """Run a program, in English and without a terminal; return its stdout, or raise CommandError."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        raise CommandError(done.stdout, done.stderr)
    return done.stdout
