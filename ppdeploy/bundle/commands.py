"""Programs of this machine that a bundle is made with."""

from __future__ import annotations

import os
import re
import subprocess

from ppdeploy.errors import BlockedError

_FULL = re.compile(r"No space left|enough (free |disk )+space|Curl error \(23\)|Failed writing received data")
"""How apt, dnf and createrepo_c tell of a full disk; curl's error 23 is one of writing (libcurl-errors(3))."""


class CommandError(Exception):
    """A program that ended with an error; whoever ran it says in a sentence what that means."""

    def __init__(self, out: str, err: str) -> None:
        """Keep what it said: `said` is stderr, or stdout where that is all, and `everything` is both."""
        super().__init__(err or out)
        self.said = err.strip() or out.strip()
        self.everything = f"{out}\n{err}".strip()


def full_disk(program: str, said: str) -> BlockedError | None:
    """Return what it means where a program found no room for what it fetched or wrote; None where it was else."""
    line = next((line.strip() for line in said.splitlines() if _FULL.search(line)), None)
    if line is None:
        return None
    return BlockedError(
        f"{program} found no room on this machine's disk for the system packages: {line}",
        remedy="free some space, or name a folder on another disk with --out, and run it again",
    )


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
