"""What vLLM is told to make of a checkpoint while it loads it: another number format, a quantisation, other numbers.

vLLM 0.32.0: `--dtype` (vllm/config/model.py, `_get_and_verify_dtype`), `--quantization` of a checkpoint that is not
quantised (vllm/config/quantization.py, vllm/model_executor/layers/quantization/online), `--hf-overrides`
(vllm/config/model.py, `_apply_dict_overrides`), and towers that are left out (vllm/model_executor/models/interfaces.py,
`_mark_tower_model`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ppdeploy.model.config import loaded_bytes
from ppdeploy.model.quantisation import Format, Quantisation

ONLINE: Mapping[str, Format] = {
    "fp8_per_tensor": Format(8, per_matrix=4),
    "fp8_per_block": Format(8, group=128, block_rows=128, scale_bytes=4),
    "fp8_per_channel": Format(8, group=-1, scale_bytes=4),
    "mxfp8": Format(8, group=32, scale_bytes=1),
    "mxfp4": Format(4, group=32, scale_bytes=1),
    "int8_per_channel_weight_only": Format(8, group=-1, scale_bytes=4),
    "nvfp4_per_token": Format(4, group=16, scale_bytes=1, per_matrix=4),
}
"""How a linear layer of 16 bits is kept in memory, by the method's name; `_ONLINE_SHORTHANDS` of vLLM 0.32.0."""

EXPERTS_ONLY = frozenset({"int8_per_channel_weight_only", "nvfp4_per_token"})
"""Methods that touch routed experts alone."""

SYNONYMS: Mapping[str, str] = {"fp8": "fp8_per_tensor"}
"""Names that vLLM still takes for others where a checkpoint is not quantised."""

WIDE = ("float32", "float")


@dataclass(frozen=True)
class Loading:
    """How a checkpoint is loaded, as far as its sizes depend on it. As it is, unless something is said."""

    dtype: str = "auto"
    quantization: str = ""
    """Name of a method; empty: as the checkpoint says."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that are replaced."""
    left_out: tuple[str, ...] = ()
    """Kinds of input (`image`, `video`) that are not served; a tower without any is not loaded."""

    @classmethod
    def from_options(cls, args: Mapping[str, Any]) -> Loading:
        """Return what options of `vllm serve` say, by their names without dashes in front."""
        limits = args.get("limit-mm-per-prompt") or {}
        alone = args.get("language-model-only") is True
        return cls(
            dtype=str(args.get("dtype") or "auto"),
            quantization=str(args.get("quantization") or ""),
            overrides=dict(args.get("hf-overrides") or {}),
            left_out=tuple(kind for kind in ("image", "video") if alone or _none_of(limits.get(kind))),
        )

    def plain_bytes(self, dtype: str | None) -> int:
        """Return the bytes in memory of a value that is not quantised; `dtype` is the checkpoint's format."""
        if self.dtype == "auto":
            return loaded_bytes(dtype)
        return 4 if self.dtype in WIDE else 2

    def quantised(self, stored: Quantisation) -> Quantisation:
        """Return the quantisation of the weights in memory; `stored` is the checkpoint's.

        A checkpoint that is quantised stays as it is, and so does one for which the method is none that vLLM quantises
        with by itself: `ppdeploy.plan.rules` refuses both where they cannot be meant.
        """
        method = SYNONYMS.get(self.quantization, self.quantization)
        form = ONLINE.get(method)
        if stored.method is not None or form is None:
            return stored
        # Whether towers are quantised too is up to each model's class; not to count on it is the safe side.
        return Quantisation(method, form, towers=False, experts_only=method in EXPERTS_ONLY)

    def key(self) -> str:
        """Return a short name of what is said, for files that are kept; empty: nothing is."""
        if self == Loading():
            return ""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def _none_of(limit: object) -> bool:
    """Whether a limit of `limit-mm-per-prompt`, a number or a map with `count`, allows no item at all."""
    count = limit.get("count") if isinstance(limit, Mapping) else limit
    return count == 0 and not isinstance(count, bool)


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with some of its fields replaced, as vLLM does it.

    A map for a section with a configuration of its own (`text_config`) replaces fields in there; any other value
    replaces what was there.
    """
    found = dict(config)
    for name, value in overrides.items():
        nested = name.endswith("_config") and name not in ("quantization_config", "compression_config")
        inner = found.get(name)
        merge = nested and isinstance(value, Mapping) and isinstance(inner, dict)
        found[name] = overridden(inner, value) if merge and isinstance(inner, dict) else value
    return found
