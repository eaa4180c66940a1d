"""A run that is told to stop ends Ansible and all that it started, leaves nothing behind, and says 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.run_support import INVENTORY, command_lines, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def seconds() -> str:
    """A number of seconds that no other process on this machine sleeps: the name of our task's process."""
    return f"600.{os.getpid()}{os.urandom(3).hex().translate(str.maketrans('abcdef', '123456'))}"


def is_running(text: str) -> bool:
    return any(text in line for line in command_lines())


def start(playbook: str, inventory: Path, *extra: str, runtime: Path, **variables: str) -> subprocess.Popen[str]:
    # Whoever runs the tests may ignore signals (nohup, a background job), and what is ignored is inherited.
    heard = ["env", "--default-signal=HUP", "--default-signal=INT", "--default-signal=TERM"]
    return subprocess.Popen(
        [*heard, sys.executable, "-m", "tests.unit.run_main", playbook, str(inventory), *extra],
        cwd=REPOSITORY,
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def sleeping(runtime: Path, seconds: str) -> Iterator[subprocess.Popen[str]]:
    process = start("playbooks/sleep.yml", INVENTORY, f"seconds={seconds}", runtime=runtime)
    try:
        wait_until(lambda: is_running(f"sleep {seconds}"), what="the task")
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_ends_everything_and_leaves_no_file(
    number: signal.Signals, sleeping: subprocess.Popen[str], runtime: Path, seconds: str
) -> None:
    assert list(runtime.iterdir())
    sleeping.send_signal(number)
    _, said = sleeping.communicate(timeout=30)
    assert sleeping.returncode == 130, said
    assert "outcome: interrupted" in said
    assert not is_running(seconds)
    assert not is_running(str(runtime))
    assert list(runtime.iterdir()) == []


def test_a_second_signal_does_not_wait_for_ansible(runtime: Path, seconds: str, tmp_path: Path) -> None:
    # This stand-in for ssh ignores the first signal, as a hanging connection would.
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\ntrap '' INT TERM\nwhile :; do sleep {seconds}; done\n")
    program.chmod(0o755)
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(f"vllm: {{hosts: {{node1: {{ansible_ssh_executable: {program}}}}}}}\n")
    process = start("playbooks/ping.yml", inventory, runtime=runtime)
    try:
        wait_until(lambda: is_running(f"sleep {seconds}"), what="the connection")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: not process.poll(), what="the first signal")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert not is_running(seconds)
    assert list(runtime.iterdir()) == []


def test_what_a_killed_run_leaves_is_ended_by_the_next(
    sleeping: subprocess.Popen[str], runtime: Path, seconds: str
) -> None:
    sleeping.kill()
    sleeping.wait()
    (leftover,) = runtime.iterdir()
    assert is_running(f"sleep {seconds}")
    subprocess.run(
        [sys.executable, "-m", "tests.unit.run_main", "playbooks/ping.yml", str(INVENTORY)],
        cwd=REPOSITORY,
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime)},
        check=True,
        capture_output=True,
    )
    assert not leftover.exists()
    assert not is_running(seconds)
