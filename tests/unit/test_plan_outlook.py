"""What a plan says of speed and links: the verdicts, the next Ethernet, the size of a step, the bubble."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.plan.network import ETHERNET_RATES, Link, faster_rates, handoff_bytes, handoff_seconds, rate_label
from ppdeploy.plan.outlook import best_settings, bubble, outlook, requests_to_fill, with_rate
from ppdeploy.plan.serving import Load, Pipeline, Settings, predict
from scripts import fit_speed

AS_MEASURED = Settings(8192, 1024)


def measured(link: str) -> Pipeline:
    return fit_speed.pipeline(link)


def joined(rate: float, latency: float = 1e-4, stages: int = 2) -> Pipeline:
    """Return the measured stages (the first one repeated), joined by plain links."""
    first, last = measured("1 Gbit").stages
    return Pipeline((first,) * (stages - 1) + (last,), (Link(rate, latency),) * (stages - 1), handoff_bytes(5120))


# ---- links


def test_a_handoff_has_two_tensors() -> None:
    # 21.0 MB for 1,024 tokens, 168 ms at 1 Gbit/s of payload (reference/measurements.md).
    assert handoff_bytes(5120) == 20480
    assert 8 * 1024 * handoff_bytes(5120) / 1e9 == pytest.approx(0.168, abs=0.001)
    assert Link(1e9, 0).seconds(1024 * 20480) == pytest.approx(0.168 / 0.957, abs=0.001)


def test_a_tp_group_receives_the_same_bytes_and_gathers_them() -> None:
    link = Link(1e9, 0)
    alone = handoff_seconds(1000, 20480, link)
    four = handoff_seconds(1000, 20480, link, gpus=4, peer_bandwidth=20e9)
    assert four - alone == pytest.approx(1000 * 20480 * 3 / 4 / 20e9)


def test_nothing_takes_no_time_and_a_burst_passes_at_once() -> None:
    assert Link(1e9, 0.1).seconds(0) == 0
    bucket = Link(1e9, 0, burst_bytes=256_000)
    assert bucket.seconds(256_000) < 0.1 * Link(1e9, 0).seconds(256_000)


def test_rates_are_named_as_people_name_them() -> None:
    assert [rate_label(rate) for rate in (1e8, 1e9, 2.5e9, 1e11)] == [
        "100 Mbit/s",
        "1 Gbit/s",
        "2.5 Gbit/s",
        "100 Gbit/s",
    ]
    assert faster_rates(1e9)[0] == ("2.5 Gbit/s", 2.5e9)
    # What was measured is a little less than what the port is called.
    assert faster_rates(941e6)[0][0] == "2.5 Gbit/s"
    assert faster_rates(600e6)[0][0] == "1 Gbit/s"
    assert faster_rates(ETHERNET_RATES[-1][1]) == []


# ---- verdicts


def test_gigabit_is_slow_and_says_what_the_next_one_gives() -> None:
    found = outlook(joined(1e9), AS_MEASURED).links[0]
    assert found.sentence() == (
        "slow: prompts wait for this 1 Gbit/s link: 0.17 s for each 1,000 prompt tokens; "
        "2.5 Gbit/s would give 1.6x at 32 users"
    )
    # Measured: 614.2 against 410.6.
    assert found.gain == pytest.approx(614.2 / 410.6, rel=0.05)


def test_ten_gigabit_is_ready() -> None:
    found = outlook(joined(10e9), AS_MEASURED).links[0]
    assert (found.verdict, found.remedy) == ("ready", "")


def test_a_long_way_is_slow_whatever_its_rate() -> None:
    found = outlook(joined(10e9, latency=0.01), AS_MEASURED).links[0]
    assert found.verdict == "slow"
    assert "latency of 10 ms one way" in found.reason


def test_a_link_without_a_rate_blocks_and_nothing_is_predicted() -> None:
    shape = joined(1e9, stages=3)
    cut = replace(shape, links=(Link(0), shape.links[1]))
    found = outlook(cut, AS_MEASURED)
    assert [link.verdict for link in found.links] == ["blocked", "ready"]
    assert found.predictions == ()


def test_a_step_that_vllm_would_give_up_blocks_and_a_smaller_one_is_named() -> None:
    found = outlook(joined(1e6), replace(AS_MEASURED, max_num_seqs=256)).links[0]
    assert found.verdict == "blocked"
    assert "vLLM gives up after 300 s" in found.reason
    chunk = int(found.remedy.split(" to ")[1].split()[0])
    assert Link(1e6).seconds(chunk * 20480) < 300


def test_the_slowest_link_limits() -> None:
    shape = joined(10e9, stages=4)
    mixed = replace(shape, links=(Link(10e9), Link(1e9, name="eth0 of b"), Link(25e9)))
    found = outlook(mixed, AS_MEASURED)
    assert found.limiting_link == 1
    assert [link.verdict for link in found.links] == ["ready", "slow", "ready"]
    assert "this eth0 of b link" in found.links[1].reason


def test_one_host_alone_has_no_links() -> None:
    found = outlook(Pipeline(measured("1 Gbit").stages[:1], (), 20480), AS_MEASURED)
    assert (found.links, found.limiting_link, found.requests_to_fill) == ((), None, 1)
    assert all(share < 0.5 for _, share in found.bubbles)


# ---- what limits


def test_a_lone_request_keeps_one_of_the_stages_busy() -> None:
    for stages in (2, 3, 8):
        assert bubble(joined(100e9, 0, stages), 1, context=1000) == pytest.approx(1 - 1 / stages, abs=0.02)


def test_as_many_requests_as_stages_fill_a_pipeline_with_fast_links() -> None:
    shape = joined(100e9, 0, 4)
    assert requests_to_fill(shape, context=1000) == 4
    shares = [bubble(shape, n, context=1000) for n in (1, 2, 3, 4)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.1


@pytest.mark.parametrize("link", ["unshaped", "2.5 Gbit", "1 Gbit"])
def test_smaller_steps_are_preferred_as_measured(link: str) -> None:
    # Measured on each of these links: 2048 gives 5-10 % more than 8192 and half the TTFT.
    pair = [predict(measured(link), Load(32, 1024, 128), Settings(chunk, 1024)) for chunk in (2048, 8192)]
    assert 1.01 < pair[0].out_tokens_per_second / pair[1].out_tokens_per_second < 1.15
    assert pair[0].ttft_s < 0.6 * pair[1].ttft_s
    assert best_settings(measured(link), AS_MEASURED).max_num_batched_tokens <= 2048


def test_a_step_is_never_smaller_than_vllm_accepts() -> None:
    found = best_settings(joined(1e9), Settings(4096, 3000))
    assert found.max_num_batched_tokens >= 3000


def test_best_is_never_worse_than_what_is_set() -> None:
    for link in fit_speed.LINKS:
        found = outlook(measured(link), AS_MEASURED)
        now, then = found.predictions[-1].prediction, found.best_predictions[-1].prediction
        assert then.out_tokens_per_second >= 0.98 * now.out_tokens_per_second


def test_only_links_of_a_rate_are_replaced() -> None:
    shape = replace(joined(1e9, stages=3), links=(Link(1e9), Link(10e9)))
    assert [link.rate_bits for link in with_rate(shape, 25e9, instead_of=1e9).links] == [25e9, 10e9]


@settings(max_examples=20)
@given(
    rate=st.floats(0, 4e11),
    latency=st.floats(0, 1),
    stages=st.integers(2, 6),
    chunk=st.integers(1, 20000),
    seqs=st.integers(1, 2048),
    tokens=st.tuples(st.integers(1, 20000), st.integers(1, 2000)),
)
def test_every_pipeline_has_an_outlook(
    rate: float, latency: float, stages: int, chunk: int, seqs: int, tokens: tuple[int, int]
) -> None:
    found = outlook(
        joined(rate, latency, stages), Settings(chunk, seqs), input_tokens=tokens[0], output_tokens=tokens[1]
    )
    assert len(found.links) == stages - 1
    for link in found.links:
        assert link.sentence()
        assert link.gain >= 1 - 1e-6
    for _, share in found.bubbles:
        assert 0 <= share <= 1
    for each in found.predictions:
        assert math.isfinite(each.prediction.out_tokens_per_second)
