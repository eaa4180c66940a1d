#!/usr/bin/python
"""A node's part in measuring the network of its pipeline: listeners for a while, clients, and nothing left behind."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_net
short_description: Measure the fabric between the nodes of a pipeline
description:
  - C(look) says whether iperf3 is there.
  - C(open) writes what the test needs into C(/run/ppdeploy-net) and starts an iperf3 server on the fabric address, as a
    transient unit that only the peers may reach. A timer ends and removes all of it should nobody else do so.
  - C(measure) asks a peer for latency by ping, and for throughput by its iperf3 server, both ways.
  - C(probe) starts the handoff probe as a transient unit, and C(collect) waits for its end and returns what it printed.
  - C(close) ends and removes all that C(open) and C(probe) made, and returns the packages that came for the test.
  - What goes wrong between two nodes is a result and no failure.
options:
  action:
    description: What to do.
    type: str
    choices: [look, open, measure, probe, collect, close]
    required: true
  address:
    description: The node's own fabric address.
    type: str
  peers:
    description: Fabric addresses of the other nodes; only they may reach the listeners.
    type: list
    elements: str
    default: []
  wire:
    description: The node's own address below a tunnel, where O(address) is in one; empty where there is none.
    type: str
    default: ""
  wire_peers:
    description: The other nodes' addresses there (C(open)).
    type: list
    elements: str
    default: []
  wire_peer:
    description: The address there of the host to measure, for two runs beside the tunnel (C(measure)).
    type: str
    default: ""
  files:
    description: Content by name of the files to write for the test (C(open)).
    type: dict
    default: {}
  brought:
    description: Packages that came for the test, for whoever ends it (C(open)).
    type: list
    elements: str
    default: []
  limit:
    description: Seconds after which all that was started ends by itself.
    type: int
    default: 600
  peer:
    description: Name of the host to measure (C(measure)).
    type: str
  peer_address:
    description: Its fabric address.
    type: str
  port:
    description: Port of its iperf3 server; 0 when it has none.
    type: int
    default: 0
  seconds:
    description: Seconds of each throughput run.
    type: int
    default: 3
  flows:
    description: Connections at once of the run with several.
    type: int
    default: 4
  python:
    description: Interpreter of the pipeline's environment (C(probe)).
    type: str
  config:
    description: What the handoff probe is told (C(probe)).
    type: dict
    default: {}
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Measure a peer
  ppdeploy_net:
    action: measure
    address: 192.0.2.11
    peer: node2
    peer_address: 192.0.2.12
    port: 40001
"""

RETURN = r"""
iperf3:
  description: Path of iperf3; empty when there is none (C(look)).
  returned: with action C(look)
  type: str
brought:
  description: The packages of which C(open) was told that they came for the test (C(close)).
  returned: with action C(close)
  type: list
port:
  description: Port of the iperf3 server; 0 when there is none (C(open)).
  returned: with action C(open)
  type: int
rendezvous:
  description: A free port for the handoff probe (C(open)).
  returned: with action C(open)
  type: int
ping:
  description: Round trips in seconds and lost pings, or what went wrong (C(measure)).
  returned: with action C(measure)
  type: dict
flows:
  description: Throughput by direction and number of connections, or what went wrong (C(measure)).
  returned: with action C(measure)
  type: dict
lines:
  description: What the handoff probe printed (C(collect)).
  returned: with action C(collect)
  type: list
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

FOLDER = Path("/run/ppdeploy-net")
SERVER, PROBE, GUARD = "ppdeploy-net-iperf3", "ppdeploy-net-handoff", "ppdeploy-net-guard"
#: Names the packages that came for the test, so that whoever ends it can take them away.
BROUGHT = "brought"
#: Pings, seconds between them, and for how long to wait for the last.
PINGS, PAUSE, PATIENCE = 60, 0.02, 1
#: Beyond its run, what an iperf3 client may take to connect and to exchange results, in seconds.
SLACK = 8
#: A server that has just ended a run says that it is busy; so often it is asked again.
TRIES = 4

#: The listeners see nothing of the node, and nobody but the peers reaches them.
FENCE = (
    "DynamicUser=yes",
    "ProtectSystem=strict",
    "ProtectHome=yes",
    "PrivateTmp=yes",
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "LimitMEMLOCK=infinity",
    "IPAddressDeny=any",
)


class NetError(Exception):
    """The node cannot take part at all; the text says why."""


def run(argv: list[str], timeout: float = 20) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; TimeoutExpired when it takes longer, with the program ended."""
    env = dict(os.environ, LC_ALL="C")
    return subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False, timeout=timeout, env=env)


def start(unit: str, argv: list[str], params: dict[str, Any], *more: str) -> None:
    """Start a program as a transient unit that ends by itself; NetError when systemd refuses."""
    beside = [params["wire"], *params["wire_peers"]] if params["wire"] else []
    # Not by name: systemd-run 252 knows addresses alone.
    allowed = " ".join(["127.0.0.0/8", params["address"], *params["peers"], *beside])
    properties = [*FENCE, f"IPAddressAllow={allowed}", f"RuntimeMaxSec={params['limit']}", *more]
    command = ["systemd-run", "--quiet", f"--unit={unit}", *(f"--property={one}" for one in properties), "--", *argv]
    done = run(command)
    if done.returncode:
        raise NetError(f"systemd did not start {unit}: {last_line(done.stderr)}")


def last_line(text: str) -> str:
    """Return the last line of a text that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


# ---- what the test needs, and its end ----------------------------------------------------------------------


def close() -> bool:
    """End and remove all that a test made; say whether there was anything."""
    units = [f"{SERVER}.service", f"{PROBE}.service", f"{GUARD}.timer", f"{GUARD}.service"]
    listed = run(["systemctl", "show", "--property=LoadState", "--value", *units])
    there = FOLDER.exists() or "loaded" in listed.stdout.split()
    run(["systemctl", "stop", *units], timeout=60)
    # A unit that failed or ran out of time is kept until somebody has seen it.
    run(["systemctl", "reset-failed", *units])
    shutil.rmtree(FOLDER, ignore_errors=True)
    if FOLDER.exists():
        raise NetError(f"{FOLDER} cannot be removed")
    return there


def free_port(address: str) -> int:
    """Return a TCP port that nobody has at this moment; NetError when the address is not this host's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError as error:
            raise NetError(f"the fabric address {address} is not on this host ({error.strerror})") from None
        return int(sock.getsockname()[1])


def listens(port: int) -> bool:
    """Say whether somebody listens on a TCP port; asked of the kernel, since a connection would count as a test."""
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                return True
    return False


def open_test(params: dict[str, Any]) -> dict[str, Any]:
    """Prepare the node; what stands in the way of iperf3 is told in `problem`."""
    close()
    FOLDER.mkdir(mode=0o755)
    FOLDER.chmod(0o755)
    for name, content in params["files"].items():
        path = FOLDER / Path(name).name
        path.write_text(content, encoding="utf-8")
        path.chmod(0o644)
    (FOLDER / BROUGHT).write_text("\n".join(params["brought"]), encoding="utf-8")
    end = f"systemctl stop {SERVER}.service {PROBE}.service; rm -rf {FOLDER}"
    guard = ["systemd-run", "--quiet", "--collect", f"--unit={GUARD}", f"--on-active={params['limit']}"]
    done = run([*guard, "/bin/sh", "-c", end])
    if done.returncode:
        raise NetError(f"systemd did not start the timer that ends the test: {last_line(done.stderr)}")
    result: dict[str, Any] = {"port": 0, "rendezvous": free_port(params["address"]), "problem": ""}
    program = shutil.which("iperf3")
    if not program:
        return {**result, "problem": "iperf3 is not installed"}
    port = free_port(params["address"])
    # With a tunnel it is asked on the wire too: then the unit's filter alone says by whom.
    bound = [] if params["wire"] else ["-B", params["address"]]
    start(SERVER, [program, "-s", *bound, "-p", str(port)], params)
    deadline = time.monotonic() + 10
    while not listens(port):
        if time.monotonic() > deadline:
            return {**result, "problem": "the iperf3 server does not listen"}
        time.sleep(0.05)
    return {**result, "port": port}


# ---- one pair ----------------------------------------------------------------------------------------------


def quantile(values: list[float], share: float) -> float:
    """Return the smallest of the values that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def read_ping(text: str) -> dict[str, Any]:
    """Return round trips in seconds and the share of lost pings, from what ping printed."""
    counted = re.search(r"(\d+) packets transmitted, (\d+) (?:packets )?received", text)
    if not counted or not int(counted[1]):
        return {"error": last_line(text)}
    sent, received = int(counted[1]), int(counted[2])
    times = [float(found) / 1000 for found in re.findall(r"time=([\d.]+) ms", text)]
    result: dict[str, Any] = {"sent": sent, "lost": sent - received}
    if times:
        result.update(p50=quantile(times, 0.5), p99=quantile(times, 0.99))
    return result


def ping(address: str, peer: str) -> dict[str, Any]:
    """Ping a peer from the fabric address, a second and a half long."""
    if not shutil.which("ping"):
        return {"error": "ping is not installed"}
    argv = ["ping", "-n", "-c", str(PINGS), "-i", str(PAUSE), "-W", str(PATIENCE), "-I", address, peer]
    try:
        done = run(argv, timeout=PINGS * PAUSE + PATIENCE + 10)
    except subprocess.TimeoutExpired:
        return {"error": "ping did not end"}
    return read_ping(done.stdout or done.stderr)


def read_iperf3(text: str) -> dict[str, Any]:
    """Return throughput as the receiver counted it, and segments sent again, from iperf3's report."""
    try:
        report = json.loads(text)
    except ValueError:
        return {"error": last_line(text)}
    if report.get("error"):
        return {"error": str(report["error"])}
    try:
        received, sent = report["end"]["sum_received"], report["end"]["sum_sent"]
        return {
            "mbit": received["bits_per_second"] / 1e6,
            "bytes": int(received["bytes"]),
            "seconds": float(received["seconds"]),
            "retransmits": sent.get("retransmits"),
        }
    except (KeyError, TypeError, ValueError):
        return {"error": "iperf3 ended without a result"}


def iperf3(params: dict[str, Any], *, back: bool, flows: int) -> dict[str, Any]:
    """Run one iperf3 client; `back` has the peer send."""
    argv = ["iperf3", "-c", params["peer_address"], "-B", params["address"], "-p", str(params["port"])]
    argv += ["-t", str(params["seconds"]), "-P", str(flows), "-J", "--connect-timeout", "3000"]
    if back:
        argv.append("-R")
    result: dict[str, Any] = {}
    for attempt in range(TRIES):
        try:
            done = run(argv, timeout=params["seconds"] + SLACK)
        except subprocess.TimeoutExpired:
            return {"error": f"no end {SLACK} s after its time"}
        result = read_iperf3(done.stdout or done.stderr)
        if "busy" not in str(result.get("error")):
            break
        time.sleep(0.3 * (attempt + 1))
    return result


def measure(params: dict[str, Any]) -> dict[str, Any]:
    """Measure one pair, both ways, one run after the other."""
    result: dict[str, Any] = {"peer": params["peer"], "ping": ping(params["address"], params["peer_address"])}
    flows: dict[str, Any] = {}
    if not shutil.which("iperf3"):
        return {**result, "flows": flows, "problem": "iperf3 is not installed"}
    if not params["port"]:
        return {**result, "flows": flows, "problem": "the peer has no iperf3 server"}
    many = params["flows"]
    runs = {"out_one": (False, 1), "in_one": (True, 1), "out_many": (False, many), "in_many": (True, many)}
    for name, (back, count) in runs.items():
        flows[name] = iperf3(params, back=back, flows=count)
        if "error" in flows[name] and "connect" in flows[name]["error"]:
            break  # the others would wait for the same silence
    if params["wire"] and params["wire_peer"]:
        wire = {**params, "address": params["wire"], "peer_address": params["wire_peer"]}
        flows["out_wire"] = iperf3(wire, back=False, flows=many)
        flows["in_wire"] = iperf3(wire, back=True, flows=many)
    return {**result, "flows": flows, "problem": ""}


# ---- the handoff probe -------------------------------------------------------------------------------------


def probe(params: dict[str, Any]) -> dict[str, Any]:
    """Start the handoff probe and leave it running; `problem` says why not."""
    if not Path(params["python"]).exists():
        return {"started": False, "problem": f"vLLM is not installed ({params['python']} is missing)"}
    more = [f"EnvironmentFile={FOLDER}/{name}" for name in ("rank.env", "nccl.env")]
    more += ["Environment=PYTHONDONTWRITEBYTECODE=1"]
    more += [f"StandardOutput=file:{FOLDER}/handoff.out", f"StandardError=file:{FOLDER}/handoff.err"]
    start(PROBE, [params["python"], f"{FOLDER}/handoff.py", json.dumps(params["config"])], params, *more)
    return {"started": True, "problem": ""}


def probe_state() -> dict[str, str]:
    """Return what systemd shows of the probe's unit."""
    names = "--property=ActiveState,Result,ExecMainStatus"
    return dict(line.partition("=")[::2] for line in run(["systemctl", "show", PROBE, names]).stdout.splitlines())


def collect(params: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end of the probe, at most `limit` seconds, and return its lines, and what it complained of."""
    deadline = time.monotonic() + params["limit"]
    while probe_state().get("ActiveState") in ("active", "activating", "deactivating") and time.monotonic() < deadline:
        time.sleep(0.25)
    state = probe_state()
    # The last one of a probe that was ended in it has no end.
    lines = list(read_lines(text_of("handoff.out")))
    problem = ""
    if not any(line.get("done") for line in lines):
        told = next((line["error"] for line in lines if "pair" not in line and "error" in line), None)
        problem = told or f"the handoff probe ended early ({state.get('Result')}): {last_line(text_of('handoff.err'))}"
    return {"lines": lines, "problem": problem}


def read_lines(text: str) -> Iterator[dict[str, Any]]:
    """Yield the probe's lines; NCCL writes its own between them where the inventory asks for them."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def text_of(name: str) -> str:
    """Return a file of the test; empty when it is not there."""
    try:
        return (FOLDER / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- the module --------------------------------------------------------------------------------------------


def work(params: dict[str, Any]) -> dict[str, Any]:
    """Do one action."""
    action: str = params["action"]
    if action == "look":
        return {"iperf3": shutil.which("iperf3") or ""}
    if action == "close":
        brought = text_of(BROUGHT).split()
        close()
        return {"brought": brought}
    return {"open": open_test, "measure": measure, "probe": probe, "collect": collect}[action](params)


def main() -> None:
    """Do what the play asks."""
    module = AnsibleModule(
        argument_spec={
            "action": {
                "type": "str",
                "choices": ["look", "open", "measure", "probe", "collect", "close"],
                "required": True,
            },
            "address": {"type": "str"},
            "peers": {"type": "list", "elements": "str", "default": []},
            # Whole files have no place in the node's journal, where Ansible notes how a module is called.
            "files": {"type": "dict", "default": {}, "no_log": True},
            "brought": {"type": "list", "elements": "str", "default": []},
            "limit": {"type": "int", "default": 600},
            "peer": {"type": "str"},
            "peer_address": {"type": "str"},
            "wire": {"type": "str", "default": ""},
            "wire_peers": {"type": "list", "elements": "str", "default": []},
            "wire_peer": {"type": "str", "default": ""},
            "port": {"type": "int", "default": 0},
            "seconds": {"type": "int", "default": 3},
            "flows": {"type": "int", "default": 4},
            "python": {"type": "str"},
            "config": {"type": "dict", "default": {}},
        },
        required_if=[
            ("action", "open", ["address"]),
            ("action", "measure", ["address", "peer", "peer_address"]),
            ("action", "probe", ["address", "python"]),
        ],
        supports_check_mode=True,
    )
    params = module.params
    if module.check_mode and params["action"] != "look":
        module.exit_json(changed=False, skipped=True, msg="check mode measures nothing")
    try:
        # Nothing stays, so the node is not another one for it.
        module.exit_json(changed=False, **work(params))
    except (NetError, OSError, subprocess.TimeoutExpired) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
