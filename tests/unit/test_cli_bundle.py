"""`ppdeploy bundle` and `ppdeploy demo`: what they ask of the packages that do the work."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppdeploy import bundle as bundles
from ppdeploy import locks
from ppdeploy.bundle import apt
from ppdeploy.bundle.content import BundleLock
from ppdeploy.cli import bundling, bundling_driver, demo
from ppdeploy.errors import ApplyError
from ppdeploy.spec import BundledDriver
from tests.factories import make_facts
from tests.factories_driver import bare
from tests.unit.cli_support import Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of `make_bundle`, which here downloads nothing."""
    calls: list[tuple[Any, ...]] = []

    def make_bundle(wanted: list[locks.Lock], out: Path | None, **options: Any) -> Any:
        options.pop("progress")(bundles.Progress(done=1, total=2, doing="x" * 99))
        calls.append((wanted, out, options))
        packages = SimpleNamespace(names=options["packages"]) if options["packages"] else None
        models = [SimpleNamespace(path="models/x")] if options["model"] else []
        return SimpleNamespace(
            path=Path("/srv/bundle"), size=5_000_000, locks=wanted, packages=packages, models=models,
            driver=options["driver"] and options["driver"].wanted,
        )  # fmt: skip

    monkeypatch.setattr(bundles, "make_bundle", make_bundle)
    return calls


def test_bundle_takes_the_lock_of_the_nodes_and_names_the_variable(command: Command, made: list[Any]) -> None:
    outcome = command("bundle", "--device", "cpu", "--python", "3.11", "--out", "b", "--index-url", "https://i")
    assert (outcome.code, outcome.out) == (0, "/srv/bundle\n")
    assert "ppdeploy_wheelhouse: /srv/bundle" in outcome.err
    ((wanted, out, options),) = made
    assert [(lock.device, lock.python, lock.vllm_version) for lock in wanted] == [
        ("cpu", "3.11", locks.default_version("cpu"))
    ]
    assert out == Path("b")
    assert options == {
        "index_url": "https://i",
        "extra_index_url": None,
        "packages": [],
        "driver": None,
        "model": None,
    }


def test_a_bundle_for_a_pipeline_with_the_handoff_plugin_holds_the_lock_with_it(
    command: Command, made: list[Any]
) -> None:
    assert command("bundle", "--device", "cpu", "--out", "b", "--handoff").code == 0
    (((lock,), _out, _options),) = made
    assert lock == locks.with_handoff(locks.find("cpu", None, "3.11", "x86_64"))


def test_a_bundle_with_packages_and_a_model_says_what_to_put_into_the_inventory(
    command: Command, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(bundling, "archives_have", lambda _name: True)
    outcome = command("bundle", "--python", "3.12", "--extra", "runai", "--packages", "--model", "org/x")
    assert outcome.code == 0
    for line in ("ppdeploy_system_packages: bundle", "ppdeploy_model: /srv/bundle/models/x"):
        assert line in outcome.err
    ((wanted, _, options),) = made
    assert [lock.extras for lock in wanted] == [("runai",)]
    assert options["packages"] == [
        *("python3.12", "python3.12-dev", "gcc", "rsync", "haproxy", "nftables", "wireguard-tools", "wireguard-go")
    ]
    assert options["model"].token == "hf_secret"
    assert "hf_secret" not in repr(options["model"]) + outcome.err + outcome.out


def test_packages_have_the_names_of_the_machines_own_system(
    command: Command, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kin = {"id": "almalinux", "id_like": ("rhel", "centos", "fedora"), "version_id": "9.6"}
    monkeypatch.setattr(bundling, "this_system", lambda: make_facts("node1").os.model_copy(update=kin))
    monkeypatch.setattr(bundling, "require_fetchable", lambda _machine: None)
    monkeypatch.setattr(bundling, "archives_have", lambda _name: True)
    assert command("bundle", "--python", "3.12", "--packages").code == 0
    ((_, _, options),) = made
    assert options["packages"] == [
        *("python3.12", "python3.12-devel", "gcc", "rsync", "haproxy", "nftables", "wireguard-tools", "wireguard-go")
    ]


def test_a_bundle_goes_without_a_rare_package_that_the_archives_lack(
    command: Command, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundling, "archives_have", lambda name: name != "wireguard-go")
    outcome = command("bundle", "--python", "3.12", "--packages")
    assert outcome.code == 0
    assert (
        "this machine's archives have no wireguard-go: left out, since only ppdeploy_fabric_encryption" in outcome.err
    )
    ((_, _, options),) = made
    assert "wireguard-tools" in options["packages"]
    assert "wireguard-go" not in options["packages"]


def test_no_archive_is_asked_on_a_machine_that_can_fetch_no_packages(
    command: Command, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundling, "archives_have", lambda _name: pytest.fail("an archive was asked"))
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    outcome = command("bundle", "--python", "3.12", "--packages", "--machine", other)
    assert (outcome.code, made) == (2, [])
    assert f"system packages for {other} cannot be fetched on {platform.machine()} (--packages)" in outcome.err


def test_what_the_archives_have_is_asked_of_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "here": "here:\n  Installed: (none)\n  Candidate: 1.0-1\n",
        "virtual": "virtual:\n  Candidate: (none)\n",
        "no": "",
    }
    monkeypatch.setattr(apt, "run", lambda command: said[command[-1]])
    assert [name for name in said if apt.archives_have(name)] == ["here"]


# ---- with the NVIDIA driver ------------------------------------------------------------------------------------------

DRIVER = ("bundle", "--python", "3.12", "--nvidia-driver")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets a test say which system this machine is, and that it has no metapackage of a kernel."""

    def tell(system: str) -> None:
        monkeypatch.setattr(bundling_driver, "this_system", lambda: bare(system).os)
        monkeypatch.setattr(bundling_driver, "flavours", lambda kernels: [kernel.split("-")[-1] for kernel in kernels])

    return tell


def red_hat_headers(kernel: str) -> tuple[str, ...]:
    """Return the packages that have a kernel's headers there."""
    return (f"kernel-devel-{kernel}", f"kernel-devel-matched-{kernel}", "kernel-headers")


@pytest.mark.parametrize(
    ("system", "words", "names"),
    [
        ("debian12", ["nvidia", "--kernel", "6.1.0-41-amd64", "--kernel", "6.1.0-42-amd64"],
         ("linux-headers-6.1.0-41-amd64", "linux-headers-6.1.0-42-amd64", "nvidia-open")),
        # The branch is in the name: the bundle's index has no module streams.
        ("rocky9", ["nvidia"], (*red_hat_headers("5.14.0-611.5.1.el9_7.x86_64"), "nvidia-open-580.*")),
        ("fedora44", ["nvidia"], (*red_hat_headers("6.19.10-300.fc44.x86_64"), "nvidia-open-610.*")),
        ("ubuntu2404", ["distribution"],
         ("linux-modules-nvidia-580-server-open-6.8.0-90-generic", "nvidia-headless-no-dkms-580-server-open",
          "nvidia-utils-580-server", "nvidia-compute-utils-580-server")),
    ],
)  # fmt: skip
def test_a_bundle_has_what_a_plan_would_name_of_the_driver(
    command: Command, made: list[Any], here: Any, system: str, words: list[str], names: tuple[str, ...]
) -> None:
    here(system)
    outcome = command(*DRIVER, *words)
    assert outcome.code == 0, outcome.err
    wish = made[0][2]["driver"]
    assert wish.wanted.names == names
    assert (wish.wanted.source, wish.wanted.machine) == (words[0], "x86_64")
    assert wish.optional == (("linux-headers-amd64",) if system == "debian12" else ())
    assert (wish.repository is None) == (words[0] == "distribution")
    for line in ("ppdeploy_system_packages: bundle", f"ppdeploy_nvidia_branch: {wish.wanted.branch}"):
        assert line in outcome.err


def test_nvidias_own_repository_is_known_by_its_key_and_a_mirror_by_the_one_that_is_named(
    command: Command, made: list[Any], here: Any, tmp_path: Path
) -> None:
    here("debian12")
    assert command(*DRIVER, "nvidia", "--nvidia-branch", "590").code == 0
    own = made[0][2]["driver"].repository
    base = "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64"
    assert (own.address, own.keyring, own.key) == (base, f"{base}/cuda-keyring_1.1-1_all.deb", None)
    assert len(own.keyring_sha256) == 64
    assert "Package: *nvidia* libcuda* cuda-drivers*\nPin: version 590.*\nPin-Priority: 1000\n" in own.preferences
    key = tmp_path / "key.asc"
    key.write_text("key")
    mirror = ("--nvidia-repository", "http://mirror.example/cuda/", "--nvidia-repository-key", key)
    assert command(*DRIVER, "nvidia", *mirror).code == 0
    other = made[1][2]["driver"].repository
    assert (other.address, other.key) == ("http://mirror.example/cuda/debian12/x86_64", key)
    here("rhel10")
    assert command(*DRIVER, "nvidia").code == 0
    assert made[2][2]["driver"].repository.keyring.endswith("/rhel10/x86_64/CDF6BA43.pub")


def test_a_driver_is_added_to_a_bundle_that_is_there_without_naming_its_python(
    command: Command, made: list[Any], here: Any, tmp_path: Path
) -> None:
    here("debian12")
    lock = locks.find("cuda", None, "3.13", "x86_64")
    held = BundleLock(
        file="locks/x.txt", digest=lock.digest, device="cuda", vllm_version=lock.vllm_version, python="3.13",
        machine="x86_64", wheels=(), uv="uv.whl",
    )  # fmt: skip
    (tmp_path / "manifest.json").write_text(bundles.Bundle(locks=(held,), files=()).model_dump_json())
    assert command("bundle", "--out", tmp_path, "--nvidia-driver", "nvidia").code == 0
    assert [one.python for one in made[0][0]] == ["3.13"]
    refused = command("bundle", "--out", tmp_path / "none", "--nvidia-driver", "nvidia")
    assert (refused.code, len(made)) == (2, 1)
    assert "--python" in refused.err


def held_bundle(folder: Path, digest: str, driver: BundledDriver | None = None) -> None:
    """Write the manifest of a bundle of one lock, with a driver."""
    held = BundleLock(
        file="locks/x.txt", digest=digest, device="cuda", vllm_version="0.33.0", python="3.13",
        machine="x86_64", wheels=(), uv="uv.whl",
    )  # fmt: skip
    (folder / "manifest.json").write_text(bundles.Bundle(locks=(held,), driver=driver, files=()).model_dump_json())


@pytest.mark.parametrize(
    ("words", "branch", "kernels", "replaced"),
    [
        # Another kernel is added, and the branch stays, which is not the default.
        (["nvidia", "--kernel", "6.1.0-43-amd64"], 590, ("6.1.0-41-amd64", "6.1.0-42-amd64", "6.1.0-43-amd64"), ""),
        (["nvidia", "--kernel", "6.1.0-41-amd64"], 590, ("6.1.0-41-amd64", "6.1.0-42-amd64"), ""),
        (["nvidia"], 590, ("6.1.0-41-amd64", "6.1.0-42-amd64"), ""),
        (["nvidia", "--nvidia-branch", "580", "--kernel", "6.1.0-43-amd64"], 580, ("6.1.0-43-amd64",),
         "branch 590 of NVIDIA's repository for debian 12 on x86_64, kernels 6.1.0-41-amd64, 6.1.0-42-amd64, by "),
    ],
)  # fmt: skip
def test_a_kernel_is_added_to_the_driver_that_a_bundle_has(
    command: Command, made: list[Any], here: Any, tmp_path: Path, words: list[str], branch: int,
    kernels: tuple[str, ...], replaced: str,
) -> None:  # fmt: skip
    here("debian12")
    had = BundledDriver(
        system="debian 12", machine="x86_64", manager="apt", source="nvidia", branch=590,
        kernels=("6.1.0-41-amd64", "6.1.0-42-amd64"), names=("nvidia-open",),
    )  # fmt: skip
    held_bundle(tmp_path, locks.find("cuda", None, "3.13", "x86_64").digest, had)
    outcome = command("bundle", "--out", tmp_path, "--nvidia-driver", *words)
    assert outcome.code == 0, outcome.err
    wanted = made[0][2]["driver"].wanted
    assert (wanted.branch, wanted.kernels) == (branch, kernels)
    assert wanted.names == (*(f"linux-headers-{kernel}" for kernel in kernels), "nvidia-open")
    told = " ".join(outcome.err.split())
    assert (f"the driver in {tmp_path} is replaced: {replaced}branch 580 of" in told) == bool(replaced), told
    assert ("is replaced" in told) == bool(replaced)


def test_a_bundle_of_another_version_is_told_with_the_way_on(
    command: Command, made: list[Any], here: Any, tmp_path: Path
) -> None:
    here("debian12")
    held_bundle(tmp_path, "0" * 64)
    outcome = command("bundle", "--out", tmp_path, "--nvidia-driver", "nvidia")
    assert (outcome.code, made) == (2, [])
    for words in ("made by another version of ppdeploy", str(tmp_path), "name --python, once for each"):
        assert words in outcome.err
    assert command("bundle", "--out", tmp_path, "--nvidia-driver", "nvidia", "--python", "3.12").code == 0


def test_a_folder_that_cannot_be_looked_at_is_left_to_the_making(command: Command, made: list[Any]) -> None:
    assert command("bundle", "--device", "cpu", "--out", "x" * 300).code == 0
    assert [out for _, out, _ in made] == [Path("x" * 300)]


@pytest.mark.parametrize("name", ["out", "manifest.json"])
def test_a_file_in_the_place_of_the_bundle_is_refused_and_nothing_is_left(
    command: Command, made: list[Any], tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    outcome = command("bundle", "--device", "cpu", "--out", tmp_path / name)
    assert (outcome.code, made) == (2, [])
    assert "is a file, no folder (--out): name a folder" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("system", "words", "told"),
    [
        ("debian12", ["cuda"], "cuda is no source of drivers (--nvidia-driver): use nvidia or distribution"),
        ("debian12", ["distribution"], "has driver 535 itself, which is older than 580 (--nvidia-driver): take nvidia"),
        ("debian13", ["nvidia", "--nvidia-branch", "580"], "the oldest is 590 (--nvidia-branch): take 590"),
        ("ubuntu2404", ["distribution", "--nvidia-branch", "570"], "the oldest is 580 (--nvidia-branch)"),
        ("debian12", ["nvidia", "--kernel", "6.1 -x"], "'6.1 -x' is no kernel (--kernel): name it as `uname -r`"),
        ("debian12", ["nvidia", "--nvidia-repository", "http://m.example"], "and its key is needed"),
        ("debian12", ["nvidia", "--nvidia-repository", "ftp://m.example", "--nvidia-repository-key", __file__],
         "ftp://m.example is no address without a password"),
        ("debian12", ["nvidia", "--nvidia-repository", "http://m.example", "--nvidia-repository-key", "/no.asc"],
         "there is no such file (--nvidia-repository-key /no.asc)"),
        ("debian12", ["nvidia", "--machine", "aarch64"], "a driver for aarch64 cannot be fetched on Debian"),
    ],
)  # fmt: skip
def test_a_driver_that_cannot_be_is_refused_before_anything_is_fetched(
    command: Command, made: list[Any], here: Any, system: str, words: list[str], told: str
) -> None:
    here(system)
    outcome = command(*DRIVER, *words)
    assert (outcome.code, made) == (2, [])
    assert told in outcome.err


@pytest.mark.parametrize(
    "words", [["--nvidia-branch", "580"], ["--kernel", "6.1"], ["--nvidia-repository", "http://m"]]
)
def test_an_option_of_a_driver_without_one_is_refused(command: Command, made: list[Any], words: list[str]) -> None:
    outcome = command("bundle", "--python", "3.12", *words)
    assert (outcome.code, made) == (2, [])
    assert f"it is of no driver ({words[0]}): name the driver with --nvidia-driver" in outcome.err


def test_verify_fetches_nothing(command: Command, made: list[Any], tmp_path: Path) -> None:
    outcome = command("bundle", "--verify", "--out", tmp_path / "b")
    assert outcome.code == 2
    assert outcome.err.startswith("error: the bundle folder does not exist")
    assert "--out" in command("bundle", "--verify", "--python", "3.12").err
    assert made == []


def test_bundle_for_several_pythons_is_one_bundle(command: Command, made: list[Any]) -> None:
    assert command("bundle", "--python", "3.11", "--python", "3.12").code == 0
    assert [lock.python for lock in made[0][0]] == ["3.11", "3.12"]


def test_bundle_in_json(command: Command, made: list[Any]) -> None:
    document = json.loads(command("bundle", "--device", "cpu", "--python", "3.11", "--json").out)
    assert document == {
        "schema": 1,
        "path": "/srv/bundle",
        "bytes": 5_000_000,
        "locks": [lock.digest for lock in made[0][0]],
        "packages": [],
        "driver": None,
        "models": [],
    }


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--device", "tpu"], "--device"),
        (["--device", "cuda"], "--python"),
        (["--vllm-version", "0.0.1", "--python", "3.11"], "0.0.1"),
        (["--python", "2.7"], "2.7"),
        (["--machine", "riscv64", "--python", "3.11"], "riscv64"),
        (["--extra", "tensorizer", "--python", "3.11"], "tensorizer"),
        (["--model-revision", "main", "--python", "3.11"], "--model"),
    ],
)
def test_bundle_refuses_what_there_is_no_lock_for(
    command: Command, made: list[Any], words: list[str], named: str
) -> None:
    outcome = command("bundle", *words)
    assert (outcome.code, made) == (2, [])
    assert named in outcome.err


PIPELINE = {
    "pipeline": "tiny",
    "model": "tiny-llama",
    "head": "node1",
    "address": "http://127.0.0.1:8000",
    "stages": {"node1": "stage 0 with layers 0-1", "node2": "stage 1 with layers 2-3"},
}


class FakeLab:
    """Notes whether it was taken down."""

    def __init__(self) -> None:
        self.gone = False
        self.nodes: list[str] = []

    def down(self) -> None:
        self.gone = True


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> FakeLab:
    found = FakeLab()
    monkeypatch.setattr(demo, "Lab", lambda: found)
    monkeypatch.setattr(demo, "up_with_vllm", lambda *_args, **_more: Path("inventory/lab/hosts.yml"))
    monkeypatch.setattr(demo, "apply_cluster", lambda _request, hints: [] if hints else [PIPELINE])
    monkeypatch.delenv("CI", raising=False)
    return found


def test_demo_without_a_terminal_takes_the_lab_down(command: Command, lab: FakeLab) -> None:
    outcome = command("demo")
    assert outcome.code == 0
    assert "node2 computes stage 1 with layers 2-3" in outcome.out
    assert lab.gone


def test_demo_leaves_a_lab_that_was_up_before(command: Command, lab: FakeLab) -> None:
    lab.nodes = ["node1", "node2"]
    assert command("demo").code == 0
    assert not lab.gone


@pytest.mark.parametrize(("ci", "gone"), [("", False), ("true", True)])
def test_demo_on_a_terminal_leaves_the_lab_up_and_says_how_to_go_on(
    command: Command, lab: FakeLab, monkeypatch: pytest.MonkeyPatch, ci: str, gone: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("CI", ci)
    outcome = command("demo")
    assert outcome.code == 0
    assert lab.gone == gone
    assert ("make clean" in outcome.err) != gone
    assert ("ppdeploy lab ssh node1 curl" in outcome.err) != gone


def test_demo_that_fails_takes_the_lab_down_where_nobody_looks(
    command: Command, lab: FakeLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_request: object, **_options: object) -> None:
        raise ApplyError("it failed")

    monkeypatch.setattr(demo, "apply_cluster", fail)
    assert command("demo").code == 4
    assert lab.gone
