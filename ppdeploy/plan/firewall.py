"""The host's table of nftables, where `ppdeploy_firewall` asks for one. It is no part of a release.

It repeats, for the whole host, what the units' own address filters say (`IPAddressAllow=`), so that a port stays shut
also where somebody's drop-in takes a unit's filter away.
"""

from __future__ import annotations

from ppdeploy.agent.ready import PORTS
from ppdeploy.facts import Sysctl
from ppdeploy.plan.agent import AGENT_PORT
from ppdeploy.plan.types import Fabric, FirewallPlan, PlannedFile, TunnelPlan
from ppdeploy.spec import PipelineVars

UNIT_NAME = "ppdeploy-firewall.service"
UNIT = f"/etc/systemd/system/{UNIT_NAME}"
RULES = "/etc/ppdeploy/firewall.nft"

EPHEMERAL = (32768, 60999)
"""Linux's own net.ipv4.ip_local_port_range, in which vLLM, gloo and NCCL listen, where a host does not tell its own."""


def plan_firewall(
    fabric: Fabric,
    peers: tuple[str, ...],
    agent_clients: tuple[str, ...],
    sysctl: Sysctl,
    wants: PipelineVars,
    *,
    tunnel: TunnelPlan | None = None,
) -> FirewallPlan | None:
    """Return what the host's table lets through and shuts; None where the inventory asks for none.

    `fabric` is where ranks talk, so with a tunnel that of the tunnel. The wire below it is shut for all but the same
    hosts, whose checks try it; the units let in the tunnel's addresses alone.
    """
    if wants.firewall == "none":
        return None
    first = wants.master_port
    low, high = sysctl.ip_local_port_range or EPHEMERAL
    return FirewallPlan(
        interface=fabric.interface,
        wire=tunnel.wire.interface if tunnel else "",
        wire_peers=tuple(peer.endpoint for peer in tunnel.peers) if tunnel else (),
        peers=peers,
        agent_port=AGENT_PORT,
        agent_clients=agent_clients,
        closed=(str(AGENT_PORT), f"{first}-{first + PORTS - 1}", str(wants.api_port)),
        ephemeral=f"{low}-{high}",
    )


def firewall_files(plan: FirewallPlan | None) -> tuple[PlannedFile, ...]:
    """Return the files of the role firewall; none where there is no table."""
    if plan is None:
        return ()
    return (
        PlannedFile(path=RULES, template="ppdeploy-firewall.nft.j2", part="firewall", in_release=False),
        PlannedFile(path=UNIT, template="ppdeploy-firewall.service.j2", part="firewall", in_release=False),
    )
