#!/usr/bin/python
"""Bring a model's files onto a node, checked against their manifest, and hand them on to the node's peers."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_weights
short_description: Place a model's files on a node, checked against their manifest
description:
  - A model folder is complete or absent. Files are gathered in a staging folder beside it (C(.partial) is
    added to its name), hashed there, and the folder is renamed once all of them are right.
    C(.ppdeploy-manifest.json) in it records size, mtime and inode of each file, so that later checks need not
    read the weights again.
  - A model travels to the cluster once. The node that has it serves it to its peers for as long as the
    transfer takes, from a read-only rsync daemon that answers only to them.
  - A node that gets only some of the weight files also gets an index that names no others, since vLLM refuses one
    that does. The record has the hash of the index as it lies there.
  - Files that another model folder beside this one has already are taken from there.
  - Everything resumes where it was interrupted.
options:
  state:
    description:
      - V(fits) looks whether the model fits on the disk, and changes nothing.
      - V(staged) makes the staging folder for the connecting user, who is about to copy files into it.
      - V(verified) hashes the staged files and places the model; a placed model is left alone.
      - V(downloaded) fetches the files from a hub, then does as V(verified).
      - V(pulled) fetches the files from rsync daemons of peers, then does as V(verified).
      - V(copied) copies the files from a folder that the node has mounted, then does as V(verified).
      - V(received) waits for what somebody copies into the staging folder, then does as V(verified).
      - V(served) starts the rsync daemon. It gives each file once its hash was found right, so that a chain of nodes
        hands a model on while it arrives. V(unserved) stops it and leaves nothing of it.
      - V(waited) tells how far a transfer is that was started with O(background).
    type: str
    choices: [fits, staged, verified, copied, downloaded, pulled, received, served, unserved, waited]
    required: true
  directory:
    description: The model folder.
    type: path
    required: true
  manifest:
    description: The files of the model.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Path below the model folder.
        type: str
        required: true
      size:
        description: Bytes.
        type: int
        required: true
      sha256:
        description: Sha256 of the content.
        type: str
      git_sha1:
        description: Git's hash of the content, where the hub gives no other.
        type: str
  rehash:
    description: With O(state=verified) read a placed model again, whatever size, mtime and inode say.
    type: bool
    default: false
  owner:
    description: With O(state=staged) the user who copies; the default is the connecting user.
    type: str
  address:
    description: This node's fabric address, where it serves, or from which it pulls.
    type: str
  port:
    description: TCP port of the rsync daemon.
    type: int
    default: 8730
  peers:
    description: With O(state=served) the addresses that may fetch; no other is answered.
    type: list
    elements: str
    default: []
  serve_seconds:
    description: With O(state=served) the time after which the daemon ends in any case.
    type: int
    default: 43200
  source:
    description: With O(state=pulled) the address of a node that has or gets all files.
    type: str
  sources:
    description:
      - With O(state=pulled) the nodes before this one in the chain, each with C(address) and the C(paths) to fetch
        from there. What is not listed, and what such a node does not come by, is fetched from O(source).
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: Fabric address.
        type: str
        required: true
      paths:
        description: Files to fetch from there.
        type: list
        elements: str
        required: true
  folder:
    description: With O(state=copied) the mounted folder.
    type: path
  patience:
    description: Seconds without a sign of life after which a peer or the controller is given up.
    type: int
    default: 60
  background:
    description:
      - With O(state=copied), O(state=downloaded), O(state=pulled) and O(state=received) go on in the
        background, see O(state=waited). A transfer of the same folder that still runs is ended first.
    type: bool
    default: false
  seconds:
    description: With O(state=waited) how long to wait at most before telling how far it is.
    type: int
    default: 4
  repository:
    description: With O(state=downloaded) the repository's id on the hub; without, O(endpoint) has the files by name.
    type: str
  commit:
    description: With O(state=downloaded) the commit.
    type: str
  endpoint:
    description: With O(state=downloaded) the hub's address, or that of a folder on a web server.
    type: str
  token:
    description: With O(state=downloaded) the hub's token, which goes by standard input and is kept nowhere.
    type: str
  python:
    description: With O(state=downloaded) a Python that has huggingface_hub, such as the vLLM venv's.
    type: path
  user:
    description: With O(state=downloaded) the unprivileged user that downloads.
    type: str
    default: nobody
  proxy:
    description: With O(state=downloaded) the HTTP proxy through which the hub or web server is reached.
    type: str
  no_proxy:
    description: Hosts and domains that are reached without O(proxy); a domain stands for all its hosts.
    type: list
    elements: str
    default: []
  ca_bundle:
    description:
      - With O(state=downloaded) a file on the node with the certificates that the server's is checked against, in place
        of the system's. O(user) must be able to read it.
    type: path
attributes:
  check_mode:
    support: full
    description: Says whether it would change the node.
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Hand the model to the peers
  ppdeploy_weights:
    state: served
    directory: /var/lib/ppdeploy/models/tiny-0123456789ab
    manifest: "{{ files }}"
    address: 192.0.2.11
    peers: [192.0.2.12]

- name: Fetch the model from the first node
  ppdeploy_weights:
    state: pulled
    directory: /var/lib/ppdeploy/models/tiny-0123456789ab
    manifest: "{{ files }}"
    address: 192.0.2.12
    source: 192.0.2.11
"""

RETURN = r"""
present:
  description: Whether the model is placed and its files are as recorded.
  returned: always
  type: bool
digest:
  description: Digest of the manifest.
  returned: always
  type: str
staging:
  description: The staging folder.
  returned: always
  type: str
owner:
  description: Name of the user who may write into the staging folder.
  returned: with O(state=staged)
  type: str
missing_bytes:
  description: Bytes that are still to be fetched.
  returned: with O(state=fits) and O(state=staged)
  type: int
fetched:
  description: The files that were fetched.
  returned: once a transfer has ended
  type: list
  elements: str
fetched_again:
  description: Those of them that had arrived damaged and were fetched a second time.
  returned: once a transfer has ended
  type: list
  elements: str
done:
  description: Whether the transfer has ended.
  returned: with O(state=waited)
  type: bool
progress:
  description: How far the transfer is, in words.
  returned: with O(state=waited)
  type: str
here_bytes:
  description: Bytes of the model that are on the node.
  returned: with O(state=waited)
  type: int
rate:
  description: Bytes that arrived a second, lately.
  returned: with O(state=waited)
  type: float
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, NamedTuple

from ansible.module_utils.basic import AnsibleModule

MANIFEST = ".ppdeploy-manifest.json"
RUN = Path("/run")
SERVED_AS = "weights"
STATE_AS = "state"
STATE = "state.json"
# Free space that is left to the rest of the system when a model has just fitted.
RESERVE = 256 << 20
LOCK_WAIT = 120
# Seconds between two looks at what has arrived, and between two words about it.
LOOK = 0.2
TELL = 0.5
# Seconds between two questions to a peer that has nothing new: at first, and at last.
ASK = (0.2, 2.0)
# How much longer than later the controller may take for its first byte.
START = 5
# Transfers from one peer at once: while one asks for what is new, the other keeps the link busy.
STREAMS = 2
# Seconds over which a rate is taken: shorter ones jump from file to file.
RATE_OVER = 15.0
# rsync's exit codes: that a file cannot be written here; and what may go by itself: 5, the daemon is not there yet
# or moves its folder; 10, 12, 30, 35: the connection; 23 and 24: a file that was not to be had.
FULL = 11
PASSING = frozenset({5, 10, 12, 23, 24, 30, 35})
INDEX = ".safetensors.index.json"
NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded")
# What a company's proxy answers where it does not let through, or finds nobody behind it.
OF_PROXY = frozenset({403, 407, 502, 503, 504})
BLOCK = 1 << 20
AGAIN = "run it again, which goes on where it stopped"
# Names that are safe in rsync's lists; the controller's manifest allows the same.
SAFE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@=, -]*")

# Runs in the vLLM venv's Python as an unprivileged user. The token comes on standard input, since an
# environment can be read by every process of that user. An error goes to standard output as a line of JSON.
# The client's own hf_hub_download begins a file anew in each process; its http_get goes on, given what is there.
DOWNLOAD = r"""
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, urlsplit
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

os.umask(0o022)
job = json.load(sys.stdin)
token = job["token"] or False

def fetch(item):
    if job["repository"] and item["size"] > getattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 50 * 1000**3):
        # The hub does not give such a file by plain HTTP, only by its own protocol.
        hf_hub_download(job["repository"], item["path"], revision=job["commit"], local_dir=job["folder"],
                        token=token)
        return
    if not job["repository"]:
        load(item, job["endpoint"] + "/" + quote(item["path"]), {"Accept-Encoding": "identity"})
        return
    url = hf_hub_url(job["repository"], item["path"], revision=job["commit"])
    for left in (2, 1, 0):
        try:
            place = get_hf_file_metadata(url, token=token).location
            break
        except Exception as error:
            # What the hub said is final, and so is its certificate; that it said nothing may be the line.
            said = getattr(getattr(error, "response", None), "status_code", 500) < 500
            if not left or said or "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise
            time.sleep(3)
    headers = build_hf_headers(token=token)
    headers["Accept-Encoding"] = "identity"
    if urlsplit(place)[:2] != urlsplit(url)[:2]:
        headers.pop("authorization", None)
    load(item, place, headers)

def load(item, place, headers):
    with open(item["part"], "ab") as part:
        if part.tell() > item["size"]:
            part.truncate(0)
        done = os.path.getsize(item["part"])
        if done < item["size"]:
            http_get(place, part, resume_size=done, headers=headers, expected_size=item["size"])
    target = os.path.join(job["folder"], item["path"])
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.replace(item["part"], target)

try:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch, job["files"]))
except Exception as error:
    while error.__cause__ is not None and type(error).__name__ == "LocalEntryNotFoundError":
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    print(json.dumps({"kind": type(error).__name__, "status": status, "text": str(error)}))
    sys.exit(1)
"""


class WeightsError(Exception):
    """What is told to the user when the work cannot go on."""


class Entry(NamedTuple):
    """One file of the manifest."""

    path: str
    size: int
    sha256: str | None
    git_sha1: str | None


class Model(NamedTuple):
    """A model folder, the staging folder beside it, and the files that belong in it."""

    directory: Path
    staging: Path
    entries: list[Entry]
    digest: str


Fetch = Callable[["list[Entry]", int], None]


# ---- the manifest ------------------------------------------------------------------------------------------


def read_model(directory: str, manifest: list[dict[str, Any]]) -> Model:
    """Return the typed model; a path that leads out of its folder, or no single hash, is an error."""
    if not Path(directory).is_absolute() or not Path(os.path.normpath(directory)).name:
        raise WeightsError(f"directory: {directory!r} is not an absolute path of a folder: give the whole path")
    entries, plain = [], []
    for item in sorted(manifest, key=lambda item: str(item["path"])):
        entry = Entry(item["path"], item["size"], item.get("sha256"), item.get("git_sha1"))
        if not all(SAFE_PART.fullmatch(part) for part in entry.path.split("/")):
            raise WeightsError(f"manifest: {entry.path!r} is not a plain path below the model folder")
        if (entry.sha256 is None) == (entry.git_sha1 is None) or entry.size < 0:
            raise WeightsError(f"manifest: {entry.path} needs a size and one of sha256 and git_sha1")
        entries.append(entry)
        plain.append({key: value for key, value in entry._asdict().items() if value is not None})
    text = json.dumps({"files": plain}, sort_keys=True, separators=(",", ":"))
    folder = Path(os.path.normpath(directory))
    return Model(folder, folder.with_name(folder.name + ".partial"), entries, hashlib.sha256(text.encode()).hexdigest())


def is_placed(model: Model) -> bool:
    """Return whether the model folder is complete and its files are still those that were hashed."""
    try:
        record = json.loads((model.directory / MANIFEST).read_text(encoding="utf-8"))
        files = {item["path"]: item for item in record["files"]}
        if record["digest"] != model.digest or set(files) != {entry.path for entry in model.entries}:
            return False
        for path, item in files.items():
            about = (model.directory / path).stat()
            if (about.st_size, about.st_mtime_ns, about.st_ino) != (
                item["size"],
                item["mtime_ns"],
                item["inode"],
            ):
                return False
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return True


def hash_open(descriptor: int, entry: Entry) -> bool:
    """Return whether an open file has the content that the manifest names."""
    if entry.sha256 is not None:
        digest, expected = hashlib.sha256(), entry.sha256
    else:
        # Not for security: git has no other name for the file.
        digest, expected = hashlib.sha1(b"blob %d\0" % entry.size), entry.git_sha1 or ""  # noqa: S324  (what git, and so the hub, names a file by)
    os.lseek(descriptor, 0, os.SEEK_SET)
    while True:
        block = os.read(descriptor, BLOCK)
        if not block:
            return digest.hexdigest() == expected
        digest.update(block)


def check_file(folder: Path, entry: Entry) -> dict[str, Any] | None:
    """Hash one file, make it the caller's with mode 0644, and return its record; None when it is not right.

    A link, or a file that has a second name, is not right: whoever filled the folder could mean another file.
    """
    try:
        descriptor = os.open(folder / entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_size != entry.size:
            return None
        # Owned before it is hashed: nobody else can open it for writing from here on.
        os.fchown(descriptor, os.geteuid(), os.getegid())
        os.fchmod(descriptor, 0o644)
        if not hash_open(descriptor, entry):
            return None
        # What is recorded as right must not be lost with the power.
        os.fsync(descriptor)
        about = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    content = {key: value for key, value in entry._asdict().items() if value is not None}
    return {**content, "mtime_ns": about.st_mtime_ns, "inode": about.st_ino}


def is_unchanged(folder: Path, record: dict[str, Any]) -> bool:
    """Return whether a file is still the caller's own and the one that was hashed."""
    try:
        about = (folder / record["path"]).lstat()
    except OSError:
        return False
    return (about.st_size, about.st_mtime_ns, about.st_ino, about.st_uid, about.st_nlink) == (
        record["size"],
        record["mtime_ns"],
        record["inode"],
        os.geteuid(),
        1,
    )


def check_files(folder: Path, entries: list[Entry]) -> tuple[list[dict[str, Any]], list[Entry]]:
    """Hash the named files; return the records of those that are right, and the others."""
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        results = list(pool.map(lambda entry: check_file(folder, entry), entries))
    wrong = [entry for entry, record in zip(entries, results) if record is None]
    return [record for record in results if record is not None], wrong


# ---- the staging folder ------------------------------------------------------------------------------------


def make_folder(path: Path) -> None:
    """Make a folder and the missing ones above it, readable by everyone whatever the umask is."""
    for folder in reversed([path, *path.parents]):
        try:
            folder.mkdir(mode=0o755)
        except FileExistsError:
            continue
        folder.chmod(0o755)


def lacking(model: Model) -> list[Entry]:
    """Return the files that the staging folder does not have in full size."""
    entries = []
    for entry in model.entries:
        try:
            complete = (model.staging / entry.path).lstat().st_size == entry.size
        except OSError:
            complete = False
        if not complete:
            entries.append(entry)
    return entries


def clear_way(model: Model) -> None:
    """Remove what lies in a file's way in the staging folder, and that no transfer goes on from.

    rsync leaves a file alone that is longer than the one it has (rsync(1), --append), which a file becomes whose source
    grows during the copy; it puts none where a folder is; and it would add to a file's other name too.
    """
    for entry in model.entries:
        for parent in reversed(Path(entry.path).parents[:-1]):
            place = model.staging / parent
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                remove(place)
        try:
            about = (model.staging / entry.path).lstat()
        except OSError:
            continue
        if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_size > entry.size:
            remove(model.staging / entry.path)


def part_path(model: Model, entry: Entry) -> Path:
    """Return where a file is downloaded to before it is whole."""
    return model.staging / ".cache" / hashlib.sha256(entry.path.encode()).hexdigest()


def staged_bytes(model: Model, entry: Entry) -> int:
    """Return how much of a file has arrived in the staging folder."""
    staged = 0
    for path in (model.staging / entry.path, part_path(model, entry)):
        # A file that is not there has no bytes.
        with contextlib.suppress(OSError):
            staged = max(staged, path.lstat().st_size)
    return min(staged, entry.size)


def is_whole(model: Model, entry: Entry) -> bool:
    """Return whether a staged file has all its bytes and is no longer written: each writer sets mode 0644 last."""
    try:
        about = (model.staging / entry.path).lstat()
    except OSError:
        return False
    return about.st_size == entry.size and stat.S_IMODE(about.st_mode) == 0o644


def missing_bytes(model: Model) -> int:
    """Return how many bytes are still to be fetched, what lies in the staging folder not counted."""
    return sum(entry.size - staged_bytes(model, entry) for entry in model.entries)


def check_room(model: Model) -> int:
    """Return the missing bytes; raise when the file system has not that much left."""
    needed = missing_bytes(model)
    folder = model.directory.parent
    while not folder.exists():
        folder = folder.parent
    about = os.statvfs(folder)
    free = about.f_bavail * about.f_frsize
    if needed + RESERVE > free:
        raise WeightsError(
            f"the disk is too small for the model: {folder} on {socket.gethostname()} has {free} bytes free, "
            f"{needed} are needed and {RESERVE} left over: free some space, or set ppdeploy_models_dir"
        )
    return needed


def take_back(model: Model) -> None:
    """Turn a placed model whose files are not as recorded into the staging folder, without damaged files.

    A rank that has such a file open keeps it; the next start finds the model absent until it is whole again.
    """
    if not model.directory.exists():
        return
    if model.staging.exists():
        shutil.rmtree(model.staging)
    model.directory.rename(model.staging)
    own_folders(model)
    _, wrong = check_files(model.staging, model.entries)
    for entry in wrong:
        remove(model.staging / entry.path)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
        return
    try:
        path.unlink()
    except FileNotFoundError:
        return


def own_folders(model: Model) -> None:
    """Make the staging folders the caller's, from the top down, and remove what is not in the manifest."""
    files = {entry.path for entry in model.entries}
    folders = {parent.as_posix() for path in files for parent in Path(path).parents}
    waiting = [Path()]
    while waiting:
        below = waiting.pop()
        folder = model.staging / below
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            # Taken before it is read: from here on, the one who filled it cannot put other things in.
            os.fchown(descriptor, os.geteuid(), os.getegid())
            os.fchmod(descriptor, 0o755)
            names = [item.name for item in os.scandir(descriptor)]
        finally:
            os.close(descriptor)
        for name in names:
            about = (folder / name).lstat()
            path = (below / name).as_posix()
            if path in folders and stat.S_ISDIR(about.st_mode):
                waiting.append(below / name)
            elif path not in files or not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
                remove(folder / name)


def give(model: Model, user: pwd.struct_passwd) -> None:
    """Give the staging folder to the user who fills it, with what lies in it already.

    From the bottom up, so that no path leads through a folder which that user could exchange meanwhile.
    """
    owner = model.staging.stat().st_uid
    if owner == user.pw_uid:
        return
    if owner != os.geteuid():
        own_folders(model)
    for root, _, files in os.walk(model.staging, topdown=False):
        for path in [*(Path(root) / name for name in files), Path(root)]:
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def find_user(name: str) -> pwd.struct_passwd:
    """Return a user of this node by name."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        raise WeightsError(f"there is no user {name} on {socket.gethostname()}: create it or name another") from None


def lock(model: Model) -> int:
    """Lock the staging folder, making it if need be; return the open lock, which a child process shares.

    A run whose controller was cut off may still be at work here: two would write into each other's files.
    """
    deadline = time.monotonic() + LOCK_WAIT
    while True:
        make_folder(model.staging.parent)
        if not model.staging.is_dir() or model.staging.is_symlink():
            remove(model.staging)
            model.staging.mkdir(mode=0o755)
        descriptor = os.open(model.staging, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one before may have placed the folder under its name meanwhile.
            if model.staging.exists() and os.path.samestat(os.fstat(descriptor), model.staging.stat()):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise WeightsError(
                    f"another run is still filling {model.staging} on {socket.gethostname()}: wait for "
                    "it, or end its rsync or download there"
                ) from None
            time.sleep(1)
        os.close(descriptor)


def place(model: Model, known: dict[str, dict[str, Any]] | None = None) -> list[Entry]:
    """Check the staged files and rename the folder when all are right; remove and return the others.

    `known` has records of files that were hashed already; those that have not changed since are not read again.
    """
    own_folders(model)
    kept = {path: record for path, record in (known or {}).items() if is_unchanged(model.staging, record)}
    records, wrong = check_files(model.staging, [entry for entry in model.entries if entry.path not in kept])
    records = sorted([*kept.values(), *records], key=lambda record: str(record["path"]))
    if wrong:
        for entry in wrong:
            remove(model.staging / entry.path)
        return wrong
    records = trim_indices(model, records)
    record = {"digest": model.digest, "files": records}
    write(model.staging / MANIFEST, json.dumps(record, indent=1, sort_keys=True) + "\n")
    sync(model.staging)
    model.staging.rename(model.directory)
    sync(model.directory.parent)
    return []


def trim_indices(model: Model, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take out of each index what names files that are not for this node; return the records with the new hashes.

    vLLM refuses an index that names absent files, and a stage needs none of their tensors.
    """
    here = {entry.path for entry in model.entries}
    trimmed = []
    for record in records:
        path = model.staging / record["path"]
        if "/" in record["path"] or not record["path"].endswith(INDEX):
            trimmed.append(record)
            continue
        index = json.loads(path.read_text(encoding="utf-8"))
        kept = {tensor: name for tensor, name in index["weight_map"].items() if name in here}
        if len(kept) == len(index["weight_map"]):
            trimmed.append(record)
            continue
        text = json.dumps({**index, "weight_map": kept}, indent=2, sort_keys=True) + "\n"
        write(path, text)
        about = path.stat()
        trimmed.append(
            {
                "path": record["path"],
                "size": about.st_size,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "mtime_ns": about.st_mtime_ns,
                "inode": about.st_ino,
            }
        )
    return trimmed


def write(path: Path, text: str) -> None:
    """Write a text file with mode 0644 and see it to the disk."""
    with path.open("w", encoding="utf-8") as stream:
        os.fchmod(stream.fileno(), 0o644)
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """See a folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- the transfer, as others see it --------------------------------------------------------------------------


def transfer_name(model: Model) -> str:
    """Return what the transfer of a model to its folder on this node is called."""
    return f"ppdeploy-weights-{hashlib.sha256(f'{model.directory} {model.digest}'.encode()).hexdigest()[:12]}"


def run_folder(model: Model) -> Path:
    """Return where a transfer keeps what peers and the waiting apply are told; it goes with the transfer."""
    base, dot = (RUN, "") if os.geteuid() == 0 else (model.directory.parent, ".")
    return base / f"{dot}{transfer_name(model)}"


def make_run_folder(model: Model) -> Path:
    """Make the folder, which nobody else can write to."""
    folder = run_folder(model)
    make_folder(folder / STATE_AS)
    return folder


def publish(model: Model, state: dict[str, Any]) -> None:
    """Tell how the transfer is, where anybody asks: with a daemon, or in the background."""
    folder = run_folder(model) / STATE_AS
    if not folder.is_dir():
        return
    draft = folder.with_name(STATE)
    draft.write_text(json.dumps(state), encoding="utf-8")
    draft.chmod(0o644)
    draft.rename(folder / STATE)


def read_state(model: Model) -> dict[str, Any] | None:
    """Return what the transfer told last; None: there is none."""
    try:
        state = json.loads((run_folder(model) / STATE_AS / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


class Watch:
    """Hashes each file as soon as it is whole, gives it to the daemon, and tells how far the transfer is."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.records: dict[str, dict[str, Any]] = {}
        self._wrong: set[str] = set()
        self._hashing: dict[str, Future[dict[str, Any] | None]] = {}
        self._arrived: deque[tuple[float, int]] = deque()
        self._over = threading.Event()
        self._beat = 0
        self._said = 0.0

    def __enter__(self) -> Watch:
        self._over.clear()
        self._wrong.clear()
        self._pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # What arrived last is hashed here, and so handed on before the folder gets its name.
        while kind is None and self._thread.is_alive() and any(map(self._is_new, self._model.entries)):
            time.sleep(LOOK / 4)
        self._over.set()
        self._thread.join()
        self._pool.shutdown()

    def ended(self, result: dict[str, Any]) -> None:
        """Tell that the model is placed."""
        if config_path(self._model).exists():
            write_config(self._model)
        publish(self._model, {"beat": -1, "placed": True, **result})

    def _run(self) -> None:
        while not self._over.wait(LOOK / 4 if self._hashing else LOOK):
            self._look()

    def _is_new(self, entry: Entry) -> bool:
        return entry.path not in self.records and entry.path not in self._wrong and is_whole(self._model, entry)

    def _look(self) -> None:
        for path in [path for path, future in self._hashing.items() if future.done()]:
            try:
                record = self._hashing.pop(path).result()
            except OSError:
                record = None
            if record is None:
                # Whoever writes it may see that too, and send it again; the folder's last check decides.
                self._wrong.add(path)
            else:
                self.records[path] = record
                self._hand_on()
        for entry in self._model.entries:
            if self._is_new(entry) and entry.path not in self._hashing:
                self._hashing[entry.path] = self._pool.submit(check_file, self._model.staging, entry)
        if time.monotonic() - self._said >= TELL:
            self._said = time.monotonic()
            self._tell()

    def _hand_on(self) -> None:
        if config_path(self._model).exists():
            write_list(self._model, self.records)

    def _tell(self) -> None:
        total = sum(entry.size for entry in self._model.entries)
        here, now = total - missing_bytes(self._model), time.monotonic()
        self._arrived.append((now, here))
        while now - self._arrived[0][0] > RATE_OVER:
            self._arrived.popleft()
        since, before = self._arrived[0]
        self._beat += 1
        told = {"beat": self._beat, "total": total, "here": here, "checked": len(self.records)}
        rate = (here - before) / (now - since) if now > since else 0.0
        publish(self._model, {**told, "files": len(self._model.entries), "rate": max(0.0, rate)})


def progress_of(state: dict[str, Any]) -> str:
    """Return in words how far a transfer is: bytes, rate, and when it will be done at that rate."""
    if not state.get("total"):
        return "looking at what is there"
    total, here, rate = int(state["total"]), int(state["here"]), float(state["rate"])
    if here >= total:
        return f"all {total / 1e9:.2f} GB here, {state['checked']} of {state['files']} files checked"
    text = f"{here / 1e9:.2f} of {total / 1e9:.2f} GB ({100 * here // total} %), {rate / 1e6:.1f} MB/s"
    return text + (f", {duration((total - here) / rate)} left" if rate > 0 else "")


def duration(seconds: float) -> str:
    """Return a time as a person says it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


# ---- in the background ---------------------------------------------------------------------------------------


def job_path(model: Model) -> Path:
    """Return the file that a transfer in the background keeps locked; its process id stands in it."""
    return run_folder(model) / "job"


def begin(model: Model, fetch: Fetch) -> None:
    """Gather the model in a process of its own, which outlives this one and its connection."""
    end_job(model)
    make_run_folder(model)
    publish(model, {"beat": 0})
    held = os.open(job_path(model), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise WeightsError(
            f"another apply has just begun to fill {model.staging} on {socket.gethostname()}: wait for it, then "
            "apply again"
        ) from None
    # Emptied only by who has it: the number in it is that of the one at work.
    os.ftruncate(held, 0)
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.write(held, str(child).encode())
        os.close(held)
        return
    # A group of its own, so that it ends together with its rsync.
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        gather(model, fetch)
    except WeightsError as error:
        publish(model, {"beat": -1, "failed": str(error)})
    except OSError as error:
        publish(model, {"beat": -1, "failed": told(error, model.directory)})
    except Exception as error:  # noqa: BLE001  (nobody else sees it: the apply reads it there)
        publish(model, {"beat": -1, "failed": f"{type(error).__name__}: {error}: tell the authors, then {AGAIN}"})
    os._exit(0)


def job_of(model: Model) -> int | None:
    """Return the process id of the transfer that runs in the background; None: none does."""
    try:
        held = os.open(job_path(model), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        # It has only just begun where no number stands there yet.
        for _ in range(20):
            text = os.pread(held, 20, 0).decode()
            if text.isdigit():
                return int(text)
            time.sleep(0.05)
    finally:
        os.close(held)
    return None


def end_job(model: Model) -> bool:
    """End a transfer in the background, of an apply that is gone; return whether there was one."""
    child = job_of(model)
    if child is None:
        return False
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, number)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if job_of(model) is None:
                return True
            time.sleep(0.1)
    raise WeightsError(f"process {child} on {socket.gethostname()} still fills {model.staging}: end it, then {AGAIN}")


def wait(model: Model, seconds: int) -> dict[str, Any]:
    """Return how far the transfer in the background is, at the latest after so many seconds; raise when it failed."""
    deadline = time.monotonic() + seconds
    while True:
        # Asked first: what a process told before it ended is read after that.
        runs = job_of(model) is not None
        state = read_state(model) or {}
        if state.get("placed"):
            # Who serves a placed model says no more than that.
            again = state.get("fetched_again", [])
            text = f"all files here; arrived damaged and were fetched again: {', '.join(again)}" if again else ""
            fetched = {"fetched": state.get("fetched", []), "fetched_again": again}
            return {
                "changed": state.get("changed", False),
                "present": True,
                "done": True,
                "progress": text or "all files here",
                **fetched,
            }
        if state.get("failed"):
            raise WeightsError(state["failed"])
        if not runs:
            raise WeightsError(f"the transfer on {socket.gethostname()} ended without a word: {AGAIN}")
        if time.monotonic() >= deadline:
            told_ = {"here_bytes": state.get("here", 0), "rate": state.get("rate", 0.0)}
            return {"changed": False, "present": False, "done": False, "progress": progress_of(state), **told_}
        time.sleep(LOOK / 2)


# ---- fetching ----------------------------------------------------------------------------------------------


def gather(model: Model, fetch: Fetch) -> dict[str, Any]:
    """Fetch what the staging folder lacks, check, fetch damaged files once more, and place the model.

    `fetch` gets the files and the open lock. Each file is hashed as soon as it is whole, and from then on handed on.
    Returns the paths fetched, and those of them fetched twice.
    """
    take_back(model)
    descriptor = lock(model)
    watch = Watch(model)
    try:
        if is_placed(model):  # by the run that held the lock
            remove(model.staging)
            watch.ended({"changed": False, "fetched": [], "fetched_again": []})
            return {"fetched": [], "fetched_again": []}
        if not isinstance(fetch, Receive):
            # That folder is its user's already, and was seen to before it was given away.
            clear_way(model)
        check_room(model)
        with watch:
            take_from_others(model, lacking(model))
            wanted = lacking(model)
            if wanted:
                fetch(wanted, descriptor)
        wrong = place(model, watch.records)
        if wrong:
            with watch:
                fetch(wrong, descriptor)
            still = place(model, watch.records)
            if still:
                raise WeightsError(
                    f"{paths_of(still)} arrived damaged twice (another hash than the manifest's): check "
                    "the source's disk and memory, then run it again"
                )
    finally:
        os.close(descriptor)
    fetched = sorted({entry.path for entry in [*wanted, *wrong]})
    result = {"fetched": fetched, "fetched_again": [entry.path for entry in wrong]}
    watch.ended({"changed": True, **result})
    return result


def take_from_others(model: Model, wanted: list[Entry]) -> None:
    """Copy what other model folders beside this one have already, by the hashes that they recorded.

    After another split of the layers a node has most of its files in the folder of the one before. A copy that is not
    right after all is found when the folder is placed, and fetched.
    """
    content = {(entry.sha256 or entry.git_sha1, entry.size): entry for entry in wanted}
    for folder in sorted(model.directory.parent.glob(f"*/{MANIFEST}")):
        try:
            files = recorded(folder.parent)
        except (OSError, ValueError, TypeError, KeyError):
            continue
        for known in files:
            entry = content.pop((known.sha256 or known.git_sha1, known.size), None)
            if entry is None:
                continue
            target = model.staging / entry.path
            make_folder(target.parent)
            remove(target)
            # Blocks are shared where the file system can; a second name for the file would be no file of its own.
            done = subprocess.run(
                ["cp", "--reflink=auto", "--", str(folder.parent / known.path), str(target)],
                capture_output=True,
                check=False,
            )
            if done.returncode != 0:
                remove(target)


def paths_of(entries: list[Entry]) -> str:
    """Return the files' paths for a sentence."""
    return ", ".join(entry.path for entry in entries)


def pull_argv(rsync: str, port: int, address: str | None) -> list[str]:
    """Return the rsync command that fetches listed files from a peer's daemon, going on within a file.

    Mode 0644 comes last, and so says that a file is whole.
    """
    argv = [rsync, "--files-from=-", "--append-verify", "--perms", "--chmod=D0755,F0644", "--ignore-missing-args"]
    argv += ["--timeout=60", "--contimeout=20", f"--port={port}"]
    return [*argv, *([f"--address={address}"] if address else [])]


def url_of(address: str, part: str) -> str:
    """Return the address of a part of a peer's daemon."""
    return f"rsync://{f'[{address}]' if ':' in address else address}/{part}"


class Pull:
    """Fetches the files from the nodes before this one in the chain, from each at once."""

    def __init__(self, params: dict[str, Any], model: Model, rsync: str) -> None:
        self._params, self._model = params, model
        self._argv = pull_argv(rsync, params["port"], params["address"])
        self._over = threading.Event()
        self._error: Exception | None = None

    def __call__(self, entries: list[Entry], descriptor: int) -> None:
        """Fetch the files, or raise what the first of the peers failed by."""
        of: dict[str, list[Entry]] = {}
        named = {path: source["address"] for source in self._params["sources"] for path in source["paths"]}
        for entry in entries:
            of.setdefault(named.get(entry.path, self._params["source"]), []).append(entry)
        threads = [
            threading.Thread(target=self._fetch, args=(address, mine[stream::STREAMS], descriptor))
            for address, mine in of.items()
            for stream in range(min(STREAMS, len(mine)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _fetch(self, address: str, entries: list[Entry], descriptor: int) -> None:
        try:
            self._fetch_from(address, entries, descriptor)
        except (WeightsError, OSError) as error:
            self._error = self._error or error
            self._over.set()

    def _fetch_from(self, address: str, entries: list[Entry], descriptor: int) -> None:
        """Ask a peer for what it has of the files until all are here. What arrived is kept in any case."""
        left, peer, pause = entries, Peer(address, self._argv, self._params["patience"]), ASK[0]
        while not self._over.is_set():
            asked, before = left, sum(staged_bytes(self._model, entry) for entry in left)
            source = url_of(address, SERVED_AS) + "/"
            code, said = run_rsync([*self._argv, source, f"{self._model.staging}/"], left, descriptor)
            left = [entry for entry in left if not is_whole(self._model, entry)]
            if not left:
                return
            if code == FULL:
                raise WeightsError(cannot_write(self._model, said))
            if code not in PASSING | {0}:
                raise WeightsError(self._reason(address, said))
            if sum(staged_bytes(self._model, entry) for entry in asked) != before:
                peer.gave()
                pause = ASK[0]
                continue
            if peer.lives(code):
                self._over.wait(pause)
                pause = min(1.3 * pause, ASK[1])
                continue
            if address == self._params["source"]:
                raise WeightsError(self._reason(address, peer.failed or said))
            # The chain is broken here: the first node has all files in any case.
            address = self._params["source"]
            peer, pause = Peer(address, self._argv, self._params["patience"]), ASK[0]

    def _reason(self, address: str, said: str) -> str:
        return (
            f"the weights cannot be fetched from {address} ({said}): "
            f"check that both nodes see each other on the fabric, then {AGAIN}"
        )


class Peer:
    """Whether a peer that has nothing new is still at work: its own transfer counts on while it lives."""

    def __init__(self, address: str, argv: list[str], patience: int) -> None:
        self._argv = [word for word in argv if word not in ("--files-from=-", "--append-verify")]
        self._url, self._patience = f"{url_of(address, STATE_AS)}/{STATE}", patience
        self._beat: Any = None
        self._heard = time.monotonic()
        self._asked = 0.0
        self.failed = ""

    def gave(self) -> None:
        """Note that bytes came."""
        self._heard = time.monotonic()

    def lives(self, code: int) -> bool:
        """Return whether it is worth asking again; `code` is how the last rsync ended."""
        state = None
        if code in (0, 23, 24) and time.monotonic() - self._asked >= ASK[1] / 2:
            self._asked = time.monotonic()
            state = self._state()
        if state is not None:
            if state.get("failed"):
                self.failed = f"it could not get them itself: {state['failed']}"
                return False
            if state.get("beat") != self._beat:
                self._beat, self._heard = state.get("beat"), time.monotonic()
        return time.monotonic() - self._heard < self._patience

    def _state(self) -> dict[str, Any] | None:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([*self._argv, self._url, f"{folder}/"], capture_output=True, check=False)
            try:
                state = json.loads((Path(folder) / STATE).read_text(encoding="utf-8")) if not done.returncode else None
            except (OSError, ValueError):
                return None
        return state if isinstance(state, dict) else None


class Copy:
    """Copies the files from a folder that the node has mounted."""

    def __init__(self, folder: str, model: Model, rsync: str) -> None:
        self._folder, self._model = folder, model
        self._argv = [rsync, "--files-from=-", "--copy-links", "--append-verify", "--perms", "--chmod=D0755,F0644"]

    def __call__(self, entries: list[Entry], descriptor: int) -> None:
        """Copy the files; raise where the folder is not there or lacks one."""
        host = socket.gethostname()
        if not Path(self._folder).is_dir():
            raise WeightsError(
                f"{self._folder} is not there on {host}: mount it on every node, or remove ppdeploy_model_on_nodes"
            )
        source = f"{self._folder.rstrip('/')}/"
        code, said = run_rsync([*self._argv, source, f"{self._model.staging}/"], entries, descriptor)
        if code == FULL:
            raise WeightsError(cannot_write(self._model, said))
        if code != 0:
            raise WeightsError(
                f"the files cannot be copied from {self._folder} on {host} ({said}): check the mount, then {AGAIN}"
            )


class Receive:
    """Waits for what the controller copies into the staging folder."""

    def __init__(self, params: dict[str, Any], model: Model) -> None:
        self._patience, self._model = params["patience"], model
        self._came = False

    def __call__(self, entries: list[Entry], _descriptor: int) -> None:
        """Return when all files are whole; raise when nothing comes any more, or what came was damaged."""
        if self._came:
            raise WeightsError(damage(self._model, entries))
        # The copy is begun after this: until its first byte it may take longer.
        seen, since, patience = -1, time.monotonic(), START * self._patience
        while not all(is_whole(self._model, entry) for entry in entries):
            now = sum(staged_bytes(self._model, entry) for entry in entries)
            if now != seen:
                patience = self._patience if seen >= 0 else patience
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                short = [entry for entry in entries if not is_whole(self._model, entry)]
                raise WeightsError(
                    f"nothing came from the controller for {patience} s, and {paths_of(short[:3])} "
                    f"did not arrive in full on {socket.gethostname()}: {AGAIN}"
                )
            time.sleep(LOOK)
        self._came = True


def cannot_write(model: Model, said: str) -> str:
    """Return the sentence for a disk that does not take the files."""
    return (
        f"the files cannot be written to {model.staging} on {socket.gethostname()} ({said}): "
        f"see to the disk there, then {AGAIN}"
    )


def redacted(text: str) -> str:
    """Return the text without users and passwords in its URLs."""
    return re.sub(r"(\w+://)[^/\s]*@", r"\1***@", text)


def run_rsync(argv: list[str], entries: list[Entry], descriptor: int) -> tuple[int, str]:
    """Copy these files by `argv`, which reads their names on stdin; its exit code, and the line that says why."""
    done = subprocess.run(
        argv,
        input="".join(entry.path + "\n" for entry in entries),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        pass_fds=[descriptor],
    )
    return done.returncode, last_line(done.stderr, done.returncode)


def last_line(text: str, code: int) -> str:
    """Return the line of rsync's errors that says why; its own last line only sums up."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not re.match(r"rsync error:", line)]
    # The other side says last that its pipe broke.
    full = [line for line in telling if NO_SPACE.search(line)]
    return (full or telling or lines or [f"exit code {code}"])[-1][:300]


def way_out(params: dict[str, Any]) -> dict[str, str]:
    """Return the environment that leads a program by the proxy, and tells it which certificates to trust.

    huggingface_hub from 1.0 on asks by httpx or httpx2, before that by requests. All of them take a proxy as urllib
    does; for certificates httpx reads SSL_CERT_FILE and requests REQUESTS_CA_BUNDLE (their own documentation,
    "Environment variables" and "SSL Cert Verification"). hf_xet, for files beyond 50 GB, reads the names in capitals
    and SSL_CERT_FILE.
    With a proxy the node's own exceptions do not count.
    """
    found = {}
    if params["proxy"]:
        found = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), params["proxy"])
    if params["proxy"] or params["no_proxy"]:
        found["no_proxy"] = ",".join(params["no_proxy"])
    found.update({name.upper(): value for name, value in found.items()})
    if params["ca_bundle"]:
        found.update(dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"), params["ca_bundle"]))
    return found


def check_certificates(path: str | None) -> None:
    """Refuse a file of certificates that is not there: the client's own word for it names no variable."""
    if path and not Path(path).is_file():
        raise WeightsError(
            f"ppdeploy_ca_bundle names {path}, which is no file on {socket.gethostname()}: put your certificates "
            "there, or name the file that has them"
        )


def download(params: dict[str, Any], model: Model, entries: list[Entry], descriptor: int) -> None:
    """Fetch files from the hub with the environment's own huggingface_hub, as an unprivileged user."""
    identity: dict[str, Any] = {}
    home = model.staging / ".cache"
    home.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0:
        user = find_user(params["user"])
        identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        give(model, user)
        os.chown(home, user.pw_uid, user.pw_gid, follow_symlinks=False)
    # Below the staging folder, with what the client notes for going on later; `place` removes it all.
    kept = ("PATH", "LANG", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    certificates = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
    environment = {name: os.environ[name] for name in kept + certificates if name in os.environ}
    environment.update(
        {
            **way_out(params),
            "HOME": str(home),
            "HF_HOME": str(home),
            "HF_ENDPOINT": params["endpoint"],
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            # A slow line is no reason to give up.
            "HF_HUB_ETAG_TIMEOUT": "30",
            "HF_HUB_DOWNLOAD_TIMEOUT": "60",
            # Else a second copy of everything could lie in its cache.
            "HF_XET_CHUNK_CACHE_SIZE_BYTES": "0",
        }
    )
    job = {
        "repository": params["repository"],
        "commit": params["commit"],
        "endpoint": str(params["endpoint"]).rstrip("/"),
        "folder": str(model.staging),
        "files": [{"path": entry.path, "size": entry.size, "part": str(part_path(model, entry))} for entry in entries],
        "token": params["token"],
    }
    done = subprocess.run(
        [params["python"], "-I", "-B", "-c", DOWNLOAD],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd="/",
        env=environment,
        pass_fds=[descriptor],
        **identity,
    )
    if done.returncode != 0:
        raise WeightsError(download_error(params, model, done))


def download_error(params: dict[str, Any], model: Model, done: subprocess.CompletedProcess[str]) -> str:
    """Return what went wrong with a download as one sentence, without the token."""
    page = f"{params['endpoint']}/{params['repository']}" if params["repository"] else str(params["endpoint"])
    try:
        error = json.loads(done.stdout.strip().splitlines()[-1])
        kind, status, text = str(error["kind"]), error["status"], " ".join(str(error["text"]).split())
    except (ValueError, LookupError, TypeError):
        kind, status, text = "", None, last_line(done.stderr, done.returncode)
    if params["token"]:
        text = text.replace(params["token"], "***")
    text = redacted(text)
    if NO_SPACE.search(text):
        return cannot_write(model, text[:300])
    if "No module named 'huggingface_hub'" in text:
        return f"{params['python']} has no huggingface_hub: set model_store_python to that of a vLLM venv"
    if "certificate verify failed" in text.lower():
        return (
            f"the certificate of {page}, or of the proxy before it, is not trusted on {socket.gethostname()}: name the "
            "file there that has your certificates in ppdeploy_ca_bundle, then apply again"
        )
    # Classes of their own are what the hub itself said.
    if params["proxy"] and (status is None or (status in OF_PROXY and kind == "HfHubHTTPError")) and kind:
        token = ", the token in ppdeploy_hf_token" if status == 403 and params["token"] else ""
        return (
            f"the download from {page} failed by way of the proxy ({kind}: {text[:300]}): check ppdeploy_proxy{token}, "
            f"or name the host in ppdeploy_no_proxy, then {AGAIN}"
        )
    if status and not params["repository"]:
        return f"{page} answered HTTP {status} ({text[:300]}): check the files on that server, then {AGAIN}"
    if kind == "GatedRepoError":
        return f"{page} is gated: accept its terms there, and give that account's token in ppdeploy_hf_token"
    if kind in {"RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"}:
        return (
            f"{page} has no commit {params['commit']} with all files, or is private: check the name, or give "
            "a token for it in ppdeploy_hf_token"
        )
    if status in {401, 403} and params["token"]:
        return f"the hub refused the token (HTTP {status}): give a valid one in ppdeploy_hf_token"
    if status in {401, 403}:
        return (
            f"{page} answered HTTP {status} without a token: give one in ppdeploy_hf_token, or check what stands "
            f"between {socket.gethostname()} and the hub"
        )
    return f"the download from {page} failed ({kind or 'error'}: {text[:300]}): {AGAIN}"


# ---- serving -----------------------------------------------------------------------------------------------


def unit_name(model: Model) -> str:
    """Return the transient unit's name."""
    return f"{transfer_name(model)}.service"


def daemon_config(model: Model, peers: list[str]) -> str:
    """Return rsyncd.conf for one read-only model folder that answers only to the peers.

    It is read anew for each connection. As long as the model is not placed, only files that were checked are given.
    """
    lines = ["read only = yes", "list = no", "reverse lookup = no", "forward lookup = no", "timeout = 300"]
    if os.geteuid() == 0:
        # The daemon leaves its rights and the rest of the file system behind.
        nobody = find_user("nobody")
        lines += ["use chroot = yes", f"uid = {nobody.pw_uid}", f"gid = {nobody.pw_gid}"]
    else:
        lines.append("use chroot = no")
    lines += [f"hosts allow = {' '.join(peers)}", "", f"[{SERVED_AS}]"]
    if is_placed(model):
        lines += [f"path = {model.directory}"]
    else:
        lines += [f"path = {model.staging}", f"include from = {list_path(model)}", "exclude = *"]
    lines += ["", f"[{STATE_AS}]", f"path = {run_folder(model) / STATE_AS}", ""]
    return "\n".join(lines)


def list_path(model: Model) -> Path:
    """Return the list of the files that the daemon may give before the model is placed."""
    return run_folder(model) / "files"


def write_list(model: Model, paths: Iterable[str]) -> None:
    """Write the list, as rsync's rules: each file, and the folders that lead there."""
    rules = {f"/{parent}/" for path in paths for parent in Path(path).parents if parent.name}
    rules |= {f"/{path}" for path in paths}
    replace(list_path(model), "".join(f"{rule}\n" for rule in sorted(rules)))


def write_config(model: Model) -> None:
    """Write the daemon's configuration anew for the folder that has the model now."""
    peers = (run_folder(model) / "peers").read_text(encoding="utf-8").split()
    replace(config_path(model), daemon_config(model, peers))


def replace(path: Path, text: str) -> None:
    """Write a file that may be read at any moment."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.chmod(0o644)
    draft.rename(path)


def serve_argv(model: Model, config: Path, params: dict[str, Any], rsync: str) -> list[str]:
    """Return the command that starts the daemon as a transient unit, shut off from all but the peers."""
    properties = {
        "Type": "exec",
        "RuntimeMaxSec": str(params["serve_seconds"]),
        "IPAddressDeny": "any",
        "IPAddressAllow": " ".join([params["address"], *params["peers"]]),
        # What it needs to leave root and to see nothing but the model.
        "CapabilityBoundingSet": "CAP_SYS_CHROOT CAP_SETUID CAP_SETGID",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "ProtectHome": "read-only",
        "ProtectKernelTunables": "yes",
        "ProtectKernelModules": "yes",
        "ProtectControlGroups": "yes",
        "PrivateTmp": "yes",
        "PrivateDevices": "yes",
        "RestrictNamespaces": "yes",
        "LockPersonality": "yes",
    }
    argv = ["systemd-run", "--quiet", "--collect", f"--unit={unit_name(model)}"]
    argv.append(f"--description=ppdeploy: weights of {model.directory.name} for the other nodes")
    for name, value in properties.items():
        argv += ["-p", f"{name}={value}"]
    daemon = [rsync, "--daemon", "--no-detach", f"--config={config}"]
    return [*argv, *daemon, f"--address={params['address']}", f"--port={params['port']}"]


def config_path(model: Model) -> Path:
    """Return the place of the daemon's configuration."""
    return run_folder(model) / "rsyncd.conf"


def serve(model: Model, params: dict[str, Any], rsync: str) -> None:
    """Start the daemon and wait until it answers."""
    unserve(model)
    check_port(params["address"], params["port"])
    config = config_path(model)
    replace(make_run_folder(model) / "peers", " ".join(params["peers"]))
    write_list(model, [])
    write_config(model)
    publish(model, {"beat": -1, "placed": True} if is_placed(model) else {"beat": 0})
    done = subprocess.run(
        serve_argv(model, config, params, rsync),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    deadline = time.monotonic() + 10
    while done.returncode == 0 and time.monotonic() < deadline:
        if greets(params["address"], params["port"]):
            return
        time.sleep(0.1)
    journal = subprocess.run(
        ["journalctl", "-u", unit_name(model), "-n", "3", "-o", "cat", "--no-pager"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    unserve(model)
    said = " / ".join(line.strip() for line in (done.stderr + journal.stdout).splitlines() if line.strip())
    raise WeightsError(
        f"the rsync daemon on {params['address']} port {params['port']} did not start "
        f"({said or 'no message'}): look at `journalctl -u {unit_name(model)}` on {socket.gethostname()}"
    )


def unserve(model: Model) -> bool:
    """Stop the daemon and a transfer in the background, and leave nothing of them; return whether there was any."""
    folder = run_folder(model)
    active = subprocess.run(["systemctl", "is-active", "--quiet", unit_name(model)], capture_output=True, check=False)
    ended = end_job(model)
    if active.returncode == 0:
        subprocess.run(["systemctl", "stop", unit_name(model)], capture_output=True, check=False)
    found = folder.exists()
    remove(folder)
    return found or ended or active.returncode == 0


def family(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def check_port(address: str, port: int) -> None:
    """Raise when the daemon could not listen."""
    with socket.socket(family(address), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise WeightsError(
                f"the weights cannot be served on {address} port {port} of {socket.gethostname()} "
                f"({error.strerror}): end what listens there, or set model_store_port"
            ) from None


def greets(address: str, port: int) -> bool:
    """Return whether an rsync daemon says hello."""
    with socket.socket(family(address), socket.SOCK_STREAM) as probe:
        probe.settimeout(2)
        try:
            probe.connect((address, port))
            return probe.recv(8) == b"@RSYNCD:"
        except OSError:
            return False


# ---- states ------------------------------------------------------------------------------------------------


def connecting_user() -> str:
    """Return the user who logged in: sudo says so, else the kernel, else it is the one at work."""
    candidates = [os.environ.get("SUDO_UID", "")]
    try:
        candidates.append(Path("/proc/self/loginuid").read_text(encoding="ascii"))
    except OSError:
        candidates.append("")
    candidates.append(str(os.getuid()))
    for text in candidates:
        # All ones: nobody logged in.
        if text.strip().isdigit() and int(text) != 0xFFFFFFFF:
            try:
                return pwd.getpwuid(int(text)).pw_name
            except KeyError:
                continue
    raise WeightsError(f"nobody seems to have connected to {socket.gethostname()}: set model_store_owner")


def stage(model: Model, owner: str | None) -> dict[str, Any]:
    """Make the staging folder and give it, with all in it, to the user who copies."""
    user = find_user(owner or connecting_user())
    end_job(model)
    take_back(model)
    descriptor = lock(model)
    try:
        own_folders(model)
        clear_way(model)
        needed = check_room(model)
        give(model, user)
    finally:
        os.close(descriptor)
    return {"changed": True, "owner": user.pw_name, "missing_bytes": needed}


def verify(model: Model) -> None:
    """Place what was copied into the staging folder."""
    if not model.staging.is_dir():
        raise WeightsError(f"{model.staging} is not there: nothing was copied to {socket.gethostname()}")
    descriptor = lock(model)
    try:
        missing = lacking(model)
        wrong = place(model)
    finally:
        os.close(descriptor)
    damaged = [entry for entry in wrong if entry not in missing]
    if damaged:
        raise WeightsError(damage(model, damaged))
    if wrong:
        raise WeightsError(f"{paths_of(wrong)} did not arrive in full on {socket.gethostname()}: {AGAIN}")


def damage(model: Model, entries: list[Entry]) -> str:
    """Return the sentence for files that the controller sent and that are not right."""
    return (
        f"{paths_of(entries)} arrived damaged, the hash is not the manifest's: the file was removed from "
        f"{model.staging} on {socket.gethostname()}, run it again to send it anew"
    )


def rehash(model: Model) -> None:
    """Read a placed model again; raise naming the files that are not right."""
    wrong = [entry for entry in recorded(model.directory) if not read_again(model.directory, entry)]
    if wrong:
        raise WeightsError(
            f"{paths_of(wrong)} in {model.directory} on {socket.gethostname()} is not what the manifest "
            "says: remove the file and apply again, which fetches it anew"
        )


def recorded(folder: Path) -> list[Entry]:
    """Return the files of a placed model as they were when it was placed; raise OSError or ValueError."""
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    return [Entry(item["path"], item["size"], item.get("sha256"), item.get("git_sha1")) for item in files]


def read_again(folder: Path, entry: Entry) -> bool:
    """Return whether a placed file still has its content; nothing is changed."""
    try:
        descriptor = os.open(folder / entry.path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_size == entry.size and hash_open(descriptor, entry)
    finally:
        os.close(descriptor)


def run(module: AnsibleModule) -> dict[str, Any]:
    """Bring the state about and return what is to be said of it."""
    params = module.params
    state = params["state"]
    model = read_model(params["directory"], params["manifest"])
    common = {"digest": model.digest, "directory": str(model.directory), "staging": str(model.staging)}
    if state == "unserved":
        found = run_folder(model).exists() if module.check_mode else unserve(model)
        return {**common, "changed": found, "present": is_placed(model)}
    if state == "waited":
        nothing = {"changed": False, "present": is_placed(model), "done": True, "progress": ""}
        return {**common, **(nothing if module.check_mode else wait(model, params["seconds"]))}
    present = is_placed(model)
    if state == "served":
        if not module.check_mode:
            serve(model, params, program(module, "rsync"))
        # Nothing of the daemon outlives the transfer, so the node is not another one for having it.
        return {**common, "changed": False, "present": present}
    background = params["background"] and not module.check_mode
    if present:
        return {**common, **stand(model, params, background=background)}
    if state == "fits":
        if not module.check_mode:
            # A check comes here before what an apply installs first.
            program(module, "rsync")
        return {**common, "changed": False, "present": False, "missing_bytes": check_room(model)}
    if module.check_mode:
        would = {"owner": params["owner"] or connecting_user()} if state == "staged" else {"fetched": []}
        return {**common, "changed": True, "present": False, **would}
    if state == "staged":
        return {**common, "present": False, **stage(model, params["owner"])}
    if state == "verified":
        verify(model)
        return {**common, "changed": True, "present": True}
    fetch = fetcher(module, model)
    if background:
        begin(model, fetch)
        return {**common, "changed": True, "present": False}
    return {**common, "changed": True, "present": True, **gather(model, fetch)}


def stand(model: Model, params: dict[str, Any], *, background: bool) -> dict[str, Any]:
    """Return what is to be said of a model that is placed; it is only read again where that is asked."""
    if params["state"] == "verified" and params["rehash"]:
        rehash(model)
    nothing: dict[str, Any] = {"changed": False, "fetched": [], "fetched_again": []}
    if background:
        make_run_folder(model)
        publish(model, {"placed": True, **nothing})
    return {**nothing, "present": True, "missing_bytes": 0}


def fetcher(module: AnsibleModule, model: Model) -> Fetch:
    """Return what brings files into the staging folder."""
    params = module.params
    if params["state"] == "pulled":
        return Pull(params, model, program(module, "rsync"))
    if params["state"] == "copied":
        return Copy(params["folder"], model, program(module, "rsync"))
    if params["state"] == "received":
        return Receive(params, model)
    check_certificates(params["ca_bundle"])
    return lambda entries, held: download(params, model, entries, held)


def told(error: OSError, directory: Path) -> str:
    """Return the sentence for what the system refused. A write that fails names no file."""
    where = error.filename or f"beside {directory}, or in the folder for temporary files"
    return (
        f"{error.strerror or error} ({where}) on {socket.gethostname()}: "
        f"check the disk and the folder's mode, then {AGAIN}"
    )


def program(module: AnsibleModule, name: str) -> str:
    """Return a program's path, or say how to get it."""
    path = module.get_bin_path(name)
    if not path:
        raise WeightsError(f"{socket.gethostname()} has no {name}: install the package {name}")
    return str(path)


def main() -> None:
    """Read the parameters, bring the state about, and tell errors as sentences."""
    module = AnsibleModule(
        argument_spec={
            "state": {
                "type": "str",
                "required": True,
                "choices": [
                    *("fits", "staged", "verified", "copied", "downloaded", "pulled", "received", "served", "unserved"),
                    "waited",
                ],
            },
            "directory": {"type": "path", "required": True},
            "manifest": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "str", "required": True},
                    "size": {"type": "int", "required": True},
                    "sha256": {"type": "str"},
                    "git_sha1": {"type": "str"},
                },
            },
            "rehash": {"type": "bool", "default": False},
            "owner": {"type": "str"},
            "address": {"type": "str"},
            "port": {"type": "int", "default": 8730},
            "peers": {"type": "list", "elements": "str", "default": []},
            "serve_seconds": {"type": "int", "default": 43200},
            "source": {"type": "str"},
            "sources": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "address": {"type": "str", "required": True},
                    "paths": {"type": "list", "elements": "str", "required": True},
                },
            },
            "folder": {"type": "path"},
            "patience": {"type": "int", "default": 60},
            "background": {"type": "bool", "default": False},
            "seconds": {"type": "int", "default": 4},
            "repository": {"type": "str"},
            "commit": {"type": "str"},
            "endpoint": {"type": "str"},
            "token": {"type": "str", "no_log": True},
            "python": {"type": "path"},
            "user": {"type": "str", "default": "nobody"},
            # One of a role used alone may hold a password.
            "proxy": {"type": "str", "no_log": True},
            "no_proxy": {"type": "list", "elements": "str", "default": []},
            "ca_bundle": {"type": "path"},
        },
        required_if=[
            ("state", "served", ["address", "peers"]),
            ("state", "pulled", ["source"]),
            ("state", "downloaded", ["endpoint", "python"]),
            ("state", "copied", ["folder"]),
        ],
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except WeightsError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=told(error, Path(module.params["directory"])))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
