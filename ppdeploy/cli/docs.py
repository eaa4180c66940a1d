"""`ppdeploy docs-variables` (hidden): the page of all variables, for docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppdeploy.cli.output import print_report
from ppdeploy.errors import InputError
from ppdeploy.spec.docs import check_docs, variables_markdown


def docs_variables(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the page to a file.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail when the file does not say what the schema says.")
    ] = False,
) -> None:
    """Print the page of all variables, made from the schema."""
    if check:
        if out is None:
            raise InputError("no page is named to compare with", where="--check", remedy="add --out FILE")
        check_docs(out)
    elif out is not None:
        out.write_text(variables_markdown(), encoding="utf-8")
    else:
        print_report(variables_markdown().rstrip("\n"))
