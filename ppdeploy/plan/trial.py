"""What vLLM's trial step holds besides the weights: the memory it keeps free for steps (0.32.0, `profile_run`).

A trial has two parts, one after the other: the tower for images, on the first stage, with as many of the largest images
as one step may bring; then a step of `max_num_batched_tokens` tokens, while the tower's results are still kept.
"""

from __future__ import annotations

from math import ceil

from ppdeploy.model import ModelShape, Vision

LOGIT_BYTES = 10
"""For each row of the vocabulary and each sampled sequence: the logits in bf16, in fp32, and their probabilities."""


def forward_bytes(shape: ModelShape, *, tokens: int, tensor_parallel_size: int, value_bytes: int) -> int:
    """Return the most that a step of `tokens` tokens holds at once on one GPU, in bytes, without weights.

    Four hidden states (two that are handed on, two that a layer works on), and the larger of the two feed-forward
    forms. Dense: gate and up projection, and their product. Experts: for each token and chosen expert two buffers, each
    as wide as the wider of what it takes in turn (`vllm/model_executor/layers/fused_moe`, workspace13 and workspace2).
    """
    hidden = shape.hidden_size
    dense = 3 * (shape.intermediate_size or 4 * hidden) / tensor_parallel_size
    experts = 0.0
    if shape.experts_per_token:
        width = (shape.moe_intermediate_size or hidden) / tensor_parallel_size
        experts = shape.experts_per_token * (max(2 * width, hidden) + max(width, hidden))
    return ceil(tokens * value_bytes * (4 * hidden + max(dense, experts)))


def vision_tokens(vision: Vision, batched_tokens: int, sequences: int) -> int:
    """Return how many tokens' worth of the largest images the tower is tried with.

    As many images as fit into the tokens of a step, at least one, however long it is (vllm/multimodal/
    encoder_budget.py, `MultiModalBudget`; vllm/v1/core/encoder_cache_manager.py, `compute_mm_encoder_budget`).
    """
    items = max(min(batched_tokens // vision.item_tokens, sequences), 1)
    return items * vision.item_tokens


def vision_bytes(
    vision: Vision,
    *,
    batched_tokens: int,
    sequences: int,
    tensor_parallel_size: int,
    value_bytes: int,
    whole: bool = False,
) -> tuple[int, int]:
    """Return what the tower holds at most while it works, on one GPU, and what its results take; both in bytes.

    With `whole` each GPU of a TP group has the tower in full and works on its share of the images.

    For each patch: a block's input and its normalised copy; then the larger of what attention has at once (queries,
    keys and values, two of them turned, the result) and of the feed-forward part's two widths. Worked out from the
    layers, not measured.
    """
    tokens = vision_tokens(vision, batched_tokens, sequences)
    here = ceil(tokens // vision.item_tokens / tensor_parallel_size) * vision.item_tokens if whole else tokens
    hidden, inner = vision.hidden_size, vision.intermediate_size
    each = 2 * hidden + max(6 * hidden, 2 * inner) / (1 if whole else tensor_parallel_size)
    results = tokens * vision.output_values * value_bytes
    return ceil(here * vision.patches_per_token * each * value_bytes) + results, results
