"""`ppdeploy_smoke` asks a gateway with a key of its own, whatever becomes of that meanwhile."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_smoke as smoke


class Gateway:
    """A gateway as its admin socket and its clients know it; `reload` is before which request it forgets keys."""

    def __init__(self, reload: int = 0) -> None:
        self.known: dict[str, str] = {}
        self.asked: list[int] = []
        self.reload = reload

    def control(self, _: str, command: str) -> str:
        """Answer a command on the admin socket, as HAProxy 2.6 does."""
        words, (_, _, payload) = command.split(), command.partition(" <<\n")
        if words[0] == "show":
            return "\n".join(f"0x55d0 {key} {value}" for key, value in self.known.items())
        if words[0] == "add":
            # Without a payload it would take one word of the value.
            key, _, value = payload.strip().partition(" ")
            assert re.fullmatch(r"[0-9]+ \+ppdeploy-smoke", value)
            self.known[key] = value
        else:
            del self.known[words[3]]
        return ""

    def request(self, *_: Any, key: str = "", **__: Any) -> dict[str, Any]:
        """Answer a request with 200 where its key is known, else 401."""
        if len(self.asked) + 1 == self.reload:
            self.known.clear()
        known = hashlib.sha256(key.encode()).hexdigest().upper() in self.known
        self.asked.append(200 if known else 401)
        return {"status": self.asked[-1], "body": "{}", "seconds": 0.0}


@pytest.mark.parametrize(
    ("reload", "asked"), [(0, [200, 401, 200]), (1, [401, 200, 401, 200]), (3, [200, 401, 401, 200])]
)
def test_a_gateway_that_is_reloaded_meanwhile_is_told_the_key_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reload: int, asked: list[int]
) -> None:
    gateway = Gateway(reload)
    monkeypatch.setattr(smoke, "_control", gateway.control)
    monkeypatch.setattr(smoke, "_request", gateway.request)
    monkeypatch.setattr(smoke, "_context", lambda _: None)
    (tmp_path / "unit").touch()
    where = {
        "unit": str(tmp_path / "unit"),
        "address": "x",
        "ca": "",
        "control": "x",
        "keys": str(tmp_path / "keys.map"),
    }
    params = {"gateway": where, "gateway_wait": 20, "timeout": 600, "model": "m", "max_tokens": 1}
    answers = smoke._gateway(params)["answers"]
    assert {name: answer["status"] for name, answer in answers.items()} == {
        "completion": 200,
        "refused": 401,
        "models": 200,
    }
    assert gateway.asked == asked
    assert gateway.known == {}
