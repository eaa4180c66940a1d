"""What is shown while a playbook runs: on a terminal, in a log, to a program."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from rich.console import Console

from ppdeploy.run import Redactor, progress
from ppdeploy.run.events import Step
from ppdeploy.run.progress import JsonProgress, LiveProgress, PlainProgress

STEPS = [
    Step("play", play="Set up"),
    Step("task", play="Set up", role="vllm_rank", task="Copy it"),
    Step("started", host="node1", role="vllm_rank", task="Copy it"),
    Step("changed", host="node1", role="vllm_rank", task="Copy it", output="changed: [node1] => ..."),
    Step("skipped", host="node2", task="Copy it"),
    Step("retry", host="node2", task="Wait", text="attempt 2 of 5"),
    Step("ok", host="node2", task="Wait"),
    Step("diff", host="node2", task="Write", output="--- before\n+++ after\n+hf_abc"),
    Step("failed", host="node2", task="Write", text="no space: hf_abc", output="fatal: [node2]: hf_abc"),
    Step("warning", text="[WARNING]: old"),
    Step("ok", host="node2", role="x", task="Validating arguments against arg spec 'main' - X"),
]
REDACTOR = Redactor(["hf_abc"])


def plain(*, verbose: bool = False) -> list[str]:
    stream = io.StringIO()
    with PlainProgress(REDACTOR, stream, verbose=verbose) as display:
        for step in STEPS:
            display.show(step)
    return stream.getvalue().splitlines()


def test_a_log_has_one_line_for_each_task_that_ended_on_a_host() -> None:
    lines = plain()
    times = [re.match(r"\d\d:\d\d:\d\d ", line) for line in lines]
    assert [line[9:] for line, time in zip(lines, times, strict=True) if time] == [
        "node1: vllm_rank : Copy it (changed)",
        "node2: Wait (attempt 2 of 5)",
        "node2: Wait",
        "node2: Write (failed)",
        "[WARNING]: old",
    ]
    assert "--- before" in lines
    assert "hf_abc" not in "\n".join(lines)


def test_a_verbose_log_has_ansible_s_own_text_below() -> None:
    assert "changed: [node1] => ..." in plain(verbose=True)
    assert "fatal: [node2]: [hidden]" in plain(verbose=True)
    assert "changed: [node1] => ..." not in plain()


def test_a_log_does_not_stand_still() -> None:
    now = [0.0]
    stream = io.StringIO()
    display = PlainProgress(REDACTOR, stream, clock=lambda: now[0])
    for host in ("node1", "node2", "node3"):
        display.show(Step("started", host=host, task="Wait"))
    display.show(Step("ok", host="node3", task="Wait"))
    for now[0] in (10, 59, 61, 100, 122):
        display.tick()
    lines = [line[9:] for line in stream.getvalue().splitlines()]
    assert lines == ["node3: Wait", *["node1, node2: Wait (goes on)"] * 2]


def test_a_log_says_now_and_then_how_far_a_long_transfer_is() -> None:
    now = [0.0]
    stream = io.StringIO()
    display = PlainProgress(REDACTOR, stream, clock=lambda: now[0])
    for now[0] in range(0, 40, 5):
        for host in ("node1", "node2"):
            display.show(Step("retry", host=host, task="Wait", text=f"{now[0]} GB"))
    display.show(Step("changed", host="node1", task="Wait"))
    display.show(Step("retry", host="node1", task="Wait on", text="0 GB"))
    lines = [line[9:] for line in stream.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("node1")] == [
        *(f"node1: Wait ({passed} GB)" for passed in (0, 15, 30)),
        "node1: Wait (changed)",
        "node1: Wait on (0 GB)",
    ]
    assert len([line for line in lines if line.startswith("node2")]) == 3


def test_a_program_gets_one_object_a_line_without_raw_output() -> None:
    stream = io.StringIO()
    with JsonProgress(REDACTOR, stream) as display:
        for step in STEPS:
            display.show(step)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == [step.kind for step in STEPS]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]", event.pop("time")) for event in events)
    assert events[3] == {"event": "changed", "host": "node1", "role": "vllm_rank", "task": "Copy it"}
    assert events[7]["output"] == "--- before\n+++ after\n+[hidden]"
    assert events[8]["text"] == "no space: [hidden]"
    assert "hf_abc" not in stream.getvalue()


def live() -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None, highlight=False)
    with LiveProgress(REDACTOR, console) as display:
        for step in STEPS:
            display.show(step)
        console.print(display._render())
    return stream.getvalue()


def test_a_terminal_shows_play_task_time_and_a_row_for_each_host() -> None:
    shown = live()
    assert re.search(r"Set up  vllm_rank : Copy it +0:00", shown)
    assert re.search(r"node1 +✓ 0 +~ 1 +✗ 0", shown)
    assert re.search(r"node2 +✓ 3 +~ 0 +✗ 1", shown)
    assert "hf_abc" not in shown


def test_a_terminal_gets_its_cursor_back() -> None:
    shown = live()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_markup_in_a_task_s_name_is_text() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None, highlight=False)
    with LiveProgress(REDACTOR, console) as display:
        display.show(Step("changed", host="node1", task="Remove [bold]x[/]"))
    assert "Remove [bold]x[/]" in stream.getvalue()


def test_the_display_follows_from_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(progress(REDACTOR, as_json=True), JsonProgress)
    assert isinstance(progress(REDACTOR), PlainProgress)
    monkeypatch.setattr(sys, "stderr", type("Terminal", (io.StringIO,), {"isatty": lambda _self: True})())
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress(REDACTOR), LiveProgress)
    assert isinstance(progress(REDACTOR, verbose=True), PlainProgress)
