"""The driver of a bundle by apt: from this machine's archives, and from NVIDIA's repository, which stays unknown to it.

apt is given folders of its own for sources, pins and lists, which begin as links to this machine's.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ppdeploy.bundle import apt
from ppdeploy.bundle.driver_repository import OPTION, Repository, check_branch
from ppdeploy.errors import InputError
from ppdeploy.spec import BundledDriver

HELPER = "/usr/lib/apt/apt-helper"
"""Fetches a file as apt is set up to, by its hash (package apt)."""

APT_USER = "_apt"
"""As whom apt fetches where root calls it (apt.conf(5), APT::Sandbox::User)."""

_SOURCES = "zz-ppdeploy-nvidia.list"
_PINS = "00-ppdeploy-nvidia"
"""The first pin that names a package decides (apt_preferences(5)), and the files are read by name."""
_OURS = "ppdeploy-nvidia"
"""What files of ours in /etc/apt are called, where this machine is a node too: they may be of another branch."""


def require(wanted: BundledDriver, repository: Repository | None) -> None:
    """Raise InputError where this machine's archives lack what the packages depend on."""
    if repository is not None and wanted.system.startswith("debian ") and "contrib" not in _components():
        raise InputError(
            "Debian's component contrib is off here, which has what NVIDIA's packages depend on",
            where=OPTION,
            remedy="add `contrib` behind `main` in /etc/apt/sources.list.d/debian.sources (or /etc/apt/sources.list), "
            "run `apt-get update`, and run it again",
        )


def fetch(
    wanted: BundledDriver, optional: Sequence[str], repository: Repository | None, folder: Path
) -> tuple[str, ...]:
    """Fetch the packages of a driver into a folder, with its index; return the names of what was asked for.

    Of the optional ones those that an archive has. Raises InputError where an archive lacks another, or the repository
    is not believed, PpdeployError for any other failure of apt.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if repository is None:
        return _fetch(wanted, optional, {}, folder)
    with _known(repository) as options:
        names = _fetch(wanted, optional, options, folder)
    check_branch(wanted, [path.name.split("_")[1] for path in folder.glob("nvidia-open_*.deb")])
    return names


def _fetch(wanted: BundledDriver, optional: Sequence[str], options: dict[str, str], folder: Path) -> tuple[str, ...]:
    asked = {**options, **apt.NO_CACHE}
    names = [*wanted.names, *(name for name in optional if apt.archives_have(name, asked, where=OPTION))]
    apt.fetch(names, folder, options, where=OPTION)
    return tuple(names)


def _components() -> set[str]:
    """Return the components of Debian's own archives that this machine has; others have some of the same name."""
    asked = ["apt-get", "indextargets", "--format", "$(ORIGIN)\t$(COMPONENT)", "Created-By: Packages"]
    rows = [line.split("\t") for line in apt.run_apt(asked, OPTION).splitlines()]
    return {row[1] for row in rows if row[0] == "Debian" and len(row) == 2}


def flavours(kernels: Sequence[str]) -> list[str]:
    """Return what the metapackages of these kernels end with: as this machine has them, else as the kernels' own."""
    listed = apt.run_apt(["dpkg-query", "--show", "--showformat=${Package}\n"], OPTION)
    known = re.findall(r"^linux-image-([a-z].*)$", listed, re.MULTILINE)
    found: list[str] = []
    for kernel in kernels:
        # Such as amd64, or cloud-amd64; Ubuntu's newer kernels have the metapackages of generic-hwe-24.04.
        own = re.sub(r"^[^a-z]*(deb[0-9]+-)?", "", kernel)
        found += [one for one in known if one == own or one.startswith(f"{own}-")] or [own]
    return list(dict.fromkeys(found))


@contextmanager
def _known(repository: Repository) -> Iterator[dict[str, str]]:
    """Yield the options by which apt knows a repository beside this machine's archives, and pins the branch."""
    with tempfile.TemporaryDirectory() as work:
        # apt fetches, and looks at signatures, as a user of its own; where it may not write, it would do so as root.
        Path(work).chmod(0o755)
        own = _folders(Path(work), repository)
        if os.geteuid() == 0 and APT_USER in {user.pw_name for user in pwd.getpwall()}:
            for folder in (Path(work), own["Dir::State::lists"] / "partial"):
                shutil.chown(folder, APT_USER)
        key = _key(repository, Path(work))
        key.chmod(0o644)
        source = own["Dir::Etc::sourceparts"] / _SOURCES
        source.write_text(f"deb [signed-by={key}] {repository.address} /\n", encoding="utf-8")
        (own["Dir::Etc::preferencesparts"] / _PINS).write_text(repository.preferences, encoding="utf-8")
        options = {name: str(path) for name, path in own.items()}
        # This source alone: the others' lists are this machine's.
        alone = {
            **options,
            **apt.NO_CACHE,
            "Dir::Etc::sourcelist": str(source),
            "Dir::Etc::sourceparts": "-",
            "APT::Get::List-Cleanup": "0",
        }
        apt.run_apt(["apt-get", "--quiet", "--error-on=any", *apt.words(alone), "update"], OPTION)
        yield options


def _folders(work: Path, repository: Repository) -> dict[str, Path]:
    """Return a list and folders of our own that begin as what this machine's apt has in its own.

    Lists, pins and sources are links; a source that names the repository too is a copy without it, since apt refuses
    two that are signed otherwise.
    """
    names = ("Dir::Etc::sourceparts", "Dir::Etc::preferencesparts", "Dir::State::lists", "Dir::Etc::sourcelist")
    asked = [
        word for number, name in enumerate(names) for word in (f"P{number}", f"{name}/{'f' if number == 3 else 'd'}")
    ]
    told = dict(re.findall(r"^P(\d)='(.*)'$", apt.run_apt(["apt-config", "shell", *asked], OPTION), re.MULTILINE))
    found = {name: work / str(number) for number, name in enumerate(names)}
    *folders, main = found.values()
    for number, folder in enumerate(folders):
        folder.mkdir()
        theirs = Path(told.get(str(number), "/nowhere"))
        for file in theirs.iterdir() if theirs.is_dir() else ():
            if not file.is_file() or file.name == "lock":
                continue
            if _names(file, repository):
                rest = _without(file, repository)
                if rest.strip():
                    (folder / file.name).write_text(rest, encoding="utf-8")
            elif not _is_of(file, repository):
                (folder / file.name).symlink_to(file.resolve())
    (found["Dir::State::lists"] / "partial").mkdir()
    theirs = Path(told.get("3", "/nowhere"))
    main.write_text(_without(theirs, repository) if theirs.is_file() else "", encoding="utf-8")
    return found


def _names(file: Path, repository: Repository) -> bool:
    """Return whether a list of sources names the repository, maybe beside others."""
    if file.suffix not in (".list", ".sources"):
        return False
    text = file.read_text(encoding="utf-8", errors="replace")
    return repository.address in text or repository.also in text


def _without(file: Path, repository: Repository) -> str:
    """Return a list of sources without those of the repository: lines, or the paragraphs of a `.sources`."""
    text = file.read_text(encoding="utf-8", errors="replace")
    parts = re.split(r"(?<=\n)\s*\n", text) if file.suffix == ".sources" else text.splitlines()
    kept = [part for part in parts if repository.address not in part and repository.also not in part]
    return ("\n" if file.suffix == ".sources" else "").join(f"{part}\n" for part in kept)


def _is_of(file: Path, repository: Repository) -> bool:
    """Return whether a fetched list, which is named by its address, or a pin of ours is about the repository."""
    return repository.address.partition("://")[2].replace("/", "_") in file.name or file.name == _OURS


def _key(repository: Repository, work: Path) -> Path:
    """Return the key of a repository; NVIDIA's own is in a package that is known by its sha256."""
    if repository.key is not None:
        return Path(shutil.copyfile(repository.key, work / "key.asc"))
    deb = work / "keyring.deb"
    sha256 = f"SHA256:{repository.keyring_sha256}"
    apt.run_apt([HELPER, "download-file", repository.keyring, str(deb), sha256], OPTION)
    apt.run_apt(["dpkg-deb", "--extract", str(deb), str(work / "keyring")], OPTION)
    found = sorted((work / "keyring").glob("usr/share/keyrings/*.gpg"))
    if not found:
        raise InputError(f"{repository.keyring} has no key", where=OPTION, remedy="name a mirror and its key")
    return found[0]
