"""The speed to expect of a planned pipeline: its stages' loads over its links, as the predictions of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ppdeploy.model import ModelShape
from ppdeploy.plan.decide import Decision
from ppdeploy.plan.handoff import as_predicted, other_modes, token_bytes
from ppdeploy.plan.measured import MeasuredLink, alike, negotiated_mbit, still_true
from ppdeploy.plan.network import (
    LAN_LATENCY,
    SOCKET_BITS,
    TCP_GOODPUT,
    Link,
    rate_label,
)
from ppdeploy.plan.outlook import TIE, LinkOutlook, LoadPrediction, best_settings, outlook, predict_loads
from ppdeploy.plan.serving import Load, Pipeline, Prediction, Settings, predict
from ppdeploy.plan.speed import StageLoad
from ppdeploy.plan.types import Capacity, Curve, Fabric, Finding, NetworkCost, Outlook, Speed, StageLink

PROMPT, ANSWER = 1024, 128
"""Tokens of the requests that are predicted for: those of the measurements (docs/speed.md)."""

MBIT = 1e6

CURVE_USERS = (1, 2, 4, 8, 16, 32, 64)
CURVE_RATES_MBIT = (1000, 2500, 10000, 25000, 100000)
"""What drawings show: users at once, and rates of the links between hosts."""

MOST_COMPARED = 16
"""Stages up to which other sizes of a step are compared; more take too long for a plan."""

INSIDE_LATENCY = 10e-6
"""Seconds one way between two GPUs of a host; rough."""

WORTH_CHANGING = 1.05
"""Tokens/s of another mode of the handoff over those of the one that is set, from which on the plan says so."""

NO_LIMIT = 1e15
"""Bits/s of a network that takes no time, to tell what the real one costs."""


@dataclass(frozen=True)
class SpeedModel:
    """A planned pipeline as the speed model has it."""

    pipeline: Pipeline
    settings: Settings
    input_tokens: int
    """Of each prompt that the plan predicts for."""
    output_tokens: int


@dataclass(frozen=True)
class Expected:
    """What is expected of a pipeline, the findings on its links, and the model behind it; None where nothing can be."""

    outlook: Outlook
    findings: tuple[Finding, ...]
    model: SpeedModel | None


def expect(
    pipeline: str,
    decision: Decision,
    shape: ModelShape,
    fabric: Mapping[str, Fabric],
    *,
    latency_seconds: float | None = None,
    measured: Sequence[MeasuredLink] = (),
    dtype: str | None = None,
    handoff: str = "off",
    overlap_possible: bool = False,
    staggers: bool = False,
    curves: bool = False,
) -> Expected:
    """Return the outlook of a pipeline, the findings on its links, and the model of its speed.

    `fabric` has the NIC of each host. Of a link that is in `measured`, and whose NICs are as they were then, rate and
    latency are those measured; else the rate is the negotiated one, and where a NIC does not say it, no speed is
    predicted. `latency_seconds` is one way between two hosts (None: as measured, else that of a switch), `dtype` the
    activations' type where the inventory sets one, and `handoff` the mode of the handoff plugin, off where it is idle.
    `overlap_possible` has what its overlap would bring told where it is off, and `staggers` says whether it may change
    the rhythm of requests (`ppdeploy.plan.handoff.may_stagger`). `curves` adds what drawings show, some 40 replays
    more.
    """
    latency = LAN_LATENCY if latency_seconds is None else latency_seconds
    hosts = [row.host for row in decision.memory]
    rates = [_rate_mbit(fabric, *pair) for pair in _pairs(hosts)]
    known_links = still_true(measured, fabric)
    seen = [known_links.get(pair) for pair in _pairs(hosts)]
    rounded = alike(link.rate_mbit for link in seen if link)
    prompt, answer = request_tokens(decision.capacity.max_model_len)
    value_bytes = 4 if (dtype or "").startswith("float32") else 2
    size = token_bytes(handoff, shape.hidden_size, value_bytes)
    known = Outlook(
        rough=_rough(decision, shape),
        input_tokens=prompt,
        output_tokens=answer,
        latency_seconds=latency,
        handoff_bytes=size,
        handoff=handoff,
    )
    links = [
        _link(load, pair, rate, latency)
        if link is None
        else _measured_link(load, link, rounded[link.rate_mbit], latency_seconds)
        for load, pair, rate, link in zip(decision.loads[:-1], _pairs(hosts), rates, seen, strict=True)
    ]
    if any(link is None for link in links):
        outlook_known, findings = _without_rate(pipeline, known, hosts, rates, links, size)
        told_links = _with(seen, outlook_known.links)
        return Expected(outlook_known.model_copy(update={"links": told_links}), findings, None)
    joined = Pipeline(_shared(decision.loads), tuple(link for link in links if link is not None), size)
    if not decision.capacity.fits:
        plain = _with(seen, _plain_links(hosts, rates, links, size))
        return Expected(known.model_copy(update={"unknown": "the model does not fit", "links": plain}), (), None)
    settings = Settings(
        decision.capacity.batched_tokens,
        running(decision.capacity, prompt + answer),
        **as_predicted(handoff, staggers=staggers),
    )

    def model_of(mode: str) -> tuple[Pipeline, Settings]:
        """Return what another mode of the handoff plugin makes of it."""
        return (
            replace(joined, handoff_bytes=token_bytes(mode, shape.hidden_size, value_bytes)),
            replace(settings, **as_predicted(mode, staggers=staggers)),
        )

    few = len(joined.stages) <= MOST_COMPARED
    found = outlook(joined, settings, input_tokens=prompt, output_tokens=answer, compare=few)
    told = _with(seen, tuple(_told(link, hosts, rates[link.index]) for link in found.links))
    changed = few and found.best_settings != settings
    outcome = known.model_copy(
        update={
            "unknown": "" if found.predictions else "a link of it has no rate",
            "speeds": _speeds(found.predictions),
            "links": told,
            "network": _network_cost(joined, hosts, settings, prompt, answer) if found.predictions else None,
            "limiting_link": found.limiting_link,
            "requests_to_fill": found.requests_to_fill,
            "best_batched_tokens": found.best_settings.max_num_batched_tokens if few else None,
            "best_speeds": _speeds(found.best_predictions) if changed else (),
            "curves": _curves(joined, hosts, settings, prompt, answer) if curves and found.predictions else (),
        }
    )
    if overlap_possible and handoff == "off" and few and outcome.network is not None:
        outcome = outcome.model_copy(update=_overlapped(*model_of("overlap"), prompt, answer))
    said = list(_findings(pipeline, told))
    if handoff != "off" and few and outcome.network is not None:
        # What fp8 cannot send in eight bits is as overlap sends it: nothing is told of its text then.
        exact = size == token_bytes("overlap", shape.hidden_size, value_bytes)
        named = handoff.replace("fp8", "overlap") if exact else handoff
        others = {mode: model_of(mode) for mode in other_modes(named)}
        said.extend(_better_modes(pipeline, named, found.predictions[-1], others))
    model = SpeedModel(joined, settings, prompt, answer) if found.predictions else None
    return Expected(outcome, tuple(said), model)


def _rough(decision: Decision, shape: ModelShape) -> str:
    """Return in what a pipeline differs from those that the model of speed was measured on (docs/speed.md)."""
    if decision.serving.device == "cpu":
        return "a CPU's speed is hardly known"
    differs = {
        "mixtures of experts": shape.num_experts > 0,
        "quantised weights": shape.quantization is not None,
        "computing in float32": decision.serving.value_bytes > 2,
        "tensor parallelism": decision.serving.tensor_parallel_size > 1,
        f"{len(decision.memory)} stages": len(decision.memory) > 2,
        "other GPUs than H200": any("H200" not in gpu.name for gpu in decision.gpus),
    }
    found = ", ".join(what for what, true in differs.items() if true)
    return f"not measured: {found}" if found else ""


def request_tokens(max_model_len: int) -> tuple[int, int]:
    """Return the tokens of prompt and answer to predict for: PROMPT and ANSWER, or less in their proportion."""
    if max_model_len >= PROMPT + ANSWER:
        return PROMPT, ANSWER
    answer = max(max_model_len * ANSWER // (PROMPT + ANSWER), 1)
    return max(max_model_len - answer, 1), answer


def running(capacity: Capacity, tokens: int) -> int:
    """Return how many requests of so many tokens run at once: `max_num_seqs`, or what the KV cache holds.

    Two lower bounds of what it holds: its tokens, and the requests of 4,096 tokens, which in a model with windows are
    more than its tokens say.
    """
    held = max(capacity.kv_tokens // tokens, int(capacity.requests_at_4k) if tokens <= 4096 else 0, 1)
    return min(capacity.sequences, held)


def _pairs(hosts: Sequence[str]) -> list[tuple[str, str]]:
    return list(pairwise(hosts))


def _rate_mbit(fabric: Mapping[str, Fabric], sender: str, receiver: str) -> int | None:
    """Return the lower of two NICs' rates; None inside a host, or where a NIC does not say."""
    return negotiated_mbit(fabric[sender], fabric[receiver]) if sender != receiver else None


def _link(load: StageLoad, pair: tuple[str, str], rate_mbit: int | None, latency: float) -> Link | None:
    """Return the link behind a stage; None where its rate is not known."""
    if pair[0] == pair[1]:
        # The payload's rate is known here, not the line's.
        bits = 8 * load.gpu.peer_bandwidth
        return Link(bits / TCP_GOODPUT, min(INSIDE_LATENCY, latency), f"inside {pair[0]}", socket_bits=bits)
    if rate_mbit is None:
        return None
    # Each GPU of a TP group sends its part by sockets of its own (`isend_tensor_dict`).
    return Link(rate_mbit * MBIT, latency, socket_bits=SOCKET_BITS * load.gpus)


def _measured_link(load: StageLoad, link: MeasuredLink, rate_mbit: float, latency: float | None) -> Link:
    """Return a measured link; `rate_mbit` is what TCP carries of payload, `latency` goes before the measured one."""
    one_way = latency if latency is not None else link.latency_seconds
    return Link(
        rate_mbit * MBIT / TCP_GOODPUT,
        LAN_LATENCY if one_way is None else one_way,
        f"measured {rate_label(_round(rate_mbit) * MBIT)}",
        socket_bits=SOCKET_BITS * load.gpus,
    )


def _with(seen: Sequence[MeasuredLink | None], links: Sequence[StageLink]) -> tuple[StageLink, ...]:
    """Return the links with what was measured of them."""
    return tuple(
        link
        if one is None
        else link.model_copy(
            update={
                "measured_mbit": _round(one.rate_mbit),
                "measured_latency_seconds": None if one.latency_seconds is None else _round(one.latency_seconds),
                "measured_at": one.time,
            }
        )
        for link, one in zip(links, seen, strict=True)
    )


def _network_cost(
    pipeline: Pipeline, hosts: Sequence[str], settings: Settings, prompt: int, answer: int
) -> NetworkCost | None:
    """Return what the links between hosts cost; None where there are none."""
    crossing = [sender != receiver for sender, receiver in _pairs(hosts)]
    if not any(crossing):
        return None

    def speed(users: int, links: Sequence[Link]) -> Prediction:
        return predict(replace(pipeline, links=tuple(links)), Load(users, prompt, answer), settings)

    free = [
        replace(link, rate_bits=NO_LIMIT, socket_bits=NO_LIMIT, latency_s=0.0, burst_bytes=0.0) if one else link
        for link, one in zip(pipeline.links, crossing, strict=True)
    ]
    lone, ideal = speed(1, pipeline.links), speed(1, free)
    slowest = min(link.rate_bits for link, one in zip(pipeline.links, crossing, strict=True) if one)
    now = speed(32, pipeline.links).out_tokens_per_second
    # The rates that drawings show: 5 and 40 Gbit/s are rare.
    better = next((rate * MBIT for rate in CURVE_RATES_MBIT if rate * MBIT > slowest * 1.15), None)
    then = now
    if better is not None:
        faster = [
            replace(link, rate_bits=max(link.rate_bits, better), name="") if one else link
            for link, one in zip(pipeline.links, crossing, strict=True)
        ]
        then = speed(32, faster).out_tokens_per_second
    added = lone.tpot_s - ideal.tpot_s
    return NetworkCost(
        first_token_seconds=_round(lone.ttft_s - ideal.ttft_s),
        further_token_seconds=_round(added),
        further_token_share=_round(added / lone.tpot_s),
        tokens_per_second=_round(now),
        faster="" if better is None else rate_label(better),
        faster_tokens_per_second=_round(then),
    )


def _overlapped(pipeline: Pipeline, settings: Settings, prompt: int, answer: int) -> dict[str, object]:
    """Return what the outlook says of the handoff plugin's overlap where it is off: the best size of a step, speeds."""
    best = best_settings(pipeline, settings, input_tokens=prompt, output_tokens=answer)
    return {
        "overlap_batched_tokens": best.max_num_batched_tokens,
        "overlap_speeds": _speeds(predict_loads(pipeline, best, (prompt, answer))),
    }


def _better_modes(
    pipeline: str, handoff: str, now: LoadPrediction, others: Mapping[str, tuple[Pipeline, Settings]]
) -> Iterator[Finding]:
    """Yield that another mode of the handoff plugin, or none, would serve the same load better.

    For fp8 also that overlap would serve it as well, with the model's own text. `others` has the modes to compare,
    those to prefer first, each as the speed model has it.
    """
    load = Load(now.concurrency, now.input_tokens, now.output_tokens)
    speeds = {mode: predict(one[0], load, one[1]).out_tokens_per_second for mode, one in others.items()}
    present = now.prediction.out_tokens_per_second
    most = max(speeds.values())
    best = next(mode for mode, speed in speeds.items() if speed >= most * (1 - TIE))
    users = f"at {now.concurrency} users"
    if most > present * WORTH_CHANGING:
        reason = f"ppdeploy_handoff: {handoff} is predicted to serve {present:.0f} tokens/s {users}, {best} {most:.0f}"
    elif handoff.startswith("fp8") and speeds["overlap"] >= present * (1 - TIE):
        best = "overlap"
        reason = f"ppdeploy_handoff: {handoff} changes the model's text, and is predicted to serve no more {users}"
    else:
        return
    yield Finding(
        id="handoff-mode", verdict="slow", pipeline=pipeline, reason=reason, remedy=f"set ppdeploy_handoff: {best}"
    )


def _shared(loads: Sequence[StageLoad]) -> tuple[StageLoad, ...]:
    """Return the loads with equal ones as one object, which are then asked once."""
    seen: list[StageLoad] = []
    for load in loads:
        seen.append(next((one for one in seen if one == load), load))
    return tuple(seen)


def _speeds(predictions: Sequence[LoadPrediction]) -> tuple[Speed, ...]:
    return tuple(speed_of(one.concurrency, one.prediction) for one in predictions)


def speed_of(concurrency: int, prediction: Prediction) -> Speed:
    """Return a prediction as the plan has it, with four digits."""
    return Speed(
        concurrency=concurrency,
        ttft_seconds=_round(prediction.ttft_s),
        tpot_seconds=_round(prediction.tpot_s),
        tokens_per_second=_round(prediction.out_tokens_per_second),
    )


def _round(value: float) -> float:
    """Return a prediction with four digits: the last bits differ between machines, and nobody measures more."""
    return float(f"{value:.4g}")


def _curves(
    pipeline: Pipeline, hosts: Sequence[str], settings: Settings, prompt: int, answer: int
) -> tuple[Curve, ...]:
    def curve(rate_mbit: int | None) -> Curve:
        links = [
            link if rate_mbit is None or sender == receiver else replace(link, rate_bits=rate_mbit * MBIT)
            for link, (sender, receiver) in zip(pipeline.links, _pairs(hosts), strict=True)
        ]
        changed = replace(pipeline, links=tuple(links))
        return Curve(
            rate_mbit=rate_mbit,
            speeds=tuple(
                speed_of(users, predict(changed, Load(users, prompt, answer), settings)) for users in CURVE_USERS
            ),
        )

    crossing = any(sender != receiver for sender, receiver in _pairs(hosts))
    return tuple(curve(rate) for rate in (None, *(CURVE_RATES_MBIT if crossing else ())))


# ---- links


def _told(link: LinkOutlook, hosts: Sequence[str], rate_mbit: int | None) -> StageLink:
    sender, receiver = hosts[link.index], hosts[link.index + 1]
    inside = sender == receiver
    return StageLink(
        index=link.index,
        sender=sender,
        receiver=receiver,
        rate_mbit=rate_mbit,
        seconds_per_1000_tokens=_round(link.seconds_per_1000_tokens),
        # What joins the GPUs of a host is as it is.
        verdict="ready" if inside else link.verdict,
        reason=f"both stages are on {sender}" if inside else link.reason,
        remedy="" if inside else link.remedy,
        faster="" if inside else link.faster,
        gain=1.0 if inside else _round(link.gain),
    )


def _plain_links(
    hosts: Sequence[str], rates: Sequence[int | None], links: Sequence[Link | None], size: float
) -> tuple[StageLink, ...]:
    """Return links of which only their own time is known, because no speed is predicted."""
    found = []
    for index, ((sender, receiver), rate, link) in enumerate(zip(_pairs(hosts), rates, links, strict=True)):
        seconds = _round(link.seconds(1000 * size)) if link and link.rate_bits > 0 else None
        if sender == receiver:
            reason = f"both stages are on {sender}"
        elif seconds is None:
            reason = f"the rate from {sender} to {receiver} is not known"
        else:
            reason = f"1,000 prompt tokens take {seconds:.2g} s"
        found.append(
            StageLink(
                index=index,
                sender=sender,
                receiver=receiver,
                rate_mbit=rate,
                seconds_per_1000_tokens=seconds,
                verdict="ready",
                judged=False,
                reason=reason,
            )
        )
    return tuple(found)


def _without_rate(
    pipeline: str,
    known: Outlook,
    hosts: Sequence[str],
    rates: Sequence[int | None],
    links: Sequence[Link | None],
    size: float,
) -> tuple[Outlook, tuple[Finding, ...]]:
    silent = [f"{a} to {b}" for (a, b), link in zip(_pairs(hosts), links, strict=True) if link is None]
    reason = f"the NICs do not say the rate from {silent[0]}" + (f" and {len(silent) - 1} more" if silent[1:] else "")
    finding = Finding(
        id="link-rate-unknown",
        verdict="ready",
        pipeline=pipeline,
        reason=f"no speed is predicted: {reason}",
        remedy="see what it would be with `ppdeploy plan --what-if fabric=1g`, or measure it with `ppdeploy net`",
    )
    links_told = _plain_links(hosts, rates, links, size)
    return known.model_copy(update={"unknown": reason, "links": links_told}), (finding,)


def _findings(pipeline: str, links: Sequence[StageLink]) -> Iterator[Finding]:
    """Yield a finding for each kind of slow or blocked link; links of one rate are named together."""
    groups: dict[tuple[str, str, str], list[StageLink]] = {}
    for link in links:
        if link.verdict != "ready":
            groups.setdefault((link.verdict, link.reason, link.remedy), []).append(link)
    for (_, reason, remedy), found in groups.items():
        first = found[0]
        between = f"{first.sender} to {first.receiver}" + (f" and {len(found) - 1} more" if found[1:] else "")
        yield Finding(
            id="link-slow" if first.verdict == "slow" else "link-blocked",
            verdict=first.verdict,
            pipeline=pipeline,
            host=first.receiver if len(found) == 1 else None,
            reason=f"{between}: {reason}",
            remedy=remedy,
        )
