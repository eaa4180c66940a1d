"""The agents' HTTP: limits on everything, for those who ask and for those who are asked."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ppdeploy.agent import contact, wire
from ppdeploy.agent.messages import Member
from ppdeploy.agent.poller import ask
from ppdeploy.agent.signing import HEADER, seal
from tests.unit.gang_factories import answer

KEY = b"k" * 32


def _handler(request: wire.Request) -> wire.Reply:
    if request.path == "/echo":
        return wire.Reply(200, repr(sorted(request.query.items())).encode())
    if request.path == "/v1/state":
        body, signature = seal(KEY, request.query.get("nonce", ""), answer())
        return wire.Reply(200, body, "application/json", {HEADER: signature})
    return wire.Reply(404)


@pytest.fixture
def port() -> Iterator[int]:
    listener = wire.listen("127.0.0.1", 0)
    server = wire.Server(_handler)
    server.add(listener)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield int(listener.getsockname()[1])
    server.stop()
    thread.join()
    listener.close()


def _serve_once(talk: Callable[[socket.socket], None]) -> tuple[int, threading.Thread]:
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        peer, _ = listener.accept()
        with peer, listener:
            try:
                peer.recv(4096)
                talk(peer)
            except OSError:
                return

    thread = threading.Thread(target=run)
    thread.start()
    return int(listener.getsockname()[1]), thread


def test_a_question_is_answered(port: int) -> None:
    reply = wire.get("127.0.0.1", port, "/echo?a=1&b=2", 2.0)
    assert (reply.status, reply.body) == (200, b"[('a', '1'), ('b', '2')]")
    assert wire.get("127.0.0.1", port, "/nothing", 2.0).status == 404


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /v1/stop HTTP/1.1\r\n\r\n", b"405"),
        (b"DELETE / HTTP/1.1\r\n\r\n", b"405"),
        (b"garbage\r\n\r\n", b"400"),
        (b"\x00\xff\r\n\r\n", b"400"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /?" + b"a=1&" * 100 + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 9000, b"400"),
    ],
)
def test_what_is_no_question_is_refused(port: int, request_: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), 2) as peer:
        peer.sendall(request_)
        assert peer.recv(64).split()[1] == status


def test_a_slow_asker_is_cut_off_and_delays_nobody(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 5) as slow:
        slow.sendall(b"GET /echo")
        begin = time.monotonic()
        assert wire.get("127.0.0.1", port, "/echo", 1.0).status == 200
        assert slow.recv(10) == b""
        assert time.monotonic() - begin < wire.LIFE + 2.0


def test_a_flood_of_connections_costs_the_oldest_and_never_the_newest(port: int) -> None:
    held = []
    for _ in range(300):
        peer = socket.create_connection(("127.0.0.1", port), 2)
        peer.sendall(b"GET /")
        held.append(peer)
    assert wire.get("127.0.0.1", port, "/echo", 2.0).status == 200
    for peer in held:
        peer.close()


def test_a_flood_costs_no_other_asker_its_answer(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) as peer:
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(90)]
        peer.settimeout(5.0)
        peer.sendall(f"GET /v1/state?nonce={'0' * 32} HTTP/1.1\r\n\r\n".encode())
        assert peer.recv(100).startswith(b"HTTP/1.1 200 ")
        for one in held:
            one.close()


@pytest.mark.parametrize("address", ["192.0.2.77", "2001:db8::77"])
def test_an_agent_listens_on_an_address_that_is_not_there_yet(address: str) -> None:
    with wire.listen(address, 0) as listener:
        assert listener.getsockname()[0] == address


def test_an_answer_that_trickles_is_too_late() -> None:
    def trickle(peer: socket.socket) -> None:
        for _ in range(40):
            peer.sendall(b"H")
            time.sleep(0.1)

    port, thread = _serve_once(trickle)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.get("127.0.0.1", port, "/", 0.5)
    assert time.monotonic() - begin < 1.5
    thread.join()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 " + b"9" * 3000 + b" x\r\n\r\n",
        b"HTTP/1.1 \xb2\xb2\xb2 x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
    ],
)
def test_an_answer_that_is_none_is_an_error(data: bytes) -> None:
    port, thread = _serve_once(lambda peer: peer.sendall(data))
    with pytest.raises(ValueError, match=r"."):
        wire.get("127.0.0.1", port, "/", 2.0, limit=4000)
    thread.join()


def test_chunks_are_put_together() -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    port, thread = _serve_once(lambda peer: peer.sendall(data))
    assert wire.get("127.0.0.1", port, "/", 2.0).body == b"abcde"
    thread.join()


def test_a_million_chunks_take_no_minutes() -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 300_000 + b"0\r\n\r\n"
    begin = time.process_time()
    assert len(wire._parse_reply(data).body) == 300_000
    assert time.process_time() - begin < 5.0


def _peer(name: str = "a") -> Member:
    return Member(name, f"machine-{name}", "127.0.0.1")


def test_a_poll_tells_what_came_of_it(port: int) -> None:
    good = ask(_peer(), port, KEY, ("c", "p"))
    assert (good.kind, good.answer) == (contact.OK, answer())
    assert ask(_peer("b"), port, KEY, ("c", "p")).kind == contact.INVALID
    forged = ask(_peer(), port, b"x" * 32, ("c", "p"))
    assert (forged.kind, forged.answer) == (contact.INVALID, None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = int(listener.getsockname()[1])
    assert ask(_peer(), closed, KEY, ("c", "p")).kind == contact.REFUSED


def test_a_poll_of_someone_who_says_nothing_is_silence() -> None:
    port, thread = _serve_once(lambda _peer: time.sleep(1.5))
    poll = ask(_peer(), port, KEY, ("c", "p"))
    assert (poll.kind, poll.error) == (contact.SILENT, "no answer within 1 s")
    thread.join()
