"""Whether the engine still makes progress: one criterion, a canary without any iteration (rules 19 and 20).

`vllm:iteration_tokens_total_count` counts engine steps; any movement proves that all stages work, whoever
asked for the tokens. A gauge of running requests proves nothing: it goes stale after aborts, and is 0
while a first request hangs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppdeploy.agent.settings import Settings

_NEVER = float("-inf")


@dataclass(frozen=True)
class ApiSight:
    """What was seen of the head's own API since the last loop.

    `counter` is the iteration counter (None: not read this time, which is unknown, not zero). `canary_id` and
    `canary_seconds` name the canary that last came back whole and how long it took.
    """

    healthy: bool = False
    counter: float | None = None
    canary_id: int = 0
    canary_seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Progress:
    """The proofs so far; times are seconds of the agent's clock. A new generation starts with a new one."""

    began: float
    counter: float | None = None
    moved_at: float = _NEVER
    good_at: float = _NEVER
    canary_id: int = 0
    canary_at: float = _NEVER
    returned: int = 0
    limit: float = 15.0


def begin(now: float, settings: Settings, limit: float = 0.0) -> Progress:
    """Return the progress of an engine of which nothing has been seen yet.

    `limit` (seconds) is what an earlier life of the agent measured for this very generation, 0 for none.
    """
    return Progress(began=now, good_at=now, limit=max(settings.stall, limit))


def observe(progress: Progress, sight: ApiSight, now: float, settings: Settings) -> Progress:
    """Return the progress after one more look at the API."""
    if sight.counter is not None:
        moved = progress.counter is not None and sight.counter != progress.counter
        progress = replace(progress, counter=sight.counter, good_at=now, moved_at=now if moved else progress.moved_at)
    if sight.canary_id > progress.returned:
        # The first canary is a full-size prefill: its time sets how long a step may take here.
        if progress.returned == 0:
            progress = replace(progress, limit=max(progress.limit, settings.stall_factor * sight.canary_seconds))
        progress = replace(progress, returned=sight.canary_id, moved_at=now)
    return progress


def outstanding(progress: Progress) -> bool:
    """Whether a canary is under way that neither came back nor was overtaken by any iteration."""
    return progress.canary_id > progress.returned and progress.moved_at < progress.canary_at


def wants_canary(progress: Progress, now: float, settings: Settings) -> bool:
    """Whether to send a canary: nothing has moved for a while and none is under way."""
    return not outstanding(progress) and now - max(progress.moved_at, progress.began) >= settings.canary_idle


def sent(progress: Progress, now: float) -> Progress:
    """Return the progress with one more canary on its way."""
    return replace(progress, canary_id=progress.canary_id + 1, canary_at=now)


def proof_age(progress: Progress, now: float) -> float:
    """Seconds since tokens were last proven, infinite when never."""
    return now - progress.moved_at


def fresh(progress: Progress, now: float, settings: Settings) -> bool:
    """Whether the last proof is as young as it would be on a healthy idle engine."""
    return proof_age(progress, now) <= settings.canary_idle + progress.limit


def failure(progress: Progress, now: float, settings: Settings) -> tuple[str, ...]:
    """Return the reason why the engine counts as dead, or nothing."""
    waited = now - progress.canary_at
    if outstanding(progress) and waited >= progress.limit:
        return (f"stalled: a canary has waited {waited:.0f} s and no engine step was counted",)
    if now - progress.good_at >= settings.metrics_dead:
        return (f"the engine's /metrics has been unreadable for {now - progress.good_at:.0f} s",)
    return ()
