"""What a pipeline serves: vLLM's scheduler over its stages, replayed for one load.

A replay of one run of `vllm bench serve`: `concurrency` requests at once, each followed by the next as it ends, until
all prompts are served. Steps are formed as vLLM's scheduler forms them (V1 engine, async scheduling, model runner V2,
as from 0.24: `v1/core/sched/scheduler.py`, `async_scheduler.py`, `v1/engine/core.py`):

* a step takes one token of each request that may decode, then prompt tokens up to `max_num_batched_tokens`, first come
  first served, prompts cut where the budget ends;
* a request decodes every PP-th step at most (`next_decode_eligible_step`), so the requests spread over PP microbatches
  and one request alone keeps one stage busy at a time;
* PP + 1 steps are scheduled ahead (`max_concurrent_batches`), so that a request which ends is followed by the next one
  PP + 2 steps later.

The time of a step on the stages follows from `execute_model` in `v1/worker/gpu_worker.py`: a stage waits for its
previous send, then posts its receive, then computes, then sends. NCCL's receive waits for what is queued before it, so
a transfer starts when the sender has computed and the receiver is done with its step before, its send included:
transfers are not hidden behind computation. A step whose requests decode waits for the tokens that the last stage
sampled PP steps earlier.

With `overlap` of the handoff plugin (ppdeploy_handoff: worker.py, sends.py, stagger.py) a link works beside its stages:
a transfer starts when the sender has computed and the link is free, the sender goes on at once (at most two sends
behind), and with two stages the requests of a large step come back a step later.

Which request is in which step never depends on seconds, only on the count of steps. So a faster link or GPU changes
no decision, and can only make each step end earlier: predictions are monotone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from ppdeploy.plan.network import Link, handoff_seconds
from ppdeploy.plan.speed import CONSTANTS, Constants, StageLoad, stage_seconds

MOST_REPLAYED = 64
"""Requests that are replayed one by one; more at once are replayed in bundles that start and end together."""


@dataclass(frozen=True)
class Pipeline:
    """Stages in their order, the links between them, and what one token is on them."""

    stages: tuple[StageLoad, ...]
    links: tuple[Link, ...]
    """One less than stages."""
    handoff_bytes: float
    """Bytes of one token at a boundary (`ppdeploy.plan.network.handoff_bytes`)."""
    constants: Constants = CONSTANTS

    def __post_init__(self) -> None:
        """Refuse what is no pipeline; a mistake of the caller, not of a user."""
        if not self.stages or len(self.links) != len(self.stages) - 1:
            raise ValueError(f"{len(self.stages)} stages need {len(self.stages) - 1} links, not {len(self.links)}")


@dataclass(frozen=True)
class Load:
    """What clients ask for: `concurrency` requests at a time, of so many prompt and output tokens each."""

    concurrency: int
    input_tokens: int
    output_tokens: int
    prompts: int | None = None
    """Requests in all; None: 4 one at a time, else 64 or two for each client, as in reference/measurements.md."""

    def total(self) -> int:
        """Return the number of requests in all."""
        return self.prompts or (4 if self.concurrency == 1 else max(64, 2 * self.concurrency))


@dataclass(frozen=True)
class Settings:
    """vLLM's limits of a step."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    overlap: bool = False
    """Whether the handoff plugin lets transfers and computing overlap."""
    stagger: int | None = None
    """With `overlap`, the tokens of a step from which on its requests come back one step later; 0 for never, None for
    what the plugin chooses."""

    def limit(self) -> int:
        """Return the stagger in tokens, 0 where there is none (`Settings.limit` of ppdeploy_handoff's settings.py)."""
        if not self.overlap:
            return 0
        return min(512, self.max_num_batched_tokens // 2) if self.stagger is None else self.stagger


@dataclass(frozen=True)
class Prediction:
    """What `vllm bench serve` would report."""

    ttft_s: float
    """Median time to the first token, seconds."""
    tpot_s: float
    """Median time of each further token, seconds."""
    out_tokens_per_second: float
    """Of all requests together, the whole run from the first request to the last answer."""


@dataclass(slots=True)
class _Request:
    """A request, or a bundle of `_Replay.bundle` of them, in the replay."""

    prompt: int
    """Prompt tokens not yet scheduled."""
    output: int
    """Output tokens not yet scheduled."""
    sent: float
    sent_step: int
    next_decode: int = 0
    first: float = math.nan


@dataclass(slots=True)
class _Step:
    """What the scheduler put into a step."""

    prefill: int = 0
    decode: int = 0
    sampled: list[_Request] = field(default_factory=list)
    """The requests that get a token from it."""
    back: int = 0
    """The step from which on these may take part in another."""
    only_new: bool = True
    """No request of it was running before, so the step waits for the requests themselves."""
    sent: float = 0.0
    """When the last of the new ones was sent."""


@dataclass(slots=True)
class _Mark:
    """Where the replay stood at the end of a round of PP steps."""

    clocks: list[float]
    requests: list[tuple[int, int, int]]
    """(prompt left, output left, steps to the next decode) of each running request."""


def compute_seconds(
    pipeline: Pipeline,
    *,
    prefill_tokens: float,
    decode_sequences: float,
    context: float,
    prefill_context: float | None = None,
) -> list[float]:
    """Return the seconds that each stage computes in a step; stages that are one object are asked once."""
    known: dict[int, float] = {}
    for stage in pipeline.stages:
        if id(stage) not in known:
            known[id(stage)] = stage_seconds(
                stage,
                prefill_tokens=prefill_tokens,
                decode_sequences=decode_sequences,
                context=context,
                prefill_context=prefill_context,
                constants=pipeline.constants,
            )
    return [known[id(stage)] for stage in pipeline.stages]


def transfer_seconds(pipeline: Pipeline, tokens: float) -> list[float]:
    """Return the seconds that the handoff of a step of `tokens` tokens takes on each link."""
    return [
        handoff_seconds(
            tokens,
            pipeline.handoff_bytes,
            link,
            gpus=receiver.gpus,
            peer_bandwidth=receiver.gpu.peer_bandwidth,
        )
        for link, receiver in zip(pipeline.links, pipeline.stages[1:], strict=True)
    ]


def return_seconds(pipeline: Pipeline) -> float:
    """Return the seconds that sampled tokens take from the last stage to the others: two broadcasts of a few bytes."""
    return 2 * max((link.latency_s for link in pipeline.links), default=0.0)


SENDS_BEHIND = 2
"""Sends that the handoff plugin lets go on behind the newest (`DEPTH` in its sends.py)."""


class _Timing:
    """The stages' clocks: when each is free for its next step."""

    def __init__(self, pipeline: Pipeline, load: Load, *, overlap: bool = False) -> None:
        self.pipeline = pipeline
        self.overlap = overlap
        self.context = load.input_tokens + load.output_tokens / 2
        self.prefill_context = load.input_tokens / 2
        self.free = [0.0] * len(pipeline.stages)
        self.sends = [deque([0.0] * SENDS_BEHIND, SENDS_BEHIND) for _ in pipeline.links]
        """When the last sends over each link ended, oldest first."""
        self.tokens_back = return_seconds(pipeline)
        self._known: dict[tuple[int, int], tuple[list[tuple[float, float]], float]] = {}

    def _durations(self, prefill: int, decode: int) -> tuple[list[tuple[float, float]], float]:
        """Return (compute, transfer) of every stage but the last, and the last one's compute, in seconds."""
        key = (prefill, decode)
        known = self._known.get(key)
        if known is None:
            compute = compute_seconds(
                self.pipeline,
                prefill_tokens=prefill,
                decode_sequences=decode,
                context=self.context,
                prefill_context=self.prefill_context,
            )
            transfer = transfer_seconds(self.pipeline, prefill + decode)
            known = (list(zip(compute, transfer, strict=False)), compute[-1])
            self._known[key] = known
        return known

    def run(self, prefill: int, decode: int, earliest: float) -> float:
        """Run a step through all stages, not before `earliest`; return when its tokens are sampled."""
        handoffs, last = self._durations(prefill, decode)
        free = self.free
        now = max(earliest, free[0])
        for index, (compute, transfer) in enumerate(handoffs):
            now += compute
            if self.overlap:
                sends = self.sends[index]
                # The stage goes on when its send before the last one has ended; the link, when the last one has.
                free[index] = max(now, sends[0])
                now = max(now, sends[-1]) + transfer
                sends.append(now)
                now = max(now, free[index + 1])
            else:
                now = max(now, free[index + 1]) + transfer
                free[index] = now
        free[-1] = now + last
        return free[-1]

    def clocks(self) -> list[float]:
        """Return all that `run` goes by."""
        sends = (end for sends in self.sends for end in sends) if self.overlap else ()
        return [*self.free, *sends]

    def go_on(self, seconds: float) -> None:
        """Put all clocks forward."""
        self.free = [time + seconds for time in self.free]
        self.sends = [deque((end + seconds for end in sends), SENDS_BEHIND) for sends in self.sends]


def predict(pipeline: Pipeline, load: Load, settings: Settings | None = None) -> Prediction:
    """Return what a pipeline serves under a load.

    Deterministic; some milliseconds of computing for two stages, whatever the numbers. Numbers below 1 count as 1.
    """
    return _Replay(pipeline, load, settings or Settings()).result()


class _Replay:
    """One run of the benchmark."""

    def __init__(self, pipeline: Pipeline, load: Load, settings: Settings) -> None:
        concurrency = max(1, load.concurrency)
        total = max(concurrency, load.total())
        self.bundle = math.ceil(concurrency / MOST_REPLAYED)
        self.output = max(1, load.output_tokens)
        self.prompt = max(1, load.input_tokens) * self.bundle
        self.total = self.unsent = math.ceil(total / self.bundle)
        self.depth = len(pipeline.stages)
        self.chunk = max(1, settings.max_num_batched_tokens)
        self.most = max(1, settings.max_num_seqs // self.bundle)
        self.api_latency = pipeline.constants.api_latency
        timed = Load(concurrency, max(1, load.input_tokens), self.output)
        self.timing = _Timing(pipeline, timed, overlap=settings.overlap)
        self.staggered = settings.limit() if self.depth == 2 else 0
        """Tokens of a step from which on its requests wait one step more; 0: never."""
        self.ahead = self.depth + 2 + (self.staggered > 0)
        self.running: list[_Request] = []
        self.arriving: deque[_Request] = deque()
        self.waiting: deque[_Request] = deque()
        self.sampled: deque[tuple[int, float]] = deque()
        """(Step whose requests may go on, time of the tokens): those that no step has waited for yet."""
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.end = 0.0
        self.marks: list[_Mark] = []
        for _ in range(math.ceil(concurrency / self.bundle)):
            self._send(0.0, -self.ahead)

    def result(self) -> Prediction:
        """Run all steps."""
        step = 0
        while len(self.tpot) < self.total:
            while self.arriving and self.arriving[0].sent_step + self.ahead <= step:
                self.waiting.append(self.arriving.popleft())
            formed = self._schedule(step)
            if formed.prefill + formed.decode:
                self._execute(step, formed)
            step += 1
            if step % self.depth == 0:
                step = self._skip(step)
        return Prediction(
            ttft_s=median(self.ttft),
            tpot_s=median(self.tpot),
            out_tokens_per_second=self.total * self.bundle * self.output / self.end,
        )

    def _send(self, now: float, step: int) -> None:
        if self.unsent > 0:
            self.unsent -= 1
            self.arriving.append(_Request(self.prompt, self.output, now, step))

    # ---- a step

    def _schedule(self, step: int) -> _Step:
        formed = _Step()
        budget = self.chunk
        for request in self.running:
            if budget <= 0:
                break
            if request.prompt > 0:
                formed.only_new = False
                budget -= self._prefill(request, budget, formed)
            elif request.next_decode <= step and request.output > 0:
                formed.only_new = False
                tokens = min(self.bundle, budget)
                formed.decode += tokens
                budget -= tokens
                self._sample(request, formed)
        while self.waiting and budget > 0 and len(self.running) < self.most:
            self.marks.clear()
            request = self.waiting.popleft()
            self.running.append(request)
            formed.sent = request.sent
            budget -= self._prefill(request, budget, formed)
        formed.back = step + self.depth + (0 < self.staggered <= formed.prefill + formed.decode)
        for request in formed.sampled:
            request.next_decode = formed.back
        return formed

    def _prefill(self, request: _Request, budget: int, formed: _Step) -> int:
        tokens = min(request.prompt, budget)
        request.prompt -= tokens
        formed.prefill += tokens
        if request.prompt == 0:
            self._sample(request, formed)
        return tokens

    def _sample(self, request: _Request, formed: _Step) -> None:
        request.output -= 1
        formed.sampled.append(request)

    def _execute(self, step: int, formed: _Step) -> None:
        earliest = 0.0
        while self.sampled and self.sampled[0][0] <= step:
            earliest = self.sampled.popleft()[1] + self.timing.tokens_back
        if formed.only_new:
            earliest = max(earliest, formed.sent + self.api_latency)
        now = self.timing.run(formed.prefill, formed.decode, earliest)
        if formed.sampled:
            self.sampled.append((formed.back, now))
        for request in formed.sampled:
            if math.isnan(request.first):
                self.marks.clear()
                request.first = now
                self.ttft.append(now - request.sent)
            if request.output == 0:
                self.marks.clear()
                self.end = max(self.end, now)
                self.tpot.append((now - request.first) / max(1, self.output - 1))
                self.running.remove(request)
                self._send(now, step)

    # ---- rounds that repeat

    def _skip(self, step: int) -> int:
        """Return the step to go on with: where rounds of PP steps repeat, all of them are taken at once.

        A round repeats the one before when nobody came, went or got a first token in either, every request stands at
        the same point of its cadence, and all clocks went on by the same time. Then only the sums change.
        """
        if self.arriving:
            self.marks.clear()
            return step
        clocks = [*self.timing.clocks(), *(time for _, time in self.sampled)]
        self.marks.append(_Mark(clocks, [(r.prompt, r.output, max(0, r.next_decode - step)) for r in self.running]))
        if len(self.marks) < 3:
            return step
        first, second, third = self.marks[-3:]
        shift = third.clocks[0] - second.clocks[0]
        if not (_went_on(first.clocks, second.clocks, shift) and _went_on(second.clocks, third.clocks, shift)):
            return step
        rounds = _repeats(second, third)
        if rounds < 1:
            return step
        for request, before, after in zip(self.running, second.requests, third.requests, strict=True):
            request.prompt -= rounds * (before[0] - after[0])
            request.output -= rounds * (before[1] - after[1])
            request.next_decode += rounds * self.depth
        self.timing.go_on(rounds * shift)
        self.sampled = deque((at + rounds * self.depth, time + rounds * shift) for at, time in self.sampled)
        self.marks.clear()
        return step + rounds * self.depth


def _went_on(before: Sequence[float], after: Sequence[float], shift: float) -> bool:
    """Say whether all clocks went on by `shift` seconds, up to rounding."""
    slack = 1e-9 * after[0]
    return len(before) == len(after) and all(
        abs(new - old - shift) <= slack for old, new in zip(before, after, strict=True)
    )


def _repeats(before: _Mark, after: _Mark) -> int:
    """Return how many more rounds like the one between two marks fit before a request's prompt or output ends."""
    rounds = []
    for old, new in zip(before.requests, after.requests, strict=True):
        if old[2] != new[2] and new[0] == 0:
            return 0
        for index in (0, 1):
            done = old[index] - new[index]
            if done > 0:
                rounds.append((new[index] - 1) // done)
    return min(rounds, default=0)
