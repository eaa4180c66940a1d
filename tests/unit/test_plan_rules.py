"""Each rule on a pipeline that breaks it, and on one that keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from packaging.version import Version

from ppdeploy.plan.rules import RULES, Heads, HostGpus, Situation, broken_rules
from ppdeploy.plan.support import MIN_CAPABILITY, UNKNOWN_CAPABILITY, pipeline_support
from tests.unit.cli_support import Command


def gpu(capability: tuple[int, int] = (8, 9), driver: str = "580.95.05") -> HostGpus:
    return HostGpus("NVIDIA GeForce RTX 4090", capability, driver)


def situation(**changes: Any) -> Situation:
    values: dict[str, Any] = {
        "pipeline": "qwen",
        "device": "cuda",
        "vllm_version": Version("0.33.0"),
        "nodes": 2,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "vllm_args": {},
        "env": {},
        "architecture": "Qwen3ForCausalLM",
        "dtype": "bfloat16",
        "heads": Heads(query=64, key_value=8, widths=(25600,)),
        "gpus": {"node1": gpu(), "node2": gpu()},
    }
    return Situation(**{**values, **changes})


def cpu(**changes: Any) -> dict[str, Any]:
    return {"device": "cpu", "gpus": {}, "tensor_parallel_size": 1, **changes}


def speculative(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative-config": {"method": method, **more}}


OLD = {"node1": gpu(), "node2": gpu((7, 5))}

BROKEN: list[tuple[str, Mapping[str, Any]]] = [
    ("vllm-no-nnodes", {"vllm_version": Version("0.11.2")}),
    ("vllm-broken-multinode", {"vllm_version": Version("0.17.0")}),
    ("vllm-broken-multinode", {"vllm_version": Version("0.18.1")}),
    ("vllm-port-race", {"vllm_version": Version("0.27.9")}),
    ("driver-cuda13", {"gpus": {"node1": gpu(driver="575.57.08")}}),
    ("tp-heads", {"tensor_parallel_size": 3, "heads": Heads(query=64)}),
    ("tp-kv-heads", {"tensor_parallel_size": 6, "heads": Heads(key_value=8)}),
    ("tp-linear-heads", {"tensor_parallel_size": 3, "heads": Heads(linear=16)}),
    ("tp-width", {"tensor_parallel_size": 3, "heads": Heads(widths=(25600,))}),
    (
        "tp-quantization-block",
        {"tensor_parallel_size": 8, "heads": Heads(widths=(12288, 1536), quantization_block=128)},
    ),
    ("length", {"max_model_len": 131_072, "longest": 40_960}),
    ("block-size", {"vllm_args": {"block-size": 7}}),
    ("speculation-no-drafts", {"drafts": False, "vllm_args": speculative("mtp")}),
    ("pp-architecture", {"architecture": "Gemma3nForCausalLM"}),
    ("pp-architecture-unknown", {"architecture": "FooForCausalLM"}),
    ("gpu-too-old", {"gpus": {"node1": gpu((6, 1))}}),
    ("gpu-bf16", {"gpus": OLD}),
    ("gpu-bf16-only", {"gpus": OLD, "model_type": "gemma3"}),
    ("dtype-float16", {"model_type": "glm4", "vllm_args": {"dtype": "half"}}),
    ("dtype-quantization", {"quantization": "fp8", "vllm_args": {"dtype": "float32"}}),
    ("dtype-quantization", {"quantization": "mxfp4", "vllm_args": {"dtype": "float16"}}),
    ("quantization-mismatch", {"quantization": "awq", "vllm_args": {"quantization": "fp8"}}),
    ("quantization-mismatch", {"quantization": "gptq", "vllm_args": {"quantization": "awq"}}),
    ("quantization-unseen", {"vllm_args": {"quantization": "awq"}}),
    ("quantization-unseen", {"vllm_args": {"quantization-config": {"linear": "fp8_per_tensor"}}}),
    ("config-elsewhere", {"vllm_args": {"hf-config-path": "/srv/other"}}),
    ("options-uncounted", {"vllm_args": {"cpu-offload-gb": 10}}),
    ("kv-cache-uncounted", {"cache_dtype": "turboquant_k8v4"}),
    ("gpu-quantization", {"gpus": OLD, "quantization": "mxfp4", "dtype": "float16"}),
    ("quantization-unknown", {"quantization": "eetq"}),
    ("gpu-fp8-widened", {"gpus": {"node1": gpu((8, 6))}, "quantization": "fp8"}),
    ("gpu-fp8-cache", {"gpus": {"node1": gpu((8, 6))}, "cache_dtype": "fp8"}),
    ("gpu-mixed", {"gpus": {"node1": gpu((8, 9)), "node2": gpu((9, 0))}}),
    ("speculation-pp-version", {"vllm_version": Version("0.29.0"), "vllm_args": speculative("mtp")}),
    ("speculation-cpu-pp", cpu(vllm_args=speculative("ngram"))),
    ("speculation-aux-states", {"architecture": "Glm4MoeForCausalLM", "vllm_args": speculative("eagle3")}),
    ("speculation-aux-states", {"architecture": "Gemma3ForCausalLM", "vllm_args": speculative("dflash")}),
    ("speculation-old-runner", {"vllm_args": speculative("suffix")}),
    ("speculation-adaptive", {"vllm_args": speculative("eagle", enable_adaptive_verification=True)}),
    ("speculation-draft-memory", {"vllm_args": {"speculative-config": {"model": "/srv/draft"}}}),
    ("cpu-eager-pp", cpu(vllm_args={"enforce-eager": True})),
    ("cpu-ci-env-pp", cpu(env={"VLLM_CPU_CI_ENV": "1"})),
    ("ray-nnodes", {"backend": "ray", "vllm_args": {"nnodes": 2}}),
    ("v1-runner-async", {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "vllm_args": {"async-scheduling": True}}),
    (
        "v1-runner-structured-output",
        {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "vllm_args": {"structured-outputs-config": {"backend": "auto"}}},
    ),
    ("pp-elastic-ep", {"vllm_args": {"enable-elastic-ep": True}}),
    ("pp-dual-batch", {"vllm_args": {"enable-dbo": True}}),
    ("pp-hisparse", {"vllm_args": {"attention-config": {"hisparse_config": {"top_k": 2}}}}),
    ("pp-routed-experts", {"vllm_args": {"enable-return-routed-experts": True}}),
    ("pp-sharded-state", {"vllm_args": {"load-format": "sharded_state"}}),
    ("fault-tolerance-dp", {"vllm_args": {"enable-fault-tolerance": True}}),
    ("batch-below-sequences", {"vllm_args": {"max-num-batched-tokens": 64, "max-num-seqs": 128}}),
    ("short-execute-timeout", {"env": {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20"}}),
]


@pytest.mark.parametrize(("rule", "changes"), BROKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_a_broken_rule_is_found_with_a_remedy_and_no_other_is(rule: str, changes: dict[str, Any]) -> None:
    also = {"vllm-no-nnodes": {"vllm-port-race"}, "vllm-broken-multinode": {"vllm-port-race"}}.get(rule, set())
    findings = list(broken_rules(situation(**changes)))
    assert {one.id for one in findings} - also == {rule} | ({"gpu-mixed"} if changes.get("gpus") is OLD else set())
    assert all(one.remedy and "{" not in one.reason + one.remedy.replace("{mode", "") for one in findings)


def test_every_rule_has_a_case_here_a_source_and_an_id_of_its_own() -> None:
    assert {rule for rule, _ in BROKEN} == {rule.id for rule in RULES}
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(rule.source and rule.remedy and rule.versions for rule in RULES)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        cpu(),
        {"vllm_args": speculative("mtp", num_speculative_tokens=1)},
        {"vllm_args": speculative("ngram")},
        {"vllm_args": speculative("eagle3"), "architecture": "LlamaForCausalLM"},
        {"pipeline_parallel_size": 1, "nodes": 1, "vllm_args": {"enable-dbo": True}},
        {"pipeline_parallel_size": 1, "nodes": 1, "architecture": "Gemma3nForCausalLM"},
        {"gpus": {"node1": gpu(UNKNOWN_CAPABILITY), "node2": gpu(UNKNOWN_CAPABILITY)}, "quantization": "mxfp4"},
        {"tensor_parallel_size": 16, "heads": Heads(query=64, key_value=8)},
        {"gpus": OLD, "vllm_args": {"dtype": "half", "attention-backend": "TRITON_ATTN"}},
        {"quantization": "fp8_per_tensor", "vllm_args": {"quantization": "fp8"}},
        {"quantization": "awq", "vllm_args": {"quantization": "awq_marlin", "dtype": "half"}},
        {"quantization": "compressed-tensors", "vllm_args": {"dtype": "float32"}},
        {"max_model_len": 131_072, "longest": 40_960, "env": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}},
        {"max_model_len": 131_072, "longest": None},
        {"max_model_len": 40_960, "longest": 40_960, "vllm_args": {"block-size": 32}},
        {"drafts": None, "vllm_args": speculative("mtp")},
        {"gpus": {"node1": gpu(), "node2": gpu(UNKNOWN_CAPABILITY)}},
        {"model_type": "gemma3", "vllm_args": {"dtype": "bfloat16"}},
        {"gpus": OLD, "quantization": "awq", "dtype": "float16", "vllm_args": {"attention-backend": "TRITON_ATTN"}},
    ],
)
def test_what_vllm_can_do_is_let_through(changes: dict[str, Any]) -> None:
    assert list(broken_rules(situation(**changes))) == []


@pytest.mark.parametrize(
    ("heads", "gpus", "sizes"),
    [
        # Qwen2.5-7B: 28 heads on hosts of 8 GPUs.
        (Heads(query=28, key_value=4), 8, "tensor_parallel_size: 4 and ppdeploy_pipeline_parallel_size: 4"),
        # Qwen3-235B-A22B-FP8: experts of 1536 columns in blocks of 128.
        (
            Heads(query=64, key_value=4, widths=(1536,), quantization_block=128),
            8,
            "tensor_parallel_size: 4 and ppdeploy_pipeline_parallel_size: 4",
        ),
        (Heads(query=64, key_value=8), 3, "tensor_parallel_size: 1 and ppdeploy_pipeline_parallel_size: 6"),
        (Heads(query=64, key_value=8), 6, "tensor_parallel_size: 2 and ppdeploy_pipeline_parallel_size: 6"),
    ],
)
def test_the_remedy_names_sizes_that_use_all_gpus_and_pass(heads: Heads, gpus: int, sizes: str) -> None:
    (broken, *_) = broken_rules(situation(tensor_parallel_size=gpus, heads=heads))
    assert f"set ppdeploy_{sizes}" in broken.remedy
    size = int(sizes.split()[1])
    assert not list(
        broken_rules(situation(tensor_parallel_size=size, pipeline_parallel_size=2 * gpus // size, heads=heads))
    )


def test_hosts_at_fault_are_named_one_by_one() -> None:
    findings = list(broken_rules(situation(gpus={"a": gpu((6, 1)), "b": gpu(), "c": gpu((7, 0))})))
    assert [(one.id, one.host) for one in findings if one.id == "gpu-too-old"] == [
        ("gpu-too-old", "a"),
        ("gpu-too-old", "c"),
    ]
    assert "NVIDIA GeForce RTX 4090 (compute capability 6.1)" in findings[0].reason


def test_the_table_of_architectures_is_vllms() -> None:
    # Spot checks against reference/vllm-multinode.md, section 9 (asked of vLLM itself).
    for name in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"):
        assert pipeline_support(name) is True
    for name in ("Mamba2ForCausalLM", "Gemma3nForCausalLM"):
        assert pipeline_support(name) is False
    assert pipeline_support("FooForCausalLM") is None
    assert {"fp8", "awq", "gptq", "compressed-tensors", "mxfp4"} <= set(MIN_CAPABILITY)


def test_rules_are_listed_as_a_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = Command(capsys)
    table = command("rules")
    assert table.code == 0
    assert all(rule.id in table.out for rule in RULES)
    assert '"id": "tp-heads"' in command("rules", "tp-heads", "--json").out
    assert "source: vLLM" in command("rules", "tp-heads").out
    wrong = command("rules", "nonsense")
    assert wrong.code == 2
    assert "there is no rule nonsense" in wrong.err
