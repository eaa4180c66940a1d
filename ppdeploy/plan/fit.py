"""The split that serves the goal among those that fit, and what it can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from ppdeploy.plan.layout import default_partition
from ppdeploy.plan.load import ANSWER, PROMPT, REQUESTS
from ppdeploy.plan.memory import PLENTY, Need, Place, Sizes
from ppdeploy.plan.split import WORTH, Cost, nearest_split, smallest_maximum, smallest_sum
from ppdeploy.plan.types import Capacity, Goal, StageMemory

Seconds = Callable[[int, int, int], float]
"""seconds(stage, first, stop): how long a stage takes with the layers `first` to `stop` - 1."""

SHORT_REQUEST = 4096
"""Tokens of a request of ordinary length."""


class Fit:
    """All that is asked of splits of one model over given places; answers are kept, equal places share them."""

    def __init__(self, sizes: Sizes, places: Sequence[Place], busy: Seconds, lone: Seconds) -> None:
        """`busy` and `lone` are the times of a step under load and of one request alone, on each place."""
        self.sizes = sizes
        self.places = places
        self.stages = len(places)
        self.layers = sizes.layers
        kinds: dict[tuple[object, ...], int] = {}
        #: For each stage, the first stage with the same GPU: their answers are equal.
        self.alike = [kinds.setdefault(place_kind(place), index) for index, place in enumerate(places)]
        self._needs: dict[tuple[int, int, int], Need] = {}
        self._kept: dict[tuple[Seconds, int, int, int], float] = {}
        self._busy = busy
        self._lone = lone

    def need(self, stage: int, first: int, stop: int) -> Need:
        """Return what a stage needs with the layers `first` to `stop` - 1."""
        key = (self.alike[stage], first, stop)
        if key not in self._needs:
            self._needs[key] = self.sizes.need(self.places[stage], first, stop)
        return self._needs[key]

    def needs(self, partition: Sequence[int]) -> list[Need]:
        """Return what each stage of a split needs."""
        found = []
        first = 0
        for stage, layers in enumerate(partition):
            found.append(self.need(stage, first, first + layers))
            first += layers
        return found

    def fits(self, partition: Sequence[int]) -> bool:
        """Say whether one request of the longest length can be served by a split."""
        return all(need.lacking == 0 for need in self.needs(partition))

    # ---- costs of a run of layers on a stage; each grows with the run

    def lack(self, stage: int, first: int, stop: int) -> float:
        """Bytes that are missing; 0 where the stage fits."""
        return self.need(stage, first, stop).lacking

    def scarcity(self, stage: int, first: int, stop: int) -> float:
        """One over the blocks of KV cache; infinity where the stage does not fit."""
        need = self.need(stage, first, stop)
        return inf if need.lacking or need.blocks < 1 else 1 / need.blocks

    def busy(self, blocks: int) -> Cost:
        """Return the cost in seconds of a step under load, with at least so many blocks of KV cache."""

        def cost(stage: int, first: int, stop: int) -> float:
            need = self.need(stage, first, stop)
            return inf if need.lacking or need.blocks < blocks else self._time(self._busy, stage, first, stop)

        return cost

    def lone(self, stage: int, first: int, stop: int) -> float:
        """Seconds of one request alone; infinity where the stage does not fit."""
        return inf if self.need(stage, first, stop).lacking else self._time(self._lone, stage, first, stop)

    def _time(self, seconds: Seconds, stage: int, first: int, stop: int) -> float:
        key = (seconds, self.alike[stage], first, stop)
        if key not in self._kept:
            self._kept[key] = seconds(stage, first, stop)
        return self._kept[key]

    # ---- choosing

    def blocks_for_load(self, least_scarcity: float) -> int:
        """Return the blocks of KV cache that REQUESTS ordinary requests take, or as many as any split has."""
        wanted = REQUESTS * self.sizes.kv.blocks(PROMPT + ANSWER) + 1
        return min(wanted, int(1 / least_scarcity * (1 - WORTH)))

    def choose(self, goal: Goal) -> tuple[int, ...]:
        """Return the split for a goal; where none fits, the one that lacks the least memory.

        `context`: the most KV cache. `throughput`: the shortest time of the slowest stage, with the KV cache that a
        load of REQUESTS takes, if any split has it. `latency`: the shortest time of one request alone. vLLM's own
        split stays unless another one is better by more than WORTH; of those the nearest to it is taken.
        """
        own = default_partition(self.layers, self.stages)
        scarcity = smallest_maximum(self.stages, self.layers, self.scarcity)
        if scarcity == inf:
            return self._nearest(self.lack, own, smallest_maximum(self.stages, self.layers, self.lack))
        if goal == "context":
            return self._nearest(self.scarcity, own, scarcity)
        if goal == "latency":
            return smallest_sum(self.stages, self.layers, self.lone, own) or own
        cost = self.busy(self.blocks_for_load(scarcity))
        return self._nearest(cost, own, smallest_maximum(self.stages, self.layers, cost))

    def _nearest(self, cost: Cost, own: Sequence[int], best: float) -> tuple[int, ...]:
        found = nearest_split(self.stages, self.layers, cost, best * (1 + WORTH), own)
        assert found is not None, "the best split itself is within the limit"
        return found

    # ---- what a split can hold

    def table(self, partition: Sequence[int], gpus: int) -> tuple[StageMemory, ...]:
        """Return the memory table of a split: a row for each stage, bytes of one of its `gpus` GPUs."""
        needs = self.needs(partition)
        blocks = max(min(need.blocks for need in needs), 0)
        rows = []
        first = 0
        for stage, (layers, need, place) in enumerate(zip(partition, needs, self.places, strict=True)):
            used = blocks * need.block
            fixed = place.others_bytes + need.runtime + need.weights + need.activations + need.graphs
            rows.append(
                StageMemory(
                    stage=stage,
                    host=place.host,
                    node_rank=place.node_rank,
                    first_layer=first,
                    layers=layers,
                    device=place.device,
                    gpus=gpus,
                    memory_bytes=place.memory_bytes,
                    utilization=place.utilization,
                    others_bytes=place.others_bytes,
                    runtime_bytes=need.runtime,
                    weight_bytes=need.weights,
                    activation_bytes=need.activations,
                    graph_bytes=need.graphs,
                    kv_bytes=max(need.available, 0),
                    kv_used_bytes=used,
                    free_bytes=place.memory_bytes - fixed - used,
                    kv_block_bytes=need.block,
                    kv_blocks=max(need.blocks, 0),
                    shortfall_bytes=need.lacking,
                )
            )
            first += layers
        return tuple(rows)

    def capacity(self, partition: Sequence[int], limit: int) -> Capacity:
        """Return what a split can hold, without changes; `limit` is the model's own longest context."""
        needs = self.needs(partition)
        serving, kv = self.sizes.serving, self.sizes.kv
        scarce = min(range(len(needs)), key=lambda stage: needs[stage].blocks)
        blocks = max(needs[scarce].blocks, 0)
        worst = max(range(len(needs)), key=lambda stage: needs[stage].lacking)
        # Without any cache the memory sets no limit; vLLM's scheduler then does.
        bounded = blocks < PLENTY
        full = blocks / max(self.sizes.blocks_wanted, 1) if bounded else float(serving.sequences)
        short = blocks / max(kv.blocks(min(SHORT_REQUEST, serving.max_model_len)), 1) if bounded else full
        lacking = needs[worst].lacking
        return Capacity(
            fits=lacking == 0,
            max_model_len=serving.max_model_len,
            kv_tokens=int(full * serving.max_model_len),
            longest_context=kv.longest(blocks - 1, limit) if bounded else limit,
            requests_at_max=round(full, 2),
            requests_at_4k=round(short, 2),
            limiting_stage=worst if lacking else scarce,
            shortfall_bytes=lacking,
            kv_cache_dtype=serving.kv_cache_dtype,
            batched_tokens=serving.batched_tokens,
            sequences=serving.sequences,
        )


def place_kind(place: Place) -> tuple[object, ...]:
    """Return what makes two places equal for a plan: all but whose they are."""
    return (place.device, place.memory_bytes, place.others_bytes, place.utilization, place.kv_bytes)
