"""Bundles: all files that nodes without a way out need, in one folder on the controller."""

from ppdeploy.bundle.content import Bundle, BundleFile, open_bundle, read_bundle, verify_bundle
from ppdeploy.bundle.driver import DriverWish
from ppdeploy.bundle.make import ModelWish, Progress, default_folder, make_bundle
from ppdeploy.bundle.unpacked import unpacked_cache

__all__ = [
    "Bundle",
    "BundleFile",
    "DriverWish",
    "ModelWish",
    "Progress",
    "default_folder",
    "make_bundle",
    "open_bundle",
    "read_bundle",
    "unpacked_cache",
    "verify_bundle",
]
