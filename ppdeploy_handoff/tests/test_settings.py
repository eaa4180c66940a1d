"""The environment variables."""

from __future__ import annotations

import pytest

from ppdeploy_handoff import versions
from ppdeploy_handoff.families import Norm, known
from ppdeploy_handoff.settings import Mode, Settings, from_env, parse


def test_nothing_set_is_off() -> None:
    assert from_env({}) == Settings(Mode.OFF, None, "")
    assert from_env({"PPDEPLOY_HANDOFF": ""}).mode is Mode.OFF


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", Settings(Mode.OFF)),
        ("lossless\n", Settings(Mode.LOSSLESS)),
        ("overlap", Settings(Mode.OVERLAP)),
        ("overlap:0", Settings(Mode.OVERLAP, 0)),
        ("overlap:64", Settings(Mode.OVERLAP, 64)),
        ("fp8", Settings(Mode.FP8)),
        ("fp8:64", Settings(Mode.FP8, 64)),
    ],
)
def test_modes(text: str, expected: Settings) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["fast", "int8", "overlap:", "fp8:-1", "overlap:x", "lossless:3", "OVERLAP"])
def test_a_wrong_mode_is_named(text: str) -> None:
    with pytest.raises(
        ValueError, match="is no handoff mode: off, lossless, overlap, overlap:TOKENS, fp8 or fp8:TOKENS"
    ):
        parse(text)
    with pytest.raises(ValueError, match="^PPDEPLOY_HANDOFF: "):
        from_env({"PPDEPLOY_HANDOFF": text})


@pytest.mark.parametrize(
    ("text", "most", "limit"),
    [("overlap", 8192, 512), ("overlap", 256, 128), ("overlap:64", 256, 64), ("fp8", 2048, 512)],
)
def test_the_limit_follows_the_most_tokens_of_a_batch(text: str, most: int, limit: int) -> None:
    assert parse(text).limit(most) == limit


def test_the_stagger_has_a_variable_of_its_own() -> None:
    assert from_env({"PPDEPLOY_HANDOFF": "overlap", "PPDEPLOY_HANDOFF_STAGGER": "64"}).stagger == 64
    with pytest.raises(ValueError, match="PPDEPLOY_HANDOFF_STAGGER='many' is no number of tokens"):
        from_env({"PPDEPLOY_HANDOFF_STAGGER": "many"})


def test_only_tested_versions() -> None:
    assert versions.refused("0.26.0+cu130", "cuda") is None
    assert versions.refused("0.33.0", "cuda") is None
    assert versions.refused("0.32.0+cpu", "cpu") is None
    for version, device in (("0.34.0", "cuda"), ("0.26.0", "cpu"), ("0.32.0", "cuda"), ("0.33.0", "cpu")):
        why = versions.refused(version, device)
        assert why is not None and f"{version} on {device}" in why and "0.26.0 on cuda" in why


def test_families_are_class_names_that_were_read() -> None:
    assert known("Qwen3ForCausalLM") is Norm.RMS
    assert known("Gemma3ForCausalLM") is Norm.GEMMA
    assert known("DeepseekV3ForCausalLM") is None
