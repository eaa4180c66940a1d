"""The vLLM versions this plugin knows, each with the kind of device it ran on. It replaces parts of vLLM that have no
stable interface, so anywhere else it does nothing and says so.

To allow another one: `measure/compare.py` says what changed at each replaced place (`places.py` holds what was read),
a line below switches it on, and `measure/proof.sh` is the proof that the line may stay.
"""

from __future__ import annotations

# (version, device type as torch names it) -> where it ran with this plugin
TESTED: dict[tuple[str, str], str] = {
    ("0.26.0", "cuda"): "two GPUs over a shaped link, Model Runner V2",
    ("0.33.0", "cuda"): "two and three stages that share one GPU, over a shaped link, Model Runners V1 and V2",
    ("0.32.0", "cpu"): "two and three ranks in network namespaces over gloo, Model Runner V1",
}


def base(version: str) -> str:
    """`0.32.0` of `0.32.0+cpu`."""
    return version.partition("+")[0]


def refused(version: str, device: str) -> str | None:
    """Why the plugin stays out of vLLM `version` on a kind of device (cuda, cpu), or None when it was tested there."""
    if (base(version), device) in TESTED:
        return None
    tested = ", ".join(f"{known} on {kind}" for known, kind in sorted(TESTED))
    return f"vLLM {version} on {device} was not tested with ppdeploy_handoff (tested: {tested})"
