"""What an agent must bear from whoever reaches its port: runs on a lab host with the host's own Python."""

from __future__ import annotations

import socket
import sys
import time

AGENT = (sys.argv[1], int(sys.argv[2]))


def connect(data: bytes) -> socket.socket:
    """Open one more connection and send something."""
    connection = socket.create_connection(AGENT, 2)
    connection.sendall(data)
    return connection


half_open = [connect(b"GET /v1/state?no") for _ in range(1000)]
time.sleep(5)
sys.stdout.write(connect(b"POST /v1/stop HTTP/1.1\r\n\r\n").recv(100).split()[1].decode())
connect(bytes(range(256)) * 64 + b"\r\n\r\n")
time.sleep(1)
