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
      - V(pulled) fetches the files from a peer's rsync daemon, then does as V(verified).
      - V(served) starts the rsync daemon for a placed model, V(unserved) stops it and leaves nothing of it.
    type: str
    choices: [fits, staged, verified, downloaded, pulled, served, unserved]
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
    description: With O(state=pulled) the address of the node that serves.
    type: str
  repository:
    description: With O(state=downloaded) the repository's id on the hub.
    type: str
  commit:
    description: With O(state=downloaded) the commit.
    type: str
  endpoint:
    description: With O(state=downloaded) the hub's address.
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
  returned: with O(state=pulled) and O(state=downloaded)
  type: list
  elements: str
fetched_again:
  description: Those of them that had arrived damaged and were fetched a second time.
  returned: with O(state=pulled) and O(state=downloaded)
  type: list
  elements: str
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import re
import shutil
import socket
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, NamedTuple

from ansible.module_utils.basic import AnsibleModule

MANIFEST = ".ppdeploy-manifest.json"
RUN = Path("/run")
SERVED_AS = "weights"
# Free space that is left to the rest of the system when a model has just fitted.
RESERVE = 256 << 20
LOCK_WAIT = 120
PULL_TRIES = 3
INDEX = ".safetensors.index.json"
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
from urllib.parse import urlsplit
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

job = json.load(sys.stdin)
token = job["token"] or False

def fetch(item):
    if item["size"] > getattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", 50 * 1000**3):
        # The hub does not give such a file by plain HTTP, only by its own protocol.
        hf_hub_download(job["repository"], item["path"], revision=job["commit"], local_dir=job["folder"],
                        token=token)
        return
    url = hf_hub_url(job["repository"], item["path"], revision=job["commit"])
    for left in (2, 1, 0):
        try:
            place = get_hf_file_metadata(url, token=token).location
            break
        except Exception as error:
            # What the hub said is final; that it said nothing may be the line.
            if not left or getattr(getattr(error, "response", None), "status_code", 500) < 500:
                raise
            time.sleep(3)
    headers = build_hf_headers(token=token)
    headers["Accept-Encoding"] = "identity"
    if urlsplit(place)[:2] != urlsplit(url)[:2]:
        headers.pop("authorization", None)
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
        digest, expected = hashlib.sha1(b"blob %d\0" % entry.size), entry.git_sha1 or ""  # noqa: S324
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


def part_path(model: Model, entry: Entry) -> Path:
    """Return where a file is downloaded to before it is whole."""
    return model.staging / ".cache" / hashlib.sha256(entry.path.encode()).hexdigest()


def missing_bytes(model: Model) -> int:
    """Return how many bytes are still to be fetched, what lies in the staging folder not counted."""
    total = 0
    for entry in model.entries:
        staged = 0
        for path in (model.staging / entry.path, part_path(model, entry)):
            # A file that is not there has no bytes.
            with contextlib.suppress(OSError):
                staged = max(staged, path.lstat().st_size)
        total += max(0, entry.size - staged)
    return total


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
            model.staging.mkdir(mode=0o700)
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


def place(model: Model) -> list[Entry]:
    """Check the staged files and rename the folder when all are right; remove and return the others."""
    own_folders(model)
    records, wrong = check_files(model.staging, model.entries)
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


# ---- fetching ----------------------------------------------------------------------------------------------


def gather(model: Model, fetch: Callable[[list[Entry], int], None]) -> tuple[list[str], list[str]]:
    """Fetch what the staging folder lacks, check, fetch damaged files once more, and place the model.

    `fetch` gets the files and the open lock. Returns the paths fetched, and those of them fetched twice.
    """
    take_back(model)
    descriptor = lock(model)
    try:
        if is_placed(model):  # by the run that held the lock
            remove(model.staging)
            return [], []
        check_room(model)
        take_from_others(model, lacking(model))
        wanted = lacking(model)
        if wanted:
            fetch(wanted, descriptor)
        wrong = place(model)
        if wrong:
            fetch(wrong, descriptor)
            still = place(model)
            if still:
                raise WeightsError(
                    f"{paths_of(still)} arrived damaged twice (another hash than the manifest's): check "
                    "the source's disk and memory, then run it again"
                )
    finally:
        os.close(descriptor)
    return sorted({entry.path for entry in [*wanted, *wrong]}), [entry.path for entry in wrong]


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


def pull_argv(rsync: str, source: str, port: int, address: str | None, staging: Path) -> list[str]:
    """Return the rsync command that fetches listed files from a peer's daemon, going on within a file."""
    host = f"[{source}]" if ":" in source else source
    argv = [rsync, "--files-from=-", "--append-verify", "--timeout=60", "--contimeout=20", f"--port={port}"]
    if address:
        argv.append(f"--address={address}")
    return [*argv, f"rsync://{host}/{SERVED_AS}/", f"{staging}/"]


def pull(argv: list[str], source: str, entries: list[Entry], descriptor: int) -> None:
    """Run rsync until the files are here. A broken connection is tried again: what arrived is kept."""
    names = "".join(entry.path + "\n" for entry in entries)
    for left in reversed(range(PULL_TRIES)):
        done = subprocess.run(
            argv,
            input=names,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            pass_fds=[descriptor],
        )
        if done.returncode == 0:
            return
        # 5: refused by the daemon; 10: no connection; 12: connection broken; 30, 35: silence.
        if done.returncode not in (5, 10, 12, 30, 35) or not left:
            raise WeightsError(
                f"the weights cannot be fetched from {source} ({last_line(done.stderr, done.returncode)}): "
                f"check that both nodes see each other on the fabric, then {AGAIN}"
            )
        time.sleep(2)


def last_line(text: str, code: int) -> str:
    """Return the line of rsync's errors that says why; its own last line only sums up."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if not re.match(r"rsync error:", line)]
    return (telling or lines or [f"exit code {code}"])[-1][:300]


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
        raise WeightsError(download_error(params, done))


def download_error(params: dict[str, Any], done: subprocess.CompletedProcess[str]) -> str:
    """Return what went wrong with a download as one sentence, without the token."""
    page = f"{params['endpoint']}/{params['repository']}"
    try:
        error = json.loads(done.stdout.strip().splitlines()[-1])
        kind, status, text = str(error["kind"]), error["status"], " ".join(str(error["text"]).split())
    except (ValueError, LookupError, TypeError):
        kind, status, text = "", None, last_line(done.stderr, done.returncode)
    if params["token"]:
        text = text.replace(params["token"], "***")
    if "No module named 'huggingface_hub'" in text:
        return f"{params['python']} has no huggingface_hub: set model_store_python to that of a vLLM venv"
    if kind == "GatedRepoError":
        return f"{page} is gated: accept its terms there, and give that account's token in ppdeploy_hf_token"
    if kind in {"RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError"}:
        return (
            f"{page} has no commit {params['commit']} with all files, or is private: check the name, or give "
            "a token for it in ppdeploy_hf_token"
        )
    if status in {401, 403}:
        return f"the hub refused the token (HTTP {status}): give a valid one in ppdeploy_hf_token"
    return f"the download from {page} failed ({kind or 'error'}: {text[:300]}): {AGAIN}"


# ---- serving -----------------------------------------------------------------------------------------------


def unit_name(model: Model) -> str:
    """Return the transient unit's name."""
    return f"ppdeploy-weights-{model.digest[:12]}.service"


def daemon_config(model: Model, peers: list[str]) -> str:
    """Return rsyncd.conf for one read-only model folder that answers only to the peers."""
    lines = ["read only = yes", "list = no", "reverse lookup = no", "forward lookup = no", "timeout = 300"]
    if os.geteuid() == 0:
        # The daemon leaves its rights and the rest of the file system behind.
        nobody = find_user("nobody")
        lines += ["use chroot = yes", f"uid = {nobody.pw_uid}", f"gid = {nobody.pw_gid}"]
    else:
        lines.append("use chroot = no")
    lines += [f"hosts allow = {' '.join(peers)}", "", f"[{SERVED_AS}]", f"path = {model.directory}", ""]
    return "\n".join(lines)


def serve_argv(model: Model, config: Path, params: dict[str, Any], rsync: str) -> list[str]:
    """Return the command that starts the daemon as a transient unit, shut off from all but the peers."""
    properties = {
        "Type": "exec",
        "RuntimeMaxSec": str(params["serve_seconds"]),
        "ExecStopPost": f"/bin/rm -f {config}",
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
    """Return the place of the daemon's configuration, which goes with the unit."""
    return RUN / (f"ppdeploy-weights-{model.digest[:12]}.conf")


def serve(model: Model, params: dict[str, Any], rsync: str) -> None:
    """Start the daemon and wait until it answers."""
    unserve(model)
    check_port(params["address"], params["port"])
    config = config_path(model)
    write(config, daemon_config(model, params["peers"]))
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
    """Stop the daemon and remove its configuration; return whether there was anything of it."""
    config = config_path(model)
    active = subprocess.run(["systemctl", "is-active", "--quiet", unit_name(model)], capture_output=True, check=False)
    found = active.returncode == 0 or config.exists()
    if found:
        subprocess.run(["systemctl", "stop", unit_name(model)], capture_output=True, check=False)
        remove(config)
    return found


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
    take_back(model)
    descriptor = lock(model)
    try:
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
        raise WeightsError(
            f"{paths_of(damaged)} arrived damaged, the hash is not the manifest's: the file was removed from "
            f"{model.staging} on {socket.gethostname()}, run it again to send it anew"
        )
    if wrong:
        raise WeightsError(f"{paths_of(wrong)} did not arrive in full on {socket.gethostname()}: {AGAIN}")


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
        found = config_path(model).exists() if module.check_mode else unserve(model)
        return {**common, "changed": found, "present": is_placed(model)}
    if is_placed(model):
        if state == "verified" and params["rehash"]:
            rehash(model)
        if state == "served" and not module.check_mode:
            serve(model, params, program(module, "rsync"))
        # Nothing of the daemon outlives the transfer, so the node is not another one for having it.
        return {
            **common,
            "changed": False,
            "present": True,
            "missing_bytes": 0,
            "fetched": [],
            "fetched_again": [],
        }
    if state == "fits":
        program(module, "rsync")
        return {**common, "changed": False, "present": False, "missing_bytes": check_room(model)}
    if module.check_mode:
        would = {"owner": params["owner"] or connecting_user()} if state == "staged" else {"fetched": []}
        return {**common, "changed": True, "present": False, **would}
    if state == "served":
        raise WeightsError(f"{model.directory} is not placed on {socket.gethostname()}: it cannot be served")
    if state == "staged":
        return {**common, "present": False, **stage(model, params["owner"])}
    if state == "verified":
        verify(model)
        return {**common, "changed": True, "present": True}
    if state == "pulled":
        argv = pull_argv(program(module, "rsync"), params["source"], params["port"], params["address"], model.staging)
        fetched = gather(model, lambda entries, held: pull(argv, params["source"], entries, held))
    else:
        fetched = gather(model, lambda entries, held: download(params, model, entries, held))
    return {**common, "changed": True, "present": True, "fetched": fetched[0], "fetched_again": fetched[1]}


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
                "choices": ["fits", "staged", "verified", "downloaded", "pulled", "served", "unserved"],
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
            "repository": {"type": "str"},
            "commit": {"type": "str"},
            "endpoint": {"type": "str"},
            "token": {"type": "str", "no_log": True},
            "python": {"type": "path"},
            "user": {"type": "str", "default": "nobody"},
        },
        required_if=[
            ("state", "served", ["address", "peers"]),
            ("state", "pulled", ["source"]),
            ("state", "downloaded", ["repository", "commit", "endpoint", "python"]),
        ],
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except WeightsError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        module.fail_json(
            msg=f"{error.strerror or error}{where} on {socket.gethostname()}: "
            f"check the disk and the folder's mode, then {AGAIN}"
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
