#!/usr/bin/python
"""Write all files of a role at once: each task on a host costs a Python and an ssh command, whatever it does."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_files
short_description: Write several text files at once
description:
  - Makes the folders, then writes the files one after the other in the order given. A file that has its text already is
    left alone; another one is written beside it and takes its place in one step.
  - All belong to root. The texts come from the controller, where C(query('ansible.builtin.template', ...)) renders
    them.
  - As C(ansible.builtin.template) for each would, for a tenth of the time.
options:
  folders:
    description: Folders to make where they are missing, each with C(path) and C(mode).
    type: list
    elements: dict
    default: []
  files:
    description: Where each text goes, with C(path) and C(mode); more keys are not looked at.
    type: list
    elements: dict
    default: []
  texts:
    description: The texts, in the order of O(files).
    type: list
    elements: str
    default: []
  validate:
    description:
      - Commands by the end of a path, such as C(.cfg); with C(%s) for the file. A new text that its command refuses is
        not written, nor any after it.
    type: dict
    default: {}
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Write the unit and its configuration
  ppdeploy_files:
    folders: [{path: /etc/example, mode: "0755"}]
    files:
      - {path: /etc/systemd/system/example.service, mode: "0644"}
      - {path: /etc/example/example.json, mode: "0600"}
    texts: "{{ query('ansible.builtin.template', 'example.service.j2', 'example.json.j2') }}"
"""

RETURN = r"""
paths:
  description: The files that were written, or would be.
  returned: always
  type: list
  elements: str
"""

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

OWNER = {"owner": "root", "group": "root"}
HERE = socket.gethostname()


class RefusedError(Exception):
    """What is there already is in the way."""


class Writer:
    """What was done so far, on behalf of a module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.changed = False
        self.paths: list[str] = []
        self.diff: list[dict[str, str]] = []

    def folder(self, path: str, mode: str) -> None:
        """Make a folder, and those above it, open to everybody, where they are missing; a link to one is followed."""
        for place in reversed((Path(path), *Path(path).parents)):
            if place.is_dir():
                continue
            if place.exists() or place.is_symlink():
                raise RefusedError(f"{place} is no folder on {HERE}: move it away, then apply again")
            self.changed = True
            shown = str(place)
            self.diff.append({"before_header": shown, "before": "absent\n", "after_header": shown, "after": "folder\n"})
            if self.module.check_mode:
                return
            place.mkdir()
            place.chmod(0o755)
        self._attributes(os.path.realpath(path), mode)

    def file(self, path: str, mode: str, text: str, command: str | None) -> None:
        """Bring a file to its text."""
        wanted, found = text.encode("utf-8"), self._read(path)
        if found == wanted:
            if self._attributes(path, mode):
                self.paths.append(path)
            return
        self.changed = True
        self.paths.append(path)
        before = "" if found is None else found.decode("utf-8", "replace")
        self.diff.append({"before_header": path, "before": before, "after_header": path, "after": text})
        if not self.module.check_mode:
            self._write(path, mode, wanted, command, there=found is not None)

    def _read(self, path: str) -> bytes | None:
        """Return what a file has; None where there is none, and for a link, which is replaced."""
        there = Path(path)
        if there.is_symlink() or not there.exists():
            return None
        if not there.is_file():
            raise RefusedError(f"{path} is no file on {HERE}: move it away, then apply again")
        return there.read_bytes()

    def _write(self, path: str, mode: str, data: bytes, command: str | None, *, there: bool) -> None:
        handle, fresh = tempfile.mkstemp(dir=self.module.tmpdir)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            if command:
                code, out, err = self.module.run_command(command % fresh)
                if code != 0:
                    told = (err or out).strip().replace(fresh, path)
                    raise RefusedError(f"the new {path} was refused on {HERE} and not written: {told}")
            if there:
                # The new one takes the old one's mode over, at first.
                self._attributes(path, mode)
            # One that was not there is its owner's alone until it has its mode.
            before = os.umask(0o077)
            try:
                self.module.atomic_move(fresh, path)
            finally:
                os.umask(before)
        finally:
            if Path(fresh).exists():
                Path(fresh).unlink()
        self._attributes(path, mode)

    def _attributes(self, path: str, mode: str) -> bool:
        """Bring owner, group and mode to what they are to be; return whether they were otherwise."""
        wanted = {"path": path, **OWNER, "mode": mode, "attributes": None, "follow": False}
        wanted.update(dict.fromkeys(("seuser", "serole", "setype", "selevel")))
        arguments = self.module.load_file_common_arguments(wanted, path=path)
        changed = bool(self.module.set_fs_attributes_if_different(arguments, False))
        self.changed = self.changed or changed
        return changed


def main() -> None:
    """Read the arguments, do the work."""
    module = AnsibleModule(
        argument_spec={
            "folders": {"type": "list", "elements": "dict", "default": []},
            "files": {"type": "list", "elements": "dict", "default": []},
            "texts": {"type": "list", "elements": "str", "default": []},
            "validate": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    params: dict[str, Any] = module.params
    files, texts = params["files"], params["texts"]
    if len(files) != len(texts):
        module.fail_json(msg=f"there are {len(files)} files and {len(texts)} texts")
    writer, path = Writer(module), ""
    try:
        for folder in params["folders"]:
            path = folder["path"]
            writer.folder(path, folder["mode"])
        for file, text in zip(files, texts):
            path = file["path"]
            command = next((line for end, line in params["validate"].items() if path.endswith(end)), None)
            writer.file(path, file["mode"], text, command)
    except RefusedError as error:
        module.fail_json(msg=str(error), changed=writer.changed, paths=writer.paths)
    except OSError as error:
        msg = f"{path} cannot be written on {HERE}: {error.strerror or error}: check the disk, then apply again"
        module.fail_json(msg=msg, changed=writer.changed, paths=writer.paths)
    module.exit_json(changed=writer.changed, paths=writer.paths, diff=writer.diff)


if __name__ == "__main__":
    main()
