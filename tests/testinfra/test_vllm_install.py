"""`vllm_install` has built the environment that the lock defines, complete, with the planned vLLM and torch in it."""

from __future__ import annotations

import json
from typing import Any

from ppdeploy.plan.types import PipelinePlan

#: Prints versions as installed; nothing of vLLM is imported.
_VERSIONS = (
    "import importlib.metadata as m, platform; print(platform.python_version(), m.version('vllm'), m.version('torch'))"
)


def test_the_environment_is_complete_and_of_the_planned_lock(host: Any, pipeline: PipelinePlan) -> None:
    marker = json.loads(host.file(f"{pipeline.environment.directory}/.ppdeploy.json").content_string)
    assert marker["lock"] == pipeline.environment.lock_digest
    assert _plain(marker["vllm"]) == pipeline.environment.vllm_version
    assert _plain(marker["torch"]) == _plain(pipeline.environment.torch_version)


def test_the_versions_are_those_of_the_lock(host: Any, pipeline: PipelinePlan) -> None:
    said = host.check_output(f"{pipeline.environment.directory}/bin/python -I -c %s", _VERSIONS)
    python, vllm, torch = said.split()
    assert python.startswith(f"{pipeline.environment.python}.")
    assert _plain(vllm) == pipeline.environment.vllm_version
    assert torch == pipeline.environment.torch_version


def test_vllm_is_a_program_of_this_environment(host: Any, pipeline: PipelinePlan) -> None:
    program = host.file(f"{pipeline.environment.directory}/bin/vllm")
    assert program.mode & 0o111
    assert pipeline.environment.directory in program.content_string.splitlines()[0]


def test_the_handoff_plugin_is_there_where_a_rank_is_to_load_it(host: Any, pipeline: PipelinePlan) -> None:
    look = "import importlib.metadata as m; print(*(p.name for p in m.entry_points(group='vllm.general_plugins')))"
    said = host.check_output(f"{pipeline.environment.directory}/bin/python -I -c %s", look).split()
    wanted = any("PPDEPLOY_HANDOFF" in node.rank_env for node in pipeline.nodes)
    assert ("ppdeploy_handoff" in said) is wanted


def test_the_environment_is_roots(host: Any, pipeline: PipelinePlan) -> None:
    folder = host.file(pipeline.environment.directory)
    assert (folder.user, folder.group, f"{folder.mode:04o}") == ("root", "root", "0755")


def _plain(version: str) -> str:
    """Return a version without its local part, which says how it was built: `0.32.0+cpu` is 0.32.0."""
    return version.partition("+")[0]
