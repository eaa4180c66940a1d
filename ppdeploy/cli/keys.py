"""`ppdeploy keys`: who may use the API. A key is shown once; kept of it, and told to gateways, is its SHA-256."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated

import typer

from ppdeploy.api_keys import add_key, expiry, key_row, keys_file, read_keys, revoke_key
from ppdeploy.cli.options import DEFAULT_INVENTORY, Inventory, Json, Request, cluster_verb
from ppdeploy.cli.output import print_json, print_report, program, say
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import InputError
from ppdeploy.report import plain_table
from ppdeploy.run import plays

keys_app = typer.Typer(
    name="keys",
    help="Give out API keys, list them, and revoke them. It takes effect at once, and no connection is dropped.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

KEYS_SCHEMA = 1
"""Version of what these verbs print with --json."""

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is: a person's or a program's.")]


def add(
    request: Request,
    *,
    name: _Name,
    expires: Annotated[
        str | None,
        typer.Option("--expires", metavar="WHEN", help="An age (12h, 90d, 8w), or a date: it ends at 00:00 UTC."),
    ] = None,
) -> None:
    """Make a key, print it this one time on stdout, and tell every gateway."""
    now = datetime.now(UTC)
    # An empty one too, as a script's unset variable gives it, is no wish for a key without an end.
    until = None if expires is None else expiry(expires, now)
    session = _session(request)
    key = add_key(session.inventory.directory, name, until, now)
    session.redactor.add([key])

    def unless(other: str) -> str:
        remedy = f"run `{program()} apply` once all answer, or any `keys` verb that changes keys"
        return f"no {other}gateway knows {name}: {remedy}"

    # Before the hosts are asked: whatever becomes of that, the key is kept, and would be lost unseen.
    if not request.as_json:
        with _shown(name):
            print_report(key)
        say(f"this is the only time that the key of {name} is shown")
        _tell(session, name, unless)
        return
    try:
        told = _told(session, name, unless)
    except BaseException:
        with _shown(name):
            print_json({"schema": KEYS_SCHEMA, "key": key, "name": name, "gateways": []}, line=True)
        raise
    with _shown(name):
        print_json({"schema": KEYS_SCHEMA, "key": key, "name": name, "gateways": told}, line=True)


@contextmanager
def _shown(name: str) -> Iterator[None]:
    """Raise InputError where stdout does not take the key: it is kept, and nobody has it."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        # What is left of it in Python's buffer would be tried again at the end.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise InputError(
            f"the key of {name} was made and could not be shown: {error.strerror}",
            where="stdout",
            remedy=f"run `ppdeploy keys revoke {name}`, then `ppdeploy keys add {name}` and keep its output",
        ) from None


def revoke(request: Request, *, name: _Name) -> None:
    """End a key and tell every gateway; requests that are under way go on. Safe to repeat where a host was away."""
    session = _session(request)
    revoke_key(session.inventory.directory, name, datetime.now(UTC))

    def unless(other: str) -> str:
        remedy = f"repeat `{program()} keys revoke {name}`"
        return f"every {other}gateway still lets {name} in, also after a reboot: {remedy}"

    if request.as_json:
        print_json({"schema": KEYS_SCHEMA, "name": name, "gateways": _told(session, name, unless)}, line=True)
    else:
        _tell(session, name, unless)


cluster_verb(keys_app, add, limit=None)
cluster_verb(keys_app, revoke, limit=None)


@keys_app.command("list")
def list_keys(inventory: Inventory = DEFAULT_INVENTORY, as_json: Json = False) -> None:
    """List the keys that were given out; no host is asked."""
    if not inventory.exists():
        raise InputError(
            "the inventory does not exist",
            where=str(inventory),
            remedy="run `ppdeploy init` to write one, or give another with -i",
        )
    now = datetime.now(UTC)
    directory = (inventory if inventory.is_dir() else inventory.parent).absolute()
    rows = [key_row(key, now) for key in read_keys(directory)]
    if as_json:
        print_json({"schema": KEYS_SCHEMA, "keys": rows})
        return
    table = plain_table("name", "state", "created", "expires", "revoked")
    for row in rows:
        table.add_row(row["name"], row["state"], row["created"], row["expires"] or "never", row["revoked"] or "")
    print_report(table if rows else f"no key was given out yet ({keys_file(directory)})")


def _session(request: Request) -> Session:
    session = open_session(request)
    if not any(pipeline.vars.gateway for pipeline in session.spec.pipelines):
        raise InputError(
            "the cluster has no gateway that would ask for a key",
            where="ppdeploy_gateway",
            remedy="set it to true and run `ppdeploy apply`",
        )
    return session


def _tell(session: Session, name: str, unless: Callable[[str], str]) -> None:
    told = _told(session, name, unless)
    say(
        f"{name}: told to the gateway of {', '.join(told)}"
        if told
        else "no gateway is installed yet: the next apply does"
    )


def _told(session: Session, name: str, unless: Callable[[str], str]) -> list[str]:
    """Tell every gateway the keys and return the hosts that have one.

    Raises where one cannot be told; `unless` says what that means for the key, of the gateways but those that were
    told: it is given "other ", or nothing where none was.
    """
    result = session.run(plays.KEYS, events=False)
    answers = result.results.get(plays.KEYS_TASK, {})
    # Each answers when it does: by name, the same cluster is told of in the same words.
    told = sorted(host for host, answer in answers.items() if answer.get("installed"))
    if result.status != "ok":
        by = f"told to the gateway of {', '.join(told)}" if told else "told to no gateway"
        say(f"{name}: {by}; {unless('other ' if told else '')}")
    result.raise_for_status()
    return told
