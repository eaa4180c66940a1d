"""What the node module tells of what can be tuned, on trees like the kernel's own and on a real loopback interface."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_facts as module
from ppdeploy.facts import NicTuning, Tuned, Tunnelling

RINGS = struct.pack("=9I", 0x10, 4096, 0, 0, 8192, 512, 0, 0, 256)
COALESCING = struct.pack("=23I", 0x0E, 125, *[0] * 8, 1, *[0] * 12)

Put = Callable[[dict[str, str]], None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Put files where the module reads /sys, /proc, /run, /lib/modules and the record."""
    for name in ("SYS", "PROC", "RUN", "MODULES"):
        monkeypatch.setattr(module, name, str(tmp_path / name.lower()))
    monkeypatch.setattr(module, "TUNED", str(tmp_path / "nic-before.json"))

    def write(tree: dict[str, str]) -> None:
        for path, text in tree.items():
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")

    return write


def tuning(name: str = "enp1s0", listed: dict[str, Any] | None = None) -> NicTuning:
    told = module.nic_tuning(name, f"{module.SYS}/class/net/{name}", listed or {})
    return NicTuning.model_validate(told)


def nic(name: str = "enp1s0", **files: str) -> dict[str, str]:
    return {f"sys/class/net/{name}/{path}": text for path, text in {"ifindex": "3", **files}.items()}


def test_a_nic_tells_its_rings_queues_and_limits(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {0x10: RINGS, 0x0E: COALESCING}
    monkeypatch.setattr(module, "ethtool", lambda _name, asked, _size: answers[struct.unpack("I", asked)[0]])
    put(nic(**{f"queues/rx-{n}/{file}": "0" for n in (0, 2, 10) for file in ("rps_cpus", "rps_flow_cnt")}))
    found = tuning(listed={"min_mtu": 68, "max_mtu": 9710, "qdisc": "mq"})
    assert found.rings is not None
    assert found.rings.model_dump() == {"rx": 512, "rx_max": 4096, "tx": 256, "tx_max": 8192}
    assert (found.rx_usecs, found.adaptive_rx) == (125, True)
    assert (found.rx_queues, found.rps, found.rfs) == (3, "rx-0=0 rx-2=0 rx-10=0", "rx-0=0 rx-2=0 rx-10=0")
    assert (found.min_mtu, found.max_mtu, found.qdisc) == (68, 9710, "mq")


def test_loopback_has_nothing_of_it() -> None:
    found = tuning("lo", {"max_mtu": 0})
    assert (found.rings, found.rx_usecs, found.max_mtu, found.manager) == (None, None, None, None)
    assert found.rx_queues >= 1


@pytest.mark.parametrize(
    ("tree", "manager", "file"),
    [
        (
            {"run/systemd/netif/links/3": "ADMIN_STATE=configured\nNETWORK_FILE=/run/systemd/network/10-x.network\n"},
            "networkd",
            "/run/systemd/network/10-x.network",
        ),
        ({"run/systemd/netif/links/3": "ADMIN_STATE=unmanaged\n"}, None, None),
        ({"run/NetworkManager/devices/3": "[device]\nmanaged=true\n"}, "NetworkManager", None),
        ({"run/NetworkManager/devices/3": "[device]\nmanaged=false\n"}, None, None),
        ({"run/network/ifstate": "lo=lo\nenp1s0=enp1s0\n"}, "ifupdown", None),
        ({"run/network/ifstate": "lo=lo\nenp1s0d=enp1s0d\n"}, None, None),
        ({}, None, None),
    ],
)
def test_who_configures_a_nic_is_known(put: Put, tree: dict[str, str], manager: str | None, file: str | None) -> None:
    put({**nic(), **tree})
    assert (tuning().manager, tuning().network_file) == (manager, file)


def test_kernel_settings_that_cannot_be_set_are_left_out(put: Put) -> None:
    put({"proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n", "proc/sys/net/ipv4/ip_local_reserved_ports": "\n"})
    assert module.tunable() == {
        "net.ipv4.ip_local_reserved_ports": "",
        "net.ipv4.tcp_rmem": "4096 131072 6291456",
    }


def test_pacing_is_known_as_file_as_built_in_and_as_loaded(put: Put) -> None:
    put({"proc/version": ""})
    assert module.pacing_modules() == []
    release = os.uname().release
    put({f"modules/{release}/modules.dep": "kernel/net/sched/sch_fq.ko.xz:\nkernel/net/sched/sch_fq_codel.ko.xz:\n"})
    assert module.pacing_modules() == ["sch_fq"]
    put(
        {f"modules/{release}/modules.dep": "", "proc/sys/net/ipv4/tcp_available_congestion_control": "reno bbr cubic\n"}
    )
    assert module.pacing_modules() == ["tcp_bbr"]
    put({f"modules/{release}/modules.builtin": "kernel/net/sched/sch_fq.ko\nkernel/net/ipv4/tcp_bbr.ko\n"})
    assert module.pacing_modules() == ["sch_fq", "tcp_bbr"]


def test_wireguard_is_known_as_file_as_built_in_and_as_loaded_and_so_is_the_key(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARED", str(tmp_path / "dev"))
    monkeypatch.setattr(module, "TUNNEL", str(tmp_path / "tunnel"))
    put({"sys/version": ""})
    assert Tunnelling.model_validate(module.tunnel()) == Tunnelling(kernel=False, tun=False, public_key=None)
    release = os.uname().release
    for tree in (
        {f"modules/{release}/modules.dep": "kernel/drivers/net/wireguard/wireguard.ko.xz: kernel/net/ipv4/udp.ko.xz\n"},
        {f"modules/{release}/modules.builtin": "kernel/drivers/net/wireguard/wireguard.ko\n"},
        {"sys/module/wireguard/version": "1.0.0\n"},
    ):
        put(tree)
        assert module.tunnel()["kernel"]
        for path in tree:
            (tmp_path / path).unlink()
        shutil.rmtree(tmp_path / "sys/module", ignore_errors=True)
        assert not module.tunnel()["kernel"]
    # A public key alone is of no use.
    put({"tunnel/public.key": "QUJD=\n"})
    assert module.tunnel()["public_key"] is None
    put({"tunnel/private.key": "secret\n"})
    assert module.tunnel()["public_key"] == "QUJD="
    assert "secret" not in str(module.tunnel())


def test_the_governor_of_every_policy_is_told(put: Put) -> None:
    folder = f"{module.SYS}/devices/system/cpu/cpufreq"
    assert module.each_policy(folder) is None
    put({f"sys/devices/system/cpu/cpufreq/policy{n}/scaling_governor": "schedutil\n" for n in (0, 4)})
    assert module.each_policy(folder) == "policy0=schedutil policy4=schedutil"


def test_what_was_there_before_is_read_from_the_record(put: Put) -> None:
    assert module.tuned() is None
    record = {"interface": "enp1s0", "settings": {"eee": "on"}, "files": {}, "folders": [], "trial": {}}
    put({"nic-before.json": json.dumps(record)})
    assert Tuned.model_validate(module.tuned()) == Tuned(interface="enp1s0", settings={"eee": "on"})
