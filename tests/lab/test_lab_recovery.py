"""A lab comes up after any crash, goes away whole, and keeps out of the way of other labs and of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppdeploy.errors import BlockedError, InputError
from ppdeploy.lab import Lab, Overlay, keeper, rootfs
from ppdeploy.lab.cgroups import parse_hierarchies
from ppdeploy.lab.state import default_name, labs_folder
from ppdeploy.paths import data_root

UP = """
import signal, sys
from ppdeploy.lab import Lab
# As on a terminal, also where the tests run in the background and SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
Lab(sys.argv[1]).up(1)
"""


def traces(name: str) -> list[str]:
    """Return all that this machine has of the lab `name`: processes, mounts, control groups, files."""
    mountinfo = Path("/proc/self/mountinfo").read_text()
    found = [line for line in mountinfo.splitlines() if name in line]
    for hierarchy in parse_hierarchies(mountinfo):
        # Unlike Path.glob it lets another group go while it looks.
        for folder, groups, files in os.walk(hierarchy.folder):
            found += [f"{folder}/{entry}" for entry in (*groups, *files) if name in entry]
    found += map(str, labs_folder().glob(f"{name}*"))
    for process in Path("/proc").glob("[0-9]*"):
        # The process that looks is no trace, nor is the one that started it.
        if process.name in {str(os.getpid()), str(os.getppid())}:
            continue
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"{labs_folder()}/{name}/" in command:
            found.append(f"process {process.name}: {command}")
    return found


def kernel_state() -> dict[str, str]:
    """Return what hosts share with this machine and must leave alone: kernel and memory settings, modules."""
    modules = Path("/proc/modules")
    # A kernel that has everything built in has no such list.
    loaded = [line.split()[0] for line in modules.read_text().splitlines()] if modules.exists() else []
    state = {"modules": " ".join(sorted(loaded))}
    for top in ("kernel", "vm", "fs"):
        for path in Path("/proc/sys", top).rglob("*"):
            # Counters and random values, no settings.
            if path.is_file() and not path.is_relative_to("/proc/sys/kernel/random"):
                try:
                    state[str(path)] = path.read_text(errors="replace")
                except OSError:
                    continue
    counters = ("-nr", "-state", "nr_open", "ns_last_pid", "sched_domain", "quota", "pty/nr", "stat_refresh")
    return {name: value for name, value in state.items() if not any(word in name for word in counters)}


@pytest.fixture
def second() -> Iterator[Lab]:
    """A second lab, down when the test begins; when it ends, nothing of it is left and this machine is as it was."""
    found = Lab(f"{default_name()}-two")
    found.down()
    before, offset = kernel_state(), time.time() - time.monotonic()
    yield found
    found.down()
    assert traces(found.name) == []
    assert kernel_state() == before
    assert abs(time.time() - time.monotonic() - offset) < 0.5


def start_up(lab: Lab) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", UP, lab.name], stderr=subprocess.PIPE)


def when(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until `condition` holds, which must be before `process` ends."""
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "it ended before the moment to stop it came"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_up_recovers_from_its_own_death_at_any_moment(second: Lab) -> None:
    host = second.folder / "nodes" / "node1"
    moments: list[Callable[[], bool]] = [
        second.folder.is_dir,
        (second.folder / "net").exists,
        (host / "store" / "layer" / "etc").exists,
        (host / "spec.json").exists,
        (host / "run.json").exists,
        lambda: "init" in (keeper.read_json(host / "run.json") or {}),
    ]
    for moment in moments:
        process = start_up(second)
        # What the last one left is still there when this one starts: first that must go.
        when(lambda: not second.folder.exists() or second.status().phase != "starting", process)
        when(moment, process)
        process.kill()
        _, said = process.communicate()
        assert process.returncode == -signal.SIGKILL, said.decode()
    second.up(1)
    assert second.exec_ssh("node1", ["systemctl", "is-system-running"]).stdout.strip() == "running"
    assert second.boots("node1") == 1
    inside = {link["ifname"] for link in json.loads(second.run_in_ns(["ip", "-json", "link"]).stdout)}
    assert inside == {"lo", "br-mgmt", "br-fab", "vb-node1", "vf-node1"}


def test_an_interrupted_up_leaves_nothing(second: Lab) -> None:
    process = start_up(second)
    when((second.folder / "nodes" / "node1" / "run.json").exists, process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in said.decode()
    # Its lock file stays for whoever waits for it; `down` removes that too.
    assert traces(second.name) == [str(labs_folder() / f"{second.name}.lock")]


def test_up_and_down_work_after_the_keepers_were_killed(second: Lab) -> None:
    second.up(1)
    run = keeper.read_json(second.folder / "nodes" / "node1" / "run.json")
    first = second.pid("node1")
    os.kill(run["keeper"]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while keeper.start_time(run["keeper"]["pid"]) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second.up(1)
    assert second.pid("node1") not in {None, first}
    assert second.boots("node1") == 2
    run = keeper.read_json(second.folder / "nodes" / "node1" / "run.json")
    os.kill(run["keeper"]["pid"], signal.SIGKILL)


def test_two_labs_have_the_same_addresses_and_never_meet(lab: Lab, second: Lab, tmp_path: Path) -> None:
    read, written = tmp_path / "read", tmp_path / "written"
    for folder in (read, written):
        folder.mkdir()
        (folder / "file").write_text("of the machine")
    umask = os.umask(0o077)
    try:
        second.up(1, binds={read: "/srv/read"}, overlays=[Overlay(written, "/srv/deep/written")], disk_gib=1)
    finally:
        os.umask(umask)
    assert second.management_address("node1") == lab.management_address("node1")
    machine = ["cat", "/etc/machine-id"]
    assert second.exec_ssh("node1", machine).stdout != lab.exec_ssh("node1", machine).stdout
    assert second.exec_ssh("node1", ["ping", "-c1", "-W1", "198.18.0.12"], check=False).returncode == 1

    # What a host is shown it may read, and what it writes reaches no folder of this machine.
    script = "cat /srv/read/file /srv/deep/written/file; echo of the host > /srv/deep/written/file; touch /srv/read/new"
    shown = second.exec_ssh("node1", ["sh", "-c", script], check=False)
    assert shown.stdout == "of the machine" * 2
    assert "Read-only file system" in shown.stderr
    second.kill("node1")
    second.boot("node1")
    assert second.exec_ssh("node1", ["cat", "/srv/deep/written/file"]).stdout == "of the host\n"
    assert (written / "file").read_text() == "of the machine"

    # No file of the host has its mode from this person's umask.
    modes = [
        "stat",
        "-c",
        "%a",
        "/",
        "/etc",
        "/etc/hosts",
        "/etc/systemd/network/10-fab0.network",
        "/srv/deep",
        "/root",
    ]
    assert second.exec_ssh("node1", modes).stdout.split() == ["755", "755", "644", "644", "755", "700"]

    # Its disk has the size that was asked for, and is full when that is.
    before = os.statvfs(labs_folder()).f_bavail
    full = second.exec_ssh("node1", ["fallocate", "-l", "1100M", "/root/file"], check=False)
    assert "No space left on device" in full.stderr
    assert os.statvfs(labs_folder()).f_bavail > before / 2


def test_down_leaves_a_strangers_process_alive_and_without_a_network(second: Lab) -> None:
    second.up(1)
    argv = ["nsenter", f"--net={second.namespace}", "sleep", "1000"]
    stranger = subprocess.Popen(argv)
    guest = subprocess.Popen([*second.ssh_command("node1"), "--", "sleep", "1000"])
    try:
        second.exec_ssh("node1", ["true"])
        second.down()
        assert guest.wait(10) == 255
        assert stranger.poll() is None
        inside = ["nsenter", f"--net=/proc/{stranger.pid}/ns/net", "ip", "-json", "link"]
        links = json.loads(subprocess.run(inside, capture_output=True, check=True).stdout)
        assert [link["ifname"] for link in links] == ["lo"]
    finally:
        for process in (stranger, guest):
            process.kill()
            process.wait()


def test_a_lab_of_another_checkout_is_refused_by_name(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = str(data_root())
    monkeypatch.setattr("ppdeploy.lab.core.data_root", lambda: tmp_path)
    other = Lab(lab.name)
    for verb in (other.down, lambda: other.up(2)):
        with pytest.raises(BlockedError, match=f"belongs to another checkout .{owner}."):
            verb()
    assert lab.pid("node1") is not None


def test_nothing_is_made_for_a_folder_that_is_not_there(second: Lab, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere"):
        second.up(1, binds={tmp_path / "nowhere": "/srv/x"})
    assert traces(second.name) == []


#: Hides this machine's cgroup mounts and shows the v2 hierarchy alone, as most machines have it; then runs a program.
ONLY_V2 = r"""
grep -o ' /sys/fs/cgroup[^ ]*' /proc/self/mountinfo | sort -r | while read -r point; do umount "$point"; done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec "$@"
"""
LIFE = """
import sys
from ppdeploy.lab import Lab
lab = Lab(sys.argv[1])
lab.up(2)
for node in lab.nodes:
    lab.exec_ssh(node, ["systemd-run", "--quiet", "--unit=twin", "sleep", "1000"])
lab.exec_ssh("node1", ["systemctl", "kill", "--signal=KILL", "twin"])
for node in lab.nodes:
    print(lab.exec_ssh(node, ["systemctl", "is-active", "twin"], check=False).stdout.strip())
lab.reboot("node1")
lab.kill("node2")
lab.boot("node2")
print(*(node.system for node in lab.status().nodes), lab.boots("node1"), lab.boots("node2"))
lab.down()
"""


def test_a_lab_lives_on_a_machine_with_cgroup_v2_alone(second: Lab) -> None:
    shell = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", ONLY_V2, "sh"]
    argv = [*shell, sys.executable, "-c", LIFE, second.name]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split() == ["failed", "active", "running", "running", "2", "2"], done.stderr
    assert traces(second.name) == []


BUILD = """\
#!/bin/sh
# The last argument but one is the folder to build in.
while [ $# -gt 2 ]; do shift; done
echo start >> "$LOG"
mkdir -p "$1/etc/apt/sources.list.d" "$1/etc/ssh"
sleep 1
echo end >> "$LOG"
"""


ENSURE = """
import sys
from pathlib import Path
from ppdeploy.lab import rootfs
rootfs.ensure(Path(sys.argv[1]), [], print)
"""


def test_a_build_that_outlives_its_controller_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, log, cache = tmp_path / "programs", tmp_path / "log", tmp_path / "cache"
    programs.mkdir()
    for name, text in {"mmdebstrap": BUILD, "systemctl": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(log))
    with subprocess.Popen([sys.executable, "-c", ENSURE, str(cache)]) as process:
        when(log.exists, process)
        process.kill()
    said: list[str] = []
    tree = rootfs.ensure(cache, [], said.append)
    assert log.read_text().split() == ["start", "end", "start", "end"]
    assert (tree / "etc/apt/sources.list").is_file()
    assert sorted(path.name for path in cache.iterdir()) == [tree.name, f"{tree.name}.lock"]
    assert rootfs.ensure(cache, [], said.append) == tree
    assert len(said) == 1
