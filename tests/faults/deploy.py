"""Puts a gang of stand-in ranks on the lab's hosts: the agent's real file, units and templates, and a release."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ppdeploy.agent.build import agent_pyz
from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.ready import tiny_model, up_with_vllm
from ppdeploy.paths import data_root

REAL = os.environ.get("PPDEPLOY_FAULTS", "") == "vllm"
"""Whether the ranks are real vLLM ones that `ppdeploy apply` sets up, and not stand-ins."""
PIPELINE = "tiny"
UNIT = f"ppdeploy-rank@{PIPELINE}.service"
API_PORT = 8000
MASTER_PORT = 29600
AGENT_PORT = 29500
_VERSION = "0.32.0"
_FAKE = Path(__file__).with_name("fake_vllm.py")


@dataclass
class Gang:
    """The lab's hosts as one gang, and how to look at them."""

    lab: Lab
    settings: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    machine_ids: dict[str, str] = field(default_factory=dict)
    #: Tokens of a request that is still under way when a fault strikes, and of one that ends within the drain.
    long_request: ClassVar[int] = 3000
    short_request: ClassVar[int] = 200

    @property
    def nodes(self) -> list[str]:
        """All hosts, the head first."""
        return self.lab.nodes

    @property
    def head(self) -> str:
        """The head's host."""
        return self.nodes[0]

    def shell(self, node: str, script: str, *, check: bool = True, stdin: str | None = None) -> str:
        """Run a shell script on a host and return what it printed."""
        return self.lab.exec_ssh(node, ["sh", "-c", script], check=check, stdin=stdin).stdout

    def memory(self, node: str) -> int:
        """Return the memory of a host's rank in bytes, as its agent sees it."""
        return int(self.status(node)["own"]["rank"]["memory_bytes"])

    def set_settings(self, node: str, settings: dict[str, Any]) -> None:
        """Give a host's agent other settings than its file has, and restart it."""
        config = json.loads(self.shell(node, "cat /etc/ppdeploy/agent.json"))
        config["settings"] = {**config["settings"], **settings}
        self._push(node, {"/etc/ppdeploy/agent.json": (json.dumps(config), 0o644)})
        self.shell(node, "systemctl restart ppdeploy-agent")

    def install_faketime(self, node: str) -> None:
        """Put libfaketime, which shifts a program's clock, on a host; this machine must have it."""
        found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
        assert found, "this machine lacks libfaketime: apt-get install libfaketime"
        self._push(node, {"/opt/libfaketime.so.1": (found[0].read_bytes(), 0o755)})

    @property
    def model(self) -> str:
        """The name that requests give."""
        return "fake"

    def install(self) -> None:
        """Boot two hosts, install agent and first release on each, and start the agents."""
        self.lab.up(2, owner=os.getpid())
        self.env.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "20")
        for node in self.nodes:
            self.machine_ids[node] = self.shell(node, "cat /etc/machine-id").strip()
        release = self.release()
        for node in self.nodes:
            self.shell(node, "getent passwd ppdeploy || useradd -r -d /var/lib/ppdeploy -s /usr/sbin/nologin ppdeploy")
            self._push(node, self._agent_files(node) | self._environment_files())
            self.push_release(node, release)
            self.shell(
                node,
                f"install -d -o ppdeploy -g ppdeploy -m 0750 /var/lib/ppdeploy/{PIPELINE};"
                f"install -d -o ppdeploy -g ppdeploy -m 0750 /var/cache/ppdeploy/{PIPELINE};"
                f"chown -R root:root /var/lib/ppdeploy/models; systemctl daemon-reload;"
                f"systemctl enable --now ppdeploy-agent.service ppdeploy-fence.timer",
            )

    # Releases.

    def release(self, *, order: list[str] | None = None, extra: str = "") -> dict[str, dict[str, str]]:
        """Return the files of a release for each host, `extra` making another one."""
        order = order or self.nodes
        files = {node: self._rank_files(node, order, extra) for node in order}
        lock = self._lock_text()
        listed = {
            "schema": 1,
            "pipeline": PIPELINE,
            "vllm": _VERSION,
            "lock": hashlib.sha256(lock.encode()).hexdigest(),
            "model": "fake",
            "manifest": "f" * 64,
            "nodes": [
                {
                    "host": node,
                    "rank": rank,
                    "address": self.lab.fabric_address(node),
                    "machine_id": self.machine_ids[node],
                    "files": {n: hashlib.sha256(t.encode()).hexdigest() for n, t in files[node].items()},
                }
                for rank, node in enumerate(order)
            ],
        }
        text = json.dumps(listed, sort_keys=True, indent=1)
        return {node: {**files[node], "release.json": text} for node in order}

    def push_release(self, node: str, release: dict[str, dict[str, str]]) -> str:
        """Write a release on a host, switch `current` to it, and return its digest."""
        files = release[node]
        digest = hashlib.sha256(files["release.json"].encode()).hexdigest()
        folder = f"/opt/ppdeploy/{PIPELINE}/releases/{digest}"
        self._push(node, {f"{folder}/{name}": (text, 0o644) for name, text in files.items()})
        drop_in = f"/etc/systemd/system/{UNIT}.d"
        self.shell(
            node,
            f"ln -sfn releases/{digest} /opt/ppdeploy/{PIPELINE}/current; mkdir -p {drop_in};"
            f"ln -sfn /opt/ppdeploy/{PIPELINE}/current/rank.conf {drop_in}/release.conf; systemctl daemon-reload",
        )
        return digest

    # Looking.

    def status(self, node: str) -> dict[str, Any]:
        """Return what a host's agent knows; an empty one while it does not answer."""
        text = self.shell(node, "python3 -I /opt/ppdeploy/agent/agent.pyz status", check=False)
        return dict(json.loads(text)) if text else {}

    def history(self) -> list[dict[str, Any]]:
        """Return the head's last phases; `at` is in seconds since this machine booted, on all hosts alike."""
        return list(self.status(self.head).get("history", []))

    def order(self, words: str) -> None:
        """Leave an operator's word on the head."""
        self.shell(self.head, f"python3 -I /opt/ppdeploy/agent/agent.pyz order {words}")

    def phase(self) -> str:
        """Return the gang's phase as the head tells it."""
        return str(self.status(self.head).get("phase", ""))

    def healthy(self) -> bool:
        """Whether the head's /healthz is 200."""
        return bool(self.status(self.head).get("healthy"))

    def remark(self) -> str:
        """Return the head's remark on its phase."""
        return str(self.status(self.head).get("remark", ""))

    def pids(self, node: str) -> list[int]:
        """Return the processes of a host's rank."""
        out = self.shell(node, f"systemctl show -P MainPID {UNIT}; pgrep -u ppdeploy || true")
        return [int(word) for word in out.split() if word != "0"]

    def main_pid(self, node: str) -> int:
        """Return the main process of a host's rank, 0 for none."""
        return int(self.shell(node, f"systemctl show -P MainPID {UNIT}").strip() or 0)

    def wait(self, what: Callable[[], bool], seconds: float, pause: float = 0.2) -> float:
        """Wait until `what` holds, and return how long it took; fail with everything that the agents say."""
        begin = time.monotonic()
        while not what():
            if time.monotonic() - begin > seconds:
                raise AssertionError(self.explain(f"it did not happen within {seconds:.0f} s"))
            time.sleep(pause)
        return time.monotonic() - begin

    def explain(self, text: str) -> str:
        """Return `text` with each agent's journal and status."""
        lines = [text]
        for node in self.nodes:
            journal = f"journalctl -u ppdeploy-agent -u {UNIT} -n 40 --no-pager -o short-monotonic"
            lines.append(f"== {node} {json.dumps(self.status(node))[:1500]}")
            lines.append(self.shell(node, journal, check=False))
        return "\n".join(lines)

    # Files.

    def _push(self, node: str, files: dict[str, tuple[str | bytes, int]]) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, (content, mode) in files.items():
                data = content.encode() if isinstance(content, str) else content
                entry = tarfile.TarInfo(name.lstrip("/"))
                entry.size, entry.mode = len(data), mode
                archive.addfile(entry, io.BytesIO(data))
        text = base64.b64encode(packed.getvalue()).decode()
        self.shell(node, "base64 -d | tar -xzf - -C / --no-same-owner", stdin=text)

    def _agent_files(self, node: str) -> dict[str, tuple[str | bytes, int]]:
        config = {
            "cluster": "lab",
            "pipeline": PIPELINE,
            "node": node,
            "listen": [[self.lab.fabric_address(node), AGENT_PORT], ["127.0.0.1", AGENT_PORT]],
            "port": AGENT_PORT,
            "device": "cpu",
            "settings": self.settings,
        }
        values = {
            "managed": "Written by a test.",
            "pipeline": PIPELINE,
            "agent_file": "/opt/ppdeploy/agent/agent.pyz",
            "agent_json": json.dumps(config),
            "fence_file": "/opt/ppdeploy/agent/fence.sh",
            "fence_seconds": 60,
            "rank_unit": UNIT,
            "run_folder": "/run/ppdeploy-agent",
            "agent_ip_allow": " ".join(["localhost", *map(self.lab.fabric_address, self.nodes)]),
            "gpus": False,
        }
        units = ("ppdeploy-agent.service", "ppdeploy-fence.service", "ppdeploy-fence.timer", "ppdeploy-rank@.service")
        return {
            "/opt/ppdeploy/agent/agent.pyz": (agent_pyz(), 0o644),
            "/opt/ppdeploy/agent/fence.sh": (_render("ppdeploy-fence.sh", values), 0o755),
            "/etc/ppdeploy/agent.json": (_render("agent.json", values), 0o644),
            "/etc/ppdeploy/agent.key": (self.key, 0o600),
            **{f"/etc/systemd/system/{unit}": (_render(unit, values), 0o644) for unit in units},
        }

    def _environment_files(self) -> dict[str, tuple[str | bytes, int]]:
        base = f"/opt/ppdeploy/venvs/{self._venv()}"
        lock = hashlib.sha256(self._lock_text().encode()).hexdigest()
        info = f"{base}/lib/python3.11/site-packages/vllm-{_VERSION}.dist-info/METADATA"
        model = "/var/lib/ppdeploy/models/fake-ffffffffffff"
        return {
            f"{base}/bin/vllm": (_FAKE.read_text(encoding="utf-8"), 0o755),
            f"{base}/.ppdeploy.json": (json.dumps({"lock": lock, "vllm": _VERSION}), 0o644),
            info: (f"Name: vllm\nVersion: {_VERSION}\n", 0o644),
            f"{model}/.ppdeploy-manifest.json": (json.dumps({"digest": "f" * 64, "files": []}), 0o644),
        }

    def _rank_files(self, node: str, order: list[str], extra: str) -> dict[str, str]:
        rank = order.index(node)
        argv = [
            f"/opt/ppdeploy/venvs/{self._venv()}/bin/vllm", "serve", "/var/lib/ppdeploy/models/fake-ffffffffffff",
            "--served-model-name", "fake", "--nnodes", str(len(order)), "--node-rank", str(rank),
            "--master-addr", self.lab.fabric_address(order[0]), "--master-port", str(MASTER_PORT),
        ]  # fmt: skip
        argv += ["--host", "127.0.0.1", "--port", str(API_PORT)] if rank == 0 else ["--headless"]
        argv += ["--shutdown-timeout", "20"]
        peers = [self.lab.fabric_address(name) for name in order if name != node]
        values = {
            "managed": "Written by a test.",
            "node_rank": rank,
            "nodes": len(order),
            "role": "worker" if rank else "head",
            "pipeline": PIPELINE,
            "stages_text": f"stage {rank}{extra}",
            "exec_start": " ".join(argv),
            "ip_allow": " ".join(["localhost", self.lab.fabric_address(node), *peers]),
            "rank_env_lines": [f"{name}={value}" for name, value in sorted(self.env.items())],
            "nccl_env_lines": ["GLOO_SOCKET_IFNAME=fab0"],
            "fabric_text": "fab0",
        }
        return {name: _render(name, values) for name in ("rank.conf", "rank.env", "nccl.env")}

    @staticmethod
    def _lock_text() -> str:
        return f"vllm=={_VERSION} --hash=sha256:{'0' * 64}\n"

    def _venv(self) -> str:
        return hashlib.sha256(self._lock_text().encode()).hexdigest()[:16]


class VllmGang(Gang):
    """The same with real vLLM ranks on a tiny model, set up by `ppdeploy apply` as anyone would."""

    long_request: ClassVar[int] = 600
    short_request: ClassVar[int] = 100

    @property
    def model(self) -> str:
        """The name that requests give."""
        return "tiny-llama"

    def install(self) -> None:
        """Boot two hosts that can install vLLM, and apply; the agents' settings are then set for the test."""
        described = LabInventory.one_pipeline(
            2, model=str(tiny_model()), vars={"ppdeploy_env": {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20"}}
        )
        inventory = up_with_vllm(self.lab, 2, inventory=described, owner=os.getpid())
        command = [sys.executable, "-m", "ppdeploy", "apply", "-i", str(inventory)]
        subprocess.run(command, check=True, timeout=1200, cwd=data_root())
        for node in self.nodes:
            self.set_settings(node, self.settings)


def _render(template: str, values: dict[str, Any]) -> str:
    environment = Environment(  # noqa: S701  (unit files, not HTML)
        loader=FileSystemLoader(data_root() / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(f"{template}.j2").render(node=values)
