"""Change a module of vLLM when it is imported, and not before: vLLM loads plugins in processes that never need its
worker, whose import takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Change = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Finds nothing itself: it lets the others find a module and adds the change to its execution."""

    def __init__(self) -> None:
        self.changes: dict[str, Change] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self.changes.get(name)
        if change is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find and finder is not self else None
            if spec is not None and spec.loader is not None:
                # A loader's own method is put behind ours, for this one import: mypy knows no such thing.
                spec.loader.exec_module = _then(spec.loader.exec_module, change)  # type: ignore[method-assign, assignment]
                return spec
        return None


def _then(execute: Change, change: Change) -> Change:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        change(module)

    return exec_module


_finder = _Finder()


def when_imported(name: str, change: Change) -> None:
    """Call `change` with module `name`: now if it is there, else as soon as it has been imported."""
    module = sys.modules.get(name)
    if module is not None:
        change(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.changes[name] = change
