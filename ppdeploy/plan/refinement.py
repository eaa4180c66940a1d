"""What the benchmarks that a cluster keeps say of a plan: the prediction refined by them, beside the plain one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from ppdeploy.plan.bench import BenchLoad, BenchRun, matching
from ppdeploy.plan.expect import SpeedModel, speed_of
from ppdeploy.plan.outlook import CONCURRENCIES
from ppdeploy.plan.refine import MOST_STAGES, Factors, Measured, fit_factors, refined
from ppdeploy.plan.serving import Load, Pipeline, Prediction, predict
from ppdeploy.plan.types import PipelinePlan, RefinedLoad, Refinement, Speed


def refine_plan(pipeline: PipelinePlan, model: SpeedModel | None, runs: Sequence[BenchRun]) -> PipelinePlan:
    """Return the plan with its refinement by those benchmarks that fit it; unchanged where none does.

    Nothing else of the plan changes. A plan of more than MOST_STAGES stages, or without a prediction, is not refined.
    """
    own = [run for run in matching(pipeline, runs) if any(load.whole for load in run.loads)]
    if model is None or not own or len(model.pipeline.stages) > MOST_STAGES:
        return pipeline
    loads = [load for run in own for load in run.loads if load.whole]
    factors = fit_factors(model.pipeline, model.settings, [_measured(load) for load in loads])
    better = refined(model.pipeline, factors)
    table = _table(model, better, loads)
    plain = {speed.concurrency: speed for speed in pipeline.outlook.speeds}
    speeds = tuple(
        _said(model, better, Load(users, model.input_tokens, model.output_tokens)) for users in CONCURRENCIES
    )
    ratios = [speed.tokens_per_second / plain[speed.concurrency].tokens_per_second for speed in speeds]
    found = Refinement(
        benchmarks=len(own),
        latest=own[-1].time,
        factor=_round(math.exp(sum(map(math.log, ratios)) / len(ratios))),
        **{name: _round(value) for name, value in asdict(factors).items()},
        speeds=speeds,
        loads=table,
    )
    return pipeline.model_copy(update={"outlook": pipeline.outlook.model_copy(update={"refinement": found})})


def predicted(model: SpeedModel, load: Load, factors: Factors | None = None) -> Speed:
    """Return what a model says of a load, with the factors where there are some."""
    return _said(model, refined(model.pipeline, factors) if factors else model.pipeline, load)


def _table(model: SpeedModel, better: Pipeline, loads: Sequence[BenchLoad]) -> tuple[RefinedLoad, ...]:
    groups: dict[Load, list[BenchLoad]] = {}
    for load in loads:
        groups.setdefault(load_of(load), []).append(load)
    return tuple(
        RefinedLoad(
            input_tokens=load.input_tokens,
            output_tokens=load.output_tokens,
            prompts=load.total(),
            runs=len(same),
            measured=_mean(same),
            plain=_said(model, model.pipeline, load),
            refined=_said(model, better, load),
        )
        for load, same in sorted(groups.items(), key=lambda item: (item[0].concurrency, item[0].input_tokens))
    )


def load_of(load: BenchLoad) -> Load:
    """Return a measured load as the speed model has it."""
    return Load(load.users, load.input_tokens, load.output_tokens, load.prompts)


def _measured(load: BenchLoad) -> Measured:
    return Measured(load_of(load), Prediction(load.ttft_seconds, load.tpot_seconds, load.tokens_per_second))


def _said(model: SpeedModel, pipeline: Pipeline, load: Load) -> Speed:
    return speed_of(load.concurrency, predict(pipeline, load, model.settings))


def _mean(loads: Sequence[BenchLoad]) -> Speed:
    return Speed(
        concurrency=loads[0].users,
        ttft_seconds=_round(sum(load.ttft_seconds for load in loads) / len(loads)),
        tpot_seconds=_round(sum(load.tpot_seconds for load in loads) / len(loads)),
        tokens_per_second=_round(sum(load.tokens_per_second for load in loads) / len(loads)),
    )


def _round(value: float) -> float:
    """Return a figure with four digits, as the plan's predictions have."""
    return float(f"{value:.4g}")
