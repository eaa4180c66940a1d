"""Secrets out of everything we print: by value, wherever the value turns up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

HIDDEN = "[hidden]"


class Redactor:
    """Replaces each known secret in text and in nested data.

    Values are added as they become known (asked passwords, variables marked secret). A secret of many lines,
    such as a private key, is also found line by line, since Ansible may print it indented.
    """

    #: Lines of a longer secret that are shorter than this (a brace, a blank) occur in innocent text too.
    _SHORTEST_LINE = 8

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets: list[str] = []
        self.add(secrets)

    def add(self, secrets: Iterable[str]) -> None:
        """Hide these values too; empty ones are passed over."""
        found = set(self._secrets)
        for secret in secrets:
            if secret.strip():
                found.add(secret.strip())
                lines = [line.strip() for line in secret.splitlines()]
                if len(lines) > 1:
                    found.update(line for line in lines if len(line) >= self._SHORTEST_LINE)
        # The longest first: a secret that contains another one must not be left half visible.
        self._secrets = sorted(found, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return `text` with every secret replaced."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def data(self, value: Any) -> Any:
        """Return a copy of JSON-like data with every secret replaced in its strings and keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.data(key): self.data(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.data(item) for item in value]
        return value
