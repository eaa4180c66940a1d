"""`gang_agent` runs the agent of this controller, with a key that only root reads, for peers and loopback to ask."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ppdeploy.agent.build import agent_pyz
from ppdeploy.plan.types import NodePlan, PipelinePlan
from tests.testinfra.conftest import exposure

PORT = 29500


def test_the_agent_is_the_controllers_own_and_runs(host: Any) -> None:
    file = host.file("/opt/ppdeploy/agent/agent.pyz")
    assert file.sha256sum == hashlib.sha256(agent_pyz()).hexdigest()
    assert (file.user, file.group, f"{file.mode:04o}") == ("root", "root", "0644")
    service = host.service("ppdeploy-agent.service")
    assert service.is_running, host.run("journalctl --no-pager --lines=40 --unit=ppdeploy-agent").stdout
    assert service.is_enabled


def test_the_fence_watches_the_agent(host: Any) -> None:
    timer = host.service("ppdeploy-fence.timer")
    assert timer.is_running
    assert timer.is_enabled
    assert f"{host.file('/opt/ppdeploy/agent/fence.sh').mode:04o}" == "0755"
    beat = float(host.file("/run/ppdeploy-agent/heartbeat").content_string)
    uptime = float(host.file("/proc/uptime").content_string.split()[0])
    assert 0 <= uptime - beat < 30


def test_only_root_reads_the_key(host: Any) -> None:
    key = host.file("/etc/ppdeploy/agent.key")
    assert (key.user, key.group, f"{key.mode:04o}") == ("root", "root", "0600")
    assert key.size >= 64


def test_only_root_can_change_what_was_promised_and_ordered(host: Any) -> None:
    for folder, mode in (("/run/ppdeploy-agent", "0755"), ("/var/lib/ppdeploy/agent", "0700")):
        place = host.file(folder)
        assert (place.user, place.group, f"{place.mode:04o}") == ("root", "root", mode), folder


def test_the_agent_answers_on_the_fabric_and_on_loopback_only(host: Any, node: NodePlan) -> None:
    # A tunnel has the same number with UDP.
    sockets = host.socket.get_listening_sockets()
    found = {name for name in sockets if name.startswith("tcp://") and name.endswith(f":{PORT}")}
    assert found == {f"tcp://{address}:{PORT}" for address in node.agent.listen}
    assert {"127.0.0.1", node.fabric.address} <= set(node.agent.listen)


def test_agent_and_fence_are_hardly_exposed(host: Any, node: NodePlan) -> None:
    # nvidia-smi, which the agent asks, needs the GPUs' nodes: 0.2 for them.
    assert exposure(host, "ppdeploy-agent.service") <= (1.7 if node.agent.device == "cuda" else 1.5)
    assert exposure(host, "ppdeploy-fence.service") <= 1.0


def test_the_agent_has_no_capability(host: Any) -> None:
    pid = host.service("ppdeploy-agent.service").systemd_properties["MainPID"]
    status = host.file(f"/proc/{pid}/status").content_string
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapBnd"], 16) == 0
    # Of its own namespace of users: it counts for nothing outside.
    assert host.file(f"/proc/{pid}/ns/user").linked_to != host.file("/proc/1/ns/user").linked_to


def test_the_agent_is_of_this_pipeline_and_holds_a_running_rank(
    host: Any, pipeline: PipelinePlan, node: NodePlan
) -> None:
    status = json.loads(host.check_output("python3 -I /opt/ppdeploy/agent/agent.pyz status"))
    own = status["own"]
    assert (own["pipeline"], own["node"], own["prepared"]) == (pipeline.name, node.host, pipeline.release)
    assert own["rank"]["state"] == "running", status["remark"]
    assert own["rank"]["release"] == pipeline.release
    assert status["phase"] == ("serving" if node.role == "head" else "worker")
