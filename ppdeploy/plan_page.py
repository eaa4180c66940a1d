"""The plan as one self-contained page: hosts, stages, links, memory and predicted speed. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ppdeploy import __version__
from ppdeploy.bench_report import refined_text, seconds_text, speed_text
from ppdeploy.plan.types import Curve, PipelinePlan, Plan, Speed, StageLink, StageMemory
from ppdeploy.plan.words import gib_text, rate_text
from ppdeploy.plan_report import (
    advice,
    capacity_text,
    link_text,
    memory_parts,
    outlook_note,
)

PAGES = Path(__file__).resolve().parent / "pages"

LEFT, RIGHT, TOP, BOTTOM = 44.0, 328.0, 10.0, 190.0
"""Where a chart's curves are in its drawing of 340 x 220."""

KINDS = {"weights": "weights", "activations": "activations", "KV cache": "kv", "other": "other", "free": "free"}

USERS_SHOWN = (1, 8, 32, 64)


def plan_page(plan: Plan) -> str:
    """Return the page as HTML. It loads nothing and runs no script; all that the plan says is escaped."""
    environment = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = {
        "cluster": plan.cluster,
        "version": __version__,
        "assumed": ", ".join(plan.assumed),
        "pipelines": [_pipeline(pipeline) for pipeline in plan.pipelines],
    }
    return environment.get_template("plan.html.j2").render(page=page)


def _pipeline(pipeline: PipelinePlan) -> dict[str, Any]:
    of = f"{pipeline.tensor_parallel_size} x {pipeline.pipeline_parallel_size}"
    outlook = pipeline.outlook
    order = ("blocked", "slow", "ready")
    return {
        "name": pipeline.name,
        "model": pipeline.model.source,
        "layers": pipeline.model.layers,
        "subtitle": f"{pipeline.model.architecture}, {pipeline.model.layers} layers, on {pipeline.device}, tensor x "
        f"pipeline {of}, vLLM {pipeline.environment.vllm_version}",
        "capacity": capacity_text(pipeline),
        "figures": list(_figures(pipeline)),
        "hosts": list(_hosts(pipeline)),
        "unknown": "" if outlook.speeds else outlook.unknown,
        "speed_note": outlook_note(outlook),
        "speeds": [
            (
                speed.concurrency,
                seconds_text(speed.ttft_seconds),
                f"{speed.tpot_seconds * 1000:.0f} ms",
                speed_text(speed.tokens_per_second),
            )
            for speed in outlook.speeds
        ],
        "charts": list(_charts(outlook.curves)),
        "advice": [*([refined_text(outlook.refinement)] if outlook.refinement else []), *advice(pipeline)],
        "findings": [
            {"verdict": finding.verdict, "text": finding.sentence()}
            for finding in sorted(pipeline.findings, key=lambda finding: order.index(finding.verdict))
        ],
    }


def _figures(pipeline: PipelinePlan) -> Iterator[dict[str, str]]:
    capacity, speeds = pipeline.capacity, pipeline.outlook.speeds
    yield {"value": "yes" if capacity.fits else "no", "name": "it fits"}
    yield {"value": f"{capacity.longest_context:,}", "name": "longest request, tokens"}
    yield {"value": f"{capacity.requests_at_4k:,.0f}", "name": "requests of 4,096 tokens at once"}
    if speeds:
        yield {"value": speed_text(speeds[0].tokens_per_second), "name": "tokens/s for one user"}
        most = speeds[-1]
        yield {"value": speed_text(most.tokens_per_second), "name": f"tokens/s for {most.concurrency} users together"}


# ---- hosts, stages and links


def _hosts(pipeline: PipelinePlan) -> Iterator[dict[str, Any]]:
    links = pipeline.outlook.links
    for node in pipeline.nodes:
        rows = [row for row in pipeline.memory if row.host == node.host]
        behind = rows[-1].stage if rows else len(links)
        devices = f"GPU {', '.join(map(str, node.devices))}" if node.devices else pipeline.device
        yield {
            "name": node.host,
            "about": f"rank {node.node_rank}, {node.role}, {devices}, {node.fabric.interface} {node.fabric.address}",
            "stages": [_stage(row, pipeline.model.layers, inside=row is not rows[-1]) for row in rows],
            "link": _link(links[behind]) if behind < len(links) else None,
        }


def _stage(row: StageMemory, layers: int, *, inside: bool) -> dict[str, Any]:
    parts = [part for part in memory_parts(row) if part.size > 0]
    total = max(sum(part.size for part in parts), 1)
    drawn, edge = [], 0
    for part in parts:
        drawn.append(
            {
                "x": _percent(edge, total),
                "width": _percent(part.size, total),
                "kind": KINDS[part.name],
                "text": f"{part.name} {gib_text(part.size)}",
            }
        )
        edge += part.size
    lacking = f", lacks {gib_text(row.shortfall_bytes)}" if row.shortfall_bytes else ""
    return {
        "index": row.stage,
        "layers": f"{row.first_layer} to {row.first_layer + row.layers - 1}",
        "device": f"{row.gpus} x {row.device}" if row.gpus > 1 else row.device,
        "strip": {"x": _percent(row.first_layer, layers), "width": _percent(row.layers, layers)},
        "parts": drawn,
        # Where the GPU's memory ends, when the parts are more than it has.
        "end": _percent(row.memory_bytes, total) if total > row.memory_bytes else "",
        "memory_text": ", ".join(part["text"] for part in drawn),
        "total": f"of {gib_text(row.memory_bytes)}{' each' if row.gpus > 1 else ''}{lacking}",
        "inside": inside,
    }


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}"


def _link(link: StageLink) -> dict[str, Any]:
    return {
        "rate": link_text(link),
        "verdict": link.verdict if link.judged else "",
        "text": link.reason + (f"; {link.remedy}" if link.remedy else ""),
        # From 1.5 for 100 Mbit/s to 12 for 100 Gbit/s.
        "width": f"{min(max(1.5 + 3.5 * math.log10((link.rate_mbit or 100) / 100), 1.5), 12):.1f}",
    }


# ---- charts


def _charts(curves: Sequence[Curve]) -> Iterator[dict[str, Any]]:
    """Yield the curves over the number of users, and over the rates of the links where there are any."""
    if not curves:
        return
    users = [speed.concurrency for speed in curves[0].speeds]
    rated = [curve for curve in curves if curve.rate_mbit is not None]
    yield _chart(
        "Tokens/s over users, for each rate of the links" if rated else "Tokens/s over users",
        "users at once",
        [(str(one), math.log2(one)) for one in users],
        [
            (
                _curve_name(curve),
                curve.rate_mbit is None,
                index,
                [(math.log2(speed.concurrency), speed.tokens_per_second) for speed in curve.speeds],
            )
            for index, curve in enumerate(curves)
        ],
    )
    if rated:
        rates = [curve.rate_mbit or 0 for curve in rated]
        by_users = [one for one in USERS_SHOWN if one in users]
        yield _chart(
            "Tokens/s over the rate of the links",
            "Gbit/s",
            [(f"{rate / 1000:g}", math.log10(rate)) for rate in rates],
            [
                (
                    f"{one} user{'s' if one > 1 else ''}",
                    False,
                    index,
                    [(math.log10(curve.rate_mbit or 1), _at(curve.speeds, one)) for curve in rated],
                )
                for index, one in enumerate(by_users, start=1)
            ],
        )


def _curve_name(curve: Curve) -> str:
    return "as it is" if curve.rate_mbit is None else rate_text(curve.rate_mbit)


def _at(speeds: Sequence[Speed], users: int) -> float:
    return next(speed.tokens_per_second for speed in speeds if speed.concurrency == users)


Line = tuple[str, bool, int, list[tuple[float, float]]]
"""Name, whether it is how things are, number of its colour, and its points."""


def _chart(title: str, axis: str, marks: Sequence[tuple[str, float]], lines: Sequence[Line]) -> dict[str, Any]:
    highest = max(y for *_, points in lines for _, y in points)
    step = nice_step(highest)
    top = max(math.ceil(highest / step - 1e-9), 1) * step
    across = _scale(marks[0][1], marks[-1][1], LEFT, RIGHT)
    up = _scale(0, top, BOTTOM, TOP)
    return {
        "title": title,
        "axis": axis,
        "ticks_x": [{"at": f"{across(value):.1f}", "text": text} for text, value in marks],
        "ticks_y": [{"at": round(up(n * step), 1), "text": f"{n * step:g}"} for n in range(round(top / step) + 1)],
        # What is now lies on top of the others.
        "curves": [
            {
                "name": name,
                "now": now,
                "colour": colour,
                "points": " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points),
            }
            for name, now, colour, points in sorted(lines, key=lambda line: line[1])
        ],
    }


def nice_step(highest: float) -> float:
    """Return the distance of grid lines, 1, 2 or 5 times a power of ten, that makes at most five of them."""
    least = max(highest, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)
