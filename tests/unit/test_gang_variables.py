"""The inventory's variables of the gang: they reach the agent, whose defaults they share, and no release."""

from __future__ import annotations

import dataclasses
from typing import Any

from ppdeploy.agent.settings import Settings
from ppdeploy.play import make_plan
from ppdeploy.spec import Spec
from tests.factories import make_cluster
from tests.factories_plan import make_pipeline_spec, make_source, make_spec


def planned(**wants: Any) -> tuple[dict[str, Any], str]:
    """Return the agent's settings and the release digest of a pipeline with these variables."""
    spec: Spec = make_spec(make_pipeline_spec(["node1", "node2"], **wants))
    (pipeline,) = make_plan(spec, make_cluster(2), {"tiny": make_source()}).pipelines
    return dict(pipeline.nodes[1].agent.settings), pipeline.release


def test_the_defaults_are_those_of_the_agent() -> None:
    settings, _ = planned()
    assert dataclasses.replace(Settings(), **settings) == Settings()
    assert {"budget", "budget_window", "lease", "refused_lease", "start_timeout"} == set(settings)


def test_they_change_the_agents_settings_and_no_release() -> None:
    _, release = planned()
    settings, same = planned(gang_failures=3, gang_window=600, gang_lease=60)
    assert (settings["budget"], settings["budget_window"], settings["lease"]) == (3, 600, 60)
    # A node whose agent alone is down gets no less time than one that is silent.
    assert settings["refused_lease"] == 60
    assert same == release
