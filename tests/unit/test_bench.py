"""What a benchmark asks, how its result is read and kept, and that play and command line plan the same by it."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ppdeploy.bench_report import bench_lines, bench_report, refinement_text
from ppdeploy.benches import bench_file, bench_text, read_benches
from ppdeploy.errors import InputError
from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.plan import BenchRun
from ppdeploy.plan.bench import AskedLoad, asked_loads, bench_argv, bench_failures, bench_load
from ppdeploy.plan.serving import Load
from ppdeploy.plan_page import plan_page
from ppdeploy.plan_report import plan_report
from ppdeploy.play import bench_of_play, plan_of_play
from tests.factories import make_cluster
from tests.unit.test_plan_refine import SLOWER, bench_run, only, plan

MEASURED = {
    "completed": 64,
    "failed": 0,
    "duration": 12.5,
    "output_throughput": 655.4,
    "median_ttft_ms": 810.0,
    "p99_ttft_ms": 1500.0,
    "median_tpot_ms": 21.5,
}
"""As `vllm bench serve` of 0.32.0 writes it, less what is not read."""


# ---- what is asked


@pytest.mark.parametrize(
    ("given", "most", "lengths"),
    [
        ((None, None), 8192, (1024, 128)),
        ((None, None), 1024, (896, 112)),
        ((None, None), 20, (3, 1)),
        ((2000, None), 8192, (2000, 128)),
        ((None, 500), 1024, (508, 500)),
        ((1000, None), 1024, (1000, 8)),
        ((64, 8), 1024, (64, 8)),
    ],
)
def test_requests_are_those_of_the_plan_or_what_the_model_takes(
    given: tuple[int | None, int | None], most: int, lengths: tuple[int, int]
) -> None:
    loads = asked_loads((32, 1, 8, 8), *given, most)
    assert [(load.input_tokens, load.output_tokens) for load in loads] == [lengths] * 3
    assert [(load.concurrency, load.total()) for load in loads] == [(1, 4), (8, 64), (32, 64)]
    assert sum(lengths) <= most - 16


@pytest.mark.parametrize(
    ("users", "given"),
    [((1,), (1020, 8)), ((1,), (2000, None)), ((1,), (None, 1024)), ((0,), (8, 8)), ((), (8, 8)), ((2000,), (8, 8))],
)
def test_what_the_model_does_not_take_is_refused(users: tuple[int, ...], given: tuple[int | None, int | None]) -> None:
    with pytest.raises(InputError, match=r"--users|--input|--output"):
        asked_loads(users, *given, 1024)


def test_the_prompts_of_a_run_are_never_fewer_than_its_users() -> None:
    assert [load.total() for load in asked_loads((1, 8), 64, 8, 1024, prompts=4)] == [4, 8]


def test_the_client_is_told_what_the_server_was() -> None:
    argv = bench_argv(
        Load(8, 64, 16, 32),
        vllm="/opt/ppdeploy/venvs/x/bin/vllm",
        url="http://127.0.0.1:8000",
        served_model_name="qwen",
        tokenizer="/srv/models/qwen",
        vllm_args={"trust-remote-code": True, "tokenizer-mode": "mistral", "max-num-seqs": 4},
    )
    text = " ".join(argv)
    assert text.startswith("/opt/ppdeploy/venvs/x/bin/vllm bench serve ")
    for words in (
        "--base-url http://127.0.0.1:8000",
        "--model qwen --tokenizer /srv/models/qwen --tokenizer-mode mistral --trust-remote-code",
        "--random-input-len 64 --random-output-len 16 --num-prompts 32 --max-concurrency 8 --ignore-eos",
    ):
        assert words in text
    assert "max-num-seqs" not in text


# ---- what came out


def asked(users: int = 8) -> AskedLoad:
    return AskedLoad(users=users, input_tokens=1024, output_tokens=128, prompts=64, argv=("x",), predicted=None)


def test_the_clients_figures_are_read_in_seconds() -> None:
    load = bench_load(asked(), MEASURED)
    assert (load.tokens_per_second, load.ttft_seconds, load.ttft_p99_seconds) == (655.4, 0.81, 1.5)
    assert (load.tpot_seconds, load.seconds) == (0.0215, 12.5)
    assert load.whole


def test_requests_that_were_not_answered_count_as_failed() -> None:
    assert bench_load(asked(), {**MEASURED, "completed": 60, "failed": 4}).failed == 4
    # A client that says nothing of failures, or not all.
    assert bench_load(asked(), {"completed": 60}).failed == 4
    assert not bench_load(asked(), {**MEASURED, "completed": 60}).whole


def test_each_load_that_failed_is_named_once() -> None:
    loads = [asked(1), asked(8), asked(32)]
    told: dict[int, dict[str, Any]] = {1: {"ok": True}, 8: {"ok": False, "reason": "it did not end within 900 s"}}
    found = [bench_load(asked(1), {**MEASURED, "completed": 63, "failed": 1})]
    assert list(bench_failures("tiny", loads, told, found)) == [
        "pipeline tiny with 1 user: 1 of 64 requests failed: see `ppdeploy logs`",
        "pipeline tiny with 8 users: it did not end within 900 s",
        "pipeline tiny with 32 users: it was not tried after the failure before it",
    ]
    assert list(bench_failures("tiny", [asked(1)], {1: {"ok": True}}, [bench_load(asked(1), MEASURED)])) == []


# ---- what is kept


def test_a_benchmark_is_kept_in_a_file_of_its_own_and_read_again(tmp_path: Path) -> None:
    runs = [bench_run(SLOWER, f"2026-11-{day}T03:55:00Z") for day in (29, 30)]
    for run in runs:
        file = bench_file(tmp_path, run)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(bench_text(run))
    assert file.relative_to(tmp_path) == Path(".ppdeploy/bench/tiny/20261130T035500Z-000000000000.json")
    assert read_benches(tmp_path) == tuple(runs)
    assert read_benches(tmp_path / "elsewhere") == ()
    # One of a later ppdeploy says nothing to this one.
    file.write_text(bench_text(runs[1]).replace('"bench_schema": 1', '"bench_schema": 2'))
    assert read_benches(tmp_path) == (runs[0],)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"bench_schema": 1}', '{"bench_schema": 1, "loads": 3}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    file = bench_file(tmp_path, bench_run(SLOWER))
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(InputError, match=r"20261130T035500Z-000000000000\.json\): delete the file"):
        read_benches(tmp_path)


# ---- the play


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def inventory(model: Path, directory: Path) -> dict[str, Any]:
    values = {"ppdeploy_model": str(model), "ppdeploy_device": "cpu", "ppdeploy_max_model_len": 512}
    return {
        "pipelines": {"tiny": ["node1", "node2"]},
        "hosts": ["node1", "node2"],
        "values": {host: {**values, "ansible_host": f"198.18.0.1{host[-1]}"} for host in ("node1", "node2")},
        "directory": str(directory),
    }


FACTS = {host: own.model_dump(mode="json") for host, own in make_cluster(2).items()}


def asked_play(model: Path, directory: Path, **bench: Any) -> dict[str, Any]:
    """Return what the filter makes of a play that is a benchmark."""
    return plan_of_play(inventory(model, directory), FACTS, None, {"users": [1, 4], **bench})


def seen(planned: dict[str, Any], **outcomes: dict[str, Any]) -> dict[str, Any]:
    """Return what the tasks of the head registered: three times as slow as predicted, unless `outcomes` has another."""
    measured = []
    for load in planned["nodes"]["node1"]["bench"]["loads"]:
        said = load["predicted"]
        figures = {
            "completed": load["prompts"],
            "output_throughput": said["tokens_per_second"] / 3,
            "median_ttft_ms": said["ttft_seconds"] * 3000,
            "p99_ttft_ms": said["ttft_seconds"] * 4000,
            "median_tpot_ms": said["tpot_seconds"] * 3000,
        }
        well = {"ok": True, "reason": "", "users": load["users"], "measured": {**MEASURED, **figures}}
        measured.append(outcomes.get(f"users{load['users']}", well))
    return {"node1": {"ppdeploy__warmed": {"ok": True}, "ppdeploy__measured": measured, "ppdeploy__seed": "17"}}


NOW = datetime(2026, 11, 30, 3, 55, tzinfo=UTC)


def test_a_play_that_is_no_benchmark_asks_for_none(model: Path, tmp_path: Path) -> None:
    assert "bench" not in plan_of_play(inventory(model, tmp_path), FACTS)["nodes"]["node1"]


def test_a_play_has_command_and_prediction_of_each_load(model: Path, tmp_path: Path) -> None:
    planned = asked_play(model, tmp_path, input=64, output=8)
    own = planned["nodes"]["node1"]["bench"]
    assert (own["force"], own["timeout"]) == (False, 900)
    first, second = own["loads"]
    assert (first["users"], first["prompts"], second["users"], second["prompts"]) == (1, 4, 4, 64)
    assert first["argv"][0] == f"{planned['plan']['pipelines'][0]['environment']['directory']}/bin/vllm"
    assert second["predicted"]["tokens_per_second"] > first["predicted"]["tokens_per_second"]


@pytest.mark.parametrize("bench", [{"input": 600}, {"users": [0]}, {"users": "many"}, {"user": [1]}])
def test_what_cannot_be_asked_ends_the_play_before_any_host_is_touched(
    model: Path, tmp_path: Path, bench: dict[str, Any]
) -> None:
    with pytest.raises(InputError):
        asked_play(model, tmp_path, **bench)


def test_a_benchmark_is_filed_with_what_it_was_measured_with(model: Path, tmp_path: Path) -> None:
    planned = asked_play(model, tmp_path)
    found = bench_of_play(planned, seen(planned), str(tmp_path), NOW)
    assert found["failures"] == []
    kept = found["files"]["tiny"]
    run = BenchRun.model_validate_json(kept["text"])
    assert run.model_dump(mode="json") == found["runs"][0]
    assert Path(kept["path"]).parent == tmp_path / ".ppdeploy" / "bench" / "tiny"
    pipeline = planned["plan"]["pipelines"][0]
    assert (run.release, run.seed, run.time) == (pipeline["release"], 17, "2026-11-30T03:55:00Z")
    assert run.circumstances.model == pipeline["model"]["manifest_digest"]
    assert run.circumstances.devices == ("1 x CPU", "1 x CPU")
    assert run.circumstances.vllm_version == "0.32.0"
    assert [load.users for load in run.loads] == [1, 4]


def test_what_failed_is_told_and_what_was_measured_before_is_kept(model: Path, tmp_path: Path) -> None:
    planned = asked_play(model, tmp_path)
    failed = {"ok": False, "reason": "`vllm bench serve` ended with code 1: x", "measured": {}, "users": 4}
    found = bench_of_play(planned, seen(planned, users4=failed), str(tmp_path), NOW)
    assert found["failures"] == ["pipeline tiny with 4 users: `vllm bench serve` ended with code 1: x"]
    assert [load["users"] for load in found["runs"][0]["loads"]] == [1]


def test_a_pipeline_that_could_not_be_warmed_up_has_nothing_to_keep(model: Path, tmp_path: Path) -> None:
    planned = asked_play(model, tmp_path)
    told = {"node1": {"ppdeploy__warmed": {"ok": False, "reason": "a request was answered with HTTP 500: x"}}}
    found = bench_of_play(planned, told, str(tmp_path), NOW)
    assert (found["runs"], found["files"]) == ([], {})
    assert found["failures"] == ["pipeline tiny: a request was answered with HTTP 500: x"]


def test_a_kept_benchmark_refines_the_plan_of_a_play_and_changes_no_release(model: Path, tmp_path: Path) -> None:
    before = asked_play(model, tmp_path)
    kept = bench_of_play(before, seen(before), str(tmp_path), NOW)["files"]["tiny"]
    Path(kept["path"]).parent.mkdir(parents=True)
    Path(kept["path"]).write_text(kept["text"])
    after = plan_of_play(inventory(model, tmp_path), FACTS)
    refinement = after["plan"]["pipelines"][0]["outlook"].pop("refinement")
    assert before["plan"]["pipelines"][0]["outlook"].pop("refinement") is None
    assert refinement["benchmarks"] == 1
    assert after["plan"] == before["plan"]
    # The hosts are given the same, to the last value.
    slices = {host: {**own, "bench": None} for host, own in after["nodes"].items()}
    assert slices == {host: {**own, "bench": None} for host, own in before["nodes"].items()}


# ---- what people see


def test_a_report_has_measured_and_predicted_and_their_ratio() -> None:
    run = bench_run(SLOWER)
    load = run.loads[0]
    said = only(plan()).outlook.speeds[0]
    half = said.model_copy(update={"tokens_per_second": load.tokens_per_second * 2})
    text = "\n".join(
        bench_lines([run.model_copy(update={"loads": (load.model_copy(update={"predicted": half}),)}).model_dump()])
    )
    assert "ratio" in text
    assert " 0.50 " in text
    assert "refine nothing" not in text
    failed = load.model_copy(update={"completed": 3, "failed": 1})
    text = "\n".join(bench_lines([run.model_copy(update={"loads": (failed,)}).model_dump()]))
    assert "3 of 4" in text
    assert "refine nothing" in text


def test_a_plan_shows_by_what_it_was_refined() -> None:
    found = plan([bench_run(SLOWER)])
    refinement = only(found).outlook.refinement
    assert refinement is not None
    assert refinement_text(refinement) == f"refined by 1 benchmark of 2026-11-30: factor {refinement.factor:.2g}"
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(*plan_report(found))
    shown = console.export_text()
    assert "expected speed" in shown
    assert refinement_text(refinement) + ":" in shown
    assert refinement_text(refinement) in plan_page(found)
    console.print(*bench_report(bench_run(SLOWER), refinement))
    assert f"the plan of this pipeline is {refinement_text(refinement)}" in console.export_text()
