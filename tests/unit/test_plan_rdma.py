"""RDMA between ranks: only where it is asked for, of the fabric NIC, and never given up in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import Gid, NodeFacts, RdmaDevice
from ppdeploy.plan.types import PipelinePlan
from ppdeploy.spec import spec_from_values
from tests.factories import make_cluster, make_facts
from tests.factories_plan import make_pipeline


def gid(index: int, last: str, kind: str = "RoCE v2", interface: str = "enp1s0") -> Gid:
    """An IPv4 address of 198.51.100.0/24, whose last byte is given in hex, as the kernel writes it."""
    return Gid(index=index, address=f"0000:0000:0000:0000:0000:ffff:c633:64{last}", kind=kind, interface=interface)


def device(*gids: Gid, **changes: Any) -> RdmaDevice:
    known = {"name": "mlx5_0", "link_layer": "Ethernet", "state": "ACTIVE", "interfaces": ("enp1s0",), "gids": gids}
    return RdmaDevice.model_validate({**known, **changes})


ONE = device(gid(2, "0b", "IB/RoCE v1"), gid(3, "0b"))
#: The same address is also on a VLAN of the NIC, and the table has another order.
TWO = device(gid(1, "0c", interface="enp1s0.7"), gid(4, "63"), gid(5, "0c"), name="rocep1s0")
LIBRARY = "/usr/lib/x86_64-linux-gnu/libibverbs.so.1"


def cluster(one: RdmaDevice = ONE, two: RdmaDevice = TWO, **changes: Any) -> dict[str, NodeFacts]:
    more = {"gpus": 1, "verbs_library": LIBRARY, **changes}
    return {
        "node1": make_facts("node1", number=1, rdma_devices=(one,), **more),
        "node2": make_facts("node2", number=2, rdma_devices=(two,), **more),
    }


def planned(facts: dict[str, NodeFacts], transport: str = "rdma", **values: Any) -> PipelinePlan:
    return make_pipeline(facts=facts, transport=transport, device="cuda", **values)


def test_nothing_uses_it_until_it_is_asked_for() -> None:
    for node in planned(cluster(), "socket").nodes:
        assert node.rdma is None
        assert {name for name in node.nccl_env if name.startswith("NCCL_IB")} == {"NCCL_IB_DISABLE"}
        assert node.nccl_env["NCCL_IB_DISABLE"] == "1"


def test_every_node_gets_its_own_device_and_the_gid_of_its_fabric_address() -> None:
    nodes = planned(cluster(fabric_speed_mbit=100_000)).nodes
    told = [{name: node.nccl_env[name] for name in ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX")} for node in nodes]
    assert told == [
        {"NCCL_IB_HCA": "=mlx5_0:1", "NCCL_IB_GID_INDEX": "3"},
        {"NCCL_IB_HCA": "=rocep1s0:1", "NCCL_IB_GID_INDEX": "5"},
    ]
    for node in nodes:
        # It fails rather than going by TCP; no threads for sockets that carry nothing.
        assert (node.nccl_env["NCCL_NET"], node.nccl_env["NCCL_IB_DISABLE"]) == ("IB", "0")
        assert "NCCL_SOCKET_NTHREADS" not in node.nccl_env
        # What NCCL and gloo agree on first goes by TCP.
        assert node.nccl_env["NCCL_SOCKET_IFNAME"] == "=enp1s0"


def test_infiniband_has_no_gid_to_choose() -> None:
    ports = [device(name=name, link_layer="InfiniBand") for name in ("mlx5_0", "mlx5_1")]
    for node in planned(cluster(*ports)).nodes:
        assert "NCCL_IB_GID_INDEX" not in node.nccl_env
        assert node.nccl_env["NCCL_NET"] == "IB"


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (make_cluster(2, gpus=1), "node1: enp1s0 is no port of an RDMA device; node2: enp1s0 is no port"),
        (cluster(two=device(interfaces=("ens9",))), r"node2: enp1s0 is no port of an RDMA device \(mlx5_0 is of other"),
        (cluster(one=device(gid(3, "0b"), state="DOWN")), "node1: the port of mlx5_0 is DOWN, not ACTIVE"),
        (cluster(verbs_library=None), "node1: libibverbs.so.1 is not installed .*apt-get install libibverbs1"),
        (cluster(one=device(gid(2, "0b", "IB/RoCE v1"))), "no GID of type RoCE v2 for 198.51.100.11 of enp1s0"),
        (cluster(one=device(link_layer="InfiniBand")), "both InfiniBand and RoCE"),
    ],
)
def test_a_node_that_has_it_not_is_named(facts: dict[str, NodeFacts], said: str) -> None:
    with pytest.raises(BlockedError, match=said) as caught:
        planned(facts)
    assert "ppdeploy_transport" in str(caught.value)


def test_one_node_needs_none() -> None:
    (node,) = planned({"node1": make_facts("node1", gpus=1)}).nodes
    assert node.nccl_env["NCCL_IB_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"ppdeploy_transport": "rdma", "ppdeploy_device": "cpu"}, "ranks on CPUs talk through gloo"),
        ({"ppdeploy_transport": "ib"}, 'ppdeploy_transport is "ib" .*set it to socket or rdma'),
        *(
            ({"ppdeploy_env": {name: "1"}}, f"{name}(.|\n)*set ppdeploy_transport")
            for name in ("NCCL_NET", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX")
        ),
    ],
)
def test_what_cannot_be_is_refused_before_any_host_is_asked(values: dict[str, Any], said: str) -> None:
    everything = {host: {"ppdeploy_model": "org/model", **values} for host in ("node1", "node2")}
    with pytest.raises(InputError, match=said):
        spec_from_values({"tiny": ["node1", "node2"]}, everything, inventory_dir=Path("inventory"))
