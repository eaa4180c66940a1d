"""Changes of `--what-if`: what they do to a plan, and how they are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ppdeploy.cli.session import plan_of
from ppdeploy.errors import BlockedError, InputError
from ppdeploy.plan import Plan
from ppdeploy.short_facts import ShortFacts, expand
from ppdeploy.what_if import Case, change
from tests.factories import make_cluster
from tests.factories_model import CONFIGS
from tests.factories_plan import make_pipeline_spec, make_spec
from tests.unit.test_plan_decide import dense


def case(rate: str = "1g", *, pipelines: int = 1, gpus: tuple[str, ...] = ("RTX 4090",)) -> Case:
    names = [f"p{n}" for n in range(pipelines)]
    specs = [
        make_pipeline_spec([f"{name}a", f"{name}b"], name, device="cuda", kv_cache_gib=None, max_model_len=4096)
        for name in names
    ]
    spec = make_spec(*specs)
    short = {host.name: ShortFacts(gpus=gpus, fabric=rate) for one in specs for host in one.hosts}
    return Case(spec, expand(short, spec), {name: dense(32) for name in names})


def what_if(start: Case, *words: str) -> tuple[Plan, Plan]:
    before = plan_of(start)
    return before, plan_of(change(start, before, words))


def test_a_faster_fabric_gives_more_tokens() -> None:
    before, after = what_if(case("1g"), "fabric=10g")
    rates = [plan.pipelines[0].outlook.links[0].rate_mbit for plan in (before, after)]
    assert rates == [1000, 10000]
    tokens = [plan.pipelines[0].outlook.speeds[-1].tokens_per_second for plan in (before, after)]
    assert tokens[1] > 1.3 * tokens[0]


def test_the_fabric_stays_the_one_that_was_chosen() -> None:
    start = case()
    facts = make_cluster(2, gpus=1, fabric_speed_mbit=10000, management_speed_mbit=1000)
    facts = {host: facts[f"node{n}"] for n, host in enumerate(("p0a", "p0b"), start=1)}
    before, after = what_if(replace(start, facts=facts), "fabric=100m")
    interfaces = [plan.pipelines[0].nodes[0].fabric.interface for plan in (before, after)]
    assert interfaces == ["enp1s0", "enp1s0"]


def test_a_latency_makes_a_lone_request_slower() -> None:
    before, after = what_if(case("10g"), "latency=5ms")
    tokens = [plan.pipelines[0].outlook.speeds[0].tokens_per_second for plan in (before, after)]
    assert tokens[1] < tokens[0]
    assert after.pipelines[0].outlook.latency_seconds == 0.005


def test_more_nodes_take_layers_and_are_called_assumed() -> None:
    before, after = what_if(case(), "nodes=+2x RTX 5090")
    assert len(before.pipelines[0].nodes) == 2
    assert [node.host for node in after.pipelines[0].nodes] == ["p0a", "p0b", "new1", "new2"]
    assert sum(after.pipelines[0].partition) == 32
    assert after.assumed == ("new1", "new2")
    assert after.pipelines[0].memory[-1].device == "GeForce RTX 5090"
    assert len({node.fabric.address for node in after.pipelines[0].nodes}) == 4


def test_hosts_with_several_gpus_can_be_added() -> None:
    _, after = what_if(case(gpus=("RTX 3090", "RTX 3090")), "nodes=+1x 2x RTX 3090")
    assert after.pipelines[0].tensor_parallel_size == 2
    assert after.pipelines[0].pipeline_parallel_size == 3


def test_another_number_of_gpus_is_refused_as_in_any_plan() -> None:
    with pytest.raises(BlockedError, match="different numbers of GPUs"):
        what_if(case(gpus=("RTX 3090", "RTX 3090")), "nodes=+1x RTX 3090")


def test_nodes_can_be_added_to_a_host_alone() -> None:
    start = case()
    spec = make_spec(make_pipeline_spec(["p0a"], "p0", device="cuda", kv_cache_gib=None, max_model_len=4096))
    start = replace(start, spec=spec, models={"p0": dense(12)})
    _, after = what_if(start, "nodes=+1x RTX 4090")
    assert [node.fabric.interface for node in after.pipelines[0].nodes] == ["fabric0", "fabric0"]


def test_another_model_needs_its_config_only(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_bytes((CONFIGS / "qwen3-8b.json").read_bytes())
    _, after = what_if(case(), f"model={folder}")
    assert after.pipelines[0].model.layers == 36
    assert sum(after.pipelines[0].partition) == 36


def test_changes_are_made_one_after_the_other() -> None:
    _, after = what_if(case(), "nodes=+1x RTX 4090", "fabric=25g")
    assert {link.rate_mbit for link in after.pipelines[0].outlook.links} == {25000}


def test_one_of_several_pipelines_is_named() -> None:
    start = case(pipelines=2)
    with pytest.raises(InputError, match=r"2 pipelines.*p0\.nodes="):
        what_if(start, "nodes=+1x RTX 4090")
    _, after = what_if(start, "p1.nodes=+1x RTX 4090", "p1.fabric=10g")
    assert [len(pipeline.nodes) for pipeline in after.pipelines] == [2, 3]
    assert [pipeline.outlook.links[0].rate_mbit for pipeline in after.pipelines] == [1000, 10000]


@pytest.mark.parametrize(
    "word",
    [
        *("", "=", "fabric", "fabric=", "fabric=0g", "fabric=fast", "fabric=1e9g", "speed=10g", "p9.fabric=1g"),
        *("latency=5", "latency=-1ms", "latency=2s", "nodes=1x RTX 4090", "nodes=+0x RTX 4090", "nodes=+1x"),
        *("nodes=+99x RTX 4090", "nodes=+1x 99x RTX 4090", "nodes=+1x Voodoo 2", "model=", "model=/nowhere"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_in_a_sentence(word: str) -> None:
    start = case()
    with pytest.raises(InputError) as caught:
        what_if(start, word)
    assert f"--what-if '{word}'" in str(caught.value)
    assert caught.value.remedy


def test_a_host_with_a_gpu_that_nobody_knows_is_like_one_that_says_what_it_can() -> None:
    start = case(gpus=("MadeUp 32 GiB",))
    rates = {"gpu_bandwidth_gbs": 800, "gpu_bf16_tflops": 90}
    hosts = tuple(
        host.model_copy(update={"vars": host.vars.model_copy(update=rates)}) for host in start.spec.pipelines[0].hosts
    )
    known = replace(start, spec=make_spec(start.spec.pipelines[0].model_copy(update={"hosts": hosts})))
    _, after = what_if(known, "nodes=+1x MadeUp 32 GiB")
    assert [row.device for row in after.pipelines[0].memory] == ["MadeUp"] * 3
    with pytest.raises(InputError) as caught:
        what_if(known, "nodes=+1x Other 32 GiB")
    assert caught.value.where == "--what-if 'nodes=+1x Other 32 GiB'"
    assert "no host of the inventory has one" in caught.value.what


def test_a_model_that_is_not_here_is_not_looked_for_beside_the_inventory() -> None:
    start = case()
    with pytest.raises(InputError) as caught:
        change(start, plan_of(start), ["model=no/such/folder"])
    assert "beside the inventory" not in str(caught.value)
    assert "a folder that is here" in str(caught.value)
