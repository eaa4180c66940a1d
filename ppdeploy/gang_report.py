"""The status of gangs for people: a few lines and a table for each pipeline."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ppdeploy.gang import NOT_INSTALLED, UNKNOWN

#: Characters of a digest that are shown.
_SHORT = 12
#: Width of a report as text, in characters: enough that no cell is cut.
_TEXT_WIDTH = 200

_STYLES = {"serving": "green", "failed": "red", NOT_INSTALLED: "red", UNKNOWN: "red", "stopped": "yellow"}
_STATES = {"running": "green", "absent": "red"}


def status_report(status: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the status of every pipeline; `status` is what `gang.gang_status` returns."""
    for index, pipeline in enumerate(status["pipelines"]):
        if index:
            yield ""
        yield from _pipeline(pipeline)


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """Return the same as lines of plain text, for a play's output."""
    return plain(status_report(status))


def plain(parts: Iterable[RenderableType], width: int = _TEXT_WIDTH) -> list[str]:
    """Return a report as lines without colours."""
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, color_system=None)
    for part in parts:
        console.print(part, soft_wrap=not isinstance(part, Table), markup=False)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def duration(seconds: float) -> str:
    """Return a time span in at most two units, such as `42 s`, `3 min 20 s`, `2 h 5 min`."""
    whole = int(seconds)
    if whole < 10 and seconds != whole:
        return f"{seconds:.1f} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for place, (unit, size) in enumerate(units[:-1]):
        if whole >= size:
            rest, (small, part) = whole % size, units[place + 1]
            return f"{whole // size} {unit}" + (f" {rest // part} {small}" if rest // part else "")
    return f"{whole} s"


def _pipeline(one: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _title(one)
    for line in _lines(one):
        yield Text(f"  {line}")
    yield _nodes(one)
    for problem in one["problems"]:
        yield Text(f"  ! {problem}", style="yellow")


def _title(one: Mapping[str, Any]) -> Text:
    phase = one["phase"]
    style = _STYLES.get(phase, "yellow") if one["healthy"] or phase != "serving" else "red"
    told = Text.assemble((f"pipeline {one['pipeline']}", "bold"), ": ", (phase, style))
    if phase == "serving" and one["serving_seconds"] is not None:
        told.append(f" for {duration(one['serving_seconds'])}")
    elif one["phase_seconds"] is not None:
        told.append(f" for {duration(one['phase_seconds'])}")
    # While it serves, the remark only tells how it came to that.
    reason = one["why_unhealthy"] if phase == "serving" else one["remark"]
    if reason:
        told.append(f": {reason.removeprefix('serving, but ')}")
    return told


def _lines(one: Mapping[str, Any]) -> Iterator[str]:
    if one["generation"] is None:
        return
    proof = one["proof_age_seconds"]
    parts = [f"generation {one['generation']}", f"release {(one['release'] or 'none')[:_SHORT]}", f"head {one['head']}"]
    if proof is not None:
        parts.append(f"tokens proven {duration(proof)} ago")
    yield ", ".join(parts)
    total, reasons = one["restarts"]["total"], one["restarts"]["by_reason"]
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(reasons.items()))
    restarts = f"restarts since the head's agent began: {total}" + (f" ({counts})" if counts else "")
    if one["recovered_seconds"]:
        restarts += f"; the last one took {duration(one['recovered_seconds'])}"
    yield restarts
    failure = one["last_failure"]
    if failure:
        yield f"last failure {duration(failure['age_seconds'])} ago: {failure['reason']}"
    budget = one["budget"]
    if budget:
        yield f"budget: {budget['left']} of {budget['limit']} failures left in {duration(budget['window'])}"


def _nodes(one: Mapping[str, Any]) -> Table:
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("rank", "host", "role", "stages", "rank is", "release", "prepared", "memory", "agent"):
        table.add_column(heading, overflow="fold")
    for row in one["nodes"]:
        table.add_row(*_cells(row))
    return table


def _cells(row: Mapping[str, Any]) -> tuple[str | Text, ...]:
    if not row["reachable"]:
        return (str(row["rank"]), row["host"], "", "", Text("unreachable", style="red"), "", "", "", _heard(row))
    state = Text(row["state"] if row["installed"] else NOT_INSTALLED, style=_STATES.get(row["state"], "yellow"))
    if row["generation"] and row["state"] != "absent":
        state.append(f", generation {row['generation']}")
    if row["detail"]:
        state.append(f": {row['detail']}")
    release = row["release"]
    return (
        str(row["rank"]),
        row["host"],
        row["role"] or "",
        row["stages"] or "",
        state,
        (release["running"] or "none")[:_SHORT],
        (release["prepared"] or "none")[:_SHORT],
        _memory(row["memory"]),
        _agent(row),
    )


def _agent(row: Mapping[str, Any]) -> str:
    agent = row["agent"]
    if not agent["answers"]:
        return "silent" if row["installed"] else ""
    heard = _heard(row)
    return f"version {agent['version']}" + (f", {heard}" if heard else "")


def _heard(row: Mapping[str, Any]) -> str:
    """Return when the head's agent last heard this node's, or why it does not."""
    told = row["heard_by_head"]
    if told is None:
        return ""
    age = "never" if told["age_seconds"] is None else f"{duration(told['age_seconds'])} ago"
    return f"heard {age}" if told["heard"] else f"not heard by the head ({told['error']}), last {age}"


def _memory(memory: Mapping[str, Any]) -> str:
    names = {"gpu_bytes": "GPU", "resident_bytes": "RSS", "cgroup_bytes": "cgroup"}
    return ", ".join(f"{word} {_gib(memory[name])}" for name, word in names.items() if memory[name] is not None)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
