"""The module that installs system packages: what it asks the node, what it tells, and what apt is given."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_packages as module

MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
GCC = {"package": "gcc", "kind": "program", "value": "gcc-of-nobody,cc-of-nobody"}
SHELL = {"package": "dash", "kind": "program", "value": "no-such-shell,sh"}


def act(*wants: dict[str, str], check: bool = False, **params: Any) -> dict[str, Any]:
    """Run it as Ansible would."""
    known = {"state": "present", "manager": "apt", "allowed": True, "repository": None, "lock_timeout": 3}
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


def test_a_folder_of_packages_is_the_only_archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = Programs(monkeypatch)
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
        with pytest.raises(module.PackageError, match=r"the folder .*/my bundle on .* have no ppdeploy-nothing"):
            act(want, repository=str(folder))


def test_dnf_installs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = Programs(monkeypatch, dnf=(1, "Error: No match for argument: gcc\n"))
    with pytest.raises(module.PackageError, match=r"the repositories in /etc/yum.repos.d on .* have no gcc"):
        act(GCC, manager="dnf")
    assert programs.run == ["dnf --assumeyes --setopt=install_weak_deps=False install gcc"]
