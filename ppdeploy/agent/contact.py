"""What one agent knows of another one: its last answer, and whether its lease has run out.

An answer that did not come says nothing about the peer's rank. The lease only starts a clean-up; safety
never rests on it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppdeploy.agent.messages import Answer
from ppdeploy.agent.settings import Settings

OK, REFUSED, SILENT, INVALID = "ok", "refused", "silent", "invalid"


@dataclass(frozen=True)
class Poll:
    """One question to a peer that has ended. `sent` is when it was asked (seconds of the agent's clock).

    `kind`: `ok`; `refused` (the host is up, its agent is not); `silent` (nothing in time, or no route);
    `invalid` (an answer that is unsigned, stale, malformed or someone else's), with the reason in
    `error`.
    """

    peer: str
    sent: float
    kind: str
    answer: Answer | None = None
    error: str = ""


@dataclass(frozen=True)
class Contact:
    """The last answer of a peer and the failed polls in a row since then."""

    answer: Answer | None = None
    heard_at: float = float("-inf")
    since: float = float("-inf")
    fails: int = 0
    kind: str = SILENT
    error: str = "not asked yet"


def begin(now: float) -> Contact:
    """Return a contact that has not been asked yet; its lease starts now."""
    return Contact(since=now)


def update(contact: Contact, poll: Poll, now: float, settings: Settings) -> Contact:
    """Return the contact after one more poll. An answer of a stuck control loop counts as none (rule 12)."""
    answer = poll.answer
    if poll.kind == OK and answer is not None:
        if answer.loop_age <= settings.lease:
            return Contact(answer=answer, heard_at=poll.sent, since=now, kind=OK, error="")
        poll = replace(poll, kind=SILENT, error=f"its control loop has been stuck for {answer.loop_age:.0f} s")
    return replace(contact, fails=contact.fails + 1, kind=poll.kind, error=poll.error)


def after_gap(contact: Contact, now: float) -> Contact:
    """Return the contact after this agent itself stood still: what was heard is void, and so are the failures."""
    return replace(contact, answer=None, since=now, fails=0, error="not asked again yet")


def restart_count(contact: Contact, now: float, settings: Settings) -> Contact:
    """Return the contact with its lease begun anew, since this agent was late itself (rule 21), unless too often."""
    if contact.answer is not None and now - contact.heard_at >= settings.late_limit:
        return contact
    return replace(contact, since=now, fails=0)


def lost(contact: Contact, now: float, settings: Settings) -> bool:
    """Whether the lease has run out: enough polls ran and failed in a row *and* the time has passed (rules 21, 22)."""
    lease = settings.lease if contact.kind == SILENT else settings.refused_lease
    return contact.fails >= settings.lease_polls and now - contact.since >= lease


def fresh(contact: Contact, now: float, settings: Settings) -> Answer | None:
    """Return the peer's answer while it may still be believed, else None."""
    if contact.answer is None or contact.fails > 0 or now - contact.heard_at > settings.lease:
        return None
    return contact.answer
