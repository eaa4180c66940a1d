"""What the options of `vllm serve` must hold that the plan reads: a value it would misread must not pass unseen.

vLLM's parser takes `8k` for a number and JSON text for a map; the plan would take such a value for none and size
something else. Facts: vLLM 0.32.0 (vllm/config/model.py, ModelDType; vllm/config/cache.py, CacheDType;
vllm/engine/arg_utils.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppdeploy.spec.plain import shown
from ppdeploy.spec.serve_options import flags

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")

CACHE_DTYPES = (
    *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "fp8_per_token_head"),
    *("int8_per_token_head", "int4_per_token_head", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla", "ultraquant_4bit"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
)

MOST = 2**31 - 1
"""The largest number that an option may have; vLLM keeps these in 32 bits."""

NUMBERS = frozenset({"max-num-seqs", "max-num-batched-tokens", "block-size", "num-gpu-blocks-override"})

FLAGS = frozenset(
    {
        *("enable-prefix-caching", "enable-chunked-prefill", "enforce-eager", "language-model-only"),
        *("enable-expert-parallel", "async-scheduling", "skip-mm-profiling", "enable-elastic-ep", "enable-dbo"),
        *("enable-return-routed-experts", "enable-fault-tolerance"),
    }
)

WORDS = frozenset({"quantization", "load-format", "performance-mode"})

CHOICES = {"dtype": DTYPES, "kv-cache-dtype": CACHE_DTYPES}

MAPS = frozenset(
    {
        *("hf-overrides", "speculative-config", "attention-config", "quantization-config", "limit-mm-per-prompt"),
        *("compilation-config", "structured-outputs-config"),
    }
)


def tidy_option_value(name: str, value: Any) -> Any:
    """Return a value as the plan and vLLM read it: `"64"` is the number, `"true"` the truth value, where one is meant.

    Templates of Ansible and `-e name=value` make text of either, as the other variables of ppdeploy accept it.
    """
    if isinstance(value, str) and name in NUMBERS and value.isascii() and value.isdigit():
        return int(value) if len(value) <= len(str(MOST)) else value
    if isinstance(value, str) and name in (FLAGS | flags()) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def check_option_value(name: str, value: object) -> tuple[str, str] | None:
    """Return what is wrong with the value of an option that the plan reads, and what to write; None when all is well.

    `name` is vLLM's own spelling. Options that the plan does not read may have any value; null stands for no option.
    """
    positive = name.removeprefix("no-")
    if positive != name and positive in FLAGS:
        return f"sets {shown(name)}", f"write {positive}: false instead"
    if value is None:
        return None
    for names, right, what, remedy in _KINDS:
        if name in names and not right(value):
            return f"gives {shown(name)} the value {shown(value)}, which is no {what}", remedy.replace("{}", name)
    known = CHOICES.get(name)
    if known and value not in known:
        return f"gives {shown(name)} the value {shown(value)}", f"write one of {', '.join(known)}"
    return None


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


_KINDS: tuple[tuple[frozenset[str], Callable[[object], bool], str, str], ...] = (
    (NUMBERS, _number, "whole number from 1", "write a number such as {}: 64"),
    (FLAGS, lambda value: isinstance(value, bool), "truth value", "write {}: true or {}: false"),
    (WORDS, lambda value: isinstance(value, str) and bool(value), "word", "write one word"),
    (MAPS, lambda value: isinstance(value, dict), "map", "write a map below {}, not JSON text"),
)
