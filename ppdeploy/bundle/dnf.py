"""System packages of a bundle by dnf 4 or 5, on a machine of the nodes' release, with repodata for theirs.

dnf resolves for an empty root, so that the folder has every package that any node of the release may lack; a node takes
of it what it needs. The repositories are the machine's own, with their variables, certificates and module streams. dnf
downloads and then only tests the transaction: that far it checks each file's signature, where a repository asks for
that (gpgcheck). With --downloadonly dnf 5 does not (seen with 5.4.6).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ppdeploy.bundle.commands import CommandError, full_disk, run
from ppdeploy.errors import InputError, PpdeployError

INDEXER = "createrepo_c"
"""Writes repodata."""

STREAMS = Path("/etc/dnf/modules.d")
"""The module streams that are enabled on this machine, as dnf 4 keeps them."""

VARIABLES = (Path("/etc/dnf/vars/releasever"), Path("/etc/yum/vars/releasever"))
"""Where a machine is kept at one minor release."""


def program() -> str | None:
    """Return the name of this machine's dnf, None where it has none."""
    return next((name for name in ("dnf", "dnf5") if shutil.which(name)), None)


def archives_have(name: str) -> bool:
    """Tell whether this machine's repositories have a package to install."""
    # It may have to take a repository's key.
    found = _run([program() or "dnf", "--quiet", "--assumeyes", "repoquery", "--queryformat", "%{name}\n", name])
    return name in found.split()


def require(where: str = "--packages") -> None:
    """Raise InputError, of our option `where`, where this machine lacks what `fetch` takes."""
    if shutil.which(INDEXER) is None:
        raise InputError(
            "createrepo_c is missing on this machine, which writes the index of RPM packages",
            where=where,
            remedy="run `dnf install createrepo_c` here",
        )
    if os.geteuid() != 0:
        # sudo by itself knows no virtual environment, and root has another cache, which is the folder without --out.
        again = "sudo --preserve-env $(command -v ppdeploy) bundle ... --out DIR"
        raise InputError("dnf resolves packages for root alone", where=where, remedy=f"run it again with `{again}`")


def fetch(names: Sequence[str], folder: Path, options: Sequence[str] = (), *, where: str = "--packages") -> None:
    """Fetch packages, and all that they need, into a folder, and write its repodata.

    `options` are dnf's beside ours, `where` is the option of ours that wants the packages. Raises InputError where this
    machine's repositories lack a package, or one is not signed as its repository says, PpdeployError for any other
    failure of dnf.
    """
    # Beside the folder, where there is room: what an interrupted run left is removed.
    work = folder.with_name(f"{folder.name}.dnf")
    shutil.rmtree(work, ignore_errors=True)
    (work / "root" / "etc" / "dnf").mkdir(parents=True)
    try:
        if STREAMS.is_dir():
            shutil.copytree(STREAMS, work / "root" / STREAMS.relative_to("/"))
        _run(_command(names, work, options), where)
        folder.mkdir(parents=True, exist_ok=True)
        for package in sorted((work / "files").glob("*.rpm")):
            package.rename(folder / package.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    # Any dnf of these releases reads gzip.
    _run([INDEXER, "--quiet", "--no-database", "--general-compress-type=gz", str(folder)], where)


def _command(names: Sequence[str], work: Path, more: Sequence[str]) -> list[str]:
    """Return the command that leaves the packages in `work/files`."""
    dnf = program() or "dnf"
    if _run([dnf, "--version"]).startswith("dnf5"):
        # dnf 5 looks for all of its configuration in the root.
        own = ["--use-host-config", "--setopt=skip_unavailable=0", "--setopt=skip_broken=0"]
    else:
        # dnf 4 looks there for repositories and variables only where there are any. The release it takes from the root,
        # unless it is told to take this machine's, or a variable says it.
        own = [] if any(path.is_file() for path in VARIABLES) else ["--releasever=/"]
        own += [f"--setopt=module_platform_id={known}" for known in [_platform_id()] if known]
    options = {
        "cachedir": f"{work}/cache",
        "system_cachedir": f"{work}/cache",
        "destdir": f"{work}/files",
        "install_weak_deps": "0",
        # A package that is not there is an error, whatever dnf.conf says.
        "strict": "1",
        # A package may need a file that the shorter list of dnf 5 does not name.
        "optional_metadata_types": "filelists",
        # Nothing is installed: the signatures are checked, and the room for the files does not matter.
        "tsflags": "test",
        "diskspacecheck": "0",
    }
    return [
        *(dnf, "--assumeyes", f"--installroot={work}/root", *own),
        *(f"--setopt={name}={value}" for name, value in options.items()),
        *more,
        *("install", *names),
    ]


def _platform_id() -> str | None:
    """Return what modular packages are built for, such as `platform:el9` (os-release(5), PLATFORM_ID)."""
    return platform.freedesktop_os_release().get("PLATFORM_ID")


def _run(command: list[str], where: str = "--packages") -> str:
    try:
        return run(command)
    except CommandError as error:
        raise _explained(command[0], error.everything, where) from None


def _explained(name: str, said: str, where: str) -> PpdeployError:
    """Turn the words of dnf 4 or 5, or of createrepo_c, into one sentence."""
    full = full_disk(name, said)
    if full is not None:
        return full
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("[")]
    if name == INDEXER:
        return PpdeployError(
            f"{name} cannot write the index of the system packages: {' '.join(lines[-3:])}",
            where=where,
            remedy="see what it says (`dnf upgrade createrepo_c` brings a newer one), then run it again",
        )
    absent = re.findall(r"No match for argument: (\S+)", said)
    if absent:
        return InputError(
            f"this machine's repositories have no package {', '.join(dict.fromkeys(absent))}",
            where=where,
            remedy="add the repository that has it, or enable it (`dnf config-manager`)",
        )
    unsigned = re.findall(
        r'^(?:Package|Public key for) (\S+\.rpm)|^OpenPGP check for package "([^"]+)"', said, re.MULTILINE
    )
    if unsigned and re.search("GPG check FAILED|Signature verification failed", said):
        bad = ", ".join(dict.fromkeys(one or other for one, other in unsigned))
        return InputError(
            f"{bad} is not signed with a key that its repository names",
            where=where,
            remedy="see which mirror it came from, and that gpgkey in the repository's file names its vendor's key",
        )
    needs = re.findall(r"nothing provides (.+?) needed by (\S+)", said)
    if needs:
        lacking = "; ".join(dict.fromkeys(f"{what}, which {who} needs" for what, who in needs[:3]))
        return InputError(
            f"this machine's repositories have no {lacking}",
            where=where,
            remedy="enable the repository that has it (on RHEL's kin often crb, or EPEL)",
        )
    return PpdeployError(
        f"{name} cannot fetch the system packages: {' '.join(lines[-3:])}",
        remedy="check this machine's network and repositories, then run it again",
    )
