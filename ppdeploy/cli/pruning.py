"""`ppdeploy prune`: the models that no release needs any more, listed and, once confirmed, removed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from ppdeploy.cli.options import Request
from ppdeploy.cli.output import print_json, print_report, say
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import InputError, UnreachableError
from ppdeploy.models import KeptModel, kept_models
from ppdeploy.run import cluster_lock, plays

#: Version of the JSON form.
PRUNE_SCHEMA = 1

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Remove what the list says, without a question.")]


def prune(request: Request, *, yes: Yes = False) -> None:
    """List the models on every node, and remove those that no release needs, once you say so.

    A model stays that the running release or the one before it needs, that a process uses, or that is being fetched.
    With --json nothing is removed without --yes. A node that cannot be reached keeps its models; the exit code is 7.
    """
    session = open_session(request)
    with cluster_lock(request.inventory, "prune"):
        found, away = ask(session, "list")
        gone = [one for one in found if not one.needed_by]
        if not request.as_json:
            print_report(*_report(found))
        removed: list[KeptModel] = []
        if gone and (yes or (not request.as_json and _confirmed(gone))):
            names = {host: [one.name for one in gone if one.host == host] for host in {one.host for one in gone}}
            _, away = ask(session, "remove", names)
            removed = [one for one in gone if one.host not in away]
    if request.as_json:
        document = {
            "schema": PRUNE_SCHEMA,
            "models": [one.model_dump(mode="json") for one in found],
            "removed": [{"host": one.host, "name": one.name, "bytes": one.bytes} for one in removed],
            "unasked": dict(away),
        }
        print_json(document, session.redactor)
    elif removed:
        say(f"removed {_size(sum(one.bytes for one in removed))} on {len({one.host for one in removed})} nodes")
    if away:
        raise UnreachableError("; ".join(f"{host}: {reason}" for host, reason in away.items()))


def ask(
    session: Session, action: str, folders: Mapping[str, Sequence[str]] | None = None
) -> tuple[list[KeptModel], dict[str, str]]:
    """Have `action` done on every node; return the folders, and why nodes could not be asked. Raises where none was."""
    result = session.run(
        plays.MODELS,
        values={plays.MODELS_ASK: {"action": action, "folders": dict(folders or {})}, plays.SHOW: False},
    )
    if result.status == "interrupted":
        raise KeyboardInterrupt
    told = result.results.get(plays.MODELS_TASK, {})
    answered = {host: one for host, one in told.items() if "models" in one}
    away = {host: session.unreachable_reason(host, one) for host, one in told.items() if host not in answered}
    error = result.error()
    if not answered and error is not None:
        raise error
    return kept_models(answered), away


def _confirmed(gone: Sequence[KeptModel]) -> bool:
    remedy = "add --yes to remove them"
    if not sys.stdin.isatty():
        raise InputError("nobody is here to confirm what is to be removed", where="prune", remedy=remedy)
    size = _size(sum(one.bytes for one in gone))
    return typer.confirm(f"Remove the {len(gone)} that nothing needs ({size})?", default=False, err=True)


def _report(found: Sequence[KeptModel]) -> list[Any]:
    table = Table("node", "model", "size", "needed by", box=None, pad_edge=False)
    for one in found:
        table.add_row(one.host, one.name, _size(one.bytes), ", ".join(one.needed_by) or "nothing: to be removed")
    return [table] if found else ["there is no model on any node"]


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
