"""What the lab needs of this machine, and what it says where that is not so."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.errors import ApplyError, BlockedError, InputError
from ppdeploy.lab import rootfs, system

LISTING = """\
http://192.0.2.7/vendor/ stable main
http://192.0.2.1/mirror/ bookworm contrib
http://192.0.2.1/mirror/ bookworm main
http://192.0.2.1/mirror/ bookworm-updates main
http://192.0.2.2/mirror/ bookworm main
"""


def test_hosts_are_built_from_the_first_source_of_this_machines_release() -> None:
    assert rootfs.parse_sources(LISTING, "bookworm") == ("http://192.0.2.1/mirror/", ["contrib", "main"])


def test_a_machine_without_such_a_source_is_told_so() -> None:
    with pytest.raises(BlockedError, match="no source for trixie main"):
        rootfs.parse_sources(LISTING, "trixie")


def test_the_cached_tree_is_for_one_release_architecture_and_package_list(monkeypatch: pytest.MonkeyPatch) -> None:
    key = rootfs.cache_key("bookworm", "amd64")
    assert key == rootfs.cache_key("bookworm", "amd64")
    assert len({key, rootfs.cache_key("trixie", "amd64"), rootfs.cache_key("bookworm", "arm64")}) == 3
    monkeypatch.setattr(rootfs, "PACKAGES", (*rootfs.PACKAGES, "vim"))
    assert rootfs.cache_key("bookworm", "amd64") != key
    key = rootfs.cache_key("bookworm", "amd64")
    monkeypatch.setattr(rootfs, "SERVED", (*rootfs.SERVED, "nginx"))
    assert rootfs.cache_key("bookworm", "amd64") != key


def test_a_folder_of_packages_becomes_a_repository_that_apt_reads(tmp_path: Path) -> None:
    control = tmp_path / "made/DEBIAN/control"
    control.parent.mkdir(parents=True)
    control.write_text(
        "Package: made\nVersion: 1.2\nArchitecture: all\nMaintainer: lab <lab@example.org>\nDescription: x\n"
    )
    (tmp_path / "made").chmod(0o755)
    control.parent.chmod(0o755)
    served = tmp_path / "served"
    served.mkdir()
    subprocess.run(["dpkg-deb", "--build", str(tmp_path / "made"), str(served / "made.deb")], check=True)
    rootfs.make_repository(served)
    fields = dict(line.split(": ", 1) for line in (served / "Packages").read_text().strip().splitlines())
    assert (fields["Package"], fields["Version"], fields["Filename"]) == ("made", "1.2", "./made.deb")
    assert int(fields["Size"]) == (served / "made.deb").stat().st_size
    assert fields["SHA256"] == hashlib.sha256((served / "made.deb").read_bytes()).hexdigest()
    rootfs.make_repository(tmp_path / "nothing")
    assert (tmp_path / "nothing/Packages").read_text() == ""


@pytest.mark.parametrize(
    ("release", "name"),
    [
        ({"ID": "debian", "VERSION_CODENAME": "bookworm"}, "bookworm"),
        ({"ID": "ubuntu", "ID_LIKE": "debian", "VERSION_CODENAME": "noble"}, "noble"),
    ],
)
def test_hosts_get_this_machines_release(monkeypatch: pytest.MonkeyPatch, release: dict[str, str], name: str) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)
    assert rootfs.machine_release() == name


def test_a_machine_of_another_family_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fedora = {"ID": "fedora", "PRETTY_NAME": "Fedora Linux 43", "VERSION_CODENAME": ""}
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: fedora)
    with pytest.raises(InputError, match="Fedora Linux 43"):
        rootfs.machine_release()


def test_whoever_is_not_root_is_told_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(InputError, match=r"^ppdeploy lab up needs root: run it again with sudo$") as caught:
        system.require_machine("ppdeploy lab up")
    assert caught.value.exit_code == 2


def test_missing_packages_are_named_once_each_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def which(program: str) -> Any:
        return None if program in {"mmdebstrap", "ip", "tc"} else f"/usr/bin/{program}"

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", which)
    with pytest.raises(InputError, match=r"lacks \(iproute2, mmdebstrap\): apt-get install -y iproute2 mmdebstrap$"):
        system.require_machine("ppdeploy lab up")


def test_another_operating_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match=r"needs Linux \(darwin\)"):
        system.require_machine("ppdeploy lab up")


def test_a_failed_program_is_told_with_its_own_last_line() -> None:
    argv = [sys.executable, "-c", "import sys; print('one\\ntwo', file=sys.stderr); sys.exit(3)"]
    with pytest.raises(ApplyError, match=r"^making it failed .*: two$"):
        system.run(argv, what="making it")


def test_a_program_that_takes_too_long_is_told() -> None:
    with pytest.raises(ApplyError, match="took longer than 0 s"):
        system.run(["sleep", "5"], what="making it", timeout=0.1)
