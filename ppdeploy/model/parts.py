"""The matrices that a model is made of, by the names that its checkpoint gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ppdeploy.model.shape import Attention, Vision

Kind = Literal["linear", "router", "plain", "embedding", "head"]
"""How a quantisation treats a part: a linear layer's matrix, the one that chooses experts, all else, the two ends."""


class Part(NamedTuple):
    """One or more equal tensors. `rows` are outputs, `columns` inputs; a vector has one column."""

    name: str
    kind: Kind
    rows: int
    columns: int = 1
    copies: int = 1
    routed: bool = False
    """It belongs to the routed experts, of which a token reads a few only."""

    @property
    def values(self) -> int:
        """How many values it has, all copies together."""
        return self.rows * self.columns * self.copies


@dataclass(frozen=True)
class LayerPlan:
    """One layer: its parts, and what it keeps of the past (fields as in `ppdeploy.model.shape.Layer`)."""

    parts: list[Part]
    attention: Attention
    kv_values: int
    kv_window: int | None = None
    state_bytes: int = 0
    experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True)
class Blueprint:
    """A whole model. Layers are made when they are asked for: an absurd count must not fill the memory."""

    layer: Callable[[int], LayerPlan]
    embedding: Part
    head: Part
    tied: bool
    first: list[Part] = field(default_factory=list)
    """What lies before the layers beside the embedding: towers for images and sound."""
    last: list[Part] = field(default_factory=list)
    mtp: list[Part] = field(default_factory=list)
    vision: Vision | None = None
    """What the tower for images works on, where one is known."""
    unsure: str = ""
    """What of it is a guess, as the start of a sentence; empty: nothing."""


def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> Iterator[Part]:
    """Yield a linear layer's matrix, and its bias."""
    yield Part(name, "linear", rows, columns)
    if bias:
        yield Part(f"{name}.bias", "plain", rows)


def norm(name: str, size: int, *, bias: bool = False) -> Part:
    """Return the weight of a normalisation, with its bias."""
    return Part(name, "plain", size, 2 if bias else 1)
