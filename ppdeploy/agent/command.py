"""The operator's last word on a node: a local file with a rising serial, each serial handled once (rule 17)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppdeploy.agent.sight import RESTART, START, STOP, Command
from ppdeploy.agent.store import read_json, write_json

VERBS = (START, STOP, RESTART)


def read(path: Path) -> Command:
    """Return the last command, or the one that every node begins with (start, serial 0)."""
    return _command(read_json(path)) or Command()


def give(path: Path, verb: str, release: str = "", forget: tuple[str, ...] = (), handled: int = 0) -> Command:
    """Write the next command and return it; raise `OSError`.

    `handled` is the last serial that this node's agent has handled as a head: where the last word was lost, a serial
    that began anew would never be read.
    """
    command = Command(max(read(path).serial, handled) + 1, verb, release, forget)
    data: dict[str, Any] = {
        "serial": command.serial,
        "verb": command.verb,
        "release": command.release,
        "forget": list(command.forget),
    }
    write_json(path, data, mode=0o644)
    return command


def _command(data: Any) -> Command | None:
    if not isinstance(data, dict) or data.get("verb") not in VERBS or type(data.get("serial")) is not int:
        return None
    forget = data.get("forget", [])
    if not isinstance(forget, list):
        return None
    return Command(data["serial"], data["verb"], str(data.get("release", "")), tuple(str(name) for name in forget))
