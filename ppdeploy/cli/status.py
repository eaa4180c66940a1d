"""`ppdeploy status`: how every pipeline and node is, once or again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ppdeploy.cli.options import Request
from ppdeploy.cli.output import print_json, print_report
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import InputError, UnreachableError
from ppdeploy.gang import answers, gang_status
from ppdeploy.gang_report import duration, status_report
from ppdeploy.run import QuietProgress, RunResult, plays

#: Seconds from the end of one look to the next one, while watching. A look is a whole play of Ansible, so the nodes
#: are not asked more often than every few seconds; the screen says how old it is.
PAUSE = 2.0


AnyHosts = Annotated[str | None, typer.Option("--limit", metavar="PATTERN", help="Only these hosts or groups.")]


def status(
    request: Request,
    *,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
) -> None:
    """Show how every pipeline and node is: phase and why, restarts, failures, ranks, releases, memory. Changes nothing.

    A node that cannot be reached is shown with the reason. The exit code is 0 when there is anything to show, whatever
    state the pipelines are in, and 7 only when no node could be asked. With --watch each look is a play of Ansible over
    all hosts (2 to 4 seconds apart), and with --json it is one line for each look.
    """
    if watch and request.options.verbosity:
        raise InputError("-v prints between the looks", where="--watch -v", remedy="leave one of them out")
    session = open_session(request)
    if watch:
        _watch(session)
        return
    found = look(session)
    if request.as_json:
        print_json(found, session.redactor)
    else:
        print_report(*status_report(session.redactor.data(found)))


def look(session: Session, *, quiet: bool = False) -> dict[str, Any]:
    """Ask all hosts once and return the status document; raises when none could be asked."""
    result = session.run(plays.STATUS, display=QuietProgress() if quiet or session.as_json else None)
    if result.status == "interrupted":
        raise KeyboardInterrupt
    found = gang_status(session.inventory.pipelines, nodes_of(session, result))
    if not answers(found):
        raise _nobody(found, result)
    return found


def nodes_of(session: Session, result: RunResult) -> dict[str, dict[str, Any]]:
    """Return what a play saw of each host, or why it could not be asked."""
    nodes: dict[str, dict[str, Any]] = {}
    for host, told in result.results.get(plays.GANG_TASK, {}).items():
        node = told.get("node")
        nodes[host] = {"node": node} if node else {"unreachable": session.unreachable_reason(host, told)}
    return nodes


def _nobody(found: dict[str, Any], result: RunResult) -> Exception:
    """Return the error for a look in which no host answered."""
    reasons: dict[str, list[str]] = {}
    for pipeline in found["pipelines"]:
        for node in pipeline["nodes"]:
            reasons.setdefault(node["reason"], []).append(node["host"])
    error = result.error()
    if error is not None and not reasons:
        return error
    return UnreachableError(
        "; ".join(f"{', '.join(hosts)}: {reason}" for reason, hosts in reasons.items()) or "no host was asked"
    )


def _watch(session: Session) -> NoReturn:
    """Look until interrupted: a live page on a terminal, else a page, or with --json a line, for each look."""
    console = Console(highlight=False)
    if session.as_json:
        _again(session, lambda document: print_json(document, session.redactor, line=True))
    if not console.is_terminal:
        _again(session, lambda document: print_report(f"-- {document['time']}", *_page(session, document)))
    page: list[RenderableType] = []
    shown = time.monotonic()

    def take(document: dict[str, Any]) -> None:
        nonlocal shown, page
        shown, page = time.monotonic(), _page(session, document)

    def screen() -> Group:
        age = duration(int(time.monotonic() - shown))
        told = f"as it was {age} ago" if page else f"asking the hosts for {age}"
        return Group(Text(f"{told}; Ctrl-C ends this", style="dim"), *page)

    with Live(console=console, get_renderable=screen, refresh_per_second=2, vertical_overflow="visible"):
        _again(session, take)


def _page(session: Session, document: dict[str, Any]) -> list[RenderableType]:
    safe = session.redactor.data(document)
    return [Text(safe["error"], style="red")] if "error" in safe else list(status_report(safe))


def _again(session: Session, take: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Hand over one look after the other; one in which no host answers is told, and does not end it."""
    while True:
        try:
            take(look(session, quiet=True))
        except UnreachableError as error:
            take({**gang_status({}, {}), "error": str(error)})
        sys.stdout.flush()
        time.sleep(PAUSE)
