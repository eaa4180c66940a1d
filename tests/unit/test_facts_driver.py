"""What the node module tells of how the driver is installed, and what the driver's module does with that."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugins.modules import ppdeploy_driver
from plugins.modules import ppdeploy_facts as module
from ppdeploy.facts import DriverInstallation, PackageLock, VendorImage

Put = Callable[[dict[str, str]], Path]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Put files where the module reads the host's, and let it find no program."""
    monkeypatch.setattr(module, "ROOT", f"{tmp_path}/")
    for name in ("SYS", "PROC", "ETC", "BOOT", "UNITS"):
        monkeypatch.setattr(module, name, str(tmp_path / name.lower()))
    monkeypatch.setattr(module, "LIBRARIES", str(tmp_path / "usr/lib"))
    monkeypatch.setattr(module, "find_tool", lambda _name: None)

    def write(tree: dict[str, str]) -> Path:
        for path, text in tree.items():
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
        return tmp_path

    return write


def said(out: str, err: str = "", status: int = 0) -> module.Command:
    """A command that has already run and said this."""
    command = module.Command("/bin/true")
    command.finish()
    command.done = (status, out, err)
    return command


def asked(**answers: Any) -> DriverInstallation:
    """Return what the module tells where programs answer so; all facts must be of the documented form."""
    query = module.DriverQuery()
    for name, answer in answers.items():
        setattr(query, name, answer)
    problems = module.Problems()
    told = query.answer(problems, [])
    assert problems.found == []
    return DriverInstallation.model_validate(told, strict=False)


DPKG = """\
adduser\t3.134\tinstalled\tinstall
cuda-keyring\t1.1-1\tinstalled\tinstall
dkms\t3.0.10-8+deb12u1\tinstalled\tinstall
libcuda1\t580.95.05-1\tinstalled\thold
libnvidia-container1\t1.18.0-1\tinstalled\tinstall
linux-image-6.1.0-41-amd64\t6.1.158-1\tinstalled\tinstall
linux-image-amd64\t6.1.158-1\tinstalled\tinstall
nvidia-open\t580.95.05-1\thalf-configured\tinstall
nvidia-settings\t535.1-1\tconfig-files\tdeinstall
vim\t2:9.0.1378-2\tunpacked\tinstall
"""
"""As `dpkg-query --show` prints it, with two packages whose installation did not end."""


def test_dpkg_tells_versions_holds_and_what_is_half_installed() -> None:
    rows = module.package_rows(said(DPKG))
    assert len(rows) == 10
    assert rows[3] == {"name": "libcuda1", "version": "580.95.05-1", "state": "installed", "held": True}


def test_only_packages_that_matter_are_told_and_every_broken_one(put: Put) -> None:
    put({})
    found = asked(manager="apt", listed=said(DPKG))
    assert [one.name for one in found.packages] == [
        *("cuda-keyring", "dkms", "libcuda1", "libnvidia-container1", "linux-image-amd64", "nvidia-open"),
    ]
    assert [(one.name, one.state) for one in found.broken] == [("nvidia-open", "half-configured"), ("vim", "unpacked")]


def test_rpm_tells_its_packages(put: Put) -> None:
    put({})
    listed = "bash\t5.1.8-9.el9\tinstalled\tinstall\nnvidia-open\t580.95.05-1.el9\tinstalled\tinstall\n"
    found = asked(manager="dnf", listed=said(listed + "kernel-core\t5.14.0-611.el9\tinstalled\tinstall\n"))
    assert [one.name for one in found.packages] == ["nvidia-open", "kernel-core"]
    assert (found.components, found.broken) == ((), ())


@pytest.mark.parametrize(
    ("line", "module_of"),
    [
        ("nvidia/580.95.05, 6.1.0-41-amd64, x86_64: installed",
         {"name": "nvidia", "version": "580.95.05", "kernel": "6.1.0-41-amd64", "state": "installed"}),
        ("nvidia, 470.256.02, 5.15.0-91-generic, x86_64: installed",
         {"name": "nvidia", "version": "470.256.02", "kernel": "5.15.0-91-generic", "state": "installed"}),
        ("nvidia-current-open/580.95.05: added",
         {"name": "nvidia-current-open", "version": "580.95.05", "kernel": None, "state": "added"}),
        ("nvidia/580.95.05, 6.1.0-41-amd64, x86_64: built (WARNING! Diff between built and installed module!)",
         {"name": "nvidia", "version": "580.95.05", "kernel": "6.1.0-41-amd64", "state": "built"}),
    ],
)  # fmt: skip
def test_dkms_says_it_in_the_words_of_two_versions(line: str, module_of: dict[str, Any]) -> None:
    assert module.dkms_modules(said(f"zfs/2.1.11, 6.1.0-41-amd64, x86_64: installed\n{line}\n")) == [module_of]


SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def test_secure_boot_is_what_the_firmware_says(put: Put) -> None:
    root = put({})
    assert module.secure_boot() is False, "no UEFI"
    (root / "sys/firmware/efi").mkdir(parents=True)
    assert module.secure_boot() is None, "its variables cannot be seen"
    put({SECURE_BOOT: ""})
    for value, on in ((b"\6\0\0\0\1", True), (b"\6\0\0\0\0", False)):
        (root / SECURE_BOOT).write_bytes(value)
        assert module.secure_boot() is on


@pytest.mark.parametrize(
    ("out", "status", "enrolled"),
    [
        ("/var/lib/dkms/mok.pub is already enrolled\n", 1, True),
        ("/var/lib/dkms/mok.pub is not enrolled\n", 0, False),
        ("EFI variables are not supported on this system\n", 255, None),
    ],
)
def test_whether_the_firmware_knows_the_key_is_in_the_words(out: str, status: int, enrolled: bool | None) -> None:
    assert module.is_enrolled(said(out, status=status)) is enrolled


def test_ubuntus_certificate_is_found_before_dkms_own(put: Put) -> None:
    root = put({"var/lib/dkms/mok.pub": "x"})
    assert asked().signing_certificate == f"{root}/var/lib/dkms/mok.pub"
    put({"var/lib/shim-signed/mok/MOK.der": "x"})
    assert asked().signing_certificate == f"{root}/var/lib/shim-signed/mok/MOK.der"


def test_the_next_boot_is_what_the_link_or_grubby_says(put: Put) -> None:
    root = put({})
    assert module.next_kernel(None) is None
    (root / "boot").mkdir()
    (root / "boot/vmlinuz").symlink_to("vmlinuz-6.8.0-90-generic")
    assert module.next_kernel(None) == "6.8.0-90-generic"
    assert module.next_kernel(said("/boot/vmlinuz-5.14.0-611.5.1.el9_7.x86_64\n")) == "5.14.0-611.5.1.el9_7.x86_64"


def test_components_come_from_both_forms_of_apts_sources(put: Put) -> None:
    put({
        "etc/apt/sources.list": "# deb x y non-free\ndeb [arch=amd64 signed-by=/k] http://d.example x main\n",
        "etc/apt/sources.list.d/d.sources": "Types: deb\nURIs: http://d.example\nSuites: x\nComponents: contrib x\n",
        "etc/apt/sources.list.d/flat.list": "deb http://d.example/cuda /\n",
        "etc/apt/sources.list.d/off.disabled": "Components: non-free\n",
    })  # fmt: skip
    assert module.apt_components() == ["contrib", "main", "x"]


@pytest.mark.parametrize(
    ("tree", "on"),
    [
        ({}, False),
        ({"etc/apt/apt.conf.d/20auto-upgrades": 'APT::Periodic::Unattended-Upgrade "1";\n'}, True),
        ({"etc/apt/apt.conf.d/20auto-upgrades": 'APT::Periodic::Unattended-Upgrade "1";\n',
          "etc/apt/apt.conf.d/99-off": 'APT::Periodic::Unattended-Upgrade "0";\n'}, False),
        ({"etc/apt/apt.conf.d/20auto-upgrades": '// APT::Periodic::Unattended-Upgrade "1";\n'}, False),
        ({"units/timers.target.wants/dnf-automatic.timer": ""}, True),
        ({"units/timers.target.wants/dnf5-automatic.timer": ""}, True),
    ],
)  # fmt: skip
def test_whether_upgrades_come_by_themselves(put: Put, tree: dict[str, str], on: bool) -> None:
    put(tree)
    assert module.unattended_upgrades() is on


SPARK = """DGX_NAME="DGX Spark"
DGX_PRETTY_NAME="NVIDIA DGX Spark"
DGX_SWBUILD_VERSION="7.2.3"

DGX_OTA_VERSION="7.3.1"

DGX_OTA_VERSION="7.5.0"
"""
"""In the form that owners of one published (tests of thatcooperguy/NVCheckup and others): an update adds its lines."""


@pytest.mark.parametrize(
    ("tree", "cards", "vendor"),
    [
        ({}, [], None),
        ({"etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n"}, [],
         VendorImage(kind="jetson", name="Jetson Linux", version="36.4.3")),
        ({"etc/dgx-release": SPARK}, [], VendorImage(kind="dgx-spark", name="NVIDIA DGX Spark", version="7.5.0")),
        ({"etc/dgx-release": 'DGX_NAME="DGX Server"\nDGX_SWBUILD_VERSION="6.3.1"\n'}, [],
         VendorImage(kind="dgx", name="DGX Server", version="6.3.1")),
        ({}, [{"vendor": "nvidia", "device_id": "0x2e12"}], VendorImage(kind="gb10", name="GB10", version=None)),
        ({}, [{"vendor": "nvidia", "device_id": "0x2684"}], None),
    ],
)  # fmt: skip
def test_images_of_nvidias_own_are_recognised(
    put: Put, tree: dict[str, str], cards: list[dict[str, str]], vendor: VendorImage | None
) -> None:
    put(tree)
    found = module.vendor_image(cards)
    assert (None if found is None else VendorImage.model_validate(found)) == vendor


def test_what_is_on_the_disk_and_what_is_loaded(put: Put) -> None:
    put({
        "usr/lib/x86_64-linux-gnu/libcuda.so.1": "",
        "usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05": "",
        "sys/module/nouveau/version": "",
        "sys/module/nvidia/version": "570.86.15",
        "usr/bin/nvidia-uninstall": "",
    })  # fmt: skip
    found = asked()
    assert (found.library_version, found.loaded, found.runfile) == ("580.95.05", ("nvidia", "nouveau"), True)
    (module_path := Path(module.ROOT, "usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05")).unlink()
    assert not module_path.exists()
    put({"usr/lib64/libcuda.so.595.84": ""})
    assert asked().library_version == "595.84"


LOCKER = """
import fcntl, sys
with open(sys.argv[1], "w") as stream:
    fcntl.lockf(stream, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def locker(put: Put) -> Any:
    """A process that has a lock of dpkg's."""
    root = put({"var/lib/dpkg/lock": "", "var/lib/dpkg/lock-frontend": ""})
    process = subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(root / "var/lib/dpkg/lock")], stdin=-1, stdout=-1, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.communicate("")


def test_who_has_the_lock_is_told_by_the_kernel(locker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROC", "/proc")
    found = module.package_lock("apt")
    assert found is not None
    lock = PackageLock.model_validate(found)
    assert (lock.pid, lock.process) == (locker.pid, Path(f"/proc/{locker.pid}/comm").read_text().strip())
    assert lock.file.endswith("/var/lib/dpkg/lock")
    assert module.package_lock("dnf") is None


def test_nobody_has_it_where_the_file_is_free_or_missing(put: Put) -> None:
    assert module.package_lock("apt") is None
    root = put({"var/lib/dpkg/lock": ""})
    # A lock of one's own is none that one has to wait for (fcntl(2)), and the module takes none.
    with (root / "var/lib/dpkg/lock").open("w") as stream:
        fcntl.lockf(stream, fcntl.LOCK_EX)
        assert module.package_lock("apt") is None


def test_dnf_4_writes_who_it_is(put: Put) -> None:
    put({"var/lib/dnf/rpmdb_lock.pid": "4711\n", "proc/4711/comm": "dnf\n"})
    found = module.package_lock("dnf")
    assert found is not None
    assert (found["pid"], found["process"]) == (4711, "dnf")
    put({"var/lib/dnf/rpmdb_lock.pid": "4712\n"})
    assert module.package_lock("dnf") is None, "a file that a dead dnf left"


# ---- the module that waits, holds and proves -------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Answers of programs by their names, what was run, and a tree for files."""

    class Host:
        def __init__(self) -> None:
            self.answers: dict[str, tuple[int, str, str]] = {}
            self.ran: list[tuple[str, ...]] = []

        def run(self, *argv: str, timeout: float = 0) -> tuple[int, str, str]:
            del timeout
            self.ran.append(argv)
            words = " ".join(argv)
            return next(
                (self.answers[key] for key in self.answers if words.startswith(key)), (127, "", "not installed")
            )

        def put(self, path: str, text: str = "") -> None:
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")

    found = Host()
    monkeypatch.setattr(ppdeploy_driver, "ROOT", str(tmp_path))
    monkeypatch.setattr(ppdeploy_driver, "run", found.run)
    monkeypatch.setattr(ppdeploy_driver, "LOOK_EVERY", 0.02)
    monkeypatch.setattr("plugins.modules.ppdeploy_driver.shutil.which", lambda name: f"/sbin/{name}")
    return found


def test_it_waits_until_the_lock_is_free(locker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ppdeploy_driver, "ROOT", module.ROOT)
    monkeypatch.setattr(ppdeploy_driver, "LOOK_EVERY", 0.02)
    with pytest.raises(ppdeploy_driver.NotReadyError, match=rf"pid {locker.pid}.* for 0 s and goes on: let it end"):
        ppdeploy_driver.wait("apt", 0, check=False)
    # A check looks and does not wait.
    assert ppdeploy_driver.wait("apt", 60, check=True)["owner"] is not None
    locker.stdin.close()
    found = ppdeploy_driver.wait("apt", 60, check=False)
    assert (found["changed"], found["owner"]) == (False, None)
    locker.stdin = None


def test_it_holds_what_is_meant_and_not_held_yet(host: Any) -> None:
    host.answers["dpkg-query"] = (0, "".join(
        f"{name}\t{status}\t{want}\n"
        for name, status, want in (
            ("libcuda1", "installed", "install"),
            ("nvidia-open", "installed", "hold"),
            ("nvidia-smi", "config-files", "deinstall"),
            ("nvidia-container-toolkit", "installed", "install"),
            ("libcudart12", "installed", "install"),
        )
    ), "")  # fmt: skip
    host.answers["apt-mark hold"] = (0, "", "")
    held = r"nvidia|^libcuda\d"
    assert ppdeploy_driver.hold(held, check=True) == {
        "changed": True,
        "held": ["libcuda1"],
        "diff": {"before": "", "after": "libcuda1 hold\n"},
    }
    assert not any(argv[0] == "apt-mark" for argv in host.ran)
    ppdeploy_driver.hold(held, check=False)
    assert ("apt-mark", "hold", "libcuda1") in host.ran


MIRROR = "http://mirror.example/cuda/debian12/x86_64"


def test_apt_must_have_read_the_repository_and_no_other(host: Any) -> None:
    elsewhere = "W: Failed to fetch http://old.example/dists/x/InRelease  404  Not Found\n"
    host.answers["apt-get --quiet update"] = (0, f"Hit:1 {MIRROR}  InRelease\n", elsewhere)
    assert ppdeploy_driver.refresh(MIRROR) == {"changed": False}
    assert ppdeploy_driver.refresh("") == {"changed": False}
    unsigned = (
        "W: An error occurred during the signature verification. The repository is not updated and the previous index "
        f"files will be used. GPG error: {MIRROR}  InRelease: The following signatures couldn't be verified because "
        "the public key is not available: NO_PUBKEY 0123456789ABCDEF\n"
    )
    host.answers["apt-get --quiet update"] = (0, "", elsewhere + unsigned)
    with pytest.raises(
        ppdeploy_driver.NotReadyError, match=rf"apt cannot read {MIRROR}: W: An error .*NO_PUBKEY"
    ) as error:
        ppdeploy_driver.refresh(MIRROR)
    assert "old.example" not in str(error.value)
    host.answers["apt-get --quiet update"] = (100, "", "E: The list of sources could not be read.\n")
    with pytest.raises(ppdeploy_driver.NotReadyError, match="apt cannot read its sources: E: The list of sources"):
        ppdeploy_driver.refresh("")


def test_nothing_is_rebooted_under_a_rank_or_another_program(host: Any) -> None:
    host.answers["systemctl is-active"] = (3, "inactive\n", "")
    assert ppdeploy_driver.idle("ppdeploy-rank@chat.service") == {"changed": False}
    host.answers["nvidia-smi"] = (0, "77, python\n", "")
    with pytest.raises(ppdeploy_driver.NotReadyError, match=r"programs compute on the GPUs \(pid, name: 77, python\)"):
        ppdeploy_driver.idle("ppdeploy-rank@chat.service")
    host.answers["systemctl is-active"] = (0, "active\n", "")
    with pytest.raises(ppdeploy_driver.NotReadyError, match=r"ppdeploy-rank@chat.service runs.*`ppdeploy stop`"):
        ppdeploy_driver.idle("ppdeploy-rank@chat.service")


def test_the_gpus_that_answer_are_counted_and_the_module_is_loaded_first(host: Any) -> None:
    host.answers |= {"modprobe": (0, "", ""), "nvidia-smi": (0, "580.95.05\n580.95.05\n", "")}
    assert ppdeploy_driver.verify(2, 0) == {"changed": False, "version": "580.95.05", "persistenced": False}
    assert host.ran[0] == ("modprobe", "nvidia")
    host.put("usr/lib/systemd/system/nvidia-persistenced.service")
    host.put("sys/module/nvidia/version", "580.95.05")
    host.ran.clear()
    assert ppdeploy_driver.verify(2, 0)["persistenced"] is True
    assert ("modprobe", "nvidia") not in host.ran


def test_a_gpu_that_does_not_answer_is_told_with_all_that_is_known(host: Any) -> None:
    host.answers |= {
        "modprobe": (1, "", "modprobe: FATAL: Module nvidia not found in directory /lib/modules/6.1.0-41-amd64"),
        "nvidia-smi": (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ""),
        "dkms": (0, "nvidia/580.95.05: added\nzfs/2: added\n", ""),
    }
    host.put("sys/module/nouveau/version")
    with pytest.raises(ppdeploy_driver.NotReadyError) as error:
        ppdeploy_driver.verify(2, 0)
    told = str(error.value)
    for words in (
        "nvidia-smi sees 0 of 2 GPUs and says: NVIDIA-SMI has failed",
        "DKMS says of NVIDIA's module: nvidia/580.95.05: added; modprobe says: modprobe: FATAL: Module nvidia",
        "nouveau is loaded",
        "journalctl -k",
    ):
        assert words in told, told
    host.answers["nvidia-smi"] = (0, "580.95.05\n", "")
    with pytest.raises(ppdeploy_driver.NotReadyError, match="nvidia-smi sees 1 of 2 GPUs"):
        ppdeploy_driver.verify(2, 0)


def test_a_key_that_the_firmware_does_not_know_has_its_own_sentence(host: Any) -> None:
    refused = "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service"
    host.answers |= {"modprobe": (1, "", refused), "nvidia-smi": (9, "", "")}
    with pytest.raises(ppdeploy_driver.NotReadyError, match=r"Secure Boot is on .*mokutil --import.*choose Enroll MOK"):
        ppdeploy_driver.verify(1, 0)


def test_both_modules_ask_the_same_locks() -> None:
    assert ppdeploy_driver.LOCKS == {"apt": module.DPKG_LOCKS, "dnf": module.RPM_LOCKS}
    assert ppdeploy_driver.PID_FILES["dnf"] == module.DNF_PID_FILES
