"""One apply at a time per cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppdeploy.errors import BlockedError
from ppdeploy.run import cluster_lock
from ppdeploy.run.lock import lock_folder

HOLD = """
import sys, time
from pathlib import Path
from ppdeploy.run import cluster_lock
with cluster_lock(Path(sys.argv[1]), "restart"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    folder = tmp_path / "inventory"
    folder.mkdir()
    (folder / "hosts.yml").write_text("")
    return folder


def is_free(inventory: Path) -> bool:
    try:
        with cluster_lock(inventory, "apply"):
            return True
    except BlockedError:
        return False


def test_the_holder_is_named_and_its_death_frees_the_lock(inventory: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(inventory)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockedError) as caught, cluster_lock(inventory, "apply"):
            pass
        assert f"`ppdeploy restart` of {os.environ.get('USER', 'root')}, pid {holder.pid}, since 2" in str(caught.value)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert is_free(inventory)


def test_all_paths_to_a_cluster_share_one_lock(
    inventory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(inventory)
    monkeypatch.chdir(inventory)
    with cluster_lock(inventory, "apply"):
        for path in (inventory / "hosts.yml", tmp_path / "link", Path()):
            assert not is_free(path)
    assert is_free(inventory)


def test_other_clusters_are_not_held_up(inventory: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with cluster_lock(inventory, "apply"):
        assert is_free(tmp_path / "other")


def test_an_error_frees_the_lock(inventory: Path) -> None:
    with pytest.raises(ZeroDivisionError), cluster_lock(inventory, "apply"):
        raise ZeroDivisionError
    assert is_free(inventory)


def test_locks_are_state_not_cache(state: Path, inventory: Path) -> None:
    assert is_free(inventory)
    assert lock_folder() == state / "ppdeploy" / "locks"
    assert [path.stat().st_mode & 0o777 for path in lock_folder().iterdir()] == [0o600]
