"""Where ppdeploy's own files lie: playbooks, roles, plugins and templates, in a checkout or inside the wheel."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_root() -> Path:
    """Return the folder that holds `site.yml`, `playbooks/`, `roles/`, `plugins/` and `templates/`.

    A wheel carries them in `ppdeploy/_data`; a checkout (or an editable install) has them beside the package.
    """
    packed = _PACKAGE / "_data"
    return packed if packed.is_dir() else _PACKAGE.parent


def cache_dir() -> Path:
    """Return the controller's cache folder, outside any checkout; it may always be deleted.

    `PPDEPLOY_CACHE_DIR` wins, else `ppdeploy` below `XDG_CACHE_HOME` or `~/.cache`.
    """
    explicit = os.environ.get("PPDEPLOY_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ppdeploy"


def kept_dir(inventory_dir: Path) -> Path:
    """Return the folder of what is kept beside an inventory: hidden, since Ansible reads every other file there."""
    return inventory_dir.resolve() / ".ppdeploy"
