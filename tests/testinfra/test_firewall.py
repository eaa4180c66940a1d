"""`firewall` has the planned table loaded, of which it alone is the owner, or has none."""

from __future__ import annotations

from typing import Any

from ppdeploy.plan.firewall import RULES, UNIT, UNIT_NAME
from ppdeploy.plan.types import NodePlan


def test_its_files_are_as_planned_and_no_others_are_there(
    host: Any, node: NodePlan, files: dict[str, tuple[Any, str]]
) -> None:
    planned = {path: (file, text) for path, (file, text) in files.items() if file.part == "firewall"}
    assert set(planned) == ({RULES, UNIT} if node.firewall else set())
    for path in (RULES, UNIT):
        found = host.file(path)
        assert found.exists == (path in planned), path
        if path in planned:
            assert found.content_string == planned[path][1], path
            assert (found.user, found.group, f"{found.mode:04o}") == ("root", "root", planned[path][0].mode)


def test_the_table_is_loaded_now_and_at_each_boot(host: Any, node: NodePlan) -> None:
    if node.firewall is None:
        # Where there is no nft there is no table.
        assert host.run("! test -x /usr/sbin/nft || ! /usr/sbin/nft list table inet ppdeploy").rc == 0
        return
    service = host.service(UNIT_NAME)
    assert service.is_running
    assert service.is_enabled
    table = host.check_output("/usr/sbin/nft list table inet ppdeploy")
    for address in node.firewall.peers:
        assert address in table
    assert f"tcp dport {node.firewall.agent_port}" in table
    assert "drop" in table
