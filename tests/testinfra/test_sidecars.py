"""`sidecars` runs the planned models beside the rank, and no others."""

from __future__ import annotations

from typing import Any

from ppdeploy.plan.types import NodePlan
from tests.testinfra.conftest import exposure

UNITS = "/etc/systemd/system"


def test_the_units_are_those_of_the_plan(host: Any, node: NodePlan) -> None:
    there = {name for name in host.file(UNITS).listdir() if name.startswith("ppdeploy-sidecar@")}
    assert there == {sidecar.unit for sidecar in node.sidecars}


def test_each_runs_as_planned_now_and_at_each_boot(
    host: Any, node: NodePlan, files: dict[str, tuple[Any, str]]
) -> None:
    for sidecar in node.sidecars:
        _, text = files[f"{UNITS}/{sidecar.unit}"]
        assert host.file(f"{UNITS}/{sidecar.unit}").content_string == text
        service = host.service(sidecar.unit)
        assert service.is_running
        assert service.is_enabled
        assert exposure(host, sidecar.unit) <= 2.0
        assert host.socket(f"tcp://127.0.0.1:{sidecar.port}").is_listening
