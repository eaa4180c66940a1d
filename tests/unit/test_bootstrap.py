"""scripts/bootstrap.sh on machines that lack something, played by a PATH with a stand-in for apt-get."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/bootstrap.sh"

#: Notes what it is asked; "installs" each package by making its program; fails on the first try when told to.
APT_GET = """#!/bin/bash
echo "$*" >> "$LOG"
[ "$1" = install ] || exit 0
if [ -e "$LISTS_MISSING" ]; then rm "$LISTS_MISSING"; exit 100; fi
for package in "${@:2}"; do
  case $package in -*) continue ;; iperf3 | rsync) ;; *) exit 100 ;; esac
  ln -sf /bin/true "$PROGRAMS/$package"
done
"""


class Machine:
    """A PATH that holds only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.log = folder / "apt.log"
        self.lists_missing = folder / "lists-missing"
        for name in ("bash", "dirname", "rm", "ln"):
            (self.programs / name).symlink_to(shutil.which(name) or name)
        self.has("systemd-nspawn", "mmdebstrap", "ssh", "ip", "rsync", "iperf3", "nft")
        self.is_user(0)

    def has(self, *names: str) -> None:
        for name in names:
            (self.programs / name).symlink_to("/bin/true")

    def lacks(self, *names: str) -> None:
        for name in names:
            (self.programs / name).unlink()

    def is_user(self, uid: int) -> None:
        self.writes("id", f"#!/bin/bash\necho {uid}\n")

    def writes(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def bootstraps(self, verb: str) -> subprocess.CompletedProcess[str]:
        # The script adds /usr/sbin for ordinary users: the tests take away only what never lies there.
        environment = {
            "PATH": str(self.programs),
            "LOG": str(self.log),
            "PROGRAMS": str(self.programs),
            "LISTS_MISSING": str(self.lists_missing),
        }
        return subprocess.run(
            [self.programs / "bash", SCRIPT, verb],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_nothing_is_installed_or_said_where_nothing_is_missing(machine: Machine) -> None:
    machine.writes("apt-get", APT_GET)
    done = machine.bootstraps("system")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert machine.asked() == []


def test_only_what_is_missing_is_named_and_installed(machine: Machine) -> None:
    machine.writes("apt-get", APT_GET)
    machine.lacks("rsync", "iperf3")
    done = machine.bootstraps("system")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "installing programs that the lab needs: rsync iperf3\n"
    assert machine.asked() == ["install -qq -y --no-install-recommends rsync iperf3"]


def test_what_bundles_of_rpm_packages_are_tested_with_is_asked_for_apart(machine: Machine) -> None:
    machine.writes("apt-get", APT_GET.replace("iperf3 |", "createrepo-c | gnupg |"))
    machine.has("dnf", "rpmbuild")
    done = machine.bootstraps("rpm")
    assert done.returncode == 0, done.stderr
    assert machine.asked() == ["install -qq -y --no-install-recommends createrepo-c gnupg"]


def test_package_lists_are_fetched_when_the_first_try_fails(machine: Machine) -> None:
    machine.writes("apt-get", APT_GET)
    machine.lists_missing.touch()
    machine.lacks("iperf3")
    done = machine.bootstraps("system")
    assert done.returncode == 0, done.stderr
    install = "install -qq -y --no-install-recommends iperf3"
    assert machine.asked() == [install, "update -qq", install]


def test_an_install_that_fails_twice_fails_the_run(machine: Machine) -> None:
    machine.writes("apt-get", APT_GET)
    machine.lacks("mmdebstrap")
    assert machine.bootstraps("system").returncode != 0


def test_who_is_not_root_is_told_the_command(machine: Machine) -> None:
    machine.writes("apt-get", APT_GET)
    machine.is_user(1000)
    machine.lacks("iperf3")
    done = machine.bootstraps("system")
    assert done.returncode == 1
    assert done.stderr == "error: programs that the lab needs missing: run `sudo apt-get install iperf3`\n"
    assert machine.asked() == []


def test_elsewhere_the_packages_are_named(machine: Machine) -> None:
    machine.lacks("iperf3", "mmdebstrap")
    done = machine.bootstraps("system")
    assert done.returncode == 1
    assert "mmdebstrap iperf3" in done.stderr
    assert "package manager" in done.stderr


def test_an_old_python_is_refused_with_the_way_out(machine: Machine) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        machine.writes(name, "#!/bin/bash\nexit 1\n")
    done = machine.bootstraps("venv")
    assert done.returncode == 1
    assert done.stderr == (
        "error: no Python 3.11 or newer found: install one, or name it: make PYTHON=/path/to/python3\n"
    )
