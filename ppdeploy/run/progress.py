"""What a person or a program sees while a playbook runs: a live display, plain lines, or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any, ClassVar, Protocol, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ppdeploy.run.events import Step, StepKind
from ppdeploy.run.redact import Redactor

#: Version of the lines that `--json` prints while a playbook runs.
EVENT_SCHEMA = 1


class Progress(Protocol):
    """Shows steps; a context manager, so that a live display always gives the terminal back."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def show(self, step: Step) -> None:
        """Show one step."""

    def tick(self) -> None:
        """Look at the clock; called a few times a second while Ansible runs."""


def progress(redactor: Redactor, *, as_json: bool = False, verbose: bool = False) -> Progress:
    """Return the display that fits: JSON lines on stdout when asked for, else for people on stderr.

    Tables and reports go to stdout, so that `ppdeploy plan > file` holds the plan and nothing else.
    """
    if as_json:
        return JsonProgress(redactor, sys.stdout)
    console = Console(stderr=True, highlight=False)
    if console.is_terminal and not verbose:
        return LiveProgress(redactor, console)
    return PlainProgress(redactor, sys.stderr, verbose=verbose)


_MARKS: dict[StepKind, str] = {
    "changed": "changed",
    "failed": "failed",
    "unreachable": "unreachable",
    "ignored": "failed, ignored",
}


#: Seconds without a line after which a log says what goes on.
QUIET = 60.0
#: Seconds between two lines of a host that waits for something and says how far it is.
RETRY_PAUSE = 15.0


class PlainProgress:
    """One line `HH:MM:SS host: task` for each task that ended on a host, with what stands out in brackets."""

    def __init__(
        self,
        redactor: Redactor,
        stream: TextIO,
        *,
        verbose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redactor = redactor
        self._stream = stream
        self._verbose = verbose
        self._clock = clock
        self._running: dict[str, str] = {}
        self._told: dict[str, float] = {}
        self._spoke = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def show(self, step: Step) -> None:
        """Print the step's line; skipped and starting tasks, and those of Ansible itself, have none."""
        if step.kind == "started":
            self._running[step.host] = task_name(step)
        elif step.host and step.kind not in ("retry", "diff"):
            self._running.pop(step.host, None)
        if step.kind in ("play", "task", "started", "skipped") or _is_routine(step) or self._was_told(step):
            return
        if step.kind == "diff":
            self._write(self._redactor.text(step.output))
            return
        line = step.text if step.kind == "warning" else f"{step.host}: {task_name(step)}"
        mark = _MARKS.get(step.kind) or (step.text if step.kind == "retry" else "")
        text = f"{datetime.now().astimezone():%H:%M:%S} {line}" + (f" ({mark})" if mark else "")
        if self._verbose and step.output and step.kind != "warning":
            text += "\n" + step.output
        self._write(self._redactor.text(text))

    def _was_told(self, step: Step) -> bool:
        """Whether a host that waits has said so a moment ago: a download of hours is asked for every few seconds."""
        if step.kind != "retry":
            self._told.pop(step.host, None)
            return False
        if self._clock() - self._told.get(step.host, -RETRY_PAUSE) < RETRY_PAUSE:
            return True
        self._told[step.host] = self._clock()
        return False

    def tick(self) -> None:
        """Say what goes on when nothing was written for long: a log that stands still looks like a hang."""
        if self._running and self._clock() - self._spoke >= QUIET:
            tasks: dict[str, list[str]] = {}
            for host, task in self._running.items():
                tasks.setdefault(task, []).append(host)
            for task, hosts in tasks.items():
                self._write(f"{datetime.now().astimezone():%H:%M:%S} {', '.join(hosts)}: {task} (goes on)")

    def _write(self, text: str) -> None:
        self._spoke = self._clock()
        _write_line(self._stream, text)


class QuietProgress:
    """Shows nothing: a verb that has the screen to itself asks the hosts again and again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def show(self, step: Step) -> None:
        """Show nothing."""

    def tick(self) -> None:
        """Do nothing."""


class JsonProgress:
    """One JSON object a line for each step, for programs; the verb's own result is the last line."""

    def __init__(self, redactor: Redactor, stream: TextIO) -> None:
        self._redactor = redactor
        self._stream = stream

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.flush()

    def show(self, step: Step) -> None:
        """Print the step, without fields that are empty and without Ansible's raw output."""
        fields = {name: value for name, value in asdict(step).items() if value}
        if step.kind != "diff":
            fields.pop("output", None)
        event: dict[str, Any] = {
            "event": fields.pop("kind"),
            "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        }
        _write_line(self._stream, json.dumps(self._redactor.data(event | fields)))

    def tick(self) -> None:
        """Do nothing: a program has its own clock."""


class LiveProgress:
    """A few lines at the bottom of the terminal: play, task, elapsed time, and a row for each host."""

    _STYLES: ClassVar[dict[StepKind, str]] = {
        "changed": "yellow",
        "failed": "red",
        "unreachable": "red",
        "ignored": "magenta",
    }

    def __init__(self, redactor: Redactor, console: Console) -> None:
        self._redactor = redactor
        self._console = console
        self._began = time.monotonic()
        self._play = ""
        self._task = ""
        self._rows: dict[str, _Row] = {}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, step: Step) -> None:
        """Update the display; what changed, failed or warned also stays above it as a line."""
        if step.kind == "play":
            self._play = step.play
        elif step.kind == "task":
            self._task = task_name(step)
        elif step.kind == "warning":
            self._say(step.text, "dim")
        elif step.kind == "diff":
            self._console.print(Text(self._redactor.text(step.output)))
        else:
            row = self._rows.setdefault(step.host, _Row())
            row.take(step)
            if step.kind in _MARKS:
                self._say(f"{step.host}: {task_name(step)} ({_MARKS[step.kind]})", self._STYLES.get(step.kind, ""))

    def tick(self) -> None:
        """Do nothing: the display refreshes itself."""

    def _say(self, line: str, style: str) -> None:
        text = self._redactor.text(f"{datetime.now().astimezone():%H:%M:%S} {line}")
        self._console.print(Text(text, style=style))

    def _render(self) -> Group:
        elapsed = int(time.monotonic() - self._began)
        head = Text.assemble(
            (self._play, "bold"),
            "  ",
            self._redactor.text(self._task),
            (f"  {elapsed // 60}:{elapsed % 60:02}", "cyan"),
        )
        table = Table.grid(padding=(0, 2))
        for host, row in self._rows.items():
            table.add_row(host, *row.cells(self._redactor))
        return Group(head, table)


class _Row:
    """What one host did so far, and what it is doing."""

    def __init__(self) -> None:
        self.ok = 0
        self.changed = 0
        self.failed = 0
        self.now = ""

    def take(self, step: Step) -> None:
        if step.kind in ("started", "retry"):
            self.now = task_name(step) + (f" ({step.text})" if step.text else "")
            return
        self.now = ""
        self.ok += step.kind in ("ok", "skipped", "ignored")
        self.changed += step.kind == "changed"
        self.failed += step.kind in ("failed", "unreachable")

    def cells(self, redactor: Redactor) -> tuple[Text, ...]:
        return (
            Text(f"✓ {self.ok}", style="green"),
            Text(f"~ {self.changed}", style="yellow" if self.changed else "dim"),
            Text(f"✗ {self.failed}", style="red" if self.failed else "dim"),
            Text(redactor.text(self.now), style="dim"),
        )


def task_name(step: Step) -> str:
    """Return the task's name with its role in front, as in Ansible's own output."""
    return f"{step.role} : {step.task}" if step.role else step.task


def _is_routine(step: Step) -> bool:
    """Whether a step is one that Ansible itself puts before each role, and that went well."""
    return step.kind == "ok" and step.task.startswith("Validating arguments against arg spec")


def _write_line(stream: TextIO, text: str) -> None:
    """Write at once: whoever follows a log wants the line when it happened."""
    stream.write(f"{text}\n")
    stream.flush()
