"""System packages of a bundle by apt, on a machine of the nodes' release, with an index for theirs.

apt resolves against an empty system, so that the folder has every package that any node of the release may lack; a node
takes of it what it needs. apt checks each file against its archive's signed lists.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ppdeploy.bundle.commands import CommandError, run
from ppdeploy.errors import InputError, PpdeployError

INDEX = "Packages"
"""Name of apt's index of a folder (deb(5), sources.list(5))."""

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""As dpkg names a machine."""


def require() -> None:
    """Find nothing missing: apt and dpkg-deb are on every machine of theirs, and resolve for any user."""


def archives_have(name: str) -> bool:
    """Tell whether this machine's archives have a package to install."""
    found = re.search(r"^\s*Candidate: (.+)$", _run(["apt-cache", "policy", name]), re.MULTILINE)
    return found is not None and found[1] != "(none)"


def fetch(names: Sequence[str], folder: Path) -> None:
    """Fetch packages, and all that they need, into a folder, and write its index.

    Raises InputError where this machine's archives lack a package, PpdeployError for any other failure of apt.
    """
    (folder / "partial").mkdir(parents=True, exist_ok=True)
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


def _stanza(deb: Path) -> str:
    """Return what apt's index says of one package."""
    control = _run(["dpkg-deb", "--field", str(deb)])
    with deb.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"{control.rstrip()}\nFilename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"


def _run(command: list[str]) -> str:
    try:
        return run(command)
    except CommandError as failed:
        said = failed.said
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
