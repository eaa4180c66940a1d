"""Inventory values as plain JSON data that can be written into files of one line a setting."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

MAX_DEPTH = 16
"""Deeper nesting than any option of vLLM has; a bound, so that hostile input cannot exhaust the stack."""


def plain(value: object, depth: int = 0) -> JsonValue:
    """Return the value as plain `dict`, `list`, `str`, `int`, `float`, `bool` and None.

    Ansible hands over subclasses of these that carry tags. Raises ValueError, with the reason as its text,
    for what JSON cannot say and for text that would break a unit or environment file (line breaks and other
    control characters).
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _plain_text(value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError("it has a number beyond 64 bits")
        return int.__add__(value, 0)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("it has a number that is not finite")
        return float.__add__(value, 0.0)
    if isinstance(value, Mapping):
        return {_plain_key(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [plain(item, depth + 1) for item in value]
    raise ValueError(f"it is a {type(value).__name__}, not plain text (put it in quotes)")


def _plain_key(key: object) -> str:
    if not isinstance(key, str):
        raise ValueError("it has a name that is not text (put names in quotes)")
    return _plain_text(key)


def _plain_text(text: str) -> str:
    for character in text:
        category = unicodedata.category(character)
        if category == "Cs":
            raise ValueError("it has characters that are no valid Unicode text")
        if character in "\r\n\u2028\u2029":
            raise ValueError("it has a line break")
        if category == "Cc":
            raise ValueError(f"it has the control character U+{ord(character):04X}")
    return str.__str__(text)


def shown(value: object, limit: int = 60) -> str:
    """Return the value for a message: JSON, shortened, printable, without a password of an address."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=lambda item: type(item).__name__)
    except (TypeError, ValueError, RecursionError):
        return f"a {type(value).__name__}"
    # Up to the last one: a password that was not escaped may hold "@" and "/" itself.
    text = re.sub(r"://[^\s\"]*@", "://***@", text)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."
