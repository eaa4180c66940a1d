"""Shapes of models for tests: a tiny Llama, and any that is in the golden folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ppdeploy.model import ModelShape, parse_config

CONFIGS = Path(__file__).resolve().parent / "golden" / "models" / "configs"

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def make_shape(*, layers: int = 4, weight_bytes: int = 0, **config: Any) -> ModelShape:
    """Return the shape of a tiny Llama with `layers` layers; `config` replaces what its config.json says.

    With `weight_bytes` the sizes of its parts are scaled to a weight file of that many bytes.
    """
    values = TINY_LLAMA | {"num_hidden_layers": layers} | config
    return parse_config(json.dumps(values).encode(), where="config.json", weight_bytes=weight_bytes)


def real_shape(name: str, *, weight_bytes: int = 0) -> ModelShape:
    """Return the shape of a published model, by the name of its file in tests/golden/models/configs."""
    text = (CONFIGS / f"{name}.json").read_bytes()
    return parse_config(text, where=f"{name}.json", weight_bytes=weight_bytes)
