"""Least squares of a few unknowns, in Levenberg's and Marquardt's way: what the speed model is fitted with."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

NUDGE = 1e-4
"""By how much an unknown is moved to see what follows."""


def least_squares(
    residuals: Callable[[Sequence[float]], Sequence[float]],
    start: Sequence[float],
    *,
    bounds: Sequence[tuple[float, float]] | None = None,
    rounds: int = 12,
) -> list[float]:
    """Return the unknowns that make the sum of the squared residuals least, found from `start` on.

    Deterministic: a fixed number of rounds, each asking for the residuals once more than there are unknowns. With
    `bounds`, (least, most) of each unknown, none leaves its own.
    """
    limits = bounds or [(float("-inf"), float("inf"))] * len(start)
    best = _within(start, limits)
    left = residuals(best)
    damping = 1e-3
    for _ in range(rounds):
        slopes = [_slope(residuals, best, left, index, limits[index]) for index in range(len(best))]
        normal = [[sum(map(operator.mul, one, other)) for other in slopes] for one in slopes]
        for index in range(len(best)):
            normal[index][index] += damping
        downhill = [-sum(map(operator.mul, slope, left)) for slope in slopes]
        trial = _within([value + move for value, move in zip(best, solve(normal, downhill), strict=True)], limits)
        found = residuals(trial)
        if _square(found) < _square(left):
            best, left, damping = trial, found, damping / 3
        else:
            damping *= 5
    return best


def _slope(
    residuals: Callable[[Sequence[float]], Sequence[float]],
    at: Sequence[float],
    left: Sequence[float],
    index: int,
    limits: tuple[float, float],
) -> list[float]:
    # Away from the bound that the unknown stands at.
    nudge = NUDGE if at[index] + NUDGE <= limits[1] else -NUDGE
    moved = [*at[:index], at[index] + nudge, *at[index + 1 :]]
    return [(after - before) / nudge for before, after in zip(left, residuals(moved), strict=True)]


def _within(values: Sequence[float], limits: Sequence[tuple[float, float]]) -> list[float]:
    return [min(max(value, least), most) for value, (least, most) in zip(values, limits, strict=True)]


def _square(values: Sequence[float]) -> float:
    return sum(value * value for value in values)


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve a small system of linear equations by elimination; the matrix is positive definite."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found
