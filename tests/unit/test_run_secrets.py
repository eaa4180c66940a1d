"""Passwords reach Ansible, and nothing else: no argument, environment variable, file or output has them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppdeploy.errors import InputError
from ppdeploy.run import Passwords, PlayOptions, VaultOptions, ask_passwords, run_playbook
from ppdeploy.run.events import Step
from tests.unit.run_support import INVENTORY, PROJECT, Recorder

WORD = "correct-horse-battery"

# Like sudo for Ansible: it asks with the given prompt, and runs the command after the right answer.
FAKE_SUDO = f"""#!{sys.executable}
import os, sys
arguments = sys.argv[1:]
if "-n" in arguments:
    sys.exit("sudo: a password is required")
prompt = arguments[arguments.index("-p") + 1]
print(prompt, end="", file=sys.stderr, flush=True)
with open({{seen!r}}, "ab") as seen:
    for name in os.listdir("/proc"):
        for file in ("cmdline", "environ"):
            try:
                seen.write(open(f"/proc/{{{{name}}}}/{{{{file}}}}", "rb").read() + b"\\n")
            except OSError:
                pass
if sys.stdin.readline().strip() != {WORD!r}:
    sys.exit("Sorry, try again.")
os.execvp("sh", ["sh", "-c", arguments[-1]])
"""


def become_inventory(folder: Path) -> Path:
    program = folder / "sudo"
    program.write_text(FAKE_SUDO.format(seen=str(folder / "seen")).replace("{{", "{").replace("}}", "}"))
    program.chmod(0o755)
    inventory = folder / "hosts.yml"
    inventory.write_text(
        "vllm: {hosts: {node1: {ansible_connection: local, ansible_python_interpreter: "
        f"'{sys.executable}', ansible_become_exe: '{program}'}}}}}}\n"
    )
    return inventory


def files_below(*folders: Path) -> bytes:
    """Return the content of all plain files; a pipe is skipped, for it holds nothing."""
    return b"".join(path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file())


def test_the_sudo_password_reaches_sudo_and_no_process_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    inventory = become_inventory(tmp_path)
    found: list[bytes] = []

    class Looker(Recorder):
        def show(self, step: Step) -> None:
            super().show(step)
            found.append(files_below(runtime))

    result = run_playbook(
        "playbooks/become.yml",
        inventory=inventory,
        root=PROJECT,
        passwords=Passwords(become=WORD),
        display=Looker(),
    )
    assert result.exit_code == 0, result.failures
    seen = (tmp_path / "seen").read_bytes()
    assert b"ansible-playbook" in seen
    assert WORD.encode() not in seen
    assert found
    assert WORD.encode() not in b"".join(found)
    assert list(runtime.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        (None, "sudo asks for a password there: add --ask-become-pass"),
        ("wrong", "sudo does not take the password"),
    ],
)
def test_a_missing_or_wrong_sudo_password_is_blocked_with_a_remedy(
    tmp_path: Path, word: str | None, sentence: str
) -> None:
    result = run_playbook(
        "playbooks/become.yml",
        inventory=become_inventory(tmp_path),
        root=PROJECT,
        passwords=Passwords(become=word),
        display=Recorder(),
    )
    assert result.exit_code == 3
    assert result.failures[0].sentence.startswith(sentence)


def vault_file(folder: Path, label: str | None = None) -> Path:
    path = folder / "secret.yml"
    path.write_text("outcome: changed\n")
    key = folder / "key"
    key.write_text(WORD)
    program = Path(sys.executable).parent / "ansible-vault"
    source = ["--vault-password-file", str(key)] if label is None else ["--vault-id", f"{label}@{key}"]
    subprocess.run([program, "encrypt", *source, path], check=True, capture_output=True)
    key.unlink()
    return path


@pytest.mark.parametrize("label", [None, "mine"])
def test_an_asked_vault_password_opens_the_vault(tmp_path: Path, label: str | None) -> None:
    result = run_playbook(
        "playbooks/outcome.yml",
        inventory=INVENTORY,
        root=PROJECT,
        options=PlayOptions(extra_vars=(f"@{vault_file(tmp_path, label)}",)),
        passwords=Passwords(vaults={label or "default": WORD}),
        display=Recorder(),
    )
    assert (result.exit_code, result.changed) == (0, 2)


def test_a_vaulted_file_without_password_is_wrong_input(tmp_path: Path) -> None:
    result = run_playbook(
        "playbooks/outcome.yml",
        inventory=INVENTORY,
        root=PROJECT,
        options=PlayOptions(extra_vars=(f"@{vault_file(tmp_path)}",)),
        display=Recorder(),
    )
    assert result.exit_code == 2
    assert "--ask-vault-pass" in str(result.error())


def test_a_vault_password_file_is_passed_on(tmp_path: Path) -> None:
    secret = vault_file(tmp_path)
    (tmp_path / "word").write_text(WORD)
    options = PlayOptions(extra_vars=(f"@{secret}",), vault=VaultOptions(password_files=(str(tmp_path / "word"),)))
    result = run_playbook(
        "playbooks/outcome.yml", inventory=INVENTORY, root=PROJECT, options=options, display=Recorder()
    )
    assert result.changed == 2


def test_a_pipe_answers_each_reader_once_and_goes_away() -> None:
    with Passwords(vaults={"default": WORD}).vault_arguments() as arguments:
        path = Path(arguments[1].removeprefix("default@"))
        assert [path.read_text() for _ in range(3)] == [WORD + "\n"] * 3
        folder = path.parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_end() -> None:
    began = time.monotonic()
    with Passwords(become=WORD).become_arguments() as arguments:
        assert Path(arguments[1]).exists()
    assert time.monotonic() - began < 5


def test_asking_without_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(InputError, match="--ask-become-pass"):
        ask_passwords(become=True, vault=VaultOptions())


def test_what_to_ask_for_follows_from_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    words = iter(["word1", "word2", "word3"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda _prompt: next(words))
    vault = VaultOptions(ask=True, ids=("mine@prompt", "other@file"), password_files=("key",))
    passwords = ask_passwords(become=True, vault=vault)
    assert passwords.vaults == {"default": "word1", "mine": "word2"}
    assert passwords.become == "word3"
    assert vault.arguments() == ["--vault-password-file", "key", "--vault-id", "other@file"]
    assert "word1" not in repr(passwords)
