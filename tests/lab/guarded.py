"""A lab on which the role `gateway` alone is run, with stand-ins of vLLM behind it, and clients that try everything."""

from __future__ import annotations

import ctypes
import json
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, TypeVar

import httpx
import yaml

from ppdeploy.certificates import ca_file
from tests.lab.cluster import Cluster, Done

STAND_IN = Path(__file__).with_name("stand_in_api.py")
RECORD = "/run/stand-in.jsonl"
PORT = 8443
HEADS = ("node1", "node2")
"""Each has a pipeline of its own. A third host is in none."""

_CLONE_NEWNET = 0x40000000

_T = TypeVar("_T")


@dataclass
class Answer:
    """What a client got: status, headers by lower-case name, body, and how long it took in seconds."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> dict[str, Any]:
        """The body as a document."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def code(self) -> str:
        """The `code` of an error as OpenAI's API writes it; fails where the body is no such error."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, self.body
        return str(error["code"])


@dataclass
class Guarded(Cluster):
    """The lab as a cluster of which site.yml's role `gateway` is run, and no other.

    `key` is the first key, `bob` one that lasts an hour, `old` one that has expired. `third` says whether the third
    host is in the group `gateway`, or in the inventory alone.
    """

    key: str = ""
    bob: str = ""
    old: str = ""
    wants: dict[str, Any] = field(default_factory=dict)
    third: bool = False
    names: dict[str, str] = field(default_factory=dict)

    # -- the play -----------------------------------------------------------------------------------------

    def guard(self, *words: str, **wants: Any) -> Done:
        """Take facts, plan, and run the role; `wants` are variables of the group `vllm`, without their prefix."""
        self.wants |= wants
        self.write_inventory()
        return self.role("gateway", words=words)

    def write_inventory(self) -> None:
        """Write what is wanted now."""
        changes = {f"ppdeploy_{name}": value for name, value in self.wants.items()}
        self.inventory = replace(self, inventory=self.lab.inventory).edited(self.elsewhere / "inventory", changes)
        tree = yaml.safe_load(self.inventory.read_text(encoding="utf-8"))
        for pipeline, name in self.names.items():
            tree["vllm"]["children"][pipeline]["vars"]["ppdeploy_served_model_name"] = name
        if not self.third and "gateway" in tree:
            tree["others"] = tree.pop("gateway")
        self.inventory.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")

    @property
    def folder(self) -> Path:
        """The inventory's folder, beside which the controller keeps keys and certificates."""
        return self.inventory.parent

    # -- the stand-ins ------------------------------------------------------------------------------------

    def stand_in(self, node: str, model: str, address: str = "127.0.0.1") -> None:
        """Start the stand-in of vLLM and the agent on a host, anew where one runs; `address` is the engine's."""
        self.lab.exec_ssh(node, ["sh", "-c", "cat > /run/stand_in_api.py"], stdin=STAND_IN.read_text(encoding="utf-8"))
        self.out(
            node,
            f"systemctl stop stand-in 2>/dev/null || true; rm -f {RECORD} {RECORD}.draining; "
            "systemd-run --quiet --collect --unit=stand-in --property=LimitNOFILE=65536 "
            f"python3 -I /run/stand_in_api.py {RECORD} {model} {address}",
        )

    def arrived(self, node: str) -> list[dict[str, Any]]:
        """Return what reached the stand-in of a host since it was started."""
        text = self.out(node, f"cat {RECORD} 2>/dev/null || true")
        return [json.loads(line) for line in text.splitlines()]

    def wait_until_healthy(self, *nodes: str, seconds: float = 30) -> None:
        """Wait until these gateways, and each other pipeline behind them, answer."""
        end = time.monotonic() + seconds
        address = "http://127.0.0.1:8405/metrics"
        show = f"python3 -c 'import urllib.request as u; print(u.urlopen(\"{address}\").read().decode())'"
        for node in nodes:
            while True:
                text = self.out(node, show)
                up = re.findall(
                    r'^haproxy_server_status\{proxy="model1",server="(\w+)",state="UP"\} 1', text, re.MULTILINE
                )
                if sorted(up) == ["one", "two"]:
                    break
                assert time.monotonic() < end, f"{node} has {up}"
                time.sleep(0.3)

    # -- clients ------------------------------------------------------------------------------------------

    def client(self, node: str = "node1", **more: Any) -> httpx.Client:
        """Return a client of a gateway that trusts the cluster's CA; use it `outside` alone."""
        trust = ssl.create_default_context(cafile=str(ca_file(self.folder)))
        return httpx.Client(
            base_url=f"https://{self.lab.management_address(node)}:{PORT}",
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            verify=trust,
            timeout=60,
            trust_env=False,
            **more,
        )

    def ask(self, prompt: str, *, node: str = "node1", **more: Any) -> Answer:
        """Ask for a completion, from outside the hosts."""
        body = {"model": "tiny-llama", "prompt": prompt, **more.pop("body", {})}
        return self.request("POST", "/v1/completions", node=node, json=body, **more)

    def request(self, method: str, path: str, *, node: str = "node1", **more: Any) -> Answer:
        """Send one request from outside the hosts, on a connection of its own."""

        def send() -> Answer:
            began = time.monotonic()
            with self.client(node) as client:
                got = client.request(method, path, **more)
            return Answer(got.status_code, dict(got.headers), got.content, time.monotonic() - began)

        return self.outside(send)

    def raw(self, data: bytes, *, node: str = "node1", wait: float = 2.0) -> bytes:
        """Send bytes over TLS and return all that comes back until the gateway closes or is silent for `wait` s."""

        def send() -> bytes:
            trust = ssl.create_default_context(cafile=str(ca_file(self.folder)))
            address = self.lab.management_address(node)
            with (
                socket.create_connection((address, PORT), timeout=10) as plain,
                trust.wrap_socket(plain, server_hostname=address) as secure,
            ):
                secure.sendall(data)
                secure.settimeout(wait)
                found = bytearray()
                try:
                    while piece := secure.recv(65536):
                        found += piece
                except (TimeoutError, ConnectionResetError):
                    pass
                return bytes(found)

        return self.outside(send)

    def call_peers(self, certificate: Path | None) -> str:
        """Call node1's gateway as another gateway would, and return the first line, or the name of what went wrong."""
        trust = ssl.create_default_context(cafile=str(ca_file(self.folder)))
        trust.check_hostname = False
        if certificate:
            trust.load_cert_chain(certificate)
        address = self.lab.management_address("node1")

        def call() -> str:
            try:
                with (
                    socket.create_connection((address, 8444), timeout=5) as plain,
                    trust.wrap_socket(plain) as secure,
                ):
                    secure.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    return secure.recv(65536).split(b"\r\n")[0].decode()
            except OSError as error:
                return type(error).__name__

        return self.outside(call)

    def outside(self, work: Callable[[], _T]) -> _T:
        """Do something in the lab's network, where this machine is a client that is no host."""
        found: list[_T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                enter(self.lab.namespace)
                found.append(work())
            except BaseException as error:  # noqa: BLE001  (it is raised again below, in the caller's thread)
                failed.append(error)

        thread = Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]


def enter(namespace: Path) -> None:
    """Bring the calling thread into a network namespace; only sockets that it makes from now on are there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open("rb") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns", str(namespace))


@dataclass
class Lost:
    """A request under load that did not end well, with when it began and ended (monotonic clock, seconds)."""

    why: str
    began: float
    ended: float


class Load:
    """Clients that ask for streams, one after the other on a connection of each, until told to stop.

    Every answer is compared with what was asked for: none may be another's, or a part.
    """

    def __init__(self, guarded: Guarded, clients: int, prompt: str, *, words: int, node: str = "node1") -> None:
        self.guarded = guarded
        self.prompt = f"{prompt} words={words}"
        self.words = words
        self.node = node
        self.done = 0
        self.lost: list[Lost] = []
        self._stop = Event()
        self._lock = Lock()
        self._threads = [Thread(target=self._run, args=(number,), daemon=True) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        # What follows happens while every client has been answered once.
        self.wait_for(len(self._threads))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for(self, more: int, seconds: float = 60) -> None:
        """Wait until so many further answers have come."""
        aim, end = self.done + more, time.monotonic() + seconds
        while self.done < aim:
            assert time.monotonic() < end, f"{self.done} answers, {self.lost}"
            time.sleep(0.02)

    def _run(self, number: int) -> None:
        enter(self.guarded.lab.namespace)
        with self.guarded.client(self.node) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                self._ask(client, f"m{number}x{turn}")

    def _ask(self, client: httpx.Client, mark: str) -> None:
        began, why = time.monotonic(), ""
        body = {"model": "tiny-llama", "prompt": f"{self.prompt} mark={mark}", "stream": True}
        try:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code == 200:
                    texts = [json.loads(line[6:])["choices"][0]["text"] for line in answer.iter_lines() if "{" in line]
                    wanted = [f"{mark}-{index}" for index in range(self.words)]
                    why = "" if texts == wanted else f"{texts} for {wanted}"
                else:
                    why = f"status {answer.status_code}: {answer.read()!r}"
        except httpx.HTTPError as error:
            why = f"{type(error).__name__}: {error}"
        with self._lock:
            if why:
                self.lost.append(Lost(why, began, time.monotonic()))
            else:
                self.done += 1
        if why:
            time.sleep(0.2)
