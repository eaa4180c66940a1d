"""`nic_tuning` on two hosts of its own, without a model: what it sets is kept, tried before it is kept, and given back.

The role is run alone, with the plan's own decisions; the hosts' NICs are veth pairs, of which the MTU and the kernel's
settings can be set and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from tests.lab.cluster import Cluster, Done, no_change

PORTS = "/proc/sys/net/ipv4/ip_local_reserved_ports"
RECORD = "/var/lib/ppdeploy/nic-before.json"
MTU = "/sys/class/net/fab0/mtu"

#: All files outside what a host writes by itself, with bytes, mode, owner and target; and what can be tuned.
_STATE = r"""
find /etc /opt /var/lib/ppdeploy /usr/local -xdev \( -type d -printf '%p %M %u:%g\n' \
  -o -type l -printf '%p %l\n' -o -type f -printf '%p %M %u:%g\n' -exec sha256sum {} + \) 2>/dev/null | sort
for file in /proc/sys/net/ipv4/ip_local_reserved_ports /proc/sys/net/ipv4/tcp_*mem /sys/class/net/*/mtu; do
  echo "$file = $(cat "$file")"
done
systemctl list-unit-files --no-legend --no-pager | sort
"""


@dataclass
class Tuned(Cluster):
    """The lab as a cluster on which the role nic_tuning alone is run, as site.yml runs it."""

    def state(self) -> dict[str, list[str]]:
        """Return every file and every setting of the hosts."""
        return {node: self.out(node, _STATE).splitlines() for node in self.lab.nodes}

    def tune(self, *words: str, mtu: int | None, nic_tuning: bool = True) -> Done:
        """Take facts, plan, and run the role."""
        wants: dict[str, object] = {"ppdeploy_nic_tuning": nic_tuning, **({"ppdeploy_mtu": mtu} if mtu else {})}
        self.inventory = replace(self, inventory=self.lab.inventory).edited(self.elsewhere / f"mtu-{mtu}", wants)
        return self.role("nic_tuning", words=words)

    def restore(self, *words: str) -> Done:
        """Give back everything, as `destroy` does: without facts, plan or any variable."""
        role = {"name": "nic_tuning", "tasks_from": "restore.yml"}
        tasks = [{"name": "Give back", "ansible.builtin.import_role": role}]
        play = {"name": "Give back", "hosts": "vllm", "gather_facts": False, "become": True, "tasks": tasks}
        return self.book("restore", play, *words)

    def set_switch(self, mtu: int, *nodes: str) -> None:
        """Let the lab's side of these hosts' fabric links carry packets of that size."""
        for node in nodes:
            self.lab.run_in_ns(["ip", "link", "set", f"vf-{node}", "mtu", str(mtu)])


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """Two bare hosts, taken down at the end."""
    lab = Lab(f"{default_name()}-tuning")
    try:
        lab.down()
        inventory = lab.up(2, inventory=LabInventory.one_pipeline(2, model=str(tiny_model())), owner=os.getpid())
        yield Tuned(lab, inventory, tmp_path_factory.mktemp("tuning"), [])
    finally:
        lab.down()


@pytest.fixture(scope="module")
def bare(tuned: Tuned) -> dict[str, list[str]]:
    """The hosts as they were before anything was tuned."""
    return tuned.state()


def test_check_shows_it_all_and_changes_nothing(tuned: Tuned, bare: dict[str, list[str]]) -> None:
    done = tuned.tune("--check", "--diff", mtu=9000)
    assert done.code == 0, done.said
    assert min(done.changed().values()) > 0
    for line in (
        "-mtu = 1500",
        "+mtu = 9000",
        "+sysctl.net.ipv4.ip_local_reserved_ports = 29500-29516",
        "+net.ipv4.ip_local_reserved_ports = 29500-29516",
        "+MTUBytes=9000",
        "+ExecStart=/usr/bin/python3 -I /opt/ppdeploy/nic/nic.py boot",
    ):
        assert f"\n{line}\n" in done.out, line
    assert tuned.state() == bare


def test_an_mtu_that_one_host_cannot_have_is_refused_and_every_host_is_as_before(
    tuned: Tuned, bare: dict[str, list[str]]
) -> None:
    tuned.set_switch(9000, "node1")
    done = tuned.tune(mtu=9000)
    assert done.code != 0
    said = "the MTU 9000 does not pass from fab0 of node1 (198.18.1.11) to 198.18.1.12: packets of 9000 bytes do not"
    assert said in done.out, done.said
    assert "does not pass from fab0 of node2 (198.18.1.12) to 198.18.1.11" in done.out
    assert "take the MTU out of the inventory" in done.out
    assert done.changed() == no_change()
    assert tuned.state() == bare


def test_an_mtu_that_one_nic_refuses_leaves_it_on_no_host(tuned: Tuned, bare: dict[str, list[str]]) -> None:
    """As a VLAN does whose NIC below has a smaller MTU; no Ethernet takes one of 70000."""
    role = {
        "role": "nic_tuning",
        "nic_tuning_interface": "fab0",
        "nic_tuning_settings": "{{ {'mtu': '70000' if inventory_hostname == 'node2' else '9000'} }}",
        "nic_tuning_source": "198.18.1.1{{ inventory_hostname[-1] }}",
        "nic_tuning_peers": "{{ ['198.18.1.11', '198.18.1.12'] | difference([nic_tuning_source]) }}",
    }
    play = {"name": "Tune", "hosts": "vllm", "gather_facts": False, "become": True, "any_errors_fatal": True}
    done = tuned.book("refused", {**play, "roles": [role]})
    assert done.code != 0
    assert "fab0 of node2 does not take the MTU 70000 (Invalid argument)" in done.out, done.said
    assert tuned.state() == bare


@pytest.fixture(scope="module")
def applied(tuned: Tuned, bare: dict[str, list[str]]) -> Done:
    """The first tuning, of a fabric that carries large packets."""
    assert bare
    tuned.set_switch(9000, *tuned.lab.nodes)
    done = tuned.tune(mtu=9000)
    assert done.code == 0, done.said
    return done


def test_what_is_wanted_is_set_and_what_was_there_is_remembered(tuned: Tuned, applied: Done) -> None:
    assert min(applied.changed().values()) > 0
    for node in tuned.lab.nodes:
        assert tuned.out(node, f"cat {MTU} {PORTS}").split() == ["9000", "29500-29516"]
        assert json.loads(tuned.out(node, f"cat {RECORD}"))["settings"] == {
            "mtu": "1500",
            "sysctl.net.ipv4.ip_local_reserved_ports": "",
        }
    # A whole packet of 9000 bytes really passes, in the words of the tool that everyone has.
    tuned.out("node1", "ping -q -c1 -W2 -M do -s 8972 198.18.1.12")


@pytest.mark.usefixtures("applied")
def test_a_second_run_changes_nothing(tuned: Tuned) -> None:
    before = tuned.state()
    done = tuned.tune(mtu=9000)
    assert (done.code, done.changed()) == (0, no_change()), done.said
    assert tuned.state() == before


@pytest.mark.usefixtures("applied")
def test_every_host_looks_as_planned(tuned: Tuned) -> None:
    done, failed = tuned.testinfra("test_nic_tuning")
    assert (done.code, failed) == (0, set()), done.said


@pytest.mark.usefixtures("applied")
def test_a_reboot_keeps_it(tuned: Tuned) -> None:
    tuned.lab.reboot("node1")
    assert tuned.out("node1", f"cat {MTU} {PORTS}").split() == ["9000", "29500-29516"]
    assert tuned.out(
        "node1", "systemctl is-active ppdeploy-nic systemd-networkd; systemctl is-system-running"
    ).split() == [
        "active",
        "active",
        "running",
    ]
    # Whoever has networkd configure the NIC anew keeps it too.
    tuned.out("node1", "networkctl reconfigure fab0; networkctl up fab0")
    assert tuned.out("node1", f"cat {MTU}") == "9000"


@pytest.mark.usefixtures("applied")
def test_restoring_gives_back_every_byte_and_every_value(tuned: Tuned, bare: dict[str, list[str]]) -> None:
    done = tuned.restore("--limit", "node1")
    assert done.code == 0, done.said
    assert done.changed()["node1"] > 0
    assert tuned.state()["node1"] == bare["node1"]


@pytest.mark.usefixtures("applied")
def test_what_is_no_longer_wanted_is_given_back_too(tuned: Tuned, bare: dict[str, list[str]]) -> None:
    done = tuned.tune(mtu=None, nic_tuning=False)
    assert done.code == 0, done.said
    # The first one is restored already, and nothing is asked of it.
    assert done.changed()["node1"] == 0
    assert done.changed()["node2"] > 0
    assert tuned.state() == bare
