"""The last step before vLLM: the rank process checks that it is the one that its ticket names, then becomes vLLM.

It runs as the rank's own user inside the unit. What systemd loaded (the command line, the environment)
must be what the ticket's release holds in its own folder, also when `current` moved in between (rule 5).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ppdeploy.agent import release, ticket
from ppdeploy.agent.command_line import environment, option, with_option
from ppdeploy.agent.config import Config
from ppdeploy.agent.ready import master_port


class RefusedError(Exception):
    """The rank must not start; `str()` says what differs."""


def prepare(config: Config, argv: Sequence[str], variables: Mapping[str, str], boot_id: str) -> list[str]:
    """Return the command to become, its master port that of the ticket's generation; raise `RefusedError`."""
    own = ticket.read(config.consumed)
    if own == ticket.BLANK or own.boot_id != boot_id:
        raise RefusedError(f"the rank has no consumed ticket ({config.consumed}): use `ppdeploy start`")
    try:
        found = release.read(config.releases / own.release, config.node, config.pipeline)
    except release.DiffersError as error:
        raise RefusedError(str(error)) from error
    if list(argv) != found.argv:
        raise RefusedError(_difference(list(argv), found.argv, own.release))
    for name in (release.RANK_ENV, release.NCCL_ENV):
        path = found.folder / name
        expected = environment(path.read_text(encoding="utf-8")) if path.exists() else {}
        for variable, value in expected.items():
            if variables.get(variable) != value:
                raise RefusedError(
                    f"{variable} is not what {name} of release {own.release[:12]} sets: another release was switched"
                    f" to during the start; it is tried again"
                )
    base = option(found.argv, "--master-port")
    if not base:
        return found.argv
    return with_option(found.argv, "--master-port", str(master_port(int(base), own.generation.number)))


def become(words: Sequence[str]) -> None:
    """Become the rank: same process, same unit, same environment; raise `OSError`."""
    variables = dict(os.environ)
    if not {"LANG", "LC_ALL"} & set(variables):
        # Python itself sets this one where no locale is given (PEP 538); the plan does not.
        variables.pop("LC_CTYPE", None)
    os.execve(words[0], list(words), variables)  # noqa: S606  (no shell)


def _difference(loaded: list[str], listed: list[str], digest: str) -> str:
    at = next((i for i, pair in enumerate(zip(loaded, listed)) if pair[0] != pair[1]), min(len(loaded), len(listed)))
    first = loaded[at] if at < len(loaded) else "nothing"
    second = listed[at] if at < len(listed) else "nothing"
    return (
        f"systemd would start the rank with {first!r} where release {digest[:12]} has {second!r} (argument {at}):"
        f" run `systemctl daemon-reload`, or apply"
    )


def consumed_by(config: Config, boot_id: str) -> Path:
    """Consume the ticket for this start, as root before the rank; raise `ticket.NoTicketError`."""
    ticket.consume(config.ticket, config.consumed, boot_id)
    return config.consumed
