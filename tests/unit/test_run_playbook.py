"""A playbook run through ansible-runner: outcome, facts, failures, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ppdeploy.errors import BlockedError, InputError, UnreachableError
from ppdeploy.run import PlayOptions, Redactor, RunResult, run_playbook
from tests.unit.run_support import INVENTORY, PROJECT, Recorder

OUTCOME = "playbooks/outcome.yml"


@pytest.fixture(scope="module", autouse=True)
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of our own for what a run keeps, so that a test can see that nothing stays."""
    folder = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


def run(options: PlayOptions | None = None, *, playbook: str = OUTCOME, inventory: Path = INVENTORY) -> RunResult:
    return run_playbook(
        playbook,
        inventory=inventory,
        options=options,
        root=PROJECT,
        display=Recorder(),
        keep=["Say something"],
    )


@dataclass(frozen=True)
class Outcomes:
    """One run with a host for each outcome."""

    result: RunResult
    display: Recorder

    def sentence(self, host: str) -> str:
        (failure,) = (failure for failure in self.result.failures if failure.host == host)
        return failure.sentence


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Run with everything in the way that a user's environment and folder can put there."""
    display = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOB_ID", "not a number")  # ansible-runner's callback fails on it
        patch.setenv("ANSIBLE_FORCE_COLOR", "1")
        patch.setenv("ANSIBLE_HOST_KEY_CHECKING", "False")
        result = run_playbook(
            OUTCOME,
            inventory=PROJECT / "outcomes.yml",
            root=PROJECT,
            display=display,
            keep=["Say something"],
            options=PlayOptions(extra_vars=("token=hf_abcdef",)),
            redactor=Redactor(["hf_abcdef"]),
            addresses={"gone": "127.0.0.1"},
        )
    return Outcomes(result, display)


def test_what_set_fact_sets_under_our_prefix_comes_back(outcomes: Outcomes) -> None:
    assert outcomes.result.facts["fine"] == {
        "ppdeploy__facts": {"host": "fine", "configured_by": str(PROJECT / "ansible.cfg")}
    }


def test_the_results_of_named_tasks_come_back(outcomes: Outcomes) -> None:
    assert set(outcomes.result.results) == {"Say something"}
    assert outcomes.result.results["Say something"]["fine"]["stdout"] == "hello"


def test_stats_are_ansible_s_own(outcomes: Outcomes) -> None:
    stats = outcomes.result.stats
    assert (stats["changed"].changed, stats["fine"].changed) == (1, 0)
    assert (stats["command"].failed, stats["gone"].unreachable, stats["rescued"].rescued) == (1, 1, 1)


def test_nothing_is_left_of_a_run_that_failed(outcomes: Outcomes, memory: Path) -> None:
    assert outcomes.result.status == "unreachable"
    assert list(memory.iterdir()) == []


def test_a_module_s_own_message_is_the_sentence(outcomes: Outcomes) -> None:
    assert outcomes.sentence("asserted") == "the disk is too small (asserted): free 2 GiB"


def test_a_failed_command_is_told_by_the_last_line_it_wrote_to_stderr(outcomes: Outcomes) -> None:
    assert outcomes.sentence("command").endswith("ended with 3: device is busy")


def test_a_failure_in_a_loop_is_told_by_the_item_that_failed(outcomes: Outcomes) -> None:
    assert outcomes.sentence("loop") == "item b is wrong"


def test_what_no_log_hides_stays_hidden(outcomes: Outcomes) -> None:
    assert "hidden" in outcomes.sentence("hidden")
    assert "very-secret" not in repr([(failure, failure.result) for failure in outcomes.result.failures])
    assert "very-secret" not in repr(outcomes.display.steps)


def test_secrets_are_in_no_failure_and_no_step(outcomes: Outcomes) -> None:
    assert outcomes.sentence("secret") == "the token is [hidden]"
    assert "hf_abcdef" not in repr((outcomes.result.failures, outcomes.display.steps))


def test_a_failure_that_the_play_deals_with_is_none(outcomes: Outcomes) -> None:
    failed = {failure.host for failure in outcomes.result.failures}
    assert failed == {"asserted", "command", "hidden", "loop", "secret", "gone"}


def test_an_unreachable_host_decides_the_exit_code_and_all_are_named(outcomes: Outcomes) -> None:
    assert outcomes.result.exit_code == 7
    with pytest.raises(UnreachableError) as caught:
        outcomes.result.raise_for_status()
    assert "gone: Say something: no ssh server answers there: start sshd on it, and then make `ssh 127.0.0.1`" in str(
        caught.value
    )
    assert "command: Run a program that fails: " in str(caught.value)


def test_colours_of_a_user_s_settings_do_not_get_into_our_text(outcomes: Outcomes) -> None:
    assert "\x1b" not in repr([failure.output for failure in outcomes.result.failures])


def test_each_step_is_shown_with_its_host_and_task(outcomes: Outcomes) -> None:
    shown = {(step.kind, step.host, step.task) for step in outcomes.display.steps}
    assert {
        ("task", "", "Say something"),
        ("started", "fine", "Say something"),
        ("changed", "changed", "Say something"),
        ("ignored", "ignored", "Tolerate a failure"),
        ("unreachable", "gone", "Say something"),
    } <= shown


def test_options_reach_ansible_and_relative_files_start_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: Path
) -> None:
    (tmp_path / "mine.yml").write_text("outcome: changed\n")
    # Ansible must not read this one, and would not: the folder is everybody's.
    (tmp_path / "ansible.cfg").write_text("[defaults]\ngathering = nonsense\n")
    tmp_path.chmod(0o777)
    monkeypatch.chdir(tmp_path)
    result = run(PlayOptions(limit="node2", extra_vars=("@mine.yml",)))
    assert (result.status, result.exit_code, set(result.stats), result.changed) == ("ok", 0, {"node2"}, 1)
    assert list(memory.iterdir()) == []


def test_check_mode_reaches_ansible() -> None:
    result = run(PlayOptions(check=True))
    assert result.results == {}  # `command` is skipped in check mode
    assert result.check


def test_a_failed_check_of_the_role_for_it_blocks() -> None:
    result = run(PlayOptions(extra_vars=("outcome=blocked",)))
    with pytest.raises(BlockedError, match="node1: Check the ports: port 8000 is taken by nginx"):
        result.raise_for_status()


@pytest.mark.parametrize("limit", ["nosuchhost", "localhost"])
def test_no_host_matched_is_wrong_input(limit: str) -> None:
    result = run(PlayOptions(limit=limit))
    assert (result.status, result.exit_code) == ("no_hosts", 2)
    with pytest.raises(InputError, match=f"no host matched .--limit {limit}."):
        result.raise_for_status()


def test_a_missing_playbook_or_inventory_is_named() -> None:
    with pytest.raises(InputError, match=r"playbooks/nosuch\.yml"):
        run(playbook="playbooks/nosuch.yml")
    with pytest.raises(InputError, match="nosuch"):
        run(inventory=Path("nosuch"))


def test_a_broken_inventory_is_wrong_input(tmp_path: Path) -> None:
    broken = tmp_path / "hosts.yml"
    broken.write_text("vllm: [\n")
    assert run(inventory=broken).exit_code == 2


def test_another_environment_s_ansible_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    with pytest.raises(InputError, match="ansible-playbook is missing from the Python environment"):
        run()
