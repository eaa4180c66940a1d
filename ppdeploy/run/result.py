"""What one run of a playbook came to, and the error and exit code that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ppdeploy.errors import (
    ApplyError,
    BlockedError,
    InputError,
    PpdeployError,
    RolledBackError,
    ServingError,
    UnreachableError,
)
from ppdeploy.run.plays import (
    CHECK_ROLE,
    PLANNING_TASKS,
    SERVES_AGAIN,
    SERVING_TASKS,
    SMOKE_PLAY,
    SMOKE_REPORTS,
)
from ppdeploy.run.sentences import Kind, known_sentence

Status = Literal["ok", "failed", "unreachable", "no_hosts", "interrupted", "error"]

#: Exit code of an interrupted run (DESIGN.md, command line).
INTERRUPTED = 130

#: Actions that do nothing but say that something is not as it must be.
_CHECKS = ("ansible.builtin.assert", "ansible.builtin.fail")


@dataclass(frozen=True)
class HostStats:
    """Ansible's own counts for one host, in tasks."""

    ok: int = 0
    changed: int = 0
    unreachable: int = 0
    failed: int = 0
    skipped: int = 0
    rescued: int = 0
    ignored: int = 0


@dataclass(frozen=True)
class Failure:
    """One host's failed task; `output` is all that Ansible printed of it, for --debug and -v."""

    host: str
    task: str
    kind: Kind
    sentence: str
    play: str = ""
    role: str = ""
    action: str = ""
    output: str = ""
    result: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_planning(self) -> bool:
        """Whether reading the inventory or planning failed: that happens here, not on the host."""
        spoke = "invocation" in self.result or "rc" in self.result
        return not self.role and self.task in PLANNING_TASKS and self.kind == "task" and not spoke

    @property
    def is_check(self) -> bool:
        """Whether a task failed that only looks."""
        return self.role == CHECK_ROLE or self.action in _CHECKS or self.task in PLANNING_TASKS

    @property
    def told(self) -> str:
        """The sentence with its task, without its host; a planning error names its own place."""
        return self.sentence if self.is_planning else f"{self.task}: {self.sentence}"


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run.

    `results` holds, for each task name that the caller wanted kept, host -> the task's result. `facts` holds,
    for each host, what `set_fact` set under our own prefix `ppdeploy__`. `messages` are Ansible's own errors
    outside any task. `check` says that the counted changes were only foreseen.
    """

    status: Status
    return_code: int
    seconds: float
    stats: dict[str, HostStats] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    results: dict[str, dict[str, Mapping[str, Any]]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    limit: str | None = None
    check: bool = False

    @property
    def unreachable(self) -> tuple[Failure, ...]:
        """The hosts that could not be reached or logged in to."""
        return tuple(failure for failure in self.failures if failure.kind == "unreachable")

    @property
    def changed(self) -> int:
        """Tasks that changed something (in check mode: that would), over all hosts."""
        return sum(stats.changed for stats in self.stats.values())

    @property
    def exit_code(self) -> int:
        """The command's exit code for this outcome."""
        if self.status == "interrupted":
            return INTERRUPTED
        error = self.error()
        return error.exit_code if error else 0

    def error(self) -> PpdeployError | None:
        """Return the error that this outcome stands for; None when all went well, or nobody wanted it any more.

        Every failed host is named; the type, and so the exit code, is that of the failure to deal with first:
        what is wrong on this machine, then hosts out of reach, then the rest. All that Ansible printed of the
        failures is attached as notes, which a traceback shows.
        """
        if self.status in ("ok", "interrupted"):
            return None
        if self.status == "no_hosts":
            return InputError(
                "no host matched",
                where=f"--limit {self.limit}" if self.limit else "the inventory",
                remedy="name hosts or groups below vllm; `ansible-inventory --graph` lists them",
            )
        if not self.failures:
            return self._without_failure()
        hosts: dict[str, list[str]] = {}  # many hosts mostly fail for one reason: tell it once
        # Each host fails when it does: by name, the same trouble is told in the same words.
        for failure in sorted(self.failures, key=lambda one: one.host):
            hosts.setdefault(failure.told, []).append(failure.host)
        planning = {failure.told for failure in self.failures if failure.is_planning}
        told = [text if text in planning else f"{', '.join(names)}: {text}" for text, names in hosts.items()]
        error = self._error_type()("; ".join(told))
        for failure in self.failures:
            error.add_note(failure.output)
        return error

    def raise_for_status(self) -> None:
        """Raise KeyboardInterrupt when the run was interrupted, and its error when it failed."""
        if self.status == "interrupted":
            raise KeyboardInterrupt
        error = self.error()
        if error:
            raise error

    def _error_type(self) -> type[PpdeployError]:
        kinds = {failure.kind for failure in self.failures}
        if "controller" in kinds or all(failure.is_planning for failure in self.failures):
            return InputError
        if "unreachable" in kinds:
            return UnreachableError
        if all(failure.play == SMOKE_PLAY for failure in self.failures):
            return RolledBackError if self._rolled_back() else ServingError
        if all(failure.task in SERVING_TASKS for failure in self.failures):
            return ServingError
        # Once something was changed, "nothing touched" would be a lie.
        touched = self.changed > 0 and not self.check
        if not touched and all(failure.is_check or failure.kind == "login" for failure in self.failures):
            return BlockedError
        return ApplyError

    def _rolled_back(self) -> bool:
        """Whether every pipeline that failed its smoke test serves its last release again."""
        failed = {name for own in self.facts.values() for name in own.get(SMOKE_REPORTS, {}).get("failed", ())}
        outcomes = [own[SERVES_AGAIN] for own in self.facts.values() if SERVES_AGAIN in own]
        return bool(outcomes) and all(outcomes) and len(outcomes) == len(failed)

    def _without_failure(self) -> PpdeployError:
        known = next((sentence for text in self.messages if (sentence := known_sentence(text))), None)
        if known:
            return InputError(known)
        text = "; ".join(self.messages) or f"it ended with code {self.return_code} and said nothing"
        # 5: wrong options; 1 and 4 without any task: an inventory or playbook that cannot be read.
        kind = InputError if not self.stats and self.return_code in (1, 4, 5) else ApplyError
        return kind(f"ansible-playbook failed: {text}", remedy="run it again with -v to see all it prints")
