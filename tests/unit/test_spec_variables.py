"""Every variable: what it takes, what it refuses, and that a refusal says what to do."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.errors import InputError
from ppdeploy.spec import VARIABLES, PipelineSpec, known_variable_names, spec_from_values
from ppdeploy.spec.variables import HostVars, PipelineVars, Sidecar

MODEL = {"ppdeploy_model": "Qwen/Qwen3-32B"}


def build(**values: Any) -> PipelineSpec:
    """Return the spec of one pipeline of one host with these variables, given without their prefix."""
    own = MODEL | {f"ppdeploy_{name}": value for name, value in values.items()}
    return spec_from_values({"chat": ["a"]}, {"a": own}, inventory_dir=Path("cluster")).pipelines[0]


def field(name: str, value: Any) -> Any:
    """Return what the spec holds for a variable that was set to `value`."""
    pipeline = build(**{name: value})
    return getattr(pipeline.vars if name in PipelineVars.model_fields else pipeline.hosts[0].vars, name)


SIDECAR: dict[str, Any] = {"name": "draft", "model": "/srv/draft", "port": 8100, "gpu_share": 0.2}

GOOD: list[tuple[str, Any, Any]] = [
    ("model", "gpt2", "gpt2"),
    ("model", "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
    ("model", "../models/tiny", "../models/tiny"),
    ("model", "/srv/models/a b", "/srv/models/a b"),
    ("model", "https://mirror.example/models/tiny", "https://mirror.example/models/tiny"),
    ("model_on_nodes", False, False),
    ("model_revision", "refs/pr/7", "refs/pr/7"),
    ("served_model_name", "chat/fast-1", "chat/fast-1"),
    ("device", "cpu", "cpu"),
    ("tensor_parallel_size", 2, 2),
    ("tensor_parallel_size", "2", 2),
    ("pipeline_parallel_size", 3, 3),
    ("layer_partition", [17, 15], (17, 15)),
    ("layer_partition", "17,15", (17, 15)),
    ("max_model_len", 16384, 16384),
    ("kv_cache_gib", 0.5, 0.5),
    ("kv_cache_gib", "4", 4.0),
    ("fabric_allow_wireless", "yes", True),
    ("api_port", 1024, 1024),
    ("master_port", 65535, 65535),
    ("vllm_version", "0.33.0", "0.33.0"),
    ("vllm_version", "0.33.0rc1", "0.33.0rc1"),
    ("allow_untested_version", True, True),
    ("start_timeout", 600, 600),
    ("gang_failures", 1, 1),
    ("gang_window", 86400, 86400),
    ("gang_lease", 5, 5),
    ("nic_tuning", True, True),
    ("mtu", 9000, 9000),
    ("tcp_pacing", "bbr", "bbr"),
    ("gpu_persistence", True, True),
    ("cpu_governor", "performance", "performance"),
    ("transport", "rdma", "rdma"),
    # What YAML makes of a bare `off`.
    ("handoff", False, "off"),
    ("handoff", "lossless", "lossless"),
    ("handoff", "overlap:64", "overlap:64"),
    ("handoff", "fp8", "fp8"),
    ("handoff", "fp8:0", "fp8:0"),
    ("nvidia_driver", "distribution", "distribution"),
    ("nvidia_branch", 580, 580),
    ("nvidia_branch", "595", 595),
    ("allow_reboot", True, True),
    ("package_lock_timeout", 0, 0),
    ("nccl_debug", "INFO", "INFO"),
    ("weights", "full", "full"),
    ("index_url", "https://index.example/simple", "https://index.example/simple"),
    ("extra_index_url", "http://[2001:db8::1]:8080/simple", "http://[2001:db8::1]:8080/simple"),
    ("proxy", "http://proxy.example:3128", "http://proxy.example:3128"),
    ("no_proxy", ["index.example", ".Corp.Example", "192.0.2.7"], ("index.example", "corp.example", "192.0.2.7")),
    ("ca_bundle", "/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/certs/ca-certificates.crt"),
    ("vllm_extras", ["runai"], ("runai",)),
    ("system_packages", "bundle", "bundle"),
    ("wheelhouse", "../bundle", "../bundle"),
    ("uv_cache_dir", "/var/cache/ppdeploy/uv/", "/var/cache/ppdeploy/uv"),
    ("uv_link_mode", "clone", "clone"),
    ("models_dir", "/data/models", "/data/models"),
    ("hf_endpoint", "https://mirror.example", "https://mirror.example"),
    ("gateway", False, False),
    ("firewall", "nftables", "nftables"),
    ("fabric_encryption", "wireguard-go", "wireguard-go"),
    ("fabric_encryption_subnet", "172.20.0.0/24", IPv4Network("172.20.0.0/24")),
    ("monitoring_from", ["192.0.2.7/32"], (IPv4Network("192.0.2.7/32"),)),
    ("trust_remote_code", ["org/model", "./own"], ("org/model", "./own")),
    ("allow_pickle_weights", True, True),
    ("gateway_port", 443, 443),
    ("gateway_address", "192.0.2.11", "192.0.2.11"),
    ("gateway_peer_port", 9444, 9444),
    ("gateway_metrics_port", 9405, 9405),
    ("gateway_certificate", "/etc/ssl/private/chat.pem", "/etc/ssl/private/chat.pem"),
    ("gateway_names", ["chat.example", "198.51.100.7", "2001:db8::7"], ("chat.example", "198.51.100.7", "2001:db8::7")),
    ("gateway_rate", 1, 1),
    ("gateway_concurrency", 4000, 4000),
    ("gateway_balance", "prefix", "prefix"),
    ("gateway_queue", 0, 0),
    ("gateway_body_mib", 64, 64),
    ("gateway_timeout", 10, 10),
    ("gateway_drain", 86400, 86400),
    ("goal", "context", "context"),
    ("sidecars", [SIDECAR], (Sidecar(**SIDECAR),)),
    ("gpu_bandwidth_gbs", 936, 936.0),
    ("gpu_bf16_tflops", "71.5", 71.5),
    ("gpu_memory_utilization", 0.98, 0.98),
    ("gpu_memory_utilization", "0.9", 0.9),
    ("omp_threads_bind", "0-3|4-7", "0-3|4-7"),
    ("omp_threads_bind", 0, "0"),
    ("omp_threads_bind", "nobind", "nobind"),
    ("fabric_interface", "enp65s0f0np0", "enp65s0f0np0"),
    ("fabric_interface", "bond0.100", "bond0.100"),
]

BAD: list[tuple[str, Any, str]] = [
    ("model", "a b", "neither a Hugging Face id nor a path"),
    ("model", "a/b/c", "neither"),
    ("model", "https://huggingface.co/a/b", "named by their id alone"),
    ("model", "", "neither"),
    ("model", "~someone/model", "neither"),
    ("model", 5, "ppdeploy_model is 5"),
    ("model", "./a\nb", "line break"),
    ("model", "https://mirror.example", "an http or https address"),
    ("model", "https://someone:secret@mirror.example/tiny", "an http or https address"),
    ("model_on_nodes", "sometimes", "set it to true or false"),
    ("model_revision", "-x", "set it to a branch, tag or commit"),
    ("served_model_name", "two words", "set it to a name of letters"),
    ("device", "gpu", "set it to cuda or cpu"),
    ("device", "CUDA", "set it to cuda or cpu"),
    ("tensor_parallel_size", 0, "set it to a whole number from 1"),
    ("tensor_parallel_size", True, "yes/no"),
    ("tensor_parallel_size", 1.5, "whole number"),
    ("pipeline_parallel_size", -2, "whole number from 1"),
    ("layer_partition", [], "list of whole numbers"),
    ("layer_partition", [16, 0], "list of whole numbers"),
    ("layer_partition", "16;16", "list of whole numbers"),
    ("layer_partition", 32, "list of whole numbers"),
    ("max_model_len", "32k", "whole number from 1"),
    ("max_model_len", float("inf"), "not finite"),
    ("kv_cache_gib", 0, "number above 0"),
    ("kv_cache_gib", 10**30, "beyond 64 bits"),
    ("fabric_subnet", "192.0.2.1", "no prefix length"),
    ("fabric_subnet", "192.0.2.1/24", "host bits set; the network is 192.0.2.0/24"),
    ("fabric_subnet", "2001:db8::/64", "not an IPv4 network"),
    ("fabric_subnet", 24, "no prefix length"),
    ("fabric_allow_wireless", "perhaps", "set it to true or false"),
    ("api_port", 80, "set it to a port from 1024 to 65535"),
    ("api_port", "http", "port from 1024"),
    ("master_port", 65536, "port from 1024"),
    ("vllm_version", 0.33, "put it in quotes"),
    ("vllm_version", "latest", "not a version"),
    ("start_timeout", 1, "whole number of seconds"),
    ("gang_failures", 0, "whole number from 1 to 100"),
    ("gang_failures", 101, "whole number from 1 to 100"),
    ("gang_window", 59, "whole number of seconds"),
    ("gang_lease", 4, "whole number of seconds"),
    ("gang_lease", True, "whole number of seconds"),
    ("nic_tuning", "sometimes", "true or false"),
    ("mtu", 1279, "whole number from 1280 to 9216"),
    ("mtu", True, "whole number from 1280 to 9216"),
    ("tcp_pacing", "cubic", "fq or bbr"),
    ("gpu_persistence", 2, "true or false"),
    ("cpu_governor", "rm -rf", "such as performance"),
    ("transport", "ib", "socket or rdma"),
    ("handoff", True, "off, lossless, overlap, overlap:TOKENS, fp8 or fp8:TOKENS"),
    ("handoff", "int8", "off, lossless, overlap, overlap:TOKENS, fp8 or fp8:TOKENS"),
    ("handoff", "lossless:64", "off, lossless, overlap, overlap:TOKENS, fp8 or fp8:TOKENS"),
    ("handoff", "overlap:-1", "off, lossless, overlap, overlap:TOKENS, fp8 or fp8:TOKENS"),
    ("weights", "half", "stage or full"),
    ("nvidia_driver", "apt", "nvidia, distribution or none"),
    ("nvidia_branch", 570, "a branch from 580"),
    ("nvidia_branch", "580.95.05", "a branch from 580"),
    ("nvidia_repository", "file:///srv/cuda", "http or https address"),
    ("nvidia_repository_key", " ", "it is empty"),
    ("allow_reboot", "later", "true or false"),
    ("package_lock_timeout", -1, "whole number of seconds from 0"),
    ("package_lock_timeout", True, "whole number of seconds from 0"),
    ("nccl_debug", "info", "one of VERSION, WARN, INFO and TRACE"),
    ("index_url", "ftp://index.example/", "http or https address"),
    ("index_url", "https://", "http or https address"),
    ("index_url", "https://a b/", "http or https address"),
    ("index_url", "https://index.example:port/", "not an address"),
    ("extra_index_url", "https://me:hunter2@index.example/", "carries a user name or password"),
    ("proxy", "http://me:hunter2@proxy.example", "carries a user name or password"),
    ("no_proxy", "index.example", "list of host names"),
    ("no_proxy", ["192.0.2.0/24"], "nor an IP address; networks and addresses of pages are not read here"),
    ("no_proxy", ["index.example:8080"], "nor an IP address; leave the port off"),
    ("no_proxy", ["index.example", "*.corp"], 'has "*.corp" in entry 2, but it is neither a host name nor a domain'),
    ("no_proxy", ["*.corp.example"], "a domain stands for all its hosts without *"),
    ("no_proxy", ["*"], "neither a host name nor a domain"),
    ("ca_bundle", "ca.pem", "not an absolute path"),
    ("vllm_extras", ["tensorizer"], "list of fastsafetensors and runai"),
    ("vllm_extras", ["runai", "runai"], "names one twice"),
    ("system_packages", True, "archives, bundle or none"),
    ("wheelhouse", " ", "it is empty"),
    ("uv_cache_dir", "cache", "not an absolute path"),
    ("uv_cache_dir", "/data/a b", "not an absolute path"),
    ("uv_cache_dir", "/data/../etc/x", "not an absolute path"),
    ("uv_link_mode", "move", "copy, hardlink, symlink or clone"),
    ("models_dir", "/etc/models", "lies in /etc"),
    ("models_dir", "/home/me/models", "lies in /home"),
    ("models_dir", "/var", "name one inside it"),
    ("models_dir", "/", "not an absolute path"),
    ("hf_endpoint", "mirror.example", "http or https address"),
    ("gateway", "maybe", "true or false"),
    ("firewall", "ufw", "none or nftables"),
    ("fabric_encryption", "ipsec", "none, wireguard or wireguard-go"),
    ("fabric_encryption_subnet", "198.51.100.0/24", "not within 10.0.0.0/8"),
    ("fabric_encryption_subnet", "10.1.2.3/24", "host bits set; the network is 10.1.2.0/24"),
    ("monitoring_from", ["192.0.2.7"], "no prefix length"),
    ("trust_remote_code", True, "list of models"),
    ("allow_pickle_weights", "perhaps", "true or false"),
    ("gateway_port", 0, "port from 1 to 65535"),
    ("gateway_address", "eth0", "an IPv4 address, or *"),
    ("gateway_peer_port", 80, "port from 1024"),
    ("gateway_metrics_port", True, "port from 1024"),
    ("gateway_certificate", "certs/chat.pem", "not an absolute path"),
    ("gateway_certificate", "/etc/ssl/../shadow", "not an absolute path"),
    ("gateway_names", "chat.example", "list of host names"),
    ("gateway_names", ["*.example"], 'has "*.example" in entry 1, but it is neither a host name nor an IP address'),
    ("gateway_rate", 0, "from 1 to 1,000,000"),
    ("gateway_concurrency", 4001, "from 1 to 4000"),
    ("gateway_balance", "roundrobin", "leastconn or prefix"),
    ("gateway_queue", -1, "from 0 to 4000"),
    ("gateway_body_mib", 65, "from 1 to 64"),
    ("gateway_timeout", 9, "whole number of seconds"),
    ("gateway_drain", "2m", "whole number of seconds"),
    ("sidecars", {"name": "draft"}, "a list of maps such as"),
    ("sidecars", [{"name": "draft", "model": "/srv/draft", "port": 8100}], "has no gpu_share in entry 1 "),
    ("sidecars", [SIDECAR, {**SIDECAR, "gpu_share": 1}], "has 1 as gpu_share in entry 2 "),
    ("sidecars", [{**SIDECAR, "model": "Qwen/Qwen3-0.6B"}], 'has "Qwen/Qwen3-0.6B" as model in entry 1, but it is not'),
    ("sidecars", [{**SIDECAR, "devices": [0, 0]}], "has [0, 0] as devices in entry 1, but it names one twice"),
    ("sidecars", [{**SIDECAR, "gpus": 1}], 'has the unknown field "gpus" in entry 1 '),
    ("goal", "speed", "set it to throughput, context or latency"),
    ("gpu_bandwidth_gbs", 0, "in GB/s"),
    ("gpu_bf16_tflops", True, "in TFLOPS without sparsity"),
    ("gpu_memory_utilization", 0, "above 0 and at most 0.98"),
    ("gpu_memory_utilization", 0.99, "above 0 and at most 0.98"),
    ("gpu_memory_utilization", 90, "above 0 and at most 0.98"),
    ("gpu_memory_utilization", "90%", "above 0 and at most 0.98"),
    ("omp_threads_bind", "all", "auto, nobind"),
    ("omp_threads_bind", "0-", "auto, nobind"),
    ("fabric_interface", "a-name-of-16-char", "at most 15 characters"),
    ("fabric_interface", "=eth0", "at most 15 characters"),
    ("fabric_interface", "eth0\0", "control character U+0000"),
    ("vllm_args", "--seed 1", "it is not a map"),
    ("vllm_args", [{"seed": 1}], "it is not a map"),
    ("env", "A=1", "it is not a map"),
    ("hf_token", "", "not a usable value"),
]


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_a_good_value_is_taken_in_its_type(name: str, value: Any, expected: Any) -> None:
    taken = field(name, value)
    assert (taken, type(taken)) == (expected, type(expected))


@pytest.mark.parametrize(("name", "value", "reason"), BAD)
def test_a_bad_value_is_refused_with_its_name_its_place_and_what_to_set(name: str, value: Any, reason: str) -> None:
    with pytest.raises(InputError) as error:
        build(**{name: value})
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(f"ppdeploy_{name} ")
    assert reason in text
    assert "(pipeline chat" in text
    assert ": set it to " in text


def test_every_variable_has_a_good_and_a_bad_example_here() -> None:
    every = {name.removeprefix("ppdeploy_") for name in known_variable_names()}
    assert {name for name, _, _ in BAD} | {"wheelhouse_on_nodes", "allow_untested_version"} == every
    tested_elsewhere = {"wheelhouse_on_nodes", "vllm_args", "env", "hf_token", "fabric_subnet"}
    tested_elsewhere |= {"nvidia_repository", "nvidia_repository_key"}
    assert {name for name, _, _ in GOOD} | tested_elsewhere == every


@pytest.mark.parametrize("variable", VARIABLES.values(), ids=lambda variable: variable.field)
def test_a_variable_is_described_and_says_what_holds_without_it(variable: Any) -> None:
    assert variable.sentence.endswith(".")
    assert variable.must[0].islower()
    assert variable.default is not None or variable.unset
    assert (variable.scope == "host") == (variable.owner is HostVars)


def test_null_is_the_default() -> None:
    assert build(api_port=None, fabric_interface=None) == build()
    with pytest.raises(InputError, match=r"^ppdeploy_model is not set \(pipeline chat\): set it to "):
        build(model=None)


def test_a_subnet_is_a_network() -> None:
    assert str(build(fabric_subnet="198.18.1.0/24").vars.fabric_subnet) == "198.18.1.0/24"


def test_two_ports_are_distinct() -> None:
    with pytest.raises(InputError, match=r"both 29501 .*: give them two different ports"):
        build(api_port=29501)


def test_a_partition_has_one_number_for_each_stage() -> None:
    assert build(layer_partition=[17, 15], pipeline_parallel_size=2).vars.layer_partition == (17, 15)
    with pytest.raises(InputError, match=r"ppdeploy_layer_partition has 2 stages, and .* is 3"):
        build(layer_partition=[17, 15], pipeline_parallel_size=3)


def test_a_folder_has_no_revision() -> None:
    assert build(model_revision="main").vars.model_revision == "main"
    with pytest.raises(InputError, match=r"a folder, which has no revisions .*: remove ppdeploy_model_revision"):
        build(model="./tiny", model_revision="main")


def test_a_mirror_has_no_revision_and_a_mounted_folder_an_absolute_path() -> None:
    with pytest.raises(InputError, match="a folder, which has no revisions"):
        build(model="https://mirror.example/tiny", model_revision="main")
    assert build(model="/mnt/tiny", model_on_nodes=True).vars.model_on_nodes
    for model in ("./tiny", "org/tiny", "https://mirror.example/tiny"):
        with pytest.raises(InputError, match="without an absolute path in ppdeploy_model"):
            build(model=model, model_on_nodes=True)


@pytest.mark.parametrize("folder", [None, "../bundle"])
def test_a_wheelhouse_on_the_nodes_has_an_absolute_path(folder: str | None) -> None:
    assert build(wheelhouse="/mnt/bundle", wheelhouse_on_nodes=True).wheelhouse_path == Path("/mnt/bundle")
    with pytest.raises(InputError, match="without an absolute path in ppdeploy_wheelhouse"):
        build(wheelhouse=folder, wheelhouse_on_nodes=True)


def test_a_mirror_of_nvidias_repositories_has_a_key() -> None:
    both = build(nvidia_repository="https://mirror.example/cuda", nvidia_repository_key="./mirror.asc")
    assert both.nvidia_key_path == Path("cluster").absolute() / "mirror.asc"
    with pytest.raises(InputError, match=r"ppdeploy_nvidia_repository is set without .*: set .*_key too, or remove"):
        build(nvidia_repository="https://mirror.example/cuda")
    with pytest.raises(InputError, match=r"ppdeploy_nvidia_repository_key is set without .*: set .*_repository too"):
        build(nvidia_repository_key="./mirror.asc")


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(InputError) as error:
        build(index_url="https://me:hunter2@index.example/")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("token", ["", "x" * 600, ["hunter2"], {"token": "hunter2"}, "hunter2\n"])
def test_a_token_is_in_no_message(token: object) -> None:
    with pytest.raises(InputError) as error:
        build(hf_token=token)
    assert "ppdeploy_hf_token" in str(error.value)
    assert "hunter2" not in str(error.value)
    assert "xxx" not in str(error.value)


def test_a_token_is_in_no_spec() -> None:
    pipeline = build(hf_token="hunter2")
    assert pipeline.has_hf_token
    assert not build().has_hf_token
    assert "hunter2" not in pipeline.model_dump_json() + repr(pipeline)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12,
)
# Text that is near to something that a variable takes, where mistakes of a validator would hide.
NEAR = st.text(alphabet="0123456789./:-_|,~[]@%${}\\'\"= abhtps\n\0é\ud800", max_size=24)


def told_or_taken(name: str, value: Any) -> tuple[str, str]:
    """Return the error's text and the spec as JSON; one of them is empty. Any other exception is a failure."""
    try:
        spec = spec_from_values({"chat": ["a"]}, {"a": MODEL | {name: value}}, inventory_dir=Path("cluster"))
    except InputError as error:
        return str(error), ""
    return "", spec.model_dump_json()


@settings(max_examples=200)
@given(name=st.sampled_from(known_variable_names()), value=JSON | NEAR)
def test_any_json_for_any_variable_is_taken_or_told(name: str, value: Any) -> None:
    told, taken = told_or_taken(name, value)
    assert taken or name in told
    assert all(line.isprintable() for line in told.split("\n"))
    assert len(told) < 4000


@settings(max_examples=150)
@given(
    name=st.sampled_from(["ppdeploy_vllm_args", "ppdeploy_env"]),
    value=st.dictionaries(st.text(st.characters()) | st.text("abcdehlmnopst-_0", max_size=12), JSON, max_size=5),
)
def test_any_map_that_is_passed_on_is_taken_or_told(name: str, value: Any) -> None:
    told, taken = told_or_taken(name, value)
    assert taken or name in told
    # What is taken has to fit into one line of a file each.
    assert "\\n" not in taken
