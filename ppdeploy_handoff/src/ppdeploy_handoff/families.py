"""For which models the sum of the two handoff tensors is as good as the two, and how exact it is.

Read in vLLM 0.33.0 (vllm/model_executor/models/FILE, class in brackets); `forward` of each layer has the same text in
0.26.0 and 0.32.0, and that of each model too, but for auxiliary hidden states for drafts, which Llama and Qwen2 hand on
since 0.32 (such a handoff holds more than the two tensors and travels as it is), and a default in Gemma 3. In all of these
the first thing a layer does with the two tensors is `hidden, residual = norm(hidden, residual)`, which adds them and
uses neither alone again; the norm after the last layer does the same, so a last stage without layers is covered too.

How exact (`r` is rounding to the tensors' type, `-0` the zero that changes nothing, not even the sign of a zero):
the sender sends s = r(h + r); the receiver hands its first layer h = s, residual = -0.
* The residual that leaves that norm is r(h + residual) in every implementation, so it is **equal to the bit** either way.
* What is normalised is r(h + residual) in vLLM's own CUDA kernel (csrc/layernorm_kernels.cu: the sum is formed in the
  tensors' type and then squared), hence **equal to the bit** there. The compiled form (vllm/ir/ops/layernorm.py, what
  torch.compile fuses, and what runs on CPUs) normalises the sum before it is rounded: with 16-bit types the input of ONE
  norm per stage boundary differs by at most half a unit in the last place, that is, by what the CUDA kernel does at
  every layer. With float32 there is nothing to round, and it is equal to the bit.
* Gemma's norm has no CUDA kernel in these versions, so it is always of the second kind.
"""

from __future__ import annotations

import enum


class Norm(enum.Enum):
    """Which norm adds the two tensors."""

    RMS = "RMSNorm: exact in vLLM's CUDA kernel, one rounding at a stage boundary when compiled"
    GEMMA = "GemmaRMSNorm: one rounding at a stage boundary"


# The class that vLLM runs (not `architectures` of config.json: several of those map to one class).
FAMILIES: dict[str, Norm] = {
    "LlamaForCausalLM": Norm.RMS,  # llama.py (LlamaDecoderLayer)
    "MistralForCausalLM": Norm.RMS,  # mistral.py (MistralDecoderLayer)
    "MixtralForCausalLM": Norm.RMS,  # mixtral.py (MixtralDecoderLayer)
    "MiniMaxM2ForCausalLM": Norm.RMS,  # minimax_m2.py (MiniMaxM2DecoderLayer)
    "Phi3ForCausalLM": Norm.RMS,  # phi3.py: a LlamaForCausalLM with other projection names
    "Qwen2ForCausalLM": Norm.RMS,  # qwen2.py (Qwen2DecoderLayer)
    "Qwen3ForCausalLM": Norm.RMS,  # qwen3.py (Qwen3DecoderLayer)
    "Qwen3MoeForCausalLM": Norm.RMS,  # qwen3_moe.py (Qwen3MoeDecoderLayer)
    "Glm4MoeForCausalLM": Norm.RMS,  # glm4_moe.py (Glm4MoeDecoderLayer)
    "Glm4ForCausalLM": Norm.RMS,  # glm4.py (Glm4DecoderLayer)
    "GptOssForCausalLM": Norm.RMS,  # gpt_oss.py (TransformerBlock)
    "Gemma2ForCausalLM": Norm.GEMMA,  # gemma2.py (Gemma2DecoderLayer)
    "Gemma3ForCausalLM": Norm.GEMMA,  # gemma3.py (Gemma3DecoderLayer)
}

# Not in the table, though their layers begin in the same way; each has a reason to be run before it is trusted:
#   Llama4, Qwen3Next, Qwen3_5: their served class is mostly a multimodal wrapper around the language model;
#   DeepseekV3, Glm4MoeLite, GlmMoeDsa: layers that may hold a slice of the tokens only (sequence parallel MoE), and in
#   float16 both tensors are scaled in the first layer alone;
#   NemotronH: mamba states handed through side channels between steps.


def known(model_class: str) -> Norm | None:
    """The norm that adds the two tensors in `model_class`, or None when they must travel as they are."""
    return FAMILIES.get(model_class)
