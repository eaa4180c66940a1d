"""How well a model still says a text it did not see, for modes that change what it computes (fp8).

quality.py ask FILE TEXT [WINDOWS [TOKENS]]   the server on port 8000 of this host, its model `m`: logprob of each token
                                              of TEXT, in WINDOWS (24) of TOKENS (512), and which token it held for the
                                              likeliest; then greedy answers of 64 tokens to the first 64 of each; to FILE
quality.py compare FILE FILE...               each against the first: perplexity, likeliest tokens that are the same,
                                              greedy tokens that are the same up to the first that is not
"""

from __future__ import annotations

import json
import math
import sys
import urllib.request
from pathlib import Path
from typing import Any

ANSWER = 64


def post(path: str, **body: Any) -> Any:
    """What the server answers."""
    request = urllib.request.Request(
        f"http://127.0.0.1:8000/{path}",
        json.dumps({"model": "m", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=900) as response:
        return json.load(response)


def said(window: list[int]) -> tuple[list[float], list[int]]:
    """Logprobs of the window's tokens but the first, and the tokens that were the likeliest there."""
    told = post("v1/completions", prompt=window, max_tokens=1, temperature=0, prompt_logprobs=1)
    rows = told["choices"][0]["prompt_logprobs"][1:]
    own = [row[str(token)]["logprob"] for token, row in zip(window[1:], rows, strict=True)]
    return own, [int(next(token for token, one in row.items() if one["rank"] == 1)) for row in rows]


def ask(file: str, text: str, windows: int, tokens: int) -> None:
    """Ask for all windows one at a time, so that batches are the same in every mode."""
    ids = post("tokenize", prompt=Path(text).read_text(encoding="utf-8"), add_special_tokens=False)["tokens"]
    parts = [ids[at * tokens : (at + 1) * tokens] for at in range(windows)]
    if len(parts[-1]) < tokens:
        sys.exit(f"{text} has {len(ids)} tokens, fewer than {windows} windows of {tokens}")
    found = [said(part) for part in parts]
    answers = [
        post(
            "v1/completions",
            prompt=part[:ANSWER],
            max_tokens=ANSWER,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
        )
        for part in parts
    ]
    told = {
        "logprobs": [value for own, _ in found for value in own],
        "likeliest": [token for _, best in found for token in best],
        "answers": [answer["choices"][0]["token_ids"] for answer in answers],
    }
    Path(file).write_text(json.dumps(told))


def compare(files: list[str]) -> None:
    """One line a file."""
    first, *_ = found = [json.loads(Path(file).read_text()) for file in files]
    for file, one in zip(files, found, strict=True):
        count = len(one["logprobs"])
        alike = sum(a == b for a, b in zip(first["likeliest"], one["likeliest"], strict=True))
        apart = sum(abs(a - b) for a, b in zip(first["logprobs"], one["logprobs"], strict=True)) / count
        until = [
            next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), ANSWER)
            for pair in zip(first["answers"], one["answers"], strict=True)
        ]
        print(
            f"QUALITY {Path(file).stem}: perplexity {math.exp(-sum(one['logprobs']) / count):.4f} of {count} tokens,"
            f" likeliest token the same {alike / count:.4f}, logprobs apart by {apart:.4f} on average,"
            f" greedy: {sum(n == ANSWER for n in until)} of {len(until)} answers the same,"
            f" the first {sum(until) / len(until):.1f} of {ANSWER} tokens on average"
        )


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        numbers = [int(word) for word in sys.argv[4:]]
        ask(sys.argv[2], sys.argv[3], *(numbers + [24, 512][len(numbers) :]))
    else:
        compare(sys.argv[2:])
