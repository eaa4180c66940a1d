"""`ppdeploy net`: how fast the network between the nodes of each pipeline is, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ppdeploy.cli.options import Request
from ppdeploy.cli.output import print_json, print_report, say
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import InputError, UnreachableError
from ppdeploy.net import NetReport
from ppdeploy.net_page import net_page
from ppdeploy.net_report import net_report
from ppdeploy.run import QuietProgress, RunResult, cluster_lock, plays

MOST_SECONDS = 60

NetLimit = Annotated[
    str | None,
    typer.Option("-l", "--limit", metavar="PATTERN", help="Only these hosts or groups; a pipeline stays whole."),
]


def net(
    request: Request,
    *,
    seconds: Annotated[
        int, typer.Option("--seconds", min=1, max=MOST_SECONDS, help="Seconds of each run of iperf3; four for a pair.")
    ] = 3,
    force: Annotated[bool, typer.Option("--force", help="Measure also where a rank runs; its requests wait.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the result as one page for a browser.")
    ] = None,
) -> None:
    """Measure the network between all nodes of each pipeline, both ways: latency, throughput, vLLM's handoffs.

    Nothing stays on the nodes. What was measured is kept beside the inventory, and `ppdeploy plan` counts with it. A
    pipeline of which a rank runs is left alone (exit code 3). A node that vanishes during the test makes the exit code
    7; the others are measured all the same.
    """
    session = open_session(request)
    session.check_models()
    values = {plays.NET_SECONDS: seconds, plays.NET_FORCE: force, plays.NET_SHOW: False}
    with cluster_lock(request.inventory, "net"):
        result = session.run(plays.NET, values=values)
        if result.status == "interrupted":
            # Its listeners would stay until their time is over.
            say("ending the test on its hosts")
            session.run(plays.NET_STOP, display=QuietProgress())
            raise KeyboardInterrupt
    found = _found(result)
    if found is None:
        result.raise_for_status()
        error = session.error_of(result)
        raise error or InputError("nothing was measured", where="--limit", remedy="name a pipeline")
    report = NetReport.model_validate(session.redactor.data(found["report"]))
    if html:
        _write_page(html, report)
    if request.as_json:
        print_json(report.document())
    else:
        print_report(*net_report(report))
    _raise(session, result, found["lost"])


def _found(result: RunResult) -> dict[str, Any] | None:
    """Return what the play judged; None when it did not come to that."""
    return next((own[plays.NET_FOUND] for own in result.facts.values() if plays.NET_FOUND in own), None)


def _raise(session: Session, result: RunResult, lost: list[str]) -> None:
    """Raise what went wrong in a test that has a result: nodes that vanished first, whatever their tasks said."""
    if lost:
        reasons = {failure.host: failure.sentence for failure in result.failures if failure.host in lost}
        told = "; ".join(session.redactor.text(f"{host}: {reasons.get(host, 'it does not answer')}") for host in lost)
        raise UnreachableError(
            f"lost during the test: {told}",
            remedy="what was measured between the others is above; what was started on a lost node ends by itself",
        )
    result.raise_for_status()


def _write_page(path: Path, report: NetReport) -> None:
    try:
        path.write_text(net_page(report), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the page cannot be written: {error.strerror}", where=f"--html {path}", remedy="name a file you may write"
        ) from error
    say(f"wrote {path}")
