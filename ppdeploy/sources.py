"""Where a model comes from: a folder on the controller, a repository of a Hugging Face hub, or a plain web server."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ppdeploy.bundle.content import check_model
from ppdeploy.errors import InputError
from ppdeploy.hub import COMMIT, HubRepository
from ppdeploy.manifest import (
    Manifest,
    folder_manifest,
    is_weight_file,
    needed_files,
)
from ppdeploy.mirror import SUMS, Mirror
from ppdeploy.model import Loading, ModelShape, Tensor, parse_config, parse_json, tensors_of
from ppdeploy.model.places import FilePlace, file_places
from ppdeploy.paths import cache_dir

DEFAULT_ENDPOINT = "https://huggingface.co"

_REPO_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
# No header of a real checkpoint comes near; a larger number means that the file is not safetensors.
_MAX_HEADER = 100_000_000
_LFS_POINTER = b"version https://git-lfs"
# Part of the names of what is kept of commits: a new number when shapes are worked out differently.
_SHAPE_VERSION = 4
# Where NVIDIA's tools say how the weights are quantised, when config.json does not.
_NVIDIA_CONFIG = "hf_quant_config.json"


class ModelSource(BaseModel):
    """A model that was found: its place, its shape and its files. It holds no secret."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["folder", "hub", "mirror"]
    name: str = Field(description="short name for folders on nodes: the repository's or the folder's own")
    location: str = Field(
        description="folder: its absolute path on the controller; hub: the repository's id; mirror: its address"
    )
    endpoint: str | None = Field(description="hub: its address; None otherwise")
    commit: str | None = Field(description="hub: the commit that everything is fetched at; None otherwise")
    shape: ModelShape
    manifest: Manifest
    places: dict[str, FilePlace] = Field(
        default_factory=dict, description="which stages need each weight file; empty where nothing says so"
    )

    def directory_name(self, files: Manifest | None = None) -> str:
        """Return the name of a folder on a node with these of the files, or all: it changes with any content."""
        return f"{self.name}-{(files or self.manifest).digest[:12]}"


def resolve_source(
    model: str,
    revision: str | None,
    base_dir: Path,
    endpoint: str | None = None,
    token: str | None = None,
    *,
    allow_no_weights: bool = False,
    allow_pickle: bool = False,
    loading: Loading | None = None,
) -> ModelSource:
    """Find the model that `ppdeploy_model` names and read what the plan needs of it.

    `model` is a folder on the controller when it starts with / ./ ../ or ~ (relative to `base_dir`, the
    inventory folder), a folder on a web server when it is an http or https address, else a hub's repository id.
    `revision` is a branch, tag or commit of the repository.
    `endpoint` is the hub's address (default: HF_ENDPOINT, else the public hub), `token` a hub token (default:
    HF_TOKEN), which goes to the hub only. `allow_no_weights` accepts a checkpoint without weight files, for
    vLLM's dummy weights, `allow_pickle` weights that can run code when they are loaded. `loading` is what vLLM is
    told to change of the checkpoint while it loads it.

    Raises InputError, one sentence, for a model that is absent, incomplete, unreadable or out of reach.
    """
    allowed = _Allowed(no_weights=allow_no_weights, pickle=allow_pickle)
    if model.startswith(("/", "./", "../", "~")) or model in (".", ".."):
        if revision is not None:
            raise InputError(
                "a model folder has no revision",
                where=f"ppdeploy_model_revision = {revision}",
                remedy="remove ppdeploy_model_revision, or name a hub repository in ppdeploy_model",
            )
        return _from_folder(model, base_dir, allowed, loading)
    if model.startswith(("http://", "https://")):
        return _from_mirror(model, allowed, loading or Loading())
    if not _REPO_ID.fullmatch(model) or ".." in model or "--" in model:
        raise InputError(
            "the model is neither a hub repository (owner/name) nor a folder (starts with /, ./, ../ or ~)",
            where=f"ppdeploy_model = {model}",
            remedy="write ./ in front of a folder that lies beside the inventory",
        )
    endpoint = (endpoint or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    token = token or os.environ.get("HF_TOKEN") or None
    return _from_hub(model, revision, endpoint, token, allowed, loading or Loading())


def _from_folder(model: str, base_dir: Path, allowed: _Allowed, loading: Loading | None) -> ModelSource:
    try:
        folder = (base_dir / Path(model).expanduser()).resolve()
    except RuntimeError as exc:
        what = "the home folder of that user is not known"
        raise InputError(what, where=f"ppdeploy_model = {model}", remedy="write the path out") from exc
    where = f"ppdeploy_model = {model}" + ("" if str(folder) == model else f", that is {folder}")
    if not folder.is_dir():
        what = "the model path is not a folder" if folder.exists() else "the model folder does not exist"
        raise InputError(what, where=where, remedy="give the folder that holds config.json, on the controller")
    paths = needed_files(_walk(folder))
    if "config.json" not in paths:
        raise InputError(
            "the model folder has no config.json",
            where=where,
            remedy="give the folder of a Hugging Face checkpoint",
        )
    _check_weights(paths, where, allowed)
    for path in paths:
        if path.endswith(".safetensors.index.json") and "/" not in path:
            _check_index(_read(folder / path), paths, str(folder / path))
    tensors: dict[str, Tensor] = {}
    names: dict[str, list[str]] = {}
    for path in filter(is_weight_file, paths):
        found = _check_weight_file(folder / path)
        names[path] = list(found)
        tensors |= found
    # The configuration is judged before the weights are hashed: that takes a minute for each 60 GB or so.
    shape = parse_config(
        _read(folder / "config.json"),
        where=str(folder / "config.json"),
        weight_bytes=sum((folder / path).stat().st_size for path in paths if is_weight_file(path)),
        tensors=tensors,
        quantization=_read(folder / _NVIDIA_CONFIG) if _NVIDIA_CONFIG in paths else None,
        loading=loading,
    )
    manifest = folder_manifest(folder, paths)
    check_model(folder, manifest)
    return ModelSource(
        kind="folder",
        name=_short_name(_folder_name(folder)),
        location=str(folder),
        endpoint=None,
        commit=None,
        shape=shape,
        manifest=manifest,
        places=_places(names, shape),
    )


def _places(names: Mapping[str, Iterable[str]], shape: ModelShape) -> dict[str, FilePlace]:
    return file_places(names, shape.num_hidden_layers, tied=shape.head_parameters == 0)


def _walk(folder: Path) -> Iterable[str]:
    """Yield the paths of the folder's files. Links to files are followed (a hub's cache is made of them)."""
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            yield (Path(root) / name).relative_to(folder).as_posix()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        what = f"the file cannot be read ({exc.strerror or exc})"
        raise InputError(what, where=str(path), remedy="check its owner and mode, and where it links to") from exc


def _folder_name(folder: Path) -> str:
    """Return the folder's name; in a hub's cache, where it is a commit, the repository's."""
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.rsplit("--", 1)[-1]
    return folder.name


def _short_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:80] or "model"


@dataclass(frozen=True)
class _Allowed:
    """What a checkpoint may be like: without weights (`no_weights`), with weights that can run code (`pickle`)."""

    no_weights: bool
    pickle: bool


def _check_weights(paths: Iterable[str], where: str, allowed: _Allowed) -> None:
    weights = [path for path in paths if is_weight_file(path)]
    pickles = [path for path in weights if not path.endswith(".safetensors")]
    if pickles and not allowed.pickle:
        raise InputError(
            f"the model's weights are not safetensors ({pickles[0]}): loading them can run code that they hold",
            where=where,
            remedy="take a model in safetensors, or set ppdeploy_allow_pickle_weights: true if you trust who made it",
        )
    if not allowed.no_weights and not weights:
        raise InputError(
            "the model has no weight files (*.safetensors)",
            where=where,
            remedy="complete the download, or set load-format: dummy in ppdeploy_vllm_args to do without",
        )


def _check_index(text: bytes, paths: Iterable[str], where: str) -> dict[str, str]:
    """Return the file of each of an index's tensors; refuse one that names absent files.

    vLLM would find out on every node, minutes later.
    """
    index = parse_json(text, where)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InputError("the index has no weight_map of file names", where=where, remedy="fetch the file again")
    absent = sorted(set(weight_map.values()) - set(paths))
    if absent:
        names = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        raise InputError(f"the index names absent files: {names}", where=where, remedy="complete the download")
    return dict(weight_map)


def _check_weight_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a weight file; refuse one that was cut short.

    A safetensors header says how long the file is. Files of other formats are not read: they have no tensors here.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise InputError(
                    "the weight file is a Git LFS pointer, not the weights",
                    where=str(path),
                    remedy="run `git lfs pull` in the model folder",
                )
            if path.suffix != ".safetensors":
                return {}
            length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else _MAX_HEADER + 1
            header: Any = None
            if length <= _MAX_HEADER:
                stream.seek(8)
                text = stream.read(length)
                header = json.loads(text) if len(text) == length else None
    except OSError as exc:
        what = f"the file cannot be read ({exc.strerror or exc})"
        raise InputError(what, where=str(path), remedy="check its owner and mode, and where it links to") from exc
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        what = "the weight file is truncated or not in safetensors format"
        raise InputError(what, where=str(path), remedy="fetch the file again")
    ends = [_end_of(tensor) for name, tensor in header.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        what = f"the weight file has {size} bytes where its header says {expected}"
        raise InputError(what, where=str(path), remedy="fetch the file again")
    return tensors_of(header)


def _end_of(tensor: Any) -> int:
    offsets = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    return offsets[1] if isinstance(offsets, list) and len(offsets) == 2 and isinstance(offsets[1], int) else 0


def _from_hub(
    repo: str, revision: str | None, endpoint: str, token: str | None, allowed: _Allowed, loading: Loading
) -> ModelSource:
    where = f"ppdeploy_model = {repo}" + (f", ppdeploy_model_revision = {revision}" if revision else "")
    if revision and COMMIT.fullmatch(revision):
        # A commit never changes, so one that was read once needs no hub: plans work while it is away.
        known = _read_known(repo, revision, endpoint, loading)
        if known is not None:
            _check_weights((file.path for file in known.manifest.files), where, allowed)
            return known
    hub = HubRepository(repo, revision, endpoint, token, where)
    commit, manifest = hub.manifest()
    paths = [file.path for file in manifest.files]
    if "config.json" not in paths:
        raise InputError(
            "the repository has no config.json",
            where=where,
            remedy="name a repository of a transformers model (GGUF-only repositories cannot be served)",
        )
    _check_weights(paths, where, allowed)
    names = _index_names(paths, lambda path: (hub.read(path, commit), f"{path} of {repo}"))
    shape = parse_config(
        hub.read("config.json", commit),
        where=f"config.json of {repo}",
        weight_bytes=manifest.weight_bytes,
        tensor_names={tensor for tensors in names.values() for tensor in tensors},
        quantization=hub.read(_NVIDIA_CONFIG, commit) if _NVIDIA_CONFIG in paths else None,
        loading=loading,
    )
    source = ModelSource(
        kind="hub",
        name=_short_name(repo.rsplit("/", 1)[-1]),
        location=repo,
        endpoint=endpoint,
        commit=commit,
        shape=shape,
        manifest=manifest,
        places=_places(names, shape),
    )
    _write_known(source, loading)
    return source


def _from_mirror(address: str, allowed: _Allowed, loading: Loading) -> ModelSource:
    where = f"ppdeploy_model = {address}"
    mirror = Mirror(address, where)
    manifest = mirror.manifest()
    paths = [file.path for file in manifest.files]
    if "config.json" not in paths:
        remedy = f"give the address of a Hugging Face checkpoint, all of whose files {SUMS} lists"
        raise InputError(f"{SUMS} of the mirror names no config.json", where=where, remedy=remedy)
    _check_weights(paths, where, allowed)
    names = _index_names(paths, lambda path: (mirror.read(path), f"{address.rstrip('/')}/{path}"))
    shape = parse_config(
        mirror.read("config.json"),
        where=f"{address.rstrip('/')}/config.json",
        weight_bytes=manifest.weight_bytes,
        tensor_names={tensor for tensors in names.values() for tensor in tensors},
        quantization=mirror.read(_NVIDIA_CONFIG) if _NVIDIA_CONFIG in paths else None,
        loading=loading,
    )
    return ModelSource(
        kind="mirror",
        name=_short_name(address.rstrip("/").rsplit("/", 1)[-1]),
        location=address.rstrip("/"),
        endpoint=None,
        commit=None,
        shape=shape,
        manifest=manifest,
        places=_places(names, shape),
    )


def _index_names(paths: Iterable[str], read: Callable[[str], tuple[bytes, str]]) -> dict[str, list[str]]:
    """Return the tensors of each weight file that the indices name; `read` gives the content and place of a file."""
    names: dict[str, list[str]] = {}
    listed = list(paths)
    for path in listed:
        if path.endswith(".safetensors.index.json") and "/" not in path:
            text, where = read(path)
            for tensor, file in _check_index(text, listed, where).items():
                names.setdefault(file, []).append(tensor)
    return names


def _known_file(repo: str, commit: str, endpoint: str, loading: Loading) -> Path:
    host = re.sub(r"[^A-Za-z0-9.-]+", "-", endpoint.split("://", 1)[-1])
    told = f".{loading.key()}" if loading.key() else ""
    return cache_dir() / "manifests" / "hub" / host / f"{repo.replace('/', '--')}@{commit}.{_SHAPE_VERSION}{told}.json"


def _read_known(repo: str, commit: str, endpoint: str, loading: Loading) -> ModelSource | None:
    try:
        source = ModelSource.model_validate_json(_known_file(repo, commit, endpoint, loading).read_bytes())
    except (OSError, ValidationError):
        return None
    return source if (source.location, source.commit, source.endpoint) == (repo, commit, endpoint) else None


def _write_known(source: ModelSource, loading: Loading) -> None:
    """Keep what a commit holds. A cache that cannot be written costs a question to the hub, never the run."""
    note = _known_file(source.location, source.commit or "", source.endpoint or "", loading)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_name(f".{note.name}.{os.getpid()}")
        draft.write_text(source.model_dump_json(), encoding="utf-8")
        draft.replace(note)
    except OSError:
        return
