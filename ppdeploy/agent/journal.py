"""The rank's own log: watched for the death of its engine, and kept for the generation that failed first.

Both run `journalctl`, in threads: one follower for each life of a rank, one reader for each end of one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ppdeploy.agent.messages import NONE, GenerationId

# Only what the engine's own files log, and only where the message begins: the API's files log words of requests as
# errors too ("Error with model ... `NAME` does not exist"), and no client may end a gang by what it writes.
_DEATH = re.compile(
    r"^(?:\([^)]{1,60}\) )?ERROR \d\d-\d\d [\d:]{8} "
    r"\[(?:[\w./]{1,80}/)?(?:async_llm|core|core_client|multiproc_executor)\.py:\d{1,6}\] "
    # A traceback's last line names the exception first, and gloo its own source.
    r"(?:\w{1,60}: )?(?:\[[^\]]{1,200}\] )?(?:[\w.]{1,80}\.)?"
    r"(EngineDeadError|EngineCore encountered a fatal error|[Ee]ngine core .{0,60}died|"
    r"WorkerProc initialization failed|Worker proc .{0,60}died|Connection closed by peer \[)"
)
KEPT_NEWEST = 4
"""Kept failures beside the first one of a series."""
KEPT_BYTES = 2 << 20
"""The end of a rank's journal that is kept, in bytes; the start-up of a rank is far shorter."""
_KEPT_LINES = 20_000
_KEPT_SECONDS = 60.0


def death(line: str) -> str:
    """Return how a line of a rank's log tells that its engine is dead, empty for any other line."""
    found = _DEATH.search(line)
    return f"its log says: {found.group(1)}" if found else ""


class Follower:
    """Follows the rank's journal from now on, until it is closed."""

    def __init__(self, unit: str) -> None:
        self.said = ""
        self._process = subprocess.Popen(
            ["journalctl", "--follow", "--lines=0", "--output=cat", f"--unit={unit}"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        threading.Thread(target=self._read, name="journal", daemon=True).start()

    def close(self) -> None:
        """End the following."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            while True:
                # A line without an end must not fill the memory.
                line = stream.readline(8192)
                if not line:
                    break
                self.said = self.said or death(line.decode("utf-8", "replace"))
        self._process.wait()


class Kept(NamedTuple):
    """A failure whose journal is to be kept."""

    generation: GenerationId
    series: GenerationId
    reason: str


class Keeper:
    """Keeps the ends of ranks' journals below `folder`/failures, the first failure of a series and the newest ones.

    Every step is taken from an open directory that must be the agent's own, and no link is followed.
    """

    def __init__(self, folder: Path, unit: str) -> None:
        self._folder = folder
        self._unit = unit
        self._wanted: queue.SimpleQueue[Kept] = queue.SimpleQueue()
        self.problem = ""
        threading.Thread(target=self._work, name="keeper", daemon=True).start()

    def keep(self, failure: Kept) -> None:
        """Keep the journal of a rank that ended; returns at once."""
        self._wanted.put(failure)

    def _work(self) -> None:
        while True:
            failure = self._wanted.get()
            try:
                self._write(failure)
                self.problem = ""
            except (OSError, subprocess.SubprocessError) as error:
                self.problem = f"the journal of generation {failure.generation} could not be kept: {error}"

    def _write(self, failure: Kept) -> None:
        text = self._last_life()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with _own_folder(self._folder, "failures") as folder:
            name = folder_name(failure.generation)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=folder)
            place = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                _write_file(place, "reason", failure.reason.encode() + b"\n")
                _write_file(place, "journal", text)
            finally:
                os.close(place)
            for old in to_remove(os.listdir(folder), failure.series):  # noqa: PTH208  (an open directory)
                _remove(folder, old)

    def _last_life(self) -> bytes:
        """Return the journal of the unit's last run, by its invocation id, at most `KEPT_BYTES` of its end."""
        shown = subprocess.run(
            ["systemctl", "show", "--property=InvocationID", "--value", self._unit],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
        invocation = shown.stdout.strip()
        if not invocation:
            return b"(systemd names no run of the unit)\n"
        return last_bytes(
            [
                "journalctl", "--output=short-iso-precise", "--no-pager", f"--lines={_KEPT_LINES}",
                f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}",
            ],
            KEPT_BYTES,
        )  # fmt: skip


def last_bytes(command: list[str], limit: int) -> bytes:
    """Return the last `limit` bytes that a command prints, never holding more than about twice as many.

    A rank may log whole prompts, so that its last lines are far larger than what is kept. Raises `OSError` and
    `CalledProcessError`, also when the command takes longer than a minute.
    """
    end = bytearray()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as tool:
        assert tool.stdout is not None
        late = threading.Timer(_KEPT_SECONDS, tool.kill)
        late.daemon = True
        late.start()
        try:
            while True:
                piece = tool.stdout.read(1 << 16)
                if not piece:
                    break
                end += piece
                if len(end) > 2 * limit:
                    del end[:-limit]
        finally:
            late.cancel()
    if tool.returncode:
        raise subprocess.CalledProcessError(tool.returncode, command[0])
    return bytes(end[-limit:])


def folder_name(generation: GenerationId) -> str:
    """Return the folder of a generation's kept journal; names sort by generation."""
    return f"{generation.number:09d}-{generation.salt:016x}"


def to_remove(names: list[str], series: GenerationId) -> list[str]:
    """Return the kept failures that have had their time: all but the series' first and the newest ones."""
    first = folder_name(series) if series != NONE else ""
    others = sorted(name for name in names if name != first and re.fullmatch(r"\d{9}-[0-9a-f]{16}", name))
    return others[:-KEPT_NEWEST]


@contextlib.contextmanager
def _own_folder(parent: Path, name: str) -> Iterator[int]:
    """Open a folder of root's own below `parent`, making it if need be; raise `OSError`."""
    above = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    finally:
        os.close(above)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise PermissionError(f"{parent / name} is not the agent's own: remove it")
        yield folder
    finally:
        os.close(folder)


def _write_file(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)


def _remove(folder: int, name: str) -> None:
    place = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        for entry in os.listdir(place):  # noqa: PTH208  (an open directory)
            os.unlink(entry, dir_fd=place)
    finally:
        os.close(place)
    os.rmdir(name, dir_fd=folder)
