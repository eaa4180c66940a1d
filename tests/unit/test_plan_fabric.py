"""The NIC that the ranks talk on: chosen by shared subnet and speed, never by the default route, and said why."""

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.errors import BlockedError
from ppdeploy.facts import NodeFacts
from ppdeploy.plan.fabric import Wish, choose_fabric
from ppdeploy.plan.types import Fabric
from tests.factories import make_cluster, make_facts, make_nic


def choose(facts: dict[str, NodeFacts], **changes: Any) -> dict[str, Fabric]:
    wants: dict[str, Any] = {"pipeline": "qwen", "hosts": list(facts), "facts": facts, "wishes": {}}
    return choose_fabric(**{**wants, **changes})


def test_the_faster_of_two_shared_subnets_wins_over_the_default_route() -> None:
    chosen = choose(make_cluster(2))
    assert [(f.interface, f.address) for f in chosen.values()] == [
        ("enp1s0", "198.51.100.11"),
        ("enp1s0", "198.51.100.12"),
    ]
    assert "fastest shared wired subnet, 10000 Mbit/s" in chosen["node1"].reason


def test_a_subnet_is_as_fast_as_its_slowest_nic() -> None:
    facts = make_cluster(2, management_speed_mbit=2500)
    facts["node2"] = make_facts("node2", number=2, management_speed_mbit=2500, fabric_speed_mbit=1000)
    assert choose(facts)["node1"].interface == "eno1"


def test_equal_speeds_are_not_guessed() -> None:
    with pytest.raises(BlockedError, match=r"share 2 subnets of the same speed.*ppdeploy_fabric_subnet: 1"):
        choose(make_cluster(2, management_speed_mbit=10000))


def test_the_named_subnet_decides() -> None:
    chosen = choose(make_cluster(2, management_speed_mbit=10000), subnet="192.0.2.0/24")
    assert {f.interface for f in chosen.values()} == {"eno1"}


def test_nic_names_may_differ_from_host_to_host() -> None:
    facts = make_cluster(2)
    facts["node2"] = make_facts("node2", number=2, fabric_name="ens5f1")
    assert [f.interface for f in choose(facts).values()] == ["enp1s0", "ens5f1"]


def test_no_shared_subnet_lists_what_each_host_has() -> None:
    facts = {
        "node1": make_facts("node1", number=1),
        "node2": make_facts("node2", number=2, management="203.0.113.5/24", fabric="203.0.113.130/25"),
    }
    with pytest.raises(BlockedError, match=r"share no subnet.*node1 has eno1 192.0.2.11/24.*node2 has eno1 203"):
        choose(facts)


def test_software_bridges_never_count() -> None:
    docker = make_nic("docker0", "203.0.113.1/24", kind="bridge", speed_mbit=100000)
    assert choose(make_cluster(2, extra_nics=[docker]))["node1"].interface == "enp1s0"


def test_wireless_only_when_asked() -> None:
    def nics(number: int) -> list[Any]:
        return [make_nic("wlan0", f"192.0.2.{number}/24", wireless=True)]

    facts = {f"node{n}": make_facts(f"node{n}", number=n, nics=nics(n)) for n in (1, 2)}
    with pytest.raises(BlockedError, match="ppdeploy_fabric_allow_wireless"):
        choose(facts)
    assert choose(facts, allow_wireless=True)["node1"].interface == "wlan0"


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("enp9s0", r"no interface enp9s0 \(host node2.*choose one of eno1, enp1s0"),
        ("eno2", "interface eno2 is down"),
        ("eno3", "no IPv4 address"),
    ],
)
def test_a_named_interface_must_be_there(wish: str, words: str) -> None:
    facts = make_cluster(2)
    extra = [make_nic("eno2", "203.0.113.7/24", up=False), make_nic("eno3")]
    facts["node2"] = make_facts("node2", number=2, extra_nics=extra)
    with pytest.raises(BlockedError, match=words):
        choose(facts, wishes={"node2": Wish(interface=wish)})


def test_the_fabric_address_must_be_on_the_host() -> None:
    facts = make_cluster(2)
    facts["node2"] = make_facts("node2", number=2, fabric="203.0.113.12/24")
    with pytest.raises(BlockedError, match=r"no usable NIC has an address in the fabric subnet.*host node2"):
        choose(facts, subnet="198.51.100.0/24")


def test_one_address_on_two_hosts_is_refused_with_both_names() -> None:
    facts = make_cluster(2)
    facts["node2"] = make_facts("node2", number=2, fabric="198.51.100.11/24")
    with pytest.raises(BlockedError, match=r"node1 and node2 both have the address 198.51.100.11"):
        choose(facts, subnet="198.51.100.0/24")


def test_one_node_stays_on_loopback() -> None:
    assert choose(make_cluster(1))["node1"].address == "127.0.0.1"
