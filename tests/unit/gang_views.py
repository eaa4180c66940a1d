"""What the module `ppdeploy_gang` returns of nodes, for tests of reports: two that serve, and changes to them."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

MOMENT = datetime(2026, 11, 30, 1, 2, 3, tzinfo=UTC)
PIPELINES = {"tiny": ["node1", "node2"]}
RELEASE = "2e4fa8d31c09" + "0" * 52
OLD_RELEASE = "91c0ffee1234" + "0" * 52


def node(host: str, **changes: Any) -> dict[str, Any]:
    """Return a node of a gang that serves; `changes` replace parts, such as `agent__status__phase="waiting"`."""
    leads = host == "node1"
    rank = {
        "state": "running",
        "generation": [7, 12345],
        "release": RELEASE,
        "detail": "",
        "memory_bytes": 2 << 30,
    }
    status: dict[str, Any] = {
        "version": "1",
        "now": 10_000.0,
        "own": {"rank": rank, "ready": True, "remark": "", "prepared": RELEASE, "held": False},
        "healthy": leads,
        "why_unhealthy": "" if leads else "worker: the API is on the head",
        "phase": "serving" if leads else "worker",
        "phase_age": 7500.0,
        "remark": "tokens proven; a canary may take 15 s" if leads else "",
        "generation": [7, 12345] if leads else [0, 0],
        "release": RELEASE if leads else "",
        "serving_seconds": 7500.0 if leads else None,
        "wanted": "run",
        "serial": 1,
        "failed": "",
        "last_reason": "",
        "restarts": {"exit": 1, "unheard": 2} if leads else {},
        "failures": [],
        "budget": {"limit": 6, "window": 1800.0, "left": 6},
        "history": [],
        "recovered_seconds": 84.0 if leads else 0.0,
        "proof_age": 1.5 if leads else None,
        "stall_limit": 15.0,
        "storage_problem": "",
        "keeper_problem": "",
        "peers": {"node2": {"heard": True, "age": 0.4, "error": "", "answer": None, "rank": "running"}}
        if leads
        else {},
        "members": ["node1", "node2"] if leads else [],
    }
    found: dict[str, Any] = {
        "time": MOMENT.timestamp(),
        "name": host,
        "agent": {"installed": True, "active": "active", "sub": "running", "problem": "", "status": status},
        "rank": {
            "rank": 0 if leads else 1,
            "nodes": 2,
            "role": "head" if leads else "worker",
            "stages": "stage 0 with layers 0-31" if leads else "stage 1 with layers 32-63",
            "installed": True,
            "active": "active",
            "sub": "running",
            "pid": 4711,
            "processes": 3,
            "resident_bytes": 3 << 30,
            "cgroup_bytes": 5 << 30,
            "gpu_bytes": 60 << 30,
        },
        "current": RELEASE,
        "previous": None,
        "release_nodes": ["node1", "node2"],
    }
    return changed(found, **changes)


def changed(found: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a copy with other parts; `__` in a name goes one level down."""
    found = copy.deepcopy(found)
    for path, value in changes.items():
        *folders, last = path.split("__")
        place = found
        for name in folders:
            place = place[name]
        place[last] = value
    return found


def seen(**nodes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the gang as a look found it: both nodes serving, unless another view of one is given."""
    views = {"node1": node("node1"), "node2": node("node2"), **nodes}
    return {host: {"node": view} if "agent" in view else view for host, view in views.items()}


def without_rank(host: str, **changes: Any) -> dict[str, Any]:
    """Return a node whose rank is gone."""
    found = node(host)
    found["agent"]["status"]["own"]["rank"] = {
        "state": "absent", "generation": [0, 0], "release": "", "detail": "", "memory_bytes": 0,
    }  # fmt: skip
    found["rank"] |= {
        "active": "inactive", "sub": "dead", "pid": None, "processes": 0,
        "resident_bytes": None, "cgroup_bytes": None, "gpu_bytes": None,
    }  # fmt: skip
    return changed(found, **changes)
