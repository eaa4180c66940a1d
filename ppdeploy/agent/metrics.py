"""What the agent tells Prometheus, gateways and operators: `/metrics`, `/healthz` and the status of this node."""

from __future__ import annotations

import math
from typing import Any

from ppdeploy.agent import budget, contact, core, head, progress
from ppdeploy.agent.messages import to_json
from ppdeploy.agent.settings import Settings
from ppdeploy.agent.sight import Local
from ppdeploy.agent.version import VERSION

_PHASES = (
    head.WAITING, head.STOPPING, head.STARTING, head.PROBING, head.SERVING, head.DRAINING, head.STOPPED, head.FAILED,
    head.RETIRED, head.WORKER,
)  # fmt: skip


def why_unhealthy(state: core.State, now: float, settings: Settings) -> str:
    """Return why no request may be sent here, empty when it may: the text of a 503 of `/healthz`."""
    if core.may_serve(state, now, settings):
        return ""
    if state.head.phase == head.WORKER:
        return "worker: the API is on the head"
    if state.head.phase != head.SERVING:
        return f"{state.head.phase}: {state.head.remark}"
    if state.unsure:
        return "serving, but this agent stood still and has not heard all peers since"
    return f"serving, but no token was proven for {progress.proof_age(state.head.progress, now):.0f} s"


def prometheus(state: core.State, local: Local, now: float, settings: Settings) -> str:
    """Return the metrics in Prometheus' text format; ages and durations are seconds."""
    mind, record = state.head, state.head.record
    pipeline = local.identity.pipeline
    lines = _Lines(f'pipeline="{pipeline}",node="{local.identity.node}"')
    lines.add("ppdeploy_gang_phase", "gauge", "1 for the phase that the gang is in.")
    for phase in _PHASES:
        lines.value("ppdeploy_gang_phase", 1 if phase == mind.phase else 0, f'phase="{phase}"')
    lines.one("ppdeploy_gang_healthy", "gauge", "Whether /healthz is 200.", core.may_serve(state, now, settings))
    lines.one("ppdeploy_gang_generation", "gauge", "Number of the generation.", record.generation.number)
    lines.add("ppdeploy_gang_restarts_total", "counter", "Generations that ended since this agent began, by kind.")
    for kind in ("exit", "stall", "start", "unheard", "reboot", "lost", "stop", "claim", "superseded", "identity"):
        lines.value("ppdeploy_gang_restarts_total", mind.restarts.get(kind, 0), f'reason="{kind}"')
    lines.one("ppdeploy_gang_failures", "gauge", "Failures that count against the budget.", len(record.failures))
    lines.one("ppdeploy_gang_recovery_seconds", "gauge", "From the last failure to serving again.", mind.recovered)
    age = progress.proof_age(mind.progress, now)
    if math.isfinite(age):
        lines.one("ppdeploy_gang_proof_age_seconds", "gauge", "Since tokens were last proven.", age)
    lines.add("ppdeploy_agent_peer_age_seconds", "gauge", "Since a peer's agent was last heard.")
    for name, known in sorted(state.contacts.items()):
        if math.isfinite(known.heard_at):
            lines.value("ppdeploy_agent_peer_age_seconds", now - known.heard_at, f'peer="{name}"')
    lines.one("ppdeploy_agent_storage_ok", "gauge", "Whether the record could be stored.", not local.storage_problem)
    lines.one(
        "ppdeploy_agent_disk_ok", "gauge", "Whether the state's file system can be written.", not local.disk_problem
    )
    return lines.text()


def status(state: core.State, local: Local, now: float, settings: Settings) -> dict[str, Any]:
    """Return everything that this agent knows, for `ppdeploy status`; ages are seconds."""
    mind, record = state.head, state.head.record
    peers = {
        name: {
            "heard": contact.fresh(known, now, settings) is not None,
            "age": round(now - known.heard_at, 1) if math.isfinite(known.heard_at) else None,
            "error": known.error,
            "answer": to_json(known.answer) if known.answer else None,
        }
        for name, known in sorted(state.contacts.items())
    }
    counted = budget.recent(record.failures, now, settings)
    return {
        "own": to_json(core.answer(state, local)),
        "version": VERSION,
        "now": round(now, 2),
        "healthy": core.may_serve(state, now, settings),
        "why_unhealthy": why_unhealthy(state, now, settings),
        "phase": mind.phase,
        "phase_age": round(now - mind.since, 1),
        "remark": mind.remark,
        "generation": list(record.generation),
        "release": record.release,
        "serving_seconds": round(now - mind.serving_since, 1) if math.isfinite(mind.serving_since) else None,
        "wanted": record.wanted,
        "serial": record.serial,
        "failed": record.failed,
        "last_reason": record.last_reason,
        "restarts": dict(mind.restarts),
        "failures": [
            {"age": round(now - f.at, 1), "reason": f.reason, "generation": f.generation.number}
            for f in record.failures
        ],
        "budget": {
            "limit": settings.budget,
            "window": settings.budget_window,
            "left": max(0, settings.budget - len(counted)),
        },
        "history": [
            {"at": round(c.at, 2), "phase": c.phase, "generation": c.generation.number, "remark": c.remark}
            for c in mind.history
        ],
        "series": list(record.series),
        "recovered_seconds": round(mind.recovered, 1),
        "proof_age": _finite(progress.proof_age(mind.progress, now)),
        "stall_limit": mind.progress.limit,
        "storage_problem": local.storage_problem,
        "disk_problem": local.disk_problem,
        "peers": peers,
    }


def _finite(value: float) -> float | None:
    return round(value, 1) if math.isfinite(value) else None


class _Lines:
    """Lines of Prometheus' text format, each with the same labels first."""

    def __init__(self, labels: str) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def add(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def value(self, name: str, value: float, labels: str = "") -> None:
        shown = f"{self._labels},{labels}" if labels else self._labels
        self._lines.append(f"{name}{{{shown}}} {float(value):g}")

    def one(self, name: str, kind: str, text: str, value: float) -> None:
        self.add(name, kind, text)
        self.value(name, value)

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"
