"""A benchmark of a pipeline as data: what was asked, what came out, and for which plans it says something. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, JsonValue

from ppdeploy.errors import InputError
from ppdeploy.plan.command import extra_arguments
from ppdeploy.plan.expect import ANSWER, PROMPT
from ppdeploy.plan.outlook import CONCURRENCIES
from ppdeploy.plan.serving import Load
from ppdeploy.plan.types import Frozen, PipelinePlan, Speed

BENCH_SCHEMA = 1
"""Version of a kept result's form; raised when a field changes its meaning or goes away."""

MARGIN = 16
"""Tokens of the model's longest request that are left free: a random prompt, sent as text, may come out longer."""

MOST_USERS = 1024
"""Users at once that one client process can play; more say more of the client than of the server."""


class Circumstances(Frozen):
    """What a benchmark was measured with. It says something of a plan for which all of this is the same."""

    model: str = Field(description="digest of the weight manifest")
    vllm_version: str
    device: Literal["cuda", "cpu"]
    tensor_parallel_size: int
    partition: tuple[int, ...] = Field(description="layers of each stage")
    devices: tuple[str, ...] = Field(description="what computes each stage, such as 2 x NVIDIA GeForce RTX 4090")
    rates_mbit: tuple[int | None, ...] = Field(description="rate of each link between stages; None: inside a host")
    batched_tokens: int = Field(description="max_num_batched_tokens")
    kv_cache_dtype: str
    handoff: str | None = Field(
        default=None, description="mode of ppdeploy_handoff, off where it is idle; None: a file from before it was kept"
    )


class BenchLoad(Frozen):
    """One run of `vllm bench serve`: so many users at once, each sending its next request when the last has ended."""

    users: int
    input_tokens: int = Field(description="tokens of each prompt that were asked for")
    output_tokens: int
    prompts: int = Field(description="requests in all")
    completed: int
    failed: int
    seconds: float = Field(description="from the first request to the last answer")
    tokens_per_second: float = Field(description="output tokens of all users together")
    ttft_seconds: float = Field(description="median time to the first token")
    ttft_p99_seconds: float
    tpot_seconds: float = Field(description="median time of each further token")
    predicted: Speed | None = Field(default=None, description="what the plan says without any benchmark; None: nothing")

    @property
    def whole(self) -> bool:
        """Whether every request was answered: of a run in which some failed, the figures say nothing."""
        return self.failed == 0 and self.completed == self.prompts > 0


class BenchRun(Frozen):
    """One benchmark of a pipeline, as it is kept in a file of its own."""

    bench_schema: int = BENCH_SCHEMA
    pipeline: str
    time: str = Field(description="when it began, in UTC: 2026-11-30T03:55:00Z")
    release: str = Field(description="digest of the release that served")
    seed: int = Field(description="of the random prompts; each load's is one more than the one before it")
    circumstances: Circumstances
    loads: tuple[BenchLoad, ...]


class AskedLoad(Frozen):
    """A load that a benchmark is to try, and how."""

    users: int
    input_tokens: int
    output_tokens: int
    prompts: int
    argv: tuple[str, ...] = Field(description="`vllm bench serve` without its seed and where its result goes")
    predicted: Speed | None = Field(description="what the plan says of it; None: nothing is predicted")


class BenchAsk(Frozen):
    """What a person asks of a benchmark."""

    users: tuple[int, ...] = CONCURRENCIES
    input: int | None = None
    output: int | None = None
    prompts: int | None = Field(default=None, description="requests of each load; None: 4 alone, else 64 or two a user")
    timeout: int = Field(default=900, description="seconds that each load may take")
    force: bool = Field(default=False, description="go on although requests are in flight")


def circumstances(pipeline: PipelinePlan) -> Circumstances:
    """Return what a benchmark of this plan would be measured with."""
    return Circumstances(
        model=pipeline.model.manifest_digest,
        vllm_version=pipeline.environment.vllm_version,
        device=pipeline.device,
        tensor_parallel_size=pipeline.tensor_parallel_size,
        partition=pipeline.partition,
        devices=tuple(f"{row.gpus} x {row.device}" for row in pipeline.memory),
        rates_mbit=tuple(link.rate_mbit for link in pipeline.outlook.links),
        batched_tokens=pipeline.capacity.batched_tokens,
        kv_cache_dtype=pipeline.capacity.kv_cache_dtype,
        handoff=pipeline.outlook.handoff,
    )


def matching(pipeline: PipelinePlan, runs: Iterable[BenchRun]) -> tuple[BenchRun, ...]:
    """Return the benchmarks that say something of this plan, the oldest first."""
    wanted = circumstances(pipeline)
    return tuple(
        sorted(
            (run for run in runs if _known(run.circumstances) == wanted and run.pipeline == pipeline.name),
            key=lambda run: run.time,
        )
    )


def _known(told: Circumstances) -> Circumstances:
    """Return circumstances with the handoff of files from before it was kept: on GPUs no plugin worked then."""
    return told.model_copy(update={"handoff": "off"}) if told.handoff is None and told.device == "cuda" else told


def asked_loads(
    users: Sequence[int],
    input_tokens: int | None,
    output_tokens: int | None,
    max_model_len: int,
    prompts: int | None = None,
) -> tuple[Load, ...]:
    """Return the loads of a benchmark, smallest first; InputError where they cannot be asked of the model.

    Without lengths they are those of the plan's predictions, or less in their proportion where the model takes no such
    request. `max_model_len` is in tokens, prompt and answer together.
    """
    if not users or any(not 1 <= count <= MOST_USERS for count in users):
        raise InputError(
            "the numbers of users are no numbers that can be tried",
            where=f"--users {','.join(map(str, users))}",
            remedy=f"give numbers from 1 to {MOST_USERS}, such as 1,8,32",
        )
    for name, value in (("--input", input_tokens), ("--output", output_tokens)):
        if value is not None and value < 1:
            raise InputError("a request has at least one token", where=f"{name} {value}", remedy="give 1 or more")
    most = max(max_model_len - MARGIN, 2)
    prompt, answer = input_tokens, output_tokens
    if answer is None:
        answer = ANSWER if most >= PROMPT + ANSWER else max(most * ANSWER // (PROMPT + ANSWER), 1)
        # A given prompt keeps its length.
        answer = max(min(answer, most - (prompt or 1)), 1)
    if prompt is None:
        prompt = max(min(PROMPT, most - answer), 1)
    if prompt + answer > most:
        raise InputError(
            f"prompts of {prompt} and answers of {answer} tokens are more than the model's {max_model_len}, of which "
            f"{MARGIN} are left free",
            where=" ".join(
                f"{name} {value}"
                for name, value in (("--input", input_tokens), ("--output", output_tokens))
                if value is not None
            ),
            remedy=f"ask for no more than {most} together, or raise ppdeploy_max_model_len",
        )
    loads = [Load(count, prompt, answer, prompts) for count in sorted(set(users))]
    return tuple(replace(load, prompts=max(load.total(), load.concurrency)) for load in loads)


#: Options of `vllm serve` that say how text becomes tokens, which the client must do in the same way.
_TOKENIZER_FLAGS = ("tokenizer-mode", "trust-remote-code")


def bench_argv(
    load: Load, *, vllm: str, url: str, served_model_name: str, tokenizer: str, vllm_args: Mapping[str, JsonValue]
) -> tuple[str, ...]:
    """Return the command that plays a load against the API at `url`; seed and result folder come on top.

    The model is named as it is served, so that the client can ask the server how it makes tokens of a prompt
    (`_align_prompts_to_server_tokenizer` in vllm/benchmarks/serve.py, 0.32.0); `tokenizer` is the model's folder.
    """
    own = {name: vllm_args[name] for name in _TOKENIZER_FLAGS if vllm_args.get(name)}
    return (
        *(vllm, "bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
        *("--model", served_model_name, "--tokenizer", str(vllm_args.get("tokenizer") or tokenizer)),
        *extra_arguments(own),
        *("--dataset-name", "random", "--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens), "--num-prompts", str(load.total())),
        *("--max-concurrency", str(load.concurrency), "--ignore-eos", "--temperature", "0"),
        *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99"),
    )


def bench_load(asked: AskedLoad, measured: Mapping[str, Any]) -> BenchLoad:
    """Return what a load came to, from the numbers that `vllm bench serve --save-result` wrote (times in ms there)."""

    def number(name: str) -> float:
        value = measured.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    return BenchLoad(
        users=asked.users,
        input_tokens=asked.input_tokens,
        output_tokens=asked.output_tokens,
        prompts=asked.prompts,
        completed=int(number("completed")),
        # An old client does not count those that failed.
        failed=max(int(number("failed")), asked.prompts - int(number("completed"))),
        seconds=number("duration"),
        tokens_per_second=number("output_throughput"),
        ttft_seconds=number("median_ttft_ms") / 1e3,
        ttft_p99_seconds=number("p99_ttft_ms") / 1e3,
        tpot_seconds=number("median_tpot_ms") / 1e3,
        predicted=asked.predicted,
    )


def bench_failures(
    pipeline: str, asked: Sequence[AskedLoad], told: Mapping[int, Mapping[str, Any]], loads: Sequence[BenchLoad]
) -> Iterator[str]:
    """Yield what went wrong with the loads of a pipeline; `told` has for each number of users how its client ended."""
    found = {load.users: load for load in loads}
    for load in asked:
        outcome = told.get(load.users)
        where = f"pipeline {pipeline} with {load.users} {'user' if load.users == 1 else 'users'}"
        if outcome is None:
            yield f"{where}: it was not tried after the failure before it"
        elif not outcome.get("ok"):
            yield f"{where}: {outcome.get('reason')}"
        elif load.users in found and not found[load.users].whole:
            yield f"{where}: {found[load.users].failed} of {load.prompts} requests failed: see `ppdeploy logs`"
