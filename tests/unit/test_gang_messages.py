"""What agents say to each other, and what they refuse to believe."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdeploy.agent.messages import GenerationId, MalformedError, answer_from_json, generation_from_json, to_json
from ppdeploy.agent.signing import UnprovenError, is_nonce, new_nonce, read_key, seal, unseal
from tests.unit.gang_factories import A, B, answer

KEY = b"k" * 32
PLACE = ("c", "p")


def test_an_answer_survives_its_journey() -> None:
    sent = answer()
    assert answer_from_json(json.loads(json.dumps(to_json(sent)))) == sent


def test_an_answer_without_ask_and_outcome_survives_too() -> None:
    sent = answer(ask=None, outcome=None, known=())
    assert answer_from_json(json.loads(json.dumps(to_json(sent)))) == sent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("promised", [1]),
        ("promised", [1, 2.5]),
        ("promised", [-1, 0]),
        ("promised", [True, 0]),
        ("started", [1, 2**64]),
        ("ready", "yes"),
        ("ready", 1),
        ("loop_age", float("nan")),
        ("loop_age", float("inf")),
        ("loop_age", -1),
        ("loop_age", True),
        ("node", "x" * 1000),
        ("node", None),
        ("rank", {"state": "flying", "generation": [0, 0], "release": "", "detail": "", "memory_bytes": 0}),
        ("rank", []),
        ("known", [{}]),
        ("known", [to_json(answer())["known"][0]] * 65),
        ("ask", {"want": "run"}),
        ("outcome", {"generation": [1, 1], "code": "0", "reason": "", "own": True}),
    ],
)
def test_a_malformed_field_is_refused(field: str, value: Any) -> None:
    data = to_json(answer())
    data[field] = value
    with pytest.raises(MalformedError):
        answer_from_json(data)


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JUNK)
def test_garbage_is_refused(data: Any) -> None:
    with pytest.raises(MalformedError):
        answer_from_json(data)


def test_a_missing_field_is_named() -> None:
    data = to_json(answer())
    del data["promised"]
    with pytest.raises(MalformedError, match="promised is missing"):
        answer_from_json(data)


def test_generations_compare_as_a_whole() -> None:
    assert GenerationId(2, 0) > GenerationId(1, 99) > GenerationId(1, 98)
    assert generation_from_json([3, 4]) == GenerationId(3, 4)


def test_a_signed_answer_is_believed() -> None:
    nonce = new_nonce()
    assert is_nonce(nonce)
    body, signature = seal(KEY, nonce, answer())
    assert unseal(KEY, nonce, A, PLACE, body, signature) == answer()


def test_a_forged_a_replayed_and_a_foreign_answer_prove_nothing() -> None:
    nonce = new_nonce()
    body, signature = seal(KEY, nonce, answer())
    with pytest.raises(UnprovenError, match="not signed"):
        unseal(b"x" * 32, nonce, A, PLACE, body, signature)
    with pytest.raises(UnprovenError, match="not signed"):
        unseal(KEY, nonce, A, PLACE, body.replace(b'"ready":true', b'"ready":null'), signature)
    with pytest.raises(UnprovenError, match="not signed"):
        unseal(KEY, nonce, A, PLACE, body, "")
    # A stranger at a peer's address may send any bytes as a header; the thread that asks must live on.
    with pytest.raises(UnprovenError, match="not signed"):
        unseal(KEY, nonce, A, PLACE, body, "\xe9" * 64)
    with pytest.raises(UnprovenError, match="an old one"):
        unseal(KEY, new_nonce(), A, PLACE, body, signature)
    with pytest.raises(UnprovenError, match="a answers at the address of b"):
        unseal(KEY, nonce, B, PLACE, body, signature)
    with pytest.raises(UnprovenError, match="belongs to pipeline p"):
        unseal(KEY, nonce, A, ("c", "other"), body, signature)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"nonce": 1}', b"\xff", b"[" * 5000])
def test_a_signed_but_malformed_body_proves_nothing(body: bytes) -> None:
    signature = hmac.new(KEY, body, hashlib.sha256).hexdigest()
    with pytest.raises(UnprovenError):
        unseal(KEY, new_nonce(), A, PLACE, body, signature)


@pytest.mark.parametrize("text", ["", "x" * 32, "0" * 31, "0" * 33, "A" * 32])
def test_what_is_no_nonce_is_not_signed(text: str) -> None:
    assert not is_nonce(text)


def test_a_key_that_others_read_or_that_is_short_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 64)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="readable by others"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == b"k" * 64
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="shorter") as caught:
        read_key(path)
    assert "short\n" not in str(caught.value)


def test_another_machine_of_the_same_name_is_left_to_the_protocol() -> None:
    nonce = new_nonce()
    other = answer(machine_id="machine-z")
    body, signature = seal(KEY, nonce, other)
    assert unseal(KEY, nonce, replace(A), PLACE, body, signature).machine_id == "machine-z"
