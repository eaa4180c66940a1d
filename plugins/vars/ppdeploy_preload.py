"""Has the process that Ansible forks for every task load `ppdeploy` once, in place of each of its forks.

A fork that comes upon any filter loads all plugins of filters, and ours imports the plan, which takes 0.7 s of a core
in each task on each host. Vars plugins are what Ansible loads at its start.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.vars import BaseVarsPlugin

DOCUMENTATION = """
name: ppdeploy_preload
short_description: Load what the filters import before the first task
description: It gives no variables.
"""

_FILTERS = Path(__file__).resolve().parents[1] / "filter" / "ppdeploy.py"


def _load() -> None:
    spec = spec_from_file_location("ppdeploy_preloaded_filters", _FILTERS)
    if spec and spec.loader:
        # What is wrong is said where a filter is used, by Ansible with the task's name.
        with contextlib.suppress(AnsibleError):
            spec.loader.exec_module(module_from_spec(spec))


# Other programs of Ansible parse inventories too, and have no filters to come.
if "playbook" in Path(sys.argv[0]).name:
    _load()


class VarsModule(BaseVarsPlugin):  # type: ignore[misc]  # Ansible has no annotations
    """Gives no variables."""

    def get_vars(self, loader: Any, path: str, entities: Any) -> dict[str, Any]:
        """Return nothing: it was all done when this was loaded."""
        super().get_vars(loader, path, entities)
        return {}
