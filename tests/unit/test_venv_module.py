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
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from uv import find_uv_bin

from plugins.modules import ppdeploy_venv
from ppdeploy.bundle import make as making
from ppdeploy.bundle import make_bundle, unpacked_cache
from ppdeploy.bundle.content import Bundle
from ppdeploy.locks import Lock
from tests.forward_proxy import ForwardProxy
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
    assert 0 <= time.time() - marker["verified_at"] < 600
    assert versions.items() <= marker.items()
    # Byte code is there, since the ranks' user could not write it.
    site = next((node.venv / "lib").iterdir()) / "site-packages"
    assert list((site / "vllm" / "__pycache__").iterdir())
    assert (node.root / "bin" / "uv").resolve().name == f"uv-{UV_VERSION}"
    before = {path: path.lstat().st_mtime_ns for path in node.root.rglob("*")}
    again = node.run()
    assert (again["changed"], again["versions"]) == (False, result["versions"])
    assert {path: path.lstat().st_mtime_ns for path in node.root.rglob("*")} == before


def test_a_build_in_the_background_is_waited_for_and_told(node: Node) -> None:
    begun = node.run(background=True)
    # Who waits for it says that it changed something.
    assert (begun["changed"], "versions" in begun) == (False, False)
    first = node.run(state="waited", seconds=0)
    assert (first["done"], bool(first["progress"])) == (False, True)
    last = node.run(state="waited", seconds=300)
    assert (last["done"], last["changed"], last["progress"]) == (True, True, "built and proved")
    assert last["versions"]["vllm"] == "0.32.0+cpu"
    again = node.run(state="waited", seconds=0)
    assert (again["done"], again["changed"]) == (True, False)


@pytest.mark.parametrize("background", [True, False])
def test_why_a_build_in_the_background_failed_is_told_to_all_who_wait_until_the_next_one(
    node: Node, background: bool
) -> None:
    path = node.wheelhouse / "wheels" / node.lock.wheels[2].file
    whole = path.read_bytes()
    path.write_bytes(damaged(whole))
    node.run(background=True)
    # Two applies may have joined in it.
    for _ in range(2):
        with pytest.raises(FailedError, match="is not the one in the lock"):
            node.run(state="waited", seconds=300)
    path.write_bytes(whole)
    node.run(background=background)
    last = node.run(state="waited", seconds=300)
    assert (last["done"], last["changed"]) == (True, background)
    assert not ppdeploy_venv.state_path(node.root, ppdeploy_venv.parse_lock(node.lock.text)).exists()


def slow_uv(node: Node) -> Path:
    """Put a program in uv's place that tells where it works, waits, and then does as uv."""
    program = node.root / "bin" / f"uv-{UV_VERSION}"
    program.parent.mkdir(parents=True)
    at_work = node.root / "at-work"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = pip ] && {{ echo $$ > {at_work}; while [ -e {at_work} ]; do sleep 0.05; done; }}\n'
        f'exec {find_uv_bin()} "$@"\n'
    )
    program.chmod(0o755)
    return at_work


def until(said: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not said():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def builder_of(node: Node) -> int:
    """Return the process that builds, as the lock says."""
    return int((node.root / "venvs" / ".lock").read_text().split()[-1])


def test_what_a_killed_build_left_running_is_not_built_beside(node: Node) -> None:
    at_work = slow_uv(node)
    node.run(background=True)
    until(at_work.exists)
    os.kill(builder_of(node), signal.SIGKILL)
    # Its uv lives on, and writes into the environment.
    node.run(background=True)
    assert node.run(state="waited", seconds=0)["done"] is False
    at_work.unlink()
    with pytest.raises(FailedError, match="ended without a word: apply again"):
        node.run(state="waited", seconds=60)
    at_work.parent.joinpath("bin", f"uv-{UV_VERSION}").unlink()
    node.run(background=True)
    assert node.run(state="waited", seconds=300)["progress"] == "built and proved"


def test_another_version_is_told_which_one_is_still_being_built(node: Node) -> None:
    at_work = slow_uv(node)
    node.run(background=True)
    until(at_work.exists)
    process = builder_of(node)
    with pytest.raises(FailedError) as error:
        node.run(lock=node.shelf.lock(name="vllm-cpu-other", installed_bytes=2000), background=True)
    assert f"(vLLM 0.32.0 for Python {node.lock.python}, process {process})" in str(error.value)
    at_work.unlink()
    assert node.run(state="waited", seconds=300)["done"] is True


def test_an_environment_that_is_whole_is_not_called_lost_whatever_its_builder_said_last(node: Node) -> None:
    node.run(background=True)
    state = ppdeploy_venv.state_path(node.root, ppdeploy_venv.parse_lock(node.lock.text))
    until(lambda: "finished" in state.read_text())
    for told in ({"progress": "importing vLLM"}, {"failed": "the folder of the wheels cannot be removed"}):
        state.write_text(json.dumps(told))
        last = node.run(state="waited", seconds=10)
        assert (last["done"], last["changed"], state.exists()) == (True, True, False)


def test_an_environment_that_the_disk_does_not_take_is_not_marked(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "sync"
    failing.write_text("#!/bin/sh\necho 'sync: Input/output error' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(FailedError, match=r"cannot be written to the disk of .*Input/output error.*check the disk"):
        node.run()
    assert not (node.venv / ".ppdeploy.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_full_before_uv_runs_is_named(node: Node) -> None:
    node.root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m,mode=755", "tmpfs", str(node.root)], check=True)
    try:
        with pytest.raises(FailedError, match=rf"No space left on device \(below {node.root}.*: check the disk"):
            node.run()
    finally:
        subprocess.run(["umount", str(node.root)], check=True)


def test_what_a_killed_uv_left_in_the_cache_goes_unless_a_uv_is_at_work(base: Path) -> None:
    cache = base / "cache"
    (cache / ".tmpAb" / "torch").mkdir(parents=True)
    (cache / ".tmpCd").write_text("half")
    (cache / "archive-v0").mkdir()
    with (cache / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        ppdeploy_venv.clear(cache)
        assert len(list(cache.glob(".tmp*"))) == 2
    ppdeploy_venv.clear(cache)
    assert {path.name for path in cache.iterdir()} == {"archive-v0", ".lock"}


def test_how_far_a_build_is_comes_from_the_cache_and_then_from_the_environment(base: Path, shelf: Shelf) -> None:
    build = built(shelf.lock(installed_bytes=4_000_000), root=str(base), uv_cache=str(base / "cache"))
    watch = ppdeploy_venv.Watch(build)
    assert watch.words(0.0) == "downloading: 0.00 of 0.00 GB unpacked, 0.0 MB/s"
    for name, size in (("archive-v0/a/x.py", 1_000_000), (".tmpA/y.so", 1_000_000)):
        file = build.cache / name
        file.parent.mkdir(parents=True)
        file.write_bytes(bytes(size))
    assert watch.words(2.0).endswith("1.0 MB/s, 2 s left")
    # What another environment left is no part of this one's bytes, and of how many there will be nothing is known.
    assert ppdeploy_venv.Watch(build).words(0.0) == "downloading: 0.00 GB beside what the cache had, 0.0 MB/s"
    site = build.venv / "lib" / "python3.11" / "site-packages"
    (site / "torch-1.dist-info").mkdir(parents=True)
    assert watch.words(3.0) == "linking: 1 of 4 packages"
    for name in ("a", "b", "c"):
        (site / f"{name}-1.dist-info").mkdir()
    assert watch.words(4.0) == "compiling the byte code of 4 packages"


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


def test_what_lies_in_a_copied_files_way_is_no_lasting_hindrance(node: Node) -> None:
    asked: dict[str, Any] = {"state": "staged", "staged": True, "wheelhouse": None}
    first = node.run(**asked)
    staging = Path(first["staging"])
    longer, folder, link = (staging / name for name in first["missing"][:3])
    longer.write_bytes((node.shelf.links / longer.name).read_bytes() + b"more")
    folder.mkdir()
    link.symlink_to("/nowhere")
    again = node.run(**asked)
    assert again["missing"] == first["missing"]
    subprocess.run(
        ["rsync", "--files-from=-", "--copy-links", "--append-verify", f"{node.wheelhouse}/", f"{staging}/"],
        input="\n".join(again["missing"]),
        text=True,
        check=True,
    )
    assert node.run(staged=True, wheelhouse=None)["changed"] is True


def test_a_folder_for_packages_is_made_beside_an_environment_that_is_there(node: Node) -> None:
    node.run()
    asked: dict[str, Any] = {"state": "staged", "staged": True, "wheelhouse": None}
    assert not Path(node.run(**asked)["staging"]).exists()
    made = node.run(**asked, packages=True)
    assert (made["changed"], made["missing"]) == (True, [])
    assert Path(made["staging"]).is_dir()


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
            # A proxy is asked with the whole address.
            parts = urlsplit(self.path).path.strip("/").split("/")
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
        # The same server as a proxy on the way to an index that nobody here could reach.
        server = url.rpartition("@")[2].removesuffix("/simple")
        beyond = url.replace(server, "index.invalid")
        made = node.run(wheelhouse=None, index_url=beyond, proxy=f"http://{server}")
        assert made["versions"]["vllm"] == "0.32.0+cpu"
        # Nothing listens where that proxy would be: the index is reached beside it.
        shutil.rmtree(node.venv)
        shutil.rmtree(node.cache)
        apart: dict[str, Any] = {"proxy": "http://127.0.0.1:9", "no_proxy": ["127.0.0.1"]}
        assert node.run(wheelhouse=None, index_url=url, **apart)["versions"]["vllm"] == "0.32.0+cpu"
    for path in node.root.rglob("*"):
        if path.is_file() and path.stat().st_size < 10**6:
            assert b"s3cret" not in path.read_bytes(), path


def test_what_a_proxy_says_is_told_and_no_password(node: Node) -> None:
    staging = Path(node.run(state="staged", wheelhouse=None)["staging"])
    shutil.copy(find_uv_bin(), staging / "uv")
    with ForwardProxy(refuses=407) as proxy:
        way: dict[str, Any] = {
            "index_url": "https://index.invalid/simple",
            "proxy": proxy.address.replace("//", "//me:s3cret@"),
        }
        with pytest.raises(FailedError, match=r"proxy authorization required: check .*ppdeploy_proxy") as error:
            node.run(wheelhouse=None, **way)
    assert "s3cret" not in str(error.value)
    # In the background, where Ansible itself does not know any more what is secret.
    node.run(wheelhouse=None, background=True, index_url="http://me:s3/cret@index.invalid/simple")
    with pytest.raises(FailedError, match="check ppdeploy_index_url") as error:
        node.run(state="waited", seconds=60)
    assert "cret" not in str(error.value)


def test_certificates_of_ones_own_reach_uv_and_none_of_it_where_there_is_a_bundle(
    base: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []
    monkeypatch.setattr(ppdeploy_venv.Build, "_uv", lambda _self, _command, more=None: given.append(more))
    for wheelhouse in (None, base):
        build = built(shelf.lock(), root=str(base), ca_bundle="/etc/company.pem", index_url="https://index.example")
        build.wheelhouse, build.link_mode = wheelhouse, "copy"
        build._install(Path("uv"), base)
        shutil.rmtree(base / "made")
    assert given == [{"UV_DEFAULT_INDEX": "https://index.example", "SSL_CERT_FILE": "/etc/company.pem"}, {}]


def test_certificates_that_are_not_there_are_named_before_anything_is_built(node: Node) -> None:
    with pytest.raises(FailedError, match=r"ppdeploy_ca_bundle names /nowhere/ca\.pem, which is no file on"):
        node.run(wheelhouse=None, ca_bundle="/nowhere/ca.pem")
    assert not node.root.exists()


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


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", "8.0", True),
        ("sm_80", "8.6", True),
        ("sm_86", "8.0", False),
        ("sm_80", "9.0", False),
        ("sm_90a", "9.0", True),
        ("sm_90a", "10.0", False),
        ("sm_120f", "12.1", True),
        ("sm_120a", "12.1", False),
        ("compute_80", "12.1", True),
        ("compute_120", "8.9", False),
        ("compute_100f", "10.3", True),
        ("compute_100f", "12.0", False),
        ("gfx942", "9.0", False),
    ],
)
def test_kernels_run_on_a_gpu_as_cuda_says(arch: str, capability: str, runs: bool) -> None:
    assert ppdeploy_venv.runs_on(arch, capability) is runs


def built(lock: Lock, **about: Any) -> ppdeploy_venv.Build:
    """Return a build of a lock, for what it thinks of versions."""
    params = {"root": "/r", "uv_cache": "/c", "link_mode": "copy", "index_url": None, "extra_index_url": None}
    more = {"proxy": None, "no_proxy": [], "ca_bundle": None, "capabilities": ["12.1"]}
    node_lock = ppdeploy_venv.parse_lock(lock.text)
    return ppdeploy_venv.Build({**params, **more, **about}, node_lock, node_lock.wheels[0], None)


def test_a_torch_of_the_other_kind_and_one_without_kernels_for_the_gpu_are_refused(shelf: Shelf) -> None:
    cuda: dict[str, Any] = {"torch": "2.14.0", "cuda": "13.0", "nccl": "2.30.7", "arches": ["sm_80", "sm_120"]}
    none = {**cuda, "cuda": None, "nccl": None, "arches": []}
    for_cpu, for_gpu = built(shelf.lock()), built(shelf.lock(name="gpu", device="cuda"))
    for_cpu._check_device(none)
    for_gpu._check_device(cuda)
    with pytest.raises(ppdeploy_venv.VenvError, match=r"is for CUDA .* and the lock for cpu"):
        for_cpu._check_device(cuda)
    with pytest.raises(ppdeploy_venv.VenvError, match="was built without CUDA, and the lock is for it"):
        for_gpu._check_device(none)
    with pytest.raises(
        ppdeploy_venv.VenvError, match=r"has kernels for sm_80, sm_90, and a GPU there has compute capability 12\.1"
    ):
        for_gpu._check_device({**cuda, "arches": ["sm_80", "sm_90"]})


class Prunable:
    """A tree of environments, releases, units and processes."""

    def __init__(self, base: Path, lock: Lock) -> None:
        self.base = base
        self.lock = ppdeploy_venv.parse_lock(lock.text)
        self.proc, self.units = base / "proc", base / "units"
        self.proc.mkdir()
        self.units.mkdir()
        for age, name in enumerate([self.lock.digest[:16], *(f"{n:016x}" for n in range(4))]):
            (base / "venvs" / name).mkdir(parents=True)
            mark = base / "venvs" / name / ".ppdeploy.json"
            mark.touch()
            os.utime(mark, (1000 - age, 1000 - age))
        # Interrupted, and no environment.
        (base / "venvs" / "f" / "half").mkdir(parents=True)

    def pruned(self, monkeypatch: pytest.MonkeyPatch, *, check: bool = False) -> list[str]:
        """Return the names of what goes."""
        monkeypatch.setattr(ppdeploy_venv, "PROC", self.proc)
        monkeypatch.setattr(ppdeploy_venv, "SYSTEMD", self.units)
        result = ppdeploy_venv.prune(self.base, self.lock, 2, check=check)
        assert result["changed"] is bool(result["removed"])
        return sorted(Path(path).name for path in result["removed"])

    def left(self) -> set[str]:
        return {path.name for path in (self.base / "venvs").iterdir() if path.is_dir()}


@pytest.fixture
def prunable(tmp_path: Path, shelf: Shelf) -> Prunable:
    return Prunable(tmp_path, shelf.lock())


def test_two_environments_are_left(prunable: Prunable, monkeypatch: pytest.MonkeyPatch) -> None:
    old = [f"{n:016x}" for n in (1, 2, 3)]
    before = prunable.left()
    assert prunable.pruned(monkeypatch, check=True) == [*old, "f"]
    assert prunable.left() == before
    assert prunable.pruned(monkeypatch) == [*old, "f"]
    assert prunable.left() == {prunable.lock.digest[:16], f"{0:016x}"}
    assert prunable.pruned(monkeypatch) == []


def test_the_newest_is_the_one_that_was_proved_last_whoever_touched_which(
    prunable: Prunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the four others, 0 is the newest by its file's time; 3 is by what it says, and 1 says nothing."""
    for number, told in ((0, 1500), (2, 1600), (3, 1700)):
        mark = prunable.base / "venvs" / f"{number:016x}" / ".ppdeploy.json"
        mark.write_text(json.dumps({"verified_at": told}))
        os.utime(mark, (3000 - number, 3000 - number))
    assert f"{3:016x}" not in prunable.pruned(monkeypatch)
    assert prunable.left() == {prunable.lock.digest[:16], f"{3:016x}"}


def test_what_is_in_use_is_never_removed(prunable: Prunable, monkeypatch: pytest.MonkeyPatch) -> None:
    venvs = prunable.base / "venvs"
    release = prunable.base / "tiny" / "releases" / "old"
    release.mkdir(parents=True)
    (release / "rank.conf").write_text(f"ExecStart=x {venvs}/{1:016x}/bin/vllm\n")
    (prunable.base / "tiny" / "previous").symlink_to("releases/old")
    drop_in = prunable.units / "ppdeploy-sidecar@x.service.d"
    drop_in.mkdir()
    (drop_in / "a.conf").write_text(f"ExecStart=/opt/ppdeploy/venvs/{2:016x}/bin/vllm\n")
    process = prunable.proc / "77"
    process.mkdir()
    # A worker that gave itself another name still has its libraries.
    (process / "cmdline").write_bytes(b"VLLM::Worker")
    (process / "maps").write_text(f"7f r-xp 0 0 1 {venvs}/{3:016x}/lib/x.so\n")
    assert prunable.pruned(monkeypatch) == ["f"]


def test_a_release_that_is_neither_current_nor_previous_keeps_none(
    prunable: Prunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = prunable.base / "tiny" / "releases" / "older"
    release.mkdir(parents=True)
    (release / "rank.conf").write_text(f"ExecStart=x /opt/ppdeploy/venvs/{1:016x}/bin/vllm\n")
    assert f"{1:016x}" in prunable.pruned(monkeypatch)


def test_nothing_is_pruned_while_an_environment_is_built(prunable: Prunable, monkeypatch: pytest.MonkeyPatch) -> None:
    with (prunable.base / "venvs" / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(ppdeploy_venv.VenvError, match="another apply builds an environment"):
            prunable.pruned(monkeypatch)


def test_an_environment_that_becomes_whole_while_others_are_looked_for_stays(
    prunable: Prunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = ppdeploy_venv.named

    def named(root: Path) -> set[str]:
        # Its build ends at this moment.
        mark = prunable.base / "venvs" / "f" / ".ppdeploy.json"
        mark.touch()
        return looked(root)

    monkeypatch.setattr(ppdeploy_venv, "named", named)
    assert "f" not in prunable.pruned(monkeypatch)
    assert "f" in prunable.left()


def test_an_environment_below_a_link_is_found_in_use(prunable: Prunable, monkeypatch: pytest.MonkeyPatch) -> None:
    real = prunable.base.with_name("disk")
    shutil.copytree(prunable.base / "venvs", real)
    shutil.rmtree(prunable.base / "venvs")
    (prunable.base / "venvs").symlink_to(real)
    process = prunable.proc / "78"
    process.mkdir()
    (process / "maps").write_text(f"7f r-xp 0 0 1 {real}/{1:016x}/lib/x.so\n")
    assert f"{1:016x}" not in prunable.pruned(monkeypatch)
