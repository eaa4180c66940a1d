"""ansible-runner's stream of events, reduced to what we show (`Step`) and what we return (`RunResult`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppdeploy.run.redact import Redactor
from ppdeploy.run.result import Failure, HostStats, RunResult, Status
from ppdeploy.run.sentences import failure_sentence

#: Prefix of variables internal to a play; those that `set_fact` sets are given back to the caller.
_INTERNAL = "ppdeploy__"

StepKind = Literal[
    "play",
    "task",
    "started",
    "ok",
    "changed",
    "skipped",
    "failed",
    "ignored",
    "unreachable",
    "retry",
    "diff",
    "warning",
]

_ENDED: Mapping[str, StepKind] = {
    "runner_on_ok": "ok",
    "runner_on_skipped": "skipped",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
    "runner_retry": "retry",
}


@dataclass(frozen=True)
class Step:
    """One thing that happened, as the progress display and `--json` show it."""

    kind: StepKind
    play: str = ""
    role: str = ""
    task: str = ""
    host: str = ""
    text: str = ""
    output: str = ""


class EventReader:
    """Takes every event of one run; calls `show` for each step and builds the result at the end."""

    def __init__(
        self,
        show: Callable[[Step], None],
        *,
        keep: Collection[str] = (),
        redactor: Redactor | None = None,
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self._addresses = addresses or {}
        self._show = show
        self._redactor = redactor or Redactor()
        self._keep = frozenset(keep)
        self._results: dict[str, dict[str, Mapping[str, Any]]] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._failures: list[Failure] = []
        self._stats: dict[str, HostStats] = {}
        self._messages: list[str] = []
        self._touched = False
        self._unmatched = False

    def take(self, event: Mapping[str, Any]) -> bool:
        """Read one event; False tells ansible-runner not to write it to a file."""
        name = event.get("event", "")
        data = event.get("event_data") or {}
        place = {
            "play": data.get("play") or "",
            "role": data.get("role") or "",
            "task": data.get("task") or "",
        }
        if name == "playbook_on_play_start":
            self._show(Step("play", play=data.get("name") or ""))
        elif name in ("playbook_on_task_start", "playbook_on_handler_task_start"):
            self._show(Step("task", **place))
        elif name == "runner_on_start":
            self._show(Step("started", host=data["host"], **place))
        elif name in _ENDED:
            self._ended(name, data, place, self._said(event))
        elif name == "playbook_on_no_hosts_matched":
            self._unmatched = True
        elif name == "playbook_on_stats":
            self._stats = _stats(data)
        elif name == "runner_on_file_diff":
            self._show(Step("diff", host=data["host"], output=self._said(event), **place))
        elif name == "warning":
            self._show(Step("warning", text=self._said(event)))
        elif name in ("verbose", "error", "system_warning"):
            self._message(self._said(event))
        return False

    def result(
        self, *, return_code: int, seconds: float, interrupted: bool, limit: str | None, check: bool = False
    ) -> RunResult:
        """Return the outcome after the last event; `return_code` is ansible-playbook's."""
        failures = self._standing_failures()
        return RunResult(
            status="interrupted" if interrupted else self._status(return_code, failures),
            return_code=return_code,
            seconds=seconds,
            stats=self._stats,
            failures=failures,
            results=self._results,
            facts=self._facts,
            messages=tuple(self._messages),
            limit=limit,
            check=check,
        )

    def _ended(self, name: str, data: Mapping[str, Any], place: Mapping[str, str], output: str) -> None:
        host, result = data["host"], data.get("res") or {}
        kind = _ENDED[name]
        text = ""
        self._touched = True
        if kind == "ok":
            kind = "changed" if result.get("changed") else "ok"
            self._remember(place["task"], host, result)
        elif kind == "failed" and data.get("ignore_errors"):
            kind = "ignored"
        elif kind in ("failed", "unreachable"):
            trouble, text = failure_sentence(
                host, self._addresses.get(host, host), result, unreachable=kind == "unreachable"
            )
            text = self._redactor.text(text)
            self._remember(place["task"], host, result)
            action = data.get("resolved_action") or data.get("task_action") or ""
            self._failures.append(
                Failure(
                    host,
                    place["task"],
                    trouble,
                    text,
                    play=place["play"],
                    role=place["role"],
                    action=action,
                    output=output,
                    result=result,
                )
            )
        elif kind == "retry":
            # A module that is asked again and again may say how far it is.
            text = str(result.get("progress") or f"attempt {result.get('attempts')} of {result.get('retries')}")
        self._show(Step(kind, host=host, text=text, output=output, **place))

    def _said(self, event: Mapping[str, Any]) -> str:
        """Return what Ansible printed with an event, without colours and secrets."""
        return self._redactor.text(_plain(event.get("stdout") or ""))

    def _remember(self, task: str, host: str, result: Mapping[str, Any]) -> None:
        if task in self._keep:
            self._results.setdefault(task, {})[host] = result
        for name, value in (result.get("ansible_facts") or {}).items():
            if name.startswith(_INTERNAL):
                self._facts.setdefault(host, {})[name] = value

    def _message(self, text: str) -> None:
        if text.startswith("[ERROR]: "):
            self._messages.append(text.removeprefix("[ERROR]: "))
            if "leaves us with no hosts to target" in text:
                self._unmatched = True

    def _standing_failures(self) -> tuple[Failure, ...]:
        """Return one failure a host: the last, and none where a `rescue` took care of all of them."""
        last = {failure.host: failure for failure in self._failures}
        if not self._stats:
            return tuple(last.values())
        return tuple(
            failure
            for host, failure in last.items()
            if (stats := self._stats.get(host, HostStats())).failed or stats.unreachable
        )

    def _status(self, return_code: int, failures: tuple[Failure, ...]) -> Status:
        if any(failure.kind == "unreachable" for failure in failures):
            return "unreachable"
        if failures:
            return "failed"
        if self._unmatched and not self._touched:
            return "no_hosts"
        return "ok" if return_code == 0 else "error"


def _stats(data: Mapping[str, Any]) -> dict[str, HostStats]:
    names = {"ok": "ok", "changed": "changed", "dark": "unreachable", "failures": "failed"}
    names |= {"skipped": "skipped", "rescued": "rescued", "ignored": "ignored"}
    hosts = sorted(data.get("processed") or {})
    return {
        host: HostStats(**{ours: int((data.get(theirs) or {}).get(host, 0)) for theirs, ours in names.items()})
        for host in hosts
    }


def _plain(text: str) -> str:
    """Strip colour codes, which a user's own settings may bring in."""
    return re.sub(r"\x1b\[[0-9;]*[mK]", "", text).strip()
