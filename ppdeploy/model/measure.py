"""From the parts of a model and its quantisation to the sizes that a plan uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ppdeploy.model.parts import Blueprint, Part
from ppdeploy.model.quantisation import Quantisation
from ppdeploy.model.shape import Layer


@dataclass(frozen=True)
class Sizes:
    """The fields of a ModelShape that say how large its parts are."""

    layers: tuple[Layer, ...]
    embedding_parameters: int
    embedding_bytes: int
    head_parameters: int
    head_bytes: int
    other_parameters: int
    other_first_bytes: int
    other_last_bytes: int
    mtp_parameters: int
    mtp_bytes: int

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that a checkpoint stores: the head only where it is not the embedding."""
        head = self.head_bytes if self.head_parameters else 0
        outside = self.embedding_bytes + head + self.other_first_bytes + self.other_last_bytes + self.mtp_bytes
        return outside + sum(layer.weight_bytes for layer in self.layers)


def measure(model: Blueprint, quantisation: Quantisation, layers: int, plain: int) -> Sizes:
    """Return the sizes of a model; `plain` is the bytes of a value that is not quantised."""
    embedding = quantisation.bytes_of(model.embedding, plain)
    head = embedding if model.tied else quantisation.bytes_of(model.head, plain)
    return Sizes(
        layers=tuple(_layer(model, quantisation, i, plain) for i in range(layers)),
        embedding_parameters=model.embedding.values,
        embedding_bytes=embedding,
        head_parameters=0 if model.tied else model.head.values,
        head_bytes=head,
        other_parameters=_values(model.first) + _values(model.last),
        other_first_bytes=_bytes(model.first, quantisation, plain),
        other_last_bytes=_bytes(model.last, quantisation, plain),
        mtp_parameters=_values(model.mtp),
        mtp_bytes=_bytes(model.mtp, quantisation, plain),
    )


def _layer(model: Blueprint, quantisation: Quantisation, index: int, plain: int) -> Layer:
    plan = model.layer(index)
    routed = [part for part in plan.parts if part.routed]
    values, routed_values = _values(plan.parts), _values(routed)
    expert_bytes = _bytes(routed, quantisation, plain)
    total = expert_bytes + _bytes((part for part in plan.parts if not part.routed), quantisation, plain)
    # One token reads some of the experts; a share of bytes is exact, since all experts of a layer are equal.
    share = (plan.experts_per_token, plan.experts) if plan.experts else (1, 1)
    return Layer(
        attention=plan.attention,
        parameters=values,
        active_parameters=values - routed_values + routed_values * share[0] // share[1],
        weight_bytes=total,
        active_bytes=total - expert_bytes + expert_bytes * share[0] // share[1],
        expert_bytes=expert_bytes,
        experts=plan.experts,
        experts_per_token=plan.experts_per_token,
        kv_values=plan.kv_values,
        kv_window=plan.kv_window,
        state_bytes=plan.state_bytes,
    )


def _values(parts: Iterable[Part]) -> int:
    return sum(part.values for part in parts)


def _bytes(parts: Iterable[Part], quantisation: Quantisation, plain: int) -> int:
    return sum(quantisation.bytes_of(part, plain) for part in parts)
