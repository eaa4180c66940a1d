"""The plan in a terminal: narrow, without colours, without Unicode; and two plans side by side."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ppdeploy.paths import data_root
from ppdeploy.plan import Plan
from ppdeploy.plan_report import advice, compare_report, memory_parts, plan_report
from tests.factories_plan import make_complete_plan
from tests.golden.plans.cases import CASES, plan_of
from tests.unit.test_plan_tuning import tunable_cluster

NAMES = ("qwen3-32b-fp8-2x-4090-1g", "qwen3-32b-2x-4090-1g", "qwen3.5-27b-2x-2-4090", "deepseek-v3-2x-8-h100")


def shown(plan: Plan, width: int, *, verbose: bool = False, encoding: str = "utf-8", colour: bool = False) -> str:
    """Return what a terminal of a width shows."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    console = Console(
        file=file, width=width, highlight=False, force_terminal=colour, color_system="truecolor" if colour else None
    )
    for part in plan_report(plan, verbose=verbose):
        console.print(part, soft_wrap=isinstance(part, str), markup=False)
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [40, 60, 160])
def test_nothing_of_a_short_plan_is_wider_than_the_terminal(name: str, width: int) -> None:
    text = shown(plan_of(CASES[name]), width)
    # The last line is one string, which the terminal folds.
    assert max(len(line.rstrip()) for line in text.splitlines()[:-1]) <= width
    assert "…" not in text


def test_a_plan_reads_without_colours_and_without_unicode() -> None:
    plan = plan_of(CASES[NAMES[0]])
    text = shown(plan, 60, encoding="ascii")
    assert "\x1b" not in text
    assert "# weights 16.0" in text
    assert "v  1 Gbit/s" in text
    assert "\x1b[" in shown(plan, 60, colour=True)


def test_what_the_handoff_plugin_would_bring_is_said_where_it_is_worth_it() -> None:
    said = list(advice(plan_of(CASES[NAMES[0]]).pipelines[0]))
    assert said[-1].startswith("ppdeploy_handoff: overlap and steps of 512 tokens (max-num-batched-tokens in ")
    # README.md shows what is said of this plan.
    readme = " ".join((data_root() / "README.md").read_text(encoding="utf-8").split())
    assert [line for line in said if f"- {line}" not in readme] == []
    # 5 % or less is not worth a sentence.
    gains = {}
    for name in CASES:
        outlook = plan_of(CASES[name]).pipelines[0].outlook
        if outlook.overlap_speeds:
            gains[name] = outlook.overlap_speeds[-1].tokens_per_second / outlook.speeds[-1].tokens_per_second
    least = min(gains, key=lambda name: gains[name])
    assert gains[least] < 1.05
    assert "ppdeploy_handoff: overlap" not in shown(plan_of(CASES[least]), 160)


def test_a_bar_is_as_long_as_its_memory() -> None:
    (row, *_) = plan_of(CASES[NAMES[0]]).pipelines[0].memory
    assert sum(part.size for part in memory_parts(row)) == row.memory_bytes
    bar = next(line for line in shown(plan_of(CASES[NAMES[0]]), 100).splitlines() if "█▓" in line or "██" in line)
    marks = bar.strip()
    assert len(marks) == 60
    assert marks.count("█") == round(60 * row.weight_bytes / row.memory_bytes)


def test_what_lacks_is_said_and_no_speed_is() -> None:
    text = " ".join(shown(plan_of(CASES[NAMES[1]]), 160).split())
    assert "it does not fit: stage 1 on node2 lacks 10.6 GiB on each GPU" in text
    assert "no speed is predicted: the model does not fit" in text
    assert "tokens/s" not in text
    # A link is not called ready where nothing was found out about it.
    assert "1 Gbit/s, 0.17 s for 1,000 prompt tokens node2" in text
    assert "1,000 prompt tokens: slow" in " ".join(shown(plan_of(CASES[NAMES[0]]), 160).split())


def test_assumed_facts_are_called_so() -> None:
    plan = plan_of(CASES[NAMES[0]]).model_copy(update={"assumed": ("node2",)})
    assert "assumed, not read from the hosts: the facts of node2" in shown(plan, 160)


def test_what_is_tuned_is_said_and_why_not_only_when_asked() -> None:
    facts = tunable_cluster()
    text = " ".join(shown(make_complete_plan(facts, mtu=9000), 160).split())
    assert "tuned on node1, node2: mtu 9000 (was 1500)" in text
    assert "tuned on" not in shown(make_complete_plan(facts), 160)
    assert "is not tuned" not in text
    told = " ".join(shown(make_complete_plan(facts, nic_tuning=True), 160, verbose=True).split())
    assert "node1: net.ipv4.tcp_rmem is not tuned: " in told


def test_two_plans_stand_side_by_side() -> None:
    before, after = plan_of(CASES[NAMES[1]]), plan_of(CASES[NAMES[0]])
    file = io.StringIO()
    console = Console(file=file, width=100, highlight=False)
    for part in compare_report(before, after, ["model=other"]):
        console.print(part, markup=False)
    lines = [line.split() for line in file.getvalue().splitlines()]
    assert ["what", "if", "model=other;", "this", "plan", "is", "not", "applied"] in lines
    assert ["fits", "no,", "10.6", "GiB", "are", "lacking", "yes"] in lines
    assert ["tokens/s,", "1", "user", "-", "21"] in lines


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-32b-2x-4090-1g", "(64 layers, 32.8 B parameters, bfloat16, 61.0 GiB)"),
        ("deepseek-v3-2x-8-h100", "(61 layers, 671 B parameters, 36.6 B active, fp8, 626.9 GiB)"),
    ],
)
def test_the_title_says_how_large_the_model_is(name: str, words: str) -> None:
    assert words in " ".join(shown(plan_of(CASES[name]), 200).split())
