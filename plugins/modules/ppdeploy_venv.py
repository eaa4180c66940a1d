#!/usr/bin/python
"""Build the virtual environment that a lock defines, beside those that are there, and prove that it works."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_venv
short_description: Build a virtual environment of vLLM from a lock
description:
  - The environment lies in C(ROOT/venvs/DIGEST), DIGEST being the first 16 digits of the lock's sha256. It is
    never changed once it is complete, which C(.ppdeploy.json) in it says; that file is written last. An
    environment without it is what an interrupted build left, and is built anew.
  - Packages come from a folder of wheels on the node, without any network, or from package indexes. Each file
    is checked against the hash that the lock has for it.
  - Nothing of Python is downloaded; the node's own interpreter of the lock's version is used.
options:
  state:
    description:
      - V(present) builds the environment.
      - V(staged) makes a folder for the connecting user, who is about to copy wheels or uv into it, and says
        which are missing there. V(present) removes it in the end.
      - V(waited) tells how far a build is that was begun with O(background), and in the end what became of it.
      - V(pruned) removes old environments, so that O(keep) are left. One that a pipeline's current or previous
        release names, or a unit, or that a program runs from, is never removed.
    type: str
    choices: [present, staged, waited, pruned]
    default: present
  background:
    description:
      - With O(state=present) go on in the background, see O(state=waited). A build of the same lock that an earlier
        apply began is joined.
    type: bool
    default: false
  seconds:
    description: With O(state=waited) how long to wait at most before telling how far it is.
    type: int
    default: 4
  lock:
    description: Content of the lock file.
    type: str
    required: true
  uv:
    description:
      - Content of the file that pins the wheel of uv, for the node's machine. An environment that comes from
        indexes is built by the controller's uv instead, copied to the folder of O(state=staged).
      - Required unless O(state=pruned).
    type: str
  wheelhouse:
    description:
      - A bundle's folder on the node, with the wheels in its folder C(wheels).
      - Left out, wheels come from the indexes.
    type: path
  staged:
    description:
      - The wheels are in the folder that O(state=staged) made; with O(state=staged), they will be copied there.
    type: bool
    default: false
  packages:
    description: With O(state=staged) make the folder whatever wheels are there, since packages will be copied there.
    type: bool
    default: false
  owner:
    description: With O(state=staged) the user who copies; the default is the connecting user.
    type: str
  index_url:
    description: Package index in place of PyPI.
    type: str
  extra_index_url:
    description: A further package index, such as the one that has torch's builds for the CPU.
    type: str
  proxy:
    description: HTTP proxy through which the indexes are reached.
    type: str
  no_proxy:
    description: Hosts and domains that are reached without O(proxy); a domain stands for all its hosts.
    type: list
    elements: str
    default: []
  ca_bundle:
    description:
      - File on the node with the certificates that an index's is checked against, in place of those of uv.
    type: path
  uv_cache:
    description:
      - uv's cache, which makes the next environment cheap. Keep it on the file system of O(root).
      - Required unless O(state=pruned).
    type: path
  link_mode:
    description:
      - How files get from the cache into the environment.
      - V(symlink) is for a cache that is never removed and that all users can read; it must hold the byte code.
    type: str
    choices: [clone, copy, hardlink, symlink]
    default: hardlink
  python:
    description: The interpreter, a path or a name; the default is found by the lock's version.
    type: str
  capabilities:
    description: Compute capabilities of the node's GPUs, such as V(9.0), which torch must have been built for.
    type: list
    elements: str
    default: []
  keep:
    description: With O(state=pruned) how many environments are left, that of O(lock) among them.
    type: int
    default: 2
  root:
    description: Where everything of ppdeploy's own programs lies.
    type: path
    default: /opt/ppdeploy
attributes:
  check_mode:
    support: full
    description: Says whether it would build, after the checks that need no change.
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Build the environment from a folder of wheels
  ppdeploy_venv:
    lock: "{{ lookup('ansible.builtin.file', 'vllm-0.33.0-cp312-x86_64.txt', rstrip=false) }}"
    uv: "{{ lookup('ansible.builtin.file', 'uv-x86_64.txt') }}"
    wheelhouse: /srv/ppdeploy/wheelhouse
    uv_cache: /var/cache/ppdeploy/uv
"""

RETURN = r"""
venv:
  description: Folder of the environment.
  returned: with O(state=present)
  type: str
digest:
  description: sha256 of the lock.
  returned: always
  type: str
versions:
  description:
    - Versions of python, vllm, torch, nccl and cuda that the environment reports; null for what is not there.
    - C(arches) lists what torch's kernels are compiled for, such as C(sm_90); empty on cpu.
  returned: with O(state=present), when the environment is there
  type: dict
seconds:
  description: Wall-clock seconds of the build's steps.
  returned: when an environment was built
  type: dict
done:
  description: Whether the build has ended.
  returned: with O(state=waited)
  type: bool
progress:
  description: How far the build is, in words.
  returned: with O(state=waited)
  type: str
staging:
  description: The folder to copy wheels into.
  returned: with O(state=staged)
  type: str
owner:
  description: Name of the user who may write there.
  returned: with O(state=staged)
  type: str
removed:
  description: Folders of the environments that were removed.
  returned: with O(state=pruned)
  type: list
  elements: str
missing:
  description: Files, below a bundle's folder, that are not there yet.
  returned: with O(state=staged)
  type: list
  elements: str
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import pwd
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple

from ansible.module_utils.basic import AnsibleModule

MARKER = ".ppdeploy.json"
# Where things are; a test puts its own tree there.
SYSTEMD = Path("/etc/systemd/system")
PROC = Path("/proc")
RUN = Path("/run")
GIB = 1024**3
# Seconds between two looks at a build, and over which a rate is taken.
LOOK = 1.0
RATE_OVER = 15.0
LINKS_BYTES = GIB // 2
"""Room for an environment of symbolic links, which take a block each on most file systems."""

VERIFY = """
import importlib.metadata as metadata
import json
import platform

import torch
import vllm

if DEVICE == "cpu":
    # Loads the compiled kernels, and with them libnuma and whatever else they are linked to.
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "silu_and_mul"):
        raise ImportError("vLLM's compiled kernels do not load: is the system package libnuma1 (numactl-libs) there?")


def arches():
    # What torch's kernels are compiled for. Its own function answers with nothing where no GPU can be seen.
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)
    return sorted(torch.cuda.get_arch_list() or (flags() or "").split())


def version(start):
    found = [d.version for d in metadata.distributions() if (d.name or "").lower().startswith(start)]
    return found[0] if found else None


print(json.dumps({
    "python": platform.python_version(),
    "vllm": metadata.version("vllm"),
    "torch": torch.__version__,
    "nccl": version("nvidia-nccl-"),
    "cuda": torch.version.cuda,
    "arches": arches(),
}))
"""


class VenvError(Exception):
    """A sentence for the user: what is wrong, where, what to do."""


class Wheel(NamedTuple):
    """A file that the lock names."""

    project: str
    version: str
    file: str
    size: int
    sha256: str
    content: bytes | None


class Lock(NamedTuple):
    """What the lock's text says."""

    digest: str
    about: dict[str, Any]
    wheels: tuple[Wheel, ...]

    def versions(self) -> dict[str, str | None]:
        """Return the versions that must be equal on all nodes; None for what the lock has not."""
        found = {w.project: w.version for w in self.wheels}
        nccl = next((version for name, version in found.items() if name.startswith("nvidia-nccl-")), None)
        return {"vllm": found.get("vllm"), "torch": found.get("torch"), "nccl": nccl}


def parse_wheels(text: str) -> tuple[Wheel, ...]:
    """Return the wheels of a lock's text; ppdeploy/locks/lock.py describes the format."""
    wheels: list[Wheel] = []
    file, size, content = "", 0, None
    for line in text.splitlines():
        if line.startswith("# wheel: "):
            file, size = line.split()[2], int(line.split()[3])
        elif line.startswith("# content: "):
            content = base64.b64decode(line.split()[2])
        elif line and not line.startswith("#"):
            requirement, sha256 = line.split(" --hash=sha256:")
            project, version = requirement.split("==")
            wheels.append(Wheel(project, version, file, size, sha256, content))
            content = None
    return tuple(wheels)


def parse_lock(text: str) -> Lock:
    """Return a lock; VenvError when the text is none."""
    about = [line[len("# ppdeploy: ") :] for line in text.splitlines() if line.startswith("# ppdeploy: ")]
    try:
        lock = Lock(hashlib.sha256(text.encode()).hexdigest(), json.loads(about[0]), parse_wheels(text))
        if not lock.wheels or not {"python", "machine", "glibc", "device", "installed_bytes"} <= lock.about.keys():
            raise ValueError
    except (IndexError, ValueError):
        raise VenvError("the lock is no lock file of ppdeploy: name one of those in its folder locks") from None
    return lock


def here() -> str:
    """Return the name of this node for sentences."""
    return socket.gethostname()


def way_out(params: dict[str, Any]) -> dict[str, str]:
    """Return the environment that leads a program by the proxy, and tells it which certificates to trust.

    uv reads the names in capitals before the others (docs.astral.sh/uv, "Environment variables").
    With a proxy the node's own exceptions do not count.
    """
    found = {}
    if params["proxy"]:
        found = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), params["proxy"])
    if params["proxy"] or params["no_proxy"]:
        found["no_proxy"] = ",".join(params["no_proxy"])
    found.update({name.upper(): value for name, value in found.items()})
    if params["ca_bundle"]:
        found["SSL_CERT_FILE"] = params["ca_bundle"]
    return found


def check_certificates(path: str | None) -> None:
    """Refuse a file of certificates that is not there: uv would warn, and go on with its own."""
    if path and not Path(path).is_file():
        raise VenvError(
            f"ppdeploy_ca_bundle names {path}, which is no file on {here()}: put your certificates there, or name the "
            "file that has them"
        )


def find_python(wanted: str | None, minor: str) -> str:
    """Return the interpreter of a minor version on this node; VenvError when there is none."""
    candidates = [wanted] if wanted else [f"python{minor}", "python3"]
    seen = []
    for candidate in candidates:
        path = shutil.which(candidate, path="/usr/local/bin:/usr/bin:/bin:" + os.environ.get("PATH", ""))
        if path is None:
            continue
        answer = subprocess.run(
            [path, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        version = answer.stdout.strip()
        if version == minor:
            return path
        seen.append(f"{path} is Python {version or 'of no known version'}")
    found = f" ({', '.join(seen)})" if seen else ""
    raise VenvError(
        f"the wheels are for Python {minor}, which {here()} does not have{found}: "
        f"install python{minor}, or make a bundle and lock for the Python that is there"
    )


def check_node(lock: Lock, python: str) -> None:
    """Refuse a node that the wheels cannot run on."""
    machine = platform.machine()
    if machine != lock.about["machine"]:
        raise VenvError(
            f"the wheels are for {lock.about['machine']} and {here()} is {machine}: use the lock for {machine}"
        )
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:
        libc = ""
    numbers = libc.split()[-1] if libc.startswith("glibc ") else ""
    if not numbers or _numbers(numbers) < _numbers(lock.about["glibc"]):
        raise VenvError(
            f"vLLM's wheels need glibc {lock.about['glibc']} and {here()} has {libc or 'another C library'}: "
            "use Debian 12, Ubuntu 22.04, RHEL 9 or later"
        )
    if lock.about["device"] == "cuda":
        _check_compiler(lock.about["python"], python)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _check_compiler(minor: str, python: str) -> None:
    """Triton compiles a small C file against Python's headers when vLLM starts on a GPU."""
    include = subprocess.run(
        [python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('include'))"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()
    if not any(shutil.which(name) for name in ("gcc", "clang", "cc")):
        raise VenvError(f"vLLM needs a C compiler and {here()} has none: install the package gcc")
    if not Path(include, "Python.h").is_file():
        raise VenvError(
            f"vLLM needs Python's headers and {here()} has no {include}/Python.h: "
            f"install the package python{minor}-dev (python{minor}-devel on RHEL)"
        )


def existing(path: Path) -> Path:
    """Return the path or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return path


def check_room(lock: Lock, venv: Path, cache: Path, link_mode: str) -> None:
    """Refuse to start what the disks cannot hold."""
    size = int(lock.about["installed_bytes"])
    venv_disk, cache_disk = existing(venv), existing(cache)
    same = venv_disk.stat().st_dev == cache_disk.stat().st_dev
    needs = {cache_disk: 0, venv_disk: 0}
    if link_mode == "symlink":
        needs[venv_disk] = LINKS_BYTES
    elif link_mode == "copy" or not same:
        # Two files for each: the cache's and the environment's.
        needs[cache_disk] += size
        needs[venv_disk] += size
    else:
        needs[venv_disk] = size
    if same:
        needs = {venv_disk: sum(needs.values())}
    for disk, needed in needs.items():
        free = shutil.disk_usage(str(disk)).free
        if needed > free:
            raise VenvError(
                f"the environment needs {needed / GIB:.1f} GiB below {disk} on {here()} and {free / GIB:.1f} GiB are "
                "free: free some space there"
            )


def check_wheelhouse(lock: Lock, uv: Wheel, wheelhouse: Path) -> None:
    """Refuse a folder of wheels that lacks some, saying what it is for when it tells."""
    folder = wheelhouse / "wheels"
    wrong = [w for w in (*lock.wheels, uv) if not _has(folder, w) and w.content is None]
    if not wrong:
        return
    first = f"{wrong[0].file} is {'damaged' if (folder / wrong[0].file).exists() else 'missing'}"
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    try:
        held = json.loads((wheelhouse / "manifest.json").read_text(encoding="utf-8"))["locks"]
        told = ", ".join(f"vLLM {k['vllm_version']} with Python {k['python']} on {k['machine']}" for k in held)
        told = f"; the bundle there is for {told}"
    except (OSError, ValueError, KeyError, TypeError):
        told = ""
    raise VenvError(
        f"{folder} on {here()} lacks wheels for vLLM {lock.about.get('version')} with Python {lock.about['python']}: "
        f"{first}{more}{told}: make the bundle with `ppdeploy bundle` and put it there"
    )


def _has(folder: Path, wheel: Wheel) -> bool:
    try:
        return (folder / wheel.file).stat().st_size == wheel.size
    except OSError:
        return False


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def ensure_uv(root: Path, uv: Wheel, wheelhouse: Path | None, staging: Path) -> Path:
    """Return a uv below `root`: the pinned one from its wheel, else the one that the controller copied."""
    folder = _made(root / "bin")
    program = folder / f"uv-{uv.version}"
    if program.is_file():
        return program
    with tempfile.TemporaryDirectory(dir=str(folder)) as work:
        unpacked = Path(work, "uv")
        if wheelhouse is not None:
            _unpack_uv(wheelhouse / "wheels" / uv.file, uv, unpacked)
        else:
            shutil.copyfile(str(staging / "uv"), str(unpacked))
        unpacked.chmod(0o755)
        program = folder / _uv_name(unpacked)
        unpacked.replace(program)
    fresh = folder / ".uv.new"
    if fresh.is_symlink():
        fresh.unlink()
    fresh.symlink_to(program.name)
    fresh.replace(folder / "uv")
    return program


def _unpack_uv(wheel: Path, pinned: Wheel, target: Path) -> None:
    if file_sha256(wheel) != pinned.sha256:
        raise VenvError(f"{wheel} on {here()} is not the pinned file, its sha256 differs: make the bundle again")
    with zipfile.ZipFile(str(wheel)) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".data/scripts/uv"))
        target.write_bytes(archive.read(name))


def _uv_name(program: Path) -> str:
    """Return `uv-VERSION`, by asking the program; VenvError when it does not run here."""
    try:
        said = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=True).stdout.split()
        return f"{said[0]}-{said[1]}"
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise VenvError(
            f"the controller's uv does not run on {here()}, which may be of another kind: use `ppdeploy bundle`"
        ) from None


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def redacted(text: str, *urls: str | None) -> str:
    """Return the text without users and passwords in its URLs, and without those that were given and hold one.

    A password that was not escaped ends at no certain place.
    """
    for url in urls:
        if url and "@" in url:
            text = text.replace(url, "***")
    return re.sub(r"(\w+://)[^/\s]*@", r"\1***@", text)


def read_marker(root: Path, lock: Lock) -> dict[str, Any] | None:
    """Return what the lock's environment says of itself, None when it is not complete."""
    try:
        marker = json.loads((venv_folder(root, lock) / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) and marker.get("lock") == lock.digest else None


def venv_folder(root: Path, lock: Lock) -> Path:
    """Return where the lock's environment lies."""
    return root / "venvs" / lock.digest[:16]


def clear(cache: Path) -> None:
    """Remove what a uv that was killed left half unpacked in its cache: nobody else does, and it can be gigabytes.

    Each uv at work holds a share of the cache's lock (docs.astral.sh/uv, "Caching", "Cache safety").
    """
    left = list(cache.glob(".tmp*"))
    if not left:
        return
    with (cache / ".lock").open("a") as alone:
        try:
            fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        for path in left:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(str(path))
            else:
                path.unlink()


class Build:
    """One build: where from, where to."""

    def __init__(self, params: dict[str, Any], lock: Lock, uv: Wheel, wheelhouse: Path | None) -> None:
        self.lock = lock
        self.uv = uv
        self.wheelhouse = wheelhouse
        self.root = Path(params["root"])
        self.venv = venv_folder(self.root, lock)
        self.cache = Path(params["uv_cache"])
        self.link_mode = params["link_mode"]
        self.index = params["index_url"]
        self.extra = params["extra_index_url"]
        self.proxy = params["proxy"]
        self.way_out = way_out(params)
        self.capabilities = params["capabilities"]
        self.seconds: dict[str, float] = {}
        self.held: tuple[int, ...] = ()
        """The open lock. uv holds it too: it lives on when this process is killed, and still writes."""

    def run(self, python: str) -> dict[str, Any]:
        """Build, prove, mark; return the versions."""
        started = time.monotonic()
        uv = ensure_uv(self.root, self.uv, self.wheelhouse, staging_folder(self.root, self.lock))
        if self.venv.exists():
            shutil.rmtree(str(self.venv))
        clear(_made(self.cache))
        self._uv([str(uv), "venv", "--quiet", "--python", python, str(self.venv)])
        with tempfile.TemporaryDirectory() as work, Watch(self):
            self._install(uv, Path(work))
        # uv leaves its lock behind, writable by everybody.
        with contextlib.suppress(FileNotFoundError):
            (self.venv / ".lock").unlink()
        self.seconds["install"] = round(time.monotonic() - started, 1)
        publish(self.root, self.lock, {"progress": "importing vLLM"})
        versions = self._verify()
        self.seconds["verify"] = round(time.monotonic() - started - self.seconds["install"], 1)
        self._sync()
        marker = {
            "schema_version": 1,
            "lock": self.lock.digest,
            "uv": uv.name[len("uv-") :],
            # A copy of the folder, or who touches a file in it, changes its times.
            "verified_at": int(time.time()),
            **versions,
        }
        fresh = self.venv / f"{MARKER}.new"
        fresh.write_text(json.dumps(marker, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        fresh.replace(self.venv / MARKER)
        return versions

    def _sync(self) -> None:
        """See the environment to the disk: after a power cut its mark must not stand for files that were lost."""
        outcome = subprocess.run(["sync", "-f", str(self.venv)], capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise VenvError(
                f"{self.venv} cannot be written to the disk of {here()} ({outcome.stderr.strip()}): check the disk, "
                "then apply again"
            )

    def _install(self, uv: Path, work: Path) -> None:
        requirements = work / "lock.txt"
        requirements.write_text(
            "".join(f"{w.project}=={w.version} --hash=sha256:{w.sha256}\n" for w in self.lock.wheels), encoding="utf-8"
        )
        made = _made(work / "made")
        folders = [made]
        if self.wheelhouse is not None:
            folders.append(self.wheelhouse / "wheels")
        for wheel in self.lock.wheels:
            if wheel.content is not None and not (self.wheelhouse and _has(folders[-1], wheel)):
                (made / wheel.file).write_bytes(wheel.content)
        python = str(self.venv / "bin" / "python")
        command = [str(uv), "pip", "install", "--quiet", "--python", python, "--no-deps", "--require-hashes"]
        command += ["--link-mode", self.link_mode, "--only-binary", ":all:"]
        for folder in folders:
            command += ["--find-links", str(folder)]
        environment = {}
        if self.wheelhouse is not None:
            command += ["--offline", "--no-index"]
        else:
            # Which index has which package does not matter, since each file is known by its hash.
            command += ["--index-strategy", "unsafe-best-match"]
            # By the environment, which only root can read: an index's URL may hold a password.
            if self.index:
                environment["UV_DEFAULT_INDEX"] = self.index
            if self.extra:
                environment["UV_INDEX"] = self.extra
            environment.update(self.way_out)
        if self.link_mode != "symlink":
            command.append("--compile-bytecode")
        self._uv([*command, "--requirements", str(requirements)], environment)
        site = self.venv / "lib" / f"python{self.lock.about['python']}" / "site-packages"
        if self.link_mode == "symlink" and not (site / "torch" / "__pycache__").is_dir():
            # A cache without byte code: the ranks' user could not write it, and every start would compile.
            subprocess.run(
                [python, "-m", "compileall", "-q", "-j", "0", str(site)],
                stdout=subprocess.DEVNULL,
                check=False,
                pass_fds=self.held,
            )

    def _uv(self, command: list[str], more: dict[str, str] | None = None) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "VIRTUAL_ENV"))}
        outcome = subprocess.run(
            command,
            env={
                **kept,
                "UV_CACHE_DIR": str(self.cache),
                "UV_NO_CONFIG": "1",
                "UV_PYTHON_DOWNLOADS": "never",
                "UV_NO_PROGRESS": "1",
                "NO_COLOR": "1",
                **(more or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            pass_fds=self.held,
        )
        if outcome.returncode:
            raise VenvError(self._explained(redacted(outcome.stdout, self.index, self.extra, self.proxy)))

    def _explained(self, said: str) -> str:
        """Turn uv's output into a sentence."""
        if "Hash mismatch" in said or "Bad CRC" in said:
            package = re.search(r"(?:Hash mismatch for|Failed to \w+) `?([^`\s]+==[^`\s]+)", said)
            return (
                f"the file of {package.group(1) if package else 'a package'} on {here()} is not the one in the lock, "
                "its sha256 differs: make the bundle again, or check the package index"
            )
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(("warning:", "hint:"))]
        if len(lines) > 4:
            # What failed comes first, and the cause of all last, such as what a proxy said.
            lines = [*lines[:2], *lines[-2:]]
        remedy = "check the bundle"
        if self.wheelhouse is None:
            remedy = "check ppdeploy_index_url, ppdeploy_proxy, ppdeploy_no_proxy and the node's network"
        if "certificate" in said.lower() and self.wheelhouse is None:
            remedy = "name the file of your certificates on the node in ppdeploy_ca_bundle"
        if "No space left" in said or "os error 28" in said:
            return (
                f"the disk of {here()} was full before the environment was whole ({self.venv}, uv's cache in "
                f"{self.cache}): free some space there, then apply again"
            )
        return f"uv cannot build the environment on {here()}: {' '.join(lines)}: {remedy}"

    def _verify(self) -> dict[str, Any]:
        """Import vLLM as a user without rights, as the ranks will, and compare the versions with the lock."""
        unprivileged: dict[str, Any] = {}
        if os.geteuid() == 0:
            try:
                nobody = pwd.getpwnam("nobody")
                unprivileged = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            except KeyError:
                pass
        with tempfile.TemporaryDirectory() as home:
            if unprivileged:
                os.chown(home, unprivileged["user"], unprivileged["group"])
            outcome = subprocess.run(
                [str(self.venv / "bin" / "python"), "-I", "-c", f"DEVICE = {self.lock.about['device']!r}{VERIFY}"],
                cwd=home,
                # Small thread pools start faster; nothing is computed.
                env={
                    "PATH": os.defpath,
                    "HOME": home,
                    "TMPDIR": home,
                    "OMP_NUM_THREADS": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                },
                capture_output=True,
                text=True,
                check=False,
                **unprivileged,
            )
        last = (outcome.stderr.strip().splitlines() or ["no word of why"])[-1]
        if outcome.returncode:
            raise VenvError(
                f"vLLM does not load in {self.venv} on {here()}: {last}: install what is missing and apply again"
            )
        versions: dict[str, Any] = json.loads(outcome.stdout.strip().splitlines()[-1])
        for name, version in self.lock.versions().items():
            if versions[name] != version and (name != "torch" or versions[name].split("+")[0] != version):
                raise VenvError(
                    f"{name} in {self.venv} on {here()} is {versions[name]} and not {version} as in the lock: report it"
                )
        self._check_device(versions)
        return versions

    def _check_device(self, versions: dict[str, Any]) -> None:
        """Refuse a torch of the other kind, or one that has no kernels for the node's GPUs."""
        where = f"torch in {self.venv} on {here()}"
        built = versions["cuda"] or versions["nccl"] or " ".join(versions["arches"])
        if self.lock.about["device"] == "cpu":
            if built:
                raise VenvError(
                    f"torch in {self.venv} on {here()} is for CUDA ({built}), and the lock for cpu: report it"
                )
            return
        if not versions["cuda"] or not versions["arches"]:
            raise VenvError(
                f"torch in {self.venv} on {here()} was built without CUDA, and the lock is for it: report it"
            )
        for capability in self.capabilities:
            if not any(runs_on(arch, capability) for arch in versions["arches"]):
                raise VenvError(
                    f"{where} has kernels for {', '.join(versions['arches'])}, and a GPU there has compute capability "
                    f"{capability}: use a vLLM that supports it (ppdeploy_vllm_version)"
                )


def runs_on(arch: str, capability: str) -> bool:
    """Return whether kernels for an arch of torch's list run on a GPU of a compute capability, such as 8.6.

    CUDA C++ Programming Guide, "Binary compatibility" and "PTX compatibility": `sm_80` runs on 8.x from 8.0 on,
    `compute_80` is compiled on all from 8.0 on when it is loaded, a letter at the end ties to that one (`a`) or to its
    family (`f`).
    """
    kind, _, number = arch.partition("_")
    digits = number.rstrip("af")
    if not digits.isdigit():
        return False
    major, minor = int(digits[:-1]), int(digits[-1])
    wanted = _numbers(capability)
    if number.endswith("a"):
        return wanted == (major, minor)
    if kind == "compute" and not number.endswith("f"):
        return wanted >= (major, minor)
    return wanted[0] == major and wanted[1] >= minor


# ---- old environments ----------------------------------------------------------------------------


def prune(root: Path, lock: Lock, keep: int, *, check: bool) -> dict[str, Any]:
    """Remove the oldest environments that nothing uses, so that `keep` are left, that of the lock among them."""
    removed = spare(root, lock, keep)
    if removed and not check:
        with only_builder(root, f"removing what is older than {lock.digest[:16]}"):
            # Looked at again: what was still being built before the lock was taken may be whole now.
            removed = spare(root, lock, keep)
            for path in removed:
                # Without its mark first: half removed, it is no environment.
                with contextlib.suppress(FileNotFoundError):
                    Path(path, MARKER).unlink()
                shutil.rmtree(path)
    return {"changed": bool(removed), "removed": removed, "digest": lock.digest}


def spare(root: Path, lock: Lock, keep: int) -> list[str]:
    """Return the environments that may go."""
    folder = root / "venvs"
    mine = lock.digest[:16]
    names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    others = [name for name in names if name != mine]
    # What an interrupted build left is no environment.
    whole = [name for name in others if (folder / name / MARKER).is_file()]
    newest = sorted(whole, key=lambda name: verified_at(folder / name / MARKER), reverse=True)
    old = set(others) - set(newest[: max(keep - 1, 0)])
    used = named(root) | running(folder, old) if old else set()
    return [str(folder / name) for name in others if name in old - used]


def verified_at(marker: Path) -> float:
    """Return when an environment was proved, in seconds since 1970: as it says itself, which older ones do not."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return float(json.loads(marker.read_text(encoding="utf-8"))["verified_at"])
    return marker.stat().st_mtime


def named(root: Path) -> set[str]:
    """Return the environments that a pipeline's current and previous release name, and systemd's units of ours."""
    files = [path for link in ("current", "previous") for path in root.glob(f"*/{link}/*")]
    files += [path for path in SYSTEMD.glob("ppdeploy-*") if path.is_file()]
    files += SYSTEMD.glob("ppdeploy-*.d/*")
    found = set()
    for path in files:
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/venvs/([0-9a-f]{16})(?![0-9a-f])", path.read_text("utf-8", errors="replace")))
    return found


def running(folder: Path, names: set[str]) -> set[str]:
    """Return the environments that a process was started from or has loaded libraries of."""
    # The kernel's own lists have the folder without links in its path.
    places = {folder, folder.resolve()}
    marks = [(name, f"{place}/{name}/".encode()) for name in names for place in places]
    found = set()
    for process in PROC.iterdir():
        if not process.name.isdigit():
            continue
        for about in ("cmdline", "environ", "maps"):
            # It may end while it is looked at.
            with contextlib.suppress(OSError):
                content = (process / about).read_bytes()
                found |= {name for name, mark in marks if mark in content}
    return found


def connecting_user() -> str:
    """Return the user who logged in: sudo says so, else it is the one at work."""
    uid = os.environ.get("SUDO_UID", "")
    if not uid.isdigit():
        try:
            uid = Path("/proc/self/loginuid").read_text(encoding="ascii").strip()
        except OSError:
            uid = ""
    # All ones: nobody logged in.
    if not uid.isdigit() or int(uid) == 0xFFFFFFFF:
        uid = str(os.getuid())
    return pwd.getpwuid(int(uid)).pw_name


def staging_folder(root: Path, lock: Lock) -> Path:
    """Return where the connecting user puts wheels."""
    return root / "staging" / lock.digest[:16]


def clear_way(path: Path, size: int) -> None:
    """Remove what rsync would not go on from to a file of that size: a longer one (--append), a link, a folder."""
    try:
        about = path.lstat()
    except OSError:
        return
    if stat.S_ISDIR(about.st_mode):
        shutil.rmtree(str(path))
    elif not stat.S_ISREG(about.st_mode) or about.st_size > size:
        path.unlink()


def stage(
    root: Path, lock: Lock, uv: Wheel, owner: str | None, *, from_wheels: bool, packages: bool = False, check: bool
) -> dict[str, Any]:
    """Make the staging folder for a user, and say what is missing in it; with `packages` in any case."""
    name = owner or connecting_user()
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise VenvError(f"there is no user {name} on {here()}: create it or name another") from None
    folder = staging_folder(root, lock)
    wheels = folder / "wheels"
    # A file of the right size may be damaged; the build finds that, by its hash.
    missing = [w for w in (*lock.wheels, uv) if from_wheels and w.content is None and not _has(wheels, w)]
    files = [f"wheels/{w.file}" for w in missing]
    if read_marker(root, lock) is not None:
        missing, files = [], []
    elif not from_wheels and not (root / "bin" / f"uv-{uv.version}").is_file():
        files = ["uv"]
    needed = sum(w.size for w in missing)
    free = shutil.disk_usage(str(existing(folder))).free
    if needed > free:
        raise VenvError(
            f"the wheels need {needed / GIB:.1f} GiB below {root} on {here()} and {free / GIB:.1f} GiB are free: "
            "free some space there"
        )
    if (files or packages) and not check:
        os.umask(0o022)
        wheels.mkdir(parents=True, exist_ok=True)
        for name_, size in [*((f"wheels/{w.file}", w.size) for w in missing), *([("uv", 0)] if "uv" in files else [])]:
            clear_way(folder / name_, size)
        if packages:
            # How long they are nobody knows here.
            shutil.rmtree(str(folder / "packages"), ignore_errors=True)
        for place in (folder, wheels):
            os.chown(str(place), user.pw_uid, user.pw_gid)
    return {
        "changed": bool(files) or packages,
        "staging": str(folder),
        "owner": name,
        "missing": files,
        "digest": lock.digest,
    }


# ---- in the background ---------------------------------------------------------------------------


def state_path(root: Path, lock: Lock) -> Path:
    """Return the file in which a build in the background tells how it goes; it is gone after a boot."""
    place = hashlib.sha256(f"{root} {lock.digest}".encode()).hexdigest()[:12]
    return (RUN if os.geteuid() == 0 else root / "venvs") / f"ppdeploy-venv-{place}.json"


def publish(root: Path, lock: Lock, state: dict[str, Any]) -> None:
    """Tell how a build in the background goes; one that nobody waits for has no such file."""
    path = state_path(root, lock)
    if path.exists():
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(state), encoding="utf-8")
        draft.replace(path)


def read_state(root: Path, lock: Lock) -> dict[str, Any] | None:
    """Return what a build told last; None: none was begun."""
    try:
        state = json.loads(state_path(root, lock).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


class Watch:
    """Looks, while uv works, at what is in its cache and in the environment, and tells it."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._archives = build.cache / "archive-v0"
        self._over = threading.Event()
        self._known = {path.name: 0 for path in self._entries(self._archives)}
        # What other environments have left in the cache is not unpacked again, and how much that is nobody knows.
        self._fresh = not self._known
        self._told: deque[tuple[float, int]] = deque()

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(LOOK):
            # Folders come and go while they are looked at.
            with contextlib.suppress(OSError):
                publish(self._build.root, self._build.lock, {"progress": self.words(time.monotonic())})

    @staticmethod
    def _entries(folder: Path) -> list[Path]:
        return list(folder.iterdir()) if folder.is_dir() else []

    def words(self, now: float) -> str:
        """Return how far the build is: bytes in the cache while packages arrive, then packages in the environment."""
        wheels = len(self._build.lock.wheels)
        linked = sum(1 for _ in self._build.venv.glob("lib/python*/site-packages/*.dist-info"))
        if linked >= wheels:
            return f"compiling the byte code of {wheels} packages"
        if linked:
            return f"linking: {linked} of {wheels} packages"
        doing = "unpacking" if self._build.wheelhouse is not None else "downloading"
        here = self._unpacked()
        self._told.append((now, here))
        while now - self._told[0][0] > RATE_OVER:
            self._told.popleft()
        since, before = self._told[0]
        rate = (here - before) / (now - since) if now > since else 0.0
        total = int(self._build.lock.about["installed_bytes"])
        if not self._fresh:
            return f"{doing}: {here / 1e9:.2f} GB beside what the cache had, {rate / 1e6:.1f} MB/s"
        text = f"{doing}: {here / 1e9:.2f} of {total / 1e9:.2f} GB unpacked, {rate / 1e6:.1f} MB/s"
        return text + (f", {duration((total - here) / rate)} left" if rate > 0 and here < total else "")

    def _unpacked(self) -> int:
        """Return the bytes that uv has unpacked: whole packages are looked through once, those under way each time."""
        for path in self._entries(self._archives):
            if path.name not in self._known:
                self._known[path.name] = size_of(path)
        return sum(self._known.values()) + sum(size_of(path) for path in self._build.cache.glob(".tmp*"))


def size_of(path: Path) -> int:
    """Return the bytes of all files below a folder, which may change meanwhile."""
    total = 0
    for folder, _, files in os.walk(str(path)):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118  (50 000 of them)
    return total


def duration(seconds: float) -> str:
    """Return a time as a person says it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def begin(work: Callable[[], dict[str, Any]], root: Path, lock: Lock) -> None:
    """Build in a process of its own, which outlives this one and its connection, and holds the lock that is held."""
    state_path(root, lock).write_text("{}", encoding="utf-8")
    sys.stdout.flush()
    if os.fork():
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    try:
        publish(root, lock, {"finished": work()})
    except VenvError as error:
        publish(root, lock, {"failed": redacted(str(error))})
    except OSError as error:
        publish(root, lock, {"failed": told(error, root)})
    except Exception as error:  # noqa: BLE001  (nobody else sees it: the apply reads it there)
        publish(root, lock, {"failed": f"{type(error).__name__} on {here()}: {redacted(str(error))}: tell the authors"})
    os._exit(0)


def told(error: OSError, root: Path) -> str:
    """Return the sentence for what the system refused. A write that fails names no file."""
    where = error.filename or f"below {root}, or in the folder for temporary files"
    return f"{error.strerror or error} ({where}) on {here()}: check the disk and the folder's mode, then apply again"


@contextlib.contextmanager
def only_builder(root: Path, doing: str) -> Iterator[int]:
    """Hold the lock under which environments come and go, with what is done in it; VenvError says who else has it."""
    # Opened without emptying it: what stands in it is of who has the lock.
    with (_made(root / "venvs") / ".lock").open("a+b") as alone:
        held = alone.fileno()
        # Who only asks whether it is held has it for an instant.
        for left in (2, 1, 0):
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if left:
                    time.sleep(0.1)
                    continue
                begun = os.pread(held, 200, 0).decode(errors="replace").strip()
                raise VenvError(
                    f"another apply builds an environment on {here()}{f' ({begun})' if begun else ''}: wait for it, "
                    "or end that process and its uv there, then apply again"
                ) from None
        sign(held, doing)
        yield held


def sign(held: int, doing: str) -> None:
    """Write into the lock, for whom it keeps waiting, which process has it and what for."""
    os.ftruncate(held, 0)
    os.write(held, f"{doing}, process {os.getpid()}\n".encode())


def builds(root: Path) -> bool:
    """Return whether some environment is being built."""
    try:
        with (root / "venvs" / ".lock").open() as alone:
            fcntl.flock(alone, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


def wait(root: Path, lock: Lock, seconds: float) -> dict[str, Any]:
    """Return how far a build in the background is, at the latest after so many seconds; raise when it failed."""
    common = {"changed": False, "venv": str(venv_folder(root, lock)), "digest": lock.digest}
    deadline = time.monotonic() + seconds
    while True:
        # Asked first: what a process told before it ended is read after that.
        runs = builds(root)
        state = read_state(root, lock)
        whole = read_marker(root, lock) is not None
        if whole and state is None:
            return {**common, "done": True, "progress": "the environment is there"}
        if state is not None and "failed" in state and not whole:
            # It stays for others who wait for the same build, until the next one begins.
            raise VenvError(state["failed"])
        if state is not None and ("finished" in state or "failed" in state or (whole and not runs)):
            state_path(root, lock).unlink(missing_ok=True)
            # Marked as whole, and then ended before it could say so, it is whole all the same.
            told_ = state.get("finished") or {}
            return {**common, "changed": True, "done": True, "progress": "built and proved", **told_}
        if not runs or state is None:
            state_path(root, lock).unlink(missing_ok=True)
            raise VenvError(f"the build of the environment on {here()} ended without a word: apply again")
        if time.monotonic() >= deadline:
            return {**common, "done": False, "progress": state.get("progress") or "beginning"}
        time.sleep(0.1)


def present(params: dict[str, Any], lock: Lock, uv: Wheel, check: bool) -> dict[str, Any]:
    """Build the environment unless it is there."""
    root = Path(params["root"])
    wheelhouse = Path(params["wheelhouse"]) if params["wheelhouse"] else None
    if params["staged"]:
        wheelhouse = staging_folder(root, lock)
    build = Build(params, lock, uv, wheelhouse)
    result: dict[str, Any] = {"changed": False, "venv": str(build.venv), "digest": lock.digest}
    marker = read_marker(root, lock)
    if marker is None:
        python = find_python(params["python"], lock.about["python"])
        check_node(lock, python)
        check_room(lock, build.venv, build.cache, build.link_mode)
        if wheelhouse is None:
            check_certificates(params["ca_bundle"])
        # In check mode nothing was copied yet.
        if wheelhouse is not None and not (check and params["staged"]):
            check_wheelhouse(lock, uv, wheelhouse)
        # What is done in the background is told by who waits for it.
        result["changed"] = check or not params["background"]
        if check:
            return result
        # The ranks run as another user, so root's own umask must not shut them out.
        os.umask(0o022)
        begun = read_state(root, lock) if params["background"] and builds(root) else None
        if begun is not None and not {"finished", "failed"} & begun.keys():
            # Of an apply that was interrupted: what it began goes on, and is waited for.
            return result
        doing = f"vLLM {lock.about.get('version')} for Python {lock.about['python']}"
        with only_builder(root, doing) as held:
            if read_marker(root, lock) is not None:
                # Another apply has just built it.
                return present(params, lock, uv, check)
            build.held = (held,)

            def work() -> dict[str, Any]:
                sign(held, doing)
                return made(build, python, staged=params["staged"])

            if params["background"]:
                begin(work, root, lock)
                return result
            # Nobody waits for this one, and what another said before it holds no more.
            state_path(root, lock).unlink(missing_ok=True)
            result.update(work())
    else:
        result["versions"] = {name: marker.get(name) for name in ("python", "vllm", "torch", "nccl", "cuda", "arches")}
    if not check and staging_folder(root, lock).exists():
        shutil.rmtree(str(staging_folder(root, lock)))
    return result


def made(build: Build, python: str, *, staged: bool) -> dict[str, Any]:
    """Build the environment and remove what was copied for it; return versions and seconds."""
    staging = staging_folder(build.root, build.lock)
    try:
        versions = build.run(python)
    except VenvError:
        if staged:
            # One of its files is wrong, and which one cannot be told from its size.
            shutil.rmtree(str(staging), ignore_errors=True)
        raise
    if staging.exists():
        shutil.rmtree(str(staging))
    return {"versions": versions, "seconds": build.seconds}


def main() -> None:
    """Read the parameters, bring the state about, and tell errors as sentences."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "staged", "waited", "pruned"], "default": "present"},
            "background": {"type": "bool", "default": False},
            "seconds": {"type": "int", "default": 4},
            "lock": {"type": "str", "required": True},
            "uv": {"type": "str"},
            "wheelhouse": {"type": "path"},
            "staged": {"type": "bool", "default": False},
            "packages": {"type": "bool", "default": False},
            "owner": {"type": "str"},
            "index_url": {"type": "str", "no_log": True},
            "extra_index_url": {"type": "str", "no_log": True},
            "proxy": {"type": "str", "no_log": True},
            "no_proxy": {"type": "list", "elements": "str", "default": []},
            "ca_bundle": {"type": "path"},
            "uv_cache": {"type": "path"},
            "link_mode": {"type": "str", "choices": ["clone", "copy", "hardlink", "symlink"], "default": "hardlink"},
            "python": {"type": "str"},
            "capabilities": {"type": "list", "elements": "str", "default": []},
            "keep": {"type": "int", "default": 2},
            "root": {"type": "path", "default": "/opt/ppdeploy"},
        },
        required_if=[("state", "present", ["uv", "uv_cache"]), ("state", "staged", ["uv"])],
        supports_check_mode=True,
    )
    try:
        lock = parse_lock(module.params["lock"])
        if module.params["state"] == "pruned":
            root = Path(module.params["root"])
            module.exit_json(**prune(root, lock, module.params["keep"], check=module.check_mode))
        if module.params["state"] == "waited":
            root = Path(module.params["root"])
            # In check mode nothing was begun.
            nothing = {"changed": False, "done": True}
            module.exit_json(**(nothing if module.check_mode else wait(root, lock, module.params["seconds"])))
        uv = parse_wheels(module.params["uv"])[0]
        if module.params["state"] == "staged":
            result = stage(
                Path(module.params["root"]),
                lock,
                uv,
                module.params["owner"],
                from_wheels=module.params["staged"],
                packages=module.params["packages"],
                check=module.check_mode,
            )
        else:
            result = present(module.params, lock, uv, module.check_mode)
    except VenvError as error:
        module.fail_json(msg=redacted(str(error)))
    except OSError as error:
        module.fail_json(msg=told(error, Path(module.params["root"])))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
