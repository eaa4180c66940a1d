"""The dynamic programming of splits: exact against trying all, and what holds for any split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.plan.layout import default_partition
from ppdeploy.plan.split import WORTH, Cost, costs, nearest_split, smallest_maximum, smallest_sum


def all_splits(stages: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut layers into stages of at least one."""
    for cuts in combinations(range(1, layers), stages - 1):
        ends = (*cuts, layers)
        yield tuple(stop - start for start, stop in zip((0, *cuts), ends, strict=True))


def table_cost(weights: Sequence[float], speeds: Sequence[float], most: float, head: float) -> Cost:
    """The cost of a run: its weights at the stage's speed, the head's on the last stage; too much cannot be."""

    def cost(stage: int, first: int, stop: int) -> float:
        size = sum(weights[first:stop]) + (head if stop == len(weights) else 0)
        return size / speeds[stage] if size <= most else inf

    return cost


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, Cost]:
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, min(4, layers)))
    weights = draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    speeds = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    most = draw(st.sampled_from([inf, 12, 20]))
    return stages, layers, table_cost(weights, speeds, most, draw(st.integers(0, 6)))


@settings(max_examples=200)
@given(problems())
def test_the_smallest_maximum_is_that_of_trying_all(problem: tuple[int, int, Cost]) -> None:
    stages, layers, cost = problem
    best = min(max(costs(split, cost)) for split in all_splits(stages, layers))
    assert smallest_maximum(stages, layers, cost) == best


@settings(max_examples=200)
@given(problems())
def test_the_nearest_split_is_that_of_trying_all(problem: tuple[int, int, Cost]) -> None:
    stages, layers, cost = problem
    own = default_partition(layers, stages)
    limit = smallest_maximum(stages, layers, cost)
    found = nearest_split(stages, layers, cost, limit, own)
    allowed = [split for split in all_splits(stages, layers) if max(costs(split, cost)) <= limit < inf]
    if not allowed:
        assert limit == inf
        return
    assert found == min(allowed, key=lambda split: (sum(abs(a - b) for a, b in zip(split, own, strict=True)), split))


@settings(max_examples=200)
@given(problems())
def test_the_smallest_sum_is_within_what_is_worth_a_change(problem: tuple[int, int, Cost]) -> None:
    stages, layers, cost = problem
    own = default_partition(layers, stages)
    best = min(sum(costs(split, cost)) for split in all_splits(stages, layers))
    found = smallest_sum(stages, layers, cost, own)
    if found is None:
        assert best == inf
        return
    assert sum(found) == layers
    assert min(found) >= 1
    reached = sum(costs(found, cost))
    assert reached == pytest.approx(best) or (found == own and reached <= best * (1 + WORTH))


def test_no_split_where_nothing_is_possible() -> None:
    assert smallest_maximum(2, 4, lambda *_: inf) == inf
    assert nearest_split(2, 4, lambda *_: inf, 1e9, (2, 2)) is None
    assert smallest_sum(2, 4, lambda *_: inf, (2, 2)) is None


def test_a_twice_as_fast_stage_gets_twice_the_layers() -> None:
    cost = table_cost([1] * 12, [1, 2], inf, 0)
    limit = smallest_maximum(2, 12, cost)
    assert nearest_split(2, 12, cost, limit, (6, 6)) == (4, 8)
