"""Six rows of docs/gang.md's fault table with real vLLM ranks, four in each CI; `make faults` runs every row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import rows
from tests.faults.course import PATIENCE
from tests.faults.deploy import VllmGang
from tests.lab.cluster import Cluster


@pytest.fixture(scope="module")
def gang(served: Cluster) -> VllmGang:
    """The ranks that the tests before have applied."""
    return VllmGang(served.lab)


@pytest.fixture(autouse=True)
def _serving(gang: VllmGang) -> Iterator[None]:
    gang.wait(gang.healthy, PATIENCE)
    # Each row has a budget of its own: these faults are all of the gang's making.
    gang.order("start")
    yield
    for node in gang.nodes:
        gang.lab.heal(node)


def test_a_worker_killed_under_load(gang: VllmGang) -> None:
    rows.rank_killed(gang, "worker", busy=True)


@pytest.mark.long
def test_the_heads_whole_unit_killed(gang: VllmGang) -> None:
    rows.whole_unit_killed(gang)


def test_a_rank_that_hangs(gang: VllmGang) -> None:
    rows.rank_stopped(gang, "worker", busy=False)


def test_a_link_cut_longer_than_the_lease(gang: VllmGang) -> None:
    rows.link_cut(gang, 20.0)


@pytest.mark.long
def test_agents_that_die(gang: VllmGang) -> None:
    rows.agent_killed(gang, 2)


def test_a_node_whose_files_differ(gang: VllmGang) -> None:
    rows.file_edited(gang, "rank.env")
