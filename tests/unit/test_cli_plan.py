"""`ppdeploy plan` and `ppdeploy render` from saved facts: no host is touched, no secret is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdeploy.cli import session
from ppdeploy.plan import Plan
from ppdeploy.render import render_node
from ppdeploy.run import HostStats, RunResult, plays
from ppdeploy.spec import Inventory
from tests.factories import make_cluster
from tests.unit.cli_support import Cluster, Command, Play, load, loaded_once, make_cluster_on_disk


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = make_cluster_on_disk(tmp_path_factory.mktemp("cluster"))
    with loaded_once(load(made)):
        yield made


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    def never(*_: object, **__: object) -> RunResult:
        raise AssertionError("a host was asked")

    monkeypatch.setattr(session, "run_playbook", never)
    return Command(capsys)


def test_the_tables_say_what_will_run_where_and_why(cluster: Cluster, command: Command) -> None:
    outcome = command("plan", "-i", cluster.inventory, "--facts", cluster.facts, "--verbose")
    assert outcome.code == 0, outcome.err
    assert "stage 0 with layers 0-1" in outcome.out
    assert "stage 1 with layers 2-3" in outcome.out
    assert "--node-rank 1" in outcome.out
    assert "--headless" in outcome.out
    assert "node1: enp1s0 198.51.100.11 in 198.51.100.0/24: " in outcome.out  # the fabric, with its reason
    assert "/etc/systemd/system/ppdeploy-rank@.service" in outcome.out
    assert "hf_verysecret" not in outcome.out + outcome.err


def test_the_short_plan_says_what_fits_and_how_fast_and_leaves_out_command_lines(
    cluster: Cluster, command: Command
) -> None:
    outcome = command("plan", "-i", cluster.inventory, "--facts", cluster.facts)
    assert outcome.code == 0, outcome.err
    assert "it fits: requests of up to 4,096 tokens" in outcome.out
    assert "stage 1 with layers 2-3 on CPU" in outcome.out
    assert "10 Gbit/s" in outcome.out
    assert "a rough prediction (a CPU's speed is hardly known)" in outcome.out
    assert "weights" in outcome.out
    assert "--headless" not in outcome.out
    assert "ppdeploy plan --verbose" in outcome.out


def test_nothing_is_cut_or_folded_in_a_file(cluster: Cluster, command: Command) -> None:
    lines = command("plan", "-i", cluster.inventory, "--facts", cluster.facts, "-v").out.splitlines()
    (argv,) = (line for line in lines if "--node-rank 0" in line)
    assert len(argv) > 200
    assert "…" not in "".join(lines)


def test_json_is_the_plan_with_the_version_of_its_schema(cluster: Cluster, command: Command) -> None:
    outcome = command("plan", "-i", cluster.inventory, "--facts", cluster.facts, "--json")
    document = json.loads(outcome.out)
    assert document["plan_schema"] == 1
    assert [node["host"] for node in document["pipelines"][0]["nodes"]] == ["node1", "node2"]
    assert "hf_verysecret" not in outcome.out
    Plan.model_validate(document)


def test_a_page_is_written_beside_the_plan(cluster: Cluster, command: Command, tmp_path: Path) -> None:
    outcome = command("plan", "-i", cluster.inventory, "--facts", cluster.facts, "--html", tmp_path / "plan.html")
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "node2" in page
    assert "hf_verysecret" not in page
    missing = tmp_path / "none" / "plan.html"
    refused = command("plan", "-i", cluster.inventory, "--facts", cluster.facts, "--html", missing)
    assert refused.code == 2
    assert "--html" in refused.err


def test_what_if_shows_both_plans_side_by_side(cluster: Cluster, command: Command) -> None:
    words = ("plan", "-i", cluster.inventory, "--facts", cluster.facts, "--what-if", "fabric=1g")
    outcome = command(*words)
    assert outcome.code == 0, outcome.err
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("fabric "))
    assert line.split() == ["fabric", "10", "Gbit/s", "1", "Gbit/s"]
    both = json.loads(command(*words, "--json").out)
    assert both["schema"] == 1
    rates = [Plan.model_validate(both[name]).pipelines[0].nodes[0].fabric.speed_mbit for name in ("before", "after")]
    assert rates == [10000, 1000]


@pytest.mark.parametrize("words", ["fabric=fast", "nodes=2", "nodes=+1x nothing", "model=/nowhere", "speed=1", "x"])
def test_a_change_that_cannot_be_read_is_wrong_input_in_one_sentence(
    cluster: Cluster, command: Command, words: str
) -> None:
    outcome = command("plan", "-i", cluster.inventory, "--facts", cluster.facts, "--what-if", words)
    assert outcome.code == 2
    assert f"--what-if '{words}'" in outcome.err
    assert outcome.out == ""


def test_facts_written_by_hand_are_planned_and_called_assumed(
    cluster: Cluster, command: Command, tmp_path: Path
) -> None:
    short = tmp_path / "facts.yml"
    short.write_text("node1: {fabric: 1g, memory_gib: 16}\nnode2: {fabric: 2.5g, memory_gib: 32}\n")
    outcome = command("plan", "-i", cluster.inventory, "--facts", short)
    assert outcome.code == 0, outcome.err
    assert "assumed, not read from the hosts: the facts of node1, node2" in outcome.out
    assert "1 Gbit/s" in outcome.out
    refused = command("render", "-i", cluster.inventory, "--facts", short, "--out", tmp_path / "out")
    assert refused.code == 2
    assert "assumed" in refused.err


def test_render_writes_what_the_plan_names(cluster: Cluster, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = command("render", "-i", cluster.inventory, "--facts", cluster.facts, "--out", out)
    assert outcome.code == 0, outcome.err
    document = command("plan", "-i", cluster.inventory, "--facts", cluster.facts, "--json").out
    plan = Plan.model_validate_json(document)
    for host in ("node1", "node2"):
        texts = render_node(plan, host)
        found = {
            "/" + str(path.relative_to(out / host)): path.read_text()
            for path in (out / host).rglob("*")
            if path.is_file()
        }
        assert found == texts
    assert len(outcome.out.splitlines()) == sum(len(render_node(plan, host)) for host in ("node1", "node2"))


def test_render_replaces_files_only_when_told_to(cluster: Cluster, command: Command, tmp_path: Path) -> None:
    words = ("render", "-i", cluster.inventory, "--facts", cluster.facts, "--out", tmp_path)
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "old").write_text("of an older plan")
    (tmp_path / "mine").write_text("not ours")
    refused = command(*words)
    assert refused.code == 2
    assert "--force" in refused.err
    assert not (tmp_path / "node2").exists()
    assert command(*words, "--force").code == 0
    assert not (tmp_path / "node1" / "old").exists()
    assert (tmp_path / "mine").read_text() == "not ours"


def test_render_into_a_file_is_refused(cluster: Cluster, command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert command("render", "-i", cluster.inventory, "--facts", cluster.facts, "--out", tmp_path / "file").code == 2


@pytest.mark.parametrize(
    "words", [["--save-facts", "x"], ["--limit", "tiny"], ["--ask-become-pass"]], ids=lambda words: words[0]
)
def test_options_for_hosts_do_not_go_with_saved_facts(cluster: Cluster, command: Command, words: list[str]) -> None:
    outcome = command("plan", "-i", cluster.inventory, "--facts", cluster.facts, *words)
    assert outcome.code == 2
    assert "--facts" in outcome.err


def test_facts_that_lack_a_host_are_wrong_input(cluster: Cluster, command: Command, tmp_path: Path) -> None:
    document = json.loads(cluster.facts.read_text())
    del document["hosts"]["node2"]
    (tmp_path / "half.json").write_text(json.dumps(document))
    outcome = command("plan", "-i", cluster.inventory, "--facts", tmp_path / "half.json")
    assert outcome.code == 2
    assert "node2" in outcome.err


def test_a_plan_that_cannot_be_applied_is_shown_and_then_blocked(
    cluster: Cluster, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = make_cluster(2)
    without_systemd = facts["node2"].os.model_copy(update={"systemd_version": None, "system_state": None})
    facts["node2"] = facts["node2"].model_copy(update={"os": without_systemd})
    monkeypatch.setattr("ppdeploy.cli.planning.read_facts", lambda _path, _spec: (facts, ()))
    outcome = command("plan", "-i", cluster.inventory, "--facts", cluster.facts)
    assert outcome.code == 3
    assert "stage 0" in outcome.out
    assert "node2" in outcome.err


def test_facts_come_from_the_hosts_otherwise_and_can_be_saved(
    cluster: Cluster, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    document = json.loads(cluster.facts.read_text())["hosts"]
    values = load(cluster).values["node1"]
    addresses = load(cluster).addresses
    public = {name: value for name, value in values.items() if name != "ppdeploy_hf_token"}
    play = Play(
        RunResult(
            status="ok",
            return_code=0,
            seconds=1,
            stats={host: HostStats(ok=2) for host in document},
            results={plays.FACTS_TASK: {host: {"facts": facts} for host, facts in document.items()}},
            facts={host: {plays.VALUES: {**public, "ansible_host": addresses[host]}} for host in document},
        )
    )
    monkeypatch.setattr(session, "run_playbook", play)
    outcome = command("plan", "-i", cluster.inventory, "--json", "--save-facts", tmp_path / "facts.json")
    assert outcome.code == 0, outcome.err
    assert play.calls[0]["playbook"] == plays.FACTS
    assert not play.calls[0]["json_events"]  # stdout is the plan and nothing else
    saved = command("plan", "-i", cluster.inventory, "--json", "--facts", tmp_path / "facts.json")
    assert saved.out == outcome.out


def test_addresses_of_the_example_are_good_enough_where_no_host_is_reached(
    cluster: Cluster, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    loaded = load(cluster)

    def note(*_: object, any_address: bool, **__: object) -> Inventory:
        asked.append(any_address)
        return loaded

    monkeypatch.setattr(session, "load_inventory", note)
    assert command("plan", "-i", cluster.inventory, "--facts", cluster.facts).code == 0
    # What these files are for is a host.
    command("render", "-i", cluster.inventory, "--facts", cluster.facts, "--out", cluster.folder / "out")
    assert asked == [True, False]
