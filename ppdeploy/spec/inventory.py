"""Read an inventory through `ansible-inventory`, so that every inventory plugin of Ansible works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.spec.ansible_cli import inventory_list, rendered_values
from ppdeploy.spec.build import example_problems, spec_from_values
from ppdeploy.spec.names import check_names
from ppdeploy.spec.problems import raise_problems, shortened_list
from ppdeploy.spec.sources import SettingFinder, not_utf8
from ppdeploy.spec.types import Spec
from ppdeploy.spec.variables import VARIABLES, secret_variable_names

GROUP = "vllm"
"""The group whose children are the pipelines."""

GATEWAYS = "gateway"
"""The group of hosts that have a gateway beside the heads."""


@dataclass(frozen=True)
class Inventory:
    """What Ansible makes of an inventory: groups below `vllm`, and the variables of their hosts."""

    path: Path
    """As the user gave it."""
    directory: Path
    """The folder that relative paths of the inventory start at, absolute."""
    pipelines: Mapping[str, tuple[str, ...]]
    """Hosts of each pipeline in rank order."""
    values: Mapping[str, Mapping[str, object]] = field(repr=False)
    """The `ppdeploy_*` values of each host, but the pending ones. They may hold secrets: never print them."""
    pending: Mapping[str, frozenset[str]]
    """For each host, the variables whose values are templates or vaulted, so that only a play knows them."""
    addresses: Mapping[str, object]
    """`ansible_host` of each host that has one."""
    ssh_ports: Mapping[str, object]
    """`ansible_port` of each host that has one."""
    gateways: tuple[str, ...] = ()
    """Hosts of the group `gateway`. Those in no pipeline have values and addresses too, and none of the rest."""

    def gateway_values(self) -> dict[str, dict[str, object]]:
        """Return what a play is told of each host of the group `gateway`: its address and its own values."""
        return {
            host: {**self.values.get(host, {}), "ansible_host": self.addresses.get(host, host)}
            for host in self.gateways
        }

    def spec(self) -> Spec:
        """Return the checked spec; raises InputError with a sentence for each thing that is wrong."""
        return spec_from_values(
            self.pipelines,
            self.values,
            inventory_dir=self.directory,
            addresses=self.addresses,
            ssh_ports=self.ssh_ports,
            pending=self.pending,
            locate=SettingFinder(self.path),
            gateways=self.gateways,
        )


def load_inventory(
    path: Path, *, vault_args: Sequence[str] = (), extra_vars: Sequence[str] = (), any_address: bool = False
) -> Inventory:
    """Return what Ansible makes of the inventory at `path` (a file or a folder).

    `vault_args` are passed on as they are (`--vault-password-file FILE`, `--ask-vault-pass`, ...);
    `extra_vars` are the values of `-e`, as a play would get them. `any_address` accepts the addresses of the example,
    for what reaches no host. Raises InputError for what cannot be read or is no cluster.
    """
    _check_path(path)
    arguments = [*vault_args, *(word for item in extra_vars for word in ("-e", item))]
    listing = inventory_list(path, arguments)
    hostvars = _hostvars(listing)
    locate = SettingFinder(path)
    pipelines = _pipelines(listing, path)
    gateways = _members(listing, GATEWAYS)
    members = list(dict.fromkeys([*(host for hosts in pipelines.values() for host in hosts), *gateways]))
    addresses = {h: v["ansible_host"] for h, v in hostvars.items() if h in members and "ansible_host" in v}
    raise_problems(
        [
            *check_names(hostvars, locate),
            *([] if any_address else example_problems({h: addresses.get(h, h) for h in members}, locate)),
        ]
    )
    values = {
        host: {name: _unwrapped(v) for name, v in hostvars.get(host, {}).items() if name in VARIABLES}
        for host in members
    }
    templated = {name for own in values.values() for name, v in own.items() if _is_pending(v)}
    # A secret is never rendered here: the play hands it over itself.
    to_render = templated.difference(secret_variable_names())
    if any(_is_pending(address) for address in addresses.values()):
        to_render.add("ansible_host")
    groups = f"{GROUP}:{GATEWAYS}" if gateways else GROUP
    for host, rendered in (rendered_values(path, groups, to_render, arguments) if to_render else {}).items():
        if host in values:
            addresses |= {host: rendered.pop("ansible_host")} if "ansible_host" in rendered else {}
            values[host] |= {name: value for name, value in rendered.items() if name in values[host]}
    pending = {host: frozenset(n for n, v in own.items() if _is_pending(v)) for host, own in values.items()}
    values = {host: {n: v for n, v in own.items() if n not in pending[host]} for host, own in values.items()}
    return Inventory(
        path=path,
        directory=(path if path.is_dir() else path.parent).absolute(),
        pipelines=pipelines,
        values=values,
        pending=pending,
        addresses=addresses,
        ssh_ports={h: v["ansible_port"] for h, v in hostvars.items() if h in members and "ansible_port" in v},
        gateways=gateways,
    )


# ---- the listing


def _hostvars(listing: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    meta = listing.get("_meta")
    found = meta.get("hostvars") if isinstance(meta, dict) else None
    return {host: v for host, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def _group(listing: Mapping[str, object], name: str, what: str) -> list[str]:
    group = listing.get(name)
    found = group.get(what) if isinstance(group, dict) else None
    return [str(item) for item in found] if isinstance(found, list) else []


def _pipelines(listing: Mapping[str, object], path: Path) -> dict[str, tuple[str, ...]]:
    everywhere = {child for name in listing for child in _group(listing, name, "children")} | set(listing)
    if GROUP not in everywhere:
        raise InputError(
            f"the inventory has no group `{GROUP}`",
            where=str(path),
            remedy="make it, with a group below it (children:) for each model, as in inventory/example",
        )
    pipelines = {name: _members(listing, name) for name in _group(listing, GROUP, "children")}
    placed = {host for hosts in pipelines.values() for host in hosts}
    loose = [host for host in _group(listing, GROUP, "hosts") if host not in placed]
    if loose:
        raise InputError(
            f"{shortened_list(loose)} {'are' if len(loose) > 1 else 'is'} directly in the group `{GROUP}`",
            where=str(path),
            remedy=f"put the hosts of one model into a group of their own below `{GROUP}` (children:)",
        )
    if not pipelines:
        raise InputError(
            f"the group `{GROUP}` is empty",
            where=str(path),
            remedy="make a group below it (children:) that holds the hosts of one model, in rank order",
        )
    return pipelines


def _members(listing: Mapping[str, object], name: str) -> tuple[str, ...]:
    """Return all hosts of a group, in the order of Ansible's own `groups[name]` (level by level)."""
    hosts: dict[str, None] = {}
    seen = {name}
    level = [name]
    while level:
        below: list[str] = []
        for group in level:
            hosts |= dict.fromkeys(_group(listing, group, "hosts"))
            below += [child for child in _group(listing, group, "children") if child not in seen]
            seen |= set(below)
        level = below
    return tuple(hosts)


def _unwrapped(value: object) -> object:
    """Return the value without the marks of `!unsafe` that ansible-inventory writes."""
    if isinstance(value, dict):
        if set(value) == {"__ansible_unsafe"}:
            return _Unsafe(value["__ansible_unsafe"])
        return {key: _unwrapped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unwrapped(item) for item in value]
    return value


class _Unsafe(str):
    """Text that Ansible never takes for a template."""

    __slots__ = ()


def _is_pending(value: object) -> bool:
    """Say whether a value is a template or vaulted, anywhere in it."""
    if isinstance(value, str):
        return not isinstance(value, _Unsafe) and ("{{" in value or "{%" in value)
    if isinstance(value, dict):
        return "__ansible_vault" in value or any(_is_pending(item) for item in (*value, *value.values()))
    return isinstance(value, list) and any(_is_pending(item) for item in value)


# ---- the files


def _check_path(path: Path) -> None:
    try:
        exists = path.exists()
        broken = not_utf8(path) if exists else None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(
            f"the inventory cannot be read: {reason}",
            where=str(path),
            remedy="make it readable, or give another with -i",
        ) from None
    if not exists:
        raise InputError(
            "the inventory does not exist",
            where=str(path),
            remedy="run `ppdeploy init` to write one, or give another with -i",
        )
    if broken:
        place, binary = broken
        raise InputError(
            f"the inventory has {'a file that is no text' if binary else 'bytes that are not UTF-8'}",
            where=place,
            remedy="move it out of the inventory's folder, which Ansible reads as a whole"
            if binary
            else "save the file as UTF-8",
        )
