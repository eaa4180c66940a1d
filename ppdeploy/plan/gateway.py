"""The gateways: where each listens, which pipelines it sends requests to, and what it lets through.

HAProxy stands between clients and vLLM, whose API listens on the head's loopback. Every head has a gateway, and so has
every host of the group `gateway`. Each knows all pipelines: those of other heads it reaches through the gateways of
these, by mutual TLS, and never vLLM itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from ppdeploy.errors import InputError
from ppdeploy.facts import NodeFacts
from ppdeploy.plan.agent import AGENT_PORT, LOOPBACK
from ppdeploy.plan.types import (
    Fabric,
    GatewayHostPlan,
    GatewayModel,
    GatewayPeers,
    GatewayPlan,
    GatewayServer,
    PipelinePlan,
    PlannedFile,
)
from ppdeploy.spec import PipelineSpec, PipelineVars, Spec, is_ip_address

FOLDER = "/etc/ppdeploy/gateway"
CONFIG = f"{FOLDER}/haproxy.cfg"
MODELS_MAP = f"{FOLDER}/models.map"
KEYS_MAP = f"{FOLDER}/keys.map"
CERTIFICATE = f"{FOLDER}/certificate.pem"
PEER_CERTIFICATE = f"{FOLDER}/peer.pem"
CA = f"{FOLDER}/ca.pem"
UNIT_NAME = "ppdeploy-gateway.service"
UNIT = f"/etc/systemd/system/{UNIT_NAME}"
RUN_FOLDER = "/run/ppdeploy-gateway"
SOCKET = f"{RUN_FOLDER}/admin.sock"

POST_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""What vLLM serves below /v1 (0.32.0, its openapi.json) for a request by itself. Left out: stored responses, which any
key could read, and what loads or removes adapters."""

GET_PATHS = ("/health", "/v1/models")

MOST_CONNECTIONS = 4000
"""Clients' connections at once; ppdeploy_gateway_concurrency and ppdeploy_gateway_queue go no further."""

THREADS = 4
"""Of HAProxy: enough for a 10 GbE LAN, and the head's other cores belong to its rank."""

PEER_SUFFIX = "ppdeploy.internal"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,29}[a-z0-9])?")


@dataclass(frozen=True)
class _Door:
    """A host that has a gateway, as the heads know it."""

    host: str
    address: str
    name: str
    fabric: Fabric | None
    """None: it is in no pipeline."""


_Groups = Sequence[tuple[tuple[str, ...], list[PipelinePlan]]]
"""The models by their names, each with the pipelines that serve it."""


def plan_gateways(
    spec: Spec, pipelines: Sequence[PipelinePlan], facts: Mapping[str, NodeFacts]
) -> tuple[tuple[PipelinePlan, ...], tuple[GatewayHostPlan, ...]]:
    """Return the pipelines with the gateways of their nodes, and the gateways outside of all pipelines.

    `pipelines` are those of `spec`, in its order; there are no gateways where ppdeploy_gateway is false. Raises
    InputError for two models of one name, and for a head that another gateway cannot reach.
    """
    wants = next((own.vars for own in spec.pipelines if own.vars.gateway), None)
    if wants is None:
        return tuple(pipelines), ()
    groups = _models({own.name: own for own in spec.pipelines}, pipelines)
    nodes = {node.host: node for pipeline in pipelines for node in pipeline.nodes}
    heads = {pipeline.head: pipeline for pipeline in pipelines}
    doors = [_head_door(pipeline) for pipeline in pipelines]
    for one in spec.gateways:
        if one.name not in heads:
            fabric = nodes[one.name].wire if one.name in nodes else None
            doors.append(_Door(one.name, one.address, host_peer_name(one.name), fabric))
    made = {}
    for door in doors:
        own = heads.get(door.host)
        callers = [other for other in doors if other.host != door.host]
        peers = _peers(own, callers, wants, facts) if own and callers else None
        alone = own is not None and not callers
        models = _served(door, own, groups, wants)
        made[door.host] = _gateway(wants, door, models, peer_name="" if alone else door.name, peers=peers)
    outside = tuple(
        GatewayHostPlan(host=one.name, address=one.address, gateway=made[one.name], files=gateway_files(made[one.name]))
        for one in spec.outside
    )
    return tuple(_with_gateways(pipeline, made) for pipeline in pipelines), outside


def _head_door(pipeline: PipelinePlan) -> _Door:
    head = pipeline.nodes[0]
    return _Door(head.host, head.address, peer_name(pipeline.name), head.wire)


def _with_gateways(pipeline: PipelinePlan, made: Mapping[str, GatewayPlan]) -> PipelinePlan:
    nodes = []
    for node in pipeline.nodes:
        gateway = made.get(node.host)
        added = {"gateway": gateway, "files": (*node.files, *gateway_files(gateway))} if gateway else {}
        nodes.append(node.model_copy(update=added))
    return pipeline.model_copy(update={"nodes": tuple(nodes)})


def gateway_files(gateway: GatewayPlan) -> tuple[PlannedFile, ...]:
    """Return the files that the role renders; certificates and keys are no part of any plan."""
    files = [PlannedFile(path=UNIT, template="ppdeploy-gateway.service.j2", part="gateway", in_release=False)]
    if gateway.routes:
        files.append(PlannedFile(path=MODELS_MAP, template="gateway-models.map.j2", part="gateway", in_release=False))
    # The last one: it is checked together with what it names.
    return (*files, PlannedFile(path=CONFIG, template="haproxy.cfg.j2", part="gateway", in_release=False))


def gateway_ports(wants: PipelineVars, *, peers: bool = True) -> dict[int, str]:
    """Return the ports of a gateway, each with the variable that names it; `peers` is whether others may call it."""
    return {
        wants.gateway_port: "ppdeploy_gateway_port",
        **({wants.gateway_peer_port: "ppdeploy_gateway_peer_port"} if peers else {}),
        wants.gateway_metrics_port: "ppdeploy_gateway_metrics_port",
    }


def peer_name(pipeline: str) -> str:
    """Return the name by which gateways know that of a pipeline's head. No client ever sees it."""
    return f"{pipeline.replace('_', '-')}.{PEER_SUFFIX}"


def host_peer_name(host: str) -> str:
    """Return the name by which heads know the gateway of a host that is none, at most 64 characters.

    It never changes with the order of hosts: else a host that has left would keep a name that lets another one in.
    """
    label = host.lower()
    if not _LABEL.fullmatch(label) or label != host:
        readable = re.sub(r"[^a-z0-9]+", "-", label).strip("-")[:16]
        label = f"{readable}-{hashlib.sha256(host.encode()).hexdigest()[:12]}".lstrip("-")
    return f"{label}.gateway.{PEER_SUFFIX}"


def model_names(pipeline: PipelinePlan, wants: PipelineVars) -> tuple[str, ...]:
    """Return the names that clients may ask a pipeline for: the served one, and those of its LoRA adapters."""
    adapters = wants.vllm_args.get("lora-modules") or []
    found = [pipeline.served_model_name]
    for one in adapters if isinstance(adapters, list) else [adapters]:
        name = _adapter_name(one)
        if not _NAME.fullmatch(name):
            raise InputError(
                "an adapter has a name that the gateway cannot route by",
                where=f"pipeline {pipeline.name}, lora-modules in ppdeploy_vllm_args",
                remedy="name it with letters, digits and . _ : / @ + - (at most 128)",
            )
        found.append(name)
    return tuple(dict.fromkeys(found))


def _adapter_name(module: JsonValue) -> str:
    """Return the name of a LoRA module as vLLM takes it: `name=path`, or an object, which may be written as text."""
    if isinstance(module, str) and module.lstrip().startswith("{"):
        try:
            module = json.loads(module)
        except ValueError:
            return ""
    return str(module.get("name", "")) if isinstance(module, Mapping) else str(module).partition("=")[0]


# ---- models ----------------------------------------------------------------------------------------------------------


def _models(
    wants: Mapping[str, PipelineSpec], pipelines: Sequence[PipelinePlan]
) -> list[tuple[tuple[str, ...], list[PipelinePlan]]]:
    """Return the models by their names, each with the pipelines that serve it."""
    groups: dict[str, tuple[tuple[str, ...], list[PipelinePlan]]] = {}
    for pipeline in pipelines:
        names = model_names(pipeline, wants[pipeline.name].vars)
        known = groups.setdefault(pipeline.served_model_name, (names, []))
        for other in known[1]:
            if other.model.manifest_digest != pipeline.model.manifest_digest:
                raise InputError(
                    f"pipelines {other.name} and {pipeline.name} serve different models as {names[0]}, so a client "
                    "would be answered by either",
                    where="ppdeploy_served_model_name",
                    remedy="give one of them another name",
                )
            if set(known[0]) != set(names):
                raise InputError(
                    f"pipelines {other.name} and {pipeline.name} serve {names[0]} with different adapters",
                    where="lora-modules in ppdeploy_vllm_args",
                    remedy="give both the same, or another ppdeploy_served_model_name",
                )
        known[1].append(pipeline)
    taken: dict[str, str] = {}
    for served, (names, members) in groups.items():
        for name in names:
            if taken.setdefault(name, served) != served:
                raise InputError(
                    f"{name} is the name of two models, {taken[name]} and {served}",
                    where=f"pipeline {members[0].name}",
                    remedy="give the model or its adapter another name",
                )
    return list(groups.values())


# ---- one gateway -----------------------------------------------------------------------------------------------------


def _gateway(
    wants: PipelineVars,
    door: _Door,
    models: tuple[GatewayModel, ...],
    *,
    peer_name: str,
    peers: GatewayPeers | None,
) -> GatewayPlan:
    fabric = (door.fabric.address,) if door.fabric and door.fabric.interface != "lo" else ()
    reached = tuple(name for name in (door.host, door.address) if is_ip_address(name) or _is_dns(name))
    return GatewayPlan(
        address=wants.gateway_address,
        port=wants.gateway_port,
        metrics_port=wants.gateway_metrics_port,
        certificate=wants.gateway_certificate or CERTIFICATE,
        certificate_is_ours=wants.gateway_certificate is None,
        names=tuple(dict.fromkeys((*reached, *fabric, *wants.gateway_names, "localhost", LOOPBACK))),
        models=models,
        peer_name=peer_name,
        peers=peers,
        rate=wants.gateway_rate,
        concurrency=wants.gateway_concurrency,
        balance=wants.gateway_balance,
        queue=wants.gateway_queue,
        body_mib=wants.gateway_body_mib,
        timeout=wants.gateway_timeout,
        drain=wants.gateway_drain,
    )


def _served(door: _Door, own: PipelinePlan | None, groups: _Groups, wants: PipelineVars) -> tuple[GatewayModel, ...]:
    """Return the models as a gateway sees them; `own` is the pipeline that its host is the head of."""
    return tuple(
        GatewayModel(
            backend=f"model{number}",
            names=names,
            max_model_len=min(member.capacity.max_model_len for member in members),
            servers=tuple(_server(door, own, member, wants) for member in members),
        )
        for number, (names, members) in enumerate(groups, start=1)
    )


def _server(door: _Door, own: PipelinePlan | None, there: PipelinePlan, wants: PipelineVars) -> GatewayServer:
    # As many as vLLM has in a step; more of them at vLLM would only wait where nobody counts them.
    most = there.capacity.sequences
    if own is not None and there.name == own.name:
        return GatewayServer(
            pipeline=there.name, address=LOOPBACK, port=there.api_port, health_port=AGENT_PORT, most=most
        )
    port = wants.gateway_peer_port
    return GatewayServer(
        pipeline=there.name,
        address=_peer_address(there, door),
        port=port,
        health_port=port,
        verify=peer_name(there.name),
        most=most,
    )


def _peers(
    own: PipelinePlan, callers: Sequence[_Door], wants: PipelineVars, facts: Mapping[str, NodeFacts]
) -> GatewayPeers:
    """Return where the gateway of a head listens for the others."""
    address = _peer_address(own, callers[0]) if len(callers) == 1 else "*"
    # What ansible_host names may be translated on the way, and nobody can listen on an address of another machine.
    here = {found.address for nic in facts[own.head].nics for found in nic.addresses}
    return GatewayPeers(
        address=address if address in here else "*",
        port=wants.gateway_peer_port,
        callers=tuple(caller.name for caller in callers),
    )


def _peer_address(pipeline: PipelinePlan, caller: _Door) -> str:
    """Return the address on which `caller` reaches the head of `pipeline`.

    That of the fabric where both are on it, which is known to work; else the one by which Ansible reaches the head.
    """
    head = pipeline.nodes[0]
    # Not the tunnel's: those of two pipelines may have the same addresses, and TLS needs none.
    if head.wire.interface != "lo" and caller.fabric and head.wire.network == caller.fabric.network:
        return head.wire.address
    if is_ip_address(head.address):
        return head.address
    raise InputError(
        f"the gateways of {caller.host} and {head.host} are in no common fabric, and ansible_host of {head.host} is a "
        "name, which may mean another machine elsewhere",
        where=f"host {head.host}",
        remedy=f"set its ansible_host to an IP address that {caller.host} reaches, or ppdeploy_gateway: false",
    )


def _is_dns(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", name) is not None and ".." not in name
