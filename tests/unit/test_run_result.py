"""From failures to the exit code: what each kind of trouble is called, and which one is dealt with first."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ppdeploy.errors import (
    ApplyError,
    BlockedError,
    InputError,
    PpdeployError,
    RolledBackError,
    ServingError,
    UnreachableError,
)
from ppdeploy.paths import data_root
from ppdeploy.run import plays
from ppdeploy.run.result import Failure, HostStats, RunResult
from ppdeploy.run.sentences import failure_sentence

TASK = Failure("node1", "Copy it", "task", "disk full", action="ansible.builtin.copy")
CHECK = Failure("node1", "Check it", "task", "port taken", role=plays.CHECK_ROLE)
LOGIN = Failure("node1", "Ask", "login", "sudo asks for a password there")
GONE = Failure("node2", "Ask", "unreachable", "it does not answer")
HERE = Failure("node2", "Ask", "controller", "this machine has no ssh client")
SERVES_NOT = Failure("node1", plays.SERVES_NOT_TASK, "task", "waiting: x", action="ansible.builtin.assert")
SMOKE = Failure("node1", "Fail where", "task", "it does not serve", play=plays.SMOKE_PLAY)
PLAN = Failure("node1", plays.PLAN_TASK, "task", "two hosts have one address (x): change it")


def result(*failures: Failure, changed: int = 0, **more: Any) -> RunResult:
    return RunResult(
        status="failed",
        return_code=2,
        seconds=1.0,
        stats={"node1": HostStats(changed=changed)},
        failures=failures,
        **more,
    )


@pytest.mark.parametrize(
    ("failures", "changed", "error"),
    [
        ((TASK,), 0, ApplyError),
        ((CHECK,), 0, BlockedError),
        ((CHECK,), 1, ApplyError),
        ((LOGIN,), 0, BlockedError),
        ((GONE, TASK), 3, UnreachableError),
        ((GONE, HERE), 0, InputError),
        ((SMOKE,), 5, ServingError),
        ((SERVES_NOT,), 1, ServingError),
        ((SERVES_NOT,), 0, ServingError),
        ((SERVES_NOT, GONE), 1, UnreachableError),
        ((PLAN,), 0, InputError),
    ],
)
def test_exit_code_follows_from_what_failed(
    failures: tuple[Failure, ...], changed: int, error: type[PpdeployError]
) -> None:
    found = result(*failures, changed=changed)
    assert type(found.error()) is error
    assert found.exit_code == error.exit_code


def smoke_facts(*serves_again: bool) -> dict[str, dict[str, Any]]:
    """What the play sets when the pipelines a and b fail and some of them go back to their last release."""
    facts: dict[str, dict[str, Any]] = {"node1": {plays.SMOKE_REPORTS: {"failed": ["a", "b"]}}}
    for number, serves in enumerate(serves_again, 1):
        facts.setdefault(f"node{number}", {})[plays.SERVES_AGAIN] = serves
    return facts


@pytest.mark.parametrize(
    ("serves_again", "error"),
    [((True, True), RolledBackError), ((True, False), ServingError), ((True,), ServingError), ((), ServingError)],
)
def test_only_when_all_that_failed_serve_again_the_rollback_is_the_news(
    serves_again: tuple[bool, ...], error: type[PpdeployError]
) -> None:
    assert type(result(SMOKE, facts=smoke_facts(*serves_again)).error()) is error


def test_changes_that_check_mode_foresees_are_none() -> None:
    assert type(result(CHECK, changed=7, check=True).error()) is BlockedError


def test_an_interruption_is_no_failure_of_the_play() -> None:
    interrupted = RunResult(status="interrupted", return_code=2, seconds=1.0, failures=(TASK,))
    assert interrupted.exit_code == 130
    with pytest.raises(KeyboardInterrupt):
        interrupted.raise_for_status()


def test_hosts_that_failed_for_one_reason_are_told_together() -> None:
    second = Failure("node2", "Copy it", "task", "disk full")
    assert str(result(TASK, second).error()) == "node1, node2: Copy it: disk full"
    # Whichever failed first.
    assert str(result(second, TASK).error()) == "node1, node2: Copy it: disk full"


def test_a_planning_error_names_its_own_place_not_the_host_that_happened_to_plan() -> None:
    assert str(result(PLAN).error()) == PLAN.sentence


def test_what_the_facts_module_says_of_a_host_is_not_an_error_of_the_inventory() -> None:
    said = Failure("node1", plays.FACTS_TASK, "task", "no /proc", result={"invocation": {}})
    assert type(result(said).error()) is BlockedError


def test_all_that_ansible_printed_is_kept_for_a_traceback() -> None:
    error = result(Failure("node1", "Copy it", "task", "disk full", output="a\nb")).error()
    assert error is not None
    assert error.__notes__ == ["a\nb"]


UNREACHABLE = [
    ("@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@", "ssh-keygen -R 198.18.0.11"),
    ("Host key verification failed.", "`ssh 198.18.0.11`"),
    ("root@198.18.0.11: Permission denied (publickey,password).", "it refuses the ssh login"),
    ("ssh: connect to host 198.18.0.11 port 22: Connection refused", "no ssh server answers there"),
    ("ssh: connect to host 198.18.0.11 port 22: No route to host", "it does not answer"),
    ("Connection timed out during banner exchange\r\nConnection to x timed out", "it does not answer"),
    ("kex_exchange_identification: Connection closed by remote host", "closes the connection at once"),
    ("ssh: Could not resolve hostname gpu-1: Name or service not known", "its name has no address here"),
]


@pytest.mark.parametrize(("message", "said"), UNREACHABLE)
def test_a_connection_that_fails_is_told_with_a_remedy(message: str, said: str) -> None:
    msg = f"Task failed: Failed to connect to the host via ssh: {message}"
    kind, sentence = failure_sentence("gpu-1", "198.18.0.11", {"msg": msg}, unreachable=True)
    assert kind == "unreachable"
    assert said in sentence
    assert ": " in sentence  # what, then what to do


@pytest.mark.parametrize(
    ("message", "kind", "said"),
    [
        (
            "Task failed: Unable to execute ssh command line on a controller: [Errno 2] ...",
            "controller",
            "no ssh",
        ),
        ("Task failed: Missing sudo password", "login", "--ask-become-pass"),
        ("Task failed: Incorrect sudo password", "login", "does not take the password"),
        (
            (
                "Task failed: Premature end of stream waiting for become success.\n>>> Standard Error\n"
                "me is not in the sudoers file."
            ),
            "login",
            "sudo refuses",
        ),
    ],
)
def test_what_goes_wrong_around_a_module_is_told_with_a_remedy(message: str, kind: str, said: str) -> None:
    found, sentence = failure_sentence("node1", "", {"msg": message}, unreachable=False)
    assert found == kind
    assert said in sentence


def test_sudo_is_also_found_where_the_module_never_started() -> None:
    garbled = {
        "msg": "Module result deserialization failed: No start of json char found",
        "module_stderr": "sudo: a password is required\n",
        "rc": 1,
    }
    assert failure_sentence("node1", "", garbled, unreachable=False)[0] == "login"


def test_a_module_s_own_words_are_left_alone() -> None:
    said = {"msg": "the API timed out: Connection refused; a password is required", "invocation": {}}
    kind, sentence = failure_sentence("node1", "", said, unreachable=False)
    assert (kind, sentence) == ("task", said["msg"])


def test_ansible_s_wrapping_of_an_error_of_ours_is_taken_off() -> None:
    msg = (
        "Task failed: Finalization of task args for 'ansible.builtin.set_fact' failed: Error while resolving "
        "value for 'ppdeploy__plan': The filter plugin 'ppdeploy_plan' failed: it is wrong (there): change it"
    )
    assert failure_sentence("n", "", {"msg": msg}, unreachable=False)[1] == "it is wrong (there): change it"


def test_a_long_message_keeps_its_first_line() -> None:
    msg = "pipeline tiny does not serve: health\n" + "\n".join(f"node1 | line {n}" for n in range(30))
    sentence = failure_sentence("n", "", {"msg": msg}, unreachable=False)[1]
    assert sentence == "pipeline tiny does not serve: health"


def test_the_playbooks_have_the_names_that_we_look_for() -> None:
    folders = [data_root() / "playbooks", data_root() / "roles" / "vllm_rank"]
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.yml")]
    named = {name.strip() for text in texts for name in re.findall(r"name: (.+)", text)}
    assert {
        plays.VALUES_TASK,
        plays.DRIVER_TASK,
        plays.PLAN_TASK,
        plays.SMOKE_PLAY,
        *plays.SERVING_TASKS,
        *plays.KEPT_TASKS,
    } <= named
    assert (data_root() / "roles" / plays.CHECK_ROLE / "tasks" / "main.yml").is_file()
    for playbook in (
        plays.SITE,
        plays.FACTS,
        plays.SMOKE,
        plays.STATUS,
        plays.LOGS,
        plays.MODELS,
        plays.BENCH,
        plays.BENCH_STOP,
        plays.NET,
        plays.NET_STOP,
    ):
        assert (data_root() / playbook).is_file()
    variables = "\n".join(texts)
    read = (plays.VALUES, plays.PLAN, plays.SMOKE_REPORTS, plays.SERVES_AGAIN, plays.BENCHES)
    given = (plays.FORGET, plays.WAIT, plays.BENCH_ASK, plays.SHOW, plays.MODELS_ASK)
    for variable in (*read, *given):
        assert re.search(rf"^\s*{variable}: ", variables, re.MULTILINE), variable


def test_a_run_without_any_event_is_wrong_input() -> None:
    broken = RunResult(status="error", return_code=4, seconds=1.0, messages=("YAML parsing failed",))
    error = broken.error()
    assert isinstance(error, InputError)
    assert "YAML parsing failed" in str(error)
