"""The node's venv module, run as Ansible runs it, with real uv and small wheels in vLLM's place."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import http.server
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from uv import find_uv_bin

from plugins.modules import ppdeploy_venv
from ppdeploy.bundle import make as making
from ppdeploy.bundle import make_bundle, unpacked_cache
from ppdeploy.bundle.content import Bundle
from ppdeploy.locks import Lock
from tests.wheels import TORCH, UV_VERSION, VLLM, Shelf, system_python, wheel

MODULE = Path(ppdeploy_venv.__file__)
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can bind folders")


class FailedError(Exception):
    """The module's own sentence."""


class Node:
    """A folder that stands for a node's disk, and a bundle beside it."""

    def __init__(self, base: Path, shelf: Shelf) -> None:
        self.shelf = shelf
        self.root = base / "opt"
        self.cache = base / "cache"
        self.wheelhouse = base / "wheelhouse"
        shutil.copytree(shelf.links, self.wheelhouse / "wheels")
        self.lock = shelf.lock()

    @property
    def venv(self) -> Path:
        return self.root / "venvs" / self.lock.directory_name

    def run(self, *, lock: Lock | None = None, umask: int = 0o022, **params: Any) -> dict[str, Any]:
        arguments = {
            "lock": (lock or self.lock).text,
            "uv": next(self.shelf.locks.glob("uv-*")).read_text(),
            "wheelhouse": str(self.wheelhouse),
            "uv_cache": str(self.cache),
            "root": str(self.root),
            "_ansible_check_mode": params.pop("check", False),
        } | params
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(MODULE)],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": {k: v for k, v in arguments.items() if v is not None}}),
            capture_output=True,
            text=True,
            check=False,
            umask=umask,
        )
        assert "Traceback" not in done.stderr + done.stdout
        result: dict[str, Any] = json.loads(done.stdout)
        if result.get("failed"):
            raise FailedError(result["msg"])
        return result


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that every user can enter, which pytest's are not: the proof runs as nobody."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def node(base: Path, shelf: Shelf) -> Node:
    return Node(base, shelf)


def test_a_venv_is_built_proved_and_marked_once(node: Node) -> None:
    result = node.run()
    assert result["changed"] is True
    versions = {"vllm": "0.32.0+cpu", "torch": "2.13.0+cpu", "nccl": None, "cuda": None}
    assert versions.items() <= result["versions"].items()
    marker = json.loads((node.venv / ".ppdeploy.json").read_text())
    assert marker["lock"] == node.lock.digest
    assert marker["uv"] == UV_VERSION
    assert versions.items() <= marker.items()
    # Byte code is there, since the ranks' user could not write it.
    site = next((node.venv / "lib").iterdir()) / "site-packages"
    assert list((site / "vllm" / "__pycache__").iterdir())
    assert (node.root / "bin" / "uv").resolve().name == f"uv-{UV_VERSION}"
    before = {path: path.lstat().st_mtime_ns for path in node.root.rglob("*")}
    again = node.run()
    assert (again["changed"], again["versions"]) == (False, result["versions"])
    assert {path: path.lstat().st_mtime_ns for path in node.root.rglob("*")} == before


def test_an_interrupted_build_is_done_again(node: Node) -> None:
    node.venv.mkdir(parents=True)
    (node.venv / "half").write_text("")
    assert node.run()["changed"] is True
    assert not (node.venv / "half").exists()
    assert (node.venv / ".ppdeploy.json").is_file()


def test_check_mode_says_so_and_changes_nothing(node: Node) -> None:
    assert node.run(check=True)["changed"] is True
    assert not node.root.exists()
    assert not node.cache.exists()


def test_a_second_environment_lies_beside_the_first(node: Node) -> None:
    node.run()
    other = node.shelf.lock(name="vllm-cpu-other", installed_bytes=2000)
    assert node.run(lock=other)["changed"] is True
    assert {path.name for path in (node.root / "venvs").iterdir()} == {
        ".lock",
        node.lock.directory_name,
        other.directory_name,
    }


def test_roots_own_umask_does_not_shut_the_ranks_out(node: Node) -> None:
    node.run(umask=0o077)
    for path in [node.venv, *node.venv.rglob("*")]:
        assert path.is_symlink() or path.stat().st_mode & stat.S_IROTH, path


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"python": "3.2"}, "the wheels are for Python 3.2, which"),
        ({"machine": "riscv64"}, "use the lock for riscv64" if platform.machine() == "riscv64" else "for riscv64 and"),
        ({"glibc": "9.9"}, "vLLM's wheels need glibc 9.9"),
        ({"installed_bytes": 10**18}, "GiB are free: free some space there"),
    ],
)
def test_a_node_that_cannot_hold_it_is_refused_before_anything_changes(
    node: Node, about: dict[str, Any], sentence: str
) -> None:
    for check in (True, False):
        with pytest.raises(FailedError) as error:
            node.run(lock=node.shelf.lock(name="odd", **about), check=check)
        assert sentence in str(error.value)
        assert platform.node() in str(error.value)
    assert not node.root.exists()


def test_gpu_nodes_need_a_compiler_and_pythons_headers(node: Node, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    (base / "bin").mkdir()
    (base / "bin" / "python3").symlink_to(system_python()[0])
    monkeypatch.setenv("PATH", str(base / "bin"))
    with pytest.raises(FailedError, match=r"has none: install the package gcc|has no .*/Python\.h: install"):
        node.run(lock=node.shelf.lock(name="gpu", device="cuda"), python=str(base / "bin" / "python3"))


def test_wheels_that_are_missing_are_told_with_what_the_bundle_is_for(node: Node) -> None:
    (node.wheelhouse / "wheels" / node.lock.wheels[0].file).unlink()
    held = {"vllm_version": "0.1", "python": "3.99", "machine": "vax"}
    (node.wheelhouse / "manifest.json").write_text(json.dumps({"locks": [held]}))
    with pytest.raises(FailedError) as error:
        node.run()
    assert f"{node.lock.wheels[0].file} is missing" in str(error.value)
    assert "is for vLLM 0.1 with Python 3.99 on vax" in str(error.value)
    assert not node.root.exists()


def damaged(content: bytes) -> bytes:
    return content.replace(b"WORD", b"BIRD")


def replaced(_: bytes) -> bytes:
    return wheel("nice", "1.0", {"nice.py": "WORD = 'evil'\n"})[1]


@pytest.mark.parametrize("change", [damaged, replaced])
def test_a_wheel_with_other_content_is_named(node: Node, change: Callable[[bytes], bytes]) -> None:
    path = node.wheelhouse / "wheels" / node.lock.wheels[2].file
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.stat().st_size == len(before)
    with pytest.raises(FailedError, match=r"the file of nice==1\.0 on .* is not the one in the lock"):
        node.run()
    assert not (node.venv / ".ppdeploy.json").exists()


def test_a_uv_with_other_content_is_never_run(node: Node) -> None:
    path = node.wheelhouse / "wheels" / node.shelf.uv.file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(FailedError, match="is not the pinned file"):
        node.run()
    assert not list((node.root / "bin").glob("uv*"))


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"torch/__init__.py": TORCH["torch/__init__.py"].replace("2.13.0", "2.12.0")}, "torch in .* is 2.12.0"),
        ({"torch/__init__.py": "raise ImportError('libgomp.so.1: no such file')\n"}, "libgomp.so.1"),
        ({"torch/__init__.py": TORCH["torch/__init__.py"].replace("silu", "gone")}, "kernels do not load.*libnuma1"),
    ],
)
def test_an_environment_that_does_not_prove_itself_is_not_marked(
    base: Path, tmp_path: Path, files: dict[str, str], sentence: str
) -> None:
    node = Node(base, Shelf(tmp_path / "bad", torch=files))
    with pytest.raises(FailedError, match=sentence):
        node.run()
    assert not (node.venv / ".ppdeploy.json").exists()


def test_the_proof_runs_without_rights(base: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("has no rights to give up")
    nosy = {**VLLM, "vllm/__init__.py": "import os\nassert os.geteuid() != 0, 'vLLM runs as root'\n"}
    assert Node(base, Shelf(tmp_path / "nosy", vllm=nosy)).run()["changed"] is True


def test_two_builds_at_once_do_not_meet(node: Node) -> None:
    (node.root / "venvs").mkdir(parents=True)
    with (node.root / "venvs" / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(FailedError, match="another apply builds an environment"):
            node.run()


def test_copied_wheels_are_asked_for_once_and_gone_in_the_end(node: Node) -> None:
    asked = node.run(state="staged", staged=True, wheelhouse=None)
    assert sorted(asked["missing"]) == sorted(f"wheels/{p.name}" for p in node.shelf.links.iterdir())
    staging = Path(asked["staging"])
    for name in asked["missing"][1:]:
        shutil.copy(node.shelf.links / Path(name).name, staging / name)
    # A file that was cut off is asked for again.
    (staging / asked["missing"][1]).write_bytes(b"cut")
    again = node.run(state="staged", staged=True, wheelhouse=None)
    assert again["missing"] == asked["missing"][:2]
    for name in again["missing"]:
        shutil.copy(node.shelf.links / Path(name).name, staging / name)
    assert node.run(staged=True, wheelhouse=None)["changed"] is True
    assert not staging.exists()
    last = node.run(state="staged", staged=True, wheelhouse=None)
    assert (last["changed"], last["missing"]) == (False, [])


@contextlib.contextmanager
def index(folder: Path, password: str) -> Iterator[str]:
    """Serve a folder of wheels as a package index that wants a password; yield its address with it."""
    wanted = "Basic " + base64.b64encode(f"me:{password}".encode()).decode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", "Basic")
                self.end_headers()
                return
            parts = self.path.strip("/").split("/")
            if parts[0] == "simple":
                stem = parts[1].replace("-", "_") + "-"
                names = [p.name for p in folder.iterdir() if p.name.startswith(stem)]
                body = "".join(f'<a href="/files/{n}">{n}</a>' for n in names).encode()
                kind = "text/html"
            else:
                body, kind = (folder / parts[1]).read_bytes(), "application/octet-stream"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://me:{password}@127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()


def test_an_index_needs_no_wheels_on_the_node_and_its_password_is_in_no_word(node: Node) -> None:
    with index(node.shelf.links, "s3cret") as url:
        asked = node.run(state="staged", wheelhouse=None)
        assert asked["missing"] == ["uv"]
        shutil.copy(find_uv_bin(), Path(asked["staging"], "uv"))
        wrong = url.replace("s3cret", "wr0ng")
        with pytest.raises(FailedError) as error:
            node.run(wheelhouse=None, index_url=wrong)
        assert "wr0ng" not in str(error.value)
        assert "check ppdeploy_index_url" in str(error.value)
        assert node.run(wheelhouse=None, index_url=url)["versions"]["vllm"] == "0.32.0+cpu"
    for path in node.root.rglob("*"):
        if path.is_file() and path.stat().st_size < 10**6:
            assert b"s3cret" not in path.read_bytes(), path


@NEEDS_ROOT
def test_an_unpacked_cache_makes_links_that_have_their_byte_code(
    base: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(base / "controller"))
    monkeypatch.setattr(making, "uv_wheel", lambda _: shelf.uv)
    lock = shelf.lock()
    bundle = _bundle(shelf, lock)
    wheelhouse = "/srv/ppdeploy-test/wheelhouse"
    said: list[str] = []
    cache = unpacked_cache(bundle, wheelhouse=wheelhouse, say=said.append)
    assert unpacked_cache(bundle, wheelhouse=wheelhouse, say=said.append) == cache
    assert len(said) == 1
    assert not Path(wheelhouse).exists()
    archives = {path.name for path in (cache / "archive-v0").iterdir()}
    assert len(archives) == len(lock.wheels)
    node = Node(base, shelf)
    result = _on_a_host(bundle, wheelhouse, node, cache)
    assert result["changed"] is True, result
    # Nothing was unpacked again, so uv knew each wheel by its path and time.
    assert {path.name for path in (cache / "archive-v0").iterdir()} == archives
    site = next((node.venv / "lib").iterdir()) / "site-packages"
    assert (site / "vllm" / "__init__.py").is_symlink()
    code = list((site / "vllm" / "__pycache__").iterdir())
    assert code
    assert all(path.is_symlink() for path in code)


def _bundle(shelf: Shelf, lock: Lock) -> Bundle:
    """Make a bundle of files that are all there."""
    folder = making.default_folder([lock])
    shutil.copytree(shelf.links, folder.with_name(f"{folder.name}.partial") / "wheels")
    return make_bundle(lock)


def _on_a_host(bundle: Bundle, wheelhouse: str, node: Node, cache: Path) -> dict[str, Any]:
    """Run the module where the bundle is bound to its place, as on a lab host."""
    parameters = {
        "lock": node.lock.text,
        "uv": next(node.shelf.locks.glob("uv-*")).read_text(),
        "wheelhouse": wheelhouse,
        "uv_cache": str(cache),
        "link_mode": "symlink",
        "root": str(node.root),
    }
    script = 'mount -t tmpfs tmpfs /srv && mkdir -p "$1" && mount --bind "$2" "$1" && shift 2 && exec "$@"'
    done = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", wheelhouse),
            *(str(bundle.path), sys.executable, "-W", "ignore", str(MODULE)),
        ],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": parameters}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
