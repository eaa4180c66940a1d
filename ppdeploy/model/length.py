"""How long a request a model takes: its own limit, and what vLLM serves when nobody says a length.

vLLM 0.32.0, vllm/config/model.py, `_get_and_verify_max_len`: a scaling of positions stretches the limit, unless its
kind is one for which config.json has the stretched number already; with `longrope` the short length is the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

from ppdeploy.model.config import Reader

STRETCHED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
"""Kinds of scaling whose factor `max_position_embeddings` has in it."""

MOST = 1 << 40
"""No model takes more tokens; above it the numbers are damaged."""


class Lengths(NamedTuple):
    """Tokens of a request, None where config.json does not say."""

    longest: int | None
    default: int | None
    """What vLLM serves when no length is asked for."""


def lengths(reader: Reader) -> Lengths:
    """Return the lengths of a model; InputError for a factor that no model has."""
    said = reader.number_or_none("max_position_embeddings")
    if said is None or (reader.model_type or "").startswith("gemma3"):
        return Lengths(said, said)
    kinds = list(_scalings(reader))
    factor = 1.0
    for scaling in kinds:
        found = scaling.get("factor")
        if found is None or _kind(scaling) in STRETCHED:
            continue
        right = isinstance(found, int | float) and not isinstance(found, bool) and isfinite(found) and found > 0
        if not right or said * found > MOST:
            raise reader.wrong("the factor of rope_scaling", found, "a number that any model has")
        factor = found
    longest = int(said * factor)
    # A second limit, up to which a length that is asked for is accepted too.
    second = reader.section.get("model_max_length", reader.config.get("model_max_length"))
    accepted = second if isinstance(second, int) and longest < second <= MOST else longest
    short = reader.number_or_none("original_max_position_embeddings")
    stretched = any(_kind(scaling) == "longrope" for scaling in kinds)
    return Lengths(accepted, short if stretched and short is not None else longest)


def _scalings(reader: Reader) -> Iterator[Mapping[str, Any]]:
    """Yield what is said on scaling of positions, for all layers at once or for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = reader.section.get(name, reader.config.get(name))
        if isinstance(found, dict):
            inner = [value for value in found.values() if isinstance(value, dict)]
            yield from inner or [found]


def _kind(scaling: Mapping[str, Any]) -> str:
    kind = scaling.get("rope_type", scaling.get("type"))
    return kind if isinstance(kind, str) else "default"
