#!/usr/bin/python
"""See whether fabric peers can be reached from this node's own fabric address."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_reach
short_description: See whether peers can be reached over the fabric
description:
  - Opens a TCP connection to each peer, from the given source address. A connection and a refusal both show that the
    peer is there; only silence and 'no route' do not.
  - It changes nothing.
options:
  source:
    description: The node's own fabric address.
    type: str
    required: true
  peers:
    description: Fabric addresses of the peers.
    type: list
    elements: str
    required: true
  port:
    description: TCP port to try.
    type: int
    required: true
  timeout:
    description: Seconds to wait for one peer.
    type: float
    default: 3
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: See every fabric peer
  ppdeploy_reach:
    source: 192.0.2.11
    peers: [192.0.2.12]
    port: 29501
"""

RETURN = r"""
peers:
  description: For each peer C(connected), C(refused) or what went wrong.
  returned: always
  type: dict
"""

import errno
import socket
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule


def _try(source: str, peer: str, port: int, timeout: float) -> tuple[bool, str]:
    """Return (answered, what happened) of one connection."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        try:
            sock.bind((source, 0))
        except OSError as error:
            return False, f"the address {source} is not on this host ({error.strerror})"
        try:
            sock.connect((peer, port))
        except ConnectionRefusedError:
            return True, "refused"
        except socket.timeout:
            return False, f"no answer in {timeout:g} s"
        except OSError as error:
            return False, error.strerror or errno.errorcode.get(error.errno or 0, str(error))
        return True, "connected"


def main() -> None:
    """Try every peer at once and fail naming those that gave no answer."""
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "str", "required": True},
            "peers": {"type": "list", "elements": "str", "required": True},
            "port": {"type": "int", "required": True},
            "timeout": {"type": "float", "default": 3},
        },
        supports_check_mode=True,
    )
    params = module.params
    with ThreadPoolExecutor(max_workers=max(len(params["peers"]), 1)) as pool:
        seen = dict(
            zip(
                params["peers"],
                pool.map(
                    lambda peer: _try(params["source"], peer, params["port"], params["timeout"]),
                    params["peers"],
                ),
            )
        )
    silent = [f"{peer} ({said})" for peer, (answered, said) in seen.items() if not answered]
    results = {peer: said for peer, (answered, said) in seen.items()}
    if silent:
        module.fail_json(
            msg="fabric peers cannot be reached from {} on port {}: {}. Check cable, subnet and firewall between "
            "them, or name another NIC with ppdeploy_fabric_interface or ppdeploy_fabric_subnet.".format(
                params["source"], params["port"], ", ".join(silent)
            ),
            peers=results,
        )
    module.exit_json(changed=False, peers=results)


if __name__ == "__main__":
    main()
