"""How many bytes a quantised weight takes, and which weights a quantisation leaves alone.

Layouts are those that the methods store in safetensors, as vLLM 0.33 reads them (vllm/model_executor/layers/
quantization/: fp8.py, auto_awq.py, auto_gptq.py, compressed_tensors/, modelopt.py, mxfp4.py, bitsandbytes.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ppdeploy.errors import InputError
from ppdeploy.model.parts import Part

_TOWERS = ("visual.", "vision_tower.", "multi_modal_projector.", "audio_tower.")
# Names that vLLM gives to matrices which it loads as one; lists of exceptions use either.
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("in_proj_a", "in_proj_b"), "in_proj_ba"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
}
_PREFIX = re.compile(r"(model\.|language_model\.)+")
_PREFIXES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")


@dataclass(frozen=True)
class Format:
    """How a matrix is stored: bits of a value, and what comes with them."""

    bits: int
    group: int | None = None
    """Inputs that share a scale; -1: all of a row; None: one scale for the whole matrix, in `per_matrix`."""
    block_rows: int = 1
    """Rows that share a scale too."""
    scale_bytes: int = 2
    zeros: bool = False
    """A zero point for each scale, of `bits` bits."""
    per_column: int = 0
    per_matrix: int = 0

    def bytes_of(self, rows: int, columns: int) -> int:
        """Return the bytes of one matrix."""
        total = -(-rows * columns * self.bits // 8) + columns * self.per_column + self.per_matrix
        if self.group is not None:
            scales = -(-rows // self.block_rows) * (1 if self.group < 0 else -(-columns // self.group))
            total += scales * self.scale_bytes + (-(-scales * self.bits // 8) if self.zeros else 0)
        return total


class Names:
    """A list of module names from a configuration: names, `*` patterns and `re:` expressions.

    A name stands for all below it, and may be the last steps of a longer one ("lm_head", "mlp.gate"), unless the list
    is `strict`: compressed-tensors lists modules that hold quantised ones without meaning those.
    """

    def __init__(self, entries: Iterable[str], *, strict: bool = False) -> None:
        self._strict = strict
        self._plain: set[str] = set()
        self._patterns: list[re.Pattern[str]] = []
        self._globs: list[re.Pattern[str]] = []
        for entry in entries:
            if entry.startswith("re:"):
                self._patterns.append(re.compile(entry[3:]))
            elif "*" in entry:
                bare = _PREFIX.sub("", entry, count=1)
                # A pattern names a module, and all that lies below it.
                pattern = ".*".join(map(re.escape, re.split(r"\*+", bare)))
                self._globs.append(re.compile(rf"{pattern}(\..*)?\Z"))
            elif entry:
                self._plain.add(_PREFIX.sub("", entry, count=1) or entry)

    def __bool__(self) -> bool:
        return bool(self._plain or self._patterns or self._globs)

    def __contains__(self, name: object) -> bool:
        return any(self._holds(variant) for variant in _variants(str(name)))

    def _holds(self, name: str) -> bool:
        if name in self._plain:
            return True
        if self._plain and not self._strict:
            steps = name.split(".")
            count = len(steps)
            if any(
                ".".join(steps[start:stop]) in self._plain
                for start in range(count)
                for stop in range(start + 1, count + 1)
            ):
                return True
        if any(pattern.match(name) for pattern in self._globs):
            return True
        return any(pattern.match(prefix + name) for pattern in self._patterns for prefix in _PREFIXES)


def _variants(name: str) -> Iterator[str]:
    yield name
    head, _, tail = name.rpartition(".")
    if tail in _FUSED:
        yield f"{head}.{_FUSED[tail]}" if head else _FUSED[tail]


@dataclass(frozen=True)
class Quantisation:
    """What a checkpoint's quantisation does to each part of the model."""

    method: str | None
    """As vLLM names it, which is mostly what config.json says in small letters; None: not quantised."""
    default: Format | None = None
    """Of every linear layer that nothing else is said of; None: only of those named."""
    named: tuple[tuple[Names, Format | None], ...] = ()
    """Modules with a format of their own, the first that fits; None: left alone."""
    ignored: Names | None = None
    towers: bool = True
    """Whether the towers for images and sound are quantised too."""
    head: bool = False
    """Whether the output head is, unless it is named."""
    experts_only: bool = False
    known: bool = True
    """False: the method's layout is not known here, the bytes are a guess."""

    @property
    def block(self) -> int | None:
        """Values of a matrix's side that share a scale, where a slice must not cut; None: no such limit."""
        formats = [self.default, *(found for _, found in self.named)]
        groups = [found.group for found in formats if found is not None and found.group is not None and found.group > 0]
        return max(groups, default=None)

    def format_of(self, part: Part) -> Format | None:
        """Return how a part is stored; None: as plain numbers of the checkpoint's format."""
        if self.method is None or part.kind not in ("linear", "head"):
            return None
        if self.experts_only and not part.routed:
            return None
        if not self.towers and part.name.startswith(_TOWERS):
            return None
        if self.ignored is not None and part.name in self.ignored:
            return None
        for names, found in self.named:
            if part.name in names:
                return found
        return None if part.kind == "head" and not self.head else self.default

    def bytes_of(self, part: Part, plain: int) -> int:
        """Return the bytes of a part, all copies together; `plain` is what a value takes that is not quantised."""
        found = self.format_of(part)
        if found is None:
            return part.values * plain
        return found.bytes_of(part.rows, part.columns) * part.copies


class _Settings:
    """The section on quantisation, with errors that name the file."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def wrong(self, name: str, expected: str) -> InputError:
        return InputError(
            f"config.json: {name} of the quantization is not {expected}",
            where=self.where,
            remedy="fetch the checkpoint's config.json again",
        )

    def number(self, names: tuple[str, ...], default: int | None, allowed: range) -> int | None:
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
                raise self.wrong(name, f"a whole number from {allowed.start} to {allowed.stop - 1}")
            return value
        return default

    def bits(self, default: int) -> int:
        return self.number(("bits", "w_bit", "num_bits"), default, range(1, 17)) or default

    def group(self, default: int) -> int:
        value = self.number(("group_size", "q_group_size"), default, range(-1, 1 << 20))
        return default if value is None else value or -1

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def words(self, *names: str) -> list[str]:
        found: list[str] = []
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
                raise self.wrong(name, "a list of names")
            found += value
        return found

    def names(self, entries: Iterable[str], name: str, *, strict: bool = False) -> Names:
        try:
            return Names(entries, strict=strict)
        except re.error as exc:
            raise self.wrong(name, "a list of names and regular expressions") from exc

    def ignored(self, *names: str, strict: bool = False) -> Names | None:
        entries = self.words(*names)
        # With many of them the search for a match could take for ever.
        if any(entry.count("*") > 8 and not entry.startswith("re:") for entry in entries):
            raise self.wrong(" / ".join(names), "a list of names with few `*`")
        return self.names(entries, " / ".join(names), strict=strict) if entries else None

    def section(self, name: str) -> _Settings | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "a section")
        return _Settings(value, self.where)


def read_quantisation(values: Mapping[str, Any] | None, where: str) -> Quantisation:
    """Return what the section on quantisation of a config.json says; `where` names the file in errors.

    `values` may be that of hf_quant_config.json too, NVIDIA's own file. An unknown method gives a guess with `known`
    False; values of the wrong kind raise InputError.
    """
    if not values:
        return Quantisation(method=None)
    settings = _Settings(values, where)
    method = values.get("quant_method")
    if method is not None and not isinstance(method, str):
        raise settings.wrong("quant_method", "a word")
    if not method and "quant_algo" in values:
        method = "modelopt"
    method = (method or ("compressed-tensors" if "config_groups" in values else "unknown")).lower()
    for names, reader in _READERS:
        if method in names:
            return reader(settings, method)
    guess = Format(settings.bits(8), group=-1)
    return Quantisation(method, guess, ignored=settings.ignored("modules_to_not_convert", "ignore"), known=False)


def cache_dtype(values: Mapping[str, Any] | None) -> str | None:
    """Return the format of the KV cache that the section on quantisation asks for; None: the model's own.

    vLLM takes it where nobody says another (0.32.0, vllm/utils/torch_utils.py, `get_kv_cache_quant_algo_string`, for
    NVIDIA's tools; vllm/model_executor/layers/attention/attention.py for compressed-tensors).
    """
    method = str((values or {}).get("quant_method") or "").lower()
    scheme = (values or {}).get("kv_cache_scheme")
    if method.startswith("compressed"):
        return "fp8" if isinstance(scheme, dict) and scheme else None
    if not method.startswith("modelopt") or values is None:
        return None
    algorithm = scheme or values.get("kv_cache_quant_algo")
    if isinstance(algorithm, dict):
        bits = algorithm.get("num_bits") if algorithm.get("type") == "float" else None
        static = algorithm.get("dynamic") is False
        return "fp8" if bits == 8 and static else "nvfp4" if bits == 4 else None
    word = algorithm.lower() if isinstance(algorithm, str) else ""
    return word if word in ("fp8", "nvfp4") else None


def _fp8(settings: _Settings, method: str) -> Quantisation:
    block = settings.values.get("weight_block_size")
    static = 4 if settings.values.get("activation_scheme") == "static" else 0
    if block is None:
        # fbgemm's scales are one for each row, in float32.
        form = Format(8, group=-1, scale_bytes=4) if method == "fbgemm_fp8" else Format(8, per_matrix=4 + static)
    else:
        rows, columns = _block(settings, block, "weight_block_size")
        form = Format(8, group=columns, block_rows=rows, scale_bytes=4)
    return Quantisation(method, form, ignored=settings.ignored("modules_to_not_convert", "ignored_layers"))


def _block(settings: _Settings, block: Any, name: str) -> tuple[int, int]:
    fits = isinstance(block, list) and len(block) == 2
    if not fits or not all(isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1 << 20 for n in block):
        raise settings.wrong(name, "two whole numbers")
    return block[0], block[1]


def _awq(settings: _Settings, method: str) -> Quantisation:
    form = Format(settings.bits(4), group=settings.group(128), zeros=settings.flag("zero_point", True))
    return Quantisation(method, form, ignored=settings.ignored("modules_to_not_convert"), towers=False)


def _gptq(settings: _Settings, method: str) -> Quantisation:
    # Zero points and the order of the inputs (4 bytes each) are stored whether they are used or not.
    def form(of: _Settings, base: Format | None) -> Format | None:
        bits = of.bits(base.bits if base else 4)
        group = of.group(base.group if base and base.group is not None else 128)
        return None if bits == 16 else Format(bits, group=group, zeros=True, per_column=4)

    default = form(settings, None)
    named: list[tuple[Names, Format | None]] = []
    dynamic = settings.section("dynamic") or settings.section("extra_config")
    for rule in dynamic.values if dynamic else ():
        regular = rule.startswith(("-:", "+:"))
        entry = rule[2:] if regular else rule
        of = None if rule.startswith("-:") else dynamic and dynamic.section(rule)
        names = settings.names([f"re:{entry}" if regular or dynamic is None else entry], "dynamic")
        named.append((names, form(of, default) if of else None))
    ignored = settings.ignored("modules_to_not_convert")
    head = settings.flag("lm_head")
    return Quantisation(method, default, named=tuple(named), ignored=ignored, towers=False, head=head)


def _compressed(settings: _Settings, method: str) -> Quantisation:
    groups = settings.section("config_groups")
    strict = method.startswith("compressed")
    whole = settings.values.get("format")
    named: list[tuple[Names, Format | None]] = []
    default: Format | None = None
    for name in groups.values if groups else ():
        group = groups.section(name) if groups else None
        weights = group.section("weights") if group else None
        if group is None or weights is None:
            continue
        form = _compressed_format(weights, group.values.get("format") or whole)
        targets = group.words("targets")
        # A class of layers instead of names; without targets (NVIDIA's tool) all linear layers are meant.
        if not targets or "Linear" in targets:
            default = form
        if special := [target for target in targets if target not in ("Linear", "FusedMoE")]:
            named.append((settings.names(special, "targets", strict=strict), form))
    ignored = settings.ignored("ignore", "exclude_modules", strict=strict)
    # The head is a linear layer too; those that leave it alone say so.
    return Quantisation(method, default, named=tuple(named), ignored=ignored, head=True)


def _compressed_format(weights: _Settings, form: Any) -> Format:
    bits = weights.bits(8)
    kind = weights.values.get("type")
    strategy = weights.values.get("strategy")
    group = weights.number(("group_size",), None, range(-1, 1 << 20)) or None
    if bits == 4 and kind == "float":
        # nvfp4: a scale of one byte for 16 values, and two for the matrix; mxfp4: one byte for 32 values.
        mx = "mxfp4" in str(form)
        return Format(4, group=group or (32 if mx else 16), scale_bytes=1, per_matrix=0 if mx else 8)
    if (block := weights.values.get("block_structure")) is not None:
        rows, columns = _block(weights, block, "block_structure")
        return Format(bits, group=columns, block_rows=rows)
    if strategy == "group" or group:
        zeros = not weights.flag("symmetric", True)
        ordered = 4 if weights.values.get("actorder") in ("group", True) else 0
        return Format(bits, group=group or 128, zeros=zeros, per_column=ordered, per_matrix=16)
    if strategy == "channel":
        return Format(bits, group=-1, per_matrix=16 if bits < 8 else 0)
    return Format(bits, per_matrix=8)


def _modelopt(settings: _Settings, method: str) -> Quantisation:
    algorithm = str(settings.values.get("quant_algo", "")).upper()
    # vLLM's own names for what NVIDIA's tool calls by one.
    kinds = (("MIXED", "_mixed"), ("FP4", "_fp4"), ("MXFP8", "_mxfp8"))
    if method == "modelopt":
        method += next((ending for word, ending in kinds if word in algorithm), "")
    if settings.values.get("config_groups") is not None:
        return _compressed(settings, method)
    ignored = settings.ignored("exclude_modules", "ignore", "modules_to_not_convert")
    named: list[tuple[Names, Format | None]] = []
    layers = settings.section("quantized_layers")
    for name in layers.values if layers else ():
        layer = layers.section(name) if layers else None
        if layer is not None:
            named.append((settings.names([name], "quantized_layers"), _modelopt_format(layer)))
    if layers is not None:
        return Quantisation(method, None, named=tuple(named), ignored=ignored)
    form = _modelopt_format(settings)
    return Quantisation(method, form or Format(8, per_matrix=8), ignored=ignored, head=True, known=form is not None)


def _modelopt_format(settings: _Settings) -> Format | None:
    algorithm = str(settings.values.get("quant_algo", settings.values.get("quant_method", ""))).upper()
    if "MXFP8" in algorithm:
        return Format(8, group=32, scale_bytes=1)
    if "FP4" in algorithm:
        return Format(4, group=settings.group(16), scale_bytes=1, per_matrix=8)
    if algorithm.startswith("FP8"):
        return Format(8, group=128, block_rows=128, scale_bytes=4) if "PB" in algorithm else Format(8, per_matrix=8)
    if "W4" in algorithm or "INT4" in algorithm:
        return Format(4, group=settings.group(128))
    return None


def _mxfp4(settings: _Settings, method: str) -> Quantisation:
    # gpt-oss: experts alone, a scale of one byte for 32 values.
    ignored = settings.ignored("modules_to_not_convert")
    return Quantisation(method, Format(4, group=32, scale_bytes=1), ignored=ignored, towers=False, experts_only=True)


def _bitsandbytes(settings: _Settings, method: str) -> Quantisation:
    ignored = settings.ignored("llm_int8_skip_modules")
    if not settings.flag("load_in_4bit"):
        return Quantisation(method, Format(8, group=-1, scale_bytes=4), ignored=ignored)
    # A float32 for 64 values; with double quantisation one byte, and a float32 for 256 of those. The table of the
    # sixteen values comes with each matrix.
    if settings.flag("bnb_4bit_use_double_quant"):
        return Quantisation(method, Format(4, group=64, scale_bytes=1, per_matrix=1200), ignored=ignored)
    return Quantisation(method, Format(4, group=64, scale_bytes=4, per_matrix=160), ignored=ignored)


_READERS = (
    (("fp8", "fbgemm_fp8"), _fp8),
    (("awq", "awq_marlin"), _awq),
    (("gptq", "gptq_marlin", "auto-round", "auto_round", "intel/auto-round"), _gptq),
    (("compressed-tensors", "compressed_tensors"), _compressed),
    (("modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"), _modelopt),
    (("mxfp4",), _mxfp4),
    (("bitsandbytes",), _bitsandbytes),
)
