"""The clusters whose rendered files are kept in this folder, and the way to write them anew.

`python -m tests.golden.cases` writes the folders; read the difference before you commit it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ppdeploy.facts import Tunnelling
from ppdeploy.plan import Plan
from ppdeploy.play import make_plan
from ppdeploy.render import render_host, render_node
from tests.factories import make_cluster
from tests.factories_plan import make_complete_plan, make_pipeline_spec, make_source, make_spec

FOLDER = Path(__file__).parent


def cpu_two_nodes() -> Plan:
    """The lab: one rank a node on cpu."""
    return make_complete_plan(
        host_vars={"node1": {"omp_threads_bind": "0"}, "node2": {"omp_threads_bind": "1"}},
        vllm_args={"compilation-config": {"mode": 2, "backend": "eager"}},
    )


def gpu_two_by_two() -> Plan:
    """Two hosts with two GPUs each and a split of the user's own: TP inside a node, PP across."""
    return make_complete_plan(
        make_cluster(2, gpus=2, gpu="RTX 4090", memory_gib=128),
        make_source("Qwen3-32B", layers=64, weight_bytes=65_500_000_000, hidden_size=5120),
        device="cuda",
        kv_cache_gib=None,
        max_model_len=32768,
        layer_partition=[33, 31],
        served_model_name="qwen",
        env={"VLLM_LOGGING_LEVEL": "INFO", "NOTE": 'a "quoted" $value'},
        vllm_args={"max-num-batched-tokens": 2048, "enable-prefix-caching": True},
        host_vars={"node2": {"gpu_memory_utilization": 0.85}},
    )


def cpu_two_pipelines() -> Plan:
    """Two pipelines of two hosts each, with two models: each head's gateway routes to both."""
    pipelines = [
        make_pipeline_spec(["node1", "node2"], "small", served_model_name="org/small"),
        make_pipeline_spec(
            ["node3", "node4"], "large", served_model_name="large", vllm_args={"lora-modules": "law=/srv/adapters/law"}
        ),
    ]
    models = {"small": make_source("small"), "large": make_source("large", layers=8, weight_bytes=16_800_000)}
    return make_plan(make_spec(*pipelines), make_cluster(4), models)


def cpu_gateways() -> Plan:
    """One pipeline, and the group `gateway`: a worker of it, and a host in no pipeline."""
    pipeline = make_pipeline_spec(["node1", "node2"])
    head, worker = pipeline.hosts
    hosts = (head.model_copy(update={"address": "192.0.2.11"}), worker)
    spec = make_spec(
        pipeline.model_copy(update={"hosts": hosts}), gateways={"node2": "192.0.2.12", "door": "192.0.2.20"}
    )
    return make_plan(spec, make_cluster(2), {"tiny": make_source()})


def cpu_encrypted() -> Plan:
    """Two nodes whose fabric goes through WireGuard, one of which has no key yet; with the host's firewall."""
    keys = {"node1": "bm9kZTEncyBwdWJsaWMga2V5LCB3aXRob3V0IHVzZSE=", "node2": None}
    facts = {
        host: one.model_copy(update={"tunnel": Tunnelling(kernel=True, tun=True, public_key=keys[host])})
        for host, one in make_cluster(2).items()
    }
    return make_complete_plan(facts, fabric_encryption="wireguard", firewall="nftables")


CASES: dict[str, Callable[[], Plan]] = {
    "cpu-encrypted": cpu_encrypted,
    "cpu-gateways": cpu_gateways,
    "cpu-two-nodes": cpu_two_nodes,
    "cpu-two-pipelines": cpu_two_pipelines,
    "gpu-two-by-two": gpu_two_by_two,
}


def rendered(plan: Plan) -> dict[str, str]:
    """Return the text of every file of every node; the release folder is called RELEASE here, its digest is a file."""
    files = {}
    for pipeline in plan.pipelines:
        for node in pipeline.nodes:
            for path, text in render_node(plan, node.host).items():
                files[f"{node.host}{path.replace(pipeline.release, 'RELEASE')}"] = text
        files[f"{pipeline.name}.digest"] = f"{pipeline.release}\n"
    for gateway in plan.gateways:
        files |= {f"{gateway.host}{path}": text for path, text in render_host(plan, gateway.host).items()}
    return files


def main() -> None:
    """Write every case's folder anew."""
    for name, make in CASES.items():
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        for path, text in rendered(make()).items():
            target = FOLDER / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


if __name__ == "__main__":
    main()
