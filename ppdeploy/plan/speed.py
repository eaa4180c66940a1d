"""How long a stage takes for a step: the roofline of its GPUs, with the shares of it that vLLM reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppdeploy.plan.gpus import Gpu

ComputeType = Literal["bf16", "fp8", "fp4"]
"""In what the matrix products run. Weight-only quantisation (awq, gptq, bnb, mxfp4 before Blackwell) is bf16."""

COMPUTE_EFFICIENCY = 0.73
"""Share of the tensor cores' rate that large matrix products of a prefill reach."""

MEMORY_EFFICIENCY = 0.80
"""Share of the memory bandwidth that a decode step reaches."""

STAGE_OVERHEAD = 0.0005
"""Seconds of each step of a stage that are neither: launches, sampling, messages."""

REDUCE_LATENCY = 20e-6
"""Seconds of one all-reduce of a TP group, besides its bytes."""


@dataclass(frozen=True)
class StageLoad:
    """What a stage has to read and compute. All figures are the whole stage's, of all GPUs of its TP group together.

    A step reads `weight_bytes` once, whatever the batch (attention, dense MLPs, shared experts, norms, and the head on
    the last stage; not the embedding table, of which a step reads a few rows), and of the routed experts' bytes
    (`expert_bytes`, all layers) the share that the batch's tokens pick: `expert_top_k` of `experts` each.
    """

    gpu: Gpu
    gpus: int
    """GPUs of the TP group."""
    layers: int
    weight_bytes: float
    flops_per_token: float
    """2 x the parameters that one token passes (routed experts: top-k of them), without the head's."""
    kv_bytes_per_token: float
    """KV cache of one token in all layers of this stage; a decode step reads it for each token of the context."""
    hidden_size: int = 0
    """For the all-reduces of a TP group; 0 leaves them out."""
    head_flops: float = 0.0
    """2 x the head's parameters on the last stage: computed for the sampled tokens only, one for each sequence."""
    attention_flops: float = 0.0
    """For each pair of a prompt token and a token before it: 4 x heads x head size x attention layers of the stage."""
    expert_bytes: float = 0.0
    experts: int = 0
    expert_top_k: int = 0
    compute: ComputeType = "bf16"


def compute_rate(gpu: Gpu, compute: ComputeType) -> float:
    """Return the FLOP/s at which a GPU computes in a type: its own, else the next wider that it has."""
    if compute == "fp4" and gpu.fp4_flops:
        return gpu.fp4_flops
    if compute == "fp8" and gpu.fp8_flops:
        return gpu.fp8_flops
    return gpu.bf16_flops


def expert_share(load: StageLoad, tokens: float) -> float:
    """Return the expected share of a layer's routed experts that `tokens` tokens touch, each picking by itself."""
    if not load.experts or tokens <= 0:
        return 0.0
    missed = 1.0 - min(1.0, load.expert_top_k / load.experts)
    return float(1.0 - missed**tokens)


def stage_seconds(load: StageLoad, *, prefill_tokens: float, decode_sequences: float, context: float) -> float:
    """Return the seconds that a stage computes in one step.

    The step has `prefill_tokens` tokens of prompts and one token of each of `decode_sequences` sequences, which have
    `context` tokens in the cache on average. The larger of compute and memory, plus what comes on top of either.
    """
    tokens = prefill_tokens + decode_sequences
    if tokens <= 0:
        return 0.0
    reads = load.weight_bytes + load.expert_bytes * expert_share(load, tokens)
    reads += load.kv_bytes_per_token * decode_sequences * context
    memory = reads / (load.gpu.bandwidth * load.gpus * MEMORY_EFFICIENCY)
    flops = load.flops_per_token * tokens + load.head_flops * max(decode_sequences, 1)
    flops += load.attention_flops * (prefill_tokens * prefill_tokens / 2 + decode_sequences * context)
    compute = flops / (compute_rate(load.gpu, load.compute) * load.gpus * COMPUTE_EFFICIENCY)
    return max(memory, compute) + STAGE_OVERHEAD + reduce_seconds(load, tokens)


def reduce_seconds(load: StageLoad, tokens: float) -> float:
    """Return the seconds of a step's all-reduces: two a layer, a ring of the TP group's GPUs, activations in bf16."""
    if load.gpus <= 1:
        return 0.0
    each_way = 2 * (load.gpus - 1) / load.gpus * tokens * load.hidden_size * 2
    return 2 * load.layers * (REDUCE_LATENCY + each_way / load.gpu.peer_bandwidth)
