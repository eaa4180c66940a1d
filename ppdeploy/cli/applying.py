"""`ppdeploy apply` and `smoke`: the play itself, and its proof alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ppdeploy.cli.forgetting import Forget, Yes, confirm_forgotten
from ppdeploy.cli.options import (
    DEFAULT_INVENTORY,
    AskBecomePass,
    AskVaultPass,
    ExtraVars,
    Inventory,
    Json,
    Limit,
    Request,
    Tags,
    VaultIds,
    VaultPasswordFiles,
    Verbose,
    play_options,
)
from ppdeploy.cli.output import print_json, print_report, program, say
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import InputError
from ppdeploy.plan import Plan
from ppdeploy.report import apply_report, pipeline_summary
from ppdeploy.run import RunResult, cluster_lock, plays

#: Lab hosts, and nobody else, have such management addresses (RFC 2544, benchmarks).
LAB_PREFIX = "198.18."

#: Version of the last line that these verbs print with --json.
RESULT_SCHEMA = 1


def apply(
    inventory: Inventory = DEFAULT_INVENTORY,
    limit: Limit = None,
    tags: Tags = None,
    check: Annotated[bool, typer.Option("--check", help="Say what would change, and change nothing.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show how files change.")] = False,
    forget: Forget = None,
    yes: Yes = False,
    extra_vars: ExtraVars = None,
    as_json: Json = False,
    verbose: Verbose = 0,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_files: VaultPasswordFiles = None,
    vault_ids: VaultIds = None,
) -> None:
    """Set up every node, run the pipelines, and prove that they serve. A second time it changes nothing.

    A dead node that was taken out of the inventory, or whose machine was replaced, is named with --forget: the gang
    would wait for its word that its rank is gone.
    """
    confirm_forgotten(forget, yes=yes)
    if check and tags and "smoke" in tags.split(","):
        raise InputError(
            "check mode asks no pipeline for a completion",
            where="--check --tags smoke",
            remedy="leave out --check, or run `ppdeploy smoke`",
        )
    options = play_options(
        limit=limit,
        tags=tags,
        check=check,
        diff=diff,
        extra_vars=extra_vars,
        verbose=verbose,
        as_json=as_json,
        ask_vault_pass=ask_vault_pass,
        vault_password_files=vault_password_files,
        vault_ids=vault_ids,
    )
    apply_cluster(Request(inventory, options, ask_become_pass, as_json), forget=forget or ())


def apply_cluster(request: Request, *, hints: bool = True, forget: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run the whole play, print what it came to and, with `hints`, what to do next; return each pipeline's summary.

    `forget` names removed nodes whose ranks are known to be dead.
    """
    session = open_session(request)
    session.check_models()
    with cluster_lock(request.inventory, "apply"):
        result = session.run(plays.SITE, events=True, values={plays.FORGET: list(forget)} if forget else None)
    summaries = _finish(session, result, "apply")
    if not request.as_json:
        if request.options.check:
            say("nothing was changed: these are the changes that an apply would make")
        elif hints:
            say(_next_commands(session, summaries))
    return summaries


def smoke(request: Request) -> None:
    """Ask every pipeline for completions, one by one and at once, and judge the answers. Changes nothing."""
    session = open_session(request)
    _finish(session, session.run(plays.SMOKE, events=True), "smoke")


def _finish(session: Session, result: RunResult, verb: str) -> list[dict[str, Any]]:
    """Print what a run came to, raise its error if it has one, and return what became of each pipeline."""
    reports = _smoke_reports(result)
    plan = _plan_of(session, result)
    made = [pipeline_summary(pipeline, reports.get(pipeline.name)) for pipeline in (plan.pipelines if plan else ())]
    summaries: list[dict[str, Any]] = session.redactor.data(made)
    changed = {host: stats.changed for host, stats in result.stats.items() if stats.changed}
    if session.as_json:
        error = session.error_of(result)
        document = {
            "event": "result",
            "schema": RESULT_SCHEMA,
            "verb": verb,
            "check": result.check,
            "ok": result.status == "ok",
            "exit_code": error.exit_code if error else result.exit_code,
            "error": str(error) if error else "interrupted" if result.status == "interrupted" else None,
            "seconds": round(result.seconds, 3),
            "hosts": {host: vars(stats) for host, stats in result.stats.items()},
            "pipelines": summaries,
            "smoke": list(reports.values()),
        }
        print_json(document, session.redactor, line=True)
    else:
        for text in _smoke_texts(result):
            say(session.redactor.text(text))
        if result.status == "ok":
            print_report(*apply_report(summaries, changed))
    _raise(session, result)
    return summaries


def _raise(session: Session, result: RunResult) -> None:
    if result.status == "interrupted":
        raise KeyboardInterrupt
    error = session.error_of(result)
    if error:
        raise error


def _plan_of(session: Session, result: RunResult) -> Plan | None:
    """Return the plan that the play made, or None when it did not come to that."""
    for facts in result.facts.values():
        if plays.PLAN in facts:
            return Plan.model_validate(facts[plays.PLAN]["plan"])
    if result.status != "ok":
        return None
    # The play hides the plan's task when a secret went into it; the plan itself has none.
    return session.plan_from_play(result)


def _smoke(result: RunResult) -> Mapping[str, Any]:
    return next((facts[plays.SMOKE_REPORTS] for facts in result.facts.values() if plays.SMOKE_REPORTS in facts), {})


def _smoke_reports(result: RunResult) -> dict[str, Mapping[str, Any]]:
    """Return the smoke test's report of each pipeline that was asked."""
    return {report["pipeline"]: report for report in _smoke(result).get("reports", ())}


def _smoke_texts(result: RunResult) -> list[str]:
    """Return what the smoke test says of pipelines that do not serve: the reasons, and all ranks' journals."""
    return list(_smoke(result).get("failures", ()))


def ask_commands(pipeline: Mapping[str, Any], address: str) -> list[str]:
    """Return the commands that ask a pipeline for a completion from here; `address` is where ssh reaches its head."""
    body = f'{{"model": "{pipeline["model"]}", "prompt": "Hello", "max_tokens": 16}}'
    curl = f"curl -s {pipeline['address']}/v1/completions -H Content-Type:application/json -d"
    if address.startswith(LAB_PREFIX):
        # A lab host is reached through the lab's network namespace only.
        return [f"{program()} lab ssh {pipeline['head']} {curl} {shlex.quote(body)}"]
    port = pipeline["address"].rpartition(":")[2]
    return [f"ssh -L {port}:127.0.0.1:{port} {address}   # and then, here:", f"{curl} {shlex.quote(body)}"]


def _next_commands(session: Session, pipelines: Sequence[Mapping[str, Any]]) -> str:
    where = "" if session.inventory.path == DEFAULT_INVENTORY else f" -i {session.inventory.path}"
    lines = ["next:"]
    for one in pipelines:
        address = str(session.inventory.addresses.get(one["head"], one["head"]))
        lines += [f"  {line}" for line in ask_commands(one, address)]
    return "\n".join([*lines, f"  {program()} status{where}", f"  {program()} smoke{where}"])
