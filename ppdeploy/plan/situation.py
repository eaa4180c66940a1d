"""What the rules look at, from spec, facts and the model."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.version import Version

from ppdeploy.facts import NodeFacts
from ppdeploy.model import ModelShape
from ppdeploy.plan.devices import lowest_gpu
from ppdeploy.plan.layout import Layout
from ppdeploy.plan.rules import Heads, Situation
from ppdeploy.plan.scheduler import cache_dtype
from ppdeploy.spec import PipelineSpec

ROUNDED_METHODS = frozenset({"mxfp4", "gpt_oss_mxfp4"})
"""Quantisations whose experts vLLM rounds up to whole blocks on each GPU, so that any number of GPUs will do (0.32.0,
vllm/model_executor/models/gpt_oss.py, `per_rank_intermediate_size_block`)."""


def situation_of(
    spec: PipelineSpec, shape: ModelShape, layout: Layout, facts: Mapping[str, NodeFacts], version: Version
) -> Situation:
    """Return what the rules look at for one pipeline."""
    wants = spec.vars
    on_gpus = wants.device == "cuda"
    latent = any(layer.attention == "mla" for layer in shape.layers)
    return Situation(
        pipeline=spec.name,
        device=wants.device,
        vllm_version=version,
        nodes=len(spec.hosts),
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        vllm_args=wants.vllm_args,
        env=wants.env,
        architecture=shape.architectures[0],
        model_type=shape.model_type or "",
        quantization=shape.quantization,
        dtype=shape.dtype or "unknown",
        cache_dtype=cache_dtype(shape, wants.vllm_args),
        max_model_len=wants.max_model_len,
        longest=shape.max_position_embeddings,
        # Of Nemotron's layers for multi-token prediction nothing is known here (docs/models.md).
        drafts=shape.mtp_layers > 0 if shape.exact and not shape.architectures[0].startswith("Nemotron") else None,
        heads=Heads(
            query=shape.num_attention_heads,
            # MLA keeps one latent, which every GPU has in full.
            key_value=0 if latent else shape.num_key_value_heads,
            linear=shape.linear_key_heads,
            widths=_widths(shape, experts_whole=wants.vllm_args.get("enable-expert-parallel") is True),
            quantization_block=0 if shape.quantization in ROUNDED_METHODS else shape.quantization_block or 0,
        ),
        gpus={host.name: lowest_gpu(facts[host.name], layout.ranks_per_node) for host in spec.hosts} if on_gpus else {},
    )


def _widths(shape: ModelShape, *, experts_whole: bool) -> tuple[int, ...]:
    """Return the widths of feed-forward layers that tensor parallelism divides."""
    dense = any(not layer.experts for layer in shape.layers)
    expert = None if experts_whole else shape.moe_intermediate_size
    return tuple(width for width in (shape.intermediate_size if dense else None, expert) if width)
