"""The release on a node: what differs is named, what is intact starts, and only that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdeploy.agent import command_line, rank, ticket
from ppdeploy.agent.config import Config
from ppdeploy.agent.messages import GenerationId
from ppdeploy.agent.release import DiffersError, WeightCache, check_weights, look, read
from ppdeploy.render import env_line, exec_word
from tests.unit.gang_factories import A, B, make_release

TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\n\r\0", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1
)


def _config(root: Path) -> Config:
    return Config(
        cluster="c",
        pipeline="p",
        node="a",
        listen=(("127.0.0.1", 0),),
        port=29500,
        key=root / "key",
        root=root,
        state=root,
        run=root,
        keep=root,
        unit="ppdeploy-rank@p.service",
        device="cpu",
    )


def test_an_intact_release_has_its_nodes_in_order_and_no_problem(tmp_path: Path) -> None:
    folder = make_release(tmp_path)
    sight, full = look(tmp_path / "p" / "current", "a", "p", WeightCache())
    assert (sight.digest, sight.problem) == (folder.name, "")
    assert [(m.name, m.machine_id, m.address) for m in sight.nodes] == [
        (m.name, m.machine_id, m.address) for m in (A, B)
    ]
    assert full is not None
    assert full.argv[1] == "serve"


def _problem(tmp_path: Path) -> str:
    sight, full = look(tmp_path / "p" / "current", "a", "p", WeightCache())
    assert full is None
    return sight.problem


@pytest.mark.parametrize("name", ["rank.conf", "rank.env", "nccl.env"])
def test_a_file_edited_by_hand_is_named(tmp_path: Path, name: str) -> None:
    folder = make_release(tmp_path)
    (folder / name).write_text((folder / name).read_text() + "\n# edited\n")
    assert _problem(tmp_path).startswith(f"{name} differs from release {folder.name[:12]}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = make_release(tmp_path)
    (folder / "nccl.env").unlink()
    assert "nccl.env cannot be read" in _problem(tmp_path)


def test_an_edited_list_of_files_names_nobody_a_head(tmp_path: Path) -> None:
    folder = make_release(tmp_path)
    data = json.loads((folder / "release.json").read_text())
    data["nodes"].reverse()
    (folder / "release.json").write_text(json.dumps(data))
    sight, _ = look(tmp_path / "p" / "current", "a", "p", WeightCache())
    assert "release.json is not the one" in sight.problem
    assert sight.head() is None


def test_other_problems_leave_the_head_known_so_that_a_stop_is_still_obeyed(tmp_path: Path) -> None:
    folder = make_release(tmp_path)
    (folder / "rank.env").write_text("A=2\n")
    sight, _ = look(tmp_path / "p" / "current", "a", "p", WeightCache())
    head = sight.head()
    assert head is not None
    assert head.name == "a"


def test_without_a_release_there_is_none(tmp_path: Path) -> None:
    assert _problem(tmp_path) == "no release has been applied yet"


def test_a_node_that_the_release_does_not_name_is_told_so(tmp_path: Path) -> None:
    folder = make_release(tmp_path)
    with pytest.raises(DiffersError, match="does not name this node, z"):
        read(folder, "z", "p")


def test_another_vllm_in_the_environment_is_named(tmp_path: Path) -> None:
    make_release(tmp_path)
    site = next((tmp_path / "venvs").glob("*/lib/*/site-packages"))
    (site / "vllm-0.32.0.dist-info").rename(site / "vllm-0.31.0.dist-info")
    assert "vllm 0.31.0 is installed, 0.32.0 is locked" in _problem(tmp_path)


def test_another_torch_than_the_lock_is_named(tmp_path: Path) -> None:
    make_release(tmp_path)
    site = next((tmp_path / "venvs").glob("*/lib/*/site-packages"))
    (site / "torch-2.13.0+cpu.dist-info").rename(site / "torch-2.12.0.dist-info")
    assert "torch 2.12.0 is installed, 2.13.0+cpu is locked" in _problem(tmp_path)


def test_an_environment_of_another_lock_is_named(tmp_path: Path) -> None:
    make_release(tmp_path)
    marker = next((tmp_path / "venvs").glob("*/.ppdeploy.json"))
    marker.write_text(json.dumps({"lock": "0" * 64}))
    assert "was built from another lock" in _problem(tmp_path)
    marker.unlink()
    assert "cannot be read" in _problem(tmp_path)


def test_a_changed_weight_file_is_hashed_once_and_named(tmp_path: Path) -> None:
    folder = make_release(tmp_path)
    release = read(folder, "a", "p")
    weights = tmp_path / "model" / "w.safetensors"
    weights.write_bytes(b"WEIGHTS")
    cache = WeightCache()
    for _ in range(3):
        with pytest.raises(DiffersError, match=r"w\.safetensors is not what the manifest names"):
            check_weights(release, cache)
    assert len(cache.known) == 1


def test_a_weight_file_that_was_only_touched_is_hashed_and_accepted(tmp_path: Path) -> None:
    folder = make_release(tmp_path)
    release = read(folder, "a", "p")
    weights = tmp_path / "model" / "w.safetensors"
    weights.unlink()
    weights.write_bytes(b"weights")
    check_weights(release, WeightCache())


def test_a_missing_weight_file_and_another_model_are_named(tmp_path: Path) -> None:
    folder = make_release(tmp_path)
    release = read(folder, "a", "p")
    with pytest.raises(DiffersError, match="another one than the release's"):
        check_weights(replace(release, manifest="0" * 64), WeightCache())
    (tmp_path / "model" / "w.safetensors").unlink()
    with pytest.raises(DiffersError, match=r"w\.safetensors: No such file"):
        check_weights(release, WeightCache())


# The last step before vLLM.

VARIABLES = {"A": "1", "B": "two words", "NCCL_SOCKET_IFNAME": "fab0", "PATH": "/bin"}


def _ticketed(root: Path, generation: int = 20) -> tuple[Config, list[str]]:
    folder = make_release(root)
    config = _config(root)
    ticket.issue(config.consumed, ticket.Ticket(GenerationId(generation, 1), folder.name, "boot"))
    return config, read(folder, "a", "p").argv


def test_a_rank_becomes_what_its_ticket_names_on_its_generations_master_port(tmp_path: Path) -> None:
    config, argv = _ticketed(tmp_path)
    words = rank.prepare(config, argv, VARIABLES, "boot")
    assert command_line.option(words, "--master-port") == str(29600 + 20 % 16)
    assert [w for w in words if w != "29604"] == [w for w in argv if w != "29600"]


def test_generations_that_follow_each_other_have_different_ports(tmp_path: Path) -> None:
    config, argv = _ticketed(tmp_path)
    ports = set()
    for number in range(16):
        ticket.issue(config.consumed, ticket.Ticket(GenerationId(number, 1), read_digest(tmp_path), "boot"))
        ports.add(command_line.option(rank.prepare(config, argv, VARIABLES, "boot"), "--master-port"))
    assert len(ports) == 16


def read_digest(root: Path) -> str:
    return (root / "p" / "current").resolve().name


def test_a_rank_without_a_consumed_ticket_of_this_boot_is_refused(tmp_path: Path) -> None:
    config, argv = _ticketed(tmp_path)
    with pytest.raises(rank.RefusedError, match="no consumed ticket"):
        rank.prepare(config, argv, VARIABLES, "another boot")
    config.consumed.unlink()
    with pytest.raises(rank.RefusedError, match="no consumed ticket"):
        rank.prepare(config, argv, VARIABLES, "boot")


def test_a_flag_that_differs_is_refused_and_named(tmp_path: Path) -> None:
    config, argv = _ticketed(tmp_path)
    with pytest.raises(rank.RefusedError, match=r"'n' where release .* has 'm' \(argument 4\)"):
        rank.prepare(config, [*argv[:4], "n", *argv[5:]], VARIABLES, "boot")
    with pytest.raises(rank.RefusedError, match=r"'--trust-remote-code' where release .* has 'nothing'"):
        rank.prepare(config, [*argv, "--trust-remote-code"], VARIABLES, "boot")


def test_an_environment_of_another_release_is_refused_and_named(tmp_path: Path) -> None:
    config, argv = _ticketed(tmp_path)
    with pytest.raises(rank.RefusedError, match=r"B is not what rank\.env"):
        rank.prepare(config, argv, {**VARIABLES, "B": "other"}, "boot")


def test_a_file_edited_since_the_check_is_refused(tmp_path: Path) -> None:
    config, argv = _ticketed(tmp_path)
    (config.releases / read_digest(tmp_path) / "rank.env").write_text("A=2\n")
    with pytest.raises(rank.RefusedError, match=r"rank\.env differs"):
        rank.prepare(config, argv, VARIABLES, "boot")


# What the plan writes is what the agent reads.


@given(st.lists(TEXT, min_size=1))
def test_every_argument_that_the_plan_quotes_is_read_back(words: list[str]) -> None:
    line = " ".join(exec_word(word) for word in words)
    assert command_line.split(line, "p") == words


@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), TEXT))
def test_every_variable_that_the_plan_writes_is_read_back(variables: dict[str, str]) -> None:
    text = "# a comment\n" + "\n".join(env_line(name, value) for name, value in variables.items())
    assert command_line.environment(text) == variables


def test_specifiers_and_quotes_are_systemds() -> None:
    assert command_line.split('a  \'b c\' "d \\" e" f%i 100%% $$x', "p") == ["a", "b c", 'd " e', "fp", "100%", "$x"]
    with pytest.raises(command_line.QuotingError):
        command_line.split("'open", "p")
    with pytest.raises(command_line.QuotingError):
        command_line.exec_start("[Service]\n", "p")
    assert command_line.option(["--port=1"], "--port") == "1"
    assert command_line.with_option(["--port=1", "x"], "--port", "2") == ["--port=2", "x"]
