"""What `ppdeploy_vllm_args` and `ppdeploy_env` let through, and what they refuse by any spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppdeploy.errors import InputError
from ppdeploy.plan.command import extra_arguments, nccl_env, rank_argv, rank_env
from ppdeploy.spec import PipelineVars, known_variable_names, spec_from_values
from ppdeploy.spec.option_values import CHOICES, FLAGS, MAPS, NUMBERS
from ppdeploy.spec.passthrough import OWNED_ENV, OWNED_FLAGS, SHORT_FORMS
from ppdeploy.spec.serve_options import flags

# Options of `vllm serve` 0.32.0 that people set and that ppdeploy does not touch (arg_utils.py, cli_args.py).
FREE_FLAGS = [
    "max-num-seqs",
    "max-num-batched-tokens",
    "enable-prefix-caching",
    "enable-chunked-prefill",
    "enforce-eager",
    "dtype",
    "quantization",
    "kv-cache-dtype",
    "compilation-config",
    "speculative-config",
    "attention-backend",
    "attention-config",
    "load-format",
    "tokenizer",
    "tokenizer-mode",
    "tokenizer-revision",
    "chat-template",
    "enable-auto-tool-choice",
    "tool-call-parser",
    "reasoning-parser",
    "seed",
    "block-size",
    "num-gpu-blocks-override",
    "hf-overrides",
    "generation-config",
    "override-generation-config",
    "limit-mm-per-prompt",
    "decode-context-parallel-size",
    "enable-expert-parallel",
    "distributed-timeout-seconds",
    "cpu-distributed-timeout-seconds",
    "disable-log-stats",
    "root-path",
    "disable-access-log-for-endpoints",
    "allowed-origins",
    "allowed-media-domains",
    "return-tokens-as-token-ids",
    "enable-prompt-tokens-details",
    "tokens-only",
    "config-format",
    "hf-config-path",
    "model-impl",
    "model-loader-extra-config",
    "cpu-offload-gb",
    "async-scheduling",
    "numa-bind",
    "scheduling-policy",
    "uvicorn-log-level",
    "middleware",
    "disable-fastapi-docs",
    "max-logprobs",
]


def variables(**values: Any) -> PipelineVars:
    own = {"ppdeploy_model": "Qwen/Qwen3-32B"} | {f"ppdeploy_{name}": value for name, value in values.items()}
    return spec_from_values({"chat": ["a"]}, {"a": own}, inventory_dir=Path("cluster")).pipelines[0].vars


def refusal(**values: Any) -> str:
    with pytest.raises(InputError) as error:
        variables(**values)
    return str(error.value)


def plain_value(flag: str) -> object:
    """Return a value that an option takes: any word, unless the plan reads it (tests/unit/test_spec_option_values)."""
    if flag in CHOICES:
        return CHOICES[flag][0]
    return 64 if flag in NUMBERS else True if flag in FLAGS | flags() else {"a": 1} if flag in MAPS else "x"


@pytest.mark.parametrize("flag", FREE_FLAGS)
def test_an_option_of_vllm_alone_is_passed_on(flag: str) -> None:
    assert variables(vllm_args={flag: plain_value(flag)}).vllm_args == {flag: plain_value(flag)}


@pytest.mark.parametrize("flag", OWNED_FLAGS)
@pytest.mark.parametrize("spelling", ["{}", "--{}", "no-{}", "--no-{}", "{}.x"])
def test_an_option_that_ppdeploy_sets_is_refused_with_what_to_do(flag: str, spelling: str) -> None:
    for name in {spelling.format(flag), spelling.format(flag.replace("-", "_"))}:
        text = refusal(vllm_args={name: 1})
        assert text == f'ppdeploy_vllm_args sets "{name}" (pipeline chat): {OWNED_FLAGS[flag]}'


@pytest.mark.parametrize(("short", "long"), SHORT_FORMS.items())
def test_a_short_form_is_seen_through(short: str, long: str) -> None:
    text = refusal(vllm_args={short: 1})
    assert OWNED_FLAGS.get(long, f"write {long} instead") in text
    assert refusal(vllm_args={f"-{short}": 1})


@pytest.mark.parametrize("beginning", ["tensor-parallel", "pipeline_parallel", "served-model", "mas", "gpu-mem", "hos"])
def test_a_beginning_that_argparse_would_complete_is_refused(beginning: str) -> None:
    assert f'sets "{beginning}"' in refusal(vllm_args={beginning: 1})


@pytest.mark.parametrize("flag", ["data-parallel-something-new", "some-api-key", "github-token", "db-password"])
def test_a_data_parallel_option_or_a_secret_is_refused_by_its_form(flag: str) -> None:
    assert f'sets "{flag}"' in refusal(vllm_args={flag: 1})


@pytest.mark.parametrize("remedy", [*OWNED_FLAGS.values(), *OWNED_ENV.values()])
def test_a_remedy_names_only_variables_that_exist(remedy: str) -> None:
    named = [word.strip(",.:") for word in remedy.split() if word.startswith("ppdeploy_")]
    assert set(named) <= set(known_variable_names())


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"--max-num-seqs": 8}, "write it without dashes in front: max-num-seqs"),
        ({"Max-Num-Seqs": 8}, "write a long name in small letters"),
        ({"max num seqs": 8}, "write a long name in small letters"),
        ({"": 8}, "write a long name in small letters"),
        ({"compilation-config.mode": 2}, "write a map below compilation-config instead"),
        ({"-cc.mode": 2}, "write a map below compilation-config instead"),
        ({"--compilaton_config.mode": 2}, "write a map below compilation-config instead"),
        ({"no-such-map.mode": 2}, "write a map below no-such-map instead"),
        ({"max-num-seqs": 8, "max_num_seqs": 9}, 'has "max-num-seqs" twice'),
        ({"chat-template": "--port"}, "starts with a dash"),
        ({"middleware": ["a", "-x"]}, "starts with a dash"),
        ({"middleware": []}, "an empty list"),
        ({"middleware": [{"a": 1}]}, "a list of other things than text and numbers"),
        ({"middleware": [None]}, "a list of other things than text and numbers"),
        ({"chat-template": "a\nb"}, "line break"),
        ({"hf-overrides": {"a": {"b": "c\0"}}}, "control character U+0000"),
        ({"seed": float("nan")}, "not finite"),
    ],
)
def test_an_entry_that_would_not_arrive_as_meant_is_refused(args: dict[str, Any], reason: str) -> None:
    text = refusal(vllm_args=args)
    assert reason in text
    assert "ppdeploy_vllm_args" in text


def test_all_refused_entries_are_told_at_once() -> None:
    text = refusal(vllm_args={"port": 1, "nnodes": 2, "seed": 3, "tp": 4}, env={"HF_TOKEN": "hunter2", "RANK": 0})
    assert text.count("\n") == 4
    assert all(part in text for part in ('sets "port"', 'sets "nnodes"', 'sets "tp"', "sets HF_TOKEN", "sets RANK"))
    assert "hunter2" not in text


def test_names_are_spelt_as_vllm_spells_them_and_nothing_is_left_out_but_null() -> None:
    given = {"max_num_seqs": 8, "enforce-eager": True, "seed": None, "max-logprobs": -1, "hf-overrides": {"a_b": [1]}}
    taken = variables(vllm_args=given).vllm_args
    assert taken == {"max-num-seqs": 8, "enforce-eager": True, "max-logprobs": -1, "hf-overrides": {"a_b": [1]}}
    assert extra_arguments(taken) == (
        *("--enforce-eager", "--hf-overrides", '{"a_b":[1]}', "--max-logprobs", "-1", "--max-num-seqs", "8"),
    )


@pytest.mark.parametrize("name", OWNED_ENV)
def test_an_environment_variable_that_ppdeploy_sets_is_refused(name: str) -> None:
    for spelling in (name, name.lower()):
        assert refusal(env={spelling: "x"}) == f"ppdeploy_env sets {spelling} (pipeline chat): {OWNED_ENV[name]}"


@pytest.mark.parametrize(
    "name", ["VLLM_API_KEY", "OPENAI_API_KEY", "S3_SECRET_ACCESS_KEY", "S3_ACCESS_KEY_ID", "MY_TOKEN", "DB_PASSWORD"]
)
def test_a_secret_in_the_environment_is_refused_and_not_repeated(name: str) -> None:
    text = refusal(env={name: "hunter2"})
    assert f"sets {name}" in text
    assert "hold no secrets" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"A B": 1}, "use letters, digits and _ only"),
        ({"1A": 1}, "use letters, digits and _ only"),
        ({"A=B": 1}, "use letters, digits and _ only"),
        ({"A": [1]}, "not text or a number"),
        ({"A": {"b": 1}}, "not text or a number"),
        ({"A": "x\ny"}, "line break"),
        ({"A": "x\x1b[0m"}, "control character U+001B"),
        ({"VLLM_DP_SIZE": 2}, "no data-parallel ranks"),
    ],
)
def test_an_environment_that_would_break_its_file_is_refused(env: dict[str, Any], reason: str) -> None:
    assert reason in refusal(env=env)


def test_environment_values_are_text() -> None:
    given = {"VLLM_USE_V2_MODEL_RUNNER": True, "A": False, "NCCL_NSOCKS_PERTHREAD": 4, "B": 0.5, "C": "x y", "D": None}
    expected = {"VLLM_USE_V2_MODEL_RUNNER": "1", "A": "0", "NCCL_NSOCKS_PERTHREAD": "4", "B": "0.5", "C": "x y"}
    assert variables(env=given).env == expected
    free = {"VLLM_LOGGING_LEVEL": "DEBUG", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "1"}
    assert variables(env=free).env == free


def test_whatever_the_plan_sets_itself_is_owned() -> None:
    common: dict[str, Any] = {
        "vllm": "vllm",
        "model": "m",
        "served_model_name": "m",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 2,
        "nodes": 2,
        "master_addr": "198.18.1.11",
        "master_port": 29501,
        "api_port": 8000,
        "max_model_len": 1,
        "gpu_memory_utilization": 0.9,
        "kv_cache_bytes": 1,
        "extra": {},
    }
    flags = {word[2:] for rank in (0, 1) for word in rank_argv(node_rank=rank, **common) if word.startswith("--")}
    assert {"nnodes", "headless", "port", "kv-cache-memory-bytes"} <= flags <= set(OWNED_FLAGS)
    names = set(nccl_env("eth0"))
    for device, bind in (("cuda", None), ("cpu", "0")):
        names |= set(
            rank_env(
                pipeline="chat",
                device=device,
                devices=[0],
                address="198.18.1.11",
                partition=[1, 1],
                partition_is_default=False,
                omp_threads_bind=bind,
                handoff="lossless",
                extra={},
            )
        )
    assert {"VLLM_HOST_IP", "VLLM_CPU_OMP_THREADS_BIND", "CUDA_VISIBLE_DEVICES"} <= names <= set(OWNED_ENV)
