"""`make bench-gateway`: 200 clients and 5,000 streams through the gateway, beside as many that go to the engine itself.

Rounds alternate on one lab: through HAProxy of one head to two pipelines, and to the same two engines without it. Every
word of every stream is compared with what was asked for. What the gateway adds is printed as differences and ratios of
one run; the engines are stand-ins that send a word each 0.2 s, so that the machine itself is not what is measured.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx

from ppdeploy.api_keys import add_key
from ppdeploy.certificates import ca_file
from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory, LabPipeline
from ppdeploy.lab.ready import tiny_model
from ppdeploy.lab.state import default_name
from tests.lab.guarded import PORT, Guarded

CLIENTS = 200
STREAMS = 2500
"""Of a round; there are two rounds of each kind."""
WORDS = 10
PAUSE = 0.2
ENGINE_PORT = 8000
UNIT = "ppdeploy-gateway"


@dataclass
class Round:
    """What the clients of one round saw; times in seconds."""

    first: list[float] = field(default_factory=list)
    """To the first word, on connections that were there already."""
    opened: list[float] = field(default_factory=list)
    """To the first word, where the connection had to be made."""
    whole: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: Round) -> Round:
        return Round(
            self.first + other.first, self.opened + other.opened, self.whole + other.whole, self.wrong + other.wrong
        )


async def ask(client: httpx.AsyncClient, mark: str, seen: Round, firsts: list[float]) -> None:
    """Ask for one stream, and compare each of its words; the time to the first one goes to `firsts`."""
    body = {"model": "tiny-llama", "prompt": f"words={WORDS} pause={PAUSE} mark={mark}", "stream": True}
    began, first, texts = time.monotonic(), 0.0, []
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                first = first or time.monotonic() - began
                if "{" in line:
                    texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
        if texts != [f"{mark}-{index}" for index in range(WORDS)]:
            seen.wrong.append(f"{mark}: {answer.status_code} {texts}")
            return
    except httpx.HTTPError as error:
        seen.wrong.append(f"{mark}: {type(error).__name__} {error}")
        return
    firsts.append(first)
    seen.whole.append(time.monotonic() - began)


async def load(doors: Sequence[str], key: str, trust: ssl.SSLContext, name: str) -> Round:
    """Have all clients ask, each on a connection of its own, until so many streams were asked for."""
    seen, turns = Round(), itertools.count()

    async def one(number: int) -> None:
        async with httpx.AsyncClient(
            base_url=doors[number % len(doors)],
            headers={"authorization": f"Bearer {key}"} if key else {},
            verify=trust,
            timeout=60,
            trust_env=False,
        ) as client:
            # Not all at one moment, as no two people ask.
            await asyncio.sleep(number / CLIENTS * WORDS * PAUSE)
            firsts = seen.opened
            while (turn := next(turns)) < STREAMS:
                await ask(client, f"{name}x{turn}", seen, firsts)
                firsts = seen.first

    await asyncio.gather(*(one(number) for number in range(CLIENTS)))
    return seen


def say(text: str) -> None:
    """Print a line now, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def cpu(guarded: Guarded) -> float:
    """Return the seconds of processor time that the gateway has used."""
    # Not systemd's own count, for which a host of the lab has no cgroup to ask.
    main = f"$(systemctl show --property=MainPID --value {UNIT})"
    ticks = guarded.out(
        "node1", f"cat $(printf '/proc/%s/stat ' {main} $(pgrep -P {main})) | awk '{{s += $14 + $15}} END {{print s}}'"
    )
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def at(values: Sequence[float], percent: int) -> float:
    """Return a percentile in milliseconds."""
    return statistics.quantiles(values, n=100)[percent - 1] * 1000


def measure(guarded: Guarded) -> int:
    """Run the rounds and print what they say; 0 if no answer was lost or mixed up."""
    trust = ssl.create_default_context(cafile=str(ca_file(guarded.folder)))
    hosts = [guarded.lab.management_address(node) for node in guarded.lab.nodes]
    engines = [f"http://{host}:{ENGINE_PORT}" for host in hosts]
    door = [f"https://{hosts[0]}:{PORT}"]
    through, direct, used = Round(), Round(), 0.0
    for turn in range(2):
        direct += guarded.outside(functools.partial(asyncio.run, load(engines, "", trust, f"d{turn}")))
        before = cpu(guarded)
        through += guarded.outside(functools.partial(asyncio.run, load(door, guarded.key, trust, f"g{turn}")))
        used += cpu(guarded) - before
        say(f"round {turn + 1}: {len(direct.whole)} direct, {len(through.whole)} through the gateway")
    for name, one in (("direct", direct), ("gateway", through)):
        say(
            f"{name:8} {len(one.whole)} streams, {len(one.wrong)} lost or mixed up; "
            f"first word p50 {at(one.first, 50):.1f}, p99 {at(one.first, 99):.1f} ms, "
            f"on a new connection {at(one.opened, 50):.1f} and {at(one.opened, 99):.1f} ms; "
            f"whole p50 {at(one.whole, 50):.1f}, p99 {at(one.whole, 99):.1f} ms"
        )
    say(
        f"the gateway adds {at(through.first, 50) - at(direct.first, 50):.1f} ms (p50) and "
        f"{at(through.first, 99) - at(direct.first, 99):.1f} ms (p99) to the first word, "
        f"ratio of whole streams {at(through.whole, 99) / at(direct.whole, 99):.3f} (p99), "
        f"and takes {used / len(through.whole) * 1000:.2f} ms of processor for a stream of {WORDS} words"
    )
    for wrong in (direct.wrong + through.wrong)[:10]:
        say(f"error: {wrong}")
    return int(bool(direct.wrong + through.wrong))


def main() -> int:
    """Bring up a lab with two pipelines and their gateways, measure, and take it down."""
    lab = Lab(f"{default_name()}-bench-gateway")
    try:
        lab.down()
        model = str(tiny_model())
        pipelines = (LabPipeline("one", ("node1",), model), LabPipeline("two", ("node2",), model))
        inventory = lab.up(2, inventory=LabInventory(pipelines=pipelines), owner=os.getpid())
        with tempfile.TemporaryDirectory() as folder:
            guarded = Guarded(lab, inventory, Path(folder), [])
            done = guarded.guard(
                gateway_concurrency=CLIENTS, gateway_rate=1_000_000, vllm_args={"max-num-seqs": CLIENTS}
            )
            if done.code:
                say(done.said)
                return 1
            guarded.key = add_key(guarded.folder, "bench", None, datetime.now(UTC))
            if (told := guarded.guard()).code:
                say(told.said)
                return 1
            for node in lab.nodes:
                guarded.stand_in(node, "tiny-llama", address="0.0.0.0")  # noqa: S104  (a network of the lab's own)
            guarded.wait_until_healthy(*lab.nodes)
            return measure(guarded)
    finally:
        lab.down()


if __name__ == "__main__":
    sys.exit(main())
