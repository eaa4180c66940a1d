"""Names of variables that nobody reads: misspelt ones are found before they are silently ignored."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

from ppdeploy.spec.plain import shown
from ppdeploy.spec.problems import Problem, shortened_list
from ppdeploy.spec.variables import PREFIX, VARIABLES, known_variable_names

_ALMOST = 0.88
"""Likeness (difflib's ratio) from which a name without our prefix is taken for a misspelt one of ours."""


_OF_ANSIBLE = {
    "ansible_address": "ansible_host",
    "ansible_hosts": "ansible_host",
    "ansible_ip": "ansible_host",
    "ansible_ports": "ansible_port",
    "ansible_username": "ansible_user",
    "ansible_users": "ansible_user",
}
"""What people write in place of Ansible's own names; Ansible ignores it, and asks another machine or account."""


def check_names(
    values: Mapping[str, Iterable[str]], locate: Callable[[str], str | None] = lambda _: None
) -> list[Problem]:
    """Return a problem for each `ppdeploy_*` name that is not known, with the nearest known one.

    `values` maps hosts to the names of their variables; names of others are let through unless they look like
    a misspelt name of ours.
    """
    holders: dict[str, list[str]] = {}
    for host, names in values.items():
        own = list(names)
        for name in own:
            # Beside the right name it is somebody's own variable.
            if name not in VARIABLES and _OF_ANSIBLE.get(name) not in own:
                holders.setdefault(name, []).append(host)
    problems = []
    for name, hosts in holders.items():
        nearest = _OF_ANSIBLE.get(name) or _nearest(name)
        if not name.startswith(PREFIX) and nearest is None:
            continue
        where = ("hosts " if len(hosts) > 1 else "host ") + shortened_list(hosts)
        file = locate(name)
        remedy = f"write {nearest}" if nearest else "remove it; docs/variables.md lists the known ones"
        problems.append(
            Problem(
                f"the variable {shown(name)[1:-1]} is not known",
                f"{where}, {file}" if file else where,
                remedy,
            )
        )
    return problems


def _nearest(name: str) -> str | None:
    spelling = name.lower().replace("-", "_")
    if spelling.startswith(PREFIX):
        # The prefix is left out: with it, any two of our names would look alike.
        fields = {known.removeprefix(PREFIX): known for known in known_variable_names()}
        close = difflib.get_close_matches(spelling.removeprefix(PREFIX), fields, n=1)
        return fields[close[0]] if close else None
    if not spelling.startswith("pp"):
        return None
    close = difflib.get_close_matches(spelling, known_variable_names(), n=1, cutoff=_ALMOST)
    return close[0] if close else None
