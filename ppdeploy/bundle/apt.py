"""System packages of a bundle by apt, on a machine of the nodes' release, with an index for theirs.

apt resolves against an empty system, so that the folder has every package that any node of the release may lack; a node
takes of it what it needs. apt checks each file against its archive's signed lists.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ppdeploy.bundle.commands import CommandError, full_disk, run
from ppdeploy.errors import InputError, PpdeployError

INDEX = "Packages"
"""Name of apt's index of a folder (deb(5), sources.list(5))."""

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""As dpkg names a machine."""


NO_CACHE: Mapping[str, str] = {"Dir::Cache::pkgcache": "", "Dir::Cache::srcpkgcache": ""}
"""Options by which apt leaves this machine's own caches alone."""


_UNMET = r"^ (\S+) : ((?:Pre-?Depends|Depends|Conflicts|Breaks): .+?)\s*$"
"""What apt says of a package whose wants cannot be met, on stdout and without its `E:`."""

_ANOTHER_WAY = {"--nvidia-driver": ", or name a mirror with --nvidia-repository and --nvidia-repository-key"}
"""Our options beside which there is another source."""


def require() -> None:
    """Find nothing missing: apt and dpkg-deb are on every machine of theirs, and resolve for any user."""


def archives_have(name: str, options: Mapping[str, str] | None = None, *, where: str = "--packages") -> bool:
    """Tell whether this machine's archives, or those that apt's `options` name, have a package to install."""
    asked = run_apt(["apt-cache", *words(options or {}), "policy", name], where)
    found = re.search(r"^\s*Candidate: (.+)$", asked, re.MULTILINE)
    return found is not None and found[1] != "(none)"


def words(options: Mapping[str, str]) -> Iterator[str]:
    """Yield options of apt as words of a command."""
    for name, value in options.items():
        yield from ("-o", f"{name}={value}")


def fetch(
    names: Sequence[str], folder: Path, options: Mapping[str, str] | None = None, *, where: str = "--packages"
) -> None:
    """Fetch packages, and all that they need, into a folder, and write its index.

    `options` are apt's, in place of this machine's own, `where` is the option of ours that wants the packages. Raises
    InputError where this machine's archives lack a package, PpdeployError for any other failure of apt.
    """
    (folder / "partial").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        empty = Path(work, "status")
        empty.touch()
        own = {
            **(options or {}),
            **NO_CACHE,
            "Dir::State::status": str(empty),
            "Dir::Cache::archives": str(folder),
            # The folder is ours alone, and the lock would need root.
            "Debug::NoLocking": "1",
        }
        begin = ("apt-get", "--yes", "--quiet", "--no-install-recommends", "--download-only")
        run_apt([*begin, *words(own), "install", *names], where)
    shutil.rmtree(folder / "partial")
    debs = sorted(folder.glob("*.deb"))
    (folder / INDEX).write_text("\n".join(_stanza(deb, where) for deb in debs), encoding="utf-8")


def _stanza(deb: Path, where: str) -> str:
    """Return what apt's index says of one package."""
    control = run_apt(["dpkg-deb", "--field", str(deb)], where)
    with deb.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return f"{control.rstrip()}\nFilename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n"


def run_apt(command: list[str], where: str) -> str:
    """Run a program of apt's or dpkg's; return its stdout, or raise what it means, of our option `where`."""
    try:
        return run(command)
    except CommandError as failed:
        said, everything = failed.said, failed.everything
    unmet = re.findall(_UNMET, everything, re.MULTILINE)
    if unmet:
        raise InputError(
            f"this machine's archives have not all that is needed: {'; '.join(' '.join(one) for one in unmet)}",
            where=where,
            remedy="bring this machine's sources up to date (`apt-get update`), or add the archive that has it",
        )
    absent = re.findall(r"Unable to locate package (\S+)|Package '?(\S+?)'? has no installation candidate", said)
    if absent:
        raise InputError(
            f"this machine's archives have no package {', '.join(one or other for one, other in absent)}",
            where=where,
            remedy="run `apt-get update` here, or add the archive that has it",
        )
    full = full_disk(command[0], said)
    if full is not None:
        raise full
    # What follows a complaint tells its particulars, such as each hash that was looked for; warnings have those of some
    # errors (a key that is not known), and come of other things too.
    lines = said.splitlines()
    told = [line for kind in (("E:", "Err:"), ("W:",)) for line in lines if line.startswith(kind)] or lines[-3:]
    raise PpdeployError(
        f"{Path(command[0]).name} cannot fetch the packages: {' '.join(told[:3])}",
        where=where,
        remedy=f"check this machine's network and archives, then run it again{_ANOTHER_WAY.get(where, '')}",
    )
