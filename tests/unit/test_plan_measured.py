"""Measured links in a plan: they count while the NICs are as they were, and change the outlook alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ppdeploy.plan import PipelinePlan
from ppdeploy.plan.measured import MeasuredLink, alike, still_true
from ppdeploy.plan_report import link_text
from ppdeploy.play import make_plan
from tests.factories import make_cluster
from tests.factories_plan import make_pipeline_spec, make_spec
from tests.unit.net_views import FABRIC, planned
from tests.unit.test_plan_decide import dense

LINK = MeasuredLink(
    sender="node1",
    receiver="node2",
    addresses=("198.51.100.11", "198.51.100.12"),
    negotiated_mbit=10000,
    rate_mbit=957.0,
    latency_seconds=0.00015,
    time="2026-11-30T03:40:12Z",
)


def plan(*links: MeasuredLink, size: int = 2, rate: int = 10000, **options: Any) -> PipelinePlan:
    facts = make_cluster(size, gpus=1, gpu="RTX 4090", fabric_speed_mbit=rate)
    wants: dict[str, Any] = {"device": "cuda", "kv_cache_gib": None, "max_model_len": 8192, "fabric_subnet": FABRIC}
    spec = make_pipeline_spec(list(facts), **wants)
    models = {spec.name: dense(16 * size)}
    return make_plan(make_spec(spec), facts, models, measured={spec.name: links}, **options).pipelines[0]


def test_a_measured_rate_takes_the_place_of_the_negotiated_one() -> None:
    link = plan(LINK).outlook.links[0]
    assert (link.rate_mbit, link.measured_mbit, link.measured_latency_seconds) == (10000, 957.0, 0.00015)
    # 957 Mbit/s of payload are what gigabit Ethernet carries.
    gigabit = plan(rate=1000).outlook.links[0]
    assert link.seconds_per_1000_tokens == pytest.approx(gigabit.seconds_per_1000_tokens, rel=0.01)
    assert link.verdict == "slow"
    assert "measured 957 Mbit/s" in link.reason
    assert link.faster == "2.5 Gbit/s"


def test_the_plan_says_that_it_was_measured() -> None:
    assert link_text(plan(LINK).outlook.links[0]) == (
        "10 Gbit/s, measured 957 Mbit/s and 0.15 ms one way on 2026-11-30"
    )
    assert link_text(plan().outlook.links[0]) == "10 Gbit/s"


def test_a_measurement_changes_the_outlook_and_its_findings_alone() -> None:
    before, after = plan(), plan(LINK)
    assert after.outlook.speeds[-1].tokens_per_second < before.outlook.speeds[-1].tokens_per_second
    same = {"outlook": before.outlook, "findings": before.findings}
    assert after.model_copy(update=same) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"negotiated_mbit": 1000},
        {"negotiated_mbit": None},
        {"addresses": ("198.51.100.11", "198.51.100.99")},
        {"receiver": "node9"},
    ],
)
def test_of_other_nics_nothing_is_known(changes: dict[str, Any]) -> None:
    assert plan(replace(LINK, **changes)).outlook == plan().outlook


def test_the_way_back_is_not_the_way_there() -> None:
    back = replace(LINK, sender="node2", receiver="node1", addresses=LINK.addresses[::-1])
    assert plan(back).outlook == plan().outlook
    fabric = {node.host: node.fabric for node in planned(rate=10000).nodes}
    assert list(still_true([LINK, back], fabric)) == [("node1", "node2"), ("node2", "node1")]


def test_where_no_ping_came_back_the_latency_is_assumed() -> None:
    assert plan(replace(LINK, latency_seconds=None)).outlook.links[0].measured_latency_seconds is None
    slow = plan(replace(LINK, latency_seconds=0.02)).outlook.speeds[0].tpot_seconds
    assert slow > 2 * plan(replace(LINK, latency_seconds=None)).outlook.speeds[0].tpot_seconds
    # What a what-if says goes before what was measured.
    assert plan(replace(LINK, latency_seconds=0.02), latency_seconds=0.0001).outlook.speeds[0].tpot_seconds < slow


def test_rates_that_no_measurement_can_tell_apart_are_one() -> None:
    assert alike([957.0, 949.0, 2360.0, 2290.0, 100.0]) == {
        100.0: 100.0,
        949.0: 949.0,
        957.0: 949.0,
        2290.0: 2290.0,
        2360.0: 2290.0,
    }
    second = replace(LINK, sender="node2", receiver="node3", addresses=("198.51.100.12", "198.51.100.13"))
    links = plan(LINK, replace(second, rate_mbit=940.0), size=3).outlook.links
    assert [link.measured_mbit for link in links] == [957.0, 940.0]
    # Both at once would gain; one alone would not.
    assert [link.verdict for link in links] == ["slow", "slow"]


def test_what_the_network_costs_is_told_against_one_that_costs_nothing() -> None:
    slow, fast = plan(LINK).outlook.network, plan(rate=100000).outlook.network
    assert slow is not None
    assert fast is not None
    assert slow.first_token_seconds > 5 * fast.first_token_seconds > 0
    assert slow.faster == "2.5 Gbit/s"
    assert slow.faster_tokens_per_second > slow.tokens_per_second
    assert fast.faster == ""
    assert plan(size=1).outlook.network is None
