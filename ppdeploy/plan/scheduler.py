"""What vLLM's scheduler is told, or takes by itself, as far as memory and time depend on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppdeploy.model import ModelShape
from ppdeploy.plan.memory import GIB, Serving
from ppdeploy.plan.support import UNCOUNTED_CACHES

UNKNOWN_LENGTH = 2048
"""vLLM's longest context of a model that does not say one (`vllm/config/model.py`)."""

Batch = tuple[int, int]
"""max_num_batched_tokens and max_num_seqs."""


def batch_default(device: str, name: str, memory_bytes: int, world_size: int) -> Batch:
    """Return what `vllm serve` takes on a GPU when nobody says (0.32.0, `get_batch_defaults`, arg_utils.py:2894)."""
    if device == "cpu":
        return 2048 * world_size, 128 * world_size
    if memory_bytes >= 160 * GIB:
        return 16384, 1024
    if memory_bytes >= 70 * GIB and "a100" not in name.lower():
        return 8192, 1024
    return 2048, 256


def batch_flags(defaults: Sequence[Batch], args: Mapping[str, Any]) -> dict[str, int]:
    """Return the flags that make all nodes agree where their GPUs would make them take different numbers.

    Each node takes its defaults from its own GPU; a head that schedules larger steps than a worker has buffers for
    breaks it. The smallest of each wins; what the inventory says stays.
    """
    if len(set(defaults)) < 2:
        return {}
    smallest = {"max-num-batched-tokens": min(d[0] for d in defaults), "max-num-seqs": min(d[1] for d in defaults)}
    return {name: value for name, value in smallest.items() if name not in args}


def serving_of(
    *,
    device: str,
    shape: ModelShape,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    max_model_len: int | None,
    defaults: Sequence[Batch],
    args: Mapping[str, Any],
) -> Serving:
    """Return how a model is served. `args` are the inventory's options of `vllm serve`, `defaults` each node's."""
    length = max_model_len or shape.default_length or shape.max_position_embeddings or UNKNOWN_LENGTH
    times = 2 if args.get("performance-mode") == "throughput" else 1
    sequences = _number(args, "max-num-seqs") or times * min(default[1] for default in defaults)
    tokens = _number(args, "max-num-batched-tokens")
    if tokens is None:
        tokens = times * min(default[0] for default in defaults)
        if args.get("enable-chunked-prefill") is False:
            tokens = max(tokens, length)
        tokens = min(tokens, sequences * length)
    cache = cache_dtype(shape, args)
    dtype = str(args.get("dtype") or "auto")
    speculation = args.get("speculative-config")
    method = str(speculation.get("method") or "") if isinstance(speculation, Mapping) else ""
    latent = any(layer.attention == "mla" for layer in shape.layers)
    return Serving(
        device=device,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        max_model_len=length,
        kv_cache_dtype=cache,
        kv_value_bytes=kv_value_bytes(cache, dtype, shape.dtype, shape.head_dim),
        block_tokens=_number(args, "block-size") or (128 if device == "cpu" else 64 if latent else 16),
        batched_tokens=tokens,
        sequences=min(sequences, tokens),
        prefix_caching=args.get("enable-prefix-caching") is not False,
        eager=args.get("enforce-eager") is True,
        draft=method == "mtp" or method.endswith("_mtp"),
        value_bytes=4 if dtype in ("float32", "float") else 2,
        vision_trial=args.get("skip-mm-profiling") is not True,
        vision_whole=args.get("mm-encoder-tp-mode") == "data",
        blocks=_number(args, "num-gpu-blocks-override"),
    )


def cache_dtype(shape: ModelShape, args: Mapping[str, Any]) -> str:
    """Return the format of the KV cache: the inventory's, else the one that the checkpoint asks for, else `auto`."""
    asked = str(args.get("kv-cache-dtype") or "auto")
    return asked if asked != "auto" else shape.cache_dtype or "auto"


def kv_value_bytes(cache: str, dtype: str, checkpoint: str | None, head_dim: int) -> float:
    """Return the bytes of one cached value. `auto` is the model's own type; nvfp4 has a scale for each 16 values.

    Formats with scales for each token and head keep four bytes beside the `head_dim` values of a head
    (vllm/v1/kv_cache_interface.py). A format that is not known here counts as 16 bits, which is never too little.
    """
    kind = cache if cache != "auto" else dtype
    if kind == "auto":
        # A checkpoint in 32 bits is served in 16 (vllm/config/model.py, `_resolve_auto_dtype`).
        kind = "bfloat16" if checkpoint in (None, "float32", "float") else checkpoint
    if kind.startswith(UNCOUNTED_CACHES):
        return 2
    if kind.endswith("_per_token_head"):
        return (0.5 if kind.startswith("int4") else 1) + 4 / head_dim
    if kind.startswith("fp8"):
        return 1
    if kind.startswith("nvfp4"):
        return 9 / 16
    return 4 if kind in ("float32", "float") else 2


def _number(args: Mapping[str, Any], name: str) -> int | None:
    value = args.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
