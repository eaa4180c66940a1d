"""Options that many verbs share, so that each is named, described and checked in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ppdeploy.errors import InputError
from ppdeploy.run import PlayOptions, VaultOptions
from ppdeploy.spec import secret_variable_names

DEFAULT_INVENTORY = Path("inventory") / "cluster"

Inventory = Annotated[
    Path, typer.Option("-i", "--inventory", metavar="PATH", help="The cluster's inventory: a folder or a file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs on stdout.")]
Limit = Annotated[
    str | None, typer.Option("--limit", metavar="PATTERN", help="Only these hosts or groups; a pipeline stays whole.")
]
Tags = Annotated[
    str | None, typer.Option("--tags", metavar="TAGS", help="Only tasks with these tags (comma-separated).")
]
ExtraVars = Annotated[
    list[str] | None,
    typer.Option("-e", "--extra-vars", metavar="NAME=VALUE|@FILE", help="Override variables. Repeatable."),
]
Verbose = Annotated[int, typer.Option("-v", "--verbose", count=True, help="Show all that Ansible prints. Repeatable.")]
AskBecomePass = Annotated[bool, typer.Option("--ask-become-pass", "-K", help="Ask for the sudo password on the hosts.")]
AskVaultPass = Annotated[bool, typer.Option("--ask-vault-pass", "-J", help="Ask for the vault's password.")]
VaultPasswordFiles = Annotated[
    list[str] | None,
    typer.Option("--vault-password-file", metavar="FILE", help="File or script with the vault's password. Repeatable."),
]
VaultIds = Annotated[
    list[str] | None,
    typer.Option("--vault-id", metavar="LABEL@SOURCE", help="A labelled vault: its password's file, or LABEL@prompt."),
]


def play_options(
    *,
    limit: str | None = None,
    tags: str | None = None,
    check: bool = False,
    diff: bool = False,
    extra_vars: list[str] | None = None,
    verbose: int = 0,
    as_json: bool = False,
    ask_vault_pass: bool = False,
    vault_password_files: list[str] | None = None,
    vault_ids: list[str] | None = None,
) -> PlayOptions:
    """Return the options of a run; InputError for those that contradict each other or would show a secret."""
    for option, value in (("--limit", limit), ("--tags", tags)):
        if value is not None and not value.strip():
            raise InputError("no host or tag is named", where=option, remedy="leave it out, or give it a value")
    if as_json and verbose:
        raise InputError("-v is text for people", where="--json -v", remedy="leave one of them out")
    _refuse_secrets(extra_vars or [])
    _refuse_what_sets_nothing(extra_vars or [])
    return PlayOptions(
        limit=limit,
        tags=tags,
        check=check,
        diff=diff,
        extra_vars=tuple(extra_vars or ()),
        verbosity=verbose,
        vault=VaultOptions(
            ask=ask_vault_pass, password_files=tuple(vault_password_files or ()), ids=tuple(vault_ids or ())
        ),
    )


def _refuse_secrets(values: list[str]) -> None:
    for name in sorted(secret_variable_names()):
        if any(name in value for value in values if not value.startswith("@")):
            raise InputError(
                "a secret on the command line is in every process list",
                where=f"-e {name}=...",
                remedy="put it into a file made by ansible-vault and give -e @FILE, or into the inventory",
            )


def _refuse_what_sets_nothing(values: list[str]) -> None:
    """Refuse what Ansible would take for -e and do nothing with, such as `-e "NAME: VALUE"`."""
    for value in values:
        if "=" not in value and not value.lstrip().startswith(("@", "{", "[")):
            # Without what was meant to be the value, which may be a password.
            name = value.split(":")[0].strip() or "NAME"
            raise InputError("no variable is given a value", where=f"-e {name}", remedy=f"write -e {name}=VALUE")


@dataclass(frozen=True)
class Request:
    """The options that every verb on a cluster has."""

    inventory: Path
    options: PlayOptions
    ask_become_pass: bool
    as_json: bool


def cluster_verb(app: typer.Typer, work: Callable[..., None], *, limit: object = Limit) -> None:
    """Add a verb that has these options and, by keyword, what `work` takes beside its request; named as `work` is.

    `limit` is the annotation of --limit, where the verb says something else of it; None: it has no --limit.
    """
    shared = [one.replace(annotation=limit) if one.name == "limit" else one for one in _parameters(_request)]
    if limit is None:
        shared = [one for one in shared if one.name != "limit"]
    own = _parameters(work)[1:]

    def verb(**given: Any) -> None:
        mine = {one.name: given.pop(one.name) for one in own}
        work(_request(**given), **mine)

    # The first say which hosts; the verb's own come before what all verbs have.
    which = 1 if limit is None else 2
    signature = inspect.Signature([*shared[:which], *own, *shared[which:]], return_annotation=None)
    vars(verb)["__signature__"] = signature
    verb.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    app.command(work.__name__, help=work.__doc__)(verb)


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    return [one.replace(kind=kind) for one in inspect.signature(function, eval_str=True).parameters.values()]


def _request(
    inventory: Inventory = DEFAULT_INVENTORY,
    limit: Limit = None,
    extra_vars: ExtraVars = None,
    as_json: Json = False,
    verbose: Verbose = 0,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_files: VaultPasswordFiles = None,
    vault_ids: VaultIds = None,
) -> Request:
    options = play_options(
        limit=limit,
        extra_vars=extra_vars,
        verbose=verbose,
        as_json=as_json,
        ask_vault_pass=ask_vault_pass,
        vault_password_files=vault_password_files,
        vault_ids=vault_ids,
    )
    return Request(inventory, options, ask_become_pass, as_json)
