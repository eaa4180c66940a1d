"""`ppdeploy start`, `stop` and `restart`: the operator's word for the gang's agents, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from ppdeploy.cli.forgetting import Forget, Yes, confirm_forgotten
from ppdeploy.cli.options import Request
from ppdeploy.cli.output import print_json, print_report
from ppdeploy.cli.session import Session, open_session
from ppdeploy.gang_report import duration
from ppdeploy.run import RunResult, cluster_lock, plays

#: Version of the last line that these verbs print with --json; 1 had no `pipelines`.
RESULT_SCHEMA = 2

NoWait = Annotated[bool, typer.Option("--no-wait", help="Leave the word and return; `ppdeploy status` tells the rest.")]


def start(request: Request, *, forget: Forget = None, yes: Yes = False, no_wait: NoWait = False) -> None:
    """Start every pipeline that is stopped or has failed, and wait until it serves.

    Failures so far are forgiven and no pause is waited for. A pipeline that runs is left alone. Exit code 5 says that a
    pipeline fails again, or waits for something, with the reason; its agents keep trying all the same.
    """
    confirm_forgotten(forget, yes=yes)
    _run(request, "start", {plays.FORGET: forget or [], plays.WAIT: not no_wait})


def stop(request: Request) -> None:
    """Stop every pipeline and wait until no rank is left: requests finish first, workers stop after the head.

    The pipeline stays stopped, over reboots too, until `ppdeploy start` or an apply that changes its release.
    """
    _run(request, "stop", {})


def restart(request: Request, *, no_wait: NoWait = False) -> None:
    """Restart the ranks of every pipeline together, after their requests have finished, and wait until it serves."""
    _run(request, "restart", {plays.WAIT: not no_wait})


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
            # Where it did not come true, or came to nothing, the error below tells why.
            if outcome["reached"] or (not outcome["waited"] and result.status == "ok"):
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
