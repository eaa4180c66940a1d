"""An encrypted fabric: what moves into the tunnel, what stays on the wire, and where none can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ppdeploy.bundle import content
from ppdeploy.errors import InputError
from ppdeploy.facts import FileState, NodeFacts, Tunnelling
from ppdeploy.gang_report import plain
from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.paths import data_root
from ppdeploy.plan import Plan
from ppdeploy.plan.firewall import RULES
from ppdeploy.plan.tunnel import INTERFACE, PEERS, UNIT, tunnel_packages
from ppdeploy.plan_report import plan_report
from ppdeploy.play import node_slice, plan_of_play, tunnel_slice, venv_slice
from ppdeploy.render import NO_KEY, release_json, render_node
from ppdeploy.spec import spec_from_values
from tests.factories import make_cluster
from tests.factories_plan import make_complete_plan, make_pipeline_spec
from tests.unit.test_plan_tuning import RUNNING


def able(facts: dict[str, NodeFacts], **changes: Any) -> dict[str, NodeFacts]:
    """Return facts of hosts that can have either kind of tunnel and have their keys; `changes` are of the first."""
    told = {"kernel": True, "tun": True}
    found = {
        host: one.model_copy(update={"tunnel": Tunnelling(**told, public_key=f"{host}-public=")})
        for host, one in facts.items()
    }
    first = next(iter(found))
    tunnel = found[first].tunnel
    assert tunnel is not None
    found[first] = found[first].model_copy(update={"tunnel": tunnel.model_copy(update=changes)})
    return found


def encrypted(facts: dict[str, NodeFacts] | None = None, *, kind: str = "wireguard", **wants: Any) -> Plan:
    return make_complete_plan(facts or able(make_cluster(2)), fabric_encryption=kind, **wants)


def reasons(plan: Plan) -> list[str]:
    return [f"{finding.host}: {finding.reason}" for finding in plan.blocked()]


def with_unit(facts: dict[str, NodeFacts], *hosts: str) -> dict[str, NodeFacts]:
    """Return the facts with the tunnel's unit on these hosts."""
    state = FileState(path=UNIT, type="file", mode="0644", owner="root", group="root", size=1, sha256=None, target=None)
    return {
        host: one.model_copy(update={"files": {**one.files, UNIT: state}}) if host in hosts else one
        for host, one in facts.items()
    }


def with_tools(facts: NodeFacts, *programs: str) -> NodeFacts:
    """Return a node's facts with further programs on it."""
    return facts.model_copy(update={"tools": {**facts.tools, **{name: f"/usr/bin/{name}" for name in programs}}})


def write_bundle(folder: Path, digest: str, *names: str) -> None:
    """Write a bundle for a lock, of empty files, that says it has these system packages."""
    held = content.BundleLock(
        file="locks/x.txt", digest=digest, device="cpu", vllm_version="0.32.0", python="3.11", machine="x86_64",
        wheels=(), uv="uv.whl",
    )  # fmt: skip
    files = tuple(content.BundleFile(path=path, sha256="0" * 64, size=0) for path in ("locks/x.txt", "wheels/uv.whl"))
    for file in files:
        (folder / file.path).parent.mkdir(exist_ok=True)
        (folder / file.path).touch()
    packages = content.BundlePackages(system="debian 12", machine="x86_64", architecture="amd64", names=names)
    made = content.Bundle(locks=(held,), files=files, packages=packages)
    (folder / content.MANIFEST).write_text(made.model_dump_json())


def running(facts: dict[str, NodeFacts]) -> dict[str, NodeFacts]:
    """Return the facts with a rank on every host."""
    return {host: one.model_copy(update={"pipelines": {"tiny": RUNNING}}) for host, one in facts.items()}


def test_nothing_is_encrypted_that_no_variable_asks_for() -> None:
    plan = make_complete_plan(able(make_cluster(2)))
    assert all(node.tunnel is None and node.wire == node.fabric for node in plan.pipelines[0].nodes)
    assert not any("tunnel" in path or INTERFACE in text for path, text in render_node(plan, "node1").items())


def test_ranks_agents_and_firewall_talk_in_the_tunnel_alone() -> None:
    plan = encrypted(firewall="nftables")
    (pipeline,) = plan.pipelines
    assert pipeline.master_addr == "10.213.117.11"
    for rank, node in enumerate(pipeline.nodes, start=1):
        own, peer = f"10.213.117.1{rank}", f"10.213.117.1{3 - rank}"
        assert (node.fabric.interface, node.fabric.address, node.peers) == (INTERFACE, own, (peer,))
        assert node.rank_env["VLLM_HOST_IP"] == own
        assert node.nccl_env["NCCL_SOCKET_IFNAME"] == f"={INTERFACE}"
        assert node.nccl_env["GLOO_SOCKET_IFNAME"] == INTERFACE
        assert node.agent.listen == (own, "127.0.0.1")
        assert node.agent.clients == ("10.213.117.0/24",)
        files = render_node(plan, node.host)
        wire = node.wire.address
        # No unit but the tunnel's own, no rank's file and no agent knows an address of the wire.
        knows = {path for path, text in files.items() if wire in text or f"198.51.100.1{3 - rank}" in text}
        assert {path for path in knows if "haproxy" not in path} == {UNIT, PEERS, RULES}
        rules = files[RULES]
        assert f'iifname "{INTERFACE}" ip saddr {{ {peer} }} accept' in rules
        # Checks try the wire too; no unit of ours lets in an address of it.
        assert f'iifname "enp1s0" ip saddr {{ 198.51.100.1{3 - rank} }} accept' in rules
        assert f'iifname {{ "{INTERFACE}", "enp1s0" }} tcp dport 32768-60999 counter drop' in rules


def test_who_watches_is_in_no_tunnel_and_asks_the_agent_on_the_wire() -> None:
    plan = encrypted(monitoring_from=["203.0.113.7/32"])
    node = plan.pipelines[0].nodes[0]
    assert node.agent.listen == ("10.213.117.11", "198.51.100.11", "127.0.0.1")
    # The rest of the wire's network may not.
    allowed = "IPAddressAllow=localhost 10.213.117.0/24 203.0.113.7/32\n"
    assert allowed in render_node(plan, "node1")["/etc/systemd/system/ppdeploy-agent.service"]


def test_nic_and_cable_stay_the_wires() -> None:
    node = encrypted(nic_tuning=True).pipelines[0].nodes[0]
    assert node.tuning.interface == node.wire.interface == "enp1s0"
    assert node.wire_peers == ("198.51.100.12",)
    assert node.fabric.speed_mbit == node.wire.speed_mbit == 10000


@pytest.mark.parametrize(
    ("wants", "mtus", "mtu"), [({}, (1500, 1500), 1440), ({}, (9000, 1500), 1440), ({"mtu": 9000}, (1500, 1500), 8940)]
)
def test_the_mtu_is_that_of_the_smallest_nic_less_wireguards_own(
    wants: dict[str, Any], mtus: tuple[int, int], mtu: int
) -> None:
    facts = able(make_cluster(2))
    for (host, one), own in zip(facts.items(), mtus, strict=True):
        nics = tuple(nic.model_copy(update={"mtu": own}) if nic.name == "enp1s0" else nic for nic in one.nics)
        facts[host] = one.model_copy(update={"nics": nics})
    plan = encrypted(facts, **wants)
    assert {node.fabric.mtu for node in plan.pipelines[0].nodes} == {mtu}
    assert f"mtu {mtu} up" in render_node(plan, "node1")[UNIT]


def test_the_unit_knows_its_peers_by_key_address_and_place() -> None:
    plan = encrypted(able(make_cluster(3)))
    files = render_node(plan, "node2")
    unit = files[UNIT]
    assert "ExecStart=ip link add dev ppdeploy0 type wireguard\n" in unit
    assert f"ExecStartPost=wg addconf ppdeploy0 {PEERS}\n" in unit
    for host, rank in (("node1", 1), ("node3", 3)):
        ends = f"Endpoint = 198.51.100.1{rank}:29500\nAllowedIPs = 10.213.117.1{rank}/32\n"
        assert f"# {host}\n[Peer]\nPublicKey = {host}-public=\n{ends}" in files[PEERS]
    # Its own too, so that a node which made another key is started anew; a private one is nobody told.
    assert "# Its own public key is node2-public=" in unit
    assert "private-key /etc/ppdeploy/tunnel/private.key\n" in unit


def test_in_user_space_a_program_makes_the_interface() -> None:
    plan = encrypted(kind="wireguard-go")
    unit = render_node(plan, "node1")[UNIT]
    assert "ExecStart=wireguard-go ppdeploy0\n" in unit
    assert "DeviceAllow=/dev/net/tun rw\n" in unit
    assert "IPAddressAllow=198.51.100.0/24\n" in unit
    assert "type wireguard" not in unit
    assert [one.package for one in tunnel_packages(plan.node("node1")[1].tunnel)] == ["wireguard-tools", "wireguard-go"]


def test_no_key_is_part_of_a_release_and_the_addresses_are() -> None:
    plain, tunnel = make_complete_plan(able(make_cluster(2))), encrypted()
    assert plain.pipelines[0].release != tunnel.pipelines[0].release
    assert encrypted(able(make_cluster(2), public_key="another=")).pipelines[0].release == tunnel.pipelines[0].release
    # How it is done is none of a rank's business.
    assert encrypted(kind="wireguard-go").pipelines[0].release == tunnel.pipelines[0].release


def test_before_keys_are_made_the_plan_says_so_and_changes_nothing_else() -> None:
    facts = able(make_cluster(2), public_key=None)
    plan = encrypted(facts)
    assert plan.blocked() == []
    assert plan.pipelines[0].release == encrypted().pipelines[0].release
    assert f"PublicKey = {NO_KEY}\n" in render_node(plan, "node2")[PEERS]
    wants = make_pipeline_spec(["node1", "node2"]).vars
    assert tunnel_slice(wants, plan.node("node1")[1], facts["node1"])["public_key"] == ""
    assert tunnel_slice(wants, plan.node("node2")[1], facts["node2"])["public_key"] == "node2-public="


def test_a_kernel_without_wireguard_is_refused_by_host_and_in_user_space_it_is_not_needed() -> None:
    facts = able(make_cluster(2), kernel=False)
    plan = encrypted(facts)
    assert reasons(plan) == [f"node1: its kernel {facts['node1'].os.kernel} has no WireGuard"]
    assert "ppdeploy_fabric_encryption to wireguard-go" in plan.blocked()[0].remedy
    assert reasons(encrypted(facts, kind="wireguard-go")) == []
    assert reasons(encrypted(able(make_cluster(2), tun=False), kind="wireguard-go")) == [
        "node1: it has no /dev/net/tun, which wireguard-go needs"
    ]


def test_where_no_packages_may_be_installed_a_host_without_the_programs_is_refused_by_package() -> None:
    facts = able(make_cluster(2))
    facts["node2"] = with_tools(facts["node2"], "wg")
    plan = encrypted(facts, system_packages="none")
    assert reasons(plan) == ["node1: it lacks wireguard-tools for the tunnel, and an apply may not install packages"]
    assert plan.blocked()[0].remedy.startswith("install wireguard-tools there, or set ppdeploy_system_packages")
    assert reasons(encrypted(facts, system_packages="none", kind="wireguard-go")) == [
        "node1: it lacks wireguard-tools, wireguard-go for the tunnel, and an apply may not install packages",
        "node2: it lacks wireguard-go for the tunnel, and an apply may not install packages",
    ]
    assert reasons(encrypted(facts)) == []


@pytest.mark.parametrize(
    ("kind", "names"), [("wireguard", ["wireguard-tools"]), ("wireguard-go", ["wireguard-tools", "wireguard-go"])]
)
def test_a_bundle_without_the_programs_is_refused_and_one_with_them_brings_what_is_lacking(
    tmp_path: Path, kind: str, names: list[str]
) -> None:
    facts = able(make_cluster(2), public_key=None)
    facts["node2"] = with_tools(facts["node2"], "wg", "wireguard-go", "haproxy")
    (pipeline,) = encrypted(facts, kind=kind, system_packages="bundle").pipelines
    spec = make_pipeline_spec(["node1", "node2"], system_packages="bundle")
    spec = spec.model_copy(update={"wheelhouse_path": tmp_path})
    write_bundle(tmp_path, pipeline.environment.lock_digest, "rsync", "haproxy")
    with pytest.raises(InputError, match=rf"the bundle lacks the system packages? {', '.join(names)} \(node1, /"):
        venv_slice(spec, pipeline, pipeline.nodes[0], facts["node1"])
    write_bundle(tmp_path, pipeline.environment.lock_digest, "rsync", "haproxy", *names)
    brought = [
        {one["package"] for one in venv_slice(spec, pipeline, node, facts[node.host])["packages"]} & set(names)
        for node in pipeline.nodes
    ]
    assert brought == [set(names), set()]


def test_who_needs_the_bundle_before_the_keys_is_told_and_nobody_where_the_plan_is_blocked(tmp_path: Path) -> None:
    facts = able(make_cluster(2), public_key=None)
    facts["node2"] = with_tools(facts["node2"], "wg")
    values = {
        "ppdeploy_model": str(make_tiny_model(tmp_path / "tiny")),
        "ppdeploy_device": "cpu",
        "ppdeploy_fabric_encryption": "wireguard",
        "ppdeploy_wheelhouse": "/srv/bundle",
        "ppdeploy_wheelhouse_on_nodes": True,
    }

    def first(source: str, facts: dict[str, NodeFacts]) -> list[str]:
        own = {**values, "ppdeploy_system_packages": source}
        inventory = {
            "pipelines": {"tiny": list(facts)},
            "hosts": list(facts),
            "values": {host: {**own, "ansible_host": f"198.18.0.1{host[4:]}"} for host in facts},
            "directory": str(tmp_path),
        }
        told = plan_of_play(inventory, {host: one.model_dump(mode="json") for host, one in facts.items()})
        found: list[str] = told["packages_first"]
        return found

    assert first("bundle", facts) == ["node1"]
    assert first("archives", facts) == []
    assert first("bundle", facts | {"node2": facts["node2"].model_copy(update={"tunnel": None})}) == []


def test_facts_that_say_nothing_of_it_are_refused() -> None:
    assert [one.host for one in encrypted(make_cluster(2)).blocked()] == ["node1", "node2"]


def test_a_network_that_a_host_is_in_is_refused_by_nic() -> None:
    facts = able(make_cluster(2))
    plan = encrypted(facts, fabric_encryption_subnet="10.0.0.0/8")
    assert reasons(plan) == []
    nic = facts["node2"].nics[1]
    taken = nic.addresses[0].model_copy(update={"address": "10.9.0.2", "prefix": 16})
    other = nic.model_copy(update={"name": "docker0", "kind": "bridge", "addresses": (taken,)})
    facts["node2"] = facts["node2"].model_copy(update={"nics": (*facts["node2"].nics, other)})
    assert reasons(encrypted(facts, fabric_encryption_subnet="10.9.7.0/24")) == [
        "node2: the tunnel's network 10.9.7.0/24 overlaps 10.9.0.0/16 of its NIC docker0"
    ]
    # Its own interface, of the apply before, is no other.
    own = other.model_copy(update={"name": INTERFACE})
    facts["node2"] = facts["node2"].model_copy(update={"nics": (*facts["node2"].nics[:-1], own)})
    assert reasons(encrypted(facts, fabric_encryption_subnet="10.9.7.0/24")) == []


def test_a_clone_of_a_node_is_refused_with_both_names() -> None:
    facts = able(make_cluster(2), public_key="node2-public=")
    found = {one.host: one for one in encrypted(facts).blocked()}
    assert set(found) == {"node1", "node2"}
    assert "the same WireGuard key as node2" in found["node1"].reason
    assert "remove /etc/ppdeploy/tunnel" in found["node2"].remedy
    # Keys that are still to be made are not the same key.
    assert not encrypted(able(make_cluster(2), public_key=None)).blocked()


def test_a_network_with_too_few_addresses_is_refused() -> None:
    with pytest.raises(InputError, match=r"10\.9\.7\.0/30 has 2 addresses for 3 nodes"):
        encrypted(able(make_cluster(3)), fabric_encryption_subnet="10.9.7.0/30")


def test_nobody_elses_unit_or_address_changes_where_a_node_comes_or_goes() -> None:
    facts = able(make_cluster(3))
    three = encrypted(facts)
    for gone in ("node2", "node3"):
        left = {host: one for host, one in facts.items() if host != gone}
        two = encrypted(left)
        for host in left:
            before, after = render_node(three, host), render_node(two, host)
            assert three.node(host)[1].fabric.address == two.node(host)[1].fabric.address
            assert after[UNIT] == before[UNIT]
            assert after[PEERS] != before[PEERS]


def on_wire(facts: dict[str, NodeFacts], **addresses: str) -> dict[str, NodeFacts]:
    """Return the facts with these addresses on the fabric NIC, all in one /16."""
    found = {}
    for host, one in facts.items():
        nics = []
        for nic in one.nics:
            first = nic.addresses[0].model_copy(update={"address": addresses[host], "prefix": 16})
            nics.append(nic.model_copy(update={"addresses": (first,)}) if nic.name == "enp1s0" else nic)
        found[host] = one.model_copy(update={"nics": tuple(nics)})
    return found


def test_in_a_larger_fabric_two_nodes_that_would_meet_are_refused() -> None:
    facts = on_wire(able(make_cluster(2)), node1="192.168.4.0", node2="192.168.7.255")
    # 1024 and 2047 in the wire's network, modulo the 254 hosts of the tunnel's.
    addresses = [node.fabric.address for node in encrypted(facts).pipelines[0].nodes]
    assert addresses == ["10.213.117.8", "10.213.117.15"]
    met = on_wire(able(make_cluster(2)), node1="192.168.0.5", node2="192.168.1.3")
    with pytest.raises(InputError, match=r"node1 and node2 would both have 10\.213\.117\.5 .*192\.168\.1\.3"):
        encrypted(met)
    larger = encrypted(met, fabric_encryption_subnet="10.9.0.0/16").pipelines[0]
    assert [node.fabric.address for node in larger.nodes] == ["10.9.0.5", "10.9.1.3"]


def test_a_node_does_not_move_in_the_tunnel_under_a_running_rank() -> None:
    facts = with_unit(running(able(make_cluster(2))), "node1", "node2")
    first = facts["node1"].nics[0]
    now = first.addresses[0].model_copy(update={"address": "10.213.117.1", "prefix": 24})
    own = first.model_copy(update={"name": INTERFACE, "kind": "tunnel", "addresses": (now,)})
    facts["node1"] = facts["node1"].model_copy(update={"nics": (*facts["node1"].nics, own)})
    plan = encrypted(facts)
    told = "its address in the tunnel is to change from 10.213.117.1 to 10.213.117.11"
    assert reasons(plan) == [f"node1: {told} while a rank runs, whose peers would lose it"]
    stopped = {host: one.model_copy(update={"pipelines": {}}) for host, one in facts.items()}
    assert reasons(encrypted(stopped)) == []


def test_a_node_that_was_taken_out_is_forgotten_only_when_the_others_serve() -> None:
    plays = yaml.safe_load((data_root() / "playbooks" / "site.yml").read_text())
    books = [play.get("ansible.builtin.import_playbook") for play in plays]
    tasks = [str(play.get("tasks", "")) for play in plays]
    (forgets,) = [place for place, text in enumerate(tasks) if "forget.yml" in text]
    assert forgets > books.index("smoke.yml")


def test_rdma_that_would_pass_it_by_is_refused(tmp_path: Any) -> None:
    values = {
        "ppdeploy_model": "Qwen/Qwen3-32B",
        "ppdeploy_transport": "rdma",
        "ppdeploy_fabric_encryption": "wireguard",
    }
    with pytest.raises(InputError, match="RDMA passes it by in clear"):
        spec_from_values({"chat": ["a", "b"]}, {"a": values, "b": values}, inventory_dir=tmp_path)


def test_the_plan_says_that_the_fabric_is_encrypted_and_whose_keys_are_to_be_made() -> None:
    def told(plan: Plan) -> str:
        return "\n".join(plain(plan_report(plan)))

    text = "encrypted by wireguard in 10.213.117.0/24, over 198.51.100.0/24"
    assert f"{text}; apply makes the keys" in told(encrypted(able(make_cluster(2), public_key=None)))
    assert text in told(encrypted())
    assert "makes the keys" not in told(encrypted())
    assert "encrypted by" not in told(make_complete_plan())


def test_a_lone_node_has_no_tunnel() -> None:
    (node,) = encrypted(able(make_cluster(1)), pipeline_parallel_size=1).pipelines[0].nodes
    assert (node.tunnel, node.fabric.interface) == (None, "lo")


@pytest.mark.parametrize(("there", "kind", "way"), [((), "wireguard", "on"), (("node1", "node2"), "none", "off")])
def test_it_is_not_switched_under_a_running_rank(there: tuple[str, ...], kind: str, way: str) -> None:
    facts = with_unit(running(able(make_cluster(2))), *there)
    plan = encrypted(facts, kind=kind)
    told = f"encryption of the fabric is to be switched {way} while a rank runs, whose peers would lose it"
    assert reasons(plan) == [f"node1: {told}", f"node2: {told}"]
    assert "ppdeploy stop" in plan.blocked()[0].remedy
    # As it is, and stopped, it may go on.
    assert reasons(encrypted(with_unit(running(able(make_cluster(2))), "node1", "node2"))) == []
    assert reasons(encrypted(with_unit(able(make_cluster(2)), *there), kind=kind)) == []


@pytest.mark.parametrize(("there", "kind", "back"), [((), "none", True), ((), "wireguard", False)])
def test_apply_does_not_go_back_over_the_switch(there: tuple[str, ...], kind: str, back: bool) -> None:
    facts = with_unit(able(make_cluster(2)), *there)
    (pipeline,) = encrypted(facts, kind=kind).pipelines
    found = node_slice(pipeline, pipeline.nodes[0], facts["node1"], release_json(pipeline))
    assert found["can_go_back"] is back


def test_a_tunnel_that_nothing_asks_for_any_more_is_removed_and_else_nothing_is_asked_of_a_host() -> None:
    wants = make_pipeline_spec(["node1", "node2"]).vars
    bare = make_cluster(2)
    node = make_complete_plan(bare).pipelines[0].nodes[0]
    assert not tunnel_slice(wants, node, bare["node1"])["needed"]
    left = tunnel_slice(wants, node, with_unit(bare, "node1")["node1"])
    assert (left["needed"], left["unit_there"], left["files"]) == (True, True, [])
    # Keys of an apply that did not come to the unit go too.
    keys = tunnel_slice(wants, node, able(bare)["node1"])
    assert (keys["needed"], keys["unit_there"]) == (True, False)
