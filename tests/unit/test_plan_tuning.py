"""What is tuned on a node: each setting chosen, not needed, impossible or not asked for, and a plan that stays."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest

from plugins.modules.ppdeploy_nic import CONFIG, OURS, OWN_FILES
from ppdeploy.facts import NicTuning, NodeFacts, PipelineState, Rings, Sysctl, Tuned, UnitState
from ppdeploy.plan.command import nccl_env, socket_threads
from ppdeploy.plan.tuning import buffer_bytes, cpu_mask, mtu_findings, plan_tuning, port_ranges, ports_in, tuning_files
from ppdeploy.plan.types import NicSetting, TuningPlan
from ppdeploy.render import render_node
from ppdeploy.spec import PipelineVars
from tests.factories import make_cluster, make_facts, make_gpu, make_nic
from tests.factories_plan import make_complete_plan, make_pipeline

DEBIAN = {
    "net.ipv4.ip_local_reserved_ports": "",
    "net.ipv4.tcp_rmem": "4096 131072 6291456",
    "net.ipv4.tcp_wmem": "4096 16384 4194304",
    "net.core.rmem_max": "212992",
    "net.core.wmem_max": "212992",
    "net.core.rps_sock_flow_entries": "0",
    "net.ipv4.tcp_congestion_control": "cubic",
}
"""What a Debian host with 64 GiB has."""

NIC: dict[str, Any] = {
    "rx_queues": 8,
    "rings": Rings(rx=512, rx_max=4096, tx=512, tx_max=4096),
    "rx_usecs": 1,
    "adaptive_rx": False,
    "rps": " ".join(f"rx-{queue}=0" for queue in range(8)),
    "rfs": " ".join(f"rx-{queue}=0" for queue in range(8)),
    "min_mtu": 68,
    "max_mtu": 9710,
    "qdisc": "fq_codel",
    "manager": "networkd",
    "network_file": "/etc/systemd/network/10-lan.network",
}


def host(
    rate: int | None = 10000,
    *,
    eee: bool | None = True,
    usb: bool = False,
    mtu: int = 1500,
    kernel: dict[str, str] | None = None,
    modules: tuple[str, ...] = ("sch_fq", "tcp_bbr"),
    facts: dict[str, Any] | None = None,
    **nic: Any,
) -> NodeFacts:
    """Facts of a host with a NIC that can be tuned; `nic` replaces fields of its NicTuning."""
    fabric = make_nic("enp1s0", "198.51.100.11/24", index=3, speed_mbit=rate, mtu=mtu, usb=usb, eee=eee)
    fabric = fabric.model_copy(update={"tuning": NicTuning(**{**NIC, **nic})})
    sysctl = Sysctl(
        ip_local_port_range=(32768, 60999),
        ip_local_reserved_ports="",
        tunable=DEBIAN if kernel is None else kernel,
        pacing_modules=modules,
    )
    return make_facts("node1", nics=[fabric], **{"sysctl": sysctl, **(facts or {})})


def plan(facts: NodeFacts, *, running: bool = False, **wants: Any) -> TuningPlan:
    wanted = PipelineVars(model="./tiny", **{"nic_tuning": True, **wants})
    nic = facts.nic("enp1s0")
    assert nic is not None
    return plan_tuning(facts, "enp1s0", wanted, rate_mbit=nic.speed_mbit, ports={29500, 29501}, running=running)


def setting(key: str, facts: NodeFacts, **wants: Any) -> NicSetting:
    (found,) = [one for one in plan(facts, **wants).settings if one.key == key]
    assert found.reason
    return found


def judged(key: str, facts: NodeFacts, **wants: Any) -> tuple[str, str]:
    found = setting(key, facts, **wants)
    return found.verdict, found.value


PORTS = "sysctl.net.ipv4.ip_local_reserved_ports"
RMEM, WMEM = "sysctl.net.ipv4.tcp_rmem", "sysctl.net.ipv4.tcp_wmem"
ENTRIES, CONTROL = "sysctl.net.core.rps_sock_flow_entries", "sysctl.net.ipv4.tcp_congestion_control"
ONE_QUEUE: dict[str, Any] = {"rx_queues": 1, "rps": "rx-0=0", "rfs": "rx-0=0"}
GOVERNED = make_facts().cpu.model_copy(
    update={"governors": "policy0=schedutil policy1=powersave", "governors_available": ("performance", "schedutil")}
)
NO_PERSISTENCE = [make_gpu(0, persistence_mode=False), make_gpu(1)]


@pytest.mark.parametrize(
    ("key", "facts", "wants", "value"),
    [
        ("mtu", host(), {"mtu": 9000}, "9000"),
        ("rings", host(), {}, "rx=4096 tx=4096"),
        ("eee", host(), {}, "off"),
        ("rx_usecs", host(rx_usecs=125), {}, "20"),
        ("rps", host(25000, **ONE_QUEUE), {}, "rx-0=ffffffff"),
        ("rps", host(2500, usb=True, **ONE_QUEUE), {}, "rx-0=ffffffff"),
        ("rfs", host(25000, **ONE_QUEUE), {}, "rx-0=4096"),
        (ENTRIES, host(25000, **ONE_QUEUE), {}, "4096"),
        ("qdisc", host(), {"tcp_pacing": "fq"}, "fq"),
        (CONTROL, host(), {"tcp_pacing": "bbr"}, "bbr"),
        (PORTS, host(), {}, "29500-29501"),
        (PORTS, host(kernel={**DEBIAN, PORTS.removeprefix("sysctl."): "8080,29501"}), {}, "8080,29500-29501"),
        (RMEM, host(100_000), {}, "4096 131072 33554432"),
        (WMEM, host(25_000), {}, "4096 16384 8388608"),
        ("sysctl.net.core.rmem_max", host(10_000), {}, "4194304"),
        ("governor", host(facts={"cpu": GOVERNED}), {"cpu_governor": "performance"},
         "policy0=performance policy1=performance"),
        ("gpu_persistence", host(facts={"gpus": NO_PERSISTENCE}), {"gpu_persistence": True}, "0=on 1=on"),
    ],
)  # fmt: skip
def test_it_is_set_where_it_helps(key: str, facts: NodeFacts, wants: dict[str, Any], value: str) -> None:
    assert judged(key, facts, **wants) == ("set", value)


@pytest.mark.parametrize(
    ("key", "facts", "wants"),
    [
        ("mtu", host(mtu=9000), {"mtu": 9000}),
        ("rings", host(rings=Rings(rx=4096, rx_max=4096, tx=4096, tx_max=4096)), {}),
        ("eee", host(eee=False), {}),
        ("rx_usecs", host(rx_usecs=50), {}),
        ("rx_usecs", host(rx_usecs=200, adaptive_rx=True), {}),
        # As many queues as cores; a rate that one core takes; a rate that nobody knows.
        ("rps", host(100_000, rx_queues=32), {}),
        ("rps", host(10_000, **ONE_QUEUE), {}),
        ("rps", host(1000, usb=True, **ONE_QUEUE), {}),
        ("rps", host(None, **ONE_QUEUE), {}),
        ("rfs", host(10_000, **ONE_QUEUE), {}),
        (ENTRIES, host(10_000, **ONE_QUEUE), {}),
        ("qdisc", host(qdisc="fq"), {"tcp_pacing": "fq"}),
        (CONTROL, host(kernel={**DEBIAN, CONTROL.removeprefix("sysctl."): "bbr"}), {"tcp_pacing": "bbr"}),
        (PORTS, host(kernel={**DEBIAN, PORTS.removeprefix("sysctl."): "29000-30000"}), {}),
        (RMEM, host(10_000), {}),
        (WMEM, host(10_000), {}),
        (WMEM, host(None), {}),
        ("governor", host(facts={"cpu": GOVERNED.model_copy(update={"governors": "policy0=schedutil"})}),
         {"cpu_governor": "schedutil"}),
        ("gpu_persistence", host(facts={"gpus": [make_gpu()]}), {"gpu_persistence": True}),
    ],
)  # fmt: skip
def test_it_is_kept_where_it_is_right(key: str, facts: NodeFacts, wants: dict[str, Any]) -> None:
    assert judged(key, facts, **wants) == ("kept", "")


@pytest.mark.parametrize(
    ("key", "facts", "wants", "said"),
    [
        ("mtu", host(max_mtu=1500), {"mtu": 9000}, "its driver allows 1500 at most"),
        ("rings", host(rings=None), {}, "does not say how large its rings are"),
        ("eee", host(eee=None), {}, "no Energy-Efficient Ethernet"),
        ("rx_usecs", host(rx_usecs=None, adaptive_rx=None), {}, "does not say how long"),
        ("rps", host(25000, rx_queues=1, rps=None, rfs=None), {}, "cannot be set here"),
        ("rfs", host(25000, kernel={}, **ONE_QUEUE), {}, "keeps net.core.rps_sock_flow_entries"),
        (ENTRIES, host(25000, kernel={}, **ONE_QUEUE), {}, "keeps net.core.rps_sock_flow_entries"),
        ("qdisc", host(modules=()), {"tcp_pacing": "fq"}, "no sch_fq"),
        ("qdisc", host(qdisc="mq"), {"tcp_pacing": "fq"}, "it has mq, which would not come back"),
        (CONTROL, host(modules=("sch_fq",)), {"tcp_pacing": "bbr"}, "no tcp_bbr"),
        (PORTS, host(kernel={}), {}, "keeps it from this host"),
        (RMEM, host(100_000, kernel={}), {}, "keeps it from this host"),
        ("governor", host(), {"cpu_governor": "performance"}, "cannot set the frequency"),
        ("governor", host(facts={"cpu": GOVERNED}), {"cpu_governor": "ondemand"}, "no such governor (it has perf"),
        ("gpu_persistence", host(), {"gpu_persistence": True}, "no NVIDIA GPU"),
    ],
)  # fmt: skip
def test_what_a_host_cannot_is_skipped_with_the_reason(
    key: str, facts: NodeFacts, wants: dict[str, Any], said: str
) -> None:
    found = setting(key, facts, **wants)
    assert (found.verdict, found.value) == ("unsupported", "")
    assert said in found.reason


def test_nothing_is_tuned_that_no_variable_asks_for() -> None:
    found = plan(host(25000, rx_usecs=200, **ONE_QUEUE), nic_tuning=False)
    assert {one.verdict for one in found.settings} == {"off"}
    assert found.wanted() == {}
    assert tuning_files(found, "/etc/systemd/network/10-lan.network") == ()
    # Each of these is asked for by a variable of its own.
    assert plan(host(), nic_tuning=False, mtu=9000).wanted() == {"mtu": "9000"}


def test_a_second_plan_is_the_first_one() -> None:
    """The facts show what was set then: what the host had before decides, not what it has now."""
    first = plan(host(25000, rx_usecs=125, **ONE_QUEUE), mtu=9000)
    before = {one.key: one.before for one in first.settings if one.verdict == "set"}
    wanted = first.wanted()
    kernel = {name: wanted.get(f"sysctl.{name}", value) for name, value in DEBIAN.items()}
    tuned = host(
        25000,
        eee=False,
        mtu=9000,
        kernel=kernel,
        facts={"tuned": Tuned(interface="enp1s0", settings=before)},
        rings=Rings(rx=4096, rx_max=4096, tx=4096, tx_max=4096),
        rx_usecs=20,
        rx_queues=1,
        rps=wanted["rps"],
        rfs=wanted["rfs"],
    )
    second = plan(tuned, mtu=9000)
    assert second.wanted() == wanted
    assert [(one.key, one.verdict, one.before) for one in second.settings] == [
        (one.key, one.verdict, one.before) for one in first.settings
    ]


def test_what_another_nic_had_says_nothing_of_this_one() -> None:
    tuned = Tuned(interface="eno1", settings={"eee": "off", "mtu": "9000", PORTS: "29500-29501"})
    facts = host(facts={"tuned": tuned})
    assert judged("eee", facts) == ("set", "off")
    # The host's own settings are not the NIC's.
    assert judged(PORTS, facts) == ("kept", "")


def test_ports_that_others_reserved_since_are_kept() -> None:
    name = PORTS.removeprefix("sysctl.")
    facts = host(
        kernel={**DEBIAN, name: "29500-29501,40000"},
        facts={"tuned": Tuned(interface="enp1s0", settings={PORTS: "8080"})},
    )
    assert judged(PORTS, facts) == ("set", "8080,29500-29501,40000")


def test_what_takes_the_link_down_waits_while_a_rank_runs() -> None:
    found = {one.key: one for one in plan(host(), running=True).settings}
    assert {key for key, one in found.items() if one.verdict == "waits"} == {"rings", "eee"}
    assert found["eee"].value == "off"
    assert "a rank runs" in found["eee"].reason
    # It is there at the next boot, which comes before any rank.
    assert plan(host(), running=True).wanted()["rings"] == "rx=4096 tx=4096"
    # What is set already, or takes nothing down, does not wait.
    assert judged("eee", host(eee=False, facts={"tuned": Tuned(interface="enp1s0", settings={"eee": "on"})}),
                  running=True) == ("set", "off")  # fmt: skip
    assert judged(PORTS, host(), running=True)[0] == "set"


def test_what_is_to_be_given_back_and_takes_the_link_down_stays_while_a_rank_runs() -> None:
    facts = host(mtu=9000, facts={"tuned": Tuned(interface="enp1s0", settings={"mtu": "1500"})})
    assert judged("mtu", facts, running=True) == ("waits", "9000")
    assert judged("mtu", facts, running=False) == ("off", "")


UNIT = UnitState(
    load_state="loaded",
    active_state="active",
    sub_state="running",
    result="success",
    main_pid=7,
    restarts=0,
    active_since_monotonic_us=1,
    unit_file_state="static",
    needs_daemon_reload=False,
)
RUNNING = PipelineState(
    current=None, previous=None, started_release=None, releases=(), unit_files=(), unit=UNIT
)  # fmt: skip


def test_an_mtu_that_a_nic_cannot_have_is_blocked_with_the_host() -> None:
    (found,) = mtu_findings("tiny", "node2", host(max_mtu=1500), "enp1s0", 9000)
    assert (found.verdict, found.host) == ("blocked", "node2")
    assert "enp1s0 cannot have the MTU 9000: its driver allows 1500 at most" in found.reason
    assert "ppdeploy_mtu" in found.remedy


def test_an_mtu_is_not_changed_under_a_rank() -> None:
    (found,) = mtu_findings("tiny", "node1", host(facts={"pipelines": {"tiny": RUNNING}}), "enp1s0", 9000)
    assert "a rank runs" in found.reason
    assert "ppdeploy stop" in found.remedy
    assert not list(mtu_findings("tiny", "node1", host(mtu=9000, max_mtu=1500), "enp1s0", 9000))
    assert not list(mtu_findings("tiny", "node1", host(), "enp1s0", None))


def test_a_host_that_cannot_have_the_mtu_blocks_its_pipeline() -> None:
    facts = make_cluster(2)
    nic = facts["node2"].nic("enp1s0")
    assert nic is not None
    slow = nic.model_copy(update={"tuning": NicTuning(**{**NIC, "max_mtu": 1500})})
    nics = tuple(slow if one.name == "enp1s0" else one for one in facts["node2"].nics)
    facts["node2"] = facts["node2"].model_copy(update={"nics": nics})
    pipeline = make_pipeline(facts=facts, mtu=9000)
    assert [(one.host, one.id) for one in pipeline.blocked()] == [("node2", "mtu-wanted")]


def test_a_host_whose_nic_nobody_can_read_is_left_alone() -> None:
    facts = make_facts("node1")
    found = plan_tuning(
        facts, "enp1s0", PipelineVars(model="./tiny", nic_tuning=True), rate_mbit=1, ports=(), running=False
    )
    assert [one.verdict for one in found.settings] == ["unsupported"]
    alone = plan_tuning(
        facts, "lo", PipelineVars(model="./tiny", nic_tuning=True), rate_mbit=None, ports=(), running=False
    )
    assert (alone.wanted(), alone.settings[0].reason) == ({}, "one node: nothing leaves it")


# ---- files -----------------------------------------------------------------------------------------------------------


def tunable_cluster(**nic: Any) -> dict[str, NodeFacts]:
    facts = make_cluster(2)
    for name, one in facts.items():
        nics = tuple(
            item.model_copy(update={"tuning": NicTuning(**{**NIC, **nic}), "eee": True})
            if item.name == "enp1s0"
            else item
            for item in one.nics
        )
        sysctl = one.sysctl.model_copy(update={"tunable": DEBIAN})
        facts[name] = one.model_copy(update={"nics": nics, "sysctl": sysctl})
    return facts


def rendered(facts: dict[str, NodeFacts], **wants: Any) -> dict[str, str]:
    """Return the files of node1 that are there for the tuning."""
    plain = render_node(make_complete_plan(facts), "node1")
    return {
        path: text
        for path, text in render_node(make_complete_plan(facts, **wants), "node1").items()
        if path not in plain and "/releases/" not in path
    }


def test_the_files_of_a_tuned_node() -> None:
    files = rendered(tunable_cluster(), nic_tuning=True, mtu=9000)
    assert set(files) == {
        "/etc/ppdeploy/nic.json",
        "/etc/sysctl.d/99-ppdeploy.conf",
        "/etc/systemd/network/10-lan.network.d/90-ppdeploy.conf",
        "/etc/systemd/system/ppdeploy-nic.service",
    }
    assert "[Link]\nMTUBytes=9000\n" in files["/etc/systemd/network/10-lan.network.d/90-ppdeploy.conf"]
    assert "net.ipv4.ip_local_reserved_ports = 29500-29516\n" in files["/etc/sysctl.d/99-ppdeploy.conf"]
    assert '"mtu": "9000"' in files["/etc/ppdeploy/nic.json"]
    assert "sysctl" not in files["/etc/ppdeploy/nic.json"]
    unit = files["/etc/systemd/system/ppdeploy-nic.service"]
    assert "Before=ppdeploy-agent.service" in unit
    assert "CapabilityBoundingSet=CAP_NET_ADMIN\n" in unit


def test_a_file_of_networkd_that_other_nics_follow_gets_no_drop_in() -> None:
    facts = tunable_cluster()
    for name, one in facts.items():
        nics = tuple(nic.model_copy(update={"tuning": NicTuning(**NIC)}) for nic in one.nics if nic.name != "lo")
        facts[name] = one.model_copy(update={"nics": nics})
    assert len(facts["node1"].nics) > 1
    assert set(rendered(facts, mtu=9000)) == {
        "/etc/ppdeploy/nic.json",
        "/etc/systemd/system/ppdeploy-nic.service",
    }


def test_the_module_knows_our_files_without_its_record() -> None:
    files = rendered(tunable_cluster(), nic_tuning=True, mtu=9000)
    files |= rendered(tunable_cluster(manager="NetworkManager", network_file=None), mtu=9000)
    files |= rendered(tunable_cluster(manager="ifupdown", network_file=None), mtu=9000)
    for path, text in files.items():
        assert any(fnmatch(path, pattern) for pattern in OWN_FILES), path
        assert path == CONFIG or OURS.decode() in text


@pytest.mark.parametrize(
    ("manager", "path"),
    [
        ("NetworkManager", "/etc/NetworkManager/dispatcher.d/90-ppdeploy-nic"),
        ("ifupdown", "/etc/network/if-up.d/ppdeploy-nic"),
    ],
)
def test_a_manager_without_drop_ins_gets_a_hook_for_the_mtu_alone(manager: str, path: str) -> None:
    facts = tunable_cluster(manager=manager, network_file=None)
    hook = rendered(facts, mtu=9000)[path]
    assert hook.startswith("#!/bin/sh\n")
    assert '[ "${1:-$IFACE}" = "enp1s0" ] || exit 0' in hook
    assert path not in rendered(facts, nic_tuning=True)


def test_tuning_is_no_part_of_the_release() -> None:
    facts = tunable_cluster()
    plain, tuned = make_complete_plan(facts), make_complete_plan(facts, nic_tuning=True, mtu=9000, tcp_pacing="bbr")
    assert tuned.pipelines[0].release == plain.pipelines[0].release
    assert [node.work for node in tuned.pipelines[0].nodes] == [node.work for node in plain.pipelines[0].nodes]
    assert tuned.pipelines[0].nodes[0].tuning.wanted()


# ---- NCCL's sockets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "threads"), [(None, None), (1000, None), (2500, None), (10_000, None), (25_000, "1"), (40_000, "2"),
                          (100_000, "2")],
)  # fmt: skip
def test_ncclls_socket_threads_follow_the_rate(rate: int | None, threads: str | None) -> None:
    assert socket_threads(rate).get("NCCL_SOCKET_NTHREADS") == threads
    assert socket_threads(rate).get("NCCL_NSOCKS_PERTHREAD") == (None if threads is None else "1")


def test_all_nodes_get_the_threads_of_the_slowest_nic() -> None:
    facts = make_cluster(2, fabric_speed_mbit=100_000)
    nodes = make_pipeline(facts=facts).nodes
    assert {node.nccl_env["NCCL_SOCKET_NTHREADS"] for node in nodes} == {"2"}
    facts["node2"] = make_facts("node2", number=2, fabric_speed_mbit=10_000)
    assert all("NCCL_SOCKET_NTHREADS" not in node.nccl_env for node in make_pipeline(facts=facts).nodes)


def test_what_the_inventory_says_of_ncclls_sockets_stands() -> None:
    facts = make_cluster(2, fabric_speed_mbit=100_000)
    (node, _) = make_pipeline(facts=facts, env={"NCCL_SOCKET_NTHREADS": "4"}).nodes
    assert "NCCL_SOCKET_NTHREADS" not in node.nccl_env
    assert node.rank_env["NCCL_SOCKET_NTHREADS"] == "4"


def test_nccl_tells_what_it_is_asked_to_and_nothing_names_tensorpipe() -> None:
    assert nccl_env("enp1s0", rate_mbit=10_000) == {
        "GLOO_SOCKET_IFNAME": "enp1s0",
        "NCCL_SOCKET_IFNAME": "=enp1s0",
        "NCCL_SOCKET_FAMILY": "AF_INET",
        "NCCL_IB_DISABLE": "1",
    }
    (node, _) = make_pipeline(nccl_debug="INFO").nodes
    assert node.nccl_env["NCCL_DEBUG"] == "INFO"


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_buffers_hold_what_is_under_way() -> None:
    # 25 Gbit/s for 1 ms is 3.1 MB; twice that, rounded up to a power of two.
    assert buffer_bytes(25_000) == 8 * 1024**2
    assert buffer_bytes(1000) == 256 * 1024


def test_masks_and_ranges_are_written_as_the_kernel_does() -> None:
    assert (cpu_mask("0-3"), cpu_mask("0-63"), cpu_mask("32-35,40")) == ("f", "ffffffff,ffffffff", "10f,00000000")
    assert ports_in("29500-29501,8000") == {8000, 29500, 29501}
    assert port_ranges({29501, 8000, 29500}) == "8000,29500-29501"
    assert (ports_in(""), port_ranges(())) == (set(), "")
