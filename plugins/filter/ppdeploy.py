"""The way from a play to the plan: thin filters over `ppdeploy.play`, which the command line calls too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

DOCUMENTATION = """
name: ppdeploy
short_description: Plan pipelines from a play's values and facts
"""

ROOT = Path(__file__).resolve().parents[2]
if (ROOT / "ppdeploy" / "play.py").is_file() and str(ROOT) not in sys.path:
    # From a checkout the package lies beside the plugins, whether or not it is installed.
    sys.path.insert(0, str(ROOT))

try:
    import ppdeploy
    from ppdeploy import checking, play
    from ppdeploy.bench_report import bench_lines
    from ppdeploy.bundle.content import folder_hashes
    from ppdeploy.check_report import check_lines
    from ppdeploy.errors import InputError, PpdeployError
    from ppdeploy.gang import gang_status
    from ppdeploy.gang_report import status_lines
    from ppdeploy.logs import lines_of, merged
    from ppdeploy.net_report import net_lines
    from ppdeploy.paths import data_root
    from ppdeploy.rsh import push_argv
    from ppdeploy.spec import known_variable_names, secret_variable_names
except ImportError as error:
    raise AnsibleFilterError(
        f"the Python that runs Ansible ({sys.executable}) cannot load ppdeploy: {error}. "
        f"Run `{sys.executable} -m pip install {ROOT}` or use the Python where ppdeploy is installed."
    ) from error

if data_root().resolve() != ROOT:
    raise AnsibleFilterError(
        f"these playbooks lie in {ROOT} and the ppdeploy package {ppdeploy.__version__} of {sys.executable} brings its "
        f"own in {data_root()}: run `ppdeploy apply`, or `{sys.executable} -m pip install -e {ROOT}`."
    )


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn an error that is told to the user into the one that Ansible prints."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PpdeployError as error:
            raise AnsibleFilterError(str(error)) from error

    return wrapped


def pipelines(hostvars: Any) -> dict[str, list[str]]:
    """Return the groups below `vllm` with their hosts in rank order. Only group names are read, no variables."""
    # The play's `groups` is flat, and ansible-inventory cannot read a vault whose password only the play was given.
    # Which groups lie below `vllm` is known to the inventory object alone, and that has no public way in.
    groups = hostvars._inventory.groups  # noqa: SLF001  (as said above)
    top = groups.get("vllm")
    if top is None:
        return {}
    return {str(group.name): [str(host.name) for host in group.get_hosts()] for group in top.child_groups}


def gateways(hostvars: Any) -> dict[str, dict[str, Any]]:
    """Return the hosts of the group `gateway`, each with its address and what it says of the gateway itself."""
    groups = hostvars._inventory.groups  # noqa: SLF001  (as above)
    if "gateway" not in groups:
        return {}
    names = [name for name in known_variable_names() if name.startswith("ppdeploy_gateway")]
    found = {}
    for host in groups["gateway"].get_hosts():
        own = hostvars[host.name]
        values = {name: own[name] for name in names if name in own}
        found[str(host.name)] = {**values, "ansible_host": own.get("ansible_host", str(host.name))}
    return found


def pipeline_of(groups: Mapping[str, list[str]], host: str) -> str:
    """Return the pipeline of a host: the first group below `vllm` that has it."""
    found = next((str(name) for name, hosts in groups.items() if host in hosts), None)
    if found is None:
        raise InputError(
            "it is in no group below vllm, so it has no pipeline", where=f"host {host}", remedy="put it into one"
        )
    return found


def status(groups: Mapping[str, list[str]], seen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return how every pipeline is, as lines; `seen` has for each host what its look registered as `ppdeploy__seen`."""
    nodes: dict[str, dict[str, Any]] = {}
    for host, own in seen.items():
        result = own.get("ppdeploy__seen") or {}
        node = result.get("node")
        nodes[host] = {"node": node} if node else {"unreachable": str(result.get("msg") or "it was not asked")}
    return status_lines(gang_status(groups, nodes))


def _looks(seen: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what a check saw of each host, from what its tasks registered."""
    looks: dict[str, dict[str, Any]] = {}
    for host, own in seen.items():
        asked = own.get("ppdeploy__facts") or {}
        listening, looked = own.get("ppdeploy__listening") or {}, own.get("ppdeploy__looked") or {}
        failed = [task.get("msg") for task in (listening, looked) if task.get("failed") or task.get("unreachable")]
        looks[host] = {
            "facts": asked.get("facts"),
            "reason": str(asked.get("msg") or "it was not asked"),
            "unreachable": bool(asked.get("unreachable")),
            "received": own.get("ppdeploy__received"),
            "listener": listening.get("listener"),
            "probe": looked.get("probe"),
            "probe_problem": str(failed[0]) if failed else "",
        }
    return looks


def ways(inventory: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what each host is to look at, and how it listens for the others."""
    return checking.ways_of_play(inventory, _looks(seen))


def check(
    inventory: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]], token: str | None = None
) -> dict[str, list[str]]:
    """Return what the checks come to: `lines` to print, and `blocked`, sentences of what must not be."""
    found = checking.check_of_play(inventory, _looks(seen), token)
    unasked = [f"{host}: {one.reason}" for host, one in found.unasked.items()]
    return {"lines": check_lines(found), "blocked": unasked + [one.sentence() for one in found.of("blocked")]}


def logs(seen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of all nodes by time; `seen` has for each host what was registered as `ppdeploy__logged`."""
    told = {host: own.get("ppdeploy__logged") or {} for host, own in seen.items()}
    by_time = merged([lines_of(host, result.get("lines", ()), pipeline="") for host, result in told.items()])
    silent = [
        f"{host}: {result.get('msg') or 'it was not asked'}" for host, result in told.items() if "lines" not in result
    ]
    return [
        *(
            f"{datetime.fromtimestamp(line.time, UTC):%H:%M:%S.%f} {line.host} {line.unit} {line.message}"
            for line in by_time
        ),
        *silent,
    ]


def net_running(groups: Mapping[str, list[str]], seen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the pipelines that a test of the network would disturb; `seen` is as that of `status`."""
    return play.net_running({host: {**own, "pipeline": pipeline_of(groups, host)} for host, own in seen.items()})


def network(report: Mapping[str, Any]) -> list[str]:
    """Return what was measured of the network, as lines."""
    return net_lines(play.net_document(report))


def bench_report(plan: Mapping[str, Any], seen: Mapping[str, Mapping[str, Any]], directory: str) -> dict[str, Any]:
    """Return what a benchmark came to, and as lines; see `play.bench_of_play`."""
    found = play.bench_of_play(plan, seen, directory, datetime.now(UTC))
    return {**found, "lines": [*bench_lines(found["runs"]), *found["failures"]]}


def gateway_make(secrets: Mapping[str, Any]) -> dict[str, Any]:
    """Make what a gateway needs of the controller, where it is missing; see `play.make_gateway_secrets`."""
    return play.make_gateway_secrets(secrets, datetime.now(UTC))


def bundle_hashes(folder: str, on_nodes: bool) -> dict[str, str]:
    """Return the sha256 of each file of a bundle's folder; see `folder_hashes`."""
    return folder_hashes(Path(folder), elsewhere=on_nodes)


def public_names(names: Iterable[str]) -> list[str]:
    """Return the variable names without those of secrets, which no plan may see."""
    secret = secret_variable_names()
    return [name for name in names if name not in secret]


def pick(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return those of a host's values that exist, by name."""
    return {name: values[name] for name in names if name in values}


class FilterModule:
    """Ansible's way to find filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {
            "ppdeploy_pipelines": _told(pipelines),
            "ppdeploy_pipeline_of": _told(pipeline_of),
            "ppdeploy_status": status,
            "ppdeploy_logs": logs,
            "ppdeploy_gateways": gateways,
            "ppdeploy_gateway_hosts": _told(play.gateway_hosts_of_play),
            "ppdeploy_gateway_forget": play.forget_gateway,
            "ppdeploy_gateway_request": _told(play.gateway_request_of_play),
            "ppdeploy_gateway_keys": _told(play.gateway_keys_of_play),
            "ppdeploy_gateway_make": _told(gateway_make),
            "ppdeploy_gang_request": _told(play.gang_request_of_play),
            "ppdeploy_public_names": public_names,
            "ppdeploy_pick": pick,
            "ppdeploy_ways": _told(ways),
            "ppdeploy_probe_peers": checking.peers_to_probe,
            "ppdeploy_check": _told(check),
            "ppdeploy_facts_request": _told(play.request_of_play),
            "ppdeploy_drivers": _told(play.drivers_of_play),
            "ppdeploy_plan": _told(play.plan_of_play),
            "ppdeploy_push": _told(push_argv),
            "ppdeploy_bundle_hashes": _told(bundle_hashes),
            "ppdeploy_bench_report": _told(bench_report),
            "ppdeploy_smoke_report": _told(play.smoke_of_play),
            "ppdeploy_net_request": _told(play.net_request_of_play),
            "ppdeploy_net_running": _told(net_running),
            "ppdeploy_net_report": _told(play.net_report_of_play),
            "ppdeploy_net_lines": network,
        }
