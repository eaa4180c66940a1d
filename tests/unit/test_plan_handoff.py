"""What the plan says about the handoff plugin, and what a rank is given."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

from ppdeploy import locks
from ppdeploy.paths import data_root
from ppdeploy.plan.handoff import ARCHITECTURES, RAN, handoff_findings, why_idle
from ppdeploy.plan.serving import Load, Settings, predict
from ppdeploy.render import release_json
from scripts import fit_speed
from tests.factories import make_cluster
from tests.factories_plan import make_pipeline


def findings(mode: str, **about: Any) -> list[str]:
    """Return the reasons that the plan gives for a pipeline with which the plugin was tested, but for `about`."""
    usual: dict[str, Any] = {
        "device": "cuda",
        "vllm_version": "0.26.0",
        "architecture": "Qwen3ForCausalLM",
        "stages": 2,
        **about,
    }
    return [found.reason for found in handoff_findings("chat", mode, why_idle(**usual), usual["stages"])]


def test_nothing_is_said_where_it_works_or_is_off() -> None:
    assert findings("lossless") == findings("overlap:64") == findings("off", stages=1) == []
    assert findings("lossless", stages=3) == []


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"stages": 1}, "overlap will change nothing: there is one stage, so nothing is handed on"),
        ({"vllm_version": "0.33.0"}, "was not tested with vLLM 0.33.0 on cuda (tested: 0.26.0 on cuda"),
        ({"device": "cpu"}, "was not tested with vLLM 0.26.0 on cpu"),
        ({"architecture": "DeepseekV3ForCausalLM"}, "does not know the layers of DeepseekV3ForCausalLM"),
        ({"stages": 4}, "overlap is for two stages, and with 4 it does what lossless does"),
    ],
)
def test_what_it_will_not_do_is_a_finding(about: dict[str, Any], reason: str) -> None:
    (said,) = findings("overlap", **about)
    assert reason in said
    assert said.startswith("ppdeploy_handoff: overlap ")


def test_the_tables_are_the_plugins_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(data_root() / "ppdeploy_handoff" / "src"))
    versions = importlib.import_module("ppdeploy_handoff.versions")
    families = importlib.import_module("ppdeploy_handoff.families")
    assert set(versions.TESTED) == set(RAN)
    # Every class of its table is an architecture of its own name too.
    assert set(families.FAMILIES) <= ARCHITECTURES


def test_a_mode_is_in_the_environment_of_every_rank_and_makes_another_release() -> None:
    facts = make_cluster(2)
    plain, with_it, other = (make_pipeline(facts=facts, handoff=mode) for mode in ("off", "lossless", "overlap"))
    assert [node.rank_env.get("PPDEPLOY_HANDOFF") for node in (*plain.nodes, *with_it.nodes)] == [
        *(None, None),
        *("lossless", "lossless"),
    ]
    assert len({release_json(pipeline) for pipeline in (plain, with_it, other)}) == 3
    assert with_it.environment == other.environment != plain.environment
    lock = locks.by_digest(plain.environment.lock_digest)
    assert with_it.environment.lock_digest == locks.with_handoff(lock).digest
    assert with_it.environment.directory.endswith(locks.with_handoff(lock).directory_name)
    assert [finding.id for finding in plain.findings if finding.id == "handoff-idle"] == []


def test_the_plan_reckons_with_half_the_bytes_where_the_plugin_works(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = make_cluster(2)
    wants = {"off": {}, "lossless": {"handoff": "lossless"}, "overlap": {"handoff": "overlap:64"}}
    monkeypatch.setattr("ppdeploy.plan.handoff.RAN", frozenset())
    idle = {mode: make_pipeline(facts=facts, **want).outlook.handoff_bytes for mode, want in wants.items()}
    monkeypatch.setattr("ppdeploy.plan.handoff.RAN", frozenset({(locks.default_version("cpu"), "cpu")}))
    found = {mode: make_pipeline(facts=facts, **want).outlook.handoff_bytes for mode, want in wants.items()}
    assert len(set(idle.values())) == 1
    assert found == {"off": idle["off"], "lossless": idle["off"] // 2, "overlap": idle["off"] // 2}


@pytest.mark.parametrize(
    ("mode", "chunk", "measured"),
    # docs/measured.md, "The handoff plugin": 1 Gbit/s, 32 users, 1024/128, 64 prompts: tok/s in all, TTFT, TPOT in ms.
    [("off", 2048, (3962, 2021, 57)), ("lossless", 2048, (5858, 1151, 40.1))],
)
def test_the_speed_model_meets_what_was_measured_with_half_the_bytes(
    mode: str, chunk: int, measured: tuple[float, float, float]
) -> None:
    pipeline = fit_speed.pipeline("1 Gbit")
    if mode == "lossless":
        pipeline = replace(pipeline, handoff_bytes=pipeline.handoff_bytes / 2)
    says = predict(pipeline, Load(32, 1024, 128, 64), Settings(chunk, 1024))
    predicted = (says.out_tokens_per_second * (1024 + 128) / 128, 1e3 * says.ttft_s, 1e3 * says.tpot_s)
    assert predicted == pytest.approx(measured, rel=0.15)
