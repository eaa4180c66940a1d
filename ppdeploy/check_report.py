"""What checks came to, for people: a table for each pipeline, grouped by node, pair and pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ppdeploy.checking import Checked, Result, counts, explained
from ppdeploy.gang_report import plain
from ppdeploy.plan.checks import AnyCheck

_STYLES = {"blocked": "red", "slow": "yellow", "ready": "green"}
_SCOPES = {"node": "node", "pair": "pair (from, to)", "pipeline": "pipeline"}


def check_report(checked: Checked, *, everything: bool = False) -> Iterator[RenderableType]:
    """Yield what is not ready, the worst first, and a count; with `everything`, all results."""
    for host, seen in checked.unasked.items():
        word = "unreachable" if seen.unreachable else "not asked"
        yield Text.assemble((f"{host} {word}", "red"), f": {seen.reason}")
    for name in dict.fromkeys(one.pipeline for one in checked.results):
        own = [one for one in checked.results if one.pipeline == name]
        shown = own if everything else [one for one in own if one.verdict != "ready"]
        heading = f"pipeline {name}" if name else "gateways outside of all pipelines"
        yield Text.assemble((heading, "bold"), ": ", _verdict(own))
        for scope, title in _SCOPES.items():
            rows = [one for one in shown if one.scope == scope]
            if rows:
                yield _table(title, rows)
    total = counts(checked)
    told = [f"{total[name]} {name}" for name in ("blocked", "slow", "ready")]
    yield f"{', '.join(told)}, {total['not_judged']} not judged (no such hardware, or not installed yet)"


def check_lines(checked: Checked) -> list[str]:
    """Return the same as lines of plain text, for a play's output."""
    return plain(check_report(checked))


def _verdict(results: Sequence[Result]) -> tuple[str, str]:
    """Return the worst verdict of a pipeline, with its colour."""
    worst = next((name for name in _STYLES if any(one.verdict == name for one in results)), "ready")
    return worst, _STYLES[worst]


def _table(heading: str, rows: Sequence[Result]) -> Table:
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("verdict", heading, "check", "evidence", "what to do"):
        table.add_column(title, overflow="fold")
    order = list(_STYLES)
    for one in sorted(rows, key=lambda row: order.index(row.verdict)):
        word = Text(one.verdict, style=_STYLES[one.verdict]) if one.judged else Text("not judged", style="dim")
        table.add_row(word, one.where, one.id, one.evidence, one.remedy)
    return table


def explain_table(checks: Sequence[AnyCheck]) -> Table:
    """Return the list of checks as a table."""
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("check", "of a", "else", "what must hold", "what to do"):
        table.add_column(title, overflow="fold")
    for one in explained(checks):
        table.add_row(one["id"], one["scope"], one["verdict"], one["looks_at"], one["remedy"])
    return table


def checks_markdown(checks: Sequence[AnyCheck]) -> str:
    """Return docs/checks.md."""
    lines = [
        "# Checks",
        "",
        "`ppdeploy check` looks at every node, at every pair of nodes in both directions and at each pipeline, changes",
        "nothing and disturbs no rank that serves. It prints what is not ready (`--all`: everything), and ends with 3",
        "when a check is blocked, with 7 when a node could not be reached, and else with 0. `ppdeploy check --explain",
        "ID` explains one check without asking a host. Checks that need hardware that a node does not have, or",
        "something that is not installed yet, are told as not judged.",
        "",
        "*Blocked* means that a run must not start, *slow* that it costs speed or care. Those marked *apply* need no",
        "probe: they are findings of the plan, and stop `ppdeploy apply` before anything is touched.",
        "",
        "This page is made from the list of checks by `scripts/checks_page.py`; a test compares them.",
    ]
    titles = {"node": "Of a node", "pair": "Of a pair", "pipeline": "Of a pipeline"}
    for scope, title in titles.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| check | else | what must hold | what to do | source |",
            "|---|---|---|---|---|",
        ]
        for one in explained([check for check in checks if check.scope == scope]):
            stops = " (apply)" if one["stops_apply"] else ""
            cells = (f"`{one['id']}`", one["verdict"] + stops, one["looks_at"], one["remedy"], one["source"])
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
