"""What outlives an agent: the two slots, tickets, memory and commands."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ppdeploy.agent import command, main, store, ticket
from ppdeploy.agent.messages import NONE, GenerationId
from ppdeploy.agent.records import Failure, Memory, Record
from ppdeploy.agent.store import SLOT, SlotFile, record_from_bytes, record_to_bytes
from tests.unit.gang_factories import G1, G2, A, B

RECORD = Record(
    generation=G2,
    launched=True,
    release="d" * 64,
    members=(A, B),
    wanted="stop",
    serial=7,
    failed="too often",
    failures=(Failure(G1, 900.0, "exit", (("machine-a", "boot-1"),)),),
    streak=3,
    series=G1,
    forgotten=("machine-z",),
    last_reason="exit",
    stall_limit=40.0,
)


def test_the_newest_whole_slot_counts(tmp_path: Path) -> None:
    slots = SlotFile(tmp_path / "generation")
    assert slots.read() is None
    for payload in (b"one", b"two", b"three"):
        slots.write(payload)
        assert slots.read() == payload
    assert (tmp_path / "generation").stat().st_size == 2 * SLOT


def test_a_torn_write_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "generation"
    slots = SlotFile(path)
    slots.write(b"one")
    slots.write(b"two")
    data = bytearray(path.read_bytes())
    at = data.index(b"two")
    data[at : at + 3] = b"tXo"
    path.write_bytes(data)
    assert slots.read() == b"one"
    slots.write(b"three")
    assert slots.read() == b"three"


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 2 * SLOT, b"\xff" * 2 * SLOT])
def test_a_corrupt_file_is_as_good_as_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "generation"
    path.write_bytes(data)
    assert SlotFile(path).read() is None
    assert record_from_bytes(SlotFile(path).read(), 0.0, "boot") == Record()
    SlotFile(path).write(b"new")
    assert SlotFile(path).read() == b"new"


def test_a_payload_that_does_not_fit_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    slots = SlotFile(tmp_path / "generation")
    slots.write(b"one")
    with pytest.raises(OSError, match="does not fit"):
        slots.write(bytes(SLOT))
    assert slots.read() == b"one"


def test_overwriting_needs_no_new_space(tmp_path: Path) -> None:
    path = tmp_path / "generation"
    slots = SlotFile(path)
    slots.write(b"one")
    before = path.stat()
    slots.write(b"two")
    assert (path.stat().st_ino, path.stat().st_blocks) == (before.st_ino, before.st_blocks)
    assert before.st_blocks * 512 >= 2 * SLOT, "the file has no holes"


def test_in_the_same_boot_the_clock_goes_on() -> None:
    assert record_from_bytes(record_to_bytes(RECORD, 1000.0, "boot"), 1500.0, "boot") == RECORD


def test_a_record_of_an_agent_before_the_stall_limit_is_read() -> None:
    """Else an upgrade would forget the generation that runs."""
    stored = record_to_bytes(RECORD, 1000.0, "boot").replace(b',"stall_limit":40.0', b"")
    assert b"stall_limit" not in stored
    assert record_from_bytes(stored, 1500.0, "boot") == replace(RECORD, stall_limit=0.0)


def test_powered_off_time_counts_as_nothing() -> None:
    stored = record_to_bytes(RECORD, 1000.0, "boot")
    found = record_from_bytes(stored, 5.0, "another boot")
    assert found.failures == (Failure(G1, 5.0 - 100.0, "exit", (("machine-a", "boot-1"),)),)
    assert found.failed == "too often"


@pytest.mark.parametrize("payload", [b"", b"{}", b"[]", b"null", b'{"boot_id": "b", "record": {}}', b"\xff"])
def test_an_unreadable_record_counts_as_none(payload: bytes) -> None:
    assert record_from_bytes(payload, 0.0, "boot") == Record()


def test_memory_belongs_to_its_boot() -> None:
    memory = Memory("boot", G2, G1, "d" * 64, A, (A, B))
    data = store.memory_to_json(memory)
    assert store.memory_from_json(data, "boot") == memory
    assert store.memory_from_json(data, "another") == Memory("another")
    assert store.memory_from_json(None, "boot") == Memory("boot")
    assert store.memory_from_json({"boot_id": "boot"}, "boot") == Memory("boot")


def test_a_boot_has_one_id_as_long_as_run_lives(tmp_path: Path) -> None:
    path = tmp_path / "boot.json"
    first = store.begin_boot(path)
    assert store.begin_boot(path) == store.boot_id(path) == first != ""
    path.unlink()
    assert store.boot_id(path) == ""
    assert store.begin_boot(path) != first


def test_a_ticket_is_good_for_one_start(tmp_path: Path) -> None:
    path, consumed = tmp_path / "ticket", tmp_path / "consumed"
    ticket.issue(path, ticket.Ticket(G1, "d" * 64, "boot"))
    won: list[GenerationId] = []

    def take() -> None:
        try:
            won.append(ticket.consume(path, consumed, "boot").generation)
        except ticket.NoTicketError:
            return

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [G1]
    assert ticket.read(path) == ticket.BLANK
    assert ticket.read(consumed).generation == G1


def test_no_ticket_a_revoked_one_and_one_of_another_boot_start_nothing(tmp_path: Path) -> None:
    path, consumed = tmp_path / "ticket", tmp_path / "consumed"
    with pytest.raises(ticket.NoTicketError, match="only the agent starts it"):
        ticket.consume(path, consumed, "boot")
    ticket.issue(path, ticket.Ticket(G1, "d" * 64, "boot"))
    ticket.revoke(path)
    ticket.revoke(path)
    with pytest.raises(ticket.NoTicketError):
        ticket.consume(path, consumed, "boot")
    ticket.issue(path, ticket.Ticket(G1, "d" * 64, "an older boot"))
    with pytest.raises(ticket.NoTicketError, match="not of this boot"):
        ticket.consume(path, consumed, "boot")


def test_a_garbled_ticket_is_none(tmp_path: Path) -> None:
    path = tmp_path / "ticket"
    for text in ("", "{}", "[]", '{"generation": 1}'):
        path.write_text(text)
        assert ticket.read(path).generation == NONE


def test_a_word_is_above_what_the_head_has_handled_even_when_the_last_word_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it would never be read: the head handles only higher serials."""
    config = tmp_path / "agent.json"
    values = {"cluster": "c", "pipeline": "p", "node": "a", "listen": [], "port": 1, "state": str(tmp_path)}
    config.write_text(json.dumps(values))
    SlotFile(tmp_path / "p-generation").write(record_to_bytes(RECORD, 1000.0, "boot"))
    (tmp_path / "command.json").write_text("lost")
    assert main.main(["--config", str(config), "order", "start"]) == 0
    assert json.loads(capsys.readouterr().out)["serial"] == RECORD.serial + 1
    assert command.read(tmp_path / "command.json").serial == RECORD.serial + 1


def test_commands_have_a_rising_serial(tmp_path: Path) -> None:
    path = tmp_path / "command.json"
    assert command.read(path).serial == 0
    assert command.give(path, "stop").serial == 1
    given = command.give(path, "start", "d" * 64, ("b",))
    assert command.read(path) == given
    assert (given.serial, given.verb, given.forget) == (2, "start", ("b",))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"verb": "explode", "serial": 3}', '{"verb": "stop"}', '{"verb":"stop","serial":"1"}']
)
def test_a_garbled_command_says_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "command.json"
    path.write_text(text)
    assert command.read(path).serial == 0


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_record_is_stored_beside_the_control_loop_and_a_full_disk_is_told_and_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    storer = store.Storer(SlotFile(folder / "generation"), "boot", lambda: None)
    assert storer.stored == Record()
    storer.want(RECORD)
    _until(lambda: "cannot be stored" in storer.problem)
    assert storer.stored == Record()
    folder.mkdir()
    _until(lambda: storer.stored == RECORD)
    assert storer.problem == ""
    again = store.Storer(SlotFile(folder / "generation"), "boot", lambda: None)
    assert again.stored.generation == RECORD.generation
