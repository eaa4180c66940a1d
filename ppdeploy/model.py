"""What a checkpoint's config.json says about the model: the shape that the plan splits and sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ppdeploy.errors import InputError

# Multimodal checkpoints keep the language model's numbers in a section of their own; the names in use, in the
# order in which they are tried. A dot leads into a section of a section (Qwen's omni models).
_TEXT_SECTIONS = ("text_config", "thinker_config.text_config", "llm_config", "language_config")

# The same number under the names that model families gave it. The first is today's.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "seq_length",
    ),
}


class ModelShape(BaseModel):
    """The numbers of a checkpoint that decide how it is split over nodes and what it needs there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architectures: tuple[str, ...] = Field(description="vLLM's names of the model class, as in config.json")
    model_type: str | None = Field(description="transformers' name of the model family")
    num_hidden_layers: int = Field(description="layers of the language model, the ones a pipeline splits")
    hidden_size: int = Field(description="values of one token's hidden state, what a handoff carries")
    num_attention_heads: int = Field(description="query heads; tensor parallelism divides them")
    num_key_value_heads: int = Field(description="key and value heads; equal to the query heads without GQA")
    head_dim: int = Field(description="values of one head")
    vocab_size: int = Field(description="rows of the embedding")
    max_position_embeddings: int | None = Field(description="longest context in tokens; None: not said")
    dtype: str | None = Field(description="the checkpoint's number format, such as bfloat16; None: not said")
    tie_word_embeddings: bool | None = Field(
        description="the output head is the embedding; None: not said, the architecture's default holds"
    )
    quantization: str | None = Field(description="quantization method, such as fp8 or awq; None: none")
    weight_bytes: int = Field(description="bytes of the weight files; 0 when there are none (dummy weights)")


def parse_json(text: bytes, where: str) -> Any:
    """Return the JSON value in `text`; `where` names the file in the InputError when it is not JSON."""
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise InputError("the file is not UTF-8 text", where=where, remedy="fetch it again") from exc
    except json.JSONDecodeError as exc:
        what = f"the file is not valid JSON (line {exc.lineno}: {exc.msg})"
        raise InputError(what, where=where, remedy="it may be truncated; fetch it again") from exc


def parse_config(text: bytes, *, where: str, weight_bytes: int) -> ModelShape:
    """Read a checkpoint's config.json and return its shape.

    `where` names the file in errors; `weight_bytes` is the size of the weight files that go with it. Raises
    InputError when the file is not a JSON object, or lacks a number that a plan cannot do without.
    """
    config = parse_json(text, where)
    if not isinstance(config, dict):
        what = f"config.json holds {_kind(config)}, not an object"
        raise InputError(what, where=where, remedy="give the folder of a Hugging Face checkpoint")
    section = _text_section(config)
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or not architectures
        or not all(isinstance(name, str) and name for name in architectures)
    ):
        raise InputError(
            "config.json names no model class under `architectures`",
            where=where,
            remedy="give a complete checkpoint (an adapter or a tokenizer alone cannot be served)",
        )
    heads = _number(section, config, "num_attention_heads", where)
    hidden = _number(section, config, "hidden_size", where)
    kv_heads = _number_or_none(section, config, "num_key_value_heads", where)
    head_dim = _number_or_none(section, config, "head_dim", where)
    model_type = config.get("model_type")
    tied = section.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return ModelShape(
        architectures=tuple(architectures),
        model_type=model_type if isinstance(model_type, str) else None,
        num_hidden_layers=_number(section, config, "num_hidden_layers", where),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads if kv_heads is not None else heads,
        head_dim=head_dim if head_dim is not None else max(1, hidden // heads),
        vocab_size=_number(section, config, "vocab_size", where),
        max_position_embeddings=_number_or_none(section, config, "max_position_embeddings", where),
        dtype=_dtype(section, config),
        tie_word_embeddings=tied if isinstance(tied, bool) else None,
        quantization=_quantization(section, config),
        weight_bytes=weight_bytes,
    )


def _text_section(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the configuration that describes the language model."""
    for name in _TEXT_SECTIONS:
        section: Any = config
        for step in name.split("."):
            section = section.get(step) if isinstance(section, dict) else None
        if isinstance(section, dict) and any(key in section for key in _NAMES["num_hidden_layers"]):
            return section
    return config


def _number_or_none(section: dict[str, Any], config: dict[str, Any], field: str, where: str) -> int | None:
    for source in (section, config):
        for name in _NAMES[field]:
            value = source.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                what = f"config.json says {name} = {json.dumps(value)}, which is not a whole number above 0"
                raise InputError(what, where=where, remedy="fetch the checkpoint's config.json again")
            return value
    return None


def _number(section: dict[str, Any], config: dict[str, Any], field: str, where: str) -> int:
    value = _number_or_none(section, config, field, where)
    if value is None:
        raise InputError(
            f"config.json does not say {field}",
            where=where,
            remedy="give the folder of a complete Hugging Face checkpoint of a language model",
        )
    return value


def _dtype(section: dict[str, Any], config: dict[str, Any]) -> str | None:
    for source in (section, config):
        for name in ("dtype", "torch_dtype"):
            value = source.get(name)
            if isinstance(value, str):
                return value.removeprefix("torch.")
    return None


def _quantization(section: dict[str, Any], config: dict[str, Any]) -> str | None:
    for source in (config, section):
        for name in ("quantization_config", "compression_config"):
            quantization = source.get(name)
            if isinstance(quantization, dict) and quantization:
                method = quantization.get("quant_method") or quantization.get("quant_algo")
                return method.lower() if isinstance(method, str) else "unknown"
    return None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "something else")
