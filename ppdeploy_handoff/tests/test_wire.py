"""The two tensors as one and back, with stand-ins for tensors: vLLM and torch are not needed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ppdeploy_handoff import fp8, wire


@dataclass(frozen=True)
class Dtype:
    name: str
    is_floating_point: bool = True


@dataclass(frozen=True)
class Tensor:
    value: float
    shape: tuple[int, ...] = (3, 4)
    dtype: Dtype = Dtype("bfloat16")
    device: str = "cuda:0"

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def dim(self) -> int:
        return len(self.shape)

    def __add__(self, other: Tensor) -> Tensor:
        return replace(self, value=self.value + other.value)


def pair(**changes: Any) -> dict[str, Any]:
    return {"hidden_states": Tensor(1.0), "residual": replace(Tensor(2.0), **changes)}


def test_the_sum_travels() -> None:
    packed = wire.pack(pair())
    assert packed is not None
    assert packed["hidden_states"].value == 3.0
    assert set(packed) == {"hidden_states", wire.MARK}


def test_eight_bits_travel_where_they_are_asked_for_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "encode", lambda hidden: replace(hidden, value=-hidden.value))
    for columns, short, value, mark in (
        (32, True, -3.0, wire.SHORT),
        (32, False, 3.0, wire.MARK),
        # The scales behind 24 bytes would lie askew.
        (24, True, 3.0, wire.MARK),
    ):
        two = {key: replace(value, shape=(3, columns)) for key, value in pair().items()}
        packed = wire.pack(two, short=short)
        assert packed is not None
        assert packed.pop("hidden_states").value == value
        assert packed == {mark: 1}


def test_eight_bits_are_read_after_the_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "decode", lambda sent: replace(sent, value=-sent.value))
    whole = Tensor(3.0)
    tensors: dict[str, Any] = {"hidden_states": Tensor(3.0, shape=(1, 12)), wire.SHORT: 1}
    postprocess: list[Callable[[], None]] = [lambda: tensors.__setitem__("hidden_states", whole)]
    assert wire.unpack(tensors, postprocess, lambda hidden: replace(hidden, value=-0.0))
    assert set(tensors) == {"hidden_states"}, "the mark is no tensor and may not reach the model runner"
    for step in postprocess:
        step()
    assert tensors["hidden_states"] == Tensor(-3.0)
    assert tensors["residual"] == Tensor(-0.0)


def test_anything_else_travels_as_it_is() -> None:
    assert wire.pack({"hidden_states": Tensor(1.0)}) is None
    assert wire.pack(pair() | {"aux_hidden_states_0": Tensor(0.0)}) is None
    assert wire.pack(pair(shape=(2, 4))) is None
    assert wire.pack(pair(dtype=Dtype("float32"))) is None
    assert wire.pack(pair(device="cuda:1")) is None
    assert wire.pack({"hidden_states": Tensor(1.0), "residual": None}) is None
    whole = Dtype("int8", is_floating_point=False)
    assert wire.pack({k: replace(v, dtype=whole) for k, v in pair().items()}) is None
    assert wire.pack({k: replace(v, shape=(0, 4)) for k, v in pair().items()}) is None


def test_the_residual_is_made_after_the_gather() -> None:
    flat, whole = Tensor(3.0, shape=(1, 12)), Tensor(3.0)
    tensors: dict[str, Any] = {"hidden_states": flat, wire.MARK: 1}
    postprocess: list[Callable[[], None]] = [lambda: tensors.__setitem__("hidden_states", whole)]
    assert wire.unpack(tensors, postprocess, lambda hidden: replace(hidden, value=-0.0))
    assert set(tensors) == {"hidden_states"}, "the mark is no tensor and may not reach the model runner"
    for step in postprocess:
        step()
    assert tensors["residual"].shape == (3, 4)


def test_an_ordinary_handoff_is_left_alone() -> None:
    tensors, postprocess = pair(), []  # type: ignore[var-annotated]
    assert not wire.unpack(tensors, postprocess, lambda hidden: hidden)
    assert tensors == pair() and postprocess == []
