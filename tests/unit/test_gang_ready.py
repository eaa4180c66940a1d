"""What keeps a node from running its rank: ranks of another pipeline, found by a systemctl that only records."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppdeploy.agent import ready

OWN = "ppdeploy-rank@tiny.service"


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl` that lists what lies in `units` and notes how it was called in `calls`; return their folder."""
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n[ "$1" != list-units ] || cat {tmp_path}/units\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def _calls(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "calls").read_text().splitlines()]


def test_a_node_with_its_own_rank_alone_stops_nothing(systemctl: Path) -> None:
    (systemctl / "units").write_text(f"{OWN} loaded active running x\n")
    assert ready.stop_strays(OWN) == ""
    assert _calls(systemctl) == ["list-units"]


def test_a_rank_of_the_pipeline_before_is_stopped_and_named(systemctl: Path) -> None:
    (systemctl / "units").write_text(f"ppdeploy-rank@old.service loaded active running x\n{OWN} loaded active x\n")
    assert ready.stop_strays(OWN) == "ppdeploy-rank@old.service of another pipeline still runs on this node"
    assert (systemctl / "calls").read_text().splitlines()[1] == "stop --no-block ppdeploy-rank@old.service"


def test_without_systemd_nothing_counts_as_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "systemd does not answer" in ready.stop_strays(OWN)
