"""`ppdeploy check`: every node, pair and pipeline looked at, with what to do about what is not ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ppdeploy.check_report import check_report, explain_table
from ppdeploy.checking import CHECK_SCHEMA, Checked, check_of_play, document, explained
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
from ppdeploy.cli.pruning import ask
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import BlockedError, InputError, PpdeployError, UnreachableError
from ppdeploy.plan.checks import catalogue
from ppdeploy.run import RunResult, plays

#: Sentences of blocked checks in the error; the table has them all.
_MOST_SENTENCES = 3


def check(
    inventory: Inventory = DEFAULT_INVENTORY,
    limit: Limit = None,
    everything: Annotated[bool, typer.Option("--all", help="Show what is ready as well.")] = False,
    explain: Annotated[
        str | None,
        typer.Option("--explain", metavar="ID|all", help="Say what a check looks at and what to do; asks no host."),
    ] = None,
    weights: Annotated[
        bool,
        typer.Option("--weights", help="Also read all models again, which takes minutes; marks what is damaged."),
    ] = False,
    extra_vars: ExtraVars = None,
    as_json: Json = False,
    verbose: Verbose = 0,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_files: VaultPasswordFiles = None,
    vault_ids: VaultIds = None,
) -> None:
    """Look at every node, pair of nodes and pipeline: ready, slow or blocked, why, and what to do. Changes nothing.

    The exit code is 3 when a check is blocked, 7 when a node cannot be reached (the others are checked all the same),
    else 0. A pipeline that serves is not disturbed. With --weights a file that is not what was placed is blocked, and
    marked on its node: no rank starts with it, and the next apply fetches it anew.
    """
    if explain is not None:
        _explain(explain, as_json=as_json)
        return
    options = play_options(
        limit=limit,
        extra_vars=extra_vars,
        verbose=verbose,
        as_json=as_json,
        ask_vault_pass=ask_vault_pass,
        vault_password_files=vault_password_files,
        vault_ids=vault_ids,
    )
    session = open_session(Request(inventory, options, ask_become_pass, as_json))
    session.check_models()
    result = session.run(plays.CHECK, values={plays.TELL: False})
    checked = _checked(session, result)
    damaged = [one.sentence() for one in ask(session, "check")[0] if one.damaged] if weights else []
    error = _error(checked, damaged)
    if as_json:
        code = error.exit_code if error else 0
        text = str(error) if error else None
        print_json(document(checked, error=text, exit_code=code, seconds=result.seconds), session.redactor)
    else:
        print_report(*check_report(checked, everything=everything), *damaged)
    if error:
        raise error
    say("an apply can start")


def _explain(name: str, *, as_json: bool) -> None:
    chosen = [one for one in catalogue() if name in ("all", one.id)]
    if not chosen:
        raise InputError(
            f"there is no check {name}", where="--explain", remedy="run `ppdeploy check --explain all` for the list"
        )
    if as_json:
        print_json({"schema": CHECK_SCHEMA, "checks": explained(chosen)})
    elif name == "all":
        print_report(explain_table(chosen))
    else:
        told = explained(chosen)[0]
        told["stops_apply"] = "yes" if told["stops_apply"] else "no"
        print_report(*(f"{field.replace('_', ' ')}: {text}" for field, text in told.items()))


def _checked(session: Session, result: RunResult) -> Checked:
    """Judge what the play saw; raises when it did not come to asking any host."""
    if result.status == "interrupted":
        raise KeyboardInterrupt
    asked = result.results.get(plays.FACTS_TASK, {})
    values = {host: facts[plays.VALUES] for host, facts in result.facts.items() if plays.VALUES in facts}
    planning = any(failure.is_planning for failure in result.failures)
    if planning or not asked or not values:
        error = session.error_of(result)
        raise error or UnreachableError("no host was asked")
    inventory = {
        "pipelines": session.inventory.pipelines,
        "hosts": list(values),
        "values": values,
        "directory": str(session.inventory.directory),
        "gateways": session.inventory.gateway_values(),
    }
    received = next((own[plays.RECEIVED] for own in result.facts.values() if plays.RECEIVED in own), None)
    seen = {host: {**_seen(session, result, host), "received": received} for host in {**values, **asked}}
    return check_of_play(inventory, seen, session.secrets.get("ppdeploy_hf_token"))


def _seen(session: Session, result: RunResult, host: str) -> dict[str, Any]:
    """Return what the play saw of a host, as `ppdeploy.checking` reads it."""

    def told(task: str) -> Mapping[str, Any]:
        return result.results.get(task, {}).get(host, {})

    facts = told(plays.FACTS_TASK)
    if "facts" not in facts:
        reason = session.unreachable_reason(host, facts) if facts else "it was not asked"
        return {"reason": reason, "unreachable": bool(facts.get("unreachable"))}
    listening, looked = told(plays.LISTEN_TASK), told(plays.PROBE_TASK)
    return {
        "facts": facts["facts"],
        "listener": listening.get("listener"),
        "probe": looked.get("probe"),
        # An error of the first task is the reason why there is no second one.
        "probe_problem": _reason(session, host, listening) or _reason(session, host, looked),
    }


def _reason(session: Session, host: str, result: Mapping[str, Any]) -> str:
    """Return why a task failed on a host, empty where it did not."""
    return session.unreachable_reason(host, result) if result.get("failed") or result.get("unreachable") else ""


def _error(checked: Checked, damaged: Sequence[str]) -> PpdeployError | None:
    """Return the error that a check ends with: hosts out of reach first, then weights, then what is blocked."""
    away = {host: seen for host, seen in checked.unasked.items() if seen.unreachable}
    if away:
        return UnreachableError("; ".join(f"{host}: {seen.reason}" for host, seen in away.items()))
    sentences = [*damaged, *(f"{host}: {seen.reason}" for host, seen in checked.unasked.items())]
    sentences += [one.sentence() for one in checked.of("blocked")]
    if not sentences:
        return None
    more = len(sentences) - _MOST_SENTENCES
    return BlockedError("; ".join(sentences[:_MOST_SENTENCES]) + (f"; and {more} more" if more > 0 else ""))
