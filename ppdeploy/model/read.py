"""The shape of a checkpoint from its configuration and what is known of its weight files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from ppdeploy.errors import InputError
from ppdeploy.model.checkpoint import (
    Tensor,
    as_loaded,
    by_tensors,
    by_total,
    difference_note,
    has_mtp,
    sorted_by_place,
    spread,
    tower_from_rest,
    without_mtp,
)
from ppdeploy.model.config import Basics, Reader, architectures, loaded_bytes, open_config, parse_json, reader_of
from ppdeploy.model.families import blueprint
from ppdeploy.model.length import Lengths, lengths
from ppdeploy.model.loading import WIDE, Loading, overridden
from ppdeploy.model.measure import Sizes, measure
from ppdeploy.model.parts import Blueprint
from ppdeploy.model.quantisation import Quantisation, cache_dtype, read_quantisation
from ppdeploy.model.shape import ModelShape


def parse_config(
    text: bytes,
    *,
    where: str,
    weight_bytes: int,
    tensors: Mapping[str, Tensor] | None = None,
    tensor_names: Iterable[str] | None = None,
    quantization: bytes | None = None,
    loading: Loading | None = None,
) -> ModelShape:
    """Read a checkpoint's config.json and return its shape as it is loaded.

    `where` names the file in errors; `weight_bytes` is the size of the weight files that go with it, 0 when there
    are none: then all sizes are computed. `tensors` are those in the headers of the weight files, where they are at
    hand, `tensor_names` the names in the index. `quantization` is the content of hf_quant_config.json, where NVIDIA's
    tools write what config.json does not have. `loading` is what vLLM is told to change while it loads.

    Raises InputError when the file is not a JSON object, lacks a number that a plan cannot do without, or holds one
    that no model has.
    """
    loading = loading or Loading()
    reader = open_config(text, where)
    section = _nvidia(quantization, where) if quantization is not None else None
    stored = _stored(reader, loading, section)
    notes = [f"{stored.model.unsure}: sizes are estimated" if stored.model.unsure else ""]
    notes.append(_unknown_method(stored.quantisation))
    files = _Files(weight_bytes, tensors or {}, frozenset(tensor_names or tensors or ()), stored.dtype in WIDE)
    sizes, said = _reconciled(stored, files)
    told = stored
    if loading.overrides:
        told = _told(reader, loading, section)
        if told.sizes != stored.sizes:
            # The files are those of the model without the changes, so nothing can be held against them.
            sizes, said = told.sizes, "sizes are computed with hf-overrides" if files.loaded else ""
    notes.append(said)
    quantisation = loading.quantised(told.quantisation)
    model = told.model
    if model.vision and set(model.vision.inputs) <= set(loading.left_out):
        model = replace(model, first=[], vision=None)
    layers, plain = told.basics.layers, loading.plain_bytes(told.dtype)
    sizes = as_loaded(sizes, told.sizes, measure(model, quantisation, layers, plain))
    return _shape(told, model, quantisation, sizes, weight_bytes, ". ".join(note for note in notes if note))


@dataclass(frozen=True)
class _Model:
    """What a configuration says, with its sizes as they are stored."""

    reader: Reader
    names: tuple[str, ...]
    basics: Basics
    dtype: str | None
    model: Blueprint
    quantisation: Quantisation
    cache_dtype: str | None
    lengths: Lengths
    sizes: Sizes


def _read(reader: Reader, beside: Mapping[str, object] | None) -> _Model:
    """Read a configuration; `beside` is what another file says of the quantisation where config.json is silent."""
    names = architectures(reader)
    basics = reader.basics()
    dtype = reader.dtype()
    section = reader.quantization() or beside
    quantisation = read_quantisation(section, reader.where)
    model = blueprint(reader, names, basics)
    sizes = measure(model, quantisation, basics.layers, loaded_bytes(dtype))
    return _Model(reader, names, basics, dtype, model, quantisation, cache_dtype(section), lengths(reader), sizes)


def _stored(reader: Reader, loading: Loading, beside: Mapping[str, object] | None) -> _Model:
    """Read the configuration as it is, or, where that alone is incomplete, with what `hf-overrides` adds to it."""
    try:
        return _read(reader, beside)
    except InputError:
        if not loading.overrides:
            raise
        return _told(reader, loading, beside)


def _told(reader: Reader, loading: Loading, beside: Mapping[str, object] | None) -> _Model:
    """Read the configuration with what `hf-overrides` replaces in it; InputError where it then makes no sense."""
    try:
        return _read(reader_of(overridden(reader.config, loading.overrides), reader.where), beside)
    except InputError as error:
        raise InputError(
            f"with hf-overrides, {error.what}",
            where=error.where,
            remedy="correct hf-overrides in ppdeploy_vllm_args",
        ) from error


def _shape(
    of: _Model, model: Blueprint, quantisation: Quantisation, sizes: Sizes, weight_bytes: int, note: str
) -> ModelShape:
    reader, basics = of.reader, of.basics
    expert_layer = next((layer for layer in sizes.layers if layer.experts), None)
    return ModelShape(
        architectures=of.names,
        model_type=(kind if isinstance(kind := reader.config.get("model_type"), str) else None),
        num_hidden_layers=basics.layers,
        hidden_size=basics.hidden,
        num_attention_heads=basics.heads,
        num_key_value_heads=basics.kv_heads,
        head_dim=basics.head_dim,
        vocab_size=basics.vocab,
        max_position_embeddings=of.lengths.longest,
        default_length=of.lengths.default,
        dtype=of.dtype,
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
        mtp_layers=_mtp_layers(reader) if sizes.mtp_parameters else 0,
        vision=model.vision,
        cache_dtype=of.cache_dtype,
        exact=not model.unsure and quantisation.known,
        note=note,
        **{field.name: getattr(sizes, field.name) for field in fields(Sizes)},
    )


def _mtp_layers(reader: Reader) -> int:
    """Return how many layers for multi-token prediction a checkpoint has that has any."""
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return next((count for name in names if (count := reader.number_or_none(name, least=0))), 1)


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


def _reconciled(of: _Model, files: _Files) -> tuple[Sizes, str]:
    """Return the sizes of a model as the files have them, and the sentence to say about it."""
    sizes, known = of.sizes, not of.model.unsure
    tower = not known and bool(of.reader.below("vision_config") or of.reader.below("audio_config"))
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
        default = of.quantisation.default
        bits = 8 * loaded_bytes(of.dtype) if of.quantisation.method is None else default.bits if default else 8
        return spread(sizes, files.loaded, bits=bits), "the weight files' bytes are spread evenly over the layers"
    found, off = by_total(sizes, files.loaded)
    return found, difference_note(off)
