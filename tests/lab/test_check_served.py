"""`ppdeploy check` beside ranks that serve: they are not disturbed, and what they have counts as ours."""

from __future__ import annotations

import json
from typing import Any

from tests.lab.cluster import Cluster


def test_a_pipeline_that_serves_is_left_alone_and_ready(served: Cluster) -> None:
    pids, before = served.pids(), served.status()
    done = served.ppdeploy("check", "--json")
    document = json.loads(done.out)
    assert done.code == 0, done.said

    def result(name: str, host: str | None = None, peer: str | None = None) -> dict[str, Any]:
        (found,) = [one for one in document["results"] if (one["id"], one["host"], one["peer"]) == (name, host, peer)]
        return dict(found)

    assert "held by our own units" in result("port-taken", "node1")["evidence"]
    assert result("master-port", "node2", "node1")["evidence"] == "our own rank runs, and has it"
    assert result("throughput", "node1", "node2")["evidence"] == "the pipeline serves, and is left alone"
    assert result("ephemeral-ports", "node1", "node2")["verdict"] == "ready"
    for name in ("environment", "weights", "memlock", "open-files", "rivals"):
        assert (result(name, "node2")["verdict"], result(name, "node2")["judged"]) == ("ready", True), result(
            name, "node2"
        )
    for name in ("same-vllm", "same-torch", "same-release"):
        assert result(name)["judged"], result(name)

    after = served.status()
    assert served.pids() == pids
    assert (after["generation"], after["healthy"]) == (before["generation"], True)
