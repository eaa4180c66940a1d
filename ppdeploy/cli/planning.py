"""`ppdeploy plan` and `ppdeploy render`: what an apply would do, without changing a host."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ppdeploy.cli.options import (
    DEFAULT_INVENTORY,
    AskBecomePass,
    AskVaultPass,
    ExtraVars,
    Inventory,
    Json,
    Limit,
    Request,
    VaultIds,
    VaultPasswordFiles,
    play_options,
)
from ppdeploy.cli.output import print_json, print_report, say
from ppdeploy.cli.session import Session, open_session, plan_of, typed_facts
from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import save_facts
from ppdeploy.plan import Plan
from ppdeploy.plan_page import plan_page
from ppdeploy.plan_report import compare_report, plan_report
from ppdeploy.render import render_host
from ppdeploy.short_facts import read_facts
from ppdeploy.what_if import FORMS, Case, change

FactsFile = Annotated[
    Path | None,
    typer.Option(
        "--facts", metavar="FILE", help="Plan from facts that --save-facts wrote, or that were written by hand."
    ),
]


def plan(
    inventory: Inventory = DEFAULT_INVENTORY,
    facts: FactsFile = None,
    save: Annotated[
        Path | None, typer.Option("--save-facts", metavar="FILE", help="Also write the facts of all hosts to a file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the plan as one page for a browser.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="CHANGE", help=f"Compare with a change: {FORMS}. Repeatable."),
    ] = None,
    as_json: Json = False,
    limit: Limit = None,
    extra_vars: ExtraVars = None,
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, help="Show command lines, environment and files, too.")
    ] = 0,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_files: VaultPasswordFiles = None,
    vault_ids: VaultIds = None,
) -> None:
    """Show what will run where, whether it fits, and what speed to expect. Changes nothing."""
    if facts and (save or limit or ask_become_pass):
        raise InputError(
            "with --facts no host is asked",
            where="--facts",
            remedy="leave out --save-facts, --limit and --ask-become-pass",
        )
    options = play_options(
        limit=limit,
        extra_vars=extra_vars,
        verbose=verbose,
        as_json=as_json,
        ask_vault_pass=ask_vault_pass,
        vault_password_files=vault_password_files,
        vault_ids=vault_ids,
    )
    session = open_session(Request(inventory, options, ask_become_pass, as_json), any_address=facts is not None)
    case = make_case(session, facts, save)
    found = plan_of(case, curves=html is not None and not what_if)
    shown = found
    if what_if:
        token = session.secrets.get("ppdeploy_hf_token")
        shown = plan_of(change(case, found, what_if, token), curves=html is not None)
    if html:
        write_page(html, shown)
    if as_json and what_if:
        both = {"before": found.model_dump(mode="json"), "after": shown.model_dump(mode="json")}
        print_json({"schema": 1, "what_if": what_if, **both}, session.redactor)
    elif as_json:
        print_json(found.model_dump(mode="json"), session.redactor)
    elif what_if:
        print_report(*compare_report(found, shown, what_if))
    else:
        print_report(*plan_report(found, verbose=verbose > 0))
    refuse_blocked(shown)


def render(
    request: Request,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files: DIR/HOST/PATH-ON-THE-HOST.")],
    facts: FactsFile = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what DIR holds of these hosts.")] = False,
) -> None:
    """Write every file of every node into a folder, byte for byte as an apply writes them. Changes no host."""
    if facts and request.ask_become_pass:
        raise InputError("with --facts no host is asked", where="--facts", remedy="leave out --ask-become-pass")
    _check_folder(out, force)
    session = open_session(request)
    case = make_case(session, facts, None)
    if case.assumed:
        raise InputError(
            "facts that are assumed make no files for a host",
            where=f"--facts {facts}",
            remedy="take the facts of the hosts with `ppdeploy plan --save-facts FILE`",
        )
    found = plan_of(case)
    hosts = [node.host for pipeline in found.pipelines for node in pipeline.nodes]
    files = {host: render_host(found, host) for host in (*hosts, *(one.host for one in found.gateways))}
    written = write_files(out, files)
    if request.as_json:
        print_json({"schema": 1, "files": [str(path) for path in written]})
    else:
        print_report(*map(str, written))


def make_case(session: Session, facts: Path | None, save: Path | None) -> Case:
    """Return what the plan is made of, from facts of a file, or from those that the hosts give now."""
    if facts:
        return session.case_from_facts(*read_facts(facts, session.spec))
    session.check_models()
    result = session.take_facts()
    if save:
        save_facts(save, typed_facts(result))
        say(f"wrote {save}")
    return session.case_from_play(result)


def write_page(path: Path, found: Plan) -> None:
    """Write the plan as a page; InputError when the file cannot be written."""
    try:
        path.write_text(plan_page(found), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the page cannot be written: {error.strerror}", where=f"--html {path}", remedy="name a file you may write"
        ) from error
    say(f"wrote {path}")


def refuse_blocked(found: Plan) -> None:
    """Raise BlockedError when the plan says that an apply cannot succeed."""
    blocked = found.blocked()
    if blocked:
        raise BlockedError("; ".join(finding.sentence() for finding in blocked))


def write_files(out: Path, files: Mapping[str, Mapping[str, str]]) -> list[Path]:
    """Write the files of each host below a folder of its name, in place of what was there; return their paths."""
    written = []
    try:
        for host, texts in files.items():
            folder = out / _folder_name(host)
            if folder.exists():
                shutil.rmtree(folder)
            for path, text in sorted(texts.items()):
                target = folder / path.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
                written.append(target)
    except OSError as error:
        raise InputError(
            f"the files cannot be written: {error.strerror}", where=str(out), remedy="name a folder you may write to"
        ) from error
    return written


def _folder_name(host: str) -> str:
    if "/" in host or host in (".", ".."):
        raise InputError("its name cannot be a folder's", where=f"host {host}", remedy="give it another name")
    return host


def _check_folder(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InputError("this is no folder", where=f"--out {out}", remedy="name a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise InputError("the folder is not empty", where=f"--out {out}", remedy="name another one, or add --force")
