#!/usr/bin/python
"""A node's part of a gang: how it is, the operator's word for its agent, and waiting until the word has come true."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_gang
short_description: Look at a node's agent and rank, leave the operator's word, wait for the gang
description:
  - C(look) returns what the node's agent knows, and what systemd and the kernel say of agent and rank. It changes
    nothing.
  - C(order) leaves the operator's word in the agent's local file, unless the gang is in that state already. On a worker
    a start or restart is only left where a stop was.
  - C(wait) waits until the gang serves, or until no rank is left on this node. It changes nothing, and it never fails;
    it tells what it saw.
options:
  action:
    description: What to do.
    type: str
    choices: [look, order, wait]
    default: look
  pipeline:
    description: Name of the pipeline.
    type: str
    required: true
  word:
    description: The operator's word. Needed by C(order).
    type: str
    choices: [start, stop, restart]
  release:
    description:
      - Digest of the release that is to run. Empty for the one that C(current) leads to.
      - With C(wait) a gang that serves another one is not what is waited for; empty for whichever serves.
    type: str
    default: ""
  forget:
    description: Removed nodes that the head shall wait for no more; only read on the head.
    type: list
    elements: str
    default: []
  force:
    description: Leave the word in any case, as an apply that switched the release does.
    type: bool
    default: false
  until:
    description: What C(wait) waits for.
    type: str
    choices: [serving, stopped]
  serial:
    description: Serial of the word that must have been read; an earlier state does not count.
    type: int
    default: 0
  seconds:
    description: How long C(wait) waits, in seconds.
    type: int
    default: 180
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Look at the gang
  ppdeploy_gang:
    pipeline: qwen
  register: found

- name: Leave a stop for the agent
  ppdeploy_gang:
    action: order
    pipeline: qwen
    word: stop
"""

RETURN = r"""
node:
  description: What was seen of the node, see C(ppdeploy/gang.py).
  returned: with action C(look)
  type: dict
serial:
  description: Serial of the agent's last word.
  returned: with action C(order)
  type: int
reached:
  description: Whether what was waited for came true.
  returned: with action C(wait)
  type: bool
reason:
  description: Why not, or what is to be said although it did.
  returned: with action C(wait)
  type: str
"""

import contextlib
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

AGENT = "/opt/ppdeploy/agent/agent.pyz"
CONFIG = "/etc/ppdeploy/agent.json"
COMMAND = "/var/lib/ppdeploy/agent/command.json"
AGENT_UNIT = "ppdeploy-agent.service"
ROOT = "/opt/ppdeploy"
CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")

#: Seconds in which the agent answers, if it does: it reads what it tells from memory.
ANSWER_LIMIT = 5.0
MOST_BYTES = 8 << 20
#: Seconds after which an agent that does not answer ends a wait: one that was restarted is back by then.
SILENCE_THAT_ENDS_THE_WAIT = 30.0
#: Seconds in the phase `waiting` after which a start says what is missing: agents look every two seconds.
WAITING_THAT_ENDS_THE_WAIT = 30.0
#: The same while the gang stops, when another node is not heard.
STOPPED_HERE = 15.0
#: A gang that fails again and again will not serve by waiting longer.
FAILURES_THAT_END_THE_WAIT = 3
#: What a waiting gang says while nothing is missing that a person could bring.
PASSING = (
    "is being checked",
    "has not read the ask yet",
    "the next start is in",
    "is being stored",
    "first generation",
)
LEADING = ("stopping", "starting", "probing", "serving", "draining")
LAUNCHED = ("starting", "probing", "serving")
PLACE = re.compile(r"^# Node rank (\d+) of (\d+) \((\w+)\) of pipeline [^:]+: (.*)\.$", re.MULTILINE)


class NotHereError(Exception):
    """The node has no agent that could be asked or told anything."""


# ---- the agent ---------------------------------------------------------------------------------------------


def configuration(path: str = CONFIG) -> dict[str, Any]:
    """Return the agent's configuration; NotHereError says why there is none."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        raise NotHereError("no agent is installed") from None
    except (OSError, ValueError) as error:
        raise NotHereError(f"{path} cannot be read: {error}") from None


def agent_url(config: dict[str, Any]) -> str:
    """Return the agent's address on loopback."""
    ports = [port for address, port in config.get("listen", []) if str(address).startswith("127.")]
    return f"http://127.0.0.1:{int(ports[0]) if ports else 29500}"


def ask_agent(url: str) -> dict[str, Any]:
    """Return what the agent knows; NotHereError says in words why it does not answer."""
    # A proxy set for the node must not swallow a request to loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/v1/status", timeout=ANSWER_LIMIT) as answer:
            found = json.loads(answer.read(MOST_BYTES))
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NotHereError(f"its agent does not answer: {reason}") from None
    if not isinstance(found, dict):
        raise NotHereError("its agent answers nonsense")
    return found


def trimmed(status: dict[str, Any]) -> dict[str, Any]:
    """Return the agent's status without what only agents need of each other."""
    peers = {}
    for name, peer in (status.get("peers") or {}).items():
        answer = peer.get("answer") or {}
        rank = answer.get("rank") or {}
        peers[name] = {**peer, "answer": None, "rank": rank.get("state"), "phase": answer.get("phase")}
    own = dict(status.get("own") or {})
    ask = own.pop("ask", None) or {}
    own.pop("known", None)
    members = [member.get("name") for member in ask.get("members") or []]
    return {**status, "peers": peers, "own": own, "members": members}


# ---- the node itself ---------------------------------------------------------------------------------------


def unit_state(unit: str) -> dict[str, str]:
    """Return what systemd shows of a unit; empty where there is no systemd."""
    names = "LoadState,ActiveState,SubState,MainPID,ControlGroup,MemoryCurrent,ActiveEnterTimestampMonotonic"
    try:
        done = subprocess.run(
            ["systemctl", "show", unit, "--property", names],
            capture_output=True, text=True, check=False, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


def processes(group: str, roots: tuple[str, ...] = CGROUPS) -> list[int]:
    """Return the processes in a unit's control group and those below it."""
    found: set[int] = set()
    for root in roots:
        for folder, _, names in os.walk(root + group) if group else ():
            if "cgroup.procs" in names:
                try:
                    found.update(int(word) for word in Path(folder, "cgroup.procs").read_text().split())
                except OSError:
                    continue  # the group has just ended
        if found:
            break
    return sorted(found)


def resident_bytes(pids: list[int]) -> int:
    """Return the resident memory of processes in bytes; what they share counts once for each."""
    pages = 0
    for pid in pids:
        # One that has just ended has none.
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def gpu_bytes(pids: list[int]) -> int | None:
    """Return the GPU memory of processes in bytes, None where no NVIDIA driver could tell."""
    if not pids or not Path("/proc/driver/nvidia").exists():
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.split(",") for line in done.stdout.splitlines()]
    own = [row[1].strip() for row in rows if len(row) == 2 and row[0].strip().isdigit() and int(row[0]) in set(pids)]
    # A GPU of several tenants hides the numbers.
    return sum(int(word) for word in own) << 20 if own and all(word.isdigit() for word in own) else None


def number(text: str | None) -> int | None:
    """Return systemd's number; None for `[not set]` and for its largest one, which means the same."""
    return int(text) if text and text.isdigit() and int(text) < 2**63 else None


def link_name(path: str) -> str:
    """Return the last part of what a link leads to, empty when there is none."""
    try:
        return Path(path).readlink().name
    except OSError:
        return ""


def place(pipeline: str, release: str) -> dict[str, Any]:
    """Return which rank and stages a release gives to this node, as its drop-in says in its second line."""
    try:
        text = Path(f"{ROOT}/{pipeline}/releases/{release}/rank.conf").read_text(encoding="utf-8")
    except OSError:
        return {}
    found = PLACE.search(text)
    return {"rank": int(found[1]), "nodes": int(found[2]), "role": found[3], "stages": found[4]} if found else {}


def release_nodes(pipeline: str, release: str) -> list[dict[str, Any]]:
    """Return the nodes that a release names, the head first; none when it cannot be read."""
    try:
        listed = json.loads(Path(f"{ROOT}/{pipeline}/releases/{release}/release.json").read_text(encoding="utf-8"))
        return sorted(listed["nodes"], key=lambda node: int(node["rank"]))
    except (OSError, ValueError, KeyError, TypeError):
        return []


def look(params: dict[str, Any]) -> dict[str, Any]:
    """Return how the node is."""
    pipeline = params["pipeline"]
    rank_unit = unit_state(f"ppdeploy-rank@{pipeline}.service")
    agent_unit = unit_state(AGENT_UNIT)
    pids = processes(rank_unit.get("ControlGroup", ""))
    status: dict[str, Any] | None = None
    config: dict[str, Any] = {}
    problem = ""
    try:
        config = configuration()
        if config.get("pipeline") != pipeline:
            raise NotHereError(f"its agent is of pipeline {config.get('pipeline')}")
        status = trimmed(ask_agent(agent_url(config)))
    except NotHereError as error:
        problem = str(error)
    current = link_name(f"{ROOT}/{pipeline}/current")
    running = ((status or {}).get("own") or {}).get("rank", {}).get("release") or ""
    return {
        "time": time.time(),
        "name": config.get("node") or "",
        "agent": {
            "installed": Path(AGENT).exists(),
            "active": agent_unit.get("ActiveState", ""),
            "sub": agent_unit.get("SubState", ""),
            "problem": problem,
            "status": status,
        },
        "rank": {
            **place(pipeline, running or current),
            "installed": rank_unit.get("LoadState") == "loaded",
            "active": rank_unit.get("ActiveState", ""),
            "sub": rank_unit.get("SubState", ""),
            "pid": number(rank_unit.get("MainPID")) or None,
            "processes": len(pids),
            "resident_bytes": resident_bytes(pids) if pids else None,
            "cgroup_bytes": number(rank_unit.get("MemoryCurrent")) if pids else None,
            "gpu_bytes": gpu_bytes(pids),
        },
        "current": current or None,
        "previous": link_name(f"{ROOT}/{pipeline}/previous") or None,
        "release_nodes": [node.get("host") for node in release_nodes(pipeline, current)],
    }


# ---- the operator's word -----------------------------------------------------------------------------------


def last_word(path: str = COMMAND) -> dict[str, Any]:
    """Return the word that was left last; a node begins with a start of serial 0."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    return found if isinstance(found, dict) and "verb" in found else {"verb": "start", "serial": 0}


def is_needed(word: str, release: str, last: dict[str, Any], status: dict[str, Any] | None, *, leads: bool) -> bool:
    """Say whether the word changes anything. `status` is what the agent knows, None when it does not answer.

    A worker only has to be told of a stop, and of its end: all else is the head's to decide.
    """
    held = bool(last["verb"] == "stop")
    if not leads:
        return held != (word == "stop")
    if word == "restart" or status is None:
        return not (word == "stop" and held)
    if word == "stop":
        return not (held and status.get("wanted") == "stop")
    if held or status.get("wanted") == "stop" or status.get("failed"):
        return True
    phase = status.get("phase")
    if phase in LAUNCHED:
        return bool(release) and status.get("release") != release
    if phase == "draining":
        return False
    # Down and wanted: a start only helps where it ends the pause after failures.
    return bool(status.get("failures")) or "the next start is in" in str(status.get("remark"))


def refusal_to_forget(names: list[str], look: dict[str, Any]) -> str:
    """Return why nodes cannot be forgotten, empty when they can."""
    status = look["agent"]["status"]
    for name in names:
        if name in look["release_nodes"] and (status is None or not _replaced(name, status)):
            return (
                f"{name} is a node of the release that is to run, which cannot serve without it: take it out of the "
                f"inventory and run `ppdeploy apply --forget {name}`"
            )
        if status is not None and name not in status["members"]:
            known = ", ".join(status["members"]) or "nobody"
            return f"the gang waits for no node called {name}, it knows {known}"
    return ""


def _replaced(name: str, status: dict[str, Any]) -> bool:
    """Say whether a node's name stands for two machines: that of the release, and an older one that is waited for."""
    return status["members"].count(name) > 1 or f"{name} answers as another machine" in str(status.get("remark"))


def order(params: dict[str, Any], *, check_mode: bool) -> dict[str, Any]:
    """Leave the word if it changes anything; OSError and CalledProcessError when it cannot be left."""
    seen = look(params)
    status = seen["agent"]["status"]
    leads = not seen["release_nodes"] or seen["release_nodes"][0] == seen["name"]
    last = last_word()
    forget = params["forget"] if leads else []
    # An apply checks its own words before it changes anything: here it would be too late to refuse.
    refused = "" if params["force"] else refusal_to_forget(forget, seen)
    if refused:
        return {"changed": False, "refused": refused, "serial": last["serial"], "leads": leads}
    release = params["release"] or (seen["current"] or "" if params["word"] == "start" else "")
    needed = params["force"] or bool(forget) or is_needed(params["word"], release, last, status, leads=leads)
    serial = last["serial"]
    if needed and not check_mode:
        command = ["/usr/bin/python3", "-I", AGENT, "order", params["word"], "--release", release]
        for name in forget:
            command += ["--forget", name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        serial = json.loads(done.stdout)["serial"]
    return {"changed": needed, "refused": "", "serial": serial, "leads": leads, "agent": seen["agent"]["problem"]}


# ---- waiting -----------------------------------------------------------------------------------------------


class Wait:
    """One wait: takes a look at a time, and says when it is over."""

    def __init__(self, until: str, serial: int, seconds: float, release: str = "") -> None:
        self._until = until
        self._release = release
        self._serial = serial
        self._seconds = seconds
        self._silent_since: float | None = None
        self._waiting_since: float | None = None
        self._failures: set[int] = set()
        # Before a word nothing is forgiven: what failed before the first look is not this wait's.
        self._earlier: set[int] | None = set() if serial else None
        self._phase = ""

    def take(self, seen: dict[str, Any], passed: float) -> dict[str, Any] | None:
        """Return the outcome, None to look again. `passed` is in seconds since the wait began."""
        status = seen["agent"]["status"]
        if status is None:
            ended = self._unheard(seen, passed)
        else:
            self._silent_since = None
            ended = self._stopped(status, passed) if self._until == "stopped" else self._serving(status, passed)
        if ended is None and passed > self._seconds:
            ended = self._not(f"not {self._until} after {passed:.0f} s: {_words(status, seen)}")
        return None if ended is None else {**ended, "seconds": round(passed, 1), "phase": self._phase}

    def _unheard(self, seen: dict[str, Any], passed: float) -> dict[str, Any] | None:
        if self._silent_since is None:
            self._silent_since = passed
        if passed - self._silent_since < SILENCE_THAT_ENDS_THE_WAIT:
            return None
        reason = f"{seen['agent']['problem']} (ppdeploy-agent.service is {seen['agent']['active'] or 'unknown'})"
        if self._until == "stopped" and not seen["rank"]["processes"]:
            return {"reached": True, "reason": f"no rank is left, but {reason}"}
        return self._not(f"{reason}: the word is left, and read once it is back; see `ppdeploy logs --agent`")

    def _stopped(self, status: dict[str, Any], passed: float) -> dict[str, Any] | None:
        phase = self._phase = str(status.get("phase"))
        present = status["own"]["rank"]["state"] != "absent"
        leads = phase != "worker"
        if present or (leads and status.get("serial", self._serial) < self._serial) or phase in LEADING[1:]:
            self._waiting_since = None
            return None
        if phase not in ("waiting", "stopping"):
            return {"reached": True, "reason": ""}
        # The head's own rank is gone; another node has not said so of its own, and may never do.
        if self._waiting_since is None:
            self._waiting_since = passed
        if passed - self._waiting_since < STOPPED_HERE:
            return None
        return {"reached": phase == "waiting", "reason": str(status.get("remark"))}

    def _serving(self, status: dict[str, Any], passed: float) -> dict[str, Any] | None:
        phase = self._phase = str(status.get("phase"))
        if status.get("serial", self._serial) < self._serial:
            return None
        if status.get("healthy"):
            # The last release may still serve while the next one is read.
            served = self._release in ("", status.get("release"))
            return {"reached": True, "reason": ""} if served else None
        if phase == "failed":
            return self._not(f"failed: {status.get('failed')}")
        if phase in ("stopped", "retired", "worker") and passed > WAITING_THAT_ENDS_THE_WAIT:
            return self._not(f"{phase}: {status.get('remark') or status['own'].get('remark')}")
        failures = {failure.get("generation", 0) for failure in status.get("failures") or []}
        if self._earlier is None:
            self._earlier = failures
        self._failures |= failures - self._earlier
        if len(self._failures) >= FAILURES_THAT_END_THE_WAIT:
            last = status["failures"][-1]["reason"] if failures else status.get("last_reason")
            return self._not(f"it failed {len(self._failures)} times while starting, the last time: {last}")
        remark = str(status.get("remark"))
        if phase != "waiting" or any(text in remark for text in PASSING):
            self._waiting_since = None
            return None
        if self._waiting_since is None:
            self._waiting_since = passed
        return self._not(f"waiting: {remark}") if passed - self._waiting_since >= WAITING_THAT_ENDS_THE_WAIT else None

    @staticmethod
    def _not(reason: str) -> dict[str, Any]:
        return {"reached": False, "reason": reason}


def _words(status: dict[str, Any] | None, seen: dict[str, Any]) -> str:
    if status is None:
        return str(seen["agent"]["problem"])
    return f"{status.get('phase')}: {status.get('remark') or status['own'].get('remark') or ''}"


def wait(params: dict[str, Any]) -> dict[str, Any]:
    """Wait, and return how it ended."""
    waiting = Wait(params["until"], params["serial"], params["seconds"], params["release"])
    began = time.monotonic()
    while True:
        ended = waiting.take(look(params), time.monotonic() - began)
        if ended is not None:
            return ended
        time.sleep(1.0)


def main() -> None:
    """Run one action."""
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["look", "order", "wait"], "default": "look"},
            "pipeline": {"type": "str", "required": True},
            "word": {"type": "str", "choices": ["start", "stop", "restart"]},
            "release": {"type": "str", "default": ""},
            "forget": {"type": "list", "elements": "str", "default": []},
            "force": {"type": "bool", "default": False},
            "until": {"type": "str", "choices": ["serving", "stopped"]},
            "serial": {"type": "int", "default": 0},
            "seconds": {"type": "int", "default": 180},
        },
        required_if=[("action", "order", ["word"]), ("action", "wait", ["until"])],
        supports_check_mode=True,
    )
    params = module.params
    if params["action"] == "look":
        module.exit_json(changed=False, node=look(params))
    if params["action"] == "wait":
        module.exit_json(changed=False, **wait(params))
    try:
        module.exit_json(**order(params, check_mode=module.check_mode))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or "").strip()
        module.fail_json(msg=f"the word `{params['word']}` cannot be left for the agent: {said or error}: run apply")


if __name__ == "__main__":
    main()
