"""Lines of several nodes on one time axis."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdeploy.logs import Axis, Line, clock_offset, kept_failures, lines_of, merged


def line(host: str, time: float, message: str = "") -> Line:
    return Line(time, host, "rank", message or f"{host} at {time}")


def test_lines_are_merged_by_time() -> None:
    one, two = [line("a", 1.0), line("a", 3.0)], [line("b", 2.0), line("b", 4.0)]
    assert [found.time for found in merged([one, two])] == [1.0, 2.0, 3.0, 4.0]


def test_a_nodes_own_lines_keep_their_order_when_its_clock_goes_back() -> None:
    stepped = [line("a", 10.0, "first"), line("a", 2.0, "second"), line("a", 11.0, "third")]
    found = [one.message for one in merged([stepped, [line("b", 10.5, "between")]])]
    assert found == ["first", "second", "between", "third"]


# A busy machine stops a test for a second.
@given(st.lists(st.lists(st.floats(0, 1000), max_size=20), max_size=5), st.lists(st.floats(0, 1000), max_size=6))
def test_nothing_is_lost_or_twice_and_each_node_keeps_its_order(nodes: list[list[float]], looks: list[float]) -> None:
    axis = Axis()
    for number, times in enumerate(nodes):
        axis.add(f"n{number}", [line(f"n{number}", time, str(place)) for place, time in enumerate(times)])
    taken = [one for until in sorted(looks) for one in axis.take(until)] + axis.take()
    for number, times in enumerate(nodes):
        own = [one for one in taken if one.host == f"n{number}"]
        assert [one.message for one in own] == [str(place) for place in range(len(times))]
        assert [one.time for one in own] == times


def test_what_another_node_may_still_precede_is_held_back() -> None:
    axis = Axis()
    axis.add("a", [line("a", 1.0), line("a", 5.0)])
    assert [one.time for one in axis.take(3.0)] == [1.0]
    axis.add("b", [line("b", 4.0)])
    assert [one.time for one in axis.take(6.0)] == [4.0, 5.0]
    assert axis.take() == []


@pytest.mark.parametrize(
    ("node", "offset"),
    [
        ((100.5, 101.5), 0.0),  # within the call: it may be right
        ((102.0, 103.0), 1.0),  # it ends a second after the call has
        ((90.0, 91.0), -10.0),  # it begins ten seconds before the call did
    ],
)
def test_a_clock_is_wrong_only_when_nothing_else_explains_it(node: tuple[float, float], offset: float) -> None:
    assert clock_offset(100.0, node, 102.0) == pytest.approx(offset)


def test_lines_get_the_controllers_time() -> None:
    raw: list[dict[str, Any]] = [{"time": 110.0, "unit": "agent", "priority": 3, "pid": 7, "message": "x"}]
    assert lines_of("a", raw, pipeline="tiny", offset=10.0) == [Line(100.0, "a", "agent", "x", 3, 7, "tiny")]


def test_failures_are_counted_from_the_last_and_the_first_of_a_series_is_marked() -> None:
    def kept(number: int, time: float, reason: str) -> dict[str, Any]:
        return {"name": f"{number:09d}-{'0' * 16}", "generation": number, "time": time, "reason": reason}

    found = kept_failures(
        {
            "a": {"failures": [kept(3, 10.0, "killed"), kept(5, 50.0, "gone")], "first": f"{3:09d}-{'0' * 16}"},
            "b": {"failures": [kept(5, 49.0, "no head")], "first": ""},
        }
    )
    assert [(one.generation, one.time, one.first, dict(one.reasons)) for one in found] == [
        (5, 49.0, False, {"a": "gone", "b": "no head"}),
        (3, 10.0, True, {"a": "killed"}),
    ]
