"""`make bench-balance`: what a gateway's way to balance is worth to the prefix cache, with real ranks.

Two pipelines of one host each serve the same model behind one gateway. Chats that grow by a question a turn go through
it, eight at once, in rounds that alternate between `leastconn` and `prefix`. Every round has questions of its own, so
none finds what another left. Printed are the share of prompt tokens that vLLM found in its cache, by its own counters,
and how long an answer takes.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import httpx

from ppdeploy.api_keys import add_key
from ppdeploy.lab import Lab
from ppdeploy.lab.inventory import LabInventory, LabPipeline
from ppdeploy.lab.ready import tiny_model, up_with_vllm
from ppdeploy.lab.state import default_name
from tests.lab.guarded import HEADS, Guarded

CHATS = 24
TURNS = 6
AT_ONCE = 8
ROUNDS = 2
"""Of each way."""
_COUNTERS = (
    "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8000/metrics\").read().decode())'"
)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201  (a report is what this program is for)


def counted(guarded: Guarded) -> tuple[float, float]:
    """Return the prompt tokens that both engines looked for in their caches so far, and those that they found."""
    totals = {"queries": 0.0, "hits": 0.0}
    for node in HEADS:
        text = guarded.out(node, _COUNTERS)
        for name in totals:
            found = re.findall(rf"^vllm:prefix_cache_{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE)
            if not found:
                raise RuntimeError(f"{node} does not say vllm:prefix_cache_{name}_total")
            totals[name] += sum(map(float, found))
    return totals["queries"], totals["hits"]


def chat(client: httpx.Client, name: str) -> list[float]:
    """Go through one chat, and return the seconds of each answer."""
    question = f"{name} asks what a pipeline of several machines does with one model, and why. "
    messages = [{"role": "system", "content": "Answer briefly, and say what you do not know. " * 4}]
    seconds = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{question} This is question {turn} of {name}."})
        body = {"model": "tiny-llama", "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        seconds.append(answer.elapsed.total_seconds())
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or "-"})
    return seconds


def round_of(guarded: Guarded, name: str) -> tuple[float, list[float]]:
    """Let all chats of a round go, and return the share of tokens that was found, and the seconds of each answer."""
    before = counted(guarded)

    def clients() -> list[float]:
        with guarded.client("node1") as client, ThreadPoolExecutor(AT_ONCE) as pool:
            return [one for chat_ in pool.map(lambda n: chat(client, f"{name}-{n}"), range(CHATS)) for one in chat_]

    # A thread is in the network of whoever made it.
    seconds = guarded.outside(clients)
    queries, hits = (after - since for after, since in zip(counted(guarded), before, strict=True))
    return hits / queries, seconds


def main() -> int:
    """Bring up a lab with two pipelines of real ranks, measure, and take it down."""
    lab = Lab(f"{default_name()}-bench-balance")
    try:
        lab.down()
        model = str(tiny_model())
        pipelines = tuple(LabPipeline(name, (node,), model) for name, node in zip("ab", HEADS, strict=True))
        described = LabInventory(pipelines=pipelines)
        inventory = up_with_vllm(lab, 2, inventory=described, owner=os.getpid())
        with tempfile.TemporaryDirectory() as folder:
            guarded = Guarded(lab, inventory, Path(folder), [], wants={"gateway_rate": 1_000_000})
            guarded.write_inventory()
            guarded.key = add_key(guarded.folder, "bench", None, datetime.now(UTC))
            done = guarded.ppdeploy("apply")
            if done.code:
                say(done.said)
                return 1
            found: dict[str, list[tuple[float, list[float]]]] = {"leastconn": [], "prefix": []}
            for turn in range(ROUNDS):
                for way, rounds in found.items():
                    done = guarded.guard(gateway_balance=way)
                    if done.code:
                        say(done.said)
                        return 1
                    rounds.append(round_of(guarded, f"{way}-{turn}"))
                    say(f"round {turn + 1}, {way}: {rounds[-1][0]:.1%} of the prompt tokens were in the cache")
        means = {way: statistics.fmean(share for share, _ in rounds) for way, rounds in found.items()}
        answers = {way: [one for _, seconds in rounds for one in seconds] for way, rounds in found.items()}
        middle = {way: statistics.median(seconds) for way, seconds in answers.items()}
        for way in found:
            say(f"{way:9} {means[way]:.1%} found, an answer takes {middle[way] * 1000:.0f} ms (median)")
        lost = {way: 1 - share for way, share in means.items()}
        say(
            f"prefix leaves {lost['prefix'] / lost['leastconn']:.2f} of the prompt tokens that leastconn leaves to "
            f"compute, and an answer takes {middle['prefix'] / middle['leastconn']:.2f} of the time"
        )
        return 0
    finally:
        lab.down()


if __name__ == "__main__":
    sys.exit(main())
