"""A clone and one `pip install` of it are enough: the command then plans from anywhere as the checkout does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ppdeploy.paths import data_root
from tests.unit.cli_support import make_cluster_on_disk


def run(*command: str | Path, cwd: Path) -> str:
    """Return what a command says; a failure shows all of it."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_clone_that_pip_installs_plans_from_another_folder(tmp_path: Path) -> None:
    clone, place, elsewhere = tmp_path / "clone", tmp_path / "venv", tmp_path / "elsewhere"
    run("git", "clone", "--quiet", data_root(), clone, cwd=tmp_path)
    run(sys.executable, "-m", "venv", place, cwd=tmp_path)
    run(place / "bin/python", "-m", "pip", "install", "--quiet", "-c", clone / "constraints.txt", clone, cwd=tmp_path)
    # The clone itself is not needed any more.
    clone.rename(tmp_path / "put-away")
    elsewhere.mkdir()
    cluster = make_cluster_on_disk(tmp_path)
    given = ("plan", "-i", cluster.inventory, "--facts", cluster.facts, "--json")
    theirs = run(place / "bin/ppdeploy", *given, cwd=elsewhere)
    assert theirs == run(sys.executable, "-m", "ppdeploy", *given, cwd=data_root())
    assert '"release": "' in theirs
