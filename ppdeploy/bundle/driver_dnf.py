"""The driver of a bundle by dnf: from this machine's repositories, and from NVIDIA's, which stays unknown to it.

NVIDIA's module streams are left aside: the branch is in the packages' names, so the bundle's own index needs none.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ppdeploy.bundle import dnf
from ppdeploy.bundle.driver_repository import OPTION, Repository, check_branch
from ppdeploy.spec import BundledDriver

_ID = "ppdeploy-bundle-nvidia"


def fetch(wanted: BundledDriver, repository: Repository, folder: Path) -> tuple[str, ...]:
    """Fetch the packages of a driver into a folder, with its repodata; return the names of what was asked for.

    Raises InputError where a repository lacks a package or one is not signed by the key, PpdeployError for any other
    failure of dnf.
    """
    shutil.rmtree(folder, ignore_errors=True)
    key = repository.key.absolute().as_uri() if repository.key is not None else repository.keyring
    settings = {
        "gpgcheck": "1",
        "gpgkey": key,
        # Every branch is seen, not that of a stream alone.
        "module_hotfixes": "1",
    }
    options = [f"--repofrompath={_ID},{repository.address}"]
    options += [f"--setopt={_ID}.{name}={value}" for name, value in settings.items()]
    dnf.fetch(wanted.names, folder, options, where=OPTION)
    # Such as nvidia-open-580.95.05-1.el9.noarch.rpm.
    names = [path.name.removeprefix("nvidia-open-") for path in folder.glob("nvidia-open-[0-9]*.rpm")]
    check_branch(wanted, names)
    return wanted.names
