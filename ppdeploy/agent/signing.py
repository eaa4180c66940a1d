"""Signed answers: HMAC-SHA256 over the whole body, which holds the asker's nonce and who answers (rule 7)."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from pathlib import Path
from typing import Any

from ppdeploy.agent.messages import Answer, MalformedError, Member, answer_from_json, to_json

HEADER = "x-ppdeploy-signature"
_KEY_BYTES = 32


class UnprovenError(Exception):
    """An answer that proves nothing; `str()` says why."""


def read_key(path: Path) -> bytes:
    """Read the pipeline's shared key; raise `OSError` or `ValueError`, never with the key in the text."""
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} is readable by others: chmod 0600 it and make a new key")
    key = path.read_bytes().strip()
    if len(key) < _KEY_BYTES:
        raise ValueError(f"{path} is shorter than {_KEY_BYTES} bytes: run apply")
    return key


def new_nonce() -> str:
    """Return a nonce for one question."""
    return secrets.token_hex(16)


def is_nonce(text: str) -> bool:
    """Whether a text looks like a nonce; anything else is not worth signing."""
    return len(text) == 32 and all(character in "0123456789abcdef" for character in text)


def seal(key: bytes, nonce: str, answer: Answer) -> tuple[bytes, str]:
    """Return the body of an answer and its signature."""
    body = json.dumps({"nonce": nonce, "answer": to_json(answer)}, separators=(",", ":")).encode()
    return body, _sign(key, body)


def unseal(key: bytes, nonce: str, asked: Member, place: tuple[str, str], body: bytes, signature: str) -> Answer:
    """Return the answer of the node that was asked; raise `UnprovenError` for anyone's or anything else.

    `place` is the (cluster, pipeline) of the asker. A machine id that differs is left to the protocol,
    which names it.
    """
    # As bytes: the header is a stranger's, and compare_digest refuses to compare texts that are not ASCII.
    if not hmac.compare_digest(_sign(key, body).encode(), signature.lower().encode("utf-8", "replace")):
        raise UnprovenError("its answer is not signed with this pipeline's key")
    try:
        data: Any = json.loads(body)
        if data["nonce"] != nonce:
            raise UnprovenError("its answer is an old one")
        answer = answer_from_json(data["answer"])
    except (ValueError, KeyError, TypeError, RecursionError, MalformedError) as error:
        raise UnprovenError(f"its answer is malformed: {error}") from error
    if (answer.cluster, answer.pipeline) != place:
        raise UnprovenError(f"it belongs to pipeline {answer.pipeline} of {answer.cluster}")
    if answer.node != asked.name:
        raise UnprovenError(f"{answer.node} answers at the address of {asked.name}")
    return answer


def _sign(key: bytes, body: bytes) -> str:
    return hmac.new(key, body, hashlib.sha256).hexdigest()
