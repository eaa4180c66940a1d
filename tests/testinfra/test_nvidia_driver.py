"""`nvidia_driver` keeps the driver that it installed as it was installed, and has left every other one alone."""

from __future__ import annotations

import re
from typing import Any

from ppdeploy.plan.driver import FILES, HELD, NOT_HELD
from ppdeploy.plan.types import NodePlan


def test_its_files_are_as_planned_and_no_others_are_there(
    host: Any, node: NodePlan, files: dict[str, tuple[Any, str]]
) -> None:
    planned = {path: (file, text) for path, (file, text) in files.items() if file.part == "driver"}
    assert bool(planned) == node.driver.ours
    for path, (file, text) in planned.items():
        found = host.file(path)
        assert found.content_string == text, path
        assert (found.user, found.group, f"{found.mode:04o}") == (file.owner, file.group, file.mode)
    for path in set(FILES) - set(planned):
        assert not host.file(path).exists, path


def test_no_upgrade_by_itself_parts_its_packages(host: Any, node: NodePlan) -> None:
    if not node.driver.ours or node.driver.manager != "apt":
        return
    states = host.check_output(r"dpkg-query --show --showformat='${Package} ${db:Status-Want} ${db:Status-Status}\n'")
    installed = [line.split() for line in states.splitlines() if line.endswith(" installed")]
    kept = {name: want for name, want, _ in installed if re.search(HELD, name) and not re.search(NOT_HELD, name)}
    assert kept
    assert set(kept.values()) == {"hold"}, kept


def test_every_gpu_answers(host: Any, node: NodePlan) -> None:
    if node.driver.cards:
        found = host.check_output("nvidia-smi --query-gpu=uuid --format=csv,noheader").splitlines()
        assert len(found) == node.driver.cards
