"""Which models vLLM splits over a pipeline, and which GPUs run which quantisation: tables with their version."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

Capability = tuple[int, int]
"""CUDA compute capability, such as (8, 9)."""

OLDEST_CAPABILITY: Capability = (7, 5)
"""CUDA 13, which the wheels of the pinned vLLM are built with, compiles for Turing and newer."""

MIN_CAPABILITY: dict[str, Capability] = {
    "awq": (7, 5),
    "auto_awq": (7, 5),
    "awq_marlin": (7, 5),
    "gptq": (6, 0),
    "auto_gptq": (6, 0),
    "gptq_marlin": (6, 0),
    "fp8": (7, 5),
    "fbgemm_fp8": (8, 0),
    "modelopt": (8, 0),
    "modelopt_fp4": (7, 5),
    "nvfp4": (7, 5),
    "mxfp4": (8, 0),
    "gpt_oss_mxfp4": (8, 0),
    "mxfp8": (7, 5),
    "compressed-tensors": (7, 0),
    "experts_int8": (8, 0),
    "torchao": (7, 5),
    "bitsandbytes": (7, 0),
    "quark": (7, 0),
}
"""Lowest capability by method: `get_min_capability` of vLLM 0.32.0, vllm/model_executor/layers/quantization.

fp8 and nvfp4 run below 8.9 and 10.0 with widened weights (Marlin); `compressed-tensors` also depends on its schemes.
"""

AUX_ARCHITECTURES = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        *("SarvamMoEForCausalLM", "DeepseekV4ForCausalLM", "MiniMaxM3SparseForCausalLM", "KimiK3ForCausalLM"),
    }
)
"""Architectures whose inner model sets `supports_aux_hidden_states_over_pp` in vLLM 0.32.0."""


@cache
def _table() -> dict[str, frozenset[str]]:
    text = resources.files("ppdeploy.plan").joinpath("pipeline_models.json").read_text(encoding="utf-8")
    document = json.loads(text)
    return {answer: frozenset(document[answer]) for answer in ("yes", "no")}


def pipeline_support(architecture: str) -> bool | None:
    """Say whether vLLM 0.32.0 can split an architecture over a pipeline; None when its registry does not have it."""
    table = _table()
    return True if architecture in table["yes"] else False if architecture in table["no"] else None


def capability_text(capability: Capability) -> str:
    """Return a capability as NVIDIA writes it, such as 8.9."""
    return f"{capability[0]}.{capability[1]}"
