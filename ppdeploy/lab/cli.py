"""`ppdeploy lab`: the verbs of the lab, thin over `ppdeploy.lab.core`."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ppdeploy.lab.core import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.ready import tiny_model, up_with_vllm
from ppdeploy.lab.status import LabStatus, NodeStatus
from ppdeploy.lab.system import require_machine

lab_app = typer.Typer(
    name="lab",
    help="Boot real systemd hosts on this machine to rehearse on. Needs root and Linux.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Link(StrEnum):
    """A host's link: fab0 on the fabric, host0 on the management network, or both."""

    FABRIC = "fabric"
    MANAGEMENT = "management"
    BOTH = "both"


_Node = Annotated[str, typer.Argument(metavar="NODE", help="A host of the lab, such as node1.")]
_Link = Annotated[Link, typer.Option("--link", help="Which of the host's links.")]


@lab_app.command()
def up(
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=4, help="How many hosts to boot.")] = 2,
    model: Annotated[
        str | None, typer.Option("--model", help="ppdeploy_model of the inventory; a tiny model of the lab's own.")
    ] = None,
    bare: Annotated[
        bool, typer.Option("--bare", help="Without what an apply needs: hosts alone, and no download of wheels.")
    ] = False,
) -> None:
    """Boot the hosts, wait for them, and write an inventory for them. Hosts that run are left alone."""
    # Progress goes to stderr, so that stdout is the inventory's path alone.
    progress = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        progress.print(escape(line))

    # Before anything is downloaded.
    require_machine("ppdeploy lab up")
    lab = Lab()
    inventory = LabInventory.one_pipeline(nodes, model or str(tiny_model()))
    if bare:
        path = lab.up(nodes, inventory=inventory, say=say)
    else:
        path = up_with_vllm(lab, nodes, inventory=inventory, say=say)
    typer.echo(path)


@lab_app.command()
def down() -> None:
    """End all hosts and remove everything that the lab made, except the cached root file system."""
    Lab().down()


@lab_app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the lab and its hosts."""
    found = Lab().status()
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2))
    else:
        Console(highlight=False).print(_table(found) if found.nodes else f"the lab {found.name} is not up")


def _table(found: LabStatus) -> Table:
    table = Table(title=f"lab {found.name}, inventory {found.inventory}", title_justify="left", box=None)
    for heading in ("host", "state", "management", "fabric", "boots", "up", "memory", "links"):
        table.add_column(heading, justify="right" if heading in {"boots", "up", "memory"} else "left", no_wrap=True)
    for node in found.nodes:
        table.add_row(
            node.name,
            node.system,
            node.management,
            node.fabric,
            str(node.boots),
            "" if node.seconds is None else f"{node.seconds:.0f} s",
            "" if node.memory_bytes is None else f"{node.memory_bytes / 2**20:.0f} MiB",
            _links(node),
        )
    return table


def _links(node: NodeStatus) -> str:
    """Return what was done to a host's links, in words."""
    words = [f"{nic} {rate}" for nic, rate in node.rate.items()]
    words += [f"{nic} cut" if how == "down" else f"{nic} cut silently" for nic, how in node.cut.items()]
    return ", ".join(words) or "whole"


@lab_app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def ssh(
    node: _Node,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="CMD...", help="What to run there; a shell where it is left out."),
    ] = None,
) -> None:
    """Log in to a host as root, or run a command there; the exit code is the command's."""
    words = Lab().ssh_command(node, command or [])
    # ssh takes our place: its terminal, its signals and its exit code are the command's own.
    os.execvp(words[0], words)  # noqa: S606  (no shell: the words are passed as they are)


@lab_app.command()
def shape(
    node: _Node,
    rate: Annotated[str, typer.Argument(metavar="RATE|none", help="Such as 1gbit, 2.5gbit, 100mbit, or none.")],
    link: _Link = Link.FABRIC,
) -> None:
    """Limit a host's link, both ways. It holds over reboots of the host."""
    Lab().shape(node, rate, link.value)


@lab_app.command()
def cut(
    node: _Node,
    link: _Link = Link.FABRIC,
    silent: Annotated[
        bool,
        typer.Option("--silent", help="Keep the carrier and let nothing through, as a broken switch does."),
    ] = False,
) -> None:
    """Cut a host's link."""
    Lab().cut(node, link.value, silent=silent)
    typer.echo(f"{node}: {link.value} cut", err=True)


@lab_app.command()
def heal(node: _Node, link: _Link = Link.BOTH) -> None:
    """Undo `cut`."""
    Lab().heal(node, link.value)
    typer.echo(f"{node}: {link.value} healed", err=True)


@lab_app.command()
def kill(node: _Node) -> None:
    """Take the power from a host: all its processes end at once."""
    Lab().kill(node)
    typer.echo(f"{node}: off", err=True)


@lab_app.command()
def boot(node: _Node) -> None:
    """Switch a host on again after `kill` or a power-off, and wait until it has booted."""
    Lab().boot(node)
    typer.echo(f"{node}: up", err=True)


@lab_app.command()
def reboot(node: _Node) -> None:
    """Reboot a host from inside and wait until it has booted again."""
    Lab().reboot(node)
    typer.echo(f"{node}: up again", err=True)
