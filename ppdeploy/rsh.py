"""How the controller's rsync reaches a node: by the ssh connection that Ansible has, with its own options."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from ppdeploy.errors import InputError

# Ansible's connections that are ssh by another name.
_SSH = ("ssh", "ansible.builtin.ssh", "smart", "paramiko", "paramiko_ssh", "ansible.builtin.paramiko_ssh")
_LOCAL = ("local", "ansible.builtin.local")


def rsync_rsh(connection: Mapping[str, object]) -> str:
    """Return the command for rsync's -e that opens the connection Ansible would.

    `connection` has, where they are known, `user`, `port`, `private_key_file`, `ssh_common_args`,
    `ssh_extra_args` and `ssh_executable`, as Ansible's ssh connection names them. Host key checking stays as ssh
    is configured, and nothing is asked for: a password or an unknown host ends the copy with ssh's own sentence.
    """
    argv = [_text(connection, "ssh_executable") or "ssh", "-o", "BatchMode=yes"]
    if user := _text(connection, "user"):
        argv += ["-l", user]
    if port := _text(connection, "port"):
        argv += ["-p", port]
    if key := _text(connection, "private_key_file"):
        argv += ["-i", key]
    for name in ("ssh_common_args", "ssh_extra_args"):
        try:
            argv += shlex.split(_text(connection, name))
        except ValueError as exc:
            what = f"the ssh options cannot be split into words ({exc})"
            raise InputError(what, where=f"ansible_{name}", remedy="close the quotation mark") from exc
    return shlex.join(argv)


def push_argv(source: str, destination: str, connection: Mapping[str, object]) -> list[str]:
    """Return the rsync command that copies listed files of a controller's folder to a node's folder.

    The list comes on standard input. A file that is there in part is gone on with. `connection` is that of
    `rsync_rsh`, with `host` (the address that Ansible connects to) and `connection` (Ansible's connection plugin).
    """
    plugin = _text(connection, "connection") or "ssh"
    host = _text(connection, "host")
    # The mode is set last, which tells the node that a file is whole.
    argv = ["rsync", "--files-from=-", "--copy-links", "--append-verify", "--perms", "--chmod=D0755,F0644"]
    argv.append("--timeout=300")
    source, destination = f"{source.rstrip('/')}/", f"{destination.rstrip('/')}/"
    if plugin in _LOCAL:
        return [*argv, source, destination]
    if plugin not in _SSH:
        raise InputError(
            f"a model folder cannot be copied over the connection {plugin}",
            where=host,
            remedy="connect by ssh, or name a hub repository in ppdeploy_model",
        )
    if ":" in host:
        host = f"[{host}]"
    # Protected: the remote shell does not see the folder's name.
    return [*argv, "--protect-args", "-e", rsync_rsh(connection), source, f"{host}:{destination}"]


def _text(connection: Mapping[str, object], name: str) -> str:
    value = connection.get(name)
    return "" if value is None else str(value)
