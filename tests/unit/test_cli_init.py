"""`ppdeploy init`: a first inventory, never over another."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppdeploy.spec import load_inventory
from tests.unit.cli_support import Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(capsys)


def test_without_hosts_it_writes_the_example_into_the_default_place(command: Command) -> None:
    outcome = command("init")
    assert (outcome.code, outcome.out) == (0, "inventory/cluster/hosts.yml\n")
    assert "<--" in Path("inventory/cluster/hosts.yml").read_text()
    assert "ppdeploy plan\n" in outcome.err


def test_the_hosts_and_the_model_given_make_a_usable_inventory(command: Command) -> None:
    words = ("big=admin@198.18.0.11", "198.18.0.12:2222", "--model", "./m", "--pipeline", "tiny", "-i", "mine")
    Path("m").mkdir()
    assert command("init", *words).code == 0
    spec = load_inventory(Path("mine")).spec()
    (pipeline,) = spec.pipelines
    assert pipeline.name == "tiny"
    assert [host.address for host in pipeline.hosts] == ["198.18.0.11", "198.18.0.12"]
    # Typed at a shell, ./m starts here; in the inventory it would start there.
    assert pipeline.vars.model == str(Path("m").resolve())


def test_a_folder_that_is_written_like_an_id_is_told(command: Command) -> None:
    Path("models/m").mkdir(parents=True)
    assert "hub" not in command("init", "--model", "models/m", "-i", "one").err
    Path("models/m/config.json").write_text("{}")
    outcome = command("init", "--model", "models/m", "-i", "two")
    assert outcome.code == 0
    assert "for the folder of that name write ./models/m" in outcome.err


def test_a_model_folder_that_is_not_there_is_told_at_once(command: Command) -> None:
    outcome = command("init", "--model", "./nosuchfolder")
    assert outcome.code == 2
    assert "the model folder does not exist (--model ./nosuchfolder)" in outcome.err
    assert not Path("inventory").exists()


@pytest.mark.parametrize("place", ["mine", "mine/hosts.yml"])
def test_it_never_overwrites(command: Command, place: str) -> None:
    Path("mine").mkdir()
    Path("mine/hosts.yml").write_text("precious\n")
    outcome = command("init", "-i", place)
    assert outcome.code == 2
    assert "mine" in outcome.err
    assert Path("mine/hosts.yml").read_text() == "precious\n"


def test_it_does_not_add_to_an_inventory_of_other_files(command: Command) -> None:
    Path("mine").mkdir()
    Path("mine/cluster.ini").write_text("[vllm]\n")
    outcome = command("init", "-i", "mine")
    assert outcome.code == 2
    assert "cluster.ini" in outcome.err
    assert not Path("mine/hosts.yml").exists()


def test_a_place_that_cannot_be_written_is_named(command: Command) -> None:
    Path("file").write_text("")
    outcome = command("init", "-i", "file/below")
    assert outcome.code == 2
    assert "file/below" in outcome.err


def test_wrong_hosts_write_nothing(command: Command) -> None:
    assert command("init", "not a host").code == 2
    assert not Path("inventory").exists()
