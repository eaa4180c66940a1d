"""Find the lock for what a pipeline wants and its nodes have."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.locks.handoff import with_handoff
from ppdeploy.locks.lock import Lock, read_lock
from ppdeploy.locks.versions import DISTRIBUTIONS, Device, default_version

FOLDER = Path(__file__).resolve().parent / "files"


@cache
def available() -> tuple[Lock, ...]:
    """Return every lock that this ppdeploy carries, in the order of their file names."""
    return tuple(read_lock(path) for path in sorted(FOLDER.glob("vllm*.txt")))


def find(device: Device, version: str | None, python_minor: str, machine: str, extras: Collection[str] = ()) -> Lock:
    """Return the lock of a vLLM version for a device, a Python minor version (3.11) and a machine (x86_64).

    `version` None stands for the default of the device; `extras` are vLLM's own, such as runai. Raises InputError,
    naming what there is instead.
    """
    wanted = version or default_version(device)
    locks = [lock for lock in available() if lock.device == device]
    name = DISTRIBUTIONS[device]
    plain_version = [lock for lock in locks if lock.vllm_version == wanted]
    same_version = [lock for lock in plain_version if set(lock.extras) == set(extras)]
    if plain_version and not same_version:
        known = sorted({extra for lock in plain_version for extra in lock.extras})
        raise InputError(
            f"there is no lock for {name} {wanted} with {' and '.join(sorted(extras))}",
            where="ppdeploy_vllm_extras",
            remedy=f"use {' or '.join(known)}" if known else "take it out of the inventory",
        )
    if not same_version:
        raise InputError(
            f"there is no lock for {name} {wanted}",
            where="ppdeploy_vllm_version",
            remedy=f"use {_listed(lock.vllm_version for lock in locks)}, or make one with `python -m"
            f" ppdeploy.locks.generate --device {device} --version {wanted} --python {python_minor}`",
        )
    same_machine = [lock for lock in same_version if lock.machine == machine]
    if not same_machine:
        raise InputError(
            f"there is no lock for {name} {wanted} on {machine} machines",
            where="the hosts' processors",
            remedy=f"use hosts of {_listed(lock.machine for lock in same_version)}, for which there is one",
        )
    for lock in same_machine:
        if lock.python == python_minor:
            return lock
    raise InputError(
        f"there is no lock for {name} {wanted} with Python {python_minor}",
        where="the hosts' Pythons",
        remedy=f"install Python {_listed(lock.python for lock in same_machine)} on the nodes",
    )


def by_digest(digest: str) -> Lock:
    """Return the lock whose digest starts with `digest`, of 16 to 64 hexadecimal digits, be it with the plugin."""
    plain = available()
    for lock in (*plain, *map(with_handoff, plain)) if len(digest) >= 16 else ():
        if lock.digest.startswith(digest):
            return lock
    raise InputError(f"no lock of this ppdeploy has the digest {digest}", remedy="use the ppdeploy that named it")


def _listed(values: Iterable[str]) -> str:
    return " or ".join(sorted(set(values), key=_natural))


def _natural(text: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in text.split("."))
