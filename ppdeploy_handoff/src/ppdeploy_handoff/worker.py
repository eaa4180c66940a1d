"""The part in each worker process: how the tensors between two stages are sent and received."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from ppdeploy_handoff import families, wire
from ppdeploy_handoff.counters import Counters
from ppdeploy_handoff.lazy import when_imported
from ppdeploy_handoff.sends import Ring
from ppdeploy_handoff.settings import Mode, Settings, parse

# A child of vLLM's logger, so that its lines appear in vLLM's format and at its level.
log = logging.getLogger("vllm.ppdeploy_handoff")

# An attribute of vLLM's SchedulerOutput, which travels to every worker: the mode of this batch when a switch file
# decides it (Settings.switch), so that both ends change at the same batch.
STAMP = "ppdeploy_handoff_mode"


class Handoff:
    """What one worker process does with its handoffs."""

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self._settings = settings
        self._counters = counters
        self._ring = Ring()
        self._stream: Any = None
        self._said: set[str] = set()
        self.mode = Mode.OFF
        self.ceiling = Mode.OFF
        # True while vLLM's Worker.execute_model runs: only its sends and receives are ours, not those of a broadcast.
        self.in_step = False

    def judge(self, worker: Any) -> None:
        """Decide, once the model is loaded, what is possible for it here, and say so in one line."""
        config = worker.vllm_config
        parallel = config.parallel_config
        model = type(worker.model_runner.get_model()).__name__
        stages = parallel.pipeline_parallel_size
        norm = families.known(model)
        reason = ""
        if stages < 2:
            reason = "there is one stage, so no handoff"
        elif norm is None:
            reason = f"the layers of {model} are not among those read for it"
        elif getattr(config.compilation_config.pass_config, "enable_sp", False):  # gone after 0.26
            reason = "sequence parallelism leaves each rank a slice of the residual"
        elif parallel.distributed_executor_backend == "external_launcher":
            reason = "the external launcher sends its tensors in another way"
        self.ceiling = Mode.OFF if reason else Mode.FP8
        self.mode = self._capped(self._settings.mode)
        if reason:
            log.warning("ppdeploy_handoff: handoffs stay as vLLM sends them: %s", reason)
        else:
            assert norm is not None
            log.info("ppdeploy_handoff: %s for %s (%s)", self.mode.value, model, norm.value)

    def begin(self, scheduler_output: Any) -> None:
        """A batch starts in this worker."""
        stamp = getattr(scheduler_output, STAMP, None)
        if stamp is not None:
            self.mode = self._capped(parse(stamp).mode)
        self.in_step = True

    def end(self) -> None:
        """The batch's work is queued."""
        self.in_step = False

    def send(self, original: Callable[..., list[Any]], group: Any, tensors: dict[str, Any], **how: Any) -> list[Any]:
        """`isend_tensor_dict` of vLLM's GroupCoordinator; `how` are its other arguments."""
        packed = None
        if self.mode is not Mode.OFF and not how.get("all_gather_tensors") and not group.use_cpu_custom_send_recv:
            packed = wire.pack(tensors, short=self.mode is Mode.FP8)
            if packed is None:
                self._once("these handoffs hold more than hidden_states and residual: they travel as they are")
        if packed is None:
            self._ring.drain()
            return original(group, tensors, **how)
        works = original(group, packed, **how)
        size = _bytes_of_one(packed[wire.PAIR[0]], how.get("all_gather_group"))
        plain = sum(_bytes_of_one(tensors[name], how.get("all_gather_group")) for name in wire.PAIR)
        self._counters.add("handoffs")
        self._counters.add("bytes_sent", size)
        self._counters.add("bytes_saved", plain - size)
        if not self.mode.overlaps:
            self._ring.drain()
            return works
        return self._ring.hold(works, packed, lambda: self._counters.add("waits_avoided"))

    def receive(self, original: Callable[..., Any], group: Any, **how: Any) -> Any:
        """`irecv_tensor_dict` of vLLM's GroupCoordinator."""
        if self.mode.overlaps and group.device.type == "cuda":
            tensors, works, postprocess = self._receive_aside(original, group, how)
        else:
            tensors, works, postprocess = original(group, **how)
        if tensors is not None:
            wire.unpack(tensors, postprocess, wire.nothing_like)
        return tensors, works, postprocess

    def _receive_aside(self, original: Callable[..., Any], group: Any, how: dict[str, Any]) -> Any:
        """Receive on a stream of its own: NCCL lets a receive wait for all that is queued on the current one, that is
        for the batch before, and the link would idle all the while."""
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(group.device)
        with torch.cuda.stream(self._stream):
            tensors, works, postprocess = original(group, **how)
        arrived = [value for value in (tensors or {}).values() if isinstance(value, torch.Tensor) and value.is_cuda]
        return tensors, [Aside(work, arrived) for work in works], postprocess

    def _capped(self, mode: Mode) -> Mode:
        order = list(Mode)
        return min(mode, self.ceiling, key=order.index)

    def _once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("ppdeploy_handoff: %s", text)


def _bytes_of_one(tensor: Any, gather: Any) -> int:
    """Bytes of `tensor` that one rank sends: of a tensor parallel group its slice, unless it cannot be cut evenly."""
    slices = 1 if gather is None or tensor.numel() % gather.world_size else gather.world_size
    return int(tensor.numel() * tensor.element_size() // slices)


class Aside:
    """A receive that was posted on another stream than the one that will read its tensors."""

    def __init__(self, work: Any, tensors: list[Any]) -> None:
        self._work = work
        self._tensors = tensors

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Let the current stream wait, and tell the allocator that it reads memory of the other one."""
        import torch

        self._work.wait()
        for tensor in self._tensors:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def install(handoff: Handoff) -> None:
    """Put `handoff` into this process's vLLM: its Worker and GroupCoordinator classes, once they are imported."""
    when_imported("vllm.v1.worker.gpu_worker", lambda module: _change_worker(handoff, module.Worker))
    when_imported("vllm.distributed.parallel_state", lambda module: _change_group(handoff, module.GroupCoordinator))


def _change_worker(handoff: Handoff, worker: Any) -> None:
    load, execute = worker.load_model, worker.execute_model

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        handoff.judge(self)
        return result

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        handoff.begin(scheduler_output)
        try:
            return execute(self, scheduler_output)
        finally:
            handoff.end()

    worker.load_model, worker.execute_model = load_model, execute_model


def _change_group(handoff: Handoff, group: Any) -> None:
    isend, irecv = group.isend_tensor_dict, group.irecv_tensor_dict

    @functools.wraps(isend)
    def isend_tensor_dict(self: Any, tensor_dict: dict[str, Any], **how: Any) -> Any:
        if handoff.in_step and self.world_size > 1:
            return handoff.send(isend, self, tensor_dict, **how)
        return isend(self, tensor_dict, **how)

    @functools.wraps(irecv)
    def irecv_tensor_dict(self: Any, **how: Any) -> Any:
        if handoff.in_step and self.world_size > 1:
            return handoff.receive(irecv, self, **how)
        return irecv(self, **how)

    group.isend_tensor_dict, group.irecv_tensor_dict = isend_tensor_dict, irecv_tensor_dict
