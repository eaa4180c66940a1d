"""`ppdeploy net` on real hosts: what it measures of shaped links, what it leaves, what it does when a node vanishes.

No model is started. The handoffs are measured on the lab of the other tests, whose hosts get vLLM; the rest on a lab of
three bare hosts of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import CPU_VLLM_ARGS, LabInventory
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from ppdeploy.net_report import net_lines
from tests.lab.cluster import PIPELINE, Cluster, Done

HIDDEN = 2048
"""Hidden size of a model of which only config.json is there: handoffs of 8 KiB a token, up to 67 MB."""

LARGE = 8_000_000
"""Bytes of a handoff from which its time is the wire's."""

TRIES = 3
"""The machine has other work, and what that takes from a run is not the network's: one good run of three counts."""

#: All that a test could leave on a host. The last grep ends with 1 where nothing runs, as it should be.
_TRACES = """
ss -tlnH | sort
systemctl list-units --all --no-legend --plain 'ppdeploy-net*'
ls -A /run /run/private /tmp /var/tmp /var/lib/private /etc 2>/dev/null | grep -v -e systemd-private -e ssh-
dpkg-query -W
getent passwd
ps -eo args= | grep -e '[i]perf3' -e '[h]andoff.py' || true
"""

#: Makes a package of the host's own iperf3, with one that it depends on, in a folder that apt knows, and takes iperf3
#: off the host.
_REPOSITORY = r"""
mkdir -p /srv/debs
cd /srv
for name in iperf3 iperf3-needs; do
  mkdir -p $name/DEBIAN $name/usr/bin
  printf 'Package: %s\nVersion: 99\nArchitecture: all\nMaintainer: lab <lab@example.org>\nDescription: lab\n' $name \
    > $name/DEBIAN/control
done
echo 'Depends: iperf3-needs' >> iperf3/DEBIAN/control
cp /usr/bin/iperf3 iperf3/usr/bin/
for name in iperf3 iperf3-needs; do
  dpkg-deb --build $name debs/$name.deb > /dev/null
  dpkg-deb --field debs/$name.deb >> debs/Packages
  printf 'Filename: ./%s.deb\nSize: %s\nSHA256: %s\n\n' $name $(stat -c %s debs/$name.deb) \
    $(sha256sum debs/$name.deb | cut -d' ' -f1) >> debs/Packages
done
dpkg --purge iperf3 > /dev/null
echo 'deb [trusted=yes] file:/srv/debs ./' > /etc/apt/sources.list.d/lab.list
apt-get update > /dev/null
"""


def traces(cluster: Cluster) -> dict[str, list[str]]:
    """What could be left of a test, by host."""
    return {node: cluster.out(node, _TRACES).splitlines() for node in cluster.lab.nodes if cluster.lab.pid(node)}


def document(done: Done, code: int = 0) -> dict[str, Any]:
    """The only pipeline of what `net --json` printed."""
    assert done.code == code, done.said
    found: dict[str, Any] = json.loads(done.out)
    (one,) = found["pipelines"]
    return dict(one)


def ways(one: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(way["sender"], way["receiver"]): way for way in one["ways"]}


# ---- links of a known rate, and handoffs over them


@pytest.fixture(scope="module")
def installed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An inventory of hosts that have vLLM and no rank, whose model has handoffs of a usual size."""
    model = tmp_path_factory.mktemp("models") / "wide"
    shutil.copytree(tiny_model(tied=True), model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": HIDDEN}))
    args = {**json.loads(json.dumps(CPU_VLLM_ARGS)), "load-format": "dummy"}
    inventory = cluster.edited(cluster.elsewhere / "wide", {"ppdeploy_vllm_args": args})
    text = inventory.read_text().replace(str(tiny_model(tied=True)), str(model))
    assert str(model) in text
    inventory.write_text(text)
    if any(cluster.pids().values()):
        stopped = cluster.ppdeploy("stop")
        assert stopped.code == 0, stopped.said
    apply = cluster.ppdeploy("apply", "--tags", "install", inventory=inventory)
    assert apply.code == 0, apply.said
    yield inventory
    for node in cluster.lab.nodes:
        cluster.lab.shape(node, "none")


def measure(cluster: Cluster, inventory: Path, rate: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Shape both links and return what is measured of them."""
    for node in cluster.lab.nodes:
        cluster.lab.shape(node, rate)
    done = cluster.ppdeploy("net", "--json", "--seconds", "2", inventory=inventory)
    one = document(done)
    sys.stdout.write("\n".join([f"\n{rate}:", *net_lines(json.loads(done.out)), ""]))
    assert one["notes"] == []
    return ways(one)


Sizes = set[tuple[str, str, int]]


def large(found: dict[tuple[str, str], dict[str, Any]]) -> Sizes:
    """Every way with each size of handoff whose time is the wire's."""
    return {(*way, one["tokens"]) for way, told in found.items() for one in told["handoffs"] if one["bytes"] >= LARGE}


def as_the_wire(found: dict[tuple[str, str], dict[str, Any]], bits: float) -> Sizes:
    """Those that take their bytes at the rate, within 15 %, beside what the handoff of one token takes anyway."""
    return {
        (*way, one["tokens"])
        for way, told in found.items()
        for one in told["handoffs"]
        if abs((one["p50_seconds"] - told["handoffs"][0]["p50_seconds"]) / (8 * one["bytes"] / bits) - 1) < 0.15
    }


@pytest.mark.parametrize(
    ("rate", "bits", "carried"),
    [("1gbit", 1e9, 957.0), pytest.param("2.5gbit", 2.5e9, 2392.0, marks=pytest.mark.long)],
)
def test_a_shaped_link_is_measured_as_it_is(
    cluster: Cluster, installed: Path, rate: str, bits: float, carried: float
) -> None:
    before = traces(cluster)
    good: Sizes = set()
    near: set[tuple[str, str]] = set()
    for _ in range(TRIES):
        found = measure(cluster, installed, rate)
        good |= as_the_wire(found, bits)
        near |= {way for way, told in found.items() if abs(told["many_flows"]["mbit"] / carried - 1) < 0.05}
        if large(found) <= good and near == set(found):
            break
    assert len(large(found)) == 6
    assert large(found) - good == set()
    assert set(found) - near == set()
    assert {told["verdict"] for told in found.values()} == {"slow"}
    assert all([h["tokens"] for h in told["handoffs"]][-1] == 8192 for told in found.values())
    # No listener, process, package, file or account.
    assert traces(cluster) == before


def test_an_unshaped_link_is_told_and_the_plan_counts_with_it(cluster: Cluster, installed: Path) -> None:
    before = json.loads(cluster.ppdeploy("plan", "--json", inventory=installed).out)["pipelines"][0]
    found = measure(cluster, installed, "none")
    rate = max(found["node1", "node2"][run]["mbit"] for run in ("one_flow", "many_flows"))
    done = cluster.ppdeploy("plan", "--json", inventory=installed)
    after = json.loads(done.out)["pipelines"][0]
    assert after["outlook"]["links"][0]["measured_mbit"] == pytest.approx(rate, rel=0.001)
    assert before["outlook"]["links"][0]["measured_mbit"] != after["outlook"]["links"][0]["measured_mbit"]
    # A measurement restarts nothing.
    assert after["release"] == before["release"]


# ---- nodes that vanish, that serve, and that lack iperf3


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, stages: list[tuple[str, float]]) -> Iterator[Cluster]:
    """Three hosts on which nothing was ever applied."""
    lab = Lab(f"{default_name()}-net")
    lab.down()
    try:
        lab.up(3, inventory=LabInventory.one_pipeline(3, model=str(tiny_model())), owner=os.getpid())
        yield Cluster(lab, lab.inventory, tmp_path_factory.mktemp("bare"), stages)
    finally:
        lab.down()


def test_a_pipeline_that_runs_is_left_alone(bare: Cluster) -> None:
    unit = f"ppdeploy-rank@{PIPELINE}"
    bare.out("node2", f"systemd-run --quiet --unit={unit} sleep 600")
    try:
        done = bare.ppdeploy("net")
        assert done.code == 3, done.said
        assert f"a rank of pipeline {PIPELINE} runs on node2" in done.error
        assert "--force" in done.error
    finally:
        bare.out("node2", f"systemctl stop {unit}")


def test_a_node_that_vanishes_is_named_and_the_others_are_measured(bare: Cluster) -> None:
    running = bare.start_ppdeploy("net", "--json", "--seconds", "2", env={})
    deadline = time.monotonic() + 120
    while bare.lab.exec_ssh("node3", ["test", "-e", "/run/ppdeploy-net"], check=False).returncode:
        assert time.monotonic() < deadline, "the test did not begin"
        time.sleep(0.2)
    bare.lab.kill("node3")
    out, err = running.communicate(timeout=300)
    one = document(Done("net", running.returncode, out, err, 0.0), 7)
    assert "lost during the test: node3" in err
    assert one["lost"] == ["node3"]
    found = ways(one)
    assert {told["verdict"] for way, told in found.items() if "node3" in way} == {"blocked"}
    assert found["node1", "node2"]["verdict"] in ("ready", "slow")
    assert found["node2", "node1"]["many_flows"]["mbit"] > 100
    bare.lab.boot("node3")
    assert not any("ppdeploy-net" in line for lines in traces(bare).values() for line in lines)


def test_iperf3_comes_for_the_test_and_goes_again_and_where_it_cannot_the_rest_goes_on(bare: Cluster) -> None:
    bare.out("node1", _REPOSITORY)
    bare.out("node2", "dpkg --purge iperf3 > /dev/null")
    before = traces(bare)
    done = bare.ansible_playbook("-e", "ppdeploy__net_seconds=1", playbook="playbooks/net.yml")
    assert done.code == 0, done.said
    assert "node2: iperf3 is not there and cannot be installed" in done.out
    kept = json.loads((bare.inventory.parent / ".ppdeploy" / f"{PIPELINE}-net.json").read_text())
    found = ways(kept["pipelines"][0])
    assert found["node1", "node3"]["one_flow"]["mbit"] > 100
    assert found["node3", "node1"]["many_flows"]["mbit"] > 100
    assert found["node1", "node2"]["one_flow"] is None
    assert found["node1", "node2"]["latency"]["lost"] == 0
    assert traces(bare) == before
    assert "iperf3-needs" not in bare.out("node1", "dpkg-query -W")


def test_ctrl_c_leaves_neither_a_listener_nor_what_came_for_the_test(bare: Cluster) -> None:
    before = traces(bare)
    running = bare.start_ppdeploy("net", "--seconds", "20", env={})
    deadline = time.monotonic() + 120
    while "iperf3-needs" not in bare.lab.exec_ssh("node1", ["cat", "/run/ppdeploy-net/brought"], check=False).stdout:
        assert time.monotonic() < deadline, "the test did not begin"
        time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=180)
    assert running.returncode == 130, err
    # A client whose server is gone ends by itself.
    deadline = time.monotonic() + 60
    while traces(bare) != before and time.monotonic() < deadline:
        time.sleep(1)
    assert traces(bare) == before
