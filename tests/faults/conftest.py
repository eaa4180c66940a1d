"""Limits for tests whose ranks take minutes to start on a busy machine, and the table of what was measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdeploy.lab import Lab
from ppdeploy.lab.state import default_name
from tests.faults.course import MEASURED, PATIENCE
from tests.faults.deploy import REAL, Gang, VllmGang

_HERE = Path(__file__).parent
_TIMEOUT = 1500


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MEASURED:
        terminalreporter.section("the fault table, for docs/gang.md")
        terminalreporter.write_line("| fault | measured |\n|---|---|")
        for fault, what in MEASURED:
            terminalreporter.write_line(f"| {fault} | {what} |")


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    """A gang of two ranks on a lab of its own, with a budget that no test spends by accident.

    With PPDEPLOY_FAULTS_KEEP the lab stays up, and a later run begins with what it finds there.
    """
    lab = Lab(f"{default_name()}-faults")
    keep = "PPDEPLOY_FAULTS_KEEP" in os.environ
    settings = {"budget": 1000, "backoff_limit": 2.0}
    found: Gang = VllmGang(lab, settings=settings) if REAL else Gang(lab, settings=settings)
    try:
        if not (keep and lab.status().phase == "up"):
            lab.down()
            found.install()
        found.wait(found.healthy, PATIENCE)
        yield found
    finally:
        if not keep:
            lab.down()
