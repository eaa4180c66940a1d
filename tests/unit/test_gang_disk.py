"""What the agent says of the file system that holds its state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppdeploy.agent import disk


def _statvfs(monkeypatch: pytest.MonkeyPatch, *, flags: int = 0, free_blocks: int = 10**6) -> None:
    answer = os.statvfs_result((4096, 4096, 10**6, free_blocks, free_blocks, 10, 10, 10, flags, 255))
    monkeypatch.setattr(os, "statvfs", lambda _folder: answer)


def test_a_folder_with_room_is_no_trouble(tmp_path: Path) -> None:
    assert disk.trouble(tmp_path) == ""


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in disk.trouble(tmp_path / "gone")


def test_a_read_only_file_system_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _statvfs(monkeypatch, flags=os.ST_RDONLY)
    assert f"{tmp_path} is read-only" in disk.trouble(tmp_path)


def test_a_full_file_system_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _statvfs(monkeypatch, free_blocks=255)
    assert f"{tmp_path} is full" in disk.trouble(tmp_path)
    _statvfs(monkeypatch, free_blocks=256)
    assert disk.trouble(tmp_path) == ""
