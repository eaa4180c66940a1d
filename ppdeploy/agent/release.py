"""The release on this node: every file hashed again, versions and weights compared with what it lists."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppdeploy.agent.command_line import QuotingError, exec_start
from ppdeploy.agent.messages import Member
from ppdeploy.agent.sight import ReleaseSight

RANK_CONF, RANK_ENV, NCCL_ENV, RELEASE_JSON = "rank.conf", "rank.env", "nccl.env", "release.json"
MANIFEST = ".ppdeploy-manifest.json"
MARKER = ".ppdeploy.json"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIST_INFO = re.compile(r"(.+)-([^-]+)\.dist-info")
_BLOCK = 1 << 20


class DiffersError(Exception):
    """Something on this node is not as the release lists it; `str()` names it."""


@dataclass(frozen=True)
class NodeRelease:
    """One release as this node sees it. `argv` is the rank's, without the wrapper that consumes the ticket."""

    folder: Path
    digest: str
    nodes: tuple[Member, ...]
    lock: str
    vllm: str
    manifest: str
    files: dict[str, str]
    argv: list[str]


@dataclass
class WeightCache:
    """Hashes of weight files by what would change with their content; hashing 100 GB takes minutes (rule 16)."""

    known: dict[tuple[str, int, int, int, int], dict[str, str]] = field(default_factory=dict)


def read(folder: Path, node: str, pipeline: str, *, checked: bool = True) -> NodeRelease:
    """Read a release from its own folder and check its files; raise `DiffersError`.

    Unchecked it is good for watching what runs by it already, never for a start.
    """
    digest = folder.name
    text = _content(folder / RELEASE_JSON)
    if not _DIGEST.fullmatch(digest) or hashlib.sha256(text).hexdigest() != digest:
        raise DiffersError(f"{RELEASE_JSON} is not the one that {folder} is named after; run apply")
    data = _parse(text, folder)
    own = next((item for item in data["nodes"] if item["host"] == node), None)
    if own is None:
        raise DiffersError(f"release {digest[:12]} does not name this node, {node}")
    files = {str(name): str(value) for name, value in own["files"].items()}
    if checked:
        check_files(folder, files)
    # A release of an earlier ppdeploy names one manifest, since its nodes had all files.
    manifest = str(own.get("manifest") or data.get("manifest") or "")
    try:
        argv = strip_wrapper(exec_start(_content(folder / RANK_CONF).decode(), pipeline))
    except (QuotingError, UnicodeDecodeError) as error:
        raise DiffersError(f"{RANK_CONF} of release {digest[:12]} cannot be read: {error}") from error
    members = tuple(Member(str(n["host"]), str(n["machine_id"]), str(n["address"])) for n in data["nodes"])
    return NodeRelease(folder, digest, members, str(data["lock"]), str(data["vllm"]), manifest, files, argv)


def members_of(folder: Path) -> tuple[Member, ...]:
    """Return the nodes that an intact release.json names, even when other files of the release differ."""
    try:
        text = _content(folder / RELEASE_JSON)
        if hashlib.sha256(text).hexdigest() != folder.name:
            return ()
        data = _parse(text, folder)
    except DiffersError:
        return ()
    return tuple(Member(str(n["host"]), str(n["machine_id"]), str(n["address"])) for n in data["nodes"])


def strip_wrapper(words: list[str]) -> list[str]:
    """Return the rank's own argv: what follows the wrapper (`python3 agent.pyz rank PIPELINE -- vllm serve ...`)."""
    if any(word.endswith("/agent.pyz") for word in words) and "--" in words:
        return words[words.index("--") + 1 :]
    return words


def check_files(folder: Path, files: dict[str, str]) -> None:
    """Hash every file in the release's folder that it lists; raise `DiffersError` naming the first that differs.

    The generic unit is left out: all releases share it, so a way back to an older one must not end here.
    """
    for name, expected in sorted(files.items()):
        if name.endswith("@.service"):
            continue
        found = hashlib.sha256(_content(folder / name)).hexdigest()
        if found != expected:
            raise DiffersError(
                f"{name} differs from release {folder.name[:12]} (sha256 {found[:12]}, not {expected[:12]}); run apply"
            )


def check_versions(release: NodeRelease) -> None:
    """Compare what lies in the rank's environment with its lock; raise `DiffersError` naming the first difference.

    The environment says itself which lock it was built from and what was found in it then (`ppdeploy_venv`).
    """
    environment = Path(release.argv[0]).parent.parent
    if environment.name != release.lock[: len(environment.name)] or len(environment.name) < 16:
        raise DiffersError(f"the rank's program {release.argv[0]} is not of the locked environment; run apply")
    try:
        marker = json.loads(_content(environment / MARKER))
        lock = marker["lock"]
        built = {name: str(marker[name]) for name in ("vllm", "torch") if marker.get(name)}
    except (ValueError, KeyError, TypeError) as error:
        raise DiffersError(f"{environment / MARKER} cannot be read: {error!r}; run apply") from error
    if lock != release.lock:
        raise DiffersError(f"the environment {environment} was built from another lock; run apply")
    found = installed(environment)
    wanted = {**built, "vllm": built.get("vllm", release.vllm)}
    for name, version in wanted.items():
        present = found.get(name, "none")
        if present != version and present.partition("+")[0] != version:
            raise DiffersError(f"{name} {present} is installed, {version} is locked; run apply")
    if found["vllm"].partition("+")[0] != release.vllm:
        raise DiffersError(f"vllm {found['vllm']} is installed, the release needs {release.vllm}; run apply")


def installed(environment: Path) -> dict[str, str]:
    """Return the version of each package in an environment, by its plain name; no Python is started."""
    found: dict[str, str] = {}
    for entry in environment.glob("lib/python3*/site-packages/*.dist-info"):
        match = _DIST_INFO.fullmatch(entry.name)
        if match:
            found[_plain(match.group(1))] = match.group(2)
    return found


def check_weights(release: NodeRelease, cache: WeightCache) -> None:
    """Compare the model's files with the manifest; raise `DiffersError` naming the first that differs.

    A file whose inode, size and times are as recorded when it was hashed is taken as unchanged; any other
    one is hashed again.
    """
    if len(release.argv) < 3:
        raise DiffersError("the rank's command names no model; run apply")
    folder = Path(release.argv[2])
    try:
        record = json.loads(_content(folder / MANIFEST))
        if record["digest"] != release.manifest:
            raise DiffersError(f"the model in {folder} is another one than the release's; run apply")
        for item in record["files"]:
            _check_weight(folder, item, cache)
    except (KeyError, TypeError, ValueError) as error:
        raise DiffersError(f"{folder / MANIFEST} cannot be read: {error!r}; run apply") from error


def _check_weight(folder: Path, item: dict[str, Any], cache: WeightCache) -> None:
    path = folder / item["path"]
    try:
        about = path.stat()
    except OSError as error:
        raise DiffersError(f"model file {item['path']}: {error.strerror}; run apply") from error
    if (about.st_size, about.st_mtime_ns, about.st_ino) == (item["size"], item["mtime_ns"], item["inode"]):
        return
    expected = {name: item[name] for name in ("sha256", "git_sha1") if item.get(name)}
    key = (str(path), about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    if key not in cache.known:
        cache.known[key] = _hashes(path, about.st_size)
    if about.st_size != item["size"] or any(cache.known[key][name] != value for name, value in expected.items()):
        raise DiffersError(f"model file {item['path']} is not what the manifest names; run apply")


def _hashes(path: Path, size: int) -> dict[str, str]:
    sha256 = hashlib.sha256()
    git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as stream:
        while True:
            block = stream.read(_BLOCK)
            if not block:
                break
            sha256.update(block)
            git.update(block)
    return {"sha256": sha256.hexdigest(), "git_sha1": git.hexdigest()}


def look(current: Path, node: str, pipeline: str, cache: WeightCache) -> tuple[ReleaseSight, NodeRelease | None]:
    """Return the prepared release as the protocol sees it, and in full when it checked out."""
    try:
        target = current.readlink()
    except OSError:
        return ReleaseSight(), None
    folder = current.parent / target
    try:
        release = read(folder, node, pipeline)
        check_versions(release)
        check_weights(release, cache)
    except DiffersError as error:
        return ReleaseSight(folder.name, members_of(folder), str(error)), None
    return ReleaseSight(release.digest, release.nodes, ""), release


def _parse(text: bytes, folder: Path) -> dict[str, Any]:
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or not data["nodes"] or not data["vllm"]:
            raise ValueError("it lists no nodes")
        for node in data["nodes"]:
            if not (node["host"] and node["address"] and isinstance(node["files"], dict)):
                raise ValueError("a node is incomplete")
            node["machine_id"] = node.get("machine_id") or ""
    except (ValueError, KeyError, TypeError) as error:
        raise DiffersError(f"{folder / RELEASE_JSON} cannot be read: {error!r}; run apply") from error
    return data


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DiffersError(f"{path} cannot be read: {error.strerror}; run apply") from error


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
