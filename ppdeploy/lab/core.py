"""The lab itself: bring hosts up, hand them out by name, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppdeploy.errors import ApplyError, BlockedError, InputError
from ppdeploy.lab import disk, keeper, network, rootfs, state, system
from ppdeploy.lab.cgroups import CgroupTree
from ppdeploy.lab.host import NSPAWN_LOCKS, Host, Nic, Overlay
from ppdeploy.lab.inventory import LabInventory, LabSsh
from ppdeploy.lab.status import LabStatus
from ppdeploy.paths import cache_dir, data_root

MAX_NODES = 4


class Lab:
    """One lab of this machine, found again by its name from any process.

    `name` is the checkout's own lab where it is None. `inventory_dir` is where `hosts.yml` is written: for
    the checkout's own lab `inventory/lab`, else below the lab's own folder.
    """

    def __init__(self, name: str | None = None, *, inventory_dir: Path | None = None) -> None:
        self.name = state.check_name(name or state.default_name())
        self.folder = state.labs_folder() / self.name
        self.namespace = self.folder / "net"
        self._lock = state.labs_folder() / f"{self.name}.lock"
        self._groups = CgroupTree(f"ppdeploy-lab-{self.name}")
        if inventory_dir is None:
            root = data_root()
            own = self.name == state.default_name() and root.name != "_data" and os.access(root, os.W_OK)
            inventory_dir = (root if own else self.folder) / "inventory" / "lab"
        self._inventory_dir = inventory_dir

    # -- what is there ------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[str]:
        """The names of the lab's hosts; none where the lab is down."""
        return [host.name for host in self._hosts(state.read_record(self.folder))]

    @property
    def inventory(self) -> Path:
        """The inventory file that `up` wrote, or would write."""
        record = state.read_record(self.folder)
        return Path(record["inventory"]) if record else self._inventory_dir / "hosts.yml"

    @property
    def ssh(self) -> LabSsh:
        """How to reach the hosts."""
        keys = self.folder / "ssh"
        proxy = [*network.inside(self.namespace), sys.executable, "-I", str(self.folder / "connect.py")]
        # One hierarchy is enough to find it again.
        for procs in self._groups.procs_files("guests")[-1:]:
            proxy += ["--cgroup", procs]
        return LabSsh(self.name, keys / "id_ed25519", keys / "known_hosts", self.folder / "cp", proxy)

    def management_address(self, node: str) -> str:
        """Return the address of host `node` on the management network."""
        return network.management_address(self._host(node).index)

    def fabric_address(self, node: str) -> str:
        """Return the address of host `node` on the fabric."""
        return network.fabric_address(self._host(node).index)

    def pid(self, node: str) -> int | None:
        """Return the process id, on this machine, of process 1 of host `node`; None where it is off."""
        return self._host(node).pid

    def boots(self, node: str) -> int:
        """Return how often host `node` was started since the lab came up."""
        return self._host(node).boots

    def status(self) -> LabStatus:
        """Return what is there now; asks each running host for its state, for at most 3 s."""
        system.require_root("ppdeploy lab")
        record = state.read_record(self.folder)
        with ThreadPoolExecutor(max_workers=MAX_NODES) as pool:
            nodes = list(pool.map(Host.status, self._hosts(record)))
        owner = record["owner"] if record else None
        return LabStatus(
            name=self.name,
            phase=str(record["phase"]) if record else "none",
            folder=str(self.folder),
            checkout=record["checkout"] if record else None,
            owner=state.describe_process(owner["pid"]) if state.alive(owner) else None,
            namespace=str(self.namespace),
            inventory=record["inventory"] if record else None,
            nodes=nodes,
        )

    # -- up and down --------------------------------------------------------------------------------------

    def up(
        self,
        nodes: int = 2,
        *,
        binds: Mapping[Path, str] | None = None,
        overlays: Sequence[Overlay] = (),
        inventory: LabInventory | None = None,
        disk_gib: int = 8,
        owner: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Path:
        """Boot `nodes` hosts (1 to 4), wait until each has finished booting, and return the inventory's path.

        `binds` maps folders of this machine to where the hosts see them, read-only; `overlays` may be written
        to. `disk_gib` is the size of each host's disk, which is memory of this machine, taken only as it is
        written. `owner` is a process id: while that process lives, no other process's `up` or `down` touches
        the lab. Hosts that run are left alone, hosts that are off are started. What a killed `up` left is
        cleaned away first. Raises InputError, BlockedError (another command or checkout has this lab) and
        ApplyError.
        """
        system.require_machine("ppdeploy lab up")
        if not 1 <= nodes <= MAX_NODES:
            raise InputError(f"a lab has 1 to {MAX_NODES} hosts, not {nodes}", where="--nodes")
        shape = _shape(nodes, disk_gib, binds or {}, overlays)
        described = inventory or LabInventory.one_pipeline(nodes)
        described.check(nodes)
        with state.locked(self._lock, "lab up"):
            record = state.read_record(self.folder)
            self._refuse_strangers(record, owner)
            fresh = record is None or not self._is_sound(record)
            if record is None or fresh:
                self._clean()
                record = {
                    "version": state.VERSION,
                    "phase": "starting",
                    "token": uuid.uuid4().hex,
                    "boot_id": state.boot_id(),
                    "checkout": str(data_root()),
                    "shape": shape,
                    "owner": None,
                    "inventory": str(self._inventory_dir / "hosts.yml"),
                }
            elif record["shape"] != shape:
                raise BlockedError(
                    "the lab is up with other hosts, or other folders in them",
                    where=f"{self.name} has {record['shape']['nodes']} hosts",
                    remedy="run ppdeploy lab down first, or ask for the same",
                )
            try:
                if fresh:
                    # Hosts get the modes that their files need, whatever this person uses for their own.
                    umask = os.umask(0o022)
                    try:
                        self._build(record, say or _say_nothing)
                    finally:
                        os.umask(umask)
                hosts = self._hosts(record)
                for host in hosts:
                    if not host.running:
                        host.start()
                with ThreadPoolExecutor(max_workers=MAX_NODES) as pool:
                    list(pool.map(Host.wait, hosts))
                path = self._write_inventory(described)
            except BaseException:
                if fresh:
                    # Ctrl-C too: a half-made lab is of no use to anyone.
                    self._clean()
                raise
            held = None if owner is None else state.identity(owner)
            keeper.write_json(self.folder / "state.json", record | {"phase": "up", "owner": held})
            return path

    def down(self) -> None:
        """End every process of the lab and remove all that it made, whatever state it is in. Idempotent."""
        system.require_root("ppdeploy lab down")
        if not state.labs_folder().is_dir() and not self._groups.exists():
            return
        with state.locked(self._lock, "lab down"):
            self._refuse_strangers(state.read_record(self.folder), os.getpid())
            self._clean()
            self._lock.unlink()
        # Another lab may still be there.
        with contextlib.suppress(OSError):
            state.labs_folder().rmdir()

    def _build(self, record: dict[str, Any], say: Callable[[str], None]) -> None:
        """Make the lab that `record` describes; its hosts are off."""
        self.folder.mkdir(mode=0o700, parents=True)
        keeper.write_json(self.folder / "state.json", record)
        for group in ("keepers", "guests", "build"):
            self._groups.create(group)
        tree = rootfs.ensure(cache_dir() / "lab", self._groups.procs_files("build"), say)
        network.create(self.namespace)
        # Copies, so that a lab goes on as it began when the checkout moves to another commit.
        for name in ("connect.py", "keeper.py"):
            shutil.copyfile(Path(__file__).with_name(name), self.folder / name)
        ssh = self.ssh
        ssh.key.parent.mkdir(mode=0o700)
        login = disk.make_key(ssh.key, "ppdeploy-lab")
        hosts = self._hosts(record)
        known = [host.create(tree, login, record["shape"], record["token"]) for host in hosts]
        ssh.known_hosts.write_text("".join(known), encoding="ascii")
        say(f"booting {', '.join(host.name for host in hosts)}")

    def _refuse_strangers(self, record: dict[str, Any] | None, owner: int | None) -> None:
        """Refuse to touch a lab of another checkout, or one that a living process keeps for itself."""
        if not record:
            return
        if record["checkout"] != str(data_root()):
            raise BlockedError(
                f"the lab {self.name} belongs to another checkout",
                where=record["checkout"],
                remedy="take it down from there, or set PPDEPLOY_LAB to another name",
            )
        holder = record["owner"]
        if state.alive(holder) and holder["pid"] != owner:
            raise BlockedError(
                f"the lab {self.name} is held by {state.describe_process(holder['pid'])}",
                remedy="wait until that has ended",
            )

    def _is_sound(self, record: dict[str, Any]) -> bool:
        """Say whether the lab came up completely, in this run of the machine, and still has its network."""
        return record["phase"] == "up" and record["boot_id"] == state.boot_id() and network.exists(self.namespace)

    def _clean(self) -> None:
        """End and remove all that belongs to the lab, from what is there and not from what a record says."""
        record = state.read_record(self.folder)
        if record:
            # A keeper reads this before each boot, also one that starts only now, and gives up.
            keeper.write_json(self.folder / "state.json", record | {"phase": "ending", "token": None})
        for group in self._groups.children() - {"keepers"}:
            self._groups.kill(group)
        # The keepers end by themselves once their hosts have; one that hangs is killed.
        deadline = time.monotonic() + 2
        while self._groups.pids() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._groups.kill()
        network.remove_bridges(self.namespace)
        network.unmount_below(self.folder)
        self._groups.remove()
        self._remove_inventory(record)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        # Only where it is empty: then no other container is there, and we may have made it.
        with contextlib.suppress(OSError):
            NSPAWN_LOCKS.rmdir()

    # -- hosts --------------------------------------------------------------------------------------------

    def boot(self, node: str) -> None:
        """Switch on host `node`, which was killed or powered off, and wait until it has booted."""
        with self._working(node, "lab boot") as host:
            if not host.running:
                host.start()
            host.wait()

    def kill(self, node: str) -> None:
        """Take the power from host `node`: its processes end at once, its links vanish. Idempotent."""
        with self._working(node, "lab kill") as host:
            host.kill()

    def reboot(self, node: str) -> None:
        """Reboot host `node` from inside, as an operator would, and wait until it has booted again."""
        self._host(node).reboot()

    def exec_ssh(
        self,
        node: str,
        argv: Sequence[str],
        *,
        check: bool = True,
        stdin: str | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` as root on host `node` and return what it wrote; `timeout` in seconds.

        Raises UnreachableError where ssh cannot log in, and with `check` ApplyError where the command failed.
        """
        return self._host(node).exec(argv, check=check, stdin=stdin, timeout=timeout)

    def ssh_command(self, node: str, argv: Sequence[str] = ()) -> list[str]:
        """Return the ssh command line that logs in to host `node`, or runs `argv` there."""
        words = ["ssh", *self.ssh.options(), f"root@{self.management_address(node)}"]
        return [*words, "--", shlex.join(argv)] if argv else words

    def run_in_ns(
        self, argv: Sequence[str], *, check: bool = True, stdin: str | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on this machine in the lab's network namespace, where we are 198.18.0.1 and 198.18.1.1.

        `timeout` in seconds. With `check` a command that fails raises ApplyError.
        """
        self._require_up()
        done = subprocess.run(
            keeper.joining(self._groups.procs_files("guests"), [*network.inside(self.namespace), *argv]),
            capture_output=True,
            text=True,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise ApplyError(
                f"`{shlex.join(argv)}` returned {done.returncode}",
                where="the lab's network namespace",
                remedy=said[-800:] or None,
            )
        return done

    def memory_limit(self, node: str, limit: int | None) -> None:
        """Limit the memory of host `node` to `limit` bytes, the way to an OOM kill; None lifts it.

        What it has read from disk counts too, but gives way. Until its next boot the host's /proc/meminfo says so too:
        a host that is smaller than the others, to plan for.
        """
        with self._working(node, "lab memory limit") as host:
            self._groups.set_memory_limit(host.name, limit)
            host.show_memory(limit)

    # -- links --------------------------------------------------------------------------------------------

    def shape(self, node: str, rate: str, nic: Nic = "fabric") -> None:
        """Limit the link of host `node` in both directions to `rate` (as in tc(8): `1gbit`), `none` lifts it.

        It holds over reboots of the host, and is set at once where the host is on.
        """
        with self._working(node, "lab shape") as host:
            host.set_link(nic, {"rate": network.check_rate(rate)})

    def cut(self, node: str, nic: Nic = "fabric", *, silent: bool = False) -> None:
        """Cut the link of host `node`: its carrier goes, or with `silent` stays and nothing arrives."""
        with self._working(node, "lab cut") as host:
            host.set_link(nic, {"cut": "silent" if silent else "down"})

    def heal(self, node: str, nic: Nic = "both") -> None:
        """Undo `cut`; the limits that `shape` set stay."""
        with self._working(node, "lab heal") as host:
            host.set_link(nic, {"cut": None})

    # -- parts --------------------------------------------------------------------------------------------

    def _hosts(self, record: dict[str, Any] | None) -> list[Host]:
        count = int(record["shape"]["nodes"]) if record else 0
        ssh = self.ssh
        return [Host(index, self.folder, self.namespace, self._groups, ssh) for index in range(1, count + 1)]

    def _require_up(self) -> list[Host]:
        system.require_root("ppdeploy lab")
        hosts = self._hosts(state.read_record(self.folder))
        if not hosts:
            raise InputError("the lab is not up", where=self.name, remedy="run ppdeploy lab up")
        return hosts

    def _host(self, node: str) -> Host:
        hosts = {host.name: host for host in self._require_up()}
        if node not in hosts:
            raise InputError(f"the lab has no host '{node}'", where=self.name, remedy=f"use {', '.join(hosts)}")
        return hosts[node]

    @contextmanager
    def _working(self, node: str, action: str) -> Iterator[Host]:
        """Hold the lab's lock for an action on host `node`."""
        self._host(node)
        with state.locked(self._lock, action):
            yield self._host(node)

    def _write_inventory(self, described: LabInventory) -> Path:
        path = self._inventory_dir / "hosts.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(described.render(self.ssh), encoding="utf-8")
        return path

    def _remove_inventory(self, record: dict[str, Any] | None) -> None:
        """Remove the inventory that this lab wrote, and its folder where nothing else is in it."""
        path = Path(record["inventory"]) if record else self._inventory_dir / "hosts.yml"
        with contextlib.suppress(OSError):
            if f"for the lab {self.name};" in path.read_text(encoding="utf-8").partition("\n")[0]:
                path.unlink()
                path.parent.rmdir()


def _shape(nodes: int, disk_gib: int, binds: Mapping[Path, str], overlays: Sequence[Overlay]) -> dict[str, Any]:
    """Return what `up` was asked for as plain values, after checking the folders."""
    for folder in (*binds, *(overlay.lower for overlay in overlays)):
        if not folder.is_dir():
            raise InputError("a folder to show to the lab's hosts does not exist", where=str(folder))
        if set(str(folder.resolve())) & set(":\\,"):
            raise InputError("a folder for the lab has a colon, comma or backslash", where=str(folder))
    return {
        "nodes": nodes,
        "disk_gib": disk_gib,
        "binds": [[str(source.resolve()), target] for source, target in binds.items()],
        "overlays": [[str(overlay.lower.resolve()), overlay.target] for overlay in overlays],
    }


def _say_nothing(_line: str) -> None:
    """Stand in for a caller that wants to hear nothing."""
