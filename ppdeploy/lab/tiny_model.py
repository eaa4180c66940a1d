"""A tiny model with random weights for the lab: real files that vLLM loads, made in a second without torch.

The tokenizer beside this file was trained on a made-up corpus (2,048 byte-level BPE tokens). The text that the model
writes is noise, but always the same noise, so two ways to run it can be compared.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from statistics import NormalDist
from typing import Literal

_TOKENIZER = Path(__file__).parent / "tiny"
_VOCABULARY = 2048
_HEAD_DIM = 64
_HEADS = 4
_KV_HEADS = 2
# Wider than the usual 0.02: the greedy choice is then stable against the rounding of bfloat16.
_DEVIATION = 0.08


_Data = Callable[[str, tuple[int, ...]], bytes]
"""Returns the bytes of a tensor by its name and shape."""


def make_tiny_model(
    folder: Path,
    *,
    architecture: Literal["llama", "qwen3"] = "llama",
    layers: int = 4,
    hidden: int = 256,
    tied: bool = False,
    sharded: bool = False,
    seed: int = 0,
) -> Path:
    """Write a checkpoint with random bfloat16 weights (8.4 MB by default) into `folder` and return it.

    `tied` shares the embedding with the output head; `sharded` writes the same weights into a file for each
    layer. The same arguments give the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(_TOKENIZER / name, folder / name)
    config = _config(architecture, layers, hidden, tied)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    shapes = _shapes(architecture, layers, hidden, tied)
    if sharded:
        _write_shards(folder, shapes, seed)
    else:
        _write_safetensors(folder / "model.safetensors", shapes, _Weights(seed).tensor)
    return folder


def make_noise_model(folder: Path, *, layers: int, hidden: int, seed: int = 0) -> Path:
    """Write a checkpoint of plain noise into `folder` and return it: right in form, of any size, not worth loading.

    It has a file for each layer, of about 18 x hidden^2 bytes. For transfers, whose bytes must not compress.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config("llama", layers, hidden, False), indent=2) + "\n")
    shapes = _shapes("llama", layers, hidden, False)
    noise = random.Random(seed)  # noqa: S311  (the same bytes each time, no secret)
    _write_parts(folder, shapes, lambda _, shape: noise.randbytes(2 * prod(shape)))
    return folder


def _write_shards(folder: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """Write the same weights as into one file."""
    weights = _Weights(seed)
    data = {name: weights.tensor(name, shape) for name, shape in sorted(shapes.items())}
    _write_parts(folder, shapes, lambda name, _: data[name])


def _write_parts(folder: Path, shapes: Mapping[str, tuple[int, ...]], data: _Data) -> None:
    """Write one file for each layer and one for each end, and the index that names them."""
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in sorted(shapes.items()):
        part = name.split(".")[2] if ".layers." in name else "first" if "embed" in name else "last"
        parts.setdefault(part, {})[name] = shape
    files = {part: f"model-{place:05d}-of-{len(parts):05d}.safetensors" for place, part in enumerate(sorted(parts), 1)}
    for part, tensors in parts.items():
        _write_safetensors(folder / files[part], tensors, data)
    index = {
        "metadata": {"total_size": sum(2 * prod(shape) for shape in shapes.values())},
        "weight_map": {name: files[part] for part, tensors in parts.items() for name in tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _config(architecture: str, layers: int, hidden: int, tied: bool) -> dict[str, object]:
    return {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[architecture]],
        "model_type": architecture,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "dtype": "bfloat16",
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 4096,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": tied,
        "vocab_size": _VOCABULARY,
    }


def _shapes(architecture: str, layers: int, hidden: int, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by its name in a Hugging Face checkpoint."""
    queries, keys = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
    }
    if not tied:
        shapes["lm_head.weight"] = (_VOCABULARY, hidden)
    for index in range(layers):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.mlp.gate_proj.weight": (3 * hidden, hidden),
            f"{layer}.mlp.up_proj.weight": (3 * hidden, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, 3 * hidden),
        }
        if architecture == "qwen3":
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (_HEAD_DIM,) for part in "qk"}
    return shapes


def _bfloat16(value: float) -> bytes:
    """Return a number as bfloat16: the upper half of its float32, rounded to nearest."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x8000) >> 16)


class _Weights:
    """Random bfloat16 weights, one tensor after the other."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)  # noqa: S311  (the same weights each time, no secret)
        self._low, self._high = _normal_tables()

    def tensor(self, _name: str, shape: tuple[int, ...]) -> bytes:
        """Return the next tensor's bytes."""
        if len(shape) == 1:
            # The weights of a norm are 1, as at the start of training.
            return _bfloat16(1.0) * shape[0]
        drawn = self._source.randbytes(shape[0] * shape[1])
        data = bytearray(2 * len(drawn))
        data[0::2] = drawn.translate(self._low)
        data[1::2] = drawn.translate(self._high)
        return bytes(data)


def _normal_tables() -> tuple[bytes, bytes]:
    """Return the low and the high bytes of 256 normal quantiles: one random byte picks a weight."""
    normal = NormalDist(0, _DEVIATION)
    weights = [_bfloat16(normal.inv_cdf((byte + 0.5) / 256)) for byte in range(256)]
    return bytes(weight[0] for weight in weights), bytes(weight[1] for weight in weights)


def _write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], data: _Data) -> None:
    """Write the tensors in the safetensors format: header length, JSON header, data in the header's order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in sorted(shapes.items()):
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, shape in sorted(shapes.items()):
            stream.write(data(name, shape))
