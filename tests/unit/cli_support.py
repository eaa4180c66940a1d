"""What the tests of `ppdeploy.cli` share: a cluster on disk, and the command as a user calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.cli import main, session
from ppdeploy.facts import save_facts
from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.run import HostStats, PlayOptions, RunResult, plays
from ppdeploy.spec import Inventory
from ppdeploy.spec import load_inventory as really_load_inventory
from tests.factories import make_cluster
from tests.factories_plan import make_complete_plan

HOSTS = """\
vllm:
  children:
    tiny:
      hosts:
        node1: {ansible_host: 198.18.0.11}
        node2: {ansible_host: 198.18.0.12}
      vars:
        ppdeploy_model: MODEL
        ppdeploy_device: cpu
        ppdeploy_hf_token: hf_verysecret
"""


@dataclass(frozen=True)
class Cluster:
    """An inventory of two hosts that nobody reaches, a model, and saved facts of both hosts."""

    folder: Path

    @property
    def inventory(self) -> Path:
        return self.folder / "inventory"

    @property
    def facts(self) -> Path:
        return self.folder / "facts.json"


def make_cluster_on_disk(folder: Path) -> Cluster:
    """Write a cluster that `ppdeploy plan --facts` can plan."""
    cluster = Cluster(folder)
    cluster.inventory.mkdir()
    model = make_tiny_model(folder / "tiny")
    (cluster.inventory / "hosts.yml").write_text(HOSTS.replace("MODEL", str(model)))
    save_facts(cluster.facts, make_cluster(2))
    return cluster


@dataclass(frozen=True)
class Outcome:
    """What a call of the command did."""

    code: int
    out: str
    err: str


@dataclass
class Command:
    """The command, called in this process."""

    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: str | Path) -> Outcome:
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        said = self.capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, said.out, said.err)


@dataclass
class Play:
    """Stands in for `run_playbook`: notes how it was called and returns the result that the test set."""

    result: RunResult
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, playbook: str, **arguments: Any) -> RunResult:
        self.calls.append({"playbook": playbook, **arguments})
        return self.result

    @property
    def options(self) -> PlayOptions:
        """The options of the last call."""
        found = self.calls[-1]["options"]
        assert isinstance(found, PlayOptions)
        return found


def applied(*, smoke: dict[str, Any] | None = None, changed: int = 3, **more: Any) -> RunResult:
    """Return the result of an apply that went well, unless `more` says otherwise."""
    plan = {"plan": make_complete_plan().model_dump(mode="json"), "nodes": {}}
    facts: dict[str, dict[str, Any]] = {"node1": {plays.PLAN: plan}, "node2": {}}
    if smoke:
        facts["node1"][plays.SMOKE_REPORTS] = smoke
    values: dict[str, Any] = {
        "status": "ok",
        "return_code": 0,
        "seconds": 12.5,
        "stats": {"node1": HostStats(ok=9, changed=changed), "node2": HostStats(ok=9)},
        "facts": facts,
    }
    return RunResult(**{**values, **more})


@contextmanager
def loaded_once(inventory: Inventory) -> Iterator[None]:
    """Let the command have this inventory without running ansible-inventory again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "load_inventory", lambda *_args, **_more: inventory)
        yield


def load(cluster: Cluster) -> Inventory:
    """Read the cluster's inventory."""
    return really_load_inventory(cluster.inventory)
