"""The network's verdict: from what the nodes measured to ready, slow or blocked for each way between two of them. Pure.

What was measured is kept on the controller and feeds the plan: see `measured_links`, `kept_links` and
`ppdeploy.plan.measured`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ppdeploy.paths import kept_dir
from ppdeploy.plan.measured import MeasuredLink, negotiated_mbit
from ppdeploy.plan.network import TCP_GOODPUT
from ppdeploy.plan.types import Fabric, NodePlan, Outlook, PipelinePlan
from ppdeploy.plan.words import measured_text

NET_SCHEMA = 1
"""Version of the report's JSON form, which is also what is kept; raised when a field changes its meaning or goes."""

ENOUGH = 0.9
"""Share of what TCP can carry at the negotiated rate from which a way is ready. Good Ethernet gives 98 % and more."""

LOSS = 0.01
"""Share of lost pings above which a way is slow: TCP halves its rate for each loss that it sees."""

LONG_WAY = 1e-3
"""Seconds of a round trip above which a way is slow: two hosts on a switch need 0.05 to 0.3 ms."""

UNNOTICED = 0.05
"""Share of a token's time below which nobody notices what the network adds to it."""

WORTH = 1.05
"""A faster network that gives less than this much more is not named."""

TOKENS = (1, 16, 256, 1024, 4096, 8192)
"""Sizes of the handoffs that are measured: of one token, as in decoding, to a step's usual most."""

MEET_SECONDS = 60
"""What the handoff probe's start may take: it imports torch."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Latency(_Frozen):
    """Round trips of pings, both ways together; `sent` and `lost` count pings."""

    p50_seconds: float | None
    p99_seconds: float | None
    sent: int
    lost: int


class Throughput(_Frozen):
    """One run of iperf3: payload as the receiver counted it, and segments that the sender had to send again."""

    flows: int
    mbit: float
    bytes: int
    seconds: float
    retransmits: int | None


class Handoff(_Frozen):
    """One size of handoff between two nodes, sent as vLLM sends it."""

    tokens: int
    bytes: int
    count: int = Field(description="how often it was measured; 0: it was left out, as it would take too long")
    p50_seconds: float | None = None
    p99_seconds: float | None = None
    wire_seconds: float | None = Field(
        default=None, description="what these bytes need at the throughput that iperf3 measured, latency included"
    )


class Way(_Frozen):
    """The way from one node to another."""

    sender: str
    receiver: str
    addresses: tuple[str, str]
    negotiated_mbit: int | None = Field(description="the lower of the NICs' negotiated rates; None: one does not say")
    next: bool = Field(description="whether the receiver has the stage after the sender's: handoffs go this way")
    latency: Latency | None = None
    one_flow: Throughput | None = None
    many_flows: Throughput | None = None
    wire: Throughput | None = Field(
        default=None, description="as many_flows, beside the tunnel; None: not measured, or there is no tunnel"
    )
    handoffs: tuple[Handoff, ...] = ()
    verdict: Literal["ready", "slow", "blocked"] | None = Field(description="None: it was not measured")
    reason: str
    remedy: str = ""

    @property
    def rate_mbit(self) -> float | None:
        """Return the payload that TCP got through at best, Mbit/s; of the largest handoff where iperf3 did not run."""
        runs = [run.mbit for run in (self.one_flow, self.many_flows) if run]
        if runs:
            return max(runs)
        largest = next((one for one in reversed(self.handoffs) if one.p50_seconds), None)
        return 8 * largest.bytes / largest.p50_seconds / 1e6 if largest and largest.p50_seconds else None

    @property
    def encryption_cost(self) -> float | None:
        """Return the share of the wire's throughput that the tunnel takes; None where one of both was not measured."""
        if not self.wire or not self.many_flows or not self.wire.mbit:
            return None
        return max(0.0, 1 - self.many_flows.mbit / self.wire.mbit)

    @property
    def one_way_seconds(self) -> float | None:
        """Return half of ping's median; None where no ping came back."""
        return self.latency.p50_seconds / 2 if self.latency and self.latency.p50_seconds is not None else None


class PipelineNet(_Frozen):
    """What was measured between the nodes of one pipeline."""

    pipeline: str
    device: Literal["cuda", "cpu"]
    nodes: tuple[str, ...]
    lost: tuple[str, ...] = Field(default=(), description="nodes that could not be reached any more during the test")
    ways: tuple[Way, ...]
    notes: tuple[str, ...] = Field(default=(), description="what could not be measured, and why")
    verdict: Literal["ready", "slow", "blocked"] | None = Field(description="the worst of the ways'")
    sentence: str = Field(default="", description="what the network costs this pipeline, by the plan's speed model")


class NetReport(_Frozen):
    """What `ppdeploy net` measured."""

    schema_: int = Field(default=NET_SCHEMA, alias="schema")
    time: str = Field(description="when it was measured, ISO 8601 in UTC")
    seconds: int = Field(description="of each run of iperf3")
    pipelines: tuple[PipelineNet, ...]

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def document(self) -> dict[str, Any]:
        """Return the report as it is printed with --json and kept."""
        return self.model_dump(mode="json", by_alias=True)


# ---- who measures whom, and when


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which each of `count` nodes meets every other once, and is in one pair at a time."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        pairs = [(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None]
        found.append(sorted(pairs))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def ends(pipeline: PipelinePlan) -> dict[str, Fabric]:
    """Return where each node is measured: in the tunnel where all have it open, else where packets pass already."""
    closed = _closed(pipeline)
    return {node.host: node.wire if closed else node.fabric for node in pipeline.nodes}


def _closed(pipeline: PipelinePlan) -> list[str]:
    """Return the hosts on which the planned tunnel is not open yet."""
    return [node.host for node in pipeline.nodes if node.tunnel and not node.tunnel.open]


def probe_limit(count: int, seconds: int) -> int:
    """Return after how many seconds a handoff probe over `count` nodes is ended."""
    return MEET_SECONDS + max(len(rounds(count)), 1) * 2 * (2 * seconds + 25)


def whole_limit(count: int, seconds: int) -> int:
    """Return after how many seconds all that a test started ends by itself, whatever became of whoever began it."""
    # Four runs of iperf3, two more beside a tunnel, and a ping for each round, Ansible's way between, and the probe.
    return 120 + len(rounds(count)) * (6 * (seconds + 8) + 30) + probe_limit(count, seconds)


def node_request(pipeline: PipelinePlan, node: NodePlan, present: Sequence[str], seconds: int) -> dict[str, Any]:
    """Return what the play asks of one node; `present` are the hosts that still take part."""
    names = [one.host for one in pipeline.nodes]
    addresses = {host: end.address for host, end in ends(pipeline).items()}
    wires = {one.host: one.wire.address if one.tunnel and not _closed(pipeline) else "" for one in pipeline.nodes}
    there = [name for name in names if name in present]
    bare = [one.host for one in pipeline.nodes if one.work.install_venv and one.host in there]
    return {
        "pipeline": pipeline.name,
        "address": addresses[node.host],
        "peers": [addresses[name] for name in names if name != node.host],
        # Beside the tunnel; empty: there is none to compare with.
        "wire": wires[node.host],
        "wire_peers": [wires[name] for name in names if name != node.host and wires[name]],
        # In each round the first of a pair is the client; the other one only listens.
        "rounds": [
            next(
                (
                    {"peer": names[b], "address": addresses[names[b]], "wire": wires[names[b]]}
                    for a, b in pairs
                    if names[a] == node.host
                ),
                {"peer": "", "address": "", "wire": ""},
            )
            for pairs in rounds(len(names))
        ],
        "alone": len(names) == 1,
        "limit": whole_limit(len(names), seconds),
        "python": f"{pipeline.environment.directory}/bin/python",
        "probe": {
            "rank": there.index(node.host) if node.host in there else 0,
            "hosts": there,
            "master_host": there[0] if there else "",
            "master": addresses[there[0]] if there else "",
            "device": pipeline.device,
            "bytes_per_token": pipeline.outlook.handoff_bytes,
            "tokens": list(TOKENS),
            "rounds": rounds(len(there)) if len(there) > 1 else [],
            "seconds": 2 * seconds,
        },
        "probe_limit": probe_limit(len(there), seconds),
        "probe_problem": _probe_problem(bare, _closed(pipeline)),
    }


def _probe_problem(bare: Sequence[str], closed: Sequence[str]) -> str:
    """Return why handoffs cannot be measured: they go as the ranks' do, through the tunnel where one is planned."""
    if bare:
        return f"no handoffs: vLLM is not installed on {', '.join(bare)} (`ppdeploy apply`)"
    return f"no handoffs: the tunnel is not open on {', '.join(closed)} (`ppdeploy apply`)" if closed else ""


# ---- the verdict


def judge(
    pipeline: PipelinePlan, seen: Mapping[str, Mapping[str, Any]], lost: Sequence[str], flows: int
) -> PipelineNet:
    """Judge what was measured between the nodes of a pipeline; the sentence is left to `with_sentence`.

    `seen` has for each host what the play noted: `pairs`, the results of the pairs that it was the client of; `probe`,
    what its handoff probe printed and complained of; `iperf3`, why that is not there. `lost` are hosts that were not
    reached any more.
    """
    names = [node.host for node in pipeline.nodes]
    runs = _runs(seen, flows)
    handoffs, broken = _handoffs(seen)
    ways = tuple(
        _way(pipeline, sender, receiver, runs.get((sender.host, receiver.host), {}), handoffs, broken, lost)
        for sender in pipeline.nodes
        for receiver in pipeline.nodes
        if sender.host != receiver.host
    )
    closed = _closed(pipeline)
    beside = [f"the tunnel is not open on {', '.join(closed)}, so this is the wire without it"] if closed else []
    notes = list(dict.fromkeys((*beside, *_notes(seen, lost, names))))
    verdicts = {way.verdict for way in ways}
    return PipelineNet(
        pipeline=pipeline.name,
        device=pipeline.device,
        nodes=tuple(names),
        lost=tuple(name for name in names if name in lost),
        ways=ways,
        notes=tuple(notes),
        verdict=next((one for one in ("blocked", "slow", "ready") if one in verdicts), None),
    )


def _notes(seen: Mapping[str, Mapping[str, Any]], lost: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    if len(names) == 1:
        return [f"{names[0]} is alone in the pipeline: there is no network to measure"]
    notes = [f"{host} could not be reached any more" for host in names if host in lost]
    told: dict[str, list[str]] = {}
    for host in names:
        own = seen.get(host, {})
        for problem in (own.get("iperf3"), (own.get("probe") or {}).get("problem")):
            if problem and host not in lost:
                told.setdefault(str(problem), []).append(host)
    return [*notes, *(f"{', '.join(hosts)}: {problem}" for problem, hosts in told.items())]


def _runs(seen: Mapping[str, Mapping[str, Any]], flows: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what ping and iperf3 said of each way, by sender and receiver."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for host, own in seen.items():
        for pair in own.get("pairs") or ():
            peer = pair["peer"]
            for way, side in (((host, peer), "out"), ((peer, host), "in")):
                told = pair.get("flows") or {}
                one, many = told.get(f"{side}_one", {}), told.get(f"{side}_many", {})
                found[way] = {
                    "ping": pair.get("ping") or {},
                    "one": {**one, "flows": 1},
                    "many": {**many, "flows": flows},
                    "wire": {**told.get(f"{side}_wire", {}), "flows": flows},
                    "problem": pair.get("problem") or "",
                    # A connection that cannot be made ends the pair, so the way back has no run of its own then.
                    "failed": one.get("error") or many.get("error") or "",
                    "connect": told.get("out_one", {}).get("error", ""),
                }
    return found


def _handoffs(
    seen: Mapping[str, Mapping[str, Any]],
) -> tuple[dict[tuple[str, str], list[dict[str, Any]]], dict[frozenset[str], str]]:
    """Return the handoffs by sender and receiver, and what went wrong between two nodes."""
    sizes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    broken: dict[frozenset[str], str] = {}
    for own in seen.values():
        for line in (own.get("probe") or {}).get("lines") or ():
            if "sender" in line:
                sizes.setdefault((line["sender"], line["receiver"]), []).append(line)
            elif "pair" in line:
                broken[frozenset(line["pair"])] = str(line["error"])
    return sizes, broken


def _way(
    pipeline: PipelinePlan,
    sender: NodePlan,
    receiver: NodePlan,
    run: Mapping[str, Any],
    handoffs: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    broken: Mapping[frozenset[str], str],
    lost: Sequence[str],
) -> Way:
    way = Way(
        sender=sender.host,
        receiver=receiver.host,
        addresses=(ends(pipeline)[sender.host].address, ends(pipeline)[receiver.host].address),
        negotiated_mbit=negotiated_mbit(sender.fabric, receiver.fabric),
        next=receiver.node_rank == sender.node_rank + 1,
        latency=_latency(run.get("ping") or {}),
        one_flow=_throughput(run.get("one") or {}),
        many_flows=_throughput(run.get("many") or {}),
        wire=_throughput(run.get("wire") or {}),
        verdict=None,
        reason="",
    )
    way = way.model_copy(
        update={"handoffs": tuple(_handoff(way, line) for line in handoffs.get((sender.host, receiver.host), ()))}
    )
    between = broken.get(frozenset((sender.host, receiver.host)), "")
    verdict, reason, remedy = _verdict(way, run, between, lost, cuda=pipeline.device == "cuda")
    return way.model_copy(update={"verdict": verdict, "reason": reason, "remedy": remedy})


def _latency(ping: Mapping[str, Any]) -> Latency | None:
    if "sent" not in ping:
        return None
    return Latency(p50_seconds=ping.get("p50"), p99_seconds=ping.get("p99"), sent=ping["sent"], lost=ping["lost"])


def _throughput(run: Mapping[str, Any]) -> Throughput | None:
    if "mbit" not in run:
        return None
    return Throughput(
        flows=run["flows"],
        mbit=run["mbit"],
        bytes=run["bytes"],
        seconds=run["seconds"],
        retransmits=run.get("retransmits"),
    )


def _handoff(way: Way, line: Mapping[str, Any]) -> Handoff:
    rate, latency = way.rate_mbit, way.one_way_seconds
    return Handoff(
        tokens=line["tokens"],
        bytes=line["bytes"],
        count=line.get("count", 0),
        p50_seconds=line.get("p50"),
        p99_seconds=line.get("p99"),
        wire_seconds=8 * line["bytes"] / (rate * 1e6) + (latency or 0.0) if rate else None,
    )


_LESS = (
    "encryption is the limit: let the kernel do it (ppdeploy_fabric_encryption: wireguard), set a larger ppdeploy_mtu, "
    "or give the fabric a network of its own and set none"
)
_LOOK = "look at cable, switch port and both NICs (`ethtool NIC`), then run `ppdeploy net` again"


def _verdict(
    way: Way, run: Mapping[str, Any], broken: str, lost: Sequence[str], *, cuda: bool
) -> tuple[Literal["ready", "slow", "blocked"] | None, str, str]:
    """Return verdict, reason and remedy of a way."""
    gone = [host for host in (way.sender, way.receiver) if host in lost]
    if gone:
        again = f"see that {' and '.join(gone)} runs and is on the network, then run `ppdeploy net` again"
        return "blocked", f"{' and '.join(gone)} could not be reached any more", again
    rate = way.rate_mbit
    part = run.get("failed") or ""
    if not rate:
        failed = part or run.get("connect") or broken or ("nothing came through" if rate is not None else "")
        if failed:
            fence = f"let {way.sender} and {way.receiver} talk on all TCP ports over the fabric: a firewall, a cable or"
            return (
                "blocked",
                f"no TCP between them: {failed}",
                f"{fence} the wrong NIC is in the way (`ppdeploy check`)",
            )
        return None, f"not measured: {run.get('problem') or 'the nodes did not come to it'}", ""
    if broken:
        return "blocked", f"handoffs between them fail: {broken}", "see that nothing filters the ports above 1024"
    if part:
        # Said before the figures, which are those of before or after it.
        return "slow", f"it carried {measured_text(rate)}, and then a run failed: {part}", _LOOK
    if way.latency and way.latency.sent and way.latency.lost == way.latency.sent:
        let = f"let ICMP echo through between {way.sender} and {way.receiver}: without it the latency is not known"
        return "slow", f"no ping comes back, though TCP carries {measured_text(rate)}", let
    if way.latency and way.latency.lost > LOSS * way.latency.sent:
        return "slow", f"{way.latency.lost} of {way.latency.sent} pings were lost", _LOOK
    short = _short(way, rate, cuda=cuda)
    if short:
        return short
    if way.latency and (way.latency.p50_seconds or 0) > LONG_WAY:
        return (
            "slow",
            f"a round trip takes {(way.latency.p50_seconds or 0) * 1e3:.1f} ms",
            "join the hosts by one switch or cable, without Wi-Fi, a VPN or a wide-area network between them",
        )
    if way.negotiated_mbit is None:
        return "ready", f"{measured_text(rate)}; the NICs do not say what they negotiated", ""
    return "ready", f"{measured_text(rate)} of {measured_text(way.negotiated_mbit)} negotiated", ""


def _short(way: Way, rate: float, *, cuda: bool) -> tuple[Literal["slow"], str, str] | None:
    """Return why a way carries less than the NICs negotiated; None when it carries it."""
    if way.negotiated_mbit is None:
        return None
    enough = ENOUGH * TCP_GOODPUT * way.negotiated_mbit
    if rate < enough:
        again = max((run.retransmits or 0 for run in (way.one_flow, way.many_flows) if run), default=0)
        sent_again = f", {again:,} segment{'s were' if again > 1 else ' was'} sent again" if again else ""
        if way.wire and way.wire.mbit >= enough:
            wire = f"{measured_text(rate)} through the tunnel and {measured_text(way.wire.mbit)} beside it"
            return "slow", wire, _LESS
        return "slow", f"{measured_text(rate)} of {measured_text(way.negotiated_mbit)} negotiated{sent_again}", _LOOK
    if way.one_flow and way.one_flow.mbit < enough:
        several = way.many_flows.flows if way.many_flows else 0
        reason = f"one connection carries {measured_text(way.one_flow.mbit)}, {several} carry {measured_text(rate)}"
        reason += f" of {measured_text(way.negotiated_mbit)} negotiated"
        more = "let NCCL use more of them: NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD in ppdeploy_env"
        core = "see whether a core of either host is busy with the network alone (`mpstat -P ALL 1`)"
        return "slow", reason, more if cuda else core
    return None


# ---- what it means


def with_sentence(found: PipelineNet, outlook: Outlook) -> PipelineNet:
    """Return the report of a pipeline with its sentence; `outlook` is the plan's, made with these measurements."""
    return found.model_copy(update={"sentence": sentence(outlook)})


def sentence(outlook: Outlook) -> str:
    """Return in a sentence what the network costs a pipeline, and what a faster one would bring; by the speed model."""
    cost = outlook.network
    crossing = [link for link in outlook.links if link.sender != link.receiver]
    if not crossing:
        return ""
    if cost is None:
        return f"What the network costs is not known: {outlook.unknown}."
    rates = [link.measured_mbit or link.rate_mbit or 0 for link in crossing]
    unmeasured = [link for link in crossing if link.measured_mbit is None]
    first = f"{ms_text(cost.first_token_seconds)} to the first token of a prompt of {outlook.input_tokens:,} tokens"
    further = (
        "nothing you would notice to decoding"
        if cost.further_token_share < UNNOTICED
        else f"{ms_text(cost.further_token_seconds)} ({cost.further_token_share:.0%}) to each further token"
    )
    now, then = cost.tokens_per_second, cost.faster_tokens_per_second
    if cost.faster and then >= now * WORTH:
        more = f"{cost.faster} would bring 32-way throughput from {_speed(now)} to {_speed(then)} tok/s"
    else:
        more = "a faster one would bring next to nothing"
    as_negotiated = " (negotiated, not measured)" if len(unmeasured) == len(crossing) else ""
    rough = f" Roughly: {outlook.rough}." if outlook.rough else ""
    return f"At {measured_text(min(rates))}{as_negotiated} your network adds {first} and {further}; {more}.{rough}"


def ms_text(seconds: float) -> str:
    """Return a time in ms of two or three digits; in s from one second on."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 9.95e-3 else f"{seconds * 1e3:.2g} ms"


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"


# ---- what is kept


def measured_links(report: NetReport, pipeline: str) -> tuple[MeasuredLink, ...]:
    """Return what a report says of the links of a pipeline, for its plan; nothing of ways that carry nothing."""
    return tuple(
        MeasuredLink(
            way.sender, way.receiver, way.addresses, way.negotiated_mbit, rate, way.one_way_seconds, report.time
        )
        for one in report.pipelines
        if one.pipeline == pipeline
        for way in one.ways
        if way.verdict != "blocked" and (rate := way.rate_mbit) is not None
    )


def kept_file(inventory_dir: Path, pipeline: str) -> Path:
    """Return where the last measurement of a pipeline is kept; hidden, since Ansible reads other files there."""
    return kept_dir(inventory_dir) / f"{pipeline}-net.json"


def kept_links(inventory_dir: Path, pipeline: str) -> tuple[MeasuredLink, ...]:
    """Return the links of a pipeline as they were measured last.

    Nothing where it was never measured, or where the file is of another version or damaged: the plan then says that
    its rates are the negotiated ones.
    """
    try:
        text = kept_file(inventory_dir, pipeline).read_text(encoding="utf-8")
        report = NetReport.model_validate(json.loads(text))
    except (OSError, ValueError, ValidationError):
        return ()
    return measured_links(report, pipeline) if report.schema_ == NET_SCHEMA else ()
