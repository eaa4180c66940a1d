"""From spec, facts and models to the plan: the one place where everything is decided. Pure: touches no host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from packaging.version import Version

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import NodeFacts
from ppdeploy.plan.agent import AGENT_PORT, agent_files, plan_agent
from ppdeploy.plan.bench import BenchRun
from ppdeploy.plan.checks import blocked_findings
from ppdeploy.plan.checks.gateway_host import certificate_findings, gateway_findings
from ppdeploy.plan.checks.situate import situation, unit_name
from ppdeploy.plan.checks.system import MASTER_PORTS, USR
from ppdeploy.plan.command import nccl_env, rank_argv, rank_env
from ppdeploy.plan.decide import decide
from ppdeploy.plan.devices import cuda_bytes
from ppdeploy.plan.driver import FILES as DRIVER_FILES
from ppdeploy.plan.driver import driver_files, driver_texts, plan_driver
from ppdeploy.plan.environment import choose_lock, packages_from, system_packages
from ppdeploy.plan.expect import SpeedModel, expect
from ppdeploy.plan.fabric import fabric_of
from ppdeploy.plan.firewall import UNIT as FIREWALL_UNIT
from ppdeploy.plan.firewall import firewall_files, plan_firewall
from ppdeploy.plan.gateway import UNIT as GATEWAY_UNIT
from ppdeploy.plan.gateway import gateway_ports, plan_gateways
from ppdeploy.plan.handoff import handoff_findings, may_stagger, why_idle
from ppdeploy.plan.layout import choose_layout, default_partition
from ppdeploy.plan.measured import MeasuredLink
from ppdeploy.plan.rdma import choose_rdma
from ppdeploy.plan.refinement import refine_plan
from ppdeploy.plan.rules import broken_rules
from ppdeploy.plan.sidecars import plan_sidecars, sidecar_file
from ppdeploy.plan.situation import situation_of
from ppdeploy.plan.tuning import mtu_findings, plan_tuning, tuning_files
from ppdeploy.plan.tunnel import UNIT as TUNNEL_UNIT
from ppdeploy.plan.tunnel import plan_tunnels, through, tunnel_files, tunnel_findings
from ppdeploy.plan.types import (
    DriverPlan,
    Environment,
    Fabric,
    Model,
    NodeModel,
    NodePlan,
    PipelinePlan,
    Plan,
    PlannedFile,
    TuningPlan,
    Work,
)
from ppdeploy.plan.weights import node_models
from ppdeploy.sources import ModelSource
from ppdeploy.spec import PipelineSpec, PipelineVars, Spec

ROOT = "/opt/ppdeploy"
UNIT_DIR = "/etc/systemd/system"
GENERIC_UNIT = f"{UNIT_DIR}/ppdeploy-rank@.service"
RELEASE_FILES = {
    "rank.conf": "rank.conf.j2",
    "rank.env": "rank.env.j2",
    "nccl.env": "nccl.env.j2",
}
"""Files of the release folder that are hashed into the release digest, with their templates."""


def build_plan(
    spec: Spec,
    facts: Mapping[str, NodeFacts],
    models: Mapping[str, ModelSource],
    *,
    latency_seconds: float | None = None,
    measured: Mapping[str, Sequence[MeasuredLink]] | None = None,
    curves: bool = False,
    benches: Sequence[BenchRun] = (),
) -> Plan:
    """Decide everything for all pipelines of a spec.

    `facts` holds those of every host of the pipelines, and may hold those of gateways outside of them; `models` the
    resolved source of each pipeline's model. The release digests and the work to do are filled in by
    `ppdeploy.render.complete`, which can render files. `latency_seconds`, `measured` (links as they were measured, by
    pipeline) and `curves` are for the predicted speed alone (see `ppdeploy.plan.expect`), and so are `benches`, the
    cluster's own benchmarks: what they change is `outlook.refinement`, which is shown, and nothing that is decided.

    Raises InputError for what the inventory got wrong and BlockedError for what the hosts do not have; findings that
    leave a plan possible are in the plan.
    """
    made_alone = []
    for own in spec.pipelines:
        made, model = _pipeline(
            spec.cluster,
            own,
            facts,
            models[own.name],
            latency_seconds=latency_seconds,
            measured=(measured or {}).get(own.name, ()),
            curves=curves,
        )
        # At another latency than the one that is assumed for all plans, a benchmark says something else.
        made_alone.append(made if latency_seconds is not None else refine_plan(made, model, benches))
    pipelines, gateways = plan_gateways(spec, made_alone, facts)
    situations = [situation(one, facts, plan) for one, plan in zip(spec.pipelines, pipelines, strict=True)]
    checked = []
    for place, plan in enumerate(pipelines):
        before = {other.pipeline: other.nodes for other in situations[:place]}
        blocked = blocked_findings(replace(situations[place], others=before))
        findings = (*plan.findings, *blocked, *certificate_findings(plan, facts))
        checked.append(plan.model_copy(update={"findings": findings}))
    found = gateway_findings(spec, facts)
    return Plan(
        cluster=spec.cluster,
        pipelines=tuple(checked),
        gateways=tuple(one.model_copy(update={"findings": found[one.host]}) for one in gateways),
    )


def speed_models(
    spec: Spec,
    facts: Mapping[str, NodeFacts],
    models: Mapping[str, ModelSource],
    *,
    measured: Mapping[str, Sequence[MeasuredLink]] | None = None,
) -> dict[str, tuple[PipelinePlan, SpeedModel | None]]:
    """Return, for each pipeline, its plan as far as `build_plan` makes it and the model that its speed follows from."""
    return {
        own.name: _pipeline(
            spec.cluster,
            own,
            facts,
            models[own.name],
            latency_seconds=None,
            measured=(measured or {}).get(own.name, ()),
            curves=False,
        )
        for own in spec.pipelines
    }


def _pipeline(
    cluster: str,
    spec: PipelineSpec,
    facts: Mapping[str, NodeFacts],
    source: ModelSource,
    *,
    latency_seconds: float | None,
    measured: Sequence[MeasuredLink],
    curves: bool,
) -> tuple[PipelinePlan, SpeedModel | None]:
    wants = spec.vars
    hosts = [host.name for host in spec.hosts]
    missing = [host for host in hosts if host not in facts]
    if missing:
        raise InputError(
            f"there are no facts of {', '.join(missing)}",
            where=f"pipeline {spec.name}",
            remedy="a plan needs the facts of every node of a pipeline: add the host to --limit or to the facts file",
        )
    every = [facts[host] for host in hosts]
    drivers = {host: plan_driver(facts[host], wants, spec.name, spec.wheelhouse, every) for host in hosts}
    _refuse_without_driver(spec.name, facts, drivers)
    layout = choose_layout(
        pipeline=spec.name,
        device=wants.device,
        hosts=hosts,
        gpus=[len(facts[host].gpus) for host in hosts],
        layers=source.shape.num_hidden_layers,
        tensor_parallel_size=wants.tensor_parallel_size,
        pipeline_parallel_size=wants.pipeline_parallel_size,
        partition=wants.layer_partition,
    )
    decision = decide(spec, facts, source.shape, layout, unit_name(spec.name))
    layout = decision.layout
    wire = fabric_of(spec, facts)
    tunnels = plan_tunnels(spec, facts, wire)
    # Where ranks and agents talk; what is set on a NIC is set on the wire.
    fabric = {host: through(tunnels.get(host), wire[host]) for host in hosts}
    lock = choose_lock(spec, facts)
    idle = why_idle(
        device=wants.device,
        vllm_version=lock.vllm_version,
        architecture=source.shape.architectures[0],
        stages=layout.pipeline_parallel_size,
    )
    staggers = layout.pipeline_parallel_size == 2 and may_stagger(wants.device, wants.env, wants.vllm_args)
    expected = expect(
        spec.name,
        decision,
        source.shape,
        fabric,
        latency_seconds=latency_seconds,
        measured=measured,
        dtype=str(wants.vllm_args.get("dtype") or ""),
        handoff="off" if idle else wants.handoff,
        overlap_possible=not idle,
        staggers=staggers,
        curves=curves,
    )
    environment = Environment(
        vllm_version=lock.vllm_version,
        torch_version=lock.torch_version,
        lock=lock.path.name,
        lock_digest=lock.digest,
        python=lock.python,
        directory=f"{ROOT}/venvs/{lock.directory_name}",
    )
    model = Model(
        name=source.name,
        kind=source.kind,
        source=source.location,
        commit=source.commit,
        architecture=source.shape.architectures[0],
        layers=source.shape.num_hidden_layers,
        dtype=_dtype(str(wants.vllm_args.get("dtype") or "auto"), source.shape.dtype),
        quantization=source.shape.quantization,
        parameters=source.shape.total_parameters,
        active_parameters=source.shape.active_parameters,
        loaded_bytes=source.shape.loaded_bytes,
        weight_bytes=source.shape.weight_bytes,
        manifest_digest=source.manifest.digest,
    )
    placed = node_models(
        source,
        [layout.stages(rank) for rank in range(len(hosts))],
        wants.models_dir,
        want=wants.weights,
        vllm_args={**decision.flags, **wants.vllm_args},
    )
    served = wants.served_model_name or source.name
    sidecars = {
        host.name: plan_sidecars(
            host.vars.sidecars,
            host=host.name,
            device=wants.device,
            vllm=f"{environment.directory}/bin/vllm",
            gpu_bytes=[cuda_bytes(gpu) for gpu in facts[host.name].gpus],
            host_bytes=facts[host.name].memory.total_bytes,
        )
        for host in spec.hosts
    }
    tunings = {host: _tuning(spec, facts[host], wire[host]) for host in hosts}
    peers = {host: tuple(fabric[other].address for other in hosts if other != host) for host in hosts}
    agents = {host: plan_agent(cluster, host, fabric[host], wants, wire=wire[host]) for host in hosts}
    firewalls = {
        host: plan_firewall(
            fabric[host], peers[host], agents[host].clients, facts[host].sysctl, wants, tunnel=tunnels.get(host)
        )
        for host in hosts
    }
    rate = _slowest_mbit(fabric)
    rdma = choose_rdma(spec.name, facts, wire) if wants.transport == "rdma" else {}
    nodes = []
    for rank, host in enumerate(spec.hosts):
        devices = tuple(range(layout.ranks_per_node)) if wants.device == "cuda" else ()
        nodes.append(
            NodePlan(
                host=host.name,
                address=host.address,
                machine_id=facts[host.name].identity.machine_id or "",
                pipeline=spec.name,
                node_rank=rank,
                role="head" if rank == 0 else "worker",
                fabric=fabric[host.name],
                tunnel=tunnels.get(host.name),
                rdma=rdma.get(host.name),
                model=placed[rank],
                stages=layout.stages(rank),
                world_ranks=layout.world_ranks(rank),
                devices=devices,
                unit=unit_name(spec.name),
                argv=rank_argv(
                    vllm=f"{environment.directory}/bin/vllm",
                    model=placed[rank].directory,
                    served_model_name=served,
                    tensor_parallel_size=layout.tensor_parallel_size,
                    pipeline_parallel_size=layout.pipeline_parallel_size,
                    nodes=len(hosts),
                    node_rank=rank,
                    master_addr=fabric[hosts[0]].address,
                    master_port=wants.master_port,
                    api_port=wants.api_port,
                    max_model_len=wants.max_model_len,
                    gpu_memory_utilization=host.vars.gpu_memory_utilization or decision.utilization(rank),
                    kv_cache_bytes=decision.kv_bytes(rank),
                    extra={**decision.flags, **wants.serve_args},
                ),
                rank_env=rank_env(
                    pipeline=spec.name,
                    device=wants.device,
                    devices=devices,
                    address=fabric[host.name].address,
                    partition=layout.partition,
                    partition_is_default=layout.partition == default_partition(model.layers, len(layout.partition)),
                    omp_threads_bind=host.vars.omp_threads_bind,
                    handoff=wants.handoff,
                    extra=wants.env,
                ),
                nccl_env=nccl_env(
                    fabric[host.name].interface,
                    rate_mbit=rate,
                    rdma=rdma.get(host.name),
                    debug=wants.nccl_debug,
                    extra=wants.env,
                ),
                peers=peers[host.name],
                ports=(wants.api_port, wants.master_port) if rank == 0 else (),
                agent=agents[host.name],
                firewall=firewalls[host.name],
                files=(
                    *_files(),
                    *agent_files(),
                    *(sidecar_file(sidecar) for sidecar in sidecars[host.name]),
                    *tuning_files(tunings[host.name], _network_file(facts[host.name], wire[host.name])),
                    *driver_files(drivers[host.name]),
                    *firewall_files(firewalls[host.name]),
                    *tunnel_files(tunnels.get(host.name)),
                ),
                sidecars=sidecars[host.name],
                tuning=tunings[host.name],
                driver=drivers[host.name],
                packages=system_packages(facts[host.name].os, lock.python, wants.device),
                package_manager=facts[host.name].os.package_manager,
                work=Work(
                    install_venv=not _venv_installed(facts[host.name], environment),
                    place_model=not _model_placed(facts[host.name], placed[rank]),
                    install_unit=True,
                    prepare_release=True,
                    switch_release=True,
                    restart=True,
                ),
            )
        )
    found = PipelinePlan(
        name=spec.name,
        device=wants.device,
        model=model,
        served_model_name=served,
        environment=environment,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        partition=layout.partition,
        goal=wants.goal,
        memory=decision.memory,
        capacity=decision.capacity,
        outlook=expected.outlook,
        head=hosts[0],
        master_addr=fabric[hosts[0]].address,
        master_port=wants.master_port,
        api_port=wants.api_port,
        start_timeout=wants.start_timeout,
        nodes=tuple(nodes),
        findings=(
            *(
                finding
                for finding in broken_rules(situation_of(spec, source.shape, layout, facts, Version(lock.vllm_version)))
                # An apply upgrades it before anything else.
                if not (finding.id == "driver-cuda13" and finding.host and drivers[finding.host].action == "install")
            ),
            *handoff_findings(spec.name, wants.handoff, idle, staggers=staggers, hidden_size=source.shape.hidden_size),
            *decision.findings,
            *expected.findings,
            *(
                finding
                for node in nodes
                for finding in mtu_findings(spec.name, node.host, facts[node.host], node.wire.interface, wants.mtu)
            ),
            *tunnel_findings(spec, facts, tunnels),
        ),
    )
    return found, expected.model


def _refuse_without_driver(pipeline: str, facts: Mapping[str, NodeFacts], drivers: Mapping[str, DriverPlan]) -> None:
    """Raise BlockedError where GPUs do not answer yet: how the model is split follows from what they are."""
    silent = {host: plan for host, plan in drivers.items() if plan.action != "none" and not facts[host].gpus}
    told = {host: plan for host, plan in silent.items() if facts[host].driver is not None}
    blocked = {host: plan for host, plan in told.items() if plan.action == "blocked"}
    if blocked:
        listed = "; ".join(f"{host}: {plan.reason}: {plan.remedy}" for host, plan in blocked.items())
        raise BlockedError(f"no GPU answers on {', '.join(blocked)}", where=f"pipeline {pipeline}", remedy=listed)
    if told and len(told) == len(silent):
        listed = "; ".join(f"{host}: {', '.join(driver_texts(plan))}" for host, plan in told.items())
        raise BlockedError(
            f"the NVIDIA driver comes first ({listed})",
            where=f"pipeline {pipeline}",
            remedy="run `ppdeploy apply`, which brings it, and then plans with the GPUs that answer",
        )


def _tuning(spec: PipelineSpec, facts: NodeFacts, fabric: Fabric) -> TuningPlan:
    return plan_tuning(
        facts,
        fabric.interface,
        spec.vars,
        rate_mbit=fabric.speed_mbit,
        # The head of each generation listens on another one (ppdeploy/agent/ready.py).
        ports={AGENT_PORT, *range(spec.vars.master_port, spec.vars.master_port + MASTER_PORTS)},
        running=facts.rank_runs(spec.name),
    )


def _slowest_mbit(fabric: Mapping[str, Fabric]) -> int | None:
    """Return the rate of the slowest NIC of a pipeline in Mbit/s; None where one does not say its own."""
    rates = [one.speed_mbit for one in fabric.values() if one.speed_mbit is not None]
    return min(rates) if len(rates) == len(fabric) else None


def _network_file(facts: NodeFacts, fabric: Fabric) -> str | None:
    """Return networkd's file of the fabric NIC; None where other NICs follow it too, which a drop-in would change."""
    files = {nic.name: nic.tuning.network_file for nic in facts.nics if nic.tuning and nic.tuning.network_file}
    own = files.pop(fabric.interface, None)
    return None if own in files.values() else own


def _files() -> tuple[PlannedFile, ...]:
    """Return the files of a rank; the release folder is named by its digest, so the paths in it are relative."""
    release = [PlannedFile(path=name, template=template) for name, template in RELEASE_FILES.items()]
    return (
        PlannedFile(path=GENERIC_UNIT, template="ppdeploy-rank@.service.j2", in_release=False),
        *release,
        PlannedFile(path="release.json", template="release.json.j2"),
    )


def _dtype(asked: str, stored: str | None) -> str:
    """Return the number format that the inventory asks for, by its whole name, else the checkpoint's."""
    return {"auto": stored or "unknown", "half": "float16", "float": "float32"}.get(asked, asked)


def _venv_installed(facts: NodeFacts, environment: Environment) -> bool:
    name = environment.directory.rsplit("/", 1)[1]
    return any(venv.name == name and venv.marker is not None for venv in facts.venvs)


def _model_placed(facts: NodeFacts, model: NodeModel) -> bool:
    name = model.directory.rsplit("/", 1)[1]
    return any(
        folder.name == name and folder.digest == model.manifest_digest and folder.verified for folder in facts.models
    )


def _may_bring_driver(wants: PipelineVars) -> bool:
    """Return whether a driver may come from the bundle, whose size is known."""
    return wants.device == "cuda" and packages_from(wants) == "bundle"


def facts_request(spec: Spec) -> dict[str, dict[str, object]]:
    """Return, for each host of a pipeline, what the facts module must be asked so that a plan can be built."""
    return {
        host.name: {
            "paths": [ROOT, pipeline.vars.models_dir, *([USR] if _may_bring_driver(pipeline.vars) else [])],
            "ports": [
                pipeline.vars.api_port,
                pipeline.vars.master_port,
                *(sidecar.port for sidecar in host.vars.sidecars),
                *(gateway_ports(pipeline.vars) if pipeline.vars.gateway else ()),
            ],
            "pipelines": [pipeline.name],
            # Whether a gateway, a firewall or a tunnel is to be removed; what keeps a driver as it is.
            "files": [
                GATEWAY_UNIT,
                FIREWALL_UNIT,
                TUNNEL_UNIT,
                *(DRIVER_FILES if pipeline.vars.device == "cuda" else ()),
                *_own_certificate(pipeline.vars),
            ],
            "models_dir": pipeline.vars.models_dir,
            "driver": pipeline.vars.device == "cuda",
        }
        for pipeline in spec.pipelines
        for host in pipeline.hosts
    }


def gateway_facts_request(wants: PipelineVars) -> dict[str, object]:
    """Return what the facts module is asked on a host that is, or was, a gateway outside of all pipelines."""
    return {"ports": [*gateway_ports(wants, peers=False)], "files": [GATEWAY_UNIT, *_own_certificate(wants)]}


def _own_certificate(wants: PipelineVars) -> tuple[str, ...]:
    return (wants.gateway_certificate,) if wants.gateway and wants.gateway_certificate else ()
