"""`model_store` on three hosts of its own, without vLLM: a chain that is killed and cut, and damage that is found.

The role is run alone, with the plan's own decisions. Killing and cutting at twenty random points is
`make weights-faults`; here it is done at two.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory
from ppdeploy.lab.state import default_name
from ppdeploy.lab.tiny_model import make_noise_model
from ppdeploy.paths import data_root
from ppdeploy.run.environment import search_path
from ppdeploy.sources import resolve_source
from tests.lab.cluster import Cluster, Done, no_change, role_plays, values_words

NODES = ("node1", "node2", "node3")
POINTS = int(os.environ.get("PPDEPLOY_WEIGHTS_POINTS", "2"))
"""How often a transfer is disturbed: first killed, then cut, in turn."""
PATIENCE = ("-e", "model_store_patience=30")
"""What is waited for where the node before was killed."""
SEED = int(os.environ.get("PPDEPLOY_WEIGHTS_SEED", "6"))

_CONTENT = r"cd {folder} && find . -type f ! -name .ppdeploy-manifest.json -exec sha256sum {{}} + | sort -k 2"


@dataclass
class Store(Cluster):
    """The lab as a cluster on which the role model_store alone is run."""

    def place(self, *words: str) -> Done:
        """Run the role on all hosts."""
        return self.role("model_store", words=words)

    def start(self) -> subprocess.Popen[str]:
        """Begin to run it."""
        return subprocess.Popen(
            self.book_command("model_store", role_plays("model_store"), *values_words(), *PATIENCE),
            cwd=data_root(),
            env={**os.environ, "PATH": search_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def remove(self) -> None:
        """Take the models from all hosts."""
        for node in self.lab.nodes:
            self.out(node, "rm -rf /var/lib/ppdeploy/models")

    def hashes(self, node: str, folder: str) -> list[str]:
        """What the model's files on a host are, by sha256."""
        return self.out(node, _CONTENT.format(folder=folder)).splitlines()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Three bare hosts and a model of 12 files that all of them need, taken down at the end."""
    lab = Lab(f"{default_name()}-store")
    elsewhere = tmp_path_factory.mktemp("store")
    model = make_noise_model(elsewhere / "noise", layers=10, hidden=512)
    variables = {"ppdeploy_weights": "full"}
    try:
        lab.down()
        described = LabInventory.one_pipeline(3, model=str(model), vars=variables)
        inventory = lab.up(3, inventory=described, owner=os.getpid())
        yield Store(lab, inventory, elsewhere, [])
    finally:
        lab.down()


@pytest.fixture(scope="module")
def folder(store: Store) -> str:
    """Where the model lies on every host."""
    return f"/var/lib/ppdeploy/models/{resolve_source(str(store.elsewhere / 'noise'), None, Path()).directory_name()}"


@pytest.fixture(scope="module")
def right(store: Store) -> list[str]:
    """What the model's files are on the controller."""
    script = _CONTENT.format(folder=store.elsewhere / "noise")
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_model_goes_down_the_chain_once_and_a_second_run_changes_nothing(
    store: Store, folder: str, right: list[str]
) -> None:
    before = {node: sent(store, node) for node in NODES}
    done = store.place()
    assert done.code == 0, done.said
    assert {node: store.hashes(node, folder) for node in NODES} == dict.fromkeys(NODES, right)
    size = sum(path.stat().st_size for path in (store.elsewhere / "noise").iterdir())
    passed = {node: (sent(store, node) - before[node]) / size for node in NODES}
    # The head gives each byte once though two nodes need it: the third has it from the second.
    assert 1.0 < passed["node1"] < 1.3, passed
    assert 1.0 < passed["node2"] < 1.3, passed
    assert passed["node3"] < 0.3, passed
    for node in NODES:
        assert (
            store.out(node, "ls -d /run/ppdeploy-weights* /var/lib/ppdeploy/models/*.partial 2>/dev/null || true") == ""
        )
        assert store.out(node, "systemctl list-units --all --plain --no-legend 'ppdeploy-weights*'") == ""
    again = store.place()
    assert again.code == 0, again.said
    assert again.changed() == no_change(NODES)


@pytest.mark.long
def test_killed_and_cut_at_random_points_it_ends_whole(store: Store, folder: str, right: list[str]) -> None:
    chance = random.Random(SEED)  # noqa: S311  (points in time, the same in each run)
    for node in NODES:
        store.lab.shape(node, "60mbit", "both")
    try:
        for point in range(POINTS):
            store.remove()
            node = NODES[chance.randrange(3)]
            running = store.start()
            if not wait_for_bytes(store, node, chance.random(), running):
                pytest.fail(f"point {point}: nothing to disturb on {node}\n{running.communicate()[0]}")
            if point % 2 == 0:
                kill_transfer(store, node)
            else:
                store.lab.cut(node)
                time.sleep(2)
                store.lab.heal(node)
            out = running.communicate(timeout=300)[0]
            if running.returncode != 0:
                assert "run it again" in out, out
                done = store.place()
                assert done.code == 0, f"point {point} on {node}\n{done.said}"
            for each in NODES:
                assert store.hashes(each, folder) == right, f"point {point} on {node}: {each}"
    finally:
        for node in NODES:
            store.lab.shape(node, "none", "both")


def test_a_bit_flip_is_found_and_named_and_the_file_fetched_again(store: Store, folder: str, right: list[str]) -> None:
    file = "model-00004-of-00012.safetensors"
    flip = f"printf x | dd of={folder}/{file} bs=1 seek=70000 conv=notrunc status=none"
    store.out("node2", flip)
    done = store.place()
    assert done.code == 0, done.said
    assert done.changed()["node2"] == 1
    assert done.changed()["node1"] == 0
    assert store.hashes("node2", folder) == right
    # Behind the same size and time only reading it all finds the flip.
    keep = f"cp -a {folder}/{file} /root/kept && {flip} && touch -r /root/kept {folder}/{file}"
    store.out("node3", keep)
    checked = store.ppdeploy("check", "--weights", "--json")
    assert checked.code == 3, checked.said
    name = folder.rpartition("/")[2]
    assert f"{file} of model {name} is not what was placed (node3)" in checked.err, checked.said
    assert store.place().changed()["node3"] == 1
    assert store.hashes("node3", folder) == right


def sent(store: Store, node: str) -> int:
    """Return the bytes that a host has sent on the fabric."""
    return int(store.out(node, "cat /sys/class/net/fab0/statistics/tx_bytes"))


def transfer_file(store: Store, node: str, name: str) -> str:
    """Return what a file of a host's transfer says, read past ssh: on a busy machine that takes longer than a copy."""
    for path in Path(f"/proc/{store.lab.pid(node)}/root/run").glob(f"ppdeploy-weights-*/{name}"):
        # It may go at any moment.
        with contextlib.suppress(OSError):
            return path.read_text(encoding="utf-8")
    return ""


def wait_for_bytes(store: Store, node: str, share: float, running: subprocess.Popen[str]) -> bool:
    """Wait until that share of the model has arrived on a host; whether it did before the transfer ended."""
    size = sum(path.stat().st_size for path in (store.elsewhere / "noise").iterdir())
    while running.poll() is None:
        state = transfer_file(store, node, "state/state.json")
        here = json.loads(state).get("here", 0) if state else 0
        if here and here >= share * size * 0.8:
            return True
        time.sleep(0.05)
    return False


def kill_transfer(store: Store, node: str) -> None:
    """Kill the process that fetches on a host, and its rsync, by the group's id within the host."""
    job = transfer_file(store, node, "job")
    assert job.isdigit(), job
    enter = ["nsenter", f"--target={store.lab.pid(node)}", "--pid", "--mount", "--"]
    subprocess.run([*enter, "/bin/kill", "-9", "--", f"-{job}"], check=True)
