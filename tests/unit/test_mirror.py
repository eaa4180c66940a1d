"""A model on a plain web server: found by SHA256SUMS, fetched by a node, and what may be wrong with it."""

from __future__ import annotations

import functools
import hashlib
import os
import pwd
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ppdeploy.errors import InputError
from ppdeploy.lab.tiny_model import make_tiny_model
from ppdeploy.mirror import SUMS
from ppdeploy.sources import ModelSource, resolve_source
from tests.unit.test_weights import FailedError, run


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and says nothing."""

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PPDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    model = make_tiny_model(tmp_path / "www" / "tiny", sharded=True)
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()} *{path.name}\n" for path in sorted(model.iterdir()))
    (model / SUMS).write_text("".join(sums))
    return model


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder.parent)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/tiny"
    server.shutdown()
    server.server_close()
    thread.join()


def found(address: str) -> ModelSource:
    return resolve_source(address, None, Path())


def test_it_is_the_model_that_lies_in_the_folder(address: str, folder: Path) -> None:
    source = found(address + "/")
    local = resolve_source(str(folder), None, Path())
    assert (source.kind, source.name, source.location) == ("mirror", "tiny", address)
    assert source.manifest == local.manifest
    assert source.places == local.places
    assert source.shape.total_parameters == local.shape.total_parameters


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / SUMS).unlink(), "the mirror has no SHA256SUMS .*run `sha256sum"),
        (lambda folder: (folder / SUMS).write_text("not a sum\n"), "not a hash and a name"),
        (lambda folder: (folder / "model-00002-of-00006.safetensors").unlink(), "HTTP 404 for model-00002-of-00006"),
        (lambda folder: (folder / SUMS).write_text(f"{'0' * 64}  a.safetensors\n"), "HTTP 404 for a.safetensors"),
    ],
)
def test_what_is_wrong_with_it_is_one_sentence(address: str, folder: Path, spoil: Any, said: str) -> None:
    spoil(folder)
    with pytest.raises(InputError, match=said):
        found(address)


def test_an_index_that_names_absent_files_is_refused(address: str, folder: Path) -> None:
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    (folder / SUMS).write_text("".join(line for line in lines if "model-00003" not in line))
    with pytest.raises(InputError, match=r"the index names absent files: model-00003-of-00006\.safetensors"):
        found(address)


def test_a_mirror_that_does_not_answer_is_named() -> None:
    with pytest.raises(InputError, match=r"the mirror did not answer \(ConnectError\)"):
        found("http://127.0.0.1:1/tiny")


def test_a_certificate_that_the_controller_does_not_trust_is_told_as_that(tmp_path: Path) -> None:
    own = tmp_path / "own.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -out"
    subprocess.run([*make.split(), own, "-keyout", tmp_path / "key.pem"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, tmp_path / "key.pem")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        address = f"https://localhost:{server.server_port}"
        with pytest.raises(InputError, match=r"mirror has a certificate .* not trust .*SSL_CERT_FILE"):
            found(f"{address}/tiny")
        with pytest.raises(InputError, match=r"hub at .* has a certificate .* not trust .*SSL_CERT_FILE"):
            resolve_source("org/tiny", None, Path(), address)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_node_downloads_from_it(address: str, folder: Path, tmp_path: Path) -> None:
    entries = found(address).manifest.entries()
    options = {"endpoint": address, "python": sys.executable, "user": pwd.getpwuid(os.geteuid()).pw_name}
    node = tmp_path / "models" / "tiny"
    assert run("downloaded", node, entries, **options)["present"]
    for entry in entries:
        assert (node / entry["path"]).read_bytes() == (folder / entry["path"]).read_bytes()


def test_a_mirror_that_sends_other_bytes_is_found(address: str, folder: Path, tmp_path: Path) -> None:
    entries = found(address).manifest.entries()
    options = {"endpoint": address, "python": sys.executable, "user": pwd.getpwuid(os.geteuid()).pw_name}
    node = tmp_path / "models" / "tiny"
    file = folder / "model-00001-of-00006.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(FailedError, match=r"model-00001-of-00006\.safetensors arrived damaged twice"):
        run("downloaded", node, entries, **options)
    file.unlink()
    with pytest.raises(FailedError, match="tiny answered HTTP 404"):
        run("downloaded", node, entries, **options)


def test_a_node_copies_from_a_mounted_folder(folder: Path, tmp_path: Path) -> None:
    entries = resolve_source(str(folder), None, Path()).manifest.entries()
    node = tmp_path / "models" / "tiny"
    assert run("copied", node, entries, folder=str(folder))["present"]
    assert {path.name for path in node.glob("*.safetensors")} == {path.name for path in folder.glob("*.safetensors")}
    shutil.rmtree(node)
    with pytest.raises(FailedError, match="mount it on every node"):
        run("copied", node, entries, folder=str(tmp_path / "absent"))
