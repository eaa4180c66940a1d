"""The plan as a page: whole in one file, escaped, and true to the plan. How it looks is tests/browser's business."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from ppdeploy.plan import Plan
from ppdeploy.plan_page import nice_step, plan_page
from tests.factories_plan import make_complete_plan
from tests.golden.plans.cases import CASES, plan_of

HOSTILE = '<script>alert(\'x\')</script>"onload="alert(1)" & {{ 7*7 }}'


class Tags(HTMLParser):
    """Notes every tag with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def hostile() -> Plan:
    plan = make_complete_plan()
    (pipeline,) = plan.pipelines
    model = pipeline.model.model_copy(update={"source": HOSTILE, "name": HOSTILE, "architecture": HOSTILE})
    findings = tuple(one.model_copy(update={"reason": HOSTILE, "remedy": HOSTILE}) for one in pipeline.findings)
    memory = tuple(row.model_copy(update={"device": HOSTILE}) for row in pipeline.memory)
    changed = pipeline.model_copy(update={"name": HOSTILE, "model": model, "findings": findings, "memory": memory})
    return plan.model_copy(update={"pipelines": (changed,), "cluster": HOSTILE, "assumed": (HOSTILE,)})


def test_what_a_plan_says_cannot_become_markup() -> None:
    page = plan_page(hostile())
    tags = Tags(page).found
    assert [tag for tag, _ in tags if tag == "script"] == []
    assert [name for _, attributes in tags for name in attributes if name.startswith("on")] == []
    assert "&lt;script&gt;alert(" in page
    assert "{{ 7*7 }}" in page


@pytest.mark.parametrize("name", CASES)
def test_the_page_loads_nothing(name: str) -> None:
    page = plan_page(plan_of(CASES[name]))
    for tag, attributes in Tags(page).found:
        assert tag not in ("script", "img", "iframe", "object"), tag
        assert attributes.get("src") is None
        assert attributes.get("href") in (None, "data:,")
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_has_hosts_links_memory_and_speed() -> None:
    plan = plan_of(CASES["qwen3-32b-fp8-2x-4090-1g"], curves=True)
    page = plan_page(plan)
    for text in ("node1", "node2", "1 Gbit/s", "layers 32 to 63", "KV cache 4.9 GiB", "2.5 Gbit/s would give"):
        assert text in page, text
    assert len(re.findall("<polyline", page)) == 6 + 4
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_curves_never_fall_with_a_faster_link() -> None:
    curves = plan_of(CASES["qwen3-32b-fp8-2x-4090-1g"], curves=True).pipelines[0].outlook.curves
    rated = [curve for curve in curves if curve.rate_mbit]
    assert [curve.rate_mbit for curve in rated] == [1000, 2500, 10000, 25000, 100000]
    assert [speed.concurrency for speed in rated[0].speeds] == [1, 2, 4, 8, 16, 32, 64]
    for at in range(7):
        tokens = [curve.speeds[at].tokens_per_second for curve in rated]
        assert tokens == sorted(tokens)
    # As it is, at 1 Gbit/s.
    assert curves[0].speeds == rated[0].speeds


def test_without_a_speed_the_page_says_why() -> None:
    page = plan_page(plan_of(CASES["qwen3-32b-2x-4090-1g"], curves=True))
    assert "No speed is predicted: the model does not fit." in page
    assert "<polyline" not in page
    # The end of the GPU's memory is marked where the parts go beyond it.
    assert page.count('fill="var(--blocked)"') == 2


@pytest.mark.parametrize(("highest", "step"), [(100, 20), (99, 20), (101, 50), (0.7, 0.2), (5, 1), (1234, 500)])
def test_grid_lines_are_at_round_numbers(highest: float, step: float) -> None:
    assert nice_step(highest) == pytest.approx(step)
