"""Measure the handoffs of a pipeline as vLLM makes them, between every two of its nodes, both ways.

Runs on every node at once, by the Python of vLLM's environment and under the environment of the ranks:

    python handoff.py '{"rank": 0, "hosts": ["node1", "node2"], "master": "192.0.2.11", "port": 40000, ...}'

It needs nothing but torch. Each line of its output is one JSON object: a size of handoff with its times, what went
wrong with a pair, or `done`. A pair that fails costs no other one.

One handoff is what `isend_tensor_dict` sends (vllm/distributed/parallel_state.py, 0.26.0 to 0.33.0): the description
of the tensors over gloo, its length first, then `hidden_states` and `residual` by one send each, over NCCL where they
are on a GPU. The receiver answers with one byte over gloo when it has both. Its way back is half of the median round
trip of such bytes, and is taken off: what is left is one way, from the sender's first call until the receiver has all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

#: Seconds in which the nodes must have found each other: torch's import takes long on a busy host.
MEETING = 60.0
#: Seconds after which an operation between two nodes has failed.
SILENCE = 45.0
#: Measurements of one size at the most, and round trips of one byte.
MOST, ROUND_TRIPS = 200, 50
#: A size is measured so often at the least, if that does not take longer than LONGEST seconds.
LEAST, LONGEST = 3, 20.0
#: Bytes up to which the first handoff of a size is thrown away: connections and caches are not warm yet.
WARM = 4 << 20


def quantile(values: list[float], share: float) -> float:
    """Return the smallest of the values that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def tell(**line: Any) -> None:
    """Print one line; what was measured stays known if the rest never comes."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Handoffs:
    """The handoffs of one node, rank `config["rank"]` of the nodes named in `config["hosts"]`.

    `config` also has: `device` (cuda or cpu), `bytes_per_token` (of both tensors), `tokens` (the sizes, ascending) and
    `seconds`, what one direction of a pair may take.
    """

    def __init__(self, torch: Any, config: dict[str, Any]) -> None:
        self.torch = torch
        self.dist = torch.distributed
        self.rank = int(config["rank"])
        self.hosts = [str(host) for host in config["hosts"]]
        self.sizes = [int(tokens) for tokens in config["tokens"]]
        self.row = int(config["bytes_per_token"]) // 2
        self.budget = float(config["seconds"]) / len(self.sizes)
        self.device = str(config["device"])
        self.tensors = [torch.zeros((max(self.sizes), self.row), dtype=torch.uint8, device=self.device) for _ in "ab"]
        self.byte = torch.zeros(1, dtype=torch.uint8)

    # ---- one message

    def settle(self) -> None:
        """Wait until the GPU has done what it was told."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def describe(self, peer: int, tokens: int) -> None:
        """Send the description of a handoff; of 0 tokens: there will be no more."""
        listed = [[name, [tokens, self.row], "uint8", self.device] for name in ("hidden_states", "residual")]
        text = json.dumps({"tokens": tokens, "tensors": listed}).encode()
        self.dist.send(self.torch.tensor([len(text)], dtype=self.torch.long), peer)
        self.dist.send(self.torch.frombuffer(bytearray(text), dtype=self.torch.uint8), peer)

    def described(self, peer: int) -> int:
        """Receive the description of a handoff and return its tokens."""
        length = self.torch.zeros(1, dtype=self.torch.long)
        self.dist.recv(length, peer)
        text = self.torch.zeros(int(length.item()), dtype=self.torch.uint8)
        self.dist.recv(text, peer)
        return int(json.loads(bytes(text.tolist()))["tokens"])

    def handoff(self, peer: int, tokens: int) -> float:
        """Send one handoff; return the seconds until the receiver's byte is here."""
        self.settle()
        began = time.perf_counter()
        self.describe(peer, tokens)
        for work in [self.dist.isend(tensor[:tokens], peer) for tensor in self.tensors]:
            work.wait()
        self.dist.recv(self.byte, peer)
        return time.perf_counter() - began

    # ---- one direction of a pair

    def send(self, peer: int) -> None:
        """Send handoffs of every size and tell how long they took."""
        back = self.round_trip(peer) / 2
        way = {"sender": self.hosts[self.rank], "receiver": self.hosts[peer]}
        before: tuple[int, float] | None = None
        for tokens in self.sizes:
            size = 2 * self.row * tokens
            if before and LEAST * before[1] * size / before[0] > LONGEST:
                tell(**way, tokens=tokens, bytes=size, skipped="it would take too long")
                continue
            times = self.times(peer, tokens, size)
            before = (size, quantile(times, 0.5))
            ways = [max(seconds - back, 0.0) for seconds in times]
            tell(
                **way,
                tokens=tokens,
                bytes=size,
                count=len(ways),
                p50=quantile(ways, 0.5),
                p99=quantile(ways, 0.99),
            )
        self.describe(peer, 0)

    def times(self, peer: int, tokens: int, size: int) -> list[float]:
        """Return the seconds of handoffs of one size, each with the byte that answers it."""
        if size <= WARM:
            self.handoff(peer, tokens)
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < MOST:
            times.append(self.handoff(peer, tokens))
            spent = time.perf_counter() - began
            if spent > LONGEST or (spent > self.budget and len(times) >= LEAST):
                break
        return times

    def round_trip(self, peer: int) -> float:
        """Return the median seconds of one byte there and one back; the first is thrown away."""
        times = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            self.dist.send(self.byte, peer)
            self.dist.recv(self.byte, peer)
            times.append(time.perf_counter() - began)
        return quantile(times[1:], 0.5)

    def receive(self, peer: int) -> None:
        """Take handoffs until there are no more."""
        for _ in range(ROUND_TRIPS):
            self.dist.recv(self.byte, peer)
            self.dist.send(self.byte, peer)
        while True:
            tokens = self.described(peer)
            if not tokens:
                return
            for work in [self.dist.irecv(tensor[:tokens], peer) for tensor in self.tensors]:
                work.wait()
            self.settle()
            self.dist.send(self.byte, peer)


def measure(handoffs: Handoffs, store: Any, rounds: list[list[list[int]]]) -> None:
    """Measure this node's pairs in the order of the rounds; no two pairs of a round share a node."""
    rank = handoffs.rank
    for number, pairs in enumerate(rounds):
        for first, second in pairs:
            if rank not in (first, second):
                continue
            peer = second if rank == first else first
            try:
                # The peer may still be at its pair of the round before.
                store.set(f"round{number}/{rank}", "ready")
                store.wait([f"round{number}/{peer}"], timedelta(seconds=2 * SILENCE))
                steps: list[Callable[[int], None]] = [handoffs.send, handoffs.receive]
                for step in steps if rank == first else steps[::-1]:
                    step(peer)
            except RuntimeError as error:  # of gloo, NCCL and the store alike
                tell(pair=[handoffs.hosts[first], handoffs.hosts[second]], error=str(error).splitlines()[0][:300])


def main() -> None:
    """Meet the other nodes, measure, and end whatever state the others are in."""
    config = json.loads(sys.argv[1])
    import torch  # noqa: PLC0415  (the module is read without it in tests)
    import torch.distributed  # noqa: PLC0415  (as above)

    rank, world = int(config["rank"]), len(config["hosts"])
    try:
        store = torch.distributed.TCPStore(
            config["master"], int(config["port"]), world, rank == 0, timeout=timedelta(seconds=MEETING)
        )
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if config["device"] == "cuda" else "gloo",
            store=torch.distributed.PrefixStore("probe", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=SILENCE),
        )
    except RuntimeError as error:
        tell(error=f"the nodes did not find each other: {str(error).splitlines()[0][:300]}")
        os._exit(1)
    measure(Handoffs(torch, config), store, config["rounds"])
    tell(done=True)
    finish(store, rank, world)
    # Not through torch's own end, which waits for nodes that may be gone.
    os._exit(0)


def finish(store: Any, rank: int, world: int) -> None:
    """Keep rank 0, which has the store, until all others are through or have been silent for too long."""
    try:
        store.set(f"done/{rank}", "done")
        if rank == 0:
            store.wait([f"done/{other}" for other in range(world)], timedelta(seconds=2 * SILENCE))
    except RuntimeError as error:
        tell(note=f"not all nodes ended: {str(error).splitlines()[0][:300]}")


if __name__ == "__main__":
    main()
