"""Fetch wheels with pip, as this machine's pip is set up: its index, find-links, proxy and certificates."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from ppdeploy.errors import InputError, PpdeployError
from ppdeploy.locks import Lock, Wheel

_PLATFORM_TAGS = 5, 39
"""Oldest and newest glibc minor whose tags are offered; the hash says which file it is, so more is no
harm."""


@cache
def pip_command() -> tuple[str, ...]:
    """Return how to start pip here; InputError when there is none."""
    for command in ([sys.executable, "-m", "pip"], ["pip3"], ["pip"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "--version"], capture_output=True, check=False).returncode
        ):
            return tuple(command)
    raise InputError(
        "pip is missing on the controller",
        remedy=f"install it with `{sys.executable} -m ensurepip` or your system's packages",
    )


def fetch(
    wheels: Sequence[Wheel],
    lock: Lock,
    folder: Path,
    *,
    index_url: str | None,
    extra_index_url: str | None,
    watch: Callable[[int], None],
) -> None:
    """Download wheels of a lock into `folder`; pip checks each against its hash before it puts it there.

    `watch` is called about twice a second with the bytes that pip holds so far. URLs reach pip by a file that
    only this user can read, since they may hold a password. Raises InputError when an index lacks a file or
    has another one, PpdeployError for any other failure, in pip's own last words.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        requirements = Path(work, "requirements.txt")
        requirements.touch(mode=0o600)
        lines = [f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}" for wheel in wheels]
        if index_url:
            lines.insert(0, f"--index-url {index_url}")
        if extra_index_url:
            lines.insert(0, f"--extra-index-url {extra_index_url}")
        requirements.write_text("\n".join(lines) + "\n", encoding="utf-8")
        scratch = Path(work, "scratch")
        scratch.mkdir()
        outcome = _run(
            [
                *(
                    *pip_command(),
                    "download",
                    "--disable-pip-version-check",
                    "--no-input",
                    "--progress-bar",
                    "off",
                ),
                *("--require-hashes", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)),
                *("--python-version", lock.python, "--implementation", "cp"),
                *(option for abi in (f"cp{lock.python.replace('.', '')}", "abi3", "none") for option in ("--abi", abi)),
                *(option for tag in _platforms(lock.machine) for option in ("--platform", tag)),
                *("--requirement", str(requirements)),
            ],
            # pip unpacks nothing here, but it downloads into TMPDIR, which may be small elsewhere.
            {**os.environ, "TMPDIR": str(scratch)},
            lambda: watch(sum(f.stat().st_size for f in scratch.rglob("*.whl") if f.is_file())),
        )
    if outcome is not None:
        raise _explained(redacted(outcome, index_url, extra_index_url))


def _platforms(machine: str) -> list[str]:
    oldest, newest = _PLATFORM_TAGS
    return [
        *(f"manylinux_2_{minor}_{machine}" for minor in range(newest, oldest - 1, -1)),
        *(f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")),
    ]


def _run(command: list[str], environment: dict[str, str], tick: Callable[[], None]) -> str | None:
    """Run pip; return None when it succeeds, else what it said."""
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=0.5)
                    break
                except subprocess.TimeoutExpired:
                    _ignoring_races(tick)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        output.seek(0)
        return None if code == 0 else output.read()


def _ignoring_races(tick: Callable[[], None]) -> None:
    """Call `tick`, which looks at files that pip may move away at the same moment."""
    try:
        tick()
    except FileNotFoundError:
        threading.Event().wait(0.05)


def redacted(text: str, *urls: str | None) -> str:
    """Return pip's words without users and passwords in its addresses, those that it was given among them."""
    for url in urls:
        if url:
            text = text.replace(url, re.sub(r"//[^/]*@", "//***@", url))
    return re.sub(r"(https?://)[^/\s]*@", r"\1***@", text)


def _explained(output: str) -> PpdeployError:
    """Turn pip's output into one sentence."""
    if match := re.search(r"No matching distribution found for ([\w.-]+)==(\S+)", output):
        name, version = match[1], match[2]
        remedy = "set ppdeploy_index_url to an index that has it"
        if "+" in version:
            remedy = (
                "set ppdeploy_extra_index_url to PyTorch's package index for the CPU, or put the wheel into a"
                " folder and name that in pip's find-links"
            )
        return InputError(f"pip finds no wheel of {name} {version} for the nodes", remedy=remedy)
    if "DO NOT MATCH THE HASHES" in output:
        names = re.findall(r"^\s+(\S+==\S+)", output.split("DO NOT MATCH THE HASHES", 1)[1], re.MULTILINE)
        return InputError(
            f"the index has another file of {names[0] if names else 'a package'} than the lock names",
            remedy="check the index (a mirror that rebuilds wheels, or a damaged download) and run it again",
        )
    said = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR")] or said[-1:] or ["pip ended without a word"]
    return PpdeployError(
        f"pip cannot download the wheels: {errors[-1].removeprefix('ERROR: ')}",
        remedy="check the network and pip's configuration, then run it again: what is there is kept",
    )
