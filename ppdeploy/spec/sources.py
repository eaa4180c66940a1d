"""The text files of an inventory: where a variable is set, and which file is broken.

`ansible-inventory` tells values without their place, and for a broken file not always the line; this finds
both. Only messages are made of it, never decisions.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

_IGNORED = (".pyc", ".pyo", ".swp", ".bak", "~", ".rpm", ".md", ".txt", ".rst", ".orig", ".cfg", ".retry")
"""Suffixes that Ansible ignores in a folder (INVENTORY_IGNORE_EXTS)."""
_VARIABLE_FOLDERS = ("group_vars", "host_vars")
_MAX_BYTES = 4 * 1024 * 1024
_MAX_FILES = 1000


def inventory_files(inventory: Path) -> Iterator[Path]:
    """Yield the regular files that make up an inventory (a file, or a folder with all below it), in order.

    Programs among them (dynamic inventories) are left out, and so is all beyond the first `_MAX_FILES`.
    """
    yield from itertools.islice(_walk(inventory), _MAX_FILES)


def _walk(inventory: Path) -> Iterator[Path]:
    if inventory.is_dir():
        yield from _below(inventory)
        return
    yield inventory
    for name in _VARIABLE_FOLDERS:
        yield from _below(inventory.parent / name)


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in sorted(files):
            path = Path(root, file)
            ignored = file.startswith(".") or file.endswith(_IGNORED)
            if ignored or not path.is_file() or os.access(path, os.X_OK) or path.stat().st_size > _MAX_BYTES:
                continue
            yield path


def not_utf8(inventory: Path) -> tuple[str, bool] | None:
    """Return `file:line` of the first file with bytes that are not UTF-8, and whether it is no text at all.

    None when all files are UTF-8.
    """
    for path in inventory_files(inventory):
        data = path.read_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            return f"{path}:{line}", b"\0" in data
    return None


def vaulted(inventory: Path) -> list[Path]:
    """Return the files that ansible-vault has encrypted as a whole."""
    found = []
    for path in inventory_files(inventory):
        with path.open("rb") as stream:
            if stream.read(14) == b"$ANSIBLE_VAULT":
                found.append(path)
    return found


def broken_yaml(inventory: Path) -> str | None:
    """Return `file:line` of the first YAML file that does not parse or has a key twice, None when all are right."""
    for path in inventory_files(inventory):
        in_folder = any(part in _VARIABLE_FOLDERS for part in path.parts[-3:])
        if path.suffix not in (".yml", ".yaml", ".json") and not in_folder:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
                twice = _written_twice(document)
                if twice:
                    return f"{path}:{twice.start_mark.line + 1}"
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            return f"{path}:{mark.line + 1}" if mark else str(path)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
            return str(path)
    return None


def _written_twice(document: yaml.Node | None) -> yaml.Node | None:
    """Return the first key that its map has already, None when all keys differ."""
    level = [document] if document else []
    # An anchor's node comes again at each of its aliases.
    seen: set[int] = set()
    while level:
        node = level.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            level += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            known: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in known:
                        return key
                    known.add(key.value)
            level += [value for _, value in reversed(node.value)]
    return None


class SettingFinder:
    """Says in which lines of an inventory's files a variable is set; reads the files on first use."""

    def __init__(self, inventory: Path) -> None:
        self._inventory = inventory
        self._lines: list[tuple[str, int, str]] | None = None

    def __call__(self, variable: str) -> str | None:
        """Return `file:line` of up to three places, joined by commas, None when it is found nowhere."""
        if self._lines is None:
            self._lines = list(self._read())
        # YAML and JSON (`name:`), INI (`name=`, anywhere in the line of a host).
        pattern = re.compile(rf"""(^\s*(-\s+)?|[{{,\s])["']?{re.escape(variable)}["']?\s*[:=]""")
        places = [f"{file}:{number}" for file, number, line in self._lines if pattern.search(line)]
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        return ", ".join(places[:3]) + more if places else None

    def _read(self) -> Iterator[tuple[str, int, str]]:
        try:
            for path in inventory_files(self._inventory):
                text = path.read_text(encoding="utf-8", errors="replace")
                for number, line in enumerate(text.splitlines(), 1):
                    if not line.lstrip().startswith(("#", ";")):
                        yield str(path), number, line
        except OSError:
            # A message without the place is better than none.
            return
