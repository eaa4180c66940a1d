#!/usr/bin/python
"""The model folders of a node: which there are and what needs them, reading them again, removing some."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_models
short_description: List, read again or remove the model folders of a node
description:
  - A folder is needed by the releases that C(current) and C(previous) of any pipeline name, by a process that has it
    in its command line, and by a transfer that is filling it.
options:
  action:
    description:
      - V(list) tells the folders, their bytes and what needs them, and changes nothing.
      - V(check) reads every file of all of them again, which takes minutes for a large model. A file that is not what
        its record says is marked by a new time, so that no rank starts with it and the next apply fetches it anew.
      - V(remove) removes the named folders. One that is needed is an error, and then none is removed.
    type: str
    choices: [list, check, remove]
    default: list
  models_dir:
    description: The folder that has the model folders.
    type: path
    required: true
  folders:
    description: With O(action=remove) their names.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Says whether it would change the node.
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Remove a model that nothing needs
  ppdeploy_models:
    action: remove
    models_dir: /var/lib/ppdeploy/models
    folders: [tiny-0123456789ab]
"""

RETURN = r"""
models:
  description: The folders with C(name), C(bytes) on the disk, C(needed_by), sentences, and C(damaged), files.
  returned: always
  type: list
  elements: dict
removed:
  description: The folders that were removed.
  returned: with O(action=remove)
  type: list
  elements: str
free_bytes:
  description: Bytes that are free in O(models_dir) now.
  returned: always
  type: int
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

MANIFEST = ".ppdeploy-manifest.json"
OPT = Path("/opt/ppdeploy")
PROC = Path("/proc")
SYSTEMD = Path("/etc/systemd/system")
RUN = Path("/run")
PARTIAL = ".partial"
# What the plan calls a folder: the model's name and the start of its manifest's digest. So is one found that has no
# record yet, or lost it.
OURS = re.compile(r".*-[0-9a-f]{12}(\.partial)?")
BLOCK = 1 << 20


class ModelsError(Exception):
    """What is told to the user when the work cannot go on."""


def model_folders(models_dir: Path) -> list[Path]:
    """Return ppdeploy's own folders below `models_dir`, also those that are not filled yet.

    Others may lie beside them, such as a sidecar's model or all that somebody collected: those are not ours to remove.
    """
    if not models_dir.is_dir():
        return []
    folders = [path for path in models_dir.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted(path for path in folders if (path / MANIFEST).is_file() or OURS.fullmatch(path.name))


def manifest_digest(folder: Path) -> str | None:
    """Return what a folder's record says that it holds; None where there is no record that can be read."""
    try:
        digest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return digest if isinstance(digest, str) else None


def releases() -> Iterator[tuple[str, Path]]:
    """Yield the releases that a pipeline runs by or goes back to, each with what it is."""
    for pipeline in sorted(OPT.glob("*/releases")):
        for link in ("current", "previous"):
            release = pipeline.parent / link
            if (release / "release.json").is_file():
                yield f"the {link} release of pipeline {pipeline.parent.name}", release


def digests_of(release: Path) -> set[str]:
    """Return the manifest digests that a release names, of all its nodes; raise where it cannot be read."""
    try:
        data = json.loads((release / "release.json").read_text(encoding="utf-8"))
        named = {node.get("manifest") for node in data["nodes"]} | {data.get("manifest")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelsError(
            f"{release / 'release.json'} cannot be read ({error}), so nobody knows what it needs: run apply"
        ) from None
    return {digest for digest in named if isinstance(digest, str)}


def processes() -> Iterator[bytes]:
    """Yield what each process was started with, has loaded and has open."""
    for process in PROC.glob("[0-9]*"):
        told = []
        for about in ("cmdline", "environ", "maps"):
            # A process may end while it is looked at.
            with contextlib.suppress(OSError):
                told.append((process / about).read_bytes())
        for link in (*process.glob("fd/*"), process / "cwd"):
            with contextlib.suppress(OSError):
                told.append(os.fsencode(link.readlink()))
        yield b"\0".join(told)


def named_in_units(pattern: re.Pattern[bytes]) -> list[str]:
    """Return the names of our units that name a folder: a sidecar needs its model also while it does not run."""
    found = []
    for path in (*SYSTEMD.glob("ppdeploy-*"), *SYSTEMD.glob("ppdeploy-*.d/*")):
        with contextlib.suppress(OSError):
            if path.is_file() and pattern.search(path.read_bytes()):
                found.append(path.name)
    return sorted(found)


def pattern_of(folder: Path, digest: str | None) -> re.Pattern[bytes]:
    """Return what names a folder, by its own path or the one without links, or a transfer from it to other nodes."""
    paths = {os.fsencode(str(folder)), os.fsencode(str(folder.resolve()))}
    names = [re.escape(path) + rb"(?![\w.+@=,-])" for path in sorted(paths)]
    # As ppdeploy_weights calls what it keeps there.
    transfer = hashlib.sha256(f"{folder} {digest}".encode()).hexdigest()[:12]
    names.append(re.escape(os.fsencode(str(RUN / f"ppdeploy-weights-{transfer}"))))
    return re.compile(b"|".join(names))


def is_being_filled(folder: Path) -> bool:
    """Return whether a transfer keeps the folder locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def needed_by(folders: list[Path]) -> dict[Path, list[str]]:
    """Return for each folder the sentences on what needs it."""
    wanted = [(what, digests_of(release)) for what, release in releases()]
    digest_of = {folder: manifest_digest(folder) for folder in folders}
    patterns = {folder: pattern_of(folder, digest) for folder, digest in digest_of.items()}
    used = {folder for told in processes() for folder, pattern in patterns.items() if pattern.search(told)}
    found: dict[Path, list[str]] = {}
    for folder in folders:
        found[folder] = [what for what, digests in wanted if digest_of[folder] in digests]
        found[folder] += [f"the unit {name}" for name in named_in_units(patterns[folder])]
        if folder in used:
            found[folder].append("a process that runs")
        if folder.name.endswith(PARTIAL) and is_being_filled(folder):
            found[folder].append("a transfer that runs")
    return found


def bytes_below(folder: Path) -> int:
    """Return the bytes of the files in a folder, as far as they are really on the disk."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                about = Path(place, name).lstat()
                total += min(about.st_size, about.st_blocks * 512) if stat.S_ISREG(about.st_mode) else 0
    return total


def is_right(folder: Path, item: dict[str, Any]) -> bool:
    """Return whether a file has the content that its record names, by reading all of it."""
    if "sha256" in item:
        digest, expected = hashlib.sha256(), item["sha256"]
    else:
        # Not for security: git has no other name for the file.
        digest, expected = hashlib.sha1(b"blob %d\0" % item["size"]), item["git_sha1"]  # noqa: S324  (what git, and so the hub, names a file by)
    try:
        with (folder / item["path"]).open("rb") as stream:
            while True:
                block = stream.read(BLOCK)
                if not block:
                    return bool(digest.hexdigest() == expected)
                digest.update(block)
    except OSError:
        return False


def damaged(folder: Path) -> list[str]:
    """Return the files of a placed model that are not what its record says."""
    try:
        items = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            right = list(pool.map(lambda item: is_right(folder, item), items))
        return [str(item["path"]) for item, good in zip(items, right) if not good]
    except (OSError, ValueError, TypeError, KeyError):
        return [MANIFEST]


def mark(folder: Path, path: str) -> None:
    """Give a file another time than the recorded one; a file that is gone needs no mark."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(folder / path)


def run(module: AnsibleModule) -> dict[str, Any]:
    """Do what was asked and return what is to be said of it."""
    models_dir = Path(module.params["models_dir"])
    if not models_dir.is_absolute():
        raise ModelsError(f"models_dir: {str(models_dir)!r} is not an absolute path: give the whole path")
    action = module.params["action"]
    folders = model_folders(models_dir)
    needed = needed_by(folders)
    changed, removed, wrong = False, [], {}
    if action == "check":
        for folder in folders:
            if not folder.name.endswith(PARTIAL):
                wrong[folder] = damaged(folder)
                for path in wrong[folder]:
                    changed = True
                    if not module.check_mode:
                        mark(folder, path)
    if action == "remove":
        removed = remove(module, folders, needed)
        changed = bool(removed)
    told = [
        {
            "name": folder.name,
            "bytes": bytes_below(folder),
            "needed_by": needed[folder],
            "damaged": wrong.get(folder, []),
        }
        for folder in folders
        if folder.is_dir()
    ]
    return {"changed": changed, "models": told, "removed": removed, "free_bytes": free(models_dir)}


def free(path: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    while not path.exists():
        path = path.parent
    about = os.statvfs(path)
    return about.f_bavail * about.f_frsize


def remove(module: AnsibleModule, folders: list[Path], needed: dict[Path, list[str]]) -> list[str]:
    """Remove the named folders and return their names; a needed one is an error."""
    chosen = [folder for folder in folders if folder.name in module.params["folders"]]
    for folder in chosen:
        partial = folder.with_name(folder.name + PARTIAL)
        if partial.is_dir() and is_being_filled(partial):
            needed[folder].append("a transfer that runs")
        if needed[folder]:
            raise ModelsError(f"{folder} is needed by {needed[folder][0]}: nothing was removed, ask for the list again")
    if not module.check_mode:
        for folder in chosen:
            # What is half removed must not be taken for a model, and is to be found again.
            doomed = folder if folder.name.endswith(PARTIAL) else folder.with_name(folder.name + PARTIAL)
            if doomed != folder:
                if doomed.exists():
                    shutil.rmtree(doomed)
                folder.rename(doomed)
            shutil.rmtree(doomed)
    return [folder.name for folder in chosen]


def main() -> None:
    """Read the parameters, do what was asked, and tell errors as sentences."""
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "default": "list", "choices": ["list", "check", "remove"]},
            "models_dir": {"type": "path", "required": True},
            "folders": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except ModelsError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        module.fail_json(msg=f"{error.strerror or error}{where}: check the disk and the folder's mode")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
