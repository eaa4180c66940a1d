"""How often the gang may fail by itself, and how long it pauses between two generations (rules 14 and 17)."""

from __future__ import annotations

from ppdeploy.agent.records import Failure
from ppdeploy.agent.settings import Settings


def recent(failures: tuple[Failure, ...], now: float, settings: Settings) -> tuple[Failure, ...]:
    """Return the failures that still count."""
    return tuple(failure for failure in failures if now - failure.at <= settings.budget_window)


def exhausted(failures: tuple[Failure, ...], now: float, settings: Settings) -> bool:
    """Whether the gang has failed by itself too often to be started again without a person."""
    return len(recent(failures, now, settings)) >= settings.budget


def pause(streak: int, settings: Settings) -> float:
    """Return the pause in seconds after `streak` generations in a row that did not settle."""
    # The exponent is bounded: a pipeline that waits for weeks must not overflow a float.
    return float(min(settings.backoff_limit, settings.backoff_first * 2.0 ** min(max(streak - 1, 0), 30)))
