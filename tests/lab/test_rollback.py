"""A release that does not serve: the last one comes back by itself."""

from __future__ import annotations

from pathlib import Path

from ppdeploy.errors import RolledBackError
from tests.lab.cluster import PIPELINE, PROMPTS, Cluster

#: vLLM ends while it is imported when this file is not there: the quickest way to ranks that never serve.
BROKEN = {"VLLM_LOGGING_CONFIG_PATH": "/etc/ppdeploy/no-such-logging.json"}


def test_the_last_release_serves_again_by_itself(served: Cluster, tmp_path: Path) -> None:
    before, text = served.plan().pipelines[0].release, served.complete(PROMPTS[0])
    inventory = served.variant(tmp_path / "hosts.yml", env=BROKEN)
    done = served.ppdeploy("apply", "--json", inventory=inventory)
    assert done.code == RolledBackError.exit_code, done.said
    assert "failed 3 times while starting" in done.error
    status = served.status()
    assert (status["phase"], status["healthy"], status["release"]) == ("serving", True, before)
    for node in served.lab.nodes:
        assert served.out(node, f"readlink /opt/ppdeploy/{PIPELINE}/current") == f"releases/{before}"
    assert served.complete(PROMPTS[0]) == text

    # What serves is what the inventory wants: there is nothing left to do.
    nodes = served.plan().pipelines[0].nodes
    assert not any(node.work.restart or node.work.switch_release for node in nodes)
