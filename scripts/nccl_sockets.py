"""Measure what NCCL's socket threads do to a handoff between two hosts, and write one CSV line for each size.

Two network namespaces play the hosts: one GPU each, a veth pair between them, shaped by `tc`. NCCL is kept off every
way round the link. Two tensors (hidden states and residual, as vLLM sends them) go over; the time ends when the word
that they have arrived is back. Needs root, two GPUs, torch, `ip` and `tc`; it makes and removes the namespaces.
Each pair of settings runs in processes of its own, since NCCL reads them once; whole rounds are repeated, so that a
busy moment does not fall on one pair alone.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

HIDDEN = 5120
"""Of the measured model: a token's handoff is two bf16 tensors of it, 20,480 bytes."""

TOKENS = (1, 32, 256, 1024, 8192)
REPEATS = {1: 60, 32: 60, 256: 30, 1024: 12, 8192: 5}
DEFAULT = (0, 0)
"""Neither variable is set."""

SETTINGS = (DEFAULT, *((threads, sockets) for threads in (1, 2, 4) for sockets in (1, 2, 4)))
BURST = {"none": "", "1gbit": "256kb", "2500mbit": "256kb", "10gbit": "1mb", "25gbit": "4mb"}
FIELDS = ("round", "nthreads", "nsocks", "rate", "tokens", "bytes", "p50_us", "min_us", "max_us", "gbit_s", "cpu_share")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
SPACES = ("nA", "nB")


def main() -> int:
    """Run the sweep, or one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("nccl_sockets.csv"), help="the CSV to write")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rates", nargs="+", choices=sorted(BURST), default=["none", "25gbit", "10gbit"])
    parser.add_argument("--seconds", type=float, default=300, help="start no further pair of settings after this time")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--label", nargs=3, type=int, default=[0, 0, 0], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.rates, options.label, options.out)
        return 0
    began = time.monotonic()
    make_link()
    try:
        with options.out.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(FIELDS)
        for turn in range(options.rounds):
            # Every other round runs backwards: what drifts with time does not look like a setting.
            for threads, sockets in SETTINGS if turn % 2 == 0 else reversed(SETTINGS):
                if time.monotonic() - began > options.seconds:
                    print(f"time is up in round {turn} before nthreads={threads} nsocks={sockets}")
                    return 0
                started = time.monotonic()
                code = pair(options, (turn, threads, sockets))
                print(f"{turn} {threads} {sockets}: {code}, {time.monotonic() - started:.1f} s", flush=True)
        return 0
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False)


def make_link() -> None:
    """Make both namespaces and the pair between them."""
    for words in (
        *(["netns", "add", space] for space in SPACES),
        ["link", "add", "v0", "netns", SPACES[0], "type", "veth", "peer", "name", "v0", "netns", SPACES[1]],
        *(["-n", space, "addr", "add", f"{own}/24", "dev", "v0"] for space, own in zip(SPACES, ADDRESSES, strict=True)),
        *(["-n", space, "link", "set", link, "up"] for space in SPACES for link in ("lo", "v0")),
    ):
        subprocess.run(["ip", *words], check=True)


def pair(options: argparse.Namespace, label: tuple[int, int, int]) -> str:
    """Run both ranks with one pair of settings; return how they ended."""
    ranks = []
    for rank, space in enumerate(SPACES):
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": str(rank),
            "NCCL_HOSTID": space,
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_IB_DISABLE": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_SOCKET_IFNAME": "=v0",
            "GLOO_SOCKET_IFNAME": "v0",
            "NCCL_SOCKET_FAMILY": "AF_INET",
            "NCCL_DEBUG": "WARN",
        }
        if label[1:] != DEFAULT:
            environment |= {"NCCL_SOCKET_NTHREADS": str(label[1]), "NCCL_NSOCKS_PERTHREAD": str(label[2])}
        command = [
            *("ip", "netns", "exec", space, sys.executable, str(Path(__file__).resolve())),
            *("--out", str(options.out), "--rank", str(rank), "--rates", *options.rates),
            *("--label", *map(str, label)),
        ]
        ranks.append(subprocess.Popen(command, env=environment))
    try:
        codes = [rank.wait(timeout=90) for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank_process in ranks:
            rank_process.kill()
            rank_process.wait()
        return "no end within 90 s"
    return "ok" if codes == [0, 0] else f"exit codes {codes}"


def shape(rate: str) -> None:
    """Limit what this namespace sends."""
    subprocess.run(["tc", "qdisc", "del", "dev", "v0", "root"], check=False, stderr=subprocess.DEVNULL)
    if rate != "none":
        words = ["root", "tbf", "rate", rate, "burst", BURST[rate], "latency", "50ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", "v0", *words], check=True)


def measure(rank: int, rates: list[str], label: list[int], out: Path) -> None:
    """Be one rank: rank 0 sends and times, rank 1 receives and says so."""
    import torch  # noqa: PLC0415 - the launcher needs none
    from torch import distributed as dist  # noqa: PLC0415 - as above

    store = dist.TCPStore(ADDRESSES[0], 29777, 2, is_master=rank == 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=torch.device("cuda:0"))
    word = torch.zeros(1, device="cuda")

    def handoff(tensors: list[torch.Tensor]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        if rank == 0:
            works = [dist.isend(tensor, 1) for tensor in tensors]
            for work in works:
                work.wait()
            dist.recv(word, 1)
        else:
            works = [dist.irecv(tensor, 0) for tensor in tensors]
            for work in works:
                work.wait()
            dist.send(word, 0)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    lines = []
    for rate in rates:
        dist.barrier()
        torch.cuda.synchronize()
        shape(rate)
        dist.barrier()
        for tokens in TOKENS:
            tensors = [torch.ones(tokens, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
            for _ in range(3):
                handoff(tensors)
            busy, wall = cpu_seconds(), time.perf_counter()
            times = [handoff(tensors) for _ in range(REPEATS[tokens])]
            share = (cpu_seconds() - busy) / (time.perf_counter() - wall)
            size, middle = 4 * HIDDEN * tokens, statistics.median(times)
            timing = [round(value * 1e6, 1) for value in (middle, min(times), max(times))]
            lines.append([*label, rate, tokens, size, *timing, round(size * 8 / middle / 1e9, 3), round(share, 2)])
    if rank == 0:
        with out.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(lines)
    dist.barrier()
    shape("none")
    dist.destroy_process_group()


def cpu_seconds() -> float:
    """Return the processor time of this process so far, all threads together."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
