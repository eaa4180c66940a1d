#!/usr/bin/python
"""Tell a gateway which API keys there are: in its file, and in the process that runs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_gateway_keys
short_description: Tell a gateway which API keys there are
description:
  - Writes HAProxy's map of the keys' SHA-256, and puts it into the running process over its admin socket, as a whole at
    one moment. No connection is touched, and nothing is reloaded.
  - Knows no key, only what it hashes to.
  - A key that M(ppdeploy_smoke) has told the process for the time of its requests stays, and is no change.
options:
  path:
    description: The map's file. Its folder is made by the role; without the folder there is no gateway here.
    type: path
    required: true
  socket:
    description: The admin socket of the running HAProxy; none is there while it does not run.
    type: path
    required: true
  keys:
    description:
      - C(entries) are the keys, each with C(sha256), C(name) and C(expires), in seconds since 1970.
      - C(lineage) names the file of keys on the controller, and C(changes) is how many it saw. Where the gateway knows
        a later state of the same file already, nothing is done, so that no key that was revoked meanwhile comes back.
    type: dict
    required: true
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Tell the gateway which keys there are
  ppdeploy_gateway_keys:
    path: /etc/ppdeploy/gateway/keys.map
    socket: /run/ppdeploy-gateway/admin.sock
    keys:
      entries:
        - {sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08, name: alice, expires: 4102444800}
"""

RETURN = r"""
installed:
  description: Whether there is a gateway here.
  returned: always
  type: bool
running:
  description: Whether a HAProxy runs, which then knows the keys.
  returned: always
  type: bool
newer:
  description: How many changes the gateway knows, where that is a later state than the one it was told; else 0.
  returned: always
  type: int
added:
  description: Names of the keys that are let in from now on.
  returned: always
  type: list
removed:
  description: Names of the keys that are not let in any more.
  returned: always
  type: list
"""

import contextlib
import fcntl
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

HEAD = "# Written by ppdeploy: SHA-256 of an API key, when it expires, its name. No key is here.\n"
AT_ONCE = 50
"""Entries in a command: one of HAProxy's has 16 kB."""


SMOKE = "+ppdeploy-smoke"
"""Name of the keys of smoke tests; no key that is given out can have it, and ppdeploy_smoke has it too."""


class RefusedError(Exception):
    """HAProxy did not do what it was told."""


def wanted_map(entries: list[dict[str, Any]]) -> dict[str, str]:
    """Return the map, key to value, or raise ValueError for what is no entry."""
    found = {}
    for entry in entries:
        sha256, name, expires = str(entry.get("sha256")), str(entry.get("name")), str(entry.get("expires"))
        if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
            raise ValueError("an entry has no SHA-256 of 64 hexadecimal digits")
        if not re.fullmatch(r"[A-Za-z0-9._@-]{1,63}", name) or not re.fullmatch(r"[0-9]{1,12}", expires):
            raise ValueError("an entry has a name or an expiry that a map cannot hold")
        # HAProxy's converter `hex` writes capital letters.
        found[sha256.upper()] = f"{expires} {name}"
    return found


def map_text(entries: dict[str, str], lineage: str = "", changes: int = 0) -> str:
    """Return the file that holds a map."""
    of = f"# of {lineage} after {changes} changes\n" if lineage else ""
    return HEAD + of + "".join(f"{key} {value}\n" for key, value in sorted(entries.items()))


def newer(text: str, lineage: str, changes: int) -> int:
    """Return how many changes a file's keys have seen, where they are a later state of the same ones; else 0."""
    found = re.search(r"^# of ([0-9a-f]+) after ([0-9]+) changes$", text, re.MULTILINE)
    known = int(found[2]) if found and found[1] == lineage else 0
    return known if known > changes else 0


def parse(text: str) -> dict[str, str]:
    """Return the map that a file holds."""
    lines = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {words[0]: words[1] for words in lines if len(words) == 2}


class Haproxy:
    """The running process, asked over its admin socket; one command for each connection."""

    def __init__(self, path: str, map_path: str) -> None:
        self.path = path
        self.map_path = map_path

    def ask(self, command: str) -> str:
        """Return the answer to a command; raise OSError where nobody answers."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(self.path)
            connection.sendall(command.encode() + b"\n")
            data = bytearray()
            while True:
                piece = connection.recv(65536)
                if not piece:
                    return data.decode()
                data += piece

    def read(self) -> dict[str, str]:
        """Return the map that is in use; raise RefusedError where there is none."""
        found = {}
        for line in self.ask(f"show map {self.map_path}").splitlines():
            words = line.split(" ", 2)
            if len(words) == 3 and words[0].startswith("0x"):
                found[words[1]] = words[2]
            elif line.strip():
                raise RefusedError(line.strip())
        return found

    def replace(self, entries: dict[str, str]) -> None:
        """Put another map in its place, at one moment (management guide of HAProxy, `prepare map`)."""
        told = self.ask(f"prepare map {self.map_path}")
        version = re.search(r"New version created: ([0-9]+)", told)
        if not version:
            raise RefusedError(told.strip())
        items = sorted(entries.items())
        for at in range(0, len(items), AT_ONCE):
            lines = "".join(f"{key} {value}\n" for key, value in items[at : at + AT_ONCE])
            self._do(f"add map @{version[1]} {self.map_path} <<\n{lines}")
        self._do(f"commit map @{version[1]} {self.map_path}")
        if without_smoke(self.read()) != without_smoke(entries):
            raise RefusedError("it does not have the keys that it was told")

    def _do(self, command: str) -> None:
        told = self.ask(command).strip()
        if told:
            raise RefusedError(told)


def without_smoke(entries: dict[str, str]) -> dict[str, str]:
    """Return the entries that are no smoke test's."""
    return {key: value for key, value in entries.items() if not value.endswith(f" {SMOKE}")}


def smoke_of(entries: dict[str, str], now: float) -> dict[str, str]:
    """Return those of smoke tests that may be under way at `now`, in seconds since 1970."""
    own = {key: value for key, value in entries.items() if value.endswith(f" {SMOKE}")}
    return {key: value for key, value in own.items() if int(value.split(" ", 1)[0]) > now}


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let nobody else change the keys meanwhile: a smoke test's would be lost between two commands (ppdeploy_smoke)."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write(path: str, text: str) -> None:
    """Replace a file as a whole, for root alone."""
    handle, fresh = tempfile.mkstemp(dir=Path(path).parent, prefix=".keys-")
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(fresh).replace(path)
    except BaseException:
        Path(fresh).unlink()
        raise


def names(entries: dict[str, str], keys: set[str]) -> list[str]:
    """Return the names of these keys."""
    return sorted(entries[key].partition(" ")[2] for key in keys)


def tell(
    path: str, control: str, wanted: dict[str, str], check: bool, lineage: str = "", changes: int = 0
) -> dict[str, Any]:
    """Bring file and process to the wanted keys; return what the module reports."""
    if not Path(path).parent.is_dir():
        return {"changed": False, "installed": False, "running": False, "newer": 0, "added": [], "removed": []}
    with alone(Path(path).parent):
        return _tell(path, control, wanted, check, lineage, changes)


def _tell(path: str, control: str, wanted: dict[str, str], check: bool, lineage: str, changes: int) -> dict[str, Any]:
    before = ""
    with contextlib.suppress(FileNotFoundError):
        before = Path(path).read_text(encoding="ascii", errors="replace")
    process = Haproxy(control, path)
    asking: dict[str, str] = {}
    running: dict[str, str] | None
    try:
        seen = process.read()
        asking, running = smoke_of(seen, time.time()), without_smoke(seen)
    except (FileNotFoundError, ConnectionRefusedError):
        running = None
    filed = parse(before)
    later = newer(before, lineage, changes)
    if later:
        running_now = running is not None
        return {"changed": False, "installed": True, "running": running_now, "newer": later, "added": [], "removed": []}
    in_use = filed if running is None else running
    write_file, tell_process = before != map_text(wanted, lineage, changes), running is not None and running != wanted
    if not check:
        # First the file: a process that starts anew in between has the new keys too.
        if write_file:
            write(path, map_text(wanted, lineage, changes))
        if tell_process:
            process.replace({**wanted, **asking})
    return {
        "changed": write_file or tell_process,
        "installed": True,
        "running": running is not None,
        "newer": 0,
        "added": names(wanted, set(wanted) - set(in_use)),
        "removed": names(in_use, set(in_use) - set(wanted)),
    }


def main() -> None:
    """Read the arguments, do the work."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "socket": {"type": "path", "required": True},
            # Of keys, only what they hash to: Ansible would take the argument's name for a secret's.
            "keys": {
                "type": "dict",
                "required": True,
                "no_log": False,
                "options": {
                    "entries": {"type": "list", "elements": "dict", "required": True},
                    "lineage": {"type": "str", "default": ""},
                    "changes": {"type": "int", "default": 0},
                },
            },
        },
        supports_check_mode=True,
    )
    params = module.params
    told = params["keys"]
    try:
        done = tell(
            params["path"],
            params["socket"],
            wanted_map(told["entries"]),
            module.check_mode,
            told["lineage"],
            told["changes"],
        )
    except ValueError as error:
        module.fail_json(msg=f"the keys cannot be used: {error}")
    except (OSError, RefusedError) as error:
        module.fail_json(
            msg=f"the gateway could not be told its keys: {error}; where {params['path']} has them already, "
            "`systemctl restart ppdeploy-gateway` reads it"
        )
    module.exit_json(**done)


if __name__ == "__main__":
    main()
