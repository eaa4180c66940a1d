"""The options that `vllm serve` has, by version: tables that scripts/vllm_options.py reads out of vLLM's own parser.

There is one for each vLLM that ppdeploy is made for. A version without a table, which
`ppdeploy_allow_untested_version` allows, has options that nobody here knows: its names are then left to vLLM.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, get_args

from packaging.version import Version

FOLDER = Path(__file__).resolve().parent / "vllm_options"

Kind = Literal["flag", "pair", "switch", "value", "values", "repeated", "optional"]
"""What may follow a name on the command line; scripts/vllm_options.py says it of each."""

PREFIXES: dict[Literal["cuda", "cpu"], str] = {"cuda": "vllm-", "cpu": "vllm-cpu-"}

_OPPOSITES = {"enable-": "disable-", "disable-": "enable-"}

_LIKE = 0.7
"""Likeness (difflib's ratio) from which a name may be meant by a misspelt one."""

_AS_LIKE = 0.08
"""How much less like than the nearest one a name may be and still be told."""


@dataclass(frozen=True)
class ServeOptions:
    """What one version of vLLM knows."""

    version: str
    wheel: str
    """sha256 of the wheel that the table was read from."""
    kinds: Mapping[str, Kind]
    """By long name, without dashes in front."""
    short: Mapping[str, str]
    """Long names by short forms, both without dashes in front."""

    @cached_property
    def negative(self) -> dict[str, str]:
        """Names that turn a flag off, each with the flag's own name."""
        found = {f"no-{name}": name for name, kind in self.kinds.items() if kind in ("flag", "pair")}
        for name, kind in self.kinds.items():
            own = name.partition("-")[0] + "-"
            if kind == "pair":
                found[_OPPOSITES[own] + name.removeprefix(own)] = name
        return found

    def meant_by(self, name: str) -> list[str]:
        """Return the names that an unknown one may stand for: those that it begins, then those most like it."""
        if name.startswith("no-"):
            names = [other for other in self.negative if other.startswith("no-")]
        elif name.startswith(tuple(_OPPOSITES)):
            names = [*self.kinds, *(other for other in self.negative if not other.startswith("no-"))]
        else:
            names = list(self.kinds)
        begun = sorted(known for known in names if known.startswith(name))
        return list(dict.fromkeys([*begun, *nearest(name, names)]))


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that a misspelt one may mean, the likeliest first."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=_LIKE)
    best = [_likeness(name, other) for other in close[:1]]
    return [other for other in close if _likeness(name, other) >= best[0] - _AS_LIKE]


def _likeness(name: str, other: str) -> float:
    # difflib compares the first with the second, and get_close_matches puts the known name first.
    return difflib.SequenceMatcher(None, other, name).ratio()


def serve_options(device: Literal["cuda", "cpu"], version: str | None) -> ServeOptions | None:
    """Return the options of a version of vLLM, of the newest one known for the device when it is None.

    None for a version that has no table.
    """
    known = tables(device)
    return known.get(max(known, key=Version) if version is None else version)


@cache
def tables(device: Literal["cuda", "cpu"]) -> dict[str, ServeOptions]:
    """Return the options of every known version for a device, by version."""
    files = {file.stem.removeprefix(PREFIXES[device]): file for file in FOLDER.glob(f"{PREFIXES[device]}*.txt")}
    return {version: read_table(file, version) for version, file in files.items() if version[0].isdigit()}


def read_table(file: Path, version: str) -> ServeOptions:
    """Return the table that a file holds."""
    kinds: dict[str, Kind] = {}
    short: dict[str, str] = {}
    wheel = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# wheel: "):
            wheel = line.partition(" sha256:")[2]
        elif not line.startswith("#"):
            name, kind, *forms = line.split(" ")
            kinds[name] = next(known for known in get_args(Kind) if known == kind)
            short |= {form.lstrip("-"): name for form in forms}
    return ServeOptions(version, wheel, kinds, short)


@cache
def all_tables() -> tuple[ServeOptions, ...]:
    """Return every table, the newest version first."""
    every = [table for device in PREFIXES for table in tables(device).values()]
    return tuple(sorted(every, key=lambda table: Version(table.version), reverse=True))


@cache
def flags() -> frozenset[str]:
    """Return the names that are flags in every version that has them."""
    have = [{name: kind in ("flag", "pair", "switch") for name, kind in table.kinds.items()} for table in all_tables()]
    names = {name for table in have for name in table}
    return frozenset(name for name in names if all(table.get(name, True) for table in have))
