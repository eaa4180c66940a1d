"""One sentence out of what Ansible says about a failed task: what is wrong, where, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: What kind of trouble a failure is; it decides the exit code (see `ppdeploy.run.result`).
Kind = Literal["unreachable", "login", "controller", "task"]

#: What ansible-core puts in front of the text that a module or plugin wrote.
_WRAPPING = re.compile(
    r"^(?:(?:Task failed|Action failed|Module failed|Finalization of task args for '[^']*' failed"
    r"|Error while resolving value for '[^']*'|Error while evaluating conditional|Error rendering template"
    r"|Failed to connect to the host via ssh|The filter plugin '[^']*' failed): )+"
)

_LONGEST = 600


@dataclass(frozen=True)
class _Known:
    """A message that users meet before any task of ours runs; `{0}` is the host, `{1}` its address."""

    pattern: re.Pattern[str]
    kind: Kind
    what: str
    remedy: str


def _known(pattern: str, kind: Kind, what: str, remedy: str) -> _Known:
    return _Known(re.compile(pattern, re.IGNORECASE), kind, what, remedy)


_LOG_IN = "make `ssh {1}` work from here, or correct ansible_host, ansible_port or ansible_user in the inventory"

_KNOWN = (
    _known(
        r"Unable to execute ssh command line|ssh: (command )?not found",
        "controller",
        "this machine has no ssh client",
        "install it (on Debian and Ubuntu: apt-get install openssh-client)",
    ),
    _known(
        r"sshpass program",
        "controller",
        "an ssh password is set in the inventory, but this machine has no sshpass",
        "log in by key instead, or install sshpass",
    ),
    _known(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key for \S+ has changed",
        "unreachable",
        "its ssh host key is not the one this machine knows",
        "if the host was set up anew, forget the old key with `ssh-keygen -R {1}` and accept the new one "
        "with `ssh {1}`; if not, find out who answers at that address",
    ),
    _known(
        r"Host key verification failed|No \S+ host key is known",
        "unreachable",
        "its ssh host key is not known to this machine",
        "compare and accept it once with `ssh {1}`",
    ),
    _known(
        r"Permission denied \(|Too many authentication failures|Invalid/incorrect password",
        "unreachable",
        "it refuses the ssh login",
        _LOG_IN,
    ),
    _known(r"Could not resolve hostname", "unreachable", "its name has no address here", _LOG_IN),
    _known(
        r"Connection refused",
        "unreachable",
        "no ssh server answers there",
        "start sshd on it, and then " + _LOG_IN,
    ),
    _known(
        r"timed? ?out|No route to host|Network is unreachable|Host is down",
        "unreachable",
        "it does not answer",
        "see that it runs and is on the network, and then " + _LOG_IN,
    ),
    # The last of its kind: a jump host or proxy that cannot get through may have said why before.
    _known(
        r"Data could not be sent to remote host|Connection (closed|reset) by",
        "unreachable",
        "it does not answer, or closes the connection at once",
        "see that it runs and is on the network, and then " + _LOG_IN,
    ),
    _known(
        r"Missing sudo password|a (terminal|password) is required|Timeout .* waiting for privilege escalation"
        r"|Timed out waiting for become success",
        "login",
        "sudo asks for a password there",
        "add --ask-become-pass, or allow the login user to use sudo without one",
    ),
    _known(
        r"Incorrect sudo password|incorrect password attempt|Sorry, try again",
        "login",
        "sudo does not take the password",
        "give the right one at --ask-become-pass",
    ),
    _known(
        r"is not in the sudoers file|is not allowed to (execute|run sudo)|must have a tty to run sudo"
        r"|Premature end of stream waiting for become",
        "login",
        "sudo refuses the login user",
        "allow that user to become root with sudo, or set ansible_user to one that may",
    ),
    _known(
        r"Attempting to decrypt but no vault secrets found|Decryption failed",
        "controller",
        "a vaulted value of the inventory cannot be read",
        "add --ask-vault-pass or --vault-password-file with the right password",
    ),
)


def failure_sentence(host: str, address: str, result: Mapping[str, Any], *, unreachable: bool) -> tuple[Kind, str]:
    """Return the kind of a failure and the sentence to print (without host and task, which the caller adds).

    `address` is where Ansible connects to; `result` is the task's result as ansible-runner reports it.
    """
    result = _first_failed_item(result)
    message = _message(result)
    spoke_for_itself = "invocation" in result or ("rc" in result and not _is_garbled(result))
    for known in _KNOWN:
        # A module's own message may well say "timed out" or "decryption failed": only what went wrong
        # around a module is about ssh, sudo and vault.
        fits = unreachable if known.kind == "unreachable" else not spoke_for_itself
        if fits and known.pattern.search(message):
            return known.kind, f"{known.what}: {known.remedy.format(host, address or host)}"
    return ("unreachable" if unreachable else "task"), _one_line(message)


def known_sentence(message: str) -> str | None:
    """Return what to say for one of Ansible's own errors outside any task, where it is a known one."""
    for known in _KNOWN:
        if known.kind == "controller" and known.pattern.search(message):
            return f"{known.what}: {known.remedy}"
    return None


def _first_failed_item(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the result of the loop's first item that failed; a task without a loop is its own."""
    items = (item for item in result.get("results") or () if isinstance(item, Mapping))
    return next((item for item in items if item.get("failed")), result)


def _is_garbled(result: Mapping[str, Any]) -> bool:
    """Say whether Ansible got no result from the module: it did not start, or was killed."""
    return str(result.get("msg") or "").startswith(("Module result deserialization failed", "MODULE FAILURE"))


def _message(result: Mapping[str, Any]) -> str:
    if result.get("censored"):
        return "it failed, and its output is hidden because it may hold a secret"
    message = str(result.get("msg") or "").strip()
    if not result.get("rc") or not (_is_garbled(result) or message in ("", "non-zero return code")):
        return message or "it failed without a message"
    # `command`'s own message says nothing; the last line on stderr nearly always does.
    texts = (str(result.get(key) or "").strip() for key in ("stderr", "module_stderr", "stdout"))
    said = next((text for text in texts if text), "it printed nothing")
    command = result.get("cmd") or "the module"
    name = " ".join(map(str, command)) if isinstance(command, list) else str(command)
    return f"`{name}` ended with {result['rc']}: {said.splitlines()[-1]}"


#: A message of more lines than this is a sentence with an attachment, such as journals.
_MOST_LINES = 4


def _one_line(message: str) -> str:
    lines = [line.strip() for line in _WRAPPING.sub("", message.strip()).splitlines() if line.strip()]
    text = "; ".join(lines if len(lines) <= _MOST_LINES else lines[:1])
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
