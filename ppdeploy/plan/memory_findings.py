"""What the plan says of the memory: what is lacking and what would help, what is estimated, what is already taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppdeploy.model import ModelShape
from ppdeploy.plan.fit import Fit
from ppdeploy.plan.memory import Place, Serving
from ppdeploy.plan.trial import vision_tokens
from ppdeploy.plan.types import Capacity, Finding, StageMemory
from ppdeploy.plan.words import gib_text


def memory_findings(pipeline: str, fit: Fit, memory: Sequence[StageMemory], capacity: Capacity) -> Iterator[Finding]:
    """Yield what a reader of a memory table must know; `memory` and `capacity` are those of the split that was chosen.

    Blocked where the pipeline does not fit, or where vLLM would find less memory free than it is to take.
    """
    shape, serving = fit.sizes.shape, fit.sizes.serving
    yield from _estimated(pipeline, shape)
    yield from _images(pipeline, shape, serving, fit.places[0].host)
    yield from _lacking(pipeline, fit, memory, capacity)
    yield from _over_asked(pipeline, fit.places, memory)


def _estimated(pipeline: str, shape: ModelShape) -> Iterator[Finding]:
    """Yield a finding where the memory table is about a model whose layers are not known exactly."""
    if not shape.exact:
        yield Finding(
            id="model-estimated",
            verdict="ready",
            pipeline=pipeline,
            reason=f"the sizes of this model are estimated: {shape.note}",
            remedy="leave more room than the table shows, or compare it with the log of the first start",
        )


def _images(pipeline: str, shape: ModelShape, serving: Serving, host: str) -> Iterator[Finding]:
    """Yield a finding where the first stage keeps room for a trial of the tower for images."""
    if shape.vision is None or not serving.vision_trial:
        return
    tokens = vision_tokens(shape.vision, serving.batched_tokens, serving.sequences)
    yield Finding(
        id="images",
        verdict="ready",
        pipeline=pipeline,
        host=host,
        reason=f"at the start vLLM tries the tower for images with {tokens:,} tokens' worth of the largest ones; the "
        "activations of the first stage count what that takes, as worked out, not measured",
        remedy="where nobody sends images, language-model-only: true in ppdeploy_vllm_args leaves the tower out",
    )


def _lacking(pipeline: str, fit: Fit, memory: Sequence[StageMemory], capacity: Capacity) -> Iterator[Finding]:
    """Yield a blocked finding on the stage that lacks most, with the changes that would help."""
    if capacity.fits:
        return
    row = memory[capacity.limiting_stage]
    others = sum(1 for one in memory if one.shortfall_bytes) - 1
    yield Finding(
        id="memory",
        verdict="blocked",
        pipeline=pipeline,
        host=row.host,
        reason=_too_little(fit, row) + (f"; {others + 1} of {len(memory)} stages lack memory" if others > 0 else ""),
        remedy=_remedy(fit, row, capacity),
    )


def _too_little(fit: Fit, row: StageMemory) -> str:
    request = (fit.sizes.blocks_wanted + 1) * row.kv_block_bytes
    length = f"{fit.sizes.serving.max_model_len:,}"
    needs = f"{gib_text(request)} of KV cache"
    fixed = row.runtime_bytes + row.weight_bytes + row.activation_bytes + row.graph_bytes
    asked = _asked_cache(fit, row)
    if asked and row.utilization is not None and row.kv_bytes < request:
        return (
            f"a request of {length} tokens needs {needs} in stage {row.stage}, and {asked} is "
            f"{gib_text(row.kv_bytes)} there"
        )
    if asked and row.utilization is not None:
        return (
            f"stage {row.stage} needs {gib_text(fixed)} on each GPU and {asked} is {gib_text(row.kv_bytes)} there, and "
            f"the GPU has {gib_text(row.memory_bytes - row.others_bytes)}"
        )
    if row.utilization is None and fixed + row.kv_bytes > row.memory_bytes:
        whole = gib_text(row.memory_bytes)
        return f"its rank needs about {gib_text(fixed + row.kv_bytes)} of memory and the host has {whole}"
    if row.utilization is None:
        return (
            f"a request of {length} tokens needs {needs} in stage {row.stage}, and there is room for "
            f"{gib_text(row.kv_bytes)}"
        )
    return (
        f"stage {row.stage} ({row.layers} layers) lacks {gib_text(row.shortfall_bytes)} on each GPU: weights "
        f"{gib_text(row.weight_bytes)}, activations {gib_text(row.activation_bytes)}, CUDA graphs "
        f"{gib_text(row.graph_bytes)} and {needs} for one request of {length} tokens, and vLLM may take "
        f"{gib_text(int(row.memory_bytes * row.utilization))} of {gib_text(row.memory_bytes)}"
    )


def _asked_cache(fit: Fit, row: StageMemory) -> str:
    """Return what the inventory asks for as the KV cache of a stage, in words; empty: what is left."""
    if fit.sizes.serving.blocks is not None:
        return "num-gpu-blocks-override in ppdeploy_vllm_args"
    return "ppdeploy_kv_cache_gib" if fit.places[row.stage].kv_bytes is not None else ""


def _remedy(fit: Fit, row: StageMemory, capacity: Capacity) -> str:
    if capacity.changes:
        return "it would fit with " + ", or with ".join(change.what for change in capacity.changes)
    if asked := _asked_cache(fit, row):
        request = (fit.sizes.blocks_wanted + 1) * row.kv_block_bytes
        return f"{'raise' if row.kv_bytes < request else 'lower'} {asked}, or remove it"
    if row.utilization is None:
        return "lower ppdeploy_kv_cache_gib, or add nodes"
    return "no small change makes it fit: add nodes, or take a smaller model"


def _over_asked(pipeline: str, places: Sequence[Place], memory: Sequence[StageMemory]) -> Iterator[Finding]:
    """Yield a blocked finding for each stage whose share is not free when vLLM starts, which it then refuses."""
    for place, row in zip(places, memory, strict=True):
        if place.utilization is None:
            continue
        free = place.memory_bytes - place.others_bytes - row.runtime_bytes
        asked = int(place.memory_bytes * place.utilization)
        if asked > free:
            yield Finding(
                id="gpu-memory-taken",
                verdict="blocked",
                pipeline=pipeline,
                host=place.host,
                reason=f"vLLM is to take {gib_text(asked)} of {place.device} and about {gib_text(free)} are free",
                remedy=f"set ppdeploy_gpu_memory_utilization to {max(free, 0) * 100 // place.memory_bytes / 100:g} or "
                "less, or stop the other programs on that GPU",
            )
