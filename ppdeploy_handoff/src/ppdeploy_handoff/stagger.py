"""The handoff as a stage of its own: requests of a large batch come back one step later.

With `p` stages vLLM (Model Runner V2, asynchronous scheduling) lets a request take part in every p-th batch: batch T+p
needs the tokens that batch T sampled. So p batches are at work at a time, one on each stage, and while a batch is on
the wire a stage has nothing to do: a step takes compute + transfer/p even when nobody waits for a send. When a transfer
takes long, it is a stage like any other: with p+1 batches at work each stage computes all the time. A request then
takes part in every (p+1)-th batch, which would only slow down small batches, whose transfer is short. Hence the number
of tokens in a batch decides, and the decision travels with the batch to all workers.

What vLLM 0.26 and later do, and what is changed (p = 2):
* `VllmConfig.max_concurrent_batches` is p+1, one more than at work: now p+2. Buffers for batches in flight follow it.
* `AsyncScheduler._update_after_schedule` sets `request.next_decode_eligible_step` p steps ahead: now p+1 for a large
  batch, and for one with structured output, whose next bitmask needs the oldest batch in flight to be done.
* `PPHandler` applies on step T+p the tokens that were received for step T: now on step T+p or T+p+1.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

from ppdeploy_handoff.counters import Counters
from ppdeploy_handoff.lazy import when_imported
from ppdeploy_handoff.settings import Settings, parse
from ppdeploy_handoff.worker import STAMP

DELAY = "ppdeploy_handoff_delay"  # an attribute of SchedulerOutput: steps until its requests may come back


def possible(config: Any) -> bool:
    """Whether a request's cadence may be changed under this VllmConfig: two stages, Model Runner V2, asynchronous
    scheduling, and no drafts, whose steps have another rhythm."""
    return bool(
        config.parallel_config.pipeline_parallel_size == 2
        and config.parallel_config.data_parallel_size == 1
        and config.scheduler_config.async_scheduling
        and config.use_v2_model_runner
        and config.speculative_config is None
    )


def _possible_here(holder: Any) -> bool:
    """`possible` of a scheduler's, engine's or runner's own configuration, asked once: vLLM works it out each time."""
    found: bool | None = getattr(holder, "_ppdeploy_possible", None)
    if found is None:
        found = holder._ppdeploy_possible = possible(holder.vllm_config)
    return found


def delay(settings: Settings, stages: int, tokens: int, most: int, structured: bool) -> int:
    """Steps until the requests of a batch of `tokens` tokens, of `most` at most, may take part in another one."""
    limit = settings.limit(most)
    if not settings.mode.overlaps or limit == 0:
        return stages
    return stages + 1 if structured or tokens >= limit else stages


class Due:
    """Received tokens of earlier steps, each to be applied on a step of its own."""

    def __init__(self) -> None:
        self._step = 0
        self._waiting: list[tuple[int, Any]] = []

    def next(self, received: Any, received_delay: int) -> list[Any]:
        """Start a step: what is due on it, oldest first. `received` is what the step before received, or None,
        and `received_delay` the number of steps from that one to the step on which it is due."""
        if received is not None:
            self._waiting.append((self._step + received_delay, received))
        self._step += 1
        due = [item for step, item in self._waiting if step <= self._step]
        self._waiting = [(step, item) for step, item in self._waiting if step > self._step]
        return due


def install(settings: Settings, counters: Counters) -> None:
    """Change scheduler, engine, model runner and configuration in this process, each once it is imported."""
    now = Now(settings)
    when_imported(
        "vllm.v1.core.sched.async_scheduler", lambda module: _change_scheduler(now, counters, module.AsyncScheduler)
    )
    if settings.switch:
        when_imported("vllm.v1.core.sched.scheduler", lambda module: _stamp(now, module.Scheduler))
        when_imported("vllm.v1.engine.core", lambda module: _change_engine(now, module.EngineCore))
    when_imported("vllm.v1.worker.gpu.model_runner", lambda module: _change_runner(module.GPUModelRunner))
    when_imported("vllm.config.vllm", lambda module: _change_config(module.VllmConfig))


class Now:
    """The settings in force, which a switch file may change while no batch is in flight."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.switch = settings.switch
        self.chunk = 0

    def read(self) -> None:
        """Read the switch file: a mode as in `settings.parse`, then, if wanted, the most tokens of a batch."""
        with open(self.switch) as file:
            mode, *chunk = file.read().split()
        self.settings = parse(mode)
        self.chunk = int(chunk[0]) if chunk else 0


def _stamp(now: Now, scheduler: Any) -> None:
    """Have every batch carry the mode that the switch file asks for."""
    after = scheduler._update_after_schedule

    @functools.wraps(after)
    def _update_after_schedule(self: Any, scheduler_output: Any) -> None:
        after(self, scheduler_output)
        setattr(scheduler_output, STAMP, now.settings.mode.value)

    scheduler._update_after_schedule = _update_after_schedule


def _change_scheduler(now: Now, counters: Counters, scheduler: Any) -> None:
    after = scheduler._update_after_schedule

    @functools.wraps(after)
    def _update_after_schedule(self: Any, scheduler_output: Any) -> None:
        after(self, scheduler_output)
        if not _possible_here(self):
            return
        stages = self.parallel_config.pipeline_parallel_size
        tokens = scheduler_output.total_num_scheduled_tokens
        structured = scheduler_output.has_structured_output_requests
        wanted = delay(now.settings, stages, tokens, self.max_num_scheduled_tokens, structured)
        if wanted == stages:
            return
        counters.add("staggered")
        setattr(scheduler_output, DELAY, wanted)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            if not request.is_prefill_chunk:
                request.next_decode_eligible_step += wanted - stages

    scheduler._update_after_schedule = _update_after_schedule


def _change_engine(now: Now, engine: Any) -> None:
    step = engine.step_with_batch_queue

    @functools.wraps(step)
    def step_with_batch_queue(self: Any) -> Any:
        if not self.batch_queue:
            now.read()
            # As many as vLLM itself would have in flight, unless one more is of use.
            self.batch_queue_size = self.batch_queue.maxlen
            if _possible_here(self) and (not now.settings.mode.overlaps or now.settings.stagger == 0):
                self.batch_queue_size -= 1
            most = self.vllm_config.scheduler_config.max_num_batched_tokens
            self.scheduler.max_num_scheduled_tokens = min(most, now.chunk or most)
        return step(self)

    engine.step_with_batch_queue = step_with_batch_queue


def _change_runner(runner: Any) -> None:
    """In a worker: apply the received tokens on the step that the scheduler meant."""
    update, execute = runner.update_pp_decode_requests, runner.execute_model

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._ppdeploy_delay_next = getattr(scheduler_output, DELAY, None)
        return execute(self, scheduler_output, *args, **kwargs)

    @functools.wraps(update)
    def update_pp_decode_requests(self: Any) -> None:
        handler = self.pp_handler
        if handler is None or handler.is_last_rank or not _possible_here(self):
            update(self)
            return
        due: Due | None = getattr(self, "_ppdeploy_due", None)
        if due is None:
            due = self._ppdeploy_due = Due()
        stages = self.parallel_config.pipeline_parallel_size
        received = handler.queue[-1]
        last = getattr(self, "_ppdeploy_delay", None) or stages
        self._ppdeploy_delay = self._ppdeploy_delay_next
        for slot in due.next(received, last):
            # vLLM's own code for one slot, the only one in the queue.
            handler.queue = deque([slot])
            update(self)
        handler.queue = deque([None])

    runner.execute_model = execute_model
    runner.update_pp_decode_requests = update_pp_decode_requests


def _change_config(config: Any) -> None:
    """One more batch in flight, in every process: buffers are made after it."""
    batches = config.max_concurrent_batches.fget

    def max_concurrent_batches(self: Any) -> int:
        return int(batches(self)) + (1 if possible(self) else 0)

    config.max_concurrent_batches = property(max_concurrent_batches, doc=batches.__doc__)
