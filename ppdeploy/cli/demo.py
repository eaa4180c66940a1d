"""`ppdeploy demo`: a lab, an apply, and a completion that its hosts computed together."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ppdeploy.cli.applying import apply_cluster
from ppdeploy.cli.options import Request, play_options
from ppdeploy.cli.output import print_report, say
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
        pipelines = apply_cluster(request)
        print_report(*_told(pipelines), f"the whole demo took {time.monotonic() - began:.0f} s")
        if keep:
            say(_to_try(pipelines, str(inventory)))
    finally:
        # With nobody there to look at it, a lab that stays is only in the way.
        if not keep:
            lab.down()


def _told(pipelines: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{host} computes {stages}" for pipeline in pipelines for host, stages in pipeline["stages"].items()]


def _to_try(pipelines: Sequence[Mapping[str, Any]], inventory: str) -> str:
    lines = ["ask it again:"]
    for pipeline in pipelines:
        body = f'{{"model": "{pipeline["model"]}", "prompt": "Hello", "max_tokens": 16}}'
        lines.append(
            f"  ppdeploy lab ssh {pipeline['head']} curl -s {pipeline['address']}/v1/completions "
            f"-H Content-Type:application/json -d '{body}'"
        )
    lines += [
        "look at it:",
        f"  ppdeploy status -i {inventory}",
        f"  ppdeploy plan -i {inventory}",
        f"  ppdeploy lab ssh {pipelines[0]['head']} systemctl status 'ppdeploy-rank@*'" if pipelines else "",
        "break it:",
        "  ppdeploy lab cut node2; ppdeploy lab heal node2",
        "take it away again:",
        "  make clean   # or: ppdeploy lab down",
    ]
    return "\n".join(line for line in lines if line)
