"""How sizes are written, the same in findings, tables and pages."""

from __future__ import annotations


def gib_text(size: int) -> str:
    """Return bytes in GiB, or in MiB where they are few."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
