#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Bring the peers of an open WireGuard tunnel to those that are wanted, without touching the others."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: ppdeploy_tunnel
short_description: Bring the peers of an open WireGuard tunnel to those that are wanted
version_added: "0.1.0"
description:
  - Reads C(wg show) and says with one C(wg set) what differs, so that no packet to or from a peer that stays is lost.
    C(wg syncconf) wants the private key, opens wireguard-go's port anew and takes every peer's addresses away for a
    moment.
  - The tunnel itself is made elsewhere; the kernel's and wireguard-go's are the same to it.
author:
  - The ppdeploy authors
options:
  interface:
    description: The tunnel's interface.
    type: str
    required: true
  peers:
    description:
      - The wanted peers, each with its public C(key), its C(endpoint), and the network C(allowed) to it. C(host) is
        for who reads.
    type: list
    elements: dict
    required: true
  keep:
    description: Whether peers that are there and not wanted stay.
    type: bool
    default: false
attributes:
  check_mode:
    description: Says what would change, and changes nothing.
    support: full
  platform:
    description: Linux; Python 3.9 or newer; wg(8).
    platforms: linux
    support: full
"""

EXAMPLES = r"""
- name: Know the peers
  ppdeploy_tunnel:
    interface: ppdeploy0
    peers:
      - {key: "{{ key_of_node2 }}", endpoint: "192.0.2.12:29500", allowed: 10.213.117.12/32}
"""

RETURN = r"""
set:
  description: Keys of the peers that came or changed.
  returned: always
  type: list
strangers:
  description: Keys that the tunnel had and that are not wanted; with O(keep) it has them still.
  returned: always
  type: list
"""

import subprocess
from typing import Any

from ansible.module_utils.basic import AnsibleModule

WG_SECONDS = 20.0


def known(dump: str) -> dict[str, tuple[str, str]]:
    """Return endpoint and allowed networks of each peer by its key, from `wg show INTERFACE dump`.

    The first line is the interface's own, with its private key: it is left alone. wg(8): public key, preshared key,
    endpoint, allowed IPs, and what is counted.
    """
    peers = [line.split("\t") for line in dump.splitlines()[1:]]
    return {peer[0]: (peer[2], peer[3]) for peer in peers}


def difference(
    there: dict[str, tuple[str, str]], wanted: list[dict[str, str]], keep: bool
) -> tuple[list[str], list[str], list[str]]:
    """Return the words for `wg set`, the keys that come or change, and those that are not wanted.

    What a peer has already is not said again: setting its networks takes them away for a moment.
    """
    keys = {peer["key"] for peer in wanted}
    strangers = [key for key in there if key not in keys]
    # First, so that an address of theirs is free for another.
    words = [] if keep else [word for key in strangers for word in ("peer", key, "remove")]
    changed = []
    for peer in wanted:
        endpoint, allowed = there.get(peer["key"], ("", ""))
        differs = [
            *(("endpoint", peer["endpoint"]) if endpoint != peer["endpoint"] else ()),
            *(("allowed-ips", peer["allowed"]) if allowed != peer["allowed"] else ()),
        ]
        if differs:
            changed.append(peer["key"])
            words += ["peer", peer["key"], *differs]
    return words, changed, strangers


def ask_wg(module: AnsibleModule, *words: str) -> str:
    """Ask wg(8) and return what it printed; end the play in a sentence where it fails."""
    interface = module.params["interface"]
    try:
        done = subprocess.run(
            ["wg", *words],
            capture_output=True,
            encoding="utf-8",
            timeout=WG_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(msg=f"wg cannot be asked about the tunnel {interface} ({error}): install wireguard-tools")
    if done.returncode != 0:
        # Not what it was told by: a dump has the private key.
        module.fail_json(
            msg=f"wg {words[0]} {interface} failed ({done.stderr.strip()}): see `systemctl status ppdeploy-tunnel`"
        )
    return done.stdout


def main() -> None:
    """Compare, and set what differs."""
    module = AnsibleModule(
        argument_spec={
            "interface": {"type": "str", "required": True},
            "peers": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "key": {"type": "str", "required": True, "no_log": False},
                    "endpoint": {"type": "str", "required": True},
                    "allowed": {"type": "str", "required": True},
                    "host": {"type": "str"},
                },
            },
            "keep": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params: dict[str, Any] = module.params
    there = known(ask_wg(module, "show", params["interface"], "dump"))
    words, changed, strangers = difference(there, params["peers"], params["keep"])
    if words and not module.check_mode:
        ask_wg(module, "set", params["interface"], *words)
    module.exit_json(changed=bool(words), set=changed, strangers=strangers)


if __name__ == "__main__":
    main()
