"""Which layers go to which stage: exact dynamic programming over contiguous runs of layers.

Costs are plain numbers that a stage has for a run of layers; nothing here knows what they stand for. A cost must not
fall when a run grows, which lets most runs be skipped; infinity says that a run cannot be on that stage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import inf

Cost = Callable[[int, int, int], float]
"""cost(stage, first, stop): what it costs a stage to have the layers `first` to `stop` - 1."""

CLOSE_HALVINGS = 8
"""How near the first bound comes to the answer; the rest is exact."""

WORTH = 0.02
"""A split must be better than one nearer to vLLM's own by this share; the costs are no more exact than that."""


def furthest(stage: int, first: int, most: int, cost: Cost, limit: float) -> int:
    """Return the layer, up to `most`, before which a stage can end that starts at `first` and costs at most `limit`.

    `first` itself when it cannot have even one layer.
    """
    low, high = first, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(stage, first, middle) <= limit else (low, middle - 1)
    return low


def _greedy(stages: int, layers: int, cost: Cost, limit: float) -> tuple[int, ...] | None:
    """Return a split in which no stage costs more than `limit`: each takes all it can. None when there is none."""
    split = []
    first = 0
    for stage in range(stages):
        rest = stages - stage - 1
        stop = furthest(stage, first, layers - rest, cost, limit)
        if stop == first or (rest == 0 and stop < layers):
            return None
        split.append(stop - first)
        first = stop
    return tuple(split)


def _close_bound(stages: int, layers: int, cost: Cost) -> float:
    """Return a cost near to the least that the largest of all stages can have, and never below it."""
    split = _greedy(stages, layers, cost, sys.float_info.max)
    if split is None:
        return inf
    low, high = 0.0, max(costs(split, cost))
    for _ in range(CLOSE_HALVINGS):
        middle = (low + high) / 2
        split = _greedy(stages, layers, cost, middle)
        if split is None:
            low = middle
        else:
            high = max(costs(split, cost))
    return high


def smallest_maximum(stages: int, layers: int, cost: Cost) -> float:
    """Return the least value that the largest of all stages' costs can have; infinity when no split is possible.

    Every stage has at least one layer. Runs that cost more than a bound near to the answer are never looked at.
    """
    bound = _close_bound(stages, layers, cost)
    if bound == inf:
        return inf
    # best[stop]: the least largest cost with which the stages so far take the layers before `stop`.
    best = [0.0, *[inf] * layers]
    for stage in range(stages):
        rest = stages - stage - 1
        following = [inf] * (layers + 1)
        for first in range(stage, layers - rest):
            so_far = best[first]
            if so_far == inf:
                continue
            for stop in range(layers if rest == 0 else first + 1, layers - rest + 1):
                value = cost(stage, first, stop)
                if value > bound:
                    break
                following[stop] = min(following[stop], max(value, so_far))
        best = following
    return best[layers]


def nearest_split(stages: int, layers: int, cost: Cost, limit: float, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return, of the splits in which no stage costs more than `limit`, the one nearest to `wanted`.

    Near is the sum over stages of the layers more or fewer; of two as near, the one whose first stages are smaller.
    None when there is no such split.
    """

    def allowed(stage: int, first: int, stop: int) -> float:
        return 0 if cost(stage, first, stop) <= limit else inf

    return _least_sum(stages, layers, allowed, wanted)


def smallest_sum(stages: int, layers: int, cost: Cost, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return the split with the least sum of costs (seconds, told apart to 1e-12); None when no split is possible.

    `wanted` itself where no split is better by WORTH; of equal ones the nearest to it.
    """

    def picoseconds(stage: int, first: int, stop: int) -> float:
        value = cost(stage, first, stop)
        return value if value == inf else round(value * 1e12)

    split = _least_sum(stages, layers, picoseconds, wanted)
    if split is None:
        return None
    return tuple(wanted) if sum(costs(wanted, cost)) <= sum(costs(split, cost)) * (1 + WORTH) else split


def _least_sum(stages: int, layers: int, cost: Cost, wanted: Sequence[int]) -> tuple[int, ...] | None:
    """Return the split with the least sum of costs, then the least change from `wanted`, then the smallest stages."""
    best: list[tuple[float, int, tuple[int, ...]] | None] = [(0, 0, ()), *[None] * layers]
    for stage in range(stages):
        rest = stages - stage - 1
        following: list[tuple[float, int, tuple[int, ...]] | None] = [None] * (layers + 1)
        for first in range(stage, layers - rest):
            before = best[first]
            if before is None:
                continue
            for stop in range(layers if rest == 0 else first + 1, layers - rest + 1):
                value = cost(stage, first, stop)
                if value == inf:
                    break
                known = following[stop]
                ahead = (before[0] + value, before[1] + abs(stop - first - wanted[stage]))
                if known is None or ahead < known[:2] or (ahead == known[:2] and before[2] < known[2]):
                    following[stop] = (*ahead, (*before[2], stop - first))
        best = following
    found = best[layers]
    return found[2] if found else None


def costs(split: Sequence[int], cost: Cost) -> list[float]:
    """Return what each stage of a split costs."""
    found = []
    first = 0
    for stage, layers in enumerate(split):
        found.append(cost(stage, first, first + layers))
        first += layers
    return found
