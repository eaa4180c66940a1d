"""The nearest changes that would make a pipeline fit, each computed like the plan itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ppdeploy.model import Layer, ModelShape
from ppdeploy.plan.fit import Fit
from ppdeploy.plan.memory import Place, Serving, Sizes
from ppdeploy.plan.types import Change

MOST_CHANGES = 3

SHORTEST_CONTEXT = 1024
"""A shorter context than this in tokens is no remedy."""

CONTEXT_STEP = 256
"""What a proposed max_model_len is a multiple of."""

SMALL_STEP = 2048
"""max_num_batched_tokens of vLLM's default for small GPUs."""

MOST_NODES_MORE = 8

WIDE_TYPES = frozenset({"bfloat16", "float16", "float32"})

QUANTISED = (
    ("an fp8 checkpoint of the model", 0.5),
    ("a 4-bit checkpoint of the model (awq or gptq)", 0.28),
)
"""Quantised forms of a 16-bit checkpoint, with the bytes of their layers as a share of its own: 4 bits and scales of
groups of 128 are about 4.5 of 16. Embedding, head and vision tower stay as they are."""


@dataclass(frozen=True)
class Today:
    """What does not fit: the pipeline as the inventory wants it."""

    shape: ModelShape
    serving: Serving
    places: tuple[Place, ...]
    partition: tuple[int, ...]
    asked: bool
    """The split is the inventory's."""
    limit: int
    """The model's own longest context in tokens."""
    fp8_cache: bool
    """All GPUs can keep the KV cache in fp8."""


def fit_without_speed(shape: ModelShape, serving: Serving, places: Sequence[Place]) -> Fit:
    """Return a Fit that knows memory only, which is all that changes need."""
    return Fit(Sizes(shape, serving), places, _no_time, _no_time)


def _no_time(stage: int, first: int, stop: int) -> float:
    raise AssertionError(f"no time is asked for of stage {stage}, layers {first} to {stop}")


def nearest_changes(today: Today) -> tuple[Change, ...]:
    """Return up to MOST_CHANGES changes that make the pipeline fit, those that cost its users least first."""
    return tuple(islice(_all_changes(today), MOST_CHANGES))


def _all_changes(today: Today) -> Iterator[Change]:
    serving = today.serving
    if today.asked:
        yield from _split(today)
    yield from _free_cache(today)
    if serving.batched_tokens > SMALL_STEP and serving.device == "cuda":
        smaller = replace(serving, batched_tokens=SMALL_STEP)
        yield from _settings(today, smaller, "max-num-batched-tokens", SMALL_STEP)
    if today.fp8_cache and serving.kv_value_bytes > 1:
        fp8 = replace(serving, kv_cache_dtype="fp8", kv_value_bytes=1)
        yield from _settings(today, fp8, "kv-cache-dtype", "fp8")
    yield from _shorter(today)
    if today.shape.quantization is None and today.shape.dtype in WIDE_TYPES:
        for name, share in QUANTISED:
            yield from _quantised(today, name, share)
    yield from _more_nodes(today)


def _change(today: Today, fit: Fit, partition: Sequence[int], what: str, **more: object) -> Change:
    capacity = fit.capacity(partition, today.limit)
    return Change.model_validate(
        {
            "what": what,
            "setting": {},
            "longest_context": capacity.longest_context,
            "kv_tokens": capacity.kv_tokens,
            **more,
        }
    )


def _best(today: Today, fit: Fit) -> tuple[int, ...]:
    """Return the split to judge a change by: the one asked for, else the best for the memory."""
    if today.asked and len(today.partition) == fit.stages:
        return today.partition
    return fit.choose("context")


def _split(today: Today) -> Iterator[Change]:
    fit = fit_without_speed(today.shape, today.serving, today.places)
    partition = fit.choose("context")
    if partition != today.partition and fit.fits(partition):
        text = ",".join(map(str, partition))
        what = f"ppdeploy_layer_partition: [{text}]"
        yield _change(today, fit, partition, what, setting={"ppdeploy_layer_partition": list(partition)})


def _free_cache(today: Today) -> Iterator[Change]:
    """Propose to leave out a size of the KV cache that the inventory asks for."""
    places = [replace(place, kv_bytes=None) for place in today.places]
    serving = replace(today.serving, blocks=None)
    if serving == today.serving and places == list(today.places):
        return
    fit = fit_without_speed(today.shape, serving, places)
    partition = _best(today, fit)
    if fit.fits(partition):
        blocks = today.serving.blocks is not None
        name = "num-gpu-blocks-override" if blocks else "ppdeploy_kv_cache_gib"
        setting = {"ppdeploy_vllm_args": {name: None}} if blocks else {name: None}
        what = f"no {name}{' in ppdeploy_vllm_args' if blocks else ''}"
        yield _change(today, fit, partition, what, setting=setting)


def _settings(today: Today, serving: Serving, flag: str, value: str | int) -> Iterator[Change]:
    fit = fit_without_speed(today.shape, serving, today.places)
    partition = _best(today, fit)
    if fit.fits(partition):
        what = f"{flag}: {value} in ppdeploy_vllm_args"
        yield _change(today, fit, partition, what, setting={"ppdeploy_vllm_args": {flag: value}})


def _shorter(today: Today) -> Iterator[Change]:
    """Propose the longest context that some split has room for."""
    low = replace(today.serving, max_model_len=SHORTEST_CONTEXT)
    fit = fit_without_speed(today.shape, low, today.places)
    partition = _best(today, fit)
    if not fit.fits(partition):
        return
    longest = fit.capacity(partition, today.serving.max_model_len).longest_context // CONTEXT_STEP * CONTEXT_STEP
    if SHORTEST_CONTEXT <= longest < today.serving.max_model_len:
        exact = fit_without_speed(today.shape, replace(low, max_model_len=longest), today.places)
        if exact.fits(partition):
            what = f"ppdeploy_max_model_len: {longest}"
            yield _change(today, exact, partition, what, setting={"ppdeploy_max_model_len": longest})


def _quantised(today: Today, name: str, share: float) -> Iterator[Change]:
    shape = today.shape.model_copy(update={"layers": tuple(_scaled(layer, share) for layer in today.shape.layers)})
    fit = fit_without_speed(shape, today.serving, today.places)
    partition = _best(today, fit)
    if fit.fits(partition):
        yield _change(today, fit, partition, name, estimate=True)


def _scaled(layer: Layer, share: float) -> Layer:
    sizes = {name: int(getattr(layer, name) * share) for name in ("weight_bytes", "active_bytes", "expert_bytes")}
    return layer.model_copy(update=sizes)


def _more_nodes(today: Today) -> Iterator[Change]:
    """Propose the least number of nodes like the last one that make room."""
    last = [place for place in today.places if place.node_rank == today.places[-1].node_rank]
    for more in range(1, MOST_NODES_MORE + 1):
        places = [*today.places, *last * more]
        if len(places) > len(today.shape.layers):
            return
        serving = replace(today.serving, pipeline_parallel_size=len(places))
        fit = fit_without_speed(today.shape, serving, places)
        partition = fit.choose("context")
        if fit.fits(partition):
            count = f"{more} more node{'s' if more > 1 else ''}"
            yield _change(today, fit, partition, f"{count} like {last[0].host}")
            return
