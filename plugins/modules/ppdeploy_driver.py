#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""What Ansible's own modules cannot do about a node's NVIDIA driver: wait and say for whom, hold, and prove it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: ppdeploy_driver
short_description: Wait for the package manager, hold the driver's packages, and see that the driver works
version_added: "0.1.0"
description:
  - V(wait) waits until no other program installs packages, and says who does where that takes longer than O(seconds).
    In check mode it looks once and does not wait.
  - V(refresh) has apt read its sources anew, and fails with apt's own words where it cannot, or where it does not
    believe O(repository). In check mode it does nothing.
  - V(hold) holds every installed package whose name O(held) finds, so that no upgrade takes another version of it.
  - V(idle) fails where a rank of O(unit) runs or a program computes on a GPU. It changes nothing.
  - V(verify) loads the driver's module where it is not loaded, and fails unless C(nvidia-smi) lists O(cards) GPUs
    within O(seconds), with what the kernel and DKMS say.
author:
  - The ppdeploy authors
options:
  action:
    description: What to do.
    type: str
    choices: [wait, refresh, hold, idle, verify]
    required: true
  manager:
    description: For V(wait), the package manager.
    type: str
    choices: [apt, dnf]
    default: apt
  seconds:
    description: For V(wait) and V(verify), how long it may take.
    type: int
    default: 0
  repository:
    description: For V(refresh), the address that apt must have read; empty for none.
    type: str
    default: ""
  held:
    description: For V(hold), a regular expression that is searched for in names of packages.
    type: str
  unit:
    description: For V(idle), the systemd unit that must not run.
    type: str
  cards:
    description: For V(verify), how many GPUs there must be.
    type: int
    default: 1
attributes:
  check_mode:
    description: Says what would change, and changes nothing. V(verify) is left out.
    support: full
  diff_mode:
    description: The packages that become held.
    support: full
  platform:
    description: Linux; Python 3.9 or newer.
    platforms: linux
    support: full
"""

EXAMPLES = r"""
- name: Wait until nothing else installs packages
  ppdeploy_driver:
    action: wait
    manager: apt
    seconds: 600

- name: See that both GPUs answer
  ppdeploy_driver:
    action: verify
    cards: 2
    seconds: 120
"""

RETURN = r"""
waited:
  description: Seconds that another program was waited for.
  returned: with wait
  type: float
held:
  description: Packages that were not held before.
  returned: with hold
  type: list
  elements: str
version:
  description: The driver's version.
  returned: with verify
  type: str
persistenced:
  description: Whether the host has NVIDIA's persistence daemon as a service.
  returned: with verify
  type: bool
"""

import fcntl
import os
import re
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# Where things are; a test puts its own tree there.
ROOT = "/"
LOCKS = {
    "apt": (
        "var/lib/dpkg/lock-frontend",
        "var/lib/dpkg/lock",
        "var/cache/apt/archives/lock",
        "var/lib/apt/lists/lock",
    ),
    "dnf": ("usr/lib/sysimage/rpm/.rpm.lock", "var/lib/rpm/.rpm.lock"),
}
# dnf 4 writes the number of its process into them and removes them at its end.
PID_FILES = {
    "apt": (),
    "dnf": ("var/cache/dnf/metadata_lock.pid", "var/cache/dnf/download_lock.pid", "var/lib/dnf/rpmdb_lock.pid"),
}
NOT_HELD = "container"
LOOK_EVERY = 1.0  # seconds
COMMAND_TIMEOUT = 60.0  # seconds; the first start of nvidia-smi after a boot initialises every card
REFRESH_TIMEOUT = 600.0  # seconds; a slow line, and archives with many packages
UNITS = ("etc/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")

Result = dict[str, Any]


class NotReadyError(Exception):
    """What is not as it must be: one sentence with what to do."""


# ---- who installs packages -----------------------------------------------------------------------


def lock_owner(path: Path) -> int | None:
    """Return the process that has a lock on a file (fcntl(2), F_GETLK), None where none has."""
    question = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("rb") as stream:
            answer = fcntl.fcntl(stream, fcntl.F_GETLK, question)
    except FileNotFoundError:
        return None
    kind, _, _, _, pid = struct.unpack("@hhqqi4x", answer)
    return None if kind == fcntl.F_UNLCK else int(pid)


def owner_of_packages(manager: str) -> str | None:
    """Return in words who installs packages at this moment, None where nobody does."""
    for name in LOCKS[manager]:
        pid = lock_owner(Path(ROOT, name))
        if pid is not None:
            return described(pid)
    for name in PID_FILES[manager]:
        text = read(Path(ROOT, name))
        if text.isdigit() and Path(ROOT, "proc", text).is_dir():
            return described(int(text))
    return None


def described(pid: int) -> str:
    """Return a process in words: its name, number and systemd unit."""
    if pid <= 0:
        return "a program of another container"
    name = read(Path(ROOT, "proc", str(pid), "comm")) or "a program"
    group = read(Path(ROOT, "proc", str(pid), "cgroup"))
    unit = re.search(r"([^/\s]+\.(?:service|scope))(?:/|$)", group, re.MULTILINE)
    return f"{name} (pid {pid}{', ' + unit.group(1) if unit else ''})"


def read(path: Path) -> str:
    """Return the stripped text of a small file, nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def wait(manager: str, seconds: float, *, check: bool) -> Result:
    """Wait until nobody installs packages; NotReadyError naming who does after that time."""
    began = time.monotonic()
    while True:
        owner = owner_of_packages(manager)
        waited = time.monotonic() - began
        if owner is None or check:
            return {"changed": False, "waited": round(waited, 1), "owner": owner}
        if waited >= seconds:
            raise NotReadyError(
                f"{owner} has been installing packages for {seconds:.0f} s and goes on: let it end, or end it, and "
                "apply again (ppdeploy_package_lock_timeout says how long an apply waits)"
            )
        time.sleep(min(LOOK_EVERY, max(seconds - waited, 0.05)))


# ---- apt's lists, and holding --------------------------------------------------------------------


def run(*argv: str, timeout: float = COMMAND_TIMEOUT) -> tuple[int, str, str]:
    """Run a program and return its exit status, standard output and standard error."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except FileNotFoundError:
        return 127, "", f"{argv[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, "", f"{argv[0]} gave no answer in {timeout:.0f} s"
    return done.returncode, done.stdout, done.stderr


def refresh(repository: str) -> Result:
    """Have apt read its sources; NotReadyError where it fails, or where it says anything against the repository.

    A source that has nothing to do with the driver may be broken: then apt goes on with what it knew of it.
    """
    status, out, err = run("apt-get", "--quiet", "update", timeout=REFRESH_TIMEOUT)
    told = [line for line in (out + err).splitlines() if line.startswith(("E:", "W:", "Err:"))]
    against = [line for line in told if repository and repository in line]
    if status != 0 or against:
        words = one_line(" ".join(against or told) or f"it ended with {status}")
        raise NotReadyError(
            f"apt cannot read {repository or 'its sources'}: {words}: see whether the host reaches it and has its key, "
            "and apply again"
        )
    return {"changed": False}


def hold(held: str, *, check: bool) -> Result:
    """Hold the installed packages that are meant and not held yet."""
    form = "${Package}\t${db:Status-Status}\t${db:Status-Want}\n"
    status, out, err = run("dpkg-query", "--show", f"--showformat={form}")
    if status != 0:
        raise NotReadyError(f"dpkg does not say what is installed: {one_line(err)}")
    rows = [line.split("\t") for line in out.splitlines()]
    loose = sorted(
        row[0]
        for row in rows
        if len(row) == 3 and row[1] == "installed" and row[2] != "hold" and is_meant(row[0], held)
    )
    if loose and not check:
        status, out, err = run("apt-mark", "hold", *loose)
        if status != 0:
            raise NotReadyError(f"apt-mark cannot hold {', '.join(loose)}: {one_line(err or out)}")
    after = "".join(f"{name} hold\n" for name in loose)
    return {"changed": bool(loose), "held": loose, "diff": {"before": "", "after": after}}


def is_meant(name: str, held: str) -> bool:
    """Return whether a package is to be held."""
    return re.search(held, name) is not None and re.search(NOT_HELD, name) is None


def one_line(text: str) -> str:
    """Return the text in one line of at most 500 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 500 else line[:497] + "..."


# ---- what uses the GPUs, and whether they answer -------------------------------------------------


def idle(unit: str) -> Result:
    """Raise NotReadyError where the unit runs or a program computes on a GPU."""
    _, out, _ = run("systemctl", "is-active", unit)
    if out.strip() in ("active", "activating", "deactivating", "reloading"):
        raise NotReadyError(f"{unit} runs, and the driver is to be changed: run `ppdeploy stop`, then `ppdeploy apply`")
    status, out, _ = run("nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv,noheader")
    users = [line.strip() for line in out.splitlines() if line.strip()] if status == 0 else []
    if users:
        raise NotReadyError(f"programs compute on the GPUs (pid, name: {'; '.join(users)}): stop them, and apply again")
    return {"changed": False}


def verify(cards: int, seconds: float) -> Result:
    """Load the module where it is not, and raise NotReadyError unless so many GPUs answer."""
    loaded = ""
    if not Path(ROOT, "sys/module/nvidia").is_dir() and shutil.which("modprobe"):
        status, _, err = run("modprobe", "nvidia")
        loaded = one_line(err) if status != 0 else ""
    deadline = time.monotonic() + seconds
    while True:
        status, out, err = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found = [line.strip() for line in out.splitlines() if line.strip()] if status == 0 else []
        if len(found) >= cards:
            here = any(Path(ROOT, folder, "nvidia-persistenced.service").is_file() for folder in UNITS)
            return {"changed": False, "version": found[0] if found else "", "persistenced": here}
        if time.monotonic() >= deadline:
            raise NotReadyError(why_not(len(found), cards, one_line(err or out) if status else "", loaded))
        time.sleep(LOOK_EVERY)


def why_not(found: int, cards: int, said: str, loaded: str) -> str:
    """Return in a sentence why GPUs do not answer, as well as the host can tell, and what to do."""
    told = f"nvidia-smi sees {found} of {cards} GPUs" + (f" and says: {said}" if said else "")
    if "rejected by service" in loaded or "Required key not available" in loaded:
        return (
            f"{told}. The kernel refuses NVIDIA's module, since Secure Boot is on and its key is not enrolled "
            f"({loaded}): run `mokutil --import` with the certificate that DKMS signs with (/var/lib/dkms/mok.pub, on "
            "Ubuntu /var/lib/shim-signed/mok/MOK.der), reboot, choose Enroll MOK on the machine's own screen, and "
            "apply again"
        )
    _, modules, _ = run("dkms", "status")
    nvidia = "; ".join(line for line in modules.splitlines() if "nvidia" in line) or "nothing"
    reasons = [f"DKMS says of NVIDIA's module: {nvidia}"]
    if loaded:
        reasons.append(f"modprobe says: {loaded}")
    if Path(ROOT, "sys/module/nouveau").is_dir():
        reasons.append("nouveau is loaded")
    return (
        f"{told}. {'; '.join(reasons)}: see `journalctl -k -g 'nvidia|NVRM'` on the host (kernel "
        f"{os.uname().release}), and apply again"
    )


def act(module: Any) -> Result:
    """Do what the module is asked, and return its result."""
    params = module.params
    action = params["action"]
    if action == "wait":
        return wait(params["manager"], params["seconds"], check=module.check_mode)
    if action == "refresh":
        return {"changed": False, "skipped": True} if module.check_mode else refresh(params["repository"])
    if action == "hold":
        return hold(params["held"], check=module.check_mode)
    if action == "idle":
        return idle(params["unit"])
    if module.check_mode:
        return {"changed": False, "skipped": True, "msg": "a check loads no driver"}
    return verify(params["cards"], params["seconds"])


def main() -> None:
    """Read the arguments and do it."""
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["wait", "refresh", "hold", "idle", "verify"], "required": True},
            "manager": {"type": "str", "choices": ["apt", "dnf"], "default": "apt"},
            "seconds": {"type": "int", "default": 0},
            "repository": {"type": "str", "default": ""},
            "held": {"type": "str"},
            "unit": {"type": "str"},
            "cards": {"type": "int", "default": 1},
        },
        required_if=[("action", "hold", ["held"]), ("action", "idle", ["unit"])],
        supports_check_mode=True,
    )
    try:
        result = act(module)
    except NotReadyError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename or 'the host'}: {error.strerror}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
