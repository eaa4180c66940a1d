"""Rendered files: quoting that systemd reads back, and a digest that moves with everything a rank runs by."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdeploy.facts import FileState, PipelineState, Release, UnitState
from ppdeploy.play import make_plan
from ppdeploy.render import env_line, exec_word, file_path, links, render_node
from tests.factories import make_cluster
from tests.factories_plan import make_complete_plan, make_pipeline_spec, make_source, make_spec

TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)


def unquote_exec(word: str) -> str:
    """Read a word as systemd does: shell-like quotes, then `%%` and `$$`."""
    (plain,) = shlex.split(word)
    return plain.replace("%%", "%").replace("$$", "$")


def unquote_env(text: str) -> str:
    """Read a value as systemd does: in double quotes a backslash escapes these four (src/basic/env-file.c)."""
    if not text.startswith('"'):
        return text
    return re.sub(r'\\(["\\`$])', r"\1", text[1:-1])


@given(TEXT)
def test_exec_words_survive_systemds_parser(word: str) -> None:
    assert unquote_exec(exec_word(word)) == word


@given(TEXT)
def test_env_values_survive_systemds_parser(value: str) -> None:
    name, _, quoted = env_line("NAME", value).partition("=")
    assert name == "NAME"
    assert unquote_env(quoted) == value


def test_every_node_shows_rank_master_address_and_headless() -> None:
    plan = make_complete_plan()
    head, worker = (render_node(plan, host) for host in ("node1", "node2"))
    release = plan.pipelines[0].release
    folder = f"/opt/ppdeploy/tiny/releases/{release}"
    assert f"{folder}/rank.conf" in head
    head_exec, worker_exec = (
        next(line for line in files[f"{folder}/rank.conf"].splitlines() if line.startswith("ExecStart="))
        for files in (head, worker)
    )
    assert "--node-rank 0" in head_exec
    assert "--host 127.0.0.1 --port 8000" in head_exec
    assert "--headless" not in head_exec
    assert "--node-rank 1" in worker_exec
    assert "--headless" in worker_exec
    assert "--port" not in worker_exec.replace("--master-port", "")
    for line in (head_exec, worker_exec):
        assert "--master-addr 198.51.100.11 --master-port 29501" in line
        assert "--nnodes 2" in line
    assert "IPAddressAllow=localhost 198.51.100.12 198.51.100.11\n" in worker[f"{folder}/rank.conf"]
    assert "GLOO_SOCKET_IFNAME=enp1s0\n" in worker[f"{folder}/nccl.env"]
    assert "NCCL_SOCKET_IFNAME==enp1s0\n" in worker[f"{folder}/nccl.env"]
    assert "VLLM_HOST_IP=198.51.100.12\n" in worker[f"{folder}/rank.env"]


def test_release_json_is_the_same_on_all_nodes_and_lists_all_files() -> None:
    plan = make_complete_plan()
    (path,) = [p for p in render_node(plan, "node1") if p.endswith("release.json")]
    texts = {render_node(plan, host)[path] for host in ("node1", "node2")}
    assert len(texts) == 1
    release = json.loads(texts.pop())
    assert [node["host"] for node in release["nodes"]] == ["node1", "node2"]
    assert set(release["nodes"][0]["files"]) == {
        "nccl.env",
        "ppdeploy-rank@.service",
        "rank.conf",
        "rank.env",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"max_model_len": 2048},
        {"env": {"VLLM_LOGGING_LEVEL": "DEBUG"}},
        {"vllm_args": {"enable-prefix-caching": False}},
        {"source": make_source("other")},
        {"layer_partition": [3, 1]},
        {"facts": make_cluster(2, fabric_name="ens1")},
    ],
)
def test_the_digest_moves_with_everything_a_rank_runs_by(change: dict[str, Any]) -> None:
    assert make_complete_plan(**change).pipelines[0].release != make_complete_plan().pipelines[0].release


def test_the_digest_does_not_move_when_a_link_renegotiates() -> None:
    slower = make_complete_plan(make_cluster(2, fabric_speed_mbit=2500))
    assert slower.pipelines[0].release == make_complete_plan().pipelines[0].release


def test_the_digest_does_not_move_with_what_the_node_happens_to_be_doing() -> None:
    busy = make_cluster(2, memory_gib=32, disks={"/opt/ppdeploy": 90.0, "/var/lib/ppdeploy/models": 90.0})
    assert make_complete_plan(busy).pipelines[0].release == make_complete_plan().pipelines[0].release


def installed(started_release: str | None = None, **unit: Any) -> Any:
    """Return facts of hosts on which all of a plan is already in place; node2's unit and last start are as given."""
    facts = make_cluster(2)
    plan = make_complete_plan(facts)
    pipeline = plan.pipelines[0]
    state = {
        "load_state": "loaded",
        "active_state": "active",
        "sub_state": "running",
        "result": "success",
        "main_pid": 100,
        "restarts": 0,
        "active_since_monotonic_us": 1,
        "unit_file_state": "disabled",
        "needs_daemon_reload": False,
        **unit,
    }
    for node in pipeline.nodes:
        texts = render_node(plan, node.host)
        files = [made_file(path, text) for path, text in texts.items()]
        folder = [file for file in files if "/releases/" in file.path]
        drop_in = list(links(pipeline).items())[1]
        link = FileState(
            path=drop_in[0],
            type="link",
            mode="0777",
            owner="root",
            group="root",
            size=1,
            sha256=None,
            target=drop_in[1],
        )
        facts[node.host] = facts[node.host].model_copy(
            update={
                "pipelines": {
                    "tiny": PipelineState(
                        current=pipeline.release,
                        previous=None,
                        started_release=(started_release if node.host == "node2" else None) or pipeline.release,
                        releases=(Release(digest=pipeline.release, files=tuple(folder)),),
                        unit_files=(*(file for file in files if "/releases/" not in file.path), link),
                        unit=UnitState(**state)
                        if node.host == "node2"
                        else UnitState(**{**state, "active_state": "active", "needs_daemon_reload": False}),
                    )
                }
            }
        )
    return facts


def made_file(path: str, text: str) -> FileState:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return FileState(
        path=path,
        type="file",
        mode="0644",
        owner="root",
        group="root",
        size=len(text),
        sha256=digest,
        target=None,
    )


def replan(facts: Any) -> Any:
    spec = make_pipeline_spec(list(facts))
    return make_plan(make_spec(spec), facts, {"tiny": make_source()}).pipelines[0]


def test_nothing_is_left_to_do_where_all_is_in_place() -> None:
    for node in replan(installed()).nodes:
        work = node.work
        assert not any((work.install_unit, work.prepare_release, work.switch_release, work.restart))


def test_one_rank_that_is_down_restarts_all_of_them() -> None:
    nodes = replan(installed(active_state="failed")).nodes
    assert [node.work.restart for node in nodes] == [True, True]
    assert not any(node.work.prepare_release for node in nodes)


def test_one_rank_that_still_runs_by_the_last_release_restarts_all_of_them() -> None:
    nodes = replan(installed(started_release="0" * 64)).nodes
    assert [node.work.restart for node in nodes] == [True, True]
    assert not any(node.work.switch_release for node in nodes)


def test_what_systemd_has_not_read_yet_is_switched_to_again() -> None:
    nodes = replan(installed(needs_daemon_reload=True)).nodes
    assert [node.work.switch_release for node in nodes] == [False, True]


def test_a_changed_file_is_written_again() -> None:
    facts = installed()
    state = facts["node2"].pipelines["tiny"]
    spoilt = tuple(f.model_copy(update={"sha256": "0" * 64}) for f in state.releases[0].files)
    release = state.releases[0].model_copy(update={"files": spoilt})
    facts["node2"] = facts["node2"].model_copy(
        update={"pipelines": {"tiny": state.model_copy(update={"releases": (release,)})}}
    )
    nodes = replan(facts).nodes
    assert [node.work.prepare_release for node in nodes] == [False, True]
    assert [node.work.restart for node in nodes] == [True, True]


def test_the_files_of_the_agent_are_rendered_and_are_no_part_of_the_release() -> None:
    plain, patient = make_complete_plan(), make_complete_plan(gang_lease=40)
    assert plain.pipelines[0].release == patient.pipelines[0].release
    for path in (
        "/etc/systemd/system/ppdeploy-agent.service",
        "/etc/systemd/system/ppdeploy-fence.service",
        "/etc/systemd/system/ppdeploy-fence.timer",
        "/opt/ppdeploy/agent/fence.sh",
    ):
        assert render_node(plain, "node2")[path].startswith(("# Written by", "#!/bin/sh\n# Written by"))
    settings = json.loads(render_node(patient, "node2")["/etc/ppdeploy/agent.json"])["settings"]
    assert (settings["lease"], settings["refused_lease"]) == (40, 40)


def test_an_agent_that_is_not_there_yet_restarts_no_rank() -> None:
    files = {file.path for file in make_complete_plan().pipelines[0].nodes[0].files if file.part == "agent"}
    assert "/etc/ppdeploy/agent.json" in files
    # `installed` has the files of the ranks and none of the agent's.
    assert [node.work.restart for node in replan(installed()).nodes] == [False, False]


def test_paths_of_release_files_carry_the_digest() -> None:
    pipeline = make_complete_plan().pipelines[0]
    paths = [file_path(pipeline, file) for file in pipeline.nodes[0].files]
    assert sum(pipeline.release in path for path in paths) == 4
