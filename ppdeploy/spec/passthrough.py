"""What `ppdeploy_vllm_args` and `ppdeploy_env` may pass to vLLM, and what belongs to ppdeploy.

Facts: vllm/engine/arg_utils.py, vllm/entrypoints/launchers/cli_args.py and vllm/envs.py of 0.32.0.
vLLM's parser takes underscores for dashes, unambiguous beginnings of names (argparse) and short forms, so
each of these is seen through here.
"""

from __future__ import annotations

import re

from pydantic import JsonValue

from ppdeploy.spec.option_values import check_option_value, tidy_option_value
from ppdeploy.spec.plain import plain, shown
from ppdeploy.spec.problems import RefusedItemsError
from ppdeploy.spec.serve_options import all_tables

_BY_PLAN = "remove it: the plan sets it for each node"
_ONE_API = "remove it: the API listens on the head's loopback, on ppdeploy_api_port, and is guarded there"
_ONE_SPECULATION = (
    "write it into the map of speculative-config (method, model, num_speculative_tokens): the plan reads it there"
)
_NO_DP = "remove it: a pipeline is one replica; make a second pipeline group for a second replica"

OWNED_FLAGS: dict[str, str] = {
    "model": "set ppdeploy_model instead",
    "model-tag": "set ppdeploy_model instead",
    "revision": "set ppdeploy_model_revision instead",
    "served-model-name": "set ppdeploy_served_model_name instead",
    "tensor-parallel-size": "set ppdeploy_tensor_parallel_size instead",
    "pipeline-parallel-size": "set ppdeploy_pipeline_parallel_size instead",
    "prefill-context-parallel-size": "remove it: the plan makes ranks of TP and PP alone",
    "max-model-len": "set ppdeploy_max_model_len instead",
    "gpu-memory-utilization": "set ppdeploy_gpu_memory_utilization instead",
    "device-memory-utilization": "set ppdeploy_gpu_memory_utilization instead",
    "kv-cache-memory-bytes": "set ppdeploy_kv_cache_gib instead",
    "port": "set ppdeploy_api_port instead",
    "master-port": "set ppdeploy_master_port instead",
    "hf-token": "set ppdeploy_hf_token in an ansible-vault file instead",
    "download-dir": "set ppdeploy_models_dir instead",
    "device-ids": "remove it: the plan sets CUDA_VISIBLE_DEVICES to exactly the GPUs of each rank",
    "nnodes": _BY_PLAN,
    "node-rank": _BY_PLAN,
    "master-addr": _BY_PLAN,
    "headless": _BY_PLAN,
    "distributed-executor-backend": _BY_PLAN,
    "shutdown-timeout": _BY_PLAN,
    "api-key": "remove it: keys are never arguments, which every user of a host can read",
    "host": _ONE_API,
    "uds": _ONE_API,
    "grpc": _ONE_API,
    "grpc-port": _ONE_API,
    "ssl-keyfile": _ONE_API,
    "ssl-certfile": _ONE_API,
    "ssl-ca-certs": _ONE_API,
    "ssl-cert-reqs": _ONE_API,
    "ssl-ciphers": _ONE_API,
    "enable-ssl-refresh": _ONE_API,
    "api-server-count": "remove it: vLLM refuses it on every node but the head",
    "trust-remote-code": "name the model in ppdeploy_trust_remote_code instead (a sidecar: trust_remote_code: true)",
    "config": "write its entries into ppdeploy_vllm_args: a file would not be part of the release",
    "help": "remove it: vLLM would print it and end",
    "version": "set ppdeploy_vllm_version instead",
    "data-parallel-size": _NO_DP,
    "data-parallel-size-local": _NO_DP,
    "data-parallel-rank": _NO_DP,
    "data-parallel-start-rank": _NO_DP,
    "data-parallel-address": _NO_DP,
    "data-parallel-rpc-port": _NO_DP,
    "data-parallel-backend": _NO_DP,
    "data-parallel-hybrid-lb": _NO_DP,
    "data-parallel-external-lb": _NO_DP,
    "data-parallel-multi-port-external-lb": _NO_DP,
    "data-parallel-supervisor-port": _NO_DP,
    "spec-method": _ONE_SPECULATION,
    "spec-model": _ONE_SPECULATION,
    "spec-tokens": _ONE_SPECULATION,
}
"""Options of `vllm serve` that ppdeploy sets or excludes, with what to do instead."""

SHORT_FORMS: dict[str, str] = {
    "h": "help",
    "v": "version",
    "n": "nnodes",
    "r": "node-rank",
    "q": "quantization",
    "O": "optimization-level",
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dpn": "data-parallel-rank",
    "dpr": "data-parallel-start-rank",
    "dpl": "data-parallel-size-local",
    "dpa": "data-parallel-address",
    "dpp": "data-parallel-rpc-port",
    "dpb": "data-parallel-backend",
    "dph": "data-parallel-hybrid-lb",
    "dpe": "data-parallel-external-lb",
    "dpm": "data-parallel-multi-port-external-lb",
    "pcp": "prefill-context-parallel-size",
    "dcp": "decode-context-parallel-size",
    "ep": "enable-expert-parallel",
    "asc": "api-server-count",
    "cc": "compilation-config",
    "sc": "speculative-config",
    "dc": "diffusion-config",
    "ac": "attention-config",
}

_SECRET_FLAG = re.compile(r"(^|-)(api-key|token|secret|password)$")
_OPTION_LIKE = re.compile(r"-(?![0-9.]+$)")
_LONG_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")


def check_vllm_args(value: object) -> dict[str, JsonValue]:
    """Return the map with names in vLLM's own spelling (dashes), in the order given, without null entries.

    Raises RefusedItemsError for every entry that ppdeploy owns or that is no long option name, ValueError for
    a value that is no map.
    """
    if not isinstance(value, dict):
        raise ValueError("it is not a map")
    refused: list[tuple[str, str]] = []
    taken: dict[str, JsonValue] = {}
    for key, given in value.items():
        item = tidy_option_value(key.replace("_", "-"), given) if isinstance(key, str) else given
        problem = _refuse_flag(key, item, taken)
        if problem:
            refused.append(problem)
        elif item is not None:
            taken[key.replace("_", "-")] = item
    if refused:
        raise RefusedItemsError(refused)
    return taken


def _refuse_flag(key: object, item: object, taken: dict[str, JsonValue]) -> tuple[str, str] | None:
    if not isinstance(key, str):
        return f"has the name {shown(key)}, which is not text", "put names in quotes"
    bare = key.lstrip("-")
    name = SHORT_FORMS.get(bare, bare).replace("_", "-")
    base = name.partition(".")[0]
    remedy = _owner(SHORT_FORMS.get(base, base))
    if remedy:
        return f"sets {shown(key)}", remedy
    if bare != key and _LONG_NAME.fullmatch(bare):
        return f"has the name {shown(key)}", f"write it without dashes in front: {bare}"
    if bare in SHORT_FORMS:
        return f"has the short form {shown(key)}", f"write {name} instead"
    if "." in key and _LONG_NAME.fullmatch(base):
        return f"has the dotted name {shown(key)}", f"write a map below {_whole(base)} instead"
    if not _LONG_NAME.fullmatch(key):
        return f"has the name {shown(key)}", "write a long name in small letters, such as max-num-seqs"
    if name in taken:
        return f"has {shown(name)} twice", "keep one of the two spellings"
    return _refuse_argument(key, item) or check_option_value(name, item)


def _whole(base: str) -> str:
    """Return the long name of a map's option that a dotted name starts with, in whatever spelling."""
    base = SHORT_FORMS.get(base, base)
    newest, *older = all_tables()
    if any(base in options.kinds for options in (newest, *older)):
        return base
    return next(iter(newest.meant_by(base)), base)


def _refuse_argument(key: str, item: object) -> tuple[str, str] | None:
    try:
        plain(item)
    except ValueError as reason:
        return f"gives {shown(key)} a value that cannot be passed, since {reason}", "write a plain value"
    values = item if isinstance(item, list) else [item]
    if not values:
        return f"gives {shown(key)} an empty list", "remove it, or give it values"
    if isinstance(item, list) and any(isinstance(value, (bool, dict, list)) or value is None for value in values):
        return f"gives {shown(key)} a list of other things than text and numbers", "write each value as text"
    # argparse would take such a value for the next option.
    if any(isinstance(value, str) and _OPTION_LIKE.match(value) for value in values):
        return f"gives {shown(key)} a value that starts with a dash", "write options as names of the map"
    return None


def _owner(name: str) -> str | None:
    """Return what to do instead of an option that ppdeploy owns under this name, None when it does not."""
    positive = name.removeprefix("no-")
    if positive in OWNED_FLAGS:
        return OWNED_FLAGS[positive]
    if positive.startswith("data-parallel-"):
        return _NO_DP
    if _SECRET_FLAG.search(positive):
        return OWNED_FLAGS["api-key"]
    # argparse completes unambiguous beginnings: `tensor-parallel` is `tensor-parallel-size`.
    if len(positive) > 1:
        for owned, remedy in OWNED_FLAGS.items():
            if owned.startswith(positive):
                return remedy
    return None


_ENV_FABRIC = "set ppdeploy_fabric_interface or ppdeploy_fabric_subnet instead"
_ENV_FOLDERS = "remove it: a rank writes to its own folders only, which the unit names"
_ENV_TRANSPORT = "remove it, and set ppdeploy_transport: the plan takes device and address from the fabric NIC"
_ENV_HIDDEN = "remove it: the environment is part of the plan and the release, which hold no secrets"
_ENV_LOADER = "remove it: it would make a rank run other code than the locked venv"
_ENV_OFFLINE = "remove it: ranks read the checked files of the release and never ask a hub"
_ENV_DP = "remove it: ppdeploy runs no data-parallel ranks"

OWNED_ENV: dict[str, str] = {
    "VLLM_HOST_IP": _ENV_FABRIC,
    "HOST_IP": _ENV_FABRIC,
    "GLOO_SOCKET_IFNAME": _ENV_FABRIC,
    "NCCL_SOCKET_IFNAME": _ENV_FABRIC,
    "TP_SOCKET_IFNAME": _ENV_FABRIC,
    "NCCL_SOCKET_FAMILY": _ENV_FABRIC,
    "NCCL_IB_DISABLE": _ENV_TRANSPORT,
    "NCCL_NET": _ENV_TRANSPORT,
    "NCCL_IB_HCA": _ENV_TRANSPORT,
    "NCCL_IB_GID_INDEX": _ENV_TRANSPORT,
    "CUDA_VISIBLE_DEVICES": "remove it: the plan sets it to exactly the GPUs of each rank",
    "CUDA_DEVICE_ORDER": "remove it: the plan counts GPUs in PCI order, as nvidia-smi does",
    "VLLM_PP_LAYER_PARTITION": "set ppdeploy_layer_partition instead",
    "VLLM_CPU_KVCACHE_SPACE": "set ppdeploy_kv_cache_gib instead",
    "VLLM_CPU_OMP_THREADS_BIND": "set ppdeploy_omp_threads_bind instead",
    "PPDEPLOY_HANDOFF": "set ppdeploy_handoff instead, which installs the plugin too",
    "PPDEPLOY_HANDOFF_STAGGER": "write it into ppdeploy_handoff instead: overlap:TOKENS or fp8:TOKENS",
    "PPDEPLOY_HANDOFF_SWITCH": "remove it: it is for measuring, and lets a file change the mode under the plan",
    "VLLM_TARGET_DEVICE": "set ppdeploy_device instead",
    "VLLM_PORT": "remove it: it is vLLM's own internal port; the API's is ppdeploy_api_port",
    "VLLM_MODEL_REDIRECT_PATH": "set ppdeploy_model instead",
    "HF_ENDPOINT": "set ppdeploy_hf_endpoint instead",
    "HF_HUB_OFFLINE": _ENV_OFFLINE,
    "TRANSFORMERS_OFFLINE": _ENV_OFFLINE,
    "VLLM_USE_MODELSCOPE": _ENV_OFFLINE,
    "MASTER_ADDR": "remove it: the plan passes --master-addr",
    "MASTER_PORT": "set ppdeploy_master_port instead",
    "RANK": _BY_PLAN,
    "LOCAL_RANK": _BY_PLAN,
    "WORLD_SIZE": _BY_PLAN,
    "HF_TOKEN": "set ppdeploy_hf_token in an ansible-vault file instead",
    "HUGGING_FACE_HUB_TOKEN": "set ppdeploy_hf_token in an ansible-vault file instead",
    "HUGGINGFACE_HUB_TOKEN": "set ppdeploy_hf_token in an ansible-vault file instead",
    "HF_TOKEN_PATH": "set ppdeploy_hf_token in an ansible-vault file instead",
    "HOME": _ENV_FOLDERS,
    "TMPDIR": _ENV_FOLDERS,
    "HF_HOME": _ENV_FOLDERS,
    "HF_HUB_CACHE": _ENV_FOLDERS,
    "XDG_CACHE_HOME": _ENV_FOLDERS,
    "XDG_CONFIG_HOME": _ENV_FOLDERS,
    "VLLM_CACHE_ROOT": _ENV_FOLDERS,
    "VLLM_CONFIG_ROOT": _ENV_FOLDERS,
    "VLLM_RPC_BASE_PATH": _ENV_FOLDERS,
    "PATH": _ENV_LOADER,
    "VIRTUAL_ENV": _ENV_LOADER,
    "LD_PRELOAD": _ENV_LOADER,
    "LD_LIBRARY_PATH": _ENV_LOADER,
    "LD_AUDIT": _ENV_LOADER,
    "PYTHONPATH": _ENV_LOADER,
    "PYTHONHOME": _ENV_LOADER,
    "PYTHONSTARTUP": _ENV_LOADER,
    "VLLM_SERVER_DEV_MODE": "remove it: it opens routes that stop the server or run code",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "remove it: it lets messages run code",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "remove it: a dead rank must end, so that the pipeline recovers",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "remove it: ranks on several nodes need it as it is",
    "VLLM_NO_USAGE_STATS": "remove it: usage statistics are always off",
    "VLLM_DO_NOT_TRACK": "remove it: usage statistics are always off",
    "DO_NOT_TRACK": "remove it: usage statistics are always off",
    "HF_HUB_DISABLE_TELEMETRY": "remove it: usage statistics are always off",
    "VLLM_USAGE_STATS_SERVER": "remove it: usage statistics are always off",
}
"""Environment variables that ppdeploy sets or excludes, with what to do instead."""

_SECRET_ENV = re.compile(r"(^|_)(API_?KEY|ACCESS_KEY(_ID)?|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_env(value: object) -> dict[str, str]:
    """Return the map with values as text (true and false as 1 and 0, as vLLM reads them), without nulls.

    Raises RefusedItemsError for every entry that ppdeploy owns, that names a secret or is no environment
    variable, ValueError for a value that is no map.
    """
    if not isinstance(value, dict):
        raise ValueError("it is not a map")
    refused: list[tuple[str, str]] = []
    taken: dict[str, str] = {}
    for key, item in value.items():
        problem = _refuse_env(key, item)
        if problem:
            refused.append(problem)
        elif isinstance(item, bool):
            taken[key] = "1" if item else "0"
        elif item is not None:
            taken[key] = str(item)
    if refused:
        raise RefusedItemsError(refused)
    return taken


def _refuse_env(key: object, item: object) -> tuple[str, str] | None:
    if not isinstance(key, str) or not _ENV_NAME.fullmatch(key):
        return f"has the name {shown(key)}", "use letters, digits and _ only, not starting with a digit"
    remedy = OWNED_ENV.get(key.upper())
    if remedy is None and key.upper().startswith("VLLM_DP_"):
        remedy = _ENV_DP
    if remedy is None and _SECRET_ENV.search(key.upper()):
        remedy = _ENV_HIDDEN
    if remedy:
        return f"sets {key}", remedy
    if item is not None and not isinstance(item, (str, int, float)):
        return f"gives {key} a value that is not text or a number", "write one value in quotes"
    try:
        plain(item)
    except ValueError as reason:
        return f"gives {key} a value that cannot be passed, since {reason}", "write one line of plain text"
    return None
