"""`nccl_env` keeps NCCL and gloo on the fabric, in the file and in the process that runs."""

from __future__ import annotations

from typing import Any

from ppdeploy.plan.types import NodePlan, PipelinePlan
from ppdeploy.render import release_folder


def test_its_file_is_as_planned(host: Any, pipeline: PipelinePlan, files: dict[str, tuple[Any, str]]) -> None:
    path = f"{release_folder(pipeline)}/nccl.env"
    planned, text = files[path]
    file = host.file(path)
    assert (file.user, file.group, f"{file.mode:04o}") == (planned.owner, planned.group, planned.mode)
    assert file.content_string == text


def test_the_running_rank_has_these_settings_and_no_others(environment: dict[str, str], node: NodePlan) -> None:
    settings = {name: value for name, value in environment.items() if name.startswith(("NCCL_", "GLOO_"))}
    assert settings == node.nccl_env


def test_the_fabric_nic_has_the_planned_address(host: Any, node: NodePlan) -> None:
    assert node.fabric.address in host.interface(node.fabric.interface).addresses
    assert node.nccl_env["GLOO_SOCKET_IFNAME"] == node.fabric.interface
