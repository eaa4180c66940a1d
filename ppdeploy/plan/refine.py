"""A cluster's own benchmarks in the speed model: a few factors on its constants, by least squares, within bounds.

What is searched: the shares of computing and of memory bandwidth that are reached, the seconds of a step that are
neither, the seconds of a request outside the stages, and the payload of a link. Few figures cannot tell five unknowns
apart, so each factor is also held to 1 a little (`PULL`): one that the figures say nothing of stays there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from ppdeploy.plan.least_squares import least_squares
from ppdeploy.plan.network import TCP_GOODPUT
from ppdeploy.plan.serving import Load, Pipeline, Prediction, Settings, predict

PULL = 0.02
"""Weight of a factor's logarithm beside a figure's: a factor of 2 counts as much as an error of 1.4 %."""

MOST_LOADS = 6
"""Different loads that are fitted, the newest; each is replayed some 70 times."""

MOST_STAGES = 16
"""Stages up to which a plan is refined; the replays of more take too long."""

ROUNDS = 8


@dataclass(frozen=True)
class Factors:
    """By what the constants of the speed model are multiplied; 1 leaves one as it is."""

    compute: float = 1.0
    """On the share of the computing rate."""
    memory: float = 1.0
    """On the share of the memory bandwidth."""
    step: float = 1.0
    """On the seconds of a step on each stage that are neither."""
    request: float = 1.0
    """On the seconds of a request outside the stages."""
    link: float = 1.0
    """On what the links carry of payload."""


@dataclass(frozen=True)
class Measured:
    """A load and what came out: what the fit is made to."""

    load: Load
    speed: Prediction


def refined(pipeline: Pipeline, factors: Factors) -> Pipeline:
    """Return the pipeline with its constants and its links multiplied by the factors."""
    known = pipeline.constants
    return replace(
        pipeline,
        constants=replace(
            known,
            compute_efficiency=known.compute_efficiency * factors.compute,
            memory_efficiency=known.memory_efficiency * factors.memory,
            stage_overhead=known.stage_overhead * factors.step,
            api_latency=known.api_latency * factors.request,
        ),
        links=tuple(
            replace(link, rate_bits=link.rate_bits * factors.link, socket_bits=link.socket_bits * factors.link)
            for link in pipeline.links
        ),
    )


def bounds(pipeline: Pipeline) -> tuple[tuple[float, float], ...]:
    """Return the least and the most of each factor, in the order of `Factors`.

    No share of a GPU's data sheet is above 1, and no payload above the link's rate; the rates of a CPU, whose compute
    capability is (0, 0), are no data sheet's.
    """
    known = pipeline.constants
    guessed = any(stage.gpu.capability == (0, 0) for stage in pipeline.stages)
    # A tiny model on a CPU with other work spends nearly all of a step outside its products: 0.1 s was seen.
    return (
        (0.002, 50.0) if guessed else (0.02, 1 / known.compute_efficiency),
        (0.002, 50.0) if guessed else (0.02, 1 / known.memory_efficiency),
        (0.1, 2000.0 if guessed else 50.0),
        (0.1, 100.0),
        (0.05, 1 / TCP_GOODPUT),
    )


def fit_factors(pipeline: Pipeline, settings: Settings, measured: Sequence[Measured]) -> Factors:
    """Return the factors with which the pipeline is predicted nearest to what was measured; all 1 without any.

    Every figure (tokens/s, median TTFT, median TPOT) counts the same, by the logarithm of predicted over measured.
    Deterministic. Of more than MOST_LOADS different loads the last ones are taken.
    """
    groups: dict[Load, list[Prediction]] = {}
    for one in reversed(measured):
        if one.load in groups or len(groups) < MOST_LOADS:
            groups.setdefault(one.load, []).append(one.speed)
    if not groups:
        return Factors()

    def left_over(logs: Sequence[float]) -> list[float]:
        changed = refined(pipeline, Factors(*map(math.exp, logs)))
        left = [PULL * value for value in logs]
        for load, speeds in groups.items():
            said = predict(changed, load, settings)
            for speed in speeds:
                pairs = zip(astuple(said), astuple(speed), strict=True)
                left += [math.log(ours / theirs) for ours, theirs in pairs if ours > 0 and theirs > 0]
        return left

    logs = [(math.log(least), math.log(most)) for least, most in bounds(pipeline)]
    found = least_squares(left_over, [0.0] * len(logs), bounds=logs, rounds=ROUNDS)
    return Factors(*map(math.exp, found))
