"""What the plan decides of units, firewall and models' code: nothing runs or is reached but as the inventory says."""

from __future__ import annotations

from typing import Any

from ppdeploy.plan.firewall import RULES, UNIT
from ppdeploy.render import render_node
from tests.factories import make_cluster
from tests.factories_plan import make_complete_plan, make_pipeline

AGENT = "/etc/systemd/system/ppdeploy-agent.service"
RANK = "/etc/systemd/system/ppdeploy-rank@.service"


def texts(host: str = "node1", **wants: Any) -> dict[str, str]:
    """Return the files of a host by path."""
    return render_node(make_complete_plan(**wants), host)


def directives(text: str) -> dict[str, list[str]]:
    """Return a unit's directives, each with its values in order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_a_models_code_runs_only_where_the_model_itself_is_named() -> None:
    flag = "--trust-remote-code"
    model = "Qwen/Qwen3-32B"
    trusted = make_pipeline(model=model, trust_remote_code=["other/model", model])
    assert all(flag in node.argv for node in trusted.nodes)
    assert not any(flag in node.argv for node in make_pipeline(model=model).nodes)
    # A name that a group of several pipelines has in common trusts no other model.
    assert not any(flag in node.argv for node in make_pipeline(model=model, trust_remote_code=["other/model"]).nodes)


def test_telemetry_is_off_for_every_rank() -> None:
    for node in make_pipeline().nodes:
        assert {name: node.rank_env[name] for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")} == {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        assert node.rank_env["HF_HUB_DISABLE_TELEMETRY"] == "1"


def test_the_agent_is_asked_by_the_fabric_and_who_watches_alone() -> None:
    plan = make_complete_plan(monitoring_from=["198.51.100.7/32"])
    unit = directives(render_node(plan, "node1")[AGENT])
    network = plan.node("node1")[1].fabric.network
    assert unit["IPAddressDeny"] == ["any"]
    assert unit["IPAddressAllow"] == [f"localhost {network} 198.51.100.7/32"]
    # The rank's ports are pickle: who watches is no peer.
    assert "198.51.100.7" not in str(plan.node("node1")[1].argv)
    assert not any("198.51.100.7" in text for path, text in render_node(plan, "node1").items() if "/opt/" in path)


def test_units_have_no_capability_and_devices_of_their_own_kind_alone() -> None:
    on_gpus: dict[str, Any] = {"device": "cuda", "kv_cache_gib": None, "facts": make_cluster(2, gpus=2, gpu="RTX 4090")}
    for wants in ({}, on_gpus):
        files = texts(**wants)
        for path in (AGENT, RANK):
            unit = directives(files[path])
            assert unit["CapabilityBoundingSet"] == [""], path
            assert unit["NoNewPrivileges"] == ["true"], path
            assert unit["SystemCallFilter"][1].startswith("~@privileged"), path
        agent = directives(files[AGENT])
        if wants:
            assert agent["DevicePolicy"] == ["closed"]
            assert "/dev/char/195:255 rw" in agent["DeviceAllow"]
        else:
            assert agent["PrivateDevices"] == ["true"]
        assert all(
            "nvidia" in one or "infiniband" in one or "gdrdrv" in one for one in directives(files[RANK])["DeviceAllow"]
        )


def test_a_firewall_is_planned_only_when_asked_for() -> None:
    assert not {RULES, UNIT} & set(texts())
    plan = make_complete_plan(firewall="nftables", monitoring_from=["198.51.100.7/32"])
    _, node = plan.node("node1")
    rules = render_node(plan, "node1")[RULES]
    network, peer = node.fabric.network, node.peers[0]
    assert f"tcp dport 29500 ip saddr {{ {network}, 198.51.100.7/32 }} accept" in rules
    assert f'iifname "{node.fabric.interface}" ip saddr {{ {peer} }} accept' in rules
    assert "tcp dport { 29500, 29501-29516, 8000 } counter drop" in rules
    # Its own table, in one step, and nothing that lets in what others keep out.
    assert "flush ruleset" not in rules
    assert [line for line in rules.splitlines() if line.startswith("table")] == ["table inet ppdeploy"] * 1 + [
        "table inet ppdeploy {"
    ]


def test_a_firewall_changes_no_release() -> None:
    (one,) = make_complete_plan().pipelines
    (two,) = make_complete_plan(firewall="nftables").pipelines
    assert one.release == two.release
