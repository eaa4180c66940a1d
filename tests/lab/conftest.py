"""One lab of two hosts for all tests below this folder, taken down at the end whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from ppdeploy.lab import Lab
from ppdeploy.lab.state import default_name

_HERE = Path(__file__).parent

#: Of a lab test that sets no limit of its own, in seconds: the first may build the hosts' root file system.
_TIMEOUT = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT))


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The lab of this test session: node1 and node2, beside any lab that a person has up in this checkout."""
    found = Lab(f"{default_name()}-test")
    # A CI ends a job by SIGTERM: then too the lab is to go, as it does by Ctrl-C.
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        # Never a lab that an earlier session left: its hosts are no fresh hosts.
        found.down()
        found.up(2, owner=os.getpid())
        yield found
    finally:
        found.down()
        signal.signal(signal.SIGTERM, before)
