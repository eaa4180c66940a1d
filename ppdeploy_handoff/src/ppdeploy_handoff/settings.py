"""What the environment asks for."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

MODE = "PPDEPLOY_HANDOFF"
STAGGER = "PPDEPLOY_HANDOFF_STAGGER"
SWITCH = "PPDEPLOY_HANDOFF_SWITCH"
COUNTERS = "PPDEPLOY_HANDOFF_COUNTERS"
# From this many tokens in a batch on, its requests wait one step more for their next token: below it the handoff is
# so short that a deeper pipeline would only make decoding slower (docs/handoff.md has the measurement). Where batches
# are small by themselves, half of the most that they may hold.
MOST_STAGGER = 512


class Mode(enum.Enum):
    """How hidden states travel. Each mode does all that the ones before it do."""

    OFF = "off"
    LOSSLESS = "lossless"
    OVERLAP = "overlap"
    FP8 = "fp8"

    @property
    def overlaps(self) -> bool:
        """Whether a stage works on while its last handoff is on the wire."""
        return self in (Mode.OVERLAP, Mode.FP8)


@dataclass(frozen=True)
class Settings:
    """mode: see `Mode`. stagger: tokens in a batch from which on a handoff counts as a stage of its own; 0 never, None
    as fits the most tokens of a batch (`limit`). switch: a file that holds the mode, read again whenever no batch is in
    flight (for measuring only), or empty."""

    mode: Mode = Mode.OFF
    stagger: int | None = None
    switch: str = ""

    def limit(self, most: int) -> int:
        """Tokens in a batch from which on a handoff counts as a stage of its own, where a batch has `most` at most."""
        return min(MOST_STAGGER, most // 2) if self.stagger is None else self.stagger


def parse(text: str, stagger: int | None = None) -> Settings:
    """Settings of `off`, `lossless`, `overlap` or `fp8`, these two also with `:TOKENS` (the stagger, 0 for none).

    ValueError names what was given and what is possible.
    """
    word, colon, tokens = text.strip().partition(":")
    try:
        mode = Mode(word)
        if colon:
            stagger = int(tokens)
        if (stagger or 0) < 0 or (colon and not mode.overlaps):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text.strip()!r} is no handoff mode: off, lossless, overlap, overlap:TOKENS, fp8 or fp8:TOKENS"
        ) from None
    return Settings(mode, stagger)


def from_env(env: Mapping[str, str]) -> Settings:
    """The settings in `env`; a bad value raises ValueError with the variable's name."""
    try:
        stagger = int(env[STAGGER]) if env.get(STAGGER) else None
    except ValueError:
        raise ValueError(f"{STAGGER}={env[STAGGER]!r} is no number of tokens") from None
    try:
        found = parse(env.get(MODE) or "off", stagger)
    except ValueError as error:
        raise ValueError(f"{MODE}: {error}") from None
    return Settings(found.mode, found.stagger, env.get(SWITCH, ""))
