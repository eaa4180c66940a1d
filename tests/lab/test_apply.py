"""From bare hosts to a served model and on: each apply does what is left to do, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.lab.cluster import PIPELINE, Cluster, FirstApply, no_change

RELEASES = f"/opt/ppdeploy/{PIPELINE}/releases"


def test_check_works_on_bare_hosts_and_changes_nothing(first: FirstApply) -> None:
    assert first.check.code == 0, first.check.said
    assert first.after_check == first.bare
    assert all(count > 0 for count in first.check.changed().values())


def test_the_first_apply_says_that_it_changed_the_hosts(served: Cluster, first: FirstApply) -> None:
    assert min(first.apply.changed().values()) > 0
    assert set(first.apply.changed()) == set(served.lab.nodes)


def test_no_host_and_not_the_controller_asked_beyond_the_lab(first: FirstApply) -> None:
    """From the bundle, and up to a served answer; `test_isolated.py` has the proof that it would have been counted."""
    assert first.beyond == {"controller": 0, "hosts": 0}


def test_a_second_apply_changes_nothing_and_restarts_nothing(served: Cluster) -> None:
    before, pids = served.listing(), served.pids()
    assert min(pids.values()) > 0
    done = served.ppdeploy("apply", "--json")
    assert done.code == 0, done.said
    assert done.changed() == no_change()
    assert (served.pids(), served.listing()) == (pids, before)


def test_configure_alone_works_and_has_nothing_to_do(served: Cluster) -> None:
    pids = served.pids()
    done = served.ansible_playbook("--tags", "configure")
    assert done.code == 0, done.said
    assert done.changed() == no_change()
    assert served.pids() == pids


def test_render_writes_what_lies_on_the_hosts(served: Cluster, tmp_path: Path) -> None:
    done = served.ppdeploy("render", "--out", str(tmp_path / "files"))
    assert done.code == 0, done.said
    for node in served.lab.nodes:
        folder = tmp_path / "files" / node
        texts = {f"/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        rendered = {path: hashlib.sha256(text).hexdigest() for path, text in texts.items()}
        # All but the packed agent, which is no template, and keys and certificates, which are in no plan.
        others = "/opt/ppdeploy/agent/*.sh /etc/ppdeploy/*.json $(find /etc/ppdeploy -name haproxy.cfg)"
        units = "$(find /etc/systemd/system -maxdepth 1 -type f -name 'ppdeploy-*')"
        script = f"sha256sum {RELEASES}/*/* {units} {others}"
        lines = (line.split(None, 1) for line in served.out(node, script).splitlines())
        assert rendered == {path: digest for digest, path in lines}


def test_every_host_looks_as_planned(served: Cluster) -> None:
    done, failed = served.testinfra()
    assert (done.code, failed) == (0, set()), done.said
    assert re.search(r"\b\d+ passed", done.out), done.said


def test_smoke_proves_that_it_serves_and_how_fast(served: Cluster) -> None:
    done = served.ppdeploy("smoke")
    assert done.code == 0, done.said
    heading, row = done.out.splitlines()[:2]
    assert "tokens/s" in heading
    assert float(re.split(r"\s{2,}", row)[3]) > 0
    assert "tiny-llama completed " in done.out


def test_an_interrupted_apply_leaves_the_last_release_serving(served: Cluster, tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    pids = served.pids()
    # A release of its own, which no later test meets again.
    process = served.start_ppdeploy(
        *("apply", "--json", "-e", "ppdeploy_max_model_len=512"), env={"XDG_RUNTIME_DIR": str(runtime)}
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line).get("task") == "Write the release beside the running one":
                break
        else:
            pytest.fail("the apply ended before it wrote a release")
        assert list(runtime.iterdir())
        # What Ctrl-C at a terminal does.
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert list(runtime.iterdir()) == []
    assert served.pids() == pids
    assert served.complete("Hello", tokens=4)


@pytest.fixture(scope="module")
def switched(served: Cluster) -> str:
    """The digest of the release that ran before a variable changed; from here on the new one runs."""
    before = served.out("node1", f"readlink /opt/ppdeploy/{PIPELINE}/current").removeprefix("releases/")
    # The first attempt is interrupted between the switch and the agents' word: the last release goes on serving.
    served.extra = ("-e", "ppdeploy_max_model_len=768")
    process = served.start_ppdeploy("apply", "--json", env={})
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line).get("task") == "Switch to the release":
                break
        else:
            pytest.fail("the apply ended before it switched to the release")
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    done = served.ppdeploy("apply", "--json")
    assert done.code == 0, done.said
    assert min(done.changed().values()) > 0
    served.notes["switch"] = done.result
    return before


def test_running_an_interrupted_apply_again_finishes_the_work(served: Cluster, switched: str) -> None:
    (pipeline,) = served.notes["switch"]["pipelines"]
    assert pipeline["serves"] is True
    assert pipeline["release"] != switched
    for node in served.lab.nodes:
        links = served.out(node, f"cd /opt/ppdeploy/{PIPELINE}; readlink current previous").split()
        assert links == [f"releases/{pipeline['release']}", f"releases/{switched}"]
        assert "--max-model-len 768" in served.out(node, f"systemctl cat ppdeploy-rank@{PIPELINE}")
    assert served.lab.exec_ssh("node1", ["pgrep", "-fc", "max-model-len 1024"], check=False).stdout.strip() == "0"


@pytest.mark.usefixtures("switched")
def test_ansible_after_ppdeploy_changes_nothing_too(served: Cluster) -> None:
    pids = served.pids()
    done = served.ansible_playbook()
    assert done.code == 0, done.said
    assert done.changed() == no_change()
    assert served.pids() == pids
