"""DeepSeek's kind of model: a first few dense layers, shared experts, multi-token prediction stored as more layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ppdeploy.model.blocks import Gqa, Where, experts_of, kv_values, mlp, with_ends
from ppdeploy.model.config import Basics, Reader
from ppdeploy.model.parts import Blueprint, LayerPlan, Part, linear, norm
from ppdeploy.model.shape import Attention


def _dense_first(
    reader: Reader,
    basics: Basics,
    attention: Callable[[str], list[Part]],
    kind: Attention,
    kv_values: int,
    *,
    correction: bool,
) -> Blueprint:
    moe = experts_of(reader, correction=correction)
    shared = reader.number("n_shared_experts", 0, least=0)
    moe = replace(moe, shared=moe.inner * shared)
    dense = reader.number("first_k_dense_replace", 0, least=0)
    every = reader.number("moe_layer_freq", 1)
    inner = reader.number("intermediate_size") if dense or every > 1 else 0

    def layer(i: int) -> LayerPlan:
        at = f"layers.{i}"
        routed = i >= dense and i % every == 0
        return LayerPlan(
            parts=[
                *attention(f"{at}.self_attn"),
                *(moe.parts(f"{at}.mlp", basics.hidden) if routed else mlp(f"{at}.mlp", basics.hidden, inner)),
                norm(f"{at}.input_layernorm", basics.hidden),
                norm(f"{at}.post_attention_layernorm", basics.hidden),
            ],
            attention=kind,
            kv_values=kv_values,
            experts=moe.experts if routed else 0,
            experts_per_token=moe.per_token if routed else 0,
        )

    extra: list[Part] = []
    for i in range(reader.number("num_nextn_predict_layers", 0, least=0)):
        at = f"layers.{basics.layers + i}"
        extra += [
            *layer(max(basics.layers + i, dense)).parts,
            *(norm(f"{at}.{name}", basics.hidden) for name in ("enorm", "hnorm", "shared_head.norm")),
            # Neither the projection nor the copies of embedding and head are quantised.
            Part(f"{at}.eh_proj", "plain", basics.hidden, 2 * basics.hidden),
            Part(f"{at}.embed_tokens", "plain", basics.vocab, basics.hidden),
            Part(f"{at}.shared_head.head", "plain", basics.vocab, basics.hidden),
        ]
    return with_ends(reader, basics, layer, tied=False, mtp=extra)


def mla(reader: Reader, basics: Basics, *, indexer: bool = False) -> Blueprint:
    """DeepSeek V3, Kimi K2 and GLM 4.7 Flash: attention over a latent; with an `indexer`, over chosen tokens only."""
    rank, rope = reader.number("kv_lora_rank"), reader.number("qk_rope_head_dim")
    nope, value = reader.number("qk_nope_head_dim"), reader.number("v_head_dim")
    query = reader.number_or_none("q_lora_rank")
    bias = reader.flag("attention_bias", False)
    hidden, heads = basics.hidden, basics.heads

    def attention(at: str) -> list[Part]:
        found: list[Part] = []
        if query is None:
            found += linear(f"{at}.q_proj", heads * (nope + rope), hidden)
        else:
            found += linear(f"{at}.q_a_proj", query, hidden, bias=bias)
            found.append(norm(f"{at}.q_a_layernorm", query))
            found += linear(f"{at}.q_b_proj", heads * (nope + rope), query)
        found += linear(f"{at}.kv_a_proj_with_mqa", rank + rope, hidden, bias=bias)
        found.append(norm(f"{at}.kv_a_layernorm", rank))
        found += linear(f"{at}.kv_b_proj", heads * (nope + value), rank)
        found += linear(f"{at}.o_proj", hidden, heads * value, bias=bias)
        if indexer:
            found += linear(f"{at}.indexer.wq_b", index_heads * index_dim, query or hidden)
            found += linear(f"{at}.indexer.wk", index_dim, hidden)
            found.append(norm(f"{at}.indexer.k_norm", index_dim, bias=True))
            found.append(Part(f"{at}.indexer.weights_proj", "plain", index_heads, hidden))
        return found

    index_heads = reader.number("index_n_heads") if indexer else 0
    index_dim = reader.number("index_head_dim") if indexer else 0
    # The indexer keeps a key of its own for each token, a byte a value and a scale of 4 bytes for 128 values, whatever
    # the format of the other keys and values is; here that is counted as values of 2 bytes.
    keys = (index_dim + -(-index_dim // 128) * 4 + 1) // 2
    correction = (reader.text_or_none("topk_method") or "noaux_tc") == "noaux_tc"
    return _dense_first(reader, basics, attention, "mla", rank + rope + keys, correction=correction)


def sparse_mla(reader: Reader, basics: Basics) -> Blueprint:
    """DeepSeek V3.2 and GLM 5."""
    return mla(reader, basics, indexer=True)


def glm4_moe(reader: Reader, basics: Basics) -> Blueprint:
    """GLM 4.5 to 4.7: attention with grouped heads, else like DeepSeek V3."""
    bias: Where = "qkv" if reader.flag("attention_bias", False) else "none"
    gqa = Gqa(bias, head_norms=reader.flag("use_qk_norm", False))
    return _dense_first(reader, basics, lambda at: gqa.parts(at, basics), "full", kv_values(basics), correction=True)
