"""The lab itself: boot hosts, reach them, hurt them, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ppdeploy.errors import ApplyError, BlockedError, InputError, UnreachableError
from ppdeploy.lab import connect, hosts, keeper, network, rootfs, state, system
from ppdeploy.lab.cgroups import CgroupTree
from ppdeploy.lab.inventory import LabInventory, LabSsh
from ppdeploy.paths import cache_dir, data_root

Nic = Literal["fabric", "management", "both"]
"""Which of a host's links is meant: fab0, host0, or both."""

MAX_NODES = 4
BOOT_SECONDS = 90
"""How long a host may take from its start to `systemctl is-system-running`; 2 s where the machine is idle."""

_INNER = {"fabric": ("fab0",), "management": ("host0",), "both": ("host0", "fab0")}


@dataclass(frozen=True)
class Overlay:
    """A folder of this machine that a host sees at `target` and may write to; what it writes stays in the lab."""

    lower: Path
    target: str


@dataclass(frozen=True)
class NodeStatus:
    """What is known of one host. `system` is what `systemctl is-system-running` says, or `unreachable`, or `off`."""

    name: str
    system: str
    management: str
    fabric: str
    boots: int
    seconds: float | None
    memory_bytes: int | None
    rate: dict[str, str]
    cut: dict[str, str]


@dataclass(frozen=True)
class LabStatus:
    """What is known of a lab. `phase` is `none`, `starting` (a command works on it, or died at it) or `up`."""

    name: str
    phase: str
    folder: str
    checkout: str | None
    owner: str | None
    namespace: str
    inventory: str | None
    nodes: list[NodeStatus]

    def as_json(self) -> dict[str, Any]:
        """Return the status as plain values."""
        return asdict(self)


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

    # -- what is there
    # ------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[str]:
        """The names of the lab's hosts; none where the lab is down."""
        record = state.read_record(self.folder)
        return self._names(record["nodes"]) if record else []

    @property
    def inventory(self) -> Path:
        """The inventory file that `up` wrote."""
        record = state.read_record(self.folder)
        return (
            Path(record["inventory"])
            if record and record.get("inventory")
            else self._inventory_dir / "hosts.yml"
        )

    @property
    def ssh(self) -> LabSsh:
        """How to reach the hosts."""
        keys = self.folder / "ssh"
        proxy = [*network.inside(self.namespace), sys.executable, "-I", str(self.folder / "connect.py")]
        # One hierarchy is enough to find it again.
        proxy += ["--cgroup", self._groups.procs_files("guests")[-1]]
        return LabSsh(self.name, keys / "id_ed25519", keys / "known_hosts", proxy)

    @staticmethod
    def management_address(node: str) -> str:
        """Return the address of host `node` on the management network."""
        return network.management_address(int(node.removeprefix("node")))

    @staticmethod
    def fabric_address(node: str) -> str:
        """Return the address of host `node` on the fabric."""
        return network.fabric_address(int(node.removeprefix("node")))

    def pid(self, node: str) -> int | None:
        """Return the process id, on this machine, of process 1 of host `node`; None where it is off."""
        self._require(node)
        init = (keeper.read_json(self._node(node) / "run.json") or {}).get("init")
        return int(init["pid"]) if state.alive(init) else None

    def boots(self, node: str) -> int:
        """Return how often host `node` was started since the lab came up."""
        self._require(node)
        return int((keeper.read_json(self._node(node) / "run.json") or {}).get("boots", 0))

    def status(self) -> LabStatus:
        """Return what is there now; asks each running host for its state, for at most 3 s."""
        system.require_root("the lab")
        record = state.read_record(self.folder)
        names = self._names(record["nodes"]) if record else []
        with ThreadPoolExecutor(max_workers=MAX_NODES) as pool:
            nodes = list(pool.map(self._node_status, names))
        owner = record.get("owner") if record else None
        return LabStatus(
            name=self.name,
            phase=str(record["phase"]) if record else "none",
            folder=str(self.folder),
            checkout=record.get("checkout") if record else None,
            owner=state.describe_process(owner["pid"]) if state.alive(owner) else None,
            namespace=str(self.namespace),
            inventory=record.get("inventory") if record else None,
            nodes=nodes,
        )

    def _node_status(self, node: str) -> NodeStatus:
        run = keeper.read_json(self._node(node) / "run.json") or {}
        links = keeper.read_json(self._node(node) / "links.json") or {}
        running = state.alive(run.get("launcher"))
        said = "off"
        if running:
            done = self._ssh(
                node, ["systemctl", "is-system-running"], timeout=3, options=["-o", "ConnectTimeout=2"]
            )
            said = (
                done.stdout.strip()
                if done and done.returncode in (0, 1) and done.stdout.strip()
                else "unreachable"
            )
        return NodeStatus(
            name=node,
            system=said,
            management=self.management_address(node),
            fabric=self.fabric_address(node),
            boots=int(run.get("boots", 0)),
            seconds=round(time.time() - run["since"], 1) if running else None,
            memory_bytes=self._groups.memory_used(node) if running else None,
            rate={nic: wanted["rate"] for nic, wanted in links.items() if wanted.get("rate")},
            cut={nic: wanted["cut"] for nic, wanted in links.items() if wanted.get("cut")},
        )

    # -- up and down
    # --------------------------------------------------------------------------------------------

    def up(
        self,
        nodes: int = 2,
        *,
        binds: dict[Path, str] | None = None,
        overlays: Sequence[Overlay] = (),
        inventory: LabInventory | None = None,
        owner: int | None = None,
        say: Callable[[str], None] | None = None,
    ) -> Path:
        """Boot `nodes` hosts (1 to 4), wait until each has finished booting, and return the inventory's path.

        `binds` maps folders of this machine to where the hosts see them, read-only; `overlays` may be written
        to. `owner` is a process id: while that process lives, nobody else's `up` or `down` touches the lab.
        Running hosts are left alone and hosts that are off are started. What a killed `up` left is cleaned
        away first. Raises InputError, BlockedError (another command or checkout has this lab) and ApplyError.
        """
        system.require_machine("ppdeploy lab up")
        if not 1 <= nodes <= MAX_NODES:
            raise InputError(f"a lab has 1 to {MAX_NODES} hosts, not {nodes}", where="--nodes")
        wanted = self._shape_of(nodes, binds or {}, overlays)
        described = inventory or LabInventory.one_pipeline(nodes)
        described.check(nodes)
        say = say or _say_nothing
        with state.locked(self._lock, "lab up"):
            record = state.read_record(self.folder)
            self._refuse_strangers(record, owner)
            if record and self._is_sound(record):
                if record["shape"] != wanted:
                    raise BlockedError(
                        "the lab is up with other hosts or other folders in them",
                        where=f"{self.name}: {record['nodes']} hosts",
                        remedy="run ppdeploy lab down first, or ask for the same",
                    )
                for node in self._names(nodes):
                    if not self._running(node):
                        say(f"starting {node}")
                        self._start(node, record["token"])
                self._wait(self._names(nodes))
                path = self._write_inventory(described)
                state_now = record | {
                    "inventory": str(path),
                    "owner": None if owner is None else state.identity(owner),
                }
                keeper.write_json(self.folder / "state.json", state_now)
                return path
            self._clean()
            try:
                return self._build(nodes, wanted, described, owner, say)
            except BaseException:
                # Ctrl-C too: a half-made lab is of no use to anyone.
                self._clean()
                raise

    def down(self) -> None:
        """End every process of the lab and remove all that it made, whatever state it is in. Idempotent."""
        system.require_root("ppdeploy lab down")
        if not state.labs_folder().is_dir() and not self._groups.exists():
            return
        with state.locked(self._lock, "lab down"):
            self._refuse_strangers(state.read_record(self.folder), os.getpid())
            self._clean()
            self._lock.unlink(missing_ok=True)
        # Another lab may still be there.
        with contextlib.suppress(OSError):
            state.labs_folder().rmdir()

    def _build(
        self,
        nodes: int,
        wanted: dict[str, Any],
        described: LabInventory,
        owner: int | None,
        say: Callable[[str], None],
    ) -> Path:
        self.folder.mkdir(mode=0o700, parents=True)
        record: dict[str, Any] = {
            "phase": "starting",
            "token": uuid.uuid4().hex,
            "boot_id": state.boot_id(),
            "checkout": str(data_root()),
            "nodes": nodes,
            "shape": wanted,
            "owner": None if owner is None else state.identity(owner),
            "inventory": str(self._inventory_dir / "hosts.yml"),
        }
        keeper.write_json(self.folder / "state.json", record)
        for group in ("keepers", "guests", "build"):
            self._groups.create(group)
        tree = rootfs.ensure(cache_dir() / "lab", self._groups.procs_files("build"), say)
        network.create(self.namespace)
        shutil.copyfile(connect.__file__, self.folder / "connect.py")
        shutil.copyfile(keeper.__file__, self.folder / "keeper.py")
        (self.folder / "ssh").mkdir(mode=0o700)
        login = hosts.make_key(self.folder / "ssh" / "id_ed25519", "ppdeploy-lab")
        known = []
        for index, node in enumerate(self._names(nodes), start=1):
            self._groups.create(node)
            key = hosts.prepare(self._node(node) / "layer", index, node, login)
            known.append(f"{network.management_address(index)} {key}\n")
            self._write_spec(node, tree, wanted, record["token"])
        (self.folder / "ssh" / "known_hosts").write_text("".join(known), encoding="ascii")
        say(f"booting {', '.join(self._names(nodes))}")
        for node in self._names(nodes):
            self._start(node, record["token"])
        self._wait(self._names(nodes))
        path = self._write_inventory(described)
        keeper.write_json(self.folder / "state.json", record | {"phase": "up", "inventory": str(path)})
        return path

    @staticmethod
    def _shape_of(nodes: int, binds: dict[Path, str], overlays: Sequence[Overlay]) -> dict[str, Any]:
        """Return what `up` was asked for as plain values, after checking the folders."""
        for folder in (*binds, *(overlay.lower for overlay in overlays)):
            if not folder.is_dir():
                raise InputError("a folder to show to the lab's hosts does not exist", where=str(folder))
            if set(str(folder)) & set(":\\,\n"):
                raise InputError(
                    "the path of a folder for the lab has a colon, comma or backslash", where=str(folder)
                )
        return {
            "nodes": nodes,
            "binds": [[str(source.resolve()), target] for source, target in binds.items()],
            "overlays": [[str(overlay.lower.resolve()), overlay.target] for overlay in overlays],
        }

    def _refuse_strangers(self, record: dict[str, Any] | None, owner: int | None) -> None:
        """Refuse to touch a lab of another checkout, or one that a living process keeps for itself."""
        if not record:
            return
        if record.get("checkout") not in (None, str(data_root())):
            raise BlockedError(
                f"the lab {self.name} belongs to another checkout",
                where=record["checkout"],
                remedy="take it down from there, or set PPDEPLOY_LAB to another name",
            )
        holder = record.get("owner")
        if state.alive(holder) and holder["pid"] != owner:
            raise BlockedError(
                f"the lab {self.name} is held by {state.describe_process(holder['pid'])}",
                remedy="wait until that has ended",
            )

    def _is_sound(self, record: dict[str, Any]) -> bool:
        """Say whether the lab came up completely, in this run of the machine, and still has its network."""
        return (
            record.get("phase") == "up"
            and record.get("boot_id") == state.boot_id()
            and network.exists(self.namespace)
        )

    def _clean(self) -> None:
        """End and remove all that belongs to the lab, from what is there and not from what a record says."""
        record = state.read_record(self.folder)
        if record:
            # A keeper that has not yet joined its group reads this after joining, and gives up.
            keeper.write_json(self.folder / "state.json", record | {"phase": "ending", "token": None})
        for group in self._groups.children() - {"keepers"}:
            self._groups.kill(group)
        # The keepers end by themselves, now that their record is ending; one that hangs is killed.
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
        # systemd-nspawn's own folder, over which each keeper mounts; empty, and only where we made it.
        with contextlib.suppress(OSError):
            Path("/run/systemd/nspawn").rmdir()

    # -- hosts
    # --------------------------------------------------------------------------------------------------

    def boot(self, node: str) -> None:
        """Switch on host `node`, which was killed or powered off, and wait until it has booted."""
        with self._working(node, "lab boot") as record:
            if not self._running(node):
                self._start(node, record["token"])
            self._wait([node])

    def kill(self, node: str) -> None:
        """Take the power from host `node`: all its processes end at once, and its links vanish. Idempotent."""
        with self._working(node, "lab kill"):
            run = keeper.read_json(self._node(node) / "run.json") or {}
            # Its process 1 first: the kernel then ends all that runs in it together, as a power cut does.
            for part in ("init", "launcher"):
                process = run.get(part)
                if state.alive(process):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process["pid"], signal.SIGKILL)
            self._groups.kill(node)
            # Its keeper sees that this was no reboot, and ends by itself.
            deadline = time.monotonic() + 10
            while self._running(node):
                if time.monotonic() > deadline:
                    raise ApplyError(
                        "the host's keeper does not end", where=node, remedy="run ppdeploy lab down"
                    )
                time.sleep(0.01)

    def reboot(self, node: str) -> None:
        """Reboot host `node` from inside, as an operator would, and wait until it has booted again."""
        before = self.boots(node)
        # The connection may end before the command has: its exit code says nothing.
        self._ssh(node, ["systemctl", "reboot"], timeout=30)
        deadline = time.monotonic() + BOOT_SECONDS
        while self.boots(node) == before:
            if time.monotonic() > deadline:
                raise ApplyError(
                    "the host did not reboot", where=node, remedy=f"see {self._node(node)}/console.log"
                )
            time.sleep(0.05)
        self._wait([node])

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
        self._require(node)
        done = self._ssh(node, argv, stdin=stdin, timeout=timeout)
        if done is None:
            raise UnreachableError(f"`{shlex.join(argv)}` took longer than {timeout:.0f} s", where=node)
        # 255 is ssh's own failure; a command that returns it and says nothing on stderr is that command's.
        if done.returncode == 255 and done.stderr.strip():
            raise UnreachableError(
                "the lab's host cannot be reached", where=node, remedy=done.stderr.strip().splitlines()[-1]
            )
        if check and done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise ApplyError(
                f"`{shlex.join(argv)}` returned {done.returncode}", where=node, remedy=said[-800:] or None
            )
        return done

    def ssh_command(self, node: str, argv: Sequence[str] = ()) -> list[str]:
        """Return the ssh command line that logs in to host `node`, or runs `argv` there."""
        self._require(node)
        words = ["ssh", *self.ssh.options(), f"root@{self.management_address(node)}"]
        return [*words, "--", shlex.join(argv)] if argv else words

    def run_in_ns(
        self, argv: Sequence[str], *, check: bool = True, stdin: str | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on this machine, in the lab's network namespace, where the controller is 198.18.0.1."""
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
                where="lab's namespace",
                remedy=said[-800:] or None,
            )
        return done

    def memory_limit(self, node: str, limit: int | None) -> None:
        """Limit the memory of host `node` to `limit` bytes (page cache included), the way to an OOM kill; None lifts it."""
        with self._working(node, "lab memory limit"):
            self._groups.set_memory_limit(node, limit)

    # -- links
    # --------------------------------------------------------------------------------------------------

    def shape(self, node: str, rate: str, nic: Nic = "fabric") -> None:
        """Limit the link of host `node` in both directions to `rate` (as in tc(8): `1gbit`), `none` lifts it.

        It holds over reboots of the host, and is set at once where the host is on.
        """
        self._set_link(node, nic, {"rate": network.check_rate(rate)})

    def cut(self, node: str, nic: Nic = "fabric", *, silent: bool = False) -> None:
        """Cut the link of host `node`: its carrier goes, or with `silent` it stays and nothing arrives any more."""
        self._set_link(node, nic, {"cut": "silent" if silent else "down"})

    def heal(self, node: str, nic: Nic = "both") -> None:
        """Undo `cut`; the limits that `shape` set stay."""
        self._set_link(node, nic, {"cut": None})

    def _set_link(self, node: str, nic: Nic, change: dict[str, str | None]) -> None:
        if nic not in _INNER:
            raise InputError(f"'{nic}' is no link of a lab's host", remedy=f"use {', '.join(_INNER)}")
        with self._working(node, "lab link"):
            path = self._node(node) / "links.json"
            wanted = keeper.read_json(path) or {}
            for inner in _INNER[nic]:
                wanted[inner] = {"rate": None, "cut": None, **wanted.get(inner, {}), **change}
            keeper.write_json(path, wanted)
            init = self.pid(node)
            if init is None:
                return
            for link in self._links(node):
                if link["inner"] in _INNER[nic]:
                    for command in keeper.link_commands(link, wanted[link["inner"]], init):
                        system.run(
                            [*network.inside(self.namespace), *command], what=f"setting the link of {node}"
                        )

    # -- parts
    # --------------------------------------------------------------------------------------------------

    @staticmethod
    def _names(nodes: int) -> list[str]:
        return [f"node{index}" for index in range(1, nodes + 1)]

    def _node(self, node: str) -> Path:
        return self.folder / "nodes" / node

    @staticmethod
    def _links(node: str) -> list[dict[str, str]]:
        """Return both links of a host: its end in the lab's namespace, its own end, and the bridge."""
        return [
            {"outer": f"vb-{node}", "inner": "host0", "bridge": network.MANAGEMENT_BRIDGE},
            {"outer": f"vf-{node}", "inner": "fab0", "bridge": network.FABRIC_BRIDGE},
        ]

    def _write_spec(self, node: str, tree: Path, wanted: dict[str, Any], token: str) -> None:
        """Write what the keeper of host `node` needs to know."""
        folder = self._node(node)
        for name in ("work", "disk", "empty"):
            (folder / name).mkdir()
        argv = [
            "systemd-nspawn",
            "--quiet",
            "--boot",
            f"--directory={folder / 'disk'}",
            f"--machine={node}",
            "--register=no",
            "--keep-unit",
            "--settings=no",
            "--kill-signal=SIGRTMIN+3",
            f"--network-bridge={network.MANAGEMENT_BRIDGE}",
            f"--network-veth-extra=vf-{node}:fab0",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            "--console=pipe",
            # systemd in the host loads BPF programs for IPAddressDeny=, which nspawn's defaults forbid.
            "--capability=all",
            # The clock and the modules are this machine's: no host may touch them.
            "--drop-capability=CAP_SYS_TIME,CAP_SYS_MODULE",
            "--system-call-filter=bpf @raw-io",
        ]
        argv += [f"--bind-ro={source}:{target}" for source, target in wanted["binds"]]
        for number, (lower, target) in enumerate(wanted["overlays"]):
            upper = folder / "overlays" / str(number)
            upper.mkdir(parents=True)
            argv.append(f"--overlay={lower}:{upper}:{target}")
        disk = f"lowerdir={tree},upperdir={folder / 'layer'},workdir={folder / 'work'}"
        Path("/run/systemd/nspawn").mkdir(parents=True, exist_ok=True)
        spec = {
            "token": token,
            "state_file": str(self.folder / "state.json"),
            "folder": str(folder),
            "keeper_groups": self._groups.procs_files("keepers"),
            "host_groups": self._groups.procs_files(node),
            "links": self._links(node),
            "links_file": str(folder / "links.json"),
            "mounts": [
                {"type": "overlay", "options": disk, "target": str(folder / "disk")},
                # Where systemd-nspawn keeps locks by machine name: two labs must not meet there, nor leave
                # any.
                {"type": "tmpfs", "options": "mode=0755", "target": "/run/systemd/nspawn"},
            ],
            "argv": argv,
        }
        keeper.write_json(folder / "spec.json", spec)

    def _start(self, node: str, token: str) -> None:
        """Start the keeper of host `node`, which starts the host; it outlives this process."""
        folder = self._node(node)
        spec = keeper.read_json(folder / "spec.json")
        if spec["token"] != token:
            raise ApplyError("the host was not made by this lab", where=node, remedy="run ppdeploy lab down")
        run = keeper.read_json(folder / "run.json") or {}
        keeper.write_json(folder / "run.json", {"boots": run.get("boots", 0)})
        with (folder / "keeper.log").open("ab") as log:
            # Forked away, so that no process of ours waits for it and none becomes its parent.
            subprocess.run(
                [
                    *("setsid", "--fork", *network.inside(self.namespace)),
                    *("unshare", "--mount", "--propagation", "slave"),
                    *(sys.executable, "-I", str(self.folder / "keeper.py"), str(folder / "spec.json")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                check=True,
            )
        deadline = time.monotonic() + 20
        while "keeper" not in (keeper.read_json(folder / "run.json") or {}):
            if time.monotonic() > deadline:
                raise ApplyError(
                    "the host's keeper does not start", where=node, remedy=self._last_words(node)
                )
            time.sleep(0.01)

    def _last_words(self, node: str) -> str:
        """Return the last line that the host's console, or else its keeper, wrote."""
        for name in ("console.log", "keeper.log"):
            path = self._node(node) / name
            if path.exists():
                lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
                if lines:
                    return lines[-1].strip()
        return "it wrote nothing"

    def _running(self, node: str) -> bool:
        """Say whether the keeper of host `node` lives: the host is on, or just between two boots."""
        return state.alive((keeper.read_json(self._node(node) / "run.json") or {}).get("keeper"))

    def _wait(self, nodes: Sequence[str]) -> None:
        """Wait until all `nodes` have booted and say so themselves."""
        with ThreadPoolExecutor(max_workers=MAX_NODES) as pool:
            list(pool.map(self._wait_for, nodes))

    def _wait_for(self, node: str) -> None:
        """Wait until `node` says that it has booted, or its keeper has ended, or the time is over."""
        deadline = time.monotonic() + BOOT_SECONDS
        done = None
        while (left := deadline - time.monotonic()) > 0:
            done = self._ssh(node, ["systemctl", "is-system-running", "--wait"], timeout=left, wait=2)
            # `offline` and `starting`: the host's own manager does not listen yet, or ends for a reboot.
            if done and done.stdout.strip() in {"running", "degraded"}:
                break
            if not self._running(node):
                raise ApplyError(
                    "the lab's host went off while booting", where=node, remedy=self._last_words(node)
                )
        else:
            said = done.stderr.strip().splitlines() if done else []
            raise ApplyError(
                f"the lab's host did not boot within {BOOT_SECONDS} s",
                where=node,
                remedy=said[-1] if said else self._last_words(node),
            )
        if done.stdout.strip() == "degraded":
            failed = self.exec_ssh(
                node, ["systemctl", "list-units", "--failed", "--plain", "--no-legend"]
            ).stdout
            units = ", ".join(line.split()[0] for line in failed.splitlines() if line.split())
            raise ApplyError(
                "units of the lab's host failed at boot", where=node, remedy=units or "none is named"
            )

    def _ssh(
        self,
        node: str,
        argv: Sequence[str],
        *,
        timeout: float,
        wait: float = 0,
        stdin: str | None = None,
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str] | None:
        """Run `argv` on a host; None where it took longer than `timeout` seconds."""
        ssh = ["ssh", *self.ssh.options(wait=wait), *options, "-o", "LogLevel=ERROR"]
        command = [*ssh, f"root@{self.management_address(node)}", "--", shlex.join(argv)]
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

    def _write_inventory(self, described: LabInventory) -> Path:
        path = self._inventory_dir / "hosts.yml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(described.render(self.ssh), encoding="utf-8")
        return path

    def _remove_inventory(self, record: dict[str, Any] | None) -> None:
        """Remove the inventory where it is the one this lab wrote, and its folder where nothing else is in it."""
        path = (
            Path(record["inventory"])
            if record and record.get("inventory")
            else self._inventory_dir / "hosts.yml"
        )
        with contextlib.suppress(OSError):
            if f"for the lab {self.name};" in path.read_text(encoding="utf-8").partition("\n")[0]:
                path.unlink()
                path.parent.rmdir()

    def _require_up(self) -> dict[str, Any]:
        system.require_root("the lab")
        record = state.read_record(self.folder)
        if not record or record.get("phase") not in {"up", "starting"}:
            raise InputError("the lab is not up", where=self.name, remedy="run ppdeploy lab up")
        return record

    def _require(self, node: str) -> dict[str, Any]:
        record = self._require_up()
        names = self._names(record["nodes"])
        if node not in names:
            raise InputError(
                f"the lab has no host '{node}'", where=self.name, remedy=f"use {', '.join(names)}"
            )
        return record

    @contextmanager
    def _working(self, node: str, action: str) -> Iterator[dict[str, Any]]:
        """Hold the lab's lock for an action on host `node`."""
        self._require(node)
        with state.locked(self._lock, action):
            yield self._require(node)


def _say_nothing(_line: str) -> None:
    """Stand in for a caller that wants to hear nothing."""
