"""The speed that a plan tells: its links, what it does not know, and what it says beside it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ppdeploy.facts import NodeFacts
from ppdeploy.plan import PipelinePlan
from ppdeploy.plan.expect import request_tokens, running
from ppdeploy.plan.types import Outlook, Speed
from tests.factories import make_cluster, make_facts
from tests.factories_plan import make_pipeline
from tests.unit.test_plan_decide import dense


def plan(facts: dict[str, NodeFacts], layers: int = 32, **wants: Any) -> PipelinePlan:
    values = {"device": "cuda", "kv_cache_gib": None, "max_model_len": 8192, **wants}
    return make_pipeline(facts=facts, source=dense(layers), **values)


def cluster(rate: int | None = 10000, *, size: int = 2, each: int = 1) -> dict[str, NodeFacts]:
    """Hosts with one NIC each, of a rate."""
    found = {}
    for number in range(1, size + 1):
        facts = make_facts(f"node{number}", number=number, gpus=each, gpu="RTX 4090", fabric_speed_mbit=rate or 1)
        nics = tuple(nic.model_copy(update={"speed_mbit": rate}) for nic in facts.nics if nic.name in ("lo", "enp1s0"))
        found[f"node{number}"] = facts.model_copy(update={"nics": nics})
    return found


def speed(outlook: Outlook, users: int) -> Speed:
    return next(one for one in outlook.speeds if one.concurrency == users)


def test_the_lower_of_two_rates_is_the_links() -> None:
    facts = cluster(10000)
    slow = cluster(1000)["node2"]
    found = plan({**facts, "node2": slow}).outlook
    assert [(link.sender, link.receiver, link.rate_mbit) for link in found.links] == [("node1", "node2", 1000)]
    assert found.links[0].verdict == "slow"
    assert found.limiting_link == 0


def test_a_slow_link_is_a_finding_that_leaves_the_plan_ready_to_apply() -> None:
    found = plan(cluster(1000))
    (finding,) = (one for one in found.findings if one.id == "link-slow")
    assert finding.verdict == "slow"
    assert finding.host == "node2"
    assert "1,000 prompt tokens" in finding.reason
    assert "2.5 Gbit/s would give" in finding.remedy
    assert found.blocked() == []


def test_equal_links_are_one_finding() -> None:
    found = plan(cluster(1000, size=4), 64)
    (finding,) = (one for one in found.findings if one.id == "link-slow")
    assert finding.reason.startswith("node1 to node2 and 2 more: ")
    assert finding.host is None


def test_without_a_rate_no_speed_is_invented() -> None:
    found = plan(cluster(None))
    assert found.outlook.speeds == ()
    assert "node1 to node2" in found.outlook.unknown
    assert found.outlook.links[0].seconds_per_1000_tokens is None
    (finding,) = (one for one in found.findings if one.id == "link-rate-unknown")
    assert finding.verdict == "ready"
    assert "--what-if fabric=1g" in finding.remedy


def test_of_a_model_that_does_not_fit_no_speed_is_told() -> None:
    found = plan(cluster(1000), 64)
    assert not found.capacity.fits
    assert found.outlook.speeds == ()
    assert found.outlook.unknown == "the model does not fit"
    assert found.outlook.links[0].seconds_per_1000_tokens == pytest.approx(0.17, abs=0.01)


def test_stages_of_one_host_are_joined_inside_it() -> None:
    found = plan(cluster(1000, each=2), pipeline_parallel_size=4).outlook
    assert [link.rate_mbit for link in found.links] == [None, 1000, None]
    assert [link.verdict for link in found.links] == ["ready", "slow", "ready"]
    assert found.links[0].seconds_per_1000_tokens is not None
    assert found.limiting_link == 1


def test_a_host_alone_has_a_speed_and_no_links() -> None:
    found = plan(cluster(1000, size=1), 12).outlook
    assert found.links == ()
    assert speed(found, 1).tokens_per_second > 0


def test_a_faster_fabric_is_never_slower() -> None:
    rates = (100, 1000, 2500, 10000, 25000, 100000)
    found = [speed(plan(cluster(rate)).outlook, 32).tokens_per_second for rate in rates]
    assert found == sorted(found)
    assert found[-1] > 1.5 * found[1]


def test_users_that_the_kv_cache_does_not_hold_wait() -> None:
    capacity = plan(cluster(10000)).capacity
    few = capacity.model_copy(update={"kv_tokens": 3 * 1152, "requests_at_4k": 0.8})
    assert running(few, 1152) == 3
    windows = capacity.model_copy(update={"kv_tokens": 100, "requests_at_4k": 7.5})
    assert running(windows, 1152) == 7
    assert running(capacity.model_copy(update={"kv_tokens": 10**9}), 1152) == capacity.sequences


@pytest.mark.parametrize("longest", [1, 2, 100, 1151, 1152, 40960])
def test_requests_are_no_longer_than_the_model_takes(longest: int) -> None:
    prompt, answer = request_tokens(longest)
    assert prompt >= 1
    assert answer >= 1
    assert prompt + answer <= max(longest, 2)


def test_what_was_not_measured_is_named() -> None:
    assert plan(cluster(10000)).outlook.rough == "not measured: other GPUs than H200"
    measured = make_cluster(2, gpus=1, gpu="H200", fabric_speed_mbit=10000)
    assert plan(measured).outlook.rough == ""
    assert "CPU" in make_pipeline().outlook.rough


def test_the_speed_is_no_part_of_a_release() -> None:
    assert plan(cluster(1000)).release == plan(cluster(10000)).release


def test_a_smaller_step_that_serves_better_is_told_with_what_it_gives() -> None:
    found = plan(cluster(1000)).outlook
    assert found.best_batched_tokens is not None
    assert found.best_batched_tokens < 2048
    better = next(one for one in found.best_speeds if one.concurrency == 32)
    assert better.ttft_seconds < speed(found, 32).ttft_seconds
    assert better.tokens_per_second > 0.97 * speed(found, 32).tokens_per_second


def test_64_nodes_are_planned_with_their_speed_in_less_than_a_second() -> None:
    facts = {
        f"node{n}": make_facts(f"node{n}", number=n, gpus=1, gpu="RTX 4090", fabric_speed_mbit=1000 + n)
        for n in range(1, 65)
    }
    start = time.process_time()
    found = plan(facts, 64, goal="throughput").outlook
    assert time.process_time() - start < 1
    assert len(found.links) == 63
    assert found.speeds
    assert found.best_batched_tokens is None
