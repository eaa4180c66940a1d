"""The agent of a node: where it listens, whom it believes, and its files. None of it is part of a release."""

from __future__ import annotations

from ppdeploy.plan.types import AgentPlan, Fabric, PlannedFile
from ppdeploy.spec import PipelineVars

AGENT_PORT = 29500
"""TCP port of the agents: outside the ephemeral range, and not the ranks' master port."""

LOOPBACK = "127.0.0.1"

SHORTEST_REFUSED_LEASE = 30
"""Seconds for which a node whose host answers may be without its agent: an upgrade of it fits in."""


def plan_agent(
    cluster: str, host: str, fabric: Fabric, wants: PipelineVars, *, wire: Fabric | None = None
) -> AgentPlan:
    """Return the agent of `host`, which is asked on its address of the fabric and on loopback.

    `wire` is the NIC below the fabric where that is a tunnel: who watches is in no tunnel, so the agent then listens
    there too, for nobody else.

    The whole fabric may ask, not the peers alone: a head waits for nodes that were taken out of the inventory too.
    """
    # A pipeline of one node has its fabric on loopback.
    alone = fabric.interface == "lo"
    watched = (wire.address,) if wire and wire != fabric and wants.monitoring_from else ()
    return AgentPlan(
        cluster=cluster,
        node=host,
        port=AGENT_PORT,
        listen=(LOOPBACK,) if alone else (fabric.address, *watched, LOOPBACK),
        clients=(*(() if alone else (fabric.network,)), *map(str, wants.monitoring_from)),
        device=wants.device,
        settings={
            "start_timeout": wants.start_timeout,
            "budget": wants.gang_failures,
            "budget_window": wants.gang_window,
            "lease": wants.gang_lease,
            # A node whose agent alone is down is never given less time than one that is silent.
            "refused_lease": max(SHORTEST_REFUSED_LEASE, wants.gang_lease),
        },
    )


def agent_files() -> tuple[PlannedFile, ...]:
    """Return the files that the role gang_agent renders; the packed agent and the key come beside them."""
    unit_dir, own = "/etc/systemd/system", "/opt/ppdeploy/agent"
    return (
        _file(f"{unit_dir}/ppdeploy-agent.service", "ppdeploy-agent.service.j2"),
        _file(f"{unit_dir}/ppdeploy-fence.service", "ppdeploy-fence.service.j2"),
        _file(f"{unit_dir}/ppdeploy-fence.timer", "ppdeploy-fence.timer.j2"),
        _file(f"{own}/fence.sh", "ppdeploy-fence.sh.j2", mode="0755"),
        # The rank's own process reads it, as an unprivileged user.
        _file("/etc/ppdeploy/agent.json", "agent.json.j2"),
    )


def _file(path: str, template: str, mode: str = "0644") -> PlannedFile:
    return PlannedFile(path=path, template=template, part="agent", mode=mode, in_release=False)
