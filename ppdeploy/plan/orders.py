"""Whether the nodes in another order, so with another head, would serve the goal better.

For the largest cost of all stages (throughput, context) a limit is met exactly when nodes that each take as many layers
as the limit allows cover the model; the furthest that a set of nodes can reach does not depend on how it was reached,
so all orders are tried by sets. For sums (latency) the best of each set and reach is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import inf

from ppdeploy.plan.split import WORTH, Cost, furthest

MOST_NODES = 8
"""Pipelines of more nodes keep their order unexamined."""

HALVINGS = 12
"""How exact the value of the best order is: the interval from 0 to today's value, halved so often."""

Used = tuple[int, ...]
"""How many nodes of each kind are placed."""


class Orders:
    """All orders of some nodes; nodes of one kind are the same."""

    def __init__(self, nodes: Sequence[Sequence[int]], kinds: Sequence[object], layers: int, cost: Cost) -> None:
        """`nodes` holds the stages that each node has today, by which `cost` knows its GPUs; `kinds` its kind."""
        self.layers = layers
        self.cost = cost
        self.members: dict[object, list[int]] = {}
        for index, kind in enumerate(kinds):
            self.members.setdefault(kind, []).append(index)
        self.stages = [list(nodes[indices[0]]) for indices in self.members.values()]
        self.counts: Used = tuple(len(indices) for indices in self.members.values())
        self.total = sum(len(stages) for stages in nodes)

    def best_maximum(self, today: float) -> tuple[float, list[int]] | None:
        """Return the least largest cost of any order, and that order as indices of nodes.

        None where none is better than `today` by more than WORTH. Where today's order cannot be (infinity), the first
        that can, with a cost that says nothing.
        """
        high = today * (1 - WORTH) if today < inf else sys.float_info.max
        found = self._cover(high)
        if found is None:
            return None
        low = 0.0
        for _ in range(HALVINGS if today < inf else 0):
            middle = (low + high) / 2
            better = self._cover(middle)
            if better is None:
                low = middle
            else:
                high, found = middle, better
        return high, self._indices(found)

    def _cover(self, limit: float) -> list[int] | None:
        """Return kinds in an order whose stages cover all layers, none above the limit; None when there is none."""
        start = tuple(0 for _ in self.counts)
        reached: dict[Used, tuple[int, list[int]]] = {start: (0, [])}
        for _ in range(sum(self.counts)):
            following: dict[Used, tuple[int, list[int]]] = {}
            for used, (layer, path) in reached.items():
                for kind, most in enumerate(self.counts):
                    if used[kind] == most:
                        continue
                    stop = self._reach(used, kind, layer, limit)
                    after = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                    if stop and (after not in following or stop > following[after][0]):
                        following[after] = (stop, [*path, kind])
            reached = following
        return next((path for layer, path in reached.values() if layer == self.layers), None)

    def _reach(self, used: Used, kind: int, layer: int, limit: float) -> int:
        """Return how far the stages of one more node reach from a layer; 0 when one of them cannot have any layer."""
        rest = self.total - self._stages_of(used)
        for stage in self.stages[kind]:
            rest -= 1
            # Every later stage needs a layer, and the last one must take all that are left.
            stop = furthest(stage, layer, self.layers - rest, self.cost, limit)
            if stop <= layer or (rest == 0 and stop < self.layers):
                return 0
            layer = stop
        return layer

    def best_sum(self, today: float) -> tuple[float, list[int]] | None:
        """Return the least sum of costs of any order, and that order; None where none is better by more than WORTH."""
        start = tuple(0 for _ in self.counts)
        reached: dict[Used, dict[int, tuple[float, list[int]]]] = {start: {0: (0.0, [])}}
        for _ in range(sum(self.counts)):
            following: dict[Used, dict[int, tuple[float, list[int]]]] = {}
            for used, places in reached.items():
                for kind, most in enumerate(self.counts):
                    if used[kind] < most:
                        after = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                        self._spread(used, kind, places, following.setdefault(after, {}))
            reached = following
        best = reached.get(self.counts, {}).get(self.layers)
        if best is None or best[0] >= today * (1 - WORTH):
            return None
        return best[0], self._indices(best[1])

    def _spread(
        self,
        used: Used,
        kind: int,
        places: dict[int, tuple[float, list[int]]],
        into: dict[int, tuple[float, list[int]]],
    ) -> None:
        """Put one more node of a kind behind every place reached, with every number of layers for its stages."""
        rest = self.total - self._stages_of(used)
        current = {layer: (value, [*path, kind]) for layer, (value, path) in places.items()}
        for stage in self.stages[kind]:
            rest -= 1
            after: dict[int, tuple[float, list[int]]] = {}
            for layer, (value, path) in current.items():
                for stop in range(self.layers if rest == 0 else layer + 1, self.layers - rest + 1):
                    more = self.cost(stage, layer, stop)
                    if more == inf:
                        break
                    if stop not in after or value + more < after[stop][0]:
                        after[stop] = (value + more, path)
            current = after
        for layer, one in current.items():
            if layer not in into or one[0] < into[layer][0]:
                into[layer] = one

    def _stages_of(self, used: Used) -> int:
        return sum(count * len(stages) for count, stages in zip(used, self.stages, strict=True))

    def _indices(self, kinds: Sequence[int]) -> list[int]:
        """Return nodes for an order of kinds; of one kind those first that come first today."""
        waiting = [list(indices) for indices in self.members.values()]
        return [waiting[kind].pop(0) for kind in kinds]
