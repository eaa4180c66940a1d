"""The plan for people at a terminal: what runs where, what memory holds, what speed to expect. Decides nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ppdeploy.bench_report import refinement_text, seconds_text, speed_text
from ppdeploy.plan.driver import driver_texts
from ppdeploy.plan.tunnel import keyless
from ppdeploy.plan.types import (
    GatewayPlan,
    Model,
    Outlook,
    PipelinePlan,
    Plan,
    Speed,
    StageLink,
    StageMemory,
    TuningPlan,
)
from ppdeploy.plan.words import gib_text, measured_text, rate_text
from ppdeploy.render import file_path, stages_text
from ppdeploy.report import SHORT_DIGEST, findings_report, plain_table, work_text

MOST_STAGES = 12
"""Stages that are drawn one by one; of more, the first and the last."""

WORTH_SAYING = 1.05
"""Gain of a faster link below which it is not worth its cable."""

_VERDICTS = {"blocked": "red", "slow": "yellow", "ready": "green"}


@dataclass(frozen=True)
class Part:
    """A part of a stage's memory: its name, its bytes, and how a bar shows it with and without Unicode."""

    name: str
    size: int
    mark: str
    plain: str
    style: str


def memory_parts(row: StageMemory) -> tuple[Part, ...]:
    """Return the parts of a stage's memory, which together are the whole of it unless it lacks some."""
    return (
        Part("weights", row.weight_bytes, "█", "#", "blue"),
        Part("activations", row.activation_bytes + row.graph_bytes, "▓", "=", "magenta"),
        Part("KV cache", row.kv_used_bytes, "▒", "+", "green"),
        Part("other", row.runtime_bytes + row.others_bytes, "░", "-", "yellow"),
        Part("free", max(row.free_bytes, 0), "·", ".", "dim"),
    )


def link_text(link: StageLink) -> str:
    """Return the rate of a link: what its NICs negotiated and, where `ppdeploy net` measured it, what it carries."""
    rate = "rate not known" if link.rate_mbit is None else rate_text(link.rate_mbit)
    if link.measured_mbit is None:
        return rate
    one_way = link.measured_latency_seconds
    latency = "" if one_way is None else f" and {one_way * 1e3:.2g} ms one way"
    return f"{rate}, measured {measured_text(link.measured_mbit)}{latency} on {link.measured_at[:10]}"


def model_text(model: Model) -> str:
    """Return what a model is, in words: layers, parameters, number format, bytes in memory, whether files are there."""
    words = [f"{model.layers} layers", f"{_billions(model.parameters)} parameters"]
    if model.active_parameters < 0.8 * model.parameters:
        words.append(f"{_billions(model.active_parameters)} active")
    words += [model.quantization or model.dtype, gib_text(model.loaded_bytes)]
    return ", ".join(words + ([] if model.weight_bytes else ["no weight files"]))


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"


def capacity_text(pipeline: PipelinePlan) -> str:
    """Return in a sentence what the KV cache holds, or what is lacking."""
    found = pipeline.capacity
    if not found.fits:
        row = pipeline.memory[found.limiting_stage]
        return (
            f"it does not fit: stage {row.stage} on {row.host} lacks {gib_text(found.shortfall_bytes)}"
            f"{' on each GPU' if pipeline.device == 'cuda' else ''} for one request of {found.max_model_len:,} tokens"
        )
    at_most = f"{found.requests_at_max:,.1f} requests of {found.max_model_len:,} tokens"
    return (
        f"it fits: requests of up to {found.longest_context:,} tokens; KV cache of {found.kv_tokens:,} tokens, at once "
        f"{at_most} or {found.requests_at_4k:,.0f} of 4,096"
    )


def outlook_note(outlook: Outlook) -> str:
    """Return what the speeds are for, and how far to trust them."""
    trust = f"a rough prediction ({outlook.rough})" if outlook.rough else "a prediction, within 20 % where measured"
    return f"prompts of {outlook.input_tokens:,} tokens, answers of {outlook.output_tokens:,}; {trust}"


def advice(pipeline: PipelinePlan) -> Iterator[str]:
    """Yield what limits the speed of a pipeline, and what would raise it."""
    outlook = pipeline.outlook
    if not outlook.speeds:
        return
    if outlook.limiting_link is not None:
        link = outlook.links[outlook.limiting_link]
        if link.sender != link.receiver and link.seconds_per_1000_tokens is not None:
            text = f"the slowest link is {link.sender} to {link.receiver}: "
            text += f"1,000 prompt tokens take {seconds_text(link.seconds_per_1000_tokens)}"
            if link.faster and link.gain >= WORTH_SAYING:
                text += f"; {link.faster} would give {link.gain:.2f}x the tokens/s at 32 users"
            elif link.faster:
                text += "; a faster one would give hardly more at 32 users"
            yield text
    if outlook.requests_to_fill and outlook.requests_to_fill > 1:
        yield f"{outlook.requests_to_fill} requests at once keep all stages busy; fewer leave some of them idle"
    if outlook.best_speeds and outlook.best_batched_tokens:
        yield f"{_steps(pipeline, outlook.best_batched_tokens)} would give {_gained(pipeline, outlook.best_speeds[-1])}"
    if outlook.overlap_speeds and outlook.overlap_batched_tokens:
        best = outlook.overlap_speeds[-1]
        if best.tokens_per_second >= WORTH_SAYING * outlook.speeds[-1].tokens_per_second:
            steps = ""
            if outlook.overlap_batched_tokens != pipeline.capacity.batched_tokens:
                steps = f" and {_steps(pipeline, outlook.overlap_batched_tokens)}"
            yield f"ppdeploy_handoff: overlap{steps} would give {_gained(pipeline, best)}"


def _steps(pipeline: PipelinePlan, tokens: int) -> str:
    lower = "; max-num-seqs must be no higher" if tokens < pipeline.capacity.sequences else ""
    now = pipeline.capacity.batched_tokens
    return f"steps of {tokens} tokens (max-num-batched-tokens in ppdeploy_vllm_args, now {now}{lower})"


def _gained(pipeline: PipelinePlan, best: Speed) -> str:
    now = pipeline.outlook.speeds[-1]
    tokens = "about the same tokens/s"
    if best.tokens_per_second >= 1.02 * now.tokens_per_second:
        tokens = f"{speed_text(best.tokens_per_second)} instead of {speed_text(now.tokens_per_second)} tokens/s"
    return (
        f"{tokens} and the first token after {seconds_text(best.ttft_seconds)} instead of "
        f"{seconds_text(now.ttft_seconds)} at {now.concurrency} users"
    )


@dataclass(frozen=True)
class Bar:
    """The memory of one stage as a bar of the terminal's width, and its legend."""

    row: StageMemory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the bar and the legend."""
        del console
        width = max(min(options.max_width - 4, 60), 10)
        parts = [part for part in memory_parts(self.row) if part.size > 0]
        total = max(sum(part.size for part in parts), 1)
        bar = Text(no_wrap=True)
        edge, start = 0, 0
        for part in parts:
            edge += part.size
            end = round(width * edge / total)
            bar.append((part.plain if options.ascii_only else part.mark) * (end - start), part.style)
            start = end
        yield bar
        legend = Text()
        for part in parts:
            legend.append((part.plain if options.ascii_only else part.mark) + " ", part.style)
            legend.append(f"{part.name} {part.size / 2**30:.1f}  ")
        lacking = f", lacks {gib_text(self.row.shortfall_bytes)}" if self.row.shortfall_bytes else ""
        each = " each" if self.row.gpus > 1 else ""
        legend.append(f"of {gib_text(self.row.memory_bytes)}{each}{lacking}", "red" if lacking else "")
        yield legend


def plan_report(plan: Plan, *, verbose: bool = False) -> Iterator[RenderableType]:
    """Yield the plan for people; `verbose` adds the nodes' table, why each NIC was chosen, command lines and files."""
    if plan.assumed:
        yield Text(f"assumed, not read from the hosts: the facts of {', '.join(plan.assumed)}", "yellow")
    for pipeline in plan.pipelines:
        yield _title(pipeline)
        yield ""
        yield from _drawing(pipeline, verbose=verbose)
        yield ""
        yield Text(capacity_text(pipeline), "" if pipeline.capacity.fits else "red")
        yield from _speed(pipeline)
        yield from _work(pipeline)
        if verbose:
            yield _nodes(pipeline)
            yield from _fabric(pipeline)
            yield from _drivers(pipeline)
            yield from _not_tuned(pipeline)
            yield from _what_runs(pipeline)
        yield from findings_report(pipeline.findings)
        yield ""
    yield from _gateways(plan, verbose=verbose)
    if not verbose:
        yield "command lines, environment and files: ppdeploy plan --verbose"


def _gateways(plan: Plan, *, verbose: bool) -> Iterator[RenderableType]:
    """Yield the gateways on hosts that are no heads."""
    nodes = [node for one in plan.pipelines for node in one.nodes if node.role == "worker"]
    of_workers = [_gateway(node.host, node.address, node.gateway) for node in nodes if node.gateway]
    yield from of_workers
    for one in plan.gateways:
        yield _gateway(one.host, one.address, one.gateway)
        if verbose:
            yield from (f"  {file.path}" for file in one.files)
        yield from findings_report(one.findings)
    if of_workers or plan.gateways:
        yield ""


def _gateway(host: str, address: str, gateway: GatewayPlan) -> Text:
    heads = [f"{one.pipeline} at {one.address}:{one.port}" for model in gateway.models for one in model.servers]
    return Text.assemble((f"gateway {host}", "bold"), f"  {gateway.url(address)}  to {', '.join(heads)}")


def _title(pipeline: PipelinePlan) -> Text:
    of = f"{pipeline.tensor_parallel_size} x {pipeline.pipeline_parallel_size}"
    return Text.assemble(
        (f"pipeline {pipeline.name}", "bold"),
        f"  {pipeline.model.source} ({model_text(pipeline.model)})"
        f"  on {pipeline.device}, tensor x pipeline {of}, vLLM {pipeline.environment.vllm_version}"
        f" with Python {pipeline.environment.python}"
        f"  release {pipeline.release[:SHORT_DIGEST]}",
    )


# ---- the drawing


def _drawing(pipeline: PipelinePlan, *, verbose: bool) -> Iterator[RenderableType]:
    """Yield each stage with its memory, and the links between them."""
    rows = pipeline.memory
    shown = range(len(rows))
    hidden: Sequence[int] = ()
    if len(rows) > MOST_STAGES and not verbose:
        hidden = range(4, len(rows) - 2)
    nodes = {node.host: node for node in pipeline.nodes}
    for index in shown:
        if index in hidden:
            if index == hidden[0]:
                yield Text(f"... {len(hidden)} more stages, drawn with --verbose", "dim")
            continue
        row = rows[index]
        node = nodes[row.host]
        if index == 0 or rows[index - 1].host != row.host or index - 1 in hidden:
            devices = f"GPU {', '.join(map(str, node.devices))}" if node.devices else pipeline.device
            yield Text.assemble(
                (row.host, "bold"), f"  rank {node.node_rank}, {node.role}, {devices}, ", node.fabric.address
            )
        last = row.first_layer + row.layers - 1
        several = f"{row.gpus} x " if row.gpus > 1 else ""
        yield Text(f"  stage {row.stage} with layers {row.first_layer}-{last} on {several}{row.device}")
        yield Padding(Bar(row), (0, 0, 0, 4), expand=False)
        if index < len(pipeline.outlook.links):
            yield _Arrow(pipeline.outlook.links[index])


@dataclass(frozen=True)
class _Arrow:
    link: StageLink

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        del console
        line, head = ("|", "v") if options.ascii_only else ("│", "▼")
        link = self.link
        if link.sender == link.receiver:
            text = Text(f"  {head}  inside {link.sender}", "dim")
        else:
            wait = (
                ""
                if link.seconds_per_1000_tokens is None
                else f", {seconds_text(link.seconds_per_1000_tokens)} for 1,000 prompt tokens"
            )
            text = Text(f"  {head}  {link_text(link)}{wait}")
            if link.judged:
                text = Text.assemble(text, ": ", (link.verdict, _VERDICTS[link.verdict]))
        yield Text(f"  {line}")
        yield text


# ---- speed


def _speed(pipeline: PipelinePlan) -> Iterator[RenderableType]:
    outlook = pipeline.outlook
    if not outlook.speeds:
        yield Text(f"no speed is predicted: {outlook.unknown}")
        return
    yield Text(f"expected speed ({outlook_note(outlook)}):")
    table = plain_table("users", "first token", "each further", "tokens/s")
    for speed in outlook.speeds:
        table.add_row(*_cells(speed))
    yield Padding(table, (0, 0, 0, 2), expand=False)
    if outlook.refinement:
        yield Text(f"{refinement_text(outlook.refinement)}:")
        better = plain_table("users", "first token", "each further", "tokens/s")
        for speed in outlook.refinement.speeds:
            better.add_row(*_cells(speed))
        yield Padding(better, (0, 0, 0, 2), expand=False)
    yield from (Text(f"- {line}") for line in advice(pipeline))


def _cells(speed: Speed) -> tuple[str, ...]:
    return (
        str(speed.concurrency),
        seconds_text(speed.ttft_seconds),
        f"{speed.tpot_seconds * 1000:.0f} ms",
        speed_text(speed.tokens_per_second),
    )


def _work(pipeline: PipelinePlan) -> Iterator[RenderableType]:
    for work, hosts in _grouped({node.host: work_text(node.work) for node in pipeline.nodes}):
        yield Text(f"apply will, on {hosts}: {work}")
    whole = pipeline.nodes[0].model.bytes
    parts = {node.host: gib_text(node.model.bytes) for node in pipeline.nodes if node.model.files is not None}
    for size, hosts in _grouped(parts):
        yield Text(f"files of their own layers alone, {size} of {gib_text(whole)}, on {hosts}")
    drivers = {node.host: "; ".join(driver_texts(node.driver)) for node in pipeline.nodes}
    for text, hosts in _grouped({host: text for host, text in drivers.items() if text}):
        yield Text(f"NVIDIA driver on {hosts}: {text}")
    tuned = {node.host: "; ".join(tuning_texts(node.tuning)) for node in pipeline.nodes}
    for settings, hosts in _grouped({host: text for host, text in tuned.items() if text}):
        yield Text(f"tuned on {hosts}: {settings}")
    tunnels = [node.tunnel for node in pipeline.nodes if node.tunnel]
    if tunnels:
        keys = "; apply makes the keys" if keyless(tunnels) else ""
        yield Text(f"encrypted by {tunnels[0].kind} in {tunnels[0].network}, over {tunnels[0].wire.network}{keys}")


def _grouped(texts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each text once, with the hosts that it is of, in words."""
    groups: dict[str, list[str]] = {}
    for host, text in texts.items():
        groups.setdefault(text, []).append(host)
    for text, hosts in groups.items():
        yield text, ", ".join(hosts) if len(hosts) <= MOST_STAGES else f"{hosts[0]} and {len(hosts) - 1} more"


def tuning_texts(tuning: TuningPlan) -> Iterator[str]:
    """Yield in words what is set on a node, such as `mtu 9000 (was 1500)`; nothing of what stays as it is."""
    for one in tuning.settings:
        name = one.key.removeprefix("sysctl.")
        if one.verdict == "set":
            was = f" (was {one.before})" if one.before not in ("", one.value) else ""
            yield f"{name} {one.value}{was}"
        elif one.verdict == "waits":
            yield f"{name} waits: {one.reason}"


# ---- what --verbose adds


def _nodes(pipeline: PipelinePlan) -> Table:
    table = plain_table("rank", "host", "role", "devices", "stages", "fabric", "Mbit/s", "MTU", "apply will")
    for node in pipeline.nodes:
        table.add_row(
            str(node.node_rank),
            node.host,
            node.role,
            f"GPU {', '.join(map(str, node.devices))}" if node.devices else pipeline.device,
            stages_text(node),
            f"{node.fabric.interface} {node.fabric.address}",
            "unknown" if node.fabric.speed_mbit is None else str(node.fabric.speed_mbit),
            "" if node.fabric.mtu is None else str(node.fabric.mtu),
            work_text(node.work),
        )
    return table


def _drivers(pipeline: PipelinePlan) -> Iterator[str]:
    """Yield what is thought of each node's driver, also where nothing is done about it."""
    for node in pipeline.nodes:
        if node.driver.action in ("keep", "none"):
            yield f"  {node.host}: NVIDIA driver: {node.driver.reason}"


def _fabric(pipeline: PipelinePlan) -> Iterator[str]:
    yield "fabric:"
    for node in pipeline.nodes:
        fabric = node.fabric
        yield f"  {node.host}: {fabric.interface} {fabric.address} in {fabric.network}: {fabric.reason}"


def _not_tuned(pipeline: PipelinePlan) -> Iterator[str]:
    """Yield what was asked for and cannot be, or need not."""
    for node in pipeline.nodes:
        for one in node.tuning.settings:
            if one.verdict in ("kept", "unsupported"):
                yield f"  {node.host}: {one.key.removeprefix('sysctl.')} is not tuned: {one.reason}"


def _what_runs(pipeline: PipelinePlan) -> Iterator[str]:
    for node in pipeline.nodes:
        yield f"{node.host} runs {node.unit}, ports {', '.join(map(str, node.ports)) or 'none'}:"
        yield f"  {shlex.join(node.argv)}"
        environment = {**node.rank_env, **node.nccl_env}
        yield "  environment: " + " ".join(
            f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())
        )
        yield "  files:"
        yield from (f"    {file_path(pipeline, file)} ({file.owner}:{file.group} {file.mode})" for file in node.files)


# ---- two plans side by side


def compare_report(before: Plan, after: Plan, words: Sequence[str]) -> Iterator[RenderableType]:
    """Yield the plan as it is and as it would be with `--what-if`, side by side."""
    yield Text(f"what if {' and '.join(words)}; this plan is not applied", "bold")
    if after.assumed:
        yield Text(f"assumed, not read from the hosts: the facts of {', '.join(after.assumed)}", "yellow")
    now = {pipeline.name: pipeline for pipeline in before.pipelines}
    for pipeline in after.pipelines:
        table = plain_table(f"pipeline {pipeline.name}", "now", "what if")
        rows = zip(_summary(now[pipeline.name]), _summary(pipeline), strict=True)
        for (name, was), (_, becomes) in rows:
            table.add_row(name, was, Text(becomes, "bold" if was != becomes else ""))
        yield table
        for verdict in ("blocked", "slow"):
            yield from findings_report(one for one in pipeline.findings if one.verdict == verdict)
        yield ""


def _summary(pipeline: PipelinePlan) -> Iterator[tuple[str, str]]:
    capacity, outlook = pipeline.capacity, pipeline.outlook
    stages = len(pipeline.partition)
    split = ", ".join(map(str, pipeline.partition)) if stages <= MOST_STAGES else f"{stages} stages"
    rates = sorted({link.rate_mbit for link in outlook.links if link.rate_mbit is not None})
    yield "model", pipeline.model.source
    yield "nodes", str(len(pipeline.nodes))
    yield "fabric", ", ".join(map(rate_text, rates)) or "-"
    yield "layers of each stage", split
    lacks = f"no, {gib_text(capacity.shortfall_bytes)} are lacking"
    yield "fits", "yes" if capacity.fits else lacks
    yield "longest request", f"{capacity.longest_context:,}"
    yield "KV cache, tokens", f"{capacity.kv_tokens:,}"
    by_users = {speed.concurrency: speed for speed in outlook.speeds}
    for users in (1, 8, 32):
        speed = by_users.get(users)
        yield f"tokens/s, {_users(users)}", speed_text(speed.tokens_per_second) if speed else "-"
    for users in (1, 32):
        speed = by_users.get(users)
        yield f"first token, {_users(users)}", seconds_text(speed.ttft_seconds) if speed else "-"
    yield "verdict", _worst(pipeline)


def _users(count: int) -> str:
    return "1 user" if count == 1 else f"{count} users"


def _worst(pipeline: PipelinePlan) -> str:
    found = {finding.verdict for finding in pipeline.findings}
    return next((verdict for verdict in _VERDICTS if verdict in found), "ready")
