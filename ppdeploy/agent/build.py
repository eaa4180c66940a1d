"""Packs the agent into the one file that lands on a node: a zip that Python runs, equal byte for byte each time.

This module runs on the controller only. The file starts with `python3 agent.pyz`, needs nothing but the
node's Python (>= 3.9), and its name and sha256 are all that says whether a node has the newest one.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_NOT_ON_NODES = frozenset({"build.py"})
# The zip format's first day: no file of the pack has a date of its own.
_DATE = (1980, 1, 1, 0, 0, 0)
_MAIN = "import sys\n\nfrom ppdeploy.agent.main import main\n\nsys.exit(main())\n"
_PACKAGE = '"""The part of ppdeploy that runs on nodes."""\n'


def agent_pyz() -> bytes:
    """Return the agent as one file for a node."""
    files = {"__main__.py": _MAIN, "ppdeploy/__init__.py": _PACKAGE}
    for path in sorted(_FOLDER.glob("*.py")):
        if path.name not in _NOT_ON_NODES:
            files[f"ppdeploy/agent/{path.name}"] = path.read_text(encoding="utf-8")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, text)
    return packed.getvalue()


def write(path: Path) -> None:
    """Write the agent's file, only when it would differ."""
    data = agent_pyz()
    if not path.exists() or path.read_bytes() != data:
        path.write_bytes(data)
