"""Made-up RPM packages, built with rpmbuild, and repositories of them: what stands in for a mirror of Red Hat's kin."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path


def _run(*words: str, home: Path, **environment: str) -> str:
    """Run a program and return what it printed; Debian's rpm keeps its database in `home`."""
    done = subprocess.run(
        words,
        env={**os.environ, "LC_ALL": "C", "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


class Keys:
    """Keys that packages are signed with, in a keyring of their own."""

    def __init__(self, folder: Path, *names: str) -> None:
        folder.mkdir(mode=0o700)
        self._folder = folder
        for name in names:
            of = f"{name}@example.org"
            words = [
                "gpg",
                "--batch",
                "--quiet",
                "--passphrase",
                "",
                "--quick-generate-key",
                of,
                "ed25519",
                "sign",
                "never",
            ]
            self._run(*words)
            self.public(name).write_text(self._run("gpg", "--armor", "--export", of))

    def _run(self, *words: str) -> str:
        return _run(*words, home=self._folder, GNUPGHOME=str(self._folder))

    def public(self, name: str) -> Path:
        """Return where the public key is."""
        return self._folder / f"{name}.pub"

    def sign(self, name: str, *packages: Path) -> None:
        """Sign packages with one of the keys, in place of the signature that they have."""
        macros = ("--define", "__gpg /usr/bin/gpg", "--define", f"_gpg_name {name}@example.org")
        self._run("rpmsign", *macros, "--addsign", *map(str, packages))

    def close(self) -> None:
        """End the agent that gpg has started for this keyring."""
        self._run("gpgconf", "--kill", "all")


def build(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes | str],
    *,
    tags: Iterable[str] = (),
    scripts: str = "",
) -> Path:
    """Build a package of these files, all of which anyone may run, and return it.

    `tags` are lines of its head, such as `Requires: base = 2`; `scripts` are sections, such as `%post`.
    """
    top = folder / "top"
    tree = top / "tree" / f"{name}-{version}"
    for path, content in files.items():
        target = tree / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
        target.chmod(0o755)
    head = [f"Name: {name}", f"Version: {version}", "Release: 1", "Summary: for a test", "License: none", *tags]
    spec = top / f"{name}-{version}.spec"
    spec.write_text(
        "\n".join((*head, "AutoReqProv: no", "%description", "For a test.", "%install"))
        + f"\nmkdir -p %{{buildroot}}\ncp -a {tree}/. %{{buildroot}}/\n{scripts}\n%files\n"
        + "\n".join(files)
        + "\n"
    )
    # Nothing is done to the files after they were copied.
    macros = {"_topdir": str(top), "__os_install_post": "%{nil}", "debug_package": "%{nil}"}
    words = [word for macro, value in macros.items() for word in ("--define", f"{macro} {value}")]
    _run("rpmbuild", "--quiet", "-bb", *words, str(spec), home=top)
    (made,) = (top / "RPMS").rglob(f"{name}-{version}-1.*.rpm")
    return Path(shutil.copy(made, folder))


def index(folder: Path) -> None:
    """Make a folder of packages a repository."""
    _run("createrepo_c", "--quiet", "--general-compress-type=gz", str(folder), home=folder)


SEEN = """\
mount -t tmpfs tmpfs "$mount"
mkdir "$mount/upper" "$mount/work"
cp -r "$etc/." "$mount/upper"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$mount/upper,workdir=$mount/work" /etc
mount -t tmpfs tmpfs /var/cache
mount -t tmpfs tmpfs /var/log
exec "$@"
"""


def on_a_machine_with(etc: Path, command: list[str]) -> list[str]:
    """Return a command that sees the files of `etc` in this machine's /etc, and leaves nothing in caches and logs."""
    mount = etc.with_name(f"{etc.name}.mount")
    mount.mkdir(exist_ok=True)
    seen = ["env", f"HOME={mount}", f"etc={etc}", f"mount={mount}", "sh", "-euc", SEEN, "sh", *command]
    return ["unshare", "--mount", "--propagation", "private", *seen]
