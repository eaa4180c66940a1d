"""Whether this node could run its rank now: GPUs, fabric address, ports, shared memory (rule 15)."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from ppdeploy.agent.command_line import environment, option
from ppdeploy.agent.release import RANK_ENV, NodeRelease

PORTS = 16
"""Master ports that generations take in turn: an old straggler never meets a new generation (rule 8)."""
_SHM = "/dev/shm"  # noqa: S108  (where vLLM's processes meet)
_SHM_NEEDED = 64 << 20


def master_port(base: int, generation: int) -> int:
    """Return the master port of a generation."""
    return base + generation % PORTS


def obstacle(release: NodeRelease, node: str, device: str, unit: str) -> str:
    """Return what keeps this node from running its rank, empty when nothing does. The rank must be absent."""
    loaded = _unit_obstacle(unit)
    if loaded:
        return loaded
    address = next((member.address for member in release.nodes if member.name == node), "")
    if not _bindable(address, 0):
        return f"the fabric address {address} is not on this host"
    if device == "cuda":
        gpus = _gpu_obstacle(release)
        if gpus:
            return gpus
    port = option(release.argv, "--port")
    if port and not _bindable(option(release.argv, "--host") or "127.0.0.1", int(port)):
        return f"port {port} of the API is taken by another program"
    free = os.statvfs(_SHM)
    if free.f_bavail * free.f_frsize < _SHM_NEEDED:
        return f"{_SHM} has less than {_SHM_NEEDED >> 20} MiB free"
    return ""


def stop_strays(unit: str) -> str:
    """Stop ranks of other pipelines on this node, and return which still run, empty when none does.

    A node that an apply moved to another pipeline may still run the rank of the one before, which no agent watches now.
    """
    everyone = unit.partition("@")[0] + "@*"
    try:
        shown = subprocess.run(
            ["systemctl", "list-units", "--plain", "--no-legend", "--state=active,activating,deactivating", everyone],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        strays = [line.split()[0] for line in shown.stdout.splitlines() if line.split()[0] != unit]
        if strays:
            subprocess.run(["systemctl", "stop", "--no-block", *strays], timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemd does not answer: {error}"
    return f"{', '.join(strays)} of another pipeline still runs on this node" if strays else ""


def _unit_obstacle(unit: str) -> str:
    """An apply may have switched the release and not yet told systemd: a start now would be of the old one."""
    try:
        shown = subprocess.run(
            ["systemctl", "show", "--property=LoadState,NeedDaemonReload", unit],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"systemd does not answer: {error}"
    values = dict(line.partition("=")[::2] for line in shown.stdout.splitlines())
    if values.get("LoadState") != "loaded":
        return f"{unit} is not usable ({values.get('LoadState') or shown.stderr.strip()}); run apply"
    if values.get("NeedDaemonReload") == "yes":
        return f"systemd has not read the new files of {unit} yet (systemctl daemon-reload)"
    return ""


def _gpu_obstacle(release: NodeRelease) -> str:
    wanted = environment((release.folder / RANK_ENV).read_text(encoding="utf-8")).get("CUDA_VISIBLE_DEVICES", "")
    indices = [item for item in wanted.split(",") if item]
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the NVIDIA driver does not answer: {error}"
    present = listed.stdout.split()
    missing = [index for index in indices if index not in present]
    if listed.returncode or missing:
        why = listed.stderr.strip() or f"nvidia-smi lists {', '.join(present) or 'none'}"
        return f"GPU {missing[0] if missing else indices} is not there: {why}"
    return ""


def gpu_residue(pids: set[int]) -> str:
    """Return which GPU memory processes of the rank still hold, by nvidia-smi, empty when none."""
    if not Path("/proc/driver/nvidia").exists():
        return ""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the NVIDIA driver does not answer: {error}"
    held = {int(word) for word in listed.stdout.split() if word.isdigit()} & pids
    return f"GPU memory of process {min(held)}" if held else ""


def _bindable(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # A listener in use is found all the same; only connections of the last rank in TIME_WAIT are not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
