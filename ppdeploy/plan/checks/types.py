"""What a check is: a pure function over a situation, with its id, its worst verdict, its remedy and its source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from ppdeploy.facts import Nic, NodeFacts
from ppdeploy.plan.types import DriverPlan, Fabric, Rdma, Verdict
from ppdeploy.probes import Listener, NodeProbe, PeerProbe

Scope = Literal["node", "pair", "pipeline"]


@dataclass(frozen=True)
class Outcome:
    """What a check came to. Without `judged` nobody knows: the verdict is then `ready` and the evidence says why."""

    verdict: Verdict
    evidence: str
    remedy: str = ""
    judged: bool = True
    host: str | None = None
    """The node at fault, where a pipeline's check knows it."""


@dataclass(frozen=True)
class Fault:
    """What is wrong: evidence, and the values that the check's remedy names. `remedy` replaces the check's own."""

    evidence: str
    values: Mapping[str, object] = field(default_factory=dict)
    remedy: str | None = None
    host: str | None = None


@dataclass(frozen=True)
class Fine:
    """Nothing is wrong, or nothing that our variables do not make harmless; the evidence says what was seen."""

    evidence: str


@dataclass(frozen=True)
class Unknown:
    """The check could not be made, or has nothing to judge here; the evidence says why."""

    evidence: str


Answer = Fault | Fine | Unknown


@dataclass(frozen=True)
class NodeSituation:
    """What the node checks look at. What is None is decided by a plan, and there is none or it was blocked."""

    pipeline: str
    device: str
    host: str
    facts: NodeFacts
    node_rank: int
    master_port: int
    api_port: int
    models_dir: str
    unit: str
    python: str | None = None
    """Python minor version of the environment, such as 3.11."""
    python_package: str = ""
    """The package that an apply installs where that Python is not there; empty: it installs none."""
    brings_rsync: bool = False
    """Whether an apply installs rsync where it is not there, from the bundle."""
    venv_bytes_missing: int = 0
    driver_copy_bytes: int = 0
    """What an apply copies to the node for a while, of the driver in the bundle."""
    driver_bytes: int = 0
    """The least that it takes installed: its packages, which are larger unpacked."""
    model_bytes_missing: int = 0
    model_folder: str | None = None
    """Name of the model's folder in `models_dir`."""
    stage_bytes: int | None = None
    """Bytes of weights that the node reads at a start, of all its stages."""
    gpus_needed: int | None = None
    sidecar_ports: Mapping[int, str] = field(default_factory=dict)
    gateway_ports: Mapping[int, str] = field(default_factory=dict)
    """Ports that its gateway listens on, with the variables that name them."""
    """Unit of the sidecar that is to have each port."""
    vllm: str | None = None
    """Version of vLLM that the environment is to have."""
    venv: str | None = None
    """Name of the environment's folder."""
    fabric: Fabric | None = None
    mtu_wanted: int | None = None
    """The MTU that an apply sets on every fabric NIC; None: each keeps its own."""
    rdma: Rdma | None = None
    driver: DriverPlan | None = None
    """What is done about its NVIDIA driver."""
    probe: NodeProbe | None = None
    probe_problem: str = ""
    """Why the node could not look at its peers, where it was asked to."""
    listener: Listener | None = None
    received: float | None = None
    """The controller's clock, in seconds since 1970, at any time after the facts came."""

    @property
    def nic(self) -> Nic | None:
        """The fabric NIC; None on one node, whose ranks talk on loopback, and where no fabric was found."""
        return self.facts.nic(self.fabric.interface) if self.fabric and self.fabric.interface != "lo" else None

    @property
    def serving(self) -> bool:
        """Whether our own rank runs here."""
        return self.facts.rank_runs(self.pipeline)


@dataclass(frozen=True)
class PairSituation:
    """What the pair checks look at: the way from one node of a pipeline to another."""

    pipeline: str
    sender: NodeSituation
    receiver: NodeSituation

    @property
    def seen(self) -> PeerProbe | None:
        """What the sender saw of the receiver."""
        probe, fabric = self.sender.probe, self.receiver.fabric
        return probe.peers.get(fabric.address) if probe and fabric else None

    def back(self) -> PairSituation:
        """Return the way back."""
        return PairSituation(self.pipeline, self.receiver, self.sender)


@dataclass(frozen=True)
class PipelineSituation:
    """What the pipeline checks look at. `nodes` are those whose facts are known, `hosts` all of the inventory."""

    pipeline: str
    device: str
    hosts: Sequence[str]
    nodes: Sequence[NodeSituation]
    fabric_problem: str | None = None
    """Why no fabric could be chosen, with what to do."""
    plan_problem: str | None = None
    """Why no plan could be made, with what to do."""
    others: Mapping[str, Sequence[NodeSituation]] = field(default_factory=dict)
    """The nodes of the pipelines that stand before this one in the inventory."""

    @property
    def facts(self) -> dict[str, NodeFacts]:
        """The facts of each node."""
        return {node.host: node.facts for node in self.nodes}


Situation = TypeVar("Situation", NodeSituation, PairSituation, PipelineSituation)
Judge = Callable[[Situation], Answer]


@dataclass(frozen=True)
class Check(Generic[Situation]):
    """One check."""

    id: str
    scope: Scope
    verdict: Verdict
    """What it says where something is wrong: `blocked`, a run must not start; `slow`, it costs speed or care."""
    looks_at: str
    """What must hold, in a few words."""
    remedy: str
    """What to do, a command where there is one; names in braces are values that the fault names."""
    source: str
    """Where the rule comes from."""
    judge: Judge[Situation]
    in_plan: bool
    """It needs facts alone and is, where it is blocked, a finding of the plan, which stops an apply."""

    def outcome(self, situation: Situation) -> Outcome:
        """Return what the check comes to in a situation."""
        answer = self.judge(situation)
        if isinstance(answer, Fault):
            remedy = self.remedy.format(**answer.values) if answer.remedy is None else answer.remedy
            return Outcome(self.verdict, answer.evidence, remedy, host=answer.host)
        return Outcome("ready", answer.evidence, judged=isinstance(answer, Fine))

    def general_remedy(self) -> str:
        """Return the remedy for reading, without a case at hand: `{interface}` becomes `INTERFACE`."""
        return re.sub(r"\{(\w+)\}", lambda name: name.group(1).upper(), self.remedy)


class Checks(Generic[Situation]):
    """The checks of one scope, in the order in which they are told."""

    def __init__(self, scope: Scope) -> None:
        self.scope: Scope = scope
        self._found: dict[str, Check[Situation]] = {}

    def add(
        self, name: str, verdict: Verdict, looks_at: str, *, remedy: str, source: str, in_plan: bool = True
    ) -> Callable[[Judge[Situation]], Judge[Situation]]:
        """Return a decorator that makes a function a check."""

        def register(judge: Judge[Situation]) -> Judge[Situation]:
            if name in self._found:
                raise ValueError(f"there are two checks {name}")
            self._found[name] = Check(name, self.scope, verdict, looks_at, remedy, source, judge, in_plan)
            return judge

        return register

    def __iter__(self) -> Iterator[Check[Situation]]:
        return iter(self._found.values())

    def __getitem__(self, name: str) -> Check[Situation]:
        return self._found[name]


NODE: Checks[NodeSituation] = Checks("node")
PAIR: Checks[PairSituation] = Checks("pair")
PIPELINE: Checks[PipelineSituation] = Checks("pipeline")


def millis(seconds: float) -> str:
    """Return a short time in milliseconds."""
    return f"{seconds * 1000:.2f} ms"
