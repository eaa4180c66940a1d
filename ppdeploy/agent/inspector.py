"""A thread that keeps looking at the prepared release and at what the rank needs, so that the loop never waits.

Small files are hashed each time, weights by their inode and times. While a rank runs, what it uses is not
looked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ppdeploy.agent import ready, release
from ppdeploy.agent.config import Config
from ppdeploy.agent.release import NodeRelease, WeightCache
from ppdeploy.agent.sight import ReleaseSight

_IDLE = 2.0
_BUSY = 5.0


@dataclass(frozen=True)
class Inspection:
    """One look. `full` is the release in detail, when it checked out; `absent`: the rank was absent all the while."""

    release: ReleaseSight = field(default_factory=lambda: ReleaseSight(problem="the release is being checked"))
    full: NodeRelease | None = None
    ready: bool = False
    remark: str = "the release is being checked"
    absent: bool = False


class Inspector:
    """Looks every few seconds; `last` is the newest whole look."""

    def __init__(self, config: Config, wake: Callable[[], None]) -> None:
        self._config = config
        self._wake = wake
        self._cache = WeightCache()
        self._absent = False
        self._again = threading.Event()
        self.last = Inspection()
        threading.Thread(target=self._work, name="inspector", daemon=True).start()

    def rank_is(self, *, absent: bool) -> None:
        """Say whether the rank is absent now; once it is, what it needs is looked at anew and at once."""
        if absent != self._absent:
            self._absent = absent
            self._again.set()

    def _work(self) -> None:
        while True:
            self._again.clear()
            self.last = self._inspect()
            self._wake()
            self._again.wait(_IDLE if self._absent else _BUSY)

    def _inspect(self) -> Inspection:
        config, absent = self._config, self._absent
        remark = ready.stop_strays(config.unit) if absent else ""
        try:
            sight, full = release.look(config.current, config.node, config.pipeline, self._cache)
            if full is not None and absent and not remark:
                remark = ready.obstacle(full, config.node, config.device, config.unit)
        except (OSError, ValueError) as error:
            # A file that vanished between two looks, or a link in the middle of an apply: look again.
            return Inspection(ReleaseSight(problem=f"the release cannot be read: {error}"), None, False, str(error))
        return Inspection(sight, full, not remark, remark, absent and self._absent)
