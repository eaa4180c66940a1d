"""All checks, and those of them that stop a run: pure functions over facts and probes.

A check that needs facts alone and is `blocked` is a finding of the plan too, so that preflight and `ppdeploy check`
say the same by the same function.
"""

from __future__ import annotations

from collections.abc import Iterator

# Each of these files adds its checks to the lists in `types`, in this order: the host comes first.
from ppdeploy.plan.checks import system  # isort: split

from ppdeploy.plan.checks import driver, gpu, nic, pair, pipeline
from ppdeploy.plan.checks.types import (
    NODE,
    PAIR,
    PIPELINE,
    Check,
    NodeSituation,
    Outcome,
    PairSituation,
    PipelineSituation,
    Scope,
)
from ppdeploy.plan.types import Finding

__all__ = [
    "NODE",
    "PAIR",
    "PIPELINE",
    "Check",
    "NodeSituation",
    "Outcome",
    "PairSituation",
    "PipelineSituation",
    "Scope",
    "blocked_findings",
    "catalogue",
]

FILES = (system, driver, gpu, nic, pair, pipeline)
"""The files of checks, one subject each."""

AnyCheck = Check[NodeSituation] | Check[PairSituation] | Check[PipelineSituation]


def catalogue() -> list[AnyCheck]:
    """Return every check: those of a node, of a pair, of a pipeline."""
    return [*NODE, *PAIR, *PIPELINE]


def blocked_findings(situation: PipelineSituation) -> Iterator[Finding]:
    """Yield what facts alone say must not start: the part of the checks that preflight stops at."""
    for node in situation.nodes:
        for check in NODE:
            outcome = check.outcome(node) if check.in_plan and check.verdict == "blocked" else None
            if outcome and outcome.verdict == "blocked":
                yield _finding(check.id, situation.pipeline, node.host, outcome)
    for over in PIPELINE:
        outcome = over.outcome(situation) if over.in_plan and over.verdict == "blocked" else None
        if outcome and outcome.verdict == "blocked":
            yield _finding(over.id, situation.pipeline, outcome.host, outcome)


def _finding(name: str, pipeline: str, host: str | None, outcome: Outcome) -> Finding:
    return Finding(
        id=name, verdict=outcome.verdict, pipeline=pipeline, host=host, reason=outcome.evidence, remedy=outcome.remedy
    )
