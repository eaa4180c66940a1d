"""Imports go one way, from the inventory to the command line, and the plan touches no host."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "ppdeploy"

#: A part imports only what stands left of it (DESIGN.md, "The way through").
ORDER = (
    *("errors", "paths", "spec", "facts", "probes", "locks", "manifest", "hub", "mirror", "model", "sources", "plan"),
    *("benches", "short_facts", "what_if", "gateway_text", "render", "run", "smoke", "net", "api_keys", "certificates"),
    *("play", "checking", "report", "bench_report"),
    *("plan_report", "plan_page", "gang", "gang_report", "check_report", "logs", "net_report", "net_page", "lab"),
    *("models", "cli", "__main__"),
)

#: What reaches a host, a network or another program.
REACHES_OUT = {
    "ansible",
    "ansible_runner",
    "asyncio",
    "http",
    "httpx",
    "huggingface_hub",
    "socket",
    "subprocess",
}


def imported(file: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions and for types alone."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "ppdeploy":
            yield from (f"ppdeploy.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def parts() -> dict[str, set[str]]:
    """For each module or package directly below `ppdeploy`, the other such parts that it imports."""
    names = {entry.stem for entry in PACKAGE.iterdir() if entry.suffix == ".py" or entry.is_dir()}
    names -= {"__init__", "__pycache__"}
    found: dict[str, set[str]] = {name: set() for name in names}
    for file in PACKAGE.rglob("*.py"):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in found:
            targets = {name.split(".")[1] for name in imported(file) if name.startswith("ppdeploy.")}
            found[part] |= targets & names - {part}
    return found


def test_no_part_imports_one_that_stands_right_of_it() -> None:
    known = {part: targets & set(ORDER) for part, targets in parts().items() if part in ORDER}
    wrong = [
        f"{part} imports {target}"
        for part, targets in known.items()
        for target in targets
        if ORDER.index(target) > ORDER.index(part)
    ]
    assert wrong == []
    assert {"errors", "spec", "plan", "render", "run", "cli"} <= set(known)


def test_no_parts_import_each_other_in_a_circle() -> None:
    # Raises CycleError, which names the circle.
    order = list(TopologicalSorter(parts()).static_order())
    assert order.index("errors") < order.index("cli")


@pytest.mark.parametrize("file", sorted((PACKAGE / "plan").rglob("*.py")), ids=lambda file: file.stem)
def test_the_plan_reaches_nothing_outside_itself(file: Path) -> None:
    assert {name.split(".")[0] for name in imported(file)} & REACHES_OUT == set()
