"""System packages of a bundle: fetched by this machine's apt for nodes of the same release, with an index for theirs.

apt resolves against an empty system, so that the folder has every package that any node of the release may lack; a node
takes of it what it needs. apt checks each file against its archive's signed lists.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ppdeploy.bundle.content import PACKAGES, BundlePackages
from ppdeploy.errors import InputError, PpdeployError

INDEX = "Packages"
"""Name of apt's index of a folder (deb(5), sources.list(5))."""

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def this_system(os_release: Path = Path("/etc/os-release")) -> str:
    """Return this machine's system, such as `debian 12`; InputError where it is not Debian's kin."""
    text = os_release.read_text(encoding="utf-8") if os_release.is_file() else ""
    known = dict(re.findall(r'^([A-Z_]+)="?([^"\n]*)"?$', text, re.MULTILINE))
    name, kin = known.get("ID", "an unknown system"), known.get("ID_LIKE", "").split()
    if not {name, *kin} & {"debian", "ubuntu"} or shutil.which("apt-get") is None:
        raise InputError(
            f"system packages are fetched by apt, and this machine runs {known.get('PRETTY_NAME', name)}",
            where="--packages",
            remedy="make the bundle on a Debian or Ubuntu of the nodes' release, or install the packages on the nodes",
        )
    return f"{name} {known.get('VERSION_ID', '')}".strip()


def archives_have(name: str) -> bool:
    """Tell whether this machine's archives have a package to install."""
    found = re.search(r"^\s*Candidate: (.+)$", _run(["apt-cache", "policy", name]), re.MULTILINE)
    return found is not None and found[1] != "(none)"


def fetch_packages(names: Sequence[str], machine: str, partial: Path, tell: Callable[[str], None]) -> BundlePackages:
    """Fetch packages, and all that they need, into the folder `packages` of a bundle, and write its index.

    Raises InputError where this machine is of another kind than the nodes or its archives lack a package.
    """
    system = this_system()
    if machine != platform.machine():
        raise InputError(
            f"system packages for {machine} cannot be fetched on {platform.machine()}",
            where="--packages",
            remedy="make the bundle on a machine like the nodes, or install the packages on the nodes",
        )
    folder = partial / PACKAGES
    (folder / "partial").mkdir(parents=True, exist_ok=True)
    tell(f"system packages: {', '.join(names)}")
    with tempfile.TemporaryDirectory() as work:
        empty = Path(work, "status")
        empty.touch()
        options = {
            "Dir::State::status": str(empty),
            "Dir::Cache::archives": str(folder),
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            # The folder is ours alone, and the lock would need root.
            "Debug::NoLocking": "1",
        }
        _run(
            [
                *("apt-get", "--yes", "--quiet", "--no-install-recommends", "--download-only"),
                *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
                *("install", *names),
            ]
        )
    shutil.rmtree(folder / "partial")
    debs = sorted(folder.glob("*.deb"))
    (folder / INDEX).write_text("\n".join(_stanza(deb) for deb in debs), encoding="utf-8")
    return BundlePackages(system=system, machine=machine, names=tuple(names), architecture=_ARCHITECTURES[machine])


def _stanza(deb: Path) -> str:
    """Return what apt's index says of one package."""
    control = _run(["dpkg-deb", "--field", str(deb)])
    with deb.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"{control.rstrip()}\nFilename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
    )
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip() or done.stdout.strip()
    absent = re.findall(r"Unable to locate package (\S+)|Package '?(\S+?)'? has no installation candidate", said)
    if absent:
        raise InputError(
            f"this machine's archives have no package {', '.join(one or other for one, other in absent)}",
            where="--packages",
            remedy="run `apt-get update` here, or add the archive that has it",
        )
    raise PpdeployError(
        f"{command[0]} cannot fetch the system packages: {' '.join(said.splitlines()[-3:])}",
        remedy="check this machine's network and archives, then run it again",
    )
