"""The measured network for people: a matrix of all nodes, a line for each way, its handoffs. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ppdeploy.gang_report import plain
from ppdeploy.net import Handoff, Latency, NetReport, PipelineNet, Throughput, Way, ms_text
from ppdeploy.plan.words import measured_text
from ppdeploy.report import plain_table

STYLES = {"blocked": "red", "slow": "yellow", "ready": "green", None: "dim"}


def net_report(report: NetReport) -> Iterator[RenderableType]:
    """Yield what was measured of every pipeline."""
    for index, pipeline in enumerate(report.pipelines):
        if index:
            yield ""
        yield from _pipeline(pipeline, report.time)


def net_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the same as lines of plain text, for a play's output; `document` is the report as data."""
    return plain(net_report(NetReport.model_validate(document)))


def cell_text(way: Way) -> str:
    """Return what the matrix says of a way: throughput and the median round trip."""
    rate = way.rate_mbit
    if rate is None:
        return way.verdict or "not measured"
    latency = way.latency
    trip = f", {ms_text(latency.p50_seconds)}" if latency and latency.p50_seconds is not None else ""
    return f"{measured_text(rate)}{trip}"


def latency_text(latency: Latency | None) -> str:
    """Return round trips as p50 / p99."""
    if latency is None:
        return "-"
    if latency.p50_seconds is None or latency.p99_seconds is None:
        return "no answer"
    return f"{ms_text(latency.p50_seconds)} / {ms_text(latency.p99_seconds)}"


def lost_text(latency: Latency | None) -> str:
    """Return how many pings were lost."""
    return "-" if latency is None else f"{latency.lost} of {latency.sent}"


def run_text(run: Throughput | None) -> str:
    """Return the throughput of a run."""
    return "-" if run is None else measured_text(run.mbit)


def again_text(way: Way) -> str:
    """Return the segments that were sent again, in the run with one connection and in that with several."""
    runs = [run for run in (way.one_flow, way.many_flows) if run]
    return " / ".join("?" if run.retransmits is None else f"{run.retransmits:,}" for run in runs) or "-"


def size_text(handoff: Handoff) -> str:
    """Return the size of a handoff in tokens and bytes."""
    tokens = f"{handoff.tokens:,} token{'s' if handoff.tokens > 1 else ''}"
    size = handoff.bytes
    return f"{tokens}, {size / 1e6:.3g} MB" if size >= 1e5 else f"{tokens}, {size / 1e3:.3g} kB"


def handoff_text(handoff: Handoff) -> tuple[str, str, str, str]:
    """Return p50, p99, what the wire alone needs, and how often a handoff was measured."""
    wire = "-" if handoff.wire_seconds is None else ms_text(handoff.wire_seconds)
    if handoff.p50_seconds is None or handoff.p99_seconds is None:
        return "left out", "", wire, "0"
    return ms_text(handoff.p50_seconds), ms_text(handoff.p99_seconds), wire, str(handoff.count)


def way_sentence(way: Way) -> str:
    """Return reason and remedy of a way."""
    return way.reason + (f": {way.remedy}" if way.remedy else "")


def _pipeline(one: PipelineNet, time: str) -> Iterator[RenderableType]:
    verdict = one.verdict or "not measured"
    yield Text.assemble(
        (f"pipeline {one.pipeline}", "bold"), ": ", (verdict, STYLES[one.verdict]), f", measured {time}"
    )
    for note in one.notes:
        yield Text(f"  ! {note}", "yellow")
    if not one.ways:
        return
    yield _matrix(one)
    yield ""
    yield _ways(one)
    for line in encryption_lines(one):
        yield Text(f"  {line}")
    for told, text in findings(one):
        yield Text.assemble("  ", (told or "unknown", STYLES[told]), f": {text}")
    shown = [way for way in one.ways if way.handoffs and way.next] or [way for way in one.ways if way.handoffs][:1]
    for way in shown:
        yield ""
        yield from _handoffs(way)
    if one.sentence:
        yield ""
        yield Text(one.sentence, "bold")


def encryption_lines(one: PipelineNet) -> Iterator[str]:
    """Yield what encryption costs each way: several connections through the tunnel, against as many beside it."""
    for way in one.ways:
        cost = way.encryption_cost
        if cost is not None and way.wire and way.many_flows:
            through, beside = measured_text(way.many_flows.mbit), measured_text(way.wire.mbit)
            told = f"{cost:.0%}: {through}, and {beside} beside the tunnel"
            yield f"encryption costs from {way.sender} to {way.receiver} {told}"


def findings(one: PipelineNet) -> Iterator[tuple[str | None, str]]:
    """Yield verdict and sentence of what is wrong with ways; those of one remedy together, so that it is said once."""
    groups: dict[tuple[str | None, str], list[Way]] = {}
    for way in one.ways:
        if way.verdict != "ready":
            groups.setdefault((way.verdict, way.remedy), []).append(way)
    for (verdict, remedy), ways in groups.items():
        told = "; ".join(f"{way.sender} to {way.receiver}: {way.reason}" for way in ways[:2])
        more = f"; and {len(ways) - 2} more" if ways[2:] else ""
        yield verdict, f"{told}{more}" + (f": {remedy}" if remedy else "")


def _matrix(one: PipelineNet) -> RenderableType:
    """Return all ways at a glance: from the node of a line to that of a column."""
    table = plain_table("from \\ to", *one.nodes)
    by_pair = {(way.sender, way.receiver): way for way in one.ways}
    for sender in one.nodes:
        cells: list[Text | str] = [sender]
        for receiver in one.nodes:
            way = by_pair.get((sender, receiver))
            cells.append(Text(cell_text(way), STYLES[way.verdict]) if way else Text("·", "dim"))
        table.add_row(*cells)
    return Padding(table, (0, 0, 0, 2), expand=False)


def _ways(one: PipelineNet) -> RenderableType:
    several = next((way.many_flows.flows for way in one.ways if way.many_flows), 0)
    table = plain_table(
        "way",
        "verdict",
        "negotiated",
        "1 flow",
        f"{several} flows" if several else "flows",
        "sent again",
        "round trip p50 / p99",
        "lost pings",
    )
    for way in one.ways:
        table.add_row(
            f"{way.sender} to {way.receiver}",
            Text(way.verdict or "unknown", STYLES[way.verdict]),
            "unknown" if way.negotiated_mbit is None else measured_text(way.negotiated_mbit),
            run_text(way.one_flow),
            run_text(way.many_flows),
            again_text(way),
            latency_text(way.latency),
            lost_text(way.latency),
        )
    return Padding(table, (0, 0, 0, 2), expand=False)


def _handoffs(way: Way) -> Iterator[RenderableType]:
    yield Text(f"  handoffs from {way.sender} to {way.receiver}, as vLLM sends them:")
    table = plain_table("tokens, bytes", "p50", "p99", "the wire alone", "times")
    for handoff in way.handoffs:
        table.add_row(size_text(handoff), *handoff_text(handoff))
    yield Padding(table, (0, 0, 0, 4), expand=False)
