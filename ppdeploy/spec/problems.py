"""Several things wrong with one input, told at once: a person then corrects them in one go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppdeploy.errors import InputError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: becomes one sentence of the form "what (where): remedy"."""

    what: str
    where: str | None = None
    remedy: str | None = None


class RefusedItemsError(ValueError):
    """Entries of a map that are refused, each as (what the variable does wrong, what to do instead).

    A ValueError, so that pydantic hands it through from a validator; it never reaches a user as it is.
    """

    def __init__(self, items: Sequence[tuple[str, str]]) -> None:
        self.items = tuple(items)
        super().__init__("; ".join(what for what, _ in items))


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one InputError for all, one sentence a line, each only once; return when there are none."""
    unique = list(dict.fromkeys(problems))
    if not unique:
        return
    if len(unique) == 1:
        only = unique[0]
        raise InputError(only.what, where=only.where, remedy=only.remedy)
    raise InputError("\n".join(str(InputError(p.what, where=p.where, remedy=p.remedy)) for p in unique))


def shortened_list(names: Sequence[str], limit: int = 4) -> str:
    """Return names for a sentence, such as `a, b and 3 more`."""
    if len(names) <= limit:
        return ", ".join(names)
    return ", ".join(names[: limit - 1]) + f" and {len(names) - limit + 1} more"
