"""Clusters that people have, with models that people run on them: their plans are kept here and were read by hand.

`python -m tests.golden.plans.cases` writes the plans anew and prints them; REVIEW.md says what is right about each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ppdeploy.manifest import Manifest, ManifestFile
from ppdeploy.model import ModelShape, parse_config
from ppdeploy.plan import PipelinePlan, Plan
from ppdeploy.plan_report import plan_report
from ppdeploy.play import make_plan
from ppdeploy.short_facts import ShortFacts, expand
from ppdeploy.sources import ModelSource
from tests.factories_model import CONFIGS
from tests.factories_plan import make_pipeline_spec, make_spec

FOLDER = Path(__file__).parent


NVIDIA_FP8 = b'{"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": null, "exclude_modules": ["lm_head"]}}'
"""hf_quant_config.json as NVIDIA's tools write it for a whole model in FP8; the config alone does not say it."""


@dataclass(frozen=True)
class Case:
    """A model of tests/golden/models on hosts of so many GPUs."""

    config: str
    hosts: Sequence[Sequence[str]]
    """The GPUs of each host."""
    fabric: str
    wants: Mapping[str, Any] = field(default_factory=dict)


def same(hosts: int, gpus: int, name: str) -> list[list[str]]:
    """Return the GPUs of so many equal hosts."""
    return [[name] * gpus] * hosts


CASES: dict[str, Case] = {
    "qwen3-32b-2x-4090-1g": Case("qwen3-32b", same(2, 1, "RTX 4090"), "1g", {"max_model_len": 8192}),
    "qwen3-32b-fp8-2x-4090-1g": Case("qwen3-32b-fp8", same(2, 1, "RTX 4090"), "1g", {"max_model_len": 32768}),
    "llama-3.1-70b-fp8-24-and-48": Case(
        "llama-3.1-70b-fp8", [["RTX 4090"], ["RTX 6000 Ada"]], "10g", {"max_model_len": 4096}
    ),
    "llama-3.1-70b-fp8-48-and-48": Case(
        "llama-3.1-70b-fp8", same(2, 1, "RTX 6000 Ada"), "10g", {"max_model_len": 16384}
    ),
    "gpt-oss-120b-4x-4090": Case("gpt-oss-120b", same(4, 1, "RTX 4090"), "2.5g", {"max_model_len": 32768}),
    "deepseek-v3-2x-8-h100": Case("deepseek-v3", same(2, 8, "H100"), "100g", {"max_model_len": 32768}),
    "qwen3.5-27b-2x-2-4090": Case("qwen3.5-27b", same(2, 2, "RTX 4090"), "10g", {"max_model_len": 32768}),
    "llama-3.1-70b-2x-4-3090": Case("llama-3.1-70b", same(2, 4, "RTX 3090"), "10g", {"max_model_len": 16384}),
    "qwen3-235b-fp8-2x-4-a6000-ada": Case(
        "qwen3-235b-a22b-fp8", same(2, 4, "RTX 6000 Ada"), "25g", {"max_model_len": 32768}
    ),
    "qwen3-235b-nvfp4-2x-spark": Case(
        "qwen3-235b-a22b-nvfp4", same(2, 1, "DGX Spark"), "100g", {"max_model_len": 32768}
    ),
    "gemma-2-27b-3090-and-4090": Case("gemma-2-27b", [["RTX 3090"], ["RTX 4090"], ["RTX 4090"]], "2.5g"),
    "mixtral-8x7b-4x-a5000-1g": Case("mixtral-8x7b", same(4, 1, "RTX A5000"), "1g", {"max_model_len": 16384}),
}


def shape_of(name: str) -> ModelShape:
    """Return a model's shape; where NVIDIA's tools say apart how it is quantised, by that."""
    extra = CONFIGS.parent / "hf_quant_config" / f"{name}.json"
    text = (CONFIGS / f"{name}.json").read_bytes()
    quantization = extra.read_bytes() if extra.is_file() else NVIDIA_FP8 if name == "llama-3.1-70b-fp8" else None
    return parse_config(text, where=f"{name}.json", weight_bytes=0, quantization=quantization)


def plan_of(case: Case, *, curves: bool = False) -> Plan:
    """Return the plan of a case, from short facts."""
    short = {
        f"node{number}": ShortFacts(gpus=tuple(gpus), fabric=case.fabric, memory_gib=256)
        for number, gpus in enumerate(case.hosts, start=1)
    }
    spec = make_spec(
        make_pipeline_spec(list(short), **{"device": "cuda", "kv_cache_gib": None, "max_model_len": None, **case.wants})
    )
    shape = shape_of(case.config)
    sized = shape.model_copy(update={"weight_bytes": shape.loaded_bytes})
    files = (ManifestFile(path="config.json", size=700, sha256="a" * 64),)
    source = ModelSource(
        kind="hub",
        name=case.config,
        location=f"example/{case.config}",
        endpoint=None,
        commit="0" * 40,
        shape=sized,
        manifest=Manifest(files=files),
    )
    return make_plan(spec, expand(short, spec), {"tiny": source}, curves=curves)


def kept(pipeline: PipelinePlan) -> dict[str, Any]:
    """Return what of a plan is kept: the split, memory, what fits, speed and findings."""
    data = pipeline.model_dump(mode="json")
    argv = {node.host: [word for word in node.argv if "utilization" in word] for node in pipeline.nodes}
    return {
        "model_bytes": data["model"]["weight_bytes"],
        "tensor_parallel_size": data["tensor_parallel_size"],
        "partition": data["partition"],
        "utilization": sorted({word for words in argv.values() for word in words}),
        "memory": data["memory"],
        "capacity": data["capacity"],
        "outlook": data["outlook"],
        "findings": data["findings"],
    }


def main() -> None:
    """Write every plan anew, and print it."""
    console = Console(width=120, highlight=False)
    for name, case in CASES.items():
        plan = plan_of(case)
        (FOLDER / f"{name}.json").write_text(json.dumps(kept(plan.pipelines[0]), indent=1) + "\n")
        console.rule(name)
        for part in plan_report(plan):
            console.print(part, markup=False)


if __name__ == "__main__":
    main()
