"""`ppdeploy bundle` and `ppdeploy demo`: what they ask of the packages that do the work."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppdeploy import bundle as bundles
from ppdeploy import locks
from ppdeploy.bundle import apt
from ppdeploy.cli import bundling, demo
from ppdeploy.errors import ApplyError
from tests.factories import make_facts
from tests.unit.cli_support import Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of `make_bundle`, which here downloads nothing."""
    calls: list[tuple[Any, ...]] = []

    def make_bundle(wanted: list[locks.Lock], out: Path | None, **options: Any) -> Any:
        options.pop("progress")(bundles.Progress(done=1, total=2, doing="x" * 99))
        calls.append((wanted, out, options))
        packages = SimpleNamespace(names=options["packages"]) if options["packages"] else None
        models = [SimpleNamespace(path="models/x")] if options["model"] else []
        return SimpleNamespace(path=Path("/srv/bundle"), size=5_000_000, locks=wanted, packages=packages, models=models)

    monkeypatch.setattr(bundles, "make_bundle", make_bundle)
    return calls


def test_bundle_takes_the_lock_of_the_nodes_and_names_the_variable(command: Command, made: list[Any]) -> None:
    outcome = command("bundle", "--device", "cpu", "--python", "3.11", "--out", "b", "--index-url", "https://i")
    assert (outcome.code, outcome.out) == (0, "/srv/bundle\n")
    assert "ppdeploy_wheelhouse: /srv/bundle" in outcome.err
    ((wanted, out, options),) = made
    assert [(lock.device, lock.python, lock.vllm_version) for lock in wanted] == [
        ("cpu", "3.11", locks.default_version("cpu"))
    ]
    assert out == Path("b")
    assert options == {
        "index_url": "https://i",
        "extra_index_url": None,
        "packages": [],
        "model": None,
    }


def test_a_bundle_for_a_pipeline_with_the_handoff_plugin_holds_the_lock_with_it(
    command: Command, made: list[Any]
) -> None:
    assert command("bundle", "--device", "cpu", "--out", "b", "--handoff").code == 0
    (((lock,), _out, _options),) = made
    assert lock == locks.with_handoff(locks.find("cpu", None, "3.11", "x86_64"))


def test_a_bundle_with_packages_and_a_model_says_what_to_put_into_the_inventory(
    command: Command, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(bundling, "archives_have", lambda _name: True)
    outcome = command("bundle", "--python", "3.12", "--extra", "runai", "--packages", "--model", "org/x")
    assert outcome.code == 0
    for line in ("ppdeploy_system_packages: bundle", "ppdeploy_model: /srv/bundle/models/x"):
        assert line in outcome.err
    ((wanted, _, options),) = made
    assert [lock.extras for lock in wanted] == [("runai",)]
    assert options["packages"] == [
        *("python3.12", "python3.12-dev", "gcc", "rsync", "haproxy", "nftables", "wireguard-tools", "wireguard-go")
    ]
    assert options["model"].token == "hf_secret"
    assert "hf_secret" not in repr(options["model"]) + outcome.err + outcome.out


def test_packages_have_the_names_of_the_machines_own_system(
    command: Command, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kin = {"id": "almalinux", "id_like": ("rhel", "centos", "fedora"), "version_id": "9.6"}
    monkeypatch.setattr(bundling, "this_system", lambda: make_facts("node1").os.model_copy(update=kin))
    monkeypatch.setattr(bundling, "archives_have", lambda _name: True)
    assert command("bundle", "--python", "3.12", "--packages").code == 0
    ((_, _, options),) = made
    assert options["packages"] == [
        *("python3.12", "python3.12-devel", "gcc", "rsync", "haproxy", "nftables", "wireguard-tools", "wireguard-go")
    ]


def test_a_bundle_goes_without_a_rare_package_that_the_archives_lack(
    command: Command, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundling, "archives_have", lambda name: name != "wireguard-go")
    outcome = command("bundle", "--python", "3.12", "--packages")
    assert outcome.code == 0
    assert (
        "this machine's archives have no wireguard-go: left out, since only ppdeploy_fabric_encryption" in outcome.err
    )
    ((_, _, options),) = made
    assert "wireguard-tools" in options["packages"]
    assert "wireguard-go" not in options["packages"]


def test_what_the_archives_have_is_asked_of_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "here": "here:\n  Installed: (none)\n  Candidate: 1.0-1\n",
        "virtual": "virtual:\n  Candidate: (none)\n",
        "no": "",
    }
    monkeypatch.setattr(apt, "run", lambda command: said[command[-1]])
    assert [name for name in said if apt.archives_have(name)] == ["here"]


def test_verify_fetches_nothing(command: Command, made: list[Any], tmp_path: Path) -> None:
    outcome = command("bundle", "--verify", "--out", tmp_path / "b")
    assert outcome.code == 2
    assert outcome.err.startswith("error: the bundle folder does not exist")
    assert "--out" in command("bundle", "--verify", "--python", "3.12").err
    assert made == []


def test_bundle_for_several_pythons_is_one_bundle(command: Command, made: list[Any]) -> None:
    assert command("bundle", "--python", "3.11", "--python", "3.12").code == 0
    assert [lock.python for lock in made[0][0]] == ["3.11", "3.12"]


def test_bundle_in_json(command: Command, made: list[Any]) -> None:
    document = json.loads(command("bundle", "--device", "cpu", "--python", "3.11", "--json").out)
    assert document == {
        "schema": 1,
        "path": "/srv/bundle",
        "bytes": 5_000_000,
        "locks": [lock.digest for lock in made[0][0]],
        "packages": [],
        "models": [],
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device", "tpu"], "--device"),
        (["--device", "cuda"], "--python"),
        (["--vllm-version", "0.0.1", "--python", "3.11"], "0.0.1"),
        (["--python", "2.7"], "2.7"),
        (["--machine", "riscv64", "--python", "3.11"], "riscv64"),
        (["--extra", "tensorizer", "--python", "3.11"], "tensorizer"),
        (["--model-revision", "main", "--python", "3.11"], "--model"),
    ],
)
def test_bundle_refuses_what_there_is_no_lock_for(
    command: Command, made: list[Any], words: list[str], named: str
) -> None:
    outcome = command("bundle", *words)
    assert (outcome.code, made) == (2, [])
    assert named in outcome.err


PIPELINE = {
    "pipeline": "tiny",
    "model": "tiny-llama",
    "head": "node1",
    "address": "http://127.0.0.1:8000",
    "stages": {"node1": "stage 0 with layers 0-1", "node2": "stage 1 with layers 2-3"},
}


class FakeLab:
    """Notes whether it was taken down."""

    def __init__(self) -> None:
        self.gone = False
        self.nodes: list[str] = []

    def down(self) -> None:
        self.gone = True


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> FakeLab:
    found = FakeLab()
    monkeypatch.setattr(demo, "Lab", lambda: found)
    monkeypatch.setattr(demo, "up_with_vllm", lambda *_args, **_more: Path("inventory/lab/hosts.yml"))
    monkeypatch.setattr(demo, "apply_cluster", lambda _request, hints: [] if hints else [PIPELINE])
    monkeypatch.delenv("CI", raising=False)
    return found


def test_demo_without_a_terminal_takes_the_lab_down(command: Command, lab: FakeLab) -> None:
    outcome = command("demo")
    assert outcome.code == 0
    assert "node2 computes stage 1 with layers 2-3" in outcome.out
    assert lab.gone


def test_demo_leaves_a_lab_that_was_up_before(command: Command, lab: FakeLab) -> None:
    lab.nodes = ["node1", "node2"]
    assert command("demo").code == 0
    assert not lab.gone


@pytest.mark.parametrize(("ci", "gone"), [("", False), ("true", True)])
def test_demo_on_a_terminal_leaves_the_lab_up_and_says_how_to_go_on(
    command: Command, lab: FakeLab, monkeypatch: pytest.MonkeyPatch, ci: str, gone: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("CI", ci)
    outcome = command("demo")
    assert outcome.code == 0
    assert lab.gone == gone
    assert ("make clean" in outcome.err) != gone
    assert ("ppdeploy lab ssh node1 curl" in outcome.err) != gone


def test_demo_that_fails_takes_the_lab_down_where_nobody_looks(
    command: Command, lab: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_request: object, **_options: object) -> None:
        raise ApplyError("it failed")

    monkeypatch.setattr(demo, "apply_cluster", fail)
    assert command("demo").code == 4
    assert lab.gone
