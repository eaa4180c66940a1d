"""How long a request a model takes, where positions are scaled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppdeploy.errors import InputError
from ppdeploy.model import Loading, ModelShape, parse_config
from ppdeploy.plan.scheduler import serving_of
from tests.factories_model import TINY_LLAMA, real_shape


def tiny(**changes: Any) -> ModelShape:
    return parse_config(json.dumps(TINY_LLAMA | changes).encode(), where="config.json", weight_bytes=0)


@pytest.mark.parametrize(
    ("changes", "longest", "default"),
    [
        ({}, 4096, 4096),
        # Kinds that multiply the limit.
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384, 16384),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 8192, 8192),
        # Those whose limit is stretched already.
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 4096, 4096),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096, 4096),
        ({"rope_parameters": {"rope_type": "default"}}, 4096, 4096),
        # One for each kind of layer.
        (
            {"rope_parameters": {"full": {"rope_type": "linear", "factor": 8}, "sliding": {"rope_type": "default"}}},
            32768,
            32768,
        ),
        # Two lengths, of which the short one is served unless another is asked for.
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 1024}, 4096, 1024),
        ({"rope_scaling": None, "original_max_position_embeddings": 1024}, 4096, 4096),
        ({"max_position_embeddings": None}, None, None),
        # A second limit counts for a length that is asked for.
        ({"model_max_length": 16384}, 16384, 4096),
        ({"model_max_length": 1024}, 4096, 4096),
        ({"model_max_length": 1e30}, 4096, 4096),
        ({"rope_scaling": "x"}, 4096, 4096),
    ],
)
def test_lengths_follow_the_scaling_of_positions(changes: dict[str, Any], longest: int | None, default: int) -> None:
    shape = tiny(**changes)
    assert (shape.max_position_embeddings, shape.default_length) == (longest, default)


def test_gemma_3_has_its_scaling_in_its_limit() -> None:
    assert real_shape("medgemma-27b").max_position_embeddings == 131072


@pytest.mark.parametrize("factor", [0, -1, 1e300, float("inf"), True, "4", [4]])
def test_a_factor_that_no_model_has_is_refused(factor: Any) -> None:
    text = json.dumps(TINY_LLAMA | {"rope_scaling": {"type": "linear", "factor": factor}}).replace("Infinity", "1e999")
    with pytest.raises(InputError, match="the factor of rope_scaling"):
        parse_config(text.encode(), where="config.json", weight_bytes=0)
    overrides = {"rope_scaling": {"type": "linear", "factor": -2}}
    with pytest.raises(InputError, match="correct hf-overrides"):
        parse_config(json.dumps(TINY_LLAMA).encode(), where="x", weight_bytes=0, loading=Loading(overrides=overrides))


def test_the_default_length_is_what_a_plan_is_made_for() -> None:
    shape = tiny(rope_scaling={"type": "longrope"}, original_max_position_embeddings=1024)
    lengths = [
        serving_of(
            device="cuda",
            shape=shape,
            tensor_parallel_size=1,
            pipeline_parallel_size=2,
            max_model_len=asked,
            defaults=[(2048, 256)],
            args={},
        ).max_model_len
        for asked in (None, 4096)
    ]
    assert lengths == [1024, 4096]
