"""The numbers of the protocol, all in seconds unless said otherwise, with the reason of each default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Limits that the protocol works with; `agent.json` may override each by name."""

    lease: float = 6.0
    """A peer that is silent for this long is lost. Longer than a 3 s cut with the retry after it."""
    refused_lease: float = 30.0
    """The same for a peer whose host answers but whose agent does not: an agent's upgrade fits in."""
    lease_polls: int = 4
    """Polls that must have run and failed in a row before a lease can end: a stalled agent judges nobody."""
    late_tick: float = 1.0
    """A control loop later than this restarts every lease count."""
    late_limit: float = 60.0
    """A peer unheard for this long is judged all the same: a node whose every loop is late must not wait for ever."""
    gap: float = 2.0
    """After a control loop later than this (a suspended machine), nothing starts until all peers answered anew."""
    canary_idle: float = 10.0
    """Send a one-token request when no iteration has been counted for this long."""
    stall: float = 15.0
    """A canary outstanding this long without any iteration is a stall. Never less than `stall_factor` prefills."""
    stall_factor: float = 10.0
    """How many times the measured full-size prefill step a canary may take."""
    metrics_dead: float = 25.0
    """The engine's /metrics unreadable for this long is a failure."""
    budget: int = 6
    """Failures of the gang's own making within `budget_window` after which it stays `failed`."""
    budget_window: float = 1800.0
    """How long such a failure counts; powered-off time does not pass."""
    budget_reset: float = 600.0
    """A generation that served this long forgives all failures."""
    backoff_first: float = 1.0
    """The pause before the next generation; doubles for each generation in a row that did not settle."""
    backoff_limit: float = 300.0
    """The longest such pause."""
    settle: float = 20.0
    """A generation that served this long has settled: the next pause is `backoff_first` again."""
    claim: float = 20.0
    """A node that was asked to start must show that it does within this time."""
    start_timeout: float = 1800.0
    """From the ask to the first proven token."""
    drain_timeout: float = 60.0
    """How long a wanted stop waits for requests in flight."""
    kill_repeat: float = 1.0
    """Pause between two attempts to kill what is left of a rank."""
