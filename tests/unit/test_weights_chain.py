"""A chain of nodes hands a model on while it arrives: only what was checked, around dead nodes, in the background."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_weights as weights
from ppdeploy.manifest import folder_manifest
from tests.unit.test_weights import NEEDS_RSYNC, Daemon, FailedError, Link, content, flip, run, served_model, staging_of

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "extra").mkdir(parents=True)
    noise = random.Random(11)  # noqa: S311  (content for files, the same in each run)
    for name in (FIRST, SECOND, "extra/template.jinja"):
        (folder / name).write_bytes(noise.randbytes(300_000))
    return folder


@pytest.fixture
def manifest(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    return folder_manifest(source, [FIRST, SECOND, "extra/template.jinja"]).entries()


@contextmanager
def serving(model: weights.Model, folder: Path) -> Iterator[Daemon]:
    folder.mkdir(exist_ok=True)
    daemon = Daemon(model, folder, ["127.0.0.1"])
    try:
        yield daemon
    finally:
        daemon.stop()


def asking(daemon: Daemon, **more: Any) -> dict[str, Any]:
    return {"address": "127.0.0.1", "port": daemon.port, "source": "127.0.0.1", "sources": [], "patience": 20, **more}


def rsync() -> str:
    found = shutil.which("rsync")
    assert found
    return found


def until(said: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@NEEDS_RSYNC
def test_a_node_hands_on_what_it_has_checked_while_the_rest_arrives(
    source: Path, manifest: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The node between gets its files one after the other; the last node has the first before the second is sent."""
    between = weights.read_model(str(tmp_path / "between" / "tiny"), manifest)
    last = weights.read_model(str(tmp_path / "last" / "tiny"), manifest)
    go_on = threading.Event()

    def arrive(entries: list[weights.Entry], _held: int) -> None:
        for entry in sorted(entries, key=lambda entry: entry.path == SECOND):
            if entry.path == SECOND:
                go_on.wait(60)
            target = between.staging / entry.path
            weights.make_folder(target.parent)
            # Whole, and not finished yet: it is not handed on before its mode says so.
            target.write_bytes((source / entry.path).read_bytes())
            target.chmod(0o644)

    with serving(between, tmp_path / "daemon") as daemon:
        threads = [
            threading.Thread(target=weights.gather, args=(between, arrive)),
            threading.Thread(target=weights.gather, args=(last, weights.Pull(asking(daemon), last, rsync()))),
        ]
        for thread in threads:
            thread.start()
        try:
            until(lambda: (last.staging / FIRST).exists() and (last.staging / "extra/template.jinja").exists())
            assert not last.directory.exists()
            assert not (between.staging / SECOND).exists()
        finally:
            go_on.set()
            for thread in threads:
                thread.join()
    assert content(last.directory) == content(between.directory) == content(source)


@NEEDS_RSYNC
def test_damage_is_not_handed_on(source: Path, manifest: list[dict[str, Any]], tmp_path: Path) -> None:
    between = weights.read_model(str(tmp_path / "between" / "tiny"), manifest)
    shutil.copytree(source, between.staging)
    flip(between.staging / FIRST)
    with serving(between, tmp_path / "daemon") as daemon, weights.Watch(between) as watch:
        until(lambda: set(watch.records) == {SECOND, "extra/template.jinja"})
        argv = ["rsync", "-r", f"rsync://127.0.0.1:{daemon.port}/weights/", str(tmp_path / "got")]
        subprocess.run(argv, check=True, capture_output=True)
    assert set(content(tmp_path / "got")) == {SECOND, "extra/template.jinja"}


@NEEDS_RSYNC
def test_around_a_dead_node_the_rest_comes_from_the_first(
    source: Path, manifest: list[dict[str, Any]], tmp_path: Path
) -> None:
    last = weights.read_model(str(tmp_path / "last" / "tiny"), manifest)
    with serving(served_model(source, manifest), tmp_path / "daemon") as daemon:
        # Nobody answers on the second loopback address.
        dead = [{"address": "127.0.0.2", "paths": [FIRST, SECOND]}]
        weights.gather(last, weights.Pull(asking(daemon, sources=dead, patience=1, address=None), last, rsync()))
    assert content(last.directory) == content(source)


@NEEDS_RSYNC
def test_what_the_node_before_failed_by_is_told(manifest: list[dict[str, Any]], tmp_path: Path) -> None:
    before = weights.read_model(str(tmp_path / "before" / "tiny"), manifest)
    before.staging.mkdir(parents=True)
    last = weights.read_model(str(tmp_path / "last" / "tiny"), manifest)
    with serving(before, tmp_path / "daemon") as daemon:
        weights.publish(before, {"beat": -1, "failed": "the disk is full"})
        with pytest.raises(weights.WeightsError, match="could not get them itself: the disk is full"):
            weights.gather(last, weights.Pull(asking(daemon), last, rsync()))


@NEEDS_RSYNC
def test_a_node_that_still_waits_itself_is_waited_for(manifest: list[dict[str, Any]], tmp_path: Path) -> None:
    """Longer than anybody's patience: a slow line to the hub is no reason to give up, a node that says nothing is."""
    before = weights.read_model(str(tmp_path / "before" / "tiny"), manifest)
    before.staging.mkdir(parents=True)
    last = weights.read_model(str(tmp_path / "last" / "tiny"), manifest)
    with serving(before, tmp_path / "daemon") as daemon:
        pull = weights.Pull(asking(daemon, patience=2), last, rsync())
        with weights.Watch(before):
            failed: list[Exception] = []

            def gather() -> None:
                try:
                    weights.gather(last, pull)
                except weights.WeightsError as error:
                    failed.append(error)

            thread = threading.Thread(target=gather)
            thread.start()
            time.sleep(5)
            assert thread.is_alive(), failed
        thread.join()
    assert "cannot be fetched from 127.0.0.1" in str(failed[0])


@NEEDS_RSYNC
@pytest.mark.parametrize("how", ["killed", "cut"])
def test_at_ten_random_points_it_goes_on_and_ends_whole(
    source: Path, manifest: list[dict[str, Any]], tmp_path: Path, how: str
) -> None:
    """The process and its rsync are killed, or the connection is cut, after a random number of bytes."""
    chance = random.Random(how)  # noqa: S311  (the same points in each run)
    size = sum(entry["size"] for entry in manifest)
    with serving(served_model(source, manifest), tmp_path / "daemon") as daemon:
        for point in range(10):
            last = weights.read_model(str(tmp_path / f"last-{point}" / "tiny"), manifest)
            after = chance.randrange(1, size * 9 // 10)
            link = SlowLink(daemon.port, [after // weights.STREAMS] * weights.STREAMS if how == "cut" else None)
            try:
                pull = weights.Pull(asking(daemon, port=link.port), last, rsync())
                if how == "killed":
                    kill_after(last, pull, after)
                    assert not last.directory.exists()
                weights.gather(last, pull)
            finally:
                link.close()
            assert content(last.directory) == content(source), f"point {point}, after {after} bytes"
            assert link.received < 1.5 * size


class SlowLink(Link):
    """One on which a transfer takes long enough to be disturbed."""

    def _read(self, source: socket.socket) -> bytes:
        time.sleep(0.002)
        return super()._read(source)


def kill_after(model: weights.Model, pull: weights.Pull, count: int) -> None:
    """Fetch in a process of its own, and kill it with its rsync once so many bytes have arrived."""
    child = os.fork()
    if not child:
        os.setsid()
        with contextlib.suppress(Exception):
            weights.gather(model, pull)
        os._exit(0)
    until(lambda: sum(weights.staged_bytes(model, entry) for entry in model.entries) >= count)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def background(state: str, directory: Path, manifest: list[dict[str, Any]], **params: Any) -> weights.Model:
    run(state, directory, manifest, background=True, **params)
    return weights.read_model(str(directory), manifest)


def test_in_the_background_it_tells_how_far_it_is_and_what_became_of_it(
    source: Path, manifest: list[dict[str, Any]], tmp_path: Path
) -> None:
    directory = tmp_path / "node" / "tiny"
    model = background("received", directory, manifest)
    try:
        shutil.copy(source / FIRST, staging_of(directory))
        (staging_of(directory) / FIRST).chmod(0o644)
        until(lambda: (weights.read_state(model) or {}).get("checked") == 1)
        told = run("waited", directory, manifest, seconds=1)
        assert (told["done"], told["changed"], told["here_bytes"]) == (False, False, 300_000)
        assert told["progress"].startswith("0.00 of 0.00 GB (33 %)")
        shutil.copytree(source, staging_of(directory), dirs_exist_ok=True)
        for path in staging_of(directory).rglob("*.*"):
            path.chmod(0o644)
        told = run("waited", directory, manifest, seconds=60)
        assert (told["done"], told["changed"], told["present"]) == (True, True, True)
        assert content(directory) == content(source)
        assert not run("received", directory, manifest, background=True)["changed"]
        assert not run("waited", directory, manifest)["changed"]
    finally:
        weights.unserve(model)
    assert not weights.run_folder(model).exists()


def test_killed_in_the_background_it_says_so_and_the_next_one_goes_on(
    source: Path, manifest: list[dict[str, Any]], tmp_path: Path
) -> None:
    directory = tmp_path / "node" / "tiny"
    model = background("received", directory, manifest)
    try:
        job = weights.job_of(model)
        assert job
        shutil.copy(source / FIRST, staging_of(directory))
        os.killpg(job, signal.SIGKILL)
        with pytest.raises(FailedError, match="ended without a word: run it again"):
            run("waited", directory, manifest)
        background("received", directory, manifest)
        job = weights.job_of(model)
        assert job
        assert (staging_of(directory) / FIRST).exists()
        # One of an apply that is gone is ended by the next.
        background("received", directory, manifest)
        assert weights.job_of(model) not in (None, job)
    finally:
        weights.unserve(model)
    assert weights.job_of(model) is None


def test_a_controller_that_falls_silent_is_named(manifest: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"nothing came from the controller for 5 s, and .* did not arrive in full"):
        run("received", tmp_path / "node" / "tiny", manifest, patience=1)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"beat": 0}, "looking at what is there"),
        (
            {"total": 60_000_000_000, "here": 12_000_000_000, "rate": 100e6, "checked": 2, "files": 12},
            "12.00 of 60.00 GB (20 %), 100.0 MB/s, 8 min left",
        ),
        ({"total": 10, "here": 0, "rate": 0.0, "checked": 0, "files": 1}, "0.00 of 0.00 GB (0 %), 0.0 MB/s"),
        (
            {"total": 5_000_000_000, "here": 5_000_000_000, "rate": 9.0, "checked": 3, "files": 4},
            "all 5.00 GB here, 3 of 4 files checked",
        ),
    ],
)
def test_how_far_it_is_in_words(state: dict[str, Any], said: str) -> None:
    assert weights.progress_of(state) == said


def test_times_in_words() -> None:
    assert [weights.duration(seconds) for seconds in (7, 600, 7200)] == ["7 s", "10 min", "2.0 h"]
