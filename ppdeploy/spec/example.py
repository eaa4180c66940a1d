"""The text of a first inventory: what `ppdeploy init` writes and what inventory/example shows."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml
from pydantic import JsonValue

from ppdeploy.errors import InputError
from ppdeploy.spec.build import PIPELINE_NAME, RESERVED_NAMES
from ppdeploy.spec.plain import shown
from ppdeploy.spec.variables import VARIABLES

EXAMPLE_HOSTS = ("192.0.2.11", "192.0.2.12")
"""Documentation addresses (RFC 5737): they reach nobody, and preflight refuses them."""
EXAMPLE_MODEL = "Qwen/Qwen3-32B"

_HEAD = """\
---
# The inventory is the only input of ppdeploy. {edit}
# docs/variables.md has all variables; `ppdeploy plan` shows what they lead to before any machine is touched.
all:
  children:
    vllm:
      children:
        # One group for each model (a pipeline). The order of the hosts is the order of the layers: the first
        # host has the first ones and the API, the next host the layers after them, and so on.
        {pipeline}:
          hosts:
{hosts}          vars:
            # The account that logs in by ssh: root, or one that may use sudo (give `ppdeploy apply` the
            # option --ask-become-pass when sudo asks for a password).
            {user}
            # A Hugging Face id, or a folder on this computer that starts with /, ./, ../ or ~/.
            ppdeploy_model: {model}{mark}
"""

_TAIL = """\
            # The network on which the machines talk to each other; only when they share more than one.
            # ppdeploy_fabric_subnet: 198.51.100.0/24
            # Longest prompt and answer together, in tokens; the model's own limit may not fit into memory.
            # ppdeploy_max_model_len: 16384
            # Anything else that `vllm serve` knows.
            # ppdeploy_vllm_args: {max-num-seqs: 64}
"""


@dataclass(frozen=True)
class _Host:
    name: str
    address: str
    user: str | None
    port: int | None


def example_text(
    hosts: Sequence[str] = EXAMPLE_HOSTS,
    model: str = EXAMPLE_MODEL,
    *,
    pipeline: str = "chat",
    user: str | None = None,
    variables: Mapping[str, JsonValue] | None = None,
    mark_lines: bool | None = None,
) -> str:
    """Return the text of an inventory with one pipeline.

    Each of `hosts` is `[NAME=][USER@]ADDRESS[:PORT]`, an IPv6 address with a port in brackets. `user` is the
    account for all of them; `variables` are more `ppdeploy_*` variables of the pipeline. `mark_lines` marks
    the lines that a person edits, by default only in the example itself. Raises InputError for what would
    make no usable inventory.
    """
    parsed = _parse(hosts)
    marked = tuple(hosts) == EXAMPLE_HOSTS if mark_lines is None else mark_lines
    _check(model, pipeline, variables or {})
    lines = "".join(_host_lines(host, f"  # <-- {number}" if marked else "") for number, host in enumerate(parsed, 1))
    count = {2: "Three", 3: "Four"}.get(len(parsed), str(len(parsed) + 1))
    text = _HEAD.format(
        edit=f"{count} lines are yours to edit, marked with <--." if marked else "Edit it as you like.",
        pipeline=pipeline,
        hosts=lines,
        user=f"ansible_user: {_scalar(user)}" if user else "# ansible_user: root",
        model=_scalar(model),
        mark=f"  # <-- {len(parsed) + 1}" if marked else "",
    )
    for name, value in (variables or {}).items():
        text += f"            {name}: {json.dumps(value, ensure_ascii=False)}\n"
    return text + _TAIL


def _host_lines(host: _Host, mark: str) -> str:
    text = f"            {host.name}:\n              ansible_host: {_scalar(host.address)}{mark}\n"
    if host.port:
        text += f"              ansible_port: {host.port}\n"
    if host.user:
        text += f"              ansible_user: {_scalar(host.user)}\n"
    return text


def _scalar(text: str) -> str:
    """Return text as a YAML scalar, in quotes only where YAML would read something else without them."""
    try:
        if yaml.safe_load(text) == text and not re.search(r"[#:{}\[\],&*!|>'\"%@`]|^[-?]|^\s|\s$", text):
            return text
    except yaml.YAMLError:
        pass
    return json.dumps(text, ensure_ascii=False)


def _check(model: str, pipeline: str, variables: Mapping[str, JsonValue]) -> None:
    if not model.strip() or not model.isprintable():
        raise InputError("the model has no usable name", where="--model", remedy="give a Hugging Face id or a folder")
    if pipeline in RESERVED_NAMES or not PIPELINE_NAME.fullmatch(pipeline):
        raise InputError(
            f"{shown(pipeline)} is no name for a pipeline",
            remedy="use a small letter, then at most 30 small letters, digits and _",
        )
    for name in variables:
        if name not in VARIABLES:
            raise InputError(f"the variable {shown(name)} is not known", remedy="see docs/variables.md")


def _parse(hosts: Sequence[str]) -> list[_Host]:
    if not hosts:
        raise InputError("no host is named", remedy="name the machines, the first one first, such as 198.18.0.11")
    parsed = [_parse_host(text, number) for number, text in enumerate(hosts, 1)]
    for part in ("name", "address"):
        seen: set[tuple[str, object]] = set()
        for host in parsed:
            key = (getattr(host, part), host.port if part == "address" else None)
            if key in seen:
                raise InputError(f"two hosts have one {part}, {key[0]}", remedy="name each machine once")
            seen.add(key)
    return parsed


_HOST = re.compile(
    r"(?:(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)=)?(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.\\-]*)@)?"
    r"(?P<address>\[[0-9A-Fa-f:.]+\]|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*|[A-Za-z0-9_][A-Za-z0-9_.-]*)"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


def _parse_host(text: str, number: int) -> _Host:
    match = _HOST.fullmatch(text)
    remedy = "write [NAME=][USER@]ADDRESS[:PORT], such as gpu-1=admin@198.18.0.11"
    if not match:
        raise InputError(f"{shown(text)} names no host", remedy=remedy)
    address = match["address"].strip("[]")
    if ":" in address or re.fullmatch(r"[0-9.]+", address):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise InputError(f"{shown(address)} is no IP address", remedy=remedy) from None
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 1 <= port <= 65535:
        raise InputError(f"{port} is no port", where=text, remedy=remedy)
    return _Host(match["name"] or f"gpu-{number}", address, match["user"], port)
