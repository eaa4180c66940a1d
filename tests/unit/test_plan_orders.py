"""All orders of nodes by sets, against trying each permutation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.plan.orders import Orders
from ppdeploy.plan.split import WORTH, Cost, costs, smallest_maximum, smallest_sum


def cost_of(speeds: Sequence[int], rooms: Sequence[int], layers: int, first_more: int, last_more: int) -> Cost:
    """Layers of one size at a node's speed, with more on the first and on the last stage; too many cannot be."""

    def cost(stage: int, first: int, stop: int) -> float:
        size = stop - first + (first_more if first == 0 else 0) + (last_more if stop == layers else 0)
        return size / speeds[stage] if size <= rooms[stage] else inf

    return cost


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, int]], int, int, int]:
    kinds = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(2, 9)), min_size=2, max_size=4))
    # Each node has one or two stages, all nodes the same number.
    each = draw(st.integers(1, 2))
    nodes = [list(range(i * each, (i + 1) * each)) for i in range(len(kinds))]
    layers = draw(st.integers(len(kinds) * each, 12))
    return nodes, kinds, layers, draw(st.integers(0, 3)), draw(st.integers(0, 3))


def by_stage(nodes: list[list[int]], kinds: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [kinds[i][0] for i, stages in enumerate(nodes) for _ in stages], [
        kinds[i][1] for i, stages in enumerate(nodes) for _ in stages
    ]


def in_order(order: Sequence[int], nodes: list[list[int]], cost: Cost) -> Cost:
    stages = [stage for index in order for stage in nodes[index]]
    return lambda stage, first, stop: cost(stages[stage], first, stop)


@settings(max_examples=150)
@given(clusters())
def test_the_best_order_is_that_of_trying_all(
    problem: tuple[list[list[int]], list[tuple[int, int]], int, int, int],
) -> None:
    nodes, kinds, layers, first_more, last_more = problem
    cost = cost_of(*by_stage(nodes, kinds), layers, first_more, last_more)
    stages = sum(map(len, nodes))
    today = smallest_maximum(stages, layers, cost)
    every = [
        smallest_maximum(stages, layers, in_order(order, nodes, cost)) for order in permutations(range(len(nodes)))
    ]
    found = Orders(nodes, kinds, layers, cost).best_maximum(today)
    if found is None:
        assert min(every) >= today * (1 - WORTH)
        return
    _, order = found
    assert sorted(order) == list(range(len(nodes)))
    reached = smallest_maximum(stages, layers, in_order(order, nodes, cost))
    assert reached < today
    if today < inf:
        assert reached == pytest.approx(min(every), rel=0.01)


@settings(max_examples=150)
@given(clusters())
def test_the_best_sum_is_that_of_trying_all(
    problem: tuple[list[list[int]], list[tuple[int, int]], int, int, int],
) -> None:
    nodes, kinds, layers, first_more, last_more = problem
    cost = cost_of(*by_stage(nodes, kinds), layers, first_more, last_more)
    stages = sum(map(len, nodes))
    wanted = [1] * (stages - 1) + [layers - stages + 1]

    def least(order: Sequence[int]) -> float:
        one = in_order(order, nodes, cost)
        split = smallest_sum(stages, layers, one, wanted)
        return sum(costs(split, one)) if split else inf

    every = [least(order) for order in permutations(range(len(nodes)))]
    found = Orders(nodes, kinds, layers, cost).best_sum(every[0])
    if found is None:
        assert min(every) >= every[0] * (1 - WORTH) or every[0] == min(every)
        return
    value, order = found
    assert value == pytest.approx(least(order), rel=WORTH)
    assert value <= min(every) * (1 + 1e-9)


def test_nodes_of_one_kind_keep_their_turn() -> None:
    cost = cost_of([1, 1, 4], [99, 99, 3], 10, 0, 2)
    found = Orders([[0], [1], [2]], ["slow", "slow", "fast"], 10, cost).best_maximum(inf)
    assert found is not None
    assert [index for index in found[1] if index != 2] == [0, 1]
