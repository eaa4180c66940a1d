"""What a node must look like, for any inventory:

    pytest tests/testinfra --hosts=ansible://vllm,ansible://gateway --ansible-inventory=inventory/cluster

What is expected is the plan, as `ppdeploy plan --json` prints it now, or as it printed it into the file of `--plan`.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.plan.types import GatewayPlan, NodePlan, PipelinePlan, Plan, PlannedFile
from ppdeploy.render import file_path, render_host, render_node
from ppdeploy.run.environment import ansible_environment

_SOCKETS = pytest.StashKey[Path]()
_PLAN = pytest.StashKey[Plan | str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "what `ppdeploy plan --json` printed; without it, the plan is made anew"
    parser.getgroup("testinfra").addoption("--plan", metavar="FILE", default=None, help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("hosts") or not config.getoption("ansible_inventory"):
        raise pytest.UsageError("name the hosts: --hosts=ansible://vllm --ansible-inventory=inventory/cluster")
    # Short, since a socket's path has at most 107 characters.
    folder = config.stash[_SOCKETS] = Path(tempfile.mkdtemp(prefix="ppt-"))
    os.environ.update(ansible_environment())
    # testinfra runs ssh itself, as inventory and ansible.cfg say, and keeps no connection open unless told where.
    settings = configparser.RawConfigParser()
    settings.read(os.environ["ANSIBLE_CONFIG"], encoding="utf-8")
    settings.set("ssh_connection", "control_path", "%(directory)s/%%C")
    settings.add_section("persistent_connection")
    settings.set("persistent_connection", "control_path_dir", str(folder))
    with (folder / "ansible.cfg").open("w", encoding="utf-8") as file:
        settings.write(file)
    os.environ["ANSIBLE_CONFIG"] = str(folder / "ansible.cfg")
    # Whose environment a rank has, and who may write to its files, is for root to see.
    os.environ["ANSIBLE_BECOME"] = "True"


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SOCKETS in config.stash:
        shutil.rmtree(config.stash[_SOCKETS])


def exposure(host: Any, unit: str) -> float:
    """Return how exposed systemd finds a unit as it is loaded, drop-ins included, from 0 to 10."""
    text = host.check_output("systemd-analyze security --no-pager %s", unit)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", text)
    assert found, text
    return float(found[1])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a gateway outside of all pipelines there is a gateway, and nothing of a node to be tested."""
    made = _made(config)
    outside = {one.host for one in made.gateways} if isinstance(made, Plan) else set()
    dropped = [item for item in items if item.path.stem != "test_gateway" and _host_of(item) in outside]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


def _host_of(item: pytest.Item) -> str:
    """Return the host that a test looks at; empty: none."""
    host: Any = item.callspec.params.get("_testinfra_host") if isinstance(item, pytest.Function) else None
    return str(host.backend.get_hostname()) if host else ""


def _made(config: pytest.Config) -> Plan | str:
    """Return the plan of the whole inventory, made once, or why there is none."""
    if _PLAN not in config.stash:
        config.stash[_PLAN] = _make(config)
    return config.stash[_PLAN]


def _make(config: pytest.Config) -> Plan | str:
    saved = config.getoption("--plan")
    if saved:
        return Plan.model_validate_json(Path(saved).read_text(encoding="utf-8"))
    inventory = config.getoption("ansible_inventory")
    command = [sys.executable, "-m", "ppdeploy", "plan", "-i", inventory, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # A plan that is blocked is printed too: what is wrong with the hosts is for the tests to find.
    return Plan.model_validate_json(done.stdout) if done.stdout.startswith("{") else done.stderr


@pytest.fixture(scope="session")
def plan(request: pytest.FixtureRequest) -> Plan:
    """The plan of the whole inventory."""
    made = _made(request.config)
    if isinstance(made, str):
        pytest.fail(f"there is no plan to test against: {made}", pytrace=False)
    return made


def _planned(host: Any, plan: Plan) -> tuple[PipelinePlan, NodePlan]:
    return plan.node(host.backend.get_hostname())


@pytest.fixture(scope="module")
def pipeline(host: Any, plan: Plan) -> PipelinePlan:
    """The pipeline that the host is a node of."""
    return _planned(host, plan)[0]


@pytest.fixture(scope="module")
def node(host: Any, plan: Plan) -> NodePlan:
    """What was decided for the host."""
    return _planned(host, plan)[1]


@pytest.fixture(scope="module")
def files(plan: Plan, pipeline: PipelinePlan, node: NodePlan) -> dict[str, tuple[Any, str]]:
    """Every file of the node by its path: what the plan says of it, and its text as `ppdeploy render` writes it."""
    texts = render_node(plan, node.host)
    return {path: (file, texts[path]) for file in node.files for path in [file_path(pipeline, file)]}


@pytest.fixture(scope="module")
def gateway(host: Any, plan: Plan) -> GatewayPlan | None:
    """What was decided for the gateway of the host, a node or not; None: it has none."""
    outside = plan.outside(host.backend.get_hostname())
    return outside.gateway if outside else _planned(host, plan)[1].gateway


@pytest.fixture(scope="module")
def gateway_files(host: Any, plan: Plan) -> dict[str, tuple[PlannedFile, str]]:
    """Every file of the host's gateway by its path: what the plan says of it, and its text."""
    name = host.backend.get_hostname()
    outside, texts = plan.outside(name), render_host(plan, name)
    files = outside.files if outside else _planned(host, plan)[1].files
    return {file.path: (file, texts[file.path]) for file in files if file.part == "gateway"}


@pytest.fixture(scope="module")
def unit(host: Any, node: NodePlan) -> Mapping[str, str]:
    """What systemd knows of the node's rank, its journal included where it is down."""
    properties: dict[str, str] = host.service(node.unit).systemd_properties
    if properties.get("ActiveState") != "active":
        journal = host.run("journalctl --no-pager --output=short-iso --lines=40 --unit=%s", node.unit)
        properties["journal"] = f"the journal of {node.unit} on {node.host} ends with:\n{journal.stdout}"
    return properties


@pytest.fixture(scope="module")
def environment(host: Any, unit: Mapping[str, str]) -> dict[str, str]:
    """The environment that the rank process was started with and still has."""
    if unit["MainPID"] == "0":
        pytest.fail(f"no rank runs; {unit.get('journal', '')}", pytrace=False)
    text = host.file(f"/proc/{unit['MainPID']}/environ").content_string
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
