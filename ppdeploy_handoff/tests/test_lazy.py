"""A module is changed when it is imported, not before."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from ppdeploy_handoff.lazy import when_imported


def test_now_or_later_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy_example_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    when_imported("lazy_example_module", lambda module: seen.append(module.value))
    assert seen == [] and "lazy_example_module" not in sys.modules
    module = importlib.import_module("lazy_example_module")
    importlib.import_module("lazy_example_module")
    assert seen == [1]
    module.value = 2  # type: ignore[attr-defined]  # of a module that the test made
    when_imported("lazy_example_module", lambda module: seen.append(module.value))
    assert seen == [1, 2]
