#!/usr/bin/env python3
"""Print the options of `vllm serve`, one a line: a table of ppdeploy/spec/vllm_options.

    VENV/bin/python scripts/vllm_options.py --wheel vllm-0.33.0-....whl > ppdeploy/spec/vllm_options/vllm-0.33.0.txt

VENV is an environment with that wheel; it needs no GPU. vLLM's own parser is asked, so it is vLLM's Python that runs
this file, and nothing but the standard library is imported beside it. Without `--wheel` the table has no line of it,
as a test on a host of the lab wants it. Each kind of a name says what may follow it:

    flag      nothing: --NAME, or --no-NAME to turn it off
    pair      as a flag, and --enable-X has the opposite spelling --disable-X (or the other way round)
    switch    nothing, and there is no form that turns it off
    value     one value
    values    one or more values
    repeated  one value, and the option is repeated for more
    optional  one value or nothing
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OPPOSITES = {"enable-": "disable-", "disable-": "enable-"}


def serve_parser() -> argparse.ArgumentParser:
    """Return the parser of `vllm serve`, as the program `vllm` makes it.

    Plugins of vLLM that are installed beside it are loaded and could change it; a locked environment has none that do.
    """
    platforms: Any = importlib.import_module("vllm.platforms")
    if platforms.current_platform.is_unspecified():
        # A build for GPUs finds none here. The names are the same on every platform but ROCm's, which may add some.
        platforms._current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()  # noqa: SLF001
    flexible = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    subparsers = flexible(prog="vllm").add_subparsers(dest="subparser")
    (command,) = importlib.import_module("vllm.entrypoints.cli.serve").cmd_init()
    parser: argparse.ArgumentParser = command.subparser_init(subparsers)
    if not parser.allow_abbrev:
        raise SystemExit("vllm serve takes no beginnings of names any more: see ppdeploy/spec/passthrough.py")
    return parser


def option_lines(parser: argparse.ArgumentParser) -> list[str]:
    """Return `NAME KIND`, and short forms, for each long name of a parser; sorted.

    Raises SystemExit for an option of a form that this table has no kind for.
    """
    # Some spellings are left out of an action's own list, which is the one that the help shows.
    spellings: dict[int, tuple[argparse.Action, list[str]]] = {}
    for spelling, action in parser._option_string_actions.items():  # noqa: SLF001
        spellings.setdefault(id(action), (action, []))[1].append(spelling)
    return sorted(line for action, names in spellings.values() for line in _lines_of(parser, action, names))


def _lines_of(parser: argparse.ArgumentParser, action: argparse.Action, spellings: list[str]) -> Iterator[str]:
    long = [spelling[2:] for spelling in spellings if spelling.startswith("--")]
    short = [spelling for spelling in spellings if not spelling.startswith("--")]
    if action.dest == "help":
        names, kind = long, "switch"
    elif action.nargs == 0:
        names, kind = _flag(parser, action, long)
    else:
        counts = {None: "value", 1: "values", "+": "values", "*": "values", "?": "optional"}
        if action.nargs not in counts:
            raise SystemExit(f"--{long[0]} takes {action.nargs} values: no kind of the table")
        appends = isinstance(action, argparse._AppendAction)  # noqa: SLF001
        names, kind = long, "repeated" if appends and action.nargs is None else counts[action.nargs]
    for name in names:
        yield " ".join((name, kind, *(sorted(short) if name == names[0] else ())))


def _flag(parser: argparse.ArgumentParser, action: argparse.Action, long: list[str]) -> tuple[list[str], str]:
    """Return the names that set a flag and its kind, by what each spelling does to it."""
    says = {name: _set_by(parser, action, name) for name in long}
    name, *more = [spelling for spelling, value in says.items() if value is True] or [long[0]]
    negative = {spelling for spelling, value in says.items() if value is False}
    opposite = next((other + name.removeprefix(own) for own, other in OPPOSITES.items() if name.startswith(own)), None)
    kinds: dict[frozenset[str | None], str] = {
        frozenset(): "switch",
        frozenset({f"no-{name}"}): "flag",
        frozenset({f"no-{name}", opposite}): "pair",
    }
    if more or frozenset(negative) not in kinds or len(says) != 1 + len(negative):
        raise SystemExit(f"--{name} has the spellings {', '.join(says)}: no kind of the table")
    return [name], kinds[frozenset(negative)]


def _set_by(parser: argparse.ArgumentParser, action: argparse.Action, name: str) -> object:
    namespace = argparse.Namespace()
    action(parser, namespace, [], f"--{name}")
    return getattr(namespace, action.dest)


def wheel_line(wheel: Path, installed: Path) -> str:
    """Return the table's line of the wheel. Raises SystemExit when `installed`, the package vllm, is another one's."""
    with zipfile.ZipFile(wheel) as archive:
        sources = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        other = [name for name in sources if _bytes(installed.parent / name) != archive.read(name)]
    if other or not sources:
        raise SystemExit(f"{installed} is not what {wheel.name} has: {other[0] if other else 'no vllm/*.py'} differs")
    with wheel.open("rb") as file:
        return f"# wheel: {wheel.name} sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def table(lines: list[str], version: str, wheel: str | None) -> str:
    """Return the table's text."""
    head = [f"# Options of `vllm serve` {version}. Made by scripts/vllm_options.py, which says what the kinds are."]
    return "\n".join((*head, *([wheel] if wheel else []), *lines)) + "\n"


def main() -> None:
    """Print the table of the vLLM that is installed beside this Python."""
    arguments = argparse.ArgumentParser(description="Print the options of `vllm serve`, one a line.")
    arguments.add_argument("--wheel", type=Path, help="the wheel that vLLM was installed from")
    given = arguments.parse_args()
    # What vLLM prints while it is imported is no part of the table.
    out, sys.stdout = sys.stdout, sys.stderr
    vllm: Any = importlib.import_module("vllm")
    version = re.sub(r"\+.*", "", str(vllm.__version__))
    wheel = wheel_line(given.wheel, Path(vllm.__file__).parent) if given.wheel else None
    out.write(table(option_lines(serve_parser()), version, wheel))


if __name__ == "__main__":
    main()
