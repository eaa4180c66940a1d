#!/usr/bin/env python3
"""Fit the constants of the speed model to the 24 measured figures and print what is left over.

    python3 scripts/fit_speed.py          # the model as it is: a table of predicted and measured
    python3 scripts/fit_speed.py --fit    # search the constants again, then the same table with what was found

The measurements are those of docs/speed.md: vLLM 0.26.0, two H200, a shaped link. Only FITTED is searched on; CHECKED
(smaller chunks, long prompts) is never fitted. Deterministic; some seconds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppdeploy.plan.gpus import MIB, find_gpu
from ppdeploy.plan.least_squares import least_squares
from ppdeploy.plan.network import SOCKET_BITS, Link, handoff_bytes
from ppdeploy.plan.serving import Load, Pipeline, Prediction, Settings, predict
from ppdeploy.plan.speed import CONSTANTS, Constants, StageLoad

# ---- what was measured

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, VOCABULARY = 5120, 64, 40, 8, 128, 25600, 151936
"""The dummy model: dense, Qwen3's shape, 30.75 B parameters in bf16."""

LINKS: dict[str, tuple[float, float]] = {
    "unshaped": (1e12, 0.0),
    "10 Gbit": (10e9, 1_048_576.0),
    "2.5 Gbit": (2.5e9, 262_144.0),
    "1 Gbit": (1e9, 262_144.0),
}
"""Bits/s and the bucket of `tc tbf` in bytes. An unshaped veth pair has no rate: NCCL's sockets are its limit."""

PING = 55e-6
"""Round trip between the two namespaces, seconds."""


@dataclass(frozen=True)
class Measured:
    """One run of `vllm bench serve`; TTFT in seconds, where it was written down."""

    link: str
    concurrency: int
    out_tokens_per_second: float
    ttft_s: float | None
    chunk: int = 8192
    input_tokens: int = 1024
    output_tokens: int = 128

    def name(self) -> str:
        """Return a label for tables."""
        return f"{self.link}, c={self.concurrency}, chunk {self.chunk}, input {self.input_tokens}"


FITTED = (
    Measured("unshaped", 1, 55.0, 0.108),
    Measured("unshaped", 8, 329.7, 0.788),
    Measured("unshaped", 32, 898.1, 1.416),
    Measured("10 Gbit", 1, 54.8, 0.117),
    Measured("10 Gbit", 8, 321.6, 0.862),
    Measured("10 Gbit", 32, 840.6, 1.591),
    Measured("2.5 Gbit", 1, 53.4, 0.172),
    Measured("2.5 Gbit", 8, 283.8, 1.283),
    Measured("2.5 Gbit", 32, 614.2, 2.862),
    Measured("1 Gbit", 1, 51.2, 0.276),
    Measured("1 Gbit", 8, 235.7, 1.984),
    Measured("1 Gbit", 32, 410.6, 4.959),
)
"""Default settings, input 1024, output 128: 12 runs, 24 figures."""

CHECKED = (
    Measured("unshaped", 8, 353.7, 0.372, 2048),
    Measured("unshaped", 32, 969.1, 0.651, 2048),
    Measured("2.5 Gbit", 8, 307.1, 0.650, 2048),
    Measured("2.5 Gbit", 32, 678.0, 1.291, 2048),
    Measured("1 Gbit", 8, 248.1, 1.325, 2048),
    Measured("1 Gbit", 32, 442.9, 2.411, 2048),
    Measured("unshaped", 32, 982.3, 0.338, 1024),
    Measured("1 Gbit", 8, 249.4, 0.721, 1024),
    Measured("1 Gbit", 32, 460.8, 1.198, 1024),
    Measured("unshaped", 32, 973.6, 0.241, 512),
    Measured("1 Gbit", 8, 270.7, 0.536, 512),
    Measured("1 Gbit", 32, 484.4, 0.655, 512),
    Measured("unshaped", 4, 76.4, None, 8192, 6000, 64),
    Measured("10 Gbit", 4, 76.5, None, 8192, 6000, 64),
    Measured("2.5 Gbit", 4, 56.7, None, 8192, 6000, 64),
    Measured("1 Gbit", 4, 41.2, 2.767, 2048, 6000, 64),
)
"""Smaller chunks (below 2048: measured on 2026-11-30, after the model was made) and long prompts; never fitted."""


def pipeline(link: str, constants: Constants = CONSTANTS, socket_bits: float = SOCKET_BITS) -> Pipeline:
    """Return the two stages that were measured: 32 layers each, the head on the last."""
    gpu = find_gpu("NVIDIA H200", 143771 * MIB)
    assert gpu is not None
    layers = LAYERS // 2
    parameters = layers * (2 * HIDDEN * HEAD_SIZE * (HEADS + KV_HEADS) + 3 * HIDDEN * INTERMEDIATE)
    first = StageLoad(
        gpu=gpu,
        gpus=1,
        layers=layers,
        weight_bytes=2 * parameters,
        flops_per_token=2 * parameters,
        kv_bytes_per_token=layers * 2 * KV_HEADS * HEAD_SIZE * 2,
        hidden_size=HIDDEN,
        attention_flops=4 * HEADS * HEAD_SIZE * layers,
    )
    head = VOCABULARY * HIDDEN
    last = replace(first, weight_bytes=first.weight_bytes + 2 * head, head_flops=2 * head)
    rate, burst = LINKS[link]
    shaped = Link(rate, PING / 2, link, burst, socket_bits)
    return Pipeline((first, last), (shaped,), handoff_bytes(HIDDEN), constants)


def predicted(run: Measured, constants: Constants = CONSTANTS, socket_bits: float = SOCKET_BITS) -> Prediction:
    """Return what the model says of a measured run."""
    load = Load(run.concurrency, run.input_tokens, run.output_tokens)
    # 1024: vLLM's default for max_num_seqs on cards of 70 GiB and more; no run comes near it.
    return predict(pipeline(run.link, constants, socket_bits), load, Settings(run.chunk, 1024))


def errors(
    runs: tuple[Measured, ...], constants: Constants = CONSTANTS, socket_bits: float = SOCKET_BITS
) -> Iterator[tuple[str, float, float, float]]:
    """Yield (figure, predicted, measured, predicted / measured - 1) for every figure of the runs."""
    for run in runs:
        says = predicted(run, constants, socket_bits)
        yield (
            f"{run.name()}: out tok/s",
            says.out_tokens_per_second,
            run.out_tokens_per_second,
            says.out_tokens_per_second / run.out_tokens_per_second - 1,
        )
        if run.ttft_s is not None:
            yield (f"{run.name()}: TTFT ms", says.ttft_s * 1e3, run.ttft_s * 1e3, says.ttft_s / run.ttft_s - 1)


def table(constants: Constants = CONSTANTS, socket_bits: float = SOCKET_BITS) -> str:
    """Return predicted against measured for every figure, as text."""
    lines = []
    for title, runs in (("fitted on", FITTED), ("never fitted", CHECKED)):
        lines.append(f"{title:58} predicted  measured   error")
        found = list(errors(runs, constants, socket_bits))
        lines += [f"{name:58} {says:9.1f} {real:9.1f} {100 * error:+6.1f} %" for name, says, real, error in found]
        worst = max(abs(error) for *_, error in found)
        mean = sum(abs(error) for *_, error in found) / len(found)
        lines.append(f"{len(found)} figures, worst {100 * worst:.1f} %, mean {100 * mean:.1f} %")
    return "\n".join(lines)


def fit() -> tuple[Constants, float]:
    """Search the constants that make the mean square error of the 24 figures least (Levenberg and Marquardt's way).

    All constants are positive, so their logarithms are searched; the replay's decisions do not depend on seconds, so
    the errors are smooth in them. `stage_overhead` is not searched: with one model on one kind of GPU it cannot be told
    apart from the share of the memory bandwidth. Nor is `roofline_exponent`, which these figures say little of.
    """
    names = [field.name for field in fields(Constants) if field.name not in ("stage_overhead", "roofline_exponent")]

    def left_over(logs: Sequence[float]) -> list[float]:
        values = [math.exp(value) for value in logs]
        constants = Constants(**dict(zip(names, values[:-1], strict=True)))
        return [error for *_, error in errors(FITTED, constants, values[-1])]

    best = least_squares(left_over, [math.log(value) for value in (0.7, 0.8, 0.01, 20e9)])
    values = [math.exp(value) for value in best]
    return Constants(**dict(zip(names, values[:-1], strict=True))), values[-1]


def main() -> None:
    """Print the table, after a fit when asked."""
    constants, socket_bits = CONSTANTS, SOCKET_BITS
    if "--fit" in sys.argv[1:]:
        constants, socket_bits = fit()
        for field in fields(constants):
            print(f"{field.name} = {getattr(constants, field.name):.4g}")
        print(f"SOCKET_BITS = {socket_bits:.3g}")
    print(table(constants, socket_bits))


if __name__ == "__main__":
    main()
