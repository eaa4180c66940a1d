"""A lab's name, lock and record."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.lab import state

HOLD = """
import sys, time
from pathlib import Path
from ppdeploy.lab.state import locked
with locked(Path(sys.argv[1]), "lab up"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_checkouts_lab_is_named_by_its_folder_and_path(tmp_path: Path) -> None:
    one, two = tmp_path / "a" / "My Repo", tmp_path / "b" / "My Repo"
    assert state.default_name(one).startswith("my-repo-")
    assert state.default_name(one) == state.default_name(one)
    assert state.default_name(one) != state.default_name(two)
    assert state.check_name(state.default_name(tmp_path / ("long" * 30))) != ""


def test_another_lab_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPDEPLOY_LAB", "other")
    assert state.default_name() == "other"


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "..", "a" * 41])
def test_a_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot name a lab"):
        state.check_name(name)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock file `lock` in the test's folder."""
    argv = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_held_lock_is_refused_with_the_holders_name(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with (
        pytest.raises(BlockedError, match=rf"process {holder.pid}, .*\(lab up\)"),
        state.locked(tmp_path / "lock", "lab down", seconds=0.1),
    ):
        pytest.fail("the lock was given twice")


def test_a_lock_goes_with_its_holder(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    holder.wait()
    with state.locked(tmp_path / "lock", "lab down", seconds=0.1) as file:
        file.seek(0)
        assert f"process {os.getpid()}," in file.read()


def test_a_lock_whose_file_was_removed_is_taken_on_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with state.locked(path, "lab down"):
        path.unlink()
        with state.locked(path, "lab up", seconds=0.1):
            assert path.exists()


def test_a_process_is_known_by_its_start_too() -> None:
    me = state.identity(os.getpid())
    assert state.alive(me)
    assert me["start"] is not None
    assert not state.alive(me | {"start": me["start"] - 1})
    assert not state.alive(None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 0}'])
def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    assert state.read_record(tmp_path) is None


def test_no_record_is_none(tmp_path: Path) -> None:
    assert state.read_record(tmp_path) is None
