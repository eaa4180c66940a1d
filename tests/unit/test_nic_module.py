"""The node's NIC module: what was there is remembered once and given back, and what a host refuses is no failure."""

from __future__ import annotations

import errno
import fcntl
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_nic as module

PORTS = "sysctl.net.ipv4.ip_local_reserved_ports"
RMEM = "sysctl.net.ipv4.tcp_rmem"
SYSCTL_FILE = "/etc/sysctl.d/99-ppdeploy.conf"

RINGS = [0x10, 4096, 0, 0, 4096, 512, 0, 0, 256]
EEE = [0x44, 0, 0, 0, 1, 1, 0, 0, 0, 0]
COALESCING = [0x0E, 125, *[0] * 21]


class Driver:
    """A NIC's driver that answers ethtool as a kernel does."""

    def __init__(self) -> None:
        self.answers = {0x10: list(RINGS), 0x44: list(EEE), 0x0E: list(COALESCING)}
        self.told: list[int] = []
        self.refuses: set[int] = set()

    def __call__(self, interface: str, numbers: list[int]) -> list[int]:
        assert interface == "fab0"
        command = numbers[0]
        if command in self.refuses or (command in self.answers and not self.answers[command]):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        if command in self.answers:
            assert len(numbers) == len(self.answers[command])
            return list(self.answers[command])
        self.told.append(command)
        self.answers[command - 1] = [command - 1, *numbers[1:]]
        return numbers


class Node:
    """A folder that stands for a host."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.warned: list[str] = []

    def put(self, path: str, text: str) -> None:
        place = self.at(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def get(self, path: str) -> str:
        return self.at(path).read_text(encoding="utf-8").strip()

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get(module.RECORD))
        return found

    def tree(self) -> dict[str, str]:
        """Everything on the host."""
        return {
            str(path.relative_to(self.root)): path.read_text(encoding="utf-8") if path.is_file() else "folder"
            for path in sorted(self.root.rglob("*"))
        }

    def act(self, *, check: bool = False, **params: Any) -> dict[str, Any]:
        defaults = {"action": "apply", "interface": "fab0", "settings": {}, "waits": [], "files": [], "peers": []}
        fake = type("Module", (), {"params": {**defaults, **params}, "check_mode": check, "warn": self.warned.append})
        return module.act(fake)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(module, "ROOT", str(tmp_path))
    found = Node(tmp_path)
    found.put("/proc/sys/net/ipv4/ip_local_reserved_ports", "\n")
    found.put("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")
    found.put("/sys/class/net/fab0/mtu", "1500\n")
    found.put("/sys/class/net/fab0/carrier", "1\n")
    for queue in ("rx-0", "rx-1"):
        found.put(f"/sys/class/net/fab0/queues/{queue}/rps_cpus", "00000000\n")
        found.put(f"/sys/class/net/fab0/queues/{queue}/rps_flow_cnt", "0\n")
    found.put("/sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "schedutil\n")
    found.put("/etc/hosts", "127.0.0.1 localhost\n")
    return found


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(module, "ethtool", found)
    return found


@pytest.fixture
def mtu_ioctl(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's side of setting an MTU; the list has what was set."""
    told: list[int] = []

    def ioctl(_socket: socket.socket, request: int, room: bytes) -> None:
        assert request == 0x8922
        name, mtu = struct.unpack_from("16si", room)
        assert name.rstrip(b"\0") == b"fab0"
        told.append(mtu)
        node.put("/sys/class/net/fab0/mtu", f"{mtu}\n")

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    return told


ALL = {
    "rings": "rx=4096 tx=4096",
    "eee": "off",
    "rx_usecs": "20",
    "rps": "rx-0=f rx-1=f",
    "rfs": "rx-0=2048 rx-1=2048",
    "governor": "policy0=performance",
    PORTS: "29500-29501",
    RMEM: "4096 131072 33554432",
}


@pytest.mark.usefixtures("driver")
def test_it_sets_everything_once_and_gives_everything_back(node: Node) -> None:
    before = node.tree()
    first = node.act(settings=ALL, files=[SYSCTL_FILE])
    assert (first["changed"], first["set"], first["refused"]) == (True, ALL, {})
    assert node.get("/proc/sys/net/ipv4/ip_local_reserved_ports") == "29500-29501"
    node.put(SYSCTL_FILE, "ours\n")
    node.put(module.SCRIPT, "ours\n")
    assert node.record["settings"][RMEM] == "4096 131072 6291456"
    second = node.act(settings=ALL, files=[SYSCTL_FILE])
    assert (second["changed"], second["set"]) == (False, {})
    node.at(module.SCRIPT).unlink()
    last = node.act(interface=None)
    assert last["changed"]
    # Byte for byte; the kernel prints its numbers its own way.
    node.put("/proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")
    assert node.tree() == before
    assert node.act(interface=None) == {
        "changed": False, "set": {}, "refused": {}, "diff": {"before": "", "after": ""},
    }  # fmt: skip


def test_a_driver_gets_back_what_it_had(node: Node, driver: Driver) -> None:
    node.act(settings={"rings": "rx=4096 tx=4096", "eee": "off", "rx_usecs": "20"})
    assert (driver.answers[0x10][5], driver.answers[0x10][8], driver.answers[0x44][5]) == (4096, 4096, 0)
    node.act()
    assert driver.answers == {0x10: RINGS, 0x44: EEE, 0x0E: COALESCING}


@pytest.mark.usefixtures("driver")
def test_check_mode_says_it_all_and_changes_nothing(node: Node) -> None:
    before = node.tree()
    said = node.act(check=True, settings=ALL, files=[SYSCTL_FILE])
    assert said["changed"]
    assert "rings = rx=512 tx=256\n" in said["diff"]["before"]
    assert "rings = rx=4096 tx=4096\n" in said["diff"]["after"]
    assert node.tree() == before
    node.act(settings=ALL, files=[SYSCTL_FILE])
    tuned = node.tree()
    given_back = node.act(check=True)
    assert f"file {SYSCTL_FILE} = none\n" in given_back["diff"]["after"]
    assert "eee = on\n" in given_back["diff"]["after"]
    assert node.tree() == tuned


def test_what_the_host_does_not_have_is_skipped_with_a_warning(node: Node, driver: Driver) -> None:
    driver.answers[0x10] = []
    driver.refuses = {0x45}
    done = node.act(settings={"rings": "rx=1 tx=1", "eee": "off", "sysctl.net.core.rmem_max": "1", PORTS: "1"})
    assert done["set"] == {PORTS: "1"}
    assert done["refused"] == {
        "rings": "the host does not have it",
        "sysctl.net.core.rmem_max": "the host does not have it",
        "eee": "Operation not supported",
    }
    assert len(node.warned) == 3
    again = node.act(settings={"rings": "rx=1 tx=1", "eee": "off", "sysctl.net.core.rmem_max": "1", PORTS: "1"})
    assert not again["changed"]


def test_what_a_driver_rounds_is_told(node: Node, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounding(interface: str, numbers: list[int]) -> list[int]:
        return driver(interface, [numbers[0], *numbers[1:5], 2048, *numbers[6:]] if numbers[0] == 0x11 else numbers)

    monkeypatch.setattr(module, "ethtool", rounding)
    assert node.act(settings={"rings": "rx=4000 tx=256"})["refused"] == {"rings": "it is rx=2048 tx=256 afterwards"}


@pytest.mark.usefixtures("driver")
def test_only_what_is_no_longer_wanted_is_given_back(node: Node) -> None:
    node.act(settings={PORTS: "29500-29501", "eee": "off"})
    done = node.act(settings={PORTS: "29500-29501"})
    assert done["set"] == {"eee": "on"}
    assert node.record["settings"] == {PORTS: ""}


@pytest.mark.usefixtures("driver")
def test_what_was_there_before_is_written_once(node: Node) -> None:
    node.act(settings={RMEM: "4096 131072 8388608"})
    node.act(settings={RMEM: "4096 131072 16777216", PORTS: "29500"})
    assert node.record["settings"] == {RMEM: "4096 131072 6291456", PORTS: ""}


@pytest.mark.usefixtures("driver")
def test_what_waits_is_remembered_and_not_set(node: Node) -> None:
    done = node.act(settings={"eee": "off", PORTS: "29500"}, waits=["eee"])
    assert done["set"] == {PORTS: "29500"}
    assert node.record["settings"]["eee"] == "on"


def test_another_nic_gets_its_own_settings_back_first(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rps_cpus", "rps_flow_cnt"):
        node.put(f"/sys/class/net/fab1/queues/rx-0/{name}", "0\n")
    monkeypatch.setattr(module, "ethtool", Driver())
    node.act(settings={"rps": "rx-0=f rx-1=f"})
    node.act(interface="fab1", settings={"rps": "rx-0=3"})
    assert node.get("/sys/class/net/fab0/queues/rx-0/rps_cpus") == "00000000"
    assert node.get("/sys/class/net/fab1/queues/rx-0/rps_cpus") == "3"
    assert (node.record["interface"], node.record["settings"]) == ("fab1", {"rps": "rx-0=0"})


@pytest.mark.usefixtures("driver")
def test_a_file_that_lay_there_comes_back_with_its_mode(node: Node) -> None:
    node.put(SYSCTL_FILE, "somebody's\n")
    node.at(SYSCTL_FILE).chmod(0o600)
    node.act(settings={PORTS: "29500"}, files=[SYSCTL_FILE])
    node.put(SYSCTL_FILE, "ours\n")
    node.act()
    assert node.get(SYSCTL_FILE) == "somebody's"
    assert node.at(SYSCTL_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("driver")
def test_a_nic_that_got_another_name_leaves_nothing_behind(node: Node) -> None:
    node.act(settings={"rps": "rx-0=f rx-1=f", PORTS: "29500"})
    # The next boot: another name, and all the kernel's own values.
    node.at("/sys/class/net/fab0").rename(node.at("/sys/class/net/fab9"))
    for queue in ("rx-0", "rx-1"):
        node.put(f"/sys/class/net/fab9/queues/{queue}/rps_cpus", "00000000\n")
    told = node.act(interface="fab9", settings={"rps": "rx-0=3 rx-1=3", PORTS: "29500"})
    assert told["set"] == {"rps": "rx-0=3 rx-1=3"}
    assert node.record["settings"] == {"rps": "rx-0=00000000 rx-1=00000000", PORTS: ""}
    assert node.warned == ["fab0 is not there any more: nothing is given back to it"]
    node.act(interface=None)
    assert node.get("/sys/class/net/fab9/queues/rx-0/rps_cpus") == "00000000"
    assert not node.at(module.RECORD).exists()


@pytest.mark.usefixtures("driver")
def test_a_nic_that_is_gone_does_not_keep_the_rest_from_being_given_back(node: Node) -> None:
    node.act(settings={"rps": "rx-0=f rx-1=f", PORTS: "29500"})
    node.at("/sys/class/net/fab0").rename(node.at("/sys/class/net/fab9"))
    assert node.act(interface=None)["refused"] == {}
    assert node.get("/proc/sys/net/ipv4/ip_local_reserved_ports") == ""
    assert not node.at(module.RECORD).exists()


def test_what_the_last_nic_does_not_take_back_says_nothing_of_the_next_one(
    node: Node, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put("/sys/class/net/fab1/mtu", "1500\n")
    node.act(settings={"rings": "rx=4096 tx=4096"})
    driver.refuses.add(0x11)
    other = Driver()
    monkeypatch.setattr(module, "ethtool", lambda nic, numbers: (driver if nic == "fab0" else other)("fab0", numbers))
    told = node.act(interface="fab1", settings={"rings": "rx=2048 tx=2048"})
    assert (told["set"], told["refused"]) == ({"rings": "rx=2048 tx=2048"}, {})
    assert node.record["settings"] == {"rings": "rx=512 tx=256"}
    assert node.warned == ["fab0: rings is left as it is: Operation not supported"]


UNIT_FILE = "/etc/systemd/system/ppdeploy-nic.service"
DROP_IN = "/etc/systemd/network/10-lan.network.d/90-ppdeploy.conf"


@pytest.fixture
def systemctl(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What systemd is told; as the real one it does not know a unit without a file."""
    told: list[str] = []

    def run(*argv: str) -> str:
        if argv[1] == "disable" and not node.at(UNIT_FILE).exists():
            raise module.RefusedError(f"systemctl: Failed to disable unit: Unit file {argv[-1]} does not exist.")
        told.append(" ".join(argv[:2]))
        return ""

    monkeypatch.setattr(module, "run", run)
    return told


@pytest.mark.usefixtures("driver")
def test_a_run_that_ended_before_the_files_were_written_is_taken_back(node: Node, systemctl: list[str]) -> None:
    before = node.tree()
    node.act(settings={PORTS: "29500"}, files=[SYSCTL_FILE, UNIT_FILE])
    node.act()
    assert node.tree() == before
    assert systemctl == []


@pytest.mark.usefixtures("driver")
def test_files_of_ours_go_although_the_record_is_lost(node: Node, systemctl: list[str]) -> None:
    node.put(SYSCTL_FILE, "# Written by ppdeploy; changes are overwritten by the next apply.\n")
    node.put(DROP_IN, "# Written by ppdeploy; changes are overwritten by the next apply.\n")
    node.put(UNIT_FILE, "# Written by ppdeploy; changes are overwritten by the next apply.\n")
    node.put(module.CONFIG, "{}\n")
    node.put("/etc/network/if-up.d/ppdeploy-nic", "somebody's\n")
    node.act(interface=None)
    assert not [path for path in (SYSCTL_FILE, DROP_IN, UNIT_FILE, module.CONFIG) if node.at(path).exists()]
    assert node.get("/etc/network/if-up.d/ppdeploy-nic") == "somebody's"
    assert systemctl == ["systemctl disable", "systemctl daemon-reload"]
    assert "is lost" in node.warned[0]
    assert not node.at(module.RECORD).exists()


@pytest.mark.usefixtures("driver", "systemctl")
def test_a_file_of_ours_whose_record_was_lost_is_nobodys(node: Node) -> None:
    node.put(SYSCTL_FILE, "# Written by ppdeploy; changes are overwritten by the next apply.\n")
    node.act(settings={PORTS: "29500"}, files=[SYSCTL_FILE])
    assert node.record["files"] == {SYSCTL_FILE: None}
    node.act()
    assert not node.at(SYSCTL_FILE).exists()


# ---- the trial of an MTU ---------------------------------------------------------------------------------------------


def test_an_mtu_that_does_not_pass_is_given_back_without_a_trace(node: Node, mtu_ioctl: list[int]) -> None:
    before = node.tree()
    assert node.act(action="try_mtu", mtu=9000) == {"changed": True, "was": "1500"}
    assert node.act(action="give_back") == {"changed": True}
    assert mtu_ioctl == [9000, 1500]
    assert node.tree() == before
    assert node.act(action="give_back") == {"changed": False}


def test_an_mtu_that_passes_is_kept_and_restored_later(node: Node, mtu_ioctl: list[int]) -> None:
    node.act(action="try_mtu", mtu=9000)
    assert node.act(settings={"mtu": "9000"})["changed"] is False
    assert node.record["settings"] == {"mtu": "1500"}
    # Nothing is on trial any more.
    assert node.act(action="give_back") == {"changed": False}
    assert node.act(action="try_mtu", mtu=9000) == {"changed": False, "was": ""}
    node.act()
    assert mtu_ioctl == [9000, 1500]


def test_a_trial_goes_back_to_the_last_mtu_and_not_to_the_first(node: Node, mtu_ioctl: list[int]) -> None:
    node.act(settings={"mtu": "4000"})
    node.act(action="try_mtu", mtu=9000)
    # The run ended before it could tell; the next one tries again.
    assert node.act(action="try_mtu", mtu=9000)["was"] == "4000"
    node.act(action="give_back")
    assert mtu_ioctl == [4000, 9000, 4000]
    assert node.record["settings"] == {"mtu": "1500"}


def test_a_trial_in_check_mode_changes_nothing(node: Node, mtu_ioctl: list[int]) -> None:
    assert node.act(check=True, action="try_mtu", mtu=9000)["changed"] is True
    assert (mtu_ioctl, node.at(module.RECORD).exists()) == ([], False)


def test_an_mtu_that_a_nic_refuses_is_told_and_ends_no_play(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def ioctl(*_: object) -> None:
        raise OSError(errno.ERANGE, "Numerical result out of range")

    before = node.tree()
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "ioctl", ioctl)
        told = node.act(action="try_mtu", mtu=9000)
    assert told == {"changed": False, "was": "", "refused": "Numerical result out of range"}
    monkeypatch.setattr(fcntl, "ioctl", lambda *_: None)
    node.act(action="give_back")
    assert node.tree() == before


@pytest.mark.usefixtures("driver")
def test_a_trial_on_another_nic_takes_nothing_over_from_the_last_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.act(settings={"rps": "rx-0=f rx-1=f"})
    node.put("/sys/class/net/fab1/mtu", "1400\n")

    def ioctl(_socket: socket.socket, _request: int, room: bytes) -> None:
        node.put("/sys/class/net/fab1/mtu", f"{struct.unpack_from('16si', room)[1]}\n")

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    node.act(action="try_mtu", interface="fab1", mtu=9000)
    assert (node.record["interface"], node.record["settings"]) == ("fab1", {"mtu": "1400"})
    assert node.get("/sys/class/net/fab0/queues/rx-0/rps_cpus") == "00000000"


def needs_raw_sockets() -> bool:
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    except PermissionError:
        return False
    return True


@pytest.mark.skipif(not needs_raw_sockets(), reason="only root sends pings that may not be split")
def test_a_ping_of_any_size_comes_back_over_loopback_and_none_comes_from_nobody() -> None:
    for size in (84, 1501, 9000):
        assert module.echoes("127.0.0.1", "127.0.0.1", size)
    # An address of the documentation (RFC 5737): nobody has it.
    assert module.echoes("127.0.0.1", "192.0.2.1", 84) is False


def answers(sizes: set[int]) -> Callable[[str, str, int], bool]:
    return lambda _source, _peer, size: size in sizes


def test_a_peer_is_told_apart_that_answers_small_packets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(module, "echoes", answers({84}))
    said = module.silent_peers("192.0.2.11", ["192.0.2.12"], 9000)
    assert said == {"192.0.2.12": "packets of 9000 bytes do not pass, small ones do"}
    monkeypatch.setattr(module, "echoes", answers({84, 9000}))
    assert module.silent_peers("192.0.2.11", ["192.0.2.12"], 9000) == {}
    monkeypatch.setattr(module, "echoes", answers(set()))
    assert "answers no ping at all" in module.why_silent("192.0.2.11", "192.0.2.12", 9000)


# ---- at boot ---------------------------------------------------------------------------------------------------------


def test_at_boot_it_sets_what_its_configuration_says(node: Node, driver: Driver, mtu_ioctl: list[int]) -> None:
    driver.answers[0x10] = []
    settings = {"eee": "off", "mtu": "9000", "rings": "rx=1 tx=1", "governor": "policy0=performance"}
    node.put(module.CONFIG, json.dumps({"interface": "fab0", "settings": settings}))
    assert list(module.boot()) == [
        "mtu is set to 9000",
        "rings is not set to rx=1 tx=1: Operation not supported",
        "eee is set to off",
        "governor is set to policy0=performance",
    ]
    assert mtu_ioctl == [9000]
    assert list(module.boot()) == ["rings is not set to rx=1 tx=1: Operation not supported"]


def test_at_boot_it_needs_no_ansible(tmp_path: Path) -> None:
    """The unit runs the file with the host's own Python."""
    program = Path(module.__file__)
    code = (
        f"import sys; sys.modules['ansible'] = None; sys.path.insert(0, {str(program.parent)!r}); import ppdeploy_nic"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# ---- as Ansible runs it ----------------------------------------------------------------------------------------------


def run_module(**params: Any) -> tuple[int, dict[str, Any]]:
    arguments = {"ANSIBLE_MODULE_ARGS": params}
    done = subprocess.run(
        [sys.executable, module.__file__], input=json.dumps(arguments), capture_output=True, text=True, check=False
    )
    return done.returncode, json.loads(done.stdout)


def test_ansible_gets_a_sentence_for_an_interface_that_is_not_there() -> None:
    code, said = run_module(action="try_mtu", interface="nonesuch0", mtu=9000)
    assert (code, said["refused"]) == (0, "there is no interface nonesuch0")
    code, said = run_module(action="probe", interface="lo")
    assert (code, "mtu" in said["msg"]) == (1, True)


def test_a_setting_that_nobody_knows_is_refused(node: Node) -> None:
    assert node.act(settings={"warp": "9"})["refused"] == {"warp": "the host does not have it"}


def test_real_kernels_are_asked_in_their_own_form() -> None:
    """The loopback interface has neither rings nor EEE: the kernel says so, and takes it for no other request."""
    for numbers in ([0x10, *[0] * 8], [0x44, *[0] * 9], [0x0E, *[0] * 22]):
        with pytest.raises(OSError, match="Operation not supported"):
            module.ethtool("lo", numbers)
