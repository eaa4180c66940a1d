"""Sends that are waited for later."""

from __future__ import annotations

from ppdeploy_handoff.sends import Ring


class Work:
    def __init__(self, done: bool = False) -> None:
        self.done, self.waits = done, 0

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.waits += 1
        self.done = True


def test_at_most_depth_sends_stay_behind_the_newest_and_each_is_waited_for_once() -> None:
    ring, works = Ring(depth=2), [Work() for _ in range(6)]
    for number, work in enumerate(works):
        for handle in ring.hold([work], [number], lambda: None):
            handle.wait()
        assert len(ring) <= 2
    assert [work.waits for work in works] == [1, 1, 1, 1, 0, 0]
    ring.drain()
    assert [work.waits for work in works] == [1] * 6, "a second wait on a gloo send never returns"


def test_a_wait_counts_as_avoided_only_if_it_would_have_been_one() -> None:
    avoided: list[int] = []
    ring = Ring()
    (pending,) = ring.hold([Work()], None, lambda: avoided.append(1))
    (done,) = ring.hold([Work(done=True)], None, lambda: avoided.append(2))
    pending.wait()
    done.wait()
    assert avoided == [1]
