"""`apply`, `check` and `smoke`: what they run, print and return."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.cli import session
from ppdeploy.cli.applying import ask_commands, gateway_command
from ppdeploy.run import Failure, cluster_lock, plays
from tests.factories import make_cluster
from tests.unit.cli_support import Cluster, Command, Play, applied, load, loaded_once, make_cluster_on_disk

SERVES: dict[str, Any] = {
    "reports": [
        {
            "pipeline": "tiny",
            "ok": True,
            "checks": [],
            "prompt": "Hello",
            "completion": " world",
            "tokens_per_second": 12.345,
        }
    ],
    "failures": [],
    "failed": [],
}
SERVES_NOT: dict[str, Any] = {
    "reports": [{"pipeline": "tiny", "ok": False, "checks": [], "completion": "", "tokens_per_second": None}],
    "failures": ["pipeline tiny does not serve: health: no answer", "node1 | node2\nlast line | other line"],
    "failed": ["tiny"],
}


def failure(**changes: Any) -> Failure:
    values = {"host": "node1", "task": "Copy it", "kind": "task", "sentence": "disk full", "output": "fatal: all"}
    return Failure(**{**values, **changes})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = make_cluster_on_disk(tmp_path_factory.mktemp("cluster"))
    with loaded_once(load(made)):
        yield made


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Play:
    found = Play(applied(smoke=SERVES))
    monkeypatch.setattr(session, "run_playbook", found)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return found


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_apply_ends_with_address_model_speed_release_changes_and_what_to_do_next(
    cluster: Cluster, command: Command, play: Play
) -> None:
    outcome = command("apply", "-i", cluster.inventory)
    assert outcome.code == 0, outcome.err
    assert play.calls[0]["playbook"] == "site.yml"
    assert "https://node1:8443" in outcome.out
    assert "12.3" in outcome.out
    assert "changed: node1 3" in outcome.out
    assert "completed 'Hello' with ' world'" in outcome.out
    # The cluster of this test has a lab's addresses, which ssh alone cannot reach.
    assert "ppdeploy lab ssh node1 curl -s http://127.0.0.1:8000/v1/completions" in outcome.err
    assert "ssh -L" not in outcome.err
    assert (
        "lab ssh node1 curl -s --insecure -H 'Authorization: Bearer KEY' https://127.0.0.1:8443/v1/models"
        in outcome.err
    )
    assert f"ppdeploy status -i {cluster.inventory}" in outcome.err


def test_the_first_apply_tells_its_key_once_and_no_later_one(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_cluster_on_disk(tmp_path)
    play = Play(applied(status="failed", failures=(failure(),)))
    monkeypatch.setattr(session, "run_playbook", play)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with loaded_once(load(made)):
        assert command("apply", "-i", made.inventory, "--check").err.count("sk-") == 0
        assert command("apply", "-i", made.inventory, "--tags", "preflight").err.count("sk-") == 0
        first = command("apply", "-i", made.inventory)
        # A failed apply tells it too: nobody else knows it.
        assert first.code == 4
        (key,) = re.findall(r"sk-[A-Za-z0-9_-]{43}", first.err)
        assert key not in first.out
        assert play.calls[-1]["redactor"].text(f"say {key}") == "say [hidden]"
        play.result = applied(smoke=SERVES)
        assert "sk-" not in command("apply", "-i", made.inventory).err


def test_a_gateway_is_asked_by_its_address_with_the_ca_that_was_made(tmp_path: Path) -> None:
    pipeline = {"head": "gpu-1", "gateway": "https://192.0.2.11:8443"}
    asked = "-H 'Authorization: Bearer KEY' https://192.0.2.11:8443/v1/models"
    ca = tmp_path / "ca.pem"
    assert gateway_command(pipeline, "192.0.2.11", ca) == f"curl -s {asked}"
    ca.touch()
    assert gateway_command(pipeline, "192.0.2.11", ca) == f"curl -s --cacert {ca} {asked}"


def test_a_head_that_ssh_reaches_is_asked_through_a_tunnel() -> None:
    pipeline = {"model": "m", "head": "gpu-1", "address": "http://127.0.0.1:8000"}
    tunnel, curl = ask_commands(pipeline, "gpu-1.lan")
    assert tunnel.startswith("ssh -L 8000:127.0.0.1:8000 gpu-1.lan ")
    assert curl.startswith("curl -s http://127.0.0.1:8000/v1/completions ")


def test_options_are_passed_on(cluster: Cluster, command: Command, play: Play) -> None:
    words = ("--limit", "tiny", "--tags", "configure", "--check", "--diff", "-e", "a=1", "-e", "@b.yml", "-vv")
    assert command("apply", "-i", cluster.inventory, *words, "--vault-password-file", "key").code == 0
    options = play.options
    assert (options.limit, options.tags, options.check, options.diff) == ("tiny", "configure", True, True)
    assert (options.extra_vars, options.verbosity) == (("a=1", "@b.yml"), 2)
    assert options.vault.password_files == ("key",)


def test_json_ends_with_one_line_for_the_whole(cluster: Cluster, command: Command, play: Play) -> None:
    outcome = command("apply", "-i", cluster.inventory, "--json")
    assert play.calls[0]["json_events"]
    (line,) = outcome.out.splitlines()
    document = json.loads(line)
    assert (document["event"], document["schema"], document["ok"], document["exit_code"]) == ("result", 1, True, 0)
    assert document["hosts"]["node1"]["changed"] == 3
    assert document["pipelines"][0]["tokens_per_second"] == 12.345
    assert outcome.err == ""


@pytest.mark.parametrize(
    ("outcome_of_play", "code"),
    [
        ({"status": "failed", "failures": (failure(),)}, 4),
        ({"status": "failed", "failures": (failure(kind="login"),), "changed": 0}, 3),
        ({"status": "unreachable", "failures": (failure(kind="unreachable"),)}, 7),
        ({"status": "failed", "failures": (failure(play=plays.SMOKE_PLAY),), "smoke": SERVES_NOT}, 5),
        ({"status": "no_hosts", "stats": {}, "facts": {}, "limit": "x"}, 2),
        ({"status": "interrupted"}, 130),
        ({"status": "error", "return_code": 4, "stats": {}, "facts": {}, "messages": ("YAML parsing failed",)}, 2),
    ],
    ids=["failed", "sudo", "unreachable", "not serving", "no hosts", "interrupted", "unreadable"],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["people", "json"])
def test_exit_codes(
    cluster: Cluster, command: Command, play: Play, outcome_of_play: dict[str, Any], code: int, as_json: bool
) -> None:
    play.result = applied(**outcome_of_play)
    outcome = command("apply", "-i", cluster.inventory, *(["--json"] if as_json else []))
    assert outcome.code == code
    assert outcome.err.splitlines()[-1].startswith("error: ")
    if as_json:
        document = json.loads(outcome.out)
        assert (document["ok"], document["exit_code"]) == (False, code)
    else:
        assert outcome.out == ""


def test_a_pipeline_that_does_not_serve_is_told_with_all_ranks_journals(
    cluster: Cluster, command: Command, play: Play
) -> None:
    play.result = applied(status="failed", failures=(failure(play=plays.SMOKE_PLAY),), smoke=SERVES_NOT)
    outcome = command("apply", "-i", cluster.inventory)
    assert "node1 | node2\nlast line | other line\n" in outcome.err


def test_a_failure_is_told_in_a_sentence_and_in_full_only_with_debug(
    cluster: Cluster, command: Command, play: Play
) -> None:
    play.result = applied(status="failed", failures=(failure(),))
    plain = command("apply", "-i", cluster.inventory)
    assert plain.err.endswith("error: node1: Copy it: disk full\n")
    assert "fatal: all" not in plain.err
    assert "fatal: all" in command("apply", "-i", cluster.inventory, "--debug").err


def test_check_mode_says_that_nothing_was_changed(cluster: Cluster, command: Command, play: Play) -> None:
    play.result = applied(check=True)
    assert "nothing was changed" in command("apply", "-i", cluster.inventory, "--check").err


def test_a_plan_that_the_play_hides_is_made_again(cluster: Cluster, command: Command, play: Play) -> None:
    """With a token for the hub the plan's task is hidden; its facts are not."""
    facts = {host: {"facts": own.model_dump(mode="json")} for host, own in make_cluster(2).items()}
    values = {name: value for name, value in load(cluster).values["node1"].items() if name != "ppdeploy_hf_token"}
    play.result = applied(
        results={plays.FACTS_TASK: facts}, facts={host: {plays.VALUES: dict(values)} for host in facts}
    )
    outcome = command("apply", "-i", cluster.inventory)
    assert outcome.code == 0, outcome.err
    assert "https://node1:8443" in outcome.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--check", "--tags", "smoke"], "--check --tags smoke"),
        (["--json", "-v"], "--json -v"),
        (["--limit", ""], "--limit"),
        (["--tags", " "], "--tags"),
        (["-e", "ppdeploy_hf_token=hf_x"], "ppdeploy_hf_token"),
        (["-e", "ppdeploy_goal: latency"], "write -e ppdeploy_goal=VALUE"),
        (["-e", "ppdeploy_goal"], "write -e ppdeploy_goal=VALUE"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    cluster: Cluster, command: Command, play: Play, words: list[str], named: str
) -> None:
    outcome = command("apply", "-i", cluster.inventory, *words)
    assert outcome.code == 2
    assert named in outcome.err
    assert "hf_x" not in outcome.err
    assert play.calls == []


@pytest.mark.parametrize("word", ["--ask-become-pass", "--ask-vault-pass"])
def test_a_password_is_not_asked_for_without_a_terminal(
    cluster: Cluster, command: Command, play: Play, word: str
) -> None:
    outcome = command("apply", "-i", cluster.inventory, word)
    assert (outcome.code, play.calls) == (2, [])
    assert word in outcome.err


@pytest.mark.parametrize("verb", ["apply", "start", "stop", "restart"])
def test_one_at_a_time_on_a_cluster(cluster: Cluster, command: Command, play: Play, verb: str) -> None:
    with cluster_lock(cluster.inventory / "hosts.yml", "apply"):
        outcome = command(verb, "-i", cluster.inventory)
    assert outcome.code == 3
    assert f"`ppdeploy apply` of {os.environ.get('USER', 'root')}, pid {os.getpid()}, since 2" in outcome.err
    assert play.calls == []


def test_smoke_reports_without_changing_anything(cluster: Cluster, command: Command, play: Play) -> None:
    outcome = command("smoke", "-i", cluster.inventory)
    assert outcome.code == 0
    assert play.calls[0]["playbook"] == "playbooks/smoke.yml"
    assert "12.3" in outcome.out
    assert json.loads(command("smoke", "-i", cluster.inventory, "--json").out)["smoke"] == SERVES["reports"]


def test_secrets_of_the_inventory_are_hidden_wherever_they_turn_up(
    cluster: Cluster, command: Command, play: Play
) -> None:
    report = {**SERVES["reports"][0], "completion": "it is hf_verysecret"}
    play.result = applied(smoke={**SERVES, "reports": [report]})
    for words in ([], ["--json"]):
        outcome = command("apply", "-i", cluster.inventory, *words)
        assert "hf_verysecret" not in outcome.out + outcome.err
        assert "it is [hidden]" in outcome.out


def test_a_real_host_that_nobody_reaches_is_7(tmp_path: Path) -> None:
    """The whole way, with the playbooks of this checkout: nothing is replaced."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        "vllm: {children: {tiny: {hosts: {node1: {ansible_host: 127.0.0.1, ansible_port: 1}},"
        " vars: {ppdeploy_model: ./m, ppdeploy_device: cpu}}}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ppdeploy", "status", "-i", inventory], capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    assert "no ssh server answers there" in done.stderr.splitlines()[-1]
    assert done.stdout == ""
