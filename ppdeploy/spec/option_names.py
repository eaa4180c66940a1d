"""Names of options that vLLM does not have: it would end at every start with them, after an apply has touched hosts.

vLLM's parser (argparse) takes an unambiguous beginning for the whole name, and some names in a negative form. Those
are refused too, with the one spelling that the plan looks for.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from ppdeploy.spec.passthrough import OWNED_FLAGS
from ppdeploy.spec.plain import shown
from ppdeploy.spec.serve_options import ServeOptions, all_tables

_MOST_NAMES = 4
"""Names that a sentence lists; a short beginning may stand for dozens."""


def refused_options(args: Mapping[str, JsonValue], options: ServeOptions) -> list[tuple[str, str]]:
    """Return what is wrong with entries that `check_vllm_args` lets through, and what to do, for one version of vLLM.

    The values are looked at as far as the kind of an option says what may follow it.
    """
    found = [_refuse(name, value, options) for name, value in args.items()]
    return [problem for problem in found if problem]


def _refuse(name: str, value: JsonValue, options: ServeOptions) -> tuple[str, str] | None:
    kind = options.kinds.get(name)
    if name in options.negative:
        flag = options.negative[name]
        write = _spelt(flag, on=not value) if isinstance(value, bool) else _either(flag)
        return f"sets {shown(name)}", f"write {write} instead"
    if kind is None:
        return _refuse_name(name, options)
    what = f"gives {shown(name)} the value {shown(value)}"
    if kind == "switch" and value is not True:
        return f"{what}, and vLLM {options.version} takes none but true", f"write {_spelt(name)}, or remove it"
    if kind in ("flag", "pair") and not isinstance(value, bool):
        return f"{what}, which is no truth value", f"write {_either(name)}"
    if kind in ("value", "values", "repeated") and isinstance(value, bool):
        return f"{what}, and it is no flag", f"write what it is to be, or remove {name}"
    if kind in ("value", "optional") and isinstance(value, list):
        return f"{what}, and it takes one value", "write one value; a list that is JSON is written as text, in quotes"
    return None


def _refuse_name(name: str, options: ServeOptions) -> tuple[str, str]:
    what = f"has the option {shown(name)}, which vLLM {options.version} does not have"
    others = [table.version for table in all_tables() if name in table.kinds or name in table.negative]
    if others:
        return f"{what}, and {others[0]} has", "remove it"
    positive = name.removeprefix("no-")
    if positive in options.kinds:
        return what, f"remove it: {positive} has no form that turns it off"
    meant = options.meant_by(name)
    # The likeliest decides: what ppdeploy sets itself is no name to write here.
    owned = OWNED_FLAGS.get(options.negative.get(meant[0], meant[0])) if meant else None
    if owned:
        return what, f"did you mean {meant[0]}? Then {owned}"
    written = [_spelt(options.negative[other], on=False) if other in options.negative else other for other in meant]
    free = [text for text, other in zip(written, meant, strict=True) if other not in OWNED_FLAGS]
    if not free:
        return what, f"remove it, or write a name that `vllm serve --help=all` of {options.version} lists"
    return what, f"did you mean {_any_of(free)}? Write the whole name, or remove it"


def _any_of(names: list[str]) -> str:
    names = names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"{len(names) - _MOST_NAMES} more"]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _spelt(name: str, *, on: bool = True) -> str:
    return f"{name}: {'true' if on else 'false'}"


def _either(name: str) -> str:
    return f"{_spelt(name)} or {_spelt(name, on=False)}"
