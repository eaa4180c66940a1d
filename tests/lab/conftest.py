"""One lab of two hosts for all tests below this folder, taken down at the end whatever happens."""

from __future__ import annotations

import collections
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from ppdeploy.lab import Lab
from ppdeploy.lab.ready import up_with_vllm
from ppdeploy.lab.state import default_name
from tests.lab.cluster import Cluster, FirstApply, described
from tests.lab.watch import Watch

_HERE = Path(__file__).parent

#: Of a lab test that sets no limit of its own, in seconds: the first may build the hosts' root file system
#: and download wheels, and on a busy machine a model takes minutes to start.
_TIMEOUT = 1500

#: What needs no rank comes first, on labs of its own, before any has taken the cores. The lab's own tests come next:
#: they reboot hosts and cut links, which ranks would suffer from. Then the story of one cluster, in which a model
#: starts as few times as possible.
_ORDER = (
    "test_checks",
    "test_gateway",
    "test_encryption",
    "test_units",
    "test_isolated",
    "test_isolated_rpm",
    "test_tuning",
    "test_driver",
    "test_store",
    "test_driver_debian",
    "test_lab_hosts",
    "test_lab_recovery",
    "test_apply",
    "test_check_served",
    "test_openai",
    "test_bench",
    "test_testinfra_catches",
    "test_bad_input",
    "test_gang",
    "test_gang_verbs",
    "test_rollback",
    "test_uneven",
    "test_handoff",
    "test_greedy",
    "test_net",
)

_STAGES: list[tuple[str, float]] = []
_MODULES: collections.defaultdict[str, float] = collections.defaultdict(float)


def _place(item: pytest.Item) -> int:
    if not item.path.is_relative_to(_HERE):
        return -1
    return _ORDER.index(item.path.stem) if item.path.stem in _ORDER else len(_ORDER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _MODULES[report.location[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("seconds of each module")
    for path, seconds in sorted(_MODULES.items(), key=lambda one: -one[1]):
        terminalreporter.write_line(f"{seconds:6.0f} s  {path}")
    if _STAGES:
        terminalreporter.section(f"commands on the lab, {sum(seconds for _, seconds in _STAGES):.0f} s")
        for name, seconds in _STAGES:
            terminalreporter.write_line(f"{seconds:6.1f} s  {name}")


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
        up_with_vllm(found, 2, inventory=described(), owner=os.getpid())
        yield found
    finally:
        found.down()
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def stages() -> list[tuple[str, float]]:
    """The commands of the session, each with how long it took in seconds; printed at its end."""
    return _STAGES


@pytest.fixture(scope="session")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory, stages: list[tuple[str, float]]) -> Cluster:
    """The lab as a cluster; nothing is applied to it yet, or it runs what the last test left."""
    return Cluster(lab, lab.inventory, tmp_path_factory.mktemp("elsewhere"), stages)


@pytest.fixture(scope="session")
def first(cluster: Cluster) -> FirstApply:
    """The way from bare hosts to a served model, by `ansible-playbook`."""
    bare = cluster.listing()
    assert not any("ppdeploy" in line for lines in bare.values() for line in lines if "/var/cache" not in line)
    check = cluster.ppdeploy("apply", "--check", "--json")
    after_check = cluster.listing()
    with Watch(cluster.lab) as watch:
        cluster.prefix = watch.prefix()
        apply = cluster.ansible_playbook()
        cluster.prefix = ()
        beyond = watch.packets()
    assert apply.code == 0, apply.said
    return FirstApply(bare, check, after_check, apply, beyond)


@pytest.fixture(scope="session")
def served(cluster: Cluster, first: FirstApply) -> Cluster:
    """The cluster with its pipeline served, as `cluster.extra` says: a test that changes that brings it back."""
    assert first.apply.code == 0
    return cluster
