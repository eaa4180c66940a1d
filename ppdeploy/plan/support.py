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

METHOD_FAMILIES = (
    frozenset({"awq", "awq_marlin", "auto_awq", "moe_wna16"}),
    frozenset({"gptq", "gptq_marlin", "auto_gptq", "moe_wna16"}),
    frozenset({"auto-round", "auto_round", "inc"}),
    frozenset({"gptq", "inc"}),
    frozenset({"awq", "inc"}),
    frozenset({"modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"}),
    frozenset({"mxfp4", "gpt_oss_mxfp4"}),
    frozenset({"fp8", "deepseek_v4_fp8"}),
)
"""Methods that vLLM 0.32.0 takes for one another's checkpoints (`override_quantization_method`); humming takes any."""

ANY_DTYPE_METHODS = frozenset({"compressed-tensors", "compressed_tensors", "torchao"})
BF16_METHODS = frozenset({"mxfp4", "gpt_oss_mxfp4", "fp_quant", "modelopt_mxfp8"})
"""Methods that compute in any number format, and in bfloat16 alone; all others in both of 16 bits, not in float32
(`get_supported_act_dtypes` of vLLM 0.32.0)."""

BF16_MODELS = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
"""Model types that vLLM 0.32.0 refuses to run in float16."""

UNCOUNTED_CACHES = ("turboquant", "ultraquant", "fp8_ds_mla", "nvfp4_ds_mla")
"""Beginnings of formats of the KV cache whose layout is not worked out here; they are counted as 16 bits."""

UNCOUNTED_OPTIONS = frozenset(
    {
        *("cpu-offload-gb", "offload-backend", "offload-group-size", "enable-lora", "decode-context-parallel-size"),
        *("kv-cache-dtype-skip-layers", "mamba-cache-dtype", "mamba-ssm-cache-dtype", "disable-sliding-window"),
        *("disable-hybrid-kv-cache-manager", "cudagraph-capture-sizes", "max-cudagraph-capture-size", "model-impl"),
        *("mm-processor-kwargs", "mm-encoder-only", "enable-mm-embeds"),
        *("kv-transfer-config", "enable-eplb", "eplb-config", "kv-sharing-fast-prefill", "runner", "convert"),
    }
)
"""Options of `vllm serve` that change what memory a rank needs, in ways that the memory table does not follow."""

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
