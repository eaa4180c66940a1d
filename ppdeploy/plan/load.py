"""From a model's shape to what a stage reads and computes, as `ppdeploy.plan.speed` wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from ppdeploy.model import Layer, ModelShape
from ppdeploy.plan.gpus import Gpu
from ppdeploy.plan.speed import ComputeType, StageLoad, stage_seconds

PROMPT, ANSWER, REQUESTS = 1024, 128, 32
"""Tokens of the requests that splits are weighed by, and how many run at once: those of the measurements."""

_FP4 = ("nvfp4", "modelopt_fp4")


def compute_type(quantization: str | None) -> ComputeType:
    """Return in what the matrix products of a checkpoint run; only fp8 and nvfp4 compute in their own type."""
    name = (quantization or "").lower()
    if name in _FP4:
        return "fp4"
    # `modelopt` alone is NVIDIA's fp8; what it calls nvfp4 or mixed has another name here.
    return "fp8" if name.startswith(("fp8", "mxfp8")) or name in ("modelopt", "fbgemm_fp8") else "bf16"


class Loads:
    """The load of any stage of one model, and the time that it takes for the two kinds of work splits are for."""

    def __init__(self, shape: ModelShape, *, tensor_parallel_size: int, stages: int, kv_value_bytes: float) -> None:
        """Add up the layers once, so that a run of them costs two look-ups for each figure."""
        self.shape = shape
        self.gpus = tensor_parallel_size
        self.stages = stages
        self.compute = compute_type(shape.quantization)
        layers = shape.layers
        self._dense = _sums(layers, lambda layer: layer.weight_bytes - layer.expert_bytes)
        self._experts = _sums(layers, lambda layer: layer.expert_bytes)
        self._flops = _sums(layers, lambda layer: 2 * layer.active_parameters)
        self._kv = _sums(layers, lambda layer: layer.kv_values * kv_value_bytes)
        self._attention = _sums(
            layers,
            lambda layer: (
                4 * shape.num_attention_heads * shape.head_dim if layer.kv_values and not layer.kv_window else 0
            ),
        )

    def load(self, gpu: Gpu, first: int, stop: int) -> StageLoad:
        """Return the load of the stage with the layers `first` to `stop` - 1 on so many of a GPU."""
        shape = self.shape
        last = stop == len(shape.layers)
        return StageLoad(
            gpu=gpu,
            gpus=self.gpus,
            layers=stop - first,
            weight_bytes=self._dense[stop] - self._dense[first] + (shape.head_bytes if last else 0),
            flops_per_token=self._flops[stop] - self._flops[first],
            kv_bytes_per_token=self._kv[stop] - self._kv[first],
            hidden_size=shape.hidden_size,
            head_flops=2.0 * shape.vocab_size * shape.hidden_size if last else 0.0,
            attention_flops=self._attention[stop] - self._attention[first],
            expert_bytes=self._experts[stop] - self._experts[first],
            experts=shape.num_experts,
            expert_top_k=shape.experts_per_token,
            compute=self.compute,
        )

    def busy_step(self, gpu: Gpu, first: int, stop: int) -> float:
        """Return the seconds of a step under load: each of REQUESTS has a token made, and new prompts come in."""
        sequences = max(REQUESTS / self.stages, 1)
        return stage_seconds(
            self.load(gpu, first, stop),
            prefill_tokens=sequences * PROMPT / ANSWER,
            decode_sequences=sequences,
            context=PROMPT + ANSWER / 2,
        )

    def lone_request(self, gpu: Gpu, first: int, stop: int) -> float:
        """Return the seconds that one request alone spends on the stage: its prompt, then its answer."""
        load = self.load(gpu, first, stop)
        prompt = stage_seconds(load, prefill_tokens=PROMPT, decode_sequences=0, context=0)
        token = stage_seconds(load, prefill_tokens=0, decode_sequences=1, context=PROMPT + ANSWER / 2)
        return prompt + ANSWER * token


def _sums(layers: Iterable[Layer], value: Callable[[Layer], float]) -> tuple[float, ...]:
    return tuple(accumulate((value(layer) for layer in layers), initial=0.0))
