"""A repository of a Hugging Face hub, read by huggingface_hub, with what can go wrong told as sentences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

# The package resolves its names when they are used: half a second that a model folder need not wait for.
import huggingface_hub
from pydantic import ValidationError

from ppdeploy.errors import InputError
from ppdeploy.manifest import Manifest, ManifestFile, is_safe_path, needed_files
from ppdeploy.unanswered import unanswered

COMMIT = re.compile(r"[0-9a-f]{40}")


class HubRepository:
    """One repository of a hub, read through huggingface_hub, with its errors told as sentences."""

    def __init__(self, repo: str, revision: str | None, endpoint: str, token: str | None, where: str) -> None:
        self._repo, self._revision, self._endpoint, self._where = repo, revision, endpoint, where
        # False keeps the client from a token it finds by itself: the node that downloads would not have it.
        self._token: str | Literal[False] = token or False

    def manifest(self) -> tuple[str, Manifest]:
        """Return the revision's commit, and the files of it that vLLM needs with the hub's hashes."""
        try:
            info = huggingface_hub.HfApi(endpoint=self._endpoint).model_info(
                self._repo, revision=self._revision, files_metadata=True, token=self._token, timeout=30
            )
        except Exception as exc:  # its HTTP library, another one in each major version, has its own base class
            raise self._told(exc) from exc
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or []}
        files = []
        for path in needed_files(siblings):
            if not is_safe_path(path):
                what = f"the file name {path!r} has characters that cannot be copied safely"
                raise InputError(what, where=self._where, remedy="use a repository without such a file")
            sibling = siblings[path]
            size = sibling.lfs.size if sibling.lfs else sibling.size
            try:
                files.append(
                    ManifestFile(
                        path=path,
                        size=-1 if size is None else size,
                        sha256=sibling.lfs.sha256 if sibling.lfs else None,
                        git_sha1=None if sibling.lfs else sibling.blob_id,
                    )
                )
            except ValidationError as exc:
                what = f"the hub gives no usable size and hash of {path}"
                remedy = f"check that {self._endpoint} is a Hugging Face hub or a full mirror of one"
                raise InputError(what, where=self._where, remedy=remedy) from exc
        if not info.sha or not COMMIT.fullmatch(info.sha):
            remedy = f"check that {self._endpoint} is a Hugging Face hub or a full mirror of one"
            raise InputError("the hub names no commit of the repository", where=self._where, remedy=remedy)
        return info.sha, Manifest(files=tuple(files))

    def read(self, path: str, commit: str) -> bytes:
        """Return a small file's content at a commit, through the controller's Hugging Face cache."""
        from huggingface_hub.utils.tqdm import disable_progress_bars  # noqa: PLC0415  (loaded late, as above)

        disable_progress_bars()
        try:
            local = huggingface_hub.hf_hub_download(
                self._repo, path, revision=commit, endpoint=self._endpoint, token=self._token
            )
        except Exception as exc:  # as above
            raise self._told(exc) from exc
        return Path(local).read_bytes()

    def fetch(self, path: str, commit: str, folder: Path) -> None:
        """Download a file of a commit into a folder, going on with what an earlier call left of it."""
        try:
            huggingface_hub.hf_hub_download(
                self._repo, path, revision=commit, endpoint=self._endpoint, token=self._token, local_dir=folder
            )
        except Exception as exc:  # as above
            raise self._told(exc) from exc

    def _told(self, exc: Exception) -> InputError:
        """Return the client's error as one sentence with the next step."""
        # `errors` is loaded with HfApi, which was used before anything could fail.
        cause: BaseException = exc
        # The client wraps what went wrong in "not in the cache either", which helps nobody.
        while isinstance(cause, huggingface_hub.errors.LocalEntryNotFoundError) and cause.__cause__ is not None:
            cause = cause.__cause__
        status = getattr(getattr(cause, "response", None), "status_code", None)
        page = f"{self._endpoint}/{self._repo}"
        no_token = "" if self._token else " and no token was given"
        silent, remedy_of_silent = unanswered(cause, "ppdeploy_hf_endpoint, or give the model as a folder")
        # The most special class comes first: they derive from one another.
        sentences: tuple[tuple[bool, str, str], ...] = (
            (
                isinstance(cause, huggingface_hub.errors.OfflineModeIsEnabled),
                "the hub cannot be asked, because HF_HUB_OFFLINE is set",
                "unset it, or give the model as a folder on the controller",
            ),
            (
                isinstance(cause, huggingface_hub.errors.GatedRepoError),
                f"the repository is gated{no_token}",
                f"accept its terms at {page}, and give that account's token in ppdeploy_hf_token or HF_TOKEN",
            ),
            (
                isinstance(cause, huggingface_hub.errors.RevisionNotFoundError),
                f"the repository has no revision {self._revision or 'main'}",
                f"choose a branch, tag or commit listed at {page}/commits/main",
            ),
            (
                isinstance(cause, huggingface_hub.errors.RepositoryNotFoundError),
                f"the hub has no such repository, or it is private{no_token}",
                f"check the spelling at {page}, or give a token for it in ppdeploy_hf_token or HF_TOKEN",
            ),
            (
                isinstance(cause, huggingface_hub.errors.EntryNotFoundError) and status is not None,
                "the repository lost a file that it lists",
                "set ppdeploy_model_revision to another commit",
            ),
            (
                status in (401, 403),
                f"the hub refused the token (HTTP {status})" if self._token else f"HTTP {status} from the hub",
                "give a valid token in ppdeploy_hf_token or HF_TOKEN",
            ),
            (status is not None, f"the hub answered HTTP {status}", f"check {self._endpoint} and try again"),
            (
                True,
                f"the hub at {self._endpoint} {silent}",
                remedy_of_silent,
            ),
        )
        what, remedy = next((what, remedy) for fits, what, remedy in sentences if fits)
        return InputError(what, where=self._where, remedy=remedy)
