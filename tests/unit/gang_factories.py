"""Answers, releases and records for the gang's unit tests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ppdeploy.agent.messages import ABSENT, RUN, Answer, Ask, GenerationId, Member, Outcome, RankView

G1 = GenerationId(1, 11)
G2 = GenerationId(2, 2**64 - 1)
A = Member("a", "machine-a", "192.0.2.1", "boot-a")
B = Member("b", "machine-b", "192.0.2.2", "boot-b")


def answer(**changes: Any) -> Answer:
    """Return a whole answer of node a."""
    values: dict[str, Any] = {
        "cluster": "c",
        "pipeline": "p",
        "node": "a",
        "machine_id": "machine-a",
        "boot_id": "boot-a",
        "loop_age": 0.1,
        "prepared": "d" * 64,
        "ready": True,
        "remark": "",
        "promised": G2,
        "started": G1,
        "rank": RankView(ABSENT),
        "outcome": Outcome(G1, -9, "killed by signal 9", own=True),
        "known": (A, B),
        "obeys": "a",
        "ask": Ask(G2, RUN, "d" * 64, (A, B), True, G1),
        "phase": "starting",
        "held": False,
        "version": "1",
    }
    return Answer(**{**values, **changes})


def make_release(root: Path, *, files: dict[str, str] | None = None, manifest: str = "f" * 64) -> Path:
    """Write a release of nodes a and b below `root` with all that it needs, and return its folder."""
    lock = "vllm==0.32.0 --hash=sha256:0\ntorch==2.13.0+cpu --hash=sha256:0\n"
    lock_digest = hashlib.sha256(lock.encode()).hexdigest()
    venv = root / "venvs" / lock_digest[:16]
    for package in ("vllm-0.32.0", "torch-2.13.0+cpu"):
        (venv / "lib/python3.11/site-packages" / f"{package}.dist-info").mkdir(parents=True)
    (venv / ".ppdeploy.json").write_text(json.dumps({"lock": lock_digest, "vllm": "0.32.0", "torch": "2.13.0+cpu"}))
    model = root / "model"
    model.mkdir()
    weights = model / "w.safetensors"
    weights.write_bytes(b"weights")
    about = weights.stat()
    entry = {
        "path": "w.safetensors",
        "size": 7,
        "sha256": hashlib.sha256(b"weights").hexdigest(),
        "mtime_ns": about.st_mtime_ns,
        "inode": about.st_ino,
    }
    (model / ".ppdeploy-manifest.json").write_text(json.dumps({"digest": manifest, "files": [entry]}))
    texts = {
        "rank.conf": (
            "[Service]\nExecStart=/usr/bin/python3 -I /opt/ppdeploy/agent/agent.pyz rank %i -- "
            f"{venv}/bin/vllm serve {model} --served-model-name m --master-port 29600 --host 127.0.0.1 --port 8000\n"
        ),
        "rank.env": 'A=1\nB="two words"\n',
        "nccl.env": "NCCL_SOCKET_IFNAME=fab0\n",
        **(files or {}),
    }
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    nodes = [
        {"host": m.name, "rank": rank, "address": m.address, "machine_id": m.machine_id, "files": hashes}
        for rank, m in enumerate((A, B))
    ]
    listed = {"vllm": "0.32.0", "lock": lock_digest, "manifest": manifest, "nodes": nodes}
    text = json.dumps(listed)
    folder = root / "p" / "releases" / hashlib.sha256(text.encode()).hexdigest()
    folder.mkdir(parents=True)
    for name, content in {**texts, "release.json": text}.items():
        (folder / name).write_text(content)
    (root / "p" / "current").symlink_to(f"releases/{folder.name}")
    return folder
