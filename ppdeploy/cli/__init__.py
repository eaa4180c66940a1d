"""The `ppdeploy` command: verbs only parse options and print; the work is done by the packages left of `cli`."""

from __future__ import annotations

from ppdeploy.cli.app import app, main

__all__ = ["app", "main"]
