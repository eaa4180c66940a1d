"""What is missing on the machine that `ppdeploy` runs on is wrong input, told with the command that brings it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.cli_support import make_cluster_on_disk


def test_without_an_ssh_client_no_host_is_called_unreachable(tmp_path: Path) -> None:
    cluster = make_cluster_on_disk(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sh").symlink_to("/bin/sh")
    done = subprocess.run(
        [sys.executable, "-m", "ppdeploy", "apply", "-i", cluster.inventory],
        env={**os.environ, "PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "this machine has no ssh client: install it" in last
    assert "apt-get install openssh-client" in last
