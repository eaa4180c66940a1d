"""Healthy situations for tests of the checks: change one thing, the rest stays true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ppdeploy.facts import ModelFolder, NicCounters, NodeFacts, PipelineState, UnitState, Venv
from ppdeploy.plan.checks import NodeSituation, PairSituation, PipelineSituation
from ppdeploy.plan.driver import plan_driver
from ppdeploy.plan.types import Fabric
from ppdeploy.probes import ClockDifference, Connect, DiskSpeed, Listener, NodeProbe, PeerProbe, Ping, Route
from ppdeploy.spec import PipelineVars
from tests.factories import make_facts, make_installation

GIB = 1024**3
UNIT = "ppdeploy-rank@chat.service"
VENV = "0123456789abcdef"
RECEIVED = 1_800_000_001.0
"""When the controller has the facts of `make_facts`, by its own clock."""
QUIET = NicCounters(rx_errors=0, rx_crc_errors=0, rx_dropped=0, tx_errors=0, tx_dropped=0, collisions=0)


def mac(number: int, index: int = 3) -> str:
    """Return the MAC address of a NIC of host `number`; index 3 is the fabric's."""
    return f"02:00:5e:00:{number:02x}:{index:02x}"


def facts_of(number: int = 1, **changes: Any) -> NodeFacts:
    """Return the facts of host `number` with two GPUs, all that the checks ask for being known and right."""
    facts = make_facts(f"node{number}", number=number, gpus=2, **changes)
    nics = tuple(
        nic.model_copy(
            update={"mac": mac(number, nic.index), "max_speed_mbit": nic.speed_mbit, "eee": False, "carrier_changes": 2}
        )
        if nic.name != "lo"
        else nic
        for nic in facts.nics
    )
    known = {
        "nics": nics,
        "memory": facts.memory.model_copy(update={"shm_total_bytes": 32 * GIB}),
        "sysctl": facts.sysctl.model_copy(
            update={
                "tcp_rmem_max": 6291456,
                "tcp_wmem_max": 4194304,
                "arp_ignore": 0,
                "arp_filter": 0,
                "max_user_namespaces": 96364,
            }
        ),
        "cpu": facts.cpu.model_copy(update={"governor": "schedutil", "scaling_driver": "acpi-cpufreq"}),
        "clock": facts.clock.model_copy(update={"synchronised": True}),
        "driver": make_installation(),
        "kernels": (),
        "rivals": (),
        "firewalls": (),
        "pipelines": {"chat": installed()},
        "venvs": (Venv(name=VENV, marker={}, python="3.11.2", packages=dict(PACKAGES)),),
        "models": (ModelFolder(name="llama", digest="d" * 64, verified=True, deviation=None, size_bytes=GIB),),
    }
    return facts.model_copy(update={name: value for name, value in known.items() if name not in changes})


PACKAGES = {"vllm": "0.33.0", "torch": "2.14.0", "nvidia-nccl-cu13": "2.30.7"}


def installed(*, active: str = "inactive", current: str | None = "a" * 64, **limits: int) -> PipelineState:
    """Return the state of an installed pipeline whose rank is in a state of systemd's."""
    unit = UnitState(
        load_state="loaded",
        active_state=active,
        sub_state="dead",
        result="success",
        main_pid=0,
        restarts=0,
        active_since_monotonic_us=0,
        unit_file_state="static",
        needs_daemon_reload=False,
        **{"limit_memlock_bytes": 2**63 - 1, "limit_nofile": 1048576, **limits},
    )
    return PipelineState(current=current, previous=None, started_release=None, releases=(), unit_files=(), unit=unit)


def fabric_of(facts: NodeFacts, name: str = "enp1s0") -> Fabric:
    """Return the fabric on a NIC of the facts."""
    nic = facts.nic(name)
    assert nic is not None
    address = nic.addresses[0]
    return Fabric(
        interface=name,
        address=address.address,
        network=str(address.interface.network),
        speed_mbit=nic.speed_mbit,
        mtu=nic.mtu,
        reason="",
    )


def a_ping(**changes: Any) -> Ping:
    """Return 20 echoes that came back in 0.2 ms."""
    values: dict[str, Any] = {
        "bytes": 84,
        "sent": 20,
        "received": 20,
        "problem": None,
        "smallest_s": 0.0002,
        "p50_s": 0.00025,
        "p90_s": 0.0003,
        "p99_s": 0.0004,
    }
    return Ping(**{**values, **changes})


def a_connect(port: int = 40000, *, master: bool = False, problem: str | None = None) -> Connect:
    """Return a connection to a port."""
    clock = None if problem else ClockDifference(offset_s=0.001, error_s=0.0002)
    return Connect(port=port, master=master, problem=problem, seconds=None if problem else 0.0002, clock=clock)


def a_way(to: int, **changes: Any) -> PeerProbe:
    """Return what a node saw of host `to`, on whose master port it connected as well."""
    values: dict[str, Any] = {
        "route": Route(interface="enp1s0", source=None, gateway=None, problem=None),
        "macs": (mac(to),),
        "ping": a_ping(),
        "whole": a_ping(bytes=1500, sent=3, received=3),
        "connects": (*(a_connect(40000 + n) for n in range(5)), a_connect(29501, master=True)),
        "clock": ClockDifference(offset_s=0.001, error_s=0.0002),
        "bits_per_second": 9.4e9,
    }
    return PeerProbe(**{**values, **changes})


def node(
    number: int = 1, facts: NodeFacts | None = None, *, probe: dict[str, Any] | None = None, **changes: Any
) -> NodeSituation:
    """Return the situation of node `number` of a pipeline of two, which looked at the other one.

    `probe` replaces fields of what it saw, `changes` fields of the situation.
    """
    facts = facts or facts_of(number)
    other = 3 - number
    fabric = changes.pop("fabric", "") or fabric_of(facts)
    seen: dict[str, Any] = {
        "address": fabric.address,
        "interface": fabric.interface,
        "closed": True,
        "claims": (),
        "counters_before": QUIET,
        "counters_after": QUIET,
        "disk": DiskSpeed(path="/var/lib/ppdeploy/models/llama/model.safetensors", bytes_per_second=2e9),
        "peers": {f"198.51.100.{10 + other}": a_way(other)},
        "problems": (),
    }
    listener = Listener(handle="1:2", token="t", ports=(40000, 29501), master=number == 1, master_problem=None)
    values: dict[str, Any] = {
        "pipeline": "chat",
        "device": "cuda",
        "host": f"node{number}",
        "facts": facts,
        "node_rank": number - 1,
        "master_port": 29501,
        "api_port": 8000,
        "models_dir": "/var/lib/ppdeploy/models",
        "unit": UNIT,
        "python": "3.11",
        "model_folder": "llama",
        "stage_bytes": 40 * GIB,
        "gpus_needed": 2,
        "vllm": "0.33.0",
        "venv": VENV,
        "fabric": fabric,
        "probe": NodeProbe(**{**seen, **(probe or {})}),
        "listener": listener,
        "received": RECEIVED,
    }
    wants = PipelineVars(model="./llama", device=changes.get("device", "cuda"))
    return NodeSituation(**{**values, "driver": plan_driver(facts, wants, "chat"), **changes})


def with_nic(number: int = 1, **changes: Any) -> NodeSituation:
    """Return a node whose fabric NIC has other fields."""
    facts = facts_of(number)
    nics = tuple(nic.model_copy(update=changes) if nic.name == "enp1s0" else nic for nic in facts.nics)
    return node(number, facts.model_copy(update={"nics": nics}))


def pair(
    way: dict[str, Any] | None = None, *, sender: NodeSituation | None = None, receiver: NodeSituation | None = None
) -> PairSituation:
    """Return the way from the worker node2 to the head node1; `way` replaces fields of what node2 saw."""
    asks = sender or node(2)
    assert asks.probe is not None
    if way is not None:
        seen = {"198.51.100.11": a_way(1, **way)}
        asks = replace(asks, probe=asks.probe.model_copy(update={"peers": seen}))
    return PairSituation("chat", asks, receiver or node(1))


def whole(*nodes: NodeSituation, **changes: Any) -> PipelineSituation:
    """Return the situation of a pipeline of two nodes, or of these."""
    found = nodes or (node(1), node(2))
    values: dict[str, Any] = {
        "pipeline": "chat",
        "device": "cuda",
        "hosts": [one.host for one in found],
        "nodes": list(found),
    }
    return PipelineSituation(**{**values, **changes})
