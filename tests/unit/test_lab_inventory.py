"""The inventory that the lab writes."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppdeploy.errors import InputError
from ppdeploy.lab import LabInventory, LabPipeline
from ppdeploy.lab.inventory import LabSsh

SSH = LabSsh("x", Path("/lab/key"), Path("/lab/known"), Path("/lab/cp"), ["nsenter", "--net=/lab/n s", "connect"])


def rendered(inventory: LabInventory) -> Any:
    return yaml.safe_load(inventory.render(SSH))["vllm"]


def test_one_pipeline_over_all_hosts_in_rank_order() -> None:
    vllm = rendered(LabInventory.one_pipeline(4, "./model"))
    tiny = vllm["children"]["tiny"]
    assert list(tiny["hosts"]) == ["node1", "node2", "node3", "node4"]
    assert tiny["hosts"]["node3"]["ansible_host"] == "198.18.0.13"
    assert tiny["vars"] == {"ppdeploy_model": "./model"}


def test_ranks_are_spread_over_the_cores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    hosts = rendered(LabInventory.one_pipeline(4))["children"]["tiny"]["hosts"]
    assert [host["ppdeploy_omp_threads_bind"] for host in hosts.values()] == ["0", "1", "0", "1"]


def test_cpu_ranks_compile_nothing_and_install_without_a_way_out() -> None:
    found = rendered(LabInventory())["vars"]
    assert {name: value for name, value in found.items() if name.startswith("ppdeploy_")} == {
        "ppdeploy_device": "cpu",
        "ppdeploy_max_model_len": 1024,
        "ppdeploy_kv_cache_gib": 1,
        "ppdeploy_fabric_subnet": "198.18.1.0/24",
        "ppdeploy_vllm_args": {"compilation-config": {"mode": 2, "backend": "eager"}},
        "ppdeploy_wheelhouse": "/srv/ppdeploy/wheelhouse",
        "ppdeploy_wheelhouse_on_nodes": True,
        "ppdeploy_uv_cache_dir": "/var/cache/ppdeploy/uv",
        "ppdeploy_uv_link_mode": "symlink",
    }


def test_two_pipelines_with_variables_at_every_level() -> None:
    vllm = rendered(
        LabInventory(
            pipelines=(
                LabPipeline("left", ("node2",), "./a", {"ppdeploy_api_port": 8001}),
                LabPipeline("right", ("node1", "node3"), "./b"),
            ),
            vars={"ppdeploy_max_model_len": 64},
            host_vars={"node3": {"ppdeploy_fabric_interface": "fab0"}},
            wheelhouse=None,
            uv_cache_dir=None,
        )
    )
    assert list(vllm["children"]) == ["left", "right"]
    assert vllm["children"]["left"]["vars"] == {"ppdeploy_model": "./a", "ppdeploy_api_port": 8001}
    assert vllm["children"]["right"]["hosts"]["node3"]["ppdeploy_fabric_interface"] == "fab0"
    assert vllm["vars"]["ppdeploy_max_model_len"] == 64
    assert not {"ppdeploy_wheelhouse", "ppdeploy_uv_cache_dir"} & set(vllm["vars"])


def test_a_host_that_the_lab_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match=r"no host node3 \(pipeline tiny\).*node1, node2"):
        LabInventory.one_pipeline(3).check(2)


def test_ssh_trusts_the_labs_own_host_keys_only_and_reads_no_other_configuration() -> None:
    words = shlex.split(rendered(LabInventory())["vars"]["ansible_ssh_common_args"])
    assert words[:2] == ["-F", "none"]
    options = dict(word.split("=", 1) for word in words[3::2])
    assert options["StrictHostKeyChecking"] == "yes"
    assert options["UserKnownHostsFile"] == "/lab/known"
    assert options["GlobalKnownHostsFile"] == "/dev/null"
    # ssh gives this to a shell, so a blank in a path must still be one word.
    assert shlex.split(options["ProxyCommand"]) == ["nsenter", "--net=/lab/n s", "connect", "%h", "%p"]


def test_ssh_waits_for_a_booting_host_only_where_asked() -> None:
    assert "--wait 2 %h" in " ".join(SSH.options(wait=2))
    assert "--wait" not in " ".join(SSH.options())


def test_a_gateway_in_no_pipeline_is_reached_like_a_node() -> None:
    described = LabInventory(gateways=("node3",))
    described.check(3)
    tree = yaml.safe_load(described.render(SSH))
    assert tree["gateway"]["hosts"] == {"node3": {"ansible_host": "198.18.0.13"}}
    assert tree["gateway"]["vars"].items() <= tree["vllm"]["vars"].items()
    assert not [name for name in tree["gateway"]["vars"] if name.startswith("ppdeploy_")]
    with pytest.raises(InputError, match=r"no host node3 \(group gateway\)"):
        described.check(2)
