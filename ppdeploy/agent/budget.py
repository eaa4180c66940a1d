"""How often the gang may fail by itself, and how long it pauses between two generations (rules 14 and 17)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ppdeploy.agent.records import Failure
from ppdeploy.agent.settings import Settings


def recent(failures: tuple[Failure, ...], now: float, settings: Settings) -> tuple[Failure, ...]:
    """Return the failures that still count."""
    return tuple(failure for failure in failures if now - failure.at <= settings.budget_window)


def with_failure(failures: tuple[Failure, ...], latest: Failure) -> tuple[Failure, ...]:
    """Return the failures with one more; only that one may still turn out to be a reboot's."""
    return (*closed(failures), latest)


def closed(failures: tuple[Failure, ...]) -> tuple[Failure, ...]:
    """Return the failures as they stay: whether a host was going down is no longer asked."""
    return tuple(replace(failure, boots=()) for failure in failures)


def without_reboot(failures: tuple[Failure, ...], boots: Mapping[str, str]) -> tuple[Failure, ...]:
    """Return the failures without the latest one, if a machine of its generation has been booted since.

    Of a host that goes down in good order the others see first that their connections break, and only later that it
    is gone. `boots` has the present boot of each machine that is heard.
    """
    if failures and any(boots.get(machine, boot) != boot for machine, boot in failures[-1].boots):
        return failures[:-1]
    return failures


def exhausted(failures: tuple[Failure, ...], now: float, settings: Settings) -> bool:
    """Whether the gang has failed by itself too often to be started again without a person."""
    return len(recent(failures, now, settings)) >= settings.budget


def pause(streak: int, settings: Settings) -> float:
    """Return the pause in seconds after `streak` generations in a row that did not settle."""
    # The exponent is bounded: a pipeline that waits for weeks must not overflow a float.
    return float(min(settings.backoff_limit, settings.backoff_first * 2.0 ** min(max(streak - 1, 0), 30)))
