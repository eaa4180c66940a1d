"""What a worker does with a handoff, with stand-ins for vLLM's classes."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_sends import Work
from test_wire import Tensor, pair

from ppdeploy_handoff import fp8, stagger, wire, worker
from ppdeploy_handoff.counters import Counters, total
from ppdeploy_handoff.settings import Mode, parse


class Qwen3ForCausalLM: ...


class Unknown: ...


class Bytes(Tensor):
    def element_size(self) -> int:
        return 2


def rank(model: object, stages: int = 2, **passes: bool) -> Any:
    parallel = SimpleNamespace(pipeline_parallel_size=stages, distributed_executor_backend="mp")
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=parallel,
            compilation_config=SimpleNamespace(pass_config=SimpleNamespace(**passes)),
        ),
        model_runner=SimpleNamespace(get_model=lambda: model),
    )


GROUP = SimpleNamespace(use_cpu_custom_send_recv=False, device=SimpleNamespace(type="cpu"))


def handoff(mode: str, model: object | None = None, **how: Any) -> worker.Handoff:
    made = worker.Handoff(parse(mode), Counters(None))
    made.judge(rank(model or Qwen3ForCausalLM(), **how))
    return made


def tensors() -> dict[str, Any]:
    return {"hidden_states": Bytes(1.0), "residual": Bytes(2.0)}


def test_half_the_bytes() -> None:
    made, sent = handoff("lossless"), []
    work = Work()
    assert made.send(lambda group, t, **how: sent.append(t) or [work], GROUP, tensors()) == [work]  # type: ignore[func-returns-value]
    assert set(sent[0]) == {"hidden_states", wire.MARK}
    counters = made._counters
    assert counters.value("bytes_sent") == counters.value("bytes_saved") == 3 * 4 * 2
    assert work.waits == 0


def test_overlap_gives_vllm_handles_that_do_not_wait() -> None:
    made, work = handoff("overlap"), Work()
    (late,) = made.send(lambda group, t, **how: [work], GROUP, tensors())
    late.wait()
    assert work.waits == 0
    assert made._counters.value("waits_avoided") == 1


def test_a_quarter_of_the_bytes_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    # Half as many values of two bytes, and the scale.
    monkeypatch.setattr(fp8, "encode", lambda hidden: replace(hidden, shape=(3, (32 + fp8.TAIL) // 2)))
    made, work, sent = handoff("fp8"), Work(), []
    whole = {key: replace(value, shape=(3, 32)) for key, value in tensors().items()}
    for gather, slices in ((None, 1), (SimpleNamespace(world_size=4), 4), (SimpleNamespace(world_size=5), 1)):
        (late,) = made.send(lambda group, t, **how: sent.append(t) or [work], GROUP, whole, all_gather_group=gather)  # type: ignore[func-returns-value]
        late.wait()
        counters = made._counters
        assert counters.value("bytes_sent") == 3 * (32 + fp8.TAIL) // slices
        assert counters.value("bytes_saved") == 3 * 32 * 2 * 2 // slices - 3 * (32 + fp8.TAIL) // slices
        made._counters = Counters(None)
    assert set(sent[0]) == {"hidden_states", wire.SHORT}
    assert work.waits == 1, "the oldest of three sends is one too many"


def test_what_cannot_be_packed_goes_after_all_that_was_put_off() -> None:
    made, work = handoff("overlap"), Work()
    made.send(lambda group, t, **how: [work], GROUP, tensors())
    more = tensors() | {"aux": Bytes(0.0)}
    made.send(lambda group, t, **how: [] if t is more and work.waits == 1 else pytest.fail("order"), GROUP, more)


def test_slices_and_shared_memory_are_left_to_vllm() -> None:
    made = handoff("overlap")
    for group, how in (
        (GROUP, {"all_gather_tensors": {"residual": False}}),
        (SimpleNamespace(use_cpu_custom_send_recv=True), {}),
    ):
        sent = tensors()
        made.send(lambda _group, t, _sent=sent, **_how: [] if t is _sent else pytest.fail("packed"), group, sent, **how)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"model": Unknown()}, "the layers of Unknown are not among those read for it"),
        ({"stages": 1}, "there is one stage"),
        ({"enable_sp": True}, "sequence parallelism"),
    ],
)
def test_where_it_stays_out_it_says_so(made: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert handoff("overlap", **made).mode is Mode.OFF
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_more_than_two_stages_do_not_wait_for_their_sends_either() -> None:
    assert handoff("overlap", stages=3).mode is Mode.OVERLAP


def test_a_stamp_changes_the_mode_of_a_batch() -> None:
    made = handoff("off")
    made.begin(SimpleNamespace(**{worker.STAMP: "lossless"}))
    assert made.mode is Mode.LOSSLESS
    made.begin(SimpleNamespace())
    assert made.mode is Mode.LOSSLESS


def test_a_received_sum_is_opened_in_every_mode() -> None:
    made = handoff("off")
    got, _, after = made.receive(lambda group, **how: ({"hidden_states": Bytes(3.0), wire.MARK: 1}, [], []), GROUP)
    assert set(got) == {"hidden_states"} and len(after) == 1


def test_counters_of_all_processes_of_a_node_add_up(tmp_path: Any) -> None:
    one = Counters(str(tmp_path))
    one.add("handoffs", 2)
    (tmp_path / "1.counters").write_bytes((tmp_path / next(iter(tmp_path.iterdir())).name).read_bytes())
    (tmp_path / "2.counters").write_bytes(b"half")
    assert total(str(tmp_path))["handoffs"] == 4


def test_the_scheduler_lets_requests_of_a_large_batch_wait_one_step_more() -> None:
    class Scheduler:
        parallel_config = SimpleNamespace(pipeline_parallel_size=2)
        max_num_scheduled_tokens = 400
        _ppdeploy_possible = True

        def __init__(self) -> None:
            self.requests = {
                "decoding": SimpleNamespace(is_prefill_chunk=False, next_decode_eligible_step=0),
                "chunk": SimpleNamespace(is_prefill_chunk=True, next_decode_eligible_step=0),
            }

        def _update_after_schedule(self, output: Any) -> None:
            self.requests["decoding"].next_decode_eligible_step = 10 + 2

    stagger._change_scheduler(stagger.Now(parse("overlap")), Counters(None), Scheduler)
    for tokens, step, stamped in ((250, 13, 3), (100, 12, None)):
        scheduler = Scheduler()
        output = SimpleNamespace(
            total_num_scheduled_tokens=tokens,
            has_structured_output_requests=False,
            num_scheduled_tokens={"decoding": 1, "chunk": tokens - 1},
        )
        scheduler._update_after_schedule(output)
        assert scheduler.requests["decoding"].next_decode_eligible_step == step
        assert scheduler.requests["chunk"].next_decode_eligible_step == 0
        assert getattr(output, stagger.DELAY, None) == stamped


def test_pair_helper_is_the_shape_that_vllm_sends() -> None:
    assert set(pair()) == set(wire.PAIR)
