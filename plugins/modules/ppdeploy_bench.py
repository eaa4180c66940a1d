#!/usr/bin/python
"""Play a load against a pipeline's API on its own head, with vLLM's own client, in a unit that ends by itself."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_bench
short_description: Run vllm bench serve on the head of a pipeline
description:
  - C(look) says whether the gang serves the release, and whether requests are in flight.
  - C(warm) sends some requests of the load's size, so that what is compiled at a first request is not measured.
  - C(start) starts C(vllm bench serve) as the ranks' user, in a transient unit that reaches loopback only and is ended
    after a time; C(wait) waits a few seconds for its end and then returns what it measured; C(stop) ends it.
  - It leaves nothing on the node but a line in the journal.
options:
  action:
    description: What to do.
    type: str
    choices: [look, warm, start, wait, stop]
    required: true
  pipeline:
    description: Name of the pipeline.
    type: str
    required: true
  url:
    description: Address of the API, such as C(http://127.0.0.1:8000). Needed by C(look) and C(warm).
    type: str
  release:
    description: Digest of the release that is to serve. Needed by C(look).
    type: str
  model:
    description: Served model name. Needed by C(warm).
    type: str
  users:
    description: Requests that C(warm) sends at once.
    type: int
    default: 1
  input_tokens:
    description: Tokens of each prompt that C(warm) sends.
    type: int
    default: 16
  argv:
    description: The command that C(start) runs, without seed and result.
    type: list
    elements: str
  seed:
    description: Seed of the random prompts. The same one again would measure the prefix cache.
    type: int
    default: 0
  user:
    description: Account that the command runs as.
    type: str
    default: ppdeploy
  timeout:
    description: Seconds after which the unit is ended (C(start)), or that requests may take (C(warm)).
    type: int
    default: 900
  patience:
    description: Seconds that one C(wait) waits.
    type: float
    default: 4
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Start a load of 8 users
  ppdeploy_bench:
    action: start
    pipeline: qwen
    argv: [/opt/ppdeploy/venvs/x/bin/vllm, bench, serve, --max-concurrency, "8"]
    seed: 7
"""

RETURN = r"""
serves:
  description: Whether the gang serves the release.
  returned: with action C(look)
  type: bool
in_flight:
  description: Requests that run or wait.
  returned: with action C(look)
  type: int
ok:
  description: Whether it went well; C(reason) says what did not.
  returned: with actions C(warm), C(start) and C(wait)
  type: bool
done:
  description: Whether the command has ended.
  returned: with action C(wait)
  type: bool
progress:
  description: How far it is, in words.
  returned: with action C(wait)
  type: str
measured:
  description: What the command measured, as it wrote it; empty where it wrote nothing.
  returned: with action C(wait)
  type: dict
"""

import contextlib
import json
import os
import pwd
import random
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

CONFIG = "/etc/ppdeploy/agent.json"
#: Where a run keeps its result and what its client printed; in memory, and gone when it has been read.
FOLDER = "/run/ppdeploy-bench"
MOST_BYTES = 4 << 20
#: Looks at the API's own count of requests, and seconds between them. The agent's own short request, its proof of
#: tokens, is seen by one of them at most; people who ask now and then are seen by more, though not by all.
LOOKS, PAUSE = 6, 0.4
#: Requests that the first warming sends at most, and tokens of each answer.
MOST_WARM, WARM_TOKENS = 8, 4
#: A number of requests in Prometheus' text; several engines have a line each.
_COUNT = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE)
#: The client's bar of requests, as `tqdm` draws it: ` 25%|##  | 16/64 [00:05<00:14, 3.2it/s]`.
_BAR = re.compile(r"\|\s*(\d+)/(\d+)\s*\[")


def unit_of(pipeline: str) -> str:
    """Return the transient unit of a pipeline's benchmark."""
    return f"ppdeploy-bench-{pipeline}.service"


def _request(url: str, body: dict[str, Any] | None = None, timeout: float = 10) -> tuple[int, str]:
    """Return status and body of one request; raises OSError when no HTTP answer came."""
    data = None if body is None else json.dumps(body).encode()
    # The address is our own, on loopback.
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})  # noqa: S310
    # A proxy set for the node must not swallow a request to loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            return answer.status, answer.read(MOST_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read(MOST_BYTES).decode("utf-8", "replace")


def cause(error: Exception) -> object:
    """Return what to say of a request without an answer."""
    return error.reason if isinstance(error, urllib.error.URLError) else error


# ---- may it be measured


def requests_in_flight(text: str) -> int | None:
    """Return how many requests run or wait, from vLLM's /metrics; None where it does not say."""
    found = _COUNT.findall(text)
    return round(sum(float(number) for _, number in found)) if found else None


def agent_url(path: str = CONFIG) -> str:
    """Return the address of the node's agent on loopback, from its configuration; OSError where there is none."""
    listed = json.loads(Path(path).read_text(encoding="utf-8")).get("listen", [])
    ports = [port for address, port in listed if str(address).startswith("127.")]
    return f"http://127.0.0.1:{int(ports[0]) if ports else 29500}"


def look(params: dict[str, Any]) -> dict[str, Any]:
    """Return whether the gang serves the release, and the requests in flight: the second greatest of some looks."""
    answer: dict[str, Any] = {"serves": False, "in_flight": 0, "reason": ""}
    try:
        status = json.loads(_request(agent_url() + "/v1/status")[1])
    except FileNotFoundError:
        return {**answer, "reason": "no agent is installed"}
    except (OSError, ValueError) as error:
        return {**answer, "reason": f"its agent does not answer: {cause(error)}"}
    if not status.get("healthy"):
        return {**answer, "reason": "it is {}: {}".format(status.get("phase"), status.get("remark") or "no reason")}
    if status.get("release") != params["release"]:
        return {
            **answer,
            "reason": "it serves release {}, and the inventory says {}".format(
                str(status.get("release"))[:12], params["release"][:12]
            ),
        }
    counts: list[int] = []
    for index in range(LOOKS):
        if index:
            time.sleep(PAUSE)
        try:
            code, text = _request(params["url"] + "/metrics")
        except OSError as error:
            return {**answer, "reason": f"its API does not answer: {cause(error)}"}
        count = requests_in_flight(text)
        if code != 200 or count is None:
            return {**answer, "reason": f"its /metrics (HTTP {code}) does not count the requests in flight"}
        counts.append(count)
    return {**answer, "serves": True, "in_flight": sorted(counts)[-2]}


def warm(params: dict[str, Any]) -> dict[str, Any]:
    """Send requests of the load's size at once, of random prompts; the reason of the first that failed."""
    reasons: list[str] = []

    def one() -> None:
        # Any vocabulary has these; the prompt is in no cache, and puts none there that the load would find.
        prompt = [random.randrange(10, 200) for _ in range(params["input_tokens"])]  # noqa: S311  (no secret)
        body = {"model": params["model"], "prompt": prompt, "max_tokens": WARM_TOKENS, "ignore_eos": True}
        try:
            code, text = _request(params["url"] + "/v1/completions", body, params["timeout"])
        except OSError as error:
            reasons.append(f"a request got no answer: {cause(error)}")
            return
        if code != 200:
            reasons.append(f"a request was answered with HTTP {code}: {text[:200]}")

    threads = [threading.Thread(target=one) for _ in range(min(params["users"], MOST_WARM))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"ok": not reasons, "reason": reasons[0] if reasons else ""}


# ---- the unit


def unit_command(params: dict[str, Any], folder: str) -> list[str]:
    """Return the command that starts the unit: nothing on the host is writable to it but its own folder."""
    work = f"{folder}/work"
    properties = {
        "User": params["user"],
        "Group": params["user"],
        "WorkingDirectory": work,
        "RuntimeMaxSec": params["timeout"],
        "TimeoutStopSec": 10,
        # Its end is read by `wait`, which then takes the unit away.
        "RemainAfterExit": "yes",
        "StandardOutput": f"append:{folder}/out",
        "StandardError": f"append:{folder}/err",
        "ProtectSystem": "strict",
        "ReadWritePaths": work,
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "RestrictSUIDSGID": "yes",
        "IPAddressDeny": "any",
        "IPAddressAllow": "localhost",
        "OOMScoreAdjust": 900,
    }
    environment = {
        "HOME": work,
        "XDG_CACHE_HOME": work,
        "VLLM_CACHE_ROOT": work,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return [
        *("systemd-run", "--quiet", f"--unit={unit_of(params['pipeline'])}"),
        f"--description=ppdeploy benchmark of pipeline {params['pipeline']}",
        *(f"--property={name}={value}" for name, value in properties.items()),
        *(f"--setenv={name}={value}" for name, value in environment.items()),
        "--",
        *params["argv"],
        *("--seed", str(params["seed"]), "--save-result", "--result-dir", work, "--result-filename", "result.json"),
    ]


def unit_state(unit: str) -> dict[str, str]:
    """Return what systemd shows of a unit."""
    names = "LoadState,ActiveState,SubState,Result,ExecMainStatus,ExecMainCode"
    done = subprocess.run(
        ["systemctl", "show", unit, "--property", names], capture_output=True, text=True, check=False, timeout=30
    )
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


def is_running(state: dict[str, str]) -> bool:
    """Whether the unit's command has not ended."""
    return state.get("ActiveState") in ("active", "activating", "deactivating") and state.get("SubState") != "exited"


def take_away(pipeline: str, folder: str) -> None:
    """End the unit, forget it, and remove its folder."""
    for verb in ("stop", "reset-failed"):
        # Both fail where there is no such unit, which is what is wanted.
        subprocess.run(["systemctl", verb, unit_of(pipeline)], capture_output=True, check=False, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)
    # Another pipeline's may be in it.
    with contextlib.suppress(OSError):
        Path(folder).parent.rmdir()


def start(params: dict[str, Any]) -> dict[str, Any]:
    """Start the command; another one of this pipeline that still runs is left alone."""
    folder = f"{FOLDER}/{params['pipeline']}"
    if is_running(unit_state(unit_of(params["pipeline"]))):
        return {
            "ok": False,
            "reason": f"a benchmark of it runs already: `systemctl stop {unit_of(params['pipeline'])}`",
        }
    take_away(params["pipeline"], folder)
    try:
        owner = pwd.getpwnam(params["user"])
    except KeyError:
        return {"ok": False, "reason": f"there is no user {params['user']}"}
    # The folder is root's, so that nobody puts a link where systemd opens the output; the client's own is inside.
    Path(folder).mkdir(mode=0o755, parents=True)
    Path(folder, "work").mkdir(mode=0o700)
    os.chown(f"{folder}/work", owner.pw_uid, owner.pw_gid)
    done = subprocess.run(unit_command(params, folder), capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        take_away(params["pipeline"], folder)
        return {"ok": False, "reason": f"systemd-run ended with {done.returncode}: {done.stderr.strip()[-300:]}"}
    return {"ok": True, "reason": ""}


def wait(params: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end of the command for some seconds; at its end return what it measured and take all away."""
    folder = f"{FOLDER}/{params['pipeline']}"
    unit = unit_of(params["pipeline"])
    deadline = time.monotonic() + params["patience"]
    state = unit_state(unit)
    while is_running(state) and time.monotonic() < deadline:
        time.sleep(0.3)
        state = unit_state(unit)
    if is_running(state):
        return {"done": False, "ok": True, "reason": "", "measured": {}, "progress": progress(f"{folder}/err")}
    measured = result(str(Path(folder, "work", "result.json")))
    reason = ending(state, folder, params["timeout"], bool(measured))
    take_away(params["pipeline"], folder)
    return {"done": True, "ok": not reason, "reason": reason, "measured": measured, "progress": ""}


def ending(state: dict[str, str], folder: str, timeout: int, has_result: bool) -> str:
    """Return why the command did not measure, empty where it did."""
    if state.get("LoadState") != "loaded":
        return "it was ended by somebody, and its unit is gone"
    if state.get("Result") == "timeout":
        return f"it did not end within {timeout} s"
    if state.get("Result") != "success":
        status = f"code {state.get('ExecMainStatus')}" if state.get("Result") == "exit-code" else state.get("Result")
        return f"`vllm bench serve` ended with {status}: {last_words(folder)}"
    return "" if has_result else f"`vllm bench serve` wrote no result: {last_words(folder)}"


def result(path: str) -> dict[str, Any]:
    """Return the numbers that the client wrote, and no longer lists; empty where it wrote none."""
    try:
        # The folder is the unprivileged user's: what lies there may be a link to somewhere else.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as stream:
            found = json.loads(stream.read(MOST_BYTES))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, (int, float, str)) or value is None}


def tail(path: str, size: int = 8192) -> str:
    """Return the end of a file."""
    try:
        with Path(path).open("rb") as stream:
            stream.seek(max(Path(path).stat().st_size - size, 0))
            return stream.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


def progress(path: str) -> str:
    """Return how many requests are done, as the client's own bar says; it starts some seconds before it asks."""
    found = _BAR.findall(tail(path))
    return f"{found[-1][0]} of {found[-1][1]} requests" if found else "the client starts"


def last_words(folder: str) -> str:
    """Return the last line that the client printed and that says something."""
    lines = [line.strip() for line in re.split(r"[\r\n]", tail(f"{folder}/err") + "\n" + tail(f"{folder}/out"))]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    told = [line for line in lines if line]
    return ((errors or told or ["it printed nothing"])[-1])[:300]


def stop(params: dict[str, Any]) -> dict[str, Any]:
    """End a benchmark and remove what is left of it."""
    folder = f"{FOLDER}/{params['pipeline']}"
    was = unit_state(unit_of(params["pipeline"])).get("LoadState") == "loaded" or Path(folder).exists()
    take_away(params["pipeline"], folder)
    return {"ok": True, "reason": "", "stopped": was}


def main() -> None:
    """Run one action and return what was seen."""
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["look", "warm", "start", "wait", "stop"], "required": True},
            "pipeline": {"type": "str", "required": True},
            "url": {"type": "str"},
            "release": {"type": "str"},
            "model": {"type": "str"},
            "users": {"type": "int", "default": 1},
            "input_tokens": {"type": "int", "default": 16},
            "argv": {"type": "list", "elements": "str"},
            "seed": {"type": "int", "default": 0},
            "user": {"type": "str", "default": "ppdeploy"},
            "timeout": {"type": "int", "default": 900},
            "patience": {"type": "float", "default": 4},
        },
        required_if=[
            ("action", "look", ["url", "release"]),
            ("action", "warm", ["url", "model"]),
            ("action", "start", ["argv"]),
        ],
        supports_check_mode=True,
    )
    action = {"look": look, "warm": warm, "start": start, "wait": wait, "stop": stop}[module.params["action"]]
    if module.check_mode and module.params["action"] != "look":
        module.exit_json(changed=False, skipped=True, msg="check mode plays no load")
    module.exit_json(changed=False, **action(module.params))


if __name__ == "__main__":
    main()
