"""The shape of a checkpoint from its configuration and what is known of its weight files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from ppdeploy.errors import InputError
from ppdeploy.model.checkpoint import (
    Tensor,
    by_tensors,
    by_total,
    difference_note,
    has_mtp,
    sorted_by_place,
    spread,
    tower_from_rest,
    without_mtp,
)
from ppdeploy.model.config import architectures, loaded_bytes, open_config, parse_json
from ppdeploy.model.families import blueprint
from ppdeploy.model.measure import Sizes, measure
from ppdeploy.model.quantisation import Quantisation, read_quantisation
from ppdeploy.model.shape import ModelShape


def parse_config(
    text: bytes,
    *,
    where: str,
    weight_bytes: int,
    tensors: Mapping[str, Tensor] | None = None,
    tensor_names: Iterable[str] | None = None,
    quantization: bytes | None = None,
) -> ModelShape:
    """Read a checkpoint's config.json and return its shape.

    `where` names the file in errors; `weight_bytes` is the size of the weight files that go with it, 0 when there
    are none: then all sizes are computed. `tensors` are those in the headers of the weight files, where they are at
    hand, `tensor_names` the names in the index. `quantization` is the content of hf_quant_config.json, where NVIDIA's
    tools write what config.json does not have.

    Raises InputError when the file is not a JSON object, lacks a number that a plan cannot do without, or holds one
    that no model has.
    """
    reader = open_config(text, where)
    names = architectures(reader)
    basics = reader.basics()
    dtype = reader.dtype()
    plain = loaded_bytes(dtype)
    section = reader.quantization()
    if section is None and quantization is not None:
        section = _nvidia(quantization, where)
    quantisation = read_quantisation(section, where)
    model = blueprint(reader, names, basics)
    sizes = measure(model, quantisation, basics.layers, plain)
    notes = [f"{model.unsure}: sizes are estimated" if model.unsure else "", _unknown_method(quantisation)]
    sizes, said = _reconciled(
        sizes,
        _Files(weight_bytes, tensors or {}, frozenset(tensor_names or tensors or ()), dtype in ("float32", "float")),
        known=not model.unsure,
        tower=bool(model.unsure) and bool(reader.below("vision_config") or reader.below("audio_config")),
        bits=8 * plain if quantisation.method is None else (quantisation.default.bits if quantisation.default else 8),
    )
    notes.append(said)
    expert_layer = next((layer for layer in sizes.layers if layer.experts), None)
    return ModelShape(
        architectures=names,
        model_type=(kind if isinstance(kind := reader.config.get("model_type"), str) else None),
        num_hidden_layers=basics.layers,
        hidden_size=basics.hidden,
        num_attention_heads=basics.heads,
        num_key_value_heads=basics.kv_heads,
        head_dim=basics.head_dim,
        vocab_size=basics.vocab,
        max_position_embeddings=reader.number_or_none("max_position_embeddings"),
        dtype=dtype,
        tie_word_embeddings=reader.tied(),
        quantization=quantisation.method,
        weight_bytes=weight_bytes,
        intermediate_size=reader.number_or_none("intermediate_size", least=0),
        moe_intermediate_size=(
            None
            if expert_layer is None
            else reader.number_or_none("moe_intermediate_size", least=0) or reader.number_or_none("intermediate_size")
        ),
        num_experts=expert_layer.experts if expert_layer else 0,
        experts_per_token=expert_layer.experts_per_token if expert_layer else 0,
        linear_key_heads=(
            reader.number("linear_num_key_heads", 16)
            if any(layer.attention == "linear" for layer in sizes.layers)
            else 0
        ),
        quantization_block=quantisation.block,
        exact=not model.unsure and quantisation.known,
        note=". ".join(note for note in notes if note),
        **{field.name: getattr(sizes, field.name) for field in fields(Sizes)},
    )


def _nvidia(text: bytes, where: str) -> Mapping[str, object] | None:
    """Return the section of hf_quant_config.json that says how the weights are stored."""
    value = parse_json(text, f"hf_quant_config.json beside {where}")
    section = value.get("quantization") if isinstance(value, dict) else None
    if section is not None and not isinstance(section, dict):
        remedy = "fetch it again"
        raise InputError("hf_quant_config.json has no section `quantization`", where=where, remedy=remedy)
    return {"quant_method": "modelopt", **section} if section else None


def _unknown_method(quantisation: Quantisation) -> str:
    if quantisation.known:
        return ""
    return f"the quantization {quantisation.method} is not known here: sizes are estimated"


class _Files:
    """What is known of the weight files."""

    def __init__(self, total: int, tensors: Mapping[str, Tensor], names: frozenset[str], halve: bool) -> None:
        self.tensors, self.names, self.halve = tensors, names, halve
        # 32-bit values are loaded as 16 bits, so a total of theirs is twice what the memory takes.
        self.loaded = total // 2 if halve else total


def _reconciled(sizes: Sizes, files: _Files, *, known: bool, tower: bool, bits: int) -> tuple[Sizes, str]:
    """Return the sizes as the files have them, and the sentence to say about it."""
    if files.names and not has_mtp(files.names, len(sizes.layers)):
        sizes = without_mtp(sizes)
    if not files.loaded:
        return sizes, ""
    stored = sorted_by_place(files.tensors, len(sizes.layers), halve=files.halve) if files.tensors else None
    if stored is not None:
        found, off = by_tensors(sizes, stored)
        return found, difference_note(off) if known else "bytes are those of the weight files, layer by layer"
    if tower:
        return tower_from_rest(sizes, files.loaded), "what the weight files hold beyond it is taken for its tower"
    if not known:
        return spread(sizes, files.loaded, bits=bits), "the weight files' bytes are spread evenly over the layers"
    found, off = by_total(sizes, files.loaded)
    return found, difference_note(off)
