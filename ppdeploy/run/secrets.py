"""Passwords that we ask for and hand to Ansible through its own prompts: never an argument, never a file."""

from __future__ import annotations

import getpass
import sys
from dataclasses import dataclass, field

from ppdeploy.errors import InputError


@dataclass(frozen=True)
class VaultOptions:
    """ansible-vault's options as given: `password_files` may be scripts, `ids` are `label@source`."""

    ask: bool = False
    password_files: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the options for any of Ansible's programs."""
        arguments = ["--ask-vault-pass"] if self.ask else []
        for path in self.password_files:
            arguments += ["--vault-password-file", path]
        for vault_id in self.ids:
            arguments += ["--vault-id", vault_id]
        return arguments

    @property
    def prompts(self) -> tuple[str, ...]:
        """The labels that ansible-vault will ask a password for; an empty one is the default vault's."""
        labels = [""] if self.ask else []
        return (
            *labels,
            *(vault_id.removesuffix("@prompt") for vault_id in self.ids if vault_id.endswith("@prompt")),
        )


@dataclass(frozen=True)
class Passwords:
    """What the user typed: `become` for sudo, `vaults` by label."""

    become: str | None = field(default=None, repr=False)
    vaults: dict[str, str] = field(default_factory=dict, repr=False)

    def values(self) -> tuple[str, ...]:
        """Return all of them, to be hidden in what we print."""
        return (*([self.become] if self.become else []), *self.vaults.values())

    def prompts(self) -> dict[str, str]:
        """Return the answers by the regular expression of Ansible's prompt, as ansible-runner types them."""
        answers = {
            rf"^Vault password{f' [(]{label}[)]' if label else ''}:\s*$": word
            for label, word in self.vaults.items()
        }
        if self.become is not None:
            answers[r"^BECOME password.*:\s*$"] = self.become
        return answers


def ask_passwords(*, become: bool, vault: VaultOptions) -> Passwords:
    """Ask on the terminal for what the options need; InputError where there is no terminal to ask on."""
    if not become and not vault.prompts:
        return Passwords()
    if not sys.stdin.isatty():
        raise InputError(
            "a password is to be asked for, but there is no terminal",
            where="--ask-become-pass" if become else "--ask-vault-pass",
            remedy="use --vault-password-file for a vault, and sudo without a password, or run it in a "
            "terminal",
        )
    vaults = {
        label: getpass.getpass(f"Vault password{f' ({label})' if label else ''}: ") for label in vault.prompts
    }
    return Passwords(
        become=getpass.getpass("sudo password on the hosts: ") if become else None, vaults=vaults
    )
