"""What all tests share: on the lab, where a run takes half an hour, a failure is printed when it happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# On a machine that others use too, the slow moment of a test says nothing of the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

_SLOW = tuple(str(Path(__file__).parent / name) for name in ("lab", "faults"))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_AtOnce(config))


class _AtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        place = str(self._config.rootpath / report.location[0])
        if terminal and report.failed and place.startswith(_SLOW):
            terminal.write_line(f"\n{report.nodeid} ({report.when}):\n{report.longreprtext}")
