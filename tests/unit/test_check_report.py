"""What checks come to: results of a whole cluster, as a table, as JSON, as the page of docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppdeploy.check_report import check_lines, checks_markdown
from ppdeploy.checking import Seen, counts, document, explained, judge, peers_to_probe, ways_of_play
from ppdeploy.facts import Listener, NodeFacts
from ppdeploy.plan.checks import NODE, PAIR, PIPELINE, catalogue
from ppdeploy.spec import GatewayHost, Spec
from tests.factories import make_cluster, make_nic
from tests.factories_checks import installed
from tests.factories_plan import make_pipeline_spec, make_source, make_spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every pipeline have the tiny model."""

    def resolve(spec: Spec, _token: str | None = None) -> dict[str, object]:
        return {pipeline.name: make_source() for pipeline in spec.pipelines}

    monkeypatch.setattr("ppdeploy.checking.resolve_models", resolve)


def seen(facts: dict[str, NodeFacts]) -> dict[str, Seen]:
    return {host: Seen(facts=one) for host, one in facts.items()}


def test_every_check_is_made_in_every_place() -> None:
    facts = make_cluster(3)
    checked = judge(make_spec(make_pipeline_spec(list(facts))), seen(facts))
    own = [one for one in checked.results if one.id in {check.id for check in catalogue()}]
    assert len(own) == 3 * len(list(NODE)) + 6 * len(list(PAIR)) + len(list(PIPELINE))
    assert {(one.host, one.peer) for one in own if one.scope == "pair"} == {
        (a, b) for a in facts for b in facts if a != b
    }
    assert counts(checked)["blocked"] == 0


def test_a_host_out_of_reach_is_told_and_the_others_are_checked() -> None:
    facts = make_cluster(3)
    looks = seen(facts) | {"node3": Seen(reason="it does not answer", unreachable=True)}
    checked = judge(make_spec(make_pipeline_spec(list(facts))), looks)
    assert list(checked.unasked) == ["node3"]
    hosts = {one.host for one in checked.results if one.scope != "pipeline"}
    assert hosts == {"node1", "node2"}
    plan = next(one for one in checked.results if one.id == "plan")
    assert (plan.verdict, plan.judged, plan.evidence) == ("ready", False, "a plan needs the facts of every node")
    assert check_lines(checked)[0] == "node3 unreachable: it does not answer"


def test_one_host_left_of_several_is_not_taken_for_a_pipeline_of_one() -> None:
    facts = make_cluster(2)
    looks = seen(facts) | {"node2": Seen(reason="it does not answer", unreachable=True)}
    checked = judge(make_spec(make_pipeline_spec(list(facts))), looks)
    up = next(one for one in checked.results if one.id == "fabric-up")
    assert (up.judged, up.evidence) == (False, "no fabric was found")


def test_hosts_without_a_common_subnet_are_blocked_and_checked_all_the_same() -> None:
    facts = make_cluster(2)
    elsewhere = make_nic("enp1s0", "203.0.113.12/24", index=3)
    facts["node2"] = facts["node2"].model_copy(update={"nics": (elsewhere,)})
    checked = judge(make_spec(make_pipeline_spec(list(facts))), seen(facts))
    blocked = {one.id: one.evidence for one in checked.of("blocked")}
    assert "the hosts share no subnet on a usable NIC" in blocked["fabric"]
    assert blocked["plan"] == "there is no fabric to plan with"
    assert any(one.id == "systemd" and one.judged for one in checked.results)


def test_what_one_pipeline_lacks_does_not_hide_the_other() -> None:
    facts = make_cluster(4)
    facts["node2"] = facts["node2"].model_copy(update={"pythons": ()})
    # Else an apply would install one.
    small = make_pipeline_spec(["node1", "node2"], "small", system_packages="none")
    spec = make_spec(small, make_pipeline_spec(["node3", "node4"], "large"))
    checked = judge(spec, seen(facts))
    assert {one.pipeline for one in checked.of("blocked")} == {"small"}
    plan = next(one for one in checked.results if one.id == "plan" and one.pipeline == "large")
    assert plan.evidence == "a plan was made"


def test_one_machine_in_two_pipelines() -> None:
    facts = make_cluster(4)
    facts["node4"] = facts["node4"].model_copy(update={"identity": facts["node1"].identity})
    spec = make_spec(make_pipeline_spec(["node1", "node2"], "small"), make_pipeline_spec(["node3", "node4"], "large"))
    (blocked,) = judge(spec, seen(facts)).of("blocked")
    assert (blocked.id, blocked.pipeline, blocked.host) == ("shared-machine", "large", "node4")


def test_a_plans_own_findings_are_told_once() -> None:
    facts = make_cluster(2, fabric_speed_mbit=100)
    checked = judge(make_spec(make_pipeline_spec(list(facts))), seen(facts))
    places = [(one.id, one.host, one.peer) for one in checked.results]
    assert len(places) == len(set(places))


def test_the_table_shows_what_is_not_ready_and_a_count() -> None:
    facts = make_cluster(2)
    facts["node1"] = facts["node1"].model_copy(update={"firewalls": ("ufw.service",)})
    checked = judge(make_spec(make_pipeline_spec(list(facts))), seen(facts))
    lines = check_lines(checked)
    assert lines[0] == "pipeline tiny: slow"
    assert any("firewall" in line and "node1" in line and "ufw allow from 198.51.100.0/24" in line for line in lines)
    assert not any("systemd" in line for line in lines)
    assert lines[-1].startswith("0 blocked, 1 slow, ")


def with_door(spec: Spec) -> Spec:
    """Return the spec with a gateway outside of all pipelines, which reaches the nodes by their addresses."""
    (pipeline,) = spec.pipelines
    hosts = tuple(host.model_copy(update={"address": f"192.0.2.{n}"}) for n, host in enumerate(pipeline.hosts, 11))
    door = GatewayHost(name="door", address="192.0.2.99")
    return spec.model_copy(update={"pipelines": (pipeline.model_copy(update={"hosts": hosts}),), "gateways": (door,)})


def test_a_gateway_outside_of_all_pipelines_is_looked_at() -> None:
    facts = make_cluster(3)
    door = facts.pop("node3")
    spec = with_door(make_spec(make_pipeline_spec(list(facts))))
    nothing = judge(spec, {**seen(facts), "door": Seen(facts=door)})
    assert not nothing.of("blocked")
    taken = Listener(port=8443, address="192.0.2.99", pid=7, process="nginx", command="nginx", unit="nginx.service")
    checked = judge(spec, {**seen(facts), "door": Seen(facts=door.model_copy(update={"listeners": (taken,)}))})
    (found,) = checked.of("blocked")
    assert (found.id, found.host, found.where) == ("port-taken", "door", "door")
    assert "ppdeploy_gateway_port" in found.remedy
    assert "gateways outside of all pipelines: blocked" in check_lines(checked)


def test_a_gateway_outside_of_all_pipelines_that_is_out_of_reach_is_told_and_one_beyond_the_limit_is_not() -> None:
    facts = make_cluster(2)
    spec = with_door(make_spec(make_pipeline_spec(list(facts))))
    away = {"door": Seen(reason="it does not answer", unreachable=True)}
    assert list(judge(spec, {**seen(facts), **away}).unasked) == ["door"]
    assert not judge(spec, seen(facts)).unasked


def test_the_json_form() -> None:
    facts = make_cluster(2)
    checked = judge(make_spec(make_pipeline_spec(list(facts))), seen(facts))
    made = document(checked, error=None, exit_code=0, seconds=1.23456)
    assert (made["schema"], made["verb"], made["ok"], made["exit_code"], made["seconds"]) == (
        2,
        "check",
        True,
        0,
        1.235,
    )
    assert sum(made["counts"].values()) == len(made["results"])
    assert set(made["results"][0]) == {
        *("id", "scope", "pipeline", "host", "peer", "verdict", "judged", "evidence", "remedy"),
    }


def values_of(facts: dict[str, NodeFacts], **more: str) -> dict[str, object]:
    own = {"ppdeploy_model": "./tiny", "ppdeploy_device": "cpu", **more}
    return {
        "pipelines": {"tiny": list(facts)},
        "hosts": list(facts),
        "values": {host: {"ansible_host": host, **own} for host in facts},
        "directory": "inventory/cluster",
    }


def raw(facts: dict[str, NodeFacts]) -> dict[str, dict[str, object]]:
    return {host: {"facts": one.model_dump(mode="json")} for host, one in facts.items()}


def test_each_node_looks_at_all_others_and_sends_to_its_neighbours() -> None:
    facts = make_cluster(3)
    ways = ways_of_play(values_of(facts), raw(facts))
    assert list(ways) == ["node1", "node2", "node3"]
    assert ways["node1"]["master_port"] == 29501
    assert ways["node2"]["master_port"] == 0
    assert [(peer["host"], peer["send"]) for peer in ways["node1"]["peers"]] == [("node2", 0.25), ("node3", 0)]
    assert ways["node3"]["allowed"] == [{"address": "198.51.100.11"}, {"address": "198.51.100.12"}]


def test_an_installed_pipeline_is_not_sent_to_and_its_master_port_is_left_alone() -> None:
    facts = {host: one.model_copy(update={"pipelines": {"tiny": installed()}}) for host, one in make_cluster(2).items()}
    ways = ways_of_play(values_of(facts), raw(facts))
    assert ways["node1"]["master_port"] == 0
    assert ways["node1"]["peers"][0]["send"] == 0


def test_a_peer_without_a_listener_is_looked_at_all_the_same() -> None:
    way = {
        "peers": [
            {"host": "b", "address": "198.51.100.12", "send": 0.4},
            {"host": "c", "address": "198.51.100.13", "send": 0},
        ]
    }
    listening = {"b": {"listener": {"token": "t", "ports": [1, 2], "master": True, "handle": "1:2"}}, "c": {}}
    assert peers_to_probe(way, listening) == [
        {"address": "198.51.100.12", "send": 0.4, "token": "t", "ports": [1, 2], "master": True},
        {"address": "198.51.100.13", "send": 0},
    ]


def test_the_page_of_checks_is_made_from_the_list() -> None:
    page = (ROOT / "docs/checks.md").read_text(encoding="utf-8")
    assert page == checks_markdown(catalogue()), "run `python scripts/checks_page.py`"


def test_every_check_is_explained() -> None:
    told = explained(catalogue())
    assert len(told) >= 40
    assert {one["scope"] for one in told} == {"node", "pair", "pipeline"}
    assert any(one["stops_apply"] for one in told)
