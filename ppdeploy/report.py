"""Reports as tables: findings, and what an apply came to. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ppdeploy.plan.types import Finding, PipelinePlan, Plan, Work
from ppdeploy.render import stages_text
from ppdeploy.smoke import GATEWAY, SmokeReport

#: Characters of a digest that tables show.
SHORT_DIGEST = 12

_VERDICT_STYLES = {"blocked": "red", "slow": "yellow", "ready": "green"}


def findings_report(findings: Iterable[Finding]) -> Iterator[RenderableType]:
    """Yield one line for each finding, the worst first."""
    order = list(_VERDICT_STYLES)
    for finding in sorted(findings, key=lambda finding: order.index(finding.verdict)):
        yield Text.assemble((f"{finding.verdict:8}", _VERDICT_STYLES[finding.verdict]), finding.sentence())


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


def pipeline_summary(pipeline: PipelinePlan, smoke: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what an apply made of a pipeline; `smoke` is its smoke test's report, where one ran."""
    report = SmokeReport.model_validate(smoke) if smoke else None
    return {
        "pipeline": pipeline.name,
        "model": pipeline.served_model_name,
        "head": pipeline.head,
        "address": f"http://127.0.0.1:{pipeline.api_port}",
        "gateway": _gateway_url(pipeline),
        "release": pipeline.release,
        "nodes": [node.host for node in pipeline.nodes],
        "stages": {node.host: stages_text(node) for node in pipeline.nodes},
        # A gateway that does not answer is another fault than a pipeline that does not serve: both are told.
        "serves": report.serves if report else None,
        "gateway_serves": _gateway_serves(report) if report else None,
        "tokens_per_second": smoke.get("tokens_per_second") if smoke else None,
        "completion": smoke.get("completion") if smoke else None,
        "prompt": smoke.get("prompt") if smoke else None,
    }


def _gateway_serves(report: SmokeReport) -> bool | None:
    """Return whether the pipeline was reached through its head's gateway; None where there is none."""
    return next((check.ok for check in report.checks if check.id == GATEWAY), None)


def _gateway_url(pipeline: PipelinePlan) -> str | None:
    """Return where clients ask, by the address that Ansible uses; None without a gateway."""
    head = pipeline.nodes[0]
    return head.gateway.url(head.address) if head.gateway else None


def gateway_urls(plan: Plan) -> dict[str, str]:
    """Return where clients ask each gateway on a host that is no head, by the host."""
    workers = [node for pipeline in plan.pipelines for node in pipeline.nodes if node.role == "worker"]
    found = {node.host: node.gateway.url(node.address) for node in workers if node.gateway}
    return found | {one.host: one.gateway.url(one.address) for one in plan.gateways}


def apply_report(
    pipelines: Sequence[Mapping[str, Any]], changed: Mapping[str, int], gateways: Mapping[str, str] | None = None
) -> Iterator[RenderableType]:
    """Yield the end of an apply: each pipeline with its address and speed, and what changed on each host.

    `gateways` has the addresses of those on hosts that are no heads.
    """
    table = plain_table("pipeline", "model", "address", "tokens/s", "release")
    for one in pipelines:
        speed = one["tokens_per_second"]
        table.add_row(
            one["pipeline"],
            one["model"],
            one.get("gateway") or f"{one['address']} on {one['head']}",
            "" if speed is None else f"{speed:.1f}",
            one["release"][:SHORT_DIGEST],
        )
    yield table
    for host, url in (gateways or {}).items():
        yield f"gateway {host}: {url}"
    for one in pipelines:
        if one["completion"]:
            yield f"{one['model']} completed {one['prompt']!r} with {one['completion']!r}"
    yield "changed: " + (", ".join(f"{host} {count}" for host, count in changed.items()) or "nothing")


def plain_table(*headings: str) -> Table:
    """Return an empty table without lines; columns of numbers go to the right."""
    numbers = {"rank", "Mbit/s", "MTU", "tokens/s", "users", "first token", "each further"}
    numbers |= {"predicted", "ratio", "refined", "p99 of it", "requests"}
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    return table
