"""The rank's unit as the agent sees it, with a systemctl that says what a test wants, and what the loop keeps of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ppdeploy.agent import cgroup, config, custody, store
from ppdeploy.agent.command_line import option
from ppdeploy.agent.loop import Agent
from ppdeploy.agent.unit import RankUnit
from tests.unit.gang_factories import make_release

GROUP = "/system.slice/ppdeploy-rank@p.service"


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl` that shows the unit as `shown` says and notes its calls in `calls`; return their folder."""
    program = tmp_path / "systemctl"
    program.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n'
        f'case "$*" in *ActiveState*) cat {tmp_path}/shown ;; show*) exit 1 ;; esac\n'
    )
    program.chmod(0o755)
    (tmp_path / "calls").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def _show(folder: Path, active: str, group: str = GROUP) -> None:
    (folder / "shown").write_text(f"ActiveState={active}\nJob=\nMainPID=7\nControlGroup={group}\n")


def _unit(folder: Path) -> RankUnit:
    return RankUnit("ppdeploy-rank@p.service", folder / "ticket.json", folder / "consumed.json", "cpu", lambda: None)


def _wait(what: str, holds: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def _shows(folder: Path) -> int:
    return (folder / "calls").read_text().count("ActiveState")


@pytest.mark.parametrize("active", ["active", "failed"])
def test_a_group_that_cannot_be_looked_into_is_not_empty(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch, active: str
) -> None:
    """An agent that begins while systemd is too busy to say where the agent itself lies must not say `absent`."""
    monkeypatch.setattr(cgroup, "_ROOTS", (str(systemctl / "none"),))
    _show(systemctl, active)
    rank = _unit(systemctl)
    _wait("the unit was not shown", lambda: rank.main_pid == 7)
    for _ in range(3):
        assert not custody.is_absent(rank.look())


def test_a_unit_that_systemd_still_counts_as_running_is_not_absent(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "find_root", lambda _own: systemctl)
    _show(systemctl, "active")
    rank = _unit(systemctl)
    _wait("the unit was not shown", lambda: rank.main_pid == 7)
    assert not custody.is_absent(rank.look())
    _show(systemctl, "inactive", "")
    _wait("systemd was not asked again", lambda: custody.is_absent(rank.look()))


def test_kills_repeated_while_a_unit_ends_ask_systemd_no_more_often(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "find_root", lambda _own: systemctl)
    _show(systemctl, "deactivating")
    rank = _unit(systemctl)
    _wait("the unit was not shown", lambda: rank.main_pid == 7)
    for _ in range(60):
        rank.kill()
    _wait("the stop was not queued", lambda: "stop" in (systemctl / "calls").read_text())
    time.sleep(1.0)
    begun = _shows(systemctl)
    time.sleep(2.0)
    # One chain of questions asks about seven times in two seconds, sixty of them four hundred times.
    assert _shows(systemctl) - begun <= 30, "each answer makes the next question"
    assert (systemctl / "calls").read_text().count("stop --no-block") <= 10


def test_a_kill_has_systemd_kill_every_process_and_then_drop_its_job(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "find_root", lambda _own: systemctl)
    _show(systemctl, "active")
    rank = _unit(systemctl)
    _wait("the unit was not shown", lambda: rank.main_pid == 7)
    rank.look()
    rank.kill()
    _wait("systemd was not told", lambda: "stop --no-block" in (systemctl / "calls").read_text())
    calls = [line for line in (systemctl / "calls").read_text().splitlines() if not line.startswith("show")]
    assert calls == ["kill --signal=SIGKILL ppdeploy-rank@p.service", "stop --no-block ppdeploy-rank@p.service"]


@pytest.mark.parametrize(("number", "known"), [(2, True), (19, True), (13, False)])
def test_a_group_removed_while_it_is_read_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, known: bool
) -> None:
    (tmp_path / "cgroup.procs").write_text("1\n")

    def gone(_path: Path) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_text", gone)
    if known:
        assert cgroup.processes(tmp_path) == set()
    else:
        with pytest.raises(PermissionError):
            cgroup.processes(tmp_path)


def test_an_agent_ends_at_once_also_while_it_would_ask_again() -> None:
    code = "from ppdeploy.agent.clock import later; later(60.0, print)"
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
    assert time.monotonic() - begin < 40


def _agent(folder: Path) -> Agent:
    key = folder / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o600)
    (folder / "run").mkdir()
    values = {
        "cluster": "c", "pipeline": "p", "node": "a", "listen": [["127.0.0.1", 1]], "port": 1, "device": "cpu",
        "key": str(key), "root": str(folder), "state": str(folder), "run": str(folder / "run"), "keep": str(folder),
    }  # fmt: skip
    place = folder / "agent.json"
    place.write_text(json.dumps(values))
    return Agent(config.load(place))


def test_a_heartbeat_that_failed_once_is_forgotten_when_it_beats_again(systemctl: Path) -> None:
    """A gang must not wait for ever because /run was full for a moment."""
    _show(systemctl, "inactive", "")
    agent, run = _agent(systemctl), systemctl / "run"
    away = systemctl / "away"
    run.rename(away)
    agent._beat(100.0)
    assert "heartbeat" in agent._look().storage_problem
    away.rename(run)
    agent._beat(200.0)
    assert agent._look().storage_problem == ""


def test_a_file_edited_by_hand_does_not_end_the_watch_of_what_runs(systemctl: Path) -> None:
    """Without a target no counter is read, and a healthy gang would be ended as stalled."""
    _show(systemctl, "inactive", "")
    folder = make_release(systemctl)
    with (folder / "rank.env").open("a") as stream:
        stream.write("# by hand\n")
    agent = _agent(systemctl)
    local = agent._look()
    found = agent._running_release(replace(local, rank=replace(local.rank, release=folder.name)))
    assert found is not None
    assert option(found.argv, "--port") == "8000"


def test_half_a_write_is_an_error_and_the_last_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that is nearly full takes a part of a write and calls that no error."""
    path = tmp_path / "memory.json"
    store.write_json(path, {"promised": [5, 1]})
    slots = store.SlotFile(tmp_path / "record")
    slots.write(b"first")
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[: len(data) // 2], at))
    with pytest.raises(OSError, match="No space"):
        store.write_json(path, {"promised": [6, 1]})
    with pytest.raises(OSError, match="No space"):
        slots.write(b"second")
    assert store.read_json(path) == {"promised": [5, 1]}
    assert slots.read() == b"first"
