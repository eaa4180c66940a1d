"""`ppdeploy_files` writes what differs and nothing else, as a whole or not at all."""

from __future__ import annotations

import grp
import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args

from plugins.modules import ppdeploy_files as files

Write = Callable[..., dict[str, Any]]


@pytest.fixture
def write(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Write:
    """Run the module with the files that are named, below the test's folder, and return what it said."""
    # Nobody but root can give a file to root.
    mine = {"owner": pwd.getpwuid(os.getuid()).pw_name, "group": grp.getgrgid(os.getgid()).gr_name}
    monkeypatch.setattr(files, "OWNER", mine)

    def run(
        texts: dict[str, str],
        /,
        *,
        mode: str = "0640",
        folders: tuple[str, ...] = (),
        check: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        arguments = {
            "folders": [{"path": str(tmp_path / name), "mode": "0750"} for name in folders],
            "files": [{"path": str(tmp_path / name), "mode": mode, "template": "any.j2"} for name in texts],
            "texts": list(texts.values()),
            "_ansible_check_mode": check,
            **more,
        }
        with patch_module_args(arguments), pytest.raises(SystemExit):
            files.main()
        said: dict[str, Any] = json.loads(capsys.readouterr().out)
        return said

    return run


def state(folder: Path) -> dict[str, tuple[str, int, int]]:
    return {
        path.name: (path.read_text(encoding="utf-8"), path.stat().st_mode & 0o7777, path.stat().st_ino)
        for path in folder.iterdir()
    }


def test_what_is_missing_is_made_with_its_mode_and_a_second_run_changes_nothing(write: Write, tmp_path: Path) -> None:
    texts = {"a/one": "1\n", "a/two": "zwei \u00fc\n"}
    said = write(texts, folders=("a",))
    assert (said["changed"], said["paths"]) == (True, [str(tmp_path / name) for name in texts])
    before = state(tmp_path / "a")
    assert {name: (text, mode) for name, (text, mode, _) in before.items()} == {
        "one": ("1\n", 0o640),
        "two": ("zwei \u00fc\n", 0o640),
    }
    assert (tmp_path / "a").stat().st_mode & 0o7777 == 0o750
    said = write(texts, folders=("a",))
    assert (said["changed"], said["paths"], said["diff"]) == (False, [], [])
    assert state(tmp_path / "a") == before


def test_only_what_differs_is_written_and_its_difference_shown(write: Write, tmp_path: Path) -> None:
    write({"one": "1\n", "two": "2\n"})
    before = state(tmp_path)
    said = write({"one": "1\n", "two": "3\n"})
    assert said["paths"] == [str(tmp_path / "two")]
    assert [(one["before"], one["after"]) for one in said["diff"]] == [("2\n", "3\n")]
    assert state(tmp_path)["one"] == before["one"]
    assert state(tmp_path)["two"][0] == "3\n"


def test_a_mode_alone_is_mended(write: Write, tmp_path: Path) -> None:
    write({"one": "1\n"})
    (tmp_path / "one").chmod(0o666)
    said = write({"one": "1\n"})
    assert (said["changed"], said["paths"]) == (True, [str(tmp_path / "one")])
    assert state(tmp_path)["one"][1] == 0o640


def test_a_check_says_what_it_would_do_and_does_nothing(write: Write, tmp_path: Path) -> None:
    write({"one": "1\n"})
    (tmp_path / "one").chmod(0o600)
    before = state(tmp_path)
    said = write({"one": "2\n", "new/two": "2\n"}, folders=("new",), check=True)
    assert (said["changed"], len(said["paths"])) == (True, 2)
    assert state(tmp_path) == before


def test_a_link_is_replaced_and_what_it_leads_to_is_left_alone(write: Write, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other\n", encoding="utf-8")
    (tmp_path / "one").symlink_to(tmp_path / "other")
    assert write({"one": "1\n"})["changed"]
    assert not (tmp_path / "one").is_symlink()
    assert (tmp_path / "other").read_text(encoding="utf-8") == "other\n"


def test_what_its_command_refuses_is_not_written_nor_what_comes_after(write: Write, tmp_path: Path) -> None:
    write({"a.cfg": "good\n", "b": "1\n"})
    validate = {".cfg": "/bin/grep -q good %s"}
    said = write({"a.cfg": "bad\n", "b": "2\n"}, validate=validate)
    assert said["failed"]
    assert f"the new {tmp_path / 'a.cfg'} was refused on " in said["msg"]
    assert {name: text for name, (text, *_) in state(tmp_path).items()} == {"a.cfg": "good\n", "b": "1\n"}
    assert write({"a.cfg": "good too\n", "b": "2\n"}, validate=validate)["paths"]


def test_as_many_texts_as_files_are_asked_for(write: Write) -> None:
    said = write({"one": "1\n"}, texts=[])
    assert (said["failed"], said["msg"]) == (True, "there are 1 files and 0 texts")


def test_a_folder_that_is_a_link_stays_one_and_a_second_run_changes_nothing(write: Write, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "etc").symlink_to(tmp_path / "disk")
    assert write({"etc/one": "1\n"}, folders=("etc",))["changed"]
    assert (tmp_path / "etc").is_symlink()
    assert (tmp_path / "disk").stat().st_mode & 0o7777 == 0o750
    assert not write({"etc/one": "1\n"}, folders=("etc",))["changed"]


def test_folders_on_the_way_are_open_to_the_rank_whatever_roots_umask_is(write: Write, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write({}, folders=("a/b/c",))
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o7777 for name in ("a", "a/b", "a/b/c")] == [0o755, 0o755, 0o750]


@pytest.mark.parametrize("there", [None, 0o644])
def test_a_secret_is_at_no_moment_open_to_others(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int | None
) -> None:
    if there is not None:
        (tmp_path / "key").write_text("old\n", encoding="utf-8")
        (tmp_path / "key").chmod(there)
    move, modes = AnsibleModule.atomic_move, []

    def watched(module: Any, source: str, target: str) -> None:
        move(module, source, target)
        modes.append(Path(target).stat().st_mode & 0o7777)

    monkeypatch.setattr(AnsibleModule, "atomic_move", watched)
    write({"key": "new\n"}, mode="0600")
    assert modes == [0o600]


@pytest.mark.parametrize("check", [False, True])
def test_what_is_no_file_where_one_is_to_be_is_named(write: Write, tmp_path: Path, check: bool) -> None:
    (tmp_path / "one").mkdir()
    said = write({"one": "1\n"}, check=check)
    assert said["failed"]
    assert said["msg"].startswith(f"{tmp_path / 'one'} is no file")
    assert "move it away" in said["msg"]


@pytest.mark.parametrize("check", [False, True])
def test_what_is_no_folder_where_one_is_to_be_is_named(write: Write, tmp_path: Path, check: bool) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "astray").symlink_to(tmp_path / "nowhere")
    for folder, wrong in (("file", "file"), ("file/below", "file"), ("astray", "astray")):
        said = write({}, folders=(folder,), check=check)
        assert said["failed"]
        assert said["msg"].startswith(f"{tmp_path / wrong} is no folder")


def test_what_the_system_refuses_is_a_sentence(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "new"))

    monkeypatch.setattr("plugins.modules.ppdeploy_files.tempfile.mkstemp", full)
    said = write({"one": "1\n"})
    assert said["failed"]
    assert "No space left on device" in said["msg"]
    assert str(tmp_path / "one") in said["msg"]
