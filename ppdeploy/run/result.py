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
    ServingError,
    UnreachableError,
)
from ppdeploy.run.sentences import Kind

Status = Literal["ok", "failed", "unreachable", "no_hosts", "interrupted", "error"]

#: Exit code of an interrupted run (DESIGN.md, command line).
INTERRUPTED = 130


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
    role: str = ""
    action: str = ""
    output: str = ""
    result: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"{self.host}: {self.task}: {self.sentence}"


@dataclass(frozen=True)
class RunResult:
    """The outcome of a run.

    `results` holds, for each task name that the caller wanted kept, host -> the task's result. `facts`
    holds, for each host, what `set_fact` set under our own prefix `ppdeploy__`. `messages` are Ansible's own
    errors outside any task.
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

    @property
    def unreachable(self) -> tuple[Failure, ...]:
        """The hosts that could not be reached or logged in to."""
        return tuple(failure for failure in self.failures if failure.kind == "unreachable")

    @property
    def changed(self) -> int:
        """Tasks that changed something, over all hosts."""
        return sum(stats.changed for stats in self.stats.values())

    @property
    def exit_code(self) -> int:
        """The command's exit code for this outcome."""
        if self.status == "interrupted":
            return INTERRUPTED
        error = self.error()
        return error.exit_code if error else 0

    def error(self) -> PpdeployError | None:
        """Return the error that this outcome stands for, or None when all went well.

        Every failed host is named; the type, and so the exit code, is that of the failure to deal with first:
        what is wrong on this machine, then hosts out of reach, then the rest.
        """
        if self.status == "ok":
            return None
        if self.status == "no_hosts":
            return InputError(
                "no host matched",
                where=f"--limit {self.limit}" if self.limit else "the inventory",
                remedy="name hosts or groups below vllm; `ansible-inventory --graph` lists them",
            )
        if not self.failures:
            return self._without_failure()
        shown = self.failures
        return self._error_type()("; ".join(str(failure) for failure in shown))

    def raise_for_status(self) -> None:
        """Raise KeyboardInterrupt when the run was interrupted, and its error when it failed."""
        if self.status == "interrupted":
            raise KeyboardInterrupt
        error = self.error()
        if error:
            raise error

    def _error_type(self) -> type[PpdeployError]:
        kinds = {failure.kind for failure in self.failures}
        if "controller" in kinds:
            return InputError
        if "unreachable" in kinds:
            return UnreachableError
        if "login" in kinds:
            return BlockedError
        if all(failure.action.endswith("ppdeploy_smoke") for failure in self.failures):
            return ServingError
        # Checks run before anything is changed; once something was, "nothing touched" would be a lie.
        if not self.changed and all(failure.role == "preflight" for failure in self.failures):
            return BlockedError
        return ApplyError

    def _without_failure(self) -> PpdeployError:
        text = "; ".join(self.messages) or f"it ended with code {self.return_code} and said nothing"
        # 5: wrong options; 1 and 4 without any task: an inventory or playbook that cannot be read.
        kind = InputError if not self.stats and self.return_code in (1, 4, 5) else ApplyError
        return kind(f"ansible-playbook failed: {text}", remedy="run it again with -v to see all it prints")
