"""What one stage sends to the next, and how long a link takes for it.

vLLM sends a stage's output as two tensors, `hidden_states` and `residual`, each of tokens x hidden size in the
activations' type (`sync_and_gather_intermediate_tensors` and the models' `IntermediateTensors`; the same from 0.26.0
to 0.33.0). With tensor parallelism each TP rank sends its 1/TP of both and the receiving group puts them together
(`isend_tensor_dict`, `_should_use_all_gather` in vllm/distributed/parallel_state.py): what crosses the link stays the
same in sum, and an all-gather inside the receiving host comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppdeploy.plan.words import rate_text

HANDOFF_TENSORS = 2
"""`hidden_states` and `residual`."""

TCP_GOODPUT = 0.957
"""Share of a link's rate that is payload: 957 Mbit/s by iperf3 over 1 Gbit Ethernet (reference/measurements.md)."""

SOCKET_BITS = 18.2e9
"""Bits/s that NCCL's sockets carry where the link sets no limit (the unshaped veth pair of the measurements; fitted by
`scripts/fit_speed.py`)."""

GIGABIT = 1e9

ETHERNET_RATES: tuple[tuple[str, float], ...] = (
    ("100 Mbit/s", 0.1 * GIGABIT),
    ("1 Gbit/s", GIGABIT),
    ("2.5 Gbit/s", 2.5 * GIGABIT),
    ("5 Gbit/s", 5 * GIGABIT),
    ("10 Gbit/s", 10 * GIGABIT),
    ("25 Gbit/s", 25 * GIGABIT),
    ("40 Gbit/s", 40 * GIGABIT),
    ("50 Gbit/s", 50 * GIGABIT),
    ("100 Gbit/s", 100 * GIGABIT),
    ("200 Gbit/s", 200 * GIGABIT),
    ("400 Gbit/s", 400 * GIGABIT),
)
"""The usual rates of Ethernet, slowest first."""

LAN_LATENCY = 100e-6
"""Seconds one way between two hosts on a switch, where nothing was measured."""


@dataclass(frozen=True)
class Link:
    """The way from one stage to the next."""

    rate_bits: float
    """Bits/s by name (1e9 for gigabit Ethernet); what TCP leaves of it is this module's business."""
    latency_s: float = LAN_LATENCY
    """Seconds one way: half of what ping says."""
    name: str = ""
    burst_bytes: float = 0.0
    """Bytes that pass at full speed before the rate holds: a token bucket's, as `tc tbf` has; 0 on real Ethernet."""
    socket_bits: float = SOCKET_BITS
    """Bits/s that NCCL's sockets carry at most between these hosts."""

    def label(self) -> str:
        """Return the name, or the rate in words."""
        return self.name or rate_label(self.rate_bits)

    def payload_bits(self) -> float:
        """Return the bits/s of payload that NCCL's sockets get through; never less than 1, so that a time is finite."""
        return max(1.0, min(self.rate_bits * TCP_GOODPUT, self.socket_bits))

    def seconds(self, size: float) -> float:
        """Return the seconds that `size` bytes take, latency included; 0 for nothing."""
        if size <= 0:
            return 0.0
        quick = min(size, self.burst_bytes)
        return self.latency_s + 8 * quick / self.socket_bits + 8 * (size - quick) / self.payload_bits()


def rate_label(rate_bits: float) -> str:
    """Return a rate as people say it: `1 Gbit/s`, `100 Mbit/s`."""
    return rate_text(rate_bits / 1e6)


def faster_rates(rate_bits: float) -> Sequence[tuple[str, float]]:
    """Return the usual Ethernet rates above this one, slowest first.

    A measured rate that is a little less than a usual one is that one.
    """
    return [(name, rate) for name, rate in ETHERNET_RATES if rate > rate_bits * 1.15]


def handoff_bytes(hidden_size: int, dtype_bytes: int = 2, tensors: int = HANDOFF_TENSORS) -> int:
    """Return the bytes of one token at one stage boundary, of all TP ranks together."""
    return tensors * hidden_size * dtype_bytes


def handoff_seconds(
    tokens: float, bytes_per_token: float, link: Link, *, gpus: int = 1, peer_bandwidth: float = 20e9
) -> float:
    """Return the seconds from a stage's last kernel to the next stage's first, for `tokens` tokens.

    `gpus` is the size of the receiving TP group: each of its ranks gets 1/TP and gathers the rest from its peers at
    `peer_bandwidth` bytes/s.
    """
    size = tokens * bytes_per_token
    gather = size * (gpus - 1) / gpus / peer_bandwidth if gpus > 1 else 0.0
    return link.seconds(size) + gather
