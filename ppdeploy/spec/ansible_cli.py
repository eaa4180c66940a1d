"""Run `ansible-inventory` and `ansible`, and turn what they say of a broken inventory into one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ppdeploy.errors import InputError
from ppdeploy.paths import data_root
from ppdeploy.spec.problems import shortened_list
from ppdeploy.spec.sources import broken_yaml, vaulted


def inventory_list(path: Path, arguments: Sequence[str]) -> Mapping[str, object]:
    """Return what `ansible-inventory --list` says of the inventory.

    `arguments` are vault options and `-e` pairs. Raises InputError, with the file and line where Ansible or
    the file itself tells them.
    """
    done = _run("ansible-inventory", ["-i", str(path.absolute()), "--list", *arguments])
    if done.returncode == 0:
        try:
            listing = json.loads(done.stdout)
        except (ValueError, RecursionError):
            listing = None
        if isinstance(listing, dict):
            return listing
    raise _unreadable(path, done.stderr)


def _run(program: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of Ansible's programs and return what it wrote."""
    # A password may be asked for on the terminal; nothing else may wait for an answer.
    asks = any(re.match(r"-J$|--ask-vault", word) for word in arguments)
    found = _program(program)
    try:
        return subprocess.run(
            [found, *arguments],
            env=_environment(),
            stdin=None if asks else subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"{program} cannot be run: {error}",
            where=found,
            remedy="install ppdeploy again (pip install ppdeploy)",
        ) from None


def _program(name: str) -> str:
    """Return the program of the Python environment that runs us, else the one on PATH."""
    beside = Path(sys.executable).with_name(name)
    if beside.is_file():
        return str(beside)
    on_path = shutil.which(name)
    if on_path:
        return on_path
    raise InputError(
        f"{name} is not installed",
        where=str(beside.parent),
        remedy="install ppdeploy again (pip install ppdeploy)",
    )


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    config = data_root() / "ansible.cfg"
    if config.is_file():
        environment.setdefault("ANSIBLE_CONFIG", str(config))
    for name in ("ANSIBLE_FORCE_COLOR", "ANSIBLE_VERBOSITY", "ANSIBLE_DEBUG"):
        environment.pop(name, None)
    environment |= {
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_DEPRECATION_WARNINGS": "False",
        # A half-read inventory is a smaller cluster than the one meant.
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "True",
        # A host or variable that is written twice would have its first half dropped, with a warning that nobody sees.
        "ANSIBLE_DUPLICATE_YAML_DICT_KEY": "error",
        # Values of groups are wanted with each host.
        "ANSIBLE_INVENTORY_EXPORT": "False",
    }
    return environment | _utf8_locale(environment)


def _utf8_locale(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what has to change for Ansible, which refuses to start in another locale than a UTF-8 one."""
    names = (environment.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    current = next((value for value in names if value), "")
    # cron, systemd and containers often have none, or C.
    return {} if re.search(r"\.utf-?8\b", current, re.IGNORECASE) else {"LC_ALL": "C.UTF-8"}


# ---- what Ansible says of a broken inventory


def _unreadable(path: Path, messages: str) -> InputError:
    """Return Ansible's messages as one sentence, with the file and line."""
    if re.search(r"no vault secrets (found|were found)|Decryption failed", messages):
        missing = "no vault secrets found" in messages
        files = shortened_list([str(file) for file in vaulted(path)]) or str(path)
        reason = "no password was given" if missing else "the password is wrong"
        return InputError(
            f"the inventory is encrypted, and {reason}",
            where=files,
            remedy="give the password with --ask-vault-pass or --vault-password-file FILE",
        )
    reasons = re.findall(r"Failed to parse inventory with '(\w+)' plugin: (.+)", messages)
    errors = re.findall(r"^\[?ERROR\]?: (?!Completely failed)(.+)", messages, re.MULTILINE)
    failed = re.search(r"Completely failed to parse inventory source (.+)", messages)
    reason = _reason(Path(failed[1]) if failed else path, reasons) or (errors[0] if errors else _last_line(messages))
    reason = re.sub(r"^(YAML parsing failed|Failed to parse inventory): ", "", reason.strip())
    reason = reason.replace(str(path.absolute()), str(path)).rstrip(".")
    what, remedy = _in_our_words(reason) or (
        f"the inventory cannot be read: {reason}",
        f"correct it, or move away what is none; `ansible-inventory -i {path} --list` says more",
    )
    return InputError(what, where=_place(path, messages, yaml_first="YAML" in messages), remedy=remedy)


def _in_our_words(reason: str) -> tuple[str, str] | None:
    """Return what is wrong and what to do, for mistakes that many make and that Ansible tells as a programmer would."""
    if twice := re.search(r"Found duplicate mapping key '(.+)'", reason):
        return (
            f"{twice[1]} is written twice in one map, of which YAML would keep the second alone",
            "remove one of the two, or give it the name that was meant",
        )
    if listed := re.search(r'Invalid "(hosts|children|vars)" entry for "(.+?)" group, requires a dictionary', reason):
        return (
            f"{listed[1]} of the group {listed[2]} is no map",
            f"write {_EXAMPLES[listed[1]]} below it, without a dash in front, as inventory/example has it",
        )
    return None


_EXAMPLES = {
    "hosts": "each host as `NAME: {ansible_host: ADDRESS}`",
    "children": "each group as `NAME:`",
    "vars": "each variable as `NAME: VALUE`",
}
"""What an entry of each part of a group looks like."""


def _last_line(messages: str) -> str:
    """Return the last words of a program that did not say what is wrong in Ansible's way."""
    lines = [line.strip() for line in messages.splitlines() if line.strip()]
    return lines[-1] if lines and "Completely failed" not in lines[-1] else "Ansible finds no inventory in it"


def _reason(source: Path, reasons: Sequence[tuple[str, str]]) -> str | None:
    """Return what the plugin that the file is meant for says; Ansible tries them all."""
    wanted = ("yaml", "auto") if source.suffix in (".yml", ".yaml", ".json") else ("ini",)
    if os.access(source, os.X_OK):
        wanted = ("script",)
    for plugin in wanted:
        for name, text in reasons:
            if name == plugin:
                return text
    return reasons[0][1] if reasons else None


def _place(path: Path, messages: str, *, yaml_first: bool) -> str:
    """Return `file:line` of the mistake as well as it can be known."""
    own = broken_yaml(path) if yaml_first else None
    if own:
        return own
    origins = re.findall(r"Origin: ([^<\n]+?)(?::(\d+))?(?::\d+)?$", messages, re.MULTILINE)
    with_line = [origin for origin in origins if origin[1]]
    for file, line in with_line or origins:
        shown = file.replace(str(path.absolute()), str(path))
        return f"{shown}:{line}" if line else shown
    return str(path)


# ---- rendering templates


def rendered_values(
    path: Path, group: str, names: Iterable[str], arguments: Sequence[str]
) -> dict[str, dict[str, object]]:
    """Return the values of templated variables as Ansible renders them, for each host that it can.

    They are rendered on the controller from the inventory alone; what needs a play is left out.
    """
    names = sorted(names)
    rendered, complete = _render(path, group, names, arguments)
    if not complete and len(names) > 1:
        # One that cannot be rendered spoils the others of its host: take each alone.
        for name in names:
            for host, values in _render(path, group, [name], arguments)[0].items():
                rendered.setdefault(host, {}).update(values)
    return rendered


def _render(
    path: Path, group: str, names: Sequence[str], arguments: Sequence[str]
) -> tuple[dict[str, dict[str, object]], bool]:
    """Return what could be rendered, and whether no host failed."""
    pairs = ", ".join(f"{name!r}: {name} | default(none)" for name in names)
    with tempfile.TemporaryDirectory(prefix="ppdeploy-") as folder:
        options = [
            "-m",
            "ansible.builtin.debug",
            "-a",
            f"msg={{{{ {{{pairs}}} | to_json }}}}",
            "--tree",
            folder,
        ]
        done = _run("ansible", ["-i", str(path.absolute()), group, *options, *arguments])
        rendered: dict[str, dict[str, object]] = {}
        for file in Path(folder).iterdir():
            try:
                message = json.loads(file.read_text(encoding="utf-8"))["msg"]
                values = json.loads(message) if isinstance(message, str) else message
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(values, dict):
                rendered[file.name] = {name: value for name, value in values.items() if value is not None}
    return rendered, done.returncode == 0
