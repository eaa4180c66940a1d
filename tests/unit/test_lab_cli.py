"""`ppdeploy lab`: what the verbs pass on and print, with the lab itself replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ppdeploy.errors import InputError
from ppdeploy.lab import LabInventory, LabStatus, NodeStatus, cli

NODE = NodeStatus(
    "node1", "running", "198.18.0.11", "198.18.1.11", 2, 61.4, 32 << 20, {"fab0": "1gbit"}, {"host0": "silent"}
)
STATUS = LabStatus("x", "up", "/lab", "/checkout", None, "/lab/net", "/lab/hosts.yml", [NODE])


class Recorder:
    """Stands in for Lab and notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answer: LabStatus = STATUS

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return {"status": self.answer, "up": Path("/lab/hosts.yml")}.get(name)

        return call


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(cli, "Lab", lambda: recorder)
    monkeypatch.setattr(cli, "require_machine", lambda _action: None)
    return recorder


def invoke(*words: str) -> str:
    result = CliRunner().invoke(cli.lab_app, list(words), catch_exceptions=False, env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_up_makes_hosts_that_an_apply_can_use(lab: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def up_with_vllm(*args: Any, inventory: LabInventory, **_: Any) -> Path:
        calls.append((*args, inventory))
        return Path("/lab/hosts.yml")

    monkeypatch.setattr(cli, "up_with_vllm", up_with_vllm)
    assert invoke("up", "--nodes", "3", "--model", "./m") == "/lab/hosts.yml\n"
    assert calls == [(lab, 3, LabInventory.one_pipeline(3, "./m"))]
    assert lab.calls == []


def test_up_by_someone_who_is_not_root_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        pytest.fail("work began before root was asked for")

    for name in ("up_with_vllm", "tiny_model", "Lab"):
        monkeypatch.setattr(cli, name, fail)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(InputError, match="ppdeploy lab up needs root"):
        invoke("up")


def test_up_makes_bare_hosts_where_asked(lab: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "tiny_model", lambda: Path("/models/tiny"))
    assert invoke("up", "--bare") == "/lab/hosts.yml\n"
    ((name, args, kwargs),) = lab.calls
    assert (name, args) == ("up", (2,))
    assert kwargs["inventory"] == LabInventory.one_pipeline(2, "/models/tiny")


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (("down",), ("down", (), {})),
        (("shape", "node1", "1gbit"), ("shape", ("node1", "1gbit", "fabric"), {})),
        (("cut", "node1", "--silent"), ("cut", ("node1", "fabric"), {"silent": True})),
        (("cut", "node1", "--link", "management"), ("cut", ("node1", "management"), {"silent": False})),
        (("heal", "node1"), ("heal", ("node1", "both"), {})),
        (("kill", "node2"), ("kill", ("node2",), {})),
        (("boot", "node2"), ("boot", ("node2",), {})),
        (("reboot", "node2"), ("reboot", ("node2",), {})),
    ],
)
def test_a_verb_does_what_it_says(lab: Recorder, words: tuple[str, ...], call: tuple[Any, ...]) -> None:
    assert invoke(*words) == ""
    assert lab.calls == [call]


@pytest.mark.usefixtures("lab")
def test_status_is_a_table() -> None:
    said = invoke("status")
    for word in (
        "node1",
        "running",
        "198.18.0.11",
        "198.18.1.11",
        "61 s",
        "32 MiB",
        "fab0 1gbit",
        "host0 cut silently",
    ):
        assert word in said


@pytest.mark.usefixtures("lab")
def test_status_is_json_where_asked() -> None:
    assert json.loads(invoke("status", "--json")) == STATUS.as_json()


def test_status_of_no_lab_says_so(lab: Recorder) -> None:
    lab.answer = LabStatus("x", "none", "/lab", None, None, "/lab/net", None, [])
    assert invoke("status") == "the lab x is not up\n"


def test_ssh_passes_options_of_the_command_through(lab: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(lab, "ssh_command", lambda node, argv: ["ssh", node, *argv], raising=False)
    monkeypatch.setattr("os.execvp", lambda program, words: ran.append((program, words)))
    invoke("ssh", "node1", "ls", "-la", "--color=never")
    assert ran == [("ssh", ["ssh", "node1", "ls", "-la", "--color=never"])]
