"""The proof of the proof: testinfra finds what is broken on a host, names it, and finds nothing else wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from ppdeploy.paths import data_root
from ppdeploy.plan import Plan
from ppdeploy.plan.driver import PREFERENCES
from ppdeploy.plan.firewall import UNIT as FIREWALL_UNIT
from ppdeploy.plan.tuning import CONFIG
from ppdeploy.plan.tunnel import FOLDER as TUNNEL
from ppdeploy.render import release_folder
from tests.lab.cluster import PIPELINE, Cluster, no_change

UNIT = f"ppdeploy-rank@{PIPELINE}.service"
CURRENT = f"/opt/ppdeploy/{PIPELINE}/current"
KEPT = f"/opt/ppdeploy/{PIPELINE}/kept"


@dataclass(frozen=True)
class Break:
    """What is done to node2, how it is undone, and the tests that must find it there.

    The shell has $release, $venv, $model and $fabric of the plan.
    """

    role: str
    what: str
    do: str
    undo: str
    found_by: tuple[str, ...]


WEIGHTS = "$model/model.safetensors"
TORCH = "cd $venv/lib/python3*/site-packages/torch-*.dist-info"
WANTS = f"/etc/systemd/system/multi-user.target.wants/{UNIT}"
LISTENS = "ss -Hltn | grep -q $fabric:8000"

BREAKS = (
    Break(
        "preflight",
        "the host is a clone",
        "cp -a /etc/machine-id /root/kept-id; echo 00000000000000000000000000000000 > /etc/machine-id",
        "cp -a /root/kept-id /etc/machine-id; rm /root/kept-id",
        ("test_preflight::test_the_host_is_the_one_that_was_planned_for",),
    ),
    Break(
        "nccl_env",
        "NCCL is sent to another NIC",
        "cp -a $release/nccl.env /root/kept-nccl; sed -i s/=fab0/=host0/ $release/nccl.env",
        "cp -a /root/kept-nccl $release/nccl.env; rm /root/kept-nccl",
        ("test_nccl_env::test_its_file_is_as_planned", "test_vllm_rank::test_files_are_those_that_render_writes"),
    ),
    Break(
        "nic_tuning",
        "what is tuned at boot is still there, and the plan tunes nothing",
        f"echo '{{}}' > {CONFIG}",
        f"rm {CONFIG}",
        ("test_nic_tuning::test_its_files_are_as_planned_and_no_others_are_there",),
    ),
    Break(
        "nvidia_driver",
        "apt is told to keep a driver that nothing installed",
        f"echo 'Package: *nvidia*' > {PREFERENCES}",
        f"rm {PREFERENCES}",
        ("test_nvidia_driver::test_its_files_are_as_planned_and_no_others_are_there",),
    ),
    Break(
        "vllm_install",
        "another torch lies in the environment",
        f"{TORCH}; mv METADATA kept-METADATA; sed 's/^Version: .*/Version: 1.0.0/' kept-METADATA > METADATA",
        f"{TORCH}; mv -f kept-METADATA METADATA",
        ("test_vllm_install::test_the_versions_are_those_of_the_lock",),
    ),
    Break(
        "model_store",
        "a byte of the weights is another one, with size and time as before",
        f"cp -a {WEIGHTS} /root/kept-weights; printf x | dd of={WEIGHTS} bs=1 seek=4000000 conv=notrunc status=none; "
        f"touch -r /root/kept-weights {WEIGHTS}",
        f"cat /root/kept-weights > {WEIGHTS}; touch -r /root/kept-weights {WEIGHTS}; rm /root/kept-weights",
        ("test_model_store::test_every_file_still_has_the_content_that_was_checked",),
    ),
    Break(
        "vllm_rank",
        "the user may log in",
        "usermod --shell /bin/bash ppdeploy",
        "usermod --shell /usr/sbin/nologin ppdeploy",
        ("test_vllm_rank::test_the_user_can_neither_log_in_nor_gain_anything",),
    ),
    Break(
        "vllm_rank",
        "a file of the release is open to all",
        "chmod 0666 $release/rank.conf",
        "chmod 0644 $release/rank.conf",
        (
            "test_vllm_rank::test_nobody_else_can_write_to_what_the_ranks_use",
            "test_vllm_rank::test_files_are_those_that_render_writes",
        ),
    ),
    Break(
        "vllm_rank",
        "the drop-in comes from elsewhere",
        f"cp -a $release $(dirname $release)/another; mv {CURRENT} {KEPT}; ln -s releases/another {CURRENT}",
        f"mv -T {KEPT} {CURRENT}; rm -r $(dirname $release)/another",
        (
            "test_vllm_rank::test_the_links_lead_to_the_planned_release",
            # It shows what it would start next.
            "test_gang_agent::test_the_agent_is_of_this_pipeline_and_holds_a_running_rank",
        ),
    ),
    Break(
        "vllm_rank",
        "systemd starts the rank at boot, whatever its gang does",
        f"mkdir -p $(dirname {WANTS}); ln -s ../ppdeploy-rank@.service {WANTS}",
        f"rm {WANTS}",
        ("test_vllm_rank::test_the_rank_is_up_and_only_its_agent_starts_it",),
    ),
    Break(
        "gang_agent",
        "everybody reads the key",
        "chmod 0644 /etc/ppdeploy/agent.key",
        "chmod 0600 /etc/ppdeploy/agent.key",
        ("test_gang_agent::test_only_root_reads_the_key",),
    ),
    Break(
        "gang_agent",
        "the agent does not come up at boot",
        "systemctl disable --quiet ppdeploy-agent",
        "systemctl enable --quiet ppdeploy-agent",
        ("test_gang_agent::test_the_agent_is_the_controllers_own_and_runs",),
    ),
    Break(
        "firewall",
        "a unit of a table that nobody asked for",
        f"touch {FIREWALL_UNIT}",
        f"rm {FIREWALL_UNIT}",
        ("test_firewall::test_its_files_are_as_planned_and_no_others_are_there",),
    ),
    Break(
        "fabric_encryption",
        "keys of a tunnel that nobody asked for",
        f"mkdir -p {TUNNEL}; touch {TUNNEL}/private.key",
        f"rm -r {TUNNEL}",
        ("test_fabric_encryption::test_its_files_are_as_planned_and_no_others_are_there",),
    ),
    Break(
        "gateway",
        "a worker has the folder of a gateway",
        "mkdir -p /etc/ppdeploy/gateway",
        "rmdir /etc/ppdeploy/gateway",
        ("test_gateway::test_its_files_are_as_planned",),
    ),
    Break(
        "vllm_rank",
        "another program listens on the API's port",
        "systemd-run --quiet --collect --unit=stranger python3 -m http.server --bind $fabric 8000; "
        f"for _ in $(seq 100); do {LISTENS} && break; sleep 0.1; done; {LISTENS}",
        "systemctl stop stranger",
        ("test_vllm_rank::test_the_api_is_on_the_heads_loopback_only",),
    ),
)


@pytest.fixture(scope="module")
def plan(served: Cluster) -> Plan:
    """The plan of the cluster as it is before anything is broken."""
    return served.plan()


@pytest.fixture
def plan_file(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan.model_dump_json())
    return path


@pytest.fixture
def broken(served: Cluster, plan: Plan) -> Iterator[set[str]]:
    """Break all of it on node2 at once, give the tests that must fail, and make it whole again."""
    pipeline, node = plan.node("node2")
    variables = (
        f"release={release_folder(pipeline)} venv={pipeline.environment.directory} "
        f"model={node.model.directory} fabric={node.fabric.address}; "
    )
    with ExitStack() as undoing:
        expected = set()
        for one in BREAKS:
            undoing.callback(served.out, "node2", variables + one.undo)
            served.out("node2", variables + one.do)
            expected |= {f"{test} node2" for test in one.found_by}
        yield expected


def test_each_broken_thing_is_found_on_its_host_and_nothing_else(
    served: Cluster, plan_file: Path, broken: set[str]
) -> None:
    done, failed = served.testinfra(plan=plan_file)
    assert failed == broken, done.said
    for name in ("rank.conf", "model.safetensors", "/bin/bash", "releases/another"):
        assert name in done.out, done.said


def test_every_role_that_an_apply_runs_has_a_broken_host() -> None:
    folder = data_root() / "playbooks"
    plays = yaml.safe_load((folder / "site.yml").read_text())
    imported = [one["ansible.builtin.import_playbook"] for one in plays if "ansible.builtin.import_playbook" in one]
    plays += [play for name in imported for play in yaml.safe_load((folder / name).read_text())]
    roles = {entry["role"] for play in plays for entry in play.get("roles", ())}
    # This cluster has no sidecar, so that role leaves nothing here that could be broken.
    assert {one.role for one in BREAKS} == roles - {"sidecars"}
    assert {path.stem for path in (data_root() / "tests" / "testinfra").glob("test_*.py")} == {
        f"test_{role}" for role in roles
    }


def test_what_was_broken_is_whole_again(served: Cluster) -> None:
    done = served.ppdeploy("apply", "--check", "--json")
    assert done.code == 0, done.said
    assert done.changed() == no_change()


@pytest.mark.long
def test_a_rank_that_died_beside_a_file_of_another_content_stays_down_and_is_found_and_named(
    served: Cluster, plan_file: Path
) -> None:
    pids = served.pids()
    edit = f"cp -a {CURRENT}/rank.env /root/kept-env; sed -i '$a VLLM_HOST_IP=198.18.0.12' {CURRENT}/rank.env"
    served.out("node2", edit)
    try:
        served.out("node2", f"kill -9 {pids['node2']}")
        for _ in range(60):
            if "rank.env differs" in served.status()["remark"]:
                break
            time.sleep(1)
        done, failed = served.testinfra("test_vllm_rank", plan=plan_file)
    finally:
        served.out("node2", f"cp -a /root/kept-env {CURRENT}/rank.env; rm /root/kept-env")
    assert "test_vllm_rank::test_the_rank_is_up_and_only_its_agent_starts_it node2" in failed, done.said
    assert "test_vllm_rank::test_files_are_those_that_render_writes node2" in failed, done.said
    assert "rank.env" in done.out

    again = served.ppdeploy("apply", "--json")
    assert again.code == 0, again.said
    assert [one["serves"] for one in again.result["pipelines"]] == [True]
    # A lone rank never rejoins: the head's, which was left alone, is another one too.
    assert all(served.pids()[node] not in (0, pid) for node, pid in pids.items())
