"""The probes of a pair as Ansible calls them, between two loopback addresses: only reading, no listener left."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_pairs as module
from ppdeploy.plan.checks.system import CHECK_LISTENER
from ppdeploy.probes import Listener, NodeProbe, listener_from_module, probe_from_module

MODULE = Path(__file__).parents[2] / "plugins" / "modules" / "ppdeploy_pairs.py"
HERE, PEER, STRANGER = "127.0.0.1", "127.0.0.2", "127.0.0.3"


def call(action: str, address: str = HERE, **arguments: Any) -> dict[str, Any]:
    """Run the module in a process of its own and return what it printed."""
    values = {"action": action, "address": address, **arguments, "_ansible_check_mode": True}
    done = subprocess.run(
        [sys.executable, MODULE],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": values}),
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr + done.stdout
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if result.get("failed") else 0)
    return result


def listen(**more: Any) -> Listener:
    return listener_from_module("here", call("open", peers=[{"address": PEER}], **more)["listener"])


def look(listener: Listener, **more: Any) -> NodeProbe:
    peer = {"address": HERE, "token": listener.token, "ports": list(listener.ports), "master": listener.master, **more}
    return probe_from_module("peer", call("probe", PEER, interface="lo", mtu=1500, peers=[peer])["probe"])


def ask(port: int, source: str, word: bytes = b"hello\n") -> bytes:
    with socket.create_connection((HERE, port), 5, source_address=(source, 0)) as sock:
        sock.sendall(word)
        try:
            return sock.makefile("rb").read()
        except ConnectionResetError:
            return b""


def is_gone(listener: Listener, seconds: float = 5.0) -> bool:
    pid, _, since = listener.handle.partition(":")
    deadline = time.monotonic() + seconds
    while module.started(int(pid)) == since:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = listen()
    yield found
    call("close", handle=found.handle)
    assert is_gone(found)


def test_a_peer_sees_our_listener_and_the_listener_then_ends(listener: Listener) -> None:
    assert len(listener.ports) == 5
    probe = look(listener, send=0.2)
    way = probe.peers[HERE]
    assert [one.problem for one in way.connects] == [None] * 5
    assert way.clock is not None
    assert abs(way.clock.offset_s) < 0.5
    assert (way.bits_per_second or 0) > 1e7
    assert way.route is not None
    assert way.route.interface == "lo"
    # The loopback device has no ARP.
    assert way.macs is None
    assert is_gone(listener)


def test_only_a_peer_is_answered_and_it_is_told_the_time(listener: Listener) -> None:
    assert ask(listener.ports[0], STRANGER) == b""
    told = json.loads(ask(listener.ports[0], PEER))
    assert told["token"] == listener.token
    assert abs(told["time"] - time.time()) < 5


def test_another_listener_is_another_machine(listener: Listener) -> None:
    peer = {"address": HERE, "token": "of somebody else", "ports": list(listener.ports)}
    result = call("probe", PEER, interface="lo", mtu=1500, peers=[peer])["probe"]
    assert {one["problem"] for one in result["peers"][HERE]["connects"]} == {"another machine or program answers there"}


def test_a_stranger_cannot_end_the_listener(listener: Listener) -> None:
    ask(listener.ports[0], STRANGER, b"done\n")
    assert not is_gone(listener, 0.5)


def test_closing_ends_that_process_and_no_other(listener: Listener) -> None:
    pid = listener.handle.partition(":")[0]
    # The same number, of a process that started at another time.
    assert call("close", handle=f"{pid}:1")["closed"] is True
    assert not is_gone(listener, 0.1)
    assert call("close", handle=listener.handle)["closed"] is True
    assert is_gone(listener)
    assert call("close", handle=listener.handle)["closed"] is True


def test_a_listener_that_everyone_forgot_ends_by_itself() -> None:
    assert is_gone(listen(lifetime=1), 4)


def test_the_master_port_is_listened_on_where_it_is_free() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        found = listen(master_port=port)
        assert (found.master, found.master_problem) == (False, "Address already in use")
        call("close", handle=found.handle)
    found = listen(master_port=port)
    assert (found.master, found.ports[-1]) == (True, port)
    probe = look(found)
    assert [one.port for one in probe.peers[HERE].connects if one.master] == [port]
    assert is_gone(found)


def test_the_facts_can_tell_the_listener_by_its_name(listener: Listener) -> None:
    comm = Path("/proc", listener.handle.partition(":")[0], "comm")
    deadline = time.monotonic() + 5
    while comm.read_text(encoding="ascii") != f"{CHECK_LISTENER}\n" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert comm.read_text(encoding="ascii") == f"{CHECK_LISTENER}\n"


def test_a_port_that_nobody_listens_on(listener: Listener) -> None:
    call("close", handle=listener.handle)
    way = look(listener).peers[HERE]
    assert {one.problem for one in way.connects} == {"Connection refused"}
    assert way.clock is None


def test_wrong_arguments_are_one_sentence() -> None:
    assert call("open", "node1")["msg"] == "'node1' is not an IPv4 address: give the fabric address, not a name"
    assert call("probe")["msg"] == "interface is missing: name the fabric interface"
    assert "1 to 600" in call("open", lifetime=0)["msg"]
    # An address of nobody here.
    assert call("open", "192.0.2.9")["msg"] == "192.0.2.9: Cannot assign requested address"


def test_a_large_file_is_read_past_the_cache_where_that_works(tmp_path: Path) -> None:
    assert module.read_speed("") is None
    assert module.read_speed(str(tmp_path)) is None
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(4 << 20))
    problems = module.Problems()
    found = problems.guard("disk", module.read_speed, str(tmp_path))
    if found is None:
        # A file system without O_DIRECT says so, and the probe tells it.
        assert problems.found == [{"probe": "disk", "reason": "Invalid argument"}]
    else:
        assert found["path"] == str(folder / "model.safetensors")
        assert found["bytes_per_second"] > 0


def test_the_checksum_of_rfc_1071() -> None:
    assert module.checksum(bytes.fromhex("0001f203f4f5f6f7")) == 0x220D
    assert module.checksum(b"\x01") == 0xFEFF


def test_quantiles() -> None:
    assert module.quantile([], 0.5) is None
    assert module.quantile([1.0], 0.99) == 1.0
    assert module.quantile([float(n) for n in range(100)], 0.99) == 99.0
