"""When requests come back, and when their tokens are applied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ppdeploy_handoff.settings import parse
from ppdeploy_handoff.stagger import Due, delay, possible


@pytest.mark.parametrize(
    ("mode", "tokens", "most", "structured", "steps"),
    [
        ("off", 4096, 8192, False, 2),
        ("lossless", 4096, 8192, False, 2),
        ("overlap:0", 4096, 8192, True, 2),
        ("overlap:512", 511, 8192, False, 2),
        ("overlap:512", 512, 8192, False, 3),
        ("overlap:512", 8, 8192, True, 3),
        ("overlap", 512, 8192, False, 3),
        ("overlap", 128, 256, False, 3),
        ("overlap", 127, 256, False, 2),
        ("fp8", 512, 8192, False, 3),
        ("fp8:0", 512, 8192, False, 2),
    ],
)
def test_delay(mode: str, tokens: int, most: int, structured: bool, steps: int) -> None:
    assert delay(parse(mode), 2, tokens, most, structured) == steps


def run(delays: list[int], steps: int) -> list[list[str]]:
    """What is applied on each step when step i receives token `i` with delay `delays[i]`."""
    due, applied, last = Due(), [], (None, 2)
    for step in range(steps):
        applied.append(due.next(*last))
        last = (str(step), delays[step]) if step < len(delays) else (None, 2)  # type: ignore[assignment]
    return applied


def test_with_vllms_own_delay_it_is_vllms_own_order() -> None:
    assert run([2, 2, 2, 2], 6) == [[], [], ["0"], ["1"], ["2"], ["3"]]


def test_each_token_is_applied_on_its_step_once_and_the_older_first() -> None:
    applied = run([3, 2, 3, 2, 2], 8)
    assert applied == [[], [], [], ["0", "1"], [], ["2", "3"], ["4"], []]


def config(**changes: Any) -> Any:
    values = {"stages": 2, "data": 1, "asynchronous": True, "v2": True, "drafts": None} | changes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=values["stages"], data_parallel_size=values["data"]),
        scheduler_config=SimpleNamespace(async_scheduling=values["asynchronous"]),
        use_v2_model_runner=values["v2"],
        speculative_config=values["drafts"],
    )


def test_where_the_cadence_may_change() -> None:
    assert possible(config())
    for change in ({"stages": 1}, {"stages": 3}, {"data": 2}, {"asynchronous": False}, {"v2": False}, {"drafts": 1}):
        assert not possible(config(**change)), change
