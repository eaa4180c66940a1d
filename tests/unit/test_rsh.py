"""The controller's rsync reaches a node as Ansible does, and hands the words on unchanged."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ppdeploy.errors import InputError
from ppdeploy.rsh import push_argv, rsync_rsh

FULL = {
    "host": "192.0.2.11",
    "connection": "ssh",
    "user": "ops",
    "port": 2222,
    "private_key_file": "/srv/ops/my keys/id",
    "ssh_common_args": "-o ProxyCommand=\"nsenter --net='/run/a b' %h %p\" -o UserKnownHostsFile=known",
    "ssh_extra_args": "-v",
    "ssh_executable": "/usr/bin/ssh",
}


def test_every_option_of_the_connection_is_there() -> None:
    assert shlex.split(rsync_rsh(FULL)) == [
        *("/usr/bin/ssh", "-o", "BatchMode=yes", "-l", "ops", "-p", "2222", "-i", "/srv/ops/my keys/id"),
        *("-o", "ProxyCommand=nsenter --net='/run/a b' %h %p", "-o", "UserKnownHostsFile=known", "-v"),
    ]


def test_what_is_unset_is_left_to_ssh() -> None:
    unset = dict.fromkeys(FULL) | {"host": "node1", "ssh_common_args": ""}
    assert rsync_rsh(unset) == "ssh -o BatchMode=yes"


def test_host_key_checking_is_never_turned_off() -> None:
    assert "StrictHostKeyChecking" not in " ".join(push_argv("/m", "/n", FULL))


def test_destination() -> None:
    assert push_argv("/m", "/n/x.partial", FULL)[-2:] == ["/m/", "192.0.2.11:/n/x.partial/"]
    assert push_argv("/m/", "/n/", FULL | {"host": "2001:db8::1"})[-1] == "[2001:db8::1]:/n/"
    assert push_argv("/m", "/n", FULL | {"connection": "local"})[-2:] == ["/m/", "/n/"]


def test_other_connections_and_open_quotes_are_sentences() -> None:
    with pytest.raises(InputError, match=r"cannot be copied over the connection docker \(192\.0\.2\.11\)"):
        push_argv("/m", "/n", FULL | {"connection": "docker"})
    with pytest.raises(InputError, match="ansible_ssh_common_args"):
        rsync_rsh({"ssh_common_args": "-o 'x"})


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
def test_rsync_splits_the_command_into_the_same_words(tmp_path: Path) -> None:
    seen = tmp_path / "seen words"
    program = tmp_path / "my ssh"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {shlex.quote(str(seen))}\nexit 3\n")
    program.chmod(0o755)
    (tmp_path / "m").mkdir()
    connection = FULL | {"ssh_executable": str(program), "private_key_file": 'it\'s "odd"'}
    subprocess.run(push_argv(str(tmp_path / "m"), "/n/x y", connection), input=b"", check=False)
    words = seen.read_text().splitlines()
    expected = shlex.split(rsync_rsh(connection))[1:]
    assert words[: len(expected)] == expected
    assert words[len(expected) : len(expected) + 2] == ["192.0.2.11", "rsync"]


@pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
def test_links_are_followed_and_only_listed_files_go(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "sub").mkdir(parents=True)
    (source / "blob").write_text("x")
    (source / "sub" / "chat template.jinja").symlink_to("../blob")
    argv = push_argv(str(source), str(target), {"connection": "local", "host": "x"})
    subprocess.run(argv, input=b"sub/chat template.jinja\n", check=True)
    assert [p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()] == ["sub/chat template.jinja"]
    assert (target / "sub" / "chat template.jinja").read_text() == "x"
    assert not (target / "sub" / "chat template.jinja").is_symlink()
