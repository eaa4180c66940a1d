"""`ppdeploy start`, `stop` and `restart`: the ranks of whole pipelines, through the role that owns their unit."""

from __future__ import annotations

from ppdeploy.cli.options import Request
from ppdeploy.cli.output import print_json, print_report
from ppdeploy.cli.session import open_session
from ppdeploy.run import cluster_lock

#: Version of the last line that these verbs print with --json.
RESULT_SCHEMA = 1


def start(request: Request) -> None:
    """Start the ranks of every pipeline."""
    _run(request, "start", "started")


def stop(request: Request) -> None:
    """Stop the ranks of every pipeline; `start` or an apply brings them back."""
    _run(request, "stop", "stopped")


def restart(request: Request) -> None:
    """Restart the ranks of every pipeline together."""
    _run(request, "restart", "restarted")


def _run(request: Request, verb: str, done: str) -> None:
    session = open_session(request)
    with cluster_lock(request.inventory, verb):
        result = session.run(f"playbooks/{verb}.yml", events=True)
    if request.as_json:
        error = result.error()
        document = {
            "event": "result",
            "schema": RESULT_SCHEMA,
            "verb": verb,
            "ok": result.status == "ok",
            "exit_code": result.exit_code,
            "error": str(error) if error else None,
            "hosts": {host: vars(stats) for host, stats in result.stats.items()},
        }
        print_json(document, session.redactor, line=True)
    result.raise_for_status()
    if not request.as_json:
        print_report(f"{done}: {', '.join(result.stats)}")
