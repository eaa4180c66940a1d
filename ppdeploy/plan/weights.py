"""Which of a model's files each node gets: those of its own stages, where that is less than all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppdeploy.manifest import Manifest, is_weight_file
from ppdeploy.model.places import FilePlace
from ppdeploy.plan.types import NodeModel, Stage
from ppdeploy.sources import ModelSource

WORTH_IT = 0.95
"""Share of the bytes above which a node gets all files: leaving out a small one is not worth a second digest."""

#: What vLLM loads the files by their index with; others (sharded_state, mistral, bitsandbytes, ...) find their files
#: in ways of their own.
_BY_INDEX = frozenset({"auto", "hf", "safetensors"})


def node_models(
    source: ModelSource, stages: Sequence[Sequence[Stage]], models_dir: str, *, want: str, vllm_args: Mapping[str, Any]
) -> tuple[NodeModel, ...]:
    """Return the model's files on each node, whose stages are given in node rank order.

    The head always gets all of them: the others pull from it, also after the split has changed. `want` is `stage` or
    `full` (`ppdeploy_weights`).
    """
    last = max(stage.index for mine in stages for stage in mine)
    by_stage = (
        want == "stage"
        and str(vllm_args.get("load-format") or "auto") in _BY_INDEX
        and any(file.path.endswith(".safetensors.index.json") for file in source.manifest.files)
    )
    return tuple(
        _node_model(source, mine, last, models_dir, by_stage=by_stage and rank > 0) for rank, mine in enumerate(stages)
    )


def _node_model(
    source: ModelSource, stages: Sequence[Stage], last: int, models_dir: str, *, by_stage: bool
) -> NodeModel:
    whole = source.manifest
    mine = whole
    if by_stage and source.places:
        others = {file.path for file in whole.files if is_weight_file(file.path)}
        others -= {path for path in others if _is_needed(path, source, stages, last)}
        part = Manifest(files=tuple(file for file in whole.files if file.path not in others))
        if part.weight_bytes < WORTH_IT * whole.weight_bytes:
            mine = part
    return NodeModel(
        directory=f"{models_dir}/{source.directory_name(mine)}",
        manifest_digest=mine.digest,
        bytes=mine.total_bytes,
        files=tuple(file.path for file in mine.files) if mine is not whole else None,
    )


def _is_needed(path: str, source: ModelSource, stages: Sequence[Stage], last: int) -> bool:
    place = source.places.get(path)
    return place is None or any(_is_of(place, stage, last) for stage in stages)


def _is_of(place: FilePlace, stage: Stage, last: int) -> bool:
    layers = range(stage.first_layer, stage.first_layer + stage.layers)
    return (
        place.everywhere
        or (place.first and stage.index == 0)
        or (place.last and stage.index == last)
        or any(layer in layers for layer in place.layers)
    )
