"""How sizes and rates are written, the same in findings, tables and pages."""

from __future__ import annotations


def gib_text(size: int) -> str:
    """Return bytes in GiB, or in MiB where they are few."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def rate_text(mbit: float) -> str:
    """Return a rate as people say it: `2.5 Gbit/s`, `100 Mbit/s`."""
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit:g} Mbit/s"


def measured_text(mbit: float) -> str:
    """Return a measured rate of three digits in words, such as `957 Mbit/s` or `9.41 Gbit/s`."""
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 999.5 else f"{mbit:.3g} Mbit/s"
