"""`ppdeploy logs`: what all ranks of all nodes logged, on one time axis."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from ppdeploy.cli.options import (
    DEFAULT_INVENTORY,
    AskBecomePass,
    AskVaultPass,
    ExtraVars,
    Inventory,
    Json,
    Request,
    VaultIds,
    VaultPasswordFiles,
    play_options,
)
from ppdeploy.cli.output import Out, print_json, say
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import InputError, PpdeployError, UnreachableError
from ppdeploy.gang_report import duration
from ppdeploy.logs import Axis, KeptFailure, Line, clock_offset, kept_failures, lines_of
from ppdeploy.run import QuietProgress, plays

#: Version of the lines that `logs --json` prints.
LOGS_SCHEMA = 1
#: Seconds from the end of one look to the next one, while following.
PAUSE = 1.0
#: Lines of a node that are shown where nobody says how many, and that one look of --follow may bring.
LINES, FOLLOWED_LINES = 200, 5000

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_red", "bright_cyan", "bright_yellow")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def logs(
    inventory: Inventory = DEFAULT_INVENTORY,
    limit: Annotated[
        str | None, typer.Option("--limit", metavar="PATTERN", help="Only these hosts or pipelines.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="WHEN", help="From 90s, 10min, 2h or 1d ago on, or a time of the day or date."),
    ] = None,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, max=20000, help=f"Newest lines of each node ({LINES}).")
    ] = None,
    agent: Annotated[
        bool, typer.Option("--agent", help="Also what the agents say: why each rank came and went.")
    ] = False,
    failure: Annotated[
        str | None,
        typer.Option(
            "--failure", metavar="N|list", help="The kept journals of the N-th last failure (1 is the last), or a list."
        ),
    ] = None,
    extra_vars: ExtraVars = None,
    as_json: Json = False,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_files: VaultPasswordFiles = None,
    vault_ids: VaultIds = None,
) -> None:
    """Show what all ranks logged, on one time axis, each node in its colour. Changes nothing.

    Nodes whose clock is certainly wrong are shifted, and named. A node that cannot be reached is named; the exit code
    is 7 only when none could be asked. With --follow each look is a play of Ansible, so lines come a few seconds late.
    """
    if failure and (follow or since or agent):
        raise InputError(
            "a kept journal has an end", where="--failure", remedy="leave out --follow, --since and --agent"
        )
    options = play_options(
        limit=limit,
        extra_vars=extra_vars,
        ask_vault_pass=ask_vault_pass,
        vault_password_files=vault_password_files,
        vault_ids=vault_ids,
    )
    number = failure_number(failure)
    seconds = None if since is None else since_seconds(since, datetime.now().astimezone())
    session = open_session(Request(inventory, options, ask_become_pass, as_json))
    # With a beginning named, all lines from there on are meant.
    most = lines if lines is not None else 20000 if seconds is not None or failure else LINES
    reader = _Reader(session, _Printer(session, as_json=as_json))
    if failure:
        reader.failures(number, most)
        return
    began = time.monotonic()
    reader.read({"agent": agent, "lines": most, "since": seconds})
    while follow:
        time.sleep(PAUSE)
        # A node that was silent so far has no place to go on from: it begins where the others did.
        passed = time.monotonic() - began + (seconds or 0.0)
        reader.read({"agent": agent, "lines": FOLLOWED_LINES, "since": passed}, follow=True)
    reader.finish()


def since_seconds(text: str, now: datetime) -> float:
    """Return how many seconds ago a time is: `90s`, `10min`, `2h`, `1d`, `14:05`, `2026-11-30 14:05`; InputError."""
    span = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)?", text.strip())
    if span:
        return float(span[1]) * _UNITS[span[2] or "s"]
    # A time of the day is one of today; a date without a zone is in the user's own.
    stamp = text.strip() if "-" in text else f"{now:%Y-%m-%d} {text.strip()}"
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        raise InputError(
            "it is no time", where=f"--since {text}", remedy='say it like 10min, 2h, 14:05 or "2026-11-30 14:05"'
        ) from None
    return max(0.0, (now - (moment if moment.tzinfo else moment.replace(tzinfo=now.tzinfo))).total_seconds())


def failure_number(text: str | None) -> int:
    """Return N of `--failure N`, 0 for the list; InputError for anything else."""
    if text is None or text == "list":
        return 0
    if not re.fullmatch(r"[1-9]\d{0,2}", text):
        raise InputError(
            "it is no number of a failure", where=f"--failure {text}", remedy="give 1 for the last, or list"
        )
    return int(text)


class _Reader:
    """Asks the nodes for their lines and hands them on by time."""

    def __init__(self, session: Session, printer: _Printer) -> None:
        self._session = session
        self._printer = printer
        self._axis = Axis()
        self._cursors: dict[str, str] = {}
        self._unreachable: dict[str, str] = {}
        self._shifted: dict[str, float] = {}

    def read(self, wanted: Mapping[str, Any], *, follow: bool = False) -> None:
        """Read once, and print what no other node can precede any more; raises when no node could be asked."""
        before = time.time()
        found = self._ask(wanted, {"ppdeploy__cursors": self._cursors}, alone=not follow)
        after = time.time()
        ends: list[float] = []
        for host, told in found.items():
            offset = self._offset(host, clock_offset(before, told["time"], after))
            self._axis.add(host, lines_of(host, told["lines"], pipeline=self._pipeline(host), offset=offset))
            self._printer.left_out(host, told["left_out"], more=told["more"])
            if told["cursor"]:
                self._cursors[host] = told["cursor"]
            ends.append(told["time"][0] - offset)
        self._printer.lines(self._axis.take(min(ends, default=0.0)))

    def finish(self) -> None:
        """Print what was held back."""
        self._printer.lines(self._axis.take())

    def failures(self, number: int, most: int) -> None:
        """Print the list of kept failures, or the journals of the one with this number."""
        found = self._ask({"action": "failures"}, {})
        chosen: dict[str, tuple[KeptFailure, int]] = {}
        for name, hosts in self._session.inventory.pipelines.items():
            own = {host: found[host] for host in hosts if host in found}
            if not own:
                continue
            kept = kept_failures(own)
            if not number:
                self._printer.failures(name, kept)
            elif number <= len(kept):
                chosen[name] = (kept[number - 1], len(kept))
            else:
                self._printer.note(f"pipeline {name} has {len(kept)} kept failures, no {number}", pipeline=name)
        if not number:
            return
        if not chosen:
            raise InputError(
                "no such failure is kept", where=f"--failure {number}", remedy="see `ppdeploy logs --failure list`"
            )
        names = {
            host: chosen[name][0].name
            for name, hosts in self._session.inventory.pipelines.items()
            for host in hosts
            if name in chosen and host in found
        }
        told = self._ask({"action": "failure", "lines": most}, {"ppdeploy__failures": names})
        for name, (failure, count) in chosen.items():
            self._printer.failure(name, failure, number, count)
            for host in self._session.inventory.pipelines[name]:
                if host not in told:
                    continue
                journal = told[host]
                self._printer.left_out(host, journal["left_out"], more=False)
                if not journal["kept"]:
                    self._printer.note(f"{host} kept no journal of it", host=host)
                self._axis.add(host, lines_of(host, journal["lines"], pipeline=name))
            self.finish()

    def _ask(
        self, wanted: Mapping[str, Any], values: Mapping[str, Any], *, alone: bool = True
    ) -> dict[str, Mapping[str, Any]]:
        """Run the play and return what each node told. With `alone` it raises when none did."""
        result = self._session.run(
            plays.LOGS,
            values={
                "ppdeploy__journal": {k: v for k, v in wanted.items() if v is not None},
                "ppdeploy__show": False,
                **values,
            },
            display=QuietProgress(),
        )
        if result.status == "interrupted":
            raise KeyboardInterrupt
        found: dict[str, Mapping[str, Any]] = {}
        silent: dict[str, str] = {}
        for host, told in result.results.get(plays.JOURNAL_TASK, {}).items():
            if "time" in told:
                found[host] = told
            else:
                silent[host] = self._session.unreachable_reason(host, told)
        if not found and alone:
            raise _nobody(silent, result.error())
        for host, reason in silent.items():
            if host not in self._unreachable:
                self._printer.note(f"{host} cannot be read: {reason}", host=host)
        for host in self._unreachable.keys() - silent.keys():
            self._printer.note(f"{host} can be read again", host=host)
        self._unreachable = silent
        return found

    def _offset(self, host: str, offset: float) -> float:
        """Return by how much to shift a node's lines: what was found first, so that its lines keep their distances."""
        if offset and host not in self._shifted:
            direction = "ahead" if offset > 0 else "behind"
            self._printer.note(
                f"the clock of {host} is at least {duration(abs(offset))} {direction}: its lines are shifted by that",
                host=host,
            )
        return self._shifted.setdefault(host, offset)

    def _pipeline(self, host: str) -> str:
        return next((name for name, hosts in self._session.inventory.pipelines.items() if host in hosts), "")


def _nobody(silent: Mapping[str, str], error: PpdeployError | None) -> Exception:
    """Return the error for a look in which no node told anything."""
    if error is not None and not silent:
        return error
    return UnreachableError("; ".join(f"{host}: {reason}" for host, reason in silent.items()) or "no host was asked")


class _Printer:
    """Prints lines on stdout, for people with colours or as JSON; what is to be said of them, on stderr."""

    def __init__(self, session: Session, *, as_json: bool) -> None:
        self._redactor = session.redactor
        self._as_json = as_json
        hosts = [host for hosts in session.inventory.pipelines.values() for host in hosts]
        self._width = max(map(len, hosts), default=0)
        self._colours = {host: _COLOURS[place % len(_COLOURS)] for place, host in enumerate(hosts)}
        self._console = Out(highlight=False)
        self._day = ""

    def lines(self, lines: list[Line]) -> None:
        """Print lines, the oldest first."""
        for line in lines:
            moment = datetime.fromtimestamp(line.time).astimezone()
            if self._as_json:
                stamp = moment.isoformat(timespec="microseconds")
                self._event("line", **{**asdict(line), "time": stamp})
                continue
            day = f"{moment:%Y-%m-%d}"
            if day != self._day:
                self._day = day
                self._text(Text(f"-- {day}", style="dim"))
            start = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03} {line.host:{self._width}} {line.unit:7} "
            for part in line.message.splitlines() or [""]:
                style = "bold" if line.priority <= 3 else ""
                self._text(Text.assemble((start, self._colours.get(line.host, "")), (self._redactor.text(part), style)))

    def failures(self, pipeline: str, kept: list[KeptFailure]) -> None:
        """Print the list of a pipeline's kept failures."""
        if self._as_json:
            for number, one in enumerate(kept, 1):
                self._failure_event(pipeline, one, number)
            return
        self._text(
            Text(f"pipeline {pipeline}: {len(kept) or 'no'} kept failure{'s' if len(kept) != 1 else ''}", "bold")
        )
        for number, one in enumerate(kept, 1):
            moment = datetime.fromtimestamp(one.time).astimezone()
            mark = "  the first of its series" if one.first else ""
            self._text(Text(f"{number:3}  {moment:%Y-%m-%d %H:%M:%S}  generation {one.generation}{mark}"))
            for host, reason in one.reasons.items():
                self._text(Text(f"     {host}: {self._redactor.text(reason)}", self._colours.get(host, "")))

    def failure(self, pipeline: str, one: KeptFailure, number: int, count: int) -> None:
        """Print what a failure was, before its lines."""
        if self._as_json:
            self._failure_event(pipeline, one, number)
            return
        first = ", the first of its series" if one.first else ""
        title = f"pipeline {pipeline}: failure {number} of {count}, generation {one.generation}{first}"
        self._text(Text(title, "bold"))
        for host, reason in one.reasons.items():
            self._text(Text(f"  {host}: {self._redactor.text(reason)}", self._colours.get(host, "")))

    def left_out(self, host: str, count: int, *, more: bool) -> None:
        """Say how many lines of a node are not shown."""
        if self._as_json and (count or more):
            self._event("left_out", host=host, lines=count or None)
        elif count:
            say(f"{host}: {count} earlier lines are left out; see --lines and --since")
        elif more:
            say(f"{host}: it has earlier lines; see --lines and --since")

    def note(self, text: str, **fields: str) -> None:
        """Say something that is no line of a log."""
        if self._as_json:
            self._event("note", text=text, **fields)
        else:
            say(self._redactor.text(text))

    def _failure_event(self, pipeline: str, one: KeptFailure, number: int) -> None:
        moment = datetime.fromtimestamp(one.time).astimezone().isoformat(timespec="seconds")
        fields = {"generation": one.generation, "time": moment, "first": one.first, "reasons": dict(one.reasons)}
        self._event("failure", pipeline=pipeline, number=number, **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        print_json({"event": kind, "schema": LOGS_SCHEMA, **fields}, self._redactor, line=True)

    def _text(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
