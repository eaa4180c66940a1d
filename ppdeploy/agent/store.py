"""What outlives the agent: the head's record in two slots on disk, the node's memory in /run (rules 4, 17, 18)."""

from __future__ import annotations

import errno
import json
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ppdeploy.agent import disk
from ppdeploy.agent.clock import later, now
from ppdeploy.agent.messages import MalformedError, generation_from_json, member_from_json
from ppdeploy.agent.records import Failure, Memory, Record

SLOT = 64 * 1024
_RETRY = 1.0
_DISK_LOOKS = 5.0
_HEADER = struct.Struct("<8sQII")
_MAGIC = b"ppgang1\0"


class SlotFile:
    """A file of two slots of fixed size, overwritten in turn in place: a full disk does not matter, nor does a crash.

    The slot with the highest sequence number and a right checksum counts; a file without one is as good
    as none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def folder(self) -> Path:
        """The folder that the file lies in."""
        return self._path.parent

    def read(self) -> bytes | None:
        """Return the newest whole payload, None when there is none."""
        newest = self._newest()
        return newest[1] if newest else None

    def write(self, payload: bytes) -> None:
        """Store a payload; raise `OSError`. On an error the last one still stands."""
        if len(payload) > SLOT - _HEADER.size:
            raise OSError(f"the record of {len(payload)} bytes does not fit into its slot")
        newest = self._newest()
        sequence = newest[0] + 1 if newest else 1
        header = _HEADER.pack(_MAGIC, sequence, len(payload), zlib.crc32(struct.pack("<Q", sequence) + payload))
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(descriptor).st_size < 2 * SLOT:
                # Real blocks, not a hole: a hole would need space at the worst moment.
                _whole(os.pwrite(descriptor, bytes(2 * SLOT), 0), 2 * SLOT)
            data = header + payload
            _whole(os.pwrite(descriptor, data, (sequence % 2) * SLOT), len(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _newest(self) -> tuple[int, bytes] | None:
        try:
            data = self._path.read_bytes()
        except OSError:
            return None
        slots = [_slot(data[at : at + SLOT]) for at in (0, SLOT)]
        return max((slot for slot in slots if slot is not None), default=None)


def _whole(written: int, wanted: int) -> None:
    """Refuse a write that a full file system cut short: it is no error to the kernel, and half a promise is none."""
    if written != wanted:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _slot(data: bytes) -> tuple[int, bytes] | None:
    if len(data) < _HEADER.size:
        return None
    magic, sequence, length, checksum = _HEADER.unpack_from(data)
    payload = data[_HEADER.size : _HEADER.size + length]
    if magic != _MAGIC or len(payload) != length or zlib.crc32(struct.pack("<Q", sequence) + payload) != checksum:
        return None
    return sequence, payload


class Storer:
    """Writes the head's record in a thread of its own: a disk that hangs must not hold the control loop.

    `stored` is what lies on disk for certain, `problem` why the last write failed; a failed one is tried
    again each second. `disk` is why the next one may fail, looked up every few seconds.
    """

    def __init__(self, slots: SlotFile, boot: str, wake: Callable[[], None]) -> None:
        self._slots = slots
        self._folder = slots.folder
        self._boot = boot
        self._wake = wake
        self._wanted: Record | None = None
        self._news = threading.Event()
        self.stored = record_from_bytes(slots.read(), now(), boot)
        self.problem = ""
        self.disk = disk.trouble(self._folder)
        threading.Thread(target=self._work, name="storer", daemon=True).start()

    def want(self, record: Record) -> None:
        """Have this record stored, instead of an older one that still waits."""
        if record is not self._wanted:
            self._wanted = record
            self._news.set()

    def _work(self) -> None:
        while True:
            if not self._news.wait(_DISK_LOOKS):
                self.disk = disk.trouble(self._folder)
                continue
            self._news.clear()
            record = self._wanted
            if record is None or record == self.stored:
                continue
            try:
                self._slots.write(record_to_bytes(record, now(), self._boot))
            except OSError as error:
                self.problem = f"the gang's record cannot be stored: {error}"
                later(_RETRY, self._news.set)
            else:
                self.stored = record
                self.problem = ""
            self._wake()


def record_to_bytes(record: Record, moment: float, boot_id: str) -> bytes:
    """Return the record for the disk. Failures are stored with their ages, since a clock starts anew with each boot."""
    data = asdict(record)
    data["failures"] = [{**asdict(failure), "age": moment - failure.at} for failure in record.failures]
    return json.dumps({"boot_id": boot_id, "record": data}, separators=(",", ":")).encode()


def record_from_bytes(payload: bytes | None, moment: float, boot_id: str) -> Record:
    """Return the stored record, an empty one for none or an unreadable one (rule 6).

    In the same boot the clock has gone on; after another one powered-off time counts as nothing.
    """
    if payload is None:
        return Record()
    try:
        stored = json.loads(payload)
        data = stored["record"]
        same = stored["boot_id"] == boot_id
        failures = tuple(
            Failure(
                generation_from_json(item["generation"]),
                float(item["at"]) if same else moment - float(item["age"]),
                str(item["reason"]),
                # As `stall_limit` below.
                tuple((str(machine), str(boot)) for machine, boot in item.get("boots", ())),
            )
            for item in data["failures"]
        )
        return Record(
            generation=generation_from_json(data["generation"]),
            launched=bool(data["launched"]),
            release=str(data["release"]),
            members=tuple(member_from_json(item) for item in data["members"]),
            draining=str(data["draining"]),
            wanted=str(data["wanted"]),
            serial=int(data["serial"]),
            failed=str(data["failed"]),
            failures=failures,
            streak=int(data["streak"]),
            series=generation_from_json(data["series"]),
            forgotten=tuple(str(item) for item in data["forgotten"]),
            last_reason=str(data["last_reason"]),
            # Agents before it stored none; their record must still be read by the one that follows.
            stall_limit=float(data.get("stall_limit", 0.0)),
        )
    except (ValueError, KeyError, TypeError, MalformedError):
        return Record()


def memory_to_json(memory: Memory) -> dict[str, Any]:
    """Return the node's memory as plain JSON data."""
    return asdict(memory)


def memory_from_json(data: Any, boot_id: str) -> Memory:
    """Return the node's memory of this boot, an empty one for none, an unreadable one or one of another boot."""
    empty = Memory(boot_id=boot_id)
    try:
        if data["boot_id"] != boot_id:
            return empty
        return Memory(
            boot_id=boot_id,
            promised=generation_from_json(data["promised"]),
            started=generation_from_json(data["started"]),
            release=str(data["release"]),
            head=None if data["head"] is None else member_from_json(data["head"]),
            known=tuple(member_from_json(item) for item in data["known"]),
        )
    except (KeyError, TypeError, MalformedError):
        return empty


def boot_id(path: Path) -> str:
    """Return the id of this boot as the rest of the node's memory knows it, empty before the agent made it.

    The kernel's own id will not do: in a container, units with another view of /proc read another one there.
    """
    return str(read_json(path) or "")


def begin_boot(path: Path) -> str:
    """Return the id of this boot, made anew when /run has none: then nothing else of this node's memory is left either.

    Raises `OSError` when it cannot be written.
    """
    if not boot_id(path):
        write_json(path, secrets.token_hex(16), mode=0o644)
    return boot_id(path)


def read_json(path: Path) -> Any:
    """Return a file's JSON, None when it is not there or is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, data: Any, mode: int = 0o600) -> None:
    """Replace a file by JSON in one step; raise `OSError`."""
    fresh = path.with_name(f".{path.name}.new")
    text = json.dumps(data, separators=(",", ":")).encode()
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(descriptor, mode)
        _whole(os.write(descriptor, text), len(text))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.replace(path)
