"""`ppdeploy status`: the state of every rank."""

from __future__ import annotations

from ppdeploy.cli.options import Request
from ppdeploy.cli.output import print_json, print_report
from ppdeploy.cli.session import open_session, typed_facts
from ppdeploy.report import status_report, status_rows

#: Version of what `status --json` prints.
STATUS_SCHEMA = 1


def status(request: Request) -> None:
    """Show the state of every rank: its unit, its release, its restarts. Changes nothing."""
    session = open_session(request)
    rows = status_rows(typed_facts(session.take_facts()), session.inventory.pipelines)
    if request.as_json:
        print_json({"schema": STATUS_SCHEMA, "ranks": rows}, session.redactor)
    else:
        print_report(*status_report(rows))
