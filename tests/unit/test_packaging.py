"""The wheel is the checkout: an installed ppdeploy has every file that one run from a clone has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import yaml
from packaging.requirements import Requirement

from hatch_build import DATA
from ppdeploy import __version__
from tests.unit.cli_support import make_cluster_on_disk

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Return what a command says; a failure shows all of it."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks or would track, so that leftovers of this checkout prove nothing."""
    target = tmp_path_factory.mktemp("clone")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(source.read_bytes())
            (target / name).chmod(source.stat().st_mode)
    return target


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of that copy, built beside byte code that must not get into it."""
    for folder in ("ppdeploy", "plugins/modules"):
        (clone / folder / "__pycache__").mkdir()
        (clone / folder / "__pycache__" / "leftover.cpython-311.pyc").write_bytes(b"\0")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", out, cwd=clone)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel; its dependencies are those of the one that runs this."""
    place = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    (packages,) = place.glob("lib/python3*/site-packages")
    install = ("pip", "install", "--quiet", "--offline", "--no-deps", "--python", place / "bin/python")
    run(sys.executable, "-m", "uv", *install, wheel, cwd=place)
    # A plain path is searched last and its own .pth files are not read: the editable ppdeploy stays out.
    (packages / "dependencies.pth").write_text(f"{Path(yaml.__file__).parents[1]}\n")
    # Their programs, run by this environment's Python as an install of them would be.
    for program in Path(sys.executable).parent.glob("ansible*"):
        first, _, rest = program.read_text().partition("\n")
        assert first.startswith("#!"), program
        (place / "bin" / program.name).write_text(f"#!{place / 'bin/python'}\n{rest}")
        (place / "bin" / program.name).chmod(0o755)
    return place


def test_the_wheel_has_the_files_of_the_checkout_and_no_others(clone: Path, wheel: Path) -> None:
    expected = {}
    for top in ("ppdeploy", *DATA):
        found = (clone / top).rglob("*") if (clone / top).is_dir() else [clone / top]
        for file in found:
            if file.is_file() and "__pycache__" not in file.parts:
                name = file.relative_to(clone).as_posix()
                expected[name if top == "ppdeploy" else f"ppdeploy/_data/{name}"] = file.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info" not in PurePosixPath(name).parts[0]]
        carried = {name: archive.read(name) for name in names}
    assert sorted(carried) == sorted(expected)
    assert [name for name in expected if carried[name] != expected[name]] == []


@pytest.mark.parametrize("part", DATA)
def test_the_wheel_has_every_part(wheel: Path, part: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert any(
            name == f"ppdeploy/_data/{part}" or name.startswith(f"ppdeploy/_data/{part}/")
            for name in archive.namelist()
        )


def test_an_installed_ppdeploy_runs_from_anywhere_with_its_own_files(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "bin/ppdeploy", "--version", cwd=tmp_path)
    assert said == f"ppdeploy {__version__}\n"
    code = "from ppdeploy.paths import data_root; print(data_root())"
    data = Path(run(installed / "bin/python", "-c", code, cwd=tmp_path).strip())
    assert data.is_relative_to(installed)
    assert {entry.name for entry in data.iterdir()} == {name.split("/")[0] for name in DATA}
    assert all((data / name).exists() for name in DATA)


def test_an_installed_playbook_finds_its_roles_modules_and_plugins(installed: Path, tmp_path: Path) -> None:
    (data,) = installed.glob("lib/python3*/site-packages/ppdeploy/_data")
    hosts = tmp_path / "hosts.yml"
    hosts.write_text("vllm: {hosts: {a: {ansible_host: 192.0.2.1}}}\n")
    listed = run(
        *(installed / "bin/python", "-m", "ansible.cli.playbook"),
        *("--inventory", hosts, "--list-tasks", data / "site.yml"),
        cwd=tmp_path,
        ANSIBLE_CONFIG=str(data / "ansible.cfg"),
    )
    assert "playbook: " in listed
    assert "TAGS: " in listed


def test_an_installed_ppdeploy_plans_and_renders_what_the_checkout_does(installed: Path, tmp_path: Path) -> None:
    cluster = make_cluster_on_disk(tmp_path)
    given = ("--inventory", cluster.inventory, "--facts", cluster.facts)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    theirs = run(installed / "bin/ppdeploy", "plan", *given, "--json", cwd=elsewhere)
    ours = run(sys.executable, "-m", "ppdeploy", "plan", *given, "--json", cwd=ROOT)
    assert json.loads(theirs) == json.loads(ours)
    assert {node["host"] for node in json.loads(theirs)["pipelines"][0]["nodes"]} == {"node1", "node2"}
    run(installed / "bin/ppdeploy", "render", *given, "--out", "theirs", cwd=elsewhere)
    run(sys.executable, "-m", "ppdeploy", "render", *given, "--out", elsewhere / "ours", cwd=ROOT)
    assert files_of(elsewhere / "theirs") == files_of(elsewhere / "ours") != {}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_an_editable_install_reads_the_checkout_itself() -> None:
    code = "from ppdeploy.paths import data_root; print(data_root())"
    assert run(sys.executable, "-c", code, cwd=Path(sys.prefix)) == f"{ROOT}\n"


def test_the_version_is_said_once_and_the_collection_agrees() -> None:
    galaxy = yaml.safe_load((ROOT / "galaxy.yml").read_text())
    assert galaxy["version"] == __version__


def test_every_dependency_is_pinned_to_a_version_that_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    wanted += [Requirement(text) for text in project["optional-dependencies"]["test"]]
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        # A name, `==`, a version, perhaps a marker: no address, path or option of the resolving machine.
        assert re.fullmatch(r"[a-z0-9.-]+==[\w.!+]+( ; .+)?", line), line
        pin = Requirement(line)
        pins.setdefault(_plain(pin.name), []).append(pin)
    for requirement in wanted:
        assert _plain(requirement.name) in pins, f"{requirement} has no pin: run `make constraints`"
        for pin in pins[_plain(requirement.name)]:
            (version,) = pin.specifier
            assert requirement.specifier.contains(version.version), f"{requirement} against {pin}"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_ansible_reads_the_configuration_without_complaint() -> None:
    said = run(
        *(sys.executable, "-m", "ansible.cli.config", "dump", "--only-changed", "--format", "json"),
        cwd=ROOT,
        ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"),
    )
    changed = {entry["name"]: entry["value"] for entry in json.loads(said) if "name" in entry}
    assert changed["DEFAULT_ROLES_PATH"] == [str(ROOT / "roles")]
    assert changed["DEFAULT_MODULE_PATH"] == [str(ROOT / "plugins/modules")]
    assert changed["DEFAULT_FILTER_PLUGIN_PATH"] == [str(ROOT / "plugins/filter")]
    assert changed["DEFAULT_GATHERING"] == "explicit"
    assert changed["INVENTORY_ANY_UNPARSED_IS_FAILED"] is True
    assert changed["DUPLICATE_YAML_DICT_KEY"] == "error"
