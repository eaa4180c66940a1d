"""System packages of a bundle by dnf: what dnf 4 and dnf 5 are given, and what their words come to.

The words are recorded from dnf 4.14.0 and dnf 5.4.6; `tests/lab/test_isolated_rpm.py` has the real dnf 4.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest

from ppdeploy.bundle import commands, dnf, make_bundle, open_bundle, packages, verify_bundle
from ppdeploy.bundle import make as making
from ppdeploy.bundle.commands import CommandError
from ppdeploy.errors import BlockedError, InputError, PpdeployError
from tests import rpms
from tests.factories import make_facts
from tests.wheels import Shelf

FOUR = "4.14.0\n  Installed: dnf-0:4.14.0-3.noarch\n"
FIVE = "dnf5 version 5.4.6.0\ndnf5 plugin API version 2.0\n"
ROCKY = make_facts("node1").os.model_copy(
    update={"id": "rocky", "id_like": ("rhel", "centos", "fedora"), "version_id": "9.4", "machine": platform.machine()}
)


class Dnf:
    """Stands in for dnf and createrepo_c: leaves a file for each package where it is told to, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str = FOUR, fails: str = "") -> None:
        self.version = version
        self.fails = fails
        self.installs: list[list[str]] = []
        self.indexed: list[str] = []
        monkeypatch.setattr(dnf, "run", self)
        monkeypatch.setattr(dnf, "STREAMS", Path("/nowhere"))
        monkeypatch.setattr(dnf, "VARIABLES", (Path("/nowhere"),))
        monkeypatch.setattr(dnf, "_platform_id", lambda: "platform:el9")
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(os, "geteuid", lambda: 0)

    def __call__(self, command: list[str]) -> str:
        if command[0] == "createrepo_c":
            folder = Path(command[-1])
            self.indexed = sorted(path.name for path in folder.iterdir())
            (folder / "repodata").mkdir()
            (folder / "repodata" / "repomd.xml").write_text("<repomd/>\n")
            return ""
        if "--version" in command:
            return self.version
        if "repoquery" in command:
            # A repository's key may have to be taken.
            assert "--assumeyes" in command
            return "haproxy\n" if command[-1] == "haproxy" else ""
        self.installs.append(command)
        files = Path(next(word for word in command if "destdir=" in word).partition("destdir=")[2])
        files.mkdir()
        for name in ("haproxy-2.4.22-1.el9", "pcre2-10.40-5.el9"):
            (files / f"{name}.x86_64.rpm").write_bytes(b"rpm")
        if self.fails:
            raise CommandError("Downloading Packages:\n", self.fails)
        return ""


@pytest.mark.parametrize(
    ("version", "own"),
    [
        (FOUR, ["--releasever=/", "--setopt=module_platform_id=platform:el9"]),
        (FIVE, ["--use-host-config", "--setopt=skip_unavailable=0", "--setopt=skip_broken=0"]),
    ],
)
def test_an_empty_root_gets_all_from_the_machines_own_repositories(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, own: list[str]
) -> None:
    program = Dnf(monkeypatch, version)
    dnf.fetch(["haproxy"], tmp_path / "packages")
    ((*words, verb, name),) = program.installs
    assert (verb, name) == ("install", "haproxy")
    assert words[:3] == ["dnf", "--assumeyes", f"--installroot={tmp_path}/packages.dnf/root"]
    assert words[3 : 3 + len(own)] == own
    # What checks signatures in both, as it is seen; --downloadonly does not in dnf 5.
    assert "--setopt=tsflags=test" in words
    assert "--setopt=strict=1" in words
    assert "--downloadonly" not in words
    assert not any("reposdir" in word or "varsdir" in word for word in words)
    assert program.indexed == ["haproxy-2.4.22-1.el9.x86_64.rpm", "pcre2-10.40-5.el9.x86_64.rpm"]
    assert [path.name for path in tmp_path.iterdir()] == ["packages"]


def test_a_machine_that_is_kept_at_one_release_stays_at_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = Dnf(monkeypatch)
    (tmp_path / "releasever").write_text("9.4\n")
    (tmp_path / "modules.d").mkdir()
    (tmp_path / "modules.d" / "nodejs.module").write_text("[nodejs]\n")
    monkeypatch.setattr(dnf, "VARIABLES", (tmp_path / "releasever",))
    monkeypatch.setattr(dnf, "STREAMS", tmp_path / "modules.d")
    seen: list[Path] = []

    def run(command: list[str]) -> str:
        if "install" in command:
            seen.extend((tmp_path / "packages.dnf" / "root").rglob("nodejs.module"))
        return program(command)

    monkeypatch.setattr(dnf, "run", run)
    dnf.fetch(["haproxy"], tmp_path / "packages")
    assert not any("--releasever" in word for word in program.installs[0])
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("said", "kind", "sentence"),
    [
        (
            "No match for argument: nope\nError: Unable to find a match: nope\n",
            InputError,
            r"this machine's repositories have no package nope \(--packages\): add the repository that has it",
        ),
        (
            (
                "Failed to resolve the transaction:\nNo match for argument: nope\nYou can try to add to command line:\n"
                "  --skip-unavailable to skip unavailable packages\n"
            ),
            InputError,
            r"this machine's repositories have no package nope \(--packages\)",
        ),
        (
            (
                "Public key for lib-1-1.noarch.rpm is not installed. Failing package is: lib-1-1.noarch\n"
                " GPG Keys are configured as: file:///srv/x/good.pub\nError: GPG check FAILED\n"
            ),
            InputError,
            r"lib-1-1\.noarch\.rpm is not signed with a key that its repository names",
        ),
        (
            "Package weak-1-1.noarch.rpm is not signed\nError: GPG check FAILED\n",
            InputError,
            r"weak-1-1\.noarch\.rpm is not signed with a key",
        ),
        (
            (
                "Transaction failed: Signature verification failed.\n"
                'OpenPGP check for package "lib-1-1.noarch" (/w/lib-1-1.noarch.rpm) from repo "site" has failed: '
                "Public key is not installed.\n"
            ),
            InputError,
            r"lib-1-1\.noarch is not signed with a key",
        ),
        (
            (
                "Error: \n Problem: conflicting requests\n"
                "  - nothing provides libbpf.so.1()(64bit) needed by broken-1-1.noarch from site\n"
            ),
            InputError,
            r"repositories have no libbpf\.so\.1\(\)\(64bit\), which broken-1-1\.noarch needs \(--packages\): enable",
        ),
        (
            (
                "[Errno 28] No space left on device: '/srv/b.partial/packages.dnf/cache/x'\n"
                "Error: Error downloading packages:\n  Cannot download x.rpm: All mirrors were tried\n"
            ),
            BlockedError,
            r"dnf found no room on this machine's disk for the system packages: \[Errno 28\] No space left .*: free",
        ),
        (
            "Error: Error downloading packages:\n  Curl error (23): Failed writing received data to disk/application\n",
            BlockedError,
            r"dnf found no room on this machine's disk for the system packages: Curl error \(23\)",
        ),
        (
            (
                "Errors during downloading metadata for repository 'site':\n  - Curl error (6): Could not resolve it\n"
                "Error: Failed to download metadata for repo 'site': Cannot download repomd.xml\n"
            ),
            PpdeployError,
            r"dnf cannot fetch the system packages: .*Cannot download repomd\.xml: check this machine's network",
        ),
    ],
)
def test_what_dnf_says_is_one_sentence_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, kind: type[PpdeployError], sentence: str
) -> None:
    program = Dnf(monkeypatch, fails=said)
    with pytest.raises(kind, match=sentence):
        dnf.fetch(["nope"], tmp_path / "packages")
    assert program.installs
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "C_CREATEREPOLIB: Critical: Cannot open repodata: Permission denied\n",
            r"createrepo_c cannot write the index of the system packages: .*Permission denied \(--packages\): see what",
        ),
        (
            "C_CREATEREPOLIB: Critical: Cannot write: No space left on device\n",
            "createrepo_c found no room on this machine's disk",
        ),
    ],
)
def test_an_index_that_cannot_be_written_is_no_trouble_of_the_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, sentence: str
) -> None:
    program = Dnf(monkeypatch)

    def run(command: list[str]) -> str:
        if command[0] == "createrepo_c":
            raise CommandError("", said)
        return program(command)

    monkeypatch.setattr(dnf, "run", run)
    with pytest.raises(PpdeployError, match=sentence):
        dnf.fetch(["haproxy"], tmp_path / "packages")


@pytest.mark.parametrize(
    ("missing", "user", "sentence"),
    [
        (
            *("", 1000),
            r"root alone \(--packages\): run it again with `sudo --preserve-env \$\(command -v ppdeploy\) bundle .* --",
        ),
        ("createrepo_c", 0, r"createrepo_c is missing .*: run `dnf install createrepo_c` here"),
    ],
)
def test_what_the_machine_lacks_is_told_before_a_wheel_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str, user: int, sentence: str
) -> None:
    program = Dnf(monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else name)
    monkeypatch.setattr(packages, "this_system", lambda: ROCKY)
    monkeypatch.setattr(making, "fetch", lambda *_, **__: pytest.fail("wheels were fetched"))
    shelf = Shelf(tmp_path / "shelf", uv=b"#!/bin/sh\n")
    monkeypatch.setattr(making, "uv_wheel", lambda _: shelf.uv)
    with pytest.raises(InputError, match=sentence):
        make_bundle(shelf.lock(), tmp_path / "out", packages=["haproxy"])
    assert program.installs == []


def test_what_the_repositories_have_is_asked_of_dnf(monkeypatch: pytest.MonkeyPatch) -> None:
    Dnf(monkeypatch)
    assert [name for name in ("haproxy", "wireguard-go") if dnf.archives_have(name)] == ["haproxy"]


@pytest.mark.skipif(shutil.which("dnf") is None or os.geteuid() != 0, reason="dnf resolves for root alone")
def test_a_package_that_real_dnf_lacks_is_told_whatever_its_configuration_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    rpms.build(site, "thing", "1", {"/usr/share/thing": "x"})
    shutil.rmtree(site / "top")
    rpms.index(site)
    etc = tmp_path / "etc"
    (etc / "dnf").mkdir(parents=True)
    (etc / "yum.repos.d").mkdir()
    (etc / "dnf" / "dnf.conf").write_text("[main]\nstrict=0\nskip_if_unavailable=0\n")
    (etc / "yum.repos.d" / "site.repo").write_text(f"[site]\nname=site\nbaseurl={site.as_uri()}\ngpgcheck=0\n")
    monkeypatch.setattr(dnf, "run", lambda command: commands.run(rpms.on_a_machine_with(etc, command)))
    with pytest.raises(InputError, match=r"this machine's repositories have no package nope"):
        dnf.fetch(["thing", "nope"], tmp_path / "packages")
    dnf.fetch(["thing"], tmp_path / "packages")
    assert [path.name for path in (tmp_path / "packages").glob("*.rpm")] == ["thing-1-1.x86_64.rpm"]


def test_a_bundle_of_rpms_says_so_and_lists_its_repodata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf", uv=b"#!/bin/sh\n")
    monkeypatch.setattr(making, "uv_wheel", lambda _: shelf.uv)
    shutil.copytree(shelf.links, tmp_path / "out.partial" / "wheels")
    program = Dnf(monkeypatch)
    monkeypatch.setattr(packages, "this_system", lambda: ROCKY)
    # dnf takes no relative root.
    monkeypatch.chdir(tmp_path)
    bundle = make_bundle(shelf.lock(), Path("out"), packages=["haproxy"])
    assert f"--installroot={tmp_path}/out.partial/packages.dnf/root" in program.installs[0]
    held = bundle.packages
    assert held is not None
    assert (held.manager, held.system, held.architecture) == ("dnf", "rocky 9", platform.machine())
    assert {file.path for file in bundle.files} >= {
        *("packages/haproxy-2.4.22-1.el9.x86_64.rpm", "packages/pcre2-10.40-5.el9.x86_64.rpm"),
        "packages/repodata/repomd.xml",
    }
    (bundle.path / "packages" / "repodata" / "repomd.xml").write_text("<repomd>\n")
    with pytest.raises(InputError, match=r"packages/repodata/repomd\.xml (has|is not)"):
        verify_bundle(open_bundle(bundle.path))
