#!/usr/bin/python
"""Ask a rank's own node what it serves: the smoke test's eyes and hands. It reports; ppdeploy/smoke.py judges."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_smoke
short_description: Ask and observe the ranks of a pipeline
description:
  - C(ask) sends the smoke test's requests to the API on loopback and returns what came back.
  - C(observe) returns a node's unit state, its rank's signs in the journal and its fabric counters.
  - It changes nothing on the node and judges nothing.
options:
  action:
    description: What to do.
    type: str
    choices: [ask, observe]
    required: true
  unit:
    description: The rank's systemd unit.
    type: str
    required: true
  url:
    description: Address of the API, such as C(http://127.0.0.1:8000). Needed by C(ask).
    type: str
  model:
    description: Served model name. Needed by C(ask).
    type: str
  concurrency:
    description: How many requests are sent at once.
    type: int
    default: 2
  max_tokens:
    description: Tokens asked for in each request.
    type: int
    default: 12
  timeout:
    description: Seconds for which C(ask) waits for one request.
    type: int
    default: 600
  interface:
    description: The fabric NIC whose counters C(observe) reads.
    type: str
  journal_lines:
    description: How many of the rank's last journal lines C(observe) returns.
    type: int
    default: 30
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Ask the head for completions
  ppdeploy_smoke:
    action: ask
    unit: ppdeploy-rank@qwen.service
    url: http://127.0.0.1:8000
    model: qwen
"""

RETURN = r"""
answers:
  description: What each request brought, by its name (C(ask)).
  returned: with action C(ask)
  type: dict
"""

import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

PROMPT = "The head of the pipeline says hello to"
# Each start logs one such line (vLLM 0.32 and 0.33, parallel_state.py, initialize_model_parallel).
RANK_LINE = re.compile(r"rank (\d+) in world size (\d+) is assigned as .*?PP rank (\d+)")


def _request(url: str, body: dict[str, Any] | None = None, timeout: float = 60) -> dict[str, Any]:
    """Return {status, body, seconds} of one request; {error, seconds} when no HTTP answer came."""
    data = None if body is None else json.dumps(body).encode()
    # The address is our own, on loopback.
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})  # noqa: S310
    started = time.monotonic()
    # A proxy set for the node must not swallow a request to loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as answer:
            status, text = answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        return {"error": str(error), "seconds": time.monotonic() - started}
    return {"status": status, "body": text, "seconds": time.monotonic() - started}


def _unit_state(unit: str) -> dict[str, str]:
    names = "ActiveState,SubState,NRestarts,MainPID,InvocationID,Result"
    done = subprocess.run(
        ["systemctl", "show", unit, "--property", names],
        capture_output=True,
        text=True,
        check=False,
    )
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


def _journal(unit: str, invocation: str | None, lines: int) -> list[str]:
    """Return the unit's last journal lines, of its current invocation where it has one."""
    match = ["_SYSTEMD_INVOCATION_ID=" + invocation] if invocation else ["--unit", unit]
    command = ["journalctl", "--no-pager", "--output=cat"]
    if lines:
        command += ["--lines", str(lines)]
    done = subprocess.run(command + match, capture_output=True, text=True, errors="replace", check=False)
    return done.stdout.splitlines()


def _ask(params: dict[str, Any]) -> dict[str, Any]:
    """Send every request of the smoke test; each answer is returned as it came."""
    url, timeout = params["url"], params["timeout"]
    common = {"model": params["model"], "max_tokens": params["max_tokens"], "temperature": 0}
    complete = dict(common, prompt=PROMPT, ignore_eos=True)
    chat = dict(common, messages=[{"role": "user", "content": "Say hello."}], ignore_eos=True)
    stream = dict(complete, stream=True, stream_options={"include_usage": True})
    answers = {
        "health": _request(url + "/health", timeout=timeout),
        "models": _request(url + "/v1/models", timeout=timeout),
        "completion": _request(url + "/v1/completions", complete, timeout),
        "chat": _request(url + "/v1/chat/completions", chat, timeout),
        "stream": _request(url + "/v1/completions", stream, timeout),
    }
    together: list[dict[str, Any]] = [{} for _ in range(params["concurrency"])]

    def one(index: int) -> None:
        together[index] = _request(url + "/v1/completions", dict(complete, prompt=f"{PROMPT} {index}"), timeout)

    started = time.monotonic()
    threads = [threading.Thread(target=one, args=(index,)) for index in range(params["concurrency"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "answers": answers,
        "together": together,
        "together_seconds": time.monotonic() - started,
        "prompt": PROMPT,
    }


def _counters(interface: str) -> dict[str, int] | None:
    base = Path("/sys/class/net") / interface / "statistics"
    try:
        return {name: int((base / name).read_text()) for name in ("rx_bytes", "tx_bytes")}
    except (OSError, ValueError):
        return None


def _observe(params: dict[str, Any]) -> dict[str, Any]:
    state = _unit_state(params["unit"])
    journal = _journal(params["unit"], state.get("InvocationID"), 0)
    ranks = sorted({(int(m[1]), int(m[2]), int(m[3])) for m in map(RANK_LINE.search, journal) if m})
    return {
        "state": state,
        "ranks": [{"world_rank": rank, "world_size": size, "pp_rank": pp} for rank, size, pp in ranks],
        "counters": _counters(params["interface"]) if params["interface"] else None,
        "journal": journal[-params["journal_lines"] :],
    }


def main() -> None:
    """Run one action and return what was seen."""
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["ask", "observe"], "required": True},
            "unit": {"type": "str", "required": True},
            "url": {"type": "str"},
            "model": {"type": "str"},
            "concurrency": {"type": "int", "default": 2},
            "max_tokens": {"type": "int", "default": 12},
            "timeout": {"type": "int", "default": 600},
            "interface": {"type": "str"},
            "journal_lines": {"type": "int", "default": 30},
        },
        required_if=[("action", "ask", ["url", "model"])],
        supports_check_mode=True,
    )
    action = {"ask": _ask, "observe": _observe}[module.params["action"]]
    module.exit_json(changed=False, **action(module.params))


if __name__ == "__main__":
    main()
