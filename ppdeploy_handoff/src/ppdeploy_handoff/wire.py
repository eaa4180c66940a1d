"""The two handoff tensors as one, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppdeploy_handoff import fp8

# Each travels with the metadata of the tensors that vLLM sends beside them, so the receiver needs no agreement
# beforehand, and one without the plugin fails at once instead of reading half a handoff. MARK says that hidden_states
# are the sum; SHORT that they are the bytes of the sum in eight bits.
MARK = "ppdeploy_handoff.sum"
SHORT = "ppdeploy_handoff.fp8"
PAIR = ("hidden_states", "residual")


def pack(tensors: dict[str, Any], *, short: bool = False) -> dict[str, Any] | None:
    """`tensors` with hidden_states and residual (shape [tokens, hidden]) replaced by their sum, a fresh tensor.

    With `short` in eight bits, where it can be (`fp8.fits`). None when there is anything else in it, or when the two are
    not alike: such a handoff travels as it is.
    """
    if tuple(sorted(tensors)) != PAIR:
        return None
    hidden, residual = (tensors[key] for key in PAIR)
    if hidden is None or residual is None:
        return None
    if hidden.shape != residual.shape or hidden.dtype != residual.dtype or hidden.device != residual.device:
        return None
    if not hidden.dtype.is_floating_point or hidden.numel() == 0:
        return None
    total = hidden + residual
    if short and fp8.fits(total):
        return {PAIR[0]: fp8.encode(total), SHORT: 1}
    return {PAIR[0]: total, MARK: 1}


def unpack(tensors: dict[str, Any], postprocess: list[Callable[[], None]], zeros: Callable[[Any], Any]) -> bool:
    """Put the residual back into a received `tensors`; False when the sender had not packed it.

    It is made by the last of `postprocess`, because until the others have run (the all-gather of the tensor
    parallel slices, in a group of one too) the received tensor is flat. `zeros` makes a tensor like the one given.
    """
    whole, short = tensors.pop(MARK, None), tensors.pop(SHORT, None)
    if whole is None and short is None:
        return False

    def restore() -> None:
        if short is not None:
            tensors[PAIR[0]] = fp8.decode(tensors[PAIR[0]])
        tensors[PAIR[1]] = zeros(tensors[PAIR[0]])

    postprocess.append(restore)
    return True


def nothing_like(hidden: Any) -> Any:
    """A residual for `hidden` that changes no bit of it when added: -0, not 0, since -0 + 0 is 0.

    One element, expanded to the shape: the model runners copy it into their own buffers.
    """
    return hidden.new_full((1,) * hidden.dim(), -0.0).expand(hidden.shape)
