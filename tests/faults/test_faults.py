"""The agent on real systemd hosts: when each fault is seen and mended, row by row of docs/gang.md.

`make faults` runs the rows with real vLLM ranks that `ppdeploy apply` has set up (PPDEPLOY_FAULTS=vllm). Without that
the ranks are stand-ins that fail as vLLM was seen to: quick, and they say how much of the time is the gang's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.faults import rows
from tests.faults.course import PATIENCE, generation
from tests.faults.deploy import MASTER_PORT, REAL, Gang

needs_stand_in = pytest.mark.skipif(REAL, reason="it makes a release of its own, for the stand-in")
needs_vllm = pytest.mark.skipif(not REAL, reason="a stand-in has no memory, weights or processes to speak of")

WHO = pytest.mark.parametrize("who", ["head", "worker"])
BUSY = pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])


@pytest.fixture(autouse=True)
def _serving(gang: Gang) -> Iterator[None]:
    gang.wait(gang.healthy, PATIENCE)
    yield
    for node in gang.nodes:
        gang.lab.heal(node)


@WHO
@BUSY
def test_a_killed_rank_is_seen_in_3_s_and_all_serve_again(gang: Gang, who: str, busy: bool) -> None:
    rows.rank_killed(gang, who, busy=busy)


@needs_vllm
def test_a_killed_engine_core_is_seen_though_its_api_lives(gang: Gang) -> None:
    rows.engine_core_killed(gang)


def test_the_death_of_the_heads_whole_unit_ends_the_worker_in_10_s(gang: Gang) -> None:
    rows.whole_unit_killed(gang)


@WHO
@BUSY
def test_a_stopped_rank_is_found_in_30_s(gang: Gang, who: str, busy: bool) -> None:
    rows.rank_stopped(gang, who, busy=busy)


@pytest.mark.parametrize("who", ["head", "worker", "both"])
def test_a_host_that_loses_power_comes_back_into_the_gang(gang: Gang, who: str) -> None:
    rows.host_power_lost(gang, who)


def test_a_cut_of_3_s_loses_nothing(gang: Gang) -> None:
    rows.link_cut_shorter_than_the_lease(gang)


@pytest.mark.parametrize("seconds", [20.0, 300.0])
def test_a_longer_cut_stops_both_sides_and_heals(gang: Gang, seconds: float) -> None:
    rows.link_cut(gang, seconds)


@pytest.mark.parametrize("times", [1, 20])
def test_an_agent_killed_again_and_again_adopts_its_rank(gang: Gang, times: int) -> None:
    rows.agent_killed(gang, times)


@needs_vllm
def test_a_rank_killed_for_memory_at_each_start_spends_the_budget(gang: Gang) -> None:
    rows.out_of_memory(gang)


@pytest.mark.parametrize("name", ["rank.env", "rank.conf"])
def test_a_file_edited_by_hand_keeps_the_gang_down_and_is_named(gang: Gang, name: str) -> None:
    rows.file_edited(gang, name)


@needs_vllm
def test_other_weights_on_one_node_keep_the_gang_down_and_are_named(gang: Gang) -> None:
    rows.model_file_edited(gang)


def test_another_vllm_on_one_node_keeps_the_gang_down_and_is_named(gang: Gang) -> None:
    rows.other_vllm(gang)


def test_a_rank_started_by_hand_ends_at_once(gang: Gang) -> None:
    rows.rank_started_by_hand(gang)


def test_a_stop_lets_requests_finish(gang: Gang) -> None:
    rows.stop_lets_requests_finish(gang)


@needs_stand_in
def test_a_new_release_runs_on_all_nodes_once_it_is_ordered(gang: Gang) -> None:
    release = gang.release(extra=" of another release")
    pids = {node: gang.main_pid(node) for node in gang.nodes}
    digest = ""
    for node in gang.nodes:
        digest = gang.push_release(node, release)
    time.sleep(8.0)
    assert {node: gang.main_pid(node) for node in gang.nodes} == pids
    gang.order(f"start --release {digest}")
    gang.wait(lambda: gang.healthy() and gang.status(gang.head)["release"] == digest, 90.0)
    ports = {gang.shell(node, f"tr '\\0' ' ' </proc/{gang.main_pid(node)}/cmdline") for node in gang.nodes}
    wanted = f"--master-port {MASTER_PORT + generation(gang) % 16} "
    assert all(wanted in command for command in ports)


def test_forged_replayed_and_endless_answers_change_nothing(gang: Gang) -> None:
    rows.impostors(gang)


def test_hostile_clients_change_nothing(gang: Gang) -> None:
    rows.hostile_clients(gang)


def test_an_agent_with_another_key_is_unknown_not_gone(gang: Gang) -> None:
    rows.other_key(gang)


def test_a_full_disk_keeps_what_runs_and_says_so(gang: Gang) -> None:
    rows.disk_full(gang)


def test_a_read_only_file_system_keeps_what_runs_and_says_so(gang: Gang) -> None:
    rows.disk_read_only(gang)


def test_a_step_of_the_wall_clock_changes_nothing(gang: Gang) -> None:
    rows.wall_clock_stepped(gang)


def test_the_fence_ends_a_rank_whose_agent_is_gone(gang: Gang) -> None:
    rows.agent_gone(gang)


def test_what_an_idle_agent_costs(gang: Gang) -> None:
    rows.idle_cost(gang)
