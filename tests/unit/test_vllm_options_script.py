"""scripts/vllm_options.py writes what a parser takes; that the tables are vLLM's own is asked on a host of the lab."""

from __future__ import annotations

import argparse
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.vllm_options import option_lines, table, wheel_line


class Paired(argparse.BooleanOptionalAction):
    """`--enable-x` with `--disable-x` beside `--no-enable-x`, as vLLM 0.33.0 makes them."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, **more)
        self.option_strings = [*self.option_strings, "--disable-x"]

    def __call__(self, _parser: Any, namespace: Any, _values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string == "--enable-x")


def test_each_form_has_its_kind() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--size", "-s", type=int)
    parser.add_argument("--many", nargs="+")
    parser.add_argument("--maybe", nargs="?")
    parser.add_argument("--again", action="append")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--both", "-b", action=argparse.BooleanOptionalAction)
    parser.add_argument("--enable-x", action=Paired)
    assert option_lines(parser) == [
        *("again repeated", "bare switch", "both flag -b", "enable-x pair", "help switch -h", "many values"),
        *("maybe optional", "size value -s"),
    ]


@pytest.mark.parametrize("form", [{"action": "store_false"}, {"nargs": 2}])
def test_a_form_without_a_kind_ends_it(form: dict[str, Any]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--odd", **form)
    with pytest.raises(SystemExit, match=r"^--odd .*: no kind of the table$"):
        option_lines(parser)


def test_a_wheel_that_is_not_the_installed_one_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(package / "a.py", "vllm/a.py")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert wheel_line(wheel, package) == f"# wheel: {wheel.name} sha256:{digest}"
    assert table(["a value"], "1", wheel_line(wheel, package)).splitlines()[1:] == [
        f"# wheel: {wheel.name} sha256:{digest}",
        "a value",
    ]
    (package / "a.py").write_text("x = 2\n")
    with pytest.raises(SystemExit, match=r"vllm/a\.py differs"):
        wheel_line(wheel, package)
