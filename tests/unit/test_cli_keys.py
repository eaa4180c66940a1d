"""`ppdeploy keys`: a key is printed once, gateways are told, and nothing else ever shows it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ppdeploy.api_keys import keys_file, read_keys
from ppdeploy.cli import session
from ppdeploy.run import Failure, HostStats, RunResult, plays
from tests.unit.cli_support import Cluster, Command, Play, load, loaded_once, make_cluster_on_disk

KEY = re.compile(r"sk-[A-Za-z0-9_-]{43}")


def told(**installed: bool) -> RunResult:
    """Return the result of telling gateways: for each host, whether it has one."""
    return RunResult(
        status="ok",
        return_code=0,
        seconds=1.0,
        stats={host: HostStats(ok=2) for host in installed},
        results={plays.KEYS_TASK: {host: {"installed": there, "changed": there} for host, there in installed.items()}},
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = make_cluster_on_disk(tmp_path)
    with loaded_once(load(made)):
        yield made


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    found = Play(told(node1=True))
    monkeypatch.setattr(session, "run_playbook", found)
    return found


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_a_key_alone_is_on_stdout_and_the_gateways_are_told(cluster: Cluster, command: Command, play: Play) -> None:
    done = command("keys", "add", "alice", "-i", cluster.inventory, "--expires", "90d")
    assert done.code == 0, done.err
    assert KEY.fullmatch(done.out.strip())
    assert "told to the gateway of node1" in done.err
    assert not KEY.search(done.err)
    assert play.calls[0]["playbook"] == "playbooks/keys.yml"
    assert play.calls[0]["redactor"].text(done.out) == "[hidden]\n"
    (kept,) = read_keys(cluster.inventory)
    assert (kept.name, kept.expires is not None) == ("alice", True)


def test_a_key_is_not_lost_where_a_gateway_cannot_be_reached(cluster: Cluster, command: Command, play: Play) -> None:
    lost = Failure("node1", plays.KEYS_TASK, "unreachable", "it does not answer")
    play.result = RunResult(status="unreachable", return_code=4, seconds=1.0, stats={}, failures=(lost,))
    for words in ((), ("--json",)):
        done = command("keys", "add", f"alice{len(words)}", "-i", cluster.inventory, *words)
        assert done.code == 7
        assert len(KEY.findall(done.out)) == 1
        assert "it does not answer" in done.err
    assert command("keys", "revoke", "alice0", "-i", cluster.inventory).code == 7
    assert [key.name for key in read_keys(cluster.inventory) if key.revoked] == ["alice0"]
    play.result = told(node1=True)
    assert command("keys", "revoke", "alice0", "-i", cluster.inventory).code == 0


def test_json_has_the_key_once_and_never_again(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = told(node1=False)
    added = json.loads(command("keys", "add", "alice", "-i", cluster.inventory, "--json").out)
    assert (added["schema"], added["name"], added["gateways"]) == (1, "alice", [])
    assert KEY.fullmatch(added["key"])
    listed = command("keys", "list", "-i", cluster.inventory, "--json").out
    (row,) = json.loads(listed)["keys"]
    assert (row["name"], row["state"], row["expires"], row["revoked"]) == ("alice", "valid", None, None)
    assert "sha256" not in listed
    revoked = json.loads(command("keys", "revoke", "alice", "-i", cluster.inventory, "--json").out)
    assert revoked == {"schema": 1, "name": "alice", "gateways": []}
    assert "revoked" in command("keys", "list", "-i", cluster.inventory).out


def test_what_is_wrong_is_told_before_anything_is_made(cluster: Cluster, command: Command, play: Play) -> None:
    for words in (("add", "two words"), ("add", "alice", "--expires", "soon"), ("revoke", "nobody")):
        done = command("keys", *words, "-i", cluster.inventory)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("error: ")
    assert play.calls == []
    assert not keys_file(cluster.inventory).exists()
    assert "no key was given out yet" in command("keys", "list", "-i", cluster.inventory).out
    assert command("keys", "list", "-i", cluster.inventory / "missing").code == 2


def test_without_a_gateway_there_is_nobody_to_tell(tmp_path: Path, command: Command, play: Play) -> None:
    made = make_cluster_on_disk(tmp_path)
    hosts = made.inventory / "hosts.yml"
    hosts.write_text(hosts.read_text().replace("      vars:\n", "      vars:\n        ppdeploy_gateway: false\n"))
    with loaded_once(load(made)):
        done = command("keys", "add", "alice", "-i", made.inventory)
    assert (done.code, done.out) == (2, "")
    assert "no gateway that would ask for a key" in done.err
    assert play.calls == []


def test_a_key_that_could_not_be_shown_is_told(cluster: Cluster, play: Play) -> None:
    assert play.calls == []
    for words in ((), ("--json",)):
        name = f"alice{len(words)}"
        command = [sys.executable, "-m", "ppdeploy", "keys", "add", name, "-i", str(cluster.inventory), *words]
        with Path("/dev/full").open("w", encoding="utf-8") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 2
        assert f"the key of {name} was made and could not be shown: No space left on device" in done.stderr
        assert f"ppdeploy keys revoke {name}" in done.stderr


def test_an_empty_expiry_is_no_key_without_an_end(cluster: Cluster, command: Command, play: Play) -> None:
    done = command("keys", "add", "alice", "--expires", "", "-i", cluster.inventory)
    assert (done.code, done.out, play.calls) == (2, "", [])


def test_who_still_lets_a_revoked_key_in_is_told(cluster: Cluster, command: Command, play: Play) -> None:
    assert command("keys", "add", "alice", "-i", cluster.inventory).code == 0
    lost = Failure("node2", plays.KEYS_TASK, "unreachable", "it does not answer")
    play.result = replace(told(node1=True), status="unreachable", return_code=4, failures=(lost,))
    for words in ((), ("--json",)):
        done = command("keys", "revoke", "alice", "-i", cluster.inventory, *words)
        assert done.code == 7
        assert "alice: told to the gateway of node1; every other gateway still lets alice in" in done.err
    done = command("keys", "add", "bob", "-i", cluster.inventory)
    assert "bob: told to the gateway of node1; no other gateway knows bob" in done.err
    play.result = replace(told(), status="unreachable", return_code=4, failures=(lost,))
    done = command("keys", "add", "carol", "-i", cluster.inventory)
    assert "carol: told to no gateway; no gateway knows carol: run `ppdeploy apply`" in done.err
