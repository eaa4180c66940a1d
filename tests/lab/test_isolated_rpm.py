"""RPM packages from a bundle alone, by real dnf: made here from made-up repositories, and installed on two hosts.

No mirror and no host of Red Hat's kin is to be had here. So the hosts are Debian's, with Debian's dnf 4 put on them and
an /etc/os-release that says Rocky Linux; the packages are small ones that rpmbuild makes, among them WireGuard's real
programs. What resolves, fetches, checks signatures, indexes and installs is the real dnf, and so are role and playbook.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppdeploy import locks
from ppdeploy.bundle import Bundle, apt, commands, dnf, make_bundle, open_bundle, packages, verify_bundle
from ppdeploy.bundle import make as making
from ppdeploy.bundle.content import MANIFEST
from ppdeploy.errors import InputError
from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from ppdeploy.plan.tunnel import INTERFACE, PUBLIC_KEY
from tests import rpms
from tests.factories import make_facts
from tests.lab.cluster import Done, no_change
from tests.lab.test_isolated import Isolated
from tests.lab.watch import Watch
from tests.wheels import Shelf

ROCKY = {"id": "rocky", "id_like": ("rhel", "centos", "fedora"), "version_id": "9.4", "machine": platform.machine()}
RELEASE = """\
NAME="Rocky Linux"
ID="rocky"
ID_LIKE="rhel centos fedora"
VERSION_ID="9.5"
PRETTY_NAME="Rocky Linux 9.5 (Blue Onyx), as a test says"
"""
"""A later one than that of the machine which made the bundle."""
REPOSITORY = """\
[site]
name=site
baseurl=file://{folder}/$site
enabled=1
gpgcheck=1
gpgkey=file://{key}
"""
BROKEN_REPOSITORY = "[internet]\nname=internet\nbaseurl=https://192.0.2.1/\nenabled=1\n"
"""On every host: whoever reads it is counted, and waits."""
BREAK_DNF = f"""\
mkdir -p /etc/yum.repos.d /etc/dnf
echo '{BROKEN_REPOSITORY}' > /etc/yum.repos.d/internet.repo
echo '{BROKEN_REPOSITORY.replace("internet", "elsewhere")}' >> /etc/dnf/dnf.conf
"""
"""Commands by which a host has it, and another one in dnf's own configuration."""
SERVICE = "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n"
WANTS = [
    {"package": "python3.11", "kind": "python", "value": "3.11"},
    {"package": "tool", "kind": "program", "value": "tool"},
    {"package": "haproxy", "kind": "daemon", "value": "haproxy"},
]
TUNNEL = ["wireguard-tools", "wireguard-go"]
NAMES = ["tool", "haproxy", *TUNNEL]


class Site:
    """The made-up repositories of this machine, and bundles that are made from them."""

    def __init__(self, base: Path) -> None:
        """Build the packages: `good` are signed with the key that the repository names, in `bad` two are not."""
        self.folder = base / "site"
        self.etc = base / "etc"
        self.loose = base / "loose"
        self._base = base
        for folder in (self.folder, self.loose, self.etc / "yum.repos.d", self.etc / "dnf" / "vars"):
            folder.mkdir(parents=True)
        self.keys = rpms.Keys(base / "keys", "vendor", "stranger")
        (self.etc / "yum.repos.d" / "site.repo").write_text(
            REPOSITORY.format(folder=self.folder, key=self.keys.public("vendor"))
        )
        good = self.folder / "good"
        good.mkdir()
        run = {name: f"#!/bin/sh\necho {name}\n" for name in ("tool", "haproxy", "base-devel")}
        rpms.build(good, "shell", "1", {"/usr/share/shell": ""}, tags=["Provides: /bin/sh"])
        # dnf knows of a file in this place by the longer list of the repository alone.
        rpms.build(good, "lib", "1", {"/usr/share/lib/what-tool-reads": ""})
        rpms.build(good, "tool", "1", {"/usr/bin/tool": run["tool"]}, tags=["Requires: /usr/share/lib/what-tool-reads"])
        started = "%post\nsystemctl enable --now --quiet haproxy.service"
        program = {"/usr/sbin/haproxy": run["haproxy"], "/usr/lib/systemd/system/haproxy.service": SERVICE}
        rpms.build(good, "haproxy", "2.4", program, scripts=started)
        rpms.build(good, "base", "2", {"/usr/bin/base": "#!/bin/sh\necho 2\n"})
        rpms.build(good, "base-devel", "2", {"/usr/bin/base-devel": run["base-devel"]}, tags=["Requires: base = 2"])
        rpms.build(good, "incomplete", "1", {"/usr/bin/incomplete": ""}, tags=["Requires: what-nobody-has"])
        apt.fetch(TUNNEL, base / "debs")
        for name, path in zip(TUNNEL, ("usr/bin/wg", "usr/bin/wireguard-go"), strict=True):
            (package,) = (base / "debs").glob(f"{name}_*.deb")
            subprocess.run(["dpkg-deb", "--extract", str(package), str(base / name)], check=True)
            rpms.build(good, name, "1", {f"/{path}": (base / name / path).read_bytes()})
        shutil.rmtree(good / "top")
        self.keys.sign("vendor", *good.glob("*.rpm"))
        bad = self.folder / "bad"
        shutil.copytree(good, bad)
        self.keys.sign("stranger", *bad.glob("lib-1-*"))
        rpms.build(bad, "base", "2", {"/usr/bin/base": "#!/bin/sh\necho other\n"})
        shutil.rmtree(bad / "top")
        for folder in (good, bad):
            rpms.index(folder)
        slow = "%pre -p <lua>\nposix.sleep(120)\n"
        rpms.build(self.loose, "slow", "1", {"/usr/bin/slow": ""}, scripts=slow)
        rpms.build(self.loose, "base", "3", {"/usr/bin/base": "#!/bin/sh\necho 3\n"})
        shutil.rmtree(self.loose / "top")
        apt.fetch(["dnf"], self.loose)
        self.choose("good")

    def choose(self, repository: str) -> None:
        """Have the machine's repository be another one, by a variable of dnf as a site may have it."""
        (self.etc / "dnf" / "vars" / "site").write_text(f"{repository}\n")

    def run(self, command: list[str]) -> str:
        """Run a program as on a machine whose repository this is."""
        return commands.run(rpms.on_a_machine_with(self.etc, command))

    def fetch(self, *names: str) -> list[str]:
        """Fetch packages as a bundle does, and return what came."""
        folder = self._base / "fetched"
        shutil.rmtree(folder, ignore_errors=True)
        dnf.fetch(names, folder)
        return sorted(path.name.rsplit("-", 2)[0] for path in folder.glob("*.rpm"))


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, patched: pytest.MonkeyPatch) -> Iterator[Site]:
    """What this machine's dnf knows, which nothing else on it sees."""
    made = Site(tmp_path_factory.mktemp("rpm"))
    patched.setattr(dnf, "run", made.run)
    yield made
    made.keys.close()


@pytest.fixture(scope="module")
def shelf(site: Site, tmp_path_factory: pytest.TempPathFactory, patched: pytest.MonkeyPatch) -> Shelf:
    """Small wheels in the place of vLLM's, on a machine of that site."""
    assert site.etc.is_dir()
    made = Shelf(tmp_path_factory.mktemp("wheels") / "shelf")
    patched.setenv("PIP_CONFIG_FILE", os.devnull)
    patched.setenv("PIP_NO_INDEX", "1")
    patched.setenv("PIP_FIND_LINKS", str(made.links))
    patched.setattr(making, "uv_wheel", lambda _: made.uv)
    patched.setattr(packages, "this_system", lambda: make_facts("node1").os.model_copy(update=ROCKY))
    return made


@pytest.fixture(scope="module")
def bundle(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle of RPM packages, as `ppdeploy bundle --packages` makes it on a Rocky Linux."""
    return make_bundle(shelf.lock(), tmp_path_factory.mktemp("bundle") / "bundle", packages=NAMES)


@pytest.fixture(scope="module")
def isolated(site: Site, shelf: Shelf, bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Isolated]:
    """Two bare hosts that dnf was put on, taken down at the end."""
    lab = Lab(f"{default_name()}-rpm")
    try:
        lab.down()
        binds = {site.loose: "/srv/loose"}
        inventory = lab.up(2, inventory=LabInventory.one_pipeline(2, wheelhouse=None), binds=binds, owner=os.getpid())
        with Watch(lab) as watch:
            found = Isolated(
                lab,
                inventory,
                tmp_path_factory.mktemp("isolated"),
                [],
                prefix=watch.prefix(),
                notes={"watch": watch},
                shelf=shelf,
                bundle=bundle.path,
            )
            want = {"package": "dnf", "kind": "program", "value": "dnf"}
            bring = {"wants": [want], "manager": "apt", "repository": "/srv/loose"}
            brought = found.roles("dnf", [], [{"name": "Bring dnf", "ppdeploy_packages": bring}])
            assert brought.code == 0, brought.said
            for node in lab.nodes:
                found.out(
                    node,
                    f"cat > /etc/os-release.new <<'END'\n{RELEASE}END\nmv /etc/os-release.new /etc/os-release\n"
                    + BREAK_DNF,
                )
            yield found
    finally:
        lab.down()


def install(isolated: Isolated, name: str = "install", **more: Any) -> Done:
    """Run the role with the bundle's RPM packages."""
    assert isolated.shelf is not None
    wants = {"vllm_install_package_manager": "dnf", "vllm_install_packages": WANTS, **more}
    return isolated.install(isolated.shelf.lock(), name, **wants)


def test_dnf_brings_what_a_package_needs_and_says_what_it_cannot(site: Site) -> None:
    assert site.fetch("tool", "base-devel") == ["base", "base-devel", "lib", "tool"]
    for names, sentence in (
        (["tool", "no-such"], r"this machine's repositories have no package no-such \(--packages\)"),
        (["incomplete"], r"repositories have no what-nobody-has, which incomplete-1-1\.\S+ needs"),
    ):
        with pytest.raises(InputError, match=sentence):
            site.fetch(*names)
    assert [name for name in ("tool", "no-such") if dnf.archives_have(name)] == ["tool"]


@pytest.mark.parametrize(("name", "culprit"), [("tool", "lib-1-1"), ("base", "base-2-1")])
def test_a_package_with_another_key_or_with_none_is_refused(site: Site, name: str, culprit: str) -> None:
    site.choose("bad")
    with pytest.raises(InputError, match=rf"^{culprit}\.\S+\.rpm is not signed with a key that its repository names"):
        site.fetch(name)
    site.choose("good")
    assert name in site.fetch(name)


def test_the_bundle_is_a_repository_whose_every_file_is_listed(bundle: Bundle) -> None:
    verify_bundle(open_bundle(bundle.path))
    held = bundle.packages
    assert held is not None
    assert (held.manager, held.system, held.names) == ("dnf", "rocky 9", tuple(NAMES))
    listed = {file.path for file in bundle.files if file.path.startswith("packages/")}
    assert listed == {
        path.relative_to(bundle.path).as_posix() for path in (bundle.path / "packages").rglob("*") if path.is_file()
    }
    assert "packages/repodata/repomd.xml" in listed


def test_another_dnf_is_waited_for_and_named(isolated: Isolated) -> None:
    slow = "systemd-run --quiet --unit=holder dnf --assumeyes '--disablerepo=*' install /srv/loose/slow-*.rpm"
    isolated.out("node1", slow)
    isolated.out(
        "node1", "for i in $(seq 100); do test -e /var/lib/dnf/rpmdb_lock.pid && exit; sleep 0.1; done; exit 1"
    )
    done = install(isolated, "locked")
    isolated.out("node1", "systemctl kill --signal=KILL holder; rm -f /var/lib/dnf/rpmdb_lock.pid")
    assert done.code == 2, done.said
    said = " ".join((done.out + done.err).split())
    assert "dnf (pid " in said
    assert "holder.service) has been installing packages for 2 s" in said, done.said


def test_both_hosts_install_from_the_bundle_and_no_repository_of_theirs_is_read(isolated: Isolated) -> None:
    watch = isolated.notes["watch"]
    done = install(isolated)
    assert done.code == 0, done.said
    assert "everything else came after" in done.out
    assert watch.packets() == {"controller": 0, "hosts": 0}
    for node in isolated.lab.nodes:
        assert isolated.out(node, "test -e /usr/share/lib/what-tool-reads; tool; haproxy") == "tool\nhaproxy"
        # Its package has started it, and it has nothing to do. Of a unit that is off, both end with an error.
        assert isolated.out(node, "systemctl is-enabled haproxy || true") == "disabled"
        assert isolated.out(node, "systemctl is-active haproxy || true") == "inactive"
        assert isolated.out(node, "ls /opt/ppdeploy/staging") == ""
    again = install(isolated)
    assert (again.code, again.changed()) == (0, no_change()), again.said


def test_an_older_bundle_takes_nothing_back(isolated: Isolated, tmp_path: Path) -> None:
    assert isolated.shelf is not None
    older = make_bundle(isolated.shelf.lock(), tmp_path / "older", packages=["base-devel"])
    isolated.out("node1", "dnf --assumeyes '--disablerepo=*' install /srv/loose/base-3-*.rpm")
    want = {"package": "base-devel", "kind": "program", "value": "base-devel"}
    more = {"vllm_install_bundle": str(older.path), "vllm_install_packages_needed": True}
    done = install(isolated, "older", vllm_install_packages=[want], **more)
    assert done.code == 2, done.said
    said = " ".join((done.out + done.err).split())
    assert "that would put older packages in the place of its base: make the bundle on a machine" in said
    assert isolated.out("node1", "base; command -v base-devel || echo none") == "3\nnone"
    # Where nothing newer is in its way, the same bundle serves.
    assert isolated.out("node2", "base; base-devel") == "2\nbase-devel"


def test_a_host_of_the_release_is_planned_and_its_tunnels_programs_come_from_the_bundle(isolated: Isolated) -> None:
    for node in isolated.lab.nodes:
        assert isolated.out(node, "command -v wg wireguard-go || echo none") == "none"
    before = isolated.notes["watch"].packets()
    kin = _encrypt(isolated, "almalinux 9")
    assert kin.code == 2, kin.said
    said = " ".join(kin.out.split())
    assert "the bundle has no system packages for rocky 9 on" in said
    assert "only some for almalinux 9 on" in said
    assert kin.changed() == no_change()
    done = _encrypt(isolated, "rocky 9")
    assert done.code == 0, done.said
    for node, peer in (("node1", "node2"), ("node2", "node1")):
        assert isolated.out(node, f"wg show {INTERFACE} peers") == isolated.out(peer, f"cat {PUBLIC_KEY}")
        assert isolated.out(node, f"dpkg-query --show {TUNNEL[0]} 2>/dev/null || echo no deb") == "no deb"
    assert isolated.notes["watch"].packets() == before


def _encrypt(isolated: Isolated, system: str) -> Done:
    """Run the site's playbook for the encrypted fabric alone, with the bundle as one for another system.

    Beside the stand-in's lock it names the one that the plan chooses; no wheel of that is asked for here.
    """
    assert isolated.bundle is not None
    folder = isolated.elsewhere / f"bundle for {system}"
    if not folder.exists():
        shutil.copytree(isolated.bundle, folder, copy_function=os.link)
        held = open_bundle(folder)
        assert held.packages is not None
        real = locks.find("cpu", None, "3.11", held.packages.machine)
        named = held.model_copy(
            update={
                "locks": (*held.locks, held.locks[0].model_copy(update={"digest": real.digest})),
                "packages": held.packages.model_copy(update={"system": system}),
            }
        )
        (folder / MANIFEST).unlink()
        (folder / MANIFEST).write_text(named.model_dump_json(), encoding="utf-8")
    kept = isolated.inventory
    wants = {"wheelhouse": str(folder), "system_packages": "bundle", "fabric_encryption": "wireguard-go"}
    isolated.inventory = isolated.variant(isolated.elsewhere / "encrypted.yml", model=str(tiny_model()), **wants)
    try:
        return isolated.ansible_playbook("--tags", "fabric_encryption")
    finally:
        isolated.inventory = kept
