"""What a person or a host gets wrong: one sentence with the place and the remedy, and no host is touched."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.spec.serve_options import FOLDER, PREFIXES
from tests.lab.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def ranks(served: Cluster) -> Iterator[dict[str, int]]:
    """Whatever the test got wrong, every host is as it was and its rank is the same process as before."""
    before, pids = served.listing(), served.pids()
    yield pids
    assert served.listing() == before
    assert served.pids() == pids


def refused(cluster: Cluster, code: int, *words: str, inventory: Path | None = None) -> str:
    """Return the sentence that an apply ends with, which must be its only error."""
    done = cluster.ppdeploy("apply", *words, inventory=inventory)
    assert done.code == code, done.said
    assert "Traceback" not in done.err
    return done.error


def test_a_port_that_another_program_has(served: Cluster) -> None:
    served.out("node1", "systemd-run --quiet --collect --unit=stranger python3 -m http.server 8001")
    listens = "ss -Hltn | grep -q :8001"
    served.out("node1", f"for _ in $(seq 100); do {listens} && break; sleep 0.1; done; {listens}")
    try:
        said = refused(served, 3, "-e", "ppdeploy_api_port=8001")
    finally:
        served.out("node1", "systemctl stop stranger")
    assert "port 8001 is taken by " in said
    assert "python3 (stranger.service, pid " in said
    assert "(node1)" in said
    assert "set ppdeploy_api_port to a free port" in said


def test_a_fabric_that_carries_nothing(served: Cluster, ranks: dict[str, int]) -> None:
    served.lab.cut("node2", silent=True)
    try:
        said = refused(served, 3)
    finally:
        served.lab.heal("node2")
        # Not the apply: the gang itself stops at such a cut, and comes back.
        served.wait_until_serving()
        ranks.update(served.pids())
    assert "fabric peers cannot be reached from 198.18.1.11 on port 29501: 198.18.1.12 (" in said
    assert "fabric peers cannot be reached from 198.18.1.12 on port 29501: 198.18.1.11 (" in said
    assert "node1" in said
    assert "node2" in said
    assert "Check cable, subnet and firewall" in said


def test_an_option_that_vllm_does_not_have(served: Cluster) -> None:
    said = refused(served, 2, "-e", json.dumps({"ppdeploy_vllm_args": {"max-num-seq": 8}}))
    assert 'has the option "max-num-seq", which vLLM 0.32.0 does not have' in said
    assert "did you mean max-num-seqs?" in said


def test_the_options_that_ppdeploy_knows_are_those_of_the_vllm_that_runs(served: Cluster) -> None:
    plan = served.plan().pipelines[0].environment
    python = f"{plan.directory}/bin/python"
    asked = shlex.quote((ROOT / "scripts" / "vllm_options.py").read_text())
    script = f"home=$(mktemp -d); trap 'rm -rf $home' EXIT; HOME=$home VLLM_NO_USAGE_STATS=1 {python} -B -c {asked}"
    known = (FOLDER / f"{PREFIXES['cpu']}{plan.vllm_version}.txt").read_text().splitlines()
    assert served.out("node1", script).splitlines() == [line for line in known if not line.startswith("# wheel: ")]


def test_a_fabric_subnet_that_no_host_is_in(served: Cluster) -> None:
    said = refused(served, 3, "-e", "ppdeploy_fabric_subnet=198.18.9.0/24")
    assert "no usable NIC has an address in the fabric subnet 198.18.9.0/24" in said
    assert "fab0 198.18.1.11/24" in said
    assert "(host node1, ppdeploy_fabric_subnet)" in said


def test_a_host_that_is_not_there(served: Cluster, tmp_path: Path) -> None:
    tree = yaml.safe_load(served.inventory.read_text())
    tree["vllm"]["children"]["tiny"]["hosts"]["node2"]["ansible_host"] = "198.18.0.99"
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump(tree, sort_keys=False))
    said = refused(served, 7, inventory=inventory)
    assert said.startswith("node2: ")
    assert "it does not answer" in said
    assert "ssh 198.18.0.99" in said


def test_a_host_with_another_key_than_the_known_one(served: Cluster, tmp_path: Path) -> None:
    known = served.lab.ssh.known_hosts
    lines = [line.split() for line in known.read_text().splitlines()]
    other = tmp_path / "known_hosts"
    # The keys of the two hosts, exchanged.
    swapped = zip(lines, reversed(lines), strict=True)
    other.write_text("".join(f"{line[0]} {line[1]} {from_other[2]}\n" for line, from_other in swapped))
    variables = yaml.safe_load(served.inventory.read_text())["vllm"]["vars"]
    arguments = variables["ansible_ssh_common_args"].replace(str(known), str(other))
    # A connection that is still open would not ask for the key again.
    change = {"ansible_ssh_common_args": arguments, "ansible_control_path_dir": str(served.elsewhere / "cp")}
    said = refused(served, 7, inventory=served.edited(tmp_path / "inventory", change))
    assert "its ssh host key is not the one this machine knows" in said
    assert "ssh-keygen -R 198.18.0.11" in said


def test_a_user_that_may_not_become_root(served: Cluster, tmp_path: Path) -> None:
    account = "useradd --create-home guest; cp -r ~root/.ssh ~guest/; chown -R guest: ~guest/.ssh"
    undo = "loginctl kill-user guest 2>/dev/null || true; userdel --remove --force guest 2>/dev/null"
    for node in served.lab.nodes:
        served.out(node, account)
    try:
        said = refused(served, 3, inventory=served.edited(tmp_path / "inventory", {"ansible_user": "guest"}))
    finally:
        for node in served.lab.nodes:
            served.out(node, undo)
    assert "node1, node2: " in said
    assert "sudo asks for a password there" in said
    assert "--ask-become-pass" in said


def test_a_model_folder_that_is_missing(served: Cluster, tmp_path: Path) -> None:
    said = refused(served, 2, "-e", f"ppdeploy_model={tmp_path}/nowhere")
    assert f"{tmp_path}/nowhere" in said


def test_a_model_folder_without_its_configuration(served: Cluster, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", layers=1)
    (folder / "config.json").unlink()
    said = refused(served, 2, "-e", f"ppdeploy_model={folder}")
    assert "config.json" in said
    assert str(folder) in said


def test_a_model_whose_index_names_absent_files(served: Cluster, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", layers=1)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weights = {
        "lm_head.weight": "model-00001-of-00002.safetensors",
        "model.norm.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    said = refused(served, 2, "-e", f"ppdeploy_model={folder}")
    assert "model-00002-of-00002.safetensors" in said
    assert str(folder) in said


def test_a_disk_that_is_too_small(served: Cluster) -> None:
    served.out("node2", "mkdir /srv/small; mount -t tmpfs -o size=4m small /srv/small")
    try:
        said = refused(served, 3, "-e", "ppdeploy_models_dir=/srv/small/models")
    finally:
        served.out("node2", "umount /srv/small; rmdir /srv/small")
    # How much follows from the model's tensors, and tests/unit says it of known ones.
    need = re.search(r"/srv/small/models needs (\d+\.\d) MiB and 4\.0 MiB are free \(node2\)", said)
    assert need, said
    assert float(need[1]) > 4
    assert "set ppdeploy_models_dir to a larger one" in said
