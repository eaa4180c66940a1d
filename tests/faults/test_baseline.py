"""The same ranks under `Restart=always` and without an agent, which is what anyone writes first: for comparison.

These tests assert that the comparison is a fair one (the ranks serve before each fault) and that bare vLLM still has
the faults for which the gang exists; what they measure is printed beside the gang's own rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.faults.course import PATIENCE, ask_for, tell
from tests.faults.deploy import API_PORT, PIPELINE, Gang

UNIT = "baseline.service"
GIVE_UP = 180.0
"""Seconds after which a pipeline that does not serve again counts as down."""

_MAKE_UNIT = r"""
folder=/opt/ppdeploy/{pipeline}/current
cat >/run/systemd/system/{unit} <<END
[Service]
User=ppdeploy
Group=ppdeploy
EnvironmentFile=$folder/rank.env
EnvironmentFile=$folder/nccl.env
WorkingDirectory=/var/lib/ppdeploy/{pipeline}
$(grep ^ExecStart= $folder/rank.conf | sed 's|=.* -- |=|')
Restart=always
RestartSec=1
END
systemctl daemon-reload
"""


@pytest.fixture(scope="module")
def bare(gang: Gang) -> Iterator[Gang]:
    """The gang's hosts with its agents switched off; the gang is back at the end."""
    gang.wait(gang.healthy, PATIENCE)
    gang.order("stop")
    gang.wait(lambda: gang.phase() == "stopped", 120.0)
    for node in gang.nodes:
        gang.shell(node, "systemctl stop ppdeploy-fence.timer ppdeploy-agent")
        gang.shell(node, _MAKE_UNIT.format(pipeline=PIPELINE, unit=UNIT))
    try:
        yield gang
    finally:
        for node in gang.nodes:
            gang.shell(node, f"systemctl stop {UNIT}; systemctl kill --signal=KILL {UNIT} || true", check=False)
        for node in gang.nodes:
            gang.shell(node, "systemctl start ppdeploy-agent ppdeploy-fence.timer")
        gang.wait(lambda: bool(gang.status(gang.head)), 30.0)
        gang.order("start")
        gang.wait(gang.healthy, PATIENCE)


@pytest.fixture(autouse=True)
def _serving(bare: Gang) -> None:
    """Start both ranks anew, as a person would after each of these faults."""
    for node in bare.nodes:
        bare.shell(node, f"systemctl kill --signal=KILL {UNIT}; systemctl stop {UNIT}", check=False)
    for node in bare.nodes:
        bare.shell(node, f"systemctl start {UNIT}")
    bare.wait(lambda: ask_for(bare, 4, 20) == "200", PATIENCE, 2.0)


def _main_pid(gang: Gang, node: str) -> int:
    return int(gang.shell(node, f"systemctl show -P MainPID {UNIT}").strip() or 0)


def _health(gang: Gang) -> str:
    """Return the status of vLLM's own /health, `000` where nothing answers, for which curl itself fails."""
    url = f"http://127.0.0.1:{API_PORT}/health"
    return gang.shell(gang.head, f"curl -s -o /dev/null -m 5 -w '%{{http_code}}' {url}", check=False).strip()


def _after(gang: Gang, fault: str) -> tuple[str, float, bool]:
    """Note what a client and vLLM's own /health say after a fault, and whether requests are ever answered again."""
    began = time.monotonic()
    first = ask_for(gang, 8, 60)
    waited = time.monotonic() - began
    health = _health(gang)
    while (last := ask_for(gang, 4, 20)) != "200" and time.monotonic() - began < GIVE_UP:
        time.sleep(2)
    again = (
        f"serving again after {time.monotonic() - began:.0f} s"
        if last == "200"
        else f"still down after {GIVE_UP:.0f} s"
    )
    tell(
        f"without an agent, Restart=always: {fault}",
        f"the first request got {first} after {waited:.1f} s, /health then {health}; {again}",
    )
    return first, waited, last == "200"


def test_a_killed_worker_leaves_the_next_request_hanging(bare: Gang) -> None:
    bare.shell(bare.nodes[1], f"systemctl kill --signal=SIGKILL {UNIT}")
    first, waited, _ = _after(bare, "worker's rank killed, idle")
    assert first != "200"
    assert waited > 10.0


def test_a_killed_head_leaves_its_worker_as_it_is(bare: Gang) -> None:
    worker = bare.nodes[1]
    old = _main_pid(bare, worker)
    bare.shell(bare.head, f"systemctl kill --signal=SIGKILL {UNIT}")
    time.sleep(10)
    assert _main_pid(bare, worker) == old, "the worker noticed by itself"
    _after(bare, "head's whole unit killed")


def test_a_stopped_worker_is_noticed_by_nobody_while_idle(bare: Gang) -> None:
    worker = bare.nodes[1]
    pids = bare.shell(
        worker, f"cat /sys/fs/cgroup/systemd/system.slice/{UNIT}/cgroup.procs 2>/dev/null || pgrep -u ppdeploy"
    )
    bare.shell(worker, f"kill -STOP {' '.join(pids.split())}")
    time.sleep(30)
    health = _health(bare)
    assert health == "200"
    _after(bare, "worker's rank stopped (SIGSTOP), asked 30 s later")
