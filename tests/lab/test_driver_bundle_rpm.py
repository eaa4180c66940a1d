"""A driver from a bundle of RPM packages, by real dnf 4, on a host whose own repositories nobody may read.

No host of Red Hat's kin is to be had here: the host is Debian's with Debian's dnf put on it, and the facts say that it
is a Rocky Linux with a card. The packages are made up and signed, in a repository over HTTP as a mirror has one.
"""

from __future__ import annotations

import functools
import http.server
import os
import platform
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppdeploy import play
from ppdeploy.bundle import Bundle, apt, commands, dnf, make_bundle, open_bundle, verify_bundle
from ppdeploy.bundle import make as making
from ppdeploy.cli import bundling_driver
from ppdeploy.cli.bundling_driver import driver_wish
from ppdeploy.errors import InputError
from ppdeploy.facts import NodeFacts
from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from ppdeploy.plan.driver import BLACKLIST, REPOSITORY
from tests import rpms
from tests.factories_driver import bare as facts_of
from tests.lab.cluster import no_change
from tests.lab.drivers import SMI, Driven, with_card
from tests.lab.test_isolated_rpm import BREAK_DNF
from tests.lab.watch import Watch
from tests.wheels import Shelf

KERNEL = platform.release()
OLD, NEW = "580.95.05", "610.57.04"
HEADERS = (f"kernel-devel-{KERNEL}", f"kernel-devel-matched-{KERNEL}", "kernel-headers")
ROCKY = facts_of("rocky9").os.model_copy(update={"kernel": KERNEL, "machine": platform.machine()})


class Mirror:
    """A mirror of NVIDIA's repository for RHEL 9, and bundles that are made from it."""

    def __init__(self, base: Path) -> None:
        """Build the packages in two branches, sign them and index them."""
        self.base = base
        self.etc = base / "etc"
        self.keys = rpms.Keys(base / "keys", "nvidia", "stranger")
        self.url = ""
        self.folder = base / "srv/cuda/rhel9/x86_64"
        own = base / "own"
        for folder in (self.folder, own, self.etc / "yum.repos.d"):
            folder.mkdir(parents=True)
        for version in (OLD, NEW):
            exact = [f"Requires: nvidia-driver-cuda = {version}", "Requires: dkms"]
            rpms.build(self.folder, "nvidia-driver-cuda", version, {"/usr/bin/nvidia-smi": SMI})
            rpms.build(self.folder, "nvidia-open", version, {"/usr/share/nvidia-open": version}, tags=exact)
        # The machine's own repository, which has what NVIDIA's packages build on. dkms requires of a system with a
        # kernel what none without one has, as EPEL's and Fedora's do.
        tags = {
            "shell": ["Provides: /bin/sh"],
            "kernel-core": [f"Provides: kernel-core-{KERNEL}"],
            f"kernel-devel-matched-{KERNEL}": ["Provides: kernel-devel-matched", f"Requires: kernel-core-{KERNEL}"],
            "dkms": ["Requires: (kernel-devel-matched if kernel-core)"],
        }
        for name in (*tags, f"kernel-devel-{KERNEL}", "kernel-headers"):
            rpms.build(own, name, "1", {f"/usr/share/{name}": name}, tags=tags.get(name, ()))
        shutil.rmtree(self.folder / "top")
        shutil.rmtree(own / "top")
        self.keys.sign("nvidia", *self.folder.glob("*.rpm"))
        for folder in (self.folder, own):
            rpms.index(folder)
        text = f"[own]\nname=own\nbaseurl=file://{own}\nenabled=1\ngpgcheck=0\n"
        (self.etc / "yum.repos.d" / "own.repo").write_text(text)

    def run(self, command: list[str]) -> str:
        """Run a program as on a machine with these repositories."""
        return commands.run(rpms.on_a_machine_with(self.etc, command))

    def bundle(self, name: str, shelf: Shelf, *, branch: int | None = None, key: str = "nvidia") -> Bundle:
        """Make a bundle with the driver, as `ppdeploy bundle` does of its options on a Rocky Linux."""
        wish = driver_wish("nvidia", branch, [], self.url, self.keys.public(key), machine=platform.machine())
        return make_bundle(shelf.lock(), self.base / name, driver=wish)


@pytest.fixture(scope="module", autouse=True)
def drivers_alone() -> Iterator[None]:
    """These bundles have small wheels in vLLM's place and no packages: what else an apply asks of one is left out."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(play, "environment_problems", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mirror]:
    made = Mirror(tmp_path_factory.mktemp("rpmdriver"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(made.base / "srv"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, pytest.MonkeyPatch.context() as patched:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_address[1]}/cuda"
        patched.setattr(dnf, "run", made.run)
        patched.setattr(bundling_driver, "this_system", lambda: ROCKY)
        yield made
        server.shutdown()
    made.keys.close()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """Small wheels in the place of vLLM's."""
    made = Shelf(tmp_path_factory.mktemp("wheels") / "shelf")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PIP_CONFIG_FILE", os.devnull)
        patched.setenv("PIP_NO_INDEX", "1")
        patched.setenv("PIP_FIND_LINKS", str(made.links))
        patched.setattr(making, "uv_wheel", lambda _: made.uv)
        yield made


def test_a_bundle_has_the_wanted_branch_signed_by_the_mirrors_key(mirror: Mirror, shelf: Shelf) -> None:
    bundle = mirror.bundle("bundle", shelf)
    verify_bundle(open_bundle(bundle.path))
    driver = bundle.driver
    assert driver is not None
    assert (driver.manager, driver.system, driver.branch, driver.kernels) == ("dnf", "rocky 9", 580, (KERNEL,))
    assert driver.names == (*HEADERS, "nvidia-open-580.*")
    found = {
        path.name.rsplit("-", 2)[0]: path.name.rsplit("-", 2)[1] for path in (bundle.path / "driver").glob("*.rpm")
    }
    # What needs nothing of the folder is not in it: an interpreter of scripts, say.
    assert found == {
        # The kernel is what the nodes run already.
        **dict.fromkeys((*HEADERS, "kernel-core", "dkms"), "1"),
        **dict.fromkeys(("nvidia-driver-cuda", "nvidia-open"), OLD),
    }
    with pytest.raises(InputError, match=r"is not signed with a key that its repository names \(--nvidia-driver\)"):
        mirror.bundle("foreign", shelf, key="stranger")
    with pytest.raises(InputError, match=r"no package nvidia-open-595\.\* \(--nvidia-driver\)"):
        mirror.bundle("none", shelf, branch=595)


@pytest.fixture(scope="module")
def driven(mirror: Mirror, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    """A host that dnf was put on, taken down at the end."""
    lab = Lab(f"{default_name()}-driverrpm")
    loose = mirror.base / "loose"
    apt.fetch(["dnf", "rpm"], loose)
    for kernel in (mirror.base / "own").glob("kernel-core-*.rpm"):
        shutil.copy(kernel, loose)
    try:
        lab.down()
        described = LabInventory.one_pipeline(
            1, model=str(tiny_model()), vars={"ppdeploy_device": "cuda"}, wheelhouse=None
        )
        inventory = lab.up(1, inventory=described, binds={loose: "/srv/loose"}, owner=os.getpid())
        with Watch(lab) as watch:
            notes = {"watch": watch}
            cluster = Driven(lab, inventory, tmp_path_factory.mktemp("driven"), [], prefix=watch.prefix(), notes=notes)
            programs = [{"package": name, "kind": "program", "value": name} for name in ("dnf", "rpm")]
            bring = {"wants": programs, "manager": "apt", "repository": "/srv/loose"}
            play = {"name": "dnf", "hosts": "vllm", "gather_facts": False, "become": True}
            done = cluster.book("dnf", {**play, "tasks": [{"name": "Bring dnf", "ppdeploy_packages": bring}]})
            assert done.code == 0, done.said
            cluster.out("node1", "rpm --install --nodeps /srv/loose/kernel-core-*.rpm")
            cluster.out("node1", BREAK_DNF)
            yield cluster
    finally:
        lab.down()


def as_rocky(facts: dict[str, NodeFacts]) -> dict[str, NodeFacts]:
    """Return facts of a host as those of a Rocky Linux with a card."""
    known = facts_of("rocky9").driver
    assert known is not None
    held = {"manager": "dnf", "packages": known.packages, "initramfs": None}
    found = with_card(facts, node1=held)
    own = ROCKY.model_copy(update={"systemd_version": facts["node1"].os.systemd_version})
    return {"node1": found["node1"].model_copy(update={"os": own})}


def wants(bundle: Bundle, **more: Any) -> dict[str, Any]:
    """Return the variables of a site that has nothing but the bundle."""
    mirrors = dict.fromkeys(("nvidia_repository", "nvidia_repository_key"))
    return {"wheelhouse": str(bundle.path), "system_packages": "bundle", **mirrors, **more}


def test_the_driver_comes_from_the_bundle_and_no_repository_is_read(
    driven: Driven, mirror: Mirror, shelf: Shelf
) -> None:
    bare = as_rocky(driven.facts())
    decided = driven.decide(bare, **wants(mirror.bundle("bundle", shelf)))
    assert decided["blocked"] == [], decided
    names = ", ".join((*HEADERS, "nvidia-open-580.*"))
    assert decided["lines"] == [f"node1: install {names} (branch 580) from the bundle: there is no NVIDIA driver"]
    done = driven.drive(decided)
    assert done.code == 0, done.said
    query = "rpm --query --queryformat '%{NAME} %{VERSION}\\n' nvidia-open nvidia-driver-cuda dkms"
    assert driven.out("node1", query) == f"nvidia-open {OLD}\nnvidia-driver-cuda {OLD}\ndkms 1"
    driven.out("node1", f"nvidia-smi --query-gpu=driver_version; ls {BLACKLIST}")
    assert driven.out("node1", f"ls {REPOSITORY} /opt/ppdeploy/staging/driver 2>/dev/null || echo none") == "none"
    assert driven.notes["watch"].packets() == {"controller": 0, "hosts": 0}
    # The same once more: dnf finds nothing to do.
    again = driven.drive({**decided, "nodes": {"node1": {**decided["nodes"]["node1"], "files": []}}})
    assert again.code == 0, again.said
    assert "ok: [node1]" in again.out.partition("Install the driver from them")[2].partition("TASK")[0], again.said


def test_another_bundle_upgrades_it(driven: Driven, mirror: Mirror, shelf: Shelf) -> None:
    newer = mirror.bundle("newer", shelf, branch=610)
    decided = driven.decide(as_rocky(driven.facts()), **wants(newer, nvidia_branch=610))
    assert decided["nodes"]["node1"]["packages"][-1] == "nvidia-open-610.*", decided
    done = driven.drive(decided)
    assert done.code == 0, done.said
    assert driven.out("node1", "rpm --query --queryformat '%{VERSION}' nvidia-open") == NEW
    assert driven.notes["watch"].packets() == {"controller": 0, "hosts": 0}
    assert done.changed() != no_change()
