"""Errors a user can cause or meet, each with the exit code that scripts rely on (DESIGN.md, command line)."""

from __future__ import annotations


class PpdeployError(Exception):
    """An error told to the user as one sentence: what is wrong, where, and what to do next.

    `exit_code` is what the `ppdeploy` command returns; `where` names the host, variable or file; `remedy` is the
    next step, a command where one exists.
    """

    exit_code = 4

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        text = what
        if where:
            text += f" ({where})"
        if remedy:
            text += f": {remedy}"
        super().__init__(text)


class InputError(PpdeployError):
    """Wrong input; no host was touched."""

    exit_code = 2


class BlockedError(PpdeployError):
    """A check says that the work cannot succeed; no host was changed."""

    exit_code = 3


class ApplyError(PpdeployError):
    """The play failed on a host that was reached."""

    exit_code = 4


class ServingError(PpdeployError):
    """The hosts are set up, but the pipeline did not serve its smoke test."""

    exit_code = 5


class RolledBackError(PpdeployError):
    """The new release failed its smoke test and the last good one serves again."""

    exit_code = 6


class UnreachableError(PpdeployError):
    """A host could not be reached or logged in to."""

    exit_code = 7
