"""Passwords that we ask for and hand to Ansible through named pipes: in no argument, environment or file.

Ansible takes a password from a file's path; a pipe has a path too, but its content never leaves the kernel's
memory, and no prompt has to be recognized in what a play prints.
"""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.run.private import memory_folder

#: ansible-vault's name for the one vault that needs no label.
DEFAULT_VAULT = "default"


@dataclass(frozen=True)
class VaultOptions:
    """ansible-vault's options as given: `password_files` may be scripts, `ids` are `label@source`."""

    ask: bool = False
    password_files: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    @property
    def prompts(self) -> tuple[str, ...]:
        """The labels of the vaults whose password is to be asked for."""
        labels = [DEFAULT_VAULT] if self.ask else []
        asked = [vault_id.removesuffix("@prompt") for vault_id in self.ids if vault_id.endswith("@prompt")]
        return (*labels, *(label or DEFAULT_VAULT for label in asked))

    def arguments(self) -> list[str]:
        """Return the options for Ansible's programs, without those that ask."""
        arguments: list[str] = []
        for path in self.password_files:
            arguments += ["--vault-password-file", path]
        for vault_id in self.ids:
            if not vault_id.endswith("@prompt"):
                arguments += ["--vault-id", vault_id]
        return arguments


@dataclass(frozen=True)
class Passwords:
    """What the user typed: `become` for sudo, `vaults` by label."""

    become: str | None = field(default=None, repr=False)
    vaults: dict[str, str] = field(default_factory=dict, repr=False)

    def values(self) -> tuple[str, ...]:
        """Return all of them, to be hidden in what we print."""
        return (*([self.become] if self.become else []), *self.vaults.values())

    @contextmanager
    def vault_arguments(self) -> Iterator[list[str]]:
        """Give the options by which Ansible's programs read the vault passwords, while it is entered."""
        with _pipes(self.vaults) as paths:
            yield [word for label, path in paths.items() for word in ("--vault-id", f"{label}@{path}")]

    @contextmanager
    def become_arguments(self) -> Iterator[list[str]]:
        """Give the options by which `ansible-playbook` reads the sudo password, while it is entered."""
        with _pipes({"become": self.become} if self.become is not None else {}) as paths:
            yield [word for path in paths.values() for word in ("--become-password-file", str(path))]


def ask_passwords(*, become: bool, vault: VaultOptions) -> Passwords:
    """Ask on the terminal for what the options need; InputError where there is no terminal to ask on."""
    if not become and not vault.prompts:
        return Passwords()
    if not sys.stdin.isatty():
        raise InputError(
            "a password is to be asked for, but there is no terminal",
            where="--ask-become-pass" if become else "--ask-vault-pass",
            remedy="run it in a terminal, or use --vault-password-file, or sudo that needs no password",
        )
    vaults = {}
    for label in vault.prompts:
        name = "" if label == DEFAULT_VAULT else f" ({label})"
        vaults[label] = getpass.getpass(f"Vault password{name}: ")
    return Passwords(become=getpass.getpass("sudo password on the hosts: ") if become else None, vaults=vaults)


@contextmanager
def _pipes(words: dict[str, str]) -> Iterator[dict[str, Path]]:
    """Give a pipe for each word, which answers every reader in turn."""
    if not words:
        yield {}
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppdeploy-ask-", dir=memory_folder())))
        paths = {}
        for number, (name, word) in enumerate(words.items()):
            paths[name] = folder / f"word{number}"
            stack.enter_context(_Pipe(paths[name], word))
        yield paths


class _Pipe:
    """A named pipe that gives one word to each program that opens it."""

    def __init__(self, path: Path, word: str) -> None:
        self._path = path
        self._word = word.encode() + b"\n"
        self._closed = False
        os.mkfifo(path, 0o600)
        self._thread = threading.Thread(target=self._serve, name="ppdeploy password pipe", daemon=True)

    def __enter__(self) -> _Pipe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        while self._thread.is_alive():  # it may be between two readers
            with suppress(OSError):
                os.close(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK))
            self._thread.join(0.05)

    def _serve(self) -> None:
        while not self._closed:
            handle = os.open(self._path, os.O_WRONLY)  # waits for a reader
            # The next reader must find a pipe of its own: in this one it would take what is not yet read.
            fresh = self._path.with_suffix(".fresh")
            os.mkfifo(fresh, 0o600)
            fresh.replace(self._path)
            with suppress(BrokenPipeError):
                if not self._closed:
                    os.write(handle, self._word)
            os.close(handle)
