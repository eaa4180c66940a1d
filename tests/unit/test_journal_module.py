"""The module `ppdeploy_journal`: what journalctl prints in our words, within limits, and kept failures."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_journal as module
from ppdeploy.agent.journal import folder_name
from ppdeploy.agent.messages import GenerationId

RANK = "ppdeploy-rank@tiny.service"


def raw(number: int, message: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {
        "__CURSOR": f"s={number}",
        "__REALTIME_TIMESTAMP": str(1_790_000_000_000_000 + number),
        "MESSAGE": message,
        "PRIORITY": "6",
        "_PID": "42",
        "_SYSTEMD_UNIT": RANK,
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "unit"),
    [
        ({}, "rank"),
        ({"_SYSTEMD_UNIT": "ppdeploy-agent.service"}, "agent"),
        ({"_SYSTEMD_UNIT": "init.scope", "UNIT": RANK}, "systemd"),
    ],
)
def test_a_line_says_who_spoke(fields: dict[str, str], unit: str) -> None:
    assert module.entry(raw(1, **fields), RANK) == {
        "time": 1_790_000_000.000001,
        "unit": unit,
        "priority": 6,
        "pid": 42,
        "message": "hello",
    }


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ([72, 105, 255], "Hi\ufffd"),
        (None, "(a message that journalctl does not show)"),
        (["twice", "said"], "twice said"),
        ("x" * 9000, "x" * 8000 + " ... (1000 more characters)"),
    ],
)
def test_a_message_is_text_of_bounded_length(message: Any, text: str) -> None:
    assert module.entry(raw(1, message), RANK)["message"] == text


def test_the_newest_lines_are_kept_and_the_others_counted() -> None:
    newest = module.Newest(2, size=100)
    for number in range(5):
        newest.add({"message": str(number)})
    assert ([line["message"] for line in newest.lines], newest.left_out) == (["3", "4"], 3)
    newest.add({"message": "y" * 99})
    assert (len(newest.lines), newest.left_out) == (2, 4)
    newest.add({"message": "z" * 99})
    assert ([line["message"][0] for line in newest.lines], newest.left_out) == (["z"], 6)


def params(**changes: Any) -> dict[str, Any]:
    return {
        "pipeline": "tiny",
        "agent": False,
        "lines": 3,
        "since": None,
        "cursor": None,
        "generation": None,
        **changes,
    }


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A journal of ten lines; the commands that read it are kept."""
    commands: list[list[str]] = []

    def printed(command: list[str]) -> Iterator[bytes]:
        commands.append(command)
        count = next((int(word.partition("=")[2]) for word in command if word.startswith("--lines=")), 10)
        for number in range(10 - count, 10):
            yield json.dumps(raw(number, f"line {number}")).encode()

    monkeypatch.setattr(module, "printed", printed)
    return commands


def test_without_a_beginning_only_the_last_lines_are_read(journal: list[list[str]]) -> None:
    found = module.read(params())
    assert [line["message"] for line in found["lines"]] == ["line 7", "line 8", "line 9"]
    assert (found["left_out"], found["more"], found["cursor"]) == (0, True, "s=9")
    assert "--lines=4" in journal[0]
    assert "--unit=ppdeploy-agent.service" not in journal[0]


def test_with_a_beginning_every_line_left_out_is_counted(journal: list[list[str]]) -> None:
    found = module.read(params(since=60.0, agent=True))
    assert (len(found["lines"]), found["left_out"], found["more"]) == (3, 7, False)
    assert any(word.startswith("--since=@") for word in journal[0])
    assert "--unit=ppdeploy-agent.service" in journal[0]


def test_it_goes_on_from_a_cursor(journal: list[list[str]]) -> None:
    module.read(params(cursor="s=4"))
    assert "--after-cursor=s=4" in journal[0]


def test_what_journalctl_refuses_is_one_sentence() -> None:
    with pytest.raises(module.UnreadableError, match="journalctl: no such thing"):
        list(module.printed(["sh", "-c", "echo no such thing >&2; exit 3"]))


def test_a_kept_journal_is_read_as_the_agent_wrote_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = folder_name(GenerationId(12, 0xABCDEF))
    folder = tmp_path / "tiny" / name
    folder.mkdir(parents=True)
    (folder / "reason").write_text("killed by signal 9\n")
    (folder / "journal").write_text(
        "-- Boot 1234 --\n"
        "2026-11-30T00:10:00.000001+0000 node1 vllm[41]: INFO starts\n"
        "2026-11-30T01:10:01.500000+01:00 node1 vllm[41]: ERROR it breaks\n"
        "                                                  and goes on here\n"
        "2026-11-30T00:10:02.000000+00:00 node1 systemd[1]: Main process exited\n"
    )
    monkeypatch.setattr(module, "FAILURES", str(tmp_path / "{}"))
    monkeypatch.setattr(module, "first_failure", lambda: name)
    listed = module.failures(params())
    assert [(one["name"], one["generation"], one["reason"]) for one in listed["failures"]] == [
        (name, 12, "killed by signal 9")
    ]
    assert listed["first"] == name
    found = module.failure(params(generation=name, lines=2))
    assert (found["left_out"], found["kept"], found["reason"]) == (1, True, "killed by signal 9")
    assert [(line["unit"], line["message"]) for line in found["lines"]] == [
        ("rank", "ERROR it breaks\nand goes on here"),
        ("systemd", "Main process exited"),
    ]
    # Two time zones, one moment and half a second.
    assert found["lines"][1]["time"] - found["lines"][0]["time"] == pytest.approx(0.5)


def test_a_failure_that_this_node_did_not_keep_has_no_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "FAILURES", str(tmp_path / "{}"))
    assert not module.failure(params(generation=folder_name(GenerationId(1, 1))))["kept"]
    (tmp_path / "tiny").mkdir()
    assert not module.failure(params(generation=folder_name(GenerationId(1, 1))))["kept"]
    with pytest.raises(module.UnreadableError, match="is not a failure's name"):
        module.failure(params(generation="../../etc"))


def test_a_folder_or_file_that_the_ranks_user_put_there_is_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = folder_name(GenerationId(1, 1))
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "journal").write_text("2026-11-30T00:10:00.000001+0000 n v[1]: secret\n")
    (tmp_path / "tiny").symlink_to(secret)
    monkeypatch.setattr(module, "FAILURES", str(tmp_path / "{}"))
    with pytest.raises(module.UnreadableError):
        module.failures(params())
    (tmp_path / "tiny").unlink()
    (tmp_path / "tiny" / name).mkdir(parents=True)
    (tmp_path / "tiny" / name / "journal").symlink_to(secret / "journal")
    assert module.failure(params(generation=name))["lines"] == []
    if os.geteuid() == 0:
        os.chown(tmp_path / "tiny", 12345, 12345)
        with pytest.raises(module.UnreadableError, match="is not the agent's own"):
            module.failures(params())
    assert stat.S_ISDIR((tmp_path / "tiny").stat().st_mode)
