"""What the lab needs of this machine: root, Linux, a few programs, and a way to run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ppdeploy.errors import ApplyError, InputError

PROGRAMS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "apt-get": "apt",
}
"""Program -> the Debian and Ubuntu package that has it."""


def require_root(action: str) -> None:
    """Refuse `action` where we are not root (namespaces, mounts and control groups need it)."""
    if os.geteuid() != 0:
        raise InputError(f"{action} needs root", remedy="run it again with sudo")


def missing_packages() -> list[str]:
    """Return the Debian names of the packages the lab needs and this machine lacks, each once."""
    return sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})


def require_machine(action: str) -> None:
    """Refuse `action` unless this is Linux, we are root and all programs are there; names what is missing."""
    if sys.platform != "linux":
        raise InputError(f"{action} needs Linux", where=sys.platform)
    require_root(action)
    missing = missing_packages()
    if missing:
        raise InputError(
            f"{action} needs packages that this machine lacks",
            where=", ".join(missing),
            remedy=f"apt-get install -y {' '.join(missing)}",
        )


def run(
    argv: Sequence[str],
    *,
    what: str,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> str:
    """Run `argv` and return its output; an error says `what` it was for. `timeout` in seconds."""
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            env=env,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ApplyError(f"{what} took longer than {timeout:.0f} s", where=argv[0]) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ApplyError(f"{what} failed", where=argv[0], remedy=said[-1] if said else f"exit code {done.returncode}")
    return done.stdout
