"""A lock: the exact wheels, one for each package, that a virtual environment is made of.

The file is a requirements file that pip and uv take as it is. Comments add what they do not need and we do:
one `# ppdeploy:` line with JSON, and one `# wheel: NAME BYTES` line above each requirement, followed by a
`# content: BASE64` line where no index has the wheel since we make it ourselves.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from ppdeploy.errors import InputError
from ppdeploy.locks.versions import Device

_REQUIREMENT = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})$")
_CONTENT = re.compile(r"^# content: (?P<base64>[A-Za-z0-9+/=]+)$")
_WHEEL = re.compile(r"^# wheel: (?P<file>\S+\.whl) (?P<size>[0-9]+)$")
_HEADER = "# ppdeploy: "
_KEYS = {"device", "distribution", "version", "python", "machine", "glibc", "installed_bytes"}


@dataclass(frozen=True)
class Wheel:
    """One file of a lock."""

    project: str
    version: str
    file: str
    sha256: str
    size: int
    """Bytes of the file."""
    content: bytes | None = None
    """The file itself when the lock holds it; None for a file that an index has."""


@dataclass(frozen=True)
class Lock:
    """All that defines a virtual environment. Two environments of one digest hold the same packages."""

    path: Path
    text: str
    digest: str
    """sha256 of the file's bytes, which contain the hash of every wheel, the metadata wheel included."""
    device: Device
    distribution: str
    vllm_version: str
    """Without a local part: 0.32.0 also where Python's metadata says 0.32.0+cpu."""
    python: str
    """Minor version, such as 3.11."""
    machine: Literal["x86_64", "aarch64"]
    glibc: str
    """Oldest glibc that the wheels run with."""
    installed_bytes: int
    """Roughly what the environment takes on disk, byte code included."""
    wheels: tuple[Wheel, ...]
    extras: tuple[str, ...] = ()
    """vLLM's own extras that it has beside the usual packages, such as runai."""

    @property
    def release(self) -> str:
        """Version of vLLM with the extras, such as 0.33.0+runai."""
        return "+".join((self.vllm_version, *self.extras))

    @property
    def directory_name(self) -> str:
        """Name of the environment's folder: the first 16 digits of the digest."""
        return self.digest[:16]

    @cached_property
    def _by_project(self) -> dict[str, Wheel]:
        return {wheel.project: wheel for wheel in self.wheels}

    def version_of(self, project: str) -> str | None:
        """Return the locked version of a package, None when the lock has no such package."""
        wheel = self._by_project.get(project)
        return None if wheel is None else wheel.version

    @property
    def metadata_version(self) -> str:
        """Version of the distribution `vllm` as an installed environment reports it."""
        return self.version_of("vllm") or self.vllm_version

    @property
    def torch_version(self) -> str:
        """Version of torch with its local part, such as 2.13.0+cpu."""
        return self.version_of("torch") or ""

    @property
    def nccl_version(self) -> str | None:
        """Version of NCCL; None on cpu."""
        return next((w.version for w in self.wheels if w.project.startswith("nvidia-nccl-")), None)

    @property
    def download_bytes(self) -> int:
        """Sum of the wheels' sizes."""
        return sum(wheel.size for wheel in self.wheels)


def read_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises InputError when the file cannot be read or is not what `ppdeploy.locks.generate` writes.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(f"cannot read the lock file: {reason}", where=str(path)) from error
    wheels = read_wheels(path, text)
    told = [line.removeprefix(_HEADER) for line in text.splitlines() if line.startswith(_HEADER)]
    header: dict[str, Any] = json.loads(told[0]) if told else {}
    missing = _KEYS - header.keys()
    if missing or not wheels:
        raise InputError(
            "this is not a lock of ppdeploy: it lacks its `# ppdeploy:` line or its wheels", where=str(path)
        )
    return Lock(
        path=path,
        text=text,
        digest=hashlib.sha256(raw).hexdigest(),
        device=cast(Device, header["device"]),
        distribution=header["distribution"],
        vllm_version=header["version"],
        python=header["python"],
        machine=cast(Literal["x86_64", "aarch64"], header["machine"]),
        glibc=header["glibc"],
        installed_bytes=header["installed_bytes"],
        wheels=wheels,
        extras=tuple(header.get("extras", ())),
    )


def read_wheels(path: Path, text: str) -> tuple[Wheel, ...]:
    """Return the wheels that the text of the file at `path` names; InputError where it is not understood."""
    wheels: list[Wheel] = []
    pending: tuple[str, int] | None = None
    content: bytes | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if match := _WHEEL.match(line):
            pending = match["file"], int(match["size"])
        elif match := _CONTENT.match(line):
            content = base64.b64decode(match["base64"])
        elif (match := _REQUIREMENT.match(line)) and pending is not None:
            wheels.append(Wheel(match["name"], match["version"], pending[0], match["sha256"], pending[1], content))
            pending = content = None
        elif line and not line.startswith("#"):
            raise InputError(
                f"line {number} of the lock is not `NAME==VERSION --hash=sha256:...` below its wheel",
                where=str(path),
                remedy="take the file from ppdeploy again, locks are not edited by hand",
            )
    return tuple(wheels)
