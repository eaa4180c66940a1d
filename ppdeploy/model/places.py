"""Where in a pipeline the tensors of each weight file are needed, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field

from ppdeploy.model.checkpoint import has_mtp, part_of

# What vLLM's models have after the last layer, on the last stage alone (`norm` of its `LlamaModel` and their kin).
_LAST_NORM = re.compile(r"(?:^|\.)(?:norm|norm_f|ln_f|final_layernorm|final_layer_norm|final_norm)\.(?:weight|bias)$")


class FilePlace(BaseModel):
    """What a weight file has: layers of the language model, its two ends, or things that any stage may need."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[int, ...] = ()
    first: bool = Field(default=False, description="the embedding, which the first stage has")
    last: bool = Field(default=False, description="norm and head, which the last stage has")
    everywhere: bool = Field(default=False, description="something else, such as a vision tower or MTP layers")


def file_places(names: Mapping[str, Iterable[str]], layers: int, *, tied: bool) -> dict[str, FilePlace]:
    """Return the place of each weight file from the names of its tensors; nothing where they do not fit the model.

    `layers` is the number of the model's layers, `tied` says that its head is its embedding. What is not known by its
    name is needed everywhere, so that a stage has rather too much than too little.
    """
    listed = {path: tuple(tensors) for path, tensors in names.items()}
    # The layers of multi-token prediction run on the last stage, and most share the embedding.
    shared = tied or has_mtp((name for tensors in listed.values() for name in tensors), layers)
    found = {path: _place(tensors, layers, tied=shared) for path, tensors in listed.items()}
    seen = {layer for place in found.values() for layer in place.layers}
    if seen != set(range(layers)) or not any(place.first for place in found.values()):
        return {}
    return found


def _place(tensors: Iterable[str], layers: int, *, tied: bool) -> FilePlace:
    indices: set[int] = set()
    first = last = everywhere = False
    for name in tensors:
        part, index = part_of(name, layers)
        if index is not None:
            indices.add(index)
        elif part == "embedding":
            first = True
            last = last or tied
        elif part == "head" or (part == "rest" and _LAST_NORM.search(name)):
            last = True
        else:
            everywhere = True
    return FilePlace(layers=tuple(sorted(indices)), first=first, last=last, everywhere=everywhere)
