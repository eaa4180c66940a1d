"""The role nic_tuning by real Ansible on this machine: an MTU that one host's NIC refuses. It sets nothing here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ppdeploy.run.environment import ansible_environment

PLAY = """
- hosts: node1:node2
  gather_facts: false
  any_errors_fatal: true
  tasks:
    - name: Try the MTU
      ansible.builtin.import_role:
        name: nic_tuning
        tasks_from: mtu.yml
      vars:
        nic_tuning_interface: nonesuch0
        nic_tuning_settings: {mtu: "9000"}
      # The other one has nothing to try, as where its NIC has the MTU already.
      when: inventory_hostname == 'node2'
"""


def test_a_nic_that_refuses_an_mtu_is_named_once_the_others_have_their_own_again(tmp_path: Path) -> None:
    play = tmp_path / "play.yml"
    play.write_text(PLAY)
    values = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    done = subprocess.run(
        ["ansible-playbook", "-i", "node1,node2,", str(play), "-e", json.dumps(values)],
        env={**os.environ, **ansible_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    assert "nonesuch0 of node2 does not take the MTU 9000 (there is no interface nonesuch0): give the NIC" in told, told
    given_back = told.split("TASK [nic_tuning : Give back the MTU")[1].split("TASK [")[0]
    assert "ok: [node2]" in given_back
