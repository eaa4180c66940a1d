"""What the Ansible plays ask for: the plan from a play's own values and facts, and each node's slice of it.

The filter plugin `plugins/filter/ppdeploy.py` calls these functions and nothing else; the command line calls the same.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ppdeploy import locks
from ppdeploy.agent.build import agent_pyz
from ppdeploy.benches import bench_file, bench_text, read_benches
from ppdeploy.errors import InputError
from ppdeploy.facts import NodeFacts
from ppdeploy.model import Loading
from ppdeploy.net import NetReport, kept_file, kept_links, measured_links, node_request, rounds, with_sentence
from ppdeploy.net import judge as judge_net
from ppdeploy.paths import cache_dir, kept_dir
from ppdeploy.plan import BenchRun, Plan, build_plan, facts_request, speed_models
from ppdeploy.plan.bench import (
    AskedLoad,
    BenchAsk,
    asked_loads,
    bench_argv,
    bench_failures,
    bench_load,
    circumstances,
)
from ppdeploy.plan.measured import MeasuredLink
from ppdeploy.plan.refinement import predicted
from ppdeploy.plan.types import NodePlan, PipelinePlan
from ppdeploy.render import complete, release_folder, release_json, render, sidecar_values, template_values
from ppdeploy.smoke import judge, side_by_side
from ppdeploy.sources import ModelSource, resolve_source
from ppdeploy.spec import PipelineSpec, Spec, example_problems, raise_problems, spec_from_values

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
    """Return the typed spec of a play: `pipelines`, `hosts`, `values` per host and the inventory's `directory`."""
    values = {host: dict(own) for host, own in inventory["values"].items()}
    addresses = {host: str(own.pop("ansible_host", host)) for host, own in values.items()}
    raise_problems(example_problems(addresses))
    return spec_from_values(
        whole_pipelines(inventory["pipelines"], inventory["hosts"]),
        values,
        inventory_dir=Path(inventory["directory"]),
        addresses=addresses,
    )


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
    typed = {host: NodeFacts.from_module(host, values) for host, values in facts.items()}
    models = resolve_models(spec, token)
    plan = make_plan(spec, typed, models, benches=read_benches(spec.inventory_dir))
    asked = bench_slices(spec, typed, models, bench_ask(bench)) if bench else {}
    nodes = {}
    for pipeline in plan.pipelines:
        text = release_json(pipeline)
        for node in pipeline.nodes:
            nodes[node.host] = {
                **node_slice(pipeline, node, typed[node.host], text),
                "model": model_slice(pipeline, node, models[pipeline.name]),
                "venv": venv_slice(spec.pipeline(pipeline.name), pipeline, node),
                "agent": agent_slice(spec, node),
                "tuning": tuning_slice(node, typed[node.host]),
                **({"bench": asked[pipeline.name]} if asked else {}),
            }
    return {"plan": plan.model_dump(mode="json"), "nodes": nodes}


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
                        vllm_args=spec.pipeline(name).vars.vllm_args,
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


def node_slice(pipeline: PipelinePlan, node: NodePlan, facts: NodeFacts, release_text: str) -> dict[str, Any]:
    """Return what the roles of one node are given."""
    state = facts.pipelines.get(pipeline.name)
    return {
        "pipeline": pipeline.name,
        "role": node.role,
        "head": pipeline.head,
        "unit": node.unit,
        "fabric_address": node.fabric.address,
        "fabric_interface": node.fabric.interface,
        "peers": list(node.peers),
        "master_addr": pipeline.master_addr,
        "master_port": pipeline.master_port,
        "api_url": f"http://127.0.0.1:{pipeline.api_port}",
        "served_model_name": pipeline.served_model_name,
        "start_timeout": pipeline.start_timeout,
        "smoke_concurrency": SMOKE_REQUESTS_PER_STAGE * pipeline.pipeline_parallel_size,
        "blocked": [finding.sentence() for finding in pipeline.blocked()],
        "work": node.work.model_dump(),
        "release": pipeline.release,
        "release_folder": release_folder(pipeline),
        "current_release": (state.current if state else None) or "",
        "node": template_values(pipeline, node, release_text),
        "sidecars": [sidecar_values(node, sidecar.name) for sidecar in node.sidecars],
    }


def agent_slice(spec: Spec, node: NodePlan) -> dict[str, Any]:
    """Return what the role gang_agent is given beside the templates' variable; the key is no part of any plan."""
    return {
        "file": str(agent_file()),
        # Made by the play where it is missing.
        "key_file": str(kept_dir(spec.inventory_dir) / f"{node.pipeline}-agent.key"),
        "files": [
            {"path": file.path, "template": file.template, "mode": file.mode}
            for file in node.files
            if file.part == "agent"
        ],
    }


def tuning_slice(node: NodePlan, facts: NodeFacts) -> dict[str, Any]:
    """Return what the role nic_tuning is given beside the templates' variable."""
    settings = node.tuning.wanted()
    return {
        "interface": node.tuning.interface,
        "settings": settings,
        "waits": [one.key for one in node.tuning.settings if one.verdict == "waits"],
        "files": [
            {"path": file.path, "template": file.template, "mode": file.mode}
            for file in node.files
            if file.part == "tuning"
        ],
        # Nothing is asked of a host on which nothing is to be set and nothing was.
        "needed": bool(settings) or facts.tuned is not None,
    }


def agent_file() -> Path:
    """Return the agent packed into its one file, in the controller's cache, named by its content."""
    data = agent_pyz()
    path = cache_dir() / "agent" / f"agent-{hashlib.sha256(data).hexdigest()[:16]}.pyz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as fresh:
            fresh.write(data)
        # Several plays may pack at once: whoever is last replaces the same bytes.
        Path(fresh.name).replace(path)
    return path


def venv_slice(spec: PipelineSpec, pipeline: PipelinePlan, node: NodePlan) -> dict[str, Any]:
    """Return what the role vllm_install is given: the lock, and where its wheels come from."""
    wants = spec.vars
    return {
        "lock": str(locks.by_digest(pipeline.environment.lock_digest).path),
        "installed": not node.work.install_venv,
        "bundle": str(spec.wheelhouse_path or ""),
        "bundle_on_node": wants.wheelhouse_on_nodes,
        "index_url": wants.index_url,
        "extra_index_url": wants.extra_index_url,
        "uv_cache": wants.uv_cache_dir or "/var/cache/ppdeploy/uv",
        "link_mode": wants.uv_link_mode,
    }


def model_slice(pipeline: PipelinePlan, node: NodePlan, source: ModelSource) -> dict[str, Any]:
    """Return what the role model_store is given: who gets the files first, and who pulls them from there."""
    lacking = [other for other in pipeline.nodes if other.work.place_model]
    # Only who has or gets all files can hand them on; the head always does.
    whole = [other for other in pipeline.nodes if other.model.files is None]
    first = next((other for other in whole if not other.work.place_model), whole[0])
    files = source.manifest.entries()
    pullers = [other.fabric.address for other in lacking if other.host != first.host]
    return {
        "kind": source.kind,
        "directory": node.model.directory,
        "manifest": [file for file in files if node.model.files is None or file["path"] in node.model.files],
        "present": not node.work.place_model,
        "source_here": node.host == first.host,
        "source_address": first.fabric.address,
        "peers": pullers if node.host == first.host else [],
        "path": source.location if source.kind == "folder" else None,
        "repository": source.location if source.kind == "hub" else None,
        "commit": source.commit,
        "endpoint": source.endpoint,
        "python": f"{pipeline.environment.directory}/bin/python",
    }


def smoke_of_play(plan: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Judge the smoke test of every pipeline in a play.

    `plan` is what `plan_of_play` returned, `seen` holds for each host what its tasks registered. Returns the reports,
    and the failures as text with the last journal lines of every rank side by side.
    """
    typed = Plan.model_validate(_plain(plan["plan"]))
    reports, failures = [], []
    for pipeline in typed.pipelines:
        hosts = [node.host for node in pipeline.nodes]
        of_head = seen.get(pipeline.head, {})
        report = judge(
            pipeline,
            wait=of_head.get("ppdeploy__wait") or {},
            ask=of_head.get("ppdeploy__ask") or {},
            before={host: seen.get(host, {}).get("ppdeploy__before") or {} for host in hosts},
            after={host: seen.get(host, {}).get("ppdeploy__after") or {} for host in hosts},
        )
        reports.append(report.model_dump(mode="json"))
        if not report.ok:
            failures.append(f"pipeline {pipeline.name} does not serve: " + "; ".join(report.failures()))
            failures.append(side_by_side(report.journals))
    failed = [report["pipeline"] for report in reports if not report["ok"]]
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
