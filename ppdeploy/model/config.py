"""Reading config.json: JSON that may hold anything, into numbers that are known to make sense."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

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
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk"),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "seq_length",
    ),
}

# No model comes near; above them a file is damaged or hostile, and the plan's tables would fill the memory.
_LIMITS: Mapping[str, int] = {
    "num_hidden_layers": 2_000,
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "num_experts": 1 << 16,
    "head_dim": 1 << 16,
    "max_position_embeddings": 1 << 40,
    "num_nextn_predict_layers": 100,
    "mtp_num_hidden_layers": 100,
}
_LIMIT = 1 << 26

# What a configuration may leave out because transformers' class for the family fills it in (read from transformers
# 5.19, configuration_*.py). Only families whose published configurations do leave numbers out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256_000},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8},
    "deepseek_v3": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256},
    "gpt_oss": {"head_dim": 64},
    "glm4": {"head_dim": 128},
}

_DTYPES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
"""Bytes of a value, for the number formats that a checkpoint's unquantised weights come in."""


def parse_json(text: bytes, where: str) -> Any:
    """Return the JSON value in `text`; `where` names the file in the InputError when it is not JSON."""
    try:
        return json.loads(text.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as exc:
        raise InputError("the file is not UTF-8 text", where=where, remedy="fetch it again") from exc
    except json.JSONDecodeError as exc:
        what = f"the file is not valid JSON (line {exc.lineno}: {exc.msg})"
        raise InputError(what, where=where, remedy="it may be truncated; fetch it again") from exc
    except RecursionError as exc:
        raise InputError("the file nests values too deep", where=where, remedy="fetch it again") from exc
    except ValueError as exc:  # NaN and Infinity, and numbers of thousands of digits
        raise InputError(f"the file holds a number that is none ({exc})", where=where, remedy="fetch it again") from exc


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class Basics(NamedTuple):
    """The numbers that every language model has."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


class Reader:
    """A configuration or a section of it, which answers with checked values or an InputError."""

    def __init__(self, config: Mapping[str, Any], section: Mapping[str, Any], where: str) -> None:
        self.config, self.section, self.where = config, section, where
        kind = section.get("model_type", config.get("model_type"))
        self.model_type: str | None = kind if isinstance(kind, str) else None
        self._defaults = _DEFAULTS.get(self.model_type or "", {})

    def has(self, field: str) -> bool:
        """Whether the configuration says anything under this name."""
        return self._find(field)[1] is not None

    def _find(self, field: str) -> tuple[str, Any]:
        for source in (self.section, self.config, self._defaults):
            for name in _NAMES.get(field, (field,)):
                value = source.get(name)
                if value is not None:
                    return name, value
        return field, None

    def wrong(self, name: str, value: Any, expected: str) -> InputError:
        """Return the error for a value that is not what it must be."""
        what = f"config.json says {name} = {_shown(value)}, which is not {expected}"
        return InputError(what, where=self.where, remedy="fetch the checkpoint's config.json again")

    def number_or_none(self, field: str, *, least: int = 1) -> int | None:
        """Return a whole number from `least` up to what any model has; None when nothing is said."""
        name, value = self._find(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, value, f"a whole number above {least - 1}" if least else "a whole number")
        limit = _LIMITS.get(field, _LIMIT)
        if value > limit:
            raise self.wrong(name, value, f"a number that any model has (at most {limit})")
        return value

    def number(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number; without a default it must be there."""
        value = self.number_or_none(field, least=least)
        if value is None:
            value = default
        if value is None:
            raise InputError(
                f"config.json does not say {_NAMES.get(field, (field,))[0]}",
                where=self.where,
                remedy="give the folder of a complete Hugging Face checkpoint of a language model",
            )
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Return a truth value."""
        name, value = self._find(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text_or_none(self, field: str) -> str | None:
        """Return a word; None when nothing is said."""
        name, value = self._find(field)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a word")
        return value

    def numbers(self, field: str) -> list[int]:
        """Return a list of whole numbers, empty when nothing is said."""
        name, value = self._find(field)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise self.wrong(name, value, "a list of whole numbers")
        return value

    def words(self, field: str) -> list[str]:
        """Return a list of words, empty when nothing is said."""
        name, value = self._find(field)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.wrong(name, value, "a list of words")
        return value

    def below(self, name: str) -> Reader | None:
        """Return the section of that name as a reader of its own; None when there is none."""
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, value, "a section")
        return Reader(value, value, self.where)

    def basics(self) -> Basics:
        """Return the numbers that every language model has."""
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        kv_heads = self.number("num_key_value_heads", heads)
        if kv_heads > heads:
            raise self.wrong("num_key_value_heads", kv_heads, f"at most the {heads} query heads")
        return Basics(
            layers=self.number("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=self.number("head_dim", max(1, hidden // heads)),
            vocab=self.number("vocab_size"),
        )

    def dtype(self) -> str | None:
        """Return the number format of weights that are not quantised, without `torch.`; None when nothing is said."""
        for source in (self.section, self.config):
            for name in ("dtype", "torch_dtype"):
                value = source.get(name)
                if value is None:
                    continue
                if not isinstance(value, str):
                    raise self.wrong(name, value, "the name of a number format")
                short = value.removeprefix("torch.")
                if short not in _DTYPES:
                    known = ", ".join(sorted(set(_DTYPES) - {"half", "float"}))
                    raise self.wrong(name, value, f"a number format that vLLM loads ({known})")
                return short
        return None

    def tied(self) -> bool | None:
        """Return whether the output head is the embedding; None when nothing is said."""
        for source in (self.section, self.config):
            value = source.get("tie_word_embeddings")
            if value is not None:
                if not isinstance(value, bool):
                    raise self.wrong("tie_word_embeddings", value, "true or false")
                return value
        return None

    def quantization(self) -> Mapping[str, Any] | None:
        """Return the section on quantisation, None when there is none."""
        for source in (self.config, self.section):
            for name in ("quantization_config", "compression_config"):
                value = source.get(name)
                if value is None:
                    continue
                if not isinstance(value, dict):
                    raise self.wrong(name, value, "a section")
                if value:
                    return value
        return None


def open_config(text: bytes, where: str) -> Reader:
    """Return the reader of a config.json, on the section of the language model.

    Raises InputError when the file is not a JSON object.
    """
    config = parse_json(text, where)
    if not isinstance(config, dict):
        what = f"config.json holds {_kind(config)}, not an object"
        raise InputError(what, where=where, remedy="give the folder of a Hugging Face checkpoint")
    return reader_of(config, where)


def reader_of(config: dict[str, Any], where: str) -> Reader:
    """Return the reader of a configuration that was read already, on the section of the language model."""
    return Reader(config, _text_section(config), where)


def architectures(reader: Reader) -> tuple[str, ...]:
    """Return the names of the model class, of which there is at least one."""
    names = reader.config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise InputError(
            "config.json names no model class under `architectures`",
            where=reader.where,
            remedy="give a complete checkpoint (an adapter or a tokenizer alone cannot be served)",
        )
    return tuple(names)


def loaded_bytes(dtype: str | None) -> int:
    """Return the bytes of a value in GPU memory: vLLM loads float32 checkpoints as 16 bits, unless told otherwise.

    vLLM 0.32 and 0.33, vllm/config/model.py, `_resolve_auto_dtype`.
    """
    return min(2, _DTYPES.get(dtype or "bfloat16", 2))


def _text_section(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the configuration that describes the language model."""
    for name in _TEXT_SECTIONS:
        section: Any = config
        for step in name.split("."):
            section = section.get(step) if isinstance(section, dict) else None
        if isinstance(section, dict) and any(key in section for key in _NAMES["num_hidden_layers"]):
            return section
    return config


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = _kind(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "something else")
