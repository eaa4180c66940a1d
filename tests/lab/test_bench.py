"""A benchmark of the served pipeline by vLLM's own client: measured, kept, and nearer to the truth afterwards."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.cluster import PIPELINE, Cluster, Done

# Few and short requests: two starts of the client are nearly all of the time that it takes.
WORDS = ("bench", "--limit", PIPELINE, "--users", "1,4", "--input", "48", "--output", "16", "--prompts", "12")


@pytest.fixture(scope="module")
def benched(served: Cluster) -> Done:
    """The benchmark, after which the hosts are as they were."""
    before, pids, plan = served.listing(), served.pids(), served.plan()
    assert plan.pipelines[0].outlook.refinement is None
    done = served.ppdeploy(*WORDS, "--json")
    assert done.code == 0, done.said
    assert (served.pids(), served.listing()) == (pids, before)
    return done


def _error(load: Mapping[str, Any], kind: str) -> float:
    """Return how far a prediction is from what was measured, over all three figures: 0 is met, 0.7 a factor of two."""
    names = ("tokens_per_second", "ttft_seconds", "tpot_seconds")
    return sum(abs(math.log(load[kind][name] / load["measured"][name])) for name in names) / len(names)


def test_it_measures_each_load_whole(benched: Done) -> None:
    (run,) = benched.result["pipelines"]
    assert [(load["users"], load["prompts"]) for load in run["loads"]] == [(1, 12), (4, 12)]
    for load in run["loads"]:
        assert (load["completed"], load["failed"]) == (12, 0)
        assert 0 < load["ttft_seconds"] <= load["ttft_p99_seconds"] < load["seconds"]
        # Twelve answers of sixteen tokens in that time, as the client says itself.
        assert load["tokens_per_second"] == pytest.approx(12 * 16 / load["seconds"], rel=0.02)
    one, four = (load["tokens_per_second"] for load in run["loads"])
    assert four > one


def test_the_refined_prediction_is_nearer_than_the_plain_one(benched: Done) -> None:
    (run,) = benched.result["pipelines"]
    loads = run["refinement"]["loads"]
    assert [load["measured"]["concurrency"] for load in loads] == [1, 4]
    for load in loads:
        assert _error(load, "refined") < _error(load, "plain"), load
    # Three figures of each of two loads, which a noisy machine may contradict each other in.
    assert sum(_error(load, "refined") for load in loads) / 2 < 0.4, loads


def test_it_is_kept_and_the_next_plan_is_refined_with_the_same_release(served: Cluster, benched: Done) -> None:
    (run,) = benched.result["pipelines"]
    file = Path(run["file"])
    assert file.parent == served.inventory.parent.resolve() / ".ppdeploy" / "bench" / PIPELINE
    assert file.stat().st_mode & 0o777 == 0o644
    (pipeline,) = served.plan().pipelines
    assert pipeline.outlook.refinement is not None
    assert pipeline.outlook.refinement.model_dump(mode="json") == run["refinement"]
    assert pipeline.release == run["release"]
    for node in pipeline.nodes:
        assert not any(node.work.model_dump().values())
    shown = served.ppdeploy("plan")
    assert "refined by 1 benchmark of " in shown.out, shown.said


def test_nothing_of_it_is_left_on_the_hosts(served: Cluster, benched: Done) -> None:
    assert benched.code == 0
    for node in served.lab.nodes:
        # Fails where the folder is there, and prints units where there are any.
        script = "test ! -e /run/ppdeploy-bench; systemctl list-units --all --no-legend 'ppdeploy-bench*'"
        assert served.out(node, script) == ""


@contextmanager
def _asked(cluster: Cluster) -> Iterator[None]:
    """Let four clients ask the pipeline all the time, but for the start of each request's own SSH session."""
    done = threading.Event()

    def ask(prompt: str) -> None:
        while not done.is_set():
            cluster.complete(prompt, tokens=200)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("one", "two", "three", "four")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_pipeline_that_is_asked_is_not_measured(served: Cluster) -> None:
    with _asked(served):
        done = served.ppdeploy(*WORDS)
    assert done.code == 3, done.said
    assert "requests in flight" in done.error
    assert "--force" in done.error


def test_a_request_that_the_model_does_not_take_touches_no_host(served: Cluster) -> None:
    longest = served.plan().pipelines[0].capacity.max_model_len
    done = served.ppdeploy("bench", "--input", str(longest - 4), "--output", "100")
    assert done.code == 2, done.said
    assert f"more than the model's {longest}" in done.error
