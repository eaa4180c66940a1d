"""The node's weights module: placing, verifying, repairing, pulling from a real rsync daemon, downloading."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pwd
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_weights as weights
from ppdeploy.manifest import folder_manifest, git_blob_sha1
from tests.hub_standin import HubStandin, Repository

MODULE = Path(weights.__file__)
NEEDS_RSYNC = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
BIG = "model-00001-of-00002.safetensors"


class FailedError(Exception):
    """The module's own sentence."""


def run(state: str, directory: Path, manifest: list[dict[str, Any]], **params: Any) -> dict[str, Any]:
    """Run the module as Ansible does, in a process of its own, and return its result."""
    check = params.pop("check", False)
    arguments = {
        "state": state,
        "directory": str(directory),
        "manifest": manifest,
        "_ansible_check_mode": check,
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(MODULE)],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments | params}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr + done.stdout
    result: dict[str, Any] = json.loads(done.stdout)
    if result.get("failed"):
        raise FailedError(result["msg"])
    return result


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "extra").mkdir(parents=True)
    noise = random.Random(7)  # noqa: S311  (content for files, the same in each run)
    (folder / BIG).write_bytes(noise.randbytes(3_000_000))
    (folder / "model-00002-of-00002.safetensors").write_bytes(noise.randbytes(200_000))
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "extra" / "chat template.jinja").write_text("{{ x }}")
    (folder / "empty.txt").write_bytes(b"")
    return folder


@pytest.fixture
def manifest(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    paths = [p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()]
    return folder_manifest(source, paths).entries()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "node" / "models" / "tiny-0123456789ab"


def staging_of(directory: Path) -> Path:
    return directory.with_name(directory.name + ".partial")


def push(source: Path, directory: Path) -> Path:
    """Copy the source into the staging folder, as the controller's rsync does."""
    return shutil.copytree(source, staging_of(directory), dirs_exist_ok=True)


def content(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name != weights.MANIFEST
    }


def flip(file: Path, keep_time: bool = False) -> None:
    about = file.stat()
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    if keep_time:
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


# --- verified


def test_model_is_staged_verified_and_placed(source: Path, directory: Path, manifest: list[dict[str, Any]]) -> None:
    staged = run("staged", directory, manifest)
    assert staged["changed"]
    assert not staged["present"]
    assert staged["missing_bytes"] == sum(entry["size"] for entry in manifest)
    assert Path(staged["staging"]).stat().st_uid == pwd.getpwnam(staged["owner"]).pw_uid
    push(source, directory)
    (staging_of(directory) / "left over").write_text("not in the manifest")
    done = run("verified", directory, manifest)
    assert done["changed"]
    assert done["present"]
    assert content(directory) == content(source)
    assert not staging_of(directory).exists()
    assert {p.stat().st_mode & 0o777 for p in directory.rglob("*") if p.is_file()} == {0o644}
    assert {p.stat().st_mode & 0o777 for p in (directory, directory / "extra")} == {0o755}
    record = json.loads((directory / weights.MANIFEST).read_text())
    assert record["digest"] == done["digest"]
    for item in record["files"]:
        about = (directory / item["path"]).stat()
        assert (item["size"], item["mtime_ns"], item["inode"]) == (
            about.st_size,
            about.st_mtime_ns,
            about.st_ino,
        )


def test_second_run_changes_nothing(source: Path, directory: Path, manifest: list[dict[str, Any]]) -> None:
    push(source, directory)
    run("verified", directory, manifest)
    before = {p: (p.stat().st_ino, p.stat().st_ctime_ns) for p in directory.rglob("*")}
    for state in ("fits", "staged", "verified"):
        result = run(state, directory, manifest)
        assert not result["changed"]
        assert result["present"]
    assert {p: (p.stat().st_ino, p.stat().st_ctime_ns) for p in directory.rglob("*")} == before


def test_digest_is_the_controllers(source: Path, directory: Path, manifest: list[dict[str, Any]]) -> None:
    paths = [entry["path"] for entry in manifest]
    assert run("fits", directory, manifest)["digest"] == folder_manifest(source, paths).digest


def test_check_mode_says_what_would_change_and_does_not(
    source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    for state in ("staged", "verified", "pulled"):
        assert run(state, directory, manifest, check=True, source="127.0.0.1")["changed"]
    assert not run("fits", directory, manifest, check=True)["changed"]
    assert not directory.parent.exists()
    push(source, directory)
    run("verified", directory, manifest)
    assert not run("verified", directory, manifest, check=True)["changed"]


def test_damaged_file_is_named_and_removed(source: Path, directory: Path, manifest: list[dict[str, Any]]) -> None:
    flip(push(source, directory) / BIG)
    with pytest.raises(FailedError, match=rf"{BIG} arrived damaged"):
        run("verified", directory, manifest)
    assert not directory.exists()
    assert not (staging_of(directory) / BIG).exists()
    assert (staging_of(directory) / "config.json").exists()
    push(source, directory)
    assert run("verified", directory, manifest)["present"]


def in_the_way(staging: Path, source: Path) -> None:
    """Leave behind what no transfer goes on from: a longer file, a folder, a file as a folder, a second name."""
    shutil.copytree(source, staging)
    with (staging / BIG).open("ab") as stream:
        stream.write(b"more")
    (staging / "config.json").unlink()
    (staging / "config.json").mkdir()
    (staging / "config.json" / "x").write_text("x")
    shutil.rmtree(staging / "extra")
    (staging / "extra").write_text("x")
    (staging / "empty.txt").unlink()
    os.link(source / "config.json", staging / "empty.txt")


@NEEDS_RSYNC
def test_what_lies_in_a_files_way_is_no_lasting_hindrance(
    source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    directory.parent.mkdir(parents=True)
    in_the_way(staging_of(directory), source)
    assert run("copied", directory, manifest, folder=str(source))["fetched_again"] == []
    assert content(directory) == content(source)
    shutil.rmtree(directory)
    in_the_way(staging_of(directory), source)
    run("staged", directory, manifest)
    run("received", directory, manifest, background=True, patience=2)
    subprocess.run(
        [*weights.pull_argv("rsync", 8730, None)[:5], f"{source}/", f"{staging_of(directory)}/"],
        input="".join(f"{entry['path']}\n" for entry in manifest),
        text=True,
        check=True,
    )
    assert run("waited", directory, manifest, seconds=60)["present"]
    assert content(directory) == content(source)
    run("unserved", directory, manifest)


def test_what_a_serving_node_says_of_a_placed_model_is_enough(directory: Path, manifest: list[dict[str, Any]]) -> None:
    model = weights.read_model(str(directory), manifest)
    weights.make_run_folder(model)
    weights.publish(model, {"beat": -1, "placed": True})
    done = run("waited", directory, manifest, seconds=0)
    assert (done["done"], done["changed"], done["fetched"]) == (True, False, [])
    weights.unserve(model)


def test_two_applies_at_once_do_not_lose_each_other(directory: Path, manifest: list[dict[str, Any]]) -> None:
    model = weights.read_model(str(directory), manifest)
    weights.make_run_folder(model)
    with weights.job_path(model).open("w") as stream:
        # Begun, and its number is not written yet.
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(FailedError, match="another apply has just begun to fill"):
            run("received", directory, manifest, background=True)
        stream.write("4711")
        stream.flush()
        assert weights.job_of(model) == 4711
        assert weights.job_path(model).read_text() == "4711"
    weights.unserve(model)


def test_short_file_is_named_as_such(source: Path, directory: Path, manifest: list[dict[str, Any]]) -> None:
    os.truncate(push(source, directory) / BIG, 1000)
    with pytest.raises(FailedError, match=rf"{BIG} did not arrive in full"):
        run("verified", directory, manifest)


@pytest.mark.parametrize("kind", ["link", "second name", "folder link"])
def test_what_is_no_plain_file_is_not_taken(
    source: Path, directory: Path, manifest: list[dict[str, Any]], tmp_path: Path, kind: str
) -> None:
    staged = push(source, directory)
    secret = tmp_path / "secret"
    secret.write_bytes((source / "config.json").read_bytes())
    secret.chmod(0o600)
    if kind == "folder link":
        shutil.rmtree(staged / "extra")
        (staged / "extra").symlink_to(source / "extra")
    else:
        (staged / "config.json").unlink()
        if kind == "link":
            (staged / "config.json").symlink_to(secret)
        else:
            (staged / "config.json").hardlink_to(secret)
    with pytest.raises(FailedError, match=r"arrived damaged|not arrive"):
        run("verified", directory, manifest)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (source / "extra" / "chat template.jinja").exists()


def test_git_hashes_are_checked(source: Path, directory: Path, manifest: list[dict[str, Any]]) -> None:
    by_git = [
        {"path": entry["path"], "size": entry["size"], "git_sha1": git_blob_sha1(source / entry["path"])}
        for entry in manifest
    ]
    flip(push(source, directory) / "config.json")
    with pytest.raises(FailedError, match=r"config\.json arrived damaged"):
        run("verified", directory, by_git)
    push(source, directory)
    assert run("verified", directory, by_git)["present"]


def test_bit_flip_behind_unchanged_size_and_time_is_found_by_rehash(
    source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    push(source, directory)
    run("verified", directory, manifest)
    assert not run("verified", directory, manifest, rehash=True)["changed"]
    flip(directory / BIG, keep_time=True)
    assert run("verified", directory, manifest)["present"]
    with pytest.raises(FailedError, match=rf"{BIG} in .* is not what the manifest says"):
        run("verified", directory, manifest, rehash=True)


def test_touched_model_is_hashed_again_and_damage_is_sent_anew(
    source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    push(source, directory)
    run("verified", directory, manifest)
    os.utime(directory / "config.json")
    flip(directory / BIG)
    staged = run("staged", directory, manifest)
    assert staged["missing_bytes"] == (source / BIG).stat().st_size
    shutil.copy(source / BIG, staging_of(directory) / BIG)
    assert run("verified", directory, manifest)["changed"]
    assert content(directory) == content(source)


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", ".x", "-x", "a\nb"])
def test_manifest_that_leads_elsewhere_is_refused(directory: Path, path: str) -> None:
    with pytest.raises(FailedError, match="not a plain path"):
        run("verified", directory, [{"path": path, "size": 1, "sha256": "0" * 64}])


def test_disk_too_small_names_needed_and_free(directory: Path) -> None:
    huge = [{"path": "x.safetensors", "size": 1 << 60, "sha256": "0" * 64}]
    with pytest.raises(FailedError, match=rf"has \d+ bytes free, {1 << 60} are needed"):
        run("fits", directory, huge)


def test_nothing_copied_is_a_sentence(directory: Path, manifest: list[dict[str, Any]]) -> None:
    with pytest.raises(FailedError, match="nothing was copied"):
        run("verified", directory, manifest)


# --- pulled


class Daemon:
    """An rsync daemon on loopback, with the configuration that the module writes for it."""

    def __init__(self, model: weights.Model, tmp_path: Path, peers: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._model = model
        weights.replace(weights.make_run_folder(model) / "peers", " ".join(peers))
        weights.write_list(model, [])
        weights.write_config(model)
        placed = weights.is_placed(model)
        weights.publish(model, {"placed": True} if placed else {"beat": 0})
        config = weights.config_path(model)
        self._process = subprocess.Popen(
            [
                *("rsync", "--daemon", "--no-detach", f"--config={config}", "--address=127.0.0.1"),
                *(f"--port={self.port}", f"--log-file={tmp_path / 'rsyncd.log'}"),
            ]
        )
        deadline = time.monotonic() + 10
        while not weights.greets("127.0.0.1", self.port):
            assert time.monotonic() < deadline, "the rsync daemon did not start"
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        shutil.rmtree(weights.run_folder(self._model))


def served_model(source: Path, manifest: list[dict[str, Any]]) -> weights.Model:
    """Return the source as a model that is placed."""
    model = weights.read_model(str(source), manifest)
    records, wrong = weights.check_files(source, model.entries)
    assert wrong == []
    (source / weights.MANIFEST).write_text(json.dumps({"digest": model.digest, "files": records}))
    return model


@pytest.fixture
def daemon(source: Path, manifest: list[dict[str, Any]], tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(served_model(source, manifest), tmp_path, ["127.0.0.1"])
    yield running
    running.stop()


@pytest.fixture
def link(daemon: Daemon) -> Iterator[Callable[..., Link]]:
    made = []

    def make(cuts: list[int] | None = None) -> Link:
        made.append(Link(daemon.port, cuts))
        return made[-1]

    yield make
    for each in made:
        each.close()


def pull(daemon: Daemon, directory: Path, manifest: list[dict[str, Any]], **params: Any) -> dict[str, Any]:
    return run("pulled", directory, manifest, source="127.0.0.1", port=daemon.port, address="127.0.0.1", **params)


@NEEDS_RSYNC
def test_model_is_pulled_once(daemon: Daemon, source: Path, directory: Path, manifest: list[dict[str, Any]]) -> None:
    done = pull(daemon, directory, manifest)
    assert done["changed"]
    assert content(directory) == content(source)
    assert done["fetched"] == sorted(entry["path"] for entry in manifest)
    assert done["fetched_again"] == []
    assert not pull(daemon, directory, manifest)["changed"]


class Link:
    """A TCP connection to the daemon that counts what comes back, and breaks after so many bytes, in turn."""

    def __init__(self, port: int, cuts: list[int] | None = None) -> None:
        self.received = 0
        self._target, self._cuts = port, cuts or []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            cut = self._cuts.pop(0) if self._cuts else None
            self._threads.append(threading.Thread(target=self._pass_on, args=(client, cut)))
            self._threads[-1].start()

    def _read(self, source: socket.socket) -> bytes:
        return source.recv(1 << 14)

    def _pass_on(self, client: socket.socket, cut: int | None) -> None:
        passed = 0
        server = socket.create_connection(("127.0.0.1", self._target))
        with client, server, contextlib.suppress(OSError):
            while cut is None or passed < cut:
                for source in select.select([client, server], [], [])[0]:
                    block = self._read(source)
                    if not block:
                        return
                    (server if source is client else client).sendall(block)
                    if source is server:
                        passed += len(block)
                        self.received += len(block)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


@NEEDS_RSYNC
def test_pull_goes_on_where_it_stopped(
    source: Path, directory: Path, manifest: list[dict[str, Any]], link: Callable[..., Link]
) -> None:
    staged = staging_of(directory)
    staged.mkdir(parents=True)
    (staged / BIG).write_bytes((source / BIG).read_bytes()[:-5000])
    shutil.copy(source / "config.json", staged)
    counted = link()
    done = run("pulled", directory, manifest, source="127.0.0.1", port=counted.port)
    assert "config.json" not in done["fetched"]
    assert content(directory) == content(source)
    assert 200_000 < counted.received < 300_000


@NEEDS_RSYNC
def test_broken_connections_are_gone_on_from(
    source: Path, directory: Path, manifest: list[dict[str, Any]], link: Callable[..., Link]
) -> None:
    breaking = link([1_000_000, 1_500_000])
    done = run("pulled", directory, manifest, source="127.0.0.1", port=breaking.port)
    assert done["fetched_again"] == []
    assert content(directory) == content(source)
    assert breaking.received < 3_600_000


@NEEDS_RSYNC
def test_killed_pull_goes_on_in_the_next_run(
    source: Path, directory: Path, manifest: list[dict[str, Any]], link: Callable[..., Link]
) -> None:
    # Two streams come in either order; the large file's gets as far as this.
    breaking = link([700_000, 700_000] + [0] * 100)
    with pytest.raises(FailedError, match="which goes on where it stopped"):
        run("pulled", directory, manifest, source="127.0.0.1", port=breaking.port, patience=2)
    assert not directory.exists()
    counted = link()
    assert run("pulled", directory, manifest, source="127.0.0.1", port=counted.port)["present"]
    assert content(directory) == content(source)
    assert counted.received < 2_900_000


@NEEDS_RSYNC
@pytest.mark.parametrize("kind", ["whole", "part"])
def test_damage_that_lay_here_is_fetched_again(
    daemon: Daemon, source: Path, directory: Path, manifest: list[dict[str, Any]], kind: str
) -> None:
    staged = staging_of(directory)
    staged.mkdir(parents=True)
    shutil.copy(source / BIG, staged)
    flip(staged / BIG)
    if kind == "part":
        os.truncate(staged / BIG, 2_000_000)
    done = pull(daemon, directory, manifest)
    # rsync itself finds the damage of a part, since it checks the whole file after going on.
    assert done["fetched_again"] == ([BIG] if kind == "whole" else [])
    assert content(directory) == content(source)


@NEEDS_RSYNC
def test_source_that_is_damaged_itself_is_named(
    daemon: Daemon, source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    flip(source / BIG)
    with pytest.raises(FailedError, match=rf"{BIG} arrived damaged twice"):
        pull(daemon, directory, manifest)
    assert not directory.exists()
    flip(source / BIG)
    assert pull(daemon, directory, manifest)["fetched"] == [BIG]


@NEEDS_RSYNC
def test_placed_model_that_was_touched_is_repaired(
    daemon: Daemon, source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    pull(daemon, directory, manifest)
    flip(directory / BIG)
    done = pull(daemon, directory, manifest)
    assert done["fetched"] == [BIG]
    assert content(directory) == content(source)


@NEEDS_RSYNC
def test_daemon_gives_nothing_else_and_takes_nothing(daemon: Daemon, source: Path, tmp_path: Path) -> None:
    url = f"rsync://127.0.0.1:{daemon.port}/weights/"
    listing = subprocess.run(["rsync", f"rsync://127.0.0.1:{daemon.port}/"], capture_output=True, check=True)
    assert listing.stdout == b""
    out = subprocess.run(
        ["rsync", f"{url}../source/config.json", str(tmp_path / "out")], capture_output=True, check=False
    )
    assert out.returncode != 0
    put = subprocess.run(["rsync", str(MODULE), url], capture_output=True, text=True, check=False)
    assert "read only" in put.stderr
    assert not (source / MODULE.name).exists()


@NEEDS_RSYNC
def test_stranger_is_not_answered(
    source: Path, directory: Path, manifest: list[dict[str, Any]], tmp_path: Path
) -> None:
    daemon = Daemon(served_model(source, manifest), tmp_path, ["192.0.2.1"])
    try:
        with pytest.raises(
            FailedError,
            match=r"cannot be fetched from 127\.0\.0\.1 \(@ERROR: .*which goes on where it stopped",
        ):
            pull(daemon, directory, manifest, patience=1)
    finally:
        daemon.stop()


@NEEDS_RSYNC
def test_unreachable_source_is_named(directory: Path, manifest: list[dict[str, Any]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(FailedError, match=r"cannot be fetched from 127\.0\.0\.1 \(.*Connection refused"):
        run("pulled", directory, manifest, source="127.0.0.1", port=port, patience=1)


@NEEDS_RSYNC
def test_two_runs_do_not_write_into_each_other(
    daemon: Daemon, source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    held = weights.lock(weights.read_model(str(directory), manifest))
    arguments = {"state": "pulled", "directory": str(directory), "manifest": manifest, "source": "127.0.0.1"}
    late = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(MODULE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert late.stdin is not None
    late.stdin.write(json.dumps({"ANSIBLE_MODULE_ARGS": arguments | {"port": daemon.port}}))
    late.stdin.close()
    time.sleep(2)
    assert late.poll() is None
    assert not any(staging_of(directory).iterdir())
    os.close(held)
    assert late.stdout is not None
    assert json.loads(late.stdout.read())["changed"]
    late.stdout.close()
    late.wait()
    assert content(directory) == content(source)


# --- served (the unit itself is tested in the lab)


def test_unit_is_shut_off_from_all_but_the_peers(directory: Path, manifest: list[dict[str, Any]]) -> None:
    model = weights.read_model(str(directory), manifest)
    params = {
        "address": "192.0.2.11",
        "peers": ["192.0.2.12", "192.0.2.13"],
        "port": 8730,
        "serve_seconds": 60,
    }
    argv = weights.serve_argv(model, Path("/run/x.conf"), params, "/usr/bin/rsync")
    assert "IPAddressDeny=any" in argv
    assert "IPAddressAllow=192.0.2.11 192.0.2.12 192.0.2.13" in argv
    assert "RuntimeMaxSec=60" in argv
    assert argv[-5:] == [
        "--daemon",
        "--no-detach",
        "--config=/run/x.conf",
        "--address=192.0.2.11",
        "--port=8730",
    ]
    assert "hosts allow = 192.0.2.12\n" in weights.daemon_config(model, ["192.0.2.12"])


def test_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(weights.WeightsError, match="in use"):
        weights.check_port("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(weights.WeightsError, match="Cannot assign"):
        weights.check_port("192.0.2.1", 8730)


# --- downloaded


@pytest.fixture
def hub(source: Path) -> Iterator[HubStandin]:
    repositories = {
        "org/tiny": Repository(source),
        "org/gated": Repository(source, token="hf_right", gated=True),
    }
    with HubStandin(repositories) as running:
        yield running


def hub_manifest(source: Path) -> list[dict[str, Any]]:
    """Return the manifest as the hub gives it: git's hash for small files."""
    entries = []
    for path in sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file()):
        file = source / path
        large = path.endswith(".safetensors")
        named = (
            {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()} if large else {"git_sha1": git_blob_sha1(file)}
        )
        entries.append({"path": path, "size": file.stat().st_size} | named)
    return entries


def download(hub: HubStandin, directory: Path, source: Path, repo: str = "org/tiny", **params: Any) -> dict[str, Any]:
    defaults = {
        "repository": repo,
        "commit": hub.repositories[repo].commit,
        "endpoint": hub.endpoint,
        "python": sys.executable,
        # The test's own Python may lie where nobody else can read it; the lab downloads as nobody.
        "user": pwd.getpwuid(os.geteuid()).pw_name,
    }
    return run("downloaded", directory, hub_manifest(source), **(defaults | params))


def test_model_is_downloaded_at_its_commit(hub: HubStandin, source: Path, directory: Path) -> None:
    (source / "README.md").write_text("not in the manifest")
    commit = hub.repositories["org/tiny"].commit
    manifest = [entry for entry in hub_manifest(source) if entry["path"] != "README.md"]
    done = run(
        "downloaded",
        directory,
        manifest,
        repository="org/tiny",
        commit=commit,
        endpoint=hub.endpoint,
        python=sys.executable,
        user=pwd.getpwuid(os.geteuid()).pw_name,
    )
    assert done["changed"]
    assert set(content(directory)) == {entry["path"] for entry in manifest}
    assert all(f"/resolve/{commit}/" in r.path or r.path.startswith("/store/") for r in hub.requests)


def enlarge(source: Path) -> int:
    """Make the large file longer than the client's blocks of 10 MiB, by which it goes on; return its size."""
    with (source / BIG).open("ab") as stream:
        stream.truncate(25_000_000)
    return 25_000_000


def test_cut_connections_are_gone_on_from(hub: HubStandin, source: Path, directory: Path) -> None:
    size = enlarge(source)
    hub.cuts[BIG] = [11_000_000, 11_000_000]
    assert download(hub, directory, source)["fetched_again"] == []
    assert content(directory) == content(source)
    ranges = [r.range for r in hub.requests if r.path.endswith(BIG) and r.method == "GET"]
    assert ranges == [None, f"bytes={10 << 20}-", f"bytes={20 << 20}-"]
    assert hub.sent_of(BIG) < size + 2_000_000


def test_download_that_gave_up_goes_on_in_the_next_run(hub: HubStandin, source: Path, directory: Path) -> None:
    size = enlarge(source)
    # Six breaks without a byte between them end the client; what came before the first stays.
    hub.cuts[BIG] = [11_000_000] + [0] * 7
    with pytest.raises(FailedError, match="which goes on where it stopped"):
        download(hub, directory, source)
    assert not directory.exists()
    hub.cuts.clear()
    sent = hub.sent_of(BIG)
    assert download(hub, directory, source)["present"]
    assert hub.sent_of(BIG) - sent == size - (10 << 20)
    assert content(directory) == content(source)


def test_mirror_that_sends_other_content_is_found(hub: HubStandin, source: Path, directory: Path) -> None:
    damaged = bytearray((source / BIG).read_bytes())
    damaged[1000] ^= 1
    hub.damaged[BIG] = bytes(damaged)
    with pytest.raises(FailedError, match=rf"{BIG} arrived damaged twice"):
        download(hub, directory, source)
    hub.damaged.clear()
    assert download(hub, directory, source)["fetched"] == [BIG]


def test_gated_repository_needs_its_token(hub: HubStandin, source: Path, directory: Path) -> None:
    with pytest.raises(FailedError, match="org/gated is gated: accept its terms there"):
        download(hub, directory, source, "org/gated")
    with pytest.raises(FailedError, match=r"refused the token \(HTTP 401\)") as caught:
        download(hub, directory, source, "org/gated", token="hf_wrong")
    assert "hf_wrong" not in str(caught.value)
    assert download(hub, directory, source, "org/gated", token="hf_right")["present"]
    assert {r.token for r in hub.requests if r.path.startswith("/store/")} == {None}
    leaks = [p for p in directory.parent.rglob("*") if p.is_file() and b"hf_right" in p.read_bytes()]
    assert leaks == []


@NEEDS_RSYNC
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_full_half_way_is_named_whoever_writes(
    hub: HubStandin, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "RESERVE", -(10**9))
    params = {
        "repository": "org/tiny",
        "commit": hub.repositories["org/tiny"].commit,
        "endpoint": hub.endpoint,
        "python": sys.executable,
        "user": "root",
        "token": None,
        "no_proxy": ["127.0.0.1"],
        "ca_bundle": None,
    }
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=True)
    try:
        model = weights.read_model(str(small / "models" / "tiny"), hub_manifest(source))
        told = rf"cannot be written to {model.staging} on .*No space left on device.*: see to the disk there"
        for proxy in (None, "http://127.0.0.1:9"):
            given = {**params, "proxy": proxy}
            with pytest.raises(weights.WeightsError, match=told):
                weights.gather(model, functools.partial(weights.download, given, model))
        with pytest.raises(weights.WeightsError, match=told):
            weights.gather(model, weights.Copy(str(source), model, "rsync"))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_absent_commit_is_a_sentence(hub: HubStandin, source: Path, directory: Path) -> None:
    with pytest.raises(FailedError, match="has no commit 0000"):
        download(hub, directory, source, commit="0" * 40)


def test_python_without_the_client_is_named(hub: HubStandin, source: Path, directory: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    with pytest.raises(FailedError, match="has no huggingface_hub"):
        download(hub, directory, source, python=str(tmp_path / "bare" / "bin" / "python"))
