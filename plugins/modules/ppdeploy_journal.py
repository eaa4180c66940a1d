#!/usr/bin/python
"""Read what a node's rank and agent logged, and the journals that the agent kept of failures."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_journal
short_description: Read the journal of a node's rank and agent
description:
  - C(read) returns the newest lines of the journal of the rank's unit and, if asked, of the agent's.
  - C(failures) lists the failures whose journals the agent kept, C(failure) returns one of them.
  - What is left out, since a limit was reached, is counted. It changes nothing.
options:
  action:
    description: What to do.
    type: str
    choices: [read, failures, failure]
    default: read
  pipeline:
    description: Name of the pipeline.
    type: str
    required: true
  agent:
    description: Whether the agent's lines are wanted too.
    type: bool
    default: false
  lines:
    description: How many lines are returned at most, the newest; 0 for none, which gives a cursor to go on from.
    type: int
    default: 200
  since:
    description: Only lines of the last so many seconds. Then the lines left out are counted exactly.
    type: float
  cursor:
    description: Only lines after this place, which an earlier call returned.
    type: str
  generation:
    description: The folder of the failure that C(failure) returns, as C(failures) named it.
    type: str
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Read the rank's last 50 lines
  ppdeploy_journal:
    pipeline: qwen
    lines: 50
"""

RETURN = r"""
lines:
  description: The lines, the oldest first, each with C(time), C(unit), C(priority), C(pid) and C(message).
  returned: with actions C(read) and C(failure)
  type: list
left_out:
  description: How many earlier lines were left out.
  returned: with actions C(read) and C(failure)
  type: int
more:
  description: Whether there are earlier lines that nobody counted.
  returned: with action C(read)
  type: bool
cursor:
  description: The place of the last line.
  returned: with action C(read)
  type: str
time:
  description: The node's clock in seconds since 1970, at the start and at the end.
  returned: always
  type: list
failures:
  description: The kept failures, the oldest first.
  returned: with action C(failures)
  type: list
"""

import collections
import contextlib
import json
import os
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

#: Bytes of messages that one call returns at most, and characters of one message: Ansible holds all of it in memory.
MOST_BYTES = 2 << 20
LONGEST_MESSAGE = 8000
#: Seconds that reading a journal may take.
PATIENCE = 60.0
FAILURES = "/var/lib/ppdeploy/agent/{}/failures"
FAILURE_NAME = re.compile(r"(\d{9})-[0-9a-f]{16}")
FIELDS = "MESSAGE,PRIORITY,_PID,_SYSTEMD_UNIT,UNIT,SYSLOG_IDENTIFIER"
# As `journalctl --output=short-iso-precise` writes it; its time zone has no colon before systemd 254.
ISO_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})([+-]\d\d):?(\d\d) \S+ ([^\s\[:]+)(?:\[(\d+)\])?: (.*)")

Facts = dict[str, Any]


class UnreadableError(Exception):
    """The journal or a kept failure cannot be read; `str()` is the reason."""


# ---- lines -------------------------------------------------------------------------------------------------


class Newest:
    """Keeps the newest lines within a number and a size, and counts the others."""

    def __init__(self, lines: int, size: int = MOST_BYTES) -> None:
        self._lines = lines
        self._size = size
        self._held = 0
        self._kept: collections.deque[Facts] = collections.deque()
        self.left_out = 0

    def add(self, line: Facts) -> None:
        """Take the next line."""
        self._kept.append(line)
        self._held += len(line["message"])
        while self._kept and (len(self._kept) > self._lines or self._held > self._size):
            self._held -= len(self._kept.popleft()["message"])
            self.left_out += 1

    @property
    def lines(self) -> list[Facts]:
        """The lines kept, the oldest first."""
        return list(self._kept)


def shortened(text: str) -> str:
    """Return a message no longer than the limit, with how much was cut off."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[:LONGEST_MESSAGE]} ... ({len(text) - LONGEST_MESSAGE} more characters)"


def text_of(value: Any) -> str:
    """Return a journal field as text: bytes that are no UTF-8 come as a list of numbers, too long ones as null."""
    if isinstance(value, list):
        with contextlib.suppress(TypeError, ValueError):
            return bytes(value).decode("utf-8", "replace")
        return " ".join(map(str, value))
    return "(a message that journalctl does not show)" if value is None else str(value)


def entry(raw: Facts, rank_unit: str) -> Facts:
    """Return a line of the journal, as `journalctl -o json` prints it, in our own words."""
    unit = raw.get("_SYSTEMD_UNIT") or ""
    about = raw.get("UNIT") or ""
    # What systemd says about a unit comes from systemd itself.
    kind = "systemd" if about and unit not in (rank_unit, "ppdeploy-agent.service") else "rank"
    return {
        "time": int(raw["__REALTIME_TIMESTAMP"]) / 1e6,
        "unit": "agent" if kind == "rank" and unit == "ppdeploy-agent.service" else kind,
        "priority": int(raw.get("PRIORITY") or 6),
        "pid": int(raw.get("_PID") or 0),
        "message": shortened(text_of(raw.get("MESSAGE"))),
    }


# ---- the journal -------------------------------------------------------------------------------------------


def journal_command(params: Facts) -> list[str]:
    """Return the command that prints the wanted lines as JSON, one line more than wanted where none is counted."""
    command = ["journalctl", "--no-pager", "--quiet", "--output=json", f"--output-fields={FIELDS}"]
    command.append(f"--unit=ppdeploy-rank@{params['pipeline']}.service")
    if params["agent"]:
        command.append("--unit=ppdeploy-agent.service")
    if params["cursor"]:
        return [*command, f"--after-cursor={params['cursor']}"]
    if params["since"] is not None:
        return [*command, f"--since=@{time.time() - params['since']:.6f}"]
    return [*command, f"--lines={params['lines'] + 1}"]


def printed(command: list[str]) -> Iterator[bytes]:
    """Yield the lines that a command prints; UnreadableError when it fails or takes too long."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        end = time.monotonic() + PATIENCE
        for line in process.stdout:
            if time.monotonic() > end:
                process.kill()
                raise UnreadableError(f"the journal could not be read within {PATIENCE:.0f} s: ask for less of it")
            yield line
        said = process.stderr.read().decode("utf-8", "replace").strip()
    if process.returncode:
        raise UnreadableError(f"journalctl: {said or f'it ended with {process.returncode}'}")


def read(params: Facts) -> Facts:
    """Return the newest lines."""
    rank_unit = f"ppdeploy-rank@{params['pipeline']}.service"
    newest = Newest(params["lines"])
    cursor = params["cursor"]
    for line in printed(journal_command(params)):
        raw = json.loads(line)
        cursor = raw["__CURSOR"]
        newest.add(entry(raw, rank_unit))
    counted = bool(params["cursor"]) or params["since"] is not None
    return {
        "lines": newest.lines,
        # Without a beginning only the last lines were asked for, and one more, to see whether there are any.
        "left_out": newest.left_out if counted else 0,
        "more": not counted and newest.left_out > 0,
        "cursor": cursor,
    }


# ---- kept failures -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def failures_folder(pipeline: str) -> Iterator[int | None]:
    """Open the agent's folder of failures; None when there is none.

    It lies in a folder of the rank's user, who must not make us read something else: it has to be root's, and no link
    is followed.
    """
    try:
        folder = os.open(FAILURES.format(pipeline), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise UnreadableError(f"{FAILURES.format(pipeline)}: {error.strerror}") from None
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            raise UnreadableError(f"{FAILURES.format(pipeline)} is not the agent's own: remove it")
        yield folder
    finally:
        os.close(folder)


def file_text(folder: int, name: str, most: int = MOST_BYTES) -> str:
    """Return the end of a file in an open folder, empty when there is none."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as stream:
        size = os.fstat(descriptor).st_size
        stream.seek(max(0, size - most))
        return stream.read(most).decode("utf-8", "replace")


def failures(params: Facts) -> Facts:
    """Return the kept failures of this node."""
    found = []
    with failures_folder(params["pipeline"]) as folder:
        for name in sorted(os.listdir(folder)) if folder is not None else ():  # noqa: PTH208  (an open directory)
            match = FAILURE_NAME.fullmatch(name)
            if not match:
                continue
            place = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                found.append(
                    {
                        "name": name,
                        "generation": int(match[1]),
                        "time": os.fstat(place).st_mtime,
                        "reason": file_text(place, "reason", 4096).strip(),
                    }
                )
            finally:
                os.close(place)
    return {"failures": found, "first": first_failure()}


def first_failure() -> str:
    """Return the folder's name of the failure with which the present series began, empty when nobody tells."""
    # Only the head's agent knows; every other one says none.
    try:
        config = json.loads(Path("/etc/ppdeploy/agent.json").read_text(encoding="utf-8"))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{int(config['port'])}/v1/status", timeout=5) as answer:
            number, salt = json.loads(answer.read(MOST_BYTES))["series"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"{number:09d}-{salt:016x}" if number else ""


def failure(params: Facts) -> Facts:
    """Return the journal that was kept of one failure."""
    name = params["generation"]
    if not FAILURE_NAME.fullmatch(name):
        raise UnreadableError(f"{name!r} is not a failure's name")
    newest = Newest(params["lines"])
    reason = ""
    with failures_folder(params["pipeline"]) as folder:
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            place = os.open(name, flags, dir_fd=folder) if folder is not None else -1
        except OSError:
            place = -1
        if place >= 0:
            try:
                reason = file_text(place, "reason", 4096).strip()
                for line in parsed(file_text(place, "journal").splitlines()):
                    newest.add(line)
            finally:
                os.close(place)
    return {"lines": newest.lines, "left_out": newest.left_out, "more": False, "kept": place >= 0, "reason": reason}


def parsed(lines: Iterable[str]) -> Iterator[Facts]:
    """Yield the lines of a kept journal; what follows a line of its own is a part of that line's message."""
    last: Facts | None = None
    for line in lines:
        match = ISO_LINE.fullmatch(line)
        if match:
            if last:
                yield last
            moment = datetime.strptime(f"{match[1]}{match[2]}{match[3]}", "%Y-%m-%dT%H:%M:%S.%f%z")
            last = {
                "time": moment.timestamp(),
                "unit": "systemd" if match[4] == "systemd" else "rank",
                "priority": 6,
                "pid": int(match[5] or 0),
                "message": shortened(match[6]),
            }
        elif last:
            last["message"] = shortened(f"{last['message']}\n{line.strip()}")
    if last:
        yield last


def main() -> None:
    """Run one action."""
    began = time.time()
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["read", "failures", "failure"], "default": "read"},
            "pipeline": {"type": "str", "required": True},
            "agent": {"type": "bool", "default": False},
            "lines": {"type": "int", "default": 200},
            "since": {"type": "float"},
            "cursor": {"type": "str"},
            "generation": {"type": "str"},
        },
        required_if=[("action", "failure", ["generation"])],
        mutually_exclusive=[("since", "cursor")],
        supports_check_mode=True,
    )
    action = {"read": read, "failures": failures, "failure": failure}[module.params["action"]]
    try:
        found = action(module.params)
    except (UnreadableError, OSError) as error:
        module.fail_json(msg=f"the journal of this node cannot be read: {error}")
    module.exit_json(changed=False, time=[began, time.time()], **found)


if __name__ == "__main__":
    main()
