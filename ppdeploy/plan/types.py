"""The plan as data: all that is decided for each pipeline and node, frozen, JSON-ready and without secrets."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

PLAN_SCHEMA = 1
"""Version of the JSON form; raised when a field changes its meaning or goes away."""

Verdict = Literal["ready", "slow", "blocked"]
Role = Literal["head", "worker"]
Goal = Literal["throughput", "context", "latency"]


class Frozen(BaseModel):
    """Base of all plan types."""

    # What is printed has every field, whether or not it has a default.
    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_serialization_defaults_required=True)


class Finding(Frozen):
    """One thing the plan noticed, with its verdict, its reason and what to do about it."""

    id: str
    verdict: Verdict
    pipeline: str = Field(description="empty: of a host that is in none")
    host: str | None = None
    reason: str
    remedy: str = ""

    def sentence(self) -> str:
        """Return the finding as one sentence: what is wrong, where, what to do next."""
        where = self.host or f"pipeline {self.pipeline}"
        return f"{self.reason} ({where})" + (f": {self.remedy}" if self.remedy else "")


class Fabric(Frozen):
    """The NIC and address on which the ranks of a node talk, and why it was chosen."""

    interface: str
    address: str
    network: str
    speed_mbit: int | None = Field(description="negotiated rate in Mbit/s; None when the NIC does not say")
    mtu: int | None
    reason: str


class TunnelPeer(Frozen):
    """One end of a pipeline's tunnel."""

    host: str
    address: str = Field(description="in the tunnel")
    endpoint: str = Field(description="on the wire: the address of its fabric NIC")
    public_key: str = Field(description="as WireGuard writes it; empty: its node makes it with the next apply")


class TunnelPlan(Frozen):
    """The tunnel that a node's fabric goes through. Of it, the release has the addresses alone."""

    kind: Literal["wireguard", "wireguard-go"] = Field(description="by the kernel, or by a program in user space")
    interface: str
    address: str
    network: str
    mtu: int = Field(description="bytes: the smallest of the pipeline's fabric NICs, less what WireGuard adds")
    port: int = Field(description="UDP port on which every end is reached")
    public_key: str = Field(description="of this node; empty: it makes it with the next apply")
    wire: Fabric = Field(description="the NIC and address below it")
    open: bool = Field(default=False, description="the node has the interface with this address already")
    peers: tuple[TunnelPeer, ...]

    @property
    def ip_network(self) -> IPv4Network:
        """The tunnel's network, as the standard library's type."""
        return IPv4Network(self.network)


class Rdma(Frozen):
    """The RDMA port behind the fabric NIC of a node, over which NCCL sends what is on its GPUs."""

    device: str = Field(description="such as mlx5_0; its first port is used")
    link_layer: Literal["Ethernet", "InfiniBand"]
    gid_index: int | None = Field(description="of the fabric address, as RoCE v2; None on InfiniBand")


class Stage(Frozen):
    """A contiguous run of layers. `first_layer` counts from 0; the stage ends before `first_layer + layers`."""

    index: int
    first_layer: int
    layers: int


class StageMemory(Frozen):
    """The memory of one stage, in bytes of each of its GPUs (of the host, on cpu). An estimate of what vLLM will say.

    `others` + `runtime` + `weight` + `activation` + `graph` + `kv_used` + `free` is the whole memory.
    """

    stage: int
    host: str
    node_rank: int
    first_layer: int
    layers: int
    device: str = Field(description="name of the GPU, or CPU")
    gpus: int = Field(description="GPUs that share the stage (TP)")
    memory_bytes: int = Field(description="what CUDA has of one GPU; with several kinds in one stage, of the smallest")
    utilization: float | None = Field(description="share that vLLM may take; None on cpu")
    others_bytes: int = Field(description="used by other programs, in whole GiB, and what sidecars may take")
    runtime_bytes: int = Field(description="CUDA context and NCCL, beside vLLM's share; on cpu the process itself")
    weight_bytes: int
    activation_bytes: int = Field(description="the most that a step needs besides")
    graph_bytes: int = Field(description="CUDA graphs")
    kv_bytes: int = Field(description="left for the KV cache")
    kv_used_bytes: int = Field(description="what is used of it: as many blocks as the stage with the fewest has")
    free_bytes: int = Field(description="used by nobody; negative: lacking")
    kv_block_bytes: int = Field(description="one block of KV cache in the layers of this stage")
    kv_blocks: int = Field(description="blocks that this stage has room for")
    shortfall_bytes: int = Field(description="lacking for one request of the longest length; 0: it fits")


class Change(Frozen):
    """A change that makes a pipeline fit, verified by the same computation as the plan."""

    what: str = Field(description="the change, as a remedy is written")
    setting: dict[str, JsonValue] = Field(description="variables that make it; empty: none does (more nodes)")
    longest_context: int = Field(description="longest request in tokens that then fits")
    kv_tokens: int = Field(description="KV cache in tokens that there then is")
    estimate: bool = Field(default=False, description="the sizes of weights are a guess, not read from a checkpoint")


class Capacity(Frozen):
    """What the KV cache of a pipeline holds, and what would help where it does not fit."""

    fits: bool
    max_model_len: int = Field(description="tokens of the longest request that is to be served")
    kv_tokens: int = Field(description="as vLLM logs it: requests_at_max x max_model_len")
    longest_context: int = Field(description="tokens of the longest request that fits, up to the model's own limit")
    requests_at_max: float = Field(description="requests of the longest length at once")
    requests_at_4k: float = Field(description="requests of 4096 tokens at once")
    limiting_stage: int = Field(description="the stage that sets the limit")
    shortfall_bytes: int = Field(description="what that stage lacks on each GPU; 0: it fits")
    kv_cache_dtype: str
    batched_tokens: int = Field(description="max_num_batched_tokens")
    sequences: int = Field(description="max_num_seqs")
    changes: tuple[Change, ...] = Field(default=(), description="the nearest changes that would make it fit")


class Speed(Frozen):
    """What `vllm bench serve` is expected to report for so many users at once."""

    concurrency: int
    ttft_seconds: float = Field(description="median time to the first token")
    tpot_seconds: float = Field(description="median time of each further token")
    tokens_per_second: float = Field(description="output tokens of all users together")


class Curve(Frozen):
    """Speed over the number of users, with one rate on all links between hosts."""

    rate_mbit: int | None = Field(description="rate of all links between hosts; None: as they are")
    speeds: tuple[Speed, ...]


class StageLink(Frozen):
    """The way from one stage to the next, and what it does to the pipeline."""

    index: int = Field(description="it leads from stage `index` to the next one")
    sender: str = Field(description="host of the stage before it")
    receiver: str = Field(description="host of the stage behind it; the sender itself: it does not leave the host")
    rate_mbit: int | None = Field(description="the lower of the NICs' negotiated rates; None: not known, or no NIC")
    measured_mbit: float | None = Field(
        default=None, description="TCP payload that `ppdeploy net` measured, taken in place of it; None: not measured"
    )
    measured_latency_seconds: float | None = Field(default=None, description="one way, measured; None: not measured")
    measured_at: str = Field(default="", description="when, in UTC; empty: not measured")
    seconds_per_1000_tokens: float | None = Field(description="for 1,000 prompt tokens; None: not known")
    verdict: Verdict
    judged: bool = Field(default=True, description="False: no speed is predicted, so `verdict` says nothing")
    reason: str
    remedy: str = ""
    faster: str = Field(default="", description="next faster usual Ethernet; empty: none, or not compared")
    gain: float = Field(default=1.0, description="output tokens/s at 32 users with it, over those now")


class NetworkCost(Frozen):
    """What the links between hosts cost a pipeline, against the same pipeline on a network that takes no time."""

    first_token_seconds: float = Field(description="added to a lone user's first token")
    further_token_seconds: float = Field(description="added to each further token of a lone user")
    further_token_share: float = Field(description="that as a share of the time of a further token")
    tokens_per_second: float = Field(description="output tokens of 32 users, with the links as they are")
    faster: str = Field(default="", description="a faster usual Ethernet; empty: there is none")
    faster_tokens_per_second: float = Field(description="output tokens of 32 users with it on all links as slow")


class RefinedLoad(Frozen):
    """A load that was measured on this cluster, with what the plan says of it. The measured is a mean of its runs."""

    input_tokens: int
    output_tokens: int
    prompts: int = Field(description="requests in all")
    runs: int = Field(description="how often it was measured")
    measured: Speed
    plain: Speed = Field(description="predicted without any benchmark")
    refined: Speed = Field(description="predicted with the factors below")


class Refinement(Frozen):
    """What the cluster's own benchmarks (`ppdeploy bench`) make of the prediction."""

    benchmarks: int = Field(description="how many of them were made with this model, split, devices, links and chunk")
    latest: str = Field(description="when the latest began, in UTC")
    factor: float = Field(description="tokens/s that are expected by them, over those of the plain prediction")
    compute: float = Field(description="factor on the share of the computing rate")
    memory: float = Field(description="factor on the share of the memory bandwidth")
    step: float = Field(description="factor on the seconds of a step on each stage that are neither")
    request: float = Field(description="factor on the seconds of a request outside the stages")
    link: float = Field(description="factor on the payload of the links")
    speeds: tuple[Speed, ...] = Field(description="as `speeds` of the outlook, refined")
    loads: tuple[RefinedLoad, ...]


class Outlook(Frozen):
    """The speed to expect of a pipeline. A prediction (docs/speed.md), and no part of the release."""

    unknown: str = Field(default="", description="why no speed is predicted; empty: it is")
    rough: str = Field(default="", description="why only the order of magnitude holds; empty: it is what was measured")
    input_tokens: int = Field(description="tokens of each prompt that is predicted for")
    output_tokens: int = Field(description="tokens of each answer")
    latency_seconds: float = Field(description="one way between two hosts, as assumed where none was measured")
    handoff_bytes: int = Field(default=0, description="bytes of one token's handoff from a stage to the next")
    speeds: tuple[Speed, ...] = ()
    links: tuple[StageLink, ...] = ()
    network: NetworkCost | None = Field(default=None, description="what the links cost; None: no speed, or one host")
    limiting_link: int | None = Field(default=None, description="index of the link on which a prompt token takes most")
    requests_to_fill: int | None = Field(default=None, description="requests at once that keep all stages busy")
    best_batched_tokens: int | None = Field(
        default=None, description="max_num_batched_tokens that serves 32 users best; None: not compared"
    )
    best_speeds: tuple[Speed, ...] = Field(default=(), description="with that value, where it is another")
    handoff: str = Field(
        default="off", description="the mode of ppdeploy_handoff that is predicted for: off where it is off or idle"
    )
    overlap_batched_tokens: int | None = Field(
        default=None, description="max_num_batched_tokens that would serve best with ppdeploy_handoff: overlap"
    )
    overlap_speeds: tuple[Speed, ...] = Field(
        default=(), description="with both, where the plugin knows the pipeline and is off"
    )
    curves: tuple[Curve, ...] = Field(default=(), description="for drawings, where they were asked for")
    refinement: Refinement | None = Field(
        default=None, description="by the cluster's own benchmarks; None: there is none that fits this plan"
    )


class PlannedFile(Frozen):
    """A file that lands on a node. Files `in_release` lie in the release folder and are hashed into its digest."""

    path: str
    template: str
    part: Literal["rank", "agent", "sidecar", "tuning", "gateway", "driver", "firewall", "tunnel"] = Field(
        default="rank", description="what the file is for; only a change of the rank's restarts the gang"
    )
    sidecar: str = Field(default="", description="name of the sidecar that the file is for")
    mode: str = "0644"
    owner: str = "root"
    group: str = "root"
    in_release: bool = True


class Model(Frozen):
    """The model of a pipeline: where it comes from, what it is, and where it lies on every node."""

    name: str
    kind: Literal["folder", "hub", "mirror"]
    source: str = Field(description="folder on the controller, repository id on the hub, or address of a mirror")
    commit: str | None = Field(description="pinned commit of a hub repository")
    architecture: str
    layers: int
    dtype: str = Field(description="format of weights that are not quantised: the inventory's, else the checkpoint's")
    quantization: str | None = Field(
        default=None, description="method of the weights in memory: the checkpoint's, or one at loading; None: none"
    )
    parameters: int = Field(default=0, description="as publishers count them, with all routed experts")
    active_parameters: int = Field(default=0, description="those that a token is multiplied with; fewer with experts")
    loaded_bytes: int = Field(default=0, description="weights in memory, on all GPUs together")
    weight_bytes: int = Field(description="of the weight files; 0: there are none")
    manifest_digest: str = Field(description="of all its files")


class NodeModel(Frozen):
    """The files of the model on one node."""

    directory: str
    manifest_digest: str = Field(description="of the files that lie on this node")
    bytes: int
    files: tuple[str, ...] | None = Field(
        default=None, description="those of the node's own stages, where it does not get all; None: all"
    )


class Environment(Frozen):
    """The virtual environment that every rank of a pipeline runs in, named by its lock."""

    vllm_version: str
    torch_version: str
    lock: str = Field(description="file name of the lock")
    lock_digest: str
    python: str = Field(description="Python minor version, such as 3.11")
    directory: str


class SystemPackage(Frozen):
    """What the environment needs of a node's system, and the package to install where that is not there."""

    package: str
    kind: Literal["python", "headers", "program", "library", "daemon"]
    value: str = Field(
        description="which one: a minor version, programs any of which will do, a library's name; of a daemon its "
        "program, whose own service, named as the package, is left off"
    )


class Work(Frozen):
    """What apply has to do on a node, seen from the facts. It is no part of the release."""

    install_venv: bool
    place_model: bool
    install_unit: bool
    prepare_release: bool
    switch_release: bool
    restart: bool


class SidecarPlan(Frozen):
    """A second model on a node: a lone `vllm serve`, which systemd starts again by itself."""

    name: str
    unit: str
    model: str
    port: int
    devices: tuple[int, ...] = Field(description="indices of its GPUs; empty on cpu")
    memory_bytes: int = Field(description="what it may take of each of them (of the host, on cpu)")
    argv: tuple[str, ...]
    env: dict[str, str]


class AgentPlan(Frozen):
    """The agent of a node. It is no part of the release."""

    cluster: str
    node: str = Field(description="the host, as the release names it")
    port: int = Field(description="TCP port on which agents ask each other")
    listen: tuple[str, ...] = Field(description="addresses on which it is asked")
    clients: tuple[str, ...] = Field(description="networks from which it may be asked, beside this host")
    device: Literal["cuda", "cpu"]
    settings: dict[str, int] = Field(description="limits of the protocol by their names in ppdeploy/agent/settings.py")


class NicSetting(Frozen):
    """One thing that can be tuned on a node, and what was decided about it."""

    key: str = Field(description="what is set, as plugins/modules/ppdeploy_nic.py knows it")
    verdict: Literal["set", "waits", "kept", "unsupported", "off"] = Field(
        description="set: it gets `value`; waits: it gets it at the next boot, or by an apply while no rank runs; "
        "kept: as it is, it is right; unsupported: this host cannot; off: no variable asks for it"
    )
    before: str = Field(default="", description="what the host had before ppdeploy tuned anything; empty: not known")
    value: str = Field(default="", description="what it is set to")
    reason: str


class TuningPlan(Frozen):
    """What is tuned on a node. It is no part of the release."""

    interface: str
    manager: Literal["networkd", "NetworkManager", "ifupdown"] | None = Field(
        description="who configures the NIC; None: not known"
    )
    settings: tuple[NicSetting, ...]

    def wanted(self) -> dict[str, str]:
        """Return the values of what is tuned, by key."""
        return {one.key: one.value for one in self.settings if one.verdict in {"set", "waits"}}


class GatewayServer(Frozen):
    """One pipeline as a gateway sees it: behind the loopback of its own head, or behind its head's gateway."""

    pipeline: str
    address: str
    port: int
    health_port: int = Field(description="where its health is asked: the agent, or the other gateway itself")
    verify: str = Field(default="", description="name in the other gateway's certificate; empty: it is on loopback")
    most: int = Field(description="requests that it gets at once; the others wait")


class GatewayModel(Frozen):
    """A model as clients name it, and the pipelines that serve it."""

    backend: str = Field(description="its name in HAProxy's configuration")
    names: tuple[str, ...] = Field(description="the served name first, then those of adapters")
    max_model_len: int
    servers: tuple[GatewayServer, ...]


class GatewayPeers(Frozen):
    """Where other gateways reach that of a head, by mutual TLS."""

    address: str
    port: int
    callers: tuple[str, ...] = Field(description="names of the gateways that may call")


class GatewayPlan(Frozen):
    """The gateway of a host. It is no part of the release."""

    address: str = Field(description="where it listens; * is every IPv4 address")
    port: int
    metrics_port: int
    certificate: str = Field(description="file on the host")
    certificate_is_ours: bool = Field(description="False: somebody else makes it and renews it")
    names: tuple[str, ...] = Field(description="names and addresses of the certificate that is made")
    models: tuple[GatewayModel, ...]
    peer_name: str = Field(
        default="", description="its name in its certificate for other gateways; empty: it is the only one"
    )
    peers: GatewayPeers | None = Field(default=None, description="None: no other gateway, or it is no head's")
    rate: int = Field(description="requests of one key within a minute")
    concurrency: int = Field(description="requests of one key at once")
    balance: Literal["leastconn", "prefix"] = Field(description="how one of several pipelines of a model is chosen")
    queue: int = Field(description="requests that may wait for one model")
    body_mib: int
    timeout: int = Field(description="seconds")
    drain: int = Field(description="seconds")

    @property
    def routes(self) -> bool:
        """Whether the `model` of a request decides where it goes."""
        return len(self.models) > 1

    @property
    def several(self) -> bool:
        """Whether it leads to several pipelines."""
        return sum(len(model.servers) for model in self.models) > 1

    @property
    def reads_bodies(self) -> bool:
        """Whether what is in a request decides where it goes."""
        return self.routes or (self.balance == "prefix" and any(len(model.servers) > 1 for model in self.models))

    def url(self, host_address: str) -> str:
        """Return where clients ask; `host_address` is where Ansible reaches the host."""
        return f"https://{host_address if self.address == '*' else self.address}:{self.port}"


DriverSource = Literal["nvidia", "distribution"]


class FirewallPlan(Frozen):
    """The host's own table of nftables."""

    interface: str = Field(description="the fabric NIC, or the tunnel over it")
    wire: str = Field(default="", description="the NIC below the tunnel; empty: there is none")
    wire_peers: tuple[str, ...] = Field(default=(), description="addresses on it of the hosts that reach the ranks")
    peers: tuple[str, ...] = Field(description="fabric addresses that reach the ranks")
    agent_port: int
    agent_clients: tuple[str, ...] = Field(description="networks that reach the agent")
    closed: tuple[str, ...] = Field(description="TCP ports, or ranges of them, that nobody else reaches")
    ephemeral: str = Field(description="ports of the fabric NIC that peers alone reach, as FIRST-LAST")


class Keyring(Frozen):
    """The package that makes a host trust NVIDIA's repository, and lists it."""

    url: str
    sha256: str


class DriverPlan(Frozen):
    """What is done about the NVIDIA driver of a node. It is no part of the release."""

    action: Literal["none", "keep", "install", "reboot", "load", "settle", "blocked"] = Field(
        description="none: no driver is needed; keep: it works and is new enough; install: packages are installed; "
        "reboot: it is installed and takes a reboot; load: its module is loaded; settle: it works, and what keeps it "
        "so is brought back; blocked: nothing is done to any node until `remedy` is"
    )
    reason: str
    remedy: str = ""
    version: str | None = Field(default=None, description="what is there now; None: none")
    ours: bool = Field(default=False, description="an apply installed it or will, so that files of ours keep it")
    cards: int = Field(default=0, description="NVIDIA's cards on the PCI bus that the host itself may use")
    source: DriverSource | None = Field(default=None, description="whose packages are, or are to be, installed by us")
    manager: Literal["apt", "dnf"] | None = None
    platform: str = Field(default="", description="what NVIDIA calls the system in its repositories")
    branch: int | None = Field(default=None, description="branch of the driver that is installed, such as 580")
    packages: tuple[str, ...] = Field(default=(), description="what is installed, as the package manager takes it")
    from_bundle: bool = Field(
        default=False, description="packages come from the bundle in ppdeploy_wheelhouse, and from nowhere else"
    )
    stream: str = Field(default="", description="module stream that dnf is given first")
    repository: str = Field(default="", description="its address; empty: the distribution's own, or the bundle")
    mirror: bool = Field(default=False, description="the repository is a mirror that the inventory names")
    key: str = Field(default="", description="file or address of the key that the repository is signed with")
    keyring: Keyring | None = None
    ca_bundle: str = Field(default="", description="file on the node that dnf checks the repository's certificate with")
    finish: bool = Field(default=False, description="an interrupted installation is ended first")
    rebuild: tuple[str, ...] = Field(default=(), description="kernels that DKMS builds the module for afterwards")
    held: str = Field(default="", description="regular expression of packages that no upgrade by itself may touch")
    initramfs: str = Field(
        default="", description="program that makes the image a boot starts from; empty: there is none"
    )
    reboot: bool = False
    reboot_reason: str = ""

    @property
    def pending(self) -> bool:
        """Whether an apply has something to do about it."""
        return self.action in ("install", "reboot", "load", "settle")


class NodePlan(Frozen):
    """All that is decided for one node of a pipeline."""

    host: str
    address: str
    machine_id: str
    pipeline: str
    node_rank: int
    role: Role
    fabric: Fabric
    tunnel: TunnelPlan | None = Field(
        default=None, description="None: ppdeploy_fabric_encryption is none, or the node is alone"
    )
    rdma: Rdma | None = Field(default=None, description="None: the ranks talk by TCP alone")
    model: NodeModel
    stages: tuple[Stage, ...]
    world_ranks: tuple[int, ...]
    devices: tuple[int, ...] = Field(description="indices of the GPUs in use; empty on cpu")
    unit: str
    argv: tuple[str, ...]
    rank_env: dict[str, str]
    nccl_env: dict[str, str]
    peers: tuple[str, ...] = Field(description="fabric addresses of the other nodes of the pipeline")
    ports: tuple[int, ...] = Field(description="TCP ports that this node's rank listens on with a fixed number")
    agent: AgentPlan
    sidecars: tuple[SidecarPlan, ...] = ()
    tuning: TuningPlan
    gateway: GatewayPlan | None = Field(
        default=None, description="None: a worker that is not in the group `gateway`, or ppdeploy_gateway is false"
    )
    driver: DriverPlan
    packages: tuple[SystemPackage, ...] = Field(
        default=(), description="what the environment needs of the system. It is no part of the release."
    )
    package_manager: Literal["apt", "dnf"] | None = Field(default=None, description="None: it has none that is known")
    firewall: FirewallPlan | None = Field(default=None, description="None: ppdeploy_firewall is none")
    files: tuple[PlannedFile, ...]
    work: Work

    @property
    def wire(self) -> Fabric:
        """The NIC below the tunnel where there is one, else the fabric itself."""
        return self.tunnel.wire if self.tunnel else self.fabric

    @property
    def wire_peers(self) -> tuple[str, ...]:
        """The other nodes' addresses on the wire."""
        return tuple(peer.endpoint for peer in self.tunnel.peers) if self.tunnel else self.peers


class PipelinePlan(Frozen):
    """One model served by one group of hosts."""

    name: str
    device: Literal["cuda", "cpu"]
    model: Model
    served_model_name: str
    environment: Environment
    tensor_parallel_size: int
    pipeline_parallel_size: int
    partition: tuple[int, ...] = Field(description="layers of each stage; their sum is the model's layers")
    goal: Goal = Field(description="what the split was chosen for")
    memory: tuple[StageMemory, ...] = Field(description="the memory of each stage, in order")
    capacity: Capacity
    outlook: Outlook
    head: str
    master_addr: str
    master_port: int
    api_port: int
    start_timeout: int = Field(description="seconds that the ranks may take until the API answers")
    nodes: tuple[NodePlan, ...]
    findings: tuple[Finding, ...]
    release: str = Field(default="", description="release digest: sha256 of the canonical release.json")

    @property
    def world_size(self) -> int:
        """Number of world ranks: tensor parallel size times pipeline parallel size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def blocked(self) -> list[Finding]:
        """Return the findings that forbid touching a host."""
        return [finding for finding in self.findings if finding.verdict == "blocked"]


class GatewayHostPlan(Frozen):
    """All that is decided for a host of the group `gateway` that is in no pipeline."""

    host: str
    address: str
    gateway: GatewayPlan
    files: tuple[PlannedFile, ...]
    findings: tuple[Finding, ...] = ()


class Plan(Frozen):
    """The plans of all pipelines of a cluster."""

    plan_schema: int = PLAN_SCHEMA
    cluster: str
    pipelines: tuple[PipelinePlan, ...]
    gateways: tuple[GatewayHostPlan, ...] = Field(
        default=(), description="gateways outside of all pipelines; those of nodes are with the nodes"
    )
    assumed: tuple[str, ...] = Field(
        default=(), description="hosts whose facts were written by hand or made up by a what-if: no plan to apply"
    )

    def node(self, host: str) -> tuple[PipelinePlan, NodePlan]:
        """Return the pipeline and the node plan of `host`; KeyError when the plan does not have it."""
        for pipeline in self.pipelines:
            for node in pipeline.nodes:
                if node.host == host:
                    return pipeline, node
        raise KeyError(host)

    def outside(self, host: str) -> GatewayHostPlan | None:
        """Return what was decided for a gateway outside of all pipelines; None: `host` is none."""
        return next((one for one in self.gateways if one.host == host), None)

    def blocked(self) -> list[Finding]:
        """Return the findings of all pipelines and gateways that forbid touching a host."""
        own = [finding for pipeline in self.pipelines for finding in pipeline.blocked()]
        return own + [found for one in self.gateways for found in one.findings if found.verdict == "blocked"]
