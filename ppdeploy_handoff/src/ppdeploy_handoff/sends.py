"""Sends that are waited for later, a bounded number of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

# Sends in flight behind the newest. Two are enough for the link never to idle while a batch is computed; each holds one
# tensor of tokens x hidden.
DEPTH = 2


class Late:
    """Stands for a send where vLLM would wait for it: the wait is put off to `Ring`, which holds the tensors."""

    def __init__(self, work: Any, avoided: Callable[[], None]) -> None:
        self._work = work
        self._avoided = avoided

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        if not self.is_completed():
            self._avoided()


class Ring:
    """The sends that were not waited for yet, oldest first, each with the tensors it reads."""

    def __init__(self, depth: int = DEPTH) -> None:
        self._depth = depth
        self._held: deque[tuple[list[Any], Any]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, works: list[Any], tensors: Any, avoided: Callable[[], None]) -> list[Any]:
        """Keep `tensors` until `works` are done; handles to give to vLLM. Waits for the sends that are too many.

        A wait on a GPU lets the current stream wait, not the caller.
        """
        self._held.append((works, tensors))
        while len(self._held) > self._depth:
            self._wait_oldest()
        return [Late(work, avoided) for work in works]

    def drain(self) -> None:
        """Wait for all of them: before anything that is not put off goes the same way."""
        while self._held:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        works, _ = self._held.popleft()
        for work in works:
            work.wait()
