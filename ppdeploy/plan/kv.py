"""How vLLM lays out the KV cache: blocks that all layers of a group share, and how many a request takes.

vLLM cuts the memory that a worker has left into equal blocks. A block holds, for every layer of one group, the keys
and values of some tokens (a page each); a request takes blocks of every group. Models with one kind of layer have one
group. Models that mix kinds (a window and none, a state of fixed size) have several of about equal size, which share
the pool. vLLM 0.32.0, `vllm/v1/core/kv_cache_utils.py` (`get_kv_cache_groups`, `get_kv_cache_configs`) and
`vllm/v1/kv_cache_interface.py` (`max_memory_usage_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil

from ppdeploy.model import Layer

FEW_MORE = 1.5
"""Kinds of layers whose counts differ by less than this factor get groups of the larger size (vLLM's rule)."""

BLOCK_STEP = 16
"""Tokens by which vLLM raises the block of a model with states of fixed size, so that a page holds a state."""


@dataclass(frozen=True)
class _Kind:
    """What must be equal for layers to share a group."""

    state: bool
    window: int | None
    page: int
    """Bytes of a block in one layer, of one GPU."""
    tokens: int
    """Tokens that a block covers; without meaning for a state."""


@dataclass(frozen=True)
class Group:
    """Layers whose blocks are handed out together."""

    layers: tuple[int, ...]
    state: bool
    window: int | None
    tokens: int


@dataclass(frozen=True)
class KvLayout:
    """The groups of a model, and the bytes of a block in each of its layers."""

    groups: tuple[Group, ...]
    sums: tuple[tuple[int, ...], ...]
    """For each group, the bytes of a block in all its layers before layer 0, 1, ..., N."""
    in_flight_tokens: int
    state_blocks: int

    def block_bytes(self, first: int, stop: int) -> int:
        """Return the bytes of one block on a GPU that has the layers `first` to `stop` - 1: the widest group's."""
        return max((column[stop] - column[first] for column in self.sums), default=0)

    def widest_page(self) -> int:
        """Return the bytes of one block in the layer that takes most for it."""
        return max((b - a for column in self.sums for a, b in pairwise(column)), default=0)

    def blocks(self, tokens: int) -> int:
        """Return the blocks that a request of so many tokens takes at most, over all groups."""
        return sum(self._blocks_of(group, tokens) for group in self.groups)

    def _blocks_of(self, group: Group, tokens: int) -> int:
        if group.state:
            return self.state_blocks
        if group.window is None:
            return ceil(tokens / group.tokens)
        # The window may start in the middle of a block, and tokens of running steps are not let go yet.
        held = min(group.window - 1 + self.in_flight_tokens, tokens)
        return ceil(held / group.tokens) + 1

    def longest(self, blocks: int, limit: int) -> int:
        """Return the longest request in tokens, up to `limit`, that fits into so many blocks; 0 when none does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks(middle) <= blocks else (low, middle - 1)
        return low


def kv_layout(
    layers: Sequence[Layer],
    *,
    value_bytes: float,
    tensor_parallel_size: int,
    kv_heads: int,
    block_tokens: int,
    in_flight_tokens: int,
    state_blocks: int,
) -> KvLayout:
    """Group a model's layers as vLLM does.

    `value_bytes` is the size of a cached value (2 in bf16, 1 in fp8), `block_tokens` vLLM's block size before it is
    raised for states, `in_flight_tokens` what all running steps may hold (steps at once x max_num_batched_tokens),
    `state_blocks` the blocks of a state that a request takes (2 with prefix caching, else 1). Keys and values are
    divided among the GPUs of a TP group until each has one head; MLA's latent is on every GPU in full.
    """
    share = min(tensor_parallel_size, kv_heads)
    token_bytes = [
        layer.kv_values * value_bytes / (1 if layer.attention == "mla" else share) if layer.kv_values else 0.0
        for layer in layers
    ]
    states = [ceil(layer.state_bytes / tensor_parallel_size) for layer in layers]
    narrowest = min((size for size in token_bytes if size), default=0.0)
    if any(states) and narrowest:
        # The attention's page must be as large as a state (vllm/platforms/interface.py).
        block_tokens = max(block_tokens, ceil(max(states) / narrowest / BLOCK_STEP) * BLOCK_STEP)
    kinds = [
        _kind(layer, token, state, block_tokens)
        for layer, token, state in zip(layers, token_bytes, states, strict=True)
    ]
    groups, pages = _group(kinds)
    sums = tuple(
        tuple(accumulate((pages[i] if i in set(group.layers) else 0 for i in range(len(layers))), initial=0))
        for group in groups
    )
    return KvLayout(groups, sums, in_flight_tokens, state_blocks)


def _kind(layer: Layer, token_bytes: float, state: int, block_tokens: int) -> _Kind | None:
    if token_bytes:
        return _Kind(False, layer.kv_window, ceil(token_bytes * block_tokens), block_tokens)
    return _Kind(True, None, state, block_tokens) if state else None


def _group(kinds: Sequence[_Kind | None]) -> tuple[tuple[Group, ...], list[int]]:
    """Return the groups, and the bytes of a block in each layer (0 for a layer that keeps nothing)."""
    pages = [kind.page if kind else 0 for kind in kinds]
    kept = {kind for kind in kinds if kind}
    if len({(kind.state, kind.window) for kind in kept}) <= 1:
        # One kind of layer, if of different sizes: one group, each layer with a page of its own.
        chosen = tuple(i for i, kind in enumerate(kinds) if kind)
        first = next(iter(kept), None)
        return ((Group(chosen, first.state, first.window, first.tokens),) if first else ()), pages
    largest = max(kind.page for kind in kept)
    same: dict[_Kind, list[int]] = {}
    for index, kind in enumerate(kinds):
        if kind:
            pages[index] = largest
            same.setdefault(_widened(kind, largest), []).append(index)
    counts = [len(members) for members in same.values()]
    size = max(counts) if max(counts) < min(counts) * FEW_MORE else min(counts)
    groups = []
    for kind, members in same.items():
        parts = ceil(len(members) / size)
        # Every n-th layer, so that each stage of a pipeline has about the same share of every group.
        groups += [Group(tuple(members[i::parts]), kind.state, kind.window, kind.tokens) for i in range(parts)]
    return tuple(groups), pages


def _widened(kind: _Kind, page: int) -> _Kind:
    """Return the kind with pages of the common size: more tokens where that divides, else padded."""
    times = page // kind.page if not kind.state and page % kind.page == 0 else 1
    return _Kind(kind.state, kind.window, page, kind.tokens * times)
