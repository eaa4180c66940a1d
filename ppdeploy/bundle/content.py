"""What a bundle is: `manifest.json`, written last, beside the folders that it names the files of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from ppdeploy.errors import InputError
from ppdeploy.locks import Lock
from ppdeploy.manifest import Manifest, needed_files
from ppdeploy.spec import BundledDriver

MANIFEST = "manifest.json"
WHEELS = "wheels"
LOCKS = "locks"
PACKAGES = "packages"
DRIVER = "driver"
MODELS = "models"

_REMEDY = "make it with `ppdeploy bundle`"


Manager = Literal["apt", "dnf"]
"""What installs packages."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _below(path: str) -> str:
    """Refuse a path that leads out of the bundle: a changed manifest must not name files that lie elsewhere."""
    if {"", ".", ".."} & set(path.split("/")) or "\0" in path:
        raise ValueError("it leads out of the bundle")
    return path


_Path = Annotated[str, AfterValidator(_below)]


class BundleFile(_Frozen):
    """A file of the bundle."""

    path: _Path = Field(
        pattern=r"^((wheels|locks)/[^/]+|(packages|driver)/(repodata/)?[^/]+|models(/[^/]+){2,})$",
        description="below the bundle",
    )
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="bytes")


class BundleLock(_Frozen):
    """A lock that the bundle can install, and the files that it takes."""

    file: _Path = Field(pattern=r"^locks/[^/]+$", description="below the bundle, such as locks/NAME.txt")
    digest: str
    device: Literal["cuda", "cpu"]
    vllm_version: str
    python: str
    machine: str
    wheels: tuple[_Path, ...] = Field(description="names in the folder wheels")
    uv: _Path = Field(description="name in the folder wheels of the uv for this machine")


class BundlePackages(_Frozen):
    """System packages, in the folder `packages` with the package manager's index of them."""

    manager: Manager = Field(default="apt", description="that installs them; older bundles do not say")
    system: str = Field(description="release of the nodes that they are for, such as debian 12 or rocky 9")
    machine: str
    architecture: str = Field(description="as the package manager names the machine")
    names: tuple[str, ...] = Field(description="what was asked for; the folder has what these need, too")


class BundleModel(_Frozen):
    """A model, as a folder that `ppdeploy_model` can name."""

    path: _Path = Field(pattern=r"^models/[^/]+$", description="below the bundle, such as models/NAME")
    repository: str
    commit: str
    files: tuple[_Path, ...] = Field(description="below its folder")


class Bundle(_Frozen):
    """A whole bundle."""

    schema_version: Literal[1] = 1
    locks: tuple[BundleLock, ...]
    packages: BundlePackages | None = None
    driver: BundledDriver | None = Field(default=None, description="in the folder `driver`, with an index of its own")
    models: tuple[BundleModel, ...] = ()
    files: tuple[BundleFile, ...]
    _path: Path = PrivateAttr()

    @property
    def path(self) -> Path:
        """Folder of the bundle."""
        return self._path

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def at(self, path: Path) -> Bundle:
        """Return the same bundle, lying at `path`."""
        found = self.model_copy()
        found._path = path  # noqa: SLF001  (our own copy's)
        return found

    def lock(self, digest: str) -> BundleLock:
        """Return the lock of a digest (16 digits or more); InputError when the bundle was made without it."""
        for lock in self.locks:
            if len(digest) >= 16 and lock.digest.startswith(digest):
                return lock
        held = ", ".join(f"{lock.vllm_version} for Python {lock.python} on {lock.machine}" for lock in self.locks)
        raise InputError(
            f"the bundle has no wheels for the lock {digest[:16]}, only for {held}",
            where=str(self._path),
            remedy="make it again with `ppdeploy bundle`",
        )

    def require_packages(self, system: str, machine: str, host: str, names: Collection[str] = ()) -> None:
        """Refuse a host for whose release (such as `rocky 9`) the bundle has no packages, or not these; InputError."""
        held = self.packages
        if held is not None and (held.system, held.machine) == (system, machine):
            absent = [name for name in names if name not in held.names]
            if not absent:
                return
            raise InputError(
                f"the bundle lacks the system package{'s' * (len(absent) > 1)} {', '.join(absent)}",
                where=f"{host}, {self._path}",
                remedy="make it again with `ppdeploy bundle --packages`, or install it there by hand",
            )
        told = f"only some for {held.system} on {held.machine}" if held else "none at all"
        raise InputError(
            f"the bundle has no system packages for {system} on {machine}, {told}",
            where=f"{host}, {self._path}",
            remedy=f"make it again with `ppdeploy bundle --packages` on a machine with {system}, or take"
            " ppdeploy_system_packages out of the inventory and install what is missing by hand",
        )

    def check_driver(self) -> None:
        """Refuse a manifest that names a driver without an index of its packages; InputError."""
        if self.driver is not None and not any(file.path.startswith(f"{DRIVER}/") for file in self.files):
            raise InputError(
                f"{MANIFEST} names a driver, and no file of it",
                where=str(self._path / MANIFEST),
                remedy=f"remove the folder and {_REMEDY}",
            )

    def needs(self) -> set[str]:
        """Return the paths of what its locks and models are made of."""
        locks = {lock.file for lock in self.locks}
        wheels = {f"{WHEELS}/{name}" for lock in self.locks for name in (*lock.wheels, lock.uv)}
        return locks | wheels | {f"{model.path}/{name}" for model in self.models for name in model.files}

    def holds(self, lock: Lock) -> bool:
        """Tell whether the bundle can install the lock."""
        return any(held.digest == lock.digest for held in self.locks)


def open_bundle(path: Path) -> Bundle:
    """Read the bundle in a folder and check that every file is there in its size.

    Hashes take time and are left to `verify_bundle`. Raises InputError when the folder is no whole bundle.
    """
    bundle = read_bundle(path)
    unlisted = sorted(bundle.needs() - {file.path for file in bundle.files})
    if unlisted:
        what = f"{MANIFEST} names {unlisted[0]} in a lock or model, and not among the files"
        raise InputError(what, where=str(path / MANIFEST), remedy=f"remove the folder and {_REMEDY}")
    bundle.check_driver()
    for file in bundle.files:
        found = path / file.path
        size = found.stat().st_size if found.is_file() else None
        if size != file.size:
            what = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
            raise InputError(f"{file.path} {what}", where=str(path), remedy=f"remove the folder and {_REMEDY}")
    return bundle


def read_bundle(path: Path) -> Bundle:
    """Read what the bundle in a folder says that it has; no other file of it is looked at. Raises InputError."""
    if not path.is_dir():
        raise InputError("the bundle folder does not exist", where=str(path), remedy=_REMEDY)
    try:
        return Bundle.model_validate_json((path / MANIFEST).read_bytes()).at(path)
    except FileNotFoundError:
        what = f"the folder holds no bundle: it has no {MANIFEST}"
        raise InputError(what, where=str(path), remedy=_REMEDY) from None
    except (OSError, ValidationError, ValueError) as error:
        raise InputError(
            f"{MANIFEST} cannot be read: {_first_line(error)}", where=str(path / MANIFEST), remedy=_REMEDY
        ) from error


def folder_hashes(folder: Path, *, elsewhere: bool = False) -> dict[str, str]:
    """Return the sha256 of each file of one folder of a bundle, such as `packages`, by its path below the folder.

    As the manifest beside it says. A bundle that lies `elsewhere`, on the nodes, may have none here: then there are no
    hashes. Raises InputError where it lies here and has none.
    """
    if elsewhere and not (folder.parent / MANIFEST).is_file():
        return {}
    begin = f"{folder.name}/"
    files = read_bundle(folder.parent).files
    return {file.path.removeprefix(begin): file.sha256 for file in files if file.path.startswith(begin)}


def verify_bundle(bundle: Bundle, seen: Callable[[BundleFile], None] | None = None) -> None:
    """Hash every file of a bundle; InputError names the first one that is not what the manifest says."""
    for file in bundle.files:
        if sha256(bundle.path / file.path) != file.sha256:
            raise InputError(
                f"{file.path} is not the file that the bundle was made with: its sha256 differs",
                where=str(bundle.path),
                remedy="remove the folder and make it again with `ppdeploy bundle`",
            )
        if seen is not None:
            seen(file)


def check_model(folder: Path, files: Manifest) -> None:
    """Refuse a model that lies in a bundle and is not as it was fetched; one that lies elsewhere is left alone.

    `files` has the hashes of the folder's files as they are. Files that were added are no harm. Raises InputError.
    """
    try:
        bundle = Bundle.model_validate_json((folder.parent.parent / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return
    name = folder.relative_to(folder.parent.parent).as_posix()
    if name not in {model.path for model in bundle.models}:
        return
    held = {file.path: file for file in files.files}
    known = {file.path: file for file in bundle.files}
    for path in needed_files(path.removeprefix(f"{name}/") for path in known if path.startswith(f"{name}/")):
        made = known[f"{name}/{path}"]
        if path not in held or (held[path].size, held[path].sha256) != (made.size, made.sha256):
            what = "is not the file" if path in held else "is missing, a file"
            raise InputError(
                f"{path} of the model {what} that the bundle was made with",
                where=str(folder),
                remedy="copy the bundle again, or make it again with `ppdeploy bundle`; to change the model, copy its "
                "folder out of the bundle and name that",
            )


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error).splitlines()[0]
