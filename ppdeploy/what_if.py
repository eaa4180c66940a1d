"""What if: the same cluster with a faster fabric, more nodes or another model. Such a plan is read, never applied."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Interface, IPv4Network, ip_interface
from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.facts import Nic, NodeFacts
from ppdeploy.model import Loading
from ppdeploy.plan.bench import BenchRun
from ppdeploy.plan.gpus import MIB, find_gpu
from ppdeploy.plan.types import NodePlan, Plan
from ppdeploy.short_facts import ShortFacts, make_facts, make_gpu, make_nic, rate_mbit
from ppdeploy.sources import ModelSource, resolve_source
from ppdeploy.spec import HostSpec, HostVars, PipelineSpec, Spec

FORMS = "fabric=10g, latency=0.2ms, nodes=+1x RTX 4090, nodes=+2x 2x RTX 3090 or model=PATH"
"""The forms of a change, as errors and help name them."""

MOST_HOSTS = 64
MOST_GPUS = 16

_NODES = re.compile(r"\+\s*(?P<hosts>\d+)\s*x\s+(?:(?P<gpus>\d+)\s*x\s+)?(?P<gpu>\S.*)", re.IGNORECASE)
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Case:
    """All that a plan is made of."""

    spec: Spec
    facts: Mapping[str, NodeFacts]
    models: Mapping[str, ModelSource]
    latency_seconds: float | None = None
    assumed: tuple[str, ...] = ()
    """Hosts whose facts nobody read."""
    benches: Sequence[BenchRun] = ()
    """The cluster's own benchmarks; those that fit a plan refine what it predicts."""


def change(case: Case, plan: Plan, words: Sequence[str], token: str | None = None) -> Case:
    """Return the case with the changes of `--what-if`, in their order.

    `plan` is that of the case as it is: it knows on which NIC the ranks talk. `token` is the hub's, for `model=`.
    Raises InputError, one sentence, for a change that cannot be read or made.
    """
    for word in words:
        where = f"--what-if '{word}'"
        name, equals, value = (part.strip() for part in word.partition("="))
        name, pipeline = _pipeline(case.spec, name, where)
        if not equals or not value or name not in ("fabric", "latency", "nodes", "model"):
            raise InputError("this change cannot be read", where=where, remedy=f"write one of {FORMS}")
        if name == "fabric":
            case = _with_fabric(case, plan, pipeline, rate_mbit(value, where))
        elif name == "latency":
            case = replace(case, latency_seconds=_latency(value, where))
        elif name == "nodes":
            case = _with_nodes(case, _only(case.spec, pipeline, where), value, where)
        else:
            case = _with_model(case, _only(case.spec, pipeline, where), value, where, token)
    return case


def _pipeline(spec: Spec, name: str, where: str) -> tuple[str, str | None]:
    """Return a change's name without the pipeline that stands before it, as in `big.nodes`, and that pipeline."""
    pipeline, dot, rest = name.rpartition(".")
    if not dot:
        return name, None
    known = [one.name for one in spec.pipelines]
    if pipeline not in known:
        raise InputError(f"there is no pipeline {pipeline}", where=where, remedy=f"name one of {', '.join(known)}")
    return rest, pipeline


def _only(spec: Spec, pipeline: str | None, where: str) -> PipelineSpec:
    if pipeline is None and len(spec.pipelines) != 1:
        names = [one.name for one in spec.pipelines]
        raise InputError(
            f"the cluster has {len(names)} pipelines", where=where, remedy=f"say which one: {names[0]}.nodes=..."
        )
    return next(one for one in spec.pipelines if pipeline in (None, one.name))


def _latency(text: str, where: str) -> float:
    found = _LATENCY.fullmatch(text)
    seconds = float(found[1]) * _SECONDS[found[2].lower()] if found else -1.0
    if not 0 <= seconds <= 1:
        raise InputError(
            f"{text!r} is no latency of a link", where=where, remedy="write one way as 0.2ms or 50us, up to 1s"
        )
    return seconds


def _with_fabric(case: Case, plan: Plan, pipeline: str | None, rate: int) -> Case:
    """Set the rate of the NICs that the plan chose, and keep to them: another one may now be as fast."""
    facts = dict(case.facts)
    changed = case.spec
    chosen = {node.host: node.wire.interface for one in plan.pipelines for node in one.nodes}
    for spec in case.spec.pipelines:
        if pipeline not in (None, spec.name):
            continue
        network = next((node.wire.network for node in _nodes(plan, spec.name) if node.role == "head"), None)
        if network and len(_nodes(plan, spec.name)) > 1:
            wants = spec.vars.model_copy(update={"fabric_subnet": IPv4Network(network)})
            changed = _spec(changed, spec.model_copy(update={"vars": wants}))
        for host in spec.hosts:
            # A host that another change added has one NIC.
            interface = chosen.get(host.name, facts[host.name].nics[0].name)
            facts[host.name] = facts[host.name].model_copy(
                update={
                    "nics": tuple(
                        nic.model_copy(update={"speed_mbit": rate}) if nic.name == interface else nic
                        for nic in facts[host.name].nics
                    )
                }
            )
    return replace(case, spec=changed, facts=facts)


def _nodes(plan: Plan, pipeline: str) -> Sequence[NodePlan]:
    return next((one.nodes for one in plan.pipelines if one.name == pipeline), ())


def _with_nodes(case: Case, pipeline: PipelineSpec, text: str, where: str) -> Case:
    found = _NODES.fullmatch(text)
    hosts, gpus = (int(found["hosts"]), int(found["gpus"] or 1)) if found else (0, 0)
    if found is None or not 1 <= hosts <= MOST_HOSTS or not 1 <= gpus <= MOST_GPUS:
        raise InputError(
            f"{text!r} does not say which nodes to add",
            where=where,
            remedy="write nodes=+1x RTX 4090 for a host with one, nodes=+2x 2x RTX 3090 for two hosts with two each",
        )
    cards = tuple(make_gpu(index, found["gpu"].strip(), where) for index in range(gpus))
    rates = _rates(case, cards[0].name, cards[0].memory_total_mib, where)
    model_host = pipeline.hosts[0].name
    pattern, network = _lan(case, pipeline, where)
    taken = {str(a.address) for one in case.facts.values() for nic in one.nics for a in nic.addresses}
    free = (address for address in map(str, network.hosts()) if address not in taken)
    facts, added = dict(case.facts), []
    known = {host.name for one in case.spec.pipelines for host in one.hosts}
    names = (name for n in range(1, MOST_HOSTS * 2 + len(known)) if (name := f"new{n}") not in known)
    like = case.facts[model_host]
    for _ in range(hosts):
        name, address = next(names), next(free, None)
        if address is None:
            raise InputError(
                f"{network} has no free address for another host", where=where, remedy="name a larger fabric subnet"
            )
        said = ShortFacts(memory_gib=like.memory.total_bytes / 1024**3, machine=_machine(like))
        nic = make_nic(pattern.name, address, network.prefixlen, pattern.speed_mbit)
        facts[name] = make_facts(name, 2**64 + len(facts), said, nic, cards, pipeline.vars.models_dir)
        facts[name] = facts[name].model_copy(update={"pythons": like.pythons})
        added.append(HostSpec(name=name, address=address, vars=rates))
    wants = pipeline.vars.model_copy(update={"layer_partition": None, "pipeline_parallel_size": None})
    changed = pipeline.model_copy(update={"hosts": (*pipeline.hosts, *added), "vars": wants})
    names_added = tuple(host.name for host in added)
    return replace(case, spec=_spec(case.spec, changed), facts=facts, assumed=(*case.assumed, *names_added))


def _rates(case: Case, name: str, mib: int, where: str) -> HostVars:
    """Return what a new host says of its GPUs: nothing of those in the table, else what a host with the same says."""
    if find_gpu(name, mib * MIB):
        return HostVars()
    for pipeline in case.spec.pipelines:
        for host in pipeline.hosts:
            wishes = host.vars
            same = any(gpu.name == name for gpu in case.facts[host.name].gpus)
            if same and wishes.gpu_bandwidth_gbs and wishes.gpu_bf16_tflops:
                return HostVars(gpu_bandwidth_gbs=wishes.gpu_bandwidth_gbs, gpu_bf16_tflops=wishes.gpu_bf16_tflops)
    raise InputError(
        f"the GPU {name!r} is not in ppdeploy's table, and no host of the inventory has one and says what it can do",
        where=where,
        remedy="name a GPU of the table that is about as fast",
    )


def _machine(facts: NodeFacts) -> str:
    return facts.os.machine if facts.os.machine in ("x86_64", "aarch64") else "x86_64"


def _lan(case: Case, pipeline: PipelineSpec, where: str) -> tuple[Nic, IPv4Network]:
    """Return the NIC of the pipeline's first host that new hosts are to share a subnet with, and that subnet."""
    host = pipeline.hosts[0]
    wanted = IPv4Network(str(pipeline.vars.fabric_subnet)) if pipeline.vars.fabric_subnet else None
    others = [case.facts[one.name] for one in pipeline.hosts[1:]]
    places = [
        (nic, interface.network)
        for nic in case.facts[host.name].nics
        if nic.up and nic.kind != "loopback" and host.vars.fabric_interface in (None, nic.name)
        for interface in _interfaces(nic)
        if (wanted is None or interface.ip in wanted)
        and all(any(interface.network == i.network for n in one.nics for i in _interfaces(n)) for one in others)
    ]
    if not places:
        raise InputError(
            f"{host.name} has no NIC with an address that a new host could share a subnet with",
            where=where,
            remedy="give it one, or name it with ppdeploy_fabric_interface",
        )
    return max(places, key=lambda place: (not place[0].wireless, place[0].speed_mbit or 0))


def _interfaces(nic: Nic) -> list[IPv4Interface]:
    found = [ip_interface(f"{a.address}/{a.prefix}") for a in nic.addresses if a.scope == "global"]
    return [one for one in found if isinstance(one, IPv4Interface)]


def _with_model(case: Case, pipeline: PipelineSpec, text: str, where: str, token: str | None) -> Case:
    """Take another model: a folder here, of which config.json is enough, or a repository of the hub."""
    folder = Path(text).expanduser()
    model = str(folder.resolve()) if folder.is_dir() else text
    try:
        source = resolve_source(
            model,
            None,
            Path.cwd(),
            pipeline.vars.hf_endpoint,
            token,
            allow_no_weights=True,
            # Nothing is loaded.
            allow_pickle=True,
            loading=Loading.from_options(pipeline.vars.vllm_args),
        )
    except InputError as error:
        # What `resolve_source` says of a folder is about the inventory's; here one starts at the working folder.
        remedy = error.remedy if error.remedy and "beside the inventory" not in error.remedy else ""
        raise InputError(
            error.what, where=where, remedy=remedy or "name a folder that is here, or a repository as owner/name"
        ) from error
    wants = pipeline.vars.model_copy(
        update={"model": model, "model_revision": None, "served_model_name": None, "layer_partition": None}
    )
    changed = pipeline.model_copy(update={"vars": wants})
    return replace(case, spec=_spec(case.spec, changed), models={**case.models, pipeline.name: source})


def _spec(spec: Spec, changed: PipelineSpec) -> Spec:
    pipelines = tuple(changed if one.name == changed.name else one for one in spec.pipelines)
    return spec.model_copy(update={"pipelines": pipelines})
