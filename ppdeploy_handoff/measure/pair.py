"""pair.py [TENSOR]: the plugin between two stages that run vLLM's own code of a handoff over gloo, without a model.

Each stage is one process, or TENSOR of them, a tensor parallel group, of which each sends its slice.

To be run by the Python of an environment with vLLM. Real are GroupCoordinator, Worker.execute_model,
AsyncIntermediateTensors and the norm that takes the tensors; a stand-in of the model runner makes random tensors on the
first stage and, on the second, copies what arrives into buffers of its own, as both model runners do. Modes change on
the way, batch by batch. Prints PROVED and ends with 0 when all batches came in their order, the residual stream was
equal to the bit (in float32 what is normalised too; with fp8 equal to what its bytes say), and the counters are right;
SIGALRM ends a hang.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
from ppdeploy_handoff import fp8, worker
from ppdeploy_handoff.counters import Counters
from ppdeploy_handoff.settings import parse

HIDDEN, MOST, LIMIT = 512, 300, 240
MODES = ["off"] * 20 + ["lossless"] * 60 + ["overlap"] * 60 + ["fp8"] * 60 + ["lossless", "overlap", "fp8", "off"] * 20
"""The mode of each batch; when it changes, sends that were put off are still on the wire."""


class LlamaForCausalLM:
    """A name that `families.py` has."""


def tensors(torch: Any, batch: int, dtype: Any) -> tuple[Any, Any]:
    """The two tensors of a batch, the same in both processes; a few are large."""
    tokens = random.Random(batch).choice([1, 2, 8, 32, MOST])
    generator = torch.Generator().manual_seed(batch)
    hidden, residual = (torch.randn(tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    return hidden, residual


def stage(rank: int, port: int, dtype_name: str, tensor: int) -> None:
    """One process."""
    import torch
    from vllm.distributed import parallel_state
    from vllm.ir import ops
    from vllm.sequence import IntermediateTensors
    from vllm.v1.worker import gpu_worker

    signal.alarm(LIMIT)
    # By it the ranks of one host find each other's shared memory.
    os.environ["VLLM_DIST_IDENT"] = str(port)
    torch.set_num_threads(1)
    dtype = getattr(torch, dtype_name)
    norm = ops.fused_add_rms_norm.impls["native"].impl_fn
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2 * tensor
    )
    first, last = list(range(tensor)), list(range(tensor, 2 * tensor))
    pp, tp = (
        # Slices are put together by the device's own communicator; sends between stages go past it.
        parallel_state.GroupCoordinator(ranks, rank, "gloo", use_device_communicator=name == "tp", group_name=name)
        for name, ranks in (("pp", [list(pair) for pair in zip(first, last, strict=True)]), ("tp", [first, last]))
    )
    gpu_worker.get_pp_group, gpu_worker.get_tp_group = lambda: pp, lambda: tp

    counters = Counters(None)
    handoff = HANDOFF[0]
    handoff._counters = counters
    parallel = SimpleNamespace(pipeline_parallel_size=2, distributed_executor_backend="mp")
    passes = SimpleNamespace(pass_config=SimpleNamespace())
    buffers = [torch.zeros(MOST, HIDDEN, dtype=dtype) for _ in range(2)]
    wrong = {"order": 0, "residual": 0, "normalised": 0}
    pause = random.Random(rank)

    class Runner:
        is_pooling_model = False

        def get_model(self) -> Any:
            return LlamaForCausalLM()

        def execute_model(self, batch: Any, received: Any) -> Any:
            hidden, residual = tensors(torch, batch.number, dtype)
            if rank < tensor:
                # The sender reuses what it sent: static buffers of a CUDA graph do the same.
                for buffer, value in zip(buffers, (hidden, residual), strict=True):
                    buffer[: len(value)].copy_(value)
                views = [buffer[: len(hidden)] for buffer in buffers]
                return IntermediateTensors(dict(zip(("hidden_states", "residual"), views, strict=True)))
            came = dict(received.items())
            wrong["order"] += set(came) != {"hidden_states", "residual"} or came["hidden_states"].shape != hidden.shape
            for buffer, name in zip(buffers, ("hidden_states", "residual"), strict=True):
                buffer[: len(hidden)].copy_(came[name][: len(hidden)])
            if MODES[batch.number] == "fp8":
                hidden = fp8.decode(fp8.encode(hidden + residual))
                residual = torch.full_like(hidden, -0.0)
            expected = norm(hidden, residual, None, 1e-6)
            found = norm(buffers[0][: len(hidden)], buffers[1][: len(hidden)], None, 1e-6)
            bits = [torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in zip(found, expected)]
            wrong["normalised"] += not bits[0]
            wrong["residual"] += not bits[1]
            # Now the one stage is behind, now the other.
            time.sleep(pause.choice([0, 0, 0, 0.02]))
            return None

    own = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel, compilation_config=passes),
        model_runner=Runner(),
        use_v2_model_runner=False,
        _pp_send_work=[],
        annotate_profile=lambda _batch: nullcontext(),
    )
    handoff.judge(own)
    for number, mode in enumerate(MODES):
        batch = SimpleNamespace(number=number, total_num_scheduled_tokens=1, **{worker.STAMP: mode})
        gpu_worker.Worker.execute_model(own, batch)
    for handle in own._pp_send_work:
        handle.wait()
    handoff._ring.drain()
    torch.distributed.barrier()
    if rank >= tensor:
        print(f"{dtype_name}: {len(MODES)} batches, wrong: {wrong}")
        ok = not wrong["order"] and not wrong["residual"] and (dtype_name != "float32" or not wrong["normalised"])
    else:
        packed = [number for number, mode in enumerate(MODES) if mode != "off"]
        values = {number: tensors(torch, number, dtype)[0].numel() for number in packed}
        sent = sum(
            count * dtype.itemsize if MODES[number] != "fp8" else count // HIDDEN * (HIDDEN + fp8.TAIL)
            for number, count in values.items()
        )
        saved = 2 * dtype.itemsize * sum(values.values()) - sent
        sent, saved = sent // tensor, saved // tensor
        told = {name: counters.value(name) for name in ("handoffs", "bytes_sent", "bytes_saved", "waits_avoided")}
        print(f"{dtype_name}: {told}, held at the end: {len(handoff._ring)}, by vLLM: {len(pp._pending_isends)}")
        ok = (told["handoffs"], told["bytes_sent"], told["bytes_saved"]) == (len(packed), sent, saved)
    sys.stdout.flush()
    os._exit(0 if ok else 1)


HANDOFF: list[worker.Handoff] = []


def main(tensor: int) -> int:
    """Import once, then be two processes or more for each type."""
    HANDOFF.append(worker.Handoff(parse("overlap"), Counters(None)))
    worker.install(HANDOFF[0])
    import vllm
    import vllm.v1.worker.gpu_worker

    print(f"vLLM {vllm.__version__}", flush=True)
    failed = False
    for dtype in ("float32", "bfloat16"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(2 * tensor):
            child = os.fork()
            if child == 0:
                stage(rank, port, dtype, tensor)
            children.append(child)
        failed |= any(os.waitpid(child, 0)[1] != 0 for child in children)
    print("FAILED" if failed else "PROVED")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 1))
