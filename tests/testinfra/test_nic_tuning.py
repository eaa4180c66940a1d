"""`nic_tuning` has set what the plan decided and nothing else, and keeps it over a reboot."""

from __future__ import annotations

import json
from typing import Any

from ppdeploy.plan.tuning import CONFIG, RECORD, SCRIPT, UNIT
from ppdeploy.plan.types import NodePlan


def wanted(node: NodePlan, verdict: str = "set") -> dict[str, str]:
    return {one.key: one.value for one in node.tuning.settings if one.verdict == verdict}


def test_its_files_are_as_planned_and_no_others_are_there(
    host: Any, node: NodePlan, files: dict[str, tuple[Any, str]]
) -> None:
    planned = {path: (file, text) for path, (file, text) in files.items() if file.part == "tuning"}
    for path, (file, text) in planned.items():
        found = host.file(path)
        assert found.content_string == text, path
        assert (found.user, found.group, f"{found.mode:04o}") == (file.owner, file.group, file.mode)
    for path in {CONFIG, UNIT} - set(planned):
        assert not host.file(path).exists, path
    assert host.file(SCRIPT).exists == bool(planned)
    assert host.file(RECORD).exists == bool(node.tuning.wanted())


def test_kernel_settings_are_as_planned(host: Any, node: NodePlan) -> None:
    for key, value in wanted(node).items():
        if key.startswith("sysctl."):
            path = "/proc/sys/" + key.removeprefix("sysctl.").replace(".", "/")
            assert host.file(path).content_string.split() == value.split(), key


def test_the_mtu_is_as_planned(host: Any, node: NodePlan) -> None:
    mtu = wanted(node).get("mtu")
    if mtu is not None:
        assert host.file(f"/sys/class/net/{node.wire.interface}/mtu").content_string.strip() == mtu


def test_a_boot_would_set_the_same(host: Any, node: NodePlan) -> None:
    boot = {key: value for key, value in node.tuning.wanted().items() if not key.startswith("sysctl.")}
    service = host.service("ppdeploy-nic.service")
    if not boot:
        assert not service.exists
        return
    assert json.loads(host.file(CONFIG).content_string) == {
        "interface": node.tuning.interface,
        "settings": boot,
    }
    assert service.is_enabled
    assert service.is_running, host.run("journalctl --no-pager --lines=20 --unit=ppdeploy-nic").stdout


def test_what_the_host_had_before_is_remembered(host: Any, node: NodePlan) -> None:
    settings = node.tuning.wanted()
    if settings:
        record = json.loads(host.file(RECORD).content_string)
        before = {one.key: one.before for one in node.tuning.settings if one.key in settings}
        assert record["interface"] == node.tuning.interface
        assert record["settings"] == before
