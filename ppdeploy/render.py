"""Render the plan: every file of every node, the release digest over them, and what apply has to do to get there.

`ansible-playbook` and `ppdeploy render` print the same templates with the same `node` variable and the same Jinja2
settings, so the text is equal to the byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ppdeploy.facts import FileState, NodeFacts, PipelineState
from ppdeploy.gateway_text import gateway_values
from ppdeploy.paths import data_root
from ppdeploy.plan.build import GENERIC_UNIT, RELEASE_FILES, ROOT, UNIT_DIR
from ppdeploy.plan.driver_systems import pin_of
from ppdeploy.plan.firewall import RULES
from ppdeploy.plan.tuning import CONFIG, SCRIPT
from ppdeploy.plan.tunnel import PEERS, PRIVATE_KEY
from ppdeploy.plan.types import (
    DriverPlan,
    FirewallPlan,
    GatewayHostPlan,
    NodePlan,
    PipelinePlan,
    Plan,
    PlannedFile,
    TunnelPlan,
    Work,
)

AGENT_FILE = "/opt/ppdeploy/agent/agent.pyz"
"""The packed agent on every node. The rank's unit names it too, so it never moves."""

AGENT_RUN_FOLDER = "/run/ppdeploy-agent"

MOST_GPUS = 16
"""GPUs of one host that the agent may ask nvidia-smi for."""

FENCE_SECONDS = 60
"""A rank whose agent has shown no life for this long is ended by the fence."""

MANAGED = "Written by ppdeploy; changes are overwritten by the next apply."


NO_KEY = "(made-by-apply)"
"""What stands for the public key of a node that has none yet."""


@lru_cache(maxsize=1)
def _jinja(templates: Path) -> Environment:
    # The settings of ansible.builtin.template (trim_blocks on, lstrip_blocks off), where an undefined name is an error.
    return Environment(  # noqa: S701  (unit files, not HTML)
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def complete(plan: Plan, facts: Mapping[str, NodeFacts]) -> Plan:
    """Fill in the release digests and, from the facts, the work that is left on each node."""
    return plan.model_copy(update={"pipelines": tuple(_complete_pipeline(p, facts) for p in plan.pipelines)})


def release_json(pipeline: PipelinePlan) -> str:
    """Return the canonical release.json: the same on all nodes of a pipeline; its sha256 is the release digest."""
    release = {
        "schema": 1,
        "pipeline": pipeline.name,
        "vllm": pipeline.environment.vllm_version,
        "lock": pipeline.environment.lock_digest,
        "model": pipeline.model.name,
        "nodes": [
            {
                "host": node.host,
                "rank": node.node_rank,
                "address": node.fabric.address,
                "machine_id": node.machine_id,
                "manifest": node.model.manifest_digest,
                "files": _hashes(pipeline, node),
            }
            for node in pipeline.nodes
        ],
    }
    return json.dumps(release, sort_keys=True, indent=1)


def render_node(plan: Plan, host: str) -> dict[str, str]:
    """Return the text of every file of a node by its absolute path."""
    pipeline, node = plan.node(host)
    values = template_values(pipeline, node)
    texts = {}
    for file in node.files:
        one = {**values, "sidecar": sidecar_values(node, file.sidecar)} if file.part == "sidecar" else values
        texts[file_path(pipeline, file)] = render(file.template, one)
    return texts


def render_host(plan: Plan, host: str) -> dict[str, str]:
    """Return the text of every file of a host of the plan, a node or a gateway, by its absolute path."""
    outside = plan.outside(host)
    if outside is None:
        return render_node(plan, host)
    values = gateway_host_values(outside)
    return {file.path: render(file.template, values) for file in outside.files}


def gateway_host_values(plan: GatewayHostPlan) -> dict[str, Any]:
    """Return the `node` variable of the templates for a gateway outside of all pipelines."""
    pipelines = [server.pipeline for model in plan.gateway.models for server in model.servers]
    return {"managed": MANAGED, "pipeline": ", ".join(pipelines), "gateway": gateway_values(plan.gateway)}


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render one template with its one variable, `node`."""
    return _jinja(data_root() / "templates").get_template(template).render(node=values)


def release_folder(pipeline: PipelinePlan) -> str:
    """Return the folder of a pipeline's release on every node."""
    return f"{ROOT}/{pipeline.name}/releases/{pipeline.release}"


def file_path(pipeline: PipelinePlan, file: PlannedFile) -> str:
    """Return the absolute path of a planned file; those of a release lie in its folder."""
    return f"{release_folder(pipeline)}/{file.path}" if file.in_release else file.path


def links(pipeline: PipelinePlan) -> dict[str, str]:
    """Return the links that make a release the running one, by path, with their targets."""
    return {
        f"{ROOT}/{pipeline.name}/current": f"releases/{pipeline.release}",
        f"{UNIT_DIR}/ppdeploy-rank@{pipeline.name}.service.d/release.conf": f"{ROOT}/{pipeline.name}/current/rank.conf",
    }


def template_values(pipeline: PipelinePlan, node: NodePlan, release: str | None = None) -> dict[str, Any]:
    """Return the `node` variable of the templates: text that only has to be printed.

    `release` is what `release_json(pipeline)` returned, given by a caller that has it at hand for all nodes.
    """
    return {
        **_file_values(pipeline, node),
        **agent_values(pipeline, node),
        "tuning": tuning_values(node),
        **({"gateway": gateway_values(node.gateway)} if node.gateway else {}),
        "driver": driver_values(node.driver),
        **({"firewall": firewall_values(node.firewall)} if node.firewall else {}),
        **({"tunnel": tunnel_values(node.tunnel)} if node.tunnel else {}),
        "release_json": release_json(pipeline) if release is None else release,
    }


def agent_values(pipeline: PipelinePlan, node: NodePlan) -> dict[str, Any]:
    """Return what the templates of the agent print, and nothing that a release is made of."""
    agent = node.agent
    config = {
        "cluster": agent.cluster,
        "pipeline": pipeline.name,
        "node": agent.node,
        "listen": [[address, agent.port] for address in agent.listen],
        "port": agent.port,
        "device": agent.device,
        "settings": agent.settings,
    }
    return {
        "agent_file": AGENT_FILE,
        "agent_json": json.dumps(config, sort_keys=True, indent=2),
        "fence_file": f"{AGENT_FILE.rsplit('/', 1)[0]}/fence.sh",
        "fence_seconds": FENCE_SECONDS,
        "rank_unit": node.unit,
        "agent_ip_allow": " ".join(("localhost", *agent.clients)),
        "gpus": agent.device == "cuda",
        # What nvidia-smi opens: the GPUs, and the node that is for all of them (major 195 is NVIDIA's for ever).
        "gpu_devices": [f"/dev/char/195:{minor}" for minor in (*range(MOST_GPUS), 255)],
        "run_folder": AGENT_RUN_FOLDER,
    }


def tuning_values(node: NodePlan) -> dict[str, Any]:
    """Return what the templates of the tuning print, as `node.tuning`."""
    wanted = node.tuning.wanted()
    reasons = {one.key: one.reason for one in node.tuning.settings}
    boot = {key: value for key, value in wanted.items() if not key.startswith("sysctl.")}
    return {
        "interface": node.tuning.interface,
        "script": SCRIPT,
        "config": CONFIG,
        "config_json": json.dumps({"interface": node.tuning.interface, "settings": boot}, sort_keys=True, indent=2),
        "kernel": [
            {"name": key.removeprefix("sysctl."), "value": value, "reason": reasons[key]}
            for key, value in sorted(wanted.items())
            if key.startswith("sysctl.")
        ],
        "mtu": wanted.get("mtu", ""),
        # nvidia-smi loads the driver's module where nothing has done so yet.
        "capabilities": "CAP_NET_ADMIN CAP_SYS_ADMIN" if "gpu_persistence" in wanted else "CAP_NET_ADMIN",
    }


def firewall_values(plan: FirewallPlan) -> dict[str, Any]:
    """Return what the templates of the firewall print, as `node.firewall`."""
    return {
        "rules": RULES,
        "interface": plan.interface,
        "peers": ", ".join(plan.peers),
        "wire": plan.wire,
        "wire_peers": ", ".join(plan.wire_peers),
        "agent_port": plan.agent_port,
        # An agent of a lone host without watchers is asked over loopback alone, which was let through before.
        "agent_clients": ", ".join(plan.agent_clients or ("127.0.0.0/8",)),
        "closed": ", ".join(plan.closed),
        "ephemeral": plan.ephemeral,
        "shut": f'{{ "{plan.interface}", "{plan.wire}" }}' if plan.wire else f'"{plan.interface}"',
    }


def tunnel_values(plan: TunnelPlan) -> dict[str, Any]:
    """Return what the template of the tunnel prints, as `node.tunnel`."""
    return {
        "interface": plan.interface,
        "address": f"{plan.address}/{plan.ip_network.prefixlen}",
        "mtu": plan.mtu,
        "port": plan.port,
        "public_key": plan.public_key or NO_KEY,
        "private_key": PRIVATE_KEY,
        "peers_file": PEERS,
        "user_space": plan.kind == "wireguard-go",
        "wire": f"{plan.wire.interface}, {plan.wire.address} in {plan.wire.network}",
        "wire_network": plan.wire.network,
        "peers": [
            {
                "host": peer.host,
                "key": peer.public_key or NO_KEY,
                "endpoint": f"{peer.endpoint}:{plan.port}",
                "allowed": f"{peer.address}/32",
            }
            for peer in plan.peers
        ],
    }


def driver_values(plan: DriverPlan) -> dict[str, Any]:
    """Return what the templates of the driver print, as `node.driver`."""
    key = f"file://{plan.key}" if plan.manager == "dnf" and plan.mirror else plan.key
    return {
        "branch": plan.branch,
        "pin": pin_of(plan.platform, plan.branch or 0),
        "repository": plan.repository,
        "key": key,
        "ca_bundle": plan.ca_bundle,
    }


def sidecar_values(node: NodePlan, name: str) -> dict[str, Any]:
    """Return what a sidecar's template prints, as `node.sidecar`."""
    sidecar = next(one for one in node.sidecars if one.name == name)
    return {
        "name": sidecar.name,
        "unit": sidecar.unit,
        "exec_start": " ".join(exec_word(word) for word in sidecar.argv),
        # Quoted as a whole (systemd.exec(5), Environment=); specifiers are expanded in it, so % is doubled.
        "env_lines": [exec_word(f"{key}={value}").replace("$$", "$") for key, value in sorted(sidecar.env.items())],
    }


def _file_values(pipeline: PipelinePlan, node: NodePlan) -> dict[str, Any]:
    """Return the values of the files that the release digest covers; release.json itself comes after them."""
    allowed = ["localhost"] if node.fabric.interface == "lo" else ["localhost", node.fabric.address, *node.peers]
    return {
        "managed": MANAGED,
        "pipeline": pipeline.name,
        "role": node.role,
        "node_rank": node.node_rank,
        "nodes": len(pipeline.nodes),
        "stages_text": stages_text(node),
        "exec_start": " ".join(exec_word(word) for word in node.argv),
        "ip_allow": " ".join(allowed),
        "rank_env_lines": [env_line(name, value) for name, value in sorted(node.rank_env.items())],
        "nccl_env_lines": [env_line(name, value) for name, value in sorted(node.nccl_env.items())],
        # Not why it was chosen: a link that renegotiates its speed must not make a new release.
        "fabric_text": f"{node.fabric.interface}, {node.fabric.address} in {node.fabric.network}",
    }


def stages_text(node: NodePlan) -> str:
    """Return the layers of a node in words, such as `stage 0 with layers 0-15`."""
    return ", ".join(
        f"stage {stage.index} with layers {stage.first_layer}-{stage.first_layer + stage.layers - 1}"
        for stage in node.stages
    )


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:,=+@")


def exec_word(word: str) -> str:
    """Quote one argument for `ExecStart=` (systemd.service(5), command lines): `%` and `$` are doubled."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if word and set(word) <= _PLAIN else f'"{escaped}"'


def env_line(name: str, value: str) -> str:
    """Return one line of an environment file (systemd.exec(5), EnvironmentFile=): no expansion happens in it."""
    if value and set(value) <= _PLAIN:
        return f"{name}={value}"
    escaped = value
    for special in ("\\", '"', "$", "`"):
        escaped = escaped.replace(special, f"\\{special}")
    return f'{name}="{escaped}"'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hashes(pipeline: PipelinePlan, node: NodePlan) -> dict[str, str]:
    """Return the sha256 of each file of a node that decides how its rank runs, by name; the generic unit included."""
    values = _file_values(pipeline, node)
    return {
        file.path.rsplit("/", 1)[-1]: _sha256(render(file.template, values))
        for file in node.files
        if file.path in RELEASE_FILES or file.path == GENERIC_UNIT
    }


def _complete_pipeline(pipeline: PipelinePlan, facts: Mapping[str, NodeFacts]) -> PipelinePlan:
    release = release_json(pipeline)
    digest = _sha256(render("release.json.j2", {"release_json": release}))
    released = pipeline.model_copy(update={"release": digest})
    works = {node.host: _work(released, node, facts[node.host], release) for node in pipeline.nodes}
    # One rank that is not as planned restarts all of them: a lone rank never rejoins.
    restart = any(work.restart for work in works.values())
    nodes = tuple(
        node.model_copy(update={"work": works[node.host].model_copy(update={"restart": restart})})
        for node in released.nodes
    )
    return released.model_copy(update={"nodes": nodes})


def _work(pipeline: PipelinePlan, node: NodePlan, facts: NodeFacts, release: str) -> Work:
    state = facts.pipelines.get(pipeline.name)
    existing = _existing(state, pipeline)
    values = template_values(pipeline, node, release)
    missing = {
        file.path
        for file in node.files
        # Other roles keep the rest; it never makes a rank start anew.
        if file.part == "rank"
        and not _same(existing.get(file_path(pipeline, file)), file, _sha256(render(file.template, values)))
    }
    switch = state is None or state.current != pipeline.release or not _linked(existing, pipeline) or _unread(state)
    running = state is not None and _runs(state, pipeline.release)
    install_unit = GENERIC_UNIT in missing
    return Work(
        install_venv=node.work.install_venv,
        place_model=node.work.place_model,
        install_unit=install_unit,
        prepare_release=bool(missing - {GENERIC_UNIT}),
        switch_release=switch,
        restart=switch or not running or install_unit or bool(missing),
    )


def _runs(state: PipelineState, release: str) -> bool:
    # An apply that was interrupted may have switched `current` and left the ranks of the last release running.
    unit = state.unit
    return unit is not None and unit.active_state == "active" and state.started_release == release


def _unread(state: PipelineState) -> bool:
    """Whether an apply ended between the switch and systemd's look at it; the agent starts nothing until then."""
    return state.unit is not None and state.unit.needs_daemon_reload


def _existing(state: PipelineState | None, pipeline: PipelinePlan) -> dict[str, FileState]:
    """Return what the node has of this release, by absolute path."""
    if state is None:
        return {}
    files = [*state.unit_files]
    for release in state.releases:
        if release.digest == pipeline.release:
            files += release.files
    return {file.path: file for file in files}


def _same(found: FileState | None, file: PlannedFile, sha256: str) -> bool:
    return (
        found is not None
        and found.type == "file"
        and (found.sha256, found.mode, found.owner, found.group) == (sha256, file.mode, file.owner, file.group)
    )


def _linked(existing: Mapping[str, FileState], pipeline: PipelinePlan) -> bool:
    """Whether the drop-in link is in place; `current` is compared by its digest."""
    path = f"{UNIT_DIR}/ppdeploy-rank@{pipeline.name}.service.d/release.conf"
    found = existing.get(path)
    return found is not None and found.target == links(pipeline)[path]
