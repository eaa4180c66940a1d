"""The smoke test's verdict: from what `ppdeploy_smoke` saw on the nodes to 'it serves' or why it does not. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from ppdeploy.plan.types import PipelinePlan

LEAST_HANDOFF_BYTES = 1000
"""Fabric bytes that the requests must have moved at the least; one decode step of the tiniest model needs more."""

GATEWAY = "gateway"
"""Id of the one check that is not of the release: to go back to the last one would not mend a gateway."""


class Check(BaseModel):
    """One thing the smoke test looked at."""

    model_config = ConfigDict(frozen=True)

    id: str
    ok: bool
    detail: str


class SmokeReport(BaseModel):
    """What the smoke test found for one pipeline. `tokens_per_second` is of all concurrent requests together."""

    model_config = ConfigDict(frozen=True)

    pipeline: str
    ok: bool
    checks: tuple[Check, ...]
    prompt: str = ""
    completion: str = ""
    tokens_per_second: float | None = None
    ready_seconds: float | None = None
    journals: dict[str, tuple[str, ...]] = {}

    @property
    def serves(self) -> bool:
        """Whether the pipeline serves, whatever becomes of requests on their way through the gateway."""
        return all(check.ok for check in self.checks if check.id != GATEWAY)

    def failures(self) -> list[str]:
        """Return what failed, one sentence each."""
        return [f"{check.id}: {check.detail}" for check in self.checks if not check.ok]


def judge(
    pipeline: PipelinePlan,
    *,
    wait: Mapping[str, Any],
    ask: Mapping[str, Any],
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    gateway: Mapping[str, Any] | None = None,
) -> SmokeReport:
    """Judge one pipeline.

    `wait` and `ask` are what the module returned on the head (`ask` is empty when the API never became ready);
    `gateway` is what it returned of the head's gateway, where there is one; `before` and `after` hold what `observe`
    returned for each host of the pipeline.
    """
    checks = [_ready(wait)]
    tokens_per_second = None
    completion = ""
    if ask.get("answers"):
        answers = ask["answers"]
        checks += [
            _models(answers["models"], pipeline.served_model_name),
            _completion("completion", answers["completion"]),
            _chat(answers["chat"]),
            _stream(answers["stream"], answers["completion"]),
        ]
        together, tokens_per_second = _together(ask)
        checks.append(together)
        completion = _text(answers["completion"])
        if gateway and gateway.get("installed"):
            checks.append(_gateway(gateway, pipeline.served_model_name))
    checks += [_pp_rank(pipeline, host, seen) for host, seen in after.items()]
    if ask.get("answers") and len(pipeline.nodes) > 1:
        checks += [_traffic(host, before.get(host, {}), after[host]) for host in after]
    return SmokeReport(
        pipeline=pipeline.name,
        ok=all(check.ok for check in checks),
        checks=tuple(checks),
        prompt=str(ask.get("prompt", "")),
        completion=completion,
        tokens_per_second=tokens_per_second,
        ready_seconds=wait.get("seconds"),
        journals={host: tuple(seen.get("journal", ())) for host, seen in after.items()},
    )


def side_by_side(journals: Mapping[str, Sequence[str]], width: int = 200) -> str:
    """Return the last journal lines of all ranks in columns, newest at the bottom; `width` is in characters."""
    if not journals:
        return "no journal could be read"
    column = max((width - 3 * (len(journals) - 1)) // len(journals), 20)
    height = max(len(lines) for lines in journals.values())
    padded = {host: [""] * (height - len(lines)) + list(lines) for host, lines in journals.items()}
    rows = [list(padded), ["-" * column for _ in padded]]
    rows += [[padded[host][index] for host in padded] for index in range(height)]
    return "\n".join(" | ".join(cell[:column].ljust(column) for cell in row).rstrip() for row in rows)


def _ready(wait: Mapping[str, Any]) -> Check:
    if wait.get("reached"):
        return Check(id="health", ok=True, detail=f"the gang serves the release after {wait['seconds']:.0f} s")
    return Check(id="health", ok=False, detail=str(wait.get("reason") or "the head gave no answer"))


def _body(answer: Mapping[str, Any]) -> dict[str, Any] | None:
    if answer.get("status") != 200:
        return None
    try:
        body = json.loads(answer["body"])
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _said(answer: Mapping[str, Any]) -> str:
    if "error" in answer:
        return f"no answer: {answer['error']}"
    return f"HTTP {answer.get('status')}: {str(answer.get('body', ''))[:200]}"


def _text(answer: Mapping[str, Any]) -> str:
    body = _body(answer)
    try:
        return str(body["choices"][0]["text"]) if body else ""
    except (KeyError, IndexError, TypeError):
        return ""


def _models(answer: Mapping[str, Any], model: str) -> Check:
    body = _body(answer)
    if body is None:
        return Check(id="models", ok=False, detail=_said(answer))
    names = [str(entry.get("id")) for entry in body.get("data", [])]
    return Check(id="models", ok=model in names, detail=f"/v1/models names {', '.join(names) or 'nothing'}")


def _usage(body: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the usage counts, or None."""
    usage = body.get("usage") or {}
    prompt, completion, total = (usage.get(key) for key in ("prompt_tokens", "completion_tokens", "total_tokens"))
    if not (isinstance(prompt, int) and isinstance(completion, int) and isinstance(total, int)):
        return f"usage is incomplete: {usage}"
    if prompt < 1 or completion < 1 or prompt + completion != total:
        return f"usage does not add up: {prompt} + {completion} is not {total}"
    return None


def _completion(name: str, answer: Mapping[str, Any]) -> Check:
    body = _body(answer)
    if body is None:
        return Check(id=name, ok=False, detail=_said(answer))
    wrong = _usage(body)
    if wrong:
        return Check(id=name, ok=False, detail=wrong)
    return Check(id=name, ok=True, detail=f"{body['usage']['completion_tokens']} tokens in {answer['seconds']:.2f} s")


def _chat(answer: Mapping[str, Any]) -> Check:
    # A base model has no chat template; vLLM then refuses chat with 400 and says so.
    if answer.get("status") == 400 and "chat template" in str(answer.get("body", "")):
        return Check(id="chat", ok=True, detail="does not apply: the model has no chat template")
    return _completion("chat", answer)


def _stream(answer: Mapping[str, Any], whole: Mapping[str, Any]) -> Check:
    if answer.get("status") != 200:
        return Check(id="stream", ok=False, detail=_said(answer))
    events = [line[6:] for line in str(answer["body"]).splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return Check(id="stream", ok=False, detail="the stream did not end with [DONE]")
    text, usage = "", None
    for event in events[:-1]:
        chunk = json.loads(event)
        text += "".join(choice.get("text") or "" for choice in chunk.get("choices", []))
        usage = chunk.get("usage") or usage
    wrong = _usage({"usage": usage})
    if wrong:
        return Check(id="stream", ok=False, detail=wrong)
    if text != _text(whole):
        return Check(
            id="stream",
            ok=False,
            detail=f"streamed text differs from the same request unstreamed: {text[:80]!r}",
        )
    return Check(id="stream", ok=True, detail=f"{len(events) - 1} chunks, same text as unstreamed")


def _together(ask: Mapping[str, Any]) -> tuple[Check, float | None]:
    answers = ask["together"]
    bad = [_said(answer) for answer in answers if _body(answer) is None]
    if bad:
        return Check(id="concurrent", ok=False, detail=f"{len(bad)} of {len(answers)} failed: {bad[0]}"), None
    bodies = [body for body in map(_body, answers) if body]
    wrong = next((problem for problem in map(_usage, bodies) if problem), None)
    if wrong:
        return Check(id="concurrent", ok=False, detail=wrong), None
    tokens = sum(body["usage"]["completion_tokens"] for body in bodies)
    rate = tokens / ask["together_seconds"]
    return Check(id="concurrent", ok=True, detail=f"{len(answers)} at once, {rate:.1f} tokens/s together"), rate


def _gateway(seen: Mapping[str, Any], model: str) -> Check:
    """Without a key nothing, with one the model and its text."""
    if seen.get("problem"):
        return Check(id=GATEWAY, ok=False, detail=f"HAProxy on the head does not answer: {seen['problem']}")
    answers = seen["answers"]
    refused = answers["refused"]
    if refused.get("status") != 401:
        return Check(id=GATEWAY, ok=False, detail=f"a request without a key is not refused: {_said(refused)}")
    models, completion = _models(answers["models"], model), _completion(GATEWAY, answers["completion"])
    if not completion.ok or models.ok:
        return completion
    return models.model_copy(update={"id": GATEWAY})


def _pp_rank(pipeline: PipelinePlan, host: str, seen: Mapping[str, Any]) -> Check:
    """The rank's own log must show the world ranks and stages that the plan gave it."""
    node = next(node for node in pipeline.nodes if node.host == host)
    wanted = {(rank, rank // pipeline.tensor_parallel_size) for rank in node.world_ranks}
    shown = {(entry["world_rank"], entry["pp_rank"]) for entry in seen.get("ranks", [])}
    sizes = {entry["world_size"] for entry in seen.get("ranks", [])}
    ok = wanted == shown and sizes == {pipeline.world_size}
    names = ", ".join(f"world rank {rank} PP rank {pp}" for rank, pp in sorted(shown)) or "no rank"
    state = seen.get("state", {}).get("ActiveState", "unknown")
    return Check(id=f"rank on {host}", ok=ok and state == "active", detail=f"its log shows {names}; unit {state}")


def _traffic(host: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Check:
    first, last = before.get("counters"), after.get("counters")
    if not first or not last:
        return Check(id=f"fabric of {host}", ok=False, detail="the NIC's counters could not be read")
    moved = {name: last[name] - first[name] for name in ("rx_bytes", "tx_bytes")}
    return Check(
        id=f"fabric of {host}",
        ok=min(moved.values()) >= LEAST_HANDOFF_BYTES,
        detail=f"{moved['rx_bytes']} bytes in, {moved['tx_bytes']} out during the requests",
    )
