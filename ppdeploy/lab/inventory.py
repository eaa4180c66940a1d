"""The lab's inventory: the same variables as any other, for CPU ranks on the lab's hosts."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ppdeploy.errors import InputError
from ppdeploy.lab import network

WHEELHOUSE = "/srv/ppdeploy/wheelhouse"
"""Where an offline bundle is bound into the hosts."""
UV_CACHE = "/var/cache/ppdeploy/uv"
"""Where unpacked wheels are laid into the hosts."""

CPU_VLLM_ARGS: Mapping[str, Any] = {"compilation-config": {"mode": 2, "backend": "eager"}}
"""Compiles no C++, and works with more than one stage, which --enforce-eager does not on CPU."""


@dataclass(frozen=True)
class LabPipeline:
    """One pipeline of the lab: its group name, its hosts in rank order and its model (as `ppdeploy_model`).

    `vars` are added to the group's variables, and win over what the lab would write.
    """

    name: str = "tiny"
    hosts: Sequence[str] = ("node1", "node2")
    model: str = "./tiny"
    vars: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LabInventory:
    """What `inventory/lab/hosts.yml` is made from.

    Of hosts in no pipeline there are those of `gateways` alone, in the group `gateway`.
    """

    pipelines: Sequence[LabPipeline] = (LabPipeline(),)
    wheelhouse: str | None = WHEELHOUSE
    uv_cache_dir: str | None = UV_CACHE
    vars: Mapping[str, Any] = field(default_factory=dict)
    host_vars: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gateways: Sequence[str] = ()

    @classmethod
    def one_pipeline(cls, nodes: int, model: str = "./tiny", **more: Any) -> LabInventory:
        """Return the usual inventory: pipeline `tiny` over all `nodes` hosts."""
        hosts = tuple(f"node{index}" for index in range(1, nodes + 1))
        return cls(pipelines=(LabPipeline(hosts=hosts, model=model),), **more)

    def check(self, nodes: int) -> None:
        """Refuse a host that a lab of `nodes` hosts does not have."""
        known = {f"node{index}" for index in range(1, nodes + 1)}
        groups = [(f"pipeline {pipeline.name}", pipeline.hosts) for pipeline in self.pipelines]
        for where, hosts in [*groups, ("group gateway", self.gateways)]:
            for host in hosts:
                if host not in known:
                    raise InputError(
                        f"the lab has no host {host}",
                        where=where,
                        remedy=f"start it with more hosts, or use {', '.join(sorted(known))}",
                    )

    def render(self, ssh: LabSsh) -> str:
        """Return the text of `hosts.yml`."""
        children: dict[str, Any] = {}
        for pipeline in self.pipelines:
            hosts = {
                host: {
                    "ansible_host": network.management_address(int(host.removeprefix("node"))),
                    # The hosts share this machine's cores: ranks on one core are ten times slower.
                    "ppdeploy_omp_threads_bind": str((int(host.removeprefix("node")) - 1) % (os.cpu_count() or 1)),
                    **self.host_vars.get(host, {}),
                }
                for host in pipeline.hosts
            }
            children[pipeline.name] = {
                "hosts": hosts,
                "vars": {"ppdeploy_model": pipeline.model, **pipeline.vars},
            }
        connection = {
            "ansible_user": "root",
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_ssh_private_key_file": str(ssh.key),
            "ansible_ssh_common_args": shlex.join(ssh.options(key=False)),
            # Ansible names its open connections by address, and two labs have the same ones.
            "ansible_control_path_dir": str(ssh.control),
        }
        variables: dict[str, Any] = {
            **connection,
            "ppdeploy_device": "cpu",
            "ppdeploy_max_model_len": 1024,
            "ppdeploy_kv_cache_gib": 1,
            # Both NICs of a lab host are veth pairs and say the same speed, so the plan would refuse to guess.
            "ppdeploy_fabric_subnet": network.FABRIC_SUBNET,
            "ppdeploy_vllm_args": json.loads(json.dumps(CPU_VLLM_ARGS)),
        }
        if self.wheelhouse:
            variables |= {"ppdeploy_wheelhouse": self.wheelhouse, "ppdeploy_wheelhouse_on_nodes": True}
        if self.uv_cache_dir:
            variables |= {"ppdeploy_uv_cache_dir": self.uv_cache_dir, "ppdeploy_uv_link_mode": "symlink"}
        tree: dict[str, Any] = {"vllm": {"vars": variables | dict(self.vars), "children": children}}
        if self.gateways:
            addresses = {host: network.management_address(int(host.removeprefix("node"))) for host in self.gateways}
            hosts = {host: {"ansible_host": address} for host, address in addresses.items()}
            tree["gateway"] = {"hosts": hosts, "vars": connection}
        head = f"# Written by `ppdeploy lab up` for the lab {ssh.lab}; `ppdeploy lab down` removes it.\n---\n"
        return head + yaml.safe_dump(tree, sort_keys=False, width=1000)


@dataclass(frozen=True)
class LabSsh:
    """How to reach the hosts of one lab from an ordinary shell of this machine."""

    lab: str
    key: Path
    known_hosts: Path
    control: Path
    proxy: Sequence[str]

    def options(self, *, wait: float = 0, key: bool = True) -> list[str]:
        """Return the options of ssh(1); `wait` is for how many seconds to try while a host boots."""
        proxy = [*self.proxy, *(["--wait", str(wait)] if wait else []), "%h", "%p"]
        named = {
            "ProxyCommand": shlex.join(proxy),
            "UserKnownHostsFile": str(self.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "IdentitiesOnly": "yes",
            # A killed host sends no goodbye: without these a command to it would wait for ever.
            "ServerAliveInterval": "5",
            "ServerAliveCountMax": "3",
        }
        # No configuration of the person or the machine has a say in how the lab is reached.
        words = ["-F", "none"]
        if key:
            words += ["-i", str(self.key), "-o", "BatchMode=yes"]
        for name, value in named.items():
            words += ["-o", f"{name}={value}"]
        return words
