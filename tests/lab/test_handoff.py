"""The handoff plugin on real ranks: as a variable of the inventory, from the lock to the counters.

What is written with and without it is compared in float32 by `ppdeploy_handoff/measure/proof.sh`: in the 16 bits of the
lab's model one norm at the stage boundary rounds otherwise, and two of six texts part (docs/handoff.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdeploy.lab.ready import tiny_model
from tests.faults import rows
from tests.faults.deploy import VllmGang
from tests.lab.cluster import PIPELINE, PROMPTS, Cluster, no_change

pytestmark = pytest.mark.long

#: What vLLM's own /metrics of the head say about handoffs.
_COUNTERS = (
    "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/metrics').read().decode())\" "
    "| grep '^ppdeploy_handoff_.*_total '"
)


def counters(cluster: Cluster) -> dict[str, float]:
    """Return the plugin's counters of the head by their names."""
    lines = [line.split() for line in cluster.out("node1", _COUNTERS).splitlines()]
    return {name.removeprefix("ppdeploy_handoff_").removesuffix("_total"): float(value) for name, value in lines}


@pytest.fixture(scope="module")
def overlap(served: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An inventory with the mode, applied; the tests after these have the ranks without it again."""
    inventory = served.variant(tmp_path_factory.mktemp("handoff") / "overlap.yml", handoff="overlap")
    done = served.ppdeploy("apply", "--json", inventory=inventory)
    assert done.code == 0, done.said
    assert set(done.changed()) == {"node1", "node2"}
    yield inventory
    back = served.ppdeploy("apply", "--json")
    assert back.code == 0, back.said


def test_a_mode_of_the_handoff_is_a_release_that_sends_half_the_bytes(served: Cluster, overlap: Path) -> None:
    for node in served.lab.nodes:
        journal = served.out(node, f"journalctl --output=cat --unit=ppdeploy-rank@{PIPELINE}")
        assert "ppdeploy_handoff: overlap for LlamaForCausalLM" in journal
    for prompt in PROMPTS:
        assert served.complete(prompt)
    found = counters(served)
    assert found["handoffs"] > 0
    assert found["waits_avoided"] > 0
    # Each handoff was half of what vLLM sends.
    assert found["bytes_sent"] == found["bytes_saved"] > 0

    again = served.ppdeploy("apply", "--json", inventory=overlap)
    assert (again.code, again.changed()) == (0, no_change()), again.said


@pytest.mark.usefixtures("overlap")
def test_a_killed_worker_comes_back_with_the_same_mode_and_text(served: Cluster) -> None:
    texts = [served.complete(prompt) for prompt in PROMPTS]
    rows.rank_killed(VllmGang(served.lab), "worker", busy=True)
    assert [served.complete(prompt) for prompt in PROMPTS] == texts
    found = counters(served)
    assert found["bytes_sent"] == found["bytes_saved"] > 0


@pytest.mark.usefixtures("overlap")
def test_eight_bits_are_a_quarter_of_the_bytes(served: Cluster, tmp_path: Path) -> None:
    # The tests after these have the ranks without the plugin again: `overlap` sees to it.
    done = served.ppdeploy("apply", "--json", inventory=served.variant(tmp_path / "fp8.yml", handoff="fp8"))
    assert done.code == 0, done.said
    texts = [served.complete(prompt) for prompt in PROMPTS]
    # It is not vLLM's own text, but the same each time.
    assert [served.complete(prompt) for prompt in PROMPTS] == texts
    found = counters(served)
    hidden = json.loads((tiny_model(tied=True) / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    # In bfloat16 vLLM sends two values of two bytes; it is one of one byte, and 16 bytes for each token.
    assert found["bytes_sent"] * 4 * hidden == (found["bytes_sent"] + found["bytes_saved"]) * (hidden + 16) > 0
