"""The agent's own configuration, `/etc/ppdeploy/agent.json`; it is no part of a release."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ppdeploy.agent.settings import Settings

DEFAULT_PATH = "/etc/ppdeploy/agent.json"


class ConfigError(Exception):
    """The configuration cannot be used; `str()` is one sentence with the file and what to do."""


@dataclass(frozen=True)
class Config:
    """Names, addresses and places. Paths are absolute; `listen` are (numeric address, port) pairs."""

    cluster: str
    pipeline: str
    node: str
    listen: tuple[tuple[str, int], ...]
    port: int
    key: Path
    root: Path
    state: Path
    run: Path
    keep: Path
    unit: str
    device: str
    settings: Settings = field(default_factory=Settings)

    @property
    def releases(self) -> Path:
        """The folder of the pipeline's releases."""
        return self.root / self.pipeline / "releases"

    @property
    def current(self) -> Path:
        """The link to the prepared release."""
        return self.root / self.pipeline / "current"

    @property
    def record(self) -> Path:
        """The head's two-slot record."""
        return self.state / f"{self.pipeline}-generation"

    @property
    def command(self) -> Path:
        """The operator's last word on this node."""
        return self.state / "command.json"

    @property
    def memory(self) -> Path:
        """The node's memory of this boot; who moves to another pipeline brings no members of the old one."""
        return self.run / f"{self.pipeline}-memory.json"

    @property
    def boot(self) -> Path:
        """The id of this boot, as long-lived as the memory."""
        return self.run / "boot.json"

    @property
    def ticket(self) -> Path:
        """The start ticket, until the unit consumes it."""
        return self.run / "ticket.json"

    @property
    def consumed(self) -> Path:
        """The consumed ticket of the last rank."""
        return self.run / "consumed.json"

    @property
    def heartbeat(self) -> Path:
        """Seconds since boot of the last finished loop, for the fence."""
        return self.run / "heartbeat"


def load(path: Path) -> Config:
    """Read the configuration; raise `ConfigError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the agent's configuration cannot be read ({path}): {error}; run apply") from error
    try:
        return _config(data)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the agent's configuration is wrong ({path}): {error!r}; run apply") from error


def _config(data: dict[str, Any]) -> Config:
    pipeline = str(data["pipeline"])
    port = int(data["port"])
    known = {item.name: item.type for item in fields(Settings)}
    changes = dict(data.get("settings", {}))
    unknown = sorted(set(changes) - set(known))
    if unknown:
        raise ValueError(f"settings.{unknown[0]} is unknown")
    numbers: dict[str, Any] = {
        name: int(value) if known[name] == "int" else float(value) for name, value in changes.items()
    }
    return Config(
        cluster=str(data["cluster"]),
        pipeline=pipeline,
        node=str(data["node"]),
        # A pipeline of one node has its fabric on loopback: once is enough.
        listen=tuple(dict.fromkeys((str(address), int(at)) for address, at in data["listen"])),
        port=port,
        key=Path(data.get("key", "/etc/ppdeploy/agent.key")),
        root=Path(data.get("root", "/opt/ppdeploy")),
        state=Path(data.get("state", "/var/lib/ppdeploy/agent")),
        run=Path(data.get("run", "/run/ppdeploy-agent")),
        keep=Path(data.get("keep", f"/var/lib/ppdeploy/agent/{pipeline}")),
        unit=str(data.get("unit", f"ppdeploy-rank@{pipeline}.service")),
        device=str(data.get("device", "cuda")),
        settings=Settings(**numbers),
    )
