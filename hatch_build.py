"""Put playbooks, roles, plugins and templates into the wheel, for `ppdeploy.paths.data_root()` to find."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

DATA = (
    *("ansible.cfg", "site.yml", "playbooks", "roles", "plugins", "templates"),
    *("ppdeploy_handoff/pyproject.toml", "ppdeploy_handoff/src"),
)
"""What a wheel carries in `ppdeploy/_data`: what a checkout has beside the package."""


class DataHook(BuildHookInterface):  # type: ignore[type-arg]  # generic only in hatchling's own annotations
    """Adds `DATA` to a wheel, but not to an editable install, which reads the checkout itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Map each entry of `DATA` to `ppdeploy/_data`; hatchling refuses to build when one is missing."""
        if version == "standard":
            build_data["force_include"].update({name: f"ppdeploy/_data/{name}" for name in DATA})
