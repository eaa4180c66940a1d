#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Set what is tuned on a node, remember what was there before, and give it back.

The same file lies on the node as a program: `python3 -I nic.py boot` sets at boot what its configuration says.
"""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: ppdeploy_nic
short_description: Tune a NIC and the kernel's network settings, and give back what was there
version_added: "0.1.0"
description:
  - Brings a host to the given settings and no others. What a setting was before it was first set is written to
    C(/var/lib/ppdeploy/nic-before.json), once; a setting that is no longer wanted gets that value again. Without
    any O(settings) and O(files), everything is given back and the record goes too.
  - Uses ioctl, /sys and /proc, so no tool is needed but C(tc) for a queueing discipline and C(nvidia-smi) for GPUs.
  - A setting that the host refuses is reported and skipped, never a failure.
author:
  - The ppdeploy authors
options:
  action:
    description:
      - V(apply) does the above. V(try_mtu) sets O(mtu) alone, for V(probe) to see whether packets of that size pass,
        and V(give_back) undoes an MTU that was tried and not yet applied. V(probe) changes nothing.
    type: str
    choices: [apply, try_mtu, probe, give_back]
    default: apply
  interface:
    description: The NIC. With V(apply) and without it, that of the record.
    type: str
  settings:
    description: Values by key (C(mtu), C(rings), C(eee), C(rx_usecs), C(rps), C(rfs), C(qdisc), C(governor),
      C(gpu_persistence), C(sysctl.NAME)).
    type: dict
    default: {}
  waits:
    description: Keys of O(settings) that are not to be set now but at the next boot.
    type: list
    elements: str
    default: []
  files:
    description: Files that the role writes for these settings; what is there before is remembered, and files of
      an earlier run that are not among them are given back.
    type: list
    elements: str
    default: []
  mtu:
    description: For V(try_mtu) and V(probe), the MTU in bytes.
    type: int
  source:
    description: For V(probe), the node's own address.
    type: str
  peers:
    description: For V(probe), the addresses of the other nodes.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Says what would change, and changes nothing.
    support: full
  diff_mode:
    description: Each setting that changes, before and after.
    support: full
  platform:
    description: Linux; Python 3.9 or newer.
    platforms: linux
    support: full
"""

EXAMPLES = r"""
- name: Keep two ports out of the way of outgoing connections
  ppdeploy_nic:
    interface: enp1s0
    settings:
      sysctl.net.ipv4.ip_local_reserved_ports: 29500-29501
    files: [/etc/sysctl.d/99-ppdeploy.conf]

- name: Give back all that was tuned
  ppdeploy_nic:
"""

RETURN = r"""
set:
  description: What was set now, by key.
  returned: with apply
  type: dict
refused:
  description: Why a setting could not be set or given back, by key; with try_mtu why the MTU could not be set.
  returned: with apply, and with try_mtu where the NIC refused
  type: raw
was:
  description: The MTU that a trial replaced; empty where it had it.
  returned: with try_mtu
  type: str
silent:
  description: Why packets of the size do not pass, by peer; empty when all pass.
  returned: with probe
  type: dict
"""

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Where things are; a test puts its own tree there.
ROOT = "/"
RECORD = "/var/lib/ppdeploy/nic-before.json"
CONFIG = "/etc/ppdeploy/nic.json"
SCRIPT = "/opt/ppdeploy/nic/nic.py"
UNIT = "ppdeploy-nic.service"
# Where the role's files may lie, and what shows that one is ours (MANAGED in ppdeploy/render.py).
OWN_FILES = (
    "/etc/sysctl.d/99-ppdeploy.conf",
    CONFIG,
    "/etc/systemd/system/ppdeploy-nic.service",
    "/etc/systemd/network/*.network.d/90-ppdeploy.conf",
    "/etc/NetworkManager/dispatcher.d/90-ppdeploy-nic",
    "/etc/network/if-up.d/ppdeploy-nic",
)
OURS = b"Written by ppdeploy"

# linux/sockios.h, linux/ethtool.h and linux/in.h.
SIOCETHTOOL = 0x8946
SIOCSIFMTU = 0x8922
GET_COALESCE, SET_COALESCE = 0x0E, 0x0F
GET_RINGS, SET_RINGS = 0x10, 0x11
GET_EEE, SET_EEE = 0x44, 0x45
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3

ANSWER_SECONDS = 1.0
PROBE_SECONDS = 12.0  # a NIC that gets another MTU may take its link down for some seconds
LINK_SECONDS = 20.0
DEVICE_SECONDS = 30.0
COMMAND_SECONDS = 30.0

Words = dict[str, str]


class RefusedError(Exception):
    """A setting that this host does not take; the text is the reason."""


def at(path: str) -> Path:
    """Return where an absolute path of the host is."""
    return Path(ROOT, path.lstrip("/"))


# ---- one setting -----------------------------------------------------------------------------------------------------


def ethtool(interface: str, numbers: list[int]) -> list[int]:
    """Ask or tell an interface's driver; `numbers` are the struct's 32-bit words, the command first."""
    room = bytearray(struct.pack(f"={len(numbers)}I", *numbers))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        call(asked, SIOCETHTOOL, interface, room)
    return list(struct.unpack(f"={len(numbers)}I", room))


def call(asked: socket.socket, request: int, interface: str, room: bytearray) -> None:
    """Make an ioctl about an interface, `room` being what its pointer leads to."""
    import ctypes  # noqa: PLC0415 - not every Python has it, and only NICs with a driver need it

    place = ctypes.addressof(ctypes.c_char.from_buffer(room))
    fcntl.ioctl(asked, request, struct.pack("16sP", interface.encode()[:15], place).ljust(40, b"\0"))


def words_of(text: str) -> Words:
    """Return `rx=256 tx=512` as a map."""
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


def text_of(words: Words) -> str:
    """Return a map as `rx=256 tx=512`."""
    return " ".join(f"{name}={value}" for name, value in words.items())


def run(*argv: str) -> str:
    """Return what a program printed; RefusedError with what it said when it is missing or fails."""
    path = shutil.which(argv[0], path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        raise RefusedError(f"{argv[0]} is not installed")
    try:
        done = subprocess.run(
            (path, *argv[1:]), capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS, env=plain_env()
        )
    except subprocess.TimeoutExpired:
        raise RefusedError(f"{argv[0]} gave no answer in {COMMAND_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise RefusedError(f"{argv[0]}: {' '.join((done.stderr or done.stdout).split())[:200]}")
    return done.stdout


def plain_env() -> Words:
    """Return the environment for programs whose words are read."""
    return {**os.environ, "LC_ALL": "C", "LANGUAGE": "C"}


class Host:
    """The settings of one host, whose NIC is `interface`."""

    def __init__(self, interface: str) -> None:
        self.interface = interface

    def read(self, key: str) -> str | None:
        """Return what a setting is now, None where the host does not have it."""
        if key.startswith("sysctl."):
            return self._text(self._sysctl(key))
        with contextlib.suppress(OSError, RefusedError, ValueError):
            return str(getattr(self, f"_get_{self._known(key)}")())
        return None

    def write(self, key: str, value: str) -> None:
        """Set a setting; RefusedError with the reason when the host does not take it, or takes something else."""
        try:
            if key.startswith("sysctl."):
                # A line of its own: nothing at all would not be written.
                self._sysctl(key).write_text(f"{value}\n", encoding="utf-8")
            else:
                getattr(self, f"_set_{self._known(key)}")(value)
        except OSError as error:
            raise RefusedError(error.strerror or str(error)) from error
        except ValueError as error:
            raise RefusedError(f"{value!r} is not such a value") from error
        found = self.read(key)
        if not same(key, found, value):
            raise RefusedError(f"it is {found or 'not there'} afterwards")

    @staticmethod
    def _known(key: str) -> str:
        if key not in KEYS:
            raise RefusedError(f"there is no such setting: {key}")
        return key

    @staticmethod
    def _text(path: Path) -> str | None:
        try:
            return " ".join(path.read_text(encoding="utf-8").split())
        except OSError:
            return None

    @staticmethod
    def _sysctl(key: str) -> Path:
        return at("/proc/sys/" + key[len("sysctl.") :].replace(".", "/"))

    @property
    def _device(self) -> Path:
        return at(f"/sys/class/net/{self.interface}")

    def _get_mtu(self) -> str:
        return (self._device / "mtu").read_text(encoding="utf-8").strip()

    def _set_mtu(self, value: str) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            fcntl.ioctl(
                asked, SIOCSIFMTU, struct.pack("16si", self.interface.encode()[:15], int(value)).ljust(40, b"\0")
            )
        self._wait_for_link()

    def _wait_for_link(self) -> None:
        """Wait until the link is there again: many drivers start the NIC anew."""
        deadline = time.monotonic() + LINK_SECONDS
        while self._text(self._device / "carrier") == "0" and time.monotonic() < deadline:
            time.sleep(0.1)

    def _rings(self) -> list[int]:
        return ethtool(self.interface, [GET_RINGS, *[0] * 8])

    def _get_rings(self) -> str:
        rings = self._rings()
        return f"rx={rings[5]} tx={rings[8]}"

    def _set_rings(self, value: str) -> None:
        rings, words = self._rings(), words_of(value)
        rings[0], rings[5], rings[8] = SET_RINGS, int(words["rx"]), int(words["tx"])
        ethtool(self.interface, rings)
        self._wait_for_link()

    def _get_eee(self) -> str:
        return "on" if ethtool(self.interface, [GET_EEE, *[0] * 9])[5] else "off"

    def _set_eee(self, value: str) -> None:
        numbers = ethtool(self.interface, [GET_EEE, *[0] * 9])
        numbers[0], numbers[5] = SET_EEE, int(value == "on")
        ethtool(self.interface, numbers)
        self._wait_for_link()

    def _get_rx_usecs(self) -> str:
        return str(ethtool(self.interface, [GET_COALESCE, *[0] * 22])[1])

    def _set_rx_usecs(self, value: str) -> None:
        numbers = ethtool(self.interface, [GET_COALESCE, *[0] * 22])
        numbers[0], numbers[1] = SET_COALESCE, int(value)
        ethtool(self.interface, numbers)

    def _queues(self, file: str) -> dict[str, Path]:
        found = [queue for queue in (self._device / "queues").iterdir() if queue.name.startswith("rx-")]
        return {queue.name: queue / file for queue in sorted(found, key=lambda queue: (len(queue.name), queue.name))}

    def _get_rps(self) -> str:
        return each(self._queues("rps_cpus"))

    def _set_rps(self, value: str) -> None:
        set_each(self._queues("rps_cpus"), value)

    def _get_rfs(self) -> str:
        return each(self._queues("rps_flow_cnt"))

    def _set_rfs(self, value: str) -> None:
        set_each(self._queues("rps_flow_cnt"), value)

    def _get_qdisc(self) -> str:
        # `qdisc fq_codel 0: root refcnt 2 ...`: an old tc has no JSON.
        shown = run("tc", "qdisc", "show", "dev", self.interface, "root")
        found = re.match(r"qdisc (\S+) ", shown)
        if found is None:
            raise RefusedError("tc shows no qdisc")
        return found.group(1)

    def _set_qdisc(self, value: str) -> None:
        if value == "fq":
            run("tc", "qdisc", "replace", "dev", self.interface, "root", "fq")
        else:
            # The kernel gives back its own; nothing else was replaced (ppdeploy/plan/tuning.py, DEFAULT_QDISCS).
            run("tc", "qdisc", "del", "dev", self.interface, "root")

    @staticmethod
    def _governors() -> dict[str, Path]:
        folder = at("/sys/devices/system/cpu/cpufreq")
        return {policy.name: policy / "scaling_governor" for policy in sorted(folder.glob("policy*"))}

    def _get_governor(self) -> str:
        return each(self._governors())

    def _set_governor(self, value: str) -> None:
        set_each(self._governors(), value)

    @staticmethod
    def _get_gpu_persistence() -> str:
        listed = run("nvidia-smi", "--query-gpu=index,persistence_mode", "--format=csv,noheader")
        modes = dict(re.findall(r"^(\d+), (Enabled|Disabled)$", listed, re.MULTILINE))
        return text_of({index: "on" if mode == "Enabled" else "off" for index, mode in modes.items()})

    def _set_gpu_persistence(self, value: str) -> None:
        now = words_of(self._get_gpu_persistence())
        for index, mode in words_of(value).items():
            if now.get(index) != mode:
                run("nvidia-smi", "-i", index, "-pm", "1" if mode == "on" else "0")


NIC_KEYS = ("mtu", "rings", "eee", "rx_usecs", "rps", "rfs", "qdisc")
KEYS = (*NIC_KEYS, "governor", "gpu_persistence")


def each(files: dict[str, Path]) -> str:
    """Return what several files hold, `rx-0=0 rx-1=0`; RefusedError where there is none."""
    if not files:
        raise RefusedError("the host has none")
    return text_of({name: path.read_text(encoding="utf-8").strip() for name, path in files.items()})


def set_each(files: dict[str, Path], value: str) -> None:
    """Write each file's own value."""
    for name, word in words_of(value).items():
        if name not in files:
            raise RefusedError(f"there is no {name}")
        files[name].write_text(f"{word}\n", encoding="utf-8")


def same(key: str, found: str | None, value: str) -> bool:
    """Whether a setting is as wanted; masks are compared as numbers, since the kernel pads them."""
    if found is None:
        return False
    if key != "rps":
        return found.split() == value.split()
    masks = [{name: int(mask.replace(",", ""), 16) for name, mask in words_of(one).items()} for one in (found, value)]
    return masks[0] == masks[1]


# ---- what was there before -------------------------------------------------------------------------------------------


class Record:
    """What the host had before, kept in one file of ours.

    `settings` by key, `files` by path (None: there was none), `folders` that were made for them, `trial`: the MTU
    before one that is being tried.
    """

    def __init__(self) -> None:
        self.path = at(RECORD)
        known = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.interface: str = known.get("interface", "")
        self.settings: Words = known.get("settings", {})
        self.files: dict[str, Words | None] = known.get("files", {})
        self.folders: list[str] = known.get("folders", [])
        self.trial: Words = known.get("trial", {})

    @property
    def empty(self) -> bool:
        """Whether nothing is left to give back."""
        return not (self.settings or self.files or self.trial)

    def make_folders(self, *paths: str) -> None:
        """Make the folders of files that are missing, and note which."""
        for path in paths:
            missing = [folder for folder in list(Path(path).parents)[::-1] if not at(str(folder)).is_dir()]
            for folder in missing:
                at(str(folder)).mkdir()
                at(str(folder)).chmod(0o755)
                self.folders.append(str(folder))

    def save(self) -> None:
        """Write the record whole or not at all; without anything left, remove it and the folders that were made."""
        if self.empty:
            self.path.unlink(missing_ok=True)
            for folder in reversed(self.folders):
                # Another role may have put something there since.
                with contextlib.suppress(OSError):
                    at(folder).rmdir()
            return
        self.make_folders(RECORD)
        known = {
            "about": "what this host had before ppdeploy tuned it; docs/tuning.md says how to give it back",
            "interface": self.interface,
            "settings": self.settings,
            "files": self.files,
            "folders": self.folders,
            "trial": self.trial,
        }
        replace(self.path, (json.dumps(known, indent=2, sort_keys=True) + "\n").encode(), 0o644)

    def remember_file(self, path: str) -> None:
        """Note what a file that is to be written holds now; one of ours, whose record is lost, counts as none."""
        place = at(path)
        if not place.exists() or is_ours(path):
            self.files[path] = None
            return
        mode = stat.S_IMODE(place.stat().st_mode)
        self.files[path] = {"content": base64.b64encode(place.read_bytes()).decode(), "mode": f"{mode:04o}"}

    def give_back_file(self, path: str) -> None:
        """Bring a file to what it was."""
        before = self.files.pop(path)
        if before is None:
            at(path).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                if str(Path(path).parent) in self.folders:
                    at(path).parent.rmdir()
        else:
            replace(at(path), base64.b64decode(before["content"]), int(before["mode"], 8))

    def adopt_files(self) -> list[str]:
        """Note files of ours that no record knows, since it was lost; return which."""
        found = [f"/{place.relative_to(ROOT)}" for pattern in OWN_FILES for place in at("/").glob(pattern.lstrip("/"))]
        lost = sorted(path for path in found if path not in self.files and is_ours(path))
        self.files.update(dict.fromkeys(lost))
        return lost

    def forget_nic(self) -> None:
        """Forget what a NIC had: it says nothing of another one."""
        self.trial = {}
        self.settings = {key: value for key, value in self.settings.items() if key not in NIC_KEYS}


def is_ours(path: str) -> bool:
    """Whether a file is one that the role wrote."""
    try:
        return path == CONFIG or OURS in at(path).read_bytes()
    except OSError:
        return False


def replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
    Path(name).replace(path)


# ---- bringing the host to it -----------------------------------------------------------------------------------------


class Converged:
    """What an apply did, or in check mode would do."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.after: list[str] = []
        self.set: Words = {}
        self.refused: Words = {}
        self.changed = False

    def tell(self, what: str, before: str, after: str) -> None:
        """Note a change for --diff."""
        self.before.append(f"{what} = {before}\n")
        self.after.append(f"{what} = {after}\n")
        self.changed = True


def converge(
    host: Host,
    record: Record,
    done: Converged,
    settings: Words,
    waits: list[str],
    files: list[str],
    *,
    check: bool,
) -> None:
    """Bring the host to the settings and no others; `waits` are remembered, and not set."""
    for key in settings:
        if key not in record.settings:
            found = host.read(key)
            if found is None:
                done.refused[key] = "the host does not have it"
            else:
                record.settings[key] = found
    for path in files:
        if path not in record.files:
            record.remember_file(path)
    record.trial = {}
    if not check and (not record.empty or record.path.exists()):
        record.interface = host.interface
        if files:
            record.make_folders(SCRIPT, *files)
        # Before anything is touched: whatever ends this run, the way back is known.
        record.save()
    dropped_files = [path for path in record.files if path not in files]
    dropped = [key for key in record.settings if key not in settings]
    give_back(host, record, dropped, dropped_files, done, check=check)
    for key, value in settings.items():
        if key in waits or key in done.refused:
            continue
        found = host.read(key)
        if not same(key, found, value):
            set_one(host, key, value, found or "", done, check=check)
    if not check and (dropped or dropped_files):
        record.save()


def set_one(host: Host, key: str, value: str, found: str, done: Converged, *, check: bool) -> None:
    """Set one setting, or note why the host does not take it."""
    try:
        if not check:
            host.write(key, value)
    except RefusedError as error:
        done.refused[key] = str(error)
        return
    done.tell(key, found, value)
    done.set[key] = value


def give_back(host: Host, record: Record, keys: list[str], paths: list[str], done: Converged, *, check: bool) -> None:
    """Give back settings and files; what the host refuses stays in the record."""
    # The record names a file before it is written: a run that ended between the two left no unit to end.
    unit = any(path.endswith(f"/{UNIT}") and at(path).exists() for path in paths) and not check
    if unit:
        run("systemctl", "disable", "--now", UNIT)
    for path in paths:
        done.tell(f"file {path}", "ours", "none" if record.files[path] is None else "as it was")
        if not check:
            record.give_back_file(path)
    if unit:
        run("systemctl", "daemon-reload")
    for key in keys:
        value, found = record.settings[key], host.read(key)
        if same(key, found, value):
            if not check:
                del record.settings[key]
            continue
        set_one(host, key, value, found or "", done, check=check)
        if key not in done.refused and not check:
            del record.settings[key]


def take_over(host: Host, record: Record, done: Converged, module: Any) -> None:
    """Let the record be of this NIC: one that had it before gets its own settings back, as far as it is still there."""
    if not record.interface:
        return
    here = at(f"/sys/class/net/{record.interface}").is_dir()
    if here and record.interface == host.interface:
        return
    if here:
        keys = [key for key in NIC_KEYS if key in record.settings]
        give_back(Host(record.interface), record, keys, [], done, check=module.check_mode)
        for key, reason in done.refused.items():
            module.warn(f"{record.interface}: {key} is left as it is: {reason}")
        # It says nothing of what this NIC takes.
        done.refused.clear()
    elif record.settings.keys() & set(NIC_KEYS):
        module.warn(f"{record.interface} is not there any more: nothing is given back to it")
    record.forget_nic()


def try_mtu(host: Host, record: Record, mtu: int) -> str:
    """Set an MTU that may turn out not to pass; return what it was, empty where it was that already."""
    now = host.read("mtu")
    if now is None:
        raise RefusedError(f"there is no interface {host.interface}")
    if now == str(mtu):
        return record.trial.get("mtu", "")
    record.interface = host.interface
    record.settings.setdefault("mtu", now)
    record.trial.setdefault("mtu", now)
    record.save()
    host.write("mtu", str(mtu))
    return record.trial["mtu"]


def give_back_mtu(host: Host, record: Record) -> bool:
    """Undo an MTU that was tried; return whether there was one."""
    before = record.trial.get("mtu")
    if before is None:
        return False
    host.write("mtu", before)
    record.trial = {}
    # As it was before anything of ours: nothing is to be remembered of it.
    if record.settings.get("mtu") == before:
        del record.settings["mtu"]
    record.save()
    return True


# ---- whether packets of a size pass ----------------------------------------------------------------------------------


def silent_peers(source: str, peers: list[str], mtu: int) -> Words:
    """Return why packets of `mtu` bytes do not pass there and back, by peer; empty when all do."""
    found = {}
    for peer in peers:
        reason = why_silent(source, peer, mtu)
        if reason:
            found[peer] = reason
    return found


def why_silent(source: str, peer: str, mtu: int) -> str:
    """Return why packets of `mtu` bytes do not pass to one peer and back, empty when they do."""
    deadline = time.monotonic() + PROBE_SECONDS
    reached = 0
    while True:
        if echoes(source, peer, mtu):
            return ""
        # Only once small ones pass does it say anything that large ones do not; thrice is no accident.
        reached += echoes(source, peer, 84)
        late = time.monotonic() > deadline
        if reached >= 3 or (reached and late):
            return f"packets of {mtu} bytes do not pass, small ones do"
        if late:
            return "it answers no ping at all, so that no size can be tried"


def echoes(source: str, peer: str, size: int) -> bool:
    """Whether a ping whose IP packet has `size` bytes and may not be split comes back."""
    ident = os.getpid() & 0xFFFF
    head = struct.pack("!BBHHH", 8, 0, 0, ident, size)
    body = bytes(size - 28)
    packet = struct.pack("!BBHHH", 8, 0, checksum(head + body), ident, size) + body
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as asked:
        asked.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        asked.bind((source, 0))
        try:
            asked.sendto(packet, (peer, 0))
        except OSError:
            time.sleep(0.2)
            return False
        deadline = time.monotonic() + ANSWER_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            asked.settimeout(left)
            try:
                answer, (sender, _) = asked.recvfrom(65535)
            except OSError:
                return False
            start = (answer[0] & 0x0F) * 4
            if sender == peer and answer[start : start + 1] == b"\0" and answer[start + 4 : start + 8] == packet[4:8]:
                return len(answer) == size
    return False


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) // 2 * 2]))
    if len(data) % 2:
        total += data[-1] << 8
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


# ---- at boot, and as a module ----------------------------------------------------------------------------------------


def boot() -> Iterator[str]:
    """Set what the configuration says; yield what was done and what the host refused."""
    known = json.loads(at(CONFIG).read_text(encoding="utf-8"))
    host = Host(known["interface"])
    deadline = time.monotonic() + DEVICE_SECONDS
    while not at(f"/sys/class/net/{host.interface}").is_dir() and time.monotonic() < deadline:
        time.sleep(0.2)
    for key in sorted(known["settings"], key=lambda key: KEYS.index(key) if key in KEYS else len(KEYS)):
        value = known["settings"][key]
        if same(key, host.read(key), value):
            continue
        try:
            host.write(key, value)
        except RefusedError as error:
            yield f"{key} is not set to {value}: {error}"
        else:
            yield f"{key} is set to {value}"


def act(module: Any) -> dict[str, Any]:
    """Do what the module is asked, and return its result."""
    params = module.params
    record = Record()
    host = Host(params["interface"] or record.interface)
    action = params["action"]
    if action == "probe":
        return {"changed": False, "silent": silent_peers(params["source"], params["peers"], params["mtu"])}
    if action == "try_mtu":
        if module.check_mode:
            found = host.read("mtu")
            return {"changed": not same("mtu", found, str(params["mtu"])), "was": ""}
        if host.read("mtu") is None:
            return {"changed": False, "was": "", "refused": f"there is no interface {host.interface}"}
        take_over(host, record, Converged(), module)
        try:
            was = try_mtu(host, record, params["mtu"])
        except RefusedError as error:
            # No failure: that would end the play before the other hosts have their old MTU again.
            return {"changed": False, "was": "", "refused": str(error)}
        return {"changed": bool(was), "was": was}
    if action == "give_back":
        return {"changed": False if module.check_mode else give_back_mtu(host, record)}
    settings = {key: str(value) for key, value in params["settings"].items()}
    done = Converged()
    if not record.path.exists() and record.adopt_files():
        module.warn(f"{at(RECORD)} is lost: what was set stays until the next boot, only the files are taken away")
    take_over(host, record, done, module)
    converge(host, record, done, settings, params["waits"], params["files"], check=module.check_mode)
    for key, reason in done.refused.items():
        module.warn(f"{host.interface}: {key} is left as it is: {reason}")
    return {
        "changed": done.changed,
        "set": done.set,
        "refused": done.refused,
        "diff": {"before": "".join(done.before), "after": "".join(done.after)},
    }


def main() -> None:
    """Read the arguments and do it."""
    # Not at the top: at boot this file runs on a host without Ansible.
    from ansible.module_utils.basic import AnsibleModule  # noqa: PLC0415 - at boot there is no Ansible

    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["apply", "try_mtu", "probe", "give_back"], "default": "apply"},
            "interface": {"type": "str"},
            "settings": {"type": "dict", "default": {}},
            "waits": {"type": "list", "elements": "str", "default": []},
            "files": {"type": "list", "elements": "str", "default": []},
            "mtu": {"type": "int"},
            "source": {"type": "str"},
            "peers": {"type": "list", "elements": "str", "default": []},
        },
        required_if=[("action", "try_mtu", ["interface", "mtu"]), ("action", "probe", ["source", "mtu"])],
        supports_check_mode=True,
    )
    try:
        result = act(module)
    except RefusedError as error:
        module.fail_json(msg=f"the NIC cannot be set: {error}")
    except (OSError, ValueError, KeyError) as error:
        lost = "where that file is damaged, remove it: what was set then goes with the next boot"
        module.fail_json(msg=f"what was there before cannot be read or written ({at(RECORD)}): {error}; {lost}")
    module.exit_json(**result)


if __name__ == "__main__":
    if sys.argv[1:] == ["boot"]:
        for line in boot():
            print(line, flush=True)  # noqa: T201 - the journal is where a unit's words go
    else:
        main()
