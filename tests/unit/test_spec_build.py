"""From an inventory's values to the spec: structure, scope, addresses, and all mistakes told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.errors import InputError
from ppdeploy.spec import Spec, example_problems, spec_from_values

MODEL = {"ppdeploy_model": "Qwen/Qwen3-32B"}


def build(pipelines: dict[str, list[str]], values: dict[str, dict[str, Any]] | None = None, **more: Any) -> Spec:
    """Return the spec of these pipelines; every host has a model unless `values` says otherwise."""
    every = {host: dict(MODEL) for hosts in pipelines.values() for host in hosts}
    for host, own in (values or {}).items():
        every[host] = every.get(host, {}) | own
    return spec_from_values(pipelines, every, inventory_dir=Path("/srv/inventory/mine"), **more)


def refusal(*args: Any, **more: Any) -> list[str]:
    with pytest.raises(InputError) as error:
        build(*args, **more)
    assert error.value.exit_code == 2
    return str(error.value).split("\n")


def test_hosts_are_in_rank_order_and_the_cluster_has_the_folders_name() -> None:
    spec = build({"chat": ["n9", "n1", "n5"], "code": ["m1"]}, addresses={"n9": "198.18.0.19"})
    assert spec.cluster == "mine"
    assert spec.inventory_dir == Path("/srv/inventory/mine")
    assert [[host.name for host in pipeline.hosts] for pipeline in spec.pipelines] == [["n9", "n1", "n5"], ["m1"]]
    assert [host.address for host in spec.pipelines[0].hosts] == ["198.18.0.19", "n1", "n5"]
    assert spec.pipeline("code") is spec.pipelines[1]
    with pytest.raises(KeyError):
        spec.pipeline("other")


def test_a_spec_is_the_same_for_equal_input_and_cannot_be_changed() -> None:
    one, two = (build({"chat": ["a", "b"]}) for _ in range(2))
    assert one == two
    with pytest.raises(ValueError, match="frozen"):
        one.cluster = "other"  # type: ignore[misc]


def test_paths_of_the_inventory_start_at_its_folder() -> None:
    values = {"a": {"ppdeploy_model": "../../models/x", "ppdeploy_wheelhouse": "bundle"}}
    pipeline = build({"chat": ["a"]}, values).pipelines[0]
    assert pipeline.model_is_local
    assert pipeline.model_path == Path("/srv/models/x")
    assert pipeline.wheelhouse_path == Path("/srv/inventory/mine/bundle")
    home = build({"chat": ["a"]}, {"a": {"ppdeploy_model": "~/models/x"}}).pipelines[0]
    assert home.model_path == Path.home() / "models/x"
    assert build({"chat": ["a"]}).pipelines[0].model_path is None


def test_a_host_may_have_its_own_memory_fraction_cores_and_nic() -> None:
    own = {"ppdeploy_gpu_memory_utilization": 0.8, "ppdeploy_fabric_interface": "eth1", "ppdeploy_omp_threads_bind": 1}
    hosts = build({"chat": ["a", "b"]}, {"b": own}).pipelines[0].hosts
    assert hosts[0].vars.model_dump(exclude_defaults=True) == {}
    assert hosts[1].vars.model_dump(exclude_defaults=True) == {
        name.removeprefix("ppdeploy_"): v for name, v in own.items()
    } | {"omp_threads_bind": "1"}


def test_a_value_of_the_pipeline_cannot_differ_between_its_hosts() -> None:
    assert refusal({"chat": ["a", "b", "c"]}, {"a": {"ppdeploy_max_model_len": 4096}}) == [
        (
            "ppdeploy_max_model_len differs between the hosts of pipeline chat: 4096 on a; not set on b, c: "
            "set it once, in the vars of the group chat"
        )
    ]


def test_a_value_of_the_pipeline_may_differ_between_pipelines() -> None:
    spec = build({"chat": ["a"], "code": ["b"]}, {"a": {"ppdeploy_api_port": 8001}, "b": {"ppdeploy_api_port": 8002}})
    assert [pipeline.vars.api_port for pipeline in spec.pipelines] == [8001, 8002]


def test_a_value_of_the_cluster_cannot_differ_between_pipelines() -> None:
    lines = refusal({"chat": ["a"], "code": ["b"]}, {"b": {"ppdeploy_hf_endpoint": "https://mirror.example"}})
    assert lines == [
        (
            "ppdeploy_hf_endpoint differs between the hosts of the cluster: not set on a; "
            '"https://mirror.example" on b: set it once, in the vars of the group vllm'
        )
    ]
    both = {host: {"ppdeploy_hf_endpoint": "https://mirror.example"} for host in "ab"}
    endpoints = [p.vars.hf_endpoint for p in build({"chat": ["a"], "code": ["b"]}, both).pipelines]
    assert endpoints == ["https://mirror.example"] * 2


def test_a_secret_that_differs_is_not_shown() -> None:
    lines = refusal(
        {"chat": ["a", "b"]}, {"a": {"ppdeploy_hf_token": "hunter2"}, "b": {"ppdeploy_hf_token": "rosebud"}}
    )
    assert len(lines) == 1
    assert lines[0].startswith("ppdeploy_hf_token differs")
    assert "hunter2" not in lines[0]
    assert "rosebud" not in lines[0]


def test_a_misspelt_name_is_told_with_the_nearest_known_one() -> None:
    assert refusal({"chat": ["a", "b"]}, {host: {"ppdeploy_max_model_length": 1} for host in "ab"}) == [
        "the variable ppdeploy_max_model_length is not known (hosts a, b): write ppdeploy_max_model_len"
    ]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ppdeploy_apiport", "ppdeploy_api_port"),
        ("ppdeploy_gpu_memory_utilisation", "ppdeploy_gpu_memory_utilization"),
        ("ppdeploy_Model", "ppdeploy_model"),
        ("ppdeploy_vllm_arg", "ppdeploy_vllm_args"),
        ("ppdeploy-model", "ppdeploy_model"),
        ("ppdeply_max_model_len", "ppdeploy_max_model_len"),
        ("pp_deploy_layer_partition", "ppdeploy_layer_partition"),
    ],
)
def test_misspellings_of_the_prefix_are_seen_too(name: str, nearest: str) -> None:
    assert refusal({"chat": ["a"]}, {"a": {name: 1}})[0].endswith(f": write {nearest}")


def test_a_name_like_no_other_is_told_without_a_guess() -> None:
    lines = refusal({"chat": ["a"]}, {"a": {"ppdeploy_xyzzy": 1}})
    assert lines == [
        "the variable ppdeploy_xyzzy is not known (host a): remove it; docs/variables.md lists the known ones"
    ]


def test_variables_of_others_are_let_through() -> None:
    others = {"ansible_user": "root", "pp_colour": 1, "model": "x", "rack": "r1"}
    assert build({"chat": ["a"]}, {"a": others}) == build({"chat": ["a"]})


@pytest.mark.parametrize("name", ["Chat", "my-chat", "1st", "x" * 32, "ä", "a/b", ""])
def test_a_pipeline_has_a_name_that_units_and_folders_can_have(name: str) -> None:
    assert "is no name for a pipeline" in refusal({name: ["a"]})[0]


@pytest.mark.parametrize("name", ["bin", "venvs", "models", "all", "vllm"])
def test_a_pipeline_is_not_named_like_a_folder_of_ours(name: str) -> None:
    assert refusal({name: ["a"]})[0].startswith(f"a pipeline cannot be named {name}, which ppdeploy uses itself")


@pytest.mark.parametrize("host", ["a/b", "../a", "a b", "-a", ""])
def test_a_host_has_a_name_that_a_folder_can_have(host: str) -> None:
    assert "is no name for a host (pipeline chat)" in refusal({"chat": [host]})[0]


def test_no_pipeline_an_empty_one_and_a_host_in_two_are_refused() -> None:
    assert "no pipeline is defined (group vllm)" in refusal({})[0]
    assert 'the pipeline has no hosts (group "chat")' in refusal({"chat": []})[0]
    assert refusal({"chat": ["a", "b"], "code": ["b"]}) == [
        "the host is in 2 pipelines: chat, code (host b): leave it in one; a host serves one pipeline"
    ]


def test_a_pipeline_of_one_host_is_allowed() -> None:
    assert len(build({"chat": ["a"]}).pipelines[0].hosts) == 1


def test_two_hosts_cannot_have_one_address() -> None:
    pipelines = {"chat": ["a", "b"], "code": ["c"]}
    same = {"a": "198.18.0.11", "c": "198.18.0.11"}
    assert refusal(pipelines, addresses=same) == [
        "2 hosts have one address, 198.18.0.11 (hosts a, c): give each host its own ansible_host"
    ]
    assert "one address, a " in refusal(pipelines, addresses={"b": "A"})[0]
    forwarded = build(pipelines, addresses=same, ssh_ports={"a": 22, "c": 2222})
    assert [p.hosts[0].address for p in forwarded.pipelines] == ["198.18.0.11"] * 2
    assert refusal(pipelines, addresses=same, ssh_ports={"a": "22"})


@pytest.mark.parametrize("address", [5, ["198.18.0.11"], "two words", "", "198.18.0.0/24"])
def test_an_address_is_a_name_or_an_address(address: object) -> None:
    assert (
        "which is no address (host a): set it to the host's name"
        in refusal({"chat": ["a"]}, addresses={"a": address})[0]
    )


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("root@198.18.0.11", "write ansible_host: 198.18.0.11 and ansible_user: root"),
        ("gpu-1:2222", "write ansible_host: gpu-1 and ansible_port: 2222"),
        ("me@gpu-1:22", "write ansible_host: gpu-1 and ansible_user: me and ansible_port: 22"),
    ],
)
def test_an_address_with_account_or_port_is_told_in_lines_of_their_own(address: str, remedy: str) -> None:
    (told,) = refusal({"chat": ["a"]}, addresses={"a": address})
    assert told == f'ansible_host is "{address}", which is more than an address (host a): {remedy}'


@pytest.mark.parametrize("address", ["fd00::11", "::1", "gpu-1.lan", "{{where}}:22"])
def test_other_addresses_are_taken_as_they_are(address: str) -> None:
    assert build({"chat": ["a"]}, addresses={"a": address}).pipelines[0].hosts[0].address == address


def test_all_mistakes_are_told_at_once_each_in_its_line() -> None:
    lines = refusal(
        {"chat": ["a", "b"], "code": ["c"]},
        {
            "a": {"ppdeploy_api_port": 80, "ppdeploy_gpu_memory_utilization": 2},
            "b": {"ppdeploy_api_port": 80, "ppdeploy_env": {"x y": 1}},
            "c": {"ppdeploy_model": None, "ppdeploy_fabric_interface": "a\nb"},
        },
        addresses={"a": "198.18.0.11", "b": "198.18.0.11"},
    )
    assert [line.split(" ", 1)[0] for line in lines] == [
        "2",
        "ppdeploy_env",
        "ppdeploy_api_port",
        "ppdeploy_gpu_memory_utilization",
        "ppdeploy_fabric_interface",
    ]
    assert "(host a)" in lines[3]
    assert "(pipeline chat)" in lines[2]


def test_places_are_named_where_they_are_known() -> None:
    lines = refusal({"chat": ["a"]}, {"a": {"ppdeploy_api_port": 80}}, locate=lambda name: f"hosts.yml:7 {name}")
    assert "(pipeline chat, hosts.yml:7 ppdeploy_api_port)" in lines[0]


def test_a_pending_value_is_marked_and_not_checked() -> None:
    pending = {"a": frozenset({"ppdeploy_model", "ppdeploy_api_port", "ppdeploy_hf_token"}), "b": frozenset[str]()}
    values: dict[str, dict[str, Any]] = {"a": {}, "b": {"ppdeploy_api_port": 29501, "ppdeploy_model": "x y"}}
    pipeline = spec_from_values({"chat": ["a", "b"]}, values, inventory_dir=Path("c"), pending=pending).pipelines[0]
    assert pipeline.pending == ("ppdeploy_model", "ppdeploy_api_port", "ppdeploy_hf_token")
    assert pipeline.has_hf_token
    assert pipeline.model_path is None
    with pytest.raises(InputError, match="ppdeploy_max_model_len is 0"):
        spec_from_values(
            {"chat": ["a"]}, {"a": {"ppdeploy_max_model_len": 0}}, inventory_dir=Path("c"), pending=pending
        )


class Tagged(str):
    """Stands for Ansible's tagged text."""

    __slots__ = ()


def test_ansibles_own_kinds_of_text_become_plain() -> None:
    args = {Tagged("max-num-seqs"): 8, "hf-overrides": {"a": [Tagged("b")]}}
    vars_ = (
        build({"chat": ["a"]}, {"a": {"ppdeploy_vllm_args": args, "ppdeploy_model": Tagged("gpt2")}}).pipelines[0].vars
    )
    assert type(vars_.model) is str
    assert {type(key) for key in vars_.vllm_args} == {str}
    assert type(vars_.vllm_args["hf-overrides"]["a"][0]) is str  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    "address", ["192.0.2.11", "198.51.100.1", "203.0.113.9", "gpu-1.example", "a.example.com", "x.invalid"]
)
def test_an_address_of_the_example_is_told(address: str) -> None:
    (problem,) = example_problems({"a": "198.18.0.11", "b": address}, lambda name: f"hosts.yml:3 {name}")
    assert address in problem.what
    assert problem.where == "host b, hosts.yml:3 ansible_host"
    assert "ppdeploy init" in str(problem.remedy)


def test_a_real_address_is_none_of_the_example() -> None:
    real = {"a": "198.18.0.11", "b": "10.0.0.1", "c": "box", "d": "example-box", "e": "fd00::1", "f": 5}
    assert example_problems(real) == []


NAMES = st.text("ab_/.-\nA1é", max_size=4)
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.lists(st.integers(), max_size=2)


@settings(max_examples=150)
@given(
    pipelines=st.dictionaries(NAMES, st.lists(NAMES, max_size=3), max_size=3),
    variables=st.dictionaries(st.sampled_from(["ppdeploy_model", "ppdeploy_api_port", "ppdeploy_x", "x"]), VALUES),
    addresses=st.dictionaries(NAMES, VALUES, max_size=3),
)
def test_any_structure_is_taken_or_told(
    pipelines: dict[str, list[str]], variables: dict[str, Any], addresses: dict[str, Any]
) -> None:
    values = {host: variables for hosts in pipelines.values() for host in hosts}
    try:
        spec = spec_from_values(pipelines, values, inventory_dir=Path("c"), addresses=addresses, ssh_ports=addresses)
    except InputError as error:
        text = str(error)
    else:
        text = ""
        assert [[host.name for host in p.hosts] for p in spec.pipelines] == list(pipelines.values())
    assert all(line.isprintable() for line in text.split("\n"))


def test_the_group_gateway_is_checked_with_all_else() -> None:
    assert build({"chat": ["a"]}, gateways=["door"]).outside[0].address == "door"
    (off,) = refusal({"chat": ["a"]}, {"a": {"ppdeploy_gateway": False}}, gateways=["door", "a"])
    assert off == (
        "ppdeploy_gateway is false, and the group `gateway` has door, a (group gateway): take the hosts out of the "
        "group, and leave them in the inventory for one apply, which removes their gateways; or set "
        "ppdeploy_gateway: true"
    )
    assert refusal({"chat": ["a"]}, addresses={"a": "198.18.0.1", "door": "198.18.0.1"}, gateways=["door"]) == [
        "2 hosts have one address, 198.18.0.1 (hosts a, door): give each host its own ansible_host"
    ]
    assert refusal({"chat": ["a"]}, addresses={"door": "two words"}, gateways=["door"]) == [
        'ansible_host is "two words", which is no address (host door): set it to the host\'s name or IP address'
    ]
    assert refusal({"chat": ["a"]}, gateways=["../door"])[0].startswith('"../door" is no name for a host (group gate')


def test_a_gateway_has_the_values_of_the_group_vllm_alone() -> None:
    other = {"a": {"ppdeploy_gateway_port": 443}, "door": {"ppdeploy_gateway_port": 444, "ppdeploy_mtu": 9000}}
    (two,) = refusal({"chat": ["a"]}, other, gateways=["door"])
    assert two == (
        "ppdeploy_gateway_port is 444 on door, and 443 for the group vllm (group gateway): set it once, in the vars of "
        "the group vllm, whose values all gateways have"
    )
    alone = refusal({"chat": ["a"]}, {"door": {"ppdeploy_gateway_rate": 5}}, gateways=["door"])
    assert alone[0].startswith("ppdeploy_gateway_rate is 5 on door, and not set for the group vllm")
    same = {host: {"ppdeploy_gateway_port": 443} for host in ("a", "door")}
    assert build({"chat": ["a"]}, same, gateways=["door"]).gateways[0].name == "door"


def test_a_sidecar_leaves_the_ports_of_a_workers_gateway_alone() -> None:
    sidecar = {"name": "draft", "model": "/srv/models/draft", "port": 8443, "gpu_share": 0.2}
    own = {"b": {"ppdeploy_sidecars": [sidecar]}}
    assert build({"chat": ["a", "b"]}, own).pipelines[0].hosts[1].vars.sidecars
    (sentence,) = refusal({"chat": ["a", "b"]}, own, gateways=["b"])
    assert sentence.startswith("sidecar draft and ppdeploy_gateway_port have the same port 8443 (host b")
