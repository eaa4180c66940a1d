"""Copy one TCP connection to standard input and output: the ssh ProxyCommand into the lab.

Stand-alone and standard library only: it is copied beside the lab's state, so that an inventory keeps working
when the checkout moves to another commit.

    connect.py [--wait SECONDS] [--cgroup PROCS_FILE] HOST PORT
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

_BLOCK = 1 << 18


def _connect(host: str, port: int, wait: float) -> socket.socket:
    """Connect within `wait` seconds, trying again while the host boots; one try where `wait` is 0."""
    deadline = time.monotonic() + wait
    while True:
        try:
            # A try is short while waiting: a host that boots answers no ARP at first, which takes 3 s to
            # fail.
            connection = socket.create_connection((host, port), timeout=0.5 if wait else 10)
        except OSError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
            continue
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _send_input(connection: socket.socket) -> None:
    """Send standard input until its end, then say so to the other side."""
    with contextlib.suppress(OSError):
        while block := os.read(0, _BLOCK):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)


def main() -> int:
    """Connect and copy both ways until the other side closes; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wait", type=float, default=0.0)
    parser.add_argument("--cgroup")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    options = parser.parse_args()
    if options.cgroup:
        # In the lab's own group, `lab down` finds this process, and takes no other for it.
        Path(options.cgroup).write_text("0", encoding="ascii")
    try:
        connection = _connect(options.host, options.port, options.wait)
    except OSError as error:
        sys.stderr.write(f"no connection to {options.host} port {options.port}: {error}\n")
        return 1
    threading.Thread(target=_send_input, args=(connection,), daemon=True).start()
    with contextlib.suppress(OSError):
        while block := connection.recv(_BLOCK):
            view = memoryview(block)
            while view:
                view = view[os.write(1, view) :]
    # The sending thread may be blocked in a read of standard input, which no clean exit would interrupt.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
