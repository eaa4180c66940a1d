"""A model on a plain web server: a folder of files with `SHA256SUMS`, as `sha256sum * > SHA256SUMS` writes it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx

from ppdeploy.errors import InputError
from ppdeploy.manifest import Manifest, ManifestFile, is_safe_path, needed_files
from ppdeploy.unanswered import unanswered

SUMS = "SHA256SUMS"

# `sha256sum` puts a star before the name of a file read as binary, and a backslash before a line with odd characters.
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")
_SECONDS = 30


class Mirror:
    """A folder of a web server, read over http or https."""

    def __init__(self, address: str, where: str) -> None:
        self._address, self._where = address.rstrip("/"), where

    def manifest(self) -> Manifest:
        """Return the files that vLLM needs, with the sizes that the server tells and the hashes of SHA256SUMS."""
        sums: dict[str, str] = {}
        for line in self.read(SUMS).decode(errors="replace").splitlines():
            match = _LINE.fullmatch(line.strip())
            if not match:
                raise self._error(
                    f"{SUMS} has a line that is not a hash and a name", f"write it by `sha256sum * > {SUMS}`"
                )
            sums[match[2]] = match[1]
        paths = needed_files(sums)
        for path in paths:
            if not is_safe_path(path):
                raise self._error(
                    f"the file name {path!r} has characters that cannot be copied safely", "rename it on the server"
                )
        with ThreadPoolExecutor(max_workers=8) as pool:
            sizes = list(pool.map(self._size, paths))
        files = (ManifestFile(path=path, size=size, sha256=sums[path]) for path, size in zip(paths, sizes, strict=True))
        return Manifest(files=tuple(files))

    def read(self, path: str) -> bytes:
        """Return a small file's content."""
        return self._ask("GET", path).content

    def _size(self, path: str) -> int:
        length = self._ask("HEAD", path).headers.get("content-length", "")
        if not length.isdigit():
            raise self._error(
                f"the server tells no size of {path}", "use a server that answers HEAD with Content-Length"
            )
        return int(length)

    def _ask(self, method: str, path: str) -> httpx.Response:
        # Packed on the way, a file would have another size than on the disk.
        headers = {"Accept-Encoding": "identity"}
        try:
            answer = httpx.request(
                method, f"{self._address}/{quote(path)}", headers=headers, timeout=_SECONDS, follow_redirects=True
            )
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            what, remedy = unanswered(exc, "the address")
            raise self._error(f"the mirror {what}", remedy) from exc
        if answer.status_code == httpx.codes.NOT_FOUND and path == SUMS:
            raise self._error(
                f"the mirror has no {SUMS}", f"run `sha256sum * > {SUMS}` in the model's folder on the server"
            )
        if answer.status_code != httpx.codes.OK:
            raise self._error(
                f"the mirror answered HTTP {answer.status_code} for {path}", "check the file on the server"
            )
        return answer

    def _error(self, what: str, remedy: str) -> InputError:
        return InputError(what, where=self._where, remedy=remedy)
