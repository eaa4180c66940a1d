"""The command itself: exit codes, one-sentence errors, tracebacks only when asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ppdeploy import __version__
from ppdeploy.cli import command as module
from ppdeploy.errors import (
    ApplyError,
    BlockedError,
    InputError,
    PpdeployError,
    RolledBackError,
    ServingError,
    UnreachableError,
)
from tests.unit.cli_support import Command

ERRORS = {
    InputError: 2,
    BlockedError: 3,
    ApplyError: 4,
    ServingError: 5,
    RolledBackError: 6,
    UnreachableError: 7,
}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(module, "app", fail)


@pytest.mark.parametrize(("error", "code"), ERRORS.items())
def test_each_error_has_its_exit_code_and_is_one_line_on_stderr(
    error: type[PpdeployError], code: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Brackets and braces are rich's and Python's own: they must come out as they are.
    raising(error("it [bold]is[/] {wrong}", where="host node1", remedy="run `x [y]`"), monkeypatch)
    outcome = command("apply")
    assert outcome.code == code
    assert outcome.err == "error: it [bold]is[/] {wrong} (host node1): run `x [y]`\n"
    assert outcome.out == ""


def test_debug_shows_the_traceback_and_what_ansible_printed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ApplyError("node1: it failed")
    error.add_note("fatal: [node1]: FAILED! => ...")
    raising(error, monkeypatch)
    for words in (("--debug", "apply"), ("apply", "--debug")):
        outcome = command(*words)
        assert "Traceback" in outcome.err
        assert "fatal: [node1]: FAILED! => ..." in outcome.err
        assert outcome.err.endswith("error: node1: it failed\n")
    assert "Traceback" not in command("apply").err


def test_debug_of_a_command_on_a_lab_host_is_not_ours() -> None:
    words = ["lab", "ssh", "node1", "tool", "--debug"]
    assert not module._take_debug(words)
    assert words == ["lab", "ssh", "node1", "tool", "--debug"]


def test_an_interruption_is_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(KeyboardInterrupt(), monkeypatch)
    outcome = command("apply")
    assert (outcome.code, outcome.err) == (130, "error: interrupted\n")


def test_a_fault_of_ours_is_one_line_too(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(ZeroDivisionError("division by zero"), monkeypatch)
    outcome = command("apply")
    assert outcome.code == 4
    assert outcome.err.count("\n") == 1
    assert "ZeroDivisionError: division by zero" in outcome.err
    assert "--debug" in outcome.err


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (["apply", "--nosuch"], "ppdeploy apply"),
        (["nosuch"], "ppdeploy"),
        (["render"], "ppdeploy render"),
        (["lab", "nosuch"], "ppdeploy lab"),
        (["keys", "add"], "ppdeploy keys add"),
    ],
)
def test_wrong_usage_is_wrong_input(words: list[str], verb: str, command: Command) -> None:
    outcome = command(*words)
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert outcome.err.endswith(f"see `{verb} --help`\n")
    assert outcome.err.count("\n") == 1


def test_without_a_verb_the_help_is_shown(command: Command) -> None:
    outcome = command()
    assert outcome.code == 2
    assert "Commands:" in outcome.err
    assert "error" not in outcome.err


def test_help_names_every_verb_and_hides_what_is_for_developers(command: Command) -> None:
    outcome = command("--help")
    assert outcome.code == 0
    verbs = {line.split()[0] for line in outcome.out.partition("Commands:")[2].splitlines() if line.strip()}
    wanted = {"init", "plan", "render", "check", "apply", "smoke", "status", "start", "stop", "restart"}
    assert wanted | {"bundle", "lab", "demo"} <= verbs
    assert "docs-variables" not in verbs


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "ppdeploy", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ppdeploy {__version__}\n"


def test_the_page_of_variables_can_be_printed_and_compared(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "variables.md"
    assert command("docs-variables", "--out", page).code == 0
    assert command("docs-variables", "--check", "--out", page).code == 0
    assert command("docs-variables").out == page.read_text()
    page.write_text(page.read_text().replace("ppdeploy_model", "ppdeploy_mode1"))
    assert command("docs-variables", "--check", "--out", page).code != 0
    assert command("docs-variables", "--check").code == 2
