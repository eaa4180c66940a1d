"""`fabric_encryption` has the planned tunnel open, with a key that is root's alone, or has none."""

from __future__ import annotations

import json
from typing import Any

from ppdeploy.plan.tunnel import FOLDER, INTERFACE, PEERS, PRIVATE_KEY, PUBLIC_KEY, UNIT, UNIT_NAME
from ppdeploy.plan.types import NodePlan


def test_its_files_are_as_planned_and_no_others_are_there(
    host: Any, node: NodePlan, files: dict[str, tuple[Any, str]]
) -> None:
    planned = {path: (file, text) for path, (file, text) in files.items() if file.part == "tunnel"}
    assert set(planned) == ({UNIT, PEERS} if node.tunnel else set())
    assert host.file(UNIT).exists == bool(planned)
    assert host.file(FOLDER).exists == bool(planned)
    for path, (file, text) in planned.items():
        found = host.file(path)
        assert found.content_string == text, path
        assert (found.user, found.group, f"{found.mode:04o}") == ("root", "root", file.mode)


def test_only_root_reads_the_private_key_and_the_plan_has_its_public_one(host: Any, node: NodePlan) -> None:
    if node.tunnel is None:
        return
    folder, private = host.file(FOLDER), host.file(PRIVATE_KEY)
    assert (folder.user, folder.group, f"{folder.mode:04o}") == ("root", "root", "0700")
    assert (private.user, private.group, f"{private.mode:04o}") == ("root", "root", "0600")
    public = host.file(PUBLIC_KEY).content_string.strip()
    assert host.check_output("wg pubkey < %s", PRIVATE_KEY) == public == node.tunnel.public_key


def test_the_tunnel_is_open_now_and_at_each_boot(host: Any, node: NodePlan) -> None:
    if node.tunnel is None:
        assert host.run("ip link show dev %s", INTERFACE).rc != 0
        return
    service = host.service(UNIT_NAME)
    assert service.is_running
    assert service.is_enabled
    (link,) = json.loads(host.check_output("ip -json address show dev %s", INTERFACE))
    assert link["mtu"] == node.tunnel.mtu
    assert node.tunnel.address in {address["local"] for address in link["addr_info"]}


def test_it_lets_in_its_peers_by_their_keys_and_nobody_else(host: Any, node: NodePlan) -> None:
    if node.tunnel is None:
        return
    # A line for the interface, then one for each peer (wg(8), show INTERFACE dump).
    own, *peers = [line.split("\t") for line in host.check_output("wg show %s dump", INTERFACE).splitlines()]
    assert (own[1], own[2]) == (node.tunnel.public_key, str(node.tunnel.port))
    assert {(peer[0], peer[2], peer[3]) for peer in peers} == {
        (peer.public_key, f"{peer.endpoint}:{node.tunnel.port}", f"{peer.address}/32") for peer in node.tunnel.peers
    }
