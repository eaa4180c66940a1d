"""What the facts of gateways say must not start: of a host outside of all pipelines, and of a node its certificate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppdeploy.facts import NodeFacts
from ppdeploy.plan.checks.system import taken_port
from ppdeploy.plan.gateway import UNIT_NAME, gateway_ports
from ppdeploy.plan.types import Finding, PipelinePlan
from ppdeploy.spec import PipelineVars, Spec


def gateway_findings(spec: Spec, facts: Mapping[str, NodeFacts]) -> dict[str, tuple[Finding, ...]]:
    """Return what is blocked on each gateway outside of all pipelines; of a host without facts nothing is known."""
    wants = spec.pipelines[0].vars
    machines: dict[str, str] = {}
    for name in (*(host.name for one in spec.pipelines for host in one.hosts), *(host.name for host in spec.outside)):
        machine = facts[name].identity.machine_id if name in facts else None
        if machine:
            machines.setdefault(machine, name)
    return {
        host.name: tuple(_findings(host.name, wants, facts[host.name], machines)) if host.name in facts else ()
        for host in spec.outside
    }


def certificate_findings(plan: PipelinePlan, facts: Mapping[str, NodeFacts]) -> Iterator[Finding]:
    """Yield what is blocked on a pipeline's nodes that are gateways with a certificate that somebody else makes."""
    for node in plan.nodes:
        if node.gateway and not node.gateway.certificate_is_ours:
            yield from _certificate(plan.name, node.host, node.gateway.certificate, facts[node.host])


def _certificate(pipeline: str, host: str, path: str, facts: NodeFacts) -> Iterator[Finding]:
    # Facts that were recorded for another plan do not know the file.
    if path in facts.files and facts.files[path] is None:
        yield Finding(
            id="gateway-certificate",
            verdict="blocked",
            pipeline=pipeline,
            host=host,
            reason=f"there is no {path}, which ppdeploy_gateway_certificate names",
            remedy="put a file there with certificate, chain and private key, or take the variable out of the "
            "inventory: a certificate is made then",
        )


def _findings(host: str, wants: PipelineVars, facts: NodeFacts, machines: Mapping[str, str]) -> Iterator[Finding]:
    ports = gateway_ports(wants, peers=False)
    fault = taken_port(facts, ports, dict.fromkeys(ports, UNIT_NAME))
    if fault:
        remedy = f"stop that program or set {fault.values['variable']} to a free port"
        yield Finding(id="port-taken", verdict="blocked", pipeline="", host=host, reason=fault.evidence, remedy=remedy)
    own = {found.address for nic in facts.nics for found in nic.addresses}
    if wants.gateway_address != "*" and wants.gateway_address not in own:
        yield Finding(
            id="gateway-address",
            verdict="blocked",
            pipeline="",
            host=host,
            reason=f"ppdeploy_gateway_address is {wants.gateway_address}, which is no address of this host",
            remedy='set it to "*", with which every gateway listens on all addresses of its host',
        )
    if wants.gateway_certificate:
        yield from _certificate("", host, wants.gateway_certificate, facts)
    first = machines.get(facts.identity.machine_id or "", host)
    if first != host:
        yield Finding(
            id="machine-id",
            verdict="blocked",
            pipeline="",
            host=host,
            reason=f"{first} and {host} have the same /etc/machine-id: one is a clone or both are one machine",
            remedy=f"where both are one, put {first} into the group gateway and take {host} out",
        )
