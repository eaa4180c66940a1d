"""The whole plan against an uneven split that ran on two GPUs: docs/measured.md. Nothing was fitted to it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest

from ppdeploy.plan import PipelinePlan
from tests.factories import GIB, make_cluster
from tests.factories_model import make_shape
from tests.factories_plan import make_pipeline, make_source

DOCS = Path(__file__).resolve().parents[2] / "docs" / "measured.md"

#: Fabric in Mbit/s -> users -> output tokens/s and median TTFT in seconds, measured on 2026-11-30. The unshaped veth
#: pair of the measurement sets no limit of its own; 100 Gbit/s stands for it.
MEASURED = {
    100_000: {1: (53.2, 0.106), 8: (282.3, 0.779), 32: (735.3, 1.785)},
    1_000: {1: (49.9, 0.275), 8: (209.8, 2.022), 32: (379.9, 4.445)},
}
MEASURED_KV_TOKENS = 535_536
MEASURED_WEIGHTS_GIB = (35.44, 21.85)


@lru_cache
def planned(mbit: int, first: int = 40) -> PipelinePlan:
    """The plan of exactly what ran: Qwen3's shape with 30.75 B parameters, 64 layers, on two H200."""
    shape = make_shape(
        layers=64,
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        hidden_size=5120,
        intermediate_size=25600,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=32768,
    )
    source = make_source("dummy-30b").model_copy(update={"shape": shape})
    return make_pipeline(
        facts=make_cluster(2, gpus=1, gpu="H200", fabric_speed_mbit=mbit, memory_gib=256, management_speed_mbit=100),
        source=source,
        device="cuda",
        kv_cache_gib=None,
        max_model_len=None,
        layer_partition=[first, 64 - first],
        host_vars={host: {"gpu_memory_utilization": 0.85} for host in ("node1", "node2")},
    )


def test_the_settings_are_those_that_ran() -> None:
    plan = planned(1_000)
    assert (plan.capacity.batched_tokens, plan.capacity.max_model_len) == (8192, 32768)
    assert (plan.outlook.input_tokens, plan.outlook.output_tokens) == (1024, 128)


@pytest.mark.parametrize(("mbit", "users"), [(mbit, users) for mbit in MEASURED for users in (1, 8, 32)])
def test_speed_is_within_30_percent(mbit: int, users: int) -> None:
    speed = next(one for one in planned(mbit).outlook.speeds if one.concurrency == users)
    tokens, ttft = MEASURED[mbit][users]
    assert speed.tokens_per_second == pytest.approx(tokens, rel=0.3)
    assert speed.ttft_seconds == pytest.approx(ttft, rel=0.3)


def test_the_kv_cache_is_within_5_percent() -> None:
    assert planned(1_000).capacity.kv_tokens == pytest.approx(MEASURED_KV_TOKENS, rel=0.05)


def test_the_weights_are_within_1_percent() -> None:
    found = [row.weight_bytes / GIB for row in planned(1_000).memory]
    assert found == pytest.approx(MEASURED_WEIGHTS_GIB, rel=0.01)


def test_the_even_split_has_the_room_that_was_measured() -> None:
    # 725,104 tokens with 32 layers on each (reference/measurements.md).
    assert planned(1_000, 32).capacity.kv_tokens == pytest.approx(725_104, rel=0.05)


def test_the_planner_itself_would_have_split_evenly_and_says_what_uneven_costs() -> None:
    even, uneven = (planned(100_000, first).outlook.speeds[-1].tokens_per_second for first in (32, 40))
    # Measured: 898.1 against 735.3.
    assert uneven / even == pytest.approx(735.3 / 898.1, rel=0.1)


def test_the_page_has_what_is_predicted_now() -> None:
    text = DOCS.read_text()
    for mbit, rows in MEASURED.items():
        for users, (tokens, ttft) in rows.items():
            speed = next(one for one in planned(mbit).outlook.speeds if one.concurrency == users)
            line = (
                f"| {users} | {tokens:.1f} | {speed.tokens_per_second:.1f} | {ttft * 1000:,.0f} ms "
                f"| {speed.ttft_seconds * 1000:,.0f} ms |"
            )
            assert line in text, line
    assert f"{planned(1_000).capacity.kv_tokens:,}" in text
