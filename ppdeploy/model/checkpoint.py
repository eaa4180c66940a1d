"""Bringing sizes that were computed together with those of the weight files: what is stored wins."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ppdeploy.model.measure import Sizes
from ppdeploy.model.shape import Layer

# More than this and a reader should know that formula and files disagree.
_NOTEWORTHY = 0.03

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERTS = re.compile(r"\.experts\.")
_TOWER = re.compile(
    r"(?:^|\.)(?:[a-z_]*vision[a-z_]*|visual|[a-z_]*audio[a-z_]*|[a-z_]*projector|image_newline)(?:\.|$)"
)
_MTP = re.compile(r"(?:^|\.)mtp[a-z_]*\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embeddings|wte|word_embeddings|tok_embeddings|embed_in)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer)\.")

Part = Literal["layer", "embedding", "head", "tower", "mtp", "rest"]


class Tensor(NamedTuple):
    """One tensor of a weight file."""

    dtype: str
    """As safetensors writes it: BF16, F32, F8_E4M3, I32, ..."""
    size: int
    """Bytes in the file."""


@dataclass(frozen=True)
class Stored:
    """What the weight files hold, by where it belongs; bytes as they are loaded."""

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    embedding: int
    head: int
    towers: int
    rest: int
    mtp: int


def tensors_of(header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors header; entries that are not as the format says are left out."""
    found = {}
    for name, entry in header.items():
        if name == "__metadata__" or not isinstance(entry, dict):
            continue
        offsets, dtype = entry.get("data_offsets"), entry.get("dtype")
        if (
            isinstance(offsets, list)
            and len(offsets) == 2
            and all(isinstance(end, int) and not isinstance(end, bool) for end in offsets)
            and 0 <= offsets[0] <= offsets[1]
            and isinstance(dtype, str)
        ):
            found[name] = Tensor(dtype, offsets[1] - offsets[0])
    return found


def sorted_by_place(tensors: Mapping[str, Tensor], layers: int, *, halve: bool) -> Stored | None:
    """Return what the files hold by layer and place; None when the names do not fit a model of that many layers.

    `halve` says that 32-bit values are loaded as 16 bits, as vLLM does with a float32 checkpoint.
    """
    sums, experts = [0] * layers, [0] * layers
    outside: Counter[Part] = Counter()
    for name, tensor in tensors.items():
        size = tensor.size // 2 if halve and tensor.dtype == "F32" else tensor.size
        part, index = part_of(name, layers)
        if index is None:
            outside[part] += size
        else:
            sums[index] += size
            experts[index] += size if _EXPERTS.search(name) else 0
    if not all(sums) or not outside["embedding"]:
        return None
    return Stored(
        layers=tuple(sums),
        experts=tuple(experts),
        embedding=outside["embedding"],
        head=outside["head"],
        towers=outside["tower"],
        rest=outside["rest"],
        mtp=outside["mtp"],
    )


def part_of(name: str, layers: int) -> tuple[Part, int | None]:
    """Return which part of a model of that many layers a tensor is of, by its name; of a layer, its index too."""
    place = _LAYER.search(name)
    if _TOWER.search(name):
        return "tower", None
    if _MTP.search(name) or (place and int(place[1]) >= layers):
        return "mtp", None
    if place:
        return "layer", int(place[1])
    if _EMBEDDING.search(name):
        return "embedding", None
    return ("head" if _HEAD.search(name) else "rest"), None


def has_mtp(names: Iterable[str], layers: int) -> bool:
    """Whether a checkpoint with tensors of these names has layers for multi-token prediction."""
    return any(part_of(name, layers)[0] == "mtp" for name in names)


def without_mtp(sizes: Sizes) -> Sizes:
    """Return the sizes of a checkpoint that leaves out the layers for multi-token prediction."""
    return replace(sizes, mtp_parameters=0, mtp_bytes=0)


def by_tensors(sizes: Sizes, stored: Stored) -> tuple[Sizes, float]:
    """Return the sizes as the files have them, layer by layer, and by which share the computed total was off."""
    tied = sizes.head_parameters == 0
    layers = tuple(
        _resized(layer, real, experts)
        for layer, real, experts in zip(sizes.layers, stored.layers, stored.experts, strict=True)
    )
    found = replace(
        sizes,
        layers=layers,
        embedding_bytes=stored.embedding,
        # A head that is stored beside tied embeddings is not loaded.
        head_bytes=stored.embedding if tied else stored.head or sizes.head_bytes,
        other_first_bytes=stored.towers,
        other_last_bytes=stored.rest,
        mtp_bytes=stored.mtp,
        mtp_parameters=sizes.mtp_parameters if stored.mtp else 0,
    )
    return found, _off(sizes.stored_bytes, found.stored_bytes)


def by_total(sizes: Sizes, total: int) -> tuple[Sizes, float]:
    """Return the sizes scaled to the bytes of all files, and by which share the computed total was off."""
    computed = sizes.stored_bytes

    def scaled(size: int) -> int:
        return size * total // computed

    layers = tuple(_resized(layer, scaled(layer.weight_bytes), scaled(layer.expert_bytes)) for layer in sizes.layers)
    found = replace(
        sizes,
        layers=layers,
        embedding_bytes=scaled(sizes.embedding_bytes),
        head_bytes=scaled(sizes.head_bytes),
        other_first_bytes=scaled(sizes.other_first_bytes),
        other_last_bytes=scaled(sizes.other_last_bytes),
        mtp_bytes=scaled(sizes.mtp_bytes),
    )
    return found, _off(computed, total)


def spread(sizes: Sizes, total: int, *, bits: int) -> Sizes:
    """Return the sizes of a model whose layers are not known: what the files hold beside the two ends, spread evenly.

    The ends are computed from the vocabulary, but never taken for more than half of the files. `bits` is what a value
    of a layer's weights takes, for the count of parameters.
    """
    head = sizes.head_bytes if sizes.head_parameters else 0
    ends = sizes.embedding_bytes + head + sizes.other_last_bytes
    if ends > total // 2:
        return by_total(sizes, total)[0]
    # A layer that mixes experts keeps the guessed share of them.
    each = (total - ends) // len(sizes.layers)
    layers = []
    for layer in sizes.layers:
        experts = each * layer.expert_bytes // max(1, layer.weight_bytes)
        resized = _resized(layer, each, experts)
        values = max(1, each * 8 // bits)
        active = values * resized.active_bytes // max(1, each)
        layers.append(resized.model_copy(update={"parameters": values, "active_parameters": active}))
    return replace(sizes, layers=tuple(layers), other_first_bytes=0, mtp_bytes=0, mtp_parameters=0)


def tower_from_rest(sizes: Sizes, total: int) -> Sizes:
    """Return the sizes with all that the files hold beyond the language model put down as a tower before the layers."""
    return replace(sizes, other_first_bytes=max(0, total - (sizes.stored_bytes - sizes.other_first_bytes)))


def as_loaded(stored: Sizes, computed: Sizes, loaded: Sizes) -> Sizes:
    """Return the sizes in memory of weights that change while they are loaded.

    `stored` are the checkpoint's, brought together with its files; `computed` and `loaded` are worked out, as they are
    stored and as they are in memory. What was found in the files is changed by the share of the two.
    """
    if loaded == computed:
        return stored

    def scaled(size: int, before: int, after: int) -> int:
        return size * after // before if before else after

    def layer(real: Layer, before: Layer, after: Layer) -> Layer:
        experts = scaled(real.expert_bytes, before.expert_bytes, after.expert_bytes)
        rest = scaled(*(one.weight_bytes - one.expert_bytes for one in (real, before, after)))
        return _resized(real, rest + experts, experts)

    outside = ("embedding_bytes", "head_bytes", "other_first_bytes", "other_last_bytes", "mtp_bytes")
    return replace(
        stored,
        layers=tuple(map(layer, stored.layers, computed.layers, loaded.layers)),
        **{name: scaled(getattr(stored, name), getattr(computed, name), getattr(loaded, name)) for name in outside},
    )


def difference_note(off: float) -> str:
    """Return the sentence on files and formula, empty when they agree."""
    if abs(off) <= _NOTEWORTHY:
        return ""
    word = "larger" if off > 0 else "smaller"
    return f"the weight files are {abs(off):.0%} {word} than the configuration says; sizes are scaled to the files"


def _resized(layer: Layer, total: int, experts: int) -> Layer:
    experts = min(experts, total)
    chosen = experts * layer.experts_per_token // layer.experts if layer.experts else experts
    return layer.model_copy(
        update={
            "weight_bytes": total,
            "active_bytes": total - experts + chosen,
            "expert_bytes": experts if layer.experts else 0,
        }
    )


def _off(computed: int, real: int) -> float:
    return real / computed - 1 if computed else 0.0
