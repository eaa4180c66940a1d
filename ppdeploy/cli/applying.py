"""`ppdeploy apply` and `smoke`: the play itself, and its proof alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ppdeploy.api_keys import first_key
from ppdeploy.certificates import ca_file, ca_warning
from ppdeploy.cli.forgetting import Forget, Yes, confirm_forgotten
from ppdeploy.cli.options import (
    DEFAULT_INVENTORY,
    AskBecomePass,
    AskVaultPass,
    ExtraVars,
    Inventory,
    Json,
    Limit,
    Request,
    Tags,
    VaultIds,
    VaultPasswordFiles,
    Verbose,
    play_options,
)
from ppdeploy.cli.output import print_json, print_report, program, say
from ppdeploy.cli.session import Session, open_session
from ppdeploy.errors import InputError
from ppdeploy.plan import Plan
from ppdeploy.play import first_key_lines, trust_lines
from ppdeploy.report import apply_report, gateway_urls, pipeline_summary
from ppdeploy.run import RunResult, cluster_lock, plays

#: Lab hosts, and nobody else, have such management addresses (RFC 2544, benchmarks).
LAB_PREFIX = "198.18."

#: Version of the last line that these verbs print with --json.
RESULT_SCHEMA = 1


def apply(
    inventory: Inventory = DEFAULT_INVENTORY,
    limit: Limit = None,
    tags: Tags = None,
    check: Annotated[bool, typer.Option("--check", help="Say what would change, and change nothing.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show how files change.")] = False,
    forget: Forget = None,
    yes: Yes = False,
    extra_vars: ExtraVars = None,
    as_json: Json = False,
    verbose: Verbose = 0,
    ask_become_pass: AskBecomePass = False,
    ask_vault_pass: AskVaultPass = False,
    vault_password_files: VaultPasswordFiles = None,
    vault_ids: VaultIds = None,
) -> None:
    """Set up every node, run the pipelines, and prove that they serve. A second time it changes nothing.

    A dead node that was taken out of the inventory, or whose machine was replaced, is named with --forget: the gang
    would wait for its word that its rank is gone.
    """
    confirm_forgotten(forget, yes=yes)
    if check and tags and "smoke" in tags.split(","):
        raise InputError(
            "check mode asks no pipeline for a completion",
            where="--check --tags smoke",
            remedy="leave out --check, or run `ppdeploy smoke`",
        )
    options = play_options(
        limit=limit,
        tags=tags,
        check=check,
        diff=diff,
        extra_vars=extra_vars,
        verbose=verbose,
        as_json=as_json,
        ask_vault_pass=ask_vault_pass,
        vault_password_files=vault_password_files,
        vault_ids=vault_ids,
    )
    apply_cluster(Request(inventory, options, ask_become_pass, as_json), forget=forget or ())


def apply_cluster(request: Request, *, hints: bool = True, forget: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run the whole play, print what it came to and, with `hints`, what to do next; return each pipeline's summary.

    `forget` names removed nodes whose ranks are known to be dead.
    """
    session = open_session(request)
    session.check_models()
    with cluster_lock(request.inventory, "apply"), _made_once(session):
        result = session.run(plays.SITE, events=True, values={plays.FORGET: list(forget)} if forget else None)
        summaries = _finish(session, result, "apply")
    if not request.as_json:
        if request.options.check:
            say("nothing was changed: these are the changes that an apply would make")
        elif hints:
            say(_next_commands(session, summaries))
    return summaries


@contextmanager
def _made_once(session: Session) -> Iterator[None]:
    """Make a first API key where a gateway is applied and there is none, and tell it at the end, whatever that is.

    The play makes one too, for who runs it by hand; here its words would be hidden among those of its tasks.
    """
    options, directory = session.options, session.inventory.directory
    tags = set((options.tags or "gateway").split(","))
    if options.check or not tags & {"all", "configure", "gateway"} or not _has_gateway(session):
        yield
        return
    key = first_key(directory, datetime.now(UTC))
    had_ca = ca_file(directory).exists()
    session.redactor.add([key])
    try:
        yield
    finally:
        if ca_file(directory).exists() and not had_ca:
            say("\n".join(trust_lines(directory, session.spec.cluster)))
        # One that cannot be read was told of by the play.
        with suppress(InputError):
            for line in ca_warning(directory, datetime.now(UTC)) if _needs_ca(session) else ():
                say(line)
        if key:
            say("\n".join(first_key_lines(key)))


def _has_gateway(session: Session) -> bool:
    return any(pipeline.vars.gateway for pipeline in session.spec.pipelines)


def _needs_ca(session: Session) -> bool:
    pipelines = session.spec.pipelines
    several = len(pipelines) + len(session.spec.gateways) > 1
    return several or not all(pipeline.vars.gateway_certificate for pipeline in pipelines)


def smoke(request: Request) -> None:
    """Ask every pipeline for completions, one by one and at once, and judge the answers. Changes nothing."""
    session = open_session(request)
    _finish(session, session.run(plays.SMOKE, events=True), "smoke")


def _finish(session: Session, result: RunResult, verb: str) -> list[dict[str, Any]]:
    """Print what a run came to, raise its error if it has one, and return what became of each pipeline."""
    reports = _smoke_reports(result)
    plan = _plan_of(session, result)
    gateways = gateway_urls(plan) if plan else {}
    made = [pipeline_summary(pipeline, reports.get(pipeline.name)) for pipeline in (plan.pipelines if plan else ())]
    summaries: list[dict[str, Any]] = session.redactor.data(made)
    changed = {host: stats.changed for host, stats in result.stats.items() if stats.changed}
    if session.as_json:
        error = session.error_of(result)
        document = {
            "event": "result",
            "schema": RESULT_SCHEMA,
            "verb": verb,
            "check": result.check,
            "ok": result.status == "ok",
            "exit_code": error.exit_code if error else result.exit_code,
            "error": str(error) if error else "interrupted" if result.status == "interrupted" else None,
            "seconds": round(result.seconds, 3),
            "hosts": {host: vars(stats) for host, stats in result.stats.items()},
            "pipelines": summaries,
            "gateways": gateways,
            "smoke": list(reports.values()),
        }
        print_json(document, session.redactor, line=True)
    else:
        for text in _smoke_texts(result):
            say(session.redactor.text(text))
        if result.status == "ok":
            print_report(*apply_report(summaries, changed, gateways))
    _raise(session, result)
    return summaries


def _raise(session: Session, result: RunResult) -> None:
    if result.status == "interrupted":
        raise KeyboardInterrupt
    error = session.error_of(result)
    if error:
        raise error


def _plan_of(session: Session, result: RunResult) -> Plan | None:
    """Return the plan that the play made, or None when it did not come to that."""
    for facts in result.facts.values():
        if plays.PLAN in facts:
            return Plan.model_validate(facts[plays.PLAN]["plan"])
    if result.status != "ok":
        return None
    # The play hides the plan's task when a secret went into it; the plan itself has none.
    return session.plan_from_play(result)


def _smoke(result: RunResult) -> Mapping[str, Any]:
    return next((facts[plays.SMOKE_REPORTS] for facts in result.facts.values() if plays.SMOKE_REPORTS in facts), {})


def _smoke_reports(result: RunResult) -> dict[str, Mapping[str, Any]]:
    """Return the smoke test's report of each pipeline that was asked."""
    return {report["pipeline"]: report for report in _smoke(result).get("reports", ())}


def _smoke_texts(result: RunResult) -> list[str]:
    """Return what the smoke test says of pipelines that do not serve: the reasons, and all ranks' journals."""
    return list(_smoke(result).get("failures", ()))


def ask_commands(pipeline: Mapping[str, Any], address: str) -> list[str]:
    """Return the commands that ask a pipeline for a completion from here; `address` is where ssh reaches its head."""
    body = f'{{"model": "{pipeline["model"]}", "prompt": "Hello", "max_tokens": 16}}'
    curl = f"curl -s {pipeline['address']}/v1/completions -H Content-Type:application/json -d"
    if address.startswith(LAB_PREFIX):
        # A lab host is reached through the lab's network namespace only.
        return [f"{program()} lab ssh {pipeline['head']} {curl} {shlex.quote(body)}"]
    port = pipeline["address"].rpartition(":")[2]
    return [f"ssh -L {port}:127.0.0.1:{port} {address}   # and then, here:", f"{curl} {shlex.quote(body)}"]


def gateway_command(pipeline: Mapping[str, Any], address: str, ca: Path) -> str:
    """Return the command that asks a pipeline's gateway, with KEY for the API key; `ca` is trusted where it exists."""
    trust = f" --cacert {ca}" if ca.exists() else ""
    url, before = f"{pipeline['gateway']}/v1/models", "curl -s"
    if address.startswith(LAB_PREFIX):
        # The lab's network is not this machine's; its CA lies here and not there.
        url, trust = f"https://127.0.0.1:{pipeline['gateway'].rpartition(':')[2]}/v1/models", " --insecure"
        before = f"{program()} lab ssh {pipeline['head']} curl -s"
    return f"{before}{trust} -H 'Authorization: Bearer KEY' {url}"


def _next_commands(session: Session, pipelines: Sequence[Mapping[str, Any]]) -> str:
    where = "" if session.inventory.path == DEFAULT_INVENTORY else f" -i {session.inventory.path}"
    lines = ["next:"]
    for one in pipelines:
        address = str(session.inventory.addresses.get(one["head"], one["head"]))
        if one["gateway"]:
            lines.append(f"  {gateway_command(one, address, ca_file(session.inventory.directory))}")
        lines += [f"  {line}" for line in ask_commands(one, address)]
    return "\n".join([*lines, f"  {program()} status{where}", f"  {program()} smoke{where}"])
