"""The root file system that all hosts of all labs share, built once and kept in the cache folder."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from ppdeploy.errors import ApplyError, BlockedError, InputError
from ppdeploy.lab import system
from ppdeploy.lab.keeper import joining

PACKAGES = (
    "ca-certificates",
    "curl",
    "dbus",
    "ethtool",
    "iperf3",
    "iproute2",
    "iputils-ping",
    "kmod",
    "libnuma1",
    "openssh-server",
    "procps",
    "python3",
    "python3-apt",
    "rsync",
    "sudo",
    "systemd",
    "systemd-sysv",
)
"""What a host has from the start; it has no way out, so all that roles need is here or served."""

SERVED = ("haproxy", "nftables", "wireguard-tools", "wireguard-go")
"""What roles install on a host for real: these packages, and what they need, lie in its folder repository."""

REPOSITORY = "/srv/ppdeploy/packages"
"""The folder repository, in every host."""

_LAYOUT = 3
"""Raised when `_finish` changes what it leaves, so that older cached trees are not used."""


def machine_release() -> str:
    """Return the code name of this machine's Debian or Ubuntu release, which the hosts get too."""
    release = platform.freedesktop_os_release()
    name = release.get("VERSION_CODENAME")
    if not name or "debian" not in (release.get("ID", ""), *release.get("ID_LIKE", "").split()):
        raise InputError(
            "the lab builds its hosts from this machine's own Debian or Ubuntu, which it is not",
            where=f"/etc/os-release says {release.get('PRETTY_NAME', 'nothing')}",
            remedy="run it in a Debian or Ubuntu virtual machine",
        )
    return name


def parse_sources(listing: str, release: str) -> tuple[str, list[str]]:
    """Return the URI and the components from which packages of `release` come.

    `listing` has a line `URI RELEASE COMPONENT` for each source that apt knows. The first URI that serves the
    main component of the release itself (not its updates, nor another vendor's archive) is taken.
    """
    rows = [line.split() for line in listing.splitlines() if len(line.split()) == 3]
    for uri, suite, component in rows:
        if suite == release and component == "main":
            return uri, list(dict.fromkeys(row[2] for row in rows if row[:2] == [uri, release]))
    raise BlockedError(
        f"apt on this machine has no source for {release} main, from which the lab's hosts are built",
        remedy="add one to /etc/apt/sources.list.d and run apt-get update",
    )


def cache_key(release: str, architecture: str) -> str:
    """Return the name of the tree for this release, architecture and package list."""
    text = "\n".join((str(_LAYOUT), release, architecture, *PACKAGES, REPOSITORY, *SERVED))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _environment() -> dict[str, str]:
    """Return the environment for mmdebstrap, with the proxies that this machine's apt is set up to use.

    They are passed as variables, not as apt options, since mmdebstrap would write options into the tree.
    """
    env = dict(os.environ)
    for scheme in ("http", "https"):
        shown = system.run(
            ["apt-config", "--format", "%f=%v%n", "dump", f"Acquire::{scheme}::Proxy"],
            what="reading apt's proxy",
        )
        proxy = shown.strip().partition("=")[2]
        if proxy:
            env[f"{scheme}_proxy"] = proxy
    return env


def _finish(tree: Path) -> None:
    """Take out of a new tree what must not be shared or known, and enable what every host runs."""
    shutil.rmtree(tree / "etc/apt/sources.list.d", ignore_errors=True)
    (tree / "etc/apt/sources.list.d").mkdir()
    for path in (*(tree / "etc/ssh").glob("ssh_host_*"), tree / "etc/hostname", tree / "etc/machine-id"):
        path.unlink(missing_ok=True)
    make_repository(tree / REPOSITORY.removeprefix("/"))
    # Not signed: it is made here, and no other machine has a say in it.
    sources = f"# The lab's hosts have no way out.\ndeb [trusted=yes] file:{REPOSITORY} ./\n"
    (tree / "etc/apt/sources.list").write_text(sources, encoding="utf-8")
    # As on a host that was not updated for a while: who installs reads the repository first.
    shutil.rmtree(tree / "var/lib/apt/lists", ignore_errors=True)
    (tree / "var/lib/apt/lists/partial").mkdir(parents=True)
    # mmdebstrap copies this machine's; the hosts resolve from /etc/hosts only.
    (tree / "etc/resolv.conf").unlink(missing_ok=True)
    (tree / "etc/resolv.conf").write_text("# The lab has no name server.\n", encoding="utf-8")
    shutil.rmtree(tree / "var/log/apt", ignore_errors=True)
    system.run(["systemctl", f"--root={tree}", "enable", "systemd-networkd"], what="enabling the hosts' network")


def make_repository(folder: Path) -> None:
    """Write the index of the packages in `folder`, so that apt takes it for a repository (sources.list(5), flat)."""
    folder.mkdir(parents=True, exist_ok=True)
    stanzas = []
    for package in sorted(folder.glob("*.deb")):
        fields = system.run(["dpkg-deb", "--field", str(package)], what=f"reading {package.name}").rstrip("\n")
        digest = hashlib.sha256(package.read_bytes()).hexdigest()
        size = package.stat().st_size
        stanzas.append(f"{fields}\nFilename: ./{package.name}\nSize: {size}\nSHA256: {digest}\n")
    (folder / "Packages").write_text("\n".join(stanzas), encoding="utf-8")


def _keeping() -> str:
    """Return mmdebstrap's hook that leaves the served packages in the tree, without installing them."""
    return (
        f'set -e; mkdir -p "$1{REPOSITORY}/partial"; APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get --yes '
        f'--no-install-recommends --download-only -o Dir::Cache::archives="$1{REPOSITORY}" '
        f'install {" ".join(SERVED)}; rm -rf "$1{REPOSITORY}/partial" "$1{REPOSITORY}/lock"'
    )


def _remove(tree: Path) -> None:
    """Remove a half-built tree, unless something is still mounted in it."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    if f" {tree}" in mounts:
        raise BlockedError("something is mounted in the half-built tree", where=str(tree), remedy="unmount it first")
    if tree.exists():
        shutil.rmtree(tree)


def ensure(folder: Path, groups: list[str], say: Callable[[str], None]) -> Path:
    """Return the root file system for this machine's release, built below `folder` where it is not there yet.

    Takes about 45 s and 280 MB the first time. A build runs in the control groups named by their
    `cgroup.procs` files `groups`. Only one build of a tree runs at a time on a machine; whoever comes second
    waits for it.
    """
    release = machine_release()
    architecture = system.run(["dpkg", "--print-architecture"], what="asking for this machine's architecture").strip()
    tree = folder / f"rootfs-{cache_key(release, architecture)}"
    if tree.is_dir():
        return tree
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{tree.name}.lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if tree.is_dir():
            return tree
        partial = folder / f"{tree.name}.partial"
        _remove(partial)
        listing = system.run(
            [
                "apt-get",
                "indextargets",
                "--format",
                "$(REPO_URI) $(RELEASE) $(COMPONENT)",
                "Created-By: Packages",
            ],
            what="reading apt's sources",
        )
        uri, components = parse_sources(listing, release)
        say(f"building the hosts' root file system ({release}), about a minute, once")
        log = folder / f"{tree.name}.log"
        with log.open("wb") as output:
            build = [
                # A mount namespace of its own: what the build mounts goes with it, however it ends.
                *("unshare", "--mount", "--propagation", "slave"),
                *("mmdebstrap", "--mode=root", "--variant=minbase"),
                *(f"--components={','.join(components)}", f"--include={','.join(PACKAGES)}"),
                f"--customize-hook={_keeping()}",
                *(release, str(partial), uri),
            ]
            done = subprocess.run(
                joining(groups, build),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                # A build that outlives us keeps the lock, so that no other lab builds into the same folder.
                pass_fds=[lock.fileno()],
                check=False,
            )
        if done.returncode != 0:
            text = log.read_text(encoding="utf-8", errors="replace").splitlines()
            reason = next((line for line in text if line.startswith("E:")), text[-1] if text else "no output")
            raise ApplyError(f"mmdebstrap could not build the hosts' root file system: {reason}", where=str(log))
        _finish(partial)
        partial.rename(tree)
        log.unlink()
    return tree
