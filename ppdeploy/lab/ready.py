"""A lab that an apply can use: hosts that see the bundle and the unpacked wheels, and a tiny model to serve."""

from __future__ import annotations

import hashlib
import inspect
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

from ppdeploy import locks
from ppdeploy.bundle import Progress, make_bundle, unpacked_cache
from ppdeploy.bundle.alone import alone
from ppdeploy.errors import InputError
from ppdeploy.lab import system
from ppdeploy.lab import tiny_model as tiny_model_recipe
from ppdeploy.lab.core import Lab
from ppdeploy.lab.host import Overlay
from ppdeploy.lab.inventory import UV_CACHE, WHEELHOUSE, LabInventory
from ppdeploy.lab.rootfs import machine_release
from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.paths import cache_dir

HOST_PYTHONS = {"bookworm": "3.11"}
"""Python of the lab's hosts by their release, where there is a lock of vLLM on cpu for it (torch's cpu wheel too)."""


def tiny_model(*, tied: bool = False) -> Path:
    """Return the folder of the lab's default model, made when it is not there.

    `tied` is one of the same name whose output head is its embedding, so that the first and the last stage need both.
    """
    # A changed recipe makes another model, and is not served the one of before.
    recipe = hashlib.sha256(inspect.getsource(tiny_model_recipe).encode()).hexdigest()[:8]
    folder = cache_dir() / "lab" / "models" / f"{recipe}{'-tied' if tied else ''}" / "tiny-llama"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder, lambda: None):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent) as work:
                make_tiny_model(Path(work, folder.name), tied=tied).rename(folder)
    return folder


def up_with_vllm(
    lab: Lab,
    nodes: int,
    *,
    inventory: LabInventory | None = None,
    owner: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Boot a lab whose hosts can install vLLM on cpu without a way out, and return its inventory's path.

    With empty caches this downloads the wheels (860 MB) and unpacks them once. `inventory` describes other pipelines
    than one over all hosts; `owner` and `say` are those of `Lab.up`.
    """
    lock = _lock()
    bundle = make_bundle(lock, progress=_told(say))
    unpacked = unpacked_cache(bundle, wheelhouse=WHEELHOUSE, say=say)
    return lab.up(
        nodes,
        binds={bundle.path: WHEELHOUSE},
        overlays=[Overlay(lower=unpacked, target=UV_CACHE)],
        inventory=inventory or LabInventory.one_pipeline(nodes, model=str(tiny_model())),
        owner=owner,
        say=say,
    )


def _lock() -> locks.Lock:
    """Return the lock that fits the hosts, which get this machine's own release."""
    system.require_machine("a lab that serves")
    release, machine = machine_release(), platform.machine()
    if release not in HOST_PYTHONS or machine != "x86_64":
        raise InputError(
            f"the lab's hosts would be {release} on {machine}, and there is no lock of vLLM on cpu for them",
            where="this machine's /etc/os-release",
            remedy="use a Debian 12 (bookworm) machine on x86_64, or `ppdeploy lab up --bare` for hosts alone",
        )
    return locks.find("cpu", None, HOST_PYTHONS[release], machine)


def _told(say: Callable[[str], None]) -> Callable[[Progress], None]:
    """Turn the download's progress into a line for each tenth of it."""
    last = -1

    def tell(progress: Progress) -> None:
        nonlocal last
        tenth = 10 * progress.done // progress.total if progress.total else 10
        if tenth > last:
            last = tenth
            say(f"wheels: {progress.done / 1e6:.0f} of {progress.total / 1e6:.0f} MB, {progress.doing}")

    return tell
