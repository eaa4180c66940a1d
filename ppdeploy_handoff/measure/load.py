"""load.py TAG CONCURRENT PROMPT ANSWER REQUESTS SEED [TOKENS]: stream REQUESTS random prompts of PROMPT tokens of ids
below TOKENS (default 100000), answers of ANSWER tokens, CONCURRENT at a time, to the model `m` on port 8000 of this
host; one RESULT line, times in milliseconds.

Needs aiohttp, which vLLM's environment has.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True)
class Answer:
    """Seconds to the first token, and from token to token."""

    first: float
    each: float


async def one(session: aiohttp.ClientSession, seed: int, prompt: int, answer: int, most: int) -> Answer | None:
    """Ask once; None when it was refused or nothing came."""
    rng = random.Random(seed)
    body = {
        "model": "m",
        "prompt": [rng.randrange(1000, most) for _ in range(prompt)],
        "max_tokens": answer,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    begun = time.perf_counter()
    came: list[float] = []
    async with session.post("http://127.0.0.1:8000/v1/completions", json=body) as response:
        if response.status != 200:
            return None
        async for line in response.content:
            if line.startswith(b"data: {"):
                came.append(time.perf_counter())
    if not came:
        return None
    return Answer(came[0] - begun, (came[-1] - came[0]) / max(1, answer - 1))


def high(values: list[float]) -> float:
    """The 99th of a hundred."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


async def main(
    tag: str, concurrent: int, prompt: int, answer: int, requests: int, seed: int, most: int = 100_000
) -> int:
    """Run the load and print what came of it; 1 when nothing was answered."""
    waiting = [seed * 100_003 + number for number in range(requests)]
    answers: list[Answer | None] = []
    limit = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def user() -> None:
            while waiting:
                answers.append(await one(session, waiting.pop(0), prompt, answer, most))

        begun = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(concurrent)))
        seconds = time.perf_counter() - begun
    done = [found for found in answers if found is not None]
    if not done:
        print(f"RESULT {tag} FAILED all {len(answers)}")
        return 1
    first, each = [1e3 * found.first for found in done], [1e3 * found.each for found in done]
    print(
        f"RESULT {tag:26s} c={concurrent} in={prompt} out={answer} ok={len(done)}/{requests}"
        f" total={len(done) * (prompt + answer) / seconds:8.1f} out={len(done) * answer / seconds:7.1f}"
        f" ttft={statistics.median(first):7.1f} tpot={statistics.median(each):6.2f}"
        f" p99ttft={high(first):7.1f} p99tpot={high(each):6.2f} s={seconds:.1f}",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:8]))))
