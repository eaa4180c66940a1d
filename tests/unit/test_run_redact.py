"""Secrets leave what we print, wherever and however they stand in it."""

from __future__ import annotations

import json

from ppdeploy.run import Redactor


def test_every_occurrence_goes_in_text_and_in_nested_data() -> None:
    redactor = Redactor(["hf_abc"])
    assert redactor.text("a hf_abc b hf_abc") == "a [hidden] b [hidden]"
    assert redactor.data({"hf_abc": ["x", ("hf_abc", {"k": "1hf_abc1"}), 5, None, True]}) == {
        "[hidden]": ["x", ["[hidden]", {"k": "1[hidden]1"}], 5, None, True]
    }


def test_quotes_and_newlines_in_a_secret_do_not_save_it() -> None:
    """Redaction comes before JSON's escapes."""
    secret = 'a"b\\c\nd'
    assert secret not in json.loads(json.dumps(Redactor([secret]).data({"msg": f"is {secret}!"})))["msg"]


def test_a_secret_that_holds_another_one_leaves_nothing() -> None:
    assert Redactor(["word", "password1"]).text("password1") == "[hidden]"


def test_a_key_of_many_lines_is_found_when_it_is_indented() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkq\nhkiG9w0BAQEFAASC\n-----END KEY-----\n"
    shown = Redactor([key]).text("\n".join(f"    {line}" for line in key.splitlines()))
    assert "MIIEvQIBADANBgkq" not in shown
    assert "hkiG9w0BAQEFAASC" not in shown


def test_empty_secrets_hide_nothing() -> None:
    assert Redactor(["", "  ", "\n"]).text("all of this") == "all of this"


def test_secrets_that_become_known_later_are_hidden_too() -> None:
    redactor = Redactor()
    redactor.add(["late"])
    assert redactor.text("late") == "[hidden]"
