"""What the Ansible plays ask for: the plan from a play's own values and facts, and each node's slice of it.

The filter plugin `plugins/filter/ppdeploy.py` calls these functions and nothing else; the command line calls the same.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ppdeploy import locks
from ppdeploy.agent.build import agent_pyz
from ppdeploy.api_keys import first_key, read_keys, told_keys
from ppdeploy.benches import bench_file, bench_text, read_benches
from ppdeploy.bundle import open_bundle, read_bundle
from ppdeploy.bundle.content import DRIVER
from ppdeploy.bundle_needs import environment_problems, pythons_lacking
from ppdeploy.certificates import (
    ca_file,
    ca_warning,
    certificate_file,
    check_ca,
    ensure_ca,
    ensure_leaf,
    peer_file,
)
from ppdeploy.errors import InputError
from ppdeploy.facts import NodeFacts
from ppdeploy.model import Loading
from ppdeploy.net import NetReport, kept_file, kept_links, measured_links, node_request, rounds, with_sentence
from ppdeploy.net import judge as judge_net
from ppdeploy.paths import cache_dir, kept_dir
from ppdeploy.plan import BenchRun, Plan, build_plan, facts_request, gateway_facts_request, speed_models
from ppdeploy.plan.agent import LOOPBACK
from ppdeploy.plan.bench import (
    AskedLoad,
    BenchAsk,
    asked_loads,
    bench_argv,
    bench_failures,
    bench_load,
    circumstances,
)
from ppdeploy.plan.checks import NODE
from ppdeploy.plan.checks.gateway_host import gateway_findings
from ppdeploy.plan.checks.situate import situation, unit_name
from ppdeploy.plan.driver import KEYS, driver_files, driver_texts, plan_driver
from ppdeploy.plan.environment import lacking, packages_from, packages_of_roles
from ppdeploy.plan.firewall import UNIT as FIREWALL_UNIT
from ppdeploy.plan.gateway import CA, CERTIFICATE, KEYS_MAP, PEER_CERTIFICATE, SOCKET
from ppdeploy.plan.gateway import UNIT as GATEWAY_UNIT
from ppdeploy.plan.gateway import UNIT_NAME as GATEWAY_UNIT_NAME
from ppdeploy.plan.measured import MeasuredLink
from ppdeploy.plan.refinement import predicted
from ppdeploy.plan.tunnel import UNIT as TUNNEL_UNIT
from ppdeploy.plan.tunnel import keyless, moved, tunnel_packages
from ppdeploy.plan.types import (
    DriverPlan,
    GatewayHostPlan,
    GatewayPlan,
    NodePlan,
    PipelinePlan,
    PlannedFile,
    SystemPackage,
)
from ppdeploy.render import (
    MANAGED,
    complete,
    driver_values,
    gateway_host_values,
    release_folder,
    release_json,
    render,
    sidecar_values,
    template_values,
)
from ppdeploy.smoke import judge, side_by_side
from ppdeploy.sources import ModelSource, resolve_source
from ppdeploy.spec import (
    PipelineSpec,
    PipelineVars,
    Spec,
    Wheelhouse,
    example_problems,
    raise_problems,
    spec_from_values,
)

SMOKE_REQUESTS_PER_STAGE = 2
"""Concurrent requests of the smoke test, for each stage: enough that every stage has one in work and one waiting."""


def whole_pipelines(pipelines: Mapping[str, Iterable[str]], hosts: Iterable[str]) -> dict[str, list[str]]:
    """Return the pipelines that the play's hosts make up.

    Raises InputError naming the hosts when `--limit` cuts a pipeline: a plan needs the facts of all its nodes.
    """
    present = set(hosts)
    chosen: dict[str, list[str]] = {}
    for name, hosts_in_order in pipelines.items():
        members = list(hosts_in_order)
        absent = [host for host in members if host not in present]
        if absent and len(absent) < len(members):
            raise InputError(
                f"the play has only a part of the pipeline; {', '.join(absent)} is left out",
                where=f"pipeline {name}, --limit",
                remedy=f"name the whole pipeline, such as --limit {name}",
            )
        if not absent:
            chosen[name] = members
    return chosen


def spec_of_play(inventory: Mapping[str, Any]) -> Spec:
    """Return the typed spec of a play.

    `inventory` has `pipelines`, `hosts`, `values` per host, the inventory's `directory`, and in `gateways` the values
    of each host of the group `gateway`.
    """
    chosen = whole_pipelines(inventory["pipelines"], inventory["hosts"])
    members = {host for hosts in chosen.values() for host in hosts}
    outside = outside_gateways(inventory)
    given = {**{host: inventory["gateways"][host] for host in outside}, **inventory["values"]}
    values = {host: dict(own) for host, own in given.items()}
    addresses = {host: str(own.pop("ansible_host", host)) for host, own in values.items()}
    raise_problems(example_problems(addresses))
    spec = spec_from_values(
        chosen,
        values,
        inventory_dir=Path(inventory["directory"]),
        addresses=addresses,
        gateways=[host for host in inventory.get("gateways", {}) if host in members or host in outside],
    )
    return with_wheelhouses(spec)


def with_wheelhouses(spec: Spec) -> Spec:
    """Return the spec with what each pipeline's bundle has."""
    looked = tuple(one.model_copy(update={"wheelhouse": wheelhouse_of(one)}) for one in spec.pipelines)
    return spec.model_copy(update={"pipelines": looked})


def wheelhouse_of(spec: PipelineSpec) -> Wheelhouse:
    """Return what a pipeline's bundle has of a driver and of system packages; nothing where none come from it."""
    if spec.wheelhouse_path is None or packages_from(spec.vars) != "bundle":
        return Wheelhouse()
    on_nodes = spec.vars.wheelhouse_on_nodes
    try:
        # Of one that lies on the nodes the controller may have no more than the manifest.
        bundle = read_bundle(spec.wheelhouse_path) if on_nodes else open_bundle(spec.wheelhouse_path)
    except InputError as error:
        also = "; of a bundle on the nodes, its manifest.json is read from the same folder here" if on_nodes else ""
        return Wheelhouse(problem=f"{error.what}: {error.where}{also}")
    size = sum(file.size for file in bundle.files if file.path.startswith(f"{DRIVER}/"))
    found = Wheelhouse(driver=bundle.driver, driver_bytes=size)
    held = bundle.packages
    if held is None:
        return found
    return found.model_copy(update={"system": held.system, "machine": held.machine, "packages": held.names})


def outside_gateways(inventory: Mapping[str, Any]) -> list[str]:
    """Return the hosts of the group `gateway` that are in no pipeline of the inventory."""
    everywhere = {host for hosts in inventory["pipelines"].values() for host in hosts}
    return [host for host in inventory.get("gateways", {}) if host not in everywhere]


def left_gateways(inventory: Mapping[str, Any]) -> list[str]:
    """Return the hosts of the inventory that are in no pipeline and no longer in the group `gateway`, and had one.

    What tells is the certificate that was made for each to show to heads, which stays on the controller until then.
    """
    here = {host for hosts in inventory["pipelines"].values() for host in hosts} | set(inventory.get("gateways", {}))
    directory = Path(inventory["directory"])
    return [host for host in inventory.get("known", ()) if host not in here and peer_file(directory, host).exists()]


def gateway_hosts_of_play(inventory: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the facts module is asked on each host outside of all pipelines that is, or was, a gateway.

    None in a play with --limit, which leaves gateways as they are. Wrong input raises before any host is touched.
    """
    spec = spec_of_play(inventory)
    if not spec.pipelines or not _is_whole(spec, inventory):
        return {}
    asked = gateway_facts_request(spec.pipelines[0].vars)
    return dict.fromkeys((*outside_gateways(inventory), *left_gateways(inventory)), asked)


def _is_whole(spec: Spec, inventory: Mapping[str, Any]) -> bool:
    """Whether all pipelines of the inventory are in the play: a gateway leads to each of them."""
    return len(spec.pipelines) == len(inventory["pipelines"])


def request_of_play(inventory: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the facts module is asked on each host; wrong input ends the play before any host is touched."""
    return facts_request(spec_of_play(inventory))


def gang_request_of_play(inventory: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the verbs on a running gang need for each host; wrong input ends the play before any is touched."""
    return {
        host.name: {"pipeline": pipeline.name, "start_timeout": pipeline.vars.start_timeout}
        for pipeline in spec_of_play(inventory).pipelines
        for host in pipeline.hosts
    }


def resolve_models(spec: Spec, token: str | None = None) -> dict[str, ModelSource]:
    """Find the model of every pipeline; `token` is the hub's, for gated models."""
    return {pipeline.name: _resolve(pipeline, spec.inventory_dir, token) for pipeline in spec.pipelines}


def _resolve(pipeline: PipelineSpec, base: Path, token: str | None) -> ModelSource:
    wants = pipeline.vars
    return resolve_source(
        wants.model,
        wants.model_revision,
        base,
        wants.hf_endpoint,
        token,
        allow_no_weights=wants.vllm_args.get("load-format") == "dummy",
        allow_pickle=wants.allow_pickle_weights,
        loading=Loading.from_options(wants.vllm_args),
    )


def make_plan(
    spec: Spec,
    facts: Mapping[str, NodeFacts],
    models: Mapping[str, ModelSource],
    *,
    latency_seconds: float | None = None,
    measured: Mapping[str, Sequence[MeasuredLink]] | None = None,
    curves: bool = False,
    benches: Sequence[BenchRun] = (),
) -> Plan:
    """Return the complete plan, with release digests and the work left on each node.

    `latency_seconds`, `measured`, `curves` and `benches` are for the predicted speed alone: see `ppdeploy.plan.build`.
    Where `measured` is None, links are as `ppdeploy net` measured them last.
    """
    if measured is None:
        measured = measured_of(spec)
    made = build_plan(
        spec, facts, models, latency_seconds=latency_seconds, measured=measured, curves=curves, benches=benches
    )
    return complete(made, facts)


def measured_of(spec: Spec) -> dict[str, tuple[MeasuredLink, ...]]:
    """Return the links of each pipeline as `ppdeploy net` measured them last."""
    return {pipeline.name: kept_links(spec.inventory_dir, pipeline.name) for pipeline in spec.pipelines}


def plan_of_play(
    inventory: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
    token: str | None = None,
    bench: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what a play keeps: the plan as data, and each node's slice for the roles.

    `bench` is what a benchmark is asked for (`BenchAsk`), where the play is one.
    """
    spec = spec_of_play(inventory)
    typed = {host: NodeFacts.from_module(host, values) for host, values in facts.items() if values}
    models = resolve_models(spec, token)
    plan = make_plan(spec, typed, models, benches=read_benches(spec.inventory_dir))
    asked = bench_slices(spec, typed, models, bench_ask(bench)) if bench else {}
    whole = _is_whole(spec, inventory)
    beside = [finding.sentence() for one in plan.gateways for finding in one.findings]
    if whole:
        beside += gateway_trouble(spec, plan)
    nodes = {}
    for pipeline in plan.pipelines:
        text = release_json(pipeline)
        for node in pipeline.nodes:
            nodes[node.host] = {
                **node_slice(pipeline, node, typed[node.host], text, beside if whole else ()),
                "model": {
                    **model_slice(
                        pipeline,
                        node,
                        models[pipeline.name],
                        mounted=spec.pipeline(pipeline.name).vars.model_on_nodes,
                    ),
                    **way_out(spec.pipeline(pipeline.name).vars),
                },
                "venv": venv_slice(spec.pipeline(pipeline.name), pipeline, node, typed[node.host]),
                "agent": agent_slice(spec, node),
                "tuning": tuning_slice(node, typed[node.host]),
                "firewall": firewall_slice(node, typed[node.host]),
                "tunnel": tunnel_slice(spec.pipeline(pipeline.name).vars, node, typed[node.host]),
                "gateway": gateway_slice(spec, node, typed[node.host], whole=whole),
                **({"bench": asked[pipeline.name]} if asked else {}),
            }
    # Nothing is made on any node while one of them is refused.
    may_work = not plan.blocked()
    gateways: dict[str, Any] = {}
    if whole:
        gateways = {one.host: outside_slice(spec, one) for one in plan.gateways}
        gateways |= {host: left_slice(spec, typed.get(host), host) for host in left_gateways(inventory)}
    return {
        "plan": plan.model_dump(mode="json"),
        "nodes": nodes,
        "gateways": gateways,
        "keyless": may_work and keyless([node.tunnel for one in plan.pipelines for node in one.nodes]),
        "packages_first": [
            node.host
            for one in plan.pipelines
            for node in one.nodes
            if may_work and packages_first(spec.pipeline(one.name).vars, node, typed[node.host])
        ],
    }


def bench_ask(words: Mapping[str, Any]) -> BenchAsk:
    """Return what a benchmark is asked for; InputError for what is no such thing."""
    try:
        return BenchAsk.model_validate(_plain(words))
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            where="ppdeploy__bench",
            remedy="write it such as {users: [1, 8, 32], input: 1024, output: 128}",
        ) from error


def bench_slices(
    spec: Spec, facts: Mapping[str, NodeFacts], models: Mapping[str, ModelSource], ask: BenchAsk
) -> dict[str, dict[str, Any]]:
    """Return what the play of a benchmark needs for each pipeline: its loads with command and prediction."""
    found = {}
    for name, (pipeline, model) in speed_models(spec, facts, models, measured=measured_of(spec)).items():
        loads = asked_loads(ask.users, ask.input, ask.output, pipeline.capacity.max_model_len, ask.prompts)
        url = f"http://127.0.0.1:{pipeline.api_port}"
        found[name] = {
            "force": ask.force,
            "timeout": ask.timeout,
            "loads": [
                AskedLoad(
                    users=load.concurrency,
                    input_tokens=load.input_tokens,
                    output_tokens=load.output_tokens,
                    prompts=load.total(),
                    argv=bench_argv(
                        load,
                        vllm=f"{pipeline.environment.directory}/bin/vllm",
                        url=url,
                        served_model_name=pipeline.served_model_name,
                        tokenizer=pipeline.nodes[0].model.directory,
                        vllm_args=spec.pipeline(name).vars.serve_args,
                    ),
                    predicted=predicted(model, load) if model else None,
                ).model_dump(mode="json")
                for load in loads
            ],
        }
    return found


def bench_of_play(
    plan: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]], directory: str, now: datetime
) -> dict[str, Any]:
    """Return what a benchmark came to: each pipeline's `BenchRun`, the file to keep it in, and what failed.

    `plan` is what `plan_of_play` returned, `seen` holds for each host what its tasks registered, `directory` is the
    inventory's, `now` the time in UTC.
    """
    typed = Plan.model_validate(_plain(plan["plan"]))
    runs, files, failures = [], {}, []
    for pipeline in typed.pipelines:
        own = _plain(seen.get(pipeline.head, {}))
        asked = [AskedLoad.model_validate(_plain(load)) for load in plan["nodes"][pipeline.head]["bench"]["loads"]]
        warmed = own.get("ppdeploy__warmed") or {}
        if not warmed.get("ok"):
            failures.append(f"pipeline {pipeline.name}: {warmed.get('reason') or 'it was not asked'}")
            continue
        told = {outcome["users"]: outcome for outcome in own.get("ppdeploy__measured") or ()}
        loads = [bench_load(load, told[load.users]["measured"]) for load in asked if _has_result(told, load)]
        failures += bench_failures(pipeline.name, asked, told, loads)
        if loads:
            run = BenchRun(
                pipeline=pipeline.name,
                time=f"{now:%Y-%m-%dT%H:%M:%SZ}",
                release=pipeline.release,
                seed=int(own["ppdeploy__seed"]),
                circumstances=circumstances(pipeline),
                loads=tuple(loads),
            )
            runs.append(run.model_dump(mode="json"))
            files[pipeline.name] = {"path": str(bench_file(Path(directory), run)), "text": bench_text(run)}
    return {"runs": runs, "files": files, "failures": failures}


def _has_result(told: Mapping[int, Mapping[str, Any]], load: AskedLoad) -> bool:
    return bool(told.get(load.users, {}).get("measured"))


def node_slice(
    pipeline: PipelinePlan, node: NodePlan, facts: NodeFacts, release_text: str, beside: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what the roles of one node are given; `beside` is what is blocked on hosts outside of all pipelines."""
    state = facts.pipelines.get(pipeline.name)
    return {
        "pipeline": pipeline.name,
        "role": node.role,
        "head": pipeline.head,
        "unit": node.unit,
        "fabric_address": node.fabric.address,
        "fabric_interface": node.fabric.interface,
        "peers": list(node.peers),
        "wire_address": node.wire.address,
        "wire_peers": list(node.wire_peers),
        "master_addr": pipeline.master_addr,
        "master_port": pipeline.master_port,
        "api_url": f"http://127.0.0.1:{pipeline.api_port}",
        "served_model_name": pipeline.served_model_name,
        "start_timeout": pipeline.start_timeout,
        "smoke_gateway": smoke_gateway(node.gateway) if node.gateway and node.role == "head" else {},
        "smoke_concurrency": SMOKE_REQUESTS_PER_STAGE * pipeline.pipeline_parallel_size,
        "blocked": [*(finding.sentence() for finding in pipeline.blocked()), *beside],
        "work": node.work.model_dump(),
        "release": pipeline.release,
        "release_folder": release_folder(pipeline),
        "current_release": (state.current if state else None) or "",
        # A release from before the tunnel came, went or moved has addresses that nobody listens on any more.
        "can_go_back": not moved(facts, node.tunnel),
        "node": template_values(pipeline, node, release_text),
        "sidecars": [sidecar_values(node, sidecar.name) for sidecar in node.sidecars],
    }


def smoke_gateway(gateway: GatewayPlan) -> dict[str, str]:
    """Return what `ppdeploy_smoke` is told of the gateway on its host."""
    address = LOOPBACK if gateway.address == "*" else gateway.address
    return {
        "unit": GATEWAY_UNIT,
        "address": f"{address}:{gateway.port}",
        "ca": CA if gateway.certificate_is_ours and address in gateway.names else "",
        "control": SOCKET,
        "keys": KEYS_MAP,
    }


def agent_slice(spec: Spec, node: NodePlan) -> dict[str, Any]:
    """Return what the role gang_agent is given beside the templates' variable; the key is no part of any plan."""
    return {
        "file": str(agent_file()),
        # Made by the play where it is missing.
        "key_file": str(kept_dir(spec.inventory_dir) / f"{node.pipeline}-agent.key"),
        "files": _files(node.files, "agent"),
    }


def _files(files: Iterable[PlannedFile], part: str) -> list[dict[str, str]]:
    """Return those of a node's files that one role writes, as it is given them."""
    return [{"path": file.path, "template": file.template, "mode": file.mode} for file in files if file.part == part]


def tuning_slice(node: NodePlan, facts: NodeFacts) -> dict[str, Any]:
    """Return what the role nic_tuning is given beside the templates' variable."""
    settings = node.tuning.wanted()
    return {
        "interface": node.tuning.interface,
        "settings": settings,
        "waits": [one.key for one in node.tuning.settings if one.verdict == "waits"],
        "files": _files(node.files, "tuning"),
        # Nothing is asked of a host on which nothing is to be set and nothing was.
        "needed": bool(settings) or facts.tuned is not None,
    }


def firewall_slice(node: NodePlan, facts: NodeFacts) -> dict[str, Any]:
    """Return what the role firewall is given beside the templates' variable."""
    return {
        # Nothing is asked of a host that has no table and is to have none.
        "needed": node.firewall is not None or facts.files.get(FIREWALL_UNIT) is not None,
        "files": _files(node.files, "firewall"),
    }


def tunnel_slice(wants: PipelineVars, node: NodePlan, facts: NodeFacts) -> dict[str, Any]:
    """Return what the role fabric_encryption is given beside the templates' variable."""
    unit_there = facts.files.get(TUNNEL_UNIT) is not None
    keys_there = bool(facts.tunnel and facts.tunnel.public_key)
    return {
        # Nothing is asked of a host that has no tunnel and is to have none.
        "needed": node.tunnel is not None or unit_there or keys_there,
        "unit_there": unit_there,
        "packages": [package.model_dump() for package in tunnel_packages(node.tunnel)],
        "package_manager": node.package_manager,
        "package_lock_timeout": wants.package_lock_timeout,
        "public_key": node.tunnel.public_key if node.tunnel else "",
        "files": _files(node.files, "tunnel"),
    }


def gateway_slice(spec: Spec, node: NodePlan, facts: NodeFacts, *, whole: bool) -> dict[str, Any]:
    """Return what the role gateway is given beside the templates' variable; keys and certificates are in no plan.

    `whole` says whether all pipelines of the cluster are in the play.
    """
    if node.gateway is None:
        return {"needed": facts.files.get(GATEWAY_UNIT) is not None, "files": [], "certificates": [], "secrets": {}}
    return {"needed": whole, **_made_of(spec, node.host, node.gateway, node.files)}


def outside_slice(spec: Spec, plan: GatewayHostPlan) -> dict[str, Any]:
    """Return what the role gateway is given on a host outside of all pipelines."""
    made_of = _made_of(spec, plan.host, plan.gateway, plan.files)
    return {"needed": True, "node": gateway_host_values(plan), **made_of, "forget": {}}


def left_slice(spec: Spec, facts: NodeFacts | None, host: str) -> dict[str, Any]:
    """Return what the role gateway is given on a host that was a gateway; `forget` is what the controller forgets.

    Where nothing is known of the host, nothing is forgotten: its certificate is what tells the next apply.
    """
    there = facts is not None and facts.files.get(GATEWAY_UNIT) is not None
    forget = {"directory": str(spec.inventory_dir), "host": host} if facts else {}
    return {"needed": there, "node": {}, "files": [], "certificates": [], "secrets": {}, "forget": forget}


def _made_of(spec: Spec, host: str, gateway: GatewayPlan, files: Sequence[PlannedFile]) -> dict[str, Any]:
    directory = spec.inventory_dir
    certificates, names = [], {}
    if gateway.certificate_is_ours:
        certificates.append({"src": str(certificate_file(directory, host)), "path": CERTIFICATE, "mode": "0600"})
        names["names"] = list(gateway.names)
    if gateway.peer_name:
        certificates.append({"src": str(peer_file(directory, host)), "path": PEER_CERTIFICATE, "mode": "0600"})
        names["peer"] = [gateway.peer_name]
    if certificates:
        # Other gateways are checked by it, and by the smoke test its own.
        certificates.append({"src": str(ca_file(directory)), "path": CA, "mode": "0600"})
    return {
        "files": _files(files, "gateway"),
        "certificates": certificates,
        "secrets": {"directory": str(directory), "cluster": spec.cluster, "host": host, **names},
    }


def forget_gateway(secrets: Mapping[str, Any]) -> list[str]:
    """Remove from the controller the certificates of a host that no longer is a gateway; return their paths.

    `secrets` is the `forget` of `left_slice`.
    """
    directory, host = Path(secrets["directory"]), str(secrets["host"])
    paths = [path for path in (certificate_file(directory, host), peer_file(directory, host)) if path.exists()]
    for path in paths:
        path.unlink()
    return [str(path) for path in paths]


def gateway_trouble(spec: Spec, plan: Plan) -> list[str]:
    """Return what is wrong with the controller's CA, where a gateway needs it, and with its API keys, in sentences."""
    nodes = [node.gateway for pipeline in plan.pipelines for node in pipeline.nodes]
    gateways = [one for one in (*nodes, *(one.gateway for one in plan.gateways)) if one]
    try:
        if gateways:
            read_keys(spec.inventory_dir)
        if any(one.certificate_is_ours or one.peer_name for one in gateways):
            check_ca(spec.inventory_dir, datetime.now(UTC))
    except InputError as error:
        return [str(error)]
    return []


def make_gateway_secrets(secrets: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Make, on the controller, what is missing of a gateway's secrets; return `lines` to print, this one time.

    `secrets` is that of `gateway_slice`, `now` the time in UTC. What is wrong is returned as `error`, a sentence: the
    task that calls this shows nothing of its own, since a key may be in it.
    """
    try:
        return {"lines": _made_secrets(secrets, now), "error": ""}
    except InputError as error:
        return {"lines": [], "error": str(error)}


def _made_secrets(secrets: Mapping[str, Any], now: datetime) -> list[str]:
    directory, host = Path(secrets["directory"]), str(secrets["host"])
    lines = []
    if "names" in secrets or "peer" in secrets:
        made = ensure_ca(directory, str(secrets["cluster"]), now)
        if made and "names" in secrets:
            lines += trust_lines(directory, str(secrets["cluster"]))
        lines += ca_warning(directory, now)
    if "names" in secrets:
        ensure_leaf(directory, certificate_file(directory, host), host, secrets["names"], now)
    if "peer" in secrets:
        name = secrets["peer"][0]
        ensure_leaf(directory, peer_file(directory, host), name, [name], now, client=True)
    key = first_key(directory, now)
    return [*lines, *(first_key_lines(key) if key else [])]


def trust_lines(directory: Path, cluster: str) -> list[str]:
    """Return how clients come to trust the CA that was made for a cluster."""
    return [
        f"the gateways' certificates are signed by a CA that was made for this cluster: {ca_file(directory)}",
        "clients name it (curl --cacert FILE, SSL_CERT_FILE=FILE for OpenAI's Python client), or trust it by",
        f"  sudo cp {ca_file(directory)} /usr/local/share/ca-certificates/ppdeploy-{cluster}.crt",
        "  sudo update-ca-certificates",
    ]


def first_key_lines(key: str) -> list[str]:
    """Return how the first key is told: once."""
    return [
        "the first API key, shown this once and kept nowhere:",
        f"  {key}",
        "more by `ppdeploy keys add NAME`; `ppdeploy keys revoke first` ends this one",
    ]


def gateway_keys_of_play(secrets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the API keys' SHA-256 as a gateway is told them, as they are kept at this moment; see `told_keys`."""
    return told_keys(read_keys(Path(secrets["directory"])))


def gateway_request_of_play(inventory: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what each gateway is asked by; those too that the next apply removes, since they answer until then."""
    spec = spec_of_play(inventory)
    asked = {"directory": str(spec.inventory_dir), "keys_map": KEYS_MAP, "socket": SOCKET}
    hosts = [pipeline.hosts[0].name for pipeline in spec.pipelines if pipeline.vars.gateway]
    hosts += [host.name for host in spec.gateways]
    return dict.fromkeys([*hosts, *left_gateways(inventory)], asked)


def drivers_of_play(inventory: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a play does about the nodes' drivers, before anything can be planned that needs to know the GPUs.

    `nodes` has each host's slice for the role nvidia_driver, `work` is whether any host has some, and `lines` says in
    words what is done. `first` is whether GPUs answer only after it. `blocked` has every reason for which no host is
    to be touched: those about drivers, and where there is work, also what the checks of each node's facts say that
    would stop the apply after it, and what its bundle has nothing of.
    """
    spec = spec_of_play(inventory)
    typed = {host: NodeFacts.from_module(host, values) for host, values in facts.items() if values}
    nodes: dict[str, Any] = {}
    blocked: list[str] = []
    later = [finding.sentence() for found in gateway_findings(spec, typed).values() for finding in found]
    lines: list[str] = []
    for pipeline in spec.pipelines:
        later += environment_problems(pipeline, typed)
        found = situation(pipeline, typed, None)
        for node in found.nodes:
            plan = plan_driver(
                node.facts, pipeline.vars, pipeline.name, pipeline.wheelhouse, list(found.facts.values())
            )
            nodes[node.host] = driver_slice(pipeline, plan, node.facts)
            lines += [f"{node.host}: {text}" for text in driver_texts(plan) if plan.action != "blocked"]
            if plan.action == "blocked":
                blocked.append(f"{plan.reason} ({node.host}): {plan.remedy}")
            for check in NODE:
                outcome = check.outcome(node) if check.in_plan and not check.id.startswith(_DRIVER_CHECKS) else None
                if outcome and outcome.verdict == "blocked":
                    later.append(f"{outcome.evidence} ({node.host}): {outcome.remedy}")
    work = any(node["needed"] for node in nodes.values())
    first = any(node["pending"] and not typed[host].gpus for host, node in nodes.items())
    return {"nodes": nodes, "work": work, "first": first, "lines": lines, "blocked": blocked + (later if work else [])}


_DRIVER_CHECKS = ("gpu", "driver")
"""Beginnings of the ids of checks on what the role nvidia_driver is there to change."""


def driver_slice(spec: PipelineSpec, plan: DriverPlan, facts: NodeFacts) -> dict[str, Any]:
    """Return what the role nvidia_driver is given for one node."""
    node = {"managed": MANAGED, "driver": driver_values(plan)}
    files = _files(driver_files(plan), "driver")
    states = {path: state for path, state in facts.files.items() if state}
    differing = [
        file["path"]
        for file in files
        if file["path"] not in states
        or states[file["path"]].sha256 != hashlib.sha256(render(file["template"], node).encode()).hexdigest()
    ]
    return {
        **plan.model_dump(mode="json"),
        # Nothing is asked of a host on which there is nothing to do.
        "needed": plan.pending or bool(differing),
        "pending": plan.pending,
        "files": files,
        "node": node,
        "key_source": str(spec.nvidia_key_path or "") if plan.mirror and plan.source == "nvidia" else "",
        "key_file": KEYS[plan.manager] if plan.manager and not plan.from_bundle else "",
        "bundle": str(spec.wheelhouse_path / DRIVER) if plan.from_bundle and spec.wheelhouse_path else "",
        "bundle_on_node": spec.vars.wheelhouse_on_nodes,
        "rsync": bool(facts.tools.get("rsync")),
        "lock_timeout": spec.vars.package_lock_timeout,
        "unit": unit_name(spec.name),
        **way_out(spec.vars),
    }


def agent_file() -> Path:
    """Return the agent packed into its one file, in the controller's cache, named by its content."""
    data = agent_pyz()
    path = cache_dir() / "agent" / f"agent-{hashlib.sha256(data).hexdigest()[:16]}.pyz"
    _keep(path, data)
    return path


def lock_file(lock: locks.Lock) -> Path:
    """Return a lock's file: the one that ppdeploy carries or, with the handoff plugin, one in the controller's cache.

    The pins of uv lie beside either, where the role looks for them.
    """
    if lock.path.exists():
        return lock.path
    folder = cache_dir() / "locks" / lock.directory_name
    tool = f"uv-{lock.machine}.txt"
    for name, text in ((tool, lock.path.with_name(tool).read_text("utf-8")), (lock.path.name, lock.text)):
        _keep(folder / name, text.encode())
    return folder / lock.path.name


def _keep(path: Path, data: bytes) -> None:
    """Write a file unless it holds that already. Several plays may do so at once: whoever is last replaces the same."""
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as fresh:
        fresh.write(data)
    Path(fresh.name).replace(path)


_VENVS_KEPT = 2
"""Environments that stay on a node: that of its release, and the one before it for a way back."""


def venv_slice(spec: PipelineSpec, pipeline: PipelinePlan, node: NodePlan, facts: NodeFacts) -> dict[str, Any]:
    """Return what the role vllm_install is given: the lock, and where its wheels and the system's packages come from.

    Raises InputError where the bundle is not whole or was made for other nodes.
    """
    own = pipeline.environment.directory.rsplit("/", 1)[1]
    others = len({venv.name for venv in facts.venvs} - {own})
    gpus = [gpu for gpu in facts.gpus if gpu.index in node.devices]
    capabilities = sorted({gpu.compute_capability for gpu in gpus if gpu.compute_capability})
    wants = spec.vars
    lock = locks.by_digest(pipeline.environment.lock_digest)
    source = packages_from(wants)
    # From archives each role installs its own.
    roles = {"model_store", *(["gateway"] if node.gateway else []), *(["firewall"] if node.firewall else [])}
    of_roles = packages_of_roles(roles, facts.tools) if source == "bundle" else ()
    of_roles += packages_first(wants, node, facts)
    if spec.wheelhouse_path and (node.work.install_venv or of_roles) and not wants.wheelhouse_on_nodes:
        # Before any node is touched, and in words that say what the bundle is for.
        bundle = open_bundle(spec.wheelhouse_path)
        bundle.lock(lock.digest)
        if source == "bundle":
            pythons = pythons_lacking(lock, facts) if node.work.install_venv else ()
            names = [one.package for one in (*pythons, *of_roles)]
            bundle.require_packages(facts.os.release, facts.os.machine, node.host, names)
    return {
        "lock": str(lock_file(lock)),
        "installed": not node.work.install_venv,
        "capabilities": capabilities,
        "packages": [package.model_dump() for package in (*node.packages, *of_roles)],
        "packages_needed": node.work.install_venv or bool(of_roles),
        "packages_from": source,
        "package_manager": node.package_manager,
        "package_lock_timeout": wants.package_lock_timeout,
        # Whether more environments may be left than are kept.
        "prune": others >= _VENVS_KEPT,
        "bundle": str(spec.wheelhouse_path or ""),
        "bundle_on_node": wants.wheelhouse_on_nodes,
        "index_url": wants.index_url,
        "extra_index_url": wants.extra_index_url,
        **way_out(wants),
        "uv_cache": wants.uv_cache_dir or "/var/cache/ppdeploy/uv",
        "link_mode": wants.uv_link_mode,
    }


def packages_first(wants: PipelineVars, node: NodePlan, facts: NodeFacts) -> tuple[SystemPackage, ...]:
    """Return what the tunnel takes from the bundle and the node lacks: its keys are made before any other work."""
    return lacking(tunnel_packages(node.tunnel), facts.tools) if packages_from(wants) == "bundle" else ()


def way_out(wants: PipelineVars) -> dict[str, Any]:
    """Return how a node reaches what lies beyond the cluster: indexes, sources of models, NVIDIA's repository."""
    return {"proxy": wants.proxy, "no_proxy": list(wants.no_proxy), "ca_bundle": wants.ca_bundle}


def model_slice(
    pipeline: PipelinePlan, node: NodePlan, source: ModelSource, *, mounted: bool = False
) -> dict[str, Any]:
    """Return what the role model_store is given: who gets the files first, and who pulls which from whom.

    `mounted` says that every node sees the folder by itself.
    """
    lacking = [other for other in pipeline.nodes if other.work.place_model]
    # Only who has or gets all files can hand them on; the head always does.
    whole = [other for other in pipeline.nodes if other.model.files is None]
    first = next((other for other in whole if not other.work.place_model), whole[0])
    chain = model_chain(first, lacking, [file.path for file in source.manifest.files])
    address = {other.host: other.fabric.address for other in pipeline.nodes}
    if mounted:
        # Every node helps itself.
        chain, peers = {}, []
    elif node.host == first.host:
        # Of all: where the chain is broken, the first node helps out.
        peers = [address[other.host] for other in lacking if other.host != first.host]
    else:
        peers = [address[host] for host, sources in chain.items() if node.host in sources]
    files = source.manifest.entries()
    return {
        "kind": "mount" if mounted else source.kind,
        "directory": node.model.directory,
        "manifest": [file for file in files if node.model.files is None or file["path"] in node.model.files],
        "present": not node.work.place_model,
        "source_here": node.host == first.host and not mounted,
        "source_address": first.fabric.address,
        "sources": [{"address": address[host], "paths": paths} for host, paths in chain.get(node.host, {}).items()],
        "peers": peers,
        "path": source.location if source.kind == "folder" else None,
        "repository": source.location if source.kind == "hub" else None,
        "commit": source.commit,
        "endpoint": source.location if source.kind == "mirror" else source.endpoint,
        "python": f"{pipeline.environment.directory}/bin/python",
    }


def model_chain(first: NodePlan, lacking: Sequence[NodePlan], paths: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Return for each lacking host the hosts from which it fetches, with the paths from each.

    Every file goes down the nodes that need it one after the other, so that it passes each node's link once in each
    direction: no link carries more than the files of the nodes at its ends.
    """
    chain: dict[str, dict[str, list[str]]] = {node.host: {} for node in lacking if node.host != first.host}
    for path in paths:
        before = first.host
        for node in lacking:
            if node.host != first.host and (node.model.files is None or path in node.model.files):
                chain[node.host].setdefault(before, []).append(path)
                before = node.host
    return chain


def smoke_of_play(plan: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Judge the smoke test of every pipeline in a play.

    `plan` is what `plan_of_play` returned, `seen` holds for each host what its tasks registered. Returns the reports,
    the failures as text with the last journal lines of every rank side by side, and in `failed` the pipelines whose
    release does not serve.
    """
    typed = Plan.model_validate(_plain(plan["plan"]))
    reports: list[dict[str, Any]] = []
    failures: list[str] = []
    failed: list[str] = []
    for pipeline in typed.pipelines:
        hosts = [node.host for node in pipeline.nodes]
        of_head = seen.get(pipeline.head, {})
        report = judge(
            pipeline,
            wait=of_head.get("ppdeploy__wait") or {},
            ask=of_head.get("ppdeploy__ask") or {},
            before={host: seen.get(host, {}).get("ppdeploy__before") or {} for host in hosts},
            after={host: seen.get(host, {}).get("ppdeploy__after") or {} for host in hosts},
            gateway=of_head.get("ppdeploy__through") or {},
        )
        reports.append(report.model_dump(mode="json"))
        if not report.serves:
            failed.append(pipeline.name)
            failures.append(f"pipeline {pipeline.name} does not serve: " + "; ".join(report.failures()))
            failures.append(side_by_side(report.journals))
        elif not report.ok:
            failures.append(
                f"pipeline {pipeline.name} serves, but not through the gateway on {pipeline.head}: "
                f"{'; '.join(report.failures())}; `journalctl --unit {GATEWAY_UNIT_NAME}` there has more"
            )
    return {"reports": reports, "failures": failures, "failed": failed}


NET_FLOWS = 4
"""Connections at once of the throughput run with several; NCCL opens 2 to 8 for each link between two hosts."""


def net_request_of_play(plan: Mapping[str, Any], hosts: Sequence[str], seconds: int) -> dict[str, dict[str, Any]]:
    """Return what a play that measures the network asks of each host.

    `plan` is what `plan_of_play` returned, `hosts` are those that still take part, `seconds` is what one run of iperf3
    takes.
    """
    text = (Path(__file__).parent / "probe" / "handoff.py").read_text(encoding="utf-8")
    typed = Plan.model_validate(_plain(plan["plan"]))
    found = {}
    for pipeline in typed.pipelines:
        for node in pipeline.nodes:
            values = template_values(pipeline, node)
            found[node.host] = {
                **node_request(pipeline, node, hosts, seconds),
                "flows": NET_FLOWS,
                # The play goes through as many rounds as its largest pipeline needs.
                "round_count": max(len(rounds(len(one.nodes))) for one in typed.pipelines),
                "files": {
                    "handoff.py": text,
                    "rank.env": render("rank.env.j2", values),
                    "nccl.env": render("nccl.env.j2", values),
                },
            }
    return found


def net_report_of_play(
    inventory: Mapping[str, Any],
    facts: Mapping[str, Mapping[str, Any]],
    seen: Mapping[str, Mapping[str, Any]],
    lost: Sequence[str],
    about: Mapping[str, Any],
    token: str | None = None,
) -> dict[str, Any]:
    """Judge what a play measured: the report as data, and what of it is kept where, by pipeline.

    `facts` are those of all hosts, `seen` what each host's tasks registered, `lost` the hosts that were not reached any
    more; `about` has the `time` of the test and the `seconds` of a run.
    """
    noted = {
        host: {
            "pairs": own.get("ppdeploy__net_pairs") or [],
            "probe": own.get("ppdeploy__net_probe") or {},
            "iperf3": own.get("ppdeploy__net_no_iperf3")
            or (own.get("ppdeploy__net_opened") or {}).get("problem")
            or "",
        }
        for host, own in _plain(seen).items()
    }
    spec = spec_of_play(inventory)
    typed = {host: NodeFacts.from_module(host, values) for host, values in facts.items()}
    models = resolve_models(spec, token)
    before = make_plan(spec, typed, models, measured={})
    judged = [judge_net(pipeline, noted, list(lost), NET_FLOWS) for pipeline in before.pipelines]
    report = NetReport(time=about["time"], seconds=int(about["seconds"]), pipelines=tuple(judged))
    # The plan with what was just measured says what the network costs.
    measured = {one.pipeline: measured_links(report, one.pipeline) for one in judged}
    after = {one.name: one.outlook for one in make_plan(spec, typed, models, measured=measured).pipelines}
    report = report.model_copy(update={"pipelines": tuple(with_sentence(one, after[one.pipeline]) for one in judged)})
    kept = {}
    for one in report.pipelines:
        if measured[one.pipeline]:
            alone = report.model_copy(update={"pipelines": (one,)})
            path = str(kept_file(spec.inventory_dir, one.pipeline))
            kept[one.pipeline] = {"path": path, "text": json.dumps(alone.document(), indent=1) + "\n"}
    return {"report": report.document(), "kept": kept, "lost": list(lost)}


def net_document(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report of `net_report_of_play` as plain data, after it went through a play."""
    return dict(_plain(report))


def net_running(seen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the pipelines that a test would disturb, with the hosts on which a rank runs, in words.

    `seen` has for each host its pipeline and what `ppdeploy_gang` saw of the node.
    """
    running: dict[str, list[str]] = {}
    for host, own in seen.items():
        rank = ((own.get("ppdeploy__seen") or {}).get("node") or {}).get("rank") or {}
        if rank.get("processes") or rank.get("active") in ("active", "activating", "deactivating", "reloading"):
            running.setdefault(str(own["pipeline"]), []).append(host)
    return [f"a rank of pipeline {name} runs on {', '.join(hosts)}" for name, hosts in running.items()]


def _plain(value: Any) -> Any:
    """Return data of a play without Ansible's lazy containers, past whose `__getitem__` pydantic reads."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
