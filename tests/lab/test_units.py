"""The units and the table of nftables on three hosts of their own, without a model: peers get in, nobody else does.

Two hosts are a pipeline, the third one is on both networks and no peer. The roles gang_agent and firewall are run as
site.yml runs them; the rank's unit is the planned one, with a plain server in the place of vLLM.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import pytest
import yaml

from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory, LabPipeline
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from ppdeploy.paths import data_root
from ppdeploy.run.private import memory_folder
from tests.lab.cluster import Cluster, Done, no_change

STRANGER = "node3"
TABLE = "/usr/sbin/nft list table inet ppdeploy"
#: Another program's rules, which shut a port that ours leaves open.
RIVAL = "table inet rival { chain input { type filter hook input priority 0; tcp dport 40001 drop; }; }"

_LISTENS = "for _ in $(seq 300); do ss -Hltn | grep -q :{0} && break; sleep 0.1; done; ss -Hltn | grep -q :{0}"

OURS = "ppdeploy-firewall ppdeploy-agent"

_CONNECT = """
import socket, sys
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), 2).close()
        print(port, "open")
    except TimeoutError:
        print(port, "silent")
    except OSError as error:
        print(port, error.strerror)
"""


#: What stands behind a rank's port: as vLLM's ranks do with what their peers send, it loads whatever arrives. A pickle
#: may call anything, here a file in the folder of the unit's state is made, named by who sent it.
_LOADS = """
import pickle, socketserver
class Load(socketserver.StreamRequestHandler):
    def handle(self):
        pickle.loads(self.rfile.read())
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(("", 41001), Load).serve_forever()
"""

_ATTACK = """
import os, pickle, socket, sys
class Call:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)
try:
    with socket.create_connection((sys.argv[1], 41001), 2) as peer:
        peer.sendall(pickle.dumps(Call()))
except OSError:
    pass
"""


@dataclass
class Guarded(Cluster):
    """The lab as a cluster of which the roles gang_agent and firewall alone are run."""

    def guard(self, *words: str, firewall: str = "nftables") -> Done:
        """Take facts, plan, and run the roles."""
        wants: dict[str, Any] = {"ppdeploy_firewall": firewall}
        self.inventory = replace(self, inventory=self.lab.inventory).edited(self.elsewhere / firewall, wants)
        return self.role("gang_agent", "firewall", words=words)

    def reach(self, source: str, address: str, *ports: int) -> dict[int, str]:
        """Return what becomes of connections from one host to another's ports."""
        told = self.lab.exec_ssh(source, ["python3", "-c", _CONNECT, address, *map(str, ports)]).stdout
        return {int(port): state for port, state in (line.split(" ", 1) for line in told.splitlines())}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, stages: list[tuple[str, float]]) -> Iterator[Guarded]:
    """Three bare hosts, taken down at the end."""
    lab = Lab(f"{default_name()}-units")
    try:
        lab.down()
        pipelines = (LabPipeline("tiny", ("node1", "node2"), str(tiny_model())),)
        inventory = lab.up(3, inventory=LabInventory(pipelines=pipelines), owner=os.getpid())
        yield Guarded(lab, inventory, tmp_path_factory.mktemp("units"), stages)
    finally:
        lab.down()


@pytest.fixture(scope="module")
def applied(guarded: Guarded) -> Done:
    """The first apply, beside another program's table."""
    guarded.out("node1", "apt-get -qq update && apt-get -qq install -y nftables >/dev/null")
    guarded.out("node1", f"nft '{RIVAL}'")
    done = guarded.guard()
    assert done.code == 0, done.said
    return done


@pytest.mark.usefixtures("applied")
def test_a_second_apply_changes_nothing(guarded: Guarded) -> None:
    done = guarded.guard()
    assert done.code == 0, done.said
    assert done.changed() == no_change()


@pytest.mark.usefixtures("applied")
def test_only_peers_reach_what_listens_and_ssh_stays_open(guarded: Guarded) -> None:
    ports = (29501, 29516, 8000, 40000, 40001)
    listeners = " & ".join(f"python3 -m http.server {port}" for port in ports)
    guarded.out("node1", f"systemd-run -q --collect --unit=listeners sh -c '{listeners}'")
    for port in ports:
        guarded.out("node1", _LISTENS.format(port))
    fabric, management = guarded.lab.fabric_address("node1"), guarded.lab.management_address("node1")
    try:
        peer = guarded.reach("node2", fabric, *ports, 29500, 22)
        # What another program drops stays dropped, also where our table lets it through.
        assert peer == {**dict.fromkeys((*ports, 29500, 22), "open"), 40001: "silent"}
        assert guarded.reach(STRANGER, fabric, *ports) == dict.fromkeys(ports, "silent")
        # Elsewhere, ports of no concern to us are others' affair.
        outside = guarded.reach(STRANGER, management, *ports, 22)
        assert outside == {29501: "silent", 29516: "silent", 8000: "silent", 40000: "open", 40001: "silent", 22: "open"}
    finally:
        guarded.out("node1", "systemctl stop listeners")


@pytest.mark.usefixtures("applied")
def test_others_tables_are_left_alone_and_theirs_leaves_ours(guarded: Guarded) -> None:
    assert "tcp dport 40001 drop" in guarded.out("node1", "nft list table inet rival")
    # Debian's own nftables.service throws away every table when it begins, and each time that it is told to begin anew.
    guarded.out("node1", "systemctl start nftables; systemctl restart ppdeploy-firewall")
    for word in ("restart", "reload"):
        # systemctl waits for the unit that it was given, and ours comes after that.
        wait = f"for _ in $(seq 100); do {TABLE} 2>/dev/null && break; sleep 0.1; done; {TABLE}"
        assert "counter" in guarded.out("node1", f"systemctl {word} nftables; {wait}"), word
    assert guarded.out("node1", "nft list tables").splitlines().count("table inet ppdeploy") == 1
    guarded.out("node1", "systemctl disable --now nftables; systemctl restart ppdeploy-firewall")


@pytest.mark.usefixtures("applied")
def test_every_host_looks_as_planned_and_a_weakened_unit_is_found(guarded: Guarded, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(guarded.plan().model_dump_json())
    done, failed = guarded.testinfra("test_firewall", plan=plan)
    assert (done.code, failed) == (0, set()), done.said
    # There is no rank here, so of the agent's tests those about ranks fail: only what the drop-in adds counts.
    _, before = guarded.testinfra("test_gang_agent", plan=plan)
    found = "test_gang_agent::test_agent_and_fence_are_hardly_exposed node2"
    assert found not in before
    folder = "/run/systemd/system/ppdeploy-agent.service.d"
    weak = "[Service]\\nProtectSystem=no\\nCapabilityBoundingSet=CAP_SYS_ADMIN"
    guarded.out("node2", f"mkdir -p {folder}; printf '{weak}\\n' > {folder}/weak.conf; systemctl daemon-reload")
    try:
        done, after = guarded.testinfra("test_gang_agent", plan=plan)
    finally:
        guarded.out("node2", f"rm -r {folder}; systemctl daemon-reload")
    assert after - before == {found}, done.said


@pytest.mark.usefixtures("applied")
def test_the_ranks_unit_answers_peers_and_nobody_else_by_itself(guarded: Guarded) -> None:
    """The unit's own filter, without the table: what every cluster has, whatever `ppdeploy_firewall` says."""
    unit = (data_root() / "templates/ppdeploy-rank@.service.j2").read_text(encoding="utf-8")
    unit = unit.replace("{{ node.managed }}", "a test")
    planned = " ".join(["localhost", *map(guarded.lab.fabric_address, ("node1", "node2"))])
    folder = "/run/systemd/system"
    guarded.lab.exec_ssh("node1", ["sh", "-c", f"cat > {folder}/ppdeploy-rank@.service"], stdin=unit)
    drop_in = (
        "[Service]\nEnvironmentFile=\nExecStartPre=\n"
        f"ExecStart=/bin/sh -c 'python3 /run/loads.py & exec python3 -m http.server 41000'\nIPAddressAllow={planned}\n"
    )
    guarded.lab.exec_ssh("node1", ["sh", "-c", "cat > /run/loads.py"], stdin=_LOADS)
    guarded.out("node1", "getent passwd ppdeploy || useradd -r -g ppdeploy -d /var/lib/ppdeploy ppdeploy")
    # The agent would end a rank that is none of its pipeline.
    guarded.out("node1", f"mkdir -p '{folder}/ppdeploy-rank@probe.service.d'; systemctl stop {OURS}")
    target = f"{folder}/ppdeploy-rank@probe.service.d/x.conf"
    guarded.lab.exec_ssh("node1", ["sh", "-c", f"cat > {target}"], stdin=drop_in)
    try:
        guarded.out("node1", "systemctl daemon-reload; systemctl start ppdeploy-rank@probe")
        why = "{ journalctl --no-pager --unit=ppdeploy-rank@probe >&2; exit 1; }"
        guarded.out("node1", f"{_LISTENS.format(41000)} || {why}")
        fabric, management = guarded.lab.fabric_address("node1"), guarded.lab.management_address("node1")
        assert guarded.reach("node2", fabric, 41000) == {41000: "open"}
        assert guarded.reach("node1", "127.0.0.1", 41000) == {41000: "open"}
        assert guarded.reach(STRANGER, fabric, 41000) == {41000: "silent"}
        assert guarded.reach(STRANGER, management, 41000) == {41000: "silent"}
        guarded.out("node1", f"{_LISTENS.format(41001)} || {why}")
        for node, address in ((STRANGER, fabric), (STRANGER, management), ("node2", fabric)):
            arrived = f"/var/lib/ppdeploy/probe/{node}"
            guarded.lab.exec_ssh(node, ["python3", "-c", _ATTACK, address, arrived])
            # What a peer sends is loaded, which shows that there was something to keep from the others.
            look = f"for _ in $(seq 20); do test -d {arrived} && break; sleep 0.1; done; ls -d {arrived} || true"
            assert guarded.out("node1", look) == (arrived if node == "node2" else ""), (node, address)
        told = guarded.out("node1", "systemd-analyze security --no-pager ppdeploy-rank@probe.service | tail -1")
        found = re.search(r"\.service: ([0-9.]+) ", told)
        assert found, told
        assert float(found[1]) <= 2.0, told
    finally:
        guarded.out("node1", f"systemctl stop ppdeploy-rank@probe; systemctl start {OURS}")
        guarded.out("node1", f"rm -rf {folder}/ppdeploy-rank@* /var/lib/ppdeploy/probe /run/loads.py")
        guarded.out("node1", "systemctl daemon-reload")


#: Everything that processes of a host show to others, and their environments, again and again.
_WATCH = r"""
import glob, time
seen = set()
with open("/run/seen", "wb", buffering=0) as out:
    while True:
        for path in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
            try:
                text = open(path, "rb").read()
            except OSError:
                continue
            if hash(text) not in seen:
                seen.add(hash(text))
                out.write(text + b"\n")
        time.sleep(0.05)
"""

#: Names of the files that hold one of the words on stdin, and how often the journal has one.
_SEARCH = r"""
umask 077; cat > /run/words
find /etc /opt /root /run /srv /tmp /usr/local /var -xdev -type f -not -path /run/words -print0 2>/dev/null |
  xargs -0 grep -lF -f /run/words 2>/dev/null || true
echo journal $(journalctl --no-pager --output=json --all | grep -cF -f /run/words)
echo processes $(grep -cF -f /run/words /run/seen)
rm /run/words
"""


class Artifacts(Thread):
    """Looks, while a verb runs, into all files that ansible-runner writes for it, for secrets."""

    def __init__(self, secrets: list[str]) -> None:
        super().__init__(daemon=True)
        self._words = [secret.encode() for secret in secrets]
        self._end = Event()
        self.files: set[str] = set()
        self.found: set[str] = set()

    def run(self) -> None:
        while not self._end.wait(0.02):
            for path in self._written():
                with suppress(OSError):
                    text = path.read_bytes()
                    self.files.add(path.name)
                    if any(word in text for word in self._words):
                        self.found.add(str(path))

    @staticmethod
    def _written() -> Iterator[Path]:
        for run in memory_folder().glob("ppdeploy-run-*"):
            # Unlike Path.glob it lets a folder go while it looks.
            for folder, _, names in os.walk(run):
                yield from (Path(folder, name) for name in names)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()


def test_no_secret_is_in_what_is_written_shown_or_running(guarded: Guarded, applied: Done) -> None:
    token = "hf_" + "CanaryTokenOfThisTest" + secrets.token_hex(8)
    key = (guarded.inventory.parent / ".ppdeploy" / "tiny-agent.key").read_text(encoding="utf-8").strip()
    assert len(key) == 64
    said = [applied.out, applied.err]
    for node in ("node1", "node2"):
        guarded.lab.exec_ssh(node, ["sh", "-c", "cat > /run/watch.py"], stdin=_WATCH)
        guarded.out(node, "systemd-run -q --collect --unit=watch python3 /run/watch.py")
        # So that the key is written anew, and every task that has it has something to tell.
        guarded.out(node, "rm /etc/ppdeploy/agent.key")
    vaulted = guarded.edited(guarded.inventory.parent, {"ppdeploy_hf_token": token, "ppdeploy_firewall": "nftables"})
    with Artifacts([token, key]) as artifacts:
        # As talkative as Ansible is, with the differences of files.
        done = guarded.guard("-vvvv", "--diff", "-e", f"@{vaulted_values(guarded, token)}")
        said += [done.out, done.err]
        assert done.code == 0, "the play failed"
        for words in (["plan", "--json"], ["apply", "--check", "--json", "-v"], ["check", "--json"]):
            done = guarded.ppdeploy(*words, inventory=vaulted)
            said += [done.out, done.err]
    assert artifacts.files, "no run of Ansible was seen"
    assert artifacts.found == set()
    assert not [text for text in said if token in text or key in text]
    for node in ("node1", "node2"):
        guarded.out(node, "systemctl stop watch")
        told = guarded.lab.exec_ssh(node, ["sh", "-c", _SEARCH], stdin=f"{token}\n{key}\n").stdout.splitlines()
        assert told == ["/etc/ppdeploy/agent.key", "journal 0", "processes 0"], node
        assert guarded.out(node, "stat -c '%U %a' /etc/ppdeploy/agent.key; stat -c %s /run/seen").split()[:2] == [
            "root",
            "600",
        ]
        guarded.out(node, "rm /run/seen /run/watch.py")
    kept = [path for path in guarded.inventory.parent.rglob("*") if path.is_file()]
    # What the controller keeps of it beside the inventory itself is for its owner alone.
    holders = [path for path in kept if key in path.read_text(encoding="utf-8", errors="replace")]
    assert [(path.name, path.stat().st_mode & 0o077) for path in holders] == [("tiny-agent.key", 0)]


def vaulted_values(guarded: Guarded, token: str) -> Path:
    """Write the token as a file of extra variables, as ansible-vault would decrypt it, and return its path."""
    path = guarded.elsewhere / "token.yml"
    path.write_text(yaml.safe_dump({"ppdeploy_hf_token": token}), encoding="utf-8")
    path.chmod(0o600)
    return path


@pytest.mark.usefixtures("applied")
def test_none_takes_the_table_and_its_files_away(guarded: Guarded) -> None:
    done = guarded.guard(firewall="none")
    assert done.code == 0, done.said
    for node in ("node1", "node2"):
        assert "ppdeploy" not in guarded.out(node, "nft list tables")
        assert guarded.out(node, "ls /etc/ppdeploy; ls /etc/systemd/system").count("firewall") == 0
    assert guarded.guard(firewall="none").changed() == no_change()
