"""What nodes measure of each other, as the play hands it to the judge: a healthy gigabit network unless a test says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ppdeploy.facts import NicAddress, Tunnelling
from ppdeploy.net import NetReport, PipelineNet, judge
from ppdeploy.plan import PipelinePlan
from ppdeploy.plan.tunnel import INTERFACE
from tests.factories import make_cluster
from tests.factories_plan import make_pipeline

FABRIC = "198.51.100.0/24"
"""Named, since the management NICs are gigabit too."""

TIME = "2026-11-30T03:40:12Z"


def encrypted(rate: int = 1000, *, up: bool = True) -> PipelinePlan:
    """A pipeline whose fabric goes through a tunnel, which is open on both nodes, or on the first alone."""
    facts = make_cluster(2, fabric_speed_mbit=rate)
    for number, (host, one) in enumerate(facts.items(), start=1):
        address = NicAddress(address=f"10.213.117.1{number}", prefix=24, scope="global")
        own = one.nics[1].model_copy(update={"name": INTERFACE, "kind": "wireguard", "addresses": (address,)})
        told = {"tunnel": Tunnelling(kernel=True, tun=True, public_key=f"{host}="), "nics": (*one.nics, own)}
        facts[host] = one.model_copy(update=told if up or number == 1 else {**told, "nics": one.nics})
    return make_pipeline(facts=facts, fabric_subnet=FABRIC, fabric_encryption="wireguard")


def planned(size: int = 2, rate: int = 1000, **wants: Any) -> PipelinePlan:
    """A pipeline whose NICs negotiated `rate` Mbit/s."""
    return make_pipeline(facts=make_cluster(size, fabric_speed_mbit=rate), fabric_subnet=FABRIC, **wants)


def run(mbit: float = 949.0, retransmits: int = 3) -> dict[str, Any]:
    return {"mbit": mbit, "bytes": int(mbit * 1e6 * 3 / 8), "seconds": 3.0, "retransmits": retransmits}


def pair(
    peer: str = "node2", *, trip: float = 0.0002, lost: int = 0, problem: str = "", **flows: Any
) -> dict[str, Any]:
    """What the client of a pair measured."""
    found = {"out_one": run(), "in_one": run(), "out_many": run(953.0), "in_many": run(953.0), **flows}
    ping = {"sent": 60, "lost": lost, "p50": trip, "p99": 2 * trip}
    return {"peer": peer, "ping": ping, "flows": found, "problem": problem}


def sizes(sender: str, receiver: str, mbit: float = 940.0, row: int = 16384) -> list[dict[str, Any]]:
    """What a handoff probe prints of one way."""
    return [
        {
            "sender": sender,
            "receiver": receiver,
            "tokens": tokens,
            "bytes": tokens * row,
            "count": 20,
            "p50": 0.0003 + 8 * tokens * row / mbit / 1e6,
            "p99": 0.001 + 8 * tokens * row / mbit / 1e6,
        }
        for tokens in (1, 1024, 8192)
    ]


def seen(pairs: Iterable[dict[str, Any]] = (), lines: Iterable[dict[str, Any]] = ()) -> dict[str, dict[str, Any]]:
    """What two nodes noted."""
    return {
        "node1": {"pairs": list(pairs), "probe": {"lines": list(lines), "problem": ""}, "iperf3": ""},
        "node2": {"pairs": [], "probe": {"lines": [], "problem": ""}, "iperf3": ""},
    }


def judged(*pairs: dict[str, Any], lines: Iterable[dict[str, Any]] = (), rate: int = 1000) -> PipelineNet:
    """The verdict on two nodes."""
    return judge(planned(rate=rate), seen(pairs or (pair(),), lines), (), 4)


def report(*pipelines: PipelineNet) -> NetReport:
    return NetReport(time=TIME, seconds=3, pipelines=pipelines or (judged(),))
