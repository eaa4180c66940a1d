"""`--forget NODE`: the operator's word that a removed node's rank is dead, asked for since nothing can check it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ppdeploy.cli.output import say
from ppdeploy.errors import InputError

Forget = Annotated[
    list[str] | None,
    typer.Option(
        "--forget",
        metavar="NODE",
        help="Wait no more for this removed node: you say that its rank is dead. It is not contacted. Repeatable.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Answer the question of --forget with yes.")]


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
