"""What to expect of a pipeline before it runs: its speed, what limits it, and what would make it faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ppdeploy.plan.network import Link, faster_rates
from ppdeploy.plan.serving import (
    Load,
    Pipeline,
    Prediction,
    Settings,
    compute_seconds,
    predict,
    return_seconds,
    transfer_seconds,
)

CONCURRENCIES = (1, 8, 32)
"""Users at once that a plan predicts for."""

CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
"""Values of `max_num_batched_tokens` that are compared."""

SMALL_CHUNKS = (128, 256)
"""Those that are compared besides where transfers overlap: measured for no other pipeline (docs/handoff.md)."""

TIE = 0.02
"""Throughputs closer than this share are called equal; the model is no better than that."""

SLOW_GAIN = 1.15
"""A link is slow when the next faster Ethernet would give this much more at 32 users."""

SLOW_LATENCY = 0.2
"""A link is slow when a lone user's token spends more than this share of its time on latency."""

NO_RATE = 1000.0
"""Bits/s below which a link is none."""

STEP_TIMEOUT = 300.0
"""Seconds after which vLLM gives up a step (`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`, default up to 0.33)."""


@dataclass(frozen=True)
class LoadPrediction:
    """A prediction and the load that it is for."""

    concurrency: int
    input_tokens: int
    output_tokens: int
    prediction: Prediction


@dataclass(frozen=True)
class LinkOutlook:
    """What one link does to a pipeline."""

    index: int
    """It joins the stages `index` and `index` + 1."""
    name: str
    verdict: Literal["ready", "slow", "blocked"]
    reason: str
    remedy: str
    seconds_per_1000_tokens: float
    """What 1,000 prompt tokens take on the link; infinite without a rate."""
    faster: str
    """The next faster usual Ethernet; empty when there is none."""
    gain: float
    """Output tokens/s at 32 users with that Ethernet on this link and all of its rate, over those now; else 1."""

    def sentence(self) -> str:
        """Return verdict, reason and remedy as one line."""
        return f"{self.verdict}: {self.reason}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Outlook:
    """All that is predicted for one pipeline."""

    settings: Settings
    predictions: tuple[LoadPrediction, ...]
    bubbles: tuple[tuple[int, float], ...]
    """(requests, share of the stages' time that is idle while they decode)."""
    requests_to_fill: int
    limiting_link: int | None
    """Index of the link on which a prompt token takes longest; None without links."""
    links: tuple[LinkOutlook, ...]
    best_settings: Settings
    """With the best `max_num_batched_tokens`; the same as `settings` where nothing is better."""
    best_predictions: tuple[LoadPrediction, ...]


def outlook(
    pipeline: Pipeline,
    settings: Settings | None = None,
    *,
    input_tokens: int = 1024,
    output_tokens: int = 128,
    compare: bool = True,
) -> Outlook:
    """Predict everything for a pipeline under vLLM's settings, for requests of so many tokens.

    Some 30 replays: about 30 ms for two stages, more with many. Without `compare` no other size of a step is tried.
    """
    settings = settings or Settings()
    tokens = (input_tokens, output_tokens)
    context = input_tokens + output_tokens / 2
    blocked = tuple(_blocked(pipeline, index, settings) for index in range(len(pipeline.links)))
    if any(link.rate_bits < NO_RATE for link in pipeline.links):
        # Nothing can be predicted of a pipeline that is cut.
        links = tuple(found or _unknown(index, pipeline.links[index]) for index, found in enumerate(blocked))
        return Outlook(settings, (), (), 1, _slowest(pipeline), links, settings, ())
    best = settings
    if compare:
        best = best_settings(pipeline, settings, input_tokens=input_tokens, output_tokens=output_tokens)
    predictions = predict_loads(pipeline, settings, tokens)
    gains: dict[float, tuple[str, float]] = {}
    now = predictions[-1].prediction
    for rate in {link.rate_bits for link in pipeline.links}:
        gains[rate] = _next_rate(pipeline, rate, Load(CONCURRENCIES[-1], *tokens), settings, now)
    return Outlook(
        settings=settings,
        predictions=predictions,
        bubbles=tuple((requests, bubble(pipeline, requests, context=context)) for requests in CONCURRENCIES),
        requests_to_fill=requests_to_fill(pipeline, context=context),
        limiting_link=_slowest(pipeline),
        links=tuple(
            found or _judge(pipeline, index, context, *gains[pipeline.links[index].rate_bits])
            for index, found in enumerate(blocked)
        ),
        best_settings=best,
        best_predictions=predictions if best == settings else predict_loads(pipeline, best, tokens),
    )


def predict_loads(pipeline: Pipeline, settings: Settings, tokens: tuple[int, int]) -> tuple[LoadPrediction, ...]:
    """Return the predictions for CONCURRENCIES; `tokens` are those of each prompt and answer."""
    return tuple(
        LoadPrediction(concurrency, *tokens, predict(pipeline, Load(concurrency, *tokens), settings))
        for concurrency in CONCURRENCIES
    )


# ---- decoding: how busy the stages are


def _decode_times(pipeline: Pipeline, sequences: float, context: float) -> tuple[float, float]:
    """Return (latency of one microbatch through all stages and back, its longest stay on a stage), seconds."""
    compute = compute_seconds(pipeline, prefill_tokens=0, decode_sequences=sequences, context=context)
    transfer = [0.0, *transfer_seconds(pipeline, sequences), 0.0]
    # A stage is taken while it receives, computes and sends: see `ppdeploy.plan.serving`.
    stays = [transfer[i] + seconds + transfer[i + 1] for i, seconds in enumerate(compute)]
    return sum(compute) + sum(transfer) + return_seconds(pipeline), max(stays)


def bubble(pipeline: Pipeline, requests: int, *, context: float) -> float:
    """Return the share of the stages' time that is idle while `requests` requests decode; 0 is a full pipeline.

    The requests spread over at most PP microbatches. Waiting for a link is idle time.
    """
    requests = max(1, requests)
    microbatches = min(requests, len(pipeline.stages))
    sequences = requests / microbatches
    latency, stay = _decode_times(pipeline, sequences, context)
    round_seconds = max(latency, microbatches * stay)
    compute = compute_seconds(pipeline, prefill_tokens=0, decode_sequences=sequences, context=context)
    return max(0.0, 1.0 - microbatches * sum(compute) / len(compute) / round_seconds)


def requests_to_fill(pipeline: Pipeline, *, context: float) -> int:
    """Return how many requests at once keep the slowest stage, or its links, busy all the time."""
    latency, stay = _decode_times(pipeline, 1, context)
    return max(1, min(len(pipeline.stages), math.ceil(latency / stay - 1e-9)))


# ---- the size of a step


def best_settings(
    pipeline: Pipeline, settings: Settings, *, input_tokens: int = 1024, output_tokens: int = 128
) -> Settings:
    """Return the settings with the `max_num_batched_tokens` that serves 32 users best.

    The most output tokens/s; of those within 2 % of it, the soonest first token; the present value where it ties.
    vLLM refuses fewer tokens than `max_num_seqs` (`SchedulerConfig.verify_max_model_len`): such a size comes with fewer
    requests where transfers overlap, and is left out elsewhere.
    """
    load = Load(CONCURRENCIES[-1], input_tokens, output_tokens)
    others = (*SMALL_CHUNKS, *CHUNKS) if settings.overlap else (c for c in CHUNKS if c >= settings.max_num_seqs)
    tried = {
        chunk: replace(settings, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, settings.max_num_seqs))
        for chunk in sorted({settings.max_num_batched_tokens, *others})
    }
    found = {chunk: predict(pipeline, load, one) for chunk, one in tried.items()}
    most = max(prediction.out_tokens_per_second for prediction in found.values())
    good = {c: p for c, p in found.items() if p.out_tokens_per_second >= most * (1 - TIE)}
    present = settings.max_num_batched_tokens
    chunk = min(good, key=lambda c: (good[c].ttft_s, c != present, c))
    return tried[chunk]


# ---- links


def with_rate(pipeline: Pipeline, rate_bits: float, *, instead_of: float | None = None) -> Pipeline:
    """Return the pipeline with `rate_bits` on all links, or on those whose rate is `instead_of`."""
    return replace(
        pipeline,
        links=tuple(
            replace(link, rate_bits=rate_bits, name="") if instead_of in (None, link.rate_bits) else link
            for link in pipeline.links
        ),
    )


def _next_rate(pipeline: Pipeline, rate: float, load: Load, settings: Settings, now: Prediction) -> tuple[str, float]:
    """Return the next faster usual Ethernet and its gain at a load, on all links of this rate."""
    faster = faster_rates(rate)
    if not faster:
        return "", 1.0
    name, bits = faster[0]
    then = predict(with_rate(pipeline, bits, instead_of=rate), load, settings)
    return name, then.out_tokens_per_second / now.out_tokens_per_second


def _slowest(pipeline: Pipeline) -> int | None:
    times = [_per_thousand(pipeline, index) for index in range(len(pipeline.links))]
    return times.index(max(times)) if times else None


def _per_thousand(pipeline: Pipeline, index: int) -> float:
    link = pipeline.links[index]
    return link.seconds(1000 * pipeline.handoff_bytes) if link.rate_bits >= NO_RATE else math.inf


def _blocked(pipeline: Pipeline, index: int, settings: Settings) -> LinkOutlook | None:
    """Return why a link cannot serve at all, else None."""
    link = pipeline.links[index]
    if link.rate_bits < NO_RATE:
        reason, remedy = "this link has no rate", "plug in its cable, or name another NIC in ppdeploy_fabric_interface"
    else:
        chunk = settings.max_num_batched_tokens
        seconds = link.seconds(chunk * pipeline.handoff_bytes)
        if seconds < STEP_TIMEOUT:
            return None
        fits = [c for c in _halves(chunk) if link.seconds(c * pipeline.handoff_bytes) < STEP_TIMEOUT / 2]
        reason = (
            f"a step of {chunk} prompt tokens takes {seconds:.0f} s on this {link.label()} link, "
            f"and vLLM gives up after {STEP_TIMEOUT:.0f} s"
        )
        remedy = f"set max-num-batched-tokens to {fits[0]} or use a faster link" if fits else "use a faster link"
    return LinkOutlook(index, link.label(), "blocked", reason, remedy, _per_thousand(pipeline, index), "", 1.0)


def _halves(chunk: int) -> Sequence[int]:
    return [chunk >> shift for shift in range(1, 20) if chunk >> shift >= 16]


def _unknown(index: int, link: Link) -> LinkOutlook:
    return LinkOutlook(
        index, link.label(), "ready", "nothing is known of it while another link is cut", "", 0.0, "", 1.0
    )


def _judge(pipeline: Pipeline, index: int, context: float, faster: str, gain: float) -> LinkOutlook:
    link = pipeline.links[index]
    label, wait = link.label(), _per_thousand(pipeline, index)
    round_seconds, _ = _decode_times(pipeline, 1, context)
    # One way with each handoff; the slowest link of all is also crossed twice by the sampled tokens.
    slowest = link.latency_s >= max(other.latency_s for other in pipeline.links)
    latency = link.latency_s + (return_seconds(pipeline) if slowest else 0.0)
    verdict: Literal["ready", "slow"] = "ready"
    reason = f"1,000 prompt tokens take {wait:.2g} s on this {label} link"
    remedy = ""
    if latency > SLOW_LATENCY * round_seconds:
        verdict = "slow"
        reason = (
            f"every token waits {latency * 1e3:.2g} ms of {round_seconds * 1e3:.2g} ms for this link's latency "
            f"of {link.latency_s * 1e3:.2g} ms one way"
        )
        remedy = "join the hosts by one switch or cable, without a VPN or a wide-area network between them"
    elif gain >= SLOW_GAIN:
        verdict = "slow"
        reason = f"prompts wait for this {label} link: {wait:.2g} s for each 1,000 prompt tokens"
        remedy = f"{faster} would give {gain:.1f}x at {CONCURRENCIES[-1]} users"
    return LinkOutlook(index, label, verdict, reason, remedy, wait, faster, gain)
