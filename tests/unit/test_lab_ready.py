"""What a lab needs of this machine before anything is downloaded."""

from __future__ import annotations

import platform
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.errors import InputError
from ppdeploy.lab import Lab, ready, system
from ppdeploy.lab.tiny_model import make_tiny_model


@pytest.mark.parametrize(
    ("release", "machine", "words"),
    [("noble", "x86_64", "would be noble on x86_64"), ("bookworm", "aarch64", "would be bookworm on aarch64")],
)
def test_a_release_without_a_lock_is_refused_before_any_download(
    monkeypatch: pytest.MonkeyPatch, release: str, machine: str, words: str
) -> None:
    monkeypatch.setattr(system, "require_machine", lambda _: None)
    monkeypatch.setattr(ready, "machine_release", lambda: release)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(InputError, match=words):
        ready.up_with_vllm(Lab("never-made"), 2)


def test_the_tiny_model_is_the_same_bytes_each_time_and_a_whole_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    first, second = (make_tiny_model(tmp_path_factory.mktemp(name), layers=2) for name in ("a", "b"))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    other = make_tiny_model(tmp_path_factory.mktemp("c"), layers=2, seed=1)
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_a_model_that_two_make_at_once_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ready, "cache_dir", lambda: tmp_path)
    made: list[Path] = []
    make = make_tiny_model

    def slowly(folder: Path, **how: Any) -> Path:
        made.append(folder)
        time.sleep(0.2)
        return make(folder, **how)

    monkeypatch.setattr(ready, "make_tiny_model", slowly)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: ready.tiny_model(), range(2))
    assert one == two
    assert len(made) == 1
    assert ready.tiny_model(tied=True) != one
