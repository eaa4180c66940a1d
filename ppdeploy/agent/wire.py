"""The least HTTP that agents need: a GET with a limit on everything, and a server that cannot be held up.

The standard library's server has a thread for each connection and no limit on a request's time, its
client a limit only between two bytes. Here one thread serves all, and every connection ends within two
seconds.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

MAX_CONNECTIONS = 64
MAX_REQUEST = 4096
MAX_REPLY = 1 << 18
_IP_FREEBIND = 15
LIFE = 2.0
"""Seconds that a connection may last, from its first to its last byte."""

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True)
class Request:
    """A GET: the path, its query, and whether it came in over loopback."""

    path: str
    query: dict[str, str]
    loopback: bool


@dataclass(frozen=True)
class Reply:
    """A status, a body, and the headers by lower-case name."""

    status: int
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    headers: dict[str, str] = field(default_factory=dict)


Handler = Callable[[Request], Reply]


def get(address: str, port: int, target: str, seconds: float, limit: int = MAX_REPLY) -> Reply:
    """Fetch `target` over a new connection, within `seconds` in all; raise `OSError` (also when late) or `ValueError`.

    `address` is numeric: a resolver may take longer than the whole question. A new connection each time,
    since an old one keeps silent for seconds after a cut, by TCP's back-off (rule 23).
    """
    return exchange(address, port, f"GET {target} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode(), seconds, limit)


def exchange(address: str, port: int, request: bytes, seconds: float, limit: int = MAX_REPLY) -> Reply:
    """Send a whole request that asks for a closed connection, and return the reply; errors as in `get`."""
    end = time.monotonic() + seconds
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(seconds)
        connection.connect((address, port))
        connection.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        data = bytearray()
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("no whole answer in time")
            connection.settimeout(left)
            piece = connection.recv(65536)
            if not piece:
                break
            data += piece
            if len(data) > limit:
                raise ValueError("the answer is too long")
    return _parse_reply(bytes(data))


def _parse_reply(data: bytes) -> Reply:
    head, separator, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    if not separator or len(words) < 2 or not words[0].startswith("HTTP/1.") or not _is_status(words[1]):
        raise ValueError("the answer is no HTTP")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = _unchunk(body)
    elif "content-length" in headers and headers["content-length"] != str(len(body)):
        raise ValueError("the answer was cut short")
    return Reply(int(words[1]), body, headers.get("content-type", ""), headers)


def _is_status(word: str) -> bool:
    # Three digits, no more: a status is told on, in reasons that are stored and sent.
    return len(word) == 3 and word.isascii() and word.isdigit()


def _unchunk(body: bytes) -> bytes:
    whole = bytearray()
    at = 0
    while True:
        # By position: what is left is not copied for each chunk, of which there may be a million.
        end = body.find(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16) if end >= 0 else -1
        if size < 0 or len(body) < end + 2 + size + 2:
            raise ValueError("the answer was cut short")
        if size == 0:
            return bytes(whole)
        whole += body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket; raise `OSError`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # An agent without its fabric address still has a rank to end and a reason to tell (`ready` names it).
        listener.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        listener.bind((address, port))
        listener.listen(256)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


@dataclass
class _Connection:
    peer: socket.socket
    born: float
    address: str
    received: bytearray = field(default_factory=bytearray)
    answer: bytes = b""

    @property
    def loopback(self) -> bool:
        """Whether the asker is on this host."""
        return self.address in {"127.0.0.1", "::1"}


class Server:
    """Serves GET requests from one thread. Too many connections cost the oldest of who has most its life."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._stopped = False

    def add(self, listener: socket.socket) -> None:
        """Serve one more listening socket."""
        self._selector.register(listener, selectors.EVENT_READ, None)

    def stop(self) -> None:
        """End `run` soon."""
        self._stopped = True

    def run(self) -> None:
        """Serve until stopped."""
        while not self._stopped:
            for key, events in self._selector.select(0.5):
                if isinstance(key.data, _Connection):
                    self._move(key.data, events)
                elif isinstance(key.fileobj, socket.socket):
                    self._accept(key.fileobj)
            now = time.monotonic()
            for connection in [c for c in self._connections.values() if now - c.born > LIFE]:
                self._close(connection)
        for connection in list(self._connections.values()):
            self._close(connection)
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer, address = listener.accept()
        except OSError:
            # It went away, or this process has no descriptor left: old connections end soon.
            return
        peer.setblocking(False)
        connection = _Connection(peer, time.monotonic(), str(address[0]))
        self._connections[peer.fileno()] = connection
        self._selector.register(peer, selectors.EVENT_READ, connection)
        if len(self._connections) > MAX_CONNECTIONS:
            # Of the address that has most: who floods costs itself its connections, and no peer an answer.
            counts = Counter(one.address for one in self._connections.values())
            greedy = counts.most_common(1)[0][0]
            self._close(next(one for one in self._connections.values() if one.address == greedy))

    def _move(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not connection.answer:
                self._read(connection)
            elif events & selectors.EVENT_WRITE:
                sent = connection.peer.send(connection.answer)
                connection.answer = connection.answer[sent:]
                if not connection.answer:
                    self._close(connection)
        except OSError:
            self._close(connection)

    def _read(self, connection: _Connection) -> None:
        piece = connection.peer.recv(MAX_REQUEST)
        if not piece:
            self._close(connection)
            return
        connection.received += piece
        if b"\r\n\r\n" in connection.received:
            connection.answer = _render(self._answer(bytes(connection.received), connection.loopback))
        elif len(connection.received) > MAX_REQUEST:
            connection.answer = _render(Reply(400, b"the request is too long\n"))
        else:
            return
        self._selector.modify(connection.peer, selectors.EVENT_WRITE, connection)

    def _answer(self, data: bytes, loopback: bool) -> Reply:
        words = data.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Reply(400, b"not a request\n")
        if words[0] != "GET":
            return Reply(405, b"agents take no commands\n")
        try:
            url = urlsplit(words[1])
            query = {name: values[-1] for name, values in parse_qs(url.query, max_num_fields=8).items()}
        except ValueError:
            return Reply(400, b"not a request\n")
        return self._handler(Request(url.path, query, loopback))

    def _close(self, connection: _Connection) -> None:
        self._connections.pop(connection.peer.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.peer)
        connection.peer.close()


def _render(reply: Reply) -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status} {_REASONS[reply.status]}",
        f"Content-Type: {reply.kind}",
        f"Content-Length: {len(reply.body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(f"{name}: {value}" for name, value in reply.headers.items()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + reply.body
