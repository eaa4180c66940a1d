"""The inventory's variables of the gang: they reach the agent, whose defaults they share, and no release."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.agent.settings import Settings
from ppdeploy.play import agent_slice, make_plan
from ppdeploy.spec import Spec
from tests.factories import make_cluster
from tests.factories_plan import make_pipeline_spec, make_source, make_spec


def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **wants: Any) -> tuple[dict[str, Any], str]:
    """Return the agent's settings and the release digest of a pipeline with these variables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec: Spec = make_spec(make_pipeline_spec(["node1", "node2"], **wants))
    (pipeline,) = make_plan(spec, make_cluster(2), {"tiny": make_source()}).pipelines
    settings: dict[str, Any] = agent_slice(spec, pipeline)["settings"]
    return settings, pipeline.release


def test_the_defaults_are_those_of_the_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings, _ = planned(monkeypatch, tmp_path)
    assert dataclasses.replace(Settings(), **settings) == Settings()
    assert {"budget", "budget_window", "lease", "refused_lease", "start_timeout"} == set(settings)


def test_they_change_the_agents_settings_and_no_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, release = planned(monkeypatch, tmp_path)
    settings, same = planned(monkeypatch, tmp_path, gang_failures=3, gang_window=600, gang_lease=60)
    assert (settings["budget"], settings["budget_window"], settings["lease"]) == (3, 600, 60)
    # A node whose agent alone is down gets no less time than one that is silent.
    assert settings["refused_lease"] == 60
    assert same == release
