"""A uv cache that holds a bundle unpacked, so that lab hosts install in seconds and do not unpack 3 GB each.

uv keys what it unpacked from a local wheel by the wheel's path and modification time. So the cache is filled
in a mount namespace of its own, where the bundle lies at the same path as on the hosts. Byte code is compiled
inside the cache: an environment that uv makes of symbolic links then has it without compiling anything.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ppdeploy.bundle.alone import alone
from ppdeploy.bundle.content import WHEELS, Bundle, BundleLock
from ppdeploy.errors import InputError, PpdeployError
from ppdeploy.paths import cache_dir

_FILL = """\
set -eu
umask 022
mkdir -p "$work/bundle" "$work/cache"
mount --bind "$bundle" "$work/bundle"
mount --bind "$cache" "$work/cache"
# What lies below this folder on this machine is hidden from here on, in this namespace only.
mount -t tmpfs tmpfs "$top"
mkdir -p "$at"
mount --bind "$work/bundle" "$at"
"$work/uv" venv --quiet --python "$python" "$top/venv"
"$work/uv" pip install --quiet --python "$top/venv/bin/python" --offline --no-index --find-links "$at/wheels" \\
  --no-deps --require-hashes --link-mode symlink --requirements "$at/$lock"
cd "$work/cache/archive-v0"
# uv refuses a wheel with a folder among its scripts, so nothing is compiled there.
"$python" -m compileall -q -j 0 -x '[.]data/' . >/dev/null || true
"""


def unpacked_cache(
    bundle: Bundle,
    *,
    digest: str | None = None,
    wheelhouse: str = "/srv/ppdeploy/wheelhouse",
    say: Callable[[str], None] | None = None,
) -> Path:
    """Return a uv cache folder for installing a lock of `bundle`, made when there is none that fits.

    `digest` chooses the lock, the bundle's only one without it. `wheelhouse` is where the bundle will lie on
    the hosts: bind it there, a copy does not keep the times that uv looks at. Mount the cache as the lower
    layer of a writable overlay, since uv takes locks in it, and install with link mode `symlink`. Takes about
    a minute. Needs root (or a kernel that lets users mount) and the lock's Python; raises InputError or
    PpdeployError.
    """
    lock = bundle.lock(digest) if digest else _only_lock(bundle)
    # A name of its own for each state of the wheels: a cache is never removed, since hosts may run from it.
    folder = cache_dir() / "uv-cache" / f"{lock.digest[:16]}-{_identity(bundle, lock, wheelhouse)}"
    tell = say or (lambda _: None)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder, lambda: tell("waiting for another ppdeploy that unpacks the same wheels")):
        if not folder.is_dir():
            tell(f"unpacking the wheels of vLLM {lock.vllm_version}")
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _fill(bundle, lock, partial, wheelhouse)
            partial.rename(folder)
    return folder


def _only_lock(bundle: Bundle) -> BundleLock:
    if len(bundle.locks) != 1:
        raise InputError("the bundle has several locks: name the digest of one", where=str(bundle.path))
    return bundle.locks[0]


def _identity(bundle: Bundle, lock: BundleLock, wheelhouse: str) -> str:
    """Return eight digits for what a cache of a lock depends on: uv's cache format, the wheels' paths and times."""
    state = hashlib.sha256(f"{lock.uv}\n{wheelhouse}\n".encode())
    for name in lock.wheels:
        state.update(f"{name} {(bundle.path / WHEELS / name).stat().st_mtime_ns}\n".encode())
    return state.hexdigest()[:8]


def _fill(bundle: Bundle, lock: BundleLock, cache: Path, wheelhouse: str) -> None:
    top = Path(*Path(wheelhouse).parts[:2])
    if not top.is_dir():
        raise InputError(f"the folder {top} does not exist on the controller", remedy=f"make it: mkdir {top}")
    with tempfile.TemporaryDirectory() as work:
        uv = Path(work, "uv")
        uv.write_bytes(_uv_program(bundle.path / WHEELS / lock.uv))
        uv.chmod(0o755)
        # The child dies with us, so that no half-made cache is written to behind the next run.
        unshare = ["unshare", "--mount", "--propagation", "private", "--fork", "--kill-child"]
        if os.geteuid() != 0:
            unshare.append("--map-root-user")
        outcome = subprocess.run(
            [*unshare, "sh", "-c", _FILL],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("UV_")},
                "at": wheelhouse,
                "bundle": str(bundle.path.resolve()),
                "cache": str(cache.resolve()),
                "lock": lock.file,
                "python": _python(lock.python),
                "top": str(top),
                "work": work,
                "UV_CACHE_DIR": f"{work}/cache",
                "UV_NO_CONFIG": "1",
                "UV_PYTHON_DOWNLOADS": "never",
            },
            capture_output=True,
            text=True,
            check=False,
        )
    if outcome.returncode:
        said = outcome.stderr.strip().splitlines() or ["no word of why"]
        raise PpdeployError(
            f"the wheels could not be unpacked: {' '.join(said[-3:])}",
            where=str(cache),
            remedy="run it as root on Linux",
        )


def _uv_program(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".data/scripts/uv")]
        return archive.read(name)


def _python(minor: str) -> str:
    """Return an interpreter of a minor version: byte code differs between them, so another one is no help."""
    if minor == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return os.path.realpath(sys.executable)
    found = shutil.which(f"python{minor}")
    if found is None:
        raise InputError(
            f"Python {minor}, which the lab's hosts have, is missing on the controller",
            remedy=f"install python{minor} or run ppdeploy with it",
        )
    return found
