"""equal.py [--plain] FILE [TOKENS [LENGTH...]]: greedy tokens and logprobs of fixed prompts, to FILE as JSON.

Prompts of LENGTH tokens one at a time (default 5 100 700 3000), then eight of 200 at once, of token ids below TOKENS
(default 100000). The server is the one on port 8000 of this host, its model is called `m`. With --plain it does not ask
for logprobs, for which vLLM compiles a kernel on the way (with gcc on CPUs).
"""

from __future__ import annotations

import concurrent.futures
import json
import random
import sys
import urllib.request
from pathlib import Path

Answer = tuple[list[int], list[float]]


def ask(prompt: list[int], plain: bool, tokens: int = 48) -> Answer:
    """The tokens of a greedy answer and their logprobs, none where `plain`."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": None if plain else 1,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=900) as response:
        told = json.load(response)["choices"][0]
    return told["token_ids"], [] if plain else told["logprobs"]["token_logprobs"]


def main(file: str, most: int, lengths: list[int], plain: bool) -> None:
    """Ask, and write {"one": answers one at a time, "eight": answers at once}."""
    rng = random.Random(7)
    alone = [[rng.randrange(10, most) for _ in range(length)] for length in lengths]
    together = [[rng.randrange(10, most) for _ in range(200)] for _ in range(8)]
    one = [ask(prompt, plain) for prompt in alone]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        eight = list(pool.map(lambda prompt: ask(prompt, plain), together))
    Path(file).write_text(json.dumps({"one": one, "eight": eight}))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--plain"]
    given = [int(value) for value in words[1:]]
    main(words[0], given[0] if given else 100_000, given[1:] or [5, 100, 700, 3000], "--plain" in sys.argv)
