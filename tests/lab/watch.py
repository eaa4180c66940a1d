"""Whoever leaves the lab is counted: hosts that knock at its door, and commands that run within it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

from ppdeploy.lab import Lab, network

_LAB = "198.18.0.0/15, 127.0.0.0/8, 224.0.0.0/4, 255.255.255.255"
#: IPv6 of a link alone, which the kernel sends by itself.
_LINK = "fe80::/10, ff00::/8, ::1, ::"

_RULES = f"""
table inet watch {{
  counter controller {{}}
  counter hosts {{}}
  chain output {{
    type filter hook output priority 0;
    ip daddr != {{ {_LAB} }} counter name controller drop
    ip6 daddr != {{ {_LINK} }} counter name controller drop
  }}
  chain prerouting {{
    type filter hook prerouting priority 0;
    ip daddr != {{ {_LAB} }} counter name hosts drop
    ip6 daddr != {{ {_LINK} }} counter name hosts drop
  }}
}}
"""


@dataclass
class Watch:
    """Counts packets to addresses beyond the lab, within `with`."""

    lab: Lab

    def __enter__(self) -> Self:
        """Give the lab's namespace a way out, at the end of which every packet is counted and dropped."""
        for command in (
            ["ip", "link", "add", "beyond", "type", "veth", "peer", "name", "beyond-end"],
            ["ip", "link", "set", "beyond-end", "up"],
            ["ip", "link", "set", "beyond", "up"],
            ["ip", "route", "add", "default", "dev", "beyond"],
            ["nft", _RULES],
        ):
            self.lab.run_in_ns(command)
        return self

    def __exit__(self, *_: object) -> None:
        """Take the way out away; whoever knocks there hears again at once that there is none."""
        self.lab.run_in_ns(["nft", "delete", "table", "inet", "watch"])
        self.lab.run_in_ns(["ip", "link", "del", "beyond"])

    def prefix(self) -> tuple[str, ...]:
        """Return the words before a command that is to run within the lab, where it is counted."""
        return tuple(network.inside(self.lab.namespace))

    def packets(self) -> dict[str, int]:
        """Return how many packets were on their way out so far, of the controller and of all hosts."""
        said = self.lab.run_in_ns(["nft", "--json", "list", "counters"])
        rows = [one["counter"] for one in json.loads(said.stdout)["nftables"] if "counter" in one]
        return {row["name"]: row["packets"] for row in rows if row["table"] == "watch"}
