"""A node with the files of its own stages alone: an index that names no others, and what other folders have already."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_weights as weights
from ppdeploy.agent import release
from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.manifest import folder_manifest
from tests.unit.test_weights import FailedError, flip, push, run, staging_of

INDEX = "model.safetensors.index.json"
FIRST, LAST = "model-00001-of-00006.safetensors", "model-00004-of-00006.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "source", sharded=True)


@pytest.fixture
def manifest(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    return folder_manifest(source, [path.name for path in source.iterdir()]).entries()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny-0123456789ab"


def without(manifest: list[dict[str, Any]], *paths: str) -> list[dict[str, Any]]:
    return [entry for entry in manifest if entry["path"] not in paths]


def named(directory: Path) -> set[str]:
    return set(json.loads((directory / INDEX).read_text())["weight_map"].values())


def placed(source: Path, directory: Path, files: list[dict[str, Any]]) -> dict[str, Any]:
    """Place a part of the model, as a pull or a copy does."""
    push(source, directory)
    return run("verified", directory, files)


def test_the_index_of_a_part_names_what_is_there(source: Path, directory: Path, manifest: list[dict[str, Any]]) -> None:
    part = without(manifest, FIRST)
    done = placed(source, directory, part)
    assert done["present"]
    assert named(directory) == {path.name for path in directory.glob("*.safetensors")} == named(source) - {FIRST}
    whole = json.loads((source / INDEX).read_text())
    kept = json.loads((directory / INDEX).read_text())
    assert kept["metadata"] == whole["metadata"]
    assert kept["weight_map"].items() < whole["weight_map"].items()
    # It is as recorded, and a second run has nothing to do.
    assert not run("verified", directory, part)["changed"]
    assert not run("verified", directory, part, rehash=True)["changed"]


def test_the_index_of_a_whole_model_is_the_publishers(
    source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    placed(source, directory, manifest)
    assert (directory / INDEX).read_bytes() == (source / INDEX).read_bytes()


def test_the_agent_finds_a_part_as_recorded_and_damage_in_its_index(
    source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    done = placed(source, directory, without(manifest, LAST))
    known = release.NodeRelease(
        directory, "d", (), "lock", "0.32.0", done["digest"], {}, ["vllm", "serve", str(directory)]
    )
    release.check_weights(known, release.WeightCache())
    flip(directory / INDEX)
    with pytest.raises(release.DiffersError, match=INDEX):
        release.check_weights(known, release.WeightCache())


def test_a_damaged_index_of_a_part_is_mended(source: Path, directory: Path, manifest: list[dict[str, Any]]) -> None:
    part = without(manifest, FIRST)
    placed(source, directory, part)
    flip(directory / INDEX, keep_time=True)
    with pytest.raises(FailedError, match=INDEX):
        run("verified", directory, part, rehash=True)
    (directory / INDEX).touch()
    model = weights.read_model(str(directory), part)
    weights.take_back(model)
    assert [entry.path for entry in weights.lacking(model)] == [INDEX]
    shutil.copyfile(source / INDEX, staging_of(directory) / INDEX)
    assert run("verified", directory, part)["changed"]
    assert named(directory) == named(source) - {FIRST}


def test_after_another_split_only_what_is_new_is_fetched(
    source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    placed(source, directory, without(manifest, FIRST, LAST))
    other = directory.with_name("tiny-ba9876543210")
    fetched: list[str] = []

    def fetch(entries: list[weights.Entry], _lock: int) -> None:
        fetched.extend(entry.path for entry in entries)
        for entry in entries:
            shutil.copyfile(source / entry.path, staging_of(other) / entry.path)

    model = weights.read_model(str(other), without(manifest, FIRST))
    assert weights.gather(model, fetch) == {"fetched": sorted([LAST, INDEX]), "fetched_again": []}
    # The index of the other part is not the publisher's, and so no use here.
    assert sorted(fetched) == sorted([LAST, INDEX])
    assert named(other) == named(source) - {FIRST}
    # What a rank runs from is another file.
    for path in other.glob("*.safetensors"):
        assert path.stat().st_nlink == 1


def test_a_copy_of_a_damaged_file_is_fetched_after_all(
    source: Path, directory: Path, manifest: list[dict[str, Any]]
) -> None:
    placed(source, directory, without(manifest, FIRST))
    flip(directory / LAST, keep_time=True)
    other = directory.with_name("tiny-ba9876543210")

    def fetch(entries: list[weights.Entry], _lock: int) -> None:
        for entry in entries:
            shutil.copyfile(source / entry.path, staging_of(other) / entry.path)

    done = weights.gather(weights.read_model(str(other), manifest), fetch)
    assert done["fetched"] == sorted([FIRST, INDEX, LAST])
    assert done["fetched_again"] == [LAST]
    assert (other / LAST).read_bytes() == (source / LAST).read_bytes()
