"""The handoff plugin's eight bits, by the torch that vLLM runs with."""

from __future__ import annotations

import json

import pytest

from ppdeploy.paths import data_root
from tests.lab.cluster import Cluster

#: What is asked of `fp8.py`, whose text comes before it.
_ASKED = """
import json
import torch

generator = torch.Generator().manual_seed(1)
told = {}
for name in ("float32", "bfloat16", "float16"):
    dtype = getattr(torch, name)
    # As hidden states are: a few channels are a hundred times as large as the others.
    hidden = torch.randn(64, 576, generator=generator)
    hidden[:, ::100] *= 300
    hidden[0] = 0
    hidden = hidden.to(dtype)
    before = hidden.clone()
    sent = encode(hidden)
    back = decode(sent)
    apart, size = (back - hidden).float().abs(), hidden.float().abs()
    largest = size.amax(-1, keepdim=True)
    # The error of e4m3, and of the rounding back to the type itself.
    allowed = (size / 16).maximum(largest / 458752) + size * torch.finfo(dtype).eps
    kept = largest[:, 0].gather(0, torch.arange(64)) - back.float().abs().amax(-1)
    told[name] = {
        "bytes": [list(sent.shape), str(sent.dtype), sent.nbytes],
        "dtype": str(back.dtype),
        "beyond": int((apart > allowed).sum()),
        "moved": float(apart[1:].sum()),
        "zeros": int(back[0].count_nonzero()),
        "largest": float(kept.abs().max() / largest.max()),
        "changed": not torch.equal(hidden, before),
    }
lost = torch.ones(2, 32)
lost[1, 3] = float("nan")
lost = decode(encode(lost))
told["lost"] = [bool(row.isnan().any()) for row in lost]
told["fits"] = [fits(torch.ones(shape)) for shape in ((3, 32), (3, 24), (3, 4, 32))]
print(json.dumps(told))
"""


def test_each_value_is_as_near_as_the_format_says(served: Cluster) -> None:
    text = (data_root() / "ppdeploy_handoff" / "src" / "ppdeploy_handoff" / "fp8.py").read_text(encoding="utf-8")
    python = served.out("node1", "ls -d /opt/ppdeploy/venvs/*/bin/python").splitlines()[0]
    told = json.loads(served.lab.exec_ssh("node1", [python, "-I", "-"], stdin=text + _ASKED).stdout)
    assert told.pop("fits") == [True, False, False]
    # What is lost stays lost, for that token alone: it may not come back as a number.
    assert told.pop("lost") == [False, True]
    assert set(told) == {"float32", "bfloat16", "float16"}
    for name, found in told.items():
        size = 4 if name == "float32" else 2
        assert found["bytes"] == [[64, (576 + 16) // size], f"torch.{name}", 64 * (576 + 16)]
        assert found["dtype"] == f"torch.{name}"
        assert (found["beyond"], found["zeros"], found["changed"]) == (0, 0, False)
        # It is rounded, and the largest value, which the scale is made of, hardly is.
        assert found["moved"] > 0
        assert found["largest"] == pytest.approx(0, abs=0.001)
