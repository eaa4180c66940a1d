"""What `preflight` found before the apply still holds."""

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.plan.types import NodePlan, PipelinePlan

#: Prints what becomes of a connection from the first address to the second: a refusal too shows that the peer is there.
_KNOCK = """
import socket, sys
source, peer, port = sys.argv[1:]
try:
    socket.create_connection((peer, int(port)), 3, (source, 0))
except ConnectionRefusedError:
    pass
"""


def test_the_plan_is_not_blocked(pipeline: PipelinePlan, node: NodePlan) -> None:
    assert [found.sentence() for found in pipeline.blocked() if found.host in (None, node.host)] == []


def test_the_host_boots_with_systemd(host: Any) -> None:
    assert host.file("/run/systemd/system").is_directory


def test_the_host_is_the_one_that_was_planned_for(host: Any, node: NodePlan) -> None:
    assert host.file("/etc/machine-id").content_string.strip() == node.machine_id


def test_its_python_is_there(host: Any, pipeline: PipelinePlan) -> None:
    assert host.exists(f"python{pipeline.environment.python}")


def test_every_fabric_peer_answers(host: Any, pipeline: PipelinePlan, node: NodePlan) -> None:
    if node.fabric.interface == "lo":
        assert node.peers == ()
        return
    python = f"python{pipeline.environment.python}"
    for peer in node.peers:
        knock = host.run(f"{python} -c %s %s %s %s", _KNOCK, node.fabric.address, peer, str(pipeline.master_port))
        if knock.rc != 0:
            pytest.fail(f"{peer} does not answer {node.fabric.address}: {knock.stderr.splitlines()[-1]}", pytrace=False)
