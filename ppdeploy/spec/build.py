"""From the values of an inventory to a `Spec`: pure, so that the command and the play get the same one.

The command has the values from `ansible-inventory`, the play from Ansible itself.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue, ValidationError

from ppdeploy.spec.names import check_names
from ppdeploy.spec.option_names import refused_options
from ppdeploy.spec.plain import plain, shown
from ppdeploy.spec.problems import Problem, RefusedItemsError, raise_problems, shortened_list
from ppdeploy.spec.serve_options import ServeOptions, serve_options
from ppdeploy.spec.types import GatewayHost, HostSpec, PipelineSpec, Spec
from ppdeploy.spec.variables import (
    PREFIX,
    VARIABLES,
    Frozen,
    HostVars,
    PipelineVars,
    SecretVars,
    is_local_model,
    is_mirror,
)

Locate = Callable[[str], str | None]
"""Says where a variable is set, such as `inventory/cluster/hosts.yml:12`; None when that is not known."""

_Vars = TypeVar("_Vars", bound=Frozen)

PIPELINE_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
RESERVED_NAMES = frozenset(
    # Ansible's own groups and ours, then folders that lie beside those of the pipelines on a node.
    {"all", "ungrouped", "vllm", "gateway", "agent", "bin", "cache", "lib", "models", "state", "uv", "venvs"}
)
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")

DOCUMENTATION_NETWORKS = tuple(IPv4Network(text) for text in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"))
"""RFC 5737: addresses that belong to nobody, which the example inventory uses."""


def spec_from_values(
    pipelines: Mapping[str, Sequence[str]],
    values: Mapping[str, Mapping[str, object]],
    *,
    inventory_dir: Path,
    addresses: Mapping[str, object] | None = None,
    ssh_ports: Mapping[str, object] | None = None,
    pending: Mapping[str, AbstractSet[str]] | None = None,
    locate: Locate | None = None,
    gateways: Sequence[str] = (),
) -> Spec:
    """Return the checked spec of a cluster.

    `pipelines` maps each group below `vllm` to its hosts in rank order; `values` maps hosts to their
    `ppdeploy_*` variables, rendered; `addresses` and `ssh_ports` hold `ansible_host` and `ansible_port` where
    set; `pending` names, for each host, variables that are set but not rendered yet; `gateways` are the hosts of
    the group `gateway`. Raises InputError, one sentence a line, for all that is wrong at once.
    """
    builder = _Builder(values, addresses or {}, ssh_ports or {}, pending or {}, locate or (lambda _: None), gateways)
    return builder.build(pipelines, inventory_dir)


def example_problems(addresses: Mapping[str, object], locate: Locate | None = None) -> list[Problem]:
    """Return a problem for each host that still has an address of the example inventory.

    `addresses` maps hosts to where Ansible reaches them.
    """
    left = {host: str(address) for host, address in addresses.items() if _is_documentation(address)}
    if not left:
        return []
    found = sorted(set(left.values()))
    verb = "belong" if len(found) > 1 else "belongs"
    file = locate("ansible_host") if locate else None
    where = ("hosts " if len(left) > 1 else "host ") + shortened_list(sorted(left))
    return [
        Problem(
            f"{shortened_list(found)} {verb} to the example, not to a machine",
            where=f"{where}, {file}" if file else where,
            remedy="run `ppdeploy init`, or copy inventory/example to inventory/cluster and write the "
            "addresses of your own machines there",
        )
    ]


def _is_documentation(address: object) -> bool:
    if not isinstance(address, str):
        return False
    name = address.lower().rstrip(".")
    if re.search(r"(^|\.)(example|invalid)(\.(com|net|org))?$", name):
        return True
    try:
        number = IPv4Address(name)
    except ValueError:
        return False
    return any(number in network for network in DOCUMENTATION_NETWORKS)


class _Builder:
    """Collects problems while the spec is put together, so that all are told at once."""

    def __init__(
        self,
        values: Mapping[str, Mapping[str, object]],
        addresses: Mapping[str, object],
        ssh_ports: Mapping[str, object],
        pending: Mapping[str, AbstractSet[str]],
        locate: Locate,
        gateways: Sequence[str],
    ) -> None:
        self.values = values
        self.addresses = addresses
        self.ssh_ports = ssh_ports
        self.pending = pending
        self.locate = locate
        self.gateways = gateways
        self.problems: list[Problem] = []
        self.unusable: dict[tuple[str, str], list[str]] = {}
        """Hosts by variable and reason, for values that are no plain data."""

    def build(self, pipelines: Mapping[str, Sequence[str]], inventory_dir: Path) -> Spec:
        self._check_pipelines(pipelines)
        self.problems += check_names(self.values, self.locate)
        # With a wrong structure, what follows would repeat the same mistake in other words.
        raise_problems(self.problems)
        hosts = [host for members in pipelines.values() for host in members]
        outside = [host for host in self.gateways if host not in hosts]
        self._check_addresses([*hosts, *outside])
        given = {host: self._plain_values(host) for host in hosts}
        cluster = {v.name for v in VARIABLES.values() if v.scope == "cluster"}
        common = self._one_value(cluster, hosts, given, "the cluster", "the group vllm")
        built = [self._pipeline(name, members, given, inventory_dir) for name, members in pipelines.items()]
        self._check_gateways(outside, common, [pipeline.vars for pipeline in built if pipeline])
        raise_problems(self.problems)
        return Spec(
            cluster=inventory_dir.absolute().name or "cluster",
            inventory_dir=inventory_dir.absolute(),
            pipelines=tuple(pipeline for pipeline in built if pipeline),
            gateways=tuple(
                GatewayHost(name=host, address=str(self.addresses.get(host) or host)) for host in self.gateways
            ),
        )

    # ---- structure

    def _check_pipelines(self, pipelines: Mapping[str, Sequence[str]]) -> None:
        if not pipelines:
            self._add(
                "no pipeline is defined",
                "group vllm",
                "make a group below `vllm` (children:) that holds the hosts of one model, in rank order",
            )
        homes: dict[str, list[str]] = {}
        for name, members in pipelines.items():
            where = f"group {shown(name)}"
            if name in RESERVED_NAMES:
                self._add(
                    f"a pipeline cannot be named {name}, which ppdeploy uses itself",
                    where,
                    "rename the group",
                )
            elif not PIPELINE_NAME.fullmatch(name):
                self._add(
                    f"{shown(name)} is no name for a pipeline",
                    where,
                    "rename the group: a small letter, then at most 30 small letters, digits and _",
                )
            if not members:
                self._add("the pipeline has no hosts", where, "add its hosts, in rank order, or remove the group")
            for host in members:
                homes.setdefault(host, []).append(name)
        for host in self.gateways:
            if host not in homes and not _HOST_NAME.fullmatch(host):
                self._add(
                    f"{shown(host)} is no name for a host",
                    "group gateway",
                    "use letters, digits and . _ - and put the address into ansible_host",
                )
        for host, groups in homes.items():
            if not _HOST_NAME.fullmatch(host):
                self._add(
                    f"{shown(host)} is no name for a host",
                    f"pipeline {groups[0]}",
                    "use letters, digits and . _ - and put the address into ansible_host",
                )
            if len(groups) > 1:
                self._add(
                    f"the host is in {len(groups)} pipelines: {', '.join(groups)}",
                    f"host {host}",
                    "leave it in one; a host serves one pipeline",
                )

    def _check_addresses(self, hosts: Sequence[str]) -> None:
        seen: dict[tuple[str, str], list[str]] = {}
        for host in hosts:
            address = self.addresses.get(host)
            if address is not None and (not isinstance(address, str) or not re.fullmatch(r"[^\s/]+", address)):
                self._add(
                    f"ansible_host is {shown(address)}, which is no address",
                    f"host {host}",
                    "set it to the host's name or IP address",
                )
                continue
            # As ssh and `ppdeploy init` take it; what else reads the address (a gateway, another node) does not.
            written = re.fullmatch(r"(?:([^@{}]+)@)?([^@:{}]+)(?::(\d+))?", address or "")
            if written and (written[1] or written[3]):
                lines = [
                    f"ansible_host: {written[2]}",
                    *([f"ansible_user: {written[1]}"] if written[1] else []),
                    *([f"ansible_port: {written[3]}"] if written[3] else []),
                ]
                self._add(
                    f"ansible_host is {shown(address)}, which is more than an address",
                    f"host {host}",
                    f"write {' and '.join(lines)}",
                )
                continue
            if address is None or "{{" not in address:
                port = str(self.ssh_ports.get(host) or 22)
                seen.setdefault(((address or host).lower(), port), []).append(host)
        for (address, _), same in seen.items():
            if len(same) > 1:
                self._add(
                    f"{len(same)} hosts have one address, {address}",
                    f"hosts {shortened_list(same)}",
                    "give each host its own ansible_host",
                )

    def _check_gateways(
        self, outside: Sequence[str], common: Mapping[str, JsonValue], built: Sequence[PipelineVars]
    ) -> None:
        """Add what is wrong with the group `gateway`, whose hosts take their values from the group `vllm`."""
        if self.gateways and built and not any(wants.gateway for wants in built):
            self._add(
                f"ppdeploy_gateway is false, and the group `gateway` has {shortened_list(self.gateways)}",
                self._where("ppdeploy_gateway", "group gateway"),
                "take the hosts out of the group, and leave them in the inventory for one apply, which removes their "
                "gateways; or set ppdeploy_gateway: true",
            )
        unknown = {name for name, _ in self.unusable} | {name for names in self.pending.values() for name in names}
        for host in outside:
            for name, value in self._plain_values(host).items():
                if name.startswith(f"{PREFIX}gateway") and name not in unknown and value != common.get(name):
                    there = shown(common[name], 30) if name in common else "not set"
                    self._add(
                        f"{name} is {shown(value, 30)} on {host}, and {there} for the group vllm",
                        self._where(name, "group gateway"),
                        "set it once, in the vars of the group vllm, whose values all gateways have",
                    )

    # ---- values

    def _plain_values(self, host: str) -> dict[str, JsonValue]:
        """Return the host's known variables that are set, as plain data; what is no such data is kept aside."""
        result: dict[str, JsonValue] = {}
        for name, value in self.values.get(host, {}).items():
            if name not in VARIABLES or name in self._pending_of(host):
                continue
            try:
                item = plain(value)
            except ValueError as reason:
                self.unusable.setdefault((name, str(reason)), []).append(host)
                continue
            if item is not None:
                result[name] = item
        return result

    def _tell_unusable(self, pipeline: str, hosts: Sequence[str]) -> None:
        for (name, reason), everywhere in self.unusable.items():
            here = [host for host in everywhere if host in hosts]
            if here:
                where = f"pipeline {pipeline}" if len(here) == len(hosts) else f"host {shortened_list(here)}"
                must = VARIABLES[name].must
                self._add(f"{name} cannot be used, since {reason}", self._where(name, where), f"set it to {must}")

    def _pending_of(self, host: str) -> AbstractSet[str]:
        return self.pending.get(host, frozenset())

    def _one_value(
        self,
        names: Iterable[str],
        hosts: Sequence[str],
        given: Mapping[str, Mapping[str, JsonValue]],
        whole: str,
        group: str,
    ) -> dict[str, JsonValue]:
        """Return the values that the hosts have in common; one that differs is a problem."""
        common: dict[str, JsonValue] = {}
        for name in names:
            if any(name in self._pending_of(host) for host in hosts) or name in {n for n, _ in self.unusable}:
                continue
            kinds: dict[str, list[str]] = {}
            for host in hosts:
                key = json.dumps(given[host].get(name), sort_keys=True)
                kinds.setdefault(key, []).append(host)
            if len(kinds) > 1:
                self._differs(name, kinds, whole, group)
            elif hosts and name in given[hosts[0]]:
                common[name] = given[hosts[0]][name]
        return common

    def _differs(self, name: str, kinds: Mapping[str, Sequence[str]], whole: str, group: str) -> None:
        parts = []
        for key, hosts in kinds.items():
            if key == "null":
                text = "not set"
            elif VARIABLES[name].secret:
                text = "one value"
            else:
                text = shown(json.loads(key), 30)
            parts.append(f"{text} on {shortened_list(hosts)}")
        self._add(
            f"{name} differs between the hosts of {whole}: {'; '.join(parts)}",
            self._where(name, None),
            f"set it once, in the vars of {group}",
        )

    def _pipeline(
        self,
        name: str,
        hosts: Sequence[str],
        given: Mapping[str, Mapping[str, JsonValue]],
        inventory_dir: Path,
    ) -> PipelineSpec | None:
        before = len(self.problems)
        self._tell_unusable(name, hosts)
        names = [v.name for v in VARIABLES.values() if v.scope != "host"]
        wanted = [n for n in names if VARIABLES[n].scope == "pipeline"]
        values = self._one_value(wanted, hosts, given, f"pipeline {name}", f"the group {name}")
        for variable in names:
            if VARIABLES[variable].scope == "cluster" and variable in given[hosts[0]]:
                values[variable] = given[hosts[0]][variable]
        pending = tuple(n for n in VARIABLES if any(n in self._pending_of(host) for host in hosts))
        where = f"pipeline {name}"
        told = len(self.problems) > before
        main = self._validate(PipelineVars, values, where, pending, complete=not told)
        secret = self._validate(SecretVars, values, where, pending)
        members = self._hosts(name, hosts, given, pending)
        if main:
            self._check_together(main, where, pending)
            self._check_options(main, where, pending)
        if main and members:
            self._check_sidecars(main, members)
            self._check_sidecar_options(main, members, pending)
        if main is None or secret is None or members is None or len(self.problems) > before:
            return None
        model_pending = f"{PREFIX}model" in pending
        return PipelineSpec(
            name=name,
            hosts=members,
            vars=main,
            has_hf_token=secret.hf_token is not None or f"{PREFIX}hf_token" in pending,
            pending=pending,
            model_path=_controller_path(main.model, inventory_dir)
            if is_local_model(main.model) and not model_pending
            else None,
            wheelhouse_path=_controller_path(main.wheelhouse, inventory_dir) if main.wheelhouse else None,
            nvidia_key_path=_controller_path(main.nvidia_repository_key, inventory_dir)
            if main.nvidia_repository_key
            else None,
        )

    def _hosts(
        self,
        pipeline: str,
        hosts: Sequence[str],
        given: Mapping[str, Mapping[str, JsonValue]],
        pending: Sequence[str],
    ) -> tuple[HostSpec, ...] | None:
        names = [v.name for v in VARIABLES.values() if v.scope == "host"]
        groups: dict[str, list[str]] = {}
        for host in hosts:
            own = {n: given[host][n] for n in names if n in given[host]}
            groups.setdefault(json.dumps(own, sort_keys=True), []).append(host)
        checked: dict[str, HostVars] = {}
        for text, same in groups.items():
            where = f"pipeline {pipeline}" if len(same) == len(hosts) else f"host {shortened_list(same)}"
            result = self._validate(HostVars, json.loads(text), where, pending)
            if result:
                checked |= dict.fromkeys(same, result)
        if len(checked) < len(hosts):
            return None
        return tuple(
            HostSpec(name=host, address=str(self.addresses.get(host) or host), vars=checked[host]) for host in hosts
        )

    def _validate(
        self,
        owner: type[_Vars],
        values: Mapping[str, JsonValue],
        where: str,
        pending: Sequence[str],
        *,
        complete: bool = True,
    ) -> _Vars | None:
        """Return the typed values, or None after adding a problem for each that is wrong.

        `complete=False` keeps silent on a required variable that is missing, which was told already.
        """
        fields = {v.field: v for v in VARIABLES.values() if v.owner is owner}
        own = {field: values[v.name] for field, v in fields.items() if v.name in values}
        for field, variable in fields.items():
            if variable.required and variable.name in pending:
                # Stands for the value until a play renders it; PipelineSpec.pending says so.
                own[field] = "pending"
        try:
            return owner.model_validate(own)
        except ValidationError as error:
            reported: set[str] = set()
            for detail in error.errors(include_url=False):
                field = str(detail["loc"][0])
                variable = fields[field]
                if field in reported or (detail["type"] == "missing" and not complete):
                    continue
                reported.add(field)
                cause = detail.get("ctx", {}).get("error")
                place = self._where(variable.name, where)
                steps = detail["loc"][1:]
                if any(isinstance(step, str) for step in steps) and not isinstance(cause, RefusedItemsError):
                    what = _wrong_inside(variable.name, steps, detail["type"], detail["input"], cause)
                    self._add(what, place, f"set it to {variable.must}")
                elif detail["type"] == "missing":
                    self._add(f"{variable.name} is not set", place, f"set it to {variable.must}")
                elif isinstance(cause, RefusedItemsError):
                    for what, remedy in cause.items:
                        self._add(f"{variable.name} {what}", place, remedy)
                else:
                    self._add(_wrong(variable.name, own[field], cause, steps), place, f"set it to {variable.must}")
            return None

    def _check_together(self, main: PipelineVars, where: str, pending: Sequence[str]) -> None:
        """Add what is wrong with values that are right one by one."""

        def known(*fields: str) -> bool:
            return not any(PREFIX + field in pending for field in fields)

        if main.api_port == main.master_port and known("api_port", "master_port"):
            self._add(
                f"ppdeploy_api_port and ppdeploy_master_port are both {main.api_port}",
                self._where("ppdeploy_master_port", where),
                "give them two different ports",
            )
        if main.gateway:
            self._check_gateway_ports(main, where)
        stages, partition = main.pipeline_parallel_size, main.layer_partition
        if stages and partition and stages != len(partition):
            self._add(
                f"ppdeploy_layer_partition has {len(partition)} stages, "
                f"and ppdeploy_pipeline_parallel_size is {stages}",
                self._where("ppdeploy_layer_partition", where),
                "make them agree, or remove ppdeploy_pipeline_parallel_size",
            )
        if main.model_revision and (is_local_model(main.model) or is_mirror(main.model)) and known("model"):
            self._add(
                "ppdeploy_model_revision is set, and ppdeploy_model is a folder, which has no revisions",
                self._where("ppdeploy_model_revision", where),
                "remove ppdeploy_model_revision",
            )
        if main.transport == "rdma" and main.device == "cpu" and known("transport", "device"):
            self._add(
                "ppdeploy_transport is rdma, and ranks on CPUs talk through gloo, which knows TCP alone",
                self._where("ppdeploy_transport", where),
                "remove ppdeploy_transport",
            )
        if main.transport == "rdma" and main.fabric_encryption != "none" and known("transport", "fabric_encryption"):
            self._add(
                f"ppdeploy_fabric_encryption is {main.fabric_encryption}, and RDMA passes it by in clear",
                self._where("ppdeploy_fabric_encryption", where),
                "remove ppdeploy_transport, or set ppdeploy_fabric_encryption: none",
            )
        if (main.nvidia_repository is None) != (main.nvidia_repository_key is None) and known(
            "nvidia_repository", "nvidia_repository_key"
        ):
            one, other = ("nvidia_repository", "nvidia_repository_key")[:: 1 if main.nvidia_repository else -1]
            self._add(
                f"ppdeploy_{one} is set without ppdeploy_{other}",
                self._where(f"ppdeploy_{one}", where),
                f"set ppdeploy_{other} too, or remove ppdeploy_{one}",
            )
        if main.model_on_nodes and not main.model.startswith("/") and known("model"):
            self._add(
                "ppdeploy_model_on_nodes is true without an absolute path in ppdeploy_model",
                self._where("ppdeploy_model_on_nodes", where),
                "set ppdeploy_model to where the folder is mounted, on the controller too",
            )
        same_path = main.wheelhouse is not None and main.wheelhouse.startswith("/")
        if main.wheelhouse_on_nodes and not same_path and known("wheelhouse"):
            self._add(
                "ppdeploy_wheelhouse_on_nodes is true without an absolute path in ppdeploy_wheelhouse",
                self._where("ppdeploy_wheelhouse_on_nodes", where),
                "set ppdeploy_wheelhouse to the folder's absolute path on the nodes",
            )

    def _check_gateway_ports(self, main: PipelineVars, where: str) -> None:
        fields = ("api_port", "master_port", "gateway_port", "gateway_peer_port", "gateway_metrics_port")
        taken: dict[int, str] = {}
        for name in fields:
            port = getattr(main, name)
            other = taken.setdefault(port, name)
            if other != name and name.startswith("gateway"):
                self._add(
                    f"{PREFIX}{other} and {PREFIX}{name} are both {port}",
                    self._where(PREFIX + name, where),
                    "give them two different ports",
                )

    def _check_sidecars(self, main: PipelineVars, members: Sequence[HostSpec]) -> None:
        """Add what is wrong with the sidecars of a host beside its rank and beside each other."""
        for index, host in enumerate(members):
            ports = {main.api_port: "ppdeploy_api_port", main.master_port: "ppdeploy_master_port"} if index == 0 else {}
            if main.gateway and (index == 0 or host.name in self.gateways):
                gateway = ("gateway_port", "gateway_peer_port", "gateway_metrics_port")
                ports |= {getattr(main, name): PREFIX + name for name in gateway}
            names: set[str] = set()
            for sidecar in host.vars.sidecars:
                where = self._where("ppdeploy_sidecars", f"host {host.name}")
                if sidecar.name in names:
                    self._add(f"two sidecars are named {sidecar.name}", where, "give each another name")
                names.add(sidecar.name)
                taken = ports.setdefault(sidecar.port, f"sidecar {sidecar.name}")
                if taken != f"sidecar {sidecar.name}":
                    what = f"sidecar {sidecar.name} and {taken} have the same port {sidecar.port}"
                    self._add(what, where, "give each another port")

    def _check_options(self, main: PipelineVars, where: str, pending: Sequence[str]) -> None:
        """Add the options that the pipeline's vLLM does not have, or not in the form that is given."""
        options = _options_of(main, pending)
        for what, remedy in refused_options(main.vllm_args, options) if options else ():
            self._add(f"{PREFIX}vllm_args {what}", self._where(f"{PREFIX}vllm_args", where), remedy)

    def _check_sidecar_options(self, main: PipelineVars, members: Sequence[HostSpec], pending: Sequence[str]) -> None:
        """Add the same for sidecars, which run in the environment of the rank; once for those of several hosts."""
        options = _options_of(main, pending)
        if options is None:
            return
        hosts: dict[tuple[str, str], list[str]] = {}
        for host in members:
            for sidecar in host.vars.sidecars:
                for what, remedy in refused_options(sidecar.vllm_args, options):
                    hosts.setdefault((f"vllm_args of sidecar {sidecar.name} {what}", remedy), []).append(host.name)
        for (what, remedy), same in hosts.items():
            place = f"host{'s' if len(same) > 1 else ''} {shortened_list(same)}"
            self._add(f"{PREFIX}sidecars: {what}", self._where(f"{PREFIX}sidecars", place), remedy)

    # ---- telling

    def _where(self, variable: str, where: str | None) -> str | None:
        file = self.locate(variable)
        return ", ".join(part for part in (where, file) if part) or None

    def _add(self, what: str, where: str | None, remedy: str) -> None:
        self.problems.append(Problem(what, where, remedy))


def _options_of(main: PipelineVars, pending: Sequence[str]) -> ServeOptions | None:
    """Return the options of a pipeline's vLLM, None while its version is not known, or where it has no table."""
    if {f"{PREFIX}device", f"{PREFIX}vllm_version"} & set(pending):
        return None
    return serve_options(main.device, main.vllm_version)


def _wrong(name: str, value: JsonValue, cause: object, steps: Sequence[int | str] = ()) -> str:
    """Return what is wrong with a value, without the value where it is secret or long.

    `steps` lead from the variable to the entry of a list that is wrong.
    """
    reason = str(cause) if isinstance(cause, ValueError) else ""
    if VARIABLES[name].secret:
        return f"{name} is not a usable value"
    if isinstance(value, list) and reason and len(steps) == 1 and isinstance(steps[0], int):
        return f"{name} has {shown(value[steps[0]])} in entry {steps[0] + 1}, but {reason}"
    if isinstance(value, (dict, list)) and reason:
        return f"{name} is wrong, since {reason}"
    return f"{name} is {shown(value)}" + (f", but {reason}" if reason else "")


def _wrong_inside(name: str, steps: Sequence[int | str], kind: str, value: object, cause: object) -> str:
    """Return what is wrong with a field of one of the maps that a variable lists.

    `steps` lead from the variable to the field, `kind` is what pydantic calls the error.
    """
    field = next(step for step in steps if isinstance(step, str))
    entry = f"entry {next((step + 1 for step in steps if isinstance(step, int)), 1)}"
    if kind == "missing":
        return f"{name} has no {field} in {entry}"
    if kind == "extra_forbidden":
        return f"{name} has the unknown field {shown(field)} in {entry}"
    reason = f", but {cause}" if isinstance(cause, ValueError) else ""
    return f"{name} has {shown(value)} as {field} in {entry}{reason}"


def _controller_path(text: str, inventory_dir: Path) -> Path:
    """Return a path as an absolute one: `~` is the user's home, a relative one starts at the inventory."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:
        # No home folder is known for it; the check that looks for the folder will say what is missing.
        path = Path(text)
    return Path(os.path.normpath(inventory_dir.absolute() / path))
