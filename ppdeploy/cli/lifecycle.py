"""`ppdeploy start`, `stop` and `restart`: the operator's word for the gang's agents, and what became of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from ppdeploy.cli.options import (
    DEFAULT_INVENTORY,
    AskBecomePass,
    AskVaultPass,
    ExtraVars,
    Inventory,
    Json,
    Limit,
    Request,
    VaultIds,
    VaultPasswordFiles,
    Verbose,
    play_options,
)
from ppdeploy.cli.output import print_json, print_report, say
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import InputError
from ppdeploy.gang_report import duration
from ppdeploy.run import RunResult, cluster_lock, plays

#: Version of the last line that these verbs print with --json; 1 had no `pipelines`.
RESULT_SCHEMA = 2

NoWait = Annotated[bool, typer.Option("--no-wait", help="Leave the word and return; `ppdeploy status` tells the rest.")]
Forget = Annotated[
    list[str] | None,
    typer.Option(
        "--forget",
        metavar="NODE",
        help="Wait no more for this removed node: you say that its rank is dead. It is not contacted. Repeatable.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Answer the question of --forget with yes.")]


def start(
    inventory: Inventory = DEFAULT_INVENTORY,
    limit: Limit = None,
    forget: Forget = None,
    yes: Yes = False,
    no_wait: NoWait = False,
    extra_vars: ExtraVars = None,
    as_json: Json = False,
    verbose: Verbose = 0,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_files: VaultPasswordFiles = None,
    vault_ids: VaultIds = None,
) -> None:
    """Start every pipeline that is stopped or has failed, and wait until it serves.

    Failures so far are forgiven and no pause is waited for. A pipeline that runs is left alone. Exit code 5 says that a
    pipeline fails again, or waits for something, with the reason; its agents keep trying all the same.
    """
    confirm_forgotten(forget, yes=yes)
    options = play_options(
        limit=limit,
        extra_vars=extra_vars,
        verbose=verbose,
        as_json=as_json,
        ask_vault_pass=ask_vault_pass,
        vault_password_files=vault_password_files,
        vault_ids=vault_ids,
    )
    request = Request(inventory, options, ask_become_pass, as_json)
    _run(request, "start", {plays.FORGET: forget or [], plays.WAIT: not no_wait})


def stop(request: Request) -> None:
    """Stop every pipeline and wait until no rank is left: requests finish first, workers stop after the head.

    The pipeline stays stopped, over reboots too, until `ppdeploy start` or an apply that changes its release.
    """
    _run(request, "stop", {})


def restart(
    inventory: Inventory = DEFAULT_INVENTORY,
    limit: Limit = None,
    no_wait: NoWait = False,
    extra_vars: ExtraVars = None,
    as_json: Json = False,
    verbose: Verbose = 0,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_files: VaultPasswordFiles = None,
    vault_ids: VaultIds = None,
) -> None:
    """Restart the ranks of every pipeline together, after their requests have finished, and wait until it serves."""
    options = play_options(
        limit=limit,
        extra_vars=extra_vars,
        verbose=verbose,
        as_json=as_json,
        ask_vault_pass=ask_vault_pass,
        vault_password_files=vault_password_files,
        vault_ids=vault_ids,
    )
    _run(Request(inventory, options, ask_become_pass, as_json), "restart", {plays.WAIT: not no_wait})


def confirm_forgotten(names: list[str] | None, *, yes: bool) -> None:
    """Ask whether the ranks of nodes to forget are dead; InputError where the answer is no or nobody can give it."""
    if not names:
        return
    told = ", ".join(names)
    say(
        f"--forget {told}: you say that the rank on {told} is dead and stays dead: its machine is off or gone."
        " If it still runs, two generations run at once."
    )
    if yes:
        return
    remedy = "see that the machine is off, and add --yes"
    if not sys.stdin.isatty():
        raise InputError("nobody is here to confirm that its rank is dead", where=f"--forget {told}", remedy=remedy)
    if not typer.confirm("Is it dead?", default=False, err=True):
        raise InputError("its rank may be alive, so nothing was done", where=f"--forget {told}", remedy=remedy)


def _run(request: Request, verb: str, values: Mapping[str, Any]) -> None:
    session = open_session(request)
    with cluster_lock(request.inventory, verb):
        result = session.run(f"playbooks/{verb}.yml", events=True, values=values)
    outcomes = list(_outcomes(session, result, verb))
    if request.as_json:
        error = result.error()
        document = {
            "event": "result",
            "schema": RESULT_SCHEMA,
            "verb": verb,
            "ok": result.status == "ok",
            "exit_code": result.exit_code,
            "error": str(error) if error else None,
            "hosts": {host: vars(stats) for host, stats in result.stats.items()},
            "pipelines": outcomes,
        }
        print_json(document, session.redactor, line=True)
    else:
        for outcome in outcomes:
            # Where it did not come true, the error below tells why.
            if outcome["reached"] is not False:
                print_report(session.redactor.text(_sentence(outcome)))
    result.raise_for_status()


def _outcomes(session: Session, result: RunResult, verb: str) -> Iterator[dict[str, Any]]:
    """Yield what became of the word in each pipeline that was told it."""
    orders = result.results.get(plays.ORDER_TASK, {})
    serving = result.results.get(plays.SERVING_TASK, {})
    stopped = result.results.get(plays.STOPPED_TASK, {})
    for name, hosts in session.inventory.pipelines.items():
        told = {host: orders[host] for host in hosts if "changed" in orders.get(host, {})}
        if not told:
            continue
        ends = stopped if verb == "stop" else serving
        waits = {host: ends[host] for host in hosts if "reached" in ends.get(host, {})}
        yield {
            "pipeline": name,
            "verb": verb,
            "changed": [host for host, order in told.items() if order["changed"]],
            "silent": {host: order["agent"] for host, order in told.items() if order.get("agent")},
            "waited": bool(waits),
            "reached": all(wait["reached"] for wait in waits.values()) if waits else None,
            "seconds": max((wait["seconds"] for wait in waits.values()), default=None),
            "reasons": {host: wait["reason"] for host, wait in waits.items() if wait["reason"]},
            "nodes": list(told),
        }


def _sentence(outcome: Mapping[str, Any]) -> str:
    """Return what a verb came to in a pipeline, in words."""
    name, verb, changed = outcome["pipeline"], outcome["verb"], outcome["changed"]
    silent = "".join(f"; {host}: {reason}" for host, reason in outcome["silent"].items())
    notes = "".join(f"; {host}: {reason}" for host, reason in outcome["reasons"].items())
    if not outcome["waited"]:
        done = f"the word is left on {', '.join(changed)}" if changed else "nothing to do, it runs or is about to"
        return f"{name}: {done}{silent}"
    took = f" after {duration(outcome['seconds'])}" if changed else " already"
    if verb == "stop":
        return f"{name}: stopped{took}, no rank is left on {', '.join(outcome['nodes'])}{notes}"
    return f"{name}: serving{took}{notes}"
