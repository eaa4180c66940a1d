"""The gateway of every head: which pipelines it knows, how it reaches them, and what it is told to refuse."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ppdeploy.errors import InputError
from ppdeploy.gateway_text import ERRORS, REFUSALS, error_body
from ppdeploy.plan import Plan
from ppdeploy.plan.gateway import CONFIG, MODELS_MAP, UNIT, gateway_ports, peer_name
from ppdeploy.plan.types import GatewayPlan
from ppdeploy.play import gateway_slice, make_plan
from ppdeploy.render import render_node
from ppdeploy.spec import PipelineSpec
from tests.factories import make_cluster
from tests.factories_plan import make_complete_plan, make_pipeline_spec, make_source, make_spec

ADDRESSES = {"node1": "192.0.2.11", "node2": "192.0.2.12"}


def addressed(spec: PipelineSpec) -> PipelineSpec:
    """Return the pipeline with IP addresses in ansible_host."""
    hosts = tuple(host.model_copy(update={"address": ADDRESSES.get(host.name, host.name)}) for host in spec.hosts)
    return spec.model_copy(update={"hosts": hosts})


def two_pipelines(
    *, one: dict[str, Any] | None = None, two: dict[str, Any] | None = None, other_model: bool = False, **both: Any
) -> Plan:
    """Return the plan of two pipelines of one host each; `both` are variables of both."""
    specs = [
        addressed(make_pipeline_spec(["node1"], "one", **both, **(one or {}))),
        addressed(make_pipeline_spec(["node2"], "two_b", **both, **(two or {}))),
    ]
    models = {"one": make_source(), "two_b": make_source(weight_bytes=8_500_000) if other_model else make_source()}
    return make_plan(make_spec(*specs), make_cluster(2), models)


def gateway(plan: Plan, host: str = "node1") -> GatewayPlan:
    """Return the gateway of a head."""
    found = plan.node(host)[1].gateway
    assert found
    return found


def test_a_head_guards_its_own_pipeline_on_loopback_and_a_worker_has_no_gateway() -> None:
    plan = make_complete_plan(max_model_len=512, vllm_args={"max-num-seqs": 48})
    found = gateway(plan)
    assert plan.node("node2")[1].gateway is None
    (model,) = found.models
    (server,) = model.servers
    assert (server.address, server.port, server.health_port, server.verify, server.most) == (
        "127.0.0.1",
        8000,
        29500,
        "",
        48,
    )
    assert model.names == ("tiny-llama",)
    assert found.peers is None
    assert not found.routes
    paths = {file.path for file in plan.node("node1")[1].files if file.part == "gateway"}
    assert paths == {UNIT, CONFIG}
    assert not [file for file in plan.node("node2")[1].files if file.part == "gateway"]


def test_a_certificate_is_good_for_every_name_of_the_head() -> None:
    names = gateway(make_complete_plan(gateway_names=["chat.example"])).names
    fabric = make_complete_plan().node("node1")[1].fabric.address
    assert names == ("node1", fabric, "chat.example", "localhost", "127.0.0.1")
    own = gateway(make_complete_plan(gateway_certificate="/etc/ssl/chat.pem"))
    assert (own.certificate, own.certificate_is_ours) == ("/etc/ssl/chat.pem", False)


def test_without_the_variable_there_is_none_and_the_release_never_depends_on_it() -> None:
    plain, other, off = (
        make_complete_plan(),
        make_complete_plan(gateway_rate=7, gateway_port=443),
        make_complete_plan(gateway=False),
    )
    assert off.node("node1")[1].gateway is None
    assert CONFIG not in render_node(off, "node1")
    assert len({plan.pipelines[0].release for plan in (plain, other, off)}) == 1


def test_two_pipelines_of_one_model_are_balanced_by_every_gateway() -> None:
    plan = two_pipelines(served_model_name="chat")
    for host, own, other in (("node1", "one", "two_b"), ("node2", "two_b", "one")):
        found = gateway(plan, host)
        assert not found.routes
        (model,) = found.models
        servers = {server.pipeline: server for server in model.servers}
        assert servers[own].address == "127.0.0.1"
        assert servers[own].verify == ""
        assert servers[other].port == servers[other].health_port == 8444
        assert servers[other].verify == peer_name(other)
        assert servers[other].address == ADDRESSES["node2" if host == "node1" else "node1"]
        assert found.peers
        assert (found.peer_name, found.peers.callers) == (peer_name(own), (peer_name(other),))
        assert found.peers.address == ADDRESSES[host]
        text = render_node(plan, host)[CONFIG]
        assert "use_backend" not in text
        assert "retry-on conn-failure 503" in text


def test_two_models_are_routed_by_name_with_their_adapters() -> None:
    adapters = ["law=/srv/adapters/law", '{"name": "med", "path": "/srv/adapters/med"}']
    plan = two_pipelines(
        one={"served_model_name": "org/small", "vllm_args": {"lora-modules": adapters}},
        two={"served_model_name": "large"},
        other_model=True,
    )
    found = gateway(plan)
    assert found.routes
    assert [model.names for model in found.models] == [("org/small", "law", "med"), ("large",)]
    files = render_node(plan, "node1")
    assert files[MODELS_MAP] == "org/small model1\nlaw model1\nmed model1\nlarge model2\n"
    listed = re.search(r"lf-string '(.*)' if \{ path /v1/models \}", files[CONFIG])
    assert listed
    document = json.loads(listed[1].replace("%[date]", "1"))
    assert [(one["id"], one["parent"]) for one in document["data"]] == [
        ("org/small", None),
        ("law", "org/small"),
        ("med", "org/small"),
        ("large", None),
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"served_model_name": "chat", "other_model": True}, "serve different models as chat"),
        (
            {"served_model_name": "chat", "one": {"vllm_args": {"lora-modules": ["law=/srv/law"]}}},
            "with different adapters",
        ),
        (
            {
                "one": {"served_model_name": "a", "vllm_args": {"lora-modules": ["b=/srv/b"]}},
                "two": {"served_model_name": "b"},
                "other_model": True,
            },
            "b is the name of two models, a and b",
        ),
        ({"one": {"vllm_args": {"lora-modules": ["two words=/srv/x"]}}}, "a name that the gateway cannot route by"),
    ],
)
def test_what_a_client_could_not_tell_apart_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        two_pipelines(**changes)
    both = {**changes, "gateway": False}
    assert gateway_free(two_pipelines(**both))


def gateway_free(plan: Plan) -> bool:
    return all(node.gateway is None for pipeline in plan.pipelines for node in pipeline.nodes)


def test_a_head_that_only_a_name_leads_to_is_refused_where_another_has_to_reach_it() -> None:
    specs = [make_pipeline_spec(["node1"], "one"), make_pipeline_spec(["node2"], "two")]
    with pytest.raises(InputError, match=r"ansible_host of node\d is a name"):
        make_plan(make_spec(*specs), make_cluster(2), {"one": make_source(), "two": make_source()})


def test_heads_on_one_fabric_meet_there() -> None:
    facts = make_cluster(4)
    specs = [make_pipeline_spec(["node1", "node2"], "one"), make_pipeline_spec(["node3", "node4"], "two")]
    plan = make_plan(make_spec(*specs), facts, {"one": make_source(), "two": make_source()})
    found = gateway(plan)
    assert found.peers
    assert found.peers.address == plan.node("node1")[1].fabric.address
    assert found.models[0].servers[1].address == plan.node("node3")[1].fabric.address
    assert plan.node("node3")[1].fabric.address in found.models[0].servers[1].address


def test_limits_are_printed_as_they_are_set() -> None:
    plan = make_complete_plan(
        gateway_address="192.0.2.11",
        gateway_port=443,
        gateway_rate=77,
        gateway_concurrency=5,
        gateway_queue=9,
        gateway_body_mib=2,
        gateway_timeout=99,
        gateway_drain=33,
        gateway_metrics_port=9999,
    )
    files = render_node(plan, "node1")
    for line in (
        "bind 192.0.2.11:443 ssl crt /etc/ppdeploy/gateway/certificate.pem alpn h2,http/1.1",
        "if { sc0_http_req_rate gt 77 }",
        "if { sc0_conn_cur gt 5 }",
        "if { queue(model1) ge 9 } !{ be_conn_free(model1) gt 0 }",
        f"if {{ req.body_size gt {2 << 20} }}",
        "timeout server 99s",
        "bind 127.0.0.1:9999",
    ):
        assert line in files[CONFIG], line
    assert "\nTimeoutStopSec=33\n" in files[UNIT]


def test_every_refusal_is_an_error_as_openai_writes_it() -> None:
    text = render_node(make_complete_plan(), "node1")[CONFIG]
    bodies = re.findall(r"status (\d+) content-type application/json string '([^']*)'", text)
    errors = [(int(status), json.loads(body)["error"]) for status, body in bodies if status != "200"]
    assert {status for status, _ in errors} >= {400, 401, 404, 405, 408, 411, 413, 429, 500, 502, 503, 504}
    for _, error in errors:
        assert set(error) == {"message", "type", "param", "code"}
    for words in (*REFUSALS.values(), *(error[:3] for error in ERRORS.values())):
        # What stands between single quotes in HAProxy's configuration must have none.
        assert "'" not in error_body(*words)
    for status in ("429", "503"):
        lines = [
            line
            for line in text.splitlines()
            if f"return status {status}" in line or f"http-error status {status}" in line
        ]
        assert lines
        assert all("hdr Retry-After " in line for line in lines)


def test_no_key_and_no_prompt_is_in_the_log_format() -> None:
    text = render_node(two_pipelines(), "node1")[CONFIG]
    formats = re.findall(r'log-format "(.*)"', text)
    assert len(formats) == 2
    for one in formats:
        assert not re.search(r"%\{?[+Q]*\}?(r|HU|HP|HQ|hr|hs)\b|req\.hdr\(auth|body|%tr\[", one)


def test_a_play_of_a_part_of_the_pipelines_leaves_gateways_alone() -> None:
    plan, facts = two_pipelines(), make_cluster(2)
    spec = make_spec(
        *(addressed(make_pipeline_spec([host], name)) for host, name in (("node1", "one"), ("node2", "b")))
    )
    node = plan.node("node1")[1]
    assert gateway_slice(spec, node, facts["node1"], whole=True)["needed"]
    assert not gateway_slice(spec, node, facts["node1"], whole=False)["needed"]
    off = two_pipelines(gateway=False).node("node1")[1]
    assert not gateway_slice(spec, off, facts["node1"], whole=True)["needed"]


def test_secrets_are_named_by_paths_on_the_controller_alone() -> None:
    plan, facts = two_pipelines(), make_cluster(2)
    spec = make_spec(addressed(make_pipeline_spec(["node1"], "one")))
    found = gateway_slice(spec, plan.node("node1")[1], facts["node1"], whole=True)
    assert [one["path"].rsplit("/", 1)[1] for one in found["certificates"]] == ["certificate.pem", "peer.pem", "ca.pem"]
    assert all("/.ppdeploy/gateway/" in one["src"] for one in found["certificates"])
    assert found["secrets"]["peer"] == [peer_name("one")]


def test_ports_are_named_with_their_variables() -> None:
    wants = make_pipeline_spec(["node1"]).vars
    assert gateway_ports(wants) == {
        8443: "ppdeploy_gateway_port",
        8444: "ppdeploy_gateway_peer_port",
        8405: "ppdeploy_gateway_metrics_port",
    }


def test_requests_that_begin_alike_go_to_one_of_several_pipelines_where_that_is_wanted() -> None:
    config = render_node(two_pipelines(gateway_balance="prefix"), "node1")["/etc/ppdeploy/gateway/haproxy.cfg"]
    (backend,) = re.findall(r"^backend model1\n(.*?)\n\n", config, re.MULTILINE | re.DOTALL)
    for line in ("balance hdr(x-ppdeploy-prefix)", "hash-type consistent sdbm avalanche", "hash-balance-factor 150"):
        assert f"    {line}\n" in backend
    assert "json_query('$.messages[1].content')" in backend
    assert "leastconn" not in backend
    # With one pipeline there is nothing to choose.
    alone = render_node(make_complete_plan(gateway_balance="prefix"), "node1")["/etc/ppdeploy/gateway/haproxy.cfg"]
    assert "balance leastconn" in alone
    assert "prefix" not in alone
