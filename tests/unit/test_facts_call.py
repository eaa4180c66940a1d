"""The node module as Ansible calls it, on this machine: one JSON in, one out, only reading, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from plugins.modules import ppdeploy_facts as module
from ppdeploy.facts import SCHEMA_VERSION, NodeFacts

MODULE = Path(__file__).parents[2] / "plugins" / "modules" / "ppdeploy_facts.py"


def call(arguments: dict[str, Any], *, check: bool = False, **environment: str) -> dict[str, Any]:
    """Run the module in a process of its own and return what it printed."""
    text = json.dumps({"ANSIBLE_MODULE_ARGS": {**arguments, "_ansible_check_mode": check}})
    done = subprocess.run(
        [sys.executable, MODULE],
        input=text,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    assert "Traceback" not in done.stderr + done.stdout
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if result.get("failed") else 0)
    return result


def test_facts_of_this_machine_are_facts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    result = call(
        {
            "paths": [str(tmp_path / "later")],
            "ports": [1, 65535],
            "pipelines": ["tiny"],
            "files": [str(tmp_path / "file"), str(tmp_path / "absent")],
            "venvs": True,
            "models": True,
            "models_dir": str(tmp_path),
            "peers": [{"address": "127.0.0.1"}],
            "controller_time": 1_000_000_000.5,
        }
    )
    assert result["changed"] is False
    facts = NodeFacts.from_module("here", result)
    assert facts.schema_version == SCHEMA_VERSION == module.SCHEMA_VERSION
    assert facts.clock.offset_s == pytest.approx(facts.clock.node_time - 1_000_000_000.5, abs=0.001)
    assert facts.disks[0].measured_at == str(tmp_path)
    assert facts.files[str(tmp_path / "absent")] is None
    assert facts.nic("lo") is not None
    assert facts.pipelines["tiny"].current is None
    assert [route.peer for route in facts.peer_routes] == ["127.0.0.1"]
    assert sorted(tmp_path.rglob("*")) == before


def test_without_arguments_and_in_check_mode_it_answers_alike() -> None:
    plain, checked = call({}), call({}, check=True)
    NodeFacts.from_module("here", plain)
    changing = {"clock", "elapsed_s", "memory", "problems"}
    assert {k: v for k, v in plain["facts"].items() if k not in changing} == {
        k: v for k, v in checked["facts"].items() if k not in changing
    }


def test_each_empty_answer_has_its_reason() -> None:
    facts = NodeFacts.from_module("here", call({"pipelines": ["tiny"]}))
    for fact, empty in (
        ("gpus", not facts.gpus),
        ("os.systemd_version", facts.os.systemd_version is None),
        ("identity.addresses", facts.identity.addresses is None),
        ("rsync_version", facts.rsync_version is None),
        ("pipelines.unit", facts.pipelines["tiny"].unit is None),
    ):
        assert (facts.problem(fact) is not None) == empty, fact


def test_a_host_without_any_tool_still_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module finds no program at all: each fact that needs one is missing with a reason."""
    monkeypatch.setattr(module, "find_tool", lambda _name: None)
    monkeypatch.setattr(module, "is_program", lambda _path: False)
    params = {
        "paths": [str(tmp_path)],
        "ports": [],
        "pipelines": ["tiny"],
        "files": [],
        "venvs": False,
        "models": False,
        "models_dir": str(tmp_path),
        "driver": True,
        "peers": [{"address": "192.0.2.9"}],
        "controller_time": None,
    }
    facts = NodeFacts.from_module("bare", {"facts": json.loads(json.dumps(module.collect(params)))})
    assert facts.problem("gpus") == "nvidia-smi is not installed"
    assert facts.problem("nics.addresses") == "ip is not installed"
    assert facts.peer_routes[0].problem == "ip is not installed"
    assert facts.driver is not None
    assert (facts.driver.manager, facts.driver.packages, facts.driver.lock) == (None, (), None)
    assert facts.problem("rsync_version") == "rsync is not installed"
    assert set(facts.tools.values()) == {None}
    assert facts.nics, "interfaces come from /sys"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ports": [70000]}, "ports: 70000 is not a TCP port: give a number from 1 to 65535"),
        ({"ports": ["http"]}, "ports"),
        ({"paths": ["opt/ppdeploy"]}, "paths: 'opt/ppdeploy' is not an absolute path"),
        ({"files": ["/etc/\0"]}, "files: "),
        ({"models_dir": "models"}, "models_dir: 'models' is not an absolute path"),
        ({"pipelines": ["../etc"]}, "pipelines: '../etc' is not a pipeline's name"),
        ({"pipelines": ["Tiny"]}, "pipelines: 'Tiny' is not a pipeline's name"),
        ({"peers": [{"address": "node2"}]}, "peers: 'node2' is not an IP address"),
        ({"peers": [{"address": "-4"}]}, "peers: '-4' is not an IP address"),
        ({"peers": [{}]}, "missing required arguments: address"),
        ({"controller_time": "noon"}, "controller_time"),
        ({"surprise": 1}, "Unsupported parameters"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments: dict[str, Any], said: str) -> None:
    result = call(arguments)
    assert result["failed"] is True
    assert said in result["msg"]
    assert "\n" not in result["msg"]


def test_a_file_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    result = call({"files": [str(loop), str(tmp_path)], "paths": [str(loop / "x")]})
    facts = NodeFacts.from_module("here", result)
    folder, link = facts.files[str(tmp_path)], facts.files[str(loop)]
    assert folder is not None
    assert link is not None
    assert (folder.type, link.type) == ("directory", "link")
    assert facts.disks[0].total_bytes > 0


def test_every_argument_is_documented() -> None:
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    for name, option in documented.items():
        assert option["description"], name
    refused = call({"surprise": 1})["msg"]
    supported = refused.split("Supported parameters include: ")[1].rstrip(".").split(", ")
    assert sorted(documented) == sorted(supported)
    yaml.safe_load(module.EXAMPLES)
    yaml.safe_load(module.RETURN)
