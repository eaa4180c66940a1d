"""`vllm_rank` runs the planned release: as its own user, with the planned command, open to its peers only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any

from ppdeploy.agent.command_line import with_option
from ppdeploy.agent.ready import master_port
from ppdeploy.plan.types import NodePlan, PipelinePlan
from ppdeploy.render import links, release_folder
from tests.testinfra.conftest import exposure

#: What systemd and the login database add to what the plan says.
_OF_SYSTEMD = {
    *("PATH", "LANG", "USER", "LOGNAME", "SHELL", "PWD", "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID"),
    *("STATE_DIRECTORY", "CACHE_DIRECTORY", "TMPDIR", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE"),
}


def test_the_user_can_neither_log_in_nor_gain_anything(host: Any) -> None:
    user = host.user("ppdeploy")
    assert user.shell == "/usr/sbin/nologin"
    assert 0 < user.uid < 1000
    assert user.groups == ["ppdeploy"]
    assert user.password in ("!", "*", "!*", "!!")


def test_nobody_else_can_write_to_what_the_ranks_use(host: Any) -> None:
    # Links have a mode of 0777 that means nothing, and a virtual environment may consist of links.
    found = host.check_output(
        "find /opt/ppdeploy /var/lib/ppdeploy /var/cache/ppdeploy -path /var/cache/ppdeploy/uv -prune "
        "-o -not -type l -perm /022 -print"
    )
    assert found == ""


def test_files_are_those_that_render_writes(host: Any, files: dict[str, tuple[Any, str]]) -> None:
    for path, (planned, text) in files.items():
        file = host.file(path)
        assert file.exists, path
        assert (file.user, file.group, f"{file.mode:04o}") == (planned.owner, planned.group, planned.mode), path
        assert file.sha256sum == hashlib.sha256(text.encode()).hexdigest(), path


def test_the_release_folder_has_these_files_and_no_others(
    host: Any, pipeline: PipelinePlan, files: dict[str, tuple[Any, str]]
) -> None:
    folder = release_folder(pipeline)
    planned = [path.removeprefix(f"{folder}/") for path in files if path.startswith(f"{folder}/")]
    assert sorted(host.file(folder).listdir()) == sorted(planned)


def test_the_links_lead_to_the_planned_release(host: Any, pipeline: PipelinePlan) -> None:
    found = {path: host.check_output("readlink %s", path) for path in links(pipeline)}
    assert found == links(pipeline)


def test_the_rank_is_up_and_only_its_agent_starts_it(host: Any, unit: Mapping[str, str], node: NodePlan) -> None:
    assert unit["ActiveState"] == "active", unit["journal"]
    assert unit["UnitFileState"] == "static"
    # What would start it at the next boot; systemd itself looks only when it is told to.
    assert host.check_output("find /etc/systemd/system -path '*.wants/*' -name %s", node.unit) == ""


def test_systemd_never_starts_it_again_by_itself(unit: Mapping[str, str]) -> None:
    # A rank that comes back alone never rejoins its gang.
    assert unit["Restart"] == "no"


def test_systemd_runs_the_unit_that_lies_there(unit: Mapping[str, str], pipeline: PipelinePlan, node: NodePlan) -> None:
    assert unit["NeedDaemonReload"] == "no"
    assert unit["FragmentPath"] in {file.path for file in node.files}
    assert unit["DropInPaths"] == next(path for path in links(pipeline) if path.endswith(".d/release.conf"))


def test_only_loopback_and_peers_may_talk_to_the_rank(unit: Mapping[str, str], node: NodePlan) -> None:
    allowed = {ip_network(text) for text in unit["IPAddressAllow"].split()}
    fabric = () if node.fabric.interface == "lo" else (node.fabric.address, *node.peers)
    assert allowed == {ip_network("127.0.0.0/8"), ip_network("::1/128"), *map(ip_network, fabric)}
    assert {ip_network(text) for text in unit["IPAddressDeny"].split()} == {ip_network("0.0.0.0/0"), ip_network("::/0")}


def test_the_rank_is_unprivileged(host: Any, unit: Mapping[str, str]) -> None:
    status = host.file(f"/proc/{unit['MainPID']}/status").content_string
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    uid = str(host.user("ppdeploy").uid)
    assert fields["Uid"].split() == [uid] * 4
    assert int(fields["CapBnd"], 16) == 0
    assert fields["NoNewPrivs"] == "1"


def test_the_rank_is_hardly_exposed(host: Any, node: NodePlan) -> None:
    assert exposure(host, node.unit) <= 2.0


def test_the_rank_has_its_filters(host: Any, unit: Mapping[str, str]) -> None:
    status = host.file(f"/proc/{unit['MainPID']}/status").content_string
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Seccomp"] == "2"
    assert unit["DevicePolicy"] == "closed"
    assert unit["LimitMEMLOCK"] == "infinity"


def test_the_running_command_is_the_planned_one(
    host: Any, unit: Mapping[str, str], pipeline: PipelinePlan, node: NodePlan
) -> None:
    words = host.file(f"/proc/{unit['MainPID']}/cmdline").content_string.rstrip("\0").split("\0")
    planned = with_option(list(node.argv), "--master-port", str(_master_port(host, pipeline)))
    # The kernel puts the script's interpreter in front.
    assert words[-len(planned) :] == planned


def test_the_running_environment_is_the_planned_one(environment: dict[str, str], node: NodePlan) -> None:
    planned = {**node.rank_env, **node.nccl_env}
    assert {name: value for name, value in environment.items() if name not in _OF_SYSTEMD - set(planned)} == planned


def test_the_api_is_on_the_heads_loopback_only(host: Any, pipeline: PipelinePlan, node: NodePlan) -> None:
    expected = {f"tcp://127.0.0.1:{pipeline.api_port}"} if node.role == "head" else set()
    assert _listening(host, pipeline.api_port) == expected


def test_the_master_port_is_the_heads(host: Any, pipeline: PipelinePlan, node: NodePlan) -> None:
    gang = node.role == "head" and bool(node.peers)
    # torch's store listens on every address; the unit's address filter is what guards it.
    assert bool(_listening(host, _master_port(host, pipeline))) == gang


def _master_port(host: Any, pipeline: PipelinePlan) -> int:
    """Return the port of the running generation, which the consumed ticket names."""
    consumed = json.loads(host.file("/run/ppdeploy-agent/consumed.json").content_string)
    return master_port(pipeline.master_port, consumed["generation"][0])


def _listening(host: Any, port: int) -> set[str]:
    found = host.socket.get_listening_sockets()
    return {name for name in found if name.startswith("tcp://") and name.endswith(f":{port}")}
