"""What the plan says of Debian's own packages, against Debian's real package lists, by its ordinary client.

Nothing is installed: apt works in a folder of its own, with the sources of this machine (from which the lab's hosts are
built too) and all components, and simulates.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from ppdeploy.lab.rootfs import machine_release, parse_sources
from ppdeploy.plan.types import DriverPlan
from tests.factories import make_package
from tests.factories_driver import bare, plan

RELEASES = {"debian12": "bookworm", "debian13": "trixie"}


class Apt:
    """apt with the lists of one release of Debian, in a folder of its own."""

    def __init__(self, folder: Path, release: str) -> None:
        for name in ("lists/partial", "archives/partial", "etc/sources.list.d", "etc/preferences.d"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "etc/sources.list.d/debian.sources").write_text(sources(release), encoding="utf-8")
        config = folder / "apt.conf"
        config.write_text(
            f'Dir::State::Lists "{folder}/lists/";\nDir::State::status "{folder}/status";\n'
            f'Dir::Cache "{folder}/";\nDir::Etc::SourceList "/dev/null";\n'
            f'Dir::Etc::SourceParts "{folder}/etc/sources.list.d/";\n'
            f'Dir::Etc::PreferencesParts "{folder}/etc/preferences.d/";\nAPT::Architecture "amd64";\n',
            encoding="utf-8",
        )
        self.env = {**os.environ, "APT_CONFIG": str(config), "LC_ALL": "C"}
        self.run("apt-get", "--error-on=any", "update")

    def run(self, *argv: str) -> str:
        """Return what a program of apt printed; its failure is the test's."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{argv}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def candidate(self, package: str) -> str:
        """Return the version that apt would install."""
        found = re.search(r"Candidate: (\S+)", self.run("apt-cache", "policy", package))
        assert found, package
        return found.group(1)

    def installs(self, *packages: str) -> set[str]:
        """Return the names of all that an installation would bring."""
        told = self.run("apt-get", "--simulate", "--no-install-recommends", "install", *packages)
        return set(re.findall(r"^Inst (\S+)", told, re.MULTILINE))


def sources(release: str) -> str:
    """Return the archive that this machine's apt uses, with all components, for a release."""
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    asked = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    listing = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    uri, _ = parse_sources(listing, machine_release())
    return (
        f"Types: deb\nURIs: {uri}\nSuites: {release}\nComponents: main contrib non-free non-free-firmware\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )


@pytest.fixture(scope="module", params=RELEASES)
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def apt(system: str, tmp_path_factory: pytest.TempPathFactory) -> Apt:
    return Apt(tmp_path_factory.mktemp(system), RELEASES[system])


def on_newest_kernel(apt: Apt, system: str) -> DriverPlan:
    """Return the plan for a host that runs the newest kernel of its release."""
    newest = re.search(r"Depends: linux-image-(\S+-amd64)", apt.run("apt-cache", "show", "linux-image-amd64"))
    assert newest
    kernel = newest.group(1)
    facts = bare(system, os={"kernel": kernel}, next_kernel=kernel, packages=(make_package("linux-image-amd64", "1"),))
    return plan(facts)


def test_debians_own_driver_is_as_old_as_the_refusal_says(apt: Apt, system: str) -> None:
    own = Version(apt.candidate("nvidia-driver").partition("-")[0])
    assert own.major < 580
    refused = plan(bare(system), nvidia_driver="distribution")
    assert f"has driver {own.major} itself, which is older than 580" in refused.reason


def test_the_headers_that_are_planned_are_there_and_bring_a_compiler(apt: Apt, system: str) -> None:
    *headers, driver = on_newest_kernel(apt, system).packages
    assert driver == "nvidia-open"
    brought = apt.installs(*headers, "dkms")
    assert set(headers) <= brought
    assert any(re.fullmatch(r"gcc-\d+", name) for name in brought)


def test_contrib_has_what_nvidias_packages_build_on(apt: Apt) -> None:
    """Whoever has main alone lacks it: the plan asks for contrib before anything is installed."""
    where = apt.run("apt-cache", "policy", "glx-alternative-nvidia")
    assert "/contrib amd64 Packages" in where
    assert "/main amd64 Packages" not in where
