"""Hidden states in eight bits each, with a scale for each token.

The format is e4m3 of "FP8 Formats for Deep Learning" (arXiv 2209.05433, table 1; torch's float8_e4m3fn): three bits of
mantissa, so each value is wrong by 1/16 of itself at most, down to 1/28,672 of the token's largest, and by 1/458,752 of
that below. A scale for each token suffices because of that range: hidden states have a few channels that are a hundred
times as large as the others, which would cost eight bits of integers their precision (docs/handoff.md has both).
"""

from __future__ import annotations

from typing import Any

LARGEST = 448.0
"""Of e4m3."""

TAIL = 16
"""Bytes behind the values of a token: its scale in float32, four times, so that what tensor parallel ranks cut into
equal slices (`isend_tensor_dict`) can still be cut by them."""


def fits(hidden: Any) -> bool:
    """Whether `hidden` (shape [tokens, hidden]) can travel so: its scales must lie at multiples of their own size."""
    return hidden.dim() == 2 and hidden.shape[-1] % TAIL == 0


def encode(hidden: Any) -> Any:
    """The bytes of `hidden` (shape [tokens, hidden], any float type), hidden + TAIL a token, as a fresh tensor.

    It has the type of `hidden`, and so many values fewer: not every communicator of vLLM gathers bytes (the one of CPUs
    that share memory does not), and all of them gather what a model computes with.
    """
    import torch

    # As few kernels as there can be: for a lone user's token each of them costs more than what it computes.
    largest = torch.linalg.vector_norm(hidden, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    # A token of zeros has no largest value to divide by.
    scale = largest.mul_(1 / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    width = hidden.shape[-1]
    sent = hidden.new_empty((len(hidden), width + TAIL), dtype=torch.uint8)
    sent[:, :width].view(torch.float8_e4m3fn).copy_(hidden / scale)
    sent[:, width:].view(torch.float32).copy_(scale)
    return sent.view(hidden.dtype)


def decode(sent: Any) -> Any:
    """What `encode` made bytes of, in its type."""
    import torch

    octets = sent.view(torch.uint8)
    width = octets.shape[-1] - TAIL
    scale = octets[:, width:].view(torch.float32)[:, :1]
    return octets[:, :width].view(torch.float8_e4m3fn).float().mul_(scale).to(sent.dtype)
