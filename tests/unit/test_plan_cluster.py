"""Several pipelines in one cluster: each has its own nodes, and none knows of the others."""

from __future__ import annotations

from typing import Any

from ppdeploy.facts import NodeFacts
from ppdeploy.plan import Plan
from ppdeploy.play import make_plan
from ppdeploy.spec import PipelineSpec
from tests.factories import make_cluster
from tests.factories_plan import make_pipeline_spec, make_source, make_spec


def two(facts: dict[str, NodeFacts], *, first: dict[str, Any] | None = None, **second: Any) -> Plan:
    """Return the plan of two pipelines of two nodes each."""
    pipelines: list[PipelineSpec] = [
        make_pipeline_spec(["node1", "node2"], "small", **(first or {})),
        make_pipeline_spec(["node3", "node4"], "large", **second),
    ]
    models = {"small": make_source("tiny-llama"), "large": make_source("large-llama", layers=7)}
    return make_plan(make_spec(*pipelines), facts, models)


def test_each_pipeline_has_its_own_split_release_and_unit() -> None:
    small, large = two(make_cluster(4)).pipelines
    assert (sum(small.partition), sum(large.partition)) == (4, 7)
    assert small.release != large.release
    assert (small.head, large.head) == ("node1", "node3")
    assert large.nodes[0].unit == "ppdeploy-rank@large.service"
    assert large.master_addr == "198.51.100.13"
    assert not {node.host for node in small.nodes} & {node.host for node in large.nodes}
    assert [row.host for row in large.memory] == ["node3", "node4"]


def test_the_same_ports_on_other_hosts_do_not_meet() -> None:
    plan = two(make_cluster(4))
    assert not plan.blocked()
    assert plan.pipelines[0].nodes[0].ports == plan.pipelines[1].nodes[0].ports


def test_a_change_to_one_pipeline_leaves_the_release_of_the_other() -> None:
    before, after = two(make_cluster(4)), two(make_cluster(4), max_model_len=2048)
    assert before.pipelines[0].release == after.pipelines[0].release
    assert before.pipelines[1].release != after.pipelines[1].release


def test_one_machine_under_two_names_is_refused() -> None:
    facts = make_cluster(4)
    facts["node4"] = facts["node4"].model_copy(update={"identity": facts["node1"].identity})
    (refused,) = two(facts).blocked()
    assert (refused.id, refused.pipeline, refused.host) == ("shared-machine", "large", "node4")
    assert "node4 and node1 of pipeline small have the same /etc/machine-id" in refused.sentence()
    assert refused.remedy


def test_machines_without_an_id_are_not_taken_for_one() -> None:
    facts = {
        host: one.model_copy(update={"identity": one.identity.model_copy(update={"machine_id": None})})
        for host, one in make_cluster(4).items()
    }
    assert not two(facts).blocked()
