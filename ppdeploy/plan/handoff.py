"""What the handoff plugin will do with a pipeline, as far as the plan can tell.

The plugin decides for itself when a rank starts, and where it was not tested it leaves handoffs as vLLM makes them and
says so in vLLM's log; the plan tells the same before anything is installed. The tables are the plugin's own
(ppdeploy_handoff/src/ppdeploy_handoff), which the controller does not import; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypedDict

from ppdeploy.plan.network import handoff_bytes
from ppdeploy.plan.types import Finding

RAN: frozenset[tuple[str, str]] = frozenset({("0.26.0", "cuda"), ("0.33.0", "cuda"), ("0.32.0", "cpu")})
"""Version of vLLM and device that the plugin works with (`versions.py`)."""

ARCHITECTURES: frozenset[str] = frozenset(
    {
        *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM"),
        *("IQuestCoderForCausalLM", "InternLM3ForCausalLM", "LLaMAForCausalLM", "LlamaForCausalLM"),
        *("MiniMaxM2ForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
        *("Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "TeleChat3ForCausalLM"),
    }
)
"""Architectures of config.json that vLLM runs with a class of the plugin's `families.py` (vllm 0.32.0 and 0.33.0,
vllm/model_executor/models/registry.py, `_TEXT_GENERATION_MODELS`)."""


def why_idle(*, device: str, vllm_version: str, architecture: str, stages: int) -> str:
    """Return why the plugin would leave a pipeline's handoffs as vLLM makes them; empty where it works."""
    if stages < 2:
        return "there is one stage, so nothing is handed on"
    if (vllm_version, device) not in RAN:
        known = ", ".join(f"{version} on {kind}" for version, kind in sorted(RAN))
        return f"the handoff plugin was not tested with vLLM {vllm_version} on {device} (tested: {known})"
    if architecture not in ARCHITECTURES:
        return f"the handoff plugin does not know the layers of {architecture}"
    return ""


EIGHT_BIT_TAIL = 16
"""Bytes that a token has in `fp8` beside one for each value: `TAIL` of the plugin's fp8.py."""


def token_bytes(mode: str, hidden_size: int, value_bytes: int) -> int:
    """Return the bytes of one token at a stage boundary in a mode; hidden states have `value_bytes` bytes a value."""
    name = mode.partition(":")[0]
    if name == "off":
        return handoff_bytes(hidden_size, value_bytes)
    # What the plugin cannot send in eight bits (`fits` of fp8.py) travels as in the other modes.
    if name == "fp8" and hidden_size % EIGHT_BIT_TAIL == 0:
        return hidden_size + EIGHT_BIT_TAIL
    return handoff_bytes(hidden_size, value_bytes, 1)


def other_modes(mode: str) -> tuple[str, ...]:
    """Return the modes to compare a mode with, those to prefer first where several are as fast.

    fp8 is nobody's alternative but its own: only where it is set is a text wanted that is not quite the model's own.
    """
    modes = ["overlap", "overlap:0", "lossless", "off"]
    if mode.startswith("fp8"):
        modes += ["fp8", "fp8:0"]
    return tuple(other for other in modes if other != mode)


class Overlap(TypedDict):
    """How the speed model takes a mode: fields of `ppdeploy.plan.serving.Settings`."""

    overlap: bool
    stagger: int | None


def as_predicted(mode: str, *, staggers: bool = True) -> Overlap:
    """Return what a mode decides of the speed model's settings; how many bytes it sends is no part of these.

    `staggers` tells whether the plugin may change vLLM's rhythm there (`may_stagger`).
    """
    name, _, tokens = mode.partition(":")
    overlaps = name in ("overlap", "fp8")
    if not staggers:
        return Overlap(overlap=overlaps, stagger=0)
    return Overlap(overlap=overlaps, stagger=int(tokens) if tokens else None)


def may_stagger(device: str, env: Mapping[str, str], arguments: Mapping[str, object]) -> bool:
    """Tell whether the plugin changes the rhythm of requests where there are two stages (`possible` of its stagger.py).

    Only Model Runner V2 with asynchronous scheduling and without drafts has the one that it knows.
    """
    return (
        device == "cuda"
        and env.get("VLLM_USE_V2_MODEL_RUNNER") != "0"
        and arguments.get("async-scheduling") is not False
        and arguments.get("speculative-config") is None
    )


def handoff_findings(pipeline: str, mode: str, idle: str, *, staggers: bool, hidden_size: int) -> Iterator[Finding]:
    """Yield that a mode changes nothing, for the reason `idle` of `why_idle`, or that a part of it does not."""
    name, _, tokens = mode.partition(":")
    if not idle and name == "fp8" and hidden_size % EIGHT_BIT_TAIL:
        yield Finding(
            id="handoff-fp8",
            verdict="ready",
            pipeline=pipeline,
            reason=f"ppdeploy_handoff: {mode} does what overlap does: it takes a hidden size that is a multiple of"
            f" {EIGHT_BIT_TAIL}, and the model's is {hidden_size}",
            remedy=f"set ppdeploy_handoff: overlap{mode.removeprefix(name)}, or leave it",
        )
    if not idle and tokens and int(tokens) and not staggers:
        yield Finding(
            id="handoff-tokens",
            verdict="ready",
            pipeline=pipeline,
            reason=f"ppdeploy_handoff: {mode} does what {name} does: a handoff gets a step of its own with two stages"
            " on GPUs alone, with vLLM's default model runner and schedule and without speculation",
            remedy=f"set ppdeploy_handoff: {name}, or leave it",
        )
    if idle and mode != "off":
        reason, remedy = f"ppdeploy_handoff: {mode} will change nothing: {idle}", "remove ppdeploy_handoff"
        yield Finding(id="handoff-idle", verdict="slow", pipeline=pipeline, reason=reason, remedy=remedy)
