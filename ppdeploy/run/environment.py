"""The environment of Ansible: this Python environment's programs, our own configuration and plugins.

Everything is set by variables, since a wheel has no `ansible.cfg` in the current folder and Ansible ignores
one in a world-writable folder.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.paths import data_root

#: Variables of AWX and of batch systems that change what ansible-runner's callback writes, or make it fail.
FOREIGN = (
    "AD_HOC_COMMAND_ID",
    "AWX_LIB_DIRECTORY",
    "JOB_ID",
    "ORIGINAL_STDOUT_CALLBACK",
    "PROJECT_UPDATE_ID",
    "ANSIBLE_FORCE_COLOR",
    # Nobody would see the question; our own options ask.
    "ANSIBLE_ASK_PASS",
    "ANSIBLE_ASK_VAULT_PASS",
    "ANSIBLE_BECOME_ASK_PASS",
    "ANSIBLE_CACHE_PLUGIN_CONNECTION",
    "ANSIBLE_DISPLAY_ARGS_TO_STDOUT",
)

#: The callback drops a result longer than this many characters; a plan of eight nodes is longer than its
#: default.
_LONGEST_RESULT = 50_000_000


def search_path() -> str:
    """Return a PATH on which the programs of this very Python environment come first."""
    scripts = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"))
    return os.pathsep.join(dict.fromkeys([*scripts, os.environ.get("PATH", os.defpath)]))


def require_program(name: str) -> None:
    """Raise InputError when `name`, one of Ansible's programs, is missing beside this Python.

    Another environment's `ansible-playbook` would run the filter plugin without this package.
    """
    folders = {Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))}
    if not any(os.access(folder / name, os.X_OK) for folder in folders):
        raise InputError(
            f"{name} is missing from the Python environment that runs ppdeploy",
            where=str(Path(sys.executable).parent),
            remedy=f"run `{sys.executable} -m pip install ansible-core`",
        )


def ansible_environment(root: Path | None = None) -> dict[str, str]:
    """Return the variables to set for Ansible; `root` stands in for `data_root()` in tests."""
    root = root or data_root()
    return {
        "PATH": search_path(),
        "ANSIBLE_CONFIG": str(root / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(root / "roles"),
        "ANSIBLE_LIBRARY": str(root / "plugins" / "modules"),
        "ANSIBLE_FILTER_PLUGINS": str(root / "plugins" / "filter"),
        "ANSIBLE_VARS_PLUGINS": str(root / "plugins" / "vars"),
        # ansible-runner turns both off unless they are set.
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        "ANSIBLE_CACHE_PLUGIN": "memory",
        # ansible-runner's callback wraps the one named here; its text is what -v and --debug show.
        "ANSIBLE_STDOUT_CALLBACK": "default",
        "ANSIBLE_NOCOLOR": "True",
        "MAX_EVENT_RES": str(_LONGEST_RESULT),
    }
