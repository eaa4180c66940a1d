"""Programs of this machine that a bundle is made with."""

from __future__ import annotations

import os
import subprocess


class CommandError(Exception):
    """A program that ended with an error; whoever ran it says in a sentence what that means."""

    def __init__(self, said: str) -> None:
        """Keep what it said on stderr, or on stdout where that is all."""
        super().__init__(said)
        self.said = said


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
        raise CommandError(done.stderr.strip() or done.stdout.strip())
    return done.stdout
