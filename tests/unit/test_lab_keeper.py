"""The two stand-alone programs of the lab: the keeper's parts, and the way in."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ppdeploy.lab import connect, keeper

LINK = {"outer": "vf-node1", "inner": "fab0", "bridge": "br-fab"}
INSIDE = ["nsenter", "--net=/proc/7/ns/net"]


def test_a_whole_link_is_on_its_bridge_without_a_limit() -> None:
    assert keeper.link_commands(LINK, {}, 7) == [
        ["ip", "link", "set", "vf-node1", "master", "br-fab"],
        ["tc", "qdisc", "replace", "dev", "vf-node1", "root", "noqueue"],
        [*INSIDE, "tc", "qdisc", "replace", "dev", "fab0", "root", "noqueue"],
        ["ip", "link", "set", "vf-node1", "up"],
    ]


def test_a_limit_holds_both_ways() -> None:
    limit = ["root", "tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"]
    commands = keeper.link_commands(LINK, {"rate": "1gbit", "cut": None}, 7)
    assert commands[1] == ["tc", "qdisc", "replace", "dev", "vf-node1", *limit]
    assert commands[2] == [*INSIDE, "tc", "qdisc", "replace", "dev", "fab0", *limit]


@pytest.mark.parametrize(("cut", "place", "end"), [("down", "master", "down"), ("silent", "nomaster", "up")])
def test_a_cut_takes_the_carrier_or_the_bridge(cut: str, place: str, end: str) -> None:
    commands = keeper.link_commands(LINK, {"cut": cut}, 7)
    assert place in commands[0]
    assert commands[-1][-1] == end


def test_a_command_enters_its_groups_and_keeps_its_words(tmp_path: Path) -> None:
    groups = [str(tmp_path / "a b"), str(tmp_path / "c")]
    words = ["x y", "--", "'", ""]
    show = [sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv[1:])", *words]
    with subprocess.Popen(keeper.joining(groups, show), stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=30)
    # The same process: what started the command knows the id of what runs.
    assert said == f"{process.pid} {words}\n"
    assert [Path(group).read_text() for group in groups] == ["0\n", "0\n"]


def test_a_command_does_not_run_outside_its_groups(tmp_path: Path) -> None:
    command = keeper.joining([str(tmp_path / "missing" / "cgroup.procs")], ["echo", "ran"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (125, "")


def test_a_process_that_has_ended_has_no_start_time_even_before_it_is_waited_for() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert keeper.start_time(process.pid) is not None
        process.kill()
        # Waits for its end without taking note of it: a zombie stays.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert keeper.start_time(process.pid) is None


def test_no_reader_sees_half_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert keeper.read_json(path) is None
    keeper.write_json(path, {"boots": 1})
    keeper.write_json(path, {"boots": 2})
    assert keeper.read_json(path) == {"boots": 2}
    assert list(tmp_path.iterdir()) == [path]


def start(*words: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-I", str(connect.__file__), *words]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_way_in_copies_both_ways_and_ends_with_the_connection(tmp_path: Path) -> None:
    group = tmp_path / "cgroup.procs"
    data = os.urandom(3_000_000)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            connection, _ = server.accept()
            with connection:
                while block := connection.recv(1 << 16):
                    connection.sendall(block)

        thread = threading.Thread(target=echo)
        thread.start()
        with start("--cgroup", str(group), "127.0.0.1", str(server.getsockname()[1])) as process:
            said, errors = process.communicate(data, timeout=30)
        thread.join()
    assert said == data
    assert (process.returncode, errors) == (0, b"")
    assert group.read_text() == "0"


def test_the_way_in_ends_when_the_host_does_though_nothing_was_typed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, start("127.0.0.1", str(server.getsockname()[1])) as process:
        server.accept()[0].close()
        assert process.wait(30) == 0


def test_the_way_in_waits_for_a_host_that_boots() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with start("--wait", "20", "127.0.0.1", str(port)) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        with socket.create_server(("127.0.0.1", port)) as server:
            server.accept()[0].close()
        assert process.wait(30) == 0


def test_the_way_in_says_where_it_does_not_lead() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with start("127.0.0.1", str(port)) as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"no connection to 127.0.0.1 port {port}" in errors.decode()
