"""Weight manifest: the files of a model, with size and hash, and the digest that names them as a whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ppdeploy.errors import InputError
from ppdeploy.paths import cache_dir

# What vLLM reads of a checkpoint beside its weights. Python files run only when trust_remote_code is set.
_TEXT_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".py")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
# Left behind by training; vLLM skips them by these names too.
_TRAINING = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
# Folders with the same model for other programs, or with earlier states of it.
_OTHER_FOLDERS = re.compile(r"(\..*|original|onnx|openvino|metal|coreml|gguf|checkpoint-.*|__pycache__|runs|logs)")
# Names that are safe in a list for rsync, in a shell and on any file system.
_SAFE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=, -]*")
_BLOCK = 1 << 20


class ManifestFile(BaseModel):
    """One file of a model, with one of the two hashes: a hub names small files by git's blob hash only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(description="path below the model folder, with /")
    size: int = Field(ge=0, description="bytes")
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$", description="sha256 of the content")
    git_sha1: str | None = Field(default=None, pattern="^[0-9a-f]{40}$", description="git's hash of the content")

    @model_validator(mode="after")
    def _check(self) -> ManifestFile:
        if not is_safe_path(self.path):
            raise ValueError(f"{self.path!r} is not a plain path below the model folder")
        if (self.sha256 is None) == (self.git_sha1 is None):
            raise ValueError(f"{self.path} needs exactly one of sha256 and git_sha1")
        return self


class Manifest(BaseModel):
    """All files of a model, in the order of their paths."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[ManifestFile, ...]

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        paths = [file.path for file in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("the files of a manifest are sorted by path, each path once")
        return self

    def entries(self) -> list[dict[str, Any]]:
        """Return the files as plain dictionaries, as the role and the node's module take them."""
        return [file.model_dump(exclude_none=True) for file in self.files]

    def canonical_json(self) -> bytes:
        """Return the one byte string that the digest is taken of (sorted keys, no spaces, UTF-8)."""
        return json.dumps({"files": self.entries()}, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> str:
        """Sha256 of the canonical JSON, 64 hex digits. It names the model's content."""
        return hashlib.sha256(self.canonical_json()).hexdigest()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files; 0 when the model is to run with dummy weights."""
        return sum(file.size for file in self.files if is_weight_file(file.path))


def is_safe_path(path: str) -> bool:
    """Return whether `path` is a relative path of plain names, fit for rsync's lists and for any node."""
    parts = path.split("/")
    return bool(parts) and all(_SAFE_PART.fullmatch(part) and not part.endswith(" ") for part in parts)


def is_weight_file(path: str) -> bool:
    """Return whether the file holds weights, by its name."""
    return path.endswith((".safetensors", *_PICKLE_SUFFIXES))


def needed_files(paths: Iterable[str]) -> list[str]:
    """Return those of a checkpoint's files that vLLM reads, sorted.

    Weights are taken from the top folder only, and as safetensors when there are any: a checkpoint often
    carries the same weights in a second format.
    """
    kept = [path for path in paths if not _is_other(path)]
    top = {path for path in kept if "/" not in path}
    safetensors = {path for path in top if path.endswith(".safetensors")}
    pickles = {path for path in top if path.endswith(_PICKLE_SUFFIXES) and path not in _TRAINING}
    if "model.safetensors.index.json" in top:
        # Mistral's own format of the same weights, beside the one that the index names.
        safetensors = {path for path in safetensors if not path.startswith("consolidated")}
    texts = {path for path in kept if path.endswith(_TEXT_SUFFIXES)}
    if safetensors:
        texts = {path for path in texts if not path.endswith(".bin.index.json")}
    return sorted(texts | (safetensors or pickles))


def _is_other(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return parts[-1].startswith(".") or any(_OTHER_FOLDERS.fullmatch(part) for part in parts[:-1])


def git_blob_sha1(path: Path) -> str:
    """Return git's hash of a file's content (`git hash-object`), by which a hub names its small files."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def folder_manifest(folder: Path, paths: Iterable[str]) -> Manifest:
    """Hash the named files of a folder on the controller and return the manifest.

    Links are followed. Hashes are kept in the cache folder by device, inode, size and times, so that a large
    model is read once. Raises InputError for a file that cannot be read, or changes meanwhile.
    """
    names = sorted(paths)
    for name in names:
        if not is_safe_path(name):
            raise InputError(
                f"the file name {name!r} has characters that cannot be copied safely",
                where=str(folder),
                remedy="rename the file, or move it out of the model folder",
            )
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return Manifest(files=tuple(pool.map(lambda name: _hash_file(folder, name), names)))


def _hash_file(folder: Path, name: str) -> ManifestFile:
    path = folder / name
    try:
        before = path.stat()
        note = cache_dir() / "manifests" / "files" / _cache_key(before)
        known = _read_note(note)
        if known is None:
            known = _sha256(path)
            after = path.stat()
            if _cache_key(after) != _cache_key(before):
                raise InputError("the file changed while it was read", where=str(path), remedy="run it again")
            # A file written within the clock's grain could change again without a new time: not kept.
            if time.time_ns() - before.st_mtime_ns > 2_000_000_000:
                _write_note(note, known)
    except OSError as exc:
        what = f"the file cannot be read ({exc.strerror or exc})"
        raise InputError(what, where=str(path), remedy="check its owner and mode") from exc
    return ManifestFile(path=name, size=before.st_size, sha256=known)


def _cache_key(stat: os.stat_result) -> str:
    return f"{stat.st_dev:x}-{stat.st_ino:x}-{stat.st_size:x}-{stat.st_mtime_ns:x}-{stat.st_ctime_ns:x}"


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_note(note: Path) -> str | None:
    try:
        text = note.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if re.fullmatch(r"[0-9a-f]{64}", text) else None


def _write_note(note: Path, digest: str) -> None:
    """Keep a hash. A cache that cannot be written costs time, never the run."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_name(f".{note.name}.{os.getpid()}")
        draft.write_text(digest + "\n", encoding="ascii")
        draft.replace(note)
    except OSError:
        return
