"""The one-use start ticket: no rank starts without one, and each starts one rank (rule 2)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ppdeploy.agent.messages import NONE, GenerationId, MalformedError, generation_from_json
from ppdeploy.agent.store import read_json, write_json


class Ticket(NamedTuple):
    """What a start is allowed for: one generation, one release, this boot."""

    generation: GenerationId
    release: str
    boot_id: str


BLANK = Ticket(NONE, "", "")


class NoTicketError(Exception):
    """There is no ticket for this start; `str()` says what that means."""


def issue(path: Path, ticket: Ticket) -> None:
    """Lay a ticket down; raise `OSError`."""
    write_json(path, ticket._asdict())


def revoke(path: Path) -> None:
    """Take back a ticket that nobody has consumed; raise `OSError` for anything but there being none."""
    path.unlink(missing_ok=True)


def read(path: Path) -> Ticket:
    """Return the ticket at `path`, `BLANK` when there is none or it is unreadable."""
    data = read_json(path)
    try:
        return Ticket(generation_from_json(data["generation"]), str(data["release"]), str(data["boot_id"]))
    except (KeyError, TypeError, MalformedError):
        return BLANK


def consume(path: Path, consumed: Path, boot_id: str) -> Ticket:
    """Consume the ticket in one atomic step, so that it is good for one start only; raise `NoTicketError`."""
    try:
        path.rename(consumed)
    except OSError as error:
        raise NoTicketError(
            f"the rank has no start ticket ({path}): only the agent starts it; use `ppdeploy start`"
        ) from error
    ticket = read(consumed)
    if ticket == BLANK or ticket.boot_id != boot_id:
        raise NoTicketError(f"the start ticket is not of this boot ({consumed}): use `ppdeploy start`")
    # The rank reads it as its own, unprivileged user.
    consumed.chmod(0o644)
    return ticket
