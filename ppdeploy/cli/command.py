"""The typer application, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from ppdeploy import __version__
from ppdeploy.errors import InputError, PpdeployError

#: What a shell reports for a command ended by SIGINT; DESIGN.md gives it to every interruption.
INTERRUPTED = 130

app = typer.Typer(
    name="ppdeploy",
    help="Serve one large model across a few GPU machines with vLLM pipeline parallelism.",
    no_args_is_help=True,
    # Error texts carry host names, regular expressions and file names: square brackets in them are not
    # markup.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ppdeploy {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks, and all that Ansible printed of a failure.")
    ] = False,
) -> None:
    """Serve one large model across a few GPU machines with vLLM pipeline parallelism."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command and leave the process with the exit codes of DESIGN.md.

    `arguments` stands in for `sys.argv[1:]` in tests. Every error is one line on stderr that starts with `error: `;
    a traceback, and all that Ansible printed of a failed task, only with `--debug`, which may stand after the verb.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take_debug(given)
    try:
        # Outside its standalone mode typer lets usage errors reach us, so that they read like all others.
        outcome = app(args=given, prog_name="ppdeploy", standalone_mode=False)
    except PpdeployError as error:
        _tell(str(error), debug=debug)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        outcome = INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output, such as `head`, has enough; Python would complain again when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:  # noqa: BLE001  (told in a sentence, and with --debug in full)
        _tell_unexpected(error, debug=debug)
    if outcome == INTERRUPTED:  # typer itself turns Ctrl-C into this code
        _tell("interrupted", debug=debug)
    sys.exit(outcome if isinstance(outcome, int) else 0)


def _take_debug(arguments: list[str]) -> bool:
    """Remove `--debug` wherever it stands, but not from the command of `lab ssh`."""
    own = len(arguments)
    if arguments[:2] == ["lab", "ssh"]:
        own = 2
    debug = "--debug" in arguments[:own]
    arguments[:own] = [word for word in arguments[:own] if word != "--debug"]
    return debug


def _tell_unexpected(error: Exception, *, debug: bool) -> NoReturn:
    # A usage error is click's; newer typers carry click inside and do not export the type.
    usage = getattr(error, "format_message", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(str(error), err=True)
        sys.exit(InputError.exit_code)
    if usage is not None:
        context = getattr(error, "ctx", None)
        verb = context.command_path if context else "ppdeploy"
        _tell(f"{usage().rstrip('.')}: see `{verb} --help`", debug=debug)
        sys.exit(InputError.exit_code)
    kind = type(error).__name__
    _tell(f"ppdeploy did not expect this: {kind}: {error}: run it again with --debug and report it", debug=debug)
    sys.exit(PpdeployError.exit_code)


def _tell(sentence: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    typer.echo(f"error: {sentence}", err=True)
