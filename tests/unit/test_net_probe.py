"""The handoff probe's order of messages, with threads for nodes and a stand-in for torch; the lab runs the real one."""

from __future__ import annotations

import json
import queue
import threading
from collections import defaultdict
from collections.abc import Set
from typing import Any

import pytest

from ppdeploy.probe import handoff
from ppdeploy.probe.handoff import Handoffs, measure


class Tensor:
    """Bytes in rows, of which the first can be taken."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __getitem__(self, part: slice) -> Tensor:
        return Tensor(self.rows[part])

    def item(self) -> Any:
        return self.rows[0]

    def tolist(self) -> list[Any]:
        return self.rows


class Done:
    def wait(self) -> None:
        pass


class Wire:
    """What joins the stand-ins: a queue for each way."""

    def __init__(self) -> None:
        self.ways: dict[tuple[int, int], queue.Queue[list[Any]]] = defaultdict(queue.Queue)
        self.dead: set[int] = set()


class Torch:
    """As much of torch as the probe uses, for one rank."""

    uint8 = long = None

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank, self.distributed = wire, rank, self

    def zeros(self, shape: Any, **_: Any) -> Tensor:
        return Tensor([0] * (shape[0] if isinstance(shape, tuple) else shape))

    def tensor(self, values: list[int], **_: Any) -> Tensor:
        return Tensor(values)

    def frombuffer(self, data: bytearray, **_: Any) -> Tensor:
        return Tensor(list(data))

    def send(self, tensor: Tensor, peer: int) -> None:
        if peer in self.wire.dead:
            raise RuntimeError("Connection closed by peer\nand more")
        self.wire.ways[self.rank, peer].put(list(tensor.rows))

    def recv(self, tensor: Tensor, peer: int) -> None:
        tensor.rows[:] = self.wire.ways[peer, self.rank].get(timeout=5)

    def isend(self, tensor: Tensor, peer: int) -> Done:
        self.send(tensor, peer)
        return Done()

    def irecv(self, tensor: Tensor, peer: int) -> Done:
        found = self.wire.ways[peer, self.rank].get(timeout=5)
        assert len(found) == len(tensor.rows), "the receiver expects another size"
        return Done()


class Store:
    """Says that everybody is there."""

    def set(self, key: str, value: str) -> None:
        pass

    def wait(self, keys: list[str], timeout: Any) -> None:
        pass


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(handoff, "tell", lambda **line: lines.append(line))
    monkeypatch.setattr(handoff, "MOST", 5)
    return lines


def config(rank: int, hosts: list[str]) -> dict[str, Any]:
    return {"rank": rank, "hosts": hosts, "device": "cpu", "bytes_per_token": 16, "tokens": [1, 4, 8], "seconds": 1}


def meet(wire: Wire, hosts: list[str], rounds: list[list[list[int]]], gone: Set[int] = frozenset()) -> None:
    """Run all nodes but those that are gone, to their end."""
    threads = [
        threading.Thread(target=measure, args=(Handoffs(Torch(wire, rank), config(rank, hosts)), Store(), rounds))
        for rank in range(len(hosts))
        if rank not in gone
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_every_way_is_measured_in_every_size(told: list[dict[str, Any]]) -> None:
    hosts = ["node1", "node2", "node3"]
    meet(Wire(), hosts, [[[1, 2]], [[0, 2]], [[0, 1]]])
    ways = [(line["sender"], line["receiver"], line["tokens"]) for line in told]
    assert sorted(ways) == sorted((a, b, tokens) for a in hosts for b in hosts if a != b for tokens in (1, 4, 8))
    assert {line["bytes"] for line in told} == {16, 64, 128}
    assert all(line["p99"] >= line["p50"] >= 0 and line["count"] == 5 for line in told)


def test_a_node_that_is_gone_costs_no_other_pair(told: list[dict[str, Any]]) -> None:
    wire = Wire()
    wire.dead = {2}
    meet(wire, ["node1", "node2", "node3"], [[[0, 2]], [[0, 1]]], gone={2})
    assert [line for line in told if "error" in line] == [
        {"pair": ["node1", "node3"], "error": "Connection closed by peer"}
    ]
    assert {(line["sender"], line["receiver"]) for line in told if "sender" in line} == {
        ("node1", "node2"),
        ("node2", "node1"),
    }


def test_a_size_that_would_take_too_long_is_left_out(
    told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "LONGEST", -1.0)
    meet(Wire(), ["node1", "node2"], [[[0, 1]]])
    assert [(line["tokens"], "skipped" in line) for line in told if line["sender"] == "node1"] == [
        (1, False),
        (4, True),
        (8, True),
    ]


def test_what_is_told_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    handoff.tell(sender="node1", p50=0.1)
    assert json.loads(capsys.readouterr().out) == {"sender": "node1", "p50": 0.1}
