"""Benchmarks for people: what was measured beside what was predicted. Decides nothing."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from ppdeploy.plan.bench import BenchLoad, BenchRun
from ppdeploy.plan.types import Refinement
from ppdeploy.report import SHORT_DIGEST, plain_table

#: Width of a report as text, in characters: enough that no cell is cut.
_TEXT_WIDTH = 160


def seconds_text(seconds: float) -> str:
    """Return a time of two or three digits with its unit."""
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def speed_text(tokens_per_second: float) -> str:
    """Return tokens/s of as many digits as mean anything."""
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"


def refinement_text(found: Refinement) -> str:
    """Return by what a prediction was refined, and by how much it changed, as one sentence without an end."""
    runs = "1 benchmark" if found.benchmarks == 1 else f"{found.benchmarks} benchmarks"
    return f"refined by {runs} of {found.latest[:10]}: factor {found.factor:.2g}"


def refined_text(found: Refinement) -> str:
    """Return the refined speeds as one sentence, where there is no room for a table."""
    users = ", ".join(f"{speed_text(speed.tokens_per_second)} with {speed.concurrency}" for speed in found.speeds)
    return f"{refinement_text(found)}: tokens/s by number of users {users}"


def bench_report(run: BenchRun, refinement: Refinement | None = None) -> Iterator[RenderableType]:
    """Yield a benchmark of a pipeline; `refinement` is what the plan makes of it and of those before it."""
    yield Text.assemble(
        (f"pipeline {run.pipeline}", "bold"),
        f"  release {run.release[:SHORT_DIGEST]}, vLLM {run.circumstances.vllm_version}, "
        f"prompts of {run.loads[0].input_tokens:,} tokens, answers of {run.loads[0].output_tokens:,}",
    )
    headings = ["users", "requests", "tokens/s", "predicted", "ratio", "first token", "p99 of it", "each further"]
    refined = _refined(run, refinement)
    table = plain_table(*headings, *(["refined"] if refined else []))
    for load in run.loads:
        table.add_row(*_cells(load), *([refined.get(load.users, "")] if refined else []))
    yield Padding(table, (0, 0, 0, 2), expand=False)
    if any(not load.whole for load in run.loads):
        yield Text("loads of which requests failed refine nothing", "yellow")
    if refinement:
        yield Text(f"the plan of this pipeline is {refinement_text(refinement)}")


def bench_lines(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return benchmarks as lines of text, as Ansible's own output shows them."""
    console = Console(file=io.StringIO(), width=_TEXT_WIDTH, highlight=False, color_system=None)
    for run in runs:
        for part in bench_report(BenchRun.model_validate(run)):
            console.print(part)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def _refined(run: BenchRun, refinement: Refinement | None) -> dict[int, str]:
    """Return the refined tokens/s of each number of users; a load of another run may have other lengths."""
    known = {(one.measured.concurrency, one.input_tokens, one.output_tokens): one for one in _loads(refinement)}
    keys = {load.users: (load.users, load.input_tokens, load.output_tokens) for load in run.loads}
    return {users: speed_text(known[key].refined.tokens_per_second) for users, key in keys.items() if key in known}


def _loads(refinement: Refinement | None) -> Iterable[Any]:
    return refinement.loads if refinement else ()


def _cells(load: BenchLoad) -> tuple[str, ...]:
    said = load.predicted
    ratio = load.tokens_per_second / said.tokens_per_second if said and said.tokens_per_second else None
    return (
        str(load.users),
        str(load.prompts) if load.whole else f"{load.completed} of {load.prompts}",
        speed_text(load.tokens_per_second),
        speed_text(said.tokens_per_second) if said else "-",
        f"{ratio:.2f}" if ratio is not None else "-",
        seconds_text(load.ttft_seconds),
        seconds_text(load.ttft_p99_seconds),
        f"{load.tpot_seconds * 1000:.0f} ms",
    )
