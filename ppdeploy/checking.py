"""`ppdeploy check`: what to probe, and what all checks come to. The play and the command line call the same functions.

What a play saw of each host is a mapping: `facts`, `listener` and `probe` as the modules returned them, and
`probe_problem`, why the host could not look at its peers; or `reason`, why it could not be asked at all, and
`unreachable`, whether that is because nobody reached it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import NodeFacts
from ppdeploy.plan import Fabric, Finding, PipelinePlan
from ppdeploy.plan.checks import NODE, PAIR, PIPELINE, AnyCheck, Outcome, PipelineSituation, Scope, catalogue
from ppdeploy.plan.checks.gateway_host import gateway_findings
from ppdeploy.plan.checks.situate import pairs, situation
from ppdeploy.plan.fabric import fabric_of
from ppdeploy.plan.types import Verdict
from ppdeploy.play import make_plan, resolve_models, spec_of_play
from ppdeploy.probes import Listener, NodeProbe, listener_from_module, probe_from_module
from ppdeploy.spec import PipelineSpec, Spec

CHECK_SCHEMA = 2
"""Version of the JSON form; 1 had the plan's findings alone."""

SEND_SECONDS = 0.25
"""How long a stream to a neighbouring stage takes."""

PLAN_RULES_OF_CHECKS = {"driver-cuda13"}
"""Rules of the plan that a check tells as well, under its own name."""


class Result(BaseModel):
    """What one check came to in one place."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    scope: Scope
    pipeline: str
    host: str | None = None
    peer: str | None = None
    verdict: Verdict
    judged: bool
    evidence: str
    remedy: str

    @property
    def where(self) -> str:
        """The node, the pair or the pipeline, in words."""
        if self.host is None:
            return f"pipeline {self.pipeline}"
        return f"{self.host} to {self.peer}" if self.peer else self.host

    def sentence(self) -> str:
        """Return the result as one sentence: what is wrong, where, what to do next."""
        return f"{self.id}: {self.evidence} ({self.where})" + (f": {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Seen:
    """What a play saw of one host. Without facts, `reason` says why."""

    facts: NodeFacts | None = None
    received: float | None = None
    listener: Listener | None = None
    probe: NodeProbe | None = None
    probe_problem: str = ""
    reason: str = ""
    unreachable: bool = False


@dataclass(frozen=True)
class Checked:
    """All that came of a check: results, and the hosts that could not be asked with the reasons."""

    results: tuple[Result, ...]
    unasked: Mapping[str, Seen]

    def of(self, verdict: Verdict) -> list[Result]:
        """Return the judged results of a verdict."""
        return [one for one in self.results if one.verdict == verdict and one.judged]


# ---- what to probe -------------------------------------------------------------------------------


def ways_of_play(inventory: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what `ppdeploy_pairs` is asked on each host that has peers to look at.

    `address`, `interface`, `mtu`, `master_port` (0: not to be listened on), `models_dir`, `allowed`, who may connect,
    and `peers`, each with `host`, `address` and `send`, the seconds for which to send it data.
    """
    return dict(_ways(spec_of_play(inventory), {host: _seen(host, own) for host, own in seen.items()}))


def _ways(spec: Spec, seen: Mapping[str, Seen]) -> Iterator[tuple[str, dict[str, Any]]]:
    for pipeline in spec.pipelines:
        facts = _facts(pipeline, seen)
        try:
            fabric = _fabric(pipeline, facts)
        except BlockedError:
            # Told as a verdict; there is no way to probe.
            continue
        names = [host.name for host in pipeline.hosts]
        asked = [name for name in names if name in fabric and fabric[name].interface != "lo"]
        quiet = _is_installed(pipeline, facts)
        for name in asked:
            yield (
                name,
                {
                    "address": fabric[name].address,
                    "interface": fabric[name].interface,
                    "mtu": fabric[name].mtu or 1500,
                    # A rank that starts at this very moment must find its port free.
                    "master_port": pipeline.vars.master_port if name == names[0] and not quiet else 0,
                    "models_dir": pipeline.vars.models_dir,
                    "allowed": [{"address": fabric[other].address} for other in asked if other != name],
                    "peers": [
                        {
                            "host": other,
                            "address": fabric[other].address,
                            "send": SEND_SECONDS if _adjacent(names, name, other) and not quiet else 0,
                        }
                        for other in asked
                        if other != name
                    ],
                },
            )


def _adjacent(names: Sequence[str], one: str, other: str) -> bool:
    """Return whether two nodes hand off to each other: throughput between others matters to nobody."""
    return abs(names.index(one) - names.index(other)) == 1


def _is_installed(pipeline: PipelineSpec, facts: Mapping[str, NodeFacts]) -> bool:
    """Return whether ranks of ours may run or start at any moment: then ports and links are left alone."""
    states = (one.pipelines.get(pipeline.name) for one in facts.values())
    return any(state is not None and state.current for state in states)


def peers_to_probe(way: Mapping[str, Any], listening: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the peers as `ppdeploy_pairs` takes them; `listening` has what each host registered when it listened."""
    peers = []
    for peer in way["peers"]:
        told = (listening.get(peer["host"]) or {}).get("listener") or {}
        known = {name: told[name] for name in ("token", "ports", "master") if name in told}
        peers.append({"address": peer["address"], "send": peer["send"], **known})
    return peers


# ---- what it comes to ----------------------------------------------------------------------------


def check_of_play(
    inventory: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]], token: str | None = None
) -> Checked:
    """Judge what a play saw of its hosts; `token` is the hub's, for gated models.

    Raises InputError for what the inventory got wrong.
    """
    return judge(spec_of_play(inventory), {host: _seen(host, own) for host, own in seen.items()}, token)


def judge(spec: Spec, seen: Mapping[str, Seen], token: str | None = None) -> Checked:
    """Return what every check comes to."""
    results: list[Result] = []
    before: dict[str, PipelineSituation] = {}
    for pipeline in spec.pipelines:
        facts = _facts(pipeline, seen)
        if not facts:
            continue
        plan, found = _situation(spec, pipeline, facts, token)
        nodes = [
            replace(
                node,
                probe=seen[node.host].probe,
                probe_problem=seen[node.host].probe_problem,
                listener=seen[node.host].listener,
                received=seen[node.host].received,
            )
            for node in found.nodes
        ]
        found = replace(found, nodes=nodes, others={name: other.nodes for name, other in before.items()})
        before[pipeline.name] = found
        results += _results(found)
        results += _of_plan(plan)
    known = {host: own.facts for host, own in seen.items() if own.facts is not None}
    if spec.pipelines:
        results += [_of_finding(found) for own in gateway_findings(spec, known).values() for found in own]
    members = {host.name for pipeline in spec.pipelines for host in pipeline.hosts}
    members |= {host.name for host in spec.outside if host.name in seen}
    unasked = {host: one for host, one in seen.items() if one.facts is None and host in members}
    return Checked(tuple(results), unasked)


def _situation(
    spec: Spec, pipeline: PipelineSpec, facts: Mapping[str, NodeFacts], token: str | None
) -> tuple[PipelinePlan | None, PipelineSituation]:
    """Return the plan of a pipeline, where one can be made, and its situation."""
    plan: PipelinePlan | None = None
    fabric: Mapping[str, Fabric] = {}
    fabric_problem = plan_problem = None
    try:
        fabric = _fabric(pipeline, facts)
    except BlockedError as error:
        fabric_problem = str(error)
    if len(facts) == len(pipeline.hosts):
        alone = spec.model_copy(update={"pipelines": (pipeline,)})
        try:
            (plan,) = make_plan(alone, facts, resolve_models(alone, token)).pipelines
        except BlockedError as error:
            plan_problem = str(error)
    found = situation(pipeline, facts, plan, fabric)
    if plan_problem is not None and plan_problem == fabric_problem:
        plan_problem = "there is no fabric to plan with"
    return plan, replace(found, fabric_problem=fabric_problem, plan_problem=plan_problem)


def _results(found: PipelineSituation) -> Iterator[Result]:
    for node in found.nodes:
        for check in NODE:
            yield _result(check, check.outcome(node), found.pipeline, node.host)
    for pair in pairs(found):
        for way in PAIR:
            yield _result(way, way.outcome(pair), found.pipeline, pair.sender.host, pair.receiver.host)
    for over in PIPELINE:
        outcome = over.outcome(found)
        yield _result(over, outcome, found.pipeline, outcome.host)


def _result(check: AnyCheck, outcome: Outcome, pipeline: str, host: str | None, peer: str | None = None) -> Result:
    return Result(
        id=check.id,
        scope=check.scope,
        pipeline=pipeline,
        host=host,
        peer=peer,
        verdict=outcome.verdict,
        judged=outcome.judged,
        evidence=outcome.evidence,
        remedy=outcome.remedy,
    )


def _of_plan(plan: PipelinePlan | None) -> Iterator[Result]:
    """Yield the plan's own findings: rules of vLLM, memory, links. Those that checks make are told by the checks."""
    ours = {check.id for check in catalogue()} | PLAN_RULES_OF_CHECKS
    for finding in plan.findings if plan else ():
        if finding.id not in ours:
            yield _of_finding(finding)


def _of_finding(finding: Finding) -> Result:
    return Result(
        id=finding.id,
        scope="node" if finding.host else "pipeline",
        pipeline=finding.pipeline,
        host=finding.host,
        verdict=finding.verdict,
        judged=True,
        evidence=finding.reason,
        remedy=finding.remedy,
    )


def document(checked: Checked, *, error: str | None, exit_code: int, seconds: float) -> dict[str, Any]:
    """Return the JSON form of a check."""
    return {
        "schema": CHECK_SCHEMA,
        "verb": "check",
        "ok": error is None,
        "exit_code": exit_code,
        "error": error,
        "seconds": round(seconds, 3),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "counts": counts(checked),
        "unasked": {
            host: {"reason": seen.reason, "unreachable": seen.unreachable} for host, seen in checked.unasked.items()
        },
        "results": [one.model_dump(mode="json") for one in checked.results],
    }


def counts(checked: Checked) -> dict[str, int]:
    """Return how many checks came to what."""
    judged = {verdict: len(checked.of(verdict)) for verdict in ("blocked", "slow", "ready")}
    return {**judged, "not_judged": sum(not one.judged for one in checked.results)}


def explained(checks: Iterable[AnyCheck]) -> list[dict[str, Any]]:
    """Return what each check is, for reading."""
    return [
        {
            "id": check.id,
            "scope": check.scope,
            "verdict": check.verdict,
            "looks_at": check.looks_at,
            "remedy": check.general_remedy(),
            "source": check.source,
            "stops_apply": check.in_plan and check.verdict == "blocked",
        }
        for check in checks
    ]


# ---- reading -------------------------------------------------------------------------------------


def _seen(host: str, own: Mapping[str, Any]) -> Seen:
    """Read what a play saw of a host."""
    raw = own.get("facts")
    if not raw:
        return Seen(reason=str(own.get("reason") or "it was not asked"), unreachable=bool(own.get("unreachable")))
    return Seen(
        facts=NodeFacts.from_module(host, raw),
        received=own.get("received"),
        listener=listener_from_module(host, own["listener"]) if own.get("listener") else None,
        probe=probe_from_module(host, own["probe"]) if own.get("probe") else None,
        probe_problem=str(own.get("probe_problem") or ""),
    )


def _facts(pipeline: PipelineSpec, seen: Mapping[str, Seen]) -> dict[str, NodeFacts]:
    """Return the facts of those nodes of a pipeline that were asked."""
    found = {host.name: seen[host.name].facts for host in pipeline.hosts if host.name in seen}
    return {host: facts for host, facts in found.items() if facts is not None}


def _fabric(pipeline: PipelineSpec, facts: Mapping[str, NodeFacts]) -> dict[str, Fabric]:
    """Choose the fabric as the plan does, among the nodes that were asked; none where one of several is left."""
    asked = [host for host in pipeline.hosts if host.name in facts]
    if len(asked) == 1 and len(pipeline.hosts) > 1:
        return {}
    if not asked:
        raise InputError("no node was asked", where=f"pipeline {pipeline.name}")
    return fabric_of(pipeline, facts)
