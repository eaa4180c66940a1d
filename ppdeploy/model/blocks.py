"""What the layers of most families are made of: attention with grouped heads, feed-forward parts, routed experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ppdeploy.model.config import Basics, Reader
from ppdeploy.model.parts import Blueprint, LayerPlan, Part, linear, norm
from ppdeploy.model.shape import Attention

Where = Literal["none", "qkv", "all"]
"""Which matrices of an attention have a bias: none, all but the output's, all."""


@dataclass(frozen=True)
class Gqa:
    """Attention with grouped heads, as the families vary it."""

    bias: Where = "none"
    head_norms: bool = False
    """A norm over each head of queries and keys."""
    wide_norms: bool = False
    """A norm over all heads of queries, and one over all of keys."""
    gated: bool = False
    """The query's matrix makes a gate for the output too."""
    fused: bool = False
    """Queries, keys and values are stored as one matrix."""
    sinks: bool = False

    def parts(self, at: str, basics: Basics) -> list[Part]:
        """Return the parts of the attention whose name is `at`."""
        hidden, wide = basics.hidden, basics.heads * basics.head_dim
        kv = basics.kv_heads * basics.head_dim
        bias = self.bias != "none"
        found: list[Part] = []
        if self.fused:
            found += linear(f"{at}.qkv_proj", wide + 2 * kv, hidden, bias=bias)
        else:
            found += linear(f"{at}.q_proj", wide * (2 if self.gated else 1), hidden, bias=bias)
            found += linear(f"{at}.k_proj", kv, hidden, bias=bias)
            found += linear(f"{at}.v_proj", kv, hidden, bias=bias)
        found += linear(f"{at}.o_proj", hidden, wide, bias=self.bias == "all")
        if self.head_norms:
            found += [norm(f"{at}.q_norm", basics.head_dim), norm(f"{at}.k_norm", basics.head_dim)]
        if self.wide_norms:
            found += [norm(f"{at}.q_norm", wide), norm(f"{at}.k_norm", kv)]
        if self.sinks:
            found.append(Part(f"{at}.sinks", "plain", basics.heads))
        return found


def mlp(at: str, hidden: int, inner: int, *, fused: bool = False, bias: bool = False) -> list[Part]:
    """Return a gated feed-forward part."""
    if fused:
        return [*linear(f"{at}.gate_up_proj", 2 * inner, hidden, bias=bias), *linear(f"{at}.down_proj", hidden, inner)]
    return [
        *linear(f"{at}.gate_proj", inner, hidden, bias=bias),
        *linear(f"{at}.up_proj", inner, hidden, bias=bias),
        *linear(f"{at}.down_proj", hidden, inner, bias=bias),
    ]


@dataclass(frozen=True)
class Moe:
    """A layer's routed experts, and what each token goes through beside them."""

    experts: int
    per_token: int
    inner: int
    shared: int = 0
    """Width of the shared expert; 0: none."""
    shared_gate: bool = False
    correction: bool = False
    """The router has a correction for each expert (DeepSeek V3's balancing without a loss)."""
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_name: str = "shared_experts"

    def parts(self, at: str, hidden: int) -> list[Part]:
        """Return the parts of the feed-forward block whose name is `at`."""
        gate, up, down = self.names
        one = f"{at}.experts.0"
        found = [
            Part(f"{at}.gate", "router", self.experts, hidden),
            Part(f"{one}.{gate}", "linear", self.inner, hidden, self.experts, routed=True),
            Part(f"{one}.{up}", "linear", self.inner, hidden, self.experts, routed=True),
            Part(f"{one}.{down}", "linear", hidden, self.inner, self.experts, routed=True),
        ]
        if self.correction:
            found.append(Part(f"{at}.gate.e_score_correction_bias", "plain", self.experts))
        if self.shared:
            found += mlp(f"{at}.{self.shared_name}", hidden, self.shared)
        if self.shared_gate:
            found.append(Part(f"{at}.{self.shared_name}_gate", "router", 1, hidden))
        return found


def experts_of(reader: Reader, *, inner: str = "moe_intermediate_size", **options: Any) -> Moe:
    """Return the experts that a configuration describes."""
    experts = reader.number("num_experts")
    per_token = reader.number("num_experts_per_tok")
    if per_token > experts:
        raise reader.wrong("num_experts_per_tok", per_token, f"at most the {experts} experts")
    return replace(Moe(experts, per_token, reader.number(inner)), **options)


def _window(reader: Reader, kinds: list[str]) -> int | None:
    """Return the sliding window, which must be said where layers have one."""
    if "sliding_attention" not in kinds and "chunked_attention" not in kinds:
        return None
    return reader.number("attention_chunk_size" if "chunked_attention" in kinds else "sliding_window")


KINDS: Mapping[str, Attention] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
}


def kinds_of(reader: Reader, count: int, otherwise: Callable[[int], str]) -> list[str]:
    """Return the kind of each layer: as the configuration lists them, or as the family's rule says."""
    listed = reader.words("layer_types")
    if not listed:
        return [otherwise(i) for i in range(count)]
    if len(listed) < count:
        raise reader.wrong("layer_types", listed, f"a list with a kind for each of the {count} layers")
    unknown = sorted(set(listed) - set(KINDS))
    if unknown:
        raise reader.wrong("layer_types", unknown[0], "a kind of layer that this family has")
    return listed[:count]


def kv_values(basics: Basics) -> int:
    """Return how many values a layer of full attention keeps for each token."""
    return 2 * basics.kv_heads * basics.head_dim


def with_ends(
    reader: Reader, basics: Basics, layer: Callable[[int], LayerPlan], *, tied: bool, mtp: Sequence[Part] = ()
) -> Blueprint:
    """Return a blueprint with the two ends that all families share; `tied` holds when the configuration is silent."""
    said = reader.tied()
    return Blueprint(
        layer=layer,
        embedding=Part("embed_tokens", "embedding", basics.vocab, basics.hidden),
        head=Part("lm_head", "head", basics.vocab, basics.hidden),
        tied=tied if said is None else said,
        last=[norm("norm", basics.hidden)],
        mtp=list(mtp),
    )


def decoder(
    reader: Reader,
    basics: Basics,
    attention: Gqa,
    *,
    kinds: list[str],
    feed: Callable[[int, str], tuple[list[Part], Moe | None]],
    norms: int = 2,
    tied: bool = False,
) -> Blueprint:
    """Return a family whose layers are attention with grouped heads and a feed-forward part."""
    window = _window(reader, kinds)

    def layer(i: int) -> LayerPlan:
        at = f"layers.{i}"
        parts, moe = feed(i, f"{at}.mlp")
        kind = KINDS[kinds[i]]
        return LayerPlan(
            parts=[
                *attention.parts(f"{at}.self_attn", basics),
                *parts,
                *(norm(f"{at}.norm{n}", basics.hidden) for n in range(norms)),
            ],
            attention=kind,
            kv_values=kv_values(basics),
            kv_window=window if kind == "sliding" else None,
            experts=moe.experts if moe else 0,
            experts_per_token=moe.per_token if moe else 0,
        )

    return with_ends(reader, basics, layer, tied=tied)


def dense(
    reader: Reader, basics: Basics, *, fused: bool = False, bias: bool = False
) -> Callable[[int, str], tuple[list[Part], Moe | None]]:
    """Return the feed-forward part of a family that has the same, without experts, in every layer."""
    inner = reader.number("intermediate_size")
    return lambda _, at: (mlp(at, basics.hidden, inner, fused=fused, bias=bias), None)


def same_kind(reader: Reader, basics: Basics) -> list[str]:
    """Return one kind for all layers: a sliding window when the configuration has one, else full attention."""
    kind = "sliding_attention" if reader.number_or_none("sliding_window") else "full_attention"
    return kinds_of(reader, basics.layers, lambda _: kind)


def qwen_feed(reader: Reader, basics: Basics, moe: Moe) -> Callable[[int, str], tuple[list[Part], Moe | None]]:
    """Return what Qwen's layers have: experts in every so many, dense in those listed."""
    dense, step = set(reader.numbers("mlp_only_layers")), reader.number("decoder_sparse_step", 1)

    def feed(i: int, at: str) -> tuple[list[Part], Moe | None]:
        if i in dense or (i + 1) % step:
            return mlp(at, basics.hidden, reader.number("intermediate_size")), None
        return moe.parts(at, basics.hidden), moe

    return feed
