"""The clusters whose rendered files are kept in this folder, and the way to write them anew.

`python -m tests.golden.cases` writes the folders; read the difference before you commit it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ppdeploy.plan import Plan
from ppdeploy.render import render_node
from tests.factories import make_cluster
from tests.factories_plan import make_complete_plan, make_source

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


CASES: dict[str, Callable[[], Plan]] = {"cpu-two-nodes": cpu_two_nodes, "gpu-two-by-two": gpu_two_by_two}


def rendered(plan: Plan) -> dict[str, str]:
    """Return the text of every file of every node; the release folder is called RELEASE here, its digest is a file."""
    files = {}
    for pipeline in plan.pipelines:
        for node in pipeline.nodes:
            for path, text in render_node(plan, node.host).items():
                files[f"{node.host}{path.replace(pipeline.release, 'RELEASE')}"] = text
        files[f"{pipeline.name}.digest"] = f"{pipeline.release}\n"
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
