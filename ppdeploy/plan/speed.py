"""How long a stage takes for a step: the roofline of its GPUs, with the shares of it that vLLM reaches.

A step takes what its matrix products compute and what it reads from memory, which hide each other in part, plus a fixed
overhead and, in a TP group, its all-reduces. `CONSTANTS` are fitted to the 24 figures of docs/speed.md by

    python3 scripts/fit_speed.py --fit

which also prints what is left over, for these figures and for others that were never fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppdeploy.plan.gpus import Gpu

ComputeType = Literal["bf16", "fp8", "fp4"]
"""In what the matrix products run. Weight-only quantisation (awq, gptq, bnb, mxfp4 before Blackwell) is bf16."""

REDUCE_LATENCY = 20e-6
"""Seconds of one all-reduce of a TP group, besides its bytes; not measured here."""


EXPERT_LAYER_SECONDS = 0.2e-3
"""Seconds of a step in each layer of routed experts that are neither computing nor reading: routing, sorting, many
small kernels. Set from public reports, not fitted: DeepSeek-R1 on 16 H100 takes 31 ms a token alone
(tenstorrent/tt-inference-server issue 356; 30 tokens/s with vLLM in sgl-project/sglang issue 3656, both 2025), which is
0.4 ms a layer over what the roofline says; newer kernels need less, so half of it. A factor of two either way."""


@dataclass(frozen=True)
class Constants:
    """What vLLM reaches of the hardware: fitted by `scripts/fit_speed.py`, see the module's docstring."""

    compute_efficiency: float = 0.711
    """Share of the tensor cores' rate in a prefill."""
    memory_efficiency: float = 0.760
    """Share of the memory bandwidth in a decode step."""
    stage_overhead: float = 0.0005
    """Seconds of each step on each stage that are neither: launches, sampling, messages between processes. Set, not
    fitted: with one model on one kind of GPU it cannot be told apart from `memory_efficiency`."""
    roofline_exponent: float = 1.5
    """How computing and reading add up to a step: as the norm of this exponent, where 1 would be one after the other
    and infinity the longer of the two. Set, not fitted: only steps of 128 to 512 tokens tell (docs/speed.md)."""
    api_latency: float = 0.0086
    """Seconds that a request spends outside the stages: HTTP, tokenizer, scheduler, detokenizer, client."""


CONSTANTS = Constants()
"""Those of the measurements; a cluster's own bench may replace them."""


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


def stage_seconds(
    load: StageLoad,
    *,
    prefill_tokens: float,
    decode_sequences: float,
    context: float,
    prefill_context: float | None = None,
    constants: Constants = CONSTANTS,
) -> float:
    """Return the seconds that a stage computes in one step.

    The step has `prefill_tokens` tokens of prompts and one token of each of `decode_sequences` sequences, which have
    `context` tokens in the cache on average; a prompt's token has `prefill_context` tokens before it on average (half
    of `prefill_tokens` unless given). Compute and memory in their norm, plus what comes on top of either.
    """
    tokens = prefill_tokens + decode_sequences
    if tokens <= 0:
        return 0.0
    reads = load.weight_bytes + load.expert_bytes * expert_share(load, tokens)
    reads += load.kv_bytes_per_token * decode_sequences * context
    memory = reads / (load.gpu.bandwidth * load.gpus * constants.memory_efficiency)
    before = prefill_tokens / 2 if prefill_context is None else prefill_context
    flops = load.flops_per_token * tokens + load.head_flops * max(decode_sequences, 1)
    flops += load.attention_flops * (prefill_tokens * before + decode_sequences * context)
    compute = flops / (compute_rate(load.gpu, load.compute) * load.gpus * constants.compute_efficiency)
    fixed = constants.stage_overhead + (EXPERT_LAYER_SECONDS * load.layers if load.experts else 0.0)
    norm = constants.roofline_exponent
    busy = float((memory**norm + compute**norm) ** (1 / norm))
    return busy + fixed + reduce_seconds(load, tokens)


def reduce_seconds(load: StageLoad, tokens: float) -> float:
    """Return the seconds of a step's all-reduces: two a layer, a ring of the TP group's GPUs, activations in bf16."""
    if load.gpus <= 1:
        return 0.0
    each_way = 2 * (load.gpus - 1) / load.gpus * tokens * load.hidden_size * 2
    return 2 * load.layers * (REDUCE_LATENCY + each_way / load.gpu.peer_bandwidth)
