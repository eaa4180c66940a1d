"""The module that looks after model folders: what needs them, damage that only reading finds, and removing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_models as models
from plugins.modules import ppdeploy_weights as weights


class Asked:
    """What `run` needs of an AnsibleModule."""

    def __init__(self, models_dir: Path, action: str = "list", *, folders: tuple[str, ...] = (), check: bool = False):
        self.params: dict[str, Any] = {"models_dir": str(models_dir), "action": action, "folders": list(folders)}
        self.check_mode = check


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's models: one that the running release needs, one of the release before, one of neither."""
    monkeypatch.setattr(models, "OPT", tmp_path / "opt")
    monkeypatch.setattr(models, "PROC", tmp_path / "proc")
    monkeypatch.setattr(models, "SYSTEMD", tmp_path / "units")
    (tmp_path / "proc").mkdir()
    base = tmp_path / "models"
    for name in ("now", "before", "old"):
        make_model(base / name, digest=f"digest of {name}")
    for link, name in (("current", "now"), ("previous", "before"), ("other", "old")):
        release = tmp_path / "opt" / "tiny" / "releases" / link
        release.mkdir(parents=True)
        nodes = [{"host": "node1", "manifest": f"digest of {name}"}, {"host": "node2", "manifest": "another"}]
        (release / "release.json").write_text(json.dumps({"nodes": nodes}))
        (release.parent.parent / link).symlink_to(release)
    return base


def make_model(folder: Path, digest: str) -> None:
    folder.mkdir(parents=True)
    content = b"weights of " + folder.name.encode()
    (folder / "model.safetensors").write_bytes(content)
    item = {"path": "model.safetensors", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / models.MANIFEST).write_text(json.dumps({"digest": digest, "files": [item]}))


def told(asked: Asked) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in models.run(asked)["models"]}


def test_what_a_release_needs_is_said_and_the_rest_is_free(node: Path) -> None:
    found = told(Asked(node))
    assert {name: one["needed_by"] for name, one in found.items()} == {
        "now": ["the current release of pipeline tiny"],
        "before": ["the previous release of pipeline tiny"],
        "old": [],
    }
    assert all(one["bytes"] > 0 for one in found.values())


def test_a_process_and_a_transfer_need_their_folder(node: Path, tmp_path: Path) -> None:
    process = tmp_path / "proc" / "77"
    process.mkdir()
    (process / "cmdline").write_bytes(b"vllm\0serve\0" + str(node / "old").encode() + b"/\0--headless\0")
    partial = node / "new-0123456789ab.partial"
    partial.mkdir()
    held = os.open(partial, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    found = told(Asked(node))
    assert found["old"]["needed_by"] == ["a process that runs"]
    assert found["new-0123456789ab.partial"]["needed_by"] == ["a transfer that runs"]
    os.close(held)
    assert told(Asked(node))["new-0123456789ab.partial"]["needed_by"] == []


def test_what_is_not_ours_is_neither_listed_nor_removed(node: Path) -> None:
    for name in ("my-own", "lost+found", "other.partial"):
        (node / name).mkdir()
        (node / name / "model.safetensors").write_bytes(b"x")
    assert set(told(Asked(node))) == {"now", "before", "old"}
    assert models.run(Asked(node, "remove", folders=("my-own", "other.partial")))["removed"] == []
    assert (node / "my-own" / "model.safetensors").exists()


def test_a_sidecar_that_does_not_run_needs_its_model(node: Path, tmp_path: Path) -> None:
    unit = tmp_path / "units" / "ppdeploy-sidecar@draft.service"
    unit.parent.mkdir()
    unit.write_text(f"[Service]\nExecStart=/opt/x/vllm serve {node / 'old'} --served-model-name draft\n")
    make_model(node / "old-er", digest="one more")
    found = told(Asked(node))
    assert found["old"]["needed_by"] == ["the unit ppdeploy-sidecar@draft.service"]
    assert found["old-er"]["needed_by"] == []


@pytest.mark.parametrize("way", ["option", "maps", "fd", "daemon"])
def test_a_process_needs_a_model_however_it_came_by_it(way: str, node: Path, tmp_path: Path) -> None:
    # A worker gave itself another name, and the models' folder is a link.
    real = node.rename(tmp_path / "disk")
    node.symlink_to(real)
    process = tmp_path / "proc" / "77"
    (process / "fd").mkdir(parents=True)
    (process / "cmdline").write_bytes(b"VLLM::Worker\0")
    if way == "option":
        (process / "cmdline").write_bytes(f"vllm\0serve\0--model={node / 'old'}\0".encode())
    elif way == "maps":
        (process / "maps").write_text(f"7f r--p 0 0 1 {real / 'old' / 'model.safetensors'}\n")
    elif way == "fd":
        (process / "fd" / "7").symlink_to(real / "old" / "model.safetensors")
    else:
        # It hands the model on to the other nodes.
        digest, entries = "digest of old", [{"path": "a", "size": 0, "sha256": "0" * 64}]
        model = weights.read_model(str(node / "old"), entries)._replace(digest=digest)
        (process / "cmdline").write_bytes(f"rsync\0--daemon\0--config=/run/{weights.transfer_name(model)}/x\0".encode())
    found = told(Asked(node))
    assert found["old"]["needed_by"] == ["a process that runs"]
    assert found["now"]["needed_by"] == ["the current release of pipeline tiny"]


def test_a_removal_that_was_cut_off_is_found_again(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = node / "old-0123456789ab"
    (node / "old").rename(old)

    def cut_off(folder: Path) -> None:
        raise OSError(5, "Input/output error", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_off)
        with pytest.raises(OSError, match="Input/output error"):
            models.run(Asked(node, "remove", folders=(old.name,)))
    assert models.run(Asked(node, "remove", folders=(f"{old.name}.partial",)))["changed"]
    assert sorted(path.name for path in node.iterdir()) == ["before", "now"]


def test_only_what_nothing_needs_is_removed(node: Path) -> None:
    with pytest.raises(
        models.ModelsError, match="needed by the previous release of pipeline tiny: nothing was removed"
    ):
        models.run(Asked(node, "remove", folders=("old", "before")))
    assert (node / "old" / models.MANIFEST).exists()
    assert models.run(Asked(node, "remove", folders=("old",), check=True))["changed"]
    assert (node / "old").exists()
    done = models.run(Asked(node, "remove", folders=("old", "absent")))
    assert (done["changed"], done["removed"]) == (True, ["old"])
    assert sorted(path.name for path in node.iterdir()) == ["before", "now"]


def test_a_release_that_cannot_be_read_keeps_everything(node: Path, tmp_path: Path) -> None:
    (tmp_path / "opt" / "tiny" / "releases" / "current" / "release.json").write_text("{")
    with pytest.raises(models.ModelsError, match="nobody knows what it needs"):
        models.run(Asked(node, "remove", folders=("old",)))


def test_a_bit_flip_behind_the_same_size_and_time_is_found_and_marked(node: Path) -> None:
    assert all(one["damaged"] == [] for one in told(Asked(node, "check")).values())
    file = node / "now" / "model.safetensors"
    before = file.stat()
    file.write_bytes(b"w" + file.read_bytes()[1:-1] + b"x")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert told(Asked(node, "check", check=True))["now"]["damaged"] == ["model.safetensors"]
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert told(Asked(node, "check"))["now"]["damaged"] == ["model.safetensors"]
    assert file.stat().st_mtime_ns != before.st_mtime_ns


def test_a_file_that_is_gone_is_damage(node: Path) -> None:
    (node / "before" / "model.safetensors").unlink()
    assert told(Asked(node, "check"))["before"]["damaged"] == ["model.safetensors"]


def test_no_folder_yet_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "OPT", tmp_path / "opt")
    done = models.run(Asked(tmp_path / "absent"))
    assert (done["models"], done["changed"]) == ([], False)
    assert done["free_bytes"] > 0
