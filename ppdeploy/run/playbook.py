"""Run a playbook with ansible-runner: the same play as plain `ansible-playbook`, watched, ended cleanly."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ansible_runner

from ppdeploy.errors import InputError
from ppdeploy.paths import data_root
from ppdeploy.run.environment import FOREIGN, ansible_environment, require_program
from ppdeploy.run.events import EventReader
from ppdeploy.run.interrupt import Interruption, Stopper, end_processes
from ppdeploy.run.private import RUN_VARIABLE, private_folder, run_marker
from ppdeploy.run.progress import Progress, progress
from ppdeploy.run.redact import Redactor
from ppdeploy.run.result import RunResult
from ppdeploy.run.secrets import Passwords, VaultOptions

#: Seconds between looks at the stop signals while Ansible prints nothing.
_POLL = 0.2


@dataclass(frozen=True)
class PlayOptions:
    """What a user may say about a run, named as in `ansible-playbook`; `extra_vars` are -e's values."""

    limit: str | None = None
    tags: str | None = None
    check: bool = False
    diff: bool = False
    extra_vars: tuple[str, ...] = ()
    verbosity: int = 0
    vault: VaultOptions = field(default_factory=VaultOptions)

    def arguments(self) -> list[str]:
        """Return the options for `ansible-playbook`, without those that ask for a password."""
        arguments = []
        if self.limit is not None:
            arguments += ["--limit", self.limit]
        if self.tags is not None:
            arguments += ["--tags", self.tags]
        arguments += ["--check"] if self.check else []
        arguments += ["--diff"] if self.diff else []
        for value in self.extra_vars:
            arguments += ["-e", value]
        return arguments + self.vault.arguments()


def run_playbook(
    playbook: str,
    *,
    inventory: Path,
    options: PlayOptions | None = None,
    passwords: Passwords | None = None,
    redactor: Redactor | None = None,
    json_events: bool = False,
    keep: Collection[str] = (),
    display: Progress | None = None,
    addresses: Mapping[str, str] | None = None,
    root: Path | None = None,
) -> RunResult:
    """Run `playbook` (a path below `data_root()`, such as `site.yml`) and return what it came to.

    Progress goes to `display`, by default to the terminal, or to stdout as JSON lines. `keep` names the
    tasks whose results the caller wants, `addresses` where each host is reached, for remedies. A play that
    fails is no exception: see
    `RunResult.raise_for_status`. Raises InputError when the playbook, the inventory or Ansible itself is
    missing. `root` stands in for `data_root()` in tests.
    """
    options = options or PlayOptions()
    passwords = passwords or Passwords()
    redactor = redactor or Redactor()
    redactor.add(passwords.values())
    root = root or data_root()
    path = root / playbook
    if not path.is_file():
        raise InputError(
            f"playbook {playbook} is missing",
            where=str(root),
            remedy="install ppdeploy again, or clone it anew",
        )
    if not inventory.exists():
        raise InputError(
            "the inventory is missing",
            where=str(inventory),
            remedy="run `ppdeploy init`, or name one with -i",
        )
    require_program("ansible-playbook")
    display = display or progress(redactor, as_json=json_events, verbose=options.verbosity > 0)

    reader = EventReader(display.show, keep=keep, redactor=redactor, addresses=addresses)
    began = time.monotonic()
    with (
        Interruption() as interruption,
        private_folder() as folder,
        passwords.vault_arguments() as vault,
        passwords.become_arguments() as become,
        display,
    ):
        marker = run_marker(folder)
        config = ansible_runner.RunnerConfig(
            private_data_dir=str(folder),
            playbook=str(path),
            inventory=str(inventory.resolve()),
            verbosity=options.verbosity or None,
            cmdline=shlex.join([*options.arguments(), *vault, *become]) or None,
            envvars=ansible_environment(root) | {RUN_VARIABLE: str(folder)},
            fact_cache_type="memory",
            quiet=True,
        )
        config.prepare()
        for name in FOREIGN:
            config.env.pop(name, None)
        config.env["ORIGINAL_STDOUT_CALLBACK"] = "default"
        # Relative files in -e @FILE and --vault-password-file are the user's: they start where the user is.
        config.cwd = str(Path.cwd())
        config.pexpect_timeout = _POLL
        config.suppress_output_file = True
        stopper = Stopper(interruption, marker)

        def look() -> bool:
            display.tick()
            return stopper()

        runner = ansible_runner.Runner(config, event_handler=reader.take, cancel_callback=look)
        try:
            if not interruption.count:
                runner.run()
        finally:
            if interruption.count or sys.exc_info()[0]:
                end_processes(marker)
    return reader.result(
        return_code=runner.rc if runner.rc is not None else -1,
        seconds=time.monotonic() - began,
        interrupted=interruption.count > 0,
        limit=options.limit,
        check=options.check,
    )
