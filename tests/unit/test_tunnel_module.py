"""The module `ppdeploy_tunnel`: it says to wg(8) what differs and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_tunnel as module

SECRET = "cHJpdmF0ZQ="
OWN = f"{SECRET}\tb3du=\t29500\toff"
PEERS = [
    {"host": "node2", "key": "two=", "endpoint": "192.0.2.12:29500", "allowed": "10.213.117.12/32"},
    {"host": "node3", "key": "three=", "endpoint": "192.0.2.13:29500", "allowed": "10.213.117.13/32"},
]


def dump(*peers: tuple[str, str, str]) -> str:
    """Return what `wg show INTERFACE dump` prints of these peers' keys, endpoints and networks."""
    rows = [f"{key}\t(none)\t{endpoint}\t{allowed}\t1795000000\t92\t180\toff" for key, endpoint, allowed in peers]
    return "\n".join((OWN, *rows)) + "\n"


TWO = ("two=", "192.0.2.12:29500", "10.213.117.12/32")
THREE = ("three=", "192.0.2.13:29500", "10.213.117.13/32")
GONE = ("gone=", "192.0.2.14:29500", "10.213.117.13/32")


@pytest.mark.parametrize(
    ("there", "keep", "words"),
    [
        ([TWO, THREE], False, ""),
        ([TWO], True, "peer three= endpoint 192.0.2.13:29500 allowed-ips 10.213.117.13/32"),
        # A moved end keeps its networks, and the other way round.
        ([TWO, ("three=", "192.0.2.99:29500", THREE[2])], True, "peer three= endpoint 192.0.2.13:29500"),
        ([TWO, ("three=", THREE[1], "(none)")], True, "peer three= allowed-ips 10.213.117.13/32"),
        ([TWO, THREE, GONE], True, ""),
        # Whoever goes does so first: the address may be another's by now.
        (
            [TWO, GONE],
            False,
            "peer gone= remove peer three= endpoint 192.0.2.13:29500 allowed-ips 10.213.117.13/32",
        ),
    ],
)
def test_only_what_differs_is_said(there: list[tuple[str, str, str]], keep: bool, words: str) -> None:
    found, changed, strangers = module.difference(module.known(dump(*there)), PEERS, keep)
    assert " ".join(found) == words
    assert changed == (["three="] if "three=" in words else [])
    assert strangers == (["gone="] if GONE in there else [])


def call(folder: Path, shown: str, *, fails: str = "", check: bool = False, **arguments: Any) -> tuple[Any, str]:
    """Run the module with a `wg` that shows this; return its result, and what `wg set` was told."""
    told = folder / "told"
    program = folder / "wg"
    (folder / "shown").write_text(shown)
    program.write_text(
        f'#!/bin/sh\n{fails}\ncase $1 in show) cat {folder}/shown ;; set) shift; echo "$*" >>{told} ;; esac\n'
    )
    program.chmod(0o755)
    values = {"interface": "ppdeploy0", "peers": PEERS, **arguments, "_ansible_check_mode": check}
    done = subprocess.run(
        [sys.executable, str(module.__file__)],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": values}),
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert SECRET not in done.stdout + done.stderr
    return json.loads(done.stdout), told.read_text() if told.exists() else ""


def test_it_changes_once_and_keeps_who_is_still_to_be_heard(tmp_path: Path) -> None:
    result, told = call(tmp_path, dump(TWO, GONE), keep=True)
    assert (result["changed"], result["set"], result["strangers"]) == (True, ["three="], ["gone="])
    assert told == "ppdeploy0 peer three= endpoint 192.0.2.13:29500 allowed-ips 10.213.117.13/32\n"
    result, again = call(tmp_path, dump(TWO, THREE, GONE), keep=True)
    assert (result["changed"], again) == (False, told)


def test_a_check_says_what_it_would_and_tells_wg_nothing(tmp_path: Path) -> None:
    result, told = call(tmp_path, dump(TWO, GONE), check=True)
    assert (result["changed"], told) == (True, "")


def test_a_tunnel_that_is_not_open_is_one_sentence(tmp_path: Path) -> None:
    result, _ = call(tmp_path, "", fails="echo 'Unable to access interface: No such device' >&2; exit 1")
    assert result["failed"]
    assert result["msg"] == (
        "wg show ppdeploy0 failed (Unable to access interface: No such device): see `systemctl status ppdeploy-tunnel`"
    )
