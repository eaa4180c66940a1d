"""A driver from a bundle alone, on two hosts that no archive is left to: whoever asks beyond the lab is counted.

NVIDIA's packages are made up, in a signed repository of the form of NVIDIA's; what they need is Debian's own, from main
and contrib, which this machine's real apt resolves and fetches. The card is put into the facts that the hosts gave.
"""

from __future__ import annotations

import functools
import http.server
import os
import platform
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ppdeploy import play
from ppdeploy.bundle import Bundle, DriverWish, make_bundle, open_bundle, verify_bundle
from ppdeploy.bundle import make as making
from ppdeploy.bundle.content import sha256
from ppdeploy.cli.bundling_driver import driver_wish
from ppdeploy.errors import InputError, PpdeployError
from ppdeploy.facts import NodeFacts
from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from ppdeploy.plan.driver import BLACKLIST, PREFERENCES, SOURCES
from tests.lab.cluster import Done, no_change
from tests.lab.drivers import NEWER, PACKAGES, SMI, VERSION, Driven, gpg, told, with_card
from tests.lab.test_driver_debian import Apt
from tests.lab.watch import Watch
from tests.wheels import Shelf

KERNEL = platform.release()
NEEDS = "libcuda1 (= $version), glx-alternative-nvidia, dkms"
"""What NVIDIA's driver builds on, of Debian's contrib and main; it brings a compiler."""


@dataclass
class Source:
    """A repository of NVIDIA's form on this machine, and where bundles of it are made."""

    base: Path
    url: str
    shelf: Shelf

    @property
    def key(self) -> Path:
        return self.base / "mirror.asc"

    def wish(self, *, branch: int | None = None, kernel: str = KERNEL, key: Path | None = None) -> DriverWish:
        """Return what `ppdeploy bundle` makes of its options."""
        found = driver_wish("nvidia", branch, [kernel], self.url, key or self.key, machine=platform.machine())
        assert found is not None
        return found

    def bundle(self, name: str, wish: DriverWish) -> Bundle:
        """Make a bundle with a driver, or put the driver anew into the one that is there."""
        return make_bundle(self.shelf.lock(), self.base / name, driver=wish)


@pytest.fixture(scope="module", autouse=True)
def drivers_alone() -> Iterator[None]:
    """These bundles have small wheels in vLLM's place and no packages: what else an apply asks of one is left out."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(play, "environment_problems", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    """A signed repository over HTTP, and this machine's apt with all of Debian's components."""
    base = tmp_path_factory.mktemp("bundled")
    folder = base / "srv/cuda/debian12/x86_64"
    folder.mkdir(parents=True)
    (folder / "smi").write_text(SMI, encoding="utf-8")
    script = PACKAGES.replace('"libcuda1 (= $version)"', f'"{NEEDS}"').replace("VERSION", VERSION)
    subprocess.run(["bash", "-ec", script.replace("NEWER", NEWER)], cwd=folder, check=True)
    release = (folder / "Release").read_text(encoding="utf-8")
    (folder / "InRelease").write_text(gpg(base, "--clearsign", stdin=release), encoding="utf-8")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(base / "srv"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, pytest.MonkeyPatch.context() as patched:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shelf = Shelf(base / "shelf")
        patched.setenv("APT_CONFIG", Apt(base / "apt", "bookworm").env["APT_CONFIG"])
        patched.setenv("PIP_CONFIG_FILE", os.devnull)
        patched.setenv("PIP_NO_INDEX", "1")
        patched.setenv("PIP_FIND_LINKS", str(shelf.links))
        patched.setattr(making, "uv_wheel", lambda _: shelf.uv)
        yield Source(base, f"http://127.0.0.1:{server.server_address[1]}/cuda", shelf)
        server.shutdown()


@pytest.fixture(scope="module")
def made(source: Source) -> Bundle:
    """A bundle of the branch that a plan chooses, though the repository has a newer one."""
    return source.bundle("bundle", source.wish())


def own_apt() -> list[str]:
    """Return all of apt's own on this machine, which making a bundle must leave as it is."""
    folders = ["/etc/apt", "/var/lib/apt", "/var/cache/apt", "/var/lib/dpkg"]
    listed = ["find", *folders, "-type", "f", "-printf", "%p %T@ %s\n"]
    return sorted(subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines())


def debs(bundle: Bundle) -> dict[str, str]:
    """Return the versions of the driver's packages in a bundle, by name."""
    names = [file.path.split("/")[1] for file in bundle.files if file.path.startswith("driver/")]
    return dict(name.split("_")[:2] for name in names if name.endswith(".deb"))


def test_a_bundle_has_the_wanted_branch_with_all_that_it_needs(source: Source) -> None:
    before = own_apt()
    bundle = source.bundle("bundle", source.wish())
    assert own_apt() == before
    verify_bundle(open_bundle(bundle.path))
    driver = bundle.driver
    assert driver is not None
    assert (driver.system, driver.source, driver.branch, driver.kernels) == ("debian 12", "nvidia", 580, (KERNEL,))
    assert driver.names == (f"linux-headers-{KERNEL}", "nvidia-open")
    found = debs(bundle)
    assert {found[name] for name in ("nvidia-open", "nvidia-driver-cuda", "libcuda1")} == {VERSION}
    assert {"dkms", "gcc-12", "make", "glx-alternative-nvidia", "libc6"} <= set(found)
    index = (bundle.path / "driver" / "Packages").read_text(encoding="utf-8")
    assert index.count("\nFilename: ./") == len(found)


def test_it_is_as_it_was_where_another_kernel_or_branch_is_not_to_be_had(source: Source, made: Bundle) -> None:
    # The same of the same repository; it was fetched anew.
    assert source.bundle("bundle", source.wish()) == made
    with pytest.raises(InputError, match=r"no package linux-headers-9\.9\.9-none \(--nvidia-driver\)"):
        source.bundle("bundle", source.wish(kernel="9.9.9-none"))
    with pytest.raises(InputError, match=rf"the repository has no branch 590, its nvidia-open is {NEWER}"):
        source.bundle("bundle", source.wish(branch=590))
    assert open_bundle(made.path) == made


def test_a_repository_that_another_key_signed_is_not_believed(source: Source) -> None:
    other = source.base / "other"
    other.mkdir()
    gpg(other, "--list-keys")
    with pytest.raises(PpdeployError, match="NO_PUBKEY"):
        source.bundle("foreign", source.wish(key=other / "mirror.asc"))
    assert not (source.base / "foreign").exists()


def test_nvidias_own_key_comes_from_its_package_by_the_hash_of_that(source: Source) -> None:
    """NVIDIA's own package is not to be had here: one of its form, with the test's key, made into a keyring."""
    tree = source.base / "keyring"
    (tree / "DEBIAN").mkdir(parents=True)
    control = "Package: cuda-keyring\nVersion: 1.1-1\nArchitecture: all\nMaintainer: lab\nDescription: lab\n"
    (tree / "DEBIAN" / "control").write_text(control)
    folder = tree / "usr/share/keyrings"
    folder.mkdir(parents=True)
    dearmor = ["gpg", "--batch", "--dearmor", "--output", str(folder / "cuda-archive-keyring.gpg"), str(source.key)]
    subprocess.run(dearmor, check=True)
    package = source.base / "srv/cuda/debian12/x86_64/cuda-keyring_1.1-1_all.deb"
    subprocess.run(["dpkg-deb", "--build", str(tree), str(package)], check=True, capture_output=True)
    wish = source.wish()
    assert wish.repository is not None
    url = f"{source.url}/debian12/x86_64/{package.name}"
    repository = replace(wish.repository, key=None, keyring=url, keyring_sha256=sha256(package))
    bundle = source.bundle("keyring-bundle", replace(wish, repository=repository))
    assert debs(bundle)["nvidia-open"] == VERSION
    with pytest.raises(PpdeployError, match="Hash Sum mismatch"):
        source.bundle("other-keyring", replace(wish, repository=replace(repository, keyring_sha256="0" * 64)))


# ---- on the hosts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    """Two hosts without any archive, taken down at the end."""
    lab = Lab(f"{default_name()}-driverbundle")
    try:
        lab.down()
        described = LabInventory.one_pipeline(
            2, model=str(tiny_model()), vars={"ppdeploy_device": "cuda"}, wheelhouse=None
        )
        inventory = lab.up(2, inventory=described, owner=os.getpid())
        for node in lab.nodes:
            lab.exec_ssh(node, ["sh", "-ec", "rm -rf /srv/ppdeploy/packages; : > /etc/apt/sources.list"])
        with Watch(lab) as watch:
            folder, notes = tmp_path_factory.mktemp("driven"), {"watch": watch}
            yield Driven(lab, inventory, folder, [], prefix=watch.prefix(), notes=notes)
    finally:
        lab.down()


@pytest.fixture(scope="module")
def bare(driven: Driven) -> dict[str, NodeFacts]:
    """What the hosts say of themselves; Debian's contrib is off on them."""
    return with_card(driven.facts(), **{node: {"components": ("main",)} for node in driven.lab.nodes})


def wants(bundle: Bundle, **more: object) -> dict[str, object]:
    """Return the variables of a site that has nothing but the bundle."""
    mirror = dict.fromkeys(("nvidia_repository", "nvidia_repository_key"))
    return {"wheelhouse": str(bundle.path), "system_packages": "bundle", **mirror, **more}


def test_a_node_of_another_kernel_is_refused_with_the_command(
    driven: Driven, bare: dict[str, NodeFacts], made: Bundle
) -> None:
    os_ = bare["node2"].os.model_copy(update={"kernel": "6.1.0-99-amd64"})
    facts = {**bare, "node2": bare["node2"].model_copy(update={"os": os_})}
    facts = with_card(facts, node2={"next_kernel": "6.1.0-99-amd64"})
    done = driven.drive(driven.decide(facts, **wants(made)))
    assert done.code != 0
    assert f"has branch 580 of NVIDIA's repository for debian 12 on x86_64, kernel {KERNEL}, where" in told(done)
    command = f"--nvidia-driver nvidia --nvidia-branch 580 --kernel {KERNEL} --kernel 6.1.0-99-amd64"
    assert f"`ppdeploy bundle --out {made.path} {command}`" in told(done), done.said
    assert done.changed() == no_change()


def test_a_check_changes_nothing(driven: Driven, bare: dict[str, NodeFacts], made: Bundle) -> None:
    before = driven.state()
    done = driven.drive(driven.decide(bare, **wants(made)), "--check", "--diff")
    assert done.code == 0, done.said
    assert driven.state() == before


@pytest.fixture(scope="module")
def brought(driven: Driven, bare: dict[str, NodeFacts], made: Bundle) -> Done:
    """The driver is brought to both hosts; the second one is taken for one without rsync."""
    decided = driven.decide(bare, **wants(made))
    assert [line.partition(":")[0] for line in decided["lines"]] == ["node1", "node2"]
    assert f"install linux-headers-{KERNEL}, nvidia-open (branch 580) from the bundle: " in decided["lines"][0]
    assert [decided["nodes"][node]["rsync"] for node in driven.lab.nodes] == [True, True]
    decided["nodes"]["node2"]["rsync"] = False
    done = driven.drive(decided)
    assert done.code == 0, done.said
    return done


@pytest.mark.usefixtures("brought")
def test_the_driver_comes_from_the_bundle_and_nobody_asks_beyond_the_lab(driven: Driven) -> None:
    assert driven.notes["watch"].packets() == {"controller": 0, "hosts": 0}
    show = "dpkg-query --show --showformat='${Package}=${Version} ' nvidia-open nvidia-driver-cuda libcuda1"
    for node in driven.lab.nodes:
        assert driven.out(node, show) == " ".join(
            f"{name}={VERSION}" for name in ("libcuda1", "nvidia-driver-cuda", "nvidia-open")
        )
        assert "580.95.05" in driven.out(node, "nvidia-smi --query-gpu=driver_version; gcc --version; dkms --version")
        assert driven.out(node, "ls -A /opt/ppdeploy/staging; stat -c %U /opt/ppdeploy /opt/ppdeploy/staging") == (
            "root\nroot"
        )


@pytest.mark.usefixtures("brought")
def test_what_keeps_it_is_there_and_the_host_knows_no_repository(driven: Driven) -> None:
    for node in driven.lab.nodes:
        held = set(driven.out(node, "apt-mark showhold").split())
        assert {"libcuda1", "nvidia-driver-cuda", "nvidia-open"} <= held
        driven.out(node, f"ls {BLACKLIST}")
        assert "Pin: version 580.*" in driven.out(node, f"cat {PREFERENCES}")
        assert driven.out(node, f"ls {SOURCES} 2>/dev/null || echo none") == "none"
        policy = driven.out(node, "apt-cache policy nvidia-open")
        assert f"*** {VERSION} 1000" in policy
        assert "http" not in policy


@pytest.mark.usefixtures("brought")
def test_a_second_run_has_nothing_to_do(driven: Driven, made: Bundle) -> None:
    decided = driven.decide(driven.facts(), **wants(made))
    assert {node["action"] for node in decided["nodes"].values()} == {"keep"}
    assert (decided["work"], decided["blocked"], decided["lines"]) == (False, [], [])
    done = driven.drive(decided)
    assert (done.code, done.changed()) == (0, no_change()), done.said


@pytest.mark.usefixtures("brought")
def test_another_bundle_upgrades_what_is_held(driven: Driven, source: Source) -> None:
    newer = source.bundle("newer", source.wish(branch=610))
    decided = driven.decide(with_card(driven.facts()), **wants(newer, nvidia_branch=610))
    assert {node["action"] for node in decided["nodes"].values()} == {"install"}, decided
    done = driven.drive(decided)
    assert done.code == 0, done.said
    for node in driven.lab.nodes:
        assert driven.out(node, "dpkg-query --show --showformat='${Version}' nvidia-driver-cuda") == NEWER
        assert "nvidia-open" in driven.out(node, "apt-mark showhold")
        assert "Pin: version 610.*" in driven.out(node, f"cat {PREFERENCES}")
    assert driven.notes["watch"].packets() == {"controller": 0, "hosts": 0}
