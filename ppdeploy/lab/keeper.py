"""Keep one host of the lab running: mount its disk, start it, connect its NICs, again on each reboot.

Stand-alone and standard library only, so that it can be run with `python3 -I`. `ppdeploy.lab.core` starts it
inside the lab's network namespace and a mount namespace of its own: whatever it mounts is gone when it and
its host are.

    keeper.py SPEC.json
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REBOOT = 133
"""The exit code of systemd-nspawn when its host asked for a reboot."""


def start_time(pid: int) -> int | None:
    """Return when process `pid` started (clock ticks since boot), None where there is none or it is a zombie.

    With the process id it names one process for as long as the machine runs: field 22 of /proc/PID/stat,
    proc(5).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` at once, so that no reader and no crash ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    """Return the content of `path`, None where there is no such file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def join(procs_files: Iterable[str]) -> None:
    """Put this process into the control groups whose `cgroup.procs` files are given."""
    for procs in procs_files:
        Path(procs).write_text("0", encoding="ascii")


def joining(procs_files: Iterable[str], argv: Iterable[str]) -> list[str]:
    """Return the command that enters the control groups of these files and then becomes `argv`.

    A shell does it, since Python code between fork and exec may hang in a process with threads.
    """
    script = 'for procs; do shift; [ "$procs" = -- ] && break; echo 0 >"$procs" || exit 125; done; exec "$@"'
    return ["sh", "-c", script, "sh", *procs_files, "--", *argv]


def find_init(launcher: int) -> int | None:
    """Return the process id (outside) of the host's process 1, started by the systemd-nspawn `launcher`."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="ascii").split():
            status = Path(f"/proc/{child}/status").read_text(encoding="utf-8", errors="replace")
            inside = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
            if len(inside) > 1 and inside[-1] == "1":
                return int(child)
    return None


def qdisc_command(device: str, rate: str | None) -> list[str]:
    """Return the `tc` command that limits what leaves `device` to `rate`, or lifts the limit."""
    base = ["tc", "qdisc", "replace", "dev", device, "root"]
    return [*base, "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"] if rate else [*base, "noqueue"]


def link_commands(link: dict[str, str], wanted: dict[str, Any], init: int) -> list[list[str]]:
    """Return the commands that bring one link to its wanted state, to be run in the lab's network namespace.

    `wanted` has `rate` (as tc(8) writes it, or None) and `cut`: None, `down` (the carrier goes, as when a
    cable is pulled) or `silent` (the carrier stays and nothing arrives, as when a switch fails). `init` is
    the host's process 1.
    """
    outer, inner, cut = link["outer"], link["inner"], wanted.get("cut")
    place = ["nomaster"] if cut == "silent" else ["master", link["bridge"]]
    rate = wanted.get("rate")
    return [
        ["ip", "link", "set", outer, *place],
        qdisc_command(outer, rate),
        ["nsenter", f"--net=/proc/{init}/ns/net", *qdisc_command(inner, rate)],
        ["ip", "link", "set", outer, "down" if cut == "down" else "up"],
    ]


def _wait_for_links(launcher: subprocess.Popen[bytes], outers: list[str]) -> int | None:
    """Return the host's process 1 once all its links exist, None where the launcher ended first."""
    while launcher.poll() is None:
        init = find_init(launcher.pid)
        with contextlib.suppress(OSError):
            for outer in outers:
                # Not /sys/class/net: that shows the network namespace in which /sys was mounted.
                socket.if_nametoindex(outer)
            if init is not None:
                return init
        time.sleep(0.01)
    return None


def _set_links(links: list[dict[str, str]], links_file: Path, init: int) -> None:
    """Bring all links to the state that `links_file` names, once more where it changed meanwhile."""
    while True:
        wanted = read_json(links_file) or {}
        for link in links:
            for command in link_commands(link, wanted.get(link["inner"], {}), init):
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        if (read_json(links_file) or {}) == wanted:
            return


def _remove_old(links: list[dict[str, str]], groups: list[str]) -> None:
    """Remove what the host's last life may have left: its ends of the links and the groups below its own."""
    for link in links:
        with contextlib.suppress(OSError):
            socket.if_nametoindex(link["outer"])
            subprocess.run(["ip", "link", "del", link["outer"]], check=False, stderr=subprocess.DEVNULL)
    for procs in groups:
        top = Path(procs).parent
        for folder, _, _ in os.walk(top, topdown=False):
            if Path(folder) != top:
                # A group that the kernel still empties is in nobody's way.
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()


def _is_ours(spec: dict[str, Any]) -> bool:
    """Say whether the lab that started us is still there and not about to end."""
    state = read_json(Path(spec["state_file"]))
    return bool(state) and state.get("token") == spec["token"]


def main(spec_path: str) -> int:
    """Run the host that `spec_path` describes until it is off or killed; return our exit code."""
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    join(spec["keeper_groups"])
    # Whatever the person who started us uses for their own files.
    os.umask(0o022)
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    folder = Path(spec["folder"])
    if not _is_ours(spec):
        # The lab was taken down between our start and our joining its group: nobody would ever end us.
        sys.stderr.write("this lab is gone\n")
        return 1
    lock = (folder / "keeper.lock").open("w", encoding="ascii")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.stderr.write("this host has a keeper already\n")
        return 1
    me: dict[str, Any] = {"pid": os.getpid(), "start": start_time(os.getpid())}
    boots = (read_json(folder / "run.json") or {}).get("boots", 0)
    write_json(folder / "run.json", {"keeper": me, "boots": boots})
    for mount in spec["mounts"]:
        Path(mount["target"]).mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["mount", "-t", mount["type"], "-o", mount["options"], mount["type"], mount["target"]], check=True
        )
    # On the mounted disk, where the folders above keep the modes that they have.
    for mount_point in spec["mount_points"]:
        Path(mount_point).mkdir(parents=True, exist_ok=True)
    while _is_ours(spec):
        _remove_old(spec["links"], spec["host_groups"])
        boots += 1
        with (folder / "console.log").open("ab") as console:
            launcher = subprocess.Popen(
                joining(spec["host_groups"], spec["argv"]),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        run: dict[str, Any] = {
            "keeper": me,
            "launcher": {"pid": launcher.pid, "start": start_time(launcher.pid)},
            "boots": boots,
            "since": time.time(),
        }
        write_json(folder / "run.json", run)
        init = _wait_for_links(launcher, [link["outer"] for link in spec["links"]])
        if init is not None:
            write_json(folder / "run.json", run | {"init": {"pid": init, "start": start_time(init)}})
            try:
                _set_links(spec["links"], Path(spec["links_file"]), init)
            except subprocess.CalledProcessError as error:
                # A host that died meanwhile explains this; one that lives has no network, which `up` reports.
                sys.stderr.write(f"links not set: {error}\n")
        code = launcher.wait()
        write_json(folder / "run.json", {"keeper": me, "boots": boots, "exit": code})
        if code != REBOOT:
            break
    write_json(folder / "run.json", {"boots": boots})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
