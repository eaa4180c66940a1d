"""The node module's readers, on what real tools and kernels printed and on what broken ones print.

facts_data: h200_* from a machine with an NVIDIA H200 (driver 580); the ip, sys_net and proc_net files from
Linux 6.18 with iproute2 6.1, in a network namespace with a bridge, a veth pair, a macvlan, a vxlan and a tun;
systemctl_* from a Debian 12 host of the lab.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_facts as module
from plugins.modules import ppdeploy_weights as weights

DATA = Path(__file__).parent / "facts_data"


def recorded(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


def said(out: str, err: str = "", status: int = 0) -> module.Command:
    """A command that has already run and said this."""
    command = module.Command("true")
    command.finish()
    command.name = "tool"
    command.done = (status, out, err)
    return command


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a tree (path -> text or link) where the module reads /sys, /proc and /etc; return its folder."""
    for name in ("SYS", "PROC", "ETC", "OPT", "UNITS", "LIBRARIES"):
        root = tmp_path / name.lower()
        root.mkdir()
        monkeypatch.setattr(module, name, str(root))
    monkeypatch.setattr(module, "CONSUMED_TICKET", str(tmp_path / "consumed.json"))

    def put(tree: dict[str, Any]) -> Path:
        for path, content in tree.items():
            place = tmp_path / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                place.write_text(content, encoding="utf-8")
            elif "link" in content:
                place.symlink_to(content["link"])
            else:
                place.mkdir(exist_ok=True)
        return tmp_path

    return put


# ---- GPUs


def read_gpus(out: str, status: int = 0, processes: str = "") -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    problems = module.Problems()
    found = problems.guard("gpus", module.gpus, problems, said(out, status=status), said(processes), 64000)
    return found or [], problems.found


def test_a_real_gpu_is_read_whole() -> None:
    found, problems = read_gpus(recorded("h200_gpus.csv"), processes=recorded("h200_processes.csv"))
    assert problems == []
    assert found == [
        {
            "index": 0,
            "uuid": "GPU-3da7b47d-9aa8-a526-8113-0e1a42e79ec8",
            "name": "NVIDIA H200",
            "memory_total_mib": 143771,
            "memory_shared": False,
            "memory_used_mib": 1551,
            "driver_version": "580.159.04",
            "compute_capability": "9.0",
            "pci_address": "00000000:00:06.0",
            "pcie_gen_current": 5,
            "pcie_gen_max": 5,
            "pcie_width_current": 16,
            "pcie_width_max": 16,
            "ecc_enabled": True,
            "ecc_uncorrected": 0,
            "persistence_mode": True,
            "mig_enabled": False,
            "processes": [{"pid": 415, "name": "python3", "memory_mib": 1542, "unit": module.unit_of(415)}],
        }
    ]


def test_what_a_consumer_card_lacks_is_null() -> None:
    line = recorded("h200_gpus.csv").replace("Enabled, 0, Enabled, Disabled", "[N/A], [N/A], Disabled, [N/A]")
    card = read_gpus(line)[0][0]
    assert (card["ecc_enabled"], card["ecc_uncorrected"], card["mig_enabled"]) == (None, None, None)
    assert card["persistence_mode"] is False


def test_a_card_without_memory_of_its_own_has_the_hosts() -> None:
    card = read_gpus(recorded("h200_gpus.csv").replace("143771, 1551", "[N/A], [N/A]"))[0][0]
    assert (card["memory_shared"], card["memory_total_mib"], card["memory_used_mib"]) == (True, 64000, None)


def test_a_comma_in_a_programs_name_stays_in_the_name() -> None:
    rows = module.gpu_rows("GPU-1, 7, 100, /opt/a, b/python3\n", module.PROCESS_FIELDS)
    assert rows[0]["process_name"] == "/opt/a, b/python3"


def test_a_field_that_the_driver_does_not_know_costs_only_that_field(monkeypatch: pytest.MonkeyPatch) -> None:
    complaint = recorded("nvidia_smi_unknown_field.txt").replace("nope", "compute_cap")
    asked: list[tuple[str, ...]] = []

    def older(fields: tuple[str, ...]) -> module.Command:
        asked.append(fields)
        return said(recorded("h200_gpus.csv").replace(", 9.0,", ","))

    monkeypatch.setattr(module, "query_gpus", older)
    found, problems = read_gpus(complaint, status=2)
    assert asked == [tuple(f for f in module.GPU_FIELDS if f != "compute_cap")]
    assert (found[0]["compute_capability"], found[0]["name"]) == (None, "NVIDIA H200")
    assert [p["fact"] for p in problems] == ["gpus.compute_cap"]


def test_a_damaged_inforom_is_a_problem_beside_the_card() -> None:
    text = recorded("h200_gpus.csv") + "WARNING: infoROM is corrupted at gpu 0000:00:06.0\n"
    found, problems = read_gpus(text, status=14)
    assert [card["name"] for card in found] == ["NVIDIA H200"]
    assert problems == [{"fact": "gpus.inforom", "reason": "infoROM is corrupted at gpu 0000:00:06.0"}]


@pytest.mark.parametrize(
    ("out", "status", "reason"),
    [
        ("No devices were found\n", 6, "tool failed with exit status 6: No devices were found"),
        (
            "Failed to initialize NVML: Driver/library version mismatch\n",
            18,
            "tool failed with exit status 18: Failed to initialize NVML: Driver/library version mismatch",
        ),
        ("0, [N/A], " + "0, " * 13 + "H200\n", 0, "nvidia-smi does not say the uuid of a GPU"),
        ("0, GPU-1\n", 0, "nvidia-smi printed a line that is not of the table: 0, GPU-1"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_reason_and_no_gpu(out: str, status: int, reason: str) -> None:
    assert read_gpus(out, status) == ([], [{"fact": "gpus", "reason": reason}])


def test_cards_are_seen_on_the_bus_without_their_driver(plant: Any) -> None:
    plant(json.loads(recorded("h200_tree.json")))
    nvidia = {
        "address": "0000:00:06.0",
        "vendor": "nvidia",
        "vendor_id": "0x10de",
        "device_id": "0x2335",
        "driver": "nvidia",
    }
    assert module.pci_accelerators() == [nvidia]
    plant(
        {
            "/sys/bus/pci/devices/0000:03:00.0/class": "0x030000\n",
            "/sys/bus/pci/devices/0000:03:00.0/vendor": "0x1002\n",
            "/sys/bus/pci/devices/0000:03:00.0/device": "0x744c\n",
            "/sys/bus/pci/devices/0000:04:00.0/class": "0x030000\n",
            "/sys/bus/pci/devices/0000:04:00.0/vendor": "0x1a03\n",
        }
    )
    amd = module.pci_accelerators()[1]
    assert (amd["vendor"], amd["driver"]) == ("amd", None)
    assert len(module.pci_accelerators()) == 2, "a server's ASPEED console is no accelerator"


# ---- network


@pytest.fixture
def interfaces(plant: Any) -> dict[str, dict[str, Any]]:
    plant(json.loads(recorded("sys_net.json")))
    problems = module.Problems()
    found = module.nics(problems, said(recorded("ip_address.json")))
    assert problems.found == []
    return {nic["name"]: nic for nic in found}


@pytest.mark.parametrize(
    ("name", "kind", "parent", "master"),
    [
        ("lo", "loopback", None, None),
        ("br0", "bridge", None, None),
        ("docker0", "bridge", None, None),
        ("host0", "veth", None, None),
        ("vb-node1", "veth", None, "br0"),
        ("mv0", "macvlan", "host0", None),
        ("vx0", "tunnel", "host0", None),
        ("tun0", "tun", None, None),
    ],
)
def test_kinds_of_software_interfaces(
    interfaces: dict[str, dict[str, Any]], name: str, kind: str, parent: str | None, master: str | None
) -> None:
    nic = interfaces[name]
    assert (nic["kind"], nic["parent"], nic["master"]) == (kind, parent, master)
    assert nic["virtual"]
    assert not nic["wireless"]
    assert not nic["usb"]


def test_a_nic_has_addresses_speed_and_state(interfaces: dict[str, dict[str, Any]]) -> None:
    host0 = interfaces["host0"]
    assert {"address": "198.18.0.11", "prefix": 24, "scope": "global"} in host0["addresses"]
    assert {a["scope"] for a in host0["addresses"]} == {"global", "link"}
    assert (host0["mtu"], host0["speed_mbit"], host0["duplex"]) == (1500, 10000, "full")
    assert (host0["operstate"], host0["carrier"]) == ("up", True)
    assert set(host0["counters"]) >= {"rx_crc_errors", "rx_dropped"}


def test_a_nic_that_is_down_says_neither_speed_nor_carrier(interfaces: dict[str, dict[str, Any]]) -> None:
    docker0 = interfaces["docker0"]
    assert (docker0["operstate"], docker0["carrier"], docker0["speed_mbit"]) == ("down", None, None)


def test_a_point_to_point_address_is_the_nodes_own(interfaces: dict[str, dict[str, Any]]) -> None:
    assert interfaces["tun0"]["addresses"] == [{"address": "198.51.100.1", "prefix": 32, "scope": "global"}]


@pytest.mark.parametrize("kinds_known", [True, False])
def test_without_ip_the_interfaces_remain(plant: Any, kinds_known: bool) -> None:
    plant(json.loads(recorded("sys_net.json")))
    problems = module.Problems()
    command = said(recorded("ip_address.json") if kinds_known else "", "boom", 0 if kinds_known else 1)
    found = {nic["name"]: nic for nic in module.nics(problems, command)}
    assert len(found) == 8
    if not kinds_known:
        assert problems.found == [{"fact": "nics.addresses", "reason": "tool failed with exit status 1: boom"}]
        assert (found["vx0"]["kind"], found["tun0"]["kind"], found["host0"]["addresses"]) == (
            "tunnel",
            "tun",
            [],
        )


def hardware(name: str, bus: str, **files: Any) -> dict[str, Any]:
    """A network device of a bus, as the kernel lays it out."""
    base = f"/sys/devices/{bus}/net/{name}"
    text = {
        "ifindex": "7",
        "address": "02:00:5e:00:53:07",
        "mtu": "1500",
        "operstate": "up",
        "type": "1",
        **files,
    }
    tree: dict[str, Any] = {f"{base}/{key}": value for key, value in text.items()}
    tree[f"/sys/class/net/{name}"] = {"link": f"../../devices/{bus}/net/{name}"}
    return tree


def test_hardware_is_told_by_its_bus_and_its_kind(plant: Any) -> None:
    plant(hardware("eno1", "pci0000:00/0000:00:1c.0/0000:02:00.0", speed="2500", duplex="full", carrier="1"))
    plant(hardware("enx1", "pci0000:00/0000:00:14.0/usb2/2-1/2-1:1.0", speed="4294967295", duplex="unknown"))
    plant(hardware("wlp3s0", "pci0000:00/0000:00:1d.0/0000:03:00.0", wireless={"dir": True}, speed="-1"))
    plant(hardware("ib0", "pci0000:00/0000:00:01.0/0000:01:00.0", type="32"))
    plant(hardware("broken0", "pci0000:00/0000:00:02.0", mtu="many"))
    problems = module.Problems()
    nics = {nic["name"]: nic for nic in module.nics(problems, said("[]"))}
    assert {n: (v["kind"], v["virtual"], v["wireless"], v["usb"], v["speed_mbit"]) for n, v in nics.items()} == {
        "eno1": ("ethernet", False, False, False, 2500),
        "enx1": ("ethernet", False, False, True, None),
        "wlp3s0": ("ethernet", False, True, False, None),
        "ib0": ("infiniband", False, False, False, None),
    }
    assert [p["fact"] for p in problems.found] == ["nics.broken0"]


def test_default_routes_are_read_without_a_program() -> None:
    assert module.default_routes(recorded("proc_net_route"), recorded("proc_net_ipv6_route")) == [
        {"family": 4, "interface": "eth0", "gateway": "192.0.2.1", "metric": 0},
        {"family": 6, "interface": "eth0", "gateway": "fd00::1", "metric": 1024},
    ]


def test_the_default_route_in_use_comes_first() -> None:
    first = recorded("proc_net_route").splitlines()
    other = "wg0\t00000000\t00000000\t0001\t0\t0\t50\t00000000\t0\t0\t0"
    down = "eth1\t00000000\t010200C0\t0000\t0\t0\t0\t00000000\t0\t0\t0"
    reject = "*\t00000000\t00000000\t0201\t0\t0\t0\t00000000\t0\t0\t0"
    found = module.default_routes("\n".join([first[0], other, down, reject, *first[1:]]), "")
    assert [(r["interface"], r["gateway"]) for r in found] == [("eth0", "192.0.2.1"), ("wg0", None)]


def test_routes_of_a_batch_go_to_their_peers() -> None:
    found, failed = module.batch_answers(recorded("ip_route_batch.out"), recorded("ip_route_batch.err"))
    assert {peer: route["dev"] for peer, route in found.items()} == {
        "198.18.0.12": "host0",
        "10.9.9.9": "host0",
        "127.0.0.1": "lo",
        "172.17.0.9": "host0",
    }
    assert failed == {3: "Network is unreachable"}


def test_half_an_answer_of_ip_is_no_traceback() -> None:
    assert module.batch_answers('[{"dst": "198.18.0.12", "dev"', "") == ({}, {})
    assert module.batch_answers('[ [{"dst": "198.18.0.12", "dev": "a"}]', "")[0]["198.18.0.12"]["dev"] == "a"


def test_a_peer_without_route_has_the_kernels_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = said(recorded("ip_route_batch.out"), recorded("ip_route_batch.err"), 1)
    neighbours = said('[{"dst": "198.18.0.12", "dev": "host0", "state": ["FAILED"]}]')
    monkeypatch.setattr(module, "Command", lambda *argv, **_options: routes if "-batch" in argv else neighbours)
    query = module.PeerQuery(["198.18.0.12", "10.9.9.9", "2001:db8::1"])
    problems = module.Problems()
    near, far, none = query.answer(problems)
    assert (near["interface"], near["gateway"], near["neighbour"]) == ("host0", None, "FAILED")
    assert (far["interface"], far["gateway"], far["source"]) == ("host0", "198.18.0.1", "198.18.0.11")
    assert (none["interface"], none["problem"]) == (None, "Network is unreachable")
    assert problems.found == []


# ---- processes


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/ppdeploy-rank@tiny.service\n", "ppdeploy-rank@tiny.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-7.scope\n", "run-7.scope"),
        ("12:memory:/lab-node1\n1:name=systemd:/lab-node1/system.slice/ssh.service\n0::/x\n", "ssh.service"),
        ("1:name=systemd:/\n0::/system.slice/a.service\n", None),
        ("0::/docker/0123abcd\n", "/docker/0123abcd"),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_the_unit_of_a_process(plant: Any, text: str, unit: str | None) -> None:
    plant({"/proc/7/cgroup": text})
    assert module.unit_of(7) == unit


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_listener_is_named_with_its_owner(family: socket.AddressFamily) -> None:
    address = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        server.listen()
        port = server.getsockname()[1]
        problems = module.Problems()
        (found,) = module.listeners(problems, {port})
    assert (found["port"], found["address"], found["pid"]) == (port, address, os.getpid())
    assert found["process"] == Path("/proc/self/comm").read_text(encoding="utf-8").strip()
    assert found["command"] == Path("/proc/self/cmdline").read_text(encoding="utf-8").split("\0")[0].split()[0]
    assert problems.found == []


def test_a_title_over_the_command_line_gives_only_its_first_word(plant: Any) -> None:
    table = "  sl\n 0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1 0\n"
    title = "sshd: /usr/sbin/sshd -D [listener] 0 of 10-100 startups\0"
    plant({"/proc/net/tcp": table, "/proc/7/comm": "sshd\n", "/proc/7/cmdline": title})
    plant({"/proc/7/fd/3": {"link": "socket:[4711]"}, "/proc/7/cgroup": "0::/system.slice/ssh.service\n"})
    assert module.listeners(module.Problems(), {8000}) == [
        {
            "port": 8000,
            "address": "127.0.0.1",
            "pid": 7,
            "process": "sshd",
            "command": "sshd",
            "unit": "ssh.service",
        }
    ]


def test_a_listener_of_nobody_seen_is_a_problem(plant: Any) -> None:
    plant({"/proc/net/tcp6": f"  sl\n 0: {'0' * 32}:1F40 {'0' * 32}:0000 0A 0:0 00:0 0 0 0 4711 1 0\n"})
    problems = module.Problems()
    (found,) = module.listeners(problems, {8000})
    assert (found["address"], found["pid"], found["command"]) == ("::", None, None)
    assert [p["fact"] for p in problems.found] == ["listeners.pid"]


def test_a_connected_socket_is_no_listener() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as client:
        assert module.listeners(module.Problems(), {client.getsockname()[1]}) == []


# ---- host


def test_a_tool_that_hangs_is_ended_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMAND_TIMEOUT", 0.3)
    command = module.Command("sleep", "30")
    with pytest.raises(module.UnreadableError, match="sleep gave no answer"):
        command.output()
    assert command.process is not None
    assert command.process.wait(5) == -9
    assert command.process.stdout is not None
    assert command.process.stderr is not None
    command.process.stdout.close()
    command.process.stderr.close()


def test_a_tool_that_is_absent_is_a_reason() -> None:
    with pytest.raises(module.UnreadableError, match="no-such-tool is not installed"):
        module.Command("no-such-tool", "--version").output()


def test_a_name_server_that_is_down_does_not_hold_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_args: Any, **_options: Any) -> list[Any]:
        time.sleep(2)
        return []

    monkeypatch.setattr(module, "RESOLVE_TIMEOUT", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    resolver = module.Resolver("node1")
    begun = time.monotonic()
    with pytest.raises(module.UnreadableError, match="resolving the host's own name node1 took over"):
        resolver.addresses()
    assert time.monotonic() - begun < 1
    resolver.thread.join()


def test_own_addresses_are_marked_and_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = (2, 1, 6, "", ("127.0.1.1", 0))
    found = [twice, twice, (10, 1, 6, "", ("fe80::1%eth0", 0, 0, 2))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_options: found)
    assert module.Resolver("node1").addresses() == [
        {"address": "127.0.1.1", "loopback": True},
        {"address": "fe80::1", "loopback": False},
    ]


def test_the_operating_system_of_a_recorded_host(plant: Any) -> None:
    plant({"/etc/os-release": recorded("os_release_debian12")})
    problems = module.Problems()
    found = module.operating_system(problems, said(recorded("systemctl_manager.txt")))
    assert (found["id"], found["version_id"], found["systemd_version"]) == ("debian", "12", 252)
    assert found["system_state"] == "running"
    assert found["pretty_name"] == "Debian GNU/Linux 12 (bookworm)"
    assert problems.found == []


def test_no_systemd_is_offline_with_a_reason(plant: Any) -> None:
    plant({"/etc/os-release": 'ID="rocky"\nID_LIKE="rhel centos fedora"\n# comment=x\n'})
    problems = module.Problems()
    found = module.operating_system(problems, None)
    assert (found["systemd_version"], found["system_state"]) == (None, "offline")
    assert found["id_like"] == ["rhel", "centos", "fedora"]
    assert problems.found[0]["fact"] == "os.systemd_version"


def test_processors_of_a_recorded_host(plant: Any) -> None:
    plant(json.loads(recorded("h200_tree.json")))
    plant({"/proc/cpuinfo": "model name\t: Intel(R) Xeon(R)\nflags\t\t: fpu avx2 avx512f amx_tile\n"})
    found = module.cpu(module.Problems())
    assert (found["cores"], found["sockets"], found["model"]) == (16, 1, "Intel(R) Xeon(R)")
    assert found["flags"] == ["avx2", "avx512f", "amx_tile"]
    assert found["numa"] == [{"node": 0, "cpus": "0-15", "memory_bytes": 4681200 * 1024}]
    assert found["usable"] == len(os.sched_getaffinity(0))


def test_an_arm_processor_has_features_and_no_model() -> None:
    assert module.cpuinfo("processor\t: 0\nFeatures\t: fp asimd bf16 sve\n") == (
        None,
        ["asimd", "bf16", "sve"],
    )


def test_memory_of_a_recorded_host(plant: Any) -> None:
    plant(json.loads(recorded("h200_tree.json")))
    assert module.memory() == {
        "total_bytes": 131981020 * 1024,
        "available_bytes": 131472712 * 1024,
        "swap_total_bytes": 0,
        "swap_free_bytes": 0,
    }


@pytest.mark.parametrize(
    ("numbers", "text"), [({0, 1, 2, 3}, "0-3"), ({0, 2, 3, 8}, "0,2-3,8"), ({5}, "5"), (set(), "")]
)
def test_cpus_are_listed_as_the_kernel_does(numbers: set[int], text: str) -> None:
    assert module.ranges(numbers) == text


def test_rsync_version_is_read() -> None:
    assert module.rsync_version(said(recorded("rsync_version.txt"))) == "3.5.0"
    assert module.rsync_version(said("rsync  version v3.2.7  protocol version 31\n")) == "3.2.7"


def test_this_python_is_among_the_pythons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = Path(sys.executable).resolve()
    (tmp_path / "python3").symlink_to(own)
    shim = tmp_path / "python3.9"
    shim.write_text("#!/bin/sh\nsleep 60\n", encoding="utf-8")
    shim.chmod(0o755)
    # A folder of PATH that is a file, or gone, or not ours to read, hides nothing of the others.
    monkeypatch.setenv("PATH", f"{shim}:relative:{tmp_path}/gone:{tmp_path}")
    problems = module.Problems()
    found = module.Pythons().answer(problems)
    assert {"path": str(own), "version": ".".join(map(str, sys.version_info[:3]))} in found
    assert str(shim) not in [p["path"] for p in found], "a version manager's script is no interpreter"
    assert found == sorted(found, key=lambda p: [int(n) for n in p["version"].split(".")], reverse=True)
    assert problems.found == []


def test_room_is_measured_at_the_nearest_parent(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    found = module.room(str(tmp_path / "a" / "b"))
    assert found["measured_at"] == str(tmp_path)
    assert found["total_bytes"] == space.f_blocks * space.f_frsize
    assert found["mount_device"] == tmp_path.stat().st_dev


# ---- files and what ppdeploy has on the host


def test_the_state_of_a_file_a_folder_and_a_link(tmp_path: Path) -> None:
    file = tmp_path / "rank.env"
    file.write_text("A=1\n", encoding="utf-8")
    file.chmod(0o640)
    (tmp_path / "link").symlink_to("rank.env")
    state = module.file_state(str(file))
    assert state is not None
    digest = subprocess.run(["sha256sum", file], check=True, capture_output=True, encoding="ascii").stdout.split()[0]
    assert (state["type"], state["mode"], state["size"], state["sha256"]) == ("file", "0640", 4, digest)
    assert state["owner"] == module.user_name(os.getuid())
    link = module.file_state(str(tmp_path / "link"))
    assert link is not None
    assert (link["type"], link["target"], link["sha256"]) == ("link", "rank.env", None)
    folder = module.file_state(str(tmp_path))
    assert folder is not None
    assert folder["type"] == "directory"
    assert module.file_state(str(tmp_path / "absent")) is None
    assert module.file_state(str(file / "below a file")) is None


RELEASE = "a" * 64


def test_a_pipeline_on_the_host(plant: Any) -> None:
    root = plant(
        {
            f"/opt/tiny/releases/{RELEASE}/rank.env": "A=1\n",
            f"/opt/tiny/releases/{RELEASE}/release.json": "{}\n",
            "/opt/tiny/current": {"link": f"releases/{RELEASE}"},
            "/units/ppdeploy-rank@.service": "[Service]\n",
            "/units/ppdeploy-rank@tiny.service.d/release.conf": {"link": "/opt/ppdeploy/tiny/current/rank.conf"},
            "/units/ppdeploy-rank@other.service.d/release.conf": "",
            "/consumed.json": json.dumps({"generation": [3, 7], "release": "b" * 64, "boot_id": "c"}),
            "/units/multi-user.target.wants/ppdeploy-rank@tiny.service": {"link": "../ppdeploy-rank@.service"},
        }
    )
    found = module.pipeline("tiny", {})
    assert (found["current"], found["previous"], found["unit"]) == (RELEASE, None, None)
    assert found["started_release"] == "b" * 64
    assert [Path(f["path"]).name for f in found["releases"][0]["files"]] == ["rank.env", "release.json"]
    assert [f["path"].removeprefix(f"{root}/units/") for f in found["unit_files"]] == [
        "ppdeploy-rank@.service",
        "ppdeploy-rank@tiny.service.d/release.conf",
        "multi-user.target.wants/ppdeploy-rank@tiny.service",
    ]


def test_a_bare_host_has_nothing_of_a_pipeline(plant: Any) -> None:
    plant({})
    assert module.pipeline("tiny", {}) == {
        "current": None,
        "previous": None,
        "started_release": None,
        "releases": [],
        "unit_files": [],
        "unit": None,
    }
    assert module.venvs() == []
    assert module.models(f"{module.OPT}/models") == []


def test_unit_states_of_one_systemctl_show() -> None:
    states = module.unit_states(said(recorded("systemctl_units.txt")))
    ssh = states["ssh.service"]
    assert (ssh["load_state"], ssh["active_state"], ssh["sub_state"]) == ("loaded", "active", "running")
    assert ssh["main_pid"] > 0
    assert ssh["active_since_monotonic_us"] > 0
    assert (ssh["unit_file_state"], ssh["needs_daemon_reload"]) == ("enabled", False)
    absent = states["ppdeploy-rank@tiny.service"]
    assert (absent["load_state"], absent["active_state"], absent["unit_file_state"]) == (
        "not-found",
        "inactive",
        "",
    )
    assert (absent["main_pid"], absent["active_since_monotonic_us"]) == (0, 0)


def test_a_venv_is_known_by_marker_and_metadata(plant: Any) -> None:
    base = "/opt/venvs/0123456789abcdef"
    site = f"{base}/lib/python3.11/site-packages"
    plant(
        {
            f"{base}/.ppdeploy.json": '{"lock": "x"}',
            f"{base}/pyvenv.cfg": "home = /usr/bin\nimplementation = CPython\nversion_info = 3.11.2\n",
            f"{site}/vllm-0.33.0.dist-info/METADATA": "",
            f"{site}/nvidia_nccl_cu12-2.27.5.dist-info/METADATA": "",
            f"{site}/torch-2.11.0+cpu.dist-info/METADATA": "",
            f"{site}/torchvision-0.26.0.dist-info/METADATA": "",
            "/opt/venvs/fedcba9876543210/.ppdeploy.json": "{half",
        }
    )
    whole, half = module.venvs()
    assert whole["marker"] == {"lock": "x"}
    assert whole["python"] == "3.11.2"
    assert whole["packages"] == {"vllm": "0.33.0", "nvidia-nccl-cu12": "2.27.5", "torch": "2.11.0+cpu"}
    assert (half["marker"], half["python"], half["packages"]) == (None, None, {})


def write_model(folder: Path) -> None:
    """A model folder with a manifest that is true."""
    folder.mkdir()
    files = []
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(name, encoding="utf-8")
        about = (folder / name).stat()
        recorded = {"size": about.st_size, "mtime_ns": about.st_mtime_ns, "inode": about.st_ino}
        files.append({"path": name, "sha256": module.sha256(str(folder / name)), **recorded})
    (folder / module.MANIFEST).write_text(json.dumps({"digest": "d" * 64, "files": files}), encoding="utf-8")


def test_a_model_as_it_was_checked_is_verified(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    assert module.models(str(tmp_path)) == [
        {"name": "tiny", "digest": "d" * 64, "verified": True, "deviation": None, "size_bytes": 28}
    ]


def test_what_the_weights_module_records_is_what_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    entry = weights.Entry("config.json", 2, module.sha256(str(folder / "config.json")), None)
    record = weights.check_file(folder, entry)
    assert record is not None
    (folder / weights.MANIFEST).write_text(json.dumps({"digest": "d", "files": [record]}), encoding="utf-8")
    assert module.model(str(tmp_path), "tiny")["verified"] is True


def test_each_way_to_change_a_model_is_named(tmp_path: Path) -> None:
    for change in ("size", "mtime_ns", "inode", "gone", "manifest"):
        write_model(tmp_path / change)
    (tmp_path / "unfinished" / "parts").mkdir(parents=True)
    (tmp_path / "unfinished" / "parts" / "model.safetensors").write_bytes(b"x" * 5000)
    with (tmp_path / "size" / "config.json").open("a", encoding="utf-8") as stream:
        stream.write("x")
    os.utime(tmp_path / "mtime_ns" / "config.json", ns=(1, 1))
    before = (tmp_path / "inode" / "config.json").stat()
    copy = tmp_path / "inode" / "copy"
    copy.write_text("config.json", encoding="utf-8")
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    copy.replace(tmp_path / "inode" / "config.json")
    (tmp_path / "gone" / "model.safetensors").unlink()
    (tmp_path / "manifest" / module.MANIFEST).write_text('{"files": 3}', encoding="utf-8")
    found = {model["name"]: model for model in module.models(str(tmp_path))}
    assert not any(model["verified"] for model in found.values())
    assert found["size"]["deviation"] == "config.json: size is 12, recorded was 11"
    assert found["mtime_ns"]["deviation"].startswith("config.json: mtime_ns is 1, recorded was ")
    assert found["inode"]["deviation"].startswith("config.json: inode is ")
    assert found["gone"]["deviation"] == "model.safetensors: No such file or directory"
    assert found["manifest"]["deviation"] == ".ppdeploy-manifest.json is damaged"
    assert found["unfinished"]["deviation"] == ".ppdeploy-manifest.json is missing: the copy was never finished"
    assert found["unfinished"]["size_bytes"] == 5000


def test_the_fastest_link_mode() -> None:
    # Bits 5 and 47: 1000baseT/Full and 2500baseT/Full, as an i225 lists them.
    assert module.fastest((1 << 5, 1 << 15, 0)) == 2500
    assert module.fastest((1 << 12,)) == 10000
    assert module.fastest((1 << 6,)) is None


def test_who_runs_vllm_or_ray() -> None:
    assert module.rival_kind(["/opt/x/bin/python3", "/opt/x/bin/vllm", "serve", "m"]) == "vllm"
    assert module.rival_kind(["python", "-m", "vllm.entrypoints.openai.api_server"]) == "vllm"
    assert module.rival_kind(["VLLM::EngineCore"]) == "vllm"
    assert module.rival_kind(["/x/ray/core/src/ray/raylet/raylet", "--x"]) == "ray"
    assert module.rival_kind(["grep", "vllm"]) is None
    assert module.rival_kind([]) is None


def test_limits_of_a_unit() -> None:
    assert (module.limit("infinity"), module.limit("1024"), module.limit(None)) == (module.NO_LIMIT, 1024, None)


def test_a_firewall_that_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ETC", str(tmp_path))
    active = {"active_state": "active"}
    assert module.filters("firewalld.service", active)
    assert not module.filters("firewalld.service", {"active_state": "inactive"})
    assert not module.filters("ufw.service", active)
    (tmp_path / "ufw").mkdir()
    (tmp_path / "ufw/ufw.conf").write_text("ENABLED=yes\n")
    assert module.filters("ufw.service", active)


def test_kernels_and_nvidias_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MODULES", str(tmp_path / "modules"))
    monkeypatch.setattr(module, "BOOT", str(tmp_path))
    for release, text in (
        ("6.1.0-39", "updates/dkms/nvidia-current.ko:\n"),
        ("6.1.0-40", "updates/dkms/nvidia.ko.xz:\n"),
        (
            "6.1.0-41",
            "kernel/fs/ext4.ko:\nkernel/drivers/i2c/busses/i2c-nvidia-gpu.ko.xz:\nkernel/nvidia-wmi-ec-backlight.ko:\n",
        ),
    ):
        (tmp_path / "modules" / release).mkdir(parents=True)
        (tmp_path / "modules" / release / "modules.dep").write_text(text)
    (tmp_path / "vmlinuz-6.1.0-41").touch()
    (tmp_path / "headers").mkdir()
    (tmp_path / "modules/6.1.0-41/build").symlink_to(tmp_path / "headers")
    (tmp_path / "modules/6.1.0-40/build").symlink_to(tmp_path / "removed")
    assert module.kernels() == [
        {"release": "6.1.0-39", "bootable": False, "nvidia_module": True, "headers": False},
        {"release": "6.1.0-40", "bootable": False, "nvidia_module": True, "headers": False},
        {"release": "6.1.0-41", "bootable": True, "nvidia_module": False, "headers": True},
    ]


# ---- RDMA --------------------------------------------------------------------------------------------------------


def test_an_rdma_device_has_the_addresses_that_are_in_use(plant: Any) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    plant(
        {
            f"{port}/state": "4: ACTIVE\n",
            f"{port}/link_layer": "Ethernet\n",
            f"{port}/gids/0": "fe80:0000:0000:0000:0a00:27ff:fe00:0001\n",
            f"{port}/gids/3": "0000:0000:0000:0000:0000:ffff:c633:640b\n",
            f"{port}/gids/4": "0000:0000:0000:0000:0000:0000:0000:0000\n",
            f"{port}/gids/10": "0000:0000:0000:0000:0000:ffff:c633:640c\n",
            f"{port}/gid_attrs/types/0": "IB/RoCE v1\n",
            f"{port}/gid_attrs/types/3": "RoCE v2\n",
            f"{port}/gid_attrs/types/4": "RoCE v2\n",
            f"{port}/gid_attrs/ndevs/0": "enp1s0\n",
            f"{port}/gid_attrs/ndevs/3": "enp1s0\n",
            "sys/class/infiniband/mlx5_0/device/net/enp1s0/mtu": "1500\n",
        }
    )
    (found,) = module.rdma_devices()
    assert (found["name"], found["state"], found["interfaces"]) == ("mlx5_0", "ACTIVE", ["enp1s0"])
    assert [(gid["index"], gid["kind"], gid["interface"]) for gid in found["gids"]] == [
        (0, "IB/RoCE v1", "enp1s0"),
        (3, "RoCE v2", "enp1s0"),
    ]


@pytest.mark.parametrize("folder", ["x86_64-linux-gnu", "../libraries64", "."])
def test_the_library_of_verbs_is_found_where_distributions_put_it(plant: Any, folder: str) -> None:
    assert module.verbs_library() is None
    plant({f"libraries/{folder}/libibverbs.so.1": ""})
    assert str(module.verbs_library()).endswith("libibverbs.so.1")
