"""A stand-in for a Hugging Face hub, for the real huggingface_hub client behind HF_ENDPOINT.

It serves folders as repositories, with what the client relies on: model info with sizes and hashes, file
addresses that redirect to a store for large files, ETag and commit headers, ranges, the error codes of gated,
private and absent repositories, and on request a connection that breaks in the middle of a file.

Runs inside a test (`with HubStandin(...) as hub:`) or by itself: `python tests/hub_standin.py --bind ADDRESS
--port PORT --repo owner/name=FOLDER [--token TOKEN] [--gated]`. It takes the port above, too.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import ssl
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

LARGE_SUFFIXES = (".safetensors", ".bin", ".model")


def _state(file: Path) -> tuple[Path, int, int]:
    about = file.stat()
    return file, about.st_size, about.st_mtime_ns


@functools.cache
def _hashes(file: Path, _size: int, _mtime_ns: int) -> tuple[str, str]:
    """Return sha256 and git's hash of a file, worked out once for each state of it."""
    content = file.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return hashlib.sha256(content).hexdigest(), blob.hexdigest()


@dataclass
class Repository:
    """A folder that the stand-in serves as one repository with one commit."""

    folder: Path
    token: str | None = None
    """The only token that may read it; None: everyone may."""
    gated: bool = False
    """Gated: the description is public, the files are not. Not gated, but with a token: nothing is told."""
    revisions: tuple[str, ...] = ("main",)

    def paths(self) -> list[str]:
        return sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())

    @property
    def commit(self) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        for path in self.paths():
            digest.update(f"{path} {self.git_sha1(path)}\n".encode())
        return digest.hexdigest()

    def sha256(self, path: str) -> str:
        return _hashes(*_state(self.folder / path))[0]

    def git_sha1(self, path: str) -> str:
        return _hashes(*_state(self.folder / path))[1]

    def info(self, repo: str, *, blobs: bool) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for path in self.paths():
            sibling: dict[str, Any] = {"rfilename": path}
            if blobs:
                size = (self.folder / path).stat().st_size
                sibling |= {"size": size, "blobId": self.git_sha1(path)}
                if path.endswith(LARGE_SUFFIXES):
                    sibling["lfs"] = {"sha256": self.sha256(path), "size": size, "pointerSize": 135}
            siblings.append(sibling)
        access = {
            "private": self.token is not None and not self.gated,
            "gated": "auto" if self.gated else False,
        }
        return {"id": repo, "modelId": repo, "sha": self.commit, "tags": [], "siblings": siblings} | access


@dataclass
class Request:
    """What one request was, for tests to look at."""

    method: str
    path: str
    range: str | None
    token: str | None
    sent: int = 0


@dataclass
class HubStandin:
    """The server, from `with` on. `cuts` says per file name after how many bytes to break off, in turn."""

    repositories: dict[str, Repository]
    cuts: dict[str, list[int]] = field(default_factory=dict)
    bind: str = "127.0.0.1"
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    damaged: dict[str, bytes] = field(default_factory=dict)
    """Files for which other content is sent than described, as a broken mirror would."""
    certificate: Path | None = None
    """A file with certificate and key, for TLS; None: plain HTTP."""

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        # Large files come from a second server: the client treats redirects to another host differently from
        # those within the hub, and must not take the token there.
        self._servers = [
            ThreadingHTTPServer((self.bind, port), Handler) for port in (self.port, self.port and self.port + 1)
        ]
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            for server in self._servers:
                server.socket = context.wrap_socket(server.socket, server_side=True)
        self._threads = [threading.Thread(target=s.serve_forever, args=(0.05,)) for s in self._servers]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    @property
    def endpoint(self) -> str:
        """Address of the hub."""
        return self._address(0)

    @property
    def store(self) -> str:
        """Address of the store that the hub redirects to."""
        return self._address(1)

    def _address(self, which: int) -> str:
        host, port = self._servers[which].server_address[:2]
        return f"http{'s' if self.certificate else ''}://{host!s}:{port}"

    def sent_of(self, name: str) -> int:
        """Bytes of content sent so far of files with this name."""
        return sum(r.sent for r in self.requests if r.path.endswith(f"/{name}") and r.method == "GET")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStandin

    def log_message(self, *_: Any) -> None:
        """Say nothing: tests look at `requests`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        authorization = self.headers.get("authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        self.request_seen = Request(self.command, url.path, self.headers.get("range"), token)
        self.hub.requests.append(self.request_seen)
        query = urllib.parse.parse_qs(url.query)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?", url.path):
            self._info(match[1], urllib.parse.unquote(match[2] or "main"), token, blobs="blobs" in query)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
            self._resolve(match[1], urllib.parse.unquote(match[2]), urllib.parse.unquote(match[3]), token)
        elif match := re.fullmatch(r"/store/([^/]+/[^/]+)/[0-9a-f]{64}/(.+)", url.path):
            # The store's addresses are their own key, as signed ones are.
            repository = self.hub.repositories[match[1]]
            self._content(repository.folder / match[2], {"ETag": f'"{repository.sha256(match[2])}"'})
        else:
            self._fail(404, None, "no such page")

    def _allowed(self, repo: str, revision: str, token: str | None, *, files: bool) -> Repository | None:
        """Return the repository, or answer as the hub does for one that is not there for this caller."""
        repository = self.hub.repositories.get(repo)
        known = {r.token for r in self.hub.repositories.values()} - {None}
        if token is not None and token not in known:
            self._fail(401, None, "Invalid credentials in Authorization header")
        elif repository is None or (repository.token not in (None, token) and not repository.gated):
            # The hub does not tell a stranger whether a private repository exists.
            self._fail(404 if token else 401, "RepoNotFound", "Repository not found")
        elif repository.gated and files and repository.token != token:
            message = f"Access to model {repo} is restricted."
            self._fail(403 if token else 401, "GatedRepo", message)
        elif revision not in (*repository.revisions, repository.commit):
            self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repository
        return None

    def _info(self, repo: str, revision: str, token: str | None, *, blobs: bool) -> None:
        repository = self._allowed(repo, revision, token, files=False)
        if repository is not None:
            body = json.dumps(repository.info(repo, blobs=blobs)).encode()
            self._send(200, {"Content-Type": "application/json"}, body)

    def _resolve(self, repo: str, revision: str, path: str, token: str | None) -> None:
        repository = self._allowed(repo, revision, token, files=True)
        if repository is None:
            return
        commit = {"X-Repo-Commit": repository.commit}
        if path not in repository.paths():
            self._fail(404, "EntryNotFound", "Entry not found", commit)
        elif path.endswith(LARGE_SUFFIXES):
            digest = repository.sha256(path)
            headers = commit | {
                "Location": f"{self.hub.store}/store/{repo}/{digest}/{path}",
                "X-Linked-Size": str((repository.folder / path).stat().st_size),
                "X-Linked-Etag": f'"{digest}"',
                "ETag": f'"{repository.git_sha1(path)}"',
            }
            self._send(302, headers, b"")
        else:
            self._content(repository.folder / path, commit | {"ETag": f'"{repository.git_sha1(path)}"'})

    def _content(self, file: Path, headers: dict[str, str]) -> None:
        content = self.hub.damaged.get(file.name, file.read_bytes())
        headers = headers | {"Accept-Ranges": "bytes"}
        status = 200
        if self.request_seen.range and (match := re.fullmatch(r"bytes=(\d+)-", self.request_seen.range)):
            start, total = int(match[1]), len(content)
            if start >= total:
                self._send(416, {"Content-Range": f"bytes */{total}"}, b"")
                return
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
            content, status = content[start:], 206
        cuts = self.hub.cuts.get(file.name, [])
        cut = cuts.pop(0) if cuts and self.command == "GET" else None
        self._send(status, headers, content, cut=cut)

    def _fail(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        headers = (headers or {}) | {"X-Error-Message": message}
        if code:
            headers["X-Error-Code"] = code
        self._send(status, headers, json.dumps({"error": message}).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        # Closed after each answer: else the client keeps its connections, and the server waits for them.
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        part = body if cut is None else body[:cut]
        self.wfile.write(part)
        self.request_seen.sent += len(part)


def main() -> None:
    """Serve folders until interrupted."""
    parser = argparse.ArgumentParser(description="Serve folders as a Hugging Face hub would.")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8099)
    parser.add_argument("--repo", action="append", required=True, metavar="OWNER/NAME=FOLDER")
    parser.add_argument("--token", help="the only token that may read the repositories")
    parser.add_argument("--gated", action="store_true", help="show the repositories, but not their files")
    options = parser.parse_args()
    repositories = {}
    for item in options.repo:
        name, _, folder = item.partition("=")
        repositories[name] = Repository(Path(folder).resolve(), options.token, options.gated)
    with HubStandin(repositories, bind=options.bind, port=options.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
