#!/usr/bin/python
"""Ask a rank's own node what it serves: the smoke test's eyes and hands. It reports; ppdeploy/smoke.py judges."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_smoke
short_description: Ask and observe the ranks of a pipeline
description:
  - C(ask) sends the smoke test's requests to the API on loopback and returns what came back.
  - C(gateway) sends requests to the gateway on the same host, without a key and with one that HAProxy is told for
    their time alone, in memory; it is made up for this, and gone with the process that made it.
  - C(observe) returns a node's unit state, its rank's signs in the journal and its fabric counters.
  - It changes no file on the node and judges nothing.
options:
  action:
    description: What to do.
    type: str
    choices: [ask, gateway, observe]
    required: true
  unit:
    description: The rank's systemd unit. Needed by C(ask) and C(observe).
    type: str
  url:
    description: Address of the API, such as C(http://127.0.0.1:8000). Needed by C(ask).
    type: str
  model:
    description: Served model name. Needed by C(ask) and C(gateway).
    type: str
  gateway:
    description:
      - Where the gateway is. Needed by C(gateway).
      - C(unit) and C(address), the unit's file and the address and port it listens on; C(ca), the CA that its
        certificate is checked by, empty where somebody else made that; C(control), HAProxy's admin socket; C(keys), the
        map of keys as HAProxy knows it.
    type: dict
  gateway_wait:
    description: Seconds for which C(gateway) asks again while the gateway says 503; its own health checks come first.
    type: int
    default: 20
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
  description: What each request brought, by its name.
  returned: with actions C(ask) and C(gateway)
  type: dict
installed:
  description: Whether there is a gateway on the host.
  returned: with action C(gateway)
  type: bool
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

PROMPT = "The head of the pipeline says hello to"
# Each start logs one such line (vLLM 0.32 and 0.33, parallel_state.py, initialize_model_parallel).
RANK_LINE = re.compile(r"rank (\d+) in world size (\d+) is assigned as .*?PP rank (\d+)")
# What the gateway's access log calls these requests.
KEY_NAME = "+ppdeploy-smoke"
"""No key that is given out has a name with +, so ppdeploy_gateway_keys knows which it is to leave alone."""


def _request(
    url: str,
    body: dict[str, Any] | None = None,
    timeout: float = 60,
    *,
    key: str = "",
    context: ssl.SSLContext | None = None,
) -> dict[str, Any]:
    """Return {status, body, seconds} of one request; {error, seconds} when no HTTP answer came."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, data=data, headers=headers)  # noqa: S310  (an address of this host)
    started = time.monotonic()
    # A proxy set for the node must not swallow a request to itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
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


def _control(path: str, command: str) -> str:
    """Return what HAProxy answers to a command on its admin socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(path)
        connection.sendall(command.encode() + b"\n")
        data = bytearray()
        while piece := connection.recv(65536):
            data += piece
    return data.decode().strip()


@contextlib.contextmanager
def _alone(keys: str) -> Iterator[None]:
    """Let nobody put other keys in place of all meanwhile (ppdeploy_gateway_keys): one that is added then is lost."""
    handle = os.open(Path(keys).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class _Key:
    """A key that the gateway knows for a time, and that it is told again where a reload has taken it away."""

    def __init__(self, gateway: dict[str, Any], seconds: int) -> None:
        self.control, self.keys = gateway["control"], gateway["keys"]
        self.clear = secrets.token_urlsafe(32)
        self.entry = hashlib.sha256(self.clear.encode()).hexdigest().upper()
        self.value = f"{int(time.time()) + seconds} {KEY_NAME}"

    def tell(self) -> str:
        """Tell it where it is not known; return what HAProxy has against it."""
        with _alone(self.keys):
            if f" {self.entry} " in _control(self.control, f"show map {self.keys}"):
                return ""
            # As a payload: of a value on the command's own line, HAProxy takes the first word alone.
            return _control(self.control, f"add map {self.keys} <<\n{self.entry} {self.value}\n")

    def take_back(self) -> None:
        """Let it be unknown again. A gateway that has gone meanwhile took it with it."""
        with contextlib.suppress(OSError), _alone(self.keys):
            _control(self.control, f"del map {self.keys} {self.entry}")

    def request(self, url: str, body: dict[str, Any] | None, timeout: float, context: ssl.SSLContext) -> dict[str, Any]:
        """Send a request with it, once more where a gateway that was reloaded meanwhile did not know it."""
        answer = _request(url, body, timeout, key=self.clear, context=context)
        if answer.get("status") == 401 and not self.tell():
            answer = _request(url, body, timeout, key=self.clear, context=context)
        return answer


def _context(ca: str) -> ssl.SSLContext:
    """Return how the gateway's certificate is looked at: by our CA, or, where somebody else made it, not at all."""
    if ca:
        return ssl.create_default_context(cafile=ca)
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _gateway(params: dict[str, Any]) -> dict[str, Any]:
    """Ask the gateway without a key, then with one that it knows for this time alone."""
    gateway = params["gateway"]
    if not Path(gateway["unit"]).exists():
        return {"installed": False}
    url = f"https://{gateway['address']}"
    # Longer than all the requests below may take: the key is taken back when they are through.
    key = _Key(gateway, params["gateway_wait"] + 6 * params["timeout"])
    complete = {"model": params["model"], "max_tokens": params["max_tokens"], "temperature": 0, "prompt": PROMPT}
    try:
        context = _context(gateway["ca"])
        told = key.tell()
    except OSError as error:
        return {"installed": True, "problem": str(error)}
    if told:
        return {"installed": True, "problem": told}
    try:
        patience = time.monotonic() + params["gateway_wait"]
        while True:
            completion = key.request(f"{url}/v1/completions", complete, params["timeout"], context)
            if completion.get("status") != 503 or time.monotonic() > patience:
                break
            # As a client is told to, so that a gateway with a low limit does not refuse it.
            time.sleep(2)
        answers = {
            "refused": _request(f"{url}/v1/models", context=context),
            "models": key.request(f"{url}/v1/models", None, 60, context),
            "completion": completion,
        }
    finally:
        key.take_back()
    return {"installed": True, "answers": answers}


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
            "action": {"type": "str", "choices": ["ask", "gateway", "observe"], "required": True},
            "unit": {"type": "str"},
            "url": {"type": "str"},
            "model": {"type": "str"},
            "gateway": {"type": "dict"},
            "gateway_wait": {"type": "int", "default": 20},
            "concurrency": {"type": "int", "default": 2},
            "max_tokens": {"type": "int", "default": 12},
            "timeout": {"type": "int", "default": 600},
            "interface": {"type": "str"},
            "journal_lines": {"type": "int", "default": 30},
        },
        required_if=[
            ("action", "ask", ["unit", "url", "model"]),
            ("action", "gateway", ["gateway", "model"]),
            ("action", "observe", ["unit"]),
        ],
        supports_check_mode=True,
    )
    action = {"ask": _ask, "gateway": _gateway, "observe": _observe}[module.params["action"]]
    module.exit_json(changed=False, **action(module.params))


if __name__ == "__main__":
    main()
