"""Counters that a worker process writes and the API process of the same node shows in vLLM's own /metrics."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {
    "handoffs": "Handoffs sent to the next stage by this node.",
    "bytes_sent": "Bytes of hidden states sent to the next stage by this node.",
    "bytes_saved": "Bytes that vLLM would have sent beside them.",
    "waits_avoided": "Sends that were still on the wire when vLLM would have waited for them.",
    "staggered": "Batches whose handoff was given a step of its own.",
}
_ONE = struct.Struct("<Q")


class Counters:
    """One process's counters, in a file of eight bytes each that another process may read at any time."""

    def __init__(self, folder: str | None) -> None:
        """`folder`: where the file goes; None keeps the counters in memory."""
        size = _ONE.size * len(NAMES)
        if folder is None:
            self._map: Any = bytearray(size)
        else:
            with open(Path(folder) / f"{os.getpid()}.counters", "w+b") as file:
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        self._at = {name: index * _ONE.size for index, name in enumerate(NAMES)}

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter of `NAMES`. One writer a process, so there is no lock."""
        at = self._at[name]
        _ONE.pack_into(self._map, at, _ONE.unpack_from(self._map, at)[0] + amount)

    def value(self, name: str) -> int:
        """What a counter stands at."""
        return int(_ONE.unpack_from(self._map, self._at[name])[0])


def total(folder: str) -> dict[str, int]:
    """The sums over all processes that wrote into `folder`."""
    sums = dict.fromkeys(NAMES, 0)
    for path in sorted(Path(folder).glob("*.counters")):
        data = path.read_bytes()
        if len(data) == _ONE.size * len(NAMES):
            for index, name in enumerate(NAMES):
                sums[name] += _ONE.unpack_from(data, index * _ONE.size)[0]
    return sums


class Exposed:
    """A prometheus_client collector of the counters in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """One counter metric for each of `NAMES`, called ppdeploy_handoff_NAME_total."""
        from prometheus_client.core import CounterMetricFamily

        sums = total(self._folder)
        for name, text in NAMES.items():
            yield CounterMetricFamily(f"ppdeploy_handoff_{name}", text, value=sums[name])


def folder_for_children(variable: str) -> str:
    """A folder for the counters of this process and all it starts, which inherit its name in `variable`.

    The process that makes it (the API server, on a head) is the one whose registry shows the counters.
    """
    folder = os.environ.get(variable)
    if folder is None:
        folder = tempfile.mkdtemp(prefix="ppdeploy-handoff-")
        os.environ[variable] = folder
        from prometheus_client import REGISTRY

        REGISTRY.register(Exposed(folder))
    return folder
