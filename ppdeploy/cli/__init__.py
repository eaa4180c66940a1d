"""The `ppdeploy` command: verbs parse options and print; the work is done left of `cli`."""

from __future__ import annotations

from ppdeploy.cli import verbs
from ppdeploy.cli.command import app, main

__all__ = ["app", "main", "verbs"]
