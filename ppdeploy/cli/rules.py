"""`ppdeploy rules`: what vLLM cannot do and a plan therefore refuses, with reason, remedy and source."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from ppdeploy.cli.options import Json
from ppdeploy.cli.output import print_json, print_report
from ppdeploy.errors import InputError
from ppdeploy.plan.rules import RULES, Rule

RULES_SCHEMA = 1
"""Version of the JSON form; raised when a field changes its meaning or goes away."""


def rules(
    rule: Annotated[str | None, typer.Argument(metavar="[RULE]", help="Show this rule only, by its id.")] = None,
    as_json: Json = False,
) -> None:
    """List what a plan checks about vLLM, models and GPUs. Needs no inventory and asks no host."""
    chosen = [one for one in RULES if rule in (None, one.id)]
    if not chosen:
        raise InputError(f"there is no rule {rule}", where="ppdeploy rules", remedy="run `ppdeploy rules` for the list")
    if as_json:
        print_json({"schema": RULES_SCHEMA, "rules": [_document(one) for one in chosen]})
    elif rule is None:
        print_report(_table(chosen))
    else:
        print_report(*(f"{name}: {text}" for name, text in _document(chosen[0]).items()))


def _document(rule: Rule) -> dict[str, str]:
    fields = asdict(rule)
    del fields["applies"]
    return {name: _words(text) for name, text in fields.items()}


def _words(text: str) -> str:
    """Return a text for reading, without the case at hand."""
    return text.replace("{}", "...").replace("{sizes}", "sizes that do (a plan names them)")


def _table(chosen: list[Rule]) -> Table:
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("rule", "verdict", "vLLM", "what is wrong", "what to do"):
        table.add_column(heading, overflow="fold")
    for rule in chosen:
        table.add_row(rule.id, rule.verdict, rule.versions, _words(rule.reason), _words(rule.remedy))
    return table
