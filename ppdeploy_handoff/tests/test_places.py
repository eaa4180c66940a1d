"""The table of what was read in vLLM."""

from __future__ import annotations

import re

from ppdeploy_handoff import versions
from ppdeploy_handoff.places import PLACES


def test_no_version_is_switched_on_that_was_not_read_at_every_place() -> None:
    for version, _device in versions.TESTED:
        for place in PLACES:
            assert any(version in known for known in place.read.values()), (version, place.file, place.name)


def test_each_version_has_one_text_of_a_place() -> None:
    for place in PLACES:
        named = [version for known in place.read.values() for version in known]
        assert sorted(named) == sorted(set(named)), place
        assert all(re.fullmatch(r"[0-9a-f]{8}|-", digest) for digest in place.read), place


def test_what_is_replaced_is_in_the_table() -> None:
    replaced = {place.name for place in PLACES if place.relied_on.startswith("replaced")}
    assert replaced == {
        "AsyncScheduler._update_after_schedule",
        "EngineCore.step_with_batch_queue",
        "GPUModelRunner.execute_model",
        "GPUModelRunner.update_pp_decode_requests",
        "GroupCoordinator.irecv_tensor_dict",
        "GroupCoordinator.isend_tensor_dict",
        "Scheduler._update_after_schedule",
        "VllmConfig.max_concurrent_batches",
        "Worker.execute_model",
        "Worker.load_model",
    }
