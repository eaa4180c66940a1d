"""The whole plan of a pipeline: command lines, environment, checks and rules, each fault with host and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.errors import InputError, PpdeployError
from ppdeploy.facts import Listener, NodeFacts, Python
from ppdeploy.plan import Plan
from ppdeploy.plan.command import extra_arguments
from ppdeploy.play import make_plan, whole_pipelines
from ppdeploy.spec import Wheelhouse
from tests.factories import make_cluster, make_facts, make_gpu
from tests.factories_plan import make_complete_plan, make_pipeline, make_pipeline_spec, make_source, make_spec

GPU_WANTS = {"device": "cuda", "kv_cache_gib": None, "max_model_len": None}


def test_a_gpu_pipeline_has_tensor_parallel_inside_and_pipeline_parallel_across() -> None:
    pipeline = make_pipeline(facts=make_cluster(2, gpus=2), source=make_source("qwen", layers=64), **GPU_WANTS)
    head, worker = pipeline.nodes
    assert (pipeline.tensor_parallel_size, pipeline.pipeline_parallel_size) == (2, 2)
    assert worker.world_ranks == (2, 3)
    assert worker.rank_env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert worker.rank_env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert worker.nccl_env["NCCL_SOCKET_IFNAME"] == "=enp1s0"
    assert "VLLM_PP_LAYER_PARTITION" not in worker.rank_env
    assert head.argv[0].startswith("/opt/ppdeploy/venvs/")
    assert pipeline.environment.vllm_version == "0.33.0"
    assert not pipeline.blocked()


def test_only_as_many_gpus_are_visible_as_ranks_run() -> None:
    pipeline = make_pipeline(facts=make_cluster(2, gpus=4), tensor_parallel_size=1, **GPU_WANTS)
    assert [node.devices for node in pipeline.nodes] == [(0,), (0,)]
    assert pipeline.pipeline_parallel_size == 2


def test_every_rank_has_its_own_address_and_the_same_partition() -> None:
    pipeline = make_pipeline(layer_partition=[3, 1])
    assert [node.rank_env["VLLM_HOST_IP"] for node in pipeline.nodes] == ["198.51.100.11", "198.51.100.12"]
    assert {node.rank_env["VLLM_PP_LAYER_PARTITION"] for node in pipeline.nodes} == {"3,1"}


def test_nothing_phones_home_and_nothing_is_fetched_at_run_time() -> None:
    env = make_pipeline().nodes[0].rank_env
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        assert env[name] == "1"


def test_a_single_node_has_neither_peers_nor_a_rendezvous() -> None:
    (node,) = make_pipeline(facts=make_cluster(1)).nodes
    assert "--nnodes" not in node.argv
    assert "--master-addr" not in node.argv
    assert node.peers == ()


def test_extra_arguments_take_every_kind_of_value() -> None:
    extra = {"b": True, "a": False, "c": None, "d": [1, 2], "e": {"y": 1, "x": 2}, "f": 0.5}
    assert extra_arguments(extra) == ("--no-a", "--b", "--d", "1", "2", "--e", '{"x":2,"y":1}', "--f", "0.5")


def listener(port: int, unit: str | None) -> Listener:
    return Listener(port=port, address="192.0.2.11", pid=4711, process="nginx", command="/usr/sbin/nginx", unit=unit)


def facts_with(**changes: Any) -> dict[str, NodeFacts]:
    facts = make_cluster(2)
    facts["node1"] = make_facts("node1", number=1, **changes)
    return facts


def two(**changes: Any) -> dict[str, NodeFacts]:
    return {"node1": make_facts("node1", number=1), "node2": make_facts("node2", number=2, **changes)}


SMALL_DISK = {"/opt/ppdeploy": 1.0, "/var/lib/ppdeploy/models": 1.0}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            facts_with(listeners=[listener(8000, "nginx.service")]),
            "port 8000 is taken by /usr/sbin/nginx (nginx.service, pid 4711)",
        ),
        (facts_with(listeners=[listener(29501, None)]), "set ppdeploy_master_port to a free port"),
        (facts_with(disks=SMALL_DISK), "/opt/ppdeploy needs 4.3 GiB and 1.0 GiB are free"),
        (facts_with(memory_gib=2), "its rank needs about 3.5 GiB of memory and the host has 2.0 GiB"),
        (two(machine="aarch64"), "different processor architectures (node1 x86_64, node2 aarch64)"),
        (facts_with(tools={"rsync": None}), "rsync is missing"),
        (two(identity=make_facts(number=1).identity), "same /etc/machine-id"),
    ],
)
def test_what_stops_a_run_is_named_with_host_and_remedy(facts: dict[str, NodeFacts], words: str) -> None:
    findings = make_pipeline(facts=facts).blocked()
    assert any(words in finding.sentence() for finding in findings), [f.sentence() for f in findings]
    assert all(finding.remedy for finding in findings)


def test_an_rsync_that_comes_from_the_bundle_stops_nothing() -> None:
    facts = facts_with(tools={"rsync": None})
    own = facts["node1"].os

    def blocked(held: tuple[str, ...], source: str = "bundle") -> bool:
        wheelhouse = Wheelhouse(system=own.release, machine=own.machine, packages=held)
        spec = make_pipeline_spec(list(facts), system_packages=source).model_copy(update={"wheelhouse": wheelhouse})
        return bool(make_plan(make_spec(spec), facts, {spec.name: make_source()}).pipelines[0].blocked())

    assert not blocked(("gcc", "rsync"))
    assert blocked(("gcc",))
    assert blocked(("gcc", "rsync"), source="archives")


def test_a_port_that_our_own_rank_holds_is_not_taken() -> None:
    facts = facts_with(listeners=[listener(8000, "ppdeploy-rank@tiny.service")])
    assert not make_pipeline(facts=facts).blocked()


def test_an_old_driver_is_blocked() -> None:
    facts = make_cluster(2, gpus=[make_gpu(driver="550.163.01")])
    (finding, _) = make_pipeline(facts=facts, **GPU_WANTS).blocked()
    assert "NVIDIA driver 550.163.01 is older than 580" in finding.reason


def test_the_pythons_must_have_a_lock() -> None:
    facts = facts_with(pythons=(Python(path="/usr/bin/python3.9", version="3.9.18"),))
    with pytest.raises(PpdeployError, match=r"Python"):
        make_pipeline(facts=facts, system_packages="none")
    # Where packages may be installed, one that has a lock comes from the system's own.
    assert make_pipeline(facts=facts).nodes[0].packages[0].package == "python3.11"


@pytest.mark.parametrize(
    ("wants", "rule"),
    [
        ({"vllm_args": {"enforce-eager": True}}, "cpu-eager-pp"),
        ({"env": {"VLLM_CPU_CI_ENV": "1"}}, "cpu-ci-env-pp"),
        ({"vllm_args": {"speculative-config": {"method": "ngram"}}}, "speculation-cpu-pp"),
    ],
)
def test_rules_stop_what_vllm_breaks_on(wants: dict[str, Any], rule: str) -> None:
    assert [finding.id for finding in make_pipeline(**wants).blocked()] == [rule]
    assert not make_pipeline(facts=make_cluster(1), **wants).blocked()


def test_a_plan_needs_all_facts_of_a_pipeline() -> None:
    spec = make_pipeline_spec(["node1", "node2"])
    with pytest.raises(InputError, match="node2"):
        make_plan(make_spec(spec), {"node1": make_facts()}, {"tiny": make_source()})


def test_a_limit_that_cuts_a_pipeline_is_refused_with_the_hosts() -> None:
    pipelines = {"a": ["node1", "node2"], "b": ["node3", "node4"]}
    assert whole_pipelines(pipelines, ["node3", "node4"]) == {"b": ["node3", "node4"]}
    with pytest.raises(InputError, match=r"node2 is left out.*pipeline a.*--limit a"):
        whole_pipelines(pipelines, ["node1", "node3", "node4"])


def test_the_plan_survives_json() -> None:
    plan = make_complete_plan()
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
