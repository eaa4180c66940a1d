"""`ppdeploy init`: the first inventory of a cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ppdeploy.cli.options import DEFAULT_INVENTORY, Inventory
from ppdeploy.cli.output import print_report, program, say
from ppdeploy.errors import InputError
from ppdeploy.spec import is_local_model
from ppdeploy.spec.example import EXAMPLE_HOSTS, EXAMPLE_MODEL, example_text


def init(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[[NAME=][USER@]ADDRESS[:PORT]]...", help="The machines; the first one gets the API."),
    ] = None,
    inventory: Inventory = DEFAULT_INVENTORY,
    model: Annotated[
        str, typer.Option("--model", help="A Hugging Face id, or a folder on this machine: ./NAME, ~/NAME or /NAME.")
    ] = EXAMPLE_MODEL,
    pipeline: Annotated[str, typer.Option("--pipeline", help="Name of the group that serves the model.")] = "chat",
    user: Annotated[str | None, typer.Option("--user", help="Account that logs in by ssh.")] = None,
) -> None:
    """Write an inventory to start from; without machines, one with marked lines to edit. Never overwrites."""
    file = inventory if inventory.suffix in (".yml", ".yaml") else inventory / "hosts.yml"
    text = example_text(tuple(hosts) if hosts else EXAMPLE_HOSTS, _model(model), pipeline=pipeline, user=user)
    if file.parent.is_dir() and (found := sorted(path.name for path in file.parent.iterdir())) and file != inventory:
        raise InputError(
            f"there is an inventory already ({', '.join(found)})",
            where=str(file.parent),
            remedy="edit it, or name another folder with -i",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Exclusive: not even a file that appears at this moment is overwritten.
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise InputError("it exists already", where=str(file), remedy="edit it, or name another with -i") from None
    except OSError as error:
        raise InputError(
            f"the inventory cannot be written: {error.strerror}", where=str(file), remedy="name another place with -i"
        ) from error
    print_report(str(file))
    where = "" if inventory == DEFAULT_INVENTORY else f" -i {inventory}"
    edit = "" if hosts else f"  $EDITOR {file}\n"
    say(f"next:\n{edit}  {program()} plan{where}\n  {program()} apply{where}")


def _model(model: str) -> str:
    """Return a model folder's whole path: typed at a shell it starts here, in the inventory it would start there."""
    if not is_local_model(model):
        if Path(model, "config.json").is_file():
            say(f"{model} is taken as an id of the Hugging Face hub; for the folder of that name write ./{model}")
        return model
    folder = Path(model).expanduser().resolve()
    if not folder.is_dir():
        raise InputError(
            "the model folder does not exist", where=f"--model {model}", remedy="give a folder with a config.json"
        )
    return str(folder)
