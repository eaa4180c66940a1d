"""What a cluster's gangs are like, out of what each node says of itself: one document for reports and programs.

A node is what the module `ppdeploy_gang` returned of it, or the reason why it could not be asked. The head's agent
tells of the gang as a whole; every node tells of its own rank. What nobody says stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

STATUS_SCHEMA = 2
"""Version of what `status --json` prints; 1 had the units alone."""

UNKNOWN = "unknown"
NOT_INSTALLED = "not installed"

#: How a change to the phase `stopping` reads when nothing failed.
_NO_FAILURE = re.compile(
    r"^first generation|^heard of generation|by the operator\b| is the head now$|has not confirmed that its rank is"
)
_NOT_LEADING = ("worker", "retired")


def gang_status(
    pipelines: Mapping[str, Sequence[str]],
    nodes: Mapping[str, Mapping[str, Any]],
    *,
    moment: datetime | None = None,
) -> dict[str, Any]:
    """Return the status document of a cluster.

    `pipelines` names the hosts of each in rank order; `nodes` has for each host that was asked either `node`, what
    `ppdeploy_gang` returned, or `unreachable`, the reason. Hosts that were not asked are left out. Ages and durations
    are seconds, sizes are bytes; `moment` stands in for now.
    """
    found = []
    for name, hosts in pipelines.items():
        asked = {host: nodes[host] for host in hosts if host in nodes}
        if asked:
            found.append(_pipeline(name, list(hosts), asked))
    when = (moment or datetime.now(UTC)).astimezone(UTC)
    return {"schema": STATUS_SCHEMA, "time": when.isoformat(timespec="seconds"), "pipelines": found}


def answers(status: Mapping[str, Any]) -> int:
    """Return how many nodes of a status document could be asked."""
    return sum(node["reachable"] for pipeline in status["pipelines"] for node in pipeline["nodes"])


def _pipeline(name: str, hosts: list[str], nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    head = _head(hosts, nodes)
    told = _agent(nodes.get(head, {})) or {}
    rows = [_node(host, rank, nodes[host], told) for rank, host in enumerate(hosts) if host in nodes]
    return {
        "pipeline": name,
        "head": head,
        **(_gang(told) if told else _without_head(head, nodes, rows)),
        "nodes": rows,
        "problems": _problems(told, rows),
    }


def _head(hosts: list[str], nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the node whose agent leads; where none says so, the first of the release, else of the inventory."""
    for host in hosts:
        status = _agent(nodes.get(host, {}))
        if status and status.get("phase") not in _NOT_LEADING:
            return host
    named = [(seen.get("node") or {}).get("release_nodes") for seen in nodes.values()]
    first = next((names[0] for names in named if names), hosts[0])
    return str(first)


def _agent(seen: Mapping[str, Any]) -> dict[str, Any] | None:
    node = seen.get("node") or {}
    status = (node.get("agent") or {}).get("status")
    return dict(status) if status else None


def _gang(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the head's agent says of the whole."""
    restarts = {kind: int(count) for kind, count in (told.get("restarts") or {}).items() if count}
    return {
        "phase": told.get("phase", UNKNOWN),
        "remark": told.get("remark") or "",
        "phase_seconds": told.get("phase_age"),
        "healthy": bool(told.get("healthy")),
        "why_unhealthy": told.get("why_unhealthy") or "",
        "generation": (told.get("generation") or [None])[0],
        "serving_seconds": told.get("serving_seconds"),
        "proof_age_seconds": told.get("proof_age"),
        "stall_limit_seconds": told.get("stall_limit"),
        "release": told.get("release") or None,
        "restarts": {"total": sum(restarts.values()), "by_reason": restarts},
        "last_failure": _last_failure(told),
        "recovered_seconds": told.get("recovered_seconds") or None,
        "budget": told.get("budget"),
        "failures": list(told.get("failures") or []),
    }


def _without_head(
    head: str, nodes: Mapping[str, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the same where the head's agent says nothing: only why, and what a worker last heard of it."""
    seen = nodes.get(head)
    if all(row["reachable"] and not row["installed"] for row in rows):
        phase, remark = NOT_INSTALLED, "run `ppdeploy apply`"
    elif seen is None:
        phase, remark = UNKNOWN, f"the head {head} was not asked"
    elif "node" not in seen:
        phase, remark = UNKNOWN, f"the head {head} is unreachable: {seen.get('unreachable')}"
    else:
        phase, remark = UNKNOWN, f"{head}: {seen['node']['agent']['problem']}"
    if phase == UNKNOWN:
        remark += _hearsay(head, nodes)
    empty = dict.fromkeys(
        (
            *("phase_seconds", "generation", "serving_seconds", "proof_age_seconds", "stall_limit_seconds", "release"),
            *("restarts", "last_failure", "recovered_seconds", "budget"),
        )
    )
    return {"phase": phase, "remark": remark, "healthy": False, "why_unhealthy": remark, **empty, "failures": []}


def _hearsay(head: str, nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what a worker's agent hears of the head over the fabric, which may work where ssh does not."""
    for host, seen in nodes.items():
        peer = ((_agent(seen) or {}).get("peers") or {}).get(head)
        if peer and peer["heard"]:
            return f"; {host} heard it {peer['age']:.1f} s ago, in phase {peer.get('phase') or UNKNOWN}"
        if peer:
            return f"; {host} does not hear it either ({peer['error']})"
    return ""


def _last_failure(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return reason and age of the youngest failure, of the gang's own making or not; None when there was none."""
    known = [(failure["age"], failure["reason"]) for failure in told.get("failures") or ()]
    # The list has only what spends budget; the phases tell of the rest, such as a host that was not heard.
    if told.get("now") is not None:
        known += [
            (round(told["now"] - change["at"], 1), change["remark"])
            for change in told.get("history") or ()
            if change["phase"] == "stopping" and not _NO_FAILURE.search(str(change["remark"]))
        ]
    if not known:
        return None
    age, reason = min(known, key=lambda one: one[0])
    return {"age_seconds": age, "reason": reason}


def _node(host: str, rank: int, seen: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    node = seen.get("node")
    heard = (told.get("peers") or {}).get(host)
    row: dict[str, Any] = {
        "host": host,
        "rank": rank,
        "reachable": node is not None,
        "reason": "" if node is not None else str(seen.get("unreachable") or "no answer"),
        "heard_by_head": {"heard": heard["heard"], "age_seconds": heard["age"], "error": heard["error"]}
        if heard
        else None,
    }
    if node is None:
        return {**row, "installed": None, "role": None, "stages": None, "agent": None, "release": None, "state": None}
    status = node["agent"]["status"] or {}
    own = status.get("own") or {}
    view = own.get("rank") or {}
    told_rank = node["rank"]
    return {
        **row,
        "rank": told_rank.get("rank", rank),
        "role": told_rank.get("role"),
        "stages": told_rank.get("stages"),
        "installed": bool(node["agent"]["installed"] and node["current"]),
        "agent": {
            "answers": bool(status),
            "version": status.get("version"),
            "active": f"{node['agent']['active']} ({node['agent']['sub']})" if node["agent"]["active"] else "",
            "problem": node["agent"]["problem"],
        },
        "release": {
            "current": node["current"],
            "previous": node["previous"],
            "prepared": own.get("prepared") or None,
            "running": view.get("release") or None,
        },
        "state": view.get("state") or _state_of_unit(told_rank),
        "generation": (view.get("generation") or [0])[0] or None,
        "detail": view.get("detail") or "",
        "ready": own.get("ready"),
        "remark": own.get("remark") or "",
        "held": bool(own.get("held")),
        "pid": told_rank["pid"],
        "memory": {
            "resident_bytes": told_rank["resident_bytes"] or view.get("memory_bytes") or None,
            "cgroup_bytes": told_rank["cgroup_bytes"],
            "gpu_bytes": told_rank["gpu_bytes"],
        },
        "storage_problems": [
            text
            for text in (status.get("storage_problem"), status.get("disk_problem"), status.get("keeper_problem"))
            if text
        ],
    }


def _state_of_unit(rank: Mapping[str, Any]) -> str:
    """Return the rank's state as systemd sees it, in the agent's words: nobody else tells."""
    if rank["processes"]:
        return "running" if rank["active"] == "active" else str(rank["active"] or "running")
    return "absent"


def _problems(told: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a person should look at, a sentence each."""
    found = []
    for row in rows:
        host = row["host"]
        if not row["reachable"]:
            found.append(f"{host} is unreachable: {row['reason']}")
            continue
        if row["installed"] and not row["agent"]["answers"]:
            found.append(f"{host}: {row['agent']['problem']}; its service is {row['agent']['active'] or 'not there'}")
        if row["held"]:
            # The word of all nodes is no news; of one alone it holds up the others.
            if told and told.get("wanted") != "stop":
                found.append(f"{host} was stopped by an operator there: `ppdeploy start` takes it back")
        elif row["agent"]["answers"] and row["ready"] is False and row["remark"] and row["state"] == "absent":
            found.append(f"{host}: {row['remark']}")
        found += [f"{host}: {text}" for text in row["storage_problems"]]
    current = {row["release"]["current"] for row in rows if row["reachable"]}
    if len(current) > 1:
        found.append("the nodes have different releases: run `ppdeploy apply`")
    return list(dict.fromkeys(found))
