"""`ppdeploy bench`: what every pipeline serves, measured by vLLM's own client, beside what the plan predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ppdeploy.bench_report import bench_report
from ppdeploy.cli.options import Request
from ppdeploy.cli.output import print_json, print_report, say
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import InputError
from ppdeploy.plan.bench import BenchAsk, BenchRun, asked_loads
from ppdeploy.plan.types import Refinement
from ppdeploy.run import QuietProgress, RunResult, cluster_lock, plays

#: Version of the last line that `bench --json` prints.
RESULT_SCHEMA = 1

#: Tokens of a request before any plan says what the model takes.
_ANY_LENGTH = 10**9


OnePipeline = Annotated[str | None, typer.Option("--limit", "-l", metavar="PIPELINE", help="Only this pipeline.")]


def bench(
    request: Request,
    *,
    users: Annotated[
        str, typer.Option("--users", metavar="N,N,...", help="Users at once, one run for each.")
    ] = "1,8,32",
    input_tokens: Annotated[
        int | None, typer.Option("--input", metavar="TOKENS", help="Tokens of each prompt (1024, or what fits).")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option("--output", metavar="TOKENS", help="Tokens of each answer (128, or what fits).")
    ] = None,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", metavar="N", help="Requests of each run (4 alone, else 64 or two a user)."),
    ] = None,
    timeout: Annotated[
        int, typer.Option("--timeout", metavar="SECONDS", min=30, help="Seconds that each run may take.")
    ] = 900,
    force: Annotated[bool, typer.Option("--force", help="Go on although the pipeline has requests in flight.")] = False,
) -> None:
    """Measure what every pipeline serves, and show it beside the prediction. Starts and stops no rank.

    On each head `vllm bench serve` plays random prompts against the API, once for each number of users. The figures are
    kept beside the inventory and refine the speed that later plans expect; nothing else of a plan follows from them.
    Refused (3) where a pipeline does not serve what the inventory says, or has requests in flight; 5 where a request
    failed.
    """
    ask = BenchAsk(
        users=_users(users), input=input_tokens, output=output_tokens, prompts=prompts, timeout=timeout, force=force
    )
    if prompts is not None and prompts < 1:
        raise InputError("a run has at least one request", where=f"--prompts {prompts}", remedy="give 1 or more")
    # What no model could take is refused before any host is asked.
    asked_loads(ask.users, ask.input, ask.output, _ANY_LENGTH)
    session = open_session(request)
    session.check_models()
    with cluster_lock(request.inventory, "bench"):
        values = {plays.BENCH_ASK: ask.model_dump(mode="json"), plays.SHOW: False}
        result = session.run(plays.BENCH, events=True, values=values)
        if result.status == "interrupted":
            # The client goes on by itself until its time is over, and would keep the pipeline busy.
            say("ending the benchmark on its hosts")
            session.run(plays.BENCH_STOP, display=QuietProgress())
            raise KeyboardInterrupt
    _finish(session, result)


def _users(text: str) -> tuple[int, ...]:
    """Return the numbers of `--users`; InputError where they are none."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise InputError("it is no list of numbers", where=f"--users {text}", remedy="give them as in --users 1,8,32")
    return tuple(map(int, words))


def _finish(session: Session, result: RunResult) -> None:
    """Print what was measured, and raise the run's error if it has one."""
    found = _benches(result)
    runs = [BenchRun.model_validate(run) for run in found.get("runs", ())]
    files = {name: file["path"] for name, file in found.get("files", {}).items()}
    refinements = _refinements(session, result) if runs else {}
    error = session.error_of(result)
    if session.as_json:
        document = {
            "event": "result",
            "schema": RESULT_SCHEMA,
            "verb": "bench",
            "ok": error is None,
            "exit_code": error.exit_code if error else 0,
            "error": str(error) if error else None,
            "seconds": round(result.seconds, 3),
            "pipelines": [
                {
                    **run.model_dump(mode="json"),
                    "file": files.get(run.pipeline),
                    "refinement": _json(refinements.get(run.pipeline)),
                }
                for run in runs
            ],
        }
        print_json(document, session.redactor, line=True)
    else:
        for run in runs:
            print_report(*bench_report(run, refinements.get(run.pipeline)))
            say(f"kept in {files[run.pipeline]}")
    if error:
        raise error


def _benches(result: RunResult) -> Mapping[str, Any]:
    return next((facts[plays.BENCHES] for facts in result.facts.values() if plays.BENCHES in facts), {})


def _refinements(session: Session, result: RunResult) -> dict[str, Refinement | None]:
    """Return what the plan makes of all kept benchmarks, those of this run included."""
    plan = session.plan_from_play(result)
    return {pipeline.name: pipeline.outlook.refinement for pipeline in plan.pipelines}


def _json(refinement: Refinement | None) -> dict[str, Any] | None:
    return refinement.model_dump(mode="json") if refinement else None
