"""`python3 agent.pyz VERB`: the agent itself, what its units call, and what operators' verbs call on a node."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ppdeploy.agent import command, config, rank, store, ticket, wire
from ppdeploy.agent.clock import now
from ppdeploy.agent.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code: 0, or 1 with one sentence on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Everything after `--` is the rank's own command line, which argparse must not read.
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    try:
        settings = config.load(options.config)
        verb = str(options.verb)
        if verb == "run":
            _run(settings)
        elif verb == "ticket":
            rank.consumed_by(settings, store.boot_id(settings.boot))
        elif verb == "rank":
            rank.become(rank.prepare(settings, words[cut + 1 :], os.environ, store.boot_id(settings.boot)))
        elif verb == "order":
            _order(settings, options)
        elif verb == "status":
            sys.stdout.write(_status(settings))
    except (config.ConfigError, rank.RefusedError, ticket.NoTicketError, OSError, ValueError) as error:
        sys.stderr.write(f"ppdeploy-agent: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agent.pyz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(config.DEFAULT_PATH), help="the agent's configuration")
    parser.add_argument("--version", action="version", version=VERSION)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("run", help="be the agent of this node")
    verbs.add_parser("ticket", help="consume the start ticket (ExecStartPre= of the rank)")
    start = verbs.add_parser("rank", help="become the rank that the ticket names (ExecStart= of the rank)")
    start.add_argument("pipeline", help="the pipeline's name")
    order = verbs.add_parser("order", help="leave the operator's word for the agent")
    order.add_argument("word", choices=command.VERBS)
    order.add_argument("--release", default="", help="the release that is to run")
    order.add_argument(
        "--forget", action="append", default=[], metavar="NODE", help="a removed node to wait for no more"
    )
    verbs.add_parser("status", help="print what the agent knows, as JSON")
    return parser


def _run(settings: config.Config) -> None:
    # Only the agent itself needs all of it; the units' verbs start faster without.
    from ppdeploy.agent.loop import Agent  # noqa: PLC0415

    threading.excepthook = _end_on_bug
    Agent(settings).run()


def _end_on_bug(arguments: threading.ExceptHookArgs) -> None:
    """End the agent when a thread of it does: systemd starts it again, and half an agent would be worse than none."""
    sys.__excepthook__(arguments.exc_type, arguments.exc_value or arguments.exc_type(), arguments.exc_traceback)
    sys.stderr.flush()
    os._exit(1)


def _order(settings: config.Config, options: argparse.Namespace) -> None:
    handled = store.record_from_bytes(store.SlotFile(settings.record).read(), now(), "").serial
    given = command.give(settings.command, options.word, options.release, tuple(options.forget), handled)
    sys.stdout.write(json.dumps({"serial": given.serial, "verb": given.verb}) + "\n")


def _status(settings: config.Config) -> str:
    address, port = next((pair for pair in settings.listen if pair[0].startswith("127.")), settings.listen[0])
    reply = wire.get(address, port, "/v1/status", 5.0)
    if reply.status != 200:
        raise ValueError(f"the agent answered {reply.status} to a question for its status")
    return reply.body.decode()


if __name__ == "__main__":
    sys.exit(main())
