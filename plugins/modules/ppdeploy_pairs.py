#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""What one node sees of its fabric peers: route, ARP, ping at the whole MTU, TCP connections, clock, throughput."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: ppdeploy_pairs
short_description: Probe the way to every fabric peer
version_added: "0.1.0"
description:
  - V(open) starts a listener on this node, on ports that the kernel gives and on the master port where it is free, and
    returns its C(token). V(probe) looks at every peer whose listener is open, and tells it when it is done. V(close)
    ends a listener that is left, and waits until it is gone.
  - The listener takes connections of O(peers) alone, answers with its token and its clock, and takes what a throughput
    probe sends. It ends when all peers are done, and by itself after O(lifetime) seconds, whatever becomes of the play.
  - Nothing on the node is changed, so check mode is the same. What cannot be probed is V(null), with the reason in
    RV(problems).
  - Run it as root; ICMP and ARP need raw sockets.
author:
  - The ppdeploy authors
options:
  action:
    description: What to do.
    type: str
    choices: [open, probe, close]
    required: true
  address:
    description: This node's fabric address.
    type: str
    required: true
  interface:
    description: This node's fabric interface; needed to probe.
    type: str
    default: ""
  mtu:
    description: MTU of the fabric interface; packets of this size are sent.
    type: int
    default: 1500
  peers:
    description: Fabric addresses of the peers; to probe, with the C(token), C(ports) and C(master) of their listeners.
    type: list
    elements: dict
    default: []
    suboptions:
      address:
        description: Fabric address of the peer.
        type: str
        required: true
      token:
        description: Token of its listener, empty where it has none.
        type: str
        default: ""
      ports:
        description: Ports of its listener.
        type: list
        elements: int
        default: []
      master:
        description: Whether the last of RV(listener.ports) is the master port.
        type: bool
        default: false
      send:
        description: Seconds for which to send it data, 0 for not at all.
        type: float
        default: 0
  ports:
    description: How many ports to listen on, beside the master port.
    type: int
    default: 5
  master_port:
    description: The master port, 0 where the node is not to listen on it.
    type: int
    default: 0
  lifetime:
    description: Seconds after which the listener ends by itself.
    type: int
    default: 60
  handle:
    description:
      - What V(open) returned as C(handle). V(probe) waits a moment for that process to end, V(close) ends it, and no
        other.
    type: str
    default: ""
  read_below:
    description: Folder in which a large file is read for a moment to measure the disk; empty for none.
    type: str
    default: ""
attributes:
  check_mode:
    description: It changes nothing, so check mode is the same.
    support: full
  diff_mode:
    description: It changes nothing, so there is no difference to show.
    support: none
  platform:
    description: Linux with /proc and /sys; Python 3.9 or newer.
    platforms: linux
    support: full
"""

EXAMPLES = r"""
- name: Listen for the peers
  ppdeploy_pairs:
    action: open
    address: 198.51.100.11
    master_port: 29501
    peers: [{address: 198.51.100.12}]
  register: listening
"""

RETURN = r"""
listener:
  description: C(handle), C(token), C(ports) and, for the master port, C(master) (listened on) or C(master_problem).
  returned: action is open
  type: dict
probe:
  description: What was seen; every field is described, with its unit, in C(ppdeploy/probes.py).
  returned: action is probe
  type: dict
closed:
  description: Whether the listener is gone, which it is unless it cannot be killed.
  returned: action is close
  type: bool
"""

import contextlib
import errno
import fcntl
import ipaddress
import json
import mmap
import os
import re
import secrets
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

Result = dict[str, Any]

# linux/in.h: send with "don't fragment" and without minding what was learnt of the path before.
IP_MTU_DISCOVER = 10
IP_PMTUDISC_PROBE = 3
SIOCGIFHWADDR = 0x8927
ETH_P_ARP = 0x0806
IP_AND_ICMP = 28  # bytes of the two headers
PINGS = 20
PING_PAUSE = 0.01  # seconds
BIG_PINGS = 3
PATIENCE = 1.5  # seconds for an answer; a LAN needs a thousandth of it
ARP_PATIENCE = 0.4  # seconds
BLOCK = b"\0" * (1 << 20)
WINDOW = 0.05  # seconds; the best window is told, since other probes may share the link for a moment
NAME = "ppdeploy-pairs"  # of the listener's process; the kernel takes 15 characters
DISK_BYTES = 64 << 20
DISK_SECONDS = 1.0
COUNTERS = ("rx_errors", "rx_crc_errors", "rx_dropped", "tx_errors", "tx_dropped", "collisions")


class Problems:
    """What could not be probed, with the reasons."""

    def __init__(self) -> None:
        self.found: list[dict[str, str]] = []

    def guard(self, what: str, probe: Callable[..., Any], *args: Any) -> Any:
        """Return what `probe(*args)` returns; None, with the reason noted, when it fails."""
        try:
            return probe(*args)
        except OSError as error:
            self.found.append({"probe": what, "reason": said(error)})
        except Exception as error:  # noqa: BLE001 - an odd host must not end in a traceback
            self.found.append({"probe": what, "reason": f"unexpected content ({type(error).__name__}: {error})"})
        return None


def said(error: OSError) -> str:
    """Return what went wrong, without Python's errno prefix."""
    return error.strerror or errno.errorcode.get(error.errno or 0, str(error))


# ---- the listener --------------------------------------------------------------------------------


def open_listener(params: Result) -> Result:
    """Listen on the ports in a process of its own, and return how to reach and how to end it."""
    sockets = [listen(params["address"], 0) for _ in range(params["ports"])]
    master_problem, master = None, False
    if params["master_port"]:
        try:
            sockets.append(listen(params["address"], params["master_port"]))
            master = True
        except OSError as error:
            master_problem = said(error)
    token = secrets.token_hex(16)
    allowed = {peer["address"] for peer in params["peers"]}
    pid = detach(sockets, token, allowed, params["lifetime"])
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return {
        "handle": f"{pid}:{started(pid)}",
        "token": token,
        "ports": ports,
        "master": master,
        "master_problem": master_problem,
    }


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on the address; port 0 is one that the kernel chooses, as it does for ranks."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(64)
    except OSError:
        sock.close()
        raise
    return sock


def detach(sockets: list[socket.socket], token: str, allowed: set[str], lifetime: int) -> int:
    """Serve the sockets in a process that outlives this one, for `lifetime` seconds at most; return its id."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        return int(text)
    # A session of its own: the play's connection may end, the listener must not be kept by its pipes.
    os.setsid()
    grandchild = os.fork()
    if grandchild:
        os.write(writer, str(grandchild).encode())
        os._exit(0)
    try:
        # By itself, and by the kernel's hand: no fault in here can make it stay.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(lifetime)
        os.close(reader)
        os.close(writer)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        keep = {sock.fileno() for sock in sockets} | {0, 1, 2}
        for entry in list(Path("/proc/self/fd").iterdir()):
            if int(entry.name) not in keep:
                with contextlib.suppress(OSError):
                    os.close(int(entry.name))
        os.chdir("/")
        # By this the facts tell it from a program that has the master port to keep.
        Path("/proc/self/comm").write_text(NAME, encoding="ascii")
        serve(sockets, token, allowed)
    finally:
        os._exit(0)


def serve(sockets: list[socket.socket], token: str, allowed: set[str]) -> None:
    """Answer the peers until all are done, or the process is ended."""
    done: set[str] = set()
    while not done >= allowed:
        # A thread cannot wake this up: look now and then whether the last peer was done.
        ready, _, _ = select.select(sockets, [], [], 0.1)
        for sock in ready:
            with contextlib.suppress(OSError):
                connection, (address, _) = sock.accept()
                if address in allowed:
                    threading.Thread(target=answer, args=(connection, token, done, address), daemon=True).start()
                else:
                    connection.close()


def answer(connection: socket.socket, token: str, done: set[str], address: str) -> None:
    """Answer `hello` with token and clock, and `send` with how many bytes came in each window of what follows.

    `done` adds the peer's address to the set of that name.
    """
    with connection, contextlib.suppress(OSError, ValueError):
        connection.settimeout(10)
        word = connection.recv(6)
        if word == b"hello\n":
            connection.sendall(json.dumps({"token": token, "time": time.time()}).encode() + b"\n")
        elif word[:5] == b"done\n":
            done.add(address)
        elif word[:5] == b"send\n":
            connection.sendall(json.dumps({"token": token, "windows": count(connection)}).encode() + b"\n")


def count(connection: socket.socket) -> list[list[float]]:
    """Return seconds and bytes of each window of what a connection brings, until it has no more."""
    room = bytearray(1 << 20)
    windows: list[list[float]] = []
    began, size = time.monotonic(), 0
    while True:
        got = connection.recv_into(room)
        now = time.monotonic()
        size += got
        if now - began >= WINDOW or not got:
            windows.append([now - began, size])
            began, size = now, 0
        if not got:
            return windows


def started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks, so that its id alone is never trusted; empty: none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name stands in brackets and may hold anything, brackets too.
    fields = text.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def close_listener(handle: str) -> bool:
    """End the process that `open_listener` named, and no other that has its number; return whether it is gone."""
    match = re.fullmatch(r"(\d+):(\d+)", handle)
    if match is None:
        return True
    pid, since = int(match.group(1)), match.group(2)
    for how in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 2
        if started(pid) == since:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        while started(pid) == since and time.monotonic() < deadline:
            time.sleep(0.02)
    return started(pid) != since


# ---- probes --------------------------------------------------------------------------------------


def probe(params: Result) -> Result:
    """Return all that is seen of the peers; see `ppdeploy/probes.py` for every field."""
    problems = Problems()
    address, interface = params["address"], params["interface"]
    before = counters(interface)
    peers = params["peers"]
    routes = problems.guard("route", routes_to, [peer["address"] for peer in peers]) or {}
    seen: dict[str, Result] = {}
    with ThreadPoolExecutor(max_workers=2 * len(peers) + 2) as pool:
        own = pool.submit(problems.guard, "duplicate address", who_has, interface, address, None)
        disk = pool.submit(problems.guard, "disk", read_speed, params["read_below"])
        ways = {
            peer["address"]: pool.submit(probe_peer, problems, address, interface, params["mtu"], peer)
            for peer in peers
        }
        for peer in peers:
            way = ways[peer["address"]].result()
            seen[peer["address"]] = {**way, "route": routes.get(peer["address"]), "bits_per_second": None}
        claims, speed = own.result(), disk.result()
    # Alone on the link, as far as this node has a say in it.
    for peer in peers:
        if peer["send"] > 0 and peer["ports"]:
            name = f"throughput to {peer['address']}"
            seen[peer["address"]]["bits_per_second"] = problems.guard(name, throughput, address, peer)
    tell_done(address, peers)
    return {
        "address": address,
        "interface": interface,
        "closed": is_gone(params["handle"]),
        "claims": claims,
        "counters_before": before,
        "counters_after": counters(interface),
        "disk": speed,
        "peers": seen,
        "problems": problems.found,
    }


def tell_done(address: str, peers: list[Result]) -> None:
    """Tell the peers' listeners that this node is done; one that cannot be told ends all the same, a little later."""

    def tell(peer: Result) -> None:
        with contextlib.suppress(OSError):
            to = (peer["address"], peer["ports"][0])
            with socket.create_connection(to, PATIENCE, source_address=(address, 0)) as sock:
                sock.sendall(b"done\n")

    with ThreadPoolExecutor(max_workers=len(peers) + 1) as pool:
        list(pool.map(tell, [peer for peer in peers if peer["ports"]]))


def is_gone(handle: str) -> bool:
    """Return whether this node's own listener has ended, or ends within a moment, since all its peers are done."""
    pid, _, since = handle.partition(":")
    deadline = time.monotonic() + PATIENCE
    while since and started(int(pid)) == since:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def probe_peer(problems: Problems, address: str, interface: str, mtu: int, peer: Result) -> Result:
    """Return what is seen of one peer."""
    to = peer["address"]
    connects = [connect(address, peer, port) for port in peer["ports"]]
    return {
        "macs": problems.guard(f"ARP for {to}", who_has, interface, to, address),
        "ping": problems.guard(f"ping of {to}", ping, address, to, 56, PINGS, PING_PAUSE),
        "whole": problems.guard(f"ping of {to}", ping, address, to, mtu - IP_AND_ICMP, BIG_PINGS, PING_PAUSE),
        "connects": connects,
        "clock": clock([one for one in connects if one["clock"]]),
    }


def counters(interface: str) -> Result | None:
    """Return the fault counters of an interface, None when it keeps none."""
    base = Path(f"/sys/class/net/{interface}/statistics")
    try:
        return {name: int((base / name).read_text(encoding="utf-8")) for name in COUNTERS}
    except (OSError, ValueError):
        return None


def routes_to(peers: list[str]) -> dict[str, Result]:
    """Return how a connection that names no source would leave for each peer, as `ip route get` says."""
    tool = shutil.which("ip", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin")
    if tool is None:
        raise OSError(errno.ENOENT, "ip is not installed")
    found = {}
    for peer in peers:
        command = [tool, "-json", "route", "get", peer]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        listed = json.loads(done.stdout or "[]") if done.returncode == 0 else []
        way = listed[0] if listed else {}
        reason = " ".join(done.stderr.split()).replace("RTNETLINK answers: ", "") or "ip names none"
        found[peer] = {
            "interface": way.get("dev"),
            "source": way.get("prefsrc"),
            "gateway": way.get("gateway"),
            "problem": None if way else reason,
        }
    return found


def who_has(interface: str, target: str, source: str | None) -> list[str] | None:
    """Return the MAC addresses that answer for an address on the link; `source` None asks as its owner may (RFC 5227).

    None on a link without ARP. The own kernel never answers its own question.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        shown = fcntl.ioctl(asked, SIOCGIFHWADDR, struct.pack("16s24x", interface.encode()[:15]))
    if struct.unpack_from("H", shown, 16)[0] != 1:  # ARPHRD_ETHER
        return None
    mac, wanted = shown[18:24], socket.inet_aton(target)
    sender = socket.inet_aton(source) if source else b"\0" * 4
    question = struct.pack("!6s6sHHHBBH", b"\xff" * 6, mac, ETH_P_ARP, 1, 0x0800, 6, 4, 1)
    question += mac + sender + b"\0" * 6 + wanted
    found: list[str] = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ARP)) as link:
        link.bind((interface, ETH_P_ARP))
        for _ in range(2):
            link.send(question)
            for frame in frames(link, ARP_PATIENCE / 2):
                # A reply (2) whose sender says that it has the address; never what this node itself sent.
                if frame[20:22] == b"\0\2" and frame[28:32] == wanted and frame[22:28] != mac:
                    text = ":".join(f"{byte:02x}" for byte in frame[22:28])
                    if text not in found:
                        found.append(text)
    return found


def frames(link: socket.socket, seconds: float) -> Iterator[bytes]:
    """Yield the frames that come within a time."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([link], [], [], left)[0]:
            return
        yield link.recv(2048)


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data[: len(data) // 2 * 2]))
    total += data[-1] << 8 if len(data) % 2 else 0
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ping(address: str, peer: str, payload: int, times: int, pause: float) -> Result:
    """Send ICMP echoes of `payload` bytes that may not be fragmented; return how many came back, and how fast."""
    mark = secrets.randbelow(0x10000)
    took: dict[int, float] = {}
    sent: dict[int, float] = {}
    refused = None
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as raw:
        raw.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        raw.bind((address, 0))

        def take(deadline: float) -> None:
            while len(took) < len(sent):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([raw], [], [], left)[0]:
                    return
                data, (sender, _) = raw.recvfrom(65535)
                now = time.monotonic()
                reply = data[(data[0] & 15) * 4 :]
                kind, _, _, echoed, number = struct.unpack_from("!BBHHH", reply)
                if sender == peer and kind == 0 and echoed == mark and number in sent:
                    took.setdefault(number, now - sent[number])

        for number in range(times):
            header = struct.pack("!BBHHH", 8, 0, 0, mark, number)
            body = bytes(payload)
            packet = struct.pack("!BBHHH", 8, 0, checksum(header + body), mark, number) + body
            sent[number] = time.monotonic()
            try:
                raw.sendto(packet, (peer, 0))
            except OSError as error:
                refused = said(error)
                del sent[number]
                break
            take(sent[number] + pause)
            rest = sent[number] + pause - time.monotonic()
            if rest > 0:
                time.sleep(rest)
        take(time.monotonic() + PATIENCE)
    times_taken = sorted(took.values())
    return {
        "bytes": payload + IP_AND_ICMP,
        "sent": len(sent),
        "received": len(took),
        "problem": refused,
        "smallest_s": times_taken[0] if times_taken else None,
        "p50_s": quantile(times_taken, 0.5),
        "p90_s": quantile(times_taken, 0.9),
        "p99_s": quantile(times_taken, 0.99),
    }


def quantile(ordered: list[float], share: float) -> float | None:
    """Return the value below which a share of them lies, None of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def connect(address: str, peer: Result, port: int) -> Result:
    """Connect to a port of a peer's listener and see that it is that listener which answers."""
    about: Result = {"port": port, "master": peer["master"] and port == peer["ports"][-1]}
    began = time.monotonic()
    try:
        with socket.create_connection((peer["address"], port), PATIENCE, source_address=(address, 0)) as sock:
            asked, wall = time.monotonic(), time.time()
            sock.sendall(b"hello\n")
            line = sock.makefile("rb").readline(4096)
            back = time.monotonic()
    except OSError as error:
        reason = f"no answer in {PATIENCE:g} s" if isinstance(error, socket.timeout) else said(error)
        return {**about, "problem": reason, "seconds": None, "clock": None}
    try:
        told = json.loads(line)
        stranger = told["token"] != peer["token"]
        offset = float(told["time"]) - (wall + (back - asked) / 2)
    except (ValueError, TypeError, KeyError):
        stranger, offset = True, 0.0
    if stranger:
        return {**about, "problem": "another machine or program answers there", "seconds": None, "clock": None}
    error_s = (back - asked) / 2
    return {**about, "problem": None, "seconds": asked - began, "clock": {"offset_s": offset, "error_s": error_s}}


def clock(connects: list[Result]) -> Result | None:
    """Return the peer's clock minus this one's in seconds, as the quickest answer tells it, and how wrong it may be."""
    best = min(connects, key=lambda one: one["clock"]["error_s"], default=None)
    return best["clock"] if best else None


def throughput(address: str, peer: Result) -> float | None:
    """Send data for a moment and return the bits/s that arrived in the best window."""
    with socket.create_connection((peer["address"], peer["ports"][0]), PATIENCE, source_address=(address, 0)) as sock:
        sock.settimeout(peer["send"] + PATIENCE)
        # A slow link must not have seconds of data left to carry when the time is over.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sock.sendall(b"send\n")
        deadline = time.monotonic() + peer["send"]
        while time.monotonic() < deadline:
            sock.send(BLOCK)
        sock.shutdown(socket.SHUT_WR)
        # What is on the way still has to arrive: a slow link holds megabytes in buffers.
        sock.settimeout(10)
        told = json.loads(sock.makefile("rb").readline(1 << 16))
    whole = [(seconds, size) for seconds, size in told["windows"] if seconds >= WINDOW]
    return max((8 * size / seconds for seconds, size in whole), default=None)


def read_speed(folder: str) -> Result | None:
    """Read a large file for a moment, past the page cache; None where the folder has none."""
    large = largest_file(folder) if folder else None
    if large is None:
        return None
    room = mmap.mmap(-1, 1 << 20)  # aligned to a page, as O_DIRECT wants it
    handle = os.open(large, os.O_RDONLY | os.O_DIRECT)
    try:
        began, size = time.monotonic(), 0
        while size < DISK_BYTES and time.monotonic() - began < DISK_SECONDS:
            got = os.readv(handle, [room])
            size += got
            if got < len(room):
                break
        seconds = time.monotonic() - began
    finally:
        os.close(handle)
        room.close()
    return {"path": large, "bytes_per_second": size / seconds} if size >= 1 << 20 else None


def largest_file(folder: str) -> str | None:
    """Return the largest regular file of a folder and the folders in it, None where none has a megabyte."""
    best: tuple[int, str] = (1 << 20, "")
    for place in [folder, *(str(p) for p in Path(folder).glob("*") if p.is_dir())]:
        for path in sorted(Path(place).glob("*")):
            with contextlib.suppress(OSError):
                about = path.lstat()
                if stat.S_ISREG(about.st_mode):
                    best = max(best, (about.st_size, str(path)))
    return best[1] or None


# ---- the whole -----------------------------------------------------------------------------------


def is_address(text: str) -> bool:
    """Return whether a text is an IPv4 address."""
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def wrong_argument(params: Result) -> str | None:
    """Return what is wrong with the arguments as one sentence, None when nothing is."""
    for address in [params["address"], *(peer["address"] for peer in params["peers"])]:
        if not is_address(address):
            return f"{address!r} is not an IPv4 address: give the fabric address, not a name"
    if params["action"] == "probe" and not params["interface"]:
        return "interface is missing: name the fabric interface"
    if params["action"] == "open" and not 1 <= params["lifetime"] <= 600:
        return f"lifetime: {params['lifetime']} is not from 1 to 600 seconds"
    return None


def main() -> None:
    """Read the arguments, do what they say."""
    module = AnsibleModule(
        argument_spec={
            "action": {"type": "str", "choices": ["open", "probe", "close"], "required": True},
            "address": {"type": "str", "required": True},
            "interface": {"type": "str", "default": ""},
            "mtu": {"type": "int", "default": 1500},
            "peers": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "address": {"type": "str", "required": True},
                    "token": {"type": "str", "default": "", "no_log": False},
                    "ports": {"type": "list", "elements": "int", "default": []},
                    "master": {"type": "bool", "default": False},
                    "send": {"type": "float", "default": 0},
                },
            },
            "ports": {"type": "int", "default": 5},
            "master_port": {"type": "int", "default": 0},
            "lifetime": {"type": "int", "default": 60},
            "handle": {"type": "str", "default": ""},
            "read_below": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params
    wrong = wrong_argument(params)
    if wrong is not None:
        module.fail_json(msg=wrong)
    try:
        if params["action"] == "open":
            module.exit_json(changed=False, listener=open_listener(params))
        if params["action"] == "probe":
            module.exit_json(changed=False, probe=probe(params))
        closed = close_listener(params["handle"])
    except OSError as error:
        module.fail_json(msg=f"{params['address']}: {said(error)}")
    if not closed:
        pid = params["handle"].split(":")[0]
        module.fail_json(msg=f"the listener cannot be ended (pid {pid}): run `kill -9 {pid}`")
    module.exit_json(changed=False, closed=True)


if __name__ == "__main__":
    main()
