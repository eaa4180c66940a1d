"""The handoff plugin as one more wheel of a lock, so that an environment is named by the plugin's content too.

It is made of the sources beside the package (`ppdeploy_handoff/`), so it is on no index and in no lock file: the lock
with it is made when it is wanted, by whoever has the same ppdeploy, to the same byte.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import tomllib
from functools import cache

from ppdeploy.locks.lock import Lock, Wheel
from ppdeploy.locks.wheel_file import wheel_file
from ppdeploy.paths import data_root


@cache
def handoff_wheel() -> Wheel:
    """Return the plugin's wheel, with its content. Its version and entry points are those of its pyproject.toml."""
    folder = data_root() / "ppdeploy_handoff"
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = project["name"].replace("-", "_"), project["version"]
    sources = sorted((folder / "src").glob("**/*.py"))
    files = {path.relative_to(folder / "src").as_posix(): path.read_text("utf-8") for path in sources}
    points = "".join(
        f"[{group}]\n{''.join(f'{key} = {value}{chr(10)}' for key, value in entries.items())}"
        for group, entries in project["entry-points"].items()
    )
    files[f"{name}-{version}.dist-info/entry_points.txt"] = points
    told = f"Summary: {project['description']}\nRequires-Python: {project['requires-python']}\n"
    file, content = wheel_file(name, version, told, files)
    return Wheel(project["name"], version, file, hashlib.sha256(content).hexdigest(), len(content), content)


@cache
def with_handoff(lock: Lock) -> Lock:
    """Return a lock with the plugin beside all that it has. Its file is not there: only the name of it is told."""
    wheel = handoff_wheel()
    assert wheel.content is not None
    text = (
        f"{lock.text}# wheel: {wheel.file} {wheel.size}\n# content: {base64.b64encode(wheel.content).decode()}\n"
        f"{wheel.project}=={wheel.version} --hash=sha256:{wheel.sha256}\n"
    )
    return dataclasses.replace(
        lock,
        path=lock.path.with_name(re.sub(r"-(?=cp\d)", "+handoff-", lock.path.name, count=1)),
        text=text,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        wheels=(*lock.wheels, wheel),
    )
