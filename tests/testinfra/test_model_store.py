"""`model_store` has brought the planned model, whole, unchanged, and for the ranks to read only.

All weights are read again: for a large model that takes minutes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ppdeploy.manifest import Manifest
from ppdeploy.plan.types import NodePlan

_RECORD = ".ppdeploy-manifest.json"


@pytest.fixture(scope="module")
def record(host: Any, node: NodePlan) -> dict[str, Any]:
    """What was written down of the files when they were checked."""
    text = host.file(f"{node.model.directory}/{_RECORD}").content_string
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_model_is_the_planned_one(record: dict[str, Any], node: NodePlan) -> None:
    assert record["digest"] == node.model.manifest_digest
    if node.model.files is not None:
        # The index of a part is written anew, and so has another hash than the one that the digest is of.
        assert tuple(sorted(entry["path"] for entry in record["files"])) == node.model.files
        return
    hashes = ("path", "size", "sha256", "git_sha1")
    entries = [{name: entry[name] for name in hashes if name in entry} for entry in record["files"]]
    assert Manifest.model_validate({"files": entries}).digest == node.model.manifest_digest


def test_the_index_names_what_is_there_and_nothing_else(host: Any, record: dict[str, Any], node: NodePlan) -> None:
    """vLLM refuses an index that names absent files."""
    weights = {entry["path"] for entry in record["files"] if entry["path"].endswith(".safetensors")}
    for index in (entry["path"] for entry in record["files"] if entry["path"].endswith(".safetensors.index.json")):
        named = json.loads(host.file(f"{node.model.directory}/{index}").content_string)["weight_map"]
        assert set(named.values()) == weights


def test_every_file_still_has_the_content_that_was_checked(host: Any, record: dict[str, Any], node: NodePlan) -> None:
    for entry in record["files"]:
        path = f"{node.model.directory}/{entry['path']}"
        if "sha256" in entry:
            assert host.file(path).sha256sum == entry["sha256"], path
        else:
            with_header = '{ printf "blob %%s\\0" "$(stat -c %%s "$1")"; cat "$1"; } | sha1sum'
            said = host.check_output(f"sh -c '{with_header}' sh %s", path)
            assert said.split()[0] == entry["git_sha1"], path


def test_only_root_can_write_and_all_can_read(host: Any, node: NodePlan) -> None:
    listed = host.check_output("find %s -printf '%%y %%u:%%g %%m\\n'", node.model.directory)
    assert set(listed.splitlines()) == {"d root:root 755", "f root:root 644"}


def test_there_is_nothing_else_in_the_folder(host: Any, record: dict[str, Any], node: NodePlan) -> None:
    listed = host.check_output("find %s -type f -printf '%%P\\n'", node.model.directory)
    assert sorted(listed.splitlines()) == sorted([_RECORD, *(entry["path"] for entry in record["files"])])


def test_nothing_of_the_transfer_is_left(host: Any, node: NodePlan) -> None:
    assert not host.file(f"{node.model.directory}.partial").exists
    assert host.run("systemctl list-units --all --plain --no-legend 'ppdeploy-weights*'").stdout == ""
