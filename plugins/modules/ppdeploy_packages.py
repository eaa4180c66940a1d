#!/usr/bin/python
"""See that a node has what vLLM needs from its system, and install the packages of what is not there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ppdeploy_packages
short_description: Install the system packages of what a node lacks
description:
  - Asks for what a package brings, not for the package, so that an interpreter or compiler from elsewhere will do.
  - Packages come from the archives that the node's package manager knows, or from a folder of packages on the node,
    and then from nowhere else.
options:
  state:
    description:
      - V(told) says what is lacking, and installs nothing.
      - V(present) installs it.
    type: str
    choices: [told, present]
    default: present
  wants:
    description:
      - What must be there. C(package) is the name to install, C(kind) what it brings and C(value) which one.
      - C(python) is an interpreter of a minor version, C(headers) its Python.h, C(program) any of the programs that
        are separated by commas, C(library) a shared library by its name in the loader's cache.
      - C(daemon) is a program whose package brings a service of the package's name, which has nothing to do here. Where
        the package is installed, the service is left off.
    type: list
    elements: dict
    default: []
  names:
    description:
      - Packages as the package manager takes them, in place of O(wants), to have in the newest version that
        O(repository) has.
      - Those that are held are changed too.
    type: list
    elements: str
    default: []
  manager:
    description: The node's package manager; left out where it has none that is known.
    type: str
    choices: [apt, dnf]
  allowed:
    description: Whether packages may be installed; otherwise what is lacking ends the play in a sentence.
    type: bool
    default: true
  repository:
    description:
      - Folder on the node with packages and their index, in place of all archives. With apt the index is C(Packages),
        with dnf C(repodata).
    type: path
  hashes:
    description:
      - The sha256 of each file of O(repository) by its path there. Before anything is installed, each must be there as
        it was, and no other file beside them, since neither apt nor dnf checks signatures there.
    type: dict
    default: {}
  manifest:
    description:
      - File on the node with the hashes, of a bundle that was put there, in place of O(hashes) where these are empty.
    type: path
  lock_timeout:
    description: Seconds that the package manager itself waits for another program that installs packages.
    type: int
    default: 600
attributes:
  check_mode:
    support: full
    description: Says what it would install.
author:
  - ppdeploy authors (@ppdeploy)
"""

EXAMPLES = r"""
- name: Have Python 3.12
  ppdeploy_packages:
    manager: apt
    wants:
      - {package: python3.12, kind: python, value: "3.12"}
"""

RETURN = r"""
lacking:
  description: Packages of what is not there.
  returned: always
  type: list
  elements: str
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from ansible.module_utils.basic import AnsibleModule

PROGRAMS = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
INSTALL_TIMEOUT = 1800.0  # seconds; a slow house line, and a compiler of 200 MB
LOOK_EVERY = 2.0  # seconds
# dnf writes its reason below these words, and then what else one may add to the command.
DNF_REASON = r"^(?:Error:|Failed to resolve the transaction:|Transaction failed:)(.+?)(?:^\(try to add|^You can try|\Z)"
# What dpkg has nothing left to do for (dpkg(1), package states).
SETTLED = ("installed", "not-installed", "config-files")
# What dnf knows a bundle's folder as.
BUNDLE = "ppdeploy-bundle"
# Packages by name are the NVIDIA driver's, which a bundle has by this option.
DRIVER = "--nvidia-driver"
# Keys of the vendors that the node trusts.
KEYS = Path("/etc/pki/rpm-gpg")
# rpm's lock: Fedora's and RHEL's place of its database, and the older one.
RPM_LOCKS = ("/usr/lib/sysimage/rpm/.rpm.lock", "/var/lib/rpm/.rpm.lock")


# A driver's own packages, of which a new one may take the place of an old one (HELD of ppdeploy/plan/driver.py).
OF_DRIVER = re.compile(r"nvidia|^libcuda\d|^cuda-drivers")


class PackageError(Exception):
    """A sentence for the user: what is wrong, where, what to do."""


def here() -> str:
    """Return the name of this node for sentences."""
    return socket.gethostname()


def run(argv: list[str], **more: str) -> tuple[int, str]:
    """Run a program; return its exit status and all that it said."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_TIMEOUT,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **more},
            check=False,
        )
    except FileNotFoundError:
        return 127, f"{argv[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, f"{argv[0]} did not end in {INSTALL_TIMEOUT:.0f} s"
    return done.returncode, done.stdout


# ---- what is there -------------------------------------------------------------------------------


def program(name: str) -> str | None:
    """Return where a program is, by the usual folders and then by PATH."""
    return shutil.which(name, path=f"{PROGRAMS}:{os.environ.get('PATH', '')}")


def ask(minor: str, expression: str) -> str | None:
    """Return what the interpreter of a minor version answers; None where there is none."""
    for name in (f"python{minor}", "python3"):
        path = program(name)
        if path is None:
            continue
        code = f"import sys, sysconfig; print('%d.%d' % sys.version_info[:2]); print({expression})"
        status, said = run([path, "-I", "-c", code])
        lines = said.splitlines()
        if status == 0 and len(lines) == 2 and lines[0] == minor:
            return lines[1]
    return None


def is_there(want: dict[str, Any]) -> bool:
    """Return whether the node has what the package would bring."""
    kind, value = want["kind"], str(want["value"])
    if kind == "python":
        return ask(value, "1") is not None
    if kind == "headers":
        folder = ask(value, "sysconfig.get_path('include')")
        return folder is not None and Path(folder, "Python.h").is_file()
    if kind in ("program", "daemon"):
        return any(program(name) for name in value.split(","))
    if kind == "library":
        _, known = run(["ldconfig", "-p"], PATH=PROGRAMS)
        return value in known or any(any(Path("/usr").glob(place + value)) for place in ("lib*/", "lib/*/"))
    raise PackageError(f"a package that brings a {kind} is not known: report it")


# ---- apt -----------------------------------------------------------------------------------------


def half_installed() -> list[str]:
    """Return the packages that dpkg has begun with and not ended."""
    _, said = run(["dpkg-query", "--show", "--showformat=${Package}\\t${db:Status-Status}\\n"])
    rows = [line.split("\t") for line in said.splitlines()]
    return sorted(row[0] for row in rows if len(row) == 2 and row[1] not in SETTLED)


def finish(lock_timeout: int, repository: Path | None = None) -> None:
    """End what an interrupted installation left, by one folder alone where it is given.

    PackageError naming what does not end.
    """
    if not half_installed():
        return
    run(["dpkg", "--configure", "-a", "--force-confold"])
    if half_installed():
        with contextlib.ExitStack() as stack:
            options = stack.enter_context(apt_from(repository)) if repository else []
            if repository:
                run([*apt(lock_timeout, *options), "update"])
            run([*apt(lock_timeout, *options), "install", "--fix-broken"])
    still = half_installed()
    if still:
        raise PackageError(
            f"{', '.join(still)} on {here()} {'is' if len(still) == 1 else 'are'} half installed, and neither "
            "`dpkg --configure -a` nor `apt-get --fix-broken install` ends it: run them there and see what they say, "
            "then apply again"
        )


def apt(lock_timeout: int, *options: str) -> list[str]:
    """Return the beginning of an apt-get command that asks nothing."""
    return [
        *("apt-get", "--quiet", "--yes", "--no-install-recommends", "--option", "Dpkg::Options::=--force-confold"),
        *("--option", f"DPkg::Lock::Timeout={lock_timeout}", *options),
    ]


@contextlib.contextmanager
def apt_from(repository: Path) -> Iterator[list[str]]:
    """Yield the options by which apt knows one folder alone: the node's archives are neither read nor changed."""
    with tempfile.TemporaryDirectory() as work:
        # A space in the folder's name would part the line's words.
        source = Path(work, "sources.list")
        source.write_text(f"deb [trusted=yes] file:{quote(str(repository))} ./\n", encoding="utf-8")
        Path(work, "lists", "partial").mkdir(parents=True)
        options = [
            f"Dir::Etc::sourcelist={source}",
            "Dir::Etc::sourceparts=-",
            f"Dir::State::lists={work}/lists",
            "Dir::Cache::pkgcache=",
            "Dir::Cache::srcpkgcache=",
        ]
        # apt reads as a user of its own, who must be able to come here.
        Path(work).chmod(0o755)
        yield [word for option in options for word in ("--option", option)]


# What apt says of a package whose wants cannot be met, on lines without its `E:`.
UNMET = r"^ (\S+) : ((?:Pre-?Depends|Depends|Conflicts|Breaks): .+?)\s*$"


class Source(NamedTuple):
    """Where packages come from, in the words of sentences."""

    name: str
    has: str
    remedy: str


ARCHIVES = {
    "apt": Source("the archives in /etc/apt", "have", "add the archive that has it, or install it by hand"),
    "dnf": Source("the repositories in /etc/yum.repos.d", "have", "add the one that has it, or install it by hand"),
}


def folder_source(repository: Path, option: str = "--packages") -> Source:
    """Return a bundle's folder as a source; `option` is that of `ppdeploy bundle` which fills it."""
    again = f"make the bundle again with `ppdeploy bundle {option}` on a machine of the node's release"
    return Source(f"the folder {repository}", "has", f"{again}, or install it by hand")


def install_with_apt(packages: list[str], repository: Path | None, lock_timeout: int) -> None:
    """Install packages from the node's archives, or from one folder alone."""
    if repository is not None:
        with apt_from(repository) as options:
            begin = apt(lock_timeout, *options)
            for command in (["update"], ["install", *packages]):
                status, said = run([*begin, *command])
                if status:
                    raise PackageError(why(packages, said, folder_source(repository)))
        return
    status, said = run([*apt(lock_timeout), "install", *packages])
    if status and not re.search("half-configured|No space left|Could not get lock", said):
        # The lists may be absent or old: they are fetched when the first try fails.
        _, updated = run([*apt(lock_timeout), "update"])
        status, said = run([*apt(lock_timeout), "install", *packages])
        said = f"{updated}\n{said}"
    if status:
        raise PackageError(why(packages, said, ARCHIVES["apt"]))


def bring_with_apt(packages: list[str], repository: Path, lock_timeout: int) -> bool:
    """Have packages as one folder has them, and all that they need; return whether anything was installed."""
    with apt_from(repository) as options:
        # The one lets apt resolve to other versions of what is held, the other lets it go on with them.
        begin = apt(lock_timeout, *options, "--ignore-hold", "--allow-change-held-packages")
        said = ""
        for command in (["update"], ["--simulate", "install", *packages], ["install", *packages]):
            status, said = run([*begin, *command])
            if status:
                raise PackageError(why(packages, said, folder_source(repository, DRIVER)))
            if "--simulate" in command:
                if not re.search(r"^(Inst|Conf|Remv) ", said, re.MULTILINE):
                    return False
                # To have its way apt removes what a package of the folder does not go with, held or not.
                lost = [name for name in re.findall(r"^Remv (\S+)", said, re.MULTILINE) if not OF_DRIVER.search(name)]
                if lost:
                    raise PackageError(
                        f"{', '.join(packages)} cannot be installed on {here()} from {repository} without the removal "
                        f"of {', '.join(lost)}: upgrade or remove that there yourself, or make the bundle again on a "
                        "machine that has its release's updates, and apply again"
                    )
    return True


# ---- dnf 4 and 5 ---------------------------------------------------------------------------------


def dnf(*options: str) -> list[str]:
    """Return the beginning of a dnf command that asks nothing and does not wait for a lock."""
    name = next((name for name in ("dnf", "dnf5") if program(name)), "dnf")
    # A package that is not there is an error, whatever dnf.conf says.
    settings = ["install_weak_deps=0", "exit_on_lock=1", "strict=1"]
    if Path(program(name) or name).resolve().name == "dnf5":
        settings += ["skip_unavailable=0", "skip_broken=0"]
    return [name, "--assumeyes", *(f"--setopt={setting}" for setting in settings), *options]


def install_with_dnf(packages: list[str], repository: Path | None, lock_timeout: int) -> None:
    """Install packages from the repositories that dnf knows, or from one folder alone."""
    if repository is not None:
        install_from_folder(packages, repository, lock_timeout, folder_source(repository))
        return
    status, said = patiently([*dnf(), "install", *packages], lock_timeout)
    if status:
        raise PackageError(why(packages, said, ARCHIVES["dnf"]))


def install_from_folder(packages: list[str], repository: Path, lock_timeout: int, source: Source) -> str:
    """Install packages by dnf from one folder alone; return what dnf said."""
    # dnf 5 copies the packages into its cache, and /tmp may be memory.
    with tempfile.TemporaryDirectory(dir="/var/tmp") as work:
        begin = dnf(f"--repo={BUNDLE}", *(f"--setopt={option}" for option in folder_alone(repository, Path(work))))
        # Where a package of the folder needs another one in the folder's version and the node has a newer one, dnf
        # would put the older in its place: what it means to do is asked first.
        status, said = patiently([*begin, "--assumeno", "install", *packages], lock_timeout)
        if status and "Operation aborted" not in said:
            raise PackageError(why(packages, said, source))
        older = downgraded(said)
        if older:
            raise PackageError(
                f"{', '.join(packages)} could not be installed on {here()} from {source.name}: that would put older "
                f"packages in the place of its {', '.join(older)}: make the bundle on a machine that has its release's "
                "updates, and apply again"
            )
        status, said = patiently([*begin, "install", *packages], lock_timeout)
        if status:
            raise PackageError(why(packages, said, source))
        return said


def folder_alone(repository: Path, work: Path) -> list[str]:
    """Return the settings by which dnf knows one folder, and neither reads nor changes what it knows of others.

    Repositories may be in dnf.conf too, so this one must be chosen (`--repo`). No plugin may bring repositories of its
    own, as that of subscriptions does. Cache and list lie in `work`.
    """
    (work / "repos").mkdir()
    Path(work, "repos", f"{BUNDLE}.repo").write_text(
        f"[{BUNDLE}]\n"
        "name=ppdeploy's bundle\n"
        f"baseurl=file://{quote(str(repository))}\n"
        "enabled=1\n"
        # Signatures were checked when the bundle was made, and its manifest has the hash of each file. Where the node's
        # rpm demands them all the same (%_pkgverify_level), dnf 4 checks them, with the keys that the node trusts.
        "gpgcheck=0\n"
        "repo_gpgcheck=0\n"
        f"gpgkey={' '.join(path.as_uri() for path in sorted(KEYS.glob('RPM-GPG-KEY-*')))}\n"
        "skip_if_unavailable=0\n"
        # A package of a module stream comes without the stream's description.
        "module_hotfixes=1\n",
        encoding="utf-8",
    )
    return [
        f"reposdir={work}/repos",
        f"cachedir={work}/cache",
        # Root's, by dnf 5.
        f"system_cachedir={work}/cache",
        "plugins=0",
        # A package may need a file that the shorter list of dnf 5 does not name.
        "optional_metadata_types=filelists",
    ]


def downgraded(said: str) -> list[str]:
    """Return the packages that dnf says it would put older ones in the place of."""
    found, inside = [], False
    for line in said.splitlines():
        if line and not line.startswith(" "):
            inside = line.startswith("Downgrading:")
        # A row begins after one space; its parts may go on in further lines, after more.
        elif inside and re.match(r" \S", line):
            found.append(line.split()[0])
    return found


def patiently(command: list[str], seconds: int) -> tuple[int, str]:
    """Run dnf; try again until `seconds` have passed while another program installs packages."""
    end = time.monotonic() + seconds
    while True:
        status, said = run(command)
        locked = re.search("already locked by|can't create transaction lock", said)
        # Where it is not another dnf, dnf 4 does not say who it is, and dnf 5 not even that it was the lock.
        owner = rpm_owner() if re.search("can't create transaction lock|Rpm transaction failed", said) else None
        if not status or not (locked or owner) or time.monotonic() >= end:
            return status, f"{said}\nRPMDB already locked by {owner}" if owner else said
        time.sleep(LOOK_EVERY)


def rpm_owner() -> int | None:
    """Return the process that holds the lock of rpm's database (fcntl(2), F_GETLK), None where none does."""
    question = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    for path in RPM_LOCKS:
        try:
            with Path(path).open("rb") as stream:
                answer = fcntl.fcntl(stream, fcntl.F_GETLK, question)
        except OSError:
            continue
        kind, _, _, _, pid = struct.unpack("@hhqqi4x", answer)
        if kind != fcntl.F_UNLCK:
            return int(pid)
    return None


def bring_with_dnf(packages: list[str], repository: Path, lock_timeout: int) -> bool:
    """Have packages as one folder has them, and all that they need; return whether anything was installed."""
    return "Nothing to do" not in install_from_folder(
        packages, repository, lock_timeout, folder_source(repository, DRIVER)
    )


BRING = {"apt": bring_with_apt, "dnf": bring_with_dnf}
INDEX = {"apt": "Packages", "dnf": "repodata/repomd.xml"}
INSTALL = {"apt": install_with_apt, "dnf": install_with_dnf}


def why(packages: list[str], said: str, source: Source) -> str:
    """Return in a sentence why packages could not be installed."""
    names = ", ".join(packages)
    lock = re.search(r"Could not get lock (\S+?)\.? It is held by process (\d+) \(([^)]+)\)", said)
    if lock:
        return (
            f"{lock.group(3)} (pid {lock.group(2)}) on {here()} holds {lock.group(1)}, so {names} could not be "
            "installed: let it end and apply again (ppdeploy_package_lock_timeout says how long an apply waits)"
        )
    locked = re.search(r"already locked by (\d+)", said)
    if locked or "can't create transaction lock" in said:
        owner = described(int(locked.group(1))) if locked else "another program"
        return (
            f"{owner} on {here()} is installing packages, so {names} could not be installed: let it end and apply "
            "again (ppdeploy_package_lock_timeout says how long an apply waits)"
        )
    if re.search(r"No space left|don't have enough free space|more space needed on|needs \S+ more space", said):
        return f"the disk of {here()} has no room for {names}: free some space there, then apply again"
    absent = sorted(set(re.findall(r"Unable to locate package (\S+)|No match for argument: (\S+)", said)))
    if absent:
        lost = ", ".join(one or other for one, other in absent)
        return f"{source.name} on {here()} {source.has} no {lost}: {source.remedy}, and apply again"
    if "GPG check FAILED" in said:
        bad = ", ".join(sorted(set(re.findall(r"(?:Package|Public key for) (\S+\.rpm) is not", said)))) or names
        return (
            f"{bad} could not be installed on {here()}: its rpm demands signatures, and there is none by a key in "
            f"{KEYS}: put the vendor's key there, and apply again"
        )
    needs = sorted(set(re.findall(r"nothing provides (.+?) needed by (\S+)", said)))
    if needs:
        lost = "; ".join(f"{what}, which {who} needs" for what, who in needs)
        return (
            f"{names} could not be installed on {here()}: {source.name} {source.has} no {lost}: {source.remedy}, and "
            "apply again"
        )
    unmet = re.findall(UNMET, said, re.MULTILINE)
    if unmet:
        told = "; ".join(f"{package} {relation}" for package, relation in unmet)[:400]
        return (
            f"{names} could not be installed on {here()} from {source.name}: {told}: {source.remedy}, and apply again"
        )
    lines = [line.strip() for line in said.splitlines() if re.match(r"\s*(E:|Err:|Error|dpkg: error)", line)]
    reason = re.search(DNF_REASON, said, re.MULTILINE | re.DOTALL)
    lines = reason.group(1).split() if reason else lines
    lines = lines or [line.strip() for line in said.splitlines() if line.strip()][-2:]
    told = " ".join(lines)[:400]
    return f"{names} could not be installed on {here()} from {source.name}: {told}: see to it, and apply again"


def described(pid: int) -> str:
    """Return a process in words."""
    try:
        name = Path("/proc", str(pid), "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        name = "a program"
    return f"{name} (pid {pid})"


def leave_off(units: list[str], installed: list[str]) -> None:
    """Stop the services that packages brought and started by themselves; what was there before is left alone."""
    for unit in units:
        if unit.rpartition(".")[0] in installed:
            status, said = run(["systemctl", "disable", "--now", "--quiet", unit])
            if status:
                raise PackageError(
                    f"{unit} on {here()} came with its package and cannot be turned off "
                    f"({' '.join(said.split())[:200]}): see `systemctl status` there, then apply again"
                )


def folder_of(path: str | None, manager: str) -> Path | None:
    """Return the folder that packages come from; PackageError where it has none for the package manager."""
    if path is None:
        return None
    if not Path(path, INDEX[manager]).is_file():
        raise PackageError(
            f"the folder {path} on {here()} has no packages for {manager} (no {INDEX[manager]}): make the bundle with "
            "`ppdeploy bundle` on a machine of the node's release, and apply again"
        )
    return Path(path)


def hashes_of(repository: Path, params: dict[str, Any]) -> dict[str, str]:
    """Return the hashes that the folder's files must have: those that the controller knows, else the manifest's."""
    if params["hashes"] or params["manifest"] is None:
        return dict(params["hashes"])
    begin = f"{repository.name}/"
    try:
        files = json.loads(Path(params["manifest"]).read_text(encoding="utf-8"))["files"]
        return {file["path"][len(begin) :]: file["sha256"] for file in files if file["path"].startswith(begin)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackageError(
            f"{params['manifest']} on {here()} does not say which packages the bundle was made with ({error}): copy "
            "the bundle there again, and apply again"
        ) from error


def verify(repository: Path, params: dict[str, Any]) -> None:
    """Refuse a folder whose files are not those that the bundle was made with; root is about to install them."""
    hashes = hashes_of(repository, params)
    if not hashes and params["manifest"] is None:
        return
    held = {path.relative_to(repository).as_posix() for path in repository.rglob("*") if not path.is_dir()}
    bad = [f"{name} is missing" for name in sorted(set(hashes) - held)]
    # apt takes a compressed index before the one that it lies beside.
    bad += [f"{name} is none of its files" for name in sorted(held - set(hashes))]
    bad += [
        f"the sha256 of {name} differs"
        for name in sorted(held & set(hashes))
        if digest(repository / name) != hashes[name]
    ]
    if bad:
        raise PackageError(
            f"the folder {repository} on {here()} is not as the bundle was made: {'; '.join(bad[:3])}, so nothing of "
            "it was installed: run `ppdeploy bundle --verify --out FOLDER` where the bundle was copied from, make it "
            "again if it is not whole there, and apply again"
        )


def digest(path: Path) -> str:
    """Return the sha256 of a file, which may be large."""
    found = hashlib.sha256()
    with path.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def bring(params: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Have the named packages as the repository has them; a check takes it that they are not there yet."""
    names, manager, repository = params["names"], params["manager"], params["repository"]
    if manager is None or repository is None:
        raise PackageError("packages by name come from a folder, by apt or dnf: name manager and repository")
    changed = True
    if not check:
        folder_of(repository, manager)
        verify(Path(repository), params)
        if manager == "apt":
            finish(params["lock_timeout"], Path(repository))
        changed = BRING[manager](names, Path(repository), params["lock_timeout"])
    return {"changed": changed, "lacking": names if changed else []}


def act(params: dict[str, Any], *, check: bool) -> dict[str, Any]:
    """Bring the state about; return what is lacking."""
    if params["names"]:
        return bring(params, check=check)
    lacking = [want["package"] for want in params["wants"] if not is_there(want)]
    manager = params["manager"]
    if lacking and (not params["allowed"] or manager is None):
        raise PackageError(f"{here()} lacks {', '.join(lacking)}: install these packages there, and apply again")
    if not lacking or params["state"] == "told" or check:
        return {"changed": bool(lacking) and params["state"] == "present", "lacking": lacking}
    repository = folder_of(params["repository"], manager)
    if repository is not None:
        verify(repository, params)
    if manager == "apt":
        finish(params["lock_timeout"], Path(params["repository"]) if params["repository"] else None)
    INSTALL[manager](lacking, repository, params["lock_timeout"])
    still = [want["package"] for want in params["wants"] if not is_there(want)]
    if still:
        raise PackageError(
            f"{', '.join(still)} on {here()} {'was' if len(still) == 1 else 'were'} installed, and what vLLM needs of "
            "it is still not there: see what the package is on this system"
        )
    leave_off([f"{want['package']}.service" for want in params["wants"] if want["kind"] == "daemon"], lacking)
    return {"changed": True, "lacking": lacking}


def main() -> None:
    """Read the parameters and do it."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["told", "present"], "default": "present"},
            "wants": {"type": "list", "elements": "dict", "default": []},
            "names": {"type": "list", "elements": "str", "default": []},
            "manager": {"type": "str", "choices": ["apt", "dnf"]},
            "allowed": {"type": "bool", "default": True},
            "repository": {"type": "path"},
            "hashes": {"type": "dict", "default": {}},
            "manifest": {"type": "path"},
            "lock_timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    try:
        result = act(module.params, check=module.check_mode)
    except PackageError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
