"""Telling systemd that the agent is up and that its control loop still turns (sd_notify(3))."""

from __future__ import annotations

import os
import socket


def tell(text: str) -> None:
    """Send `text` to systemd; nothing happens when systemd does not listen."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.sendto(text.encode(), address)
        except OSError as error:
            # The watchdog ends an agent that cannot be heard; it must not end itself before.
            os.write(2, f"systemd does not listen: {error}\n".encode())
