"""The agent itself: it looks, lets the protocol decide, and does what it says, some times a second.

Whatever may take time happens in threads (polls, systemctl, hashing, HTTP, journals); this loop only
reads what they found last. The watchdog and the heartbeat are fed by this loop alone (rules 11 and 12).
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import select
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType

from ppdeploy.agent import command, core, custody, head, metrics, notify, release, signing, store, wire
from ppdeploy.agent.actions import (
    Action,
    DrainRank,
    KeepJournal,
    KillRank,
    SaveMemory,
    SaveRecord,
    Say,
    SendCanary,
    StartRank,
)
from ppdeploy.agent.cgroup import resident_bytes
from ppdeploy.agent.clock import machine_id, now
from ppdeploy.agent.command_line import option
from ppdeploy.agent.config import Config
from ppdeploy.agent.contact import Poll
from ppdeploy.agent.engine import Engine, Target
from ppdeploy.agent.inspector import Inspector
from ppdeploy.agent.journal import Follower, Keeper, Kept
from ppdeploy.agent.messages import NONE, Member
from ppdeploy.agent.poller import Poller
from ppdeploy.agent.sight import Identity, Local
from ppdeploy.agent.ticket import Ticket
from ppdeploy.agent.unit import RankUnit
from ppdeploy.agent.version import VERSION

TICK = 0.4
_SLOW_LOOKS = 10.0
_BEAT = 2.0


class Agent:
    """One life of the agent. `run` returns when it is told to end; the rank is left as it is."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._key = signing.read_key(config.key)
        boot = store.begin_boot(config.boot)
        self._identity = Identity(config.cluster, config.pipeline, config.node, machine_id(), boot)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._ended: queue.SimpleQueue[Poll] = queue.SimpleQueue()
        self._pollers: dict[str, Poller] = {}
        self._unit = RankUnit(config.unit, config.ticket, config.consumed, config.device, self._wake)
        self._inspector = Inspector(config, self._wake)
        self._engine = Engine()
        self._keeper = Keeper(config.keep, config.unit)
        self._follower: Follower | None = None
        self._storer = store.Storer(store.SlotFile(config.record), self._identity.boot_id, self._wake)
        self._memory = store.memory_from_json(store.read_json(config.memory), self._identity.boot_id)
        self._storage_problems: dict[Path, str] = {}
        self._disk_problem = ""
        self._rank_memory = (float("-inf"), 0)
        self._stopping = False
        self._old_release: release.NodeRelease | None = None
        self._beat_at = float("-inf")
        self._local = self._look()
        self._state = core.begin(self._local, now(), config.settings)
        self._looped_at = now()
        self._published = core.answer(self._state, self._local)

    def run(self) -> None:
        """Run until SIGTERM or SIGINT."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        server = wire.Server(self.answer)
        for address, port in self._config.listen:
            server.add(wire.listen(address, port))
        threading.Thread(target=server.run, name="http", daemon=True).start()
        notify.tell("READY=1")
        while not self._stopping:
            self.turn()
            self._wait()
        server.stop()
        notify.tell("STOPPING=1")

    def turn(self) -> None:
        """One control loop."""
        config, moment = self._config, now()
        self._local = local = self._look()
        polls = []
        while not self._ended.empty():
            polls.append(self._ended.get())
        self._state, actions = core.step(self._state, polls, local, moment, config.settings)
        for action in actions:
            self._act(action)
        after = replace(local, stored_memory=self._memory)
        self._local = after
        self._published = replace(core.answer(self._state, after), version=VERSION)
        self._ask(core.peers(self._state, after))
        self._attend(after)
        self._looped_at = moment
        self._beat(moment)

    def answer(self, request: wire.Request) -> wire.Reply:
        """Answer a request; called by the server's thread, reads only."""
        moment, settings = now(), self._config.settings
        if request.path == "/v1/state":
            nonce = request.query.get("nonce", "")
            if not signing.is_nonce(nonce):
                return wire.Reply(400, b"a nonce of 32 hexadecimal digits is needed\n")
            shown = replace(self._published, loop_age=max(0.0, moment - self._looped_at))
            body, signature = signing.seal(self._key, nonce, shown)
            return wire.Reply(200, body, "application/json", {signing.HEADER: signature})
        if request.path == "/healthz":
            why = metrics.why_unhealthy(self._state, moment, settings)
            if moment - self._looped_at > settings.lease:
                why = "the agent's control loop is stuck"
            return wire.Reply(503 if why else 200, (why or "serving").encode() + b"\n")
        if request.path == "/metrics":
            text = metrics.prometheus(self._state, self._local, moment, settings)
            return wire.Reply(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")
        if request.path == "/v1/status" and request.loopback:
            status = metrics.status(self._state, self._local, moment, settings)
            status["keeper_problem"] = self._keeper.problem
            return wire.Reply(200, json.dumps(status).encode() + b"\n", "application/json")
        return wire.Reply(404, b"not found\n")

    # Looking.

    def _look(self) -> Local:
        rank = self._unit.look()
        absent = custody.is_absent(rank)
        self._inspector.rank_is(absent=absent)
        inspection = self._inspector.last
        rank = replace(rank, memory_bytes=self._resident())
        follower = self._follower
        return Local(
            identity=self._identity,
            salt=secrets.randbits(64),
            rank=rank,
            release=inspection.release,
            ready=inspection.ready and (inspection.absent or not absent),
            remark=inspection.remark
            or ("" if inspection.absent or not absent else "what the rank needs is being checked"),
            command=command.read(self._config.command),
            api=self._engine.sight(),
            dying=follower.said if follower is not None and not absent else "",
            stored_memory=self._memory,
            stored_record=self._storer.stored,
            storage_problem=self._storer.problem or next(iter(self._storage_problems.values()), ""),
            disk_problem=self._storer.disk,
        )

    def _resident(self) -> int:
        if not self._unit.pids:
            # Looked at anew as soon as a rank is there: one that was just adopted does not count as empty.
            self._rank_memory = (float("-inf"), 0)
            return 0
        moment = now()
        if moment - self._rank_memory[0] >= _SLOW_LOOKS:
            self._rank_memory = (moment, resident_bytes(self._unit.pids))
        return self._rank_memory[1]

    # Acting.

    def _act(self, action: Action) -> None:
        if isinstance(action, SaveMemory):
            self._save_memory(action)
        elif isinstance(action, SaveRecord):
            self._storer.want(action.record)
        elif isinstance(action, StartRank):
            self._start(action)
        elif isinstance(action, KillRank):
            self._unit.kill()
        elif isinstance(action, DrainRank):
            self._unit.drain()
        elif isinstance(action, SendCanary):
            self._engine.canary(action.number, full_size=action.full_size)
        elif isinstance(action, KeepJournal):
            self._keeper.keep(Kept(action.generation, action.series, action.reason))
        elif isinstance(action, Say):
            _say(action.text)

    def _save_memory(self, action: SaveMemory) -> None:
        try:
            store.write_json(self._config.memory, store.memory_to_json(action.memory))
        except OSError as error:
            self._complain(self._config.memory, f"the node's memory cannot be stored ({self._config.memory}): {error}")
            return
        self._storage_problems.pop(self._config.memory, None)
        self._memory = action.memory

    def _complain(self, path: Path, text: str) -> None:
        """Tell why a file cannot be written, until it can: a gang is not to wait for what is long over."""
        if text != self._storage_problems.get(path):
            _say(text)
        self._storage_problems[path] = text

    def _start(self, action: StartRank) -> None:
        if self._follower is not None:
            self._follower.close()
        self._follow()
        self._engine.forget()
        _say(f"starting the rank of generation {action.generation}, release {action.release[:12]}")
        try:
            self._unit.start(Ticket(action.generation, action.release, self._identity.boot_id))
        except OSError as error:
            _say(f"the start ticket cannot be written: {error}")

    def _follow(self) -> None:
        """Follow the rank's journal; where no program can be started, the next loop tries again."""
        try:
            self._follower = Follower(self._config.unit)
        except OSError as error:
            self._follower = None
            _say(f"the rank's journal cannot be followed: {error}")

    # Attending to what goes on.

    def _ask(self, peers: dict[str, Member]) -> None:
        """Keep one poller for each peer; a peer with a new address gets a new one."""
        for name, poller in list(self._pollers.items()):
            if peers.get(name) is None or peers[name].address != poller.peer.address:
                poller.stop()
                del self._pollers[name]
        steady = self._state.head.phase == head.SERVING or (
            self._state.head.phase == head.WORKER and self._published.rank.state == "running"
        )
        for name, peer in peers.items():
            if name not in self._pollers:
                place = (self._config.cluster, self._config.pipeline)
                self._pollers[name] = Poller(peer, self._config.port, self._key, place, self._ended, self._wake)
            self._pollers[name].interval = 1.0 if steady else 0.3

    def _attend(self, local: Local) -> None:
        """Watch the API while this node's rank has one, and the rank's log while it runs; tell of the disk."""
        if local.disk_problem not in {"", self._disk_problem}:
            _say(local.disk_problem)
        self._disk_problem = local.disk_problem
        running = not custody.is_absent(local.rank) and local.rank.running != NONE
        full = self._running_release(local) if running else None
        self._engine.watch(_target(full) if full is not None else None)
        self._engine.interval = 2.0 if self._state.head.phase == head.SERVING else 1.0
        if running and self._follower is None:
            self._follow()
        if custody.is_absent(local.rank) and self._follower is not None:
            self._follower.close()
            self._follower = None

    def _running_release(self, local: Local) -> release.NodeRelease | None:
        """Return the release that the rank runs by, read from its own folder, not through `current`."""
        digest = local.rank.release
        known = self._inspector.last.full
        if known is not None and known.digest == digest:
            return known
        cached = self._old_release
        if cached is None or cached.digest != digest:
            # Unchecked: a file that was edited by hand since must not end the watch of a rank that runs, which would
            # count as a stall.
            folder, config = self._config.releases / digest, self._config
            try:
                cached = release.read(folder, config.node, config.pipeline, checked=False)
            except release.DiffersError:
                return None
            self._old_release = cached
        return cached

    def _beat(self, moment: float) -> None:
        if moment - self._beat_at < _BEAT:
            return
        self._beat_at = moment
        notify.tell("WATCHDOG=1")
        try:
            store.write_json(self._config.heartbeat, int(moment), mode=0o644)
            self._storage_problems.pop(self._config.heartbeat, None)
        except OSError as error:
            self._complain(
                self._config.heartbeat, f"the heartbeat cannot be written ({self._config.heartbeat}): {error}"
            )

    # Waiting.

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"w")
        except BlockingIOError:
            # The pipe is full, so the loop is awake already.
            return

    def _wait(self) -> None:
        """Wait for the next turn, or for a thread's news or the end of the rank's main process."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        handle = -1
        if self._unit.main_pid and self._unit.pids:
            try:
                handle = os.pidfd_open(self._unit.main_pid)
                poll.register(handle, select.POLLIN)
            except ProcessLookupError:
                handle = -1
        poll.poll(TICK * 1000)
        if handle >= 0:
            os.close(handle)
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            return

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True
        self._wake()


def _target(full: release.NodeRelease) -> Target | None:
    port = option(full.argv, "--port")
    if not port:
        return None
    chunk = option(full.argv, "--max-num-batched-tokens")
    model = option(full.argv, "--served-model-name") or (full.argv[2] if len(full.argv) > 2 else "")
    address = option(full.argv, "--host") or "127.0.0.1"
    return Target(address, int(port), model, int(chunk)) if chunk else Target(address, int(port), model)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
