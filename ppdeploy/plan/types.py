"""The plan as data: all that is decided for each pipeline and node, frozen, JSON-ready and without secrets."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PLAN_SCHEMA = 1
"""Version of the JSON form; raised when a field changes its meaning or goes away."""

Verdict = Literal["ready", "slow", "blocked"]
Role = Literal["head", "worker"]


class Frozen(BaseModel):
    """Base of all plan types."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(Frozen):
    """One thing the plan noticed, with its verdict, its reason and what to do about it."""

    id: str
    verdict: Verdict
    pipeline: str
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


class Stage(Frozen):
    """A contiguous run of layers. `first_layer` counts from 0; the stage ends before `first_layer + layers`."""

    index: int
    first_layer: int
    layers: int


class PlannedFile(Frozen):
    """A file that lands on a node. Files `in_release` lie in the release folder and are hashed into its digest."""

    path: str
    template: str
    mode: str = "0644"
    owner: str = "root"
    group: str = "root"
    in_release: bool = True


class Model(Frozen):
    """The model of a pipeline: where it comes from, what it is, and where it lies on every node."""

    name: str
    kind: Literal["folder", "hub"]
    source: str = Field(description="folder on the controller, or repository id on the hub")
    commit: str | None = Field(description="pinned commit of a hub repository")
    architecture: str
    layers: int
    dtype: str
    weight_bytes: int
    manifest_digest: str
    directory: str


class Environment(Frozen):
    """The virtual environment that every rank of a pipeline runs in, named by its lock."""

    vllm_version: str
    torch_version: str
    lock: str = Field(description="file name of the lock")
    lock_digest: str
    python: str = Field(description="Python minor version, such as 3.11")
    directory: str


class Work(Frozen):
    """What apply has to do on a node, seen from the facts. It is no part of the release."""

    install_venv: bool
    place_model: bool
    install_unit: bool
    prepare_release: bool
    switch_release: bool
    restart: bool


class NodePlan(Frozen):
    """All that is decided for one node of a pipeline."""

    host: str
    address: str
    machine_id: str
    pipeline: str
    node_rank: int
    role: Role
    fabric: Fabric
    stages: tuple[Stage, ...]
    world_ranks: tuple[int, ...]
    devices: tuple[int, ...] = Field(description="indices of the GPUs in use; empty on cpu")
    unit: str
    argv: tuple[str, ...]
    rank_env: dict[str, str]
    nccl_env: dict[str, str]
    peers: tuple[str, ...] = Field(description="fabric addresses of the other nodes of the pipeline")
    ports: tuple[int, ...] = Field(description="TCP ports that this node's rank listens on with a fixed number")
    files: tuple[PlannedFile, ...]
    work: Work


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


class Plan(Frozen):
    """The plans of all pipelines of a cluster."""

    plan_schema: int = PLAN_SCHEMA
    cluster: str
    pipelines: tuple[PipelinePlan, ...]

    def node(self, host: str) -> tuple[PipelinePlan, NodePlan]:
        """Return the pipeline and the node plan of `host`; KeyError when the plan does not have it."""
        for pipeline in self.pipelines:
            for node in pipeline.nodes:
                if node.host == host:
                    return pipeline, node
        raise KeyError(host)

    def blocked(self) -> list[Finding]:
        """Return the findings of all pipelines that forbid touching a host."""
        return [finding for pipeline in self.pipelines for finding in pipeline.blocked()]
