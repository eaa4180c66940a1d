"""`ppdeploy status` as text, for each state that a gang can be in: the page is compared as a whole."""
# ruff: noqa: E501  (pages as they are printed)

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.gang import answers, gang_status
from ppdeploy.gang_report import duration, status_lines
from tests.unit.gang_views import MOMENT, OLD_RELEASE, PIPELINES, node, seen, without_rank

_S = "agent__status__"
HELD = "stopped by the operator on this node"

SERVING = seen(
    node1=node(
        "node1",
        agent__status__history=[
            {"at": 2400.0, "phase": "stopping", "generation": 7, "remark": "node2 is not heard (no route to host)"},
            {"at": 2484.0, "phase": "serving", "generation": 7, "remark": "tokens proven"},
        ],
    )
)
WAITING = seen(
    node1=without_rank(
        "node1",
        **{
            _S + "phase": "waiting", _S + "phase_age": 130.0, _S + "healthy": False, _S + "serving_seconds": None,
            _S + "why_unhealthy": "waiting: x", _S + "generation": [8, 1], _S + "proof_age": 141.0,
            _S + "remark": "node2 is not heard (no answer within a second)",
            _S + "peers": {"node2": {"heard": False, "age": 141.2, "error": "no answer within a second"}},
        },
    ),
    node2={"unreachable": "it does not answer: see that it runs and is on the network"},
)  # fmt: skip
FAILED = seen(
    node1=without_rank(
        "node1",
        **{
            _S + "phase": "failed", _S + "phase_age": 61.0, _S + "healthy": False, _S + "serving_seconds": None,
            _S + "why_unhealthy": "failed: x", _S + "generation": [12, 1], _S + "proof_age": 700.0,
            _S + "remark": "6 failures in 30 minutes, the last: the rank of node2 ended (code 1): killed by the kernel; "
            "the first generation's journals are kept; `ppdeploy start` tries again",
            _S + "restarts": {"exit": 6}, _S + "budget": {"limit": 6, "window": 1800.0, "left": 0},
            _S + "failures": [
                {"age": 600.0, "reason": "the rank of node2 ended (code 1): killed", "generation": 6},
                {"age": 61.5, "reason": "the rank of node2 ended (code 1): killed by the kernel", "generation": 11},
            ],
            _S + "history": [
                {"at": 9938.5, "phase": "stopping", "generation": 12, "remark": "the rank of node2 ended (code 1): it"},
                {"at": 9939.0, "phase": "failed", "generation": 12, "remark": "6 failures"},
            ],
        },
    ),
    node2=without_rank("node2"),
)  # fmt: skip
STARTING = seen(
    node1=without_rank(
        "node1",
        **{
            _S + "phase": "starting", _S + "phase_age": 4.0, _S + "healthy": False, _S + "serving_seconds": None,
            _S + "remark": "every rank is gone and every node is ready", _S + "proof_age": None, _S + "restarts": {},
            _S + "recovered_seconds": 0.0,
        },
    ),
    node2=node("node2", **{_S + "own__rank__state": "starting"}),
)  # fmt: skip
STOPPED = seen(
    node1=without_rank(
        "node1",
        **{
            _S + "phase": "stopped", _S + "phase_age": 45.0, _S + "healthy": False, _S + "wanted": "stop",
            _S + "remark": "stopped by the operator", _S + "restarts": {}, _S + "recovered_seconds": 0.0,
            _S + "serving_seconds": None, _S + "own__held": True, _S + "own__ready": False, _S + "own__remark": HELD,
            _S + "history": [{"at": 9955.0, "phase": "stopping", "generation": 8, "remark": "stopped by the operator"}],
        },
    ),
    node2=without_rank("node2", **{_S + "own__held": True, _S + "own__ready": False, _S + "own__remark": HELD}),
)  # fmt: skip
STOPPED_THERE = seen(
    node1=without_rank(
        "node1",
        **{
            _S + "phase": "waiting", _S + "phase_age": 9.0, _S + "healthy": False, _S + "serving_seconds": None,
            _S + "remark": f"node2: {HELD}", _S + "restarts": {}, _S + "recovered_seconds": 0.0,
        },
    ),
    node2=without_rank("node2", **{_S + "own__held": True, _S + "own__ready": False, _S + "own__remark": HELD}),
)  # fmt: skip
HEAD_SILENT = seen(
    node1=node(
        "node1", agent__status=None, agent__problem="its agent does not answer: Connection refused",
        agent__active="activating", agent__sub="auto-restart",
    )
)  # fmt: skip
NOT_INSTALLED: dict[str, dict[str, Any]] = {
    host: {
        "node": {
            "time": 0.0, "name": "", "current": None, "previous": None, "release_nodes": [],
            "agent": {"installed": False, "active": "inactive", "sub": "dead", "problem": "no agent is installed",
                      "status": None},
            "rank": {"installed": False, "active": "inactive", "sub": "dead", "pid": None, "processes": 0,
                     "resident_bytes": None, "cgroup_bytes": None, "gpu_bytes": None},
        }
    }
    for host in PIPELINES["tiny"]
}  # fmt: skip
HEAD_UNREACHABLE = seen(node1={"unreachable": "no ssh server answers there"})
MIXED = seen(
    node1=without_rank(
        "node1",
        **{
            _S + "phase": "waiting", _S + "phase_age": 12.0, _S + "healthy": False, _S + "serving_seconds": None,
            _S + "remark": "node2: rank.env differs from release 2e4fa8d31c09", _S + "restarts": {},
            _S + "recovered_seconds": 0.0, _S + "proof_age": None,
            _S + "storage_problem": "the record cannot be stored: No space left on device",
        },
    ),
    node2=without_rank(
        "node2", current=OLD_RELEASE,
        **{_S + "own__ready": False, _S + "own__remark": "rank.env differs from release 2e4fa8d31c09; run apply",
           _S + "own__prepared": ""},
    ),
)  # fmt: skip

#: The page of each state, at the width of a wide terminal.
PAGES: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "serving": (
        SERVING,
        """
pipeline tiny: serving for 2 h 5 min
  generation 7, release 2e4fa8d31c09, head node1, tokens proven 1.5 s ago
  restarts since the head's agent began: 3 (exit 1, unheard 2); the last one took 1 min 24 s
  last failure 2 h 6 min ago: node2 is not heard (no route to host)
  budget: 6 of 6 failures left in 30 min
rank  host   role    stages                     rank is                release       prepared      memory                                     agent
0     node1  head    stage 0 with layers 0-31   running, generation 7  2e4fa8d31c09  2e4fa8d31c09  GPU 60.0 GiB, RSS 3.0 GiB, cgroup 5.0 GiB  version 1
1     node2  worker  stage 1 with layers 32-63  running, generation 7  2e4fa8d31c09  2e4fa8d31c09  GPU 60.0 GiB, RSS 3.0 GiB, cgroup 5.0 GiB  version 1, heard 0.4 s ago
""",
    ),
    "waiting": (
        WAITING,
        """
pipeline tiny: waiting for 2 min 10 s: node2 is not heard (no answer within a second)
  generation 8, release 2e4fa8d31c09, head node1, tokens proven 2 min 21 s ago
  restarts since the head's agent began: 3 (exit 1, unheard 2); the last one took 1 min 24 s
  budget: 6 of 6 failures left in 30 min
rank  host   role  stages                    rank is      release  prepared      memory  agent
0     node1  head  stage 0 with layers 0-31  absent       none     2e4fa8d31c09          version 1
1     node2                                  unreachable                                 not heard by the head (no answer within a second), last 2 min 21 s ago
  ! node2 is unreachable: it does not answer: see that it runs and is on the network
""",
    ),
    "failed": (
        FAILED,
        """
pipeline tiny: failed for 1 min 1 s: 6 failures in 30 minutes, the last: the rank of node2 ended (code 1): killed by the kernel; the first generation's journals are kept; `ppdeploy start` tries again
  generation 12, release 2e4fa8d31c09, head node1, tokens proven 11 min 40 s ago
  restarts since the head's agent began: 6 (exit 6); the last one took 1 min 24 s
  last failure 1 min 1 s ago: the rank of node2 ended (code 1): killed by the kernel
  budget: 0 of 6 failures left in 30 min
rank  host   role    stages                     rank is  release  prepared      memory  agent
0     node1  head    stage 0 with layers 0-31   absent   none     2e4fa8d31c09          version 1
1     node2  worker  stage 1 with layers 32-63  absent   none     2e4fa8d31c09          version 1, heard 0.4 s ago
""",
    ),
    "starting": (
        STARTING,
        """
pipeline tiny: starting for 4 s: every rank is gone and every node is ready
  generation 7, release 2e4fa8d31c09, head node1
  restarts since the head's agent began: 0
  budget: 6 of 6 failures left in 30 min
rank  host   role    stages                     rank is                 release       prepared      memory                                     agent
0     node1  head    stage 0 with layers 0-31   absent                  none          2e4fa8d31c09                                             version 1
1     node2  worker  stage 1 with layers 32-63  starting, generation 7  2e4fa8d31c09  2e4fa8d31c09  GPU 60.0 GiB, RSS 3.0 GiB, cgroup 5.0 GiB  version 1, heard 0.4 s ago
""",
    ),
    "stopped": (
        STOPPED,
        """
pipeline tiny: stopped for 45 s: stopped by the operator
  generation 7, release 2e4fa8d31c09, head node1, tokens proven 1.5 s ago
  restarts since the head's agent began: 0
  budget: 6 of 6 failures left in 30 min
rank  host   role    stages                     rank is  release  prepared      memory  agent
0     node1  head    stage 0 with layers 0-31   absent   none     2e4fa8d31c09          version 1
1     node2  worker  stage 1 with layers 32-63  absent   none     2e4fa8d31c09          version 1, heard 0.4 s ago
""",
    ),
    "stopped_there": (
        STOPPED_THERE,
        """
pipeline tiny: waiting for 9 s: node2: stopped by the operator on this node
  generation 7, release 2e4fa8d31c09, head node1, tokens proven 1.5 s ago
  restarts since the head's agent began: 0
  budget: 6 of 6 failures left in 30 min
rank  host   role    stages                     rank is  release  prepared      memory  agent
0     node1  head    stage 0 with layers 0-31   absent   none     2e4fa8d31c09          version 1
1     node2  worker  stage 1 with layers 32-63  absent   none     2e4fa8d31c09          version 1, heard 0.4 s ago
  ! node2 was stopped by an operator there: `ppdeploy start` takes it back
""",
    ),
    "head_silent": (
        HEAD_SILENT,
        """
pipeline tiny: unknown: node1: its agent does not answer: Connection refused
rank  host   role    stages                     rank is                release       prepared      memory                                     agent
0     node1  head    stage 0 with layers 0-31   running                none          none          GPU 60.0 GiB, RSS 3.0 GiB, cgroup 5.0 GiB  silent
1     node2  worker  stage 1 with layers 32-63  running, generation 7  2e4fa8d31c09  2e4fa8d31c09  GPU 60.0 GiB, RSS 3.0 GiB, cgroup 5.0 GiB  version 1
  ! node1: its agent does not answer: Connection refused; its service is activating (auto-restart)
""",
    ),
    "head_unreachable": (
        HEAD_UNREACHABLE,
        """
pipeline tiny: unknown: the head node1 is unreachable: no ssh server answers there
rank  host   role    stages                     rank is                release       prepared      memory                                     agent
0     node1                                     unreachable
1     node2  worker  stage 1 with layers 32-63  running, generation 7  2e4fa8d31c09  2e4fa8d31c09  GPU 60.0 GiB, RSS 3.0 GiB, cgroup 5.0 GiB  version 1
  ! node1 is unreachable: no ssh server answers there
""",
    ),
    "not_installed": (
        NOT_INSTALLED,
        """
pipeline tiny: not installed: run `ppdeploy apply`
rank  host   role  stages  rank is        release  prepared  memory  agent
0     node1                not installed  none     none
1     node2                not installed  none     none
""",
    ),
    "mixed": (
        MIXED,
        """
pipeline tiny: waiting for 12 s: node2: rank.env differs from release 2e4fa8d31c09
  generation 7, release 2e4fa8d31c09, head node1
  restarts since the head's agent began: 0
  budget: 6 of 6 failures left in 30 min
rank  host   role    stages                     rank is  release  prepared      memory  agent
0     node1  head    stage 0 with layers 0-31   absent   none     2e4fa8d31c09          version 1
1     node2  worker  stage 1 with layers 32-63  absent   none     none                  version 1, heard 0.4 s ago
  ! node1: the record cannot be stored: No space left on device
  ! node2: rank.env differs from release 2e4fa8d31c09; run apply
  ! the nodes have different releases: run `ppdeploy apply`
""",
    ),
}


def page(views: dict[str, dict[str, Any]]) -> str:
    return "\n".join(status_lines(gang_status(PIPELINES, views, moment=MOMENT))) + "\n"


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_state_reads_like_this(name: str) -> None:
    views, text = PAGES[name]
    assert page(views) == text.lstrip("\n")


def test_the_document_is_for_programs_and_counts_who_answered() -> None:
    document = gang_status(PIPELINES, WAITING, moment=MOMENT)
    assert (document["schema"], document["time"]) == (2, "2026-11-30T01:02:03+00:00")
    (pipeline,) = document["pipelines"]
    assert (pipeline["phase"], pipeline["healthy"], pipeline["generation"]) == ("waiting", False, 8)
    assert [row["reachable"] for row in pipeline["nodes"]] == [True, False]
    assert answers(document) == 1
    assert answers(gang_status(PIPELINES, {host: {"unreachable": "x"} for host in PIPELINES["tiny"]})) == 0


def test_a_pipeline_that_was_not_asked_is_left_out() -> None:
    pipelines = {**PIPELINES, "other": ["node3"]}
    assert [one["pipeline"] for one in gang_status(pipelines, SERVING)["pipelines"]] == ["tiny"]


def test_the_head_is_the_node_that_leads_and_not_the_first_of_the_inventory() -> None:
    turned = {"tiny": ["node2", "node1"]}
    assert gang_status(turned, SERVING)["pipelines"][0]["head"] == "node1"
    # When no agent tells, the release does.
    silent = {"node": node("node1", agent__status=None, agent__problem="silent")}
    assert gang_status(turned, {"node1": silent, "node2": {"unreachable": "x"}})["pipelines"][0]["head"] == "node1"


@pytest.mark.parametrize(
    "remark", ["first generation", "stopped by the operator on node2", "restarted by the operator"]
)
def test_what_an_operator_wanted_is_no_failure(remark: str) -> None:
    history = [{"at": 9000.0, "phase": "stopping", "generation": 7, "remark": remark}]
    views = seen(node1=node("node1", agent__status__history=history))
    assert gang_status(PIPELINES, views)["pipelines"][0]["last_failure"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4, "0.4 s"),
        (42, "42 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (7500, "2 h 5 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_a_time_span_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text
