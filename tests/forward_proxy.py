"""A small forward proxy on loopback, as a company's network has: it carries requests and tunnels, and says which."""

from __future__ import annotations

import http.client
import select
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import urlsplit


@dataclass
class ForwardProxy:
    """The server, from `with` on. `refuses` is the status that it answers everything with, where it does."""

    refuses: int | None = None
    asked: list[str] = field(default_factory=list)
    """What was asked for, as `GET http://...` or `CONNECT host:port`."""

    def __enter__(self) -> Self:
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        """Its address, as clients are told it."""
        return f"http://127.0.0.1:{self._server.server_port}"


class _Handler(BaseHTTPRequestHandler):
    proxy: ForwardProxy

    def log_message(self, *_: Any) -> None:
        """Say nothing: tests look at `asked`."""

    def do_HEAD(self) -> None:
        self._carry()

    def do_GET(self) -> None:
        self._carry()

    def _is_refused(self) -> bool:
        self.proxy.asked.append(f"{self.command} {self.path}")
        if self.proxy.refuses:
            self.send_error(self.proxy.refuses)
        return bool(self.proxy.refuses)

    def _carry(self) -> None:
        if self._is_refused():
            return
        url = urlsplit(self.path)
        onward = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=10)
        path = url.path + (f"?{url.query}" if url.query else "")
        onward.request(self.command, path, headers={k: v for k, v in self.headers.items() if k.lower() != "host"})
        answer = onward.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.read())
        onward.close()

    def do_CONNECT(self) -> None:
        if self._is_refused():
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as onward:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: onward, onward: self.connection}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(65536)
                    if not data:
                        return
                    ends[end].sendall(data)
