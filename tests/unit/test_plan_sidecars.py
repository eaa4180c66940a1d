"""Sidecars: what they take is left to them, their units are whole, and no release or rank depends on them."""

from __future__ import annotations

from typing import Any

import pytest

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import GpuProcess, Listener
from ppdeploy.plan import PipelinePlan
from ppdeploy.render import file_path, render_node
from ppdeploy.spec import HostVars
from tests.factories import GIB, make_cluster, make_facts, make_gpu
from tests.factories_plan import make_complete_plan, make_pipeline
from tests.unit.test_spec_variables import build

DRAFT: dict[str, Any] = {"name": "draft", "model": "/srv/models/draft", "port": 8100, "gpu_share": 0.25}


def plan(*sidecars: dict[str, Any], **wants: Any) -> PipelinePlan:
    values = {"device": "cuda", "kv_cache_gib": None, "facts": make_cluster(2, gpus=2, gpu="RTX 4090"), **wants}
    return make_pipeline(host_vars={"node2": {"sidecars": list(sidecars)}}, **values)


def share(pipeline: PipelinePlan, node: int) -> str:
    argv = pipeline.nodes[node].argv
    return argv[argv.index("--gpu-memory-utilization") + 1]


def test_the_rank_leaves_a_sidecar_its_share_on_that_host_alone() -> None:
    pipeline = plan(DRAFT)
    assert (share(pipeline, 0), share(pipeline, 1)) == ("0.92", "0.71")
    (first, second) = pipeline.memory
    assert first.others_bytes == 0
    assert second.others_bytes == pytest.approx(0.25 * second.memory_bytes, abs=1)
    assert pipeline.nodes[1].sidecars[0].memory_bytes == second.others_bytes


def test_a_running_sidecar_is_not_counted_twice() -> None:
    process = GpuProcess(pid=1, name="vllm", memory_mib=6000, unit="ppdeploy-sidecar@draft.service")
    facts = make_cluster(2, gpus=2, gpu="RTX 4090")
    facts["node2"] = make_facts(
        "node2", number=2, gpus=[make_gpu(0, processes=[process], memory_used_mib=6001), make_gpu(1)]
    )
    assert plan(DRAFT, facts=facts).release == plan(DRAFT).release


def test_a_sidecar_is_a_plain_server_on_loopback_with_its_own_gpus_and_folders() -> None:
    sidecar = {**DRAFT, "devices": [0, 1], "max_model_len": 4096, "vllm_args": {"max-num-seqs": 8}}
    (found,) = plan(sidecar).nodes[1].sidecars
    assert found.argv[1:] == (
        *("serve", "/srv/models/draft", "--served-model-name", "draft", "--host", "127.0.0.1", "--port", "8100"),
        *("--gpu-memory-utilization", "0.25", "--tensor-parallel-size", "2", "--max-model-len", "4096"),
        *("--max-num-seqs", "8"),
    )
    assert "--nnodes" not in found.argv
    assert found.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert found.env["HOME"] == "/var/lib/ppdeploy/sidecar-draft"


def test_its_unit_is_rendered_and_no_part_of_the_release() -> None:
    wants: dict[str, Any] = {"device": "cuda", "kv_cache_gib": None}
    with_one = make_complete_plan(
        make_cluster(2, gpus=1),
        host_vars={"node2": {"sidecars": [DRAFT], "gpu_memory_utilization": 0.6}},
        **wants,
    )
    without = make_complete_plan(make_cluster(2, gpus=1), host_vars={"node2": {"gpu_memory_utilization": 0.6}}, **wants)
    assert with_one.pipelines[0].release == without.pipelines[0].release
    texts = render_node(with_one, "node2")
    unit = texts["/etc/systemd/system/ppdeploy-sidecar@draft.service"]
    for line in (
        "User=ppdeploy",
        "Restart=always",
        "IPAddressDeny=any",
        "IPAddressAllow=localhost",
        "Environment=VLLM_HOST_IP=127.0.0.1",
        "StateDirectory=ppdeploy/sidecar-draft",
    ):
        assert line in unit.splitlines()
    assert "/bin/vllm serve /srv/models/draft --served-model-name draft" in unit
    assert not any("sidecar" in path for path in render_node(with_one, "node1"))
    pipeline = with_one.pipelines[0]
    assert [file_path(pipeline, file) for file in pipeline.nodes[1].files if file.sidecar] == [
        "/etc/systemd/system/ppdeploy-sidecar@draft.service"
    ]


def test_a_new_sidecar_restarts_no_rank() -> None:
    # The unit is missing on the host, as every file of the rank is not.
    work = plan(DRAFT).nodes[0].work
    assert work == plan().nodes[0].work


def test_on_cpu_it_takes_a_share_of_the_host() -> None:
    pipeline = make_pipeline(host_vars={"node2": {"sidecars": [DRAFT]}})
    assert pipeline.memory[1].others_bytes == 16 * GIB
    assert pipeline.nodes[1].sidecars[0].devices == ()


def test_what_is_left_must_do_for_the_rank() -> None:
    facts = make_cluster(2, memory_gib=6)
    (missing,) = make_pipeline(facts=facts, host_vars={"node2": {"sidecars": [{**DRAFT, "gpu_share": 0.5}]}}).blocked()
    assert (missing.id, missing.host) == ("memory", "node2")


def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(BlockedError, match=r"sidecar draft is to use GPU 2 and the host has 2 \(host node2"):
        plan({**DRAFT, "devices": [2]})


def test_a_taken_port_is_named_unless_the_sidecar_itself_has_it() -> None:
    def with_listener(unit: str | None) -> PipelinePlan:
        taken = Listener(port=8100, address="127.0.0.1", pid=7, process="nginx", command="/usr/sbin/nginx", unit=unit)
        facts = make_cluster(2, gpus=2)
        facts["node2"] = make_facts("node2", number=2, gpus=2, listeners=[taken])
        return plan(DRAFT, facts=facts)

    (refused,) = with_listener("nginx.service").blocked()
    assert "port 8100 is taken by /usr/sbin/nginx" in refused.reason
    assert "set the port in ppdeploy_sidecars to a free port" in refused.remedy
    assert not with_listener("ppdeploy-sidecar@draft.service").blocked()


def test_ports_and_names_of_a_host_do_not_meet() -> None:
    with pytest.raises(InputError, match="sidecar draft and ppdeploy_api_port have the same port 8000"):
        build(sidecars=[{**DRAFT, "port": 8000}])
    with pytest.raises(InputError, match="two sidecars are named draft"):
        build(sidecars=[DRAFT, {**DRAFT, "port": 8101}])
    with pytest.raises(InputError, match="sidecar b and sidecar draft have the same port 8100"):
        build(sidecars=[DRAFT, {**DRAFT, "name": "b"}])
    with pytest.raises(InputError, match=r'ppdeploy_sidecars sets "port" .*: set ppdeploy_api_port instead'):
        build(sidecars=[{**DRAFT, "vllm_args": {"port": 8000}}])
    assert HostVars(sidecars=(DRAFT,)).sidecars[0].devices == (0,)
