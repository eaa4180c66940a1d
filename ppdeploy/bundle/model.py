"""The model of a bundle: a hub's repository at one commit, as a folder that `ppdeploy_model` can name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ppdeploy.bundle.content import MODELS, BundleModel, sha256
from ppdeploy.errors import BlockedError, InputError
from ppdeploy.hub import HubRepository
from ppdeploy.manifest import ManifestFile, git_blob_sha1

HUB = "https://huggingface.co"


def model_path(repository: str) -> str:
    """Return where a bundle has the model of a repository, below the bundle."""
    return f"{MODELS}/{repository.rsplit('/', 1)[-1]}"


def fetch_model(
    repository: str,
    revision: str | None,
    partial: Path,
    *,
    endpoint: str | None,
    token: str | None,
    tell: Callable[[int, int, str], None],
) -> BundleModel:
    """Fetch the files of a repository that vLLM reads into `models/NAME` of a bundle.

    What is there whole is kept, what is there in part is gone on with, and each file is checked against the hub's own
    hash. `tell` is called with the bytes there, those of all files, and what is fetched. Raises InputError in the
    hub's words, BlockedError where the disk is too small.
    """
    hub = HubRepository(repository, revision, endpoint or HUB, token, "--model")
    commit, manifest = hub.manifest()
    folder = partial / model_path(repository)
    folder.mkdir(parents=True, exist_ok=True)
    lacking = [file for file in manifest.files if not _is_whole(folder, file)]
    total = manifest.total_bytes
    needed = sum(file.size for file in lacking)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BlockedError(
            f"the model needs {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free",
            where=str(folder),
            remedy="free some space or name another folder with --out",
        )
    done = total - needed
    for file in lacking:
        tell(done, total, f"{repository}: {file.path}")
        hub.fetch(file.path, commit, folder)
        if not _is_whole(folder, file):
            raise InputError(
                f"{file.path} of {repository} came with other bytes than the hub names",
                where=str(folder),
                remedy="run it again: the file is fetched anew",
            )
        done += file.size
    # The client keeps its notes about half-done files beside them.
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return BundleModel(
        path=model_path(repository),
        repository=repository,
        commit=commit,
        files=tuple(f.path for f in manifest.files),
    )


def _is_whole(folder: Path, file: ManifestFile) -> bool:
    """Tell whether a file is there as the hub names it; one that is not is removed."""
    path = folder / file.path
    if not path.is_file():
        return False
    found = sha256(path) if file.sha256 else git_blob_sha1(path)
    if path.stat().st_size == file.size and found == (file.sha256 or file.git_sha1):
        return True
    path.unlink()
    return False
