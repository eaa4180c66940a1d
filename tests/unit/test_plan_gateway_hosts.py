"""Gateways on hosts that are no heads: what the plan decides for them, and what a play is told."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.api_keys import keys_file
from ppdeploy.certificates import ca_file, certificate_file, ensure_ca, ensure_leaf, peer_file
from ppdeploy.errors import InputError
from ppdeploy.facts import FileState, Listener, NodeFacts
from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.plan import Plan, facts_request, gateway_facts_request
from ppdeploy.plan.gateway import CONFIG, MODELS_MAP, UNIT, host_peer_name, peer_name
from ppdeploy.play import (
    drivers_of_play,
    forget_gateway,
    gateway_hosts_of_play,
    gateway_request_of_play,
    gateway_trouble,
    make_gateway_secrets,
    make_plan,
    plan_of_play,
)
from ppdeploy.render import render_host
from ppdeploy.spec import PipelineSpec
from tests.factories import make_cluster, make_facts
from tests.factories_plan import make_pipeline_spec, make_source, make_spec

NOW = datetime.now(UTC)

DOOR = "192.0.2.20"


def addressed(spec: PipelineSpec) -> PipelineSpec:
    """Return the pipeline with the IP addresses of the factories' hosts."""
    hosts = [host.model_copy(update={"address": f"192.0.2.{10 + int(host.name[4:])}"}) for host in spec.hosts]
    return spec.model_copy(update={"hosts": tuple(hosts)})


def made(*, gateways: dict[str, str], several: bool = False, facts: dict[str, NodeFacts] | None = None) -> Plan:
    """Return the plan of one pipeline of two hosts, or of two with two models, and the group `gateway`."""
    specs = [addressed(make_pipeline_spec(["node1", "node2"], "one", served_model_name="small"))]
    if several:
        specs.append(addressed(make_pipeline_spec(["node3", "node4"], "two_b", served_model_name="large")))
    models = {"one": make_source(), "two_b": make_source(weight_bytes=8_500_000)}
    every = make_cluster(4 if several else 2) | (facts or {})
    return make_plan(make_spec(*specs, gateways=gateways), every, models)


def test_a_host_in_no_pipeline_reaches_the_head_by_mutual_tls_and_the_head_lets_it_in() -> None:
    plan = made(gateways={"door": DOOR})
    (door,) = plan.gateways
    (server,) = door.gateway.models[0].servers
    assert (server.address, server.port, server.health_port, server.verify) == (
        *("192.0.2.11", 8444, 8444),
        peer_name("one"),
    )
    assert (door.gateway.peer_name, door.gateway.peers) == ("door.gateway.ppdeploy.internal", None)
    assert door.gateway.names == ("door", DOOR, "localhost", "127.0.0.1")
    head = plan.node("node1")[1].gateway
    assert head
    assert head.peers
    assert (head.peers.address, head.peers.callers) == ("192.0.2.11", (door.gateway.peer_name,))
    assert head.peer_name == peer_name("one")
    # Nothing else changed for the head: its own clients' requests go to loopback.
    assert head.models[0].servers[0].address == "127.0.0.1"
    assert plan.node("node2")[1].gateway is None
    texts = render_host(plan, "door")
    assert set(texts) == {UNIT, CONFIG}
    assert "frontend peers" not in texts[CONFIG]
    assert ":8000" not in texts[CONFIG]
    assert "tune.bufsize" not in texts[CONFIG]
    assert "acl caller ssl_c_s_dn(cn) -m str door.gateway.ppdeploy.internal\n" in render_host(plan, "node1")[CONFIG]
    assert render_host(plan, "node2").keys() & {UNIT, CONFIG} == set()


def test_without_the_group_a_single_pipeline_has_no_second_door() -> None:
    plan = made(gateways={})
    head = plan.node("node1")[1].gateway
    assert head
    assert (head.peers, head.peer_name, plan.gateways) == (None, "", ())
    # A head in the group is what it is without it.
    assert made(gateways={"node1": "192.0.2.11"}).pipelines == plan.pipelines


def test_a_worker_meets_its_head_on_their_fabric() -> None:
    plan = made(gateways={"node2": "192.0.2.12"})
    head, worker = (plan.node(name)[1] for name in ("node1", "node2"))
    assert worker.gateway
    assert worker.gateway.models[0].servers[0].address == head.fabric.address
    assert worker.fabric.address in worker.gateway.names
    assert head.gateway
    assert head.gateway.peers
    assert head.gateway.peers.address == head.fabric.address
    assert {UNIT, CONFIG} <= render_host(plan, "node2").keys()
    assert plan.gateways == ()


def test_a_gateway_elsewhere_routes_by_model_and_has_every_head_called_by_name() -> None:
    plan = made(gateways={"door": DOOR, "node4": "192.0.2.14"}, several=True)
    texts = render_host(plan, "door")
    assert texts[MODELS_MAP] == "small model1\nlarge model2\n"
    assert "tune.bufsize" in texts[CONFIG]
    assert texts[CONFIG].count("verify required verifyhost") == 2
    for host, own in (("node1", "one"), ("node3", "two_b")):
        gateway = plan.node(host)[1].gateway
        assert gateway
        assert gateway.peers
        others = {peer_name("one"), peer_name("two_b"), host_peer_name("door"), host_peer_name("node4")}
        assert set(gateway.peers.callers) == others - {peer_name(own)}
        assert gateway.peers.address == "*"


def test_an_address_that_is_translated_on_the_way_is_none_to_listen_on() -> None:
    spec = addressed(make_pipeline_spec(["node1"], "one"))
    spec = spec.model_copy(update={"hosts": (spec.hosts[0].model_copy(update={"address": "203.0.113.9"}),)})
    plan = make_plan(make_spec(spec, gateways={"door": DOOR}), make_cluster(1), {"one": make_source()})
    head = plan.node("node1")[1].gateway
    assert head
    assert head.peers
    assert head.peers.address == "*"
    assert plan.gateways[0].gateway.models[0].servers[0].address == "203.0.113.9"


PEM = "/etc/ssl/chat.pem"


@pytest.mark.parametrize(("state", "words"), [("missing", f"there is no {PEM}"), ("there", ""), ("not asked", "")])
def test_a_certificate_of_ones_own_that_is_not_there_is_told_before_anything_is_touched(state: str, words: str) -> None:
    own = addressed(make_pipeline_spec(["node1", "node2"], "one", gateway_certificate=PEM))
    spec = make_spec(own, gateways={"door": DOOR})
    link = FileState(
        path=PEM, type="link", mode="0777", owner="root", group="root", size=9, sha256=None, target="../live/chat.pem"
    )
    files: dict[str, FileState | None] = {} if state == "not asked" else {PEM: link if state == "there" else None}
    hosts = {name: one.model_copy(update={"files": files}) for name, one in make_cluster(2).items()}
    plan = make_plan(spec, {**hosts, "door": make_facts(files=files)}, {"one": make_source()})
    found = [one for one in plan.pipelines[0].findings if one.id == "gateway-certificate"]
    # The worker is no gateway.
    assert [one.host for one in found] == (["node1"] if words else [])
    outside = [one for one in plan.gateways[0].findings if one.id == "gateway-certificate"]
    assert len(outside) == len(found)
    for one in (*found, *outside):
        assert one.verdict == "blocked"
        assert words in one.reason
    for asked in (*facts_request(spec).values(), gateway_facts_request(own.vars)):
        assert PEM in asked["files"]  # type: ignore[operator]  # of what is asked all kinds are objects


def test_a_head_that_only_a_name_leads_to_is_refused() -> None:
    spec = make_spec(make_pipeline_spec(["node1"], "one"), gateways={"door": DOOR})
    with pytest.raises(InputError, match=r"ansible_host of node1 is a name.*IP address that door reaches"):
        make_plan(spec, make_cluster(1), {"one": make_source()})


def test_names_for_heads_are_short_plain_and_each_hosts_own() -> None:
    hosts = ["lb", "LB", "lb.example", "lb_example", "x" * 200, "x" * 201, "_", "fd00::1"]
    names = [host_peer_name(host) for host in hosts]
    assert names[0] == "lb.gateway.ppdeploy.internal"
    assert len(set(names)) == len(hosts)
    assert all(len(name) <= 64 and name.endswith(".gateway.ppdeploy.internal") for name in names)
    assert all(not name.startswith("-") and " " not in name for name in names)


# ---- its facts -------------------------------------------------------------------------------------------------------


def listening(port: int, unit: str) -> Listener:
    return Listener(port=port, address="0.0.0.0", pid=7, process="nginx", command="nginx", unit=unit)  # noqa: S104


def test_a_port_that_a_program_has_is_blocked_and_our_own_is_not() -> None:
    facts = make_facts("door", number=10)
    ours = facts.model_copy(update={"listeners": (listening(8443, "ppdeploy-gateway.service"),)})
    assert made(gateways={"door": DOOR}, facts={"door": ours}).blocked() == []
    # Nobody calls it, so the port for other gateways may be another program's.
    other = facts.model_copy(update={"listeners": (listening(8444, "nginx.service"),)})
    assert made(gateways={"door": DOOR}, facts={"door": other}).blocked() == []
    taken = facts.model_copy(update={"listeners": (listening(8443, "nginx.service"),)})
    (finding,) = made(gateways={"door": DOOR}, facts={"door": taken}).blocked()
    assert finding.sentence() == (
        "port 8443 is taken by nginx (nginx.service, pid 7) (door): stop that program or set ppdeploy_gateway_port to "
        "a free port"
    )


def test_an_address_that_the_host_does_not_have_is_blocked() -> None:
    spec = addressed(make_pipeline_spec(["node1"], "one", gateway_address="192.0.2.11"))
    facts = {**make_cluster(1), "door": make_facts("door", number=10)}
    plan = make_plan(make_spec(spec, gateways={"door": DOOR}), facts, {"one": make_source()})
    (finding,) = plan.blocked()
    assert finding.sentence() == (
        'ppdeploy_gateway_address is 192.0.2.11, which is no address of this host (door): set it to "*", with which '
        "every gateway listens on all addresses of its host"
    )
    spec = addressed(make_pipeline_spec(["node1"], "one", gateway_address=DOOR))
    assert make_plan(make_spec(spec, gateways={"door": DOOR}), facts, {"one": make_source()}).gateways[0].findings == ()


def test_a_node_under_another_name_is_blocked() -> None:
    facts = make_facts("door", number=10)
    same = make_cluster(1)["node1"].identity.machine_id
    twin = facts.model_copy(update={"identity": facts.identity.model_copy(update={"machine_id": same})})
    (finding,) = made(gateways={"door": DOOR}, facts={"door": twin}).blocked()
    assert finding.sentence().startswith("node1 and door have the same /etc/machine-id")


# ---- a play ----------------------------------------------------------------------------------------------------------


def inventory(folder: Path, **more: Any) -> dict[str, Any]:
    """Return what a play hands over: one pipeline, `door` in the group `gateway`, and a host that is in neither."""
    values = {"ppdeploy_model": str(make_tiny_model(folder / "tiny")), "ppdeploy_device": "cpu"}
    hosts = ["node1", "node2"]
    return {
        "pipelines": {"tiny": hosts},
        "hosts": hosts,
        "values": {host: {**values, "ansible_host": f"198.18.0.1{host[4:]}"} for host in hosts},
        "directory": str(folder),
        "gateways": {"door": {"ansible_host": "198.18.0.20"}},
        "known": [*hosts, "door", "left", "other"],
        **more,
    }


def facts_of(hosts: list[str], **files: FileState | None) -> dict[str, dict[str, Any]]:
    return {
        host: facts.model_copy(update={"files": {UNIT: files[host]}} if host in files else {}).model_dump(mode="json")
        for host, facts in {**make_cluster(2), **{host: make_facts(host, number=10) for host in hosts}}.items()
    }


UNIT_THERE = FileState(
    path=UNIT, type="file", mode="0644", owner="root", group="root", size=1, sha256="0" * 64, target=None
)


def test_a_play_sets_up_those_in_the_group_and_removes_those_that_left_it(tmp_path: Path) -> None:
    given = inventory(tmp_path)
    assert list(gateway_hosts_of_play(given)) == ["door"]
    assert gateway_hosts_of_play(given)["door"] == {"ports": [8443, 8405], "files": [UNIT]}
    slices = plan_of_play(given, facts_of(["door"]))["gateways"]
    assert list(slices) == ["door"]
    assert slices["door"]["needed"]
    assert slices["door"]["secrets"]["peer"] == [host_peer_name("door")]
    make_gateway_secrets(slices["door"]["secrets"], NOW)
    assert peer_file(tmp_path, "door").exists()

    gone = inventory(tmp_path, gateways={})
    assert list(gateway_hosts_of_play(gone)) == ["door"]
    assert list(gateway_request_of_play(gone)) == ["node1", "door"]
    left = plan_of_play(gone, facts_of(["door"], door=UNIT_THERE))["gateways"]["door"]
    assert (left["needed"], left["files"]) == (True, [])
    # A host whose facts nobody took may still have one.
    assert plan_of_play(gone, facts_of([]))["gateways"]["door"]["forget"] == {}
    assert len(forget_gateway(left["forget"])) == 2
    assert not certificate_file(tmp_path, "door").exists()
    assert forget_gateway(left["forget"]) == []
    assert gateway_hosts_of_play(gone) == {}
    assert plan_of_play(gone, facts_of([]))["gateways"] == {}


def test_hosts_that_never_were_gateways_are_not_asked(tmp_path: Path) -> None:
    ensure_ca(tmp_path, "mine", NOW)
    # A head of several pipelines has such a certificate, too.
    ensure_leaf(tmp_path, peer_file(tmp_path, "node1"), "tiny", ["tiny"], NOW, client=True)
    assert list(gateway_hosts_of_play(inventory(tmp_path))) == ["door"]
    assert list(gateway_request_of_play(inventory(tmp_path))) == ["node1", "door"]


def test_a_play_with_a_part_of_the_pipelines_leaves_gateways_alone(tmp_path: Path) -> None:
    part = inventory(tmp_path, gateways={"door": {}, "node4": {}})
    part["pipelines"]["other"] = ["node3", "node4"]
    assert gateway_hosts_of_play(part) == {}
    planned = plan_of_play(part, facts_of(["door"]))
    assert planned["gateways"] == {}
    assert not planned["nodes"]["node1"]["gateway"]["needed"]


def test_a_worker_that_leaves_the_group_has_its_gateway_removed(tmp_path: Path) -> None:
    in_it = inventory(tmp_path, gateways={"node2": {}})
    assert plan_of_play(in_it, facts_of([]))["nodes"]["node2"]["gateway"]["files"]
    left = plan_of_play(inventory(tmp_path, gateways={}), facts_of([], node2=UNIT_THERE))["nodes"]["node2"]["gateway"]
    assert (left["needed"], left["files"]) == (True, [])


def test_what_is_blocked_outside_keeps_every_node_from_being_touched(tmp_path: Path) -> None:
    facts = facts_of(["door"])
    facts["door"]["listeners"] = [listening(8443, "nginx.service").model_dump(mode="json")]
    given = inventory(tmp_path)
    for host in ("node1", "node2"):
        (sentence,) = plan_of_play(given, facts)["nodes"][host]["blocked"]
        assert sentence.startswith("port 8443 is taken by nginx")
    # No driver is to be brought, so the roles stop at it.
    assert drivers_of_play(given, facts)["blocked"] == []


def test_a_ca_or_keys_that_cannot_be_used_are_told_before_any_host_is_changed(tmp_path: Path) -> None:
    ensure_ca(tmp_path, "lab", NOW)
    ca_file(tmp_path).write_text("cut")
    secrets = {"directory": str(tmp_path), "cluster": "lab", "host": "node1", "names": ["node1"]}
    # The task hides what it made, so an error of it would be hidden too.
    made_of = make_gateway_secrets(secrets, NOW)
    assert made_of["lines"] == []
    assert "the cluster's CA cannot be used" in made_of["error"]
    plan = made(gateways={})
    spec = make_spec(addressed(make_pipeline_spec(["node1", "node2"], "one"))).model_copy(
        update={"inventory_dir": tmp_path}
    )
    (told,) = gateway_trouble(spec, plan)
    assert "the cluster's CA cannot be used" in told
    ca_file(tmp_path).unlink()
    ca_file(tmp_path).with_name("ca.key").unlink()
    assert gateway_trouble(spec, plan) == []
    keys_file(tmp_path).write_text("cut")
    (told,) = gateway_trouble(spec, plan)
    assert "the API keys cannot be read" in told
