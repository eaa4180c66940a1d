"""What a bundle is: `manifest.json`, written last, beside the folders `wheels` and `locks` that it names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from ppdeploy.errors import InputError
from ppdeploy.locks import Lock

MANIFEST = "manifest.json"
WHEELS = "wheels"
LOCKS = "locks"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BundleFile(_Frozen):
    """A file of the bundle."""

    path: str = Field(pattern=r"^(wheels|locks)/[^/]+$", description="below the bundle")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    size: int = Field(ge=0, description="bytes")


class BundleLock(_Frozen):
    """A lock that the bundle can install, and the files that it takes."""

    file: str = Field(description="below the bundle, such as locks/NAME.txt")
    digest: str
    device: Literal["cuda", "cpu"]
    vllm_version: str
    python: str
    machine: str
    wheels: tuple[str, ...] = Field(description="names in the folder wheels")
    uv: str = Field(description="name in the folder wheels of the uv for this machine")


class Bundle(_Frozen):
    """A whole bundle. Later kinds of content (models, system packages) become further fields and folders."""

    schema_version: Literal[1] = 1
    locks: tuple[BundleLock, ...]
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

    def holds(self, lock: Lock) -> bool:
        """Tell whether the bundle can install the lock."""
        return any(held.digest == lock.digest for held in self.locks)


def open_bundle(path: Path) -> Bundle:
    """Read the bundle in a folder and check that every file is there in its size.

    Hashes take time and are left to `verify_bundle`. Raises InputError when the folder is no whole bundle.
    """
    remedy = "make it with `ppdeploy bundle`"
    if not path.is_dir():
        raise InputError("the bundle folder does not exist", where=str(path), remedy=remedy)
    try:
        bundle = Bundle.model_validate_json((path / MANIFEST).read_bytes()).at(path)
    except FileNotFoundError:
        what = f"the folder holds no bundle: it has no {MANIFEST}"
        raise InputError(what, where=str(path), remedy=remedy) from None
    except (OSError, ValidationError, ValueError) as error:
        raise InputError(
            f"{MANIFEST} cannot be read: {_first_line(error)}", where=str(path / MANIFEST), remedy=remedy
        ) from error
    for file in bundle.files:
        found = path / file.path
        size = found.stat().st_size if found.is_file() else None
        if size != file.size:
            what = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
            raise InputError(f"{file.path} {what}", where=str(path), remedy=f"remove the folder and {remedy}")
    return bundle


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


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
