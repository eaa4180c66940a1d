"""A wheel of pure Python, the same to the last byte wherever and whenever it is made: a lock can pin its hash."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Mapping

#: The oldest time that a zip file can hold: any fixed one would do.
_TIME = (1980, 1, 1, 0, 0, 0)


def wheel_file(name: str, version: str, metadata: str, files: Mapping[str, str]) -> tuple[str, bytes]:
    """Return file name and content of a wheel.

    `name` is the distribution's with _ for -, `metadata` what METADATA says beside name and version (lines), and
    `files` the texts in it by their paths, those of its `.dist-info` folder included.
    """
    info = f"{name}-{version}.dist-info"
    held = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n{metadata}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: ppdeploy (1)\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in held.items())
    held[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    buffer = io.BytesIO()
    # Stored, not compressed: the output of zlib differs between its versions.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, text in held.items():
            member = zipfile.ZipInfo(path, _TIME)
            member.create_system = 3
            member.external_attr = 0o100644 << 16
            archive.writestr(member, text.encode())
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
