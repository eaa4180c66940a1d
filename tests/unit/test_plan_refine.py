"""A cluster's own benchmarks refine what its plan expects, and nothing else of the plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from typing import Any

import pytest

from ppdeploy.plan import BenchRun, PipelinePlan, Plan, bench
from ppdeploy.plan.bench import BenchLoad, circumstances, matching
from ppdeploy.plan.build import speed_models
from ppdeploy.plan.refine import Factors, Measured, bounds, fit_factors, refined
from ppdeploy.plan.refinement import predicted
from ppdeploy.plan.serving import Load, Pipeline, Prediction, Settings, predict
from ppdeploy.play import make_plan
from scripts import fit_speed
from tests.factories import make_cluster
from tests.factories_plan import make_pipeline_spec, make_source, make_spec
from tests.unit.test_plan_decide import dense
from tests.unit.test_plan_expect import cluster

SETTINGS = Settings(8192, 1024)
LOADS = [Load(users, 1024, 128) for users in (1, 8, 32)]


def played(pipeline: Pipeline, factors: Factors, loads: Iterable[Load] = LOADS) -> list[Measured]:
    """Return what a pipeline with these factors would be measured to serve."""
    return [Measured(load, predict(refined(pipeline, factors), load, SETTINGS)) for load in loads]


# ---- the fit


@pytest.mark.parametrize(
    "factors",
    [
        Factors(),
        Factors(compute=0.8, memory=0.9, request=2.0, link=0.85),
        Factors(compute=1.2, memory=1.1),
        Factors(link=0.5),
        Factors(memory=0.6, request=4.0),
    ],
)
def test_the_fit_finds_known_factors_and_predicts_what_was_measured(factors: Factors) -> None:
    pipeline = fit_speed.pipeline("1 Gbit")
    measured = played(pipeline, factors)
    found = fit_factors(pipeline, SETTINGS, measured)
    # Seconds of a step and share of the bandwidth are hardly told apart by one model: the latter takes nearly all.
    for name in ("compute", "memory", "link"):
        assert getattr(found, name) == pytest.approx(getattr(factors, name), rel=0.05), (name, found)
    assert found.request == pytest.approx(factors.request, rel=0.2)
    for one in measured:
        again = predict(refined(pipeline, found), one.load, SETTINGS)
        assert astuple(again) == pytest.approx(astuple(one.speed), rel=0.02)


def test_a_load_that_was_not_measured_comes_out_right_too() -> None:
    pipeline = fit_speed.pipeline("1 Gbit")
    factors = Factors(compute=0.8, memory=0.9, link=0.8)
    found = fit_factors(pipeline, SETTINGS, played(pipeline, factors))
    other = Load(16, 2000, 64)
    told, real = (predict(refined(pipeline, one), other, SETTINGS) for one in (found, factors))
    assert astuple(told) == pytest.approx(astuple(real), rel=0.05)
    plain = predict(pipeline, other, SETTINGS)
    assert abs(math.log(told.ttft_s / real.ttft_s)) < abs(math.log(plain.ttft_s / real.ttft_s)) / 3


def test_nothing_measured_changes_nothing() -> None:
    assert fit_factors(fit_speed.pipeline("1 Gbit"), SETTINGS, []) == Factors()


def test_no_factor_leaves_its_bounds_however_odd_the_figures() -> None:
    pipeline = fit_speed.pipeline("10 Gbit")
    for figures in (Prediction(1e-6, 1e-6, 1e9), Prediction(1e5, 1e3, 1e-3), Prediction(0.0, 0.0, 5.0)):
        found = fit_factors(pipeline, SETTINGS, [Measured(LOADS[1], figures)])
        for value, (least, most) in zip(astuple(found), bounds(pipeline), strict=True):
            assert least * 0.999 <= value <= most * 1.001
        constants = refined(pipeline, found).constants
        assert max(constants.compute_efficiency, constants.memory_efficiency) <= 1.0001


def test_a_benchmark_that_was_repeated_counts_as_its_middle() -> None:
    pipeline = fit_speed.pipeline("1 Gbit")
    fast, slow = (played(pipeline, Factors(memory=share)) for share in (1.0, 0.8))
    found = fit_factors(pipeline, SETTINGS, [*fast, *slow])
    assert 0.85 < found.memory < 0.95


@pytest.mark.parametrize("link", fit_speed.LINKS)
def test_the_runs_on_two_h200_stay_within_their_tolerance(link: str) -> None:
    pipeline = fit_speed.pipeline(link)
    own = [run for run in fit_speed.FITTED if run.link == link]
    measured = [
        # The median time of a further token was not written down for all of them: 0 is left out.
        Measured(Load(run.concurrency, 1024, 128), Prediction(run.ttft_s or 0.0, 0.0, run.out_tokens_per_second))
        for run in own
    ]
    better = refined(pipeline, fit_factors(pipeline, SETTINGS, measured))
    plain_errors: list[float] = []
    errors: list[float] = []
    for one in measured:
        for told, into in (
            (predict(pipeline, one.load, SETTINGS), plain_errors),
            (predict(better, one.load, SETTINGS), errors),
        ):
            into.append(told.out_tokens_per_second / one.speed.out_tokens_per_second - 1)
            into.append(told.ttft_s / one.speed.ttft_s - 1)
    assert max(map(abs, errors)) <= 0.20
    assert sum(error**2 for error in errors) <= sum(error**2 for error in plain_errors)
    # Chunks and lengths that nothing was fitted to stay within theirs.
    for run in (run for run in fit_speed.CHECKED if run.link == link):
        told = predict(better, Load(run.concurrency, run.input_tokens, run.output_tokens), Settings(run.chunk, 1024))
        assert abs(told.out_tokens_per_second / run.out_tokens_per_second - 1) <= 0.30, run
        assert run.ttft_s is None or abs(told.ttft_s / run.ttft_s - 1) <= 0.30, run


# ---- the plan


SPEC = make_spec(make_pipeline_spec(["node1", "node2"], device="cuda", kv_cache_gib=None, max_model_len=8192))
MODELS = {"tiny": dense(32)}
FACTS = cluster(1000)


def plan(benches: Sequence[BenchRun] = (), **more: Any) -> Plan:
    return make_plan(SPEC, FACTS, MODELS, benches=benches, **more)


def only(found: Plan) -> PipelinePlan:
    (pipeline,) = found.pipelines
    return pipeline


def bench_run(factors: Factors, time: str = "2026-11-30T03:55:00Z", **changes: Any) -> BenchRun:
    """Return a benchmark of that plan, of a cluster with these factors."""
    pipeline, model = speed_models(SPEC, FACTS, MODELS)["tiny"]
    assert model is not None
    loads = []
    for users in (1, 8, 32):
        load = Load(users, 1024, 128, Load(users, 1, 1).total())
        speed = predicted(model, load, factors)
        loads.append(
            BenchLoad(
                users=users,
                input_tokens=1024,
                output_tokens=128,
                prompts=load.total(),
                completed=load.total(),
                failed=0,
                seconds=10.0,
                tokens_per_second=speed.tokens_per_second,
                ttft_seconds=speed.ttft_seconds,
                ttft_p99_seconds=speed.ttft_seconds * 2,
                tpot_seconds=speed.tpot_seconds,
            )
        )
    run = BenchRun(
        pipeline="tiny",
        time=time,
        release="0" * 64,
        seed=1,
        circumstances=circumstances(pipeline),
        loads=tuple(loads),
    )
    return run.model_copy(update=changes)


SLOWER = Factors(compute=0.8, memory=0.8, link=0.9)


def test_a_plan_says_by_what_it_was_refined_and_keeps_the_plain_prediction() -> None:
    plain, found = only(plan()), only(plan([bench_run(SLOWER)]))
    refinement = found.outlook.refinement
    assert refinement is not None
    assert (refinement.benchmarks, refinement.latest) == (1, "2026-11-30T03:55:00Z")
    assert found.outlook.speeds == plain.outlook.speeds
    for load in refinement.loads:
        assert load.refined.tokens_per_second == pytest.approx(load.measured.tokens_per_second, rel=0.02)
        assert load.plain.tokens_per_second > load.measured.tokens_per_second * 1.05
    ratios = [
        a.tokens_per_second / b.tokens_per_second for a, b in zip(refinement.speeds, plain.outlook.speeds, strict=True)
    ]
    assert refinement.factor == pytest.approx(math.prod(ratios) ** (1 / 3), rel=0.001)
    assert 0.75 < refinement.factor < 0.95


def test_a_benchmark_changes_nothing_of_the_release_nor_of_what_is_decided() -> None:
    plain, found = plan(), plan([bench_run(SLOWER)])
    assert only(found).release == only(plain).release
    bare = only(found).model_copy(update={"outlook": only(found).outlook.model_copy(update={"refinement": None})})
    assert plain.model_copy(update={"pipelines": (bare,)}) == plain


@pytest.mark.parametrize(
    "change",
    [
        {"model": "f" * 64},
        {"vllm_version": "0.1.0"},
        {"partition": (20, 12)},
        {"devices": ("1 x NVIDIA H200", "1 x NVIDIA H200")},
        {"rates_mbit": (10000,)},
        {"batched_tokens": 512},
        {"tensor_parallel_size": 2},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_results_of_other_circumstances_are_not_used(change: dict[str, Any]) -> None:
    run = bench_run(SLOWER)
    other = run.model_copy(update={"circumstances": run.circumstances.model_copy(update=change)})
    assert other.circumstances != run.circumstances
    assert only(plan([other])).outlook.refinement is None
    assert only(plan([run, other])).outlook.refinement == only(plan([run])).outlook.refinement


def test_results_of_another_pipeline_and_of_failed_loads_are_not_used() -> None:
    run = bench_run(SLOWER)
    failed = tuple(load.model_copy(update={"failed": 1, "completed": load.prompts - 1}) for load in run.loads)
    assert only(plan([run.model_copy(update={"pipeline": "other"})])).outlook.refinement is None
    assert only(plan([run.model_copy(update={"loads": failed})])).outlook.refinement is None
    half = run.model_copy(update={"loads": (failed[0], *run.loads[1:])})
    refinement = only(plan([half])).outlook.refinement
    assert refinement is not None
    assert [load.measured.concurrency for load in refinement.loads] == [8, 32]


def test_several_benchmarks_are_counted_and_the_latest_is_named_whatever_their_order() -> None:
    runs = [bench_run(SLOWER, "2026-11-30T03:55:00Z"), bench_run(SLOWER, "2026-11-29T00:00:00Z")]
    first, second = (only(plan(order)).outlook.refinement for order in (runs, runs[::-1]))
    assert first == second
    assert first is not None
    assert (first.benchmarks, first.latest, first.loads[0].runs) == (2, "2026-11-30T03:55:00Z", 2)
    assert [run.time[:10] for run in matching(only(plan()), runs)] == ["2026-11-29", "2026-11-30"]


def test_a_benchmark_with_another_mode_of_the_handoff_refines_nothing() -> None:
    run = bench_run(SLOWER)
    assert run.circumstances.handoff == "off"
    for mode, refines in (("overlap", False), ("off", True), (None, True)):
        told = run.circumstances.model_copy(update={"handoff": mode})
        found = only(plan([run.model_copy(update={"circumstances": told})])).outlook.refinement
        assert (found is not None) == refines
    # A file from before the mode was kept says nothing of a pipeline on CPUs, where the plugin worked already.
    old = run.circumstances.model_copy(update={"handoff": None, "device": "cpu"})
    assert bench._known(old).handoff is None


def test_a_plan_at_another_latency_is_not_refined() -> None:
    assert only(plan([bench_run(SLOWER)], latency_seconds=0.02)).outlook.refinement is None


def test_a_pipeline_without_a_prediction_is_not_refined() -> None:
    found = only(make_plan(SPEC, cluster(None), MODELS, benches=[bench_run(SLOWER)]))
    assert found.outlook.unknown
    assert found.outlook.refinement is None


def test_a_cpu_may_be_far_from_its_guessed_rates() -> None:
    spec = make_spec(make_pipeline_spec(["node1", "node2"]))
    (model,) = (model for _, model in speed_models(spec, make_cluster(2), {"tiny": make_source()}).values())
    assert model is not None
    load = Load(4, 64, 8, 16)
    plain = predict(model.pipeline, load, model.settings)
    slow = replace(
        plain,
        tpot_s=plain.tpot_s * 20,
        ttft_s=plain.ttft_s * 20,
        out_tokens_per_second=plain.out_tokens_per_second / 20,
    )
    found = fit_factors(model.pipeline, model.settings, [Measured(load, slow)])
    told = predict(refined(model.pipeline, found), load, model.settings)
    assert astuple(told) == pytest.approx(astuple(slow), rel=0.2)
