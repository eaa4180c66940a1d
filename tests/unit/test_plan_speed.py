"""The roofline of a stage and the replay of the scheduler: what must hold for any hardware, model and load."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.plan.gpus import Gpu, find_gpu
from ppdeploy.plan.network import ETHERNET_RATES, Link
from ppdeploy.plan.serving import Load, Pipeline, Prediction, Settings, predict
from ppdeploy.plan.speed import EXPERT_LAYER_SECONDS, Constants, StageLoad, expert_share, stage_seconds

HIDDEN = 5120


def gpu(name: str = "NVIDIA GeForce RTX 4090") -> Gpu:
    found = find_gpu(name, 0)
    assert found is not None
    return found


def stage(card: Gpu | None = None, weight_bytes: float = 15e9) -> StageLoad:
    return StageLoad(
        gpu=card or gpu(),
        gpus=1,
        layers=16,
        weight_bytes=weight_bytes,
        flops_per_token=weight_bytes,
        kv_bytes_per_token=65536,
        hidden_size=HIDDEN,
        attention_flops=4 * HIDDEN * 16,
    )


def pipeline(stages: int = 2, rate: float = 1e9, latency: float = 1e-4, load: StageLoad | None = None) -> Pipeline:
    return Pipeline((load or stage(),) * stages, (Link(rate, latency),) * (stages - 1), 4 * HIDDEN)


# ---- a stage


def test_decode_is_bound_by_memory_and_prefill_by_computing() -> None:
    one, many = (
        stage_seconds(stage(), prefill_tokens=n, decode_sequences=0, context=0, prefill_context=0) for n in (1, 8192)
    )
    card = gpu()
    memory = 15e9 / card.bandwidth / Constants().memory_efficiency
    compute = 8192 * 15e9 / card.bf16_flops / Constants().compute_efficiency
    assert one == pytest.approx(memory + Constants().stage_overhead, rel=0.001)
    assert many == pytest.approx(compute + Constants().stage_overhead, rel=0.02)


def test_a_step_that_is_bound_by_both_takes_more_than_either_and_less_than_their_sum() -> None:
    card = gpu()
    memory = 15e9 / card.bandwidth / Constants().memory_efficiency
    tokens = memory / (15e9 / card.bf16_flops / Constants().compute_efficiency)
    both = stage_seconds(stage(), prefill_tokens=tokens, decode_sequences=0, context=0, prefill_context=0)
    assert 1.2 * memory < both - Constants().stage_overhead < 1.8 * memory


def test_a_stage_with_nothing_to_do_takes_no_time() -> None:
    assert stage_seconds(stage(), prefill_tokens=0, decode_sequences=0, context=0) == 0


def test_two_gpus_take_half_the_time_and_their_all_reduces() -> None:
    alone = stage_seconds(stage(), prefill_tokens=4096, decode_sequences=0, context=0)
    both = stage_seconds(replace(stage(), gpus=2), prefill_tokens=4096, decode_sequences=0, context=0)
    assert alone / 2 < both < alone


def test_fp8_is_faster_only_where_the_tensor_cores_know_it() -> None:
    def prefill(name: str, fp8: bool) -> float:
        load = replace(stage(gpu(name)), compute="fp8" if fp8 else "bf16")
        return stage_seconds(load, prefill_tokens=8192, decode_sequences=0, context=0)

    assert prefill("RTX 4090", fp8=True) < 0.6 * prefill("RTX 4090", fp8=False)
    assert prefill("RTX 3090", fp8=True) == prefill("RTX 3090", fp8=False)


def test_a_batch_touches_the_expected_share_of_the_experts() -> None:
    load = replace(stage(), experts=128, expert_top_k=8, expert_bytes=30e9)
    assert expert_share(load, 1) == pytest.approx(8 / 128)
    assert expert_share(load, 16) == pytest.approx(1 - (120 / 128) ** 16)
    assert expert_share(load, 4096) == pytest.approx(1)
    assert expert_share(stage(), 16) == 0


def test_a_lone_token_of_a_mixture_reads_only_its_own_experts() -> None:
    load = replace(stage(weight_bytes=1e9), experts=128, expert_top_k=8, expert_bytes=64e9)
    one = stage_seconds(load, prefill_tokens=0, decode_sequences=1, context=0)
    fixed = Constants().stage_overhead + EXPERT_LAYER_SECONDS * load.layers
    assert one == pytest.approx(5e9 / gpu().bandwidth / Constants().memory_efficiency + fixed, rel=0.001)


# ---- the replay


def test_one_request_alone_pays_for_all_stages_and_handoffs_in_turn() -> None:
    shape = pipeline(latency=0)
    load = Load(1, 1024, 128)
    prediction = predict(shape, load)
    compute = stage_seconds(shape.stages[0], prefill_tokens=1024, decode_sequences=0, context=0, prefill_context=512)
    transfer = shape.links[0].seconds(1024 * shape.handoff_bytes)
    assert prediction.ttft_s == pytest.approx(2 * compute + transfer + Constants().api_latency)
    token = stage_seconds(shape.stages[0], prefill_tokens=0, decode_sequences=1, context=1024 + 64)
    assert prediction.tpot_s == pytest.approx(2 * token + shape.links[0].seconds(shape.handoff_bytes))
    assert prediction.out_tokens_per_second == pytest.approx(128 / (prediction.ttft_s + 127 * prediction.tpot_s))


def test_rounds_that_are_skipped_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (pipeline(stages), Load(concurrency, 700, 90), Settings(chunk, 16))
        for stages in (1, 2, 3, 5)
        for concurrency in (1, 7, 40)
        for chunk in (64, 512, 8192)
    ]
    quick = [predict(*case) for case in cases]
    monkeypatch.setattr("ppdeploy.plan.serving._repeats", lambda *_: 0)
    for case, prediction in zip(cases, quick, strict=True):
        slow = predict(*case)
        assert prediction.ttft_s == pytest.approx(slow.ttft_s, rel=1e-6), case
        assert prediction.tpot_s == pytest.approx(slow.tpot_s, rel=1e-6), case
        assert prediction.out_tokens_per_second == pytest.approx(slow.out_tokens_per_second, rel=1e-6), case


def test_more_requests_than_max_num_seqs_wait() -> None:
    few, many = (predict(pipeline(), Load(32, 512, 64), Settings(2048, limit)) for limit in (4, 32))
    assert few.ttft_s > many.ttft_s
    assert few.out_tokens_per_second < many.out_tokens_per_second


def test_a_pipeline_needs_a_link_less_than_stages() -> None:
    with pytest.raises(ValueError, match="2 stages need 1 links, not 0"):
        Pipeline((stage(), stage()), (), 4 * HIDDEN)


rates = st.floats(1e6, 4e11)
loads = st.builds(
    Load,
    concurrency=st.integers(1, 4096),
    input_tokens=st.integers(1, 10**6),
    output_tokens=st.integers(1, 10**5),
)
limits = st.builds(
    Settings, max_num_batched_tokens=st.sampled_from((512, 2048, 8192)), max_num_seqs=st.integers(1, 512)
)
#: Loads whose replay is quick, so that many can be tried.
small_loads = st.builds(
    Load,
    concurrency=st.integers(1, 64),
    input_tokens=st.integers(1, 8000),
    output_tokens=st.integers(1, 400),
    prompts=st.integers(1, 80),
)


def finite(prediction: Prediction) -> bool:
    values = (prediction.ttft_s, prediction.tpot_s, prediction.out_tokens_per_second)
    return all(math.isfinite(value) for value in values) and prediction.ttft_s > 0 and values[1] >= 0 and values[2] > 0


@settings(max_examples=25)
@given(
    stages=st.integers(1, 6),
    rate=rates,
    latency=st.floats(0, 0.2),
    load=loads,
    limit=limits,
    weights=st.floats(1e6, 1e12),
)
def test_every_load_has_a_prediction(
    stages: int, rate: float, latency: float, load: Load, limit: Settings, weights: float
) -> None:
    prediction = predict(pipeline(stages, rate, latency, stage(weight_bytes=weights)), load, limit)
    assert finite(prediction)
    if load.output_tokens > 1:
        assert prediction.tpot_s > 0


def no_slower(fast: tuple[Pipeline, Pipeline], load: Load, limit: Settings) -> None:
    """Assert that the first pipeline of the two serves as much as the other, and answers as soon."""
    better, worse = (predict(each, load, limit) for each in fast)
    assert better.out_tokens_per_second >= worse.out_tokens_per_second * (1 - 1e-6)
    # With one request for each client, all are sent at the start. In a longer run the next one is sent when its
    # predecessor ends, sooner on the faster pipeline, and may then meet a step that is no shorter there.
    better, worse = (predict(each, replace(load, prompts=load.concurrency), limit) for each in fast)
    assert better.ttft_s <= worse.ttft_s * (1 + 1e-6)


@settings(max_examples=25)
@given(stages=st.integers(2, 5), one=rates, other=rates, load=small_loads, limit=limits)
def test_a_faster_link_is_never_predicted_slower(
    stages: int, one: float, other: float, load: Load, limit: Settings
) -> None:
    no_slower((pipeline(stages, max(one, other)), pipeline(stages, min(one, other))), load, limit)


def test_each_faster_ethernet_answers_sooner_in_the_loads_of_a_plan() -> None:
    for stages in (2, 3, 8):
        for concurrency in (1, 8, 32):
            found = [predict(pipeline(stages, rate), Load(concurrency, 1024, 128)) for _, rate in ETHERNET_RATES]
            ttft = [prediction.ttft_s for prediction in found]
            assert ttft == sorted(ttft, reverse=True), (stages, concurrency)


@settings(max_examples=25)
@given(stages=st.integers(1, 5), factor=st.floats(1, 50), bandwidth=st.booleans(), load=small_loads, limit=limits)
def test_a_faster_gpu_is_never_predicted_slower(
    stages: int, factor: float, bandwidth: bool, load: Load, limit: Settings
) -> None:
    card = gpu()
    better = (
        replace(card, bandwidth=card.bandwidth * factor)
        if bandwidth
        else replace(card, bf16_flops=card.bf16_flops * factor)
    )
    no_slower((pipeline(stages, load=stage(better)), pipeline(stages, load=stage(card))), load, limit)


@settings(max_examples=25)
@given(
    card=st.sampled_from(("RTX 3060", "RTX 4090", "H200", "Tesla V100-PCIE-16GB", "GB10")),
    prefill=st.integers(0, 10**6),
    decode=st.integers(0, 4096),
    context=st.integers(0, 10**6),
    more=st.integers(1, 1000),
)
def test_more_work_never_takes_less_time(card: str, prefill: int, decode: int, context: int, more: int) -> None:
    load = replace(stage(gpu(card)), experts=64, expert_top_k=4, expert_bytes=20e9)

    def seconds(p: int, d: int, c: int) -> float:
        return stage_seconds(load, prefill_tokens=p, decode_sequences=d, context=c)

    least = seconds(prefill, decode, context)
    assert 0 <= least < math.inf
    assert seconds(prefill + more, decode, context) >= least
    assert seconds(prefill, decode + more, context) >= least
    assert seconds(prefill, decode, context + more) >= least


def test_64_stages_are_predicted_in_no_time() -> None:
    started = time.process_time()
    for concurrency in (1, 8, 32):
        assert finite(predict(pipeline(64), Load(concurrency, 1024, 128)))
    assert time.process_time() - started < 0.3
