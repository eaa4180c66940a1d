"""same.py FILE FILE [KIND]: compare two files of equal.py. Exit status 1 when a text differs, 2 when one is empty.

KIND is `one` where only the prompts that were alone decide: batches of several differ from run to run in who is in them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def compare(one: list[Any], two: list[Any]) -> tuple[int, float]:
    """How many answers have the same tokens, and the largest difference of logprobs of tokens that are the same."""
    same = sum(a[0] == b[0] for a, b in zip(one, two, strict=True))
    gaps = [
        abs(p - q)
        for a, b in zip(one, two, strict=True)
        if a[1] and b[1]
        for s, t, p, q in zip(*(a[0], b[0], a[1], b[1]), strict=True)
        if s == t
    ]
    return same, max(gaps, default=0.0)


def main(first: str, second: str, decides: str = "") -> int:
    """Print one line for the prompts alone and one for those at once."""
    found = [json.loads(Path(file).read_text()) for file in (first, second)]
    status = 0
    for kind in ("one", "eight"):
        answers = [told[kind] for told in found]
        if not answers[0] or not all(answer[0] for answer in answers[0]):
            return 2
        same, gap = compare(*answers)
        print(f"{first} {second} {kind}: {same} of {len(answers[0])} texts equal, logprobs apart by at most {gap:.2e}")
        if decides in ("", kind):
            status |= same != len(answers[0])
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
