"""Answers in an agent's place, on its host: runs there with the host's own Python, not under pytest.

`record` keeps one genuine answer; `replay` gives it to every question, `forge` changes it, `endless` never stops. Each
lasts ten seconds.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

MODE, ADDRESS, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3])
RECORDED = Path("/run/ppdeploy-recorded")


def answer(client: socket.socket) -> None:
    """Give one client what the mode says."""
    client.recv(4096)
    genuine = RECORDED.read_bytes()
    if MODE == "replay":
        client.sendall(genuine)
    elif MODE == "forge":
        client.sendall(genuine.replace(b'"running"', b'"absent" '))
    else:
        while True:
            client.sendall(bytes(65536))


def main() -> None:
    """Record, or serve for ten seconds."""
    if MODE == "record":
        with socket.create_connection((ADDRESS, PORT), 2) as agent:
            agent.sendall(b"GET /v1/state?nonce=" + b"0" * 32 + b" HTTP/1.1\r\nConnection: close\r\n\r\n")
            parts = []
            while part := agent.recv(65536):
                parts.append(part)
        RECORDED.write_bytes(b"".join(parts))
        return
    end = time.monotonic() + 10
    with socket.create_server((ADDRESS, PORT)) as server:
        server.settimeout(1)
        while time.monotonic() < end:
            try:
                client, _ = server.accept()
                with client:
                    answer(client)
            except OSError:
                # Nobody asked for a second, or who asked has had enough.
                continue


main()
