"""Reports as tables: the plan, and what an apply came to. Nothing here decides anything."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ppdeploy.plan.types import Finding, PipelinePlan, Plan, Work
from ppdeploy.render import file_path, stages_text

#: Characters of a digest that tables show.
SHORT_DIGEST = 12

_VERDICT_STYLES = {"blocked": "red", "slow": "yellow", "ready": "green"}


def plan_report(plan: Plan) -> Iterator[RenderableType]:
    """Yield the plan for people: nodes, stages and fabric as tables, then what will run and every file."""
    for pipeline in plan.pipelines:
        yield _title(pipeline)
        yield _nodes(pipeline)
        yield from _fabric(pipeline)
        yield from _what_runs(pipeline)
        yield from findings_report(pipeline.findings)
        yield ""


def findings_report(findings: Iterable[Finding]) -> Iterator[RenderableType]:
    """Yield one line for each finding, the worst first."""
    order = list(_VERDICT_STYLES)
    for finding in sorted(findings, key=lambda finding: order.index(finding.verdict)):
        yield Text.assemble((f"{finding.verdict:8}", _VERDICT_STYLES[finding.verdict]), finding.sentence())


def _title(pipeline: PipelinePlan) -> Text:
    of = f"{pipeline.tensor_parallel_size} x {pipeline.pipeline_parallel_size}"
    return Text.assemble(
        (f"pipeline {pipeline.name}", "bold"),
        f"  {pipeline.model.source} ({pipeline.model.layers} layers, {_gib(pipeline.model.weight_bytes)})"
        f"  on {pipeline.device}, tensor x pipeline {of}, vLLM {pipeline.environment.vllm_version}"
        f" with Python {pipeline.environment.python}"
        f"  release {pipeline.release[:SHORT_DIGEST]}",
    )


def _nodes(pipeline: PipelinePlan) -> Table:
    table = _table("rank", "host", "role", "devices", "stages", "fabric", "Mbit/s", "MTU", "apply will")
    for node in pipeline.nodes:
        table.add_row(
            str(node.node_rank),
            node.host,
            node.role,
            f"GPU {', '.join(map(str, node.devices))}" if node.devices else pipeline.device,
            stages_text(node),
            f"{node.fabric.interface} {node.fabric.address}",
            "unknown" if node.fabric.speed_mbit is None else str(node.fabric.speed_mbit),
            "" if node.fabric.mtu is None else str(node.fabric.mtu),
            work_text(node.work),
        )
    return table


def work_text(work: Work) -> str:
    """Return what apply has to do on a node, in words."""
    words = {
        "install vLLM": work.install_venv,
        "place the model": work.place_model,
        "install the unit": work.install_unit,
        "prepare the release": work.prepare_release,
        "switch to it": work.switch_release,
        "start the rank anew": work.restart,
    }
    return ", ".join(word for word, wanted in words.items() if wanted) or "change nothing"


def _fabric(pipeline: PipelinePlan) -> Iterator[str]:
    yield "fabric:"
    for node in pipeline.nodes:
        fabric = node.fabric
        yield f"  {node.host}: {fabric.interface} {fabric.address} in {fabric.network}: {fabric.reason}"


def _what_runs(pipeline: PipelinePlan) -> Iterator[str]:
    for node in pipeline.nodes:
        yield f"{node.host} runs {node.unit}, ports {', '.join(map(str, node.ports)) or 'none'}:"
        yield f"  {shlex.join(node.argv)}"
        environment = {**node.rank_env, **node.nccl_env}
        yield "  environment: " + " ".join(
            f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())
        )
        yield "  files:"
        yield from (f"    {file_path(pipeline, file)} ({file.owner}:{file.group} {file.mode})" for file in node.files)


def pipeline_summary(pipeline: PipelinePlan, smoke: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what an apply made of a pipeline; `smoke` is its smoke test's report, where one ran."""
    return {
        "pipeline": pipeline.name,
        "model": pipeline.served_model_name,
        "head": pipeline.head,
        "address": f"http://127.0.0.1:{pipeline.api_port}",
        "release": pipeline.release,
        "nodes": [node.host for node in pipeline.nodes],
        "stages": {node.host: stages_text(node) for node in pipeline.nodes},
        "serves": smoke["ok"] if smoke else None,
        "tokens_per_second": smoke.get("tokens_per_second") if smoke else None,
        "completion": smoke.get("completion") if smoke else None,
        "prompt": smoke.get("prompt") if smoke else None,
    }


def apply_report(pipelines: Sequence[Mapping[str, Any]], changed: Mapping[str, int]) -> Iterator[RenderableType]:
    """Yield the end of an apply: each pipeline with its address and speed, and what changed on each host."""
    table = _table("pipeline", "model", "address", "tokens/s", "release")
    for one in pipelines:
        speed = one["tokens_per_second"]
        table.add_row(
            one["pipeline"],
            one["model"],
            f"{one['address']} on {one['head']}",
            "" if speed is None else f"{speed:.1f}",
            one["release"][:SHORT_DIGEST],
        )
    yield table
    for one in pipelines:
        if one["completion"]:
            yield f"{one['model']} completed {one['prompt']!r} with {one['completion']!r}"
    yield "changed: " + (", ".join(f"{host} {count}" for host, count in changed.items()) or "nothing")


def _table(*headings: str) -> Table:
    numbers = {"rank", "Mbit/s", "MTU", "tokens/s"}
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return table


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
