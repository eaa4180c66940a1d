"""The measured network for people: at a terminal, from a play, and as a page."""

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.gang_report import plain
from ppdeploy.net import NetReport, judge
from ppdeploy.net_page import heat, net_page
from ppdeploy.net_report import net_lines, net_report
from tests.unit.net_views import encrypted, judged, pair, planned, report, run, seen, sizes
from tests.unit.test_plan_page import HOSTILE, Tags

HANDOFFS = [*sizes("node1", "node2"), *sizes("node2", "node1")]


def text(found: NetReport) -> str:
    return "\n".join(plain(net_report(found)))


def told() -> NetReport:
    one = judged(pair(in_one=run(402.0), in_many=run(420.0)), lines=HANDOFFS)
    return report(one.model_copy(update={"sentence": "At 420 Mbit/s your network adds 64 ms."}))


def test_the_matrix_has_every_way_once() -> None:
    lines = text(told()).splitlines()
    assert lines[0] == "pipeline tiny: slow, measured 2026-11-30T03:40:12Z"
    row1 = next(line for line in lines if line.startswith("  node1 "))
    row2 = next(line for line in lines if line.startswith("  node2 "))
    assert row1.split("  ")[1:] == [*row1.split("  ")[1:]]
    assert "953 Mbit/s, 0.2 ms" in row1
    assert "420 Mbit/s, 0.2 ms" in row2


def test_what_is_wrong_is_said_with_its_remedy_and_once() -> None:
    found = text(told())
    assert found.count("ethtool NIC") == 1
    assert "slow: node2 to node1: 420 Mbit/s of 1 Gbit/s negotiated" in found
    assert "At 420 Mbit/s your network adds 64 ms." in found


def test_what_encryption_costs_is_said_for_each_way() -> None:
    flows: dict[str, Any] = {
        "out_many": run(760.0),
        "in_many": run(950.0),
        "out_wire": run(950.0),
        "in_wire": run(950.0),
    }
    found = text(report(judge(encrypted(), seen([pair(**flows)]), (), 4)))
    assert "encryption costs from node1 to node2 20%: 760 Mbit/s, and 950 Mbit/s beside the tunnel" in found
    assert "encryption costs from node2 to node1 0%: 950 Mbit/s, and 950 Mbit/s beside the tunnel" in found
    assert "encryption costs" not in text(told())


def test_the_handoffs_of_the_pipelines_own_way_are_shown() -> None:
    found = text(told())
    assert "handoffs from node1 to node2" in found
    assert "handoffs from node2 to node1" not in found
    assert "8,192 tokens, 134 MB" in found
    assert "1 token, 16.4 kB" in found


def test_a_handoff_that_was_left_out_says_so() -> None:
    line = {"sender": "node1", "receiver": "node2", "tokens": 8192, "bytes": 134217728, "skipped": "it would"}
    assert "left out" in text(report(judged(lines=[line])))


def test_what_could_not_be_measured_is_said() -> None:
    noted = seen()
    noted["node1"]["iperf3"] = "iperf3 is not there and cannot be installed"
    found = text(report(judge(planned(3), noted, ("node3",), 4)))
    assert "! node3 could not be reached any more" in found
    assert "! node1: iperf3 is not there and cannot be installed" in found
    assert "blocked" in found


def test_a_node_alone_is_no_empty_table() -> None:
    found = text(report(judge(planned(1), {}, (), 4)))
    assert found.splitlines() == [
        "pipeline tiny: not measured, measured 2026-11-30T03:40:12Z",
        "  ! node1 is alone in the pipeline: there is no network to measure",
    ]


def test_a_play_prints_the_same() -> None:
    assert net_lines(told().document()) == plain(net_report(told()))


# ---- the page


def test_the_page_is_whole_and_loads_nothing() -> None:
    page = net_page(told())
    for tag, attributes in Tags(page).found:
        assert tag not in ("script", "img", "iframe", "object"), tag
        assert attributes.get("src") is None
        assert attributes.get("href") in (None, "data:,")
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page
    for words in ("953 Mbit/s", "420 Mbit/s", "95 % of 1 Gbit/s", "8,192 tokens, 134 MB", "At 420 Mbit/s your network"):
        assert words in page, words


def test_the_heat_map_has_a_cell_for_each_way() -> None:
    cells = [
        (attributes["class"], attributes["style"])
        for tag, attributes in Tags(net_page(told())).found
        if tag == "td" and "style" in attributes
    ]
    assert cells == [("ready", "--heat: 95%"), ("slow", "--heat: 42%")]


@pytest.mark.parametrize(("changes", "share"), [({}, 95), ({"negotiated_mbit": None}, 100), ({"many_flows": None}, 95)])
def test_heat_is_the_share_of_what_was_negotiated(changes: dict[str, Any], share: int) -> None:
    assert heat(judged().ways[0].model_copy(update=changes)) == share
    assert heat(judged().ways[0].model_copy(update={"one_flow": None, "many_flows": None})) == 0


def test_what_was_measured_cannot_become_markup() -> None:
    one = judged()
    ways = tuple(way.model_copy(update={"sender": HOSTILE, "reason": HOSTILE, "remedy": HOSTILE}) for way in one.ways)
    changed = {"pipeline": HOSTILE, "ways": ways, "notes": (HOSTILE,), "sentence": HOSTILE, "nodes": (HOSTILE, "b")}
    page = net_page(report(one.model_copy(update=changed)))
    tags = Tags(page).found
    assert [tag for tag, _ in tags if tag == "script"] == []
    assert [name for _, attributes in tags for name in attributes if name.startswith("on")] == []
    assert "{{ 7*7 }}" in page
