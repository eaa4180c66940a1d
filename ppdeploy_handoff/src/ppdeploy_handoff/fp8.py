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
"""Bytes behind the values of a token: its scale in float32, and nothing, so that what tensor parallel ranks cut into
equal slices (`isend_tensor_dict`) can still be cut by them."""

SCALE = 4
"""Bytes of the scale."""


def fits(hidden: Any) -> bool:
    """Whether `hidden` (shape [tokens, hidden]) can travel so: its scales must lie at multiples of their own size."""
    return hidden.dim() == 2 and hidden.shape[-1] % TAIL == 0


def encode(hidden: Any) -> Any:
    """`hidden` (shape [tokens, hidden], any float type) as bytes (shape [tokens, hidden + TAIL]), a fresh tensor."""
    import torch

    exact = hidden.float()
    # A token of zeros has no largest value to divide by.
    scale = exact.abs().amax(-1, keepdim=True).div_(LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    width = hidden.shape[-1]
    sent = hidden.new_zeros((len(hidden), width + TAIL), dtype=torch.uint8)
    sent[:, :width].view(torch.float8_e4m3fn).copy_(exact / scale)
    sent[:, width : width + SCALE].view(torch.float32).copy_(scale)
    return sent


def decode(sent: Any, dtype: str) -> Any:
    """What `encode` made bytes of, as `dtype` (torch's name of it, such as `bfloat16`)."""
    import torch

    width = sent.shape[-1] - TAIL
    scale = sent[:, width : width + SCALE].view(torch.float32)
    return sent[:, :width].view(torch.float8_e4m3fn).float().mul_(scale).to(getattr(torch, dtype))
