"""The lab's hosts behave as real ones do, and touch nothing of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from ppdeploy.errors import ApplyError, BlockedError, InputError, UnreachableError
from ppdeploy.lab import Lab
from ppdeploy.lab.keeper import start_time
from ppdeploy.lab.ready import up_with_vllm
from ppdeploy.lab.rootfs import machine_release
from tests.lab.cluster import described


@pytest.fixture
def node1(lab: Lab) -> Iterator[str]:
    """A host with whole links, which the test may treat as it likes."""
    yield "node1"
    lab.heal("node1")
    lab.shape("node1", "none", "both")
    lab.memory_limit("node1", None)
    lab.boot("node1")


def out(lab: Lab, node: str, script: str) -> str:
    """Run a shell script on a host and return what it printed."""
    return lab.exec_ssh(node, ["sh", "-ec", script]).stdout.strip()


def pings(lab: Lab, node: str, address: str) -> bool:
    return lab.exec_ssh(node, ["ping", "-c1", "-W1", address], check=False).returncode == 0


def until(what: str, condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until `condition` holds; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.1)


def test_every_host_has_finished_booting(lab: Lab) -> None:
    assert lab.nodes == ["node1", "node2"]
    for node in lab.nodes:
        assert out(lab, node, "systemctl is-system-running") == "running"


def test_management_has_the_default_route_and_fabric_has_its_own_subnet(lab: Lab) -> None:
    for index, node in enumerate(lab.nodes, start=1):
        links = json.loads(out(lab, node, "ip -json -4 addr show"))
        found = {link["ifname"]: [entry["local"] for entry in link["addr_info"]] for link in links}
        assert found == {
            "lo": ["127.0.0.1"],
            "host0": [f"198.18.0.{10 + index}"],
            "fab0": [f"198.18.1.{10 + index}"],
        }
        routes = json.loads(out(lab, node, "ip -json route show default"))
        assert [(route["gateway"], route["dev"]) for route in routes] == [("198.18.0.1", "host0")]


def test_a_host_finds_itself_at_127_0_1_1_and_no_peer_by_name(lab: Lab) -> None:
    assert out(lab, "node1", "hostname; getent hosts node1").split() == ["node1", "127.0.1.1", "node1"]
    assert lab.exec_ssh("node1", ["getent", "hosts", "node2"], check=False).returncode == 2


def test_hosts_reach_each_other_and_nothing_else(lab: Lab) -> None:
    assert pings(lab, "node1", "198.18.0.12")
    assert pings(lab, "node1", "198.18.1.12")
    own = subprocess.run(["ip", "-json", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    addresses = [entry["local"] for link in json.loads(own) for entry in link["addr_info"]]
    outside = [address for address in addresses if not address.startswith("127.")]
    assert outside, "this machine has no address to try"
    for address in outside:
        assert not pings(lab, "node1", address)


def test_hosts_have_identities_of_their_own(lab: Lab) -> None:
    for command in (
        "cat /etc/machine-id",
        "cat /etc/ssh/ssh_host_ed25519_key.pub",
        "cat /sys/class/net/host0/address",
    ):
        assert out(lab, "node1", command) != out(lab, "node2", command)


def test_hosts_know_no_package_source_of_this_machine(lab: Lab) -> None:
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sites = {line.split("//")[-1].rstrip("/") for line in listing.splitlines() if line.strip()}
    assert sites
    for site in sites:
        found = lab.exec_ssh(
            "node1", ["grep", "-rlF", site, "/etc/apt", "/etc/resolv.conf", "/var/lib/apt"], check=False
        )
        assert (found.returncode, found.stdout) == (1, "")
    assert out(lab, "node1", ". /etc/os-release; echo $VERSION_CODENAME") == machine_release()


def test_the_inventory_works_from_an_ordinary_shell_with_host_key_checking(lab: Lab, tmp_path: Path) -> None:
    ansible = Path(sys.executable).with_name("ansible")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_HOST_KEY_CHECKING": "true",
        # No connection outlives a command, or the second would go through the first one's.
        "ANSIBLE_SSH_ARGS": "-o ControlMaster=no",
    }
    command = [
        str(ansible),
        "-i",
        str(lab.inventory),
        "vllm",
        "-m",
        "ansible.builtin.command",
        "-a",
        "uname -n",
        "-o",
    ]
    good = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "(stdout) node1" in good.stdout
    assert "(stdout) node2" in good.stdout

    # The same with the hosts' keys swapped: nobody gets in.
    swapped = tmp_path / "known_hosts"
    lines = [line.split() for line in lab.ssh.known_hosts.read_text().splitlines()]
    keys = [line[2] for line in reversed(lines)]
    swapped.write_text("".join(f"{line[0]} {line[1]} {key}\n" for line, key in zip(lines, keys, strict=True)))
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(lab.inventory.read_text().replace(str(lab.ssh.known_hosts), str(swapped)))
    command[2] = str(inventory)
    bad = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert bad.returncode == 4, bad.stdout + bad.stderr
    assert "Host key verification failed" in bad.stdout + bad.stderr


def test_the_inventory_says_what_a_cpu_pipeline_needs(lab: Lab) -> None:
    vllm = yaml.safe_load(lab.inventory.read_text())["vllm"]
    assert vllm["vars"]["ppdeploy_device"] == "cpu"
    hosts = vllm["children"]["tiny"]["hosts"]
    assert [hosts[node]["ansible_host"] for node in lab.nodes] == ["198.18.0.11", "198.18.0.12"]


def throughput(lab: Lab, sender: str, receiver: str) -> float:
    """Return what one TCP stream over the fabric carries, in Mbit/s, measured by iperf3."""
    lab.exec_ssh(receiver, ["systemd-run", "--unit=iperf", "--collect", "iperf3", "-s", "-1"])
    until("iperf3 listens", lambda: ":5201" in out(lab, receiver, "ss -Hltn"))
    said = out(lab, sender, f"iperf3 -J -t 1 -c {lab.fabric_address(receiver)}")
    return float(json.loads(said)["end"]["sum_received"]["bits_per_second"]) / 1e6


def test_a_shaped_link_carries_its_rate_both_ways_and_after_a_reboot(lab: Lab, node1: str) -> None:
    lab.shape(node1, "50mbit")
    assert 30 < throughput(lab, "node1", "node2") < 60
    assert 30 < throughput(lab, "node2", "node1") < 60
    lab.reboot(node1)
    assert 30 < throughput(lab, "node1", "node2") < 60
    assert 30 < throughput(lab, "node2", "node1") < 60
    lab.shape(node1, "none")
    assert throughput(lab, "node1", "node2") > 200


def test_a_reboot_is_real_and_leaves_the_peer_and_a_cut_alone(lab: Lab, node1: str) -> None:
    boots, peer = lab.boots(node1), lab.pid("node2")
    boot_id = out(lab, node1, "cat /proc/sys/kernel/random/boot_id")
    out(lab, node1, "echo kept > /root/kept; touch /run/lost")
    out(lab, node1, "ip link set fab0 mtu 1400; sysctl -qw net.ipv4.tcp_retries2=7")
    out(lab, node1, "systemctl add-wants multi-user.target network-online.target")
    lab.cut(node1)
    lab.reboot(node1)
    assert lab.boots(node1) == boots + 1
    assert lab.pid("node2") == peer
    assert out(lab, node1, "cat /proc/sys/kernel/random/boot_id") != boot_id
    assert out(lab, node1, "cat /root/kept; test ! -e /run/lost; cat /sys/class/net/fab0/mtu") == "kept\n1500"
    assert out(lab, node1, "sysctl -n net.ipv4.tcp_retries2") == "15"
    assert out(lab, node1, "systemctl is-active network-online.target") == "active"
    out(lab, node1, "rm /etc/systemd/system/multi-user.target.wants/network-online.target")
    assert not pings(lab, node1, "198.18.1.12")
    lab.heal(node1)
    until("fabric is back", lambda: pings(lab, node1, "198.18.1.12"))


@pytest.mark.parametrize("silent", [False, True])
def test_a_cut_fabric_leaves_management(lab: Lab, node1: str, silent: bool) -> None:
    lab.cut(node1, silent=silent)
    carrier = "1" if silent else "0"
    assert out(lab, node1, "cat /sys/class/net/fab0/carrier") == carrier
    assert not pings(lab, "node2", "198.18.1.11")
    assert pings(lab, "node2", "198.18.0.11")
    lab.heal(node1)
    until("fabric is back", lambda: pings(lab, "node2", "198.18.1.11"))


def test_a_killed_host_is_gone_at_once_and_boots_again_with_its_disk(lab: Lab, node1: str) -> None:
    out(lab, node1, "echo kept > /root/kept; systemd-run --quiet --unit=sleeper sleep 1000")
    init, boots, peer = lab.pid(node1), lab.boots(node1), lab.pid("node2")
    lab.kill(node1)
    assert init is not None
    assert start_time(init) is None
    assert lab.pid(node1) is None
    with pytest.raises(UnreachableError, match="node1"):
        lab.exec_ssh(node1, ["true"])
    assert [node.system for node in lab.status().nodes] == ["off", "running"]
    lab.boot(node1)
    assert lab.boots(node1) == boots + 1
    assert lab.pid("node2") == peer
    assert out(lab, node1, "cat /root/kept") == "kept"
    assert lab.exec_ssh(node1, ["systemctl", "is-active", "sleeper"], check=False).stdout.strip() == "inactive"


def test_a_host_that_is_switched_off_stays_off_until_booted(lab: Lab, node1: str) -> None:
    lab.exec_ssh(node1, ["systemctl", "poweroff"], check=False)
    until("node1 is off", lambda: lab.status().nodes[0].system == "off", 20)
    lab.boot(node1)
    assert out(lab, node1, "systemctl is-system-running") == "running"


def test_units_of_one_name_on_two_hosts_are_two_groups(lab: Lab) -> None:
    start = "systemd-run --quiet --unit=twin sh -c 'sleep 1001 & sleep 1002 & wait'"
    for node in lab.nodes:
        out(lab, node, start)
    out(lab, "node1", "systemctl kill --signal=SIGKILL twin")
    until("twin ended", lambda: lab.exec_ssh("node1", ["pgrep", "-f", "^sleep 100"], check=False).stdout == "")
    assert len(out(lab, "node2", "pgrep -f '^sleep 100'").split()) == 2
    out(lab, "node2", "systemctl stop twin")
    out(lab, "node1", "systemctl reset-failed twin")


def test_a_units_address_filter_admits_the_peer_only(lab: Lab) -> None:
    out(
        lab,
        "node1",
        "systemd-run --quiet --unit=filtered -p IPAddressDeny=any -p 'IPAddressAllow=127.0.0.0/8 198.18.1.12' "
        "python3 -m http.server 8123",
    )
    knock = "import urllib.request as u; print(u.urlopen('http://198.18.1.11:8123', timeout=2).status)"
    until("the server listens", lambda: ":8123" in out(lab, "node1", "ss -Hltn"))
    assert lab.exec_ssh("node2", ["python3", "-c", knock]).stdout.strip() == "200"
    stranger = lab.run_in_ns([sys.executable, "-c", knock], check=False)
    assert stranger.returncode != 0
    assert "timed out" in stranger.stderr
    out(lab, "node1", "systemctl stop filtered")


def memory_total(lab: Lab, node: str) -> int:
    """Return the memory that a host says it has, in KiB."""
    return int(out(lab, node, "sed -n 's/^MemTotal: *//p' /proc/meminfo").split()[0])


def test_a_memory_limit_ends_a_greedy_process_of_that_host_only(lab: Lab, node1: str) -> None:
    used = lab.status().nodes[0].memory_bytes
    assert used is not None
    greedy = ["python3", "-c", f"print(len(bytearray({400 << 20})))"]
    lab.memory_limit(node1, used + (200 << 20))
    assert lab.exec_ssh(node1, greedy, check=False).returncode != 0
    assert lab.exec_ssh("node2", greedy).stdout.strip() == str(400 << 20)
    assert memory_total(lab, node1) == (used + (200 << 20)) >> 10
    lab.memory_limit(node1, None)
    assert memory_total(lab, node1) == memory_total(lab, "node2")
    assert lab.exec_ssh(node1, greedy).stdout.strip() == str(400 << 20)


def test_a_host_can_touch_neither_clock_nor_modules_nor_kernel_settings(lab: Lab) -> None:
    for command in (
        "date -s 2001-01-01",
        "echo 1 > /proc/sys/kernel/sysrq",
        "echo 7 > /proc/sys/vm/swappiness",
    ):
        assert lab.exec_ssh("node1", ["sh", "-c", command], check=False).returncode != 0
    capabilities = int(out(lab, "node1", "sed -n 's/^CapBnd:\t//p' /proc/1/status"), 16)
    sys_module, sys_time = 16, 25
    assert not capabilities & (1 << sys_module | 1 << sys_time)


def test_up_again_leaves_running_hosts_alone_and_starts_the_others(lab: Lab, node1: str) -> None:
    pids = [lab.pid(node) for node in lab.nodes]
    up_with_vllm(lab, 2, inventory=described(), owner=os.getpid())
    assert [lab.pid(node) for node in lab.nodes] == pids
    lab.kill(node1)
    up_with_vllm(lab, 2, inventory=described(), owner=os.getpid())
    assert lab.pid(node1) not in (None, pids[0])
    assert lab.pid("node2") == pids[1]


def test_a_lab_with_other_hosts_is_refused(lab: Lab) -> None:
    with pytest.raises(BlockedError, match="2 hosts"):
        lab.up(3, owner=os.getpid())


def test_a_lab_that_a_process_holds_is_taken_down_by_no_other(lab: Lab) -> None:
    script = f"from ppdeploy.lab import Lab\nLab({lab.name!r}).down()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "BlockedError" in done.stderr
    assert f"held by process {os.getpid()}," in done.stderr
    assert lab.pid("node1") is not None


def test_an_unknown_host_and_a_wrong_rate_are_refused_in_a_sentence(lab: Lab) -> None:
    with pytest.raises(InputError, match=r"the lab has no host 'node3' .*: use node1, node2"):
        lab.exec_ssh("node3", ["true"])
    with pytest.raises(InputError, match="'fast' is not a rate"):
        lab.shape("node1", "fast")


def test_a_failed_command_says_where_and_what(lab: Lab) -> None:
    with pytest.raises(ApplyError, match=r"`ls /nowhere` returned 2 \(node2\): ls: cannot access '/nowhere'"):
        lab.exec_ssh("node2", ["ls", "/nowhere"])


def test_a_host_sends_standard_input_and_arguments_through_unchanged(lab: Lab) -> None:
    words = ["a b", "'", '"$HOME"', "*", ""]
    said = lab.exec_ssh(
        "node1", ["python3", "-c", "import sys; print(sys.argv[1:], sys.stdin.read())", *words], stdin="é\n"
    )
    assert said.stdout == f"{words} é\n\n"


def test_this_machine_keeps_its_links(lab: Lab) -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert not [name for name in names if name.startswith(("vb-node", "vf-node", "br-mgmt", "br-fab"))]
    inside = json.loads(lab.run_in_ns(["ip", "-json", "link"]).stdout)
    assert {link["ifname"] for link in inside} == {
        *("lo", "br-mgmt", "br-fab", "vb-node1", "vf-node1", "vb-node2", "vf-node2")
    }
