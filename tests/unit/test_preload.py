"""The plan is imported once in an `ansible-playbook`, and not by each process that a task runs in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppdeploy.paths import data_root
from ppdeploy.run.environment import ansible_environment

PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.debug:
        msg: "{{ 'the plan was %s there' | format('' | probe) }}"
"""

#: A plugin of filters that Ansible loads before ours.
PROBE = """
import sys

THERE = "ppdeploy.plan" in sys.modules

class FilterModule:
    def filters(self):
        return {"probe": lambda _: "already" if THERE else "not"}
"""


def play(folder: Path, env: dict[str, str]) -> str:
    """Return what a task on two hosts printed of the process that it ran in."""
    (folder / "filters").mkdir()
    (folder / "filters" / "probe.py").write_text(PROBE)
    (folder / "play.yml").write_text(PLAY)
    (folder / "hosts").write_text("one ansible_connection=local\ntwo ansible_connection=local\n")
    program = Path(sys.executable).with_name("ansible-playbook")
    filters = f"{folder / 'filters'}{os.pathsep}{data_root() / 'plugins' / 'filter'}"
    done = subprocess.run(
        [program, "-i", folder / "hosts", folder / "play.yml"],
        env={**os.environ, **env, "ANSIBLE_FILTER_PLUGINS": filters},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("how", ["ppdeploy", "by hand"])
def test_a_task_finds_the_plan_imported(tmp_path: Path, how: str) -> None:
    by_hand = {"ANSIBLE_CONFIG": str(data_root() / "ansible.cfg")}
    said = play(tmp_path, ansible_environment() if how == "ppdeploy" else by_hand)
    assert said.count("the plan was already there") == 2, said


def test_without_the_plugin_each_would_import_it(tmp_path: Path) -> None:
    said = play(tmp_path, {**ansible_environment(), "ANSIBLE_VARS_PLUGINS": str(tmp_path)})
    assert said.count("the plan was not there") == 2, said
