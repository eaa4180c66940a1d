"""The lab's network namespace and its two bridges. Nothing in it leads to another network."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.lab import system

MANAGEMENT_BRIDGE = "br-mgmt"
FABRIC_BRIDGE = "br-fab"
GATEWAY = "198.18.0.1"
"""The controller's address on the management network; the hosts' default route ends there."""
FABRIC_OBSERVER = "198.18.1.1"
"""An address of the controller on the fabric, so that a test can knock there as a stranger."""

FABRIC_SUBNET = "198.18.1.0/24"

_RATE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(bit|kbit|mbit|gbit)")


def management_address(index: int) -> str:
    """Return the address on host0 of host `index` (1 is node1), of the benchmark range of RFC 2544."""
    return f"198.18.0.{10 + index}"


def fabric_address(index: int) -> str:
    """Return the address on fab0 of host `index` (1 is node1)."""
    return f"198.18.1.{10 + index}"


def check_rate(rate: str) -> str | None:
    """Return `rate` as tc(8) reads it (`1gbit`, `2.5gbit`, `100mbit`); None for `none`."""
    if rate == "none":
        return None
    if not _RATE.fullmatch(rate.lower()):
        raise InputError(
            f"'{rate}' is not a rate", remedy="write it like 1gbit, 2.5gbit or 100mbit, or none to lift it"
        )
    return rate.lower()


def inside(namespace: Path) -> list[str]:
    """Return the words to put before a command so that it runs in `namespace`.

    Not `ip netns exec`: that hides the cgroup mounts, and systemd-nspawn then says `No medium found`.
    """
    return ["nsenter", f"--net={namespace}"]


def create(namespace: Path) -> None:
    """Make the namespace, held by a mount on the file `namespace`, and the bridges in it."""
    namespace.touch()
    system.run(["unshare", f"--net={namespace}", "true"], what="making the lab's network namespace")
    commands = ["link set lo up"]
    for bridge, address in ((MANAGEMENT_BRIDGE, GATEWAY), (FABRIC_BRIDGE, FABRIC_OBSERVER)):
        commands += [
            f"link add {bridge} type bridge forward_delay 0 stp_state 0 mcast_snooping 0",
            f"addr add {address}/24 dev {bridge}",
            f"link set {bridge} up",
        ]
    system.run(
        [*inside(namespace), "ip", "-batch", "-"],
        what="making the lab's bridges",
        stdin="\n".join(commands) + "\n",
    )


def exists(namespace: Path) -> bool:
    """Say whether `namespace` is mounted."""
    return str(namespace) in _mounts_below(namespace)


def _mounts_below(folder: Path) -> list[str]:
    """Return the mount points at or below `folder`, the innermost first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()]
    return [point for point in reversed(points) if point == str(folder) or point.startswith(f"{folder}/")]


def unmount_below(folder: Path) -> None:
    """Undo every mount at or below `folder`: the namespace's own, and any that a broken run left."""
    for point in _mounts_below(folder):
        system.run(["umount", point], what="unmounting what belongs to the lab")


def remove_bridges(namespace: Path) -> None:
    """Remove the bridges: a stranger's process may keep the namespace, but finds nothing in it."""
    if not exists(namespace):
        return
    for bridge in (MANAGEMENT_BRIDGE, FABRIC_BRIDGE):
        subprocess.run(
            [*inside(namespace), "ip", "link", "del", bridge],
            check=False,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
