"""`ppdeploy bundle`: everything that nodes without a way out install from, in one folder on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from ppdeploy import bundle as bundles
from ppdeploy import locks
from ppdeploy.cli.options import Json
from ppdeploy.cli.output import print_json, print_report, say
from ppdeploy.errors import InputError

#: Version of what `bundle --json` prints.
BUNDLE_SCHEMA = 1


def bundle(
    device: Annotated[str, typer.Option("--device", metavar="cuda|cpu", help="What the nodes compute on.")] = "cuda",
    vllm_version: Annotated[
        str | None, typer.Option("--vllm-version", metavar="VERSION", help="The tested one of the device by default.")
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option("--python", metavar="MINOR", help="Python of the nodes, such as 3.12. Repeatable."),
    ] = None,
    machine: Annotated[str, typer.Option("--machine", help="Architecture of the nodes.")] = "x86_64",
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the bundle.")] = None,
    index_url: Annotated[
        str | None, typer.Option("--index-url", metavar="URL", help="Instead of pip's own index.")
    ] = None,
    extra_index_url: Annotated[
        str | None, typer.Option("--extra-index-url", metavar="URL", help="A second index, such as PyTorch's.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read a bundle that is there already, and check it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fetch all wheels that nodes without internet need into one folder, for `ppdeploy_wheelhouse`."""
    wanted = _locks(device, vllm_version, python or [], machine)
    made = _make(wanted, out, index_url=index_url, extra_index_url=extra_index_url, verify=verify)
    if as_json:
        print_json(
            {
                "schema": BUNDLE_SCHEMA,
                "path": str(made.path),
                "bytes": made.size,
                "locks": [lock.digest for lock in made.locks],
            }
        )
        return
    print_report(str(made.path))
    say(f"{made.size / 1e6:.0f} MB; name it in the inventory:\n  ppdeploy_wheelhouse: {made.path}")


def _locks(device: str, version: str | None, pythons: list[str], machine: str) -> list[locks.Lock]:
    if device not in ("cuda", "cpu"):
        raise InputError(f"{device} is no device", where="--device", remedy="use cuda or cpu")
    kind: locks.Device = "cuda" if device == "cuda" else "cpu"
    if not pythons:
        wanted = version or locks.default_version(kind)
        pythons = [
            lock.python
            for lock in locks.available()
            if (lock.device, lock.vllm_version, lock.machine) == (kind, wanted, machine)
        ]
        if len(pythons) > 1:
            raise InputError(
                f"the nodes' Python decides which wheels they need, and there are {', '.join(pythons)}",
                where="--python",
                remedy="name it (`ppdeploy plan` shows it), once for each version that the nodes have",
            )
    return [locks.find(kind, version, python, machine) for python in pythons or ["3.11"]]


def _make(
    wanted: list[locks.Lock], out: Path | None, *, index_url: str | None, extra_index_url: str | None, verify: bool
) -> bundles.Bundle:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=None)

        def show(progress: bundles.Progress) -> None:
            doing = progress.doing if len(progress.doing) <= 40 else f"{progress.doing[:39]}…"
            bar.update(task, description=doing, completed=progress.done, total=progress.total)

        return bundles.make_bundle(
            wanted, out, index_url=index_url, extra_index_url=extra_index_url, verify=verify, progress=show
        )
