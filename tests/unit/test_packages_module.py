"""The module that installs system packages: what it asks the node, what it tells, and what apt is given."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_packages as module
from ppdeploy.plan.driver import HELD
from tests import rpms

MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
GCC = {"package": "gcc", "kind": "program", "value": "gcc-of-nobody,cc-of-nobody"}
SHELL = {"package": "dash", "kind": "program", "value": "no-such-shell,sh"}


def act(*wants: dict[str, str], check: bool = False, **params: Any) -> dict[str, Any]:
    """Run it as Ansible would."""
    known = {"state": "present", "manager": "apt", "allowed": True, "repository": None, "lock_timeout": 3, "names": []}
    known |= {"hashes": {}, "manifest": None}
    return module.act({**known, "wants": list(wants), **params}, check=check)


class Programs:
    """Stands in for the programs that the module runs; `answers` by the first words of a command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: tuple[int, str]) -> None:
        self.answers = answers
        self.run: list[str] = []
        monkeypatch.setattr(module, "run", self)

    def __call__(self, argv: list[str], **_: str) -> tuple[int, str]:
        self.run.append(" ".join(argv))
        return next(
            (answer for words, answer in self.answers.items() if all(w in argv for w in words.split("__"))), (0, "")
        )


@pytest.mark.parametrize(
    ("want", "there"),
    [
        (SHELL, True),
        (GCC, False),
        ({"package": "p", "kind": "python", "value": MINOR}, True),
        ({"package": "p", "kind": "python", "value": "3.2"}, False),
        ({"package": "h", "kind": "headers", "value": "3.2"}, False),
        ({"package": "libc6", "kind": "library", "value": "libc.so.6"}, True),
        ({"package": "l", "kind": "library", "value": "libnobody.so.1"}, False),
    ],
)
def test_what_a_package_brings_is_looked_for_not_the_package(want: dict[str, str], there: bool) -> None:
    assert module.is_there(want) is there


def test_nothing_is_run_where_nothing_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(monkeypatch)
    assert act(SHELL) == {"changed": False, "lacking": []}
    assert programs.run == []


def test_a_look_and_a_check_install_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(monkeypatch)
    assert act(GCC, state="told") == {"changed": False, "lacking": ["gcc"]}
    assert act(GCC, check=True) == {"changed": True, "lacking": ["gcc"]}
    assert programs.run == []


@pytest.mark.parametrize("params", [{"allowed": False}, {"manager": None}])
def test_where_nothing_may_be_installed_it_is_named(params: dict[str, Any]) -> None:
    with pytest.raises(module.PackageError, match=r"lacks gcc: install these packages there, and apply again"):
        act(GCC, SHELL, state="told", **params)


def test_lists_are_fetched_only_when_the_first_try_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(monkeypatch, install=(100, "E: Unable to locate package gcc"))
    with pytest.raises(module.PackageError, match=r"the archives in /etc/apt on .* have no gcc: add the archive"):
        act(GCC)
    verbs = [
        next(word for word in line.split() if word in ("install", "update")) for line in programs.run if "apt" in line
    ]
    assert verbs == ["install", "update", "install"]


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 77 (unattended-upgr)",
            r"unattended-upgr \(pid 77\) on .* holds /var/lib/dpkg/lock-frontend, so gcc could not be installed: let",
        ),
        ("E: You don't have enough free space in /var/cache/apt/archives/.", "has no room for gcc: free some space"),
        ("E: Failed to fetch http://x/gcc.deb  404", r"gcc could not be installed on .*: E: Failed to fetch"),
        (
            (
                "Some packages could not be installed.\n\n gcc : Depends: libc6-dev (= 2) but 3 is to be installed\n"
                "E: Unable to correct problems, you have held broken packages."
            ),
            r"gcc could not be installed on .*: gcc Depends: libc6-dev \(= 2\) but 3 is to be installed: add the",
        ),
    ],
)
def test_why_packages_could_not_be_installed_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, said: str, sentence: str
) -> None:
    Programs(monkeypatch, install=(100, said))
    with pytest.raises(module.PackageError, match=sentence):
        act(GCC)


def test_a_daemons_own_service_is_left_off_where_its_package_was_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(monkeypatch)
    there: list[str] = []
    monkeypatch.setattr(module, "program", lambda name: f"/usr/sbin/{name}" if name in there else None)
    monkeypatch.setitem(module.INSTALL, "apt", lambda packages, *_: there.extend(packages))
    daemon = {"package": "haproxy", "kind": "daemon", "value": "haproxy"}
    tool = {"package": "nft", "kind": "program", "value": "nft"}
    assert act(daemon, tool) == {"changed": True, "lacking": ["haproxy", "nft"]}
    off = "systemctl disable --now --quiet haproxy.service"
    assert [line for line in programs.run if "systemctl" in line] == [off]
    # One that was there may be somebody's: a later run with another package leaves it alone.
    there.remove("nft")
    assert act(daemon, tool)["lacking"] == ["nft"]
    assert programs.run.count(off) == 1


def test_a_service_that_does_not_go_off_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Programs(monkeypatch, systemctl=(1, "Unit is masked\n"))
    with pytest.raises(module.PackageError, match=r"haproxy\.service on .* cannot be turned off \(Unit is masked\)"):
        module.leave_off(["haproxy.service"], ["haproxy"])


def test_a_package_that_does_not_bring_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Programs(monkeypatch)
    with pytest.raises(module.PackageError, match=r"gcc on .* was installed, and what vLLM needs of it is still not"):
        act(GCC)


def test_half_installed_packages_are_finished_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(monkeypatch, **{"dpkg-query": (0, "gcc\tinstalled\nnano\tunpacked\nvim\tconfig-files\n")})
    with pytest.raises(module.PackageError, match=r"nano on .* is half installed, and neither `dpkg --configure -a`"):
        act(GCC)
    assert [line.split()[0] for line in programs.run] == ["dpkg-query", "dpkg", "dpkg-query", "apt-get", "dpkg-query"]


def indexed(folder: Path) -> str:
    """Make a folder one that apt or dnf can install from, as far as that is looked at here."""
    (folder / "repodata").mkdir()
    for name in ("Packages", "repodata/repomd.xml"):
        (folder / name).touch()
    return str(folder)


@pytest.mark.parametrize(("manager", "index"), [("apt", "Packages"), ("dnf", "repodata/repomd.xml")])
def test_a_folder_without_packages_for_the_manager_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, manager: str, index: str
) -> None:
    indexed(tmp_path)
    (tmp_path / index).unlink()
    programs = Programs(monkeypatch)
    with pytest.raises(
        module.PackageError, match=rf"has no packages for {manager} \(no {index}\): make the bundle with"
    ):
        act(GCC, manager=manager, repository=str(tmp_path))
    assert programs.run == []


def test_a_folder_of_packages_is_the_only_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = Programs(monkeypatch)
    indexed(tmp_path)
    with pytest.raises(module.PackageError, match="still not there"):
        act(GCC, repository=str(tmp_path))
    update, install = (line for line in programs.run if "apt-get" in line)
    assert update.endswith(" update")
    assert install.endswith(" install gcc")
    for line in (update, install):
        assert "Dir::Etc::sourceparts=-" in line
        assert "Dir::Etc::sourcelist=/" in line
        assert "Dir::State::lists=/" in line


@pytest.mark.skipif(shutil.which("apt-get") is None or os.geteuid() != 0, reason="only root can install, by apt")
def test_apt_finds_a_folder_with_a_space_in_its_name() -> None:
    want = {"package": "ppdeploy-nothing", "kind": "program", "value": "ppdeploy-nothing"}
    with tempfile.TemporaryDirectory() as name:
        # apt reads as a user of its own.
        Path(name).chmod(0o755)
        folder = Path(name, "my bundle")
        folder.mkdir(mode=0o755)
        (folder / "Packages").write_text("")
        with pytest.raises(
            module.PackageError, match=r"the folder .*/my bundle on .* has no ppdeploy-nothing: make the"
        ):
            act(want, repository=str(folder))


def test_dnf_installs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(monkeypatch, dnf=(1, "Error: No match for argument: gcc\n"))
    with pytest.raises(
        module.PackageError, match=r"the repositories in /etc/yum.repos.d on .* have no gcc: add the one"
    ):
        act(GCC, manager="dnf")
    settings = "--setopt=install_weak_deps=0 --setopt=exit_on_lock=1 --setopt=strict=1"
    assert programs.run == [f"dnf --assumeyes {settings} install gcc"]


def test_dnf_5_skips_nothing_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dnf5").touch()
    (tmp_path / "dnf").symlink_to("dnf5")
    monkeypatch.setattr(module, "program", lambda name: str(tmp_path / name))
    assert {"--setopt=strict=1", "--setopt=skip_unavailable=0", "--setopt=skip_broken=0"} <= set(module.dnf())


class Dnf:
    """Stands in for dnf; `plans` is what it says that it would do, and `ends` how it ends when it does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plans: str, *ends: tuple[int, str]) -> None:
        self.plans = plans
        self.ends = list(ends)
        self.run: list[list[str]] = []
        self.list = ""
        monkeypatch.setattr(module, "run", self)
        monkeypatch.setattr(module, "LOOK_EVERY", 0.01)
        monkeypatch.setattr(module, "program", lambda name: "/usr/bin/dnf" if name == "dnf" else None)

    def __call__(self, argv: list[str], **_: str) -> tuple[int, str]:
        self.run.append(argv)
        folder = next((word.partition("reposdir=")[2] for word in argv if "reposdir=" in word), None)
        if folder:
            (path,) = Path(folder).iterdir()
            self.list = path.read_text()
        if "--assumeno" in argv:
            return (0, self.plans) if "Nothing to do" in self.plans else (1, self.plans)
        return self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]


# Recorded from dnf 4.14.0 and dnf 5.4.6.
PLANS = """\
Dependencies resolved.
Installing:
 base-devel         noarch         2-1            ppdeploy-bundle         5.9 k
Operation aborted.
"""
OLDER_BY_FOUR = """\
 Package            Architecture   Version        Repository               Size
================================================================================
Installing:
 base-devel         noarch         2-1            ppdeploy-bundle         5.9 k
Downgrading:
 a-package-with-a-name-that-takes-the-whole-of-its-line-in-the-table
                    noarch         2-1            ppdeploy-bundle         5.9 k
 base               noarch         2-1            ppdeploy-bundle         5.9 k

Transaction Summary
================================================================================
Install    1 Package
Downgrade  1 Package

Operation aborted.
"""
OLDER_BY_FIVE = """\
Package           Arch   Version Repository           Size
Downgrading:
 base             noarch 0:2-1   ppdeploy-bundle  22.0   B
   replacing base noarch 0:3-1   <unknown>        22.0   B
Installing:
 base-devel       noarch 0:2-1   ppdeploy-bundle  28.0   B

Transaction Summary:
 Installing:         1 package
 Replacing:          1 package

Operation aborted by the user.
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder of packages on the node."""
    (tmp_path / "my bundle").mkdir()
    return indexed(tmp_path / "my bundle")


def test_a_folder_of_packages_is_dnfs_only_repository(
    monkeypatch: pytest.MonkeyPatch, folder: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("RPM-GPG-KEY-two", "RPM-GPG-KEY-one", "other"):
        (keys / name).touch()
    monkeypatch.setattr(module, "KEYS", keys)
    program = Dnf(monkeypatch, PLANS, (0, "Complete!"))
    with pytest.raises(module.PackageError, match="still not there"):
        act(GCC, manager="dnf", repository=folder)
    asked, done = program.run
    assert asked == [*done[:-2], "--assumeno", *done[-2:]]
    assert done[-2:] == ["install", "gcc"]
    assert "--setopt=plugins=0" in done
    assert "--repo=ppdeploy-bundle" in done
    for name in ("reposdir", "cachedir", "system_cachedir"):
        assert any(word.startswith(f"--setopt={name}=/") for word in done)
    assert f"baseurl=file://{folder.replace(' ', '%20')}\n" in program.list
    assert "gpgcheck=0\n" in program.list
    assert f"gpgkey=file://{keys}/RPM-GPG-KEY-one file://{keys}/RPM-GPG-KEY-two\n" in program.list


@pytest.mark.skipif(shutil.which("dnf") is None or os.geteuid() != 0, reason="dnf installs for root alone")
def test_real_dnf_knows_the_folder_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A repository in dnf.conf is not asked, and no setting there hides that a package is lacking."""
    folder, etc, root = tmp_path / "my bundle", tmp_path / "etc", tmp_path / "root"
    for made in (folder, etc / "dnf", root):
        made.mkdir(parents=True)
    rpms.build(tmp_path, "thing", "1", {"/usr/share/thing": "x"}).rename(folder / "thing.rpm")
    rpms.index(folder)
    other = "[internet]\nname=internet\nbaseurl=http://127.0.0.1:9/\nenabled=1\ntimeout=2\nretries=1\n"
    (etc / "dnf" / "dnf.conf").write_text(f"[main]\nstrict=0\nskip_if_unavailable=0\n{other}")
    run = module.run

    def elsewhere(argv: list[str], **more: str) -> tuple[int, str]:
        words = [argv[0], f"--installroot={root}", f"--config={etc}/dnf/dnf.conf", "--releasever=9", *argv[1:]]
        return run(rpms.on_a_machine_with(etc, words), **more)

    monkeypatch.setattr(module, "run", elsewhere)
    with pytest.raises(module.PackageError, match="no nope"):
        module.install_with_dnf(["thing", "nope"], folder, 3)
    assert module.bring_with_dnf(["thing"], folder, 3)
    assert (root / "usr/share/thing").read_text() == "x"
    assert not module.bring_with_dnf(["thing"], folder, 3)


@pytest.mark.parametrize(
    ("plans", "older"),
    [
        (OLDER_BY_FOUR, "a-package-with-a-name-that-takes-the-whole-of-its-line-in-the-table, base"),
        (OLDER_BY_FIVE, "base"),
    ],
)
def test_a_bundle_puts_no_older_packages_in_the_place_of_a_nodes(
    monkeypatch: pytest.MonkeyPatch, folder: str, plans: str, older: str
) -> None:
    program = Dnf(monkeypatch, plans, (0, "Complete!"))
    sentence = (
        rf"gcc could not be installed on .* from the folder {folder}: that would put older packages in .* its {older}"
    )
    with pytest.raises(module.PackageError, match=sentence):
        act(GCC, manager="dnf", repository=folder)
    assert len(program.run) == 1


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "Problem: conflicting requests\n  - nothing provides libx.so needed by gcc-1-1.x86_64 from a\n",
            r"gcc could not be installed on \S+: the folder /.* has no libx\.so, which gcc-1-1\.x86_64 needs: make the",
        ),
        (
            (
                "Error: \n Problem: package base-devel-2-1.noarch requires base = 2, but none of the providers can be "
                "installed\n  - package base-2-1.noarch is filtered out by exclude filtering\n"
                "(try to add '--skip-broken' to skip uninstallable packages)\n"
            ),
            r"from the folder /.*: Problem: package base-devel-.* is filtered out by exclude filtering: see to it",
        ),
        (
            (
                "Running transaction test\nError: Transaction test error:\n  file /usr/bin/x conflicts between "
                "attempted installs\n"
            ),
            r"the folder /.*: Transaction test error: file /usr/bin/x conflicts between",
        ),
        (
            "Public key for gcc-1-1.rpm is not installed\nError: GPG check FAILED\n",
            r"gcc-1-1\.rpm could not be installed on \S+: its rpm demands signatures, and there is none",
        ),
        ("installing package gcc needs 3MB more space on the / filesystem", "has no room for gcc: free some space"),
        ("Disk Requirements:\n   At least 9MB more space needed on the / filesystem.", "has no room for gcc"),
    ],
)
def test_why_dnf_installed_nothing_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, folder: str, said: str, sentence: str
) -> None:
    Dnf(monkeypatch, PLANS, (1, said))
    with pytest.raises(module.PackageError, match=sentence):
        act(GCC, manager="dnf", repository=folder)


@pytest.mark.parametrize(
    ("said", "owner"),
    [
        ("RPMDB already locked by 1\n  The application with PID 1 is: dnf\n", r"\S+ \(pid 1\)"),
        (
            "RPM: error: can't create transaction lock on /x/.rpm.lock (Resource temporarily unavailable)\n",
            "another program",
        ),
        ("Running transaction\nTransaction failed: Rpm transaction failed.\n", r"\S+ \(pid 1\)"),
    ],
)
def test_another_program_that_installs_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, folder: str, said: str, owner: str
) -> None:
    locked = (1, said)
    monkeypatch.setattr(module, "rpm_owner", lambda: 1 if "Rpm transaction" in said else None)
    program = Dnf(monkeypatch, PLANS, locked)
    with pytest.raises(module.PackageError, match=rf"{owner} on \S+ is installing packages, so gcc could not be"):
        act(GCC, manager="dnf", repository=folder, lock_timeout=0.1)
    assert len(program.run) > 3
    program = Dnf(monkeypatch, PLANS, locked, (0, "Complete!"))
    with pytest.raises(module.PackageError, match="still not there"):
        act(GCC, manager="dnf", repository=folder)
    assert len(program.run) == 3


def test_the_lock_of_rpms_database_has_an_owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lock = tmp_path / ".rpm.lock"
    monkeypatch.setattr(module, "RPM_LOCKS", (str(tmp_path / "none"), str(lock)))
    lock.touch()
    assert module.rpm_owner() is None
    holds = (
        f"import fcntl, sys; f = open({str(lock)!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert module.rpm_owner() == holder.pid
        holder.communicate("\n")


# ---- that they are as the bundle was made ----------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A bundle on the node, and the hashes of its packages."""
    folder = tmp_path / "bundle" / "packages"
    folder.mkdir(parents=True)
    indexed(folder)
    (folder / "gcc.deb").write_bytes(b"deb")
    names = ("Packages", "repodata/repomd.xml", "gcc.deb")
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    files = [{"path": f"packages/{name}", "sha256": sha256} for name, sha256 in hashes.items()]
    other = {"path": "wheels/x.whl", "sha256": "0" * 64}
    (folder.parent / "manifest.json").write_text(json.dumps({"files": [*files, other]}))
    return folder, hashes


@pytest.mark.parametrize("on_node", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "gcc.deb").write_bytes(b"bed"), r"the sha256 of gcc\.deb differs"),
        (
            lambda folder: (folder / "repodata/repomd.xml").write_bytes(b"x"),
            r"the sha256 of repodata/repomd\.xml differs",
        ),
        (lambda folder: (folder / "gcc.deb").unlink(), r"gcc\.deb is missing"),
        (lambda folder: (folder / "Packages.xz").touch(), r"Packages\.xz is none of its files"),
    ],
)
def test_packages_that_are_not_the_bundles_are_not_installed(
    monkeypatch: pytest.MonkeyPatch, whole: Any, damage: Any, told: str, by_name: bool, on_node: bool
) -> None:
    folder, hashes = whole
    programs = Programs(monkeypatch)
    damage(folder)
    manifest = str(folder.parent / "manifest.json") if on_node else None
    params = {"repository": str(folder), "hashes": {} if on_node else hashes, "manifest": manifest}
    sentence = rf"{folder} on \S+ is not as the bundle was made: {told}, so nothing of it was installed: run `ppdeploy"
    with pytest.raises(module.PackageError, match=sentence):
        act(*([] if by_name else [GCC]), names=["gcc"] if by_name else [], **params)
    assert programs.run == []


@pytest.mark.parametrize("on_node", [False, True])
def test_packages_that_are_the_bundles_are_installed(
    monkeypatch: pytest.MonkeyPatch, whole: Any, on_node: bool
) -> None:
    folder, hashes = whole
    Programs(monkeypatch, **{"--simulate": (0, "Inst gcc\n")})
    manifest = str(folder.parent / "manifest.json") if on_node else None
    assert act(names=["gcc"], repository=str(folder), hashes={} if on_node else hashes, manifest=manifest)["changed"]


def test_what_the_controller_knows_comes_before_the_manifest_on_the_node(
    monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    folder, hashes = whole
    Programs(monkeypatch)
    manifest = str(folder.parent / "manifest.json")
    with pytest.raises(module.PackageError, match=r"the sha256 of gcc\.deb differs"):
        act(GCC, repository=str(folder), hashes={**hashes, "gcc.deb": "0" * 64}, manifest=manifest)


@pytest.mark.parametrize("text", [None, "{", "{}", '{"files": [1]}'])
def test_a_bundle_on_the_node_without_a_manifest_is_refused(
    monkeypatch: pytest.MonkeyPatch, whole: Any, text: str | None
) -> None:
    folder, _ = whole
    Programs(monkeypatch)
    manifest = folder.parent / "manifest.json"
    manifest.unlink() if text is None else manifest.write_text(text)
    with pytest.raises(
        module.PackageError, match=r"manifest\.json on \S+ does not say which packages .*: copy the bundle"
    ):
        act(GCC, repository=str(folder), manifest=str(manifest))


# ---- packages by name ------------------------------------------------------------------------------------------------


def brought(tmp_path: Path, **params: Any) -> dict[str, Any]:
    """Have two packages as a folder has them."""
    (tmp_path / "repodata").mkdir(exist_ok=True)
    for index in module.INDEX.values():
        (tmp_path / index).touch()
    return act(names=["nvidia-open", "linux-headers-6.1"], repository=str(tmp_path), **params)


def test_named_packages_come_from_the_folder_also_where_they_are_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = Programs(monkeypatch, **{"--simulate": (0, "Inst nvidia-open [570] (580 localhost [all])\n")})
    assert brought(tmp_path)["changed"]
    update, simulate, install = (line for line in programs.run if line.startswith("apt-get"))
    assert install.endswith(" install nvidia-open linux-headers-6.1")
    for line in (update, simulate, install):
        # By the one apt resolves to other versions, by the other it goes on with them.
        assert "--ignore-hold --allow-change-held-packages" in line
        assert "Dir::Etc::sourceparts=-" in line


def test_apt_may_not_remove_what_is_not_the_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulated = "Remv zheld [1]\nRemv libnvidia-compute-570 [570] []\nInst nvidia-open [570] (580 localhost [all])\n"
    programs = Programs(monkeypatch, **{"--simulate": (0, simulated)})
    with pytest.raises(module.PackageError, match=r"without the removal of zheld: upgrade or remove"):
        brought(tmp_path)
    assert [line for line in programs.run if line.startswith("apt-get") and "--simulate" not in line][1:] == []
    # The driver's own of before may go.
    Programs(monkeypatch, **{"--simulate": (0, simulated.partition("\n")[2])})
    assert brought(tmp_path)["changed"]


def test_the_modules_pattern_of_the_drivers_packages_is_the_plans() -> None:
    assert module.OF_DRIVER.pattern == HELD


def test_an_interrupted_installation_is_ended_by_the_folder_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = [["gcc-12"], ["gcc-12"], []]
    programs = Programs(monkeypatch, **{"--simulate": (0, "")})
    monkeypatch.setattr(module, "half_installed", lambda: left.pop(0))
    brought(tmp_path)
    (fix,) = (line for line in programs.run if "--fix-broken" in line)
    assert "Dir::Etc::sourceparts=-" in fix
    assert left == []


@pytest.mark.parametrize(
    ("manager", "said"),
    [("apt", "E: Unable to locate package nvidia-open"), ("dnf", "No match for argument: nvidia-open\n")],
)
def test_a_bundle_without_what_is_asked_of_it_is_to_be_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, manager: str, said: str
) -> None:
    Programs(monkeypatch, install=(1, said))
    again = "make the bundle again with `ppdeploy bundle {}` on a machine of the node's release, or install it by hand"
    with pytest.raises(module.PackageError) as refused:
        brought(tmp_path, manager=manager)
    assert f" has no nvidia-open: {again.format('--nvidia-driver')}, and apply again" in str(refused.value)
    with pytest.raises(module.PackageError) as refused:
        act({**GCC, "package": "nvidia-open"}, repository=str(tmp_path), manager=manager)
    assert f" has no nvidia-open: {again.format('--packages')}, and apply again" in str(refused.value)


def test_where_all_is_there_nothing_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = Programs(monkeypatch, **{"--simulate": (0, "0 upgraded, 0 newly installed, 0 to remove\n")})
    assert brought(tmp_path) == {"changed": False, "lacking": []}
    assert [line.split()[-3] for line in programs.run if line.startswith("apt-get")][1:] == ["install"]
    assert brought(tmp_path, check=True)["changed"]


@pytest.mark.parametrize(
    ("said", "changed"), [("Complete!\n", True), ("Dependencies resolved.\nNothing to do.\n", False)]
)
def test_with_dnf_its_own_words_tell_whether_something_came(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, changed: bool
) -> None:
    programs = Programs(monkeypatch, install=(0, said))
    assert brought(tmp_path, manager="dnf")["changed"] is changed
    assert all(line.endswith("install nvidia-open linux-headers-6.1") for line in programs.run)
    assert len(programs.run) == 2


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"manager": None}, "packages by name come from a folder, by apt or dnf"),
        ({"repository": None}, "packages by name come from a folder, by apt or dnf"),
        ({"repository": "/srv/none"}, r"the folder /srv/none on .* has no packages for apt \(no Packages\): make the"),
    ],
)
def test_names_without_a_folder_are_refused(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(module.PackageError, match=sentence):
        act(names=["nvidia-open"], **params)
