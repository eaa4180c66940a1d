"""One host of the lab: make its disk, start it, reach it, hurt it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ppdeploy.errors import ApplyError, InputError, UnreachableError
from ppdeploy.lab import disk, keeper, network, state, system
from ppdeploy.lab.cgroups import CgroupTree
from ppdeploy.lab.inventory import LabSsh
from ppdeploy.lab.status import NodeStatus

Nic = Literal["fabric", "management", "both"]
"""Which of a host's links is meant: fab0, host0, or both."""

BOOT_SECONDS = 90
"""How long a host may take from its start to a finished boot; 3 s where the machine is idle."""

NSPAWN_LOCKS = Path("/run/systemd/nspawn")
"""Where systemd-nspawn keeps locks and sockets by machine name, which two labs share."""

_INNER: dict[str, tuple[str, ...]] = {
    "fabric": ("fab0",),
    "management": ("host0",),
    "both": ("host0", "fab0"),
}


def limited_meminfo(text: str, limit: int, used: int) -> str:
    """Return the text of /proc/meminfo (proc(5)) for a host with `limit` bytes of which `used` are in use."""
    most = {"MemTotal": limit, "MemFree": max(limit - used, 0), "MemAvailable": max(limit - used, 0)}
    lines = []
    for line in text.splitlines():
        name, _, value = line.partition(":")
        kib = min(int(value.split()[0]), most[name] // 1024) if name in most else 0
        lines.append(f"{name}: {kib:15d} kB" if name in most else line)
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Overlay:
    """A folder that hosts see at `target` and may write to; what they write stays in the lab."""

    lower: Path
    target: str


@dataclass(frozen=True)
class Host:
    """Host `index` (from 1) of the lab whose folder, namespace, groups and ssh are given."""

    index: int
    lab: Path
    namespace: Path
    groups: CgroupTree
    ssh: LabSsh

    @property
    def name(self) -> str:
        """The host's name, also that of its control group."""
        return f"node{self.index}"

    @property
    def folder(self) -> Path:
        """Where all of the host lies."""
        return self.lab / "nodes" / self.name

    @property
    def links(self) -> list[dict[str, str]]:
        """Both links: the end in the lab's namespace, the host's own end, and the bridge."""
        return [
            {"outer": f"vb-{self.name}", "inner": "host0", "bridge": network.MANAGEMENT_BRIDGE},
            {"outer": f"vf-{self.name}", "inner": "fab0", "bridge": network.FABRIC_BRIDGE},
        ]

    # -- what is there ------------------------------------------------------------------------------------

    def _run(self) -> dict[str, Any]:
        """Return what the host's keeper wrote last."""
        run: dict[str, Any] = keeper.read_json(self.folder / "run.json") or {}
        return run

    @property
    def boots(self) -> int:
        """How often the host was started."""
        return int(self._run().get("boots", 0))

    @property
    def running(self) -> bool:
        """Whether the host's keeper lives: the host is on, or just between two boots."""
        return state.alive(self._run().get("keeper"))

    @property
    def pid(self) -> int | None:
        """The process id, on this machine, of the host's process 1; None where it is off."""
        init = self._run().get("init")
        return int(init["pid"]) if state.alive(init) else None

    def status(self) -> NodeStatus:
        """Return what is known of the host; asks it where it is on, for at most 3 s."""
        run, on = self._run(), self.running
        links = keeper.read_json(self.folder / "links.json") or {}
        said = "off"
        if on:
            done = self.try_ssh(["systemctl", "is-system-running"], timeout=3)
            said = (done.stdout.strip() if done else "") or "unreachable"
        return NodeStatus(
            name=self.name,
            system=said,
            management=network.management_address(self.index),
            fabric=network.fabric_address(self.index),
            boots=int(run.get("boots", 0)),
            seconds=round(time.time() - run["since"], 1) if on and "since" in run else None,
            memory_bytes=self.groups.memory_used(self.name) if on else None,
            rate={nic: wanted["rate"] for nic, wanted in links.items() if wanted["rate"]},
            cut={nic: wanted["cut"] for nic, wanted in links.items() if wanted["cut"]},
        )

    def last_words(self) -> str:
        """Return the last line that the host's console, or else its keeper, wrote."""
        for name in ("console.log", "keeper.log"):
            path = self.folder / name
            if path.exists():
                lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
                if lines:
                    return lines[-1].strip()
        return "it wrote nothing"

    # -- its life -----------------------------------------------------------------------------------------

    def create(self, tree: Path, login: str, shape: dict[str, Any], token: str) -> str:
        """Make the host over the root file system `tree` and return its line for known_hosts.

        `login` is the public key that may log in, `shape` has the folders to show to the host, and `token`
        names the lab's life, so that a keeper which starts too late knows that its lab is gone.
        """
        self.groups.create(self.name)
        store = self.folder / "store"
        store.mkdir(parents=True)
        disk.mount_store(store, shape["disk_gib"])
        key = disk.prepare(store / "layer", self.index, self.name, login)
        (store / "work").mkdir()
        (self.folder / "disk").mkdir()
        argv = [
            "systemd-nspawn",
            "--quiet",
            "--boot",
            f"--directory={self.folder / 'disk'}",
            f"--machine={self.name}",
            "--register=no",
            "--keep-unit",
            "--settings=no",
            "--kill-signal=SIGRTMIN+3",
            f"--network-bridge={network.MANAGEMENT_BRIDGE}",
            f"--network-veth-extra=vf-{self.name}:fab0",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            "--console=pipe",
            # systemd in the host loads BPF programs for IPAddressDeny=, which nspawn's defaults forbid.
            "--capability=all",
            "--system-call-filter=bpf @raw-io",
            # The clock and the modules are this machine's: no host may touch them.
            "--drop-capability=CAP_SYS_TIME,CAP_SYS_MODULE",
        ]
        argv += [f"--bind-ro={source}:{target}" for source, target in shape["binds"]]
        for number, (lower, target) in enumerate(shape["overlays"]):
            upper = store / "overlays" / str(number)
            upper.mkdir(parents=True)
            argv.append(f"--overlay={lower}:{upper}:{target}")
        layers = f"lowerdir={tree},upperdir={store / 'layer'},workdir={store / 'work'}"
        NSPAWN_LOCKS.mkdir(parents=True, exist_ok=True)
        spec = {
            "token": token,
            "state_file": str(self.lab / "state.json"),
            "folder": str(self.folder),
            "keeper_groups": self.groups.procs_files("keepers"),
            "host_groups": self.groups.procs_files(self.name),
            "links": self.links,
            "links_file": str(self.folder / "links.json"),
            "mounts": [
                {"type": "overlay", "options": layers, "target": str(self.folder / "disk")},
                {"type": "tmpfs", "options": "mode=0755", "target": str(NSPAWN_LOCKS)},
            ],
            # systemd-nspawn makes the last folder of an overlay's mount point, not those above it.
            "mount_points": [str(self.folder / "disk") + target for _, target in shape["overlays"]],
            "argv": argv,
        }
        keeper.write_json(self.folder / "spec.json", spec)
        return f"{network.management_address(self.index)} {key}\n"

    def start(self) -> None:
        """Start the host's keeper, which starts the host and outlives this process."""
        # A keeper that was killed may have left its host running, on the disk that the next one is to use.
        self.groups.kill(self.name)
        keeper.write_json(self.folder / "run.json", {"boots": self.boots})
        with (self.folder / "keeper.log").open("ab") as log:
            # Forked away, so that no process of ours waits for it and none becomes its parent.
            subprocess.run(
                [
                    *("setsid", "--fork", *network.inside(self.namespace)),
                    *("unshare", "--mount", "--propagation", "slave"),
                    *(sys.executable, "-I", str(self.lab / "keeper.py"), str(self.folder / "spec.json")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                check=True,
            )
        deadline = time.monotonic() + 20
        while "keeper" not in self._run():
            if time.monotonic() > deadline:
                raise ApplyError("a host's keeper does not start", where=self.name, remedy=self.last_words())
            time.sleep(0.01)

    def wait(self) -> None:
        """Wait until the host says that it has booted, or its keeper has ended, or the time is over."""
        deadline = time.monotonic() + BOOT_SECONDS
        done = None
        while (left := deadline - time.monotonic()) > 0:
            done = self.try_ssh(["systemctl", "is-system-running", "--wait"], timeout=left, wait=2)
            # Anything else: its manager does not listen yet, or ends for a reboot.
            if done and done.stdout.strip() in {"running", "degraded"}:
                break
            if not self.running:
                raise ApplyError("a host went off while booting", where=self.name, remedy=self.last_words())
        else:
            said = done.stderr.strip().splitlines() if done else []
            raise ApplyError(
                f"a host did not boot within {BOOT_SECONDS} s",
                where=self.name,
                remedy=said[-1] if said else self.last_words(),
            )
        if done.stdout.strip() == "degraded":
            failed = self.exec(["systemctl", "list-units", "--failed", "--plain", "--no-legend"]).stdout
            units = ", ".join(line.split()[0] for line in failed.splitlines() if line.split())
            raise ApplyError("units of a host failed at boot", where=self.name, remedy=units or "none is named")

    def kill(self) -> None:
        """Take the host's power: its processes end at once, its links vanish. Idempotent."""
        run = self._run()
        # Its process 1 first: the kernel then ends all that runs in it together, as a power cut does.
        for part in ("init", "launcher"):
            process = run.get(part)
            if state.alive(process):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process["pid"], signal.SIGKILL)
        self.groups.kill(self.name)
        # Its keeper sees that this was no reboot, and ends; one that was just rebooting it starts it once more.
        deadline = time.monotonic() + 10
        while self.running:
            self.groups.kill(self.name)
            if time.monotonic() > deadline:
                raise ApplyError("a host's keeper does not end", where=self.name, remedy="run ppdeploy lab down")
            time.sleep(0.01)

    def reboot(self) -> None:
        """Reboot the host from inside, as an operator would, and wait until it has booted again."""
        before = self.boots
        # The connection may end before the command has: its exit code says nothing.
        self.try_ssh(["systemctl", "reboot"], timeout=30)
        deadline = time.monotonic() + BOOT_SECONDS
        while self.boots == before:
            if time.monotonic() > deadline or not self.running:
                raise ApplyError("a host did not reboot", where=self.name, remedy=self.last_words())
            time.sleep(0.02)
        self.wait()

    # -- reaching it --------------------------------------------------------------------------------------

    def try_ssh(
        self, argv: Sequence[str], *, timeout: float, wait: float = 0, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str] | None:
        """Run `argv` on the host; None where it took longer than `timeout` seconds.

        `wait` is for how many seconds to try to connect.
        """
        ssh = ["ssh", *self.ssh.options(wait=wait), "-o", "LogLevel=ERROR"]
        command = [*ssh, f"root@{network.management_address(self.index)}", "--", shlex.join(argv)]
        try:
            return subprocess.run(
                command,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None

    def exec(
        self, argv: Sequence[str], *, check: bool = True, stdin: str | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` as root on the host and return what it wrote; see `Lab.exec_ssh`."""
        done = self.try_ssh(argv, stdin=stdin, timeout=timeout)
        if done is None:
            raise UnreachableError(f"`{shlex.join(argv)}` took longer than {timeout:.0f} s", where=self.name)
        # 255 is ssh's own failure, which it explains; a command that a signal ended gives it silently.
        if done.returncode == 255 and done.stderr.strip():
            reason = done.stderr.strip().splitlines()[-1]
            raise UnreachableError("a host of the lab cannot be reached", where=self.name, remedy=reason)
        if check and done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise ApplyError(
                f"`{shlex.join(argv)}` returned {done.returncode}",
                where=self.name,
                remedy=said[-800:] or None,
            )
        return done

    def show_memory(self, limit: int | None) -> None:
        """Have /proc/meminfo of the running host say that it has `limit` bytes, or with None what the machine has.

        Like lxcfs, but as of now: what is available does not move with what is used afterwards.
        """
        init = self.pid
        if init is None:
            return
        within = ["nsenter", f"--target={init}", "--mount", "--pid", "sh", "-euc"]
        what = f"setting what {self.name} sees of its memory"
        # Not mountpoint(1): it knows folders only.
        lift = "while grep -q ' /proc/meminfo ' /proc/self/mountinfo; do umount /proc/meminfo; done"
        system.run([*within, lift], what=what)
        if limit is None:
            return
        used = self.groups.memory_used(self.name) or 0
        text = limited_meminfo(Path("/proc/meminfo").read_text(encoding="ascii"), limit, used)
        show = "cat >/run/ppdeploy-lab-meminfo; mount --bind /run/ppdeploy-lab-meminfo /proc/meminfo"
        system.run([*within, show], what=what, stdin=text)

    # -- its links ----------------------------------------------------------------------------------------

    def set_link(self, nic: Nic, change: dict[str, str | None]) -> None:
        """Record what the links `nic` are to be like, and bring them there where the host is on."""
        if nic not in _INNER:
            raise InputError(f"'{nic}' is no link of a lab's host", remedy=f"use {', '.join(_INNER)}")
        path = self.folder / "links.json"
        wanted = keeper.read_json(path) or {}
        for inner in _INNER[nic]:
            wanted[inner] = {"rate": None, "cut": None, **wanted.get(inner, {}), **change}
        keeper.write_json(path, wanted)
        init = self.pid
        if init is None:
            return
        for link in self.links:
            if link["inner"] in _INNER[nic]:
                for command in keeper.link_commands(link, wanted[link["inner"]], init):
                    what = f"setting {link['inner']} of {self.name}"
                    system.run([*network.inside(self.namespace), *command], what=what)
