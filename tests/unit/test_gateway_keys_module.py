"""`ppdeploy_gateway_keys` brings a file and a running process to the wanted keys, or says that it could not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_gateway_keys as keys
from plugins.modules import ppdeploy_smoke as smoke

ALICE = {"sha256": "a" * 64, "name": "alice", "expires": 4102444800}
BOB = {"sha256": "0b" * 32, "name": "bob", "expires": 1800000000}


class FakeHaproxy:
    """HAProxy's admin socket, as the management guide of 2.6 describes the commands on maps."""

    def __init__(self, path: Path, map_path: str) -> None:
        self.map_path = map_path
        self.now: dict[str, str] = {}
        self.next: dict[str, str] = {}
        self.commands: list[str] = []
        self.refuses = ""
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(self._answer(connection.recv(65536).decode()).encode())

    def _answer(self, text: str) -> str:
        first, _, payload = text.partition("\n")
        self.commands.append(first)
        words = first.split()
        if self.refuses and words[0] == self.refuses:
            return "Unknown map identifier. Please use #<id> or <file>.\n\n"
        if words[:2] == ["show", "map"]:
            return "".join(f"0x{n:x} {key} {value}\n" for n, (key, value) in enumerate(self.now.items())) + "\n"
        if words[:2] == ["prepare", "map"]:
            self.next = {}
            return "New version created: 7\n\n"
        if words[0] == "add":
            assert text.endswith("\n\n")
            assert len(text) < 16384
            self.next |= dict(line.split(" ", 1) for line in payload.strip().splitlines())
        if words[0] == "commit":
            self.now = self.next
        return "\n"


@pytest.fixture
def haproxy(tmp_path: Path) -> Iterator[FakeHaproxy]:
    (tmp_path / "gateway").mkdir()
    found = FakeHaproxy(tmp_path / "s", str(tmp_path / "gateway/keys.map"))
    yield found
    found.server.close()


def tell(folder: Path, *entries: dict[str, Any], check: bool = False, of: tuple[str, int] = ("", 0)) -> dict[str, Any]:
    wanted = keys.wanted_map(list(entries))
    told: dict[str, Any] = keys.tell(str(folder / "gateway/keys.map"), str(folder / "s"), wanted, check, *of)
    return told


def test_file_and_process_get_the_keys_and_a_second_time_nothing_happens(tmp_path: Path, haproxy: FakeHaproxy) -> None:
    told = tell(tmp_path, ALICE, BOB)
    assert told == {
        "changed": True,
        "installed": True,
        "running": True,
        "newer": 0,
        "added": ["alice", "bob"],
        "removed": [],
    }
    wanted = {"A" * 64: "4102444800 alice", "0B" * 32: "1800000000 bob"}
    assert haproxy.now == wanted
    path = tmp_path / "gateway/keys.map"
    assert keys.parse(path.read_text()) == wanted
    assert path.stat().st_mode & 0o777 == 0o600
    haproxy.commands.clear()
    assert not tell(tmp_path, BOB, ALICE)["changed"]
    assert haproxy.commands == [f"show map {haproxy.map_path}"]
    assert tell(tmp_path, ALICE) == {**told, "added": [], "removed": ["bob"]}
    assert list(haproxy.now) == ["A" * 64]


def test_a_check_changes_nothing_and_says_what_it_would(tmp_path: Path, haproxy: FakeHaproxy) -> None:
    tell(tmp_path, ALICE)
    before = (tmp_path / "gateway/keys.map").read_text()
    told = tell(tmp_path, BOB, check=True)
    assert (told["changed"], told["added"], told["removed"]) == (True, ["bob"], ["alice"])
    assert list(haproxy.now) == ["A" * 64]
    assert (tmp_path / "gateway/keys.map").read_text() == before


def test_a_process_that_missed_them_is_told(tmp_path: Path, haproxy: FakeHaproxy) -> None:
    tell(tmp_path, ALICE)
    haproxy.now = {}
    assert tell(tmp_path, ALICE) == {
        "changed": True,
        "installed": True,
        "running": True,
        "newer": 0,
        "added": ["alice"],
        "removed": [],
    }
    assert list(haproxy.now) == ["A" * 64]


def test_many_keys_go_in_commands_that_haproxy_can_read(tmp_path: Path, haproxy: FakeHaproxy) -> None:
    many = [{"sha256": f"{number:064x}", "name": "n" * 63, "expires": 4102444800} for number in range(220)]
    tell(tmp_path, *many)
    assert len(haproxy.now) == 220
    assert sum(command.startswith("add map @7") for command in haproxy.commands) == 5


def test_without_a_process_the_file_is_enough_and_without_a_gateway_nothing_is_made(tmp_path: Path) -> None:
    assert tell(tmp_path, ALICE) == {
        "changed": False,
        "installed": False,
        "running": False,
        "newer": 0,
        "added": [],
        "removed": [],
    }
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "gateway").mkdir()
    assert tell(tmp_path, ALICE) == {
        "changed": True,
        "installed": True,
        "running": False,
        "newer": 0,
        "added": ["alice"],
        "removed": [],
    }
    assert not tell(tmp_path, ALICE)["changed"]


@pytest.mark.parametrize("command", ["show", "prepare", "add", "commit"])
def test_a_refusal_is_an_error(tmp_path: Path, haproxy: FakeHaproxy, command: str) -> None:
    haproxy.refuses = command
    with pytest.raises(keys.RefusedError, match="Unknown map identifier"):
        tell(tmp_path, ALICE)


@pytest.mark.parametrize(
    "entry",
    [
        {**ALICE, "sha256": "a" * 63},
        {**ALICE, "sha256": "x" * 64},
        {**ALICE, "name": "two words"},
        {**ALICE, "name": "a\nb"},
        {**ALICE, "expires": "never"},
        {},
    ],
)
def test_what_a_map_cannot_hold_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"SHA-256|a map cannot hold"):
        keys.wanted_map([entry])


def test_a_smoke_test_under_way_keeps_its_key_and_is_no_change(tmp_path: Path, haproxy: FakeHaproxy) -> None:
    tell(tmp_path, ALICE)
    under_way = {"C" * 64: f"{int(time.time()) + 600} {smoke.KEY_NAME}"}
    killed = {"D" * 64: f"{int(time.time()) - 600} {smoke.KEY_NAME}"}
    haproxy.now |= {**under_way, **killed}
    assert not tell(tmp_path, ALICE)["changed"]
    told = tell(tmp_path, BOB)
    assert (told["added"], told["removed"]) == (["bob"], ["alice"])
    assert haproxy.now == {"0B" * 32: "1800000000 bob", **under_way}
    assert list(keys.parse((tmp_path / "gateway/keys.map").read_text())) == ["0B" * 32]


def test_two_that_tell_keys_wait_for_each_other(tmp_path: Path, haproxy: FakeHaproxy) -> None:
    with keys.alone(tmp_path / "gateway"):
        other = threading.Thread(target=tell, args=(tmp_path, ALICE))
        other.start()
        other.join(0.5)
        assert other.is_alive()
        assert haproxy.commands == []
    other.join(10)
    assert list(haproxy.now) == ["A" * 64]


def test_who_was_told_later_keys_takes_no_earlier_ones(tmp_path: Path, haproxy: FakeHaproxy) -> None:
    """An apply reads the keys, a key is revoked everywhere, and then the apply comes to tell what it read."""
    tell(tmp_path, ALICE, BOB, of=("ab12", 2))
    tell(tmp_path, BOB, of=("ab12", 3))
    before = (tmp_path / "gateway/keys.map").read_text()
    told = tell(tmp_path, ALICE, BOB, of=("ab12", 2))
    assert (told["changed"], told["newer"], told["added"], told["removed"]) == (False, 3, [], [])
    assert list(haproxy.now) == ["0B" * 32]
    assert (tmp_path / "gateway/keys.map").read_text() == before
    assert not tell(tmp_path, BOB, of=("ab12", 3))["changed"]
    # Keys that were given out anew, after the file was lost, count from one.
    assert tell(tmp_path, ALICE, of=("cd34", 1))["newer"] == 0
    assert list(haproxy.now) == ["A" * 64]
