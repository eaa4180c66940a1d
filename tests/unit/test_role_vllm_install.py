"""The role vllm_install by real Ansible on this machine: wheels copied by rsync, built, nothing left or done twice.

Starting Ansible takes longer than what it does here, so one run has several plays, which are told apart in its output.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.bundle import make as making
from ppdeploy.bundle import make_bundle
from ppdeploy.run.environment import ansible_environment
from tests.wheels import Shelf

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


class Node:
    """This machine as a node of its own, and a bundle on it."""

    def __init__(self, base: Path, shelf: Shelf) -> None:
        self.base = base
        self.shelf = shelf
        self.lock = shelf.lock()
        self.bundle = base / "bundle"
        self.root = base / "opt"

    def play(self, name: str, *, check: bool = False, tasks_from: str = "main", **variables: Any) -> dict[str, Any]:
        """Return a play of the role alone."""
        values = {
            "ansible_python_interpreter": sys.executable,
            "vllm_install_lock": str(self.lock.path),
            "vllm_install_bundle": str(self.bundle),
            "vllm_install_root": str(self.root),
            "vllm_install_uv_cache": str(self.base / "cache"),
        } | variables
        role = {"name": "Install", "ansible.builtin.import_role": {"name": "vllm_install", "tasks_from": tasks_from}}
        play = {"name": name, "hosts": "node", "gather_facts": False, "check_mode": check, "vars": values}
        # What this one left is seen by the next.
        seen = {"name": "Look", "ansible.builtin.stat": {"path": str(self.root)}, "register": "root"}
        told = {"name": "Tell", "ansible.builtin.debug": {"msg": "root is there: {{ root.stat.exists }}"}}
        return {**play, "tasks": [role], "post_tasks": [] if "missing" in values.values() else [seen, told]}

    def run(self, *plays: Mapping[str, Any]) -> tuple[int, dict[str, str]]:
        """Run plays one after the other; return Ansible's exit code and what it printed of each."""
        path = self.base / "play.yml"
        # As tasks/values.yml does: our filters are loaded once, and not by every task's worker anew.
        load = {"name": "Load", "ansible.builtin.debug": {"msg": "loaded"}}
        load["throttle"] = "{{ [] | ppdeploy_public_names | length }}"
        first, *others = plays
        path.write_text(json.dumps([{**first, "pre_tasks": [load]}, *others]))
        done = subprocess.run(
            ["ansible-playbook", "-i", "node,", "-e", "ansible_connection=local", str(path)],
            env={**os.environ, **ansible_environment(), "ANSIBLE_LOCALHOST_WARNING": "False"},
            capture_output=True,
            text=True,
            check=False,
        )
        parts = re.split(r"^PLAY \[(\w+)\].*$", done.stdout + done.stderr, flags=re.MULTILINE)
        return done.returncode, dict(zip(parts[1::2], parts[2::2], strict=True))


def changed(output: str) -> int:
    """Return how many tasks changed something."""
    return len(re.findall(r"^changed: ", output, re.MULTILINE))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def node(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(making, "uv_wheel", lambda _: shelf.uv)
    with tempfile.TemporaryDirectory() as name:
        # Every user can enter it, which pytest's folders do not allow: vLLM is imported as nobody.
        base = Path(name)
        base.chmod(0o755)
        made = Node(base, shelf)
        shutil.copytree(shelf.links, base / "bundle.partial" / "wheels")
        make_bundle(made.lock, made.bundle)
        yield made


def test_wheels_are_copied_once_and_a_second_run_changes_nothing(node: Node) -> None:
    code, said = node.run(
        node.play("check", check=True),
        node.play("build"),
        node.play("again"),
        # With facts that say so, no task reaches the node.
        node.play("installed", vllm_install_installed=True, ansible_python_interpreter="missing"),
        node.play("lying", tasks_from="install", vllm_install_bundle_on_node=True, vllm_install_root=f"{node.base}/2"),
        node.play("prune", tasks_from="prune"),
    )
    assert code == 0, "\n".join(said.values())
    assert "root is there: False" in said["check"]
    assert {name: changed(output) for name, output in said.items()} == {
        "check": 2,
        "build": 3,
        "again": 0,
        "installed": 0,
        # A bundle on the node is used where it lies.
        "lying": 1,
        "prune": 0,
    }
    marker = node.root / "venvs" / node.lock.directory_name / ".ppdeploy.json"
    assert json.loads(marker.read_text())["lock"] == node.lock.digest
    assert not list((node.root / "staging").iterdir())
    assert not (node.base / "2" / "staging").exists()


def test_a_bundle_that_does_not_fit_is_told_before_the_node_is_touched(node: Node) -> None:
    other = node.shelf.lock(name="vllm-cpu-0.32.0-other", installed_bytes=5)
    (node.base / "none").mkdir()
    for play in (
        node.play("other", vllm_install_lock=str(other.path)),
        node.play("none", vllm_install_bundle=f"{node.base}/none"),
    ):
        code, said = node.run(play)
        assert code == 2
        (output,) = said.values()
        assert "is no bundle of" in output
        assert "`ppdeploy bundle`" in output
        assert not node.root.exists()


def test_packages_that_changed_since_the_bundle_was_made_are_not_installed(node: Node) -> None:
    """Copied, or where they lie on the node: with the controller's manifest, and with that of the node alone."""
    folder = node.bundle / "packages"
    folder.mkdir()
    manifest = json.loads((node.bundle / "manifest.json").read_text())
    for name in ("Packages", "ppdeploy-nothing_1_all.deb"):
        (folder / name).write_text(name)
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        manifest["files"].append({"path": f"packages/{name}", "sha256": sha256, "size": len(name)})
    (node.bundle / "manifest.json").write_text(json.dumps(manifest))
    (folder / "ppdeploy-nothing_1_all.deb").write_text("another")
    want = {"package": "ppdeploy-nothing", "kind": "program", "value": "ppdeploy-nothing"}
    wants: dict[str, Any] = {
        "vllm_install_packages": [want],
        "vllm_install_packages_from": "bundle",
        "vllm_install_package_manager": "apt",
    }
    sentence = "the sha256 of ppdeploy-nothing_1_all.deb differs, so nothing of it was installed"
    for on_node in (False, True):
        code, said = node.run(node.play("told", tasks_from="packages", vllm_install_bundle_on_node=on_node, **wants))
        assert code != 0
        assert sentence in " ".join(said["told"].split()), said["told"]
        assert f"the folder {folder if on_node else node.root}" in " ".join(said["told"].split())
