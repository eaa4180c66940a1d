"""The verdict on a network: ready, slow or blocked, what it costs in a sentence, and what the plan makes of it."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.net import (
    NetReport,
    judge,
    kept_file,
    kept_links,
    measured_links,
    node_request,
    probe_limit,
    rounds,
    sentence,
    whole_limit,
)
from ppdeploy.plan.measured import still_true
from ppdeploy.plan.types import NetworkCost, Outlook
from ppdeploy.play import make_plan, net_document, net_report_of_play, net_request_of_play, net_running
from tests.factories import make_cluster
from tests.factories_plan import make_complete_plan, make_pipeline_spec, make_source, make_spec
from tests.unit.net_views import FABRIC, TIME, encrypted, judged, pair, planned, report, run, seen, sizes

# ---- who measures whom


@pytest.mark.parametrize("count", range(1, 9))
def test_every_two_nodes_meet_once_and_no_node_is_in_two_pairs_of_a_round(count: int) -> None:
    found = rounds(count)
    for pairs in found:
        named = [node for one in pairs for node in one]
        assert len(named) == len(set(named))
    assert sorted(one for pairs in found for one in pairs) == list(combinations(range(count), 2))


def test_each_pair_has_one_client() -> None:
    pipeline = planned(3)
    hosts = [node.host for node in pipeline.nodes]
    asks = {node.host: node_request(pipeline, node, hosts, 3) for node in pipeline.nodes}
    clients = {(host, one["peer"]) for host, ask in asks.items() for one in ask["rounds"] if one["peer"]}
    assert clients == {("node1", "node2"), ("node1", "node3"), ("node2", "node3")}
    assert asks["node2"]["rounds"][0] == {"peer": "node3", "address": "198.51.100.13", "wire": ""}


def test_a_node_that_is_gone_takes_no_part_in_the_handoffs() -> None:
    pipeline = planned(3)
    ask = node_request(pipeline, pipeline.nodes[2], ["node2", "node3"], 3)
    assert ask["probe"]["hosts"] == ["node2", "node3"]
    assert (ask["probe"]["rank"], ask["probe"]["master"]) == (1, "198.51.100.12")
    assert ask["probe"]["rounds"] == [[(0, 1)]]
    assert ask["probe_problem"].startswith("no handoffs: vLLM is not installed on node2, node3")


def test_a_test_outlasts_its_parts() -> None:
    assert whole_limit(8, 3) > probe_limit(8, 3) + 7 * 4 * 3
    assert probe_limit(2, 3) >= 2 * (2 * 3 + 20)


def test_the_nodes_get_the_ranks_own_environment_and_the_probe() -> None:
    plan = make_complete_plan()
    asks = net_request_of_play({"plan": plan.model_dump(mode="json")}, ["node1", "node2"], 3)
    assert "GLOO_SOCKET_IFNAME=enp1s0" in asks["node2"]["files"]["nccl.env"]
    assert "VLLM_HOST_IP=198.51.100.12" in asks["node2"]["files"]["rank.env"]
    assert "class Handoffs" in asks["node1"]["files"]["handoff.py"]
    assert asks["node1"]["round_count"] == 1
    assert asks["node1"]["probe"]["bytes_per_token"] == plan.pipelines[0].outlook.handoff_bytes > 0


# ---- an encrypted fabric


def test_with_a_tunnel_a_pair_is_asked_in_it_and_beside_it() -> None:
    pipeline = encrypted()
    ask = node_request(pipeline, pipeline.nodes[0], ["node1", "node2"], 3)
    assert (ask["address"], ask["peers"]) == ("10.213.117.11", ["10.213.117.12"])
    assert (ask["wire"], ask["wire_peers"]) == ("198.51.100.11", ["198.51.100.12"])
    assert ask["rounds"] == [{"peer": "node2", "address": "10.213.117.12", "wire": "198.51.100.12"}]
    assert ask["probe_problem"].startswith("no handoffs: vLLM is not installed")


def test_a_tunnel_that_is_not_open_everywhere_leaves_the_wire_to_measure() -> None:
    pipeline = encrypted(up=False)
    ask = node_request(pipeline, pipeline.nodes[0], ["node1", "node2"], 3)
    assert (ask["address"], ask["peers"], ask["wire"]) == ("198.51.100.11", ["198.51.100.12"], "")
    found = judge(pipeline, seen([pair()]), (), 4)
    assert found.notes[0] == "the tunnel is not open on node2, so this is the wire without it"
    assert found.ways[0].addresses == ("198.51.100.11", "198.51.100.12")
    installed = pipeline.nodes[0].work.model_copy(update={"install_venv": False})
    nodes = tuple(node.model_copy(update={"work": installed}) for node in pipeline.nodes)
    told = node_request(pipeline.model_copy(update={"nodes": nodes}), nodes[0], ["node1", "node2"], 3)
    assert told["probe_problem"] == "no handoffs: the tunnel is not open on node2 (`ppdeploy apply`)"


def test_what_encryption_costs_is_the_share_of_the_wire_that_it_takes() -> None:
    half: dict[str, Any] = {"in_one": run(475.0), "in_many": run(475.0)}
    measured = pair(out_many=run(900.0), **half, out_wire=run(950.0), in_wire=run(950.0))
    found = judge(encrypted(), seen([measured]), (), 4)
    there, back = found.ways
    assert there.addresses == ("10.213.117.11", "10.213.117.12")
    assert there.encryption_cost == pytest.approx(50 / 950)
    assert there.verdict == "ready"
    # The wire carries it, so no cable is blamed.
    assert back.encryption_cost == pytest.approx(0.5)
    assert (back.verdict, "ethtool" in back.remedy) == ("slow", False)


def test_where_the_wire_carries_it_encryption_is_named_as_the_limit() -> None:
    slow: dict[str, Any] = {f"{way}_{count}": run(300.0) for way in ("out", "in") for count in ("one", "many")}
    found = judge(encrypted(), seen([pair(**slow, out_wire=run(950.0), in_wire=run(950.0))]), (), 4)
    assert {way.verdict for way in found.ways} == {"slow"}
    assert found.ways[0].reason == "300 Mbit/s through the tunnel and 950 Mbit/s beside it"
    assert found.ways[0].remedy.startswith("encryption is the limit")
    # A wire that is slow itself is still a matter of cable and port.
    bad = judge(encrypted(), seen([pair(**slow, out_wire=run(310.0), in_wire=run(310.0))]), (), 4)
    assert "ethtool" in bad.ways[0].remedy


def test_what_was_measured_beside_the_tunnel_is_not_taken_for_what_is_in_it() -> None:
    before = judge(encrypted(up=False), seen([pair()]), (), 4)
    links = measured_links(report(before), before.pipeline)
    assert links
    fabric = {node.host: node.fabric for node in encrypted().nodes}
    assert still_true(links, fabric) == {}
    after = judge(encrypted(), seen([pair()]), (), 4)
    assert still_true(measured_links(report(after), after.pipeline), fabric)


# ---- the verdict


def test_a_wire_that_carries_what_was_negotiated_is_ready_both_ways() -> None:
    found = judged(lines=[*sizes("node1", "node2"), *sizes("node2", "node1")])
    assert [(way.sender, way.receiver, way.verdict) for way in found.ways] == [
        ("node1", "node2", "ready"),
        ("node2", "node1", "ready"),
    ]
    assert found.verdict == "ready"
    assert found.notes == ()
    assert [way.next for way in found.ways] == [True, False]
    assert found.ways[0].reason == "953 Mbit/s of 1 Gbit/s negotiated"
    largest = found.ways[0].handoffs[-1]
    assert largest.wire_seconds == pytest.approx(8192 * 16384 * 8 / 953e6 + 0.0001)


def test_each_direction_has_its_own_verdict() -> None:
    found = judged(pair(in_one=run(402.0, 8123), in_many=run(420.0, 9)))
    assert [way.verdict for way in found.ways] == ["ready", "slow"]
    assert found.verdict == "slow"
    assert found.ways[1].reason == "420 Mbit/s of 1 Gbit/s negotiated, 8,123 segments were sent again"
    assert "ethtool" in found.ways[1].remedy


def test_one_connection_that_is_slower_than_several_is_named() -> None:
    many: dict[str, Any] = {
        "out_one": run(12000.0),
        "out_many": run(23000.0),
        "in_one": run(23000.0),
        "in_many": run(23000.0),
    }
    way = judged(pair(**many), rate=25000).ways[0]
    assert way.verdict == "slow"
    assert way.reason == "one connection carries 12 Gbit/s, 4 carry 23 Gbit/s of 25 Gbit/s negotiated"
    assert "mpstat" in way.remedy


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lost": 3}, "3 of 60 pings were lost"),
        ({"trip": 0.0042}, "a round trip takes 4.2 ms"),
    ],
)
def test_loss_and_a_long_way_are_slow(changes: dict[str, Any], reason: str) -> None:
    found = judged(pair(**changes))
    assert {way.verdict for way in found.ways} == {"slow"}
    assert found.ways[0].reason == reason
    assert found.ways[0].remedy


def test_without_tcp_a_way_is_blocked() -> None:
    silent = pair()
    silent["flows"] = {"out_one": {"error": "unable to connect to server: Connection timed out"}}
    found = judged(silent)
    assert {way.verdict for way in found.ways} == {"blocked"}
    assert found.ways[0].reason.endswith("unable to connect to server: Connection timed out")
    assert "ppdeploy check" in found.ways[0].remedy


def test_a_pair_that_is_cut_in_the_middle_says_so_both_ways() -> None:
    cut = {"error": "no end 8 s after its time"}
    found = judged({**pair(), "flows": {"out_one": run(), "in_one": cut, "out_many": cut, "in_many": cut}})
    assert [(way.verdict, way.reason) for way in found.ways] == [
        ("slow", "it carried 949 Mbit/s, and then a run failed: no end 8 s after its time"),
        ("blocked", "no TCP between them: no end 8 s after its time"),
    ]


def test_a_way_through_which_nothing_came_is_not_ready() -> None:
    none = run(0.0)
    found = judged(pair(out_one=none, out_many=none))
    assert next((way.verdict, way.reason) for way in found.ways) == (
        "blocked",
        "no TCP between them: nothing came through",
    )


def test_a_firewall_that_drops_pings_alone_is_no_bad_cable() -> None:
    way = judged(pair(lost=60)).ways[0]
    assert (way.verdict, way.reason) == ("slow", "no ping comes back, though TCP carries 953 Mbit/s")
    assert "ICMP" in way.remedy


def test_handoffs_that_fail_block_a_way_that_iperf3_found_ready() -> None:
    found = judged(lines=[{"pair": ["node1", "node2"], "error": "timed out"}])
    assert {way.verdict for way in found.ways} == {"blocked"}
    assert found.ways[0].reason == "handoffs between them fail: timed out"


def test_without_iperf3_the_handoffs_tell_the_rate() -> None:
    without = {**pair(problem="the peer has no iperf3 server"), "flows": {}}
    noted = seen([without], [*sizes("node1", "node2"), *sizes("node2", "node1", 500.0)])
    noted["node2"]["iperf3"] = "iperf3 is not there and cannot be installed"
    found = judge(planned(), noted, (), 4)
    assert [way.verdict for way in found.ways] == ["ready", "slow"]
    assert found.ways[0].rate_mbit == pytest.approx(940, rel=0.01)
    assert found.notes == ("node2: iperf3 is not there and cannot be installed",)


def test_what_was_not_measured_has_no_verdict() -> None:
    found = judged({**pair(problem="iperf3 is not installed"), "flows": {}})
    assert [way.verdict for way in found.ways] == [None, None]
    assert found.verdict is None
    assert found.ways[0].reason == "not measured: iperf3 is not installed"


def test_a_node_that_vanished_is_named_and_the_others_keep_their_verdicts() -> None:
    noted = seen([pair()])
    found = judge(planned(3), noted, ("node3",), 4)
    verdicts = {(way.sender, way.receiver): way.verdict for way in found.ways}
    assert verdicts["node1", "node2"] == verdicts["node2", "node1"] == "ready"
    assert {verdict for way, verdict in verdicts.items() if "node3" in way} == {"blocked"}
    assert found.lost == ("node3",)
    assert found.notes == ("node3 could not be reached any more",)


def test_a_node_alone_has_no_network() -> None:
    found = judge(planned(1), {}, (), 4)
    assert found.ways == ()
    assert "alone in the pipeline" in found.notes[0]


# ---- the sentence


def outlook(**changes: Any) -> Outlook:
    links = planned().outlook.links
    link = links[0].model_copy(update={"measured_mbit": 2390.0, **changes.pop("link", {})})
    cost = {
        "first_token_seconds": 0.0641,
        "further_token_seconds": 0.0002,
        "further_token_share": 0.01,
        "tokens_per_second": 614.2,
        "faster": "10 Gbit/s",
        "faster_tokens_per_second": 840.4,
        **changes,
    }
    return Outlook(
        input_tokens=1024, output_tokens=128, latency_seconds=1e-4, links=(link,), network=NetworkCost(**cost)
    )


def test_the_sentence_says_what_the_network_costs_and_what_a_faster_one_brings() -> None:
    assert sentence(outlook()) == (
        "At 2.39 Gbit/s your network adds 64 ms to the first token of a prompt of 1,024 tokens and nothing you would "
        "notice to decoding; 10 Gbit/s would bring 32-way throughput from 614 to 840 tok/s."
    )


def test_the_sentence_names_what_decoding_notices_and_what_is_not_worth_it() -> None:
    told = sentence(outlook(further_token_seconds=0.0031, further_token_share=0.12, faster_tokens_per_second=620.0))
    assert "and 3.1 ms (12%) to each further token; a faster one would bring next to nothing." in told


def test_the_sentence_says_when_its_rate_was_not_measured() -> None:
    assert sentence(outlook(link={"measured_mbit": None})).startswith("At 1 Gbit/s (negotiated, not measured) your")


def test_without_a_prediction_the_sentence_says_why() -> None:
    told = sentence(outlook().model_copy(update={"network": None, "unknown": "the model does not fit"}))
    assert told == "What the network costs is not known: the model does not fit."


# ---- what is kept, and what the plan makes of it


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    kept = kept_file(tmp_path, "tiny")
    assert kept.parent.name == ".ppdeploy"
    assert kept_links(tmp_path, "tiny") == ()
    kept.parent.mkdir()
    kept.write_text(json.dumps(report().document()))
    links = kept_links(tmp_path, "tiny")
    assert links == measured_links(report(), "tiny")
    assert [(link.sender, link.rate_mbit, link.latency_seconds, link.time) for link in links] == [
        ("node1", 953.0, 0.0001, TIME),
        ("node2", 953.0, 0.0001, TIME),
    ]
    kept.write_text(json.dumps({**report().document(), "schema": 99}))
    assert kept_links(tmp_path, "tiny") == ()
    kept.write_text("{")
    assert kept_links(tmp_path, "tiny") == ()


def test_the_document_has_its_version_and_reads_back() -> None:
    document = report().document()
    assert document["schema"] == 1
    assert NetReport.model_validate(json.loads(json.dumps(document))) == report()


def test_of_a_way_that_carries_nothing_the_plan_learns_nothing() -> None:
    silent = pair()
    silent["flows"] = {"out_one": {"error": "unable to connect"}}
    assert measured_links(report(judged(silent)), "tiny") == ()


def test_a_measurement_makes_no_other_release(tmp_path: Path) -> None:
    facts = make_cluster(2, fabric_speed_mbit=10000)
    spec = make_spec(make_pipeline_spec(list(facts))).model_copy(update={"inventory_dir": tmp_path})
    models = {"tiny": make_source()}
    before = make_plan(spec, facts, models)
    kept = kept_file(tmp_path, "tiny")
    kept.parent.mkdir()
    kept.write_text(json.dumps(report(judged(rate=10000)).document()))
    after = make_plan(spec, facts, models)
    assert after.pipelines[0].outlook.links[0].measured_mbit == 953.0
    assert after.pipelines[0].outlook != before.pipelines[0].outlook
    assert after.pipelines[0].release == before.pipelines[0].release
    assert after.pipelines[0].nodes == before.pipelines[0].nodes


def test_the_play_judges_keeps_and_tells(tmp_path: Path) -> None:
    facts = make_cluster(2, fabric_speed_mbit=1000)
    model = tmp_path / "model"
    make_tiny_model(model)
    values = {"ppdeploy_model": str(model), "ppdeploy_device": "cpu", "ppdeploy_fabric_subnet": FABRIC}
    inventory = {
        "pipelines": {"tiny": ["node1", "node2"]},
        "hosts": ["node1", "node2"],
        "values": {f"node{n}": {**values, "ansible_host": f"198.18.0.1{n}"} for n in (1, 2)},
        "directory": str(tmp_path),
    }
    noted = {"node1": {"ppdeploy__net_pairs": [pair()]}, "node2": {}}
    raw = {host: one.model_dump(mode="json") for host, one in facts.items()}
    found = net_report_of_play(inventory, raw, noted, [], {"time": TIME, "seconds": 3})
    (one,) = found["report"]["pipelines"]
    assert one["verdict"] == "ready"
    assert one["sentence"].startswith("At 953 Mbit/s your network adds ")
    kept = found["kept"]["tiny"]
    assert kept["path"] == str(tmp_path.resolve() / ".ppdeploy" / "tiny-net.json")
    assert json.loads(kept["text"])["pipelines"][0]["pipeline"] == "tiny"


class Lazy(dict[str, Any]):
    """As Ansible's containers: the values are only there for who asks in Python's way, and pydantic does not."""

    def items(self) -> Any:
        return {name: report().document()[name] for name in self}.items()


def test_a_report_that_went_through_a_play_can_be_read() -> None:
    assert NetReport.model_validate(net_document(Lazy(dict.fromkeys(report().document())))) == report()


# ---- what is left alone


@pytest.mark.parametrize(
    ("rank", "runs"),
    [
        ({"processes": 3, "active": "active"}, True),
        ({"processes": 0, "active": "activating"}, True),
        ({"processes": 1, "active": "failed"}, True),
        ({"processes": 0, "active": "inactive"}, False),
        ({"processes": 0, "active": "failed"}, False),
        ({}, False),
    ],
)
def test_a_pipeline_of_which_a_rank_runs_is_left_alone(rank: dict[str, Any], runs: bool) -> None:
    own = {"pipeline": "tiny", "ppdeploy__seen": {"node": {"rank": rank}}}
    idle = {"pipeline": "tiny", "ppdeploy__seen": {"node": {"rank": {"processes": 0, "active": "inactive"}}}}
    found = net_running({"node1": idle, "node2": own})
    assert found == (["a rank of pipeline tiny runs on node2"] if runs else [])
