"""`ppdeploy demo`: a lab, an apply, and a completion that its hosts computed together."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ppdeploy.cli.applying import LAB_PREFIX, apply_cluster, ask_commands
from ppdeploy.cli.options import Request, play_options
from ppdeploy.cli.output import print_report, program, say
from ppdeploy.lab import Lab
from ppdeploy.lab.ready import up_with_vllm


def demo(
    nodes: Annotated[int, typer.Option("--nodes", min=2, max=4, help="How many hosts to boot.")] = 2,
) -> None:
    """Serve a tiny model on real hosts of the lab, and read a completion. Needs root, Linux and no GPU."""
    began = time.monotonic()
    lab = Lab()
    watched = sys.stdout.isatty() and os.environ.get("CI", "") not in ("1", "true")
    keep = watched or bool(lab.nodes)  # a lab that was up before is somebody's
    try:
        inventory = up_with_vllm(lab, nodes, say=say)
        booted = time.monotonic()
        say(f"lab: {nodes} hosts are up after {booted - began:.0f} s; applying {inventory}")
        request = Request(inventory, play_options(), ask_become_pass=False, as_json=False)
        pipelines = apply_cluster(request, hints=False)
        print_report(*_told(pipelines), f"the whole demo took {time.monotonic() - began:.0f} s")
        if keep:
            say(_to_try(pipelines, inventory))
    finally:
        # With nobody there to look at it, a lab that stays is only in the way.
        if not keep:
            lab.down()


def _told(pipelines: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{host} computes {stages}" for pipeline in pipelines for host, stages in pipeline["stages"].items()]


def _to_try(pipelines: Sequence[Mapping[str, Any]], inventory: Path) -> str:
    run, where = program(), os.path.relpath(inventory)
    lines = ["ask it again (the weights are random, so the text is noise):"]
    for pipeline in pipelines:
        # Any address of a lab host will do: the command goes through `lab ssh`.
        lines += [f"  {line}" for line in ask_commands(pipeline, LAB_PREFIX)]
    lines += [
        "look at it:",
        f"  {run} status -i {where}",
        f"  {run} plan -i {where}",
        f"  {run} lab ssh node1 systemctl status 'ppdeploy-rank@*'",
        "break it, look, and mend it:",
        f"  {run} lab cut node2",
        f"  {run} check -i {where}",
        f"  {run} lab heal node2",
        "take it away again:",
        f"  {run} lab down   # or: make clean",
    ]
    return "\n".join(lines)
