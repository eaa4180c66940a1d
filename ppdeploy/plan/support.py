"""Which models vLLM splits over a pipeline, and which GPUs run which quantisation: tables with their version."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

Capability = tuple[int, int]
"""CUDA compute capability, such as (8, 9)."""

UNKNOWN_CAPABILITY: Capability = (0, 0)
"""Neither the driver nor the table of GPUs says; no rule applies."""

OLDEST_CAPABILITY: Capability = (7, 5)
"""CUDA 13, which the wheels of the pinned vLLM are built with, compiles for Turing and newer."""

MIN_CAPABILITY: dict[str, Capability] = {
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), (7, 5)),
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin"), (6, 0)),
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "deepseek_v4_fp8"), (7, 5)),
    **dict.fromkeys(("nvfp4", "modelopt_fp4", "nvfp4_per_token", "mxfp8", "modelopt_mxfp8"), (7, 5)),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4", "modelopt", "modelopt_mixed", "fbgemm_fp8", "experts_int8"), (8, 0)),
    **dict.fromkeys(("torchao", "humming", "online", "int8_per_channel_weight_only"), (7, 5)),
    **dict.fromkeys(("compressed-tensors", "quark", "moe_wna16"), (7, 0)),
    **dict.fromkeys(("inc", "auto-round", "auto_round"), (6, 0)),
    "fp_quant": (10, 0),
}
"""Lowest capability by method: `get_min_capability` of vLLM 0.32.0, vllm/model_executor/layers/quantization.

Keys are all of its QuantizationMethods, and the names that checkpoints use for them. fp8 runs below 8.9 and nvfp4 below
10.0 with widened weights (Marlin); of `compressed-tensors` the schemes may ask for more.
"""

AUX_ARCHITECTURES = frozenset(
    {
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
        *(
            "SarvamMoEForCausalLM",
            "DeepseekV4ForCausalLM",
            "MiniMaxM3SparseForCausalLM",
            "KimiK3ForConditionalGeneration",
        ),
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
