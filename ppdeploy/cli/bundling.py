"""`ppdeploy bundle`: everything that nodes without a way out install from, in one folder on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from ppdeploy import bundle as bundles
from ppdeploy import locks
from ppdeploy.bundle.content import MANIFEST
from ppdeploy.bundle.packages import archives_have, require_fetchable, this_system
from ppdeploy.cli.bundling_driver import driver_wish
from ppdeploy.cli.options import Json
from ppdeploy.cli.output import print_json, print_report, say
from ppdeploy.errors import InputError
from ppdeploy.plan.driver_packages import driver_words
from ppdeploy.plan.environment import ALWAYS, RARE, bundled, system_packages

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
    extra: Annotated[
        list[str] | None,
        typer.Option("--extra", metavar="NAME", help="A reader of weights, as in ppdeploy_vllm_extras. Repeatable."),
    ] = None,
    handoff: Annotated[
        bool, typer.Option("--handoff", help="With the handoff plugin, for pipelines that set ppdeploy_handoff.")
    ] = False,
    packages: Annotated[
        bool,
        typer.Option(
            "--packages",
            help="Also what vLLM (Python too), gateway, firewall, encryption and copies need of the nodes' system, if "
            "that is this machine's (Debian's kin by apt, Red Hat's by dnf).",
        ),
    ] = False,
    nvidia_driver: Annotated[
        str | None,
        typer.Option(
            "--nvidia-driver",
            metavar="nvidia|distribution",
            help="Also the NVIDIA driver for the nodes' system, if that is this machine's, from where "
            "ppdeploy_nvidia_driver says. Added to the bundle in --out it needs no --python.",
        ),
    ] = None,
    nvidia_branch: Annotated[
        int | None,
        typer.Option("--nvidia-branch", metavar="BRANCH", help="Of the driver, as ppdeploy_nvidia_branch."),
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            "--kernel",
            metavar="RELEASE",
            help="Kernel of the nodes, as uname -r prints it there, added to those that the bundle has; this machine's "
            "by default. Repeatable.",
        ),
    ] = None,
    nvidia_repository: Annotated[
        str | None,
        typer.Option("--nvidia-repository", metavar="URL", help="A mirror, as ppdeploy_nvidia_repository."),
    ] = None,
    nvidia_repository_key: Annotated[
        Path | None, typer.Option("--nvidia-repository-key", metavar="FILE", help="The key that it is signed with.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="ID", help="Also a model of the Hugging Face hub.")
    ] = None,
    model_revision: Annotated[
        str | None, typer.Option("--model-revision", metavar="REVISION", help="Its branch, tag or commit.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only hash every file of the bundle in --out; fetches nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fetch all that nodes without internet need into one folder, for `ppdeploy_wheelhouse`."""
    if verify:
        _report(_verified(out), as_json=as_json)
        return
    there = _there(out)
    had = there.driver if there else None
    driver = driver_wish(
        nvidia_driver, nvidia_branch, kernel or [], nvidia_repository, nvidia_repository_key, machine=machine, held=had
    )
    if driver and had and not had.is_like(driver.wanted):
        say(f"the driver in {out} is replaced: {driver_words(had)}, by {driver_words(driver.wanted)}")
    wanted = [] if driver is None or python or vllm_version or extra or handoff else _held(there)
    wanted = wanted or _locks(device, vllm_version, python or [], machine, extra or [])
    if handoff:
        wanted = [locks.with_handoff(lock) for lock in wanted]
    named = _available(wanted) if packages else []
    made = _make(
        wanted,
        out,
        index_url=index_url,
        extra_index_url=extra_index_url,
        packages=named,
        driver=driver,
        model=_model(model, model_revision),
    )
    _report(made, as_json=as_json)


def _available(wanted: list[locks.Lock]) -> list[str]:
    """Return the packages, as this machine's system names them, without what few nodes need and its archives lack.

    Says what it leaves out. A pipeline that needs one of these is refused by name when it is planned.
    """
    # Before this machine's repositories are asked, which takes dnf minutes.
    require_fetchable(wanted[0].machine)
    system = this_system()
    of_system = [one for lock in wanted for one in system_packages(system, lock.python, lock.device)]
    names = list(dict.fromkeys(one.package for one in (*of_system, *bundled())))
    absent = [name for name in names if name in RARE and not archives_have(name)]
    for name in absent:
        say(f"this machine's archives have no {name}: left out, since only {RARE[name]} needs it")
    return [name for name in names if name not in absent]


def _verified(out: Path | None) -> bundles.Bundle:
    """Return the bundle in the folder once every file has its hash."""
    if out is None:
        raise InputError("which bundle is not said", where="--verify", remedy="name its folder with --out")
    held = bundles.open_bundle(out.absolute())
    bundles.verify_bundle(held)
    return held


def _report(made: bundles.Bundle, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "schema": BUNDLE_SCHEMA,
                "path": str(made.path),
                "bytes": made.size,
                "locks": [lock.digest for lock in made.locks],
                "packages": list(made.packages.names) if made.packages else [],
                "driver": made.driver.model_dump(mode="json") if made.driver else None,
                "models": [str(made.path / one.path) for one in made.models],
            }
        )
        return
    print_report(str(made.path))
    lines = [f"{made.size / 1e6:.0f} MB; name it in the inventory:", f"ppdeploy_wheelhouse: {made.path}"]
    if made.packages or made.driver:
        lines.append("ppdeploy_system_packages: bundle")
    if made.driver:
        lines += [f"ppdeploy_nvidia_driver: {made.driver.source}", f"ppdeploy_nvidia_branch: {made.driver.branch}"]
    lines += [f"ppdeploy_model: {made.path / one.path}" for one in made.models]
    say("\n  ".join(lines))


def _there(out: Path | None) -> bundles.Bundle | None:
    """Return the bundle that lies in a folder already, None where there is none; InputError where a file lies there."""
    if out is None:
        return None
    try:
        is_file, is_bundle = out.exists() and not out.is_dir(), (out / MANIFEST).is_file()
    except OSError:
        # One that cannot be looked at cannot be written either, which is said with the reason.
        return None
    if is_file:
        remedy = "name a folder, or one that is to be made"
        raise InputError(f"{out} is a file, no folder", where="--out", remedy=remedy)
    return bundles.read_bundle(out.absolute()) if is_bundle else None


def _held(there: bundles.Bundle | None) -> list[locks.Lock]:
    """Return the locks of a bundle that is there; InputError where this version no longer has one of them."""
    try:
        return [locks.by_digest(lock.digest) for lock in there.locks] if there else []
    except InputError as error:
        raise InputError(
            f"the bundle was made by another version of ppdeploy: {error.what}",
            where=str(there.path) if there else "--out",
            remedy="name --python, once for each that the nodes have, to make the bundle anew for this version",
        ) from None


def _model(repository: str | None, revision: str | None) -> bundles.ModelWish | None:
    if repository is None:
        if revision:
            raise InputError("a revision of no model", where="--model-revision", remedy="name it with --model")
        return None
    return bundles.ModelWish(
        repository, revision, endpoint=os.environ.get("HF_ENDPOINT"), token=os.environ.get("HF_TOKEN")
    )


def _locks(device: str, version: str | None, pythons: list[str], machine: str, extras: list[str]) -> list[locks.Lock]:
    if device not in ("cuda", "cpu"):
        raise InputError(f"{device} is no device", where="--device", remedy="use cuda or cpu")
    kind: locks.Device = "cuda" if device == "cuda" else "cpu"
    more = set(extras) - ALWAYS[kind]
    if not pythons:
        wanted = version or locks.default_version(kind)
        pythons = [
            lock.python
            for lock in locks.available()
            if (lock.device, lock.vllm_version, lock.machine, set(lock.extras)) == (kind, wanted, machine, more)
        ]
        if len(pythons) > 1:
            raise InputError(
                f"the nodes' Python decides which wheels they need, and there are {', '.join(pythons)}",
                where="--python",
                remedy="name it (`ppdeploy plan` shows it), once for each version that the nodes have",
            )
    return [locks.find(kind, version, python, machine, more) for python in pythons or ["3.11"]]


def _make(
    wanted: list[locks.Lock],
    out: Path | None,
    *,
    index_url: str | None,
    extra_index_url: str | None,
    packages: list[str],
    driver: bundles.DriverWish | None,
    model: bundles.ModelWish | None,
) -> bundles.Bundle:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=None)

        def show(progress: bundles.Progress) -> None:
            doing = progress.doing if len(progress.doing) <= 40 else f"{progress.doing[:39]}…"
            bar.update(task, description=doing, completed=progress.done, total=progress.total)

        return bundles.make_bundle(
            wanted,
            out,
            index_url=index_url,
            extra_index_url=extra_index_url,
            packages=packages,
            driver=driver,
            model=model,
            progress=show,
        )
