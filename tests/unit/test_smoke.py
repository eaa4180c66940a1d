"""The smoke test's verdict: healthy answers pass, and each single thing that goes wrong is named."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ppdeploy.plan.types import PipelinePlan
from ppdeploy.report import pipeline_summary
from ppdeploy.smoke import judge, side_by_side
from tests.factories_plan import make_pipeline

USAGE = {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}


def answer(body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    return {"status": status, "body": json.dumps(body), "seconds": 0.5}


def stream(*texts: str, end: str = "data: [DONE]\n\n") -> dict[str, Any]:
    chunks = [{"choices": [{"text": text}]} for text in texts] + [{"choices": [], "usage": USAGE}]
    return {
        "status": 200,
        "body": "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + end,
        "seconds": 0.5,
    }


def healthy() -> dict[str, Any]:
    completion = answer({"choices": [{"text": "a node"}], "usage": USAGE})
    ranks = {
        "node1": [{"world_rank": 0, "world_size": 2, "pp_rank": 0}],
        "node2": [{"world_rank": 1, "world_size": 2, "pp_rank": 1}],
    }
    return {
        "wait": {"reached": True, "seconds": 31.0, "reason": ""},
        "ask": {
            "prompt": "hello to",
            "answers": {
                "health": {"status": 200, "body": "", "seconds": 0.01},
                "models": answer({"data": [{"id": "tiny-llama"}]}),
                "completion": completion,
                "chat": answer({"choices": [{"message": {"content": "x"}}], "usage": USAGE}),
                "stream": stream("a ", "node"),
            },
            "together": [completion, completion],
            "together_seconds": 2.0,
        },
        "before": {h: {"counters": {"rx_bytes": 0, "tx_bytes": 0}} for h in ranks},
        "after": {
            h: {
                "counters": {"rx_bytes": 50_000, "tx_bytes": 90_000},
                "ranks": seen,
                "state": {"ActiveState": "active"},
                "journal": [f"line of {h}"],
            }
            for h, seen in ranks.items()
        },
        "gateway": {
            "installed": True,
            "answers": {
                "refused": answer({"error": {"code": "invalid_api_key"}}, 401),
                "models": answer({"data": [{"id": "tiny-llama"}]}),
                "completion": completion,
            },
        },
    }


@pytest.fixture
def pipeline() -> PipelinePlan:
    return make_pipeline()


def test_a_healthy_pipeline_passes(pipeline: PipelinePlan) -> None:
    report = judge(pipeline, **healthy())
    assert report.failures() == []
    assert report.ok
    assert report.completion == "a node"
    assert report.tokens_per_second == 12.0
    assert report.journals["node2"] == ("line of node2",)


def fault(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(seen: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place = seen
        for part in parents:
            place = place[part]
        place[last] = value

    return apply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (fault("ask.answers.models", answer({"data": [{"id": "other"}]})), "models: /v1/models names other"),
        (fault("ask.answers.completion", answer({"error": "x"}, 500)), "completion: HTTP 500"),
        (fault("ask.answers.chat", answer({"error": "x"}, 500)), "chat: HTTP 500"),
        (fault("ask.answers.chat", {"error": "timed out", "seconds": 60}), "chat: no answer: timed out"),
        (fault("ask.answers.stream", stream("a ", "pod")), "differs from the same request unstreamed"),
        (fault("ask.answers.stream", stream("a ", "node", end="")), "did not end with"),
        (
            fault(
                "ask.answers.completion",
                answer({"choices": [{"text": "a node"}], "usage": {**USAGE, "total_tokens": 5}}),
            ),
            "usage does not add up",
        ),
        (fault("gateway", {"installed": True, "problem": "refused"}), "gateway: HAProxy on the head .*: refused"),
        (fault("gateway.answers.refused", answer({"data": []})), "gateway: a request without a key is not refused"),
        (fault("gateway.answers.models", answer({"data": []})), "gateway: /v1/models names nothing"),
        (fault("gateway.answers.completion", answer({"error": "x"}, 503)), "gateway: HTTP 503"),
        (fault("ask.together", [answer({"error": "x"}, 503)]), "concurrent: 1 of 1 failed: HTTP 503"),
        (fault("after.node2.ranks", []), "rank on node2: its log shows no rank"),
        (fault("after.node2.ranks", [{"world_rank": 0, "world_size": 2, "pp_rank": 0}]), "rank on node2"),
        (fault("after.node1.state", {"ActiveState": "failed"}), "rank on node1.*unit failed"),
        (fault("after.node2.counters", {"rx_bytes": 10, "tx_bytes": 10}), "fabric of node2: 10 bytes in"),
        (fault("after.node2.counters", None), "fabric of node2: the NIC's counters"),
    ],
)
def test_each_fault_is_named(pipeline: PipelinePlan, change: Callable[[dict[str, Any]], None], words: str) -> None:
    seen = copy.deepcopy(healthy())
    change(seen)
    report = judge(pipeline, **seen)
    assert not report.ok
    assert any(re.search(words, failure) for failure in report.failures()), report.failures()


def test_a_head_that_never_answers_is_named_with_its_reason(pipeline: PipelinePlan) -> None:
    seen = healthy() | {
        "wait": {"reached": False, "seconds": 9.0, "reason": "the rank died 3 times"},
        "ask": {},
    }
    report = judge(pipeline, **seen)
    assert report.failures() == ["health: the rank died 3 times"]


def test_a_model_without_chat_template_has_no_chat(pipeline: PipelinePlan) -> None:
    seen = healthy()
    seen["ask"]["answers"]["chat"] = {"status": 400, "body": "no chat template is set", "seconds": 0.1}
    assert judge(pipeline, **seen).ok


def test_journals_stand_side_by_side_with_the_newest_line_below() -> None:
    text = side_by_side({"node1": ["old", "new"], "node2": ["only"]}, width=50)
    rows = [line.split(" | ") for line in text.splitlines()]
    assert [cell.strip() for cell in rows[0]] == ["node1", "node2"]
    assert [cell.strip() for cell in rows[-1]] == ["new", "only"]
    assert side_by_side({}) == "no journal could be read"


def test_only_what_is_no_fault_of_the_gateway_is_a_release_that_does_not_serve(pipeline: PipelinePlan) -> None:
    seen = healthy()
    seen["gateway"]["answers"]["completion"] = answer({"error": "x"}, 503)
    report = judge(pipeline, **seen)
    assert (report.ok, report.serves) == (False, True)
    # An apply and `smoke --json` say it as the sentence beside it does.
    said = pipeline_summary(pipeline, report.model_dump(mode="json"))
    assert (said["serves"], said["gateway_serves"]) == (True, False)
    seen["ask"]["answers"]["completion"] = answer({"error": "x"}, 500)
    assert not judge(pipeline, **seen).serves


@pytest.mark.parametrize("gateway", [None, {}, {"installed": False}])
def test_nothing_is_said_of_a_gateway_that_is_not_there(pipeline: PipelinePlan, gateway: Any) -> None:
    report = judge(pipeline, **{**healthy(), "gateway": gateway})
    assert report.ok
    assert pipeline_summary(pipeline, report.model_dump(mode="json"))["gateway_serves"] is None
    assert not [check for check in report.checks if check.id == "gateway"]
