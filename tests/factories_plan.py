"""Specs, models and plans for tests: a tiny model on two cpu nodes, unless a test changes something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppdeploy.facts import NodeFacts
from ppdeploy.manifest import Manifest, ManifestFile
from ppdeploy.plan import PipelinePlan, Plan
from ppdeploy.play import make_plan
from ppdeploy.sources import ModelSource
from ppdeploy.spec import GatewayHost, HostSpec, HostVars, PipelineSpec, PipelineVars, Spec
from tests.factories import make_cluster
from tests.factories_model import make_shape


def make_source(
    name: str = "tiny-llama", *, layers: int = 4, weight_bytes: int = 8_400_000, **shape: Any
) -> ModelSource:
    """Return a model folder's source; `shape` replaces fields of its ModelShape."""
    files = (
        ManifestFile(path="config.json", size=700, sha256="a" * 64),
        ManifestFile(path="model.safetensors", size=weight_bytes, sha256="b" * 64),
    )
    return ModelSource(
        kind="folder",
        name=name,
        location=f"/srv/models/{name}",
        endpoint=None,
        commit=None,
        shape=make_shape(layers=layers, weight_bytes=weight_bytes).model_copy(update=shape),
        manifest=Manifest(files=files),
    )


def make_pipeline_spec(
    hosts: list[str], name: str = "tiny", *, host_vars: dict[str, dict[str, Any]] | None = None, **wants: Any
) -> PipelineSpec:
    """Return a pipeline's spec; `wants` are variables without their prefix, `host_vars` those of single hosts."""
    values = {"model": "./tiny-llama", "device": "cpu", "max_model_len": 1024, "kv_cache_gib": 1, **wants}
    return PipelineSpec(
        name=name,
        hosts=tuple(
            HostSpec(name=host, address=host, vars=HostVars(**(host_vars or {}).get(host, {}))) for host in hosts
        ),
        vars=PipelineVars(**values),
        has_hf_token=False,
        model_path=None,
        wheelhouse_path=None,
    )


def make_spec(*pipelines: PipelineSpec, gateways: dict[str, str] | None = None) -> Spec:
    """Return the spec of a cluster; `gateways` are the hosts of the group `gateway` with their addresses."""
    group = tuple(GatewayHost(name=host, address=address) for host, address in (gateways or {}).items())
    return Spec(cluster="lab", inventory_dir=Path("inventory/lab"), pipelines=pipelines, gateways=group)


def make_complete_plan(
    facts: dict[str, NodeFacts] | None = None, source: ModelSource | None = None, **wants: Any
) -> Plan:
    """Return the complete plan of one pipeline over all hosts of `facts`."""
    facts = facts or make_cluster(2)
    spec = make_pipeline_spec(list(facts), **wants)
    return make_plan(make_spec(spec), facts, {spec.name: source or make_source()})


def make_pipeline(**options: Any) -> PipelinePlan:
    """Return the only pipeline of `make_complete_plan`."""
    return make_complete_plan(**options).pipelines[0]
