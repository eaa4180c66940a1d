"""The NVIDIA driver of a bundle: its manifest, what apt and dnf are given, and what a plan is told of it.

Package managers are stood in for here; `tests/lab/test_driver_bundle.py` has the real apt, against a signed repository.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.bundle import Bundle, DriverWish, apt, dnf, driver, driver_apt, make_bundle, open_bundle, verify_bundle
from ppdeploy.bundle import make as making
from ppdeploy.bundle.driver_repository import Repository
from ppdeploy.errors import InputError
from ppdeploy.plan.checks import NODE
from ppdeploy.plan.checks.situate import situation
from ppdeploy.play import driver_slice, wheelhouse_of
from ppdeploy.spec import BundledDriver, PipelineSpec, Wheelhouse
from tests.factories import make_facts
from tests.factories_driver import bare, plan
from tests.factories_plan import make_pipeline_spec
from tests.wheels import Shelf

KERNEL = "6.1.0-41-amd64"
WANTED = BundledDriver(
    system="debian 12",
    machine="x86_64",
    manager="apt",
    source="nvidia",
    branch=580,
    kernels=(KERNEL,),
    names=(f"linux-headers-{KERNEL}", "nvidia-open"),
)
BASE = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64"
REPOSITORY = Repository(
    address="http://mirror.example/cuda/debian12/x86_64", also=BASE, preferences="Package: *nvidia*\n"
)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """All wheels of a lock, for which no pip has to run."""
    made = Shelf(tmp_path / "shelf", uv=b"#!/bin/sh\n")
    monkeypatch.setattr(making, "uv_wheel", lambda _: made.uv)
    return made


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[BundledDriver]:
    """Drivers that were fetched: of each, one package and its index."""
    calls: list[BundledDriver] = []

    def fetch(wanted: BundledDriver, optional: Sequence[str], _: Any, folder: Path) -> tuple[str, ...]:
        calls.append(wanted)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "nvidia-open_580.95.05-1_amd64.deb").write_bytes(f"deb {len(calls)}".encode())
        (folder / "Packages").write_text("Package: nvidia-open\n")
        return (*wanted.names, *optional)

    monkeypatch.setattr(driver_apt, "fetch", fetch)
    return calls


def made(shelf: Shelf, out: Path, wish: DriverWish | None) -> Bundle:
    partial = out.with_name(f"{out.name}.partial") / "wheels"
    if not out.exists() and not partial.exists():
        shutil.copytree(shelf.links, partial)
    return make_bundle(shelf.lock(), out, driver=wish)


def test_a_driver_lies_in_a_folder_of_its_own_and_stays_in_the_bundle(
    shelf: Shelf, tmp_path: Path, fetched: list[BundledDriver]
) -> None:
    out = tmp_path / "out"
    bundle = made(shelf, out, DriverWish(WANTED, ("linux-headers-amd64",)))
    assert bundle.driver == WANTED.model_copy(update={"names": (*WANTED.names, "linux-headers-amd64")})
    paths = {file.path for file in bundle.files}
    assert paths >= {"driver/Packages", "driver/nvidia-open_580.95.05-1_amd64.deb"}
    verify_bundle(open_bundle(out))
    # Nothing of it is asked for: nothing is fetched.
    assert make_bundle([shelf.lock(), shelf.lock(name="vllm-cpu-0.32.0-other", installed_bytes=2)], out).driver == (
        bundle.driver
    )
    assert len(fetched) == 1
    verify_bundle(open_bundle(out))
    # What is asked for comes anew, since the branch goes on, and with another kernel.
    assert made(shelf, out, DriverWish(WANTED)).driver == WANTED
    assert (out / "driver" / "nvidia-open_580.95.05-1_amd64.deb").read_bytes() == b"deb 2"
    more = WANTED.model_copy(update={"kernels": (KERNEL, "6.1.0-42-amd64")})
    assert made(shelf, out, DriverWish(more)).driver == more
    assert (out / "driver" / "nvidia-open_580.95.05-1_amd64.deb").read_bytes() == b"deb 3"
    verify_bundle(open_bundle(out))


def test_what_an_interrupted_run_left_of_a_driver_is_in_no_bundle(
    shelf: Shelf, tmp_path: Path, fetched: list[BundledDriver]
) -> None:
    out = tmp_path / "out"
    made(shelf, out, DriverWish(WANTED))
    for name in ("driver/nvidia-open_580.95.05-1_amd64.deb", "driver/stray_1_amd64.deb", "driver.dnf/files/x.rpm"):
        left = tmp_path / "out.partial" / name
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_bytes(b"of another run")
    make_bundle([shelf.lock(), shelf.lock(name="vllm-cpu-0.32.0-other", installed_bytes=2)], out)
    assert {path.name for path in (out / "driver").iterdir()} == {"Packages", "nvidia-open_580.95.05-1_amd64.deb"}
    assert not (out / "driver.dnf").exists()
    verify_bundle(open_bundle(out))
    assert len(fetched) == 1


@pytest.mark.usefixtures("fetched")
def test_a_driver_comes_to_a_relative_folder(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(shelf.links, tmp_path / "out.partial" / "wheels")
    monkeypatch.chdir(tmp_path)
    seen: list[Path] = []
    fetch = driver_apt.fetch

    def watched(wanted: BundledDriver, optional: Sequence[str], repository: Any, folder: Path) -> tuple[str, ...]:
        seen.append(folder)
        return fetch(wanted, optional, repository, folder)

    monkeypatch.setattr(driver_apt, "fetch", watched)
    assert make_bundle(shelf.lock(), Path("out"), driver=DriverWish(WANTED)).path == tmp_path / "out"
    assert seen == [tmp_path / "out.partial" / "driver"]


@pytest.mark.usefixtures("fetched")
def test_a_bundle_that_was_made_before_there_were_drivers_opens(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(shelf, out, None)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest.pop("driver") is None
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert open_bundle(out).driver is None
    assert wheelhouse_of(site(out)) == Wheelhouse()
    # A driver is added to it, and nothing else is fetched.
    assert made(shelf, out, DriverWish(WANTED)).driver == WANTED


@pytest.mark.usefixtures("fetched")
def test_a_manifest_that_names_a_driver_without_its_files_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(shelf, out, DriverWish(WANTED))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["files"] = [file for file in manifest["files"] if not file["path"].startswith("driver/")]
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"manifest\.json names a driver, and no file of it .*make it with"):
        open_bundle(out)


# ---- apt -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A machine's own files of apt, which has NVIDIA's repository by its own key, and pins its branch."""
    folder = tmp_path / "etc"
    texts = {
        "sources/debian.sources": "URIs: http://archive.example/debian\n",
        "sources/cuda-debian12.list": f"deb [signed-by=/usr/share/keyrings/cuda.gpg] {BASE}/ /\n",
        "sources/mirror.sources": f"URIs: {REPOSITORY.address}\n",
        "sources/several.list": f"deb {REPOSITORY.address} /\ndeb http://tools.example/apt stable main\n",
        "sources/several.sources": f"URIs: {BASE}/\nSuites: /\n\nURIs: http://more.example/\nSuites: /\n",
        "sources.list": f"deb {BASE}/ /\ndeb http://main.example/apt stable main\n",
        "preferences/site": "Package: *\n",
        "preferences/ppdeploy-nvidia": "Pin: version 570.*\n",
        "lists/archive.example_debian_Packages": "Package: gcc\n",
        "lists/mirror.example_cuda_debian12_x86_64_Packages": "Package: nvidia-open\n",
        "lists/lock": "",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Apt:
    """Stands in for apt's programs: notes what they are given, and the folders that they see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, own: Path, version: str = "580.95.05-1") -> None:
        self.own = own
        self.version = version
        self.run: list[list[str]] = []
        self.seen: dict[str, dict[str, str]] = {}
        self.main = ""
        monkeypatch.setattr(apt, "run", self)

    def __call__(self, command: list[str]) -> str:
        self.run.append(command)
        options = dict(word.split("=", 1) for word in command if re.match("(Dir|APT)::.*=", word))
        if command[0] == "apt-config":
            names = ("sources/", "preferences/", "lists/", "sources.list")
            return "".join(f"P{n}='{self.own}/{name}'\n" for n, name in enumerate(names))
        if "indextargets" in command:
            return "Debian\tmain\nDebian\tcontrib\n\tmain\n"
        if "policy" in command:
            return "Candidate: 1\n" if command[-1] == "linux-headers-amd64" else ""
        if command[-1] == "update":
            for name in ("Dir::Etc::preferencesparts", "Dir::State::lists"):
                self.seen[name] = {p.name: p.read_text() for p in Path(options[name]).iterdir() if p.is_file()}
            source = Path(options["Dir::Etc::sourcelist"])
            self.seen["sources"] = {path.name: path.read_text() for path in source.parent.iterdir()}
        if "install" in command:
            self.main = Path(options["Dir::Etc::sourcelist"]).read_text()
            name = f"nvidia-open_{self.version}_amd64.deb"
            Path(options["Dir::Cache::archives"], name).write_bytes(b"deb")
        return "Package: nvidia-open\n"


def mirrored(tmp_path: Path) -> Repository:
    key = tmp_path / "mirror.asc"
    key.write_text("the mirror's key")
    return replace(REPOSITORY, key=key)


def test_apt_knows_the_repository_beside_this_machines_own_and_by_the_right_key_alone(
    monkeypatch: pytest.MonkeyPatch, own: Path, tmp_path: Path
) -> None:
    programs = Apt(monkeypatch, own)
    names = driver_apt.fetch(WANTED, ("linux-headers-amd64", "linux-headers-none"), mirrored(tmp_path), tmp_path / "d")
    assert names == (*WANTED.names, "linux-headers-amd64")
    sources = programs.seen["sources"]
    # Of one that names it beside others, these stay: two keys of one repository are no list of sources to apt.
    assert sorted(sources) == ["debian.sources", "several.list", "several.sources", "zz-ppdeploy-nvidia.list"]
    assert sources["several.list"] == "deb http://tools.example/apt stable main\n"
    assert sources["several.sources"].split() == ["URIs:", "http://more.example/", "Suites:", "/"]
    assert sources["zz-ppdeploy-nvidia.list"].endswith(f"/key.asc] {REPOSITORY.address} /\n")
    assert sorted(programs.seen["Dir::Etc::preferencesparts"]) == ["00-ppdeploy-nvidia", "site"]
    assert sorted(programs.seen["Dir::State::lists"]) == ["archive.example_debian_Packages"]
    update, install = (run for run in programs.run if run[-1] == "update" or "install" in run)
    # Only this source is read anew, and no list that is there is removed for it.
    assert {"Dir::Etc::sourceparts=-", "APT::Get::List-Cleanup=0", "Dir::Cache::pkgcache="} <= set(update)
    assert install[-4:] == ["install", *names]
    assert "--download-only" in install
    assert programs.main == "deb http://main.example/apt stable main\n"
    # What was made for it is gone, and this machine's own is as it was.
    parts = next(word for word in install if word.startswith("Dir::Etc::sourceparts=")).partition("=")[2]
    assert not Path(parts).exists()
    assert len(list(own.rglob("*"))) == 3 + 11


def test_nvidias_own_key_is_in_a_package_that_is_known_by_its_hash(
    monkeypatch: pytest.MonkeyPatch, own: Path, tmp_path: Path
) -> None:
    programs = Apt(monkeypatch, own)
    url = f"{BASE}/cuda-keyring_1.1-1_all.deb"
    repository = replace(REPOSITORY, keyring=url, keyring_sha256="ab" * 32)
    with pytest.raises(InputError, match="has no key"):
        driver_apt.fetch(WANTED, (), repository, tmp_path / "d")
    (fetch,) = (run for run in programs.run if run[0].endswith("/apt-helper"))
    assert (fetch[1], fetch[2], fetch[4]) == ("download-file", url, f"SHA256:{'ab' * 32}")
    assert not any("update" in run for run in programs.run)


def test_a_branch_that_the_repository_lacks_is_told(monkeypatch: pytest.MonkeyPatch, own: Path, tmp_path: Path) -> None:
    Apt(monkeypatch, own, version="610.57.04-1")
    with pytest.raises(InputError, match=r"has no branch 580, its nvidia-open is 610\.57\.04-1 \(--nvidia-branch\)"):
        driver_apt.fetch(WANTED, (), mirrored(tmp_path), tmp_path / "d")


def test_debian_without_contrib_is_refused_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shelf: Shelf
) -> None:
    # Anybody may call a component of theirs contrib.
    answers = {"indextargets": "Debian\tmain\nOracle\tcontrib\n"}
    monkeypatch.setattr(apt, "run", lambda command: answers[command[1]])
    monkeypatch.setattr(making, "fetch", lambda *_, **__: pytest.fail("pip was run"))
    with pytest.raises(InputError, match=r"contrib is off here.*add `contrib` behind `main`.*`apt-get update`"):
        make_bundle(shelf.lock(), tmp_path / "out", driver=DriverWish(WANTED, repository=REPOSITORY))


@pytest.mark.parametrize(
    ("kernel", "known", "flavours"),
    [
        ("6.1.0-41-amd64", ["linux-image-amd64"], ["amd64"]),
        ("6.1.0-41-cloud-amd64", ["linux-image-cloud-amd64", "linux-image-amd64"], ["cloud-amd64"]),
        ("6.12.57+deb13-amd64", ["linux-image-6.12.57+deb13-amd64"], ["amd64"]),
        (
            "6.14.0-37-generic",
            ["linux-image-generic-hwe-24.04", "linux-image-6.14.0-37-generic"],
            ["generic-hwe-24.04"],
        ),
        ("6.8.0-90-generic", [], ["generic"]),
    ],
)
def test_metapackages_are_those_of_this_machine_or_as_the_kernel_ends(
    monkeypatch: pytest.MonkeyPatch, kernel: str, known: list[str], flavours: list[str]
) -> None:
    monkeypatch.setattr(apt, "run", lambda _: "\n".join(known))
    assert driver_apt.flavours([kernel]) == flavours


# ---- dnf -------------------------------------------------------------------------------------------------------------

ROCKY = WANTED.model_copy(
    update={
        "system": "rocky 9",
        "manager": "dnf",
        "names": (
            "kernel-devel-5.14.0-611.5.1.el9_7.x86_64",
            "kernel-devel-matched-5.14.0-611.5.1.el9_7.x86_64",
            "kernel-headers",
            "nvidia-open-580.*",
        ),
    }
)


@pytest.fixture
def rpms(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[list[str]]]:
    """Stands in for dnf and createrepo_c; the repository has nvidia-open of the version that is told."""

    def tell(version: str) -> list[list[str]]:
        asked: list[list[str]] = []

        def run(command: list[str]) -> str:
            asked.append(command)
            if "install" in command:
                files = Path(next(word for word in command if "destdir=" in word).partition("destdir=")[2])
                files.mkdir()
                (files / f"nvidia-open-{version}.noarch.rpm").write_bytes(b"rpm")
            return "4.14.0\n"

        monkeypatch.setattr(dnf, "run", run)
        monkeypatch.setattr(dnf, "STREAMS", Path("/nowhere"))
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        return asked

    return tell


@pytest.mark.parametrize("mirror", [False, True])
def test_dnf_knows_the_repository_for_this_once_and_checks_it_by_its_key(
    tmp_path: Path, rpms: Callable[[str], list[list[str]]], mirror: bool
) -> None:
    asked = rpms("580.95.05-1.el9")
    base = "https://developer.download.nvidia.com/compute/cuda/repos/rhel9/x86_64"
    repository = Repository(address=base, also=base, preferences="", keyring=f"{base}/D42D0685.pub")
    if mirror:
        repository = replace(mirrored(tmp_path), address="http://mirror.example/cuda/rhel9/x86_64")
    found = driver.fetch_driver(DriverWish(ROCKY, repository=repository), tmp_path, lambda _: None)
    assert found == ROCKY
    (command,) = (one for one in asked if "install" in one)
    assert command[-5:] == ["install", *ROCKY.names]
    assert f"--repofrompath=ppdeploy-bundle-nvidia,{repository.address}" in command
    key = (tmp_path / "mirror.asc").as_uri() if mirror else f"{base}/D42D0685.pub"
    for setting in ("gpgcheck=1", f"gpgkey={key}", "module_hotfixes=1"):
        assert f"--setopt=ppdeploy-bundle-nvidia.{setting}" in command


def test_so_is_a_branch_that_dnfs_repository_lacks(tmp_path: Path, rpms: Callable[[str], list[list[str]]]) -> None:
    rpms("610.57.04-1.el9")
    with pytest.raises(InputError, match="has no branch 580, its nvidia-open is 610"):
        driver.fetch_driver(DriverWish(ROCKY, repository=REPOSITORY), tmp_path, lambda _: None)


# ---- what a plan is told ---------------------------------------------------------------------------------------------


def site(folder: Path, **wants: Any) -> PipelineSpec:
    """Return the spec of a site that has nothing but a bundle."""
    values = {"device": "cuda", "wheelhouse": str(folder), "system_packages": "bundle", **wants}
    spec = make_pipeline_spec(["node1"], kv_cache_gib=None, max_model_len=None, **values)
    return spec.model_copy(update={"wheelhouse_path": folder})


@pytest.mark.usefixtures("fetched")
def test_a_plan_is_told_what_the_bundle_has(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(shelf, out, DriverWish(WANTED))
    told = wheelhouse_of(site(out))
    assert told == Wheelhouse(driver=WANTED, driver_bytes=len("deb 1") + len("Package: nvidia-open\n"))
    found = driver_slice(site(out), plan(bare(), bundle=told, **SITE), bare())
    assert (found["bundle"], found["bundle_on_node"], found["rsync"]) == (str(out / "driver"), False, True)
    assert (found["keyring"], found["repository"], found["key_source"], found["key_file"]) == (None, "", "", "")
    # Where packages come from elsewhere, it is not even looked for.
    for wants in ({"system_packages": "archives"}, {"system_packages": "none"}):
        assert wheelhouse_of(site(tmp_path / "absent", **wants)) == Wheelhouse()


@pytest.mark.usefixtures("fetched")
def test_rsync_comes_from_a_bundle_that_has_it_for_the_node(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(shelf, out, DriverWish(WANTED))
    without = make_facts("node1").model_copy(update={"tools": {}})

    def outcome(folder: Path, **wants: Any) -> str:
        spec = site(folder, **wants)
        spec = spec.model_copy(update={"wheelhouse": wheelhouse_of(spec)})
        (node,) = situation(spec, {"node1": without}, None).nodes
        return NODE["rsync"].outcome(node).verdict

    assert outcome(out) == "blocked"
    manifest = json.loads((out / "manifest.json").read_text())
    for names, system, verdict in (
        (["rsync"], without.os.release, "ready"),
        (["gcc"], without.os.release, "blocked"),
        (["rsync"], "debian 7", "blocked"),
    ):
        manifest["packages"] = {"system": system, "machine": "x86_64", "architecture": "amd64", "names": names}
        (out / "manifest.json").write_text(json.dumps(manifest))
        assert outcome(out) == verdict
        assert outcome(out, device="cpu") == verdict
    # Of one that lies on the nodes alone nobody here knows it: the node says so.
    assert outcome(tmp_path / "absent", wheelhouse_on_nodes=True) == "ready"


SITE: dict[str, Any] = {"wheelhouse": "/srv/bundle", "system_packages": "bundle"}


@pytest.mark.usefixtures("fetched")
def test_a_bundle_that_is_not_whole_is_told_in_the_plan(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert wheelhouse_of(site(out)).problem == f"the bundle folder does not exist: {out}"
    made(shelf, out, DriverWish(WANTED))
    (out / "driver" / "Packages").unlink()
    assert wheelhouse_of(site(out)).problem == f"driver/Packages is missing: {out}"


@pytest.mark.usefixtures("fetched")
def test_of_a_bundle_on_the_nodes_the_manifest_is_enough_here(shelf: Shelf, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(shelf, out, DriverWish(WANTED))
    shutil.rmtree(out / "driver")
    assert wheelhouse_of(site(out, wheelhouse_on_nodes=True)).driver == WANTED
    shutil.rmtree(out)
    told = wheelhouse_of(site(out, wheelhouse_on_nodes=True)).problem
    assert told.endswith("; of a bundle on the nodes, its manifest.json is read from the same folder here")
