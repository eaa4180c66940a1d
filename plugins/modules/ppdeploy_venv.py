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
    type: str
    choices: [present, staged]
    default: present
  lock:
    description: Content of the lock file.
    type: str
    required: true
  uv:
    description:
      - Content of the file that pins the wheel of uv, for the node's machine. An environment that comes from
        indexes is built by the controller's uv instead, copied to the folder of O(state=staged).
    type: str
    required: true
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
  owner:
    description: With O(state=staged) the user who copies; the default is the connecting user.
    type: str
  index_url:
    description: Package index in place of PyPI.
    type: str
  extra_index_url:
    description: A further package index, such as the one that has torch's builds for the CPU.
    type: str
  uv_cache:
    description: uv's cache, which makes the next environment cheap. Keep it on the file system of O(root).
    type: path
    required: true
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
  description: Versions of python, vllm, torch, nccl and cuda that the environment reports; null for what is not there.
  returned: with O(state=present), when the environment is there
  type: dict
seconds:
  description: Wall-clock seconds of the build's steps.
  returned: when an environment was built
  type: dict
staging:
  description: The folder to copy wheels into.
  returned: with O(state=staged)
  type: str
owner:
  description: Name of the user who may write there.
  returned: with O(state=staged)
  type: str
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
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from ansible.module_utils.basic import AnsibleModule

MARKER = ".ppdeploy.json"
GIB = 1024**3
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


def version(start):
    found = [d.version for d in metadata.distributions() if (d.name or "").lower().startswith(start)]
    return found[0] if found else None


print(json.dumps({
    "python": platform.python_version(),
    "vllm": metadata.version("vllm"),
    "torch": torch.__version__,
    "nccl": version("nvidia-nccl-"),
    "cuda": torch.version.cuda,
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


def redacted(text: str) -> str:
    """Return the text without users and passwords in its URLs."""
    return re.sub(r"(\w+://)[^/@\s]*@", r"\1***@", text)


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
        self.seconds: dict[str, float] = {}

    def run(self, python: str) -> dict[str, Any]:
        """Build, prove, mark; return the versions."""
        started = time.monotonic()
        uv = ensure_uv(self.root, self.uv, self.wheelhouse, staging_folder(self.root, self.lock))
        if self.venv.exists():
            shutil.rmtree(str(self.venv))
        _made(self.cache)
        self._uv([str(uv), "venv", "--quiet", "--python", python, str(self.venv)])
        with tempfile.TemporaryDirectory() as work:
            self._install(uv, Path(work))
        # uv leaves its lock behind, writable by everybody.
        with contextlib.suppress(FileNotFoundError):
            (self.venv / ".lock").unlink()
        self.seconds["install"] = round(time.monotonic() - started, 1)
        versions = self._verify()
        self.seconds["verify"] = round(time.monotonic() - started - self.seconds["install"], 1)
        marker = {"schema_version": 1, "lock": self.lock.digest, "uv": uv.name[len("uv-") :], **versions}
        fresh = self.venv / f"{MARKER}.new"
        fresh.write_text(json.dumps(marker, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        fresh.replace(self.venv / MARKER)
        return versions

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
        if self.link_mode != "symlink":
            command.append("--compile-bytecode")
        self._uv([*command, "--requirements", str(requirements)], environment)
        site = self.venv / "lib" / f"python{self.lock.about['python']}" / "site-packages"
        if self.link_mode == "symlink" and not (site / "torch" / "__pycache__").is_dir():
            # A cache without byte code: the ranks' user could not write it, and every start would compile.
            subprocess.run(
                [python, "-m", "compileall", "-q", "-j", "0", str(site)], stdout=subprocess.DEVNULL, check=False
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
        )
        if outcome.returncode:
            raise VenvError(self._explained(redacted(outcome.stdout)))

    def _explained(self, said: str) -> str:
        """Turn uv's output into a sentence."""
        if "Hash mismatch" in said or "Bad CRC" in said:
            package = re.search(r"(?:Hash mismatch for|Failed to \w+) `?([^`\s]+==[^`\s]+)", said)
            return (
                f"the file of {package.group(1) if package else 'a package'} on {here()} is not the one in the lock, "
                "its sha256 differs: make the bundle again, or check the package index"
            )
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith(("warning:", "hint:"))][:4]
        remedy = (
            "check the bundle" if self.wheelhouse is not None else "check ppdeploy_index_url and the node's network"
        )
        if "No space left" in said:
            remedy = "free some space"
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
        return versions


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


def stage(root: Path, lock: Lock, uv: Wheel, owner: str | None, *, from_wheels: bool, check: bool) -> dict[str, Any]:
    """Make the staging folder for a user, and say what is missing in it."""
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
    if files and not check:
        os.umask(0o022)
        wheels.mkdir(parents=True, exist_ok=True)
        for place in (folder, wheels):
            os.chown(str(place), user.pw_uid, user.pw_gid)
    return {
        "changed": bool(files),
        "staging": str(folder),
        "owner": name,
        "missing": files,
        "digest": lock.digest,
    }


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
        # In check mode nothing was copied yet.
        if wheelhouse is not None and not (check and params["staged"]):
            check_wheelhouse(lock, uv, wheelhouse)
        result["changed"] = True
        if check:
            return result
        # The ranks run as another user, so root's own umask must not shut them out.
        os.umask(0o022)
        with (_made(root / "venvs") / ".lock").open("w") as alone:
            try:
                fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise VenvError(f"another apply builds an environment on {here()}: wait for it") from None
            try:
                result["versions"] = build.run(python)
            except VenvError:
                if params["staged"]:
                    # One of its files is wrong, and which one cannot be told from its size.
                    shutil.rmtree(str(staging_folder(root, lock)), ignore_errors=True)
                raise
        result["seconds"] = build.seconds
    else:
        result["versions"] = {name: marker.get(name) for name in ("python", "vllm", "torch", "nccl", "cuda")}
    if not check and staging_folder(root, lock).exists():
        shutil.rmtree(str(staging_folder(root, lock)))
    return result


def main() -> None:
    """Read the parameters, bring the state about, and tell errors as sentences."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "staged"], "default": "present"},
            "lock": {"type": "str", "required": True},
            "uv": {"type": "str", "required": True},
            "wheelhouse": {"type": "path"},
            "staged": {"type": "bool", "default": False},
            "owner": {"type": "str"},
            "index_url": {"type": "str", "no_log": True},
            "extra_index_url": {"type": "str", "no_log": True},
            "uv_cache": {"type": "path", "required": True},
            "link_mode": {"type": "str", "choices": ["clone", "copy", "hardlink", "symlink"], "default": "hardlink"},
            "python": {"type": "str"},
            "root": {"type": "path", "default": "/opt/ppdeploy"},
        },
        supports_check_mode=True,
    )
    try:
        lock = parse_lock(module.params["lock"])
        uv = parse_wheels(module.params["uv"])[0]
        if module.params["state"] == "staged":
            result = stage(
                Path(module.params["root"]),
                lock,
                uv,
                module.params["owner"],
                from_wheels=module.params["staged"],
                check=module.check_mode,
            )
        else:
            result = present(module.params, lock, uv, module.check_mode)
    except VenvError as error:
        module.fail_json(msg=redacted(str(error)))
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        module.fail_json(
            msg=f"{error.strerror or error}{where} on {here()}: check the disk and the folder's mode, then apply again"
        )
    module.exit_json(**result)


if __name__ == "__main__":
    main()
