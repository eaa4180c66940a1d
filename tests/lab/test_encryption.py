"""`fabric_encryption` on two hosts of its own, without a model: keys, the tunnel, what the wire shows, and removal.

The hosts share this machine's kernel, which may have no WireGuard, so the tunnel is wireguard-go's; what the plan
decides and the role does differ in one line of the unit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.network import inside
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from ppdeploy.plan.tunnel import FOLDER, INTERFACE, PRIVATE_KEY, PUBLIC_KEY, UNIT_NAME
from tests.lab.cluster import PIPELINE, Cluster, Done, no_change

#: All files outside what a host writes by itself and its packages bring, with bytes, mode and owner; and its links.
_STATE = r"""
find /etc /opt /var/lib/ppdeploy /usr/local -xdev -path /etc/wireguard -prune -o \( -type d -printf '%p %M %u:%g\n' \
  -o -type l -printf '%p %l\n' -o -type f -printf '%p %M %u:%g\n' -exec sha256sum {} + \) 2>/dev/null | sort
ls /sys/class/net
"""

NODES = ("node1", "node2")
ADDRESSES = ("10.213.117.11", "10.213.117.12")
SECOND = ADDRESSES[1]

MARK = b"a handoff that nobody else is to read"

#: Prints how many of the packets on a link hold the mark; ends with its input.
_SNIFF = f"""
import socket, select, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
wire.bind((sys.argv[1], 0))
print("ready", flush=True)
seen = all_of_them = 0
while True:
    readable, _, _ = select.select([wire, sys.stdin], [], [])
    if wire in readable:
        packet = wire.recv(65536)
        all_of_them += 1
        seen += {MARK!r} in packet
    elif sys.stdin in readable:
        break
print(all_of_them, seen)
"""

_LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 5001)) as door:
    door.settimeout(30)
    came, _ = door.accept()
    print(came.makefile("rb").read().decode())
"""

_SEND = f"""
import socket, sys
with socket.create_connection((sys.argv[1], 5001), 20) as way:
    way.sendall({MARK!r})
"""


@dataclass
class Encrypted(Cluster):
    """The lab as a cluster on which the role fabric_encryption alone is run, as a person would."""

    def state(self) -> dict[str, list[str]]:
        """Return every file of the hosts and the names of their links."""
        return {node: self.out(node, _STATE).splitlines() for node in NODES}

    def encrypt(self, kind: str, *words: str, third: bool = False) -> Done:
        """Take facts, plan, and run the role on two hosts, or with a third in their pipeline."""
        tree = yaml.safe_load(self.lab.inventory.read_text(encoding="utf-8"))
        hosts = tree["vllm"]["children"][PIPELINE]["hosts"]
        if not third:
            del hosts["node3"]
        tree["vllm"]["vars"] |= {"ppdeploy_fabric_encryption": kind, "ppdeploy_system_packages": "archives"}
        self.inventory = self.elsewhere / f"{kind}-{len(hosts)}.yml"
        self.inventory.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        return self.ansible_playbook("--tags", "fabric_encryption", *words)

    def peers(self, node: str) -> set[str]:
        """Return the public keys that the host's open tunnel knows."""
        return set(self.out(node, f"wg show {INTERFACE} peers").split())

    def key(self, node: str) -> str:
        """Return the host's public key."""
        return self.out(node, f"cat {PUBLIC_KEY}")

    def seen(self, address: str) -> tuple[int, int]:
        """Send the mark from node1 to node2's `address`; return the packets on node2's link, and those that show it."""
        watch = subprocess.Popen(
            [*inside(self.lab.namespace), sys.executable, "-c", _SNIFF, "vf-node2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watch.stdout is not None
        assert watch.stdout.readline() == "ready\n"
        self.lab.exec_ssh(
            "node2", ["systemd-run", "--quiet", "--collect", "--unit=ear", "python3", "-c", _LISTEN, address]
        )
        self.out("node2", "for _ in $(seq 100); do ss -Hltn | grep -q :5001 && exit 0; sleep 0.1; done; exit 1")
        self.lab.exec_ssh("node1", ["python3", "-c", _SEND, address])
        self.out("node2", "for _ in $(seq 100); do systemctl -q is-active ear || exit 0; sleep 0.1; done; exit 1")
        time.sleep(0.5)
        said, _ = watch.communicate("\n", timeout=20)
        packets, marked = said.split()
        return int(packets), int(marked)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    """Bare hosts, taken down at the end: two, and a third that comes and goes."""
    lab = Lab(f"{default_name()}-encryption")
    try:
        lab.down()
        inventory = lab.up(3, inventory=LabInventory.one_pipeline(3, model=str(tiny_model())), owner=os.getpid())
        yield Encrypted(lab, inventory, tmp_path_factory.mktemp("encryption"), [])
    finally:
        lab.down()


@pytest.fixture(scope="module")
def bare(pair: Encrypted) -> dict[str, list[str]]:
    """The hosts as they were before anything was encrypted."""
    return pair.state()


@pytest.mark.skipif(Path("/sys/module/wireguard").exists(), reason="this machine's kernel has WireGuard")
def test_a_kernel_without_wireguard_is_refused_before_any_host_is_touched(
    pair: Encrypted, bare: dict[str, list[str]]
) -> None:
    done = pair.encrypt("wireguard")
    assert done.code != 0
    assert f"its kernel {os.uname().release} has no WireGuard (node1): boot a kernel that has it" in done.out, done.said
    assert done.changed() == no_change()
    assert pair.state() == bare


def test_check_changes_nothing(pair: Encrypted, bare: dict[str, list[str]]) -> None:
    done = pair.encrypt("wireguard-go", "--check", "--diff")
    assert done.code == 0, done.said
    assert min(done.changed().values()) > 0
    assert "+ExecStart=wireguard-go ppdeploy0" in done.out
    assert pair.state() == bare


@pytest.fixture(scope="module")
def applied(pair: Encrypted, bare: dict[str, list[str]]) -> Done:
    """The first apply, as talkative as it gets."""
    assert bare
    done = pair.encrypt("wireguard-go", "-vvvv", "--diff")
    assert done.code == 0, done.said
    return done


def test_every_node_has_a_key_of_its_own_that_never_left_it(pair: Encrypted, applied: Done) -> None:
    keys = {node: pair.out(node, f"cat {PRIVATE_KEY}") for node in NODES}
    assert len(set(keys.values())) == 2
    for node, key in keys.items():
        assert key not in applied.out + applied.err
        assert pair.out(node, f"stat -c '%a %U' {PRIVATE_KEY} {FOLDER}").split("\n") == ["600 root", "700 root"]
        assert pair.peers(node) == {pair.key("node2" if node == "node1" else "node1")}
        # Neither in a file that others read, nor in what runs.
        assert pair.out(node, f"grep -rlF {key} /etc /opt /run /var/lib/ppdeploy 2>/dev/null || true") == PRIVATE_KEY
        assert key not in pair.out(node, "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' ' '")


@pytest.mark.usefixtures("applied")
def test_a_second_run_changes_nothing(pair: Encrypted) -> None:
    before = pair.state()
    done = pair.encrypt("wireguard-go")
    assert (done.code, done.changed()) == (0, no_change()), done.said
    assert pair.state() == before


@pytest.mark.usefixtures("applied")
def test_every_host_looks_as_planned(pair: Encrypted) -> None:
    done, failed = pair.testinfra("test_fabric_encryption")
    assert (done.code, failed) == (0, set()), done.said


@pytest.mark.usefixtures("applied")
def test_on_the_wire_nobody_reads_what_goes_through_the_tunnel(pair: Encrypted) -> None:
    packets, marked = pair.seen("198.18.1.12")
    assert marked > 0, "the listener sees what goes in clear"
    packets, marked = pair.seen(SECOND)
    assert packets > 0
    assert marked == 0


@pytest.mark.usefixtures("applied")
def test_large_packets_pass_and_larger_ones_do_not(pair: Encrypted) -> None:
    pair.out("node1", f"ping -q -c1 -W5 -M do -s 1412 {SECOND}")
    assert pair.out("node1", f"! ping -q -c1 -W1 -M do -s 1413 {SECOND} >/dev/null 2>&1 && echo none") == "none"


@pytest.mark.usefixtures("applied")
def test_it_comes_back_after_a_kill_and_a_boot(pair: Encrypted) -> None:
    back = f"for _ in $(seq 60); do ping -q -c1 -W1 {SECOND} >/dev/null && exit 0; sleep 0.5; done; exit 1"
    pair.out("node2", f"systemctl kill --signal=KILL {UNIT_NAME}")
    pair.out("node1", back)
    pair.lab.reboot("node1")
    pair.out("node1", back)
    assert pair.out("node1", f"systemctl is-active {UNIT_NAME}; systemctl is-system-running").split() == [
        "active",
        "running",
    ]


@pytest.mark.usefixtures("applied")
def test_a_node_that_lost_its_key_gets_another_and_its_peers_learn_it(pair: Encrypted) -> None:
    before = pair.key("node1")
    pair.out("node1", f"rm {PRIVATE_KEY}")
    done = pair.encrypt("wireguard-go")
    assert done.code == 0, done.said
    assert pair.key("node1") != before
    assert pair.peers("node2") == {pair.key("node1")}


@pytest.mark.usefixtures("applied")
def test_a_node_that_comes_and_goes_costs_the_others_no_packet(pair: Encrypted) -> None:
    keys = {node: pair.key(node) for node in NODES}
    program = f"systemctl show --property=MainPID --value {UNIT_NAME}"
    before = {node: pair.out(node, program) for node in NODES}
    # A packet each 20 ms, of both nodes: one that is lost shows a silence of that length.
    for node, peer in zip(NODES, reversed(ADDRESSES), strict=True):
        pair.out(node, f"ping -n -q -c1 -W10 {peer}")
        ping = f"exec ping -n -i 0.02 {peer} >/run/pinged"
        pair.lab.exec_ssh(node, ["systemd-run", "--quiet", "--collect", "--unit=pings", "sh", "-c", ping])
    came = pair.encrypt("wireguard-go", third=True)
    assert came.code == 0, came.said
    keys["node3"] = pair.key("node3")
    assert {node: pair.peers(node) for node in keys} == {
        node: {key for other, key in keys.items() if other != node} for node in keys
    }
    went = pair.encrypt("wireguard-go")
    assert went.code == 0, went.said
    assert {node: pair.peers(node) for node in NODES} == {"node1": {keys["node2"]}, "node2": {keys["node1"]}}
    for node in NODES:
        pair.out(node, "systemctl kill --signal=INT pings")
        said = pair.out(node, "while systemctl -q is-active pings; do sleep 0.1; done; cat /run/pinged")
        answered = {int(number) for number in re.findall(r"icmp_seq=(\d+) ttl", said)}
        # Those that were under way at the end are not waited for.
        assert set(range(1, max(answered) + 1)) == answered, said[-2000:]
        assert len(answered) > 100
    assert {node: pair.out(node, program) for node in NODES} == before


@pytest.mark.usefixtures("applied")
def test_switched_off_it_leaves_nothing_but_the_packages(pair: Encrypted, bare: dict[str, list[str]]) -> None:
    done = pair.encrypt("none")
    assert done.code == 0, done.said
    assert min(done.changed().values()) > 0
    # The folder that all roles share.
    left = {
        node: [line for line in lines if not line.startswith("/etc/ppdeploy drwx")]
        for node, lines in pair.state().items()
    }
    assert left == bare
    again = pair.encrypt("none")
    assert (again.code, again.changed()) == (0, no_change()), again.said
