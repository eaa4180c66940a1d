"""Two hosts write what one host writes; and of two pipelines one can be worked on alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.lab.cluster import PROMPTS, Cluster


@pytest.fixture(scope="module")
def by_two_hosts(served: Cluster) -> list[str]:
    """What the pipeline of two stages completes the prompts with."""
    return [served.complete(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def singles(served: Cluster, by_two_hosts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The same hosts with a pipeline of its own each, `a` and `b`; the pipeline over both is stopped."""
    assert len(by_two_hosts) == len(PROMPTS)
    stop = served.ppdeploy("stop")
    assert stop.code == 0, stop.said
    assert set(served.pids().values()) == {0}
    tree = yaml.safe_load(served.inventory.read_text())
    (pipeline,) = tree["vllm"]["children"].values()
    tree["vllm"]["children"] = {
        name: {"hosts": {host: values}, "vars": pipeline["vars"]}
        for name, (host, values) in zip("ab", pipeline["hosts"].items(), strict=True)
    }
    inventory = tmp_path_factory.mktemp("singles") / "hosts.yml"
    inventory.write_text(yaml.safe_dump(tree, sort_keys=False))
    return replace(served, inventory=inventory)


def test_a_part_of_a_pipeline_is_refused_with_the_hosts_to_name(served: Cluster) -> None:
    before, pids = served.listing(), served.pids()
    done = served.ppdeploy("apply", "--limit", "node2")
    assert done.code == 2, done.said
    assert "node1" in done.error
    assert "pipeline tiny" in done.error
    assert "--limit tiny" in done.error
    by_hand = served.ansible_playbook("--limit", "node2")
    assert by_hand.code != 0
    assert "--limit tiny" in by_hand.out + by_hand.err
    assert (served.listing(), served.pids()) == (before, pids)


def test_one_of_two_pipelines_is_set_up_alone(singles: Cluster) -> None:
    before = singles.listing()["node2"]
    done = singles.ppdeploy("apply", "--json", "--limit", "a")
    assert done.code == 0, done.said
    assert set(done.changed()) == {"node1"}
    assert [(one["pipeline"], one["serves"]) for one in done.result["pipelines"]] == [("a", True)]
    assert singles.listing()["node2"] == before


def test_two_hosts_write_the_same_text_as_one(singles: Cluster, by_two_hosts: list[str]) -> None:
    command = singles.out("node1", "systemctl cat ppdeploy-rank@a")
    assert "--pipeline-parallel-size 1" in command
    assert "--nnodes" not in command
    assert [singles.complete(prompt) for prompt in PROMPTS] == by_two_hosts
    # Prompts that are answered alike would prove nothing.
    assert len(set(by_two_hosts)) == len(PROMPTS)


def test_a_rank_that_is_down_is_found_with_its_journal(singles: Cluster, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(singles.plan().model_dump_json())
    stop = singles.ppdeploy("stop", "--limit", "a")
    assert stop.code == 0, stop.said
    done, failed = singles.testinfra("test_vllm_rank", hosts="a", plan=plan)
    assert "test_vllm_rank::test_the_rank_is_up_and_only_its_agent_starts_it node1" in failed, done.said
    assert "the journal of ppdeploy-rank@a.service on node1 ends with:" in done.out
    assert "Application shutdown complete" in done.out or "Stopped ppdeploy-rank@a" in done.out
