"""What the rules look at of a pipeline: the inventory, the checkpoint and the GPUs together."""

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.plan import PipelinePlan
from ppdeploy.plan.load import compute_type
from ppdeploy.short_facts import ShortFacts, expand
from tests.factories_model import real_shape
from tests.factories_plan import make_pipeline, make_pipeline_spec, make_source, make_spec
from tests.unit.test_plan_decide import finding


def plan(name: str, *, gpus: int = 1, gpu: str = "H100", **wants: Any) -> PipelinePlan:
    """Return the plan of a published model on two hosts with so many of a GPU."""
    values = {"device": "cuda", "kv_cache_gib": None, "max_model_len": 4096, **wants}
    short = {f"node{n}": ShortFacts(gpus=(gpu,) * gpus, memory_gib=256) for n in (1, 2)}
    facts = expand(short, make_spec(make_pipeline_spec(list(short), **values)))
    source = make_source(name).model_copy(update={"shape": real_shape(name)})
    return make_pipeline(facts=facts, source=source, **values)


def test_experts_that_vllm_rounds_up_to_whole_blocks_take_any_number_of_gpus() -> None:
    # gpt-oss: 2880 columns on 8 GPUs are 360 each, and a block has 32; people run it so.
    assert finding(plan("gpt-oss-120b", gpus=8), "tp-quantization-block") is None
    found = finding(plan("qwen3-235b-a22b-fp8", gpus=8), "tp-quantization-block")
    assert found is not None
    assert found.verdict == "blocked"


def test_a_length_above_the_models_own_is_blocked_with_both_numbers() -> None:
    found = finding(plan("qwen3-8b", max_model_len=131_072), "length")
    assert found is not None
    assert found.reason == "ppdeploy_max_model_len is 131,072 tokens, and the model takes 40,960"
    assert finding(plan("qwen3-8b", max_model_len=40_960), "length") is None


def test_drafts_of_its_own_need_layers_for_them() -> None:
    options = {"speculative-config": {"method": "mtp", "num_speculative_tokens": 1}}
    assert finding(plan("qwen3-8b", vllm_args=options), "speculation-no-drafts") is not None
    assert finding(plan("qwen3.5-27b", vllm_args=options), "speculation-no-drafts") is None


def test_a_model_that_cannot_be_float16_is_not_told_to_be() -> None:
    old = plan("gemma-3-4b", gpu="T4")
    assert finding(old, "gpu-bf16") is None
    found = finding(old, "gpu-bf16-only")
    assert found is not None
    assert "half" not in found.remedy


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        (None, "bf16"),
        ("awq", "bf16"),
        ("fp8", "fp8"),
        ("fp8_per_block", "fp8"),
        ("mxfp8", "fp8"),
        ("modelopt", "fp8"),
        ("modelopt_fp4", "fp4"),
        ("modelopt_mixed", "bf16"),
        ("mxfp4", "bf16"),
    ],
)
def test_only_fp8_and_nvfp4_compute_in_their_own_type(method: str | None, kind: str) -> None:
    assert compute_type(method) == kind


def test_the_name_of_the_number_format_is_the_one_that_is_served() -> None:
    assert plan("qwen3-8b").model.dtype == "bfloat16"
    assert plan("qwen3-8b", vllm_args={"dtype": "half"}).model.dtype == "float16"
    wide = plan("qwen3-8b", vllm_args={"dtype": "float32"})
    assert wide.model.dtype == "float32"
    assert "computing in float32" in wide.outlook.rough


def test_a_gpu_beside_an_arm_processor_is_not_promised_on_another() -> None:
    found = finding(plan("qwen3-8b", gpu="DGX Spark"), "gpu-machine")
    assert found is not None
    assert (found.verdict, found.host) == ("blocked", "node1")
    assert finding(plan("qwen3-8b"), "gpu-machine") is None
