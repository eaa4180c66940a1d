"""The measured network as one self-contained page with a heat map. Decides nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ppdeploy import __version__
from ppdeploy.net import NetReport, PipelineNet, Way
from ppdeploy.net_report import (
    again_text,
    findings,
    handoff_text,
    latency_text,
    lost_text,
    run_text,
    size_text,
    way_sentence,
)
from ppdeploy.plan.words import measured_text

PAGES = Path(__file__).resolve().parent / "pages"


def net_page(report: NetReport) -> str:
    """Return the page as HTML. It loads nothing and runs no script; all that was measured is escaped."""
    environment = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = {
        "version": __version__,
        "time": report.time,
        "seconds": report.seconds,
        "pipelines": [_pipeline(one) for one in report.pipelines],
    }
    return environment.get_template("net.html.j2").render(page=page)


def heat(way: Way) -> int:
    """Return in percent how much of what TCP can carry at the negotiated rate a way carries; without one: of itself."""
    rate = way.rate_mbit
    if rate is None:
        return 0
    if not way.negotiated_mbit:
        return 100
    return max(0, min(100, round(100 * rate / way.negotiated_mbit)))


def _pipeline(one: PipelineNet) -> dict[str, Any]:
    by_pair = {(way.sender, way.receiver): way for way in one.ways}
    several = next((way.many_flows.flows for way in one.ways if way.many_flows), 0)
    return {
        "name": one.pipeline,
        "verdict": one.verdict or "unknown",
        "sentence": one.sentence,
        "notes": one.notes,
        "nodes": one.nodes,
        "flows": f"{several} flows" if several else "several flows",
        "rows": [
            {"name": sender, "cells": [_cell(by_pair.get((sender, receiver))) for receiver in one.nodes]}
            for sender in one.nodes
        ],
        "ways": [_way(way) for way in one.ways],
        "findings": [{"verdict": verdict or "unknown", "text": text} for verdict, text in findings(one)],
        "handoffs": [
            {
                "name": f"{way.sender} to {way.receiver}",
                "rows": [(size_text(one), *handoff_text(one)) for one in way.handoffs],
            }
            for way in one.ways
            if way.handoffs
        ],
    }


def _cell(way: Way | None) -> dict[str, Any] | None:
    if way is None:
        return None
    latency = way.latency
    rate = way.rate_mbit
    return {
        "verdict": way.verdict or "unknown",
        "heat": heat(way),
        "rate": "none" if rate is None else measured_text(rate),
        "share": ""
        if rate is None or not way.negotiated_mbit
        else f"{heat(way)} % of {measured_text(way.negotiated_mbit)}",
        "trip": latency_text(latency) if latency else "",
        "text": f"{way.sender} to {way.receiver}: {way_sentence(way)}",
    }


def _way(way: Way) -> dict[str, Any]:
    return {
        "name": f"{way.sender} to {way.receiver}",
        "verdict": way.verdict or "unknown",
        "cells": (run_text(way.one_flow), run_text(way.many_flows), again_text(way), latency_text(way.latency),
                  lost_text(way.latency)),
    }  # fmt: skip
