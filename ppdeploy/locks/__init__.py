"""Locks: what a virtual environment of vLLM is made of, to the last byte."""

from ppdeploy.locks.find import available, by_digest, find
from ppdeploy.locks.handoff import with_handoff
from ppdeploy.locks.lock import Lock, Wheel, read_lock
from ppdeploy.locks.tool import uv_wheel
from ppdeploy.locks.versions import DISTRIBUTIONS, TESTED, Device, default_version, is_tested

__all__ = [
    "DISTRIBUTIONS",
    "TESTED",
    "Device",
    "Lock",
    "Wheel",
    "available",
    "by_digest",
    "default_version",
    "find",
    "is_tested",
    "read_lock",
    "uv_wheel",
    "with_handoff",
]
