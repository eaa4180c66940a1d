"""What a play and `ppdeploy plan` make of the drivers: slices for the role, files to the byte, who is not touched."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ppdeploy import locks
from ppdeploy.bundle.content import Bundle, BundleFile, BundleLock, BundlePackages
from ppdeploy.errors import BlockedError
from ppdeploy.facts import FileState, NodeFacts, PathSpace, Venv
from ppdeploy.plan.driver import BLACKLIST, PREFERENCES, REPOSITORY, SOURCES, driver_files
from ppdeploy.plan.environment import minors
from ppdeploy.plan_report import plan_report
from ppdeploy.play import driver_slice, drivers_of_play
from ppdeploy.render import render, render_node
from ppdeploy.spec import BundledDriver
from tests.factories import GIB, make_cluster, make_installation, make_package
from tests.factories_driver import SYSTEMS, bare, plan, working
from tests.factories_plan import make_complete_plan, make_pipeline_spec


def decided(facts: dict[str, NodeFacts], **wants: Any) -> dict[str, Any]:
    """Return what a play decides for these hosts."""
    values = {f"ppdeploy_{name}": value for name, value in {"model": "./tiny", "allow_reboot": True, **wants}.items()}
    inventory = {
        "pipelines": {"chat": list(facts)},
        "hosts": list(facts),
        "values": {host: {**values, "ansible_host": f"198.18.0.{11 + n}"} for n, host in enumerate(facts)},
        "directory": "cluster",
    }
    return drivers_of_play(inventory, {host: own.model_dump(mode="json") for host, own in facts.items()})


def rooms(free_gib: float) -> tuple[PathSpace, ...]:
    return (
        PathSpace(
            path="/opt/ppdeploy", measured_at="/", mount_device=1, total_bytes=GIB, free_bytes=int(free_gib * GIB)
        ),
    )


def test_a_node_that_is_blocked_keeps_every_node_from_being_touched() -> None:
    found = decided({"node1": bare(), "node2": bare(secure_boot=True)})
    (sentence,) = found["blocked"]
    assert sentence.startswith("there is no NVIDIA driver, and Secure Boot is on")
    assert "(node2): on the host, install dkms and mokutil" in sentence
    assert found["nodes"]["node1"]["needed"]
    assert not found["nodes"]["node2"]["needed"]


def test_what_would_stop_the_apply_after_it_stops_it_before_it() -> None:
    old = bare().model_copy(update={"user": bare().user.model_copy(update={"uid": 1000})})
    found = decided({"node1": bare(), "node2": old})
    assert found["blocked"] == [
        (
            "the play runs as root, not as root (node2): allow the user to use sudo, and give its password with "
            "--ask-become-pass if it needs one"
        )
    ]
    # Where nothing is to be done about a driver, the plan says it.
    quiet = working().model_copy(update={"user": old.user})
    assert decided({"node1": working(), "node2": quiet})["blocked"] == []


def driver_bundle(folder: Path, python: str, packages: BundlePackages | None = None) -> dict[str, Any]:
    """Write a bundle of one lock and the driver of Debian 12; return the variables of a site that has nothing else."""
    lock = locks.find("cuda", None, python, "x86_64")
    held = BundleLock(
        file="locks/x.txt", digest=lock.digest, device="cuda", vllm_version=lock.vllm_version, python=python,
        machine="x86_64", wheels=(), uv="uv.whl",
    )  # fmt: skip
    driver = BundledDriver(
        system="debian 12", machine="x86_64", manager="apt", source="nvidia", branch=580,
        kernels=(bare().os.kernel,), names=(),
    )  # fmt: skip
    paths = ("locks/x.txt", "wheels/uv.whl", "driver/Packages")
    files = tuple(BundleFile(path=path, sha256="0" * 64, size=0) for path in paths)
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    made = Bundle(locks=(held,), packages=packages, driver=driver, files=files)
    (folder / "manifest.json").write_text(made.model_dump_json())
    return {"wheelhouse": str(folder), "system_packages": "bundle"}


def test_what_the_bundle_lacks_for_the_environment_is_told_before_the_driver_is_installed(tmp_path: Path) -> None:
    python = "3.11"
    whole = bare().model_copy(update={"tools": dict.fromkeys(("rsync", "haproxy", "nft"), "/usr/bin/x")})
    assert python in minors(whole)
    found = decided({"node1": whole}, **driver_bundle(tmp_path, python))
    assert (found["work"], found["blocked"]) == (True, [])
    # The wheels are for another Python than the nodes'.
    (told,) = decided({"node1": whole}, **driver_bundle(tmp_path, "3.13"))["blocked"]
    assert "the bundle has no wheels for the lock" in told
    assert "Python 3.13 on x86_64" in told
    # On the nodes too: its manifest is here.
    site = driver_bundle(tmp_path, "3.13")
    assert decided({"node1": whole}, **site, wheelhouse_on_nodes=True)["blocked"] == [told]
    # Nothing is said where no driver is to be installed: the plan refuses it.
    assert decided({"node1": working()}, **site)["blocked"] == []
    # A program is lacking that another role needs.
    bald = whole.model_copy(update={"tools": {**whole.tools, "haproxy": None}})
    site = driver_bundle(tmp_path, python)
    (told,) = decided({"node1": bald, "node2": bald}, **site)["blocked"]
    assert "no system packages for debian 12 on x86_64, none at all, and the node lacks haproxy (node1, " in told
    assert decided({"node1": bald}, **site, gateway=False)["blocked"] == []
    both = decided({"node1": whole, "node2": whole}, **site, fabric_encryption="wireguard")["blocked"]
    assert ["lacks wireguard-tools (node1, " in both[0], "lacks wireguard-tools (node2, " in both[1]] == [True, True]
    packages = BundlePackages(system="debian 12", machine="x86_64", architecture="amd64", names=("haproxy",))
    site = driver_bundle(tmp_path, python, packages)
    assert decided({"node1": bald, "node2": bald}, **site)["blocked"] == []
    no_rsync = bald.model_copy(update={"tools": {}})
    assert any("the bundle lacks the system package rsync (node1" in one
               for one in decided({"node1": no_rsync}, **site)["blocked"])  # fmt: skip
    # What is built already needs no wheels.
    lock = locks.find("cuda", None, python, "x86_64")
    built = whole.model_copy(update={"venvs": (Venv(name=lock.directory_name, marker={}, python=None, packages={}),)})
    assert decided({"node1": built}, **driver_bundle(tmp_path, "3.13"))["blocked"] == []


def test_a_driver_for_which_there_is_no_room_is_not_installed(tmp_path: Path) -> None:
    site = driver_bundle(tmp_path, "3.11")
    with (tmp_path / "driver" / "Packages").open("wb") as file:
        file.truncate(3 * GIB)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["files"][-1]["size"] = 3 * GIB
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    def told(usr: float, opt: float, *, same: bool = False, **wants: Any) -> list[str]:
        disks = tuple(
            PathSpace(path=path, measured_at=path, mount_device=device, total_bytes=9 * GIB, free_bytes=int(gib * GIB))
            for path, device, gib in (("/opt/ppdeploy", 1, opt), ("/usr", 1 if same else 2, usr))
        )
        tools = dict.fromkeys(("rsync", "haproxy"), "/usr/bin/x")
        facts = bare().model_copy(update={"disks": disks, "tools": tools})
        blocked: list[str] = decided({"node1": facts}, **site, **wants)["blocked"]
        return blocked

    assert told(4, 4) == []
    assert told(2, 4) == ["/usr needs 3.0 GiB and 2.0 GiB are free (node1): free space on the file system of /usr"]
    assert [one.partition(" are free")[0] for one in told(4, 2)] == ["/opt/ppdeploy needs 3.0 GiB and 2.0 GiB"]
    # On one file system it is there twice for a while, unless it lies on the node.
    assert [one.partition(" are free")[0] for one in told(4, 4, same=True)] == [
        "/opt/ppdeploy needs 6.0 GiB and 4.0 GiB"
    ]
    assert told(4, 4, same=True, wheelhouse_on_nodes=True) == []
    # Of another source than the bundle nobody knows the size.
    assert told(2, 2, nvidia_repository="http://m.example/cuda", nvidia_repository_key=__file__) == []


def test_nodes_without_a_python_in_common_are_told_before_the_driver_is_installed() -> None:
    (told,) = decided({"node1": bare().model_copy(update={"pythons": ()})}, system_packages="none")["blocked"]
    assert "the nodes have no Python in common" in told


def test_where_all_drivers_work_nothing_is_said_and_nobody_is_asked() -> None:
    found = decided({"node1": working(), "node2": working("rhel9")})
    assert (found["work"], found["first"], found["blocked"], found["lines"]) == (False, False, [], [])
    assert not any(node["needed"] for node in found["nodes"].values())


def test_what_is_done_is_said_with_the_reboot() -> None:
    found = decided({"node1": bare(), "node2": working()})
    assert (found["work"], found["first"]) == (True, True)
    assert found["lines"] == [
        (
            "node1: install linux-headers-6.1.0-41-amd64, linux-headers-amd64, nvidia-open (branch 580) from NVIDIA's "
            "repository: there is no NVIDIA driver"
        ),
        "node1: reboot: nouveau has the card",
    ]
    assert decided({"node1": working(version="570.86.15")})["first"] is False, "its GPUs answer already"


# ---- the files, to the byte ------------------------------------------------------------------------------------------

HEAD = "# Written by ppdeploy; changes are overwritten by the next apply.\n"
NOUVEAU = (
    f"{HEAD}# nouveau, which the kernel has by itself, would take the cards before NVIDIA's module.\n"
    "blacklist nouveau\noptions nouveau modeset=0\n"
)
PIN = (
    f"{HEAD}# Driver, libraries and module stay on branch %s, whatever else the repository has.\n"
    "Package: *nvidia* libcuda* cuda-drivers*\nPin: version %s\nPin-Priority: 1000\n"
)
YUM = (
    f"{HEAD}# It is off, so that no upgrade takes a library of another version than the loaded module's.\n"
    "[ppdeploy-nvidia]\nname=NVIDIA driver\nbaseurl=%s\nenabled=0\ngpgcheck=1\ngpgkey=%s\n"
)
ORIGIN = "https://developer.download.nvidia.com/compute/cuda/repos"
FILES: dict[str, dict[str, str]] = {
    "debian12": {BLACKLIST: NOUVEAU, PREFERENCES: PIN % (580, "580.*")},
    "debian13": {BLACKLIST: NOUVEAU, PREFERENCES: PIN % (590, "590.*")},
    # On Ubuntu, NVIDIA's revisions end with ubuntu1, Canonical's of the same branch do not.
    "ubuntu2204": {BLACKLIST: NOUVEAU, PREFERENCES: PIN % (580, "580.*ubuntu1")},
    "ubuntu2404": {BLACKLIST: NOUVEAU, PREFERENCES: PIN % (580, "580.*ubuntu1")},
    "ubuntu2604": {BLACKLIST: NOUVEAU, PREFERENCES: PIN % (595, "595.*ubuntu1")},
    "rhel9": {BLACKLIST: NOUVEAU,
              REPOSITORY: YUM % (f"{ORIGIN}/rhel9/x86_64", f"{ORIGIN}/rhel9/x86_64/D42D0685.pub")},
    "rocky9": {BLACKLIST: NOUVEAU,
               REPOSITORY: YUM % (f"{ORIGIN}/rhel9/x86_64", f"{ORIGIN}/rhel9/x86_64/D42D0685.pub")},
    "almalinux10": {BLACKLIST: NOUVEAU,
                    REPOSITORY: YUM % (f"{ORIGIN}/rhel10/x86_64", f"{ORIGIN}/rhel10/x86_64/CDF6BA43.pub")},
    "rhel10": {BLACKLIST: NOUVEAU,
               REPOSITORY: YUM % (f"{ORIGIN}/rhel10/x86_64", f"{ORIGIN}/rhel10/x86_64/CDF6BA43.pub")},
    "fedora43": {BLACKLIST: NOUVEAU,
                 REPOSITORY: YUM % (f"{ORIGIN}/fedora43/x86_64", f"{ORIGIN}/fedora43/x86_64/1940C73E.pub")},
    "fedora44": {BLACKLIST: NOUVEAU,
                 REPOSITORY: YUM % (f"{ORIGIN}/fedora44/x86_64", f"{ORIGIN}/fedora44/x86_64/73CD9B30.pub")},
}  # fmt: skip


def texts(facts: NodeFacts, **wants: Any) -> dict[str, str]:
    slice_ = driver_slice(make_pipeline_spec(["node1"], **wants), plan(facts, **wants), facts)
    return {file["path"]: render(file["template"], slice_["node"]) for file in slice_["files"]}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_files_of_each_system(system: str) -> None:
    assert texts(bare(system)) == FILES[system]


def test_the_files_of_a_mirror() -> None:
    wants = {"nvidia_repository": "http://mirror.example/cuda", "nvidia_repository_key": "./mirror.asc"}
    assert texts(bare(), **wants)[SOURCES] == (
        f"{HEAD}# A mirror of NVIDIA's repository (ppdeploy_nvidia_repository).\n"
        "Types: deb\nURIs: http://mirror.example/cuda/debian12/x86_64\nSuites: /\n"
        "Signed-By: /etc/apt/keyrings/ppdeploy-nvidia.asc\n"
    )
    key = "file:///etc/pki/rpm-gpg/RPM-GPG-KEY-ppdeploy-nvidia"
    assert texts(bare("rhel9"), **wants)[REPOSITORY] == YUM % ("http://mirror.example/cuda/rhel9/x86_64", key)


def test_the_sites_way_out_is_the_roles_and_certificates_stand_in_dnfs_own_file() -> None:
    wants = {"proxy": "http://proxy.example:3128", "no_proxy": ["mirror.example"], "ca_bundle": "/etc/company.pem"}
    for system in ("debian12", "rhel9"):
        found = decided({"node1": bare(system)}, **wants)["nodes"]["node1"]
        assert {name: found[name] for name in wants} == wants
    assert texts(bare("rhel9"), **wants)[REPOSITORY] == FILES["rhel9"][REPOSITORY] + "sslcacert=/etc/company.pem\n"
    # apt is told them while an apply fetches.
    assert texts(bare(), **wants) == FILES["debian12"]


def ours(**differing: str) -> NodeFacts:
    """Facts of a host that we brought the driver to; `differing` replaces the text of a file."""
    told = {**FILES["debian12"], **{{"blacklist": BLACKLIST}[name]: text for name, text in differing.items()}}
    files: dict[str, FileState | None] = {
        path: FileState(
            path=path, type="file", mode="0644", owner="root", group="root", size=len(text), target=None,
            sha256=hashlib.sha256(text.encode()).hexdigest(),
        )
        for path, text in told.items()
    }  # fmt: skip
    return working(files=files, packages=tuple(make_package(name, held=True) for name in ("libcuda1", "nvidia-open")))


def test_a_file_that_somebody_changed_is_written_again_and_nothing_else_is_done() -> None:
    assert not decided({"node1": ours()})["work"]
    found = decided({"node1": ours(blacklist="# mine\n")})
    assert found["work"]
    node = found["nodes"]["node1"]
    assert (node["needed"], node["action"], node["packages"], node["reboot"]) == (True, "keep", [], False)


# ---- `ppdeploy plan` -------------------------------------------------------------------------------------------------

GPU: dict[str, Any] = {"device": "cuda", "kv_cache_gib": None, "max_model_len": None}


def cluster(**second: Any) -> dict[str, NodeFacts]:
    facts = make_cluster(2, gpus=1)
    facts["node1"] = facts["node1"].model_copy(update={"driver": make_installation()})
    facts["node2"] = facts["node2"].model_copy(update={"driver": make_installation(), **second})
    return facts


def shown(facts: dict[str, NodeFacts], *, verbose: bool = False, **wants: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=200, highlight=False)
    for part in plan_report(make_complete_plan(facts, **GPU, **wants), verbose=verbose):
        console.print(part, markup=False)
    return " ".join(file.getvalue().split())


def test_a_driver_that_is_too_old_is_upgraded_by_the_apply_and_no_rule_stands_in_its_way() -> None:
    old = make_cluster(2, gpus=1, driver="570.86.15")["node2"]
    facts = cluster(gpus=old.gpus, nvidia_driver=old.nvidia_driver)
    made = make_complete_plan(facts, **GPU, allow_reboot=True)
    assert made.blocked() == []
    text = shown(facts, allow_reboot=True)
    assert "NVIDIA driver on node2: install linux-headers-6.1.0-41-amd64, linux-headers-amd64, nvidia-open" in text
    assert "reboot: the old module is loaded" in text
    blocked = {finding.id: finding for finding in make_complete_plan(facts, **GPU).blocked()}
    assert set(blocked) == {"driver-cuda13", "driver"}
    assert blocked["driver"].remedy == "set ppdeploy_allow_reboot: true, or reboot the host yourself"


def test_why_a_driver_is_left_alone_is_said_only_when_asked() -> None:
    assert "NVIDIA driver" not in shown(cluster())
    assert "node1: NVIDIA driver: driver 580.95.05 works and is new enough" in shown(cluster(), verbose=True)


def test_without_gpus_that_answer_the_plan_says_what_comes_first() -> None:
    facts = {"node1": cluster()["node1"], "node2": bare().model_copy(update={"gpus": ()})}
    with pytest.raises(BlockedError) as error:
        make_complete_plan(facts, **GPU, allow_reboot=True)
    told = str(error.value)
    assert "the NVIDIA driver comes first (node2: install linux-headers-6.1.0-41-amd64" in told
    assert "reboot: nouveau has the card" in told
    assert "run `ppdeploy apply`" in told
    with pytest.raises(BlockedError, match=r"no GPU answers on node2 .*takes a reboot .*ppdeploy_allow_reboot: true"):
        make_complete_plan(facts, **GPU)


def test_what_an_apply_installed_is_rendered_with_the_other_files() -> None:
    facts = cluster()
    facts["node1"] = facts["node1"].model_copy(update={"files": ours().files})
    made = make_complete_plan(facts, **GPU)
    assert [file.path for file in driver_files(made.node("node1")[1].driver)] == [BLACKLIST, PREFERENCES]
    assert render_node(made, "node1")[PREFERENCES] == PIN % (580, "580.*")
    assert PREFERENCES not in render_node(made, "node2")
    # A driver is no part of a release: it changes no digest, and no gang is restarted for it.
    assert made.pipelines[0].release == make_complete_plan(cluster(), **GPU).pipelines[0].release


def test_the_mirrors_key_is_found_from_the_inventory() -> None:
    spec = make_pipeline_spec(["node1"]).model_copy(update={"nvidia_key_path": Path("/etc/keys/mirror.asc")})
    wants: dict[str, Any] = {"nvidia_repository": "http://m.example/cuda", "nvidia_repository_key": "./mirror.asc"}
    slice_ = driver_slice(spec, plan(bare(), **wants), bare())
    assert (slice_["key_source"], slice_["key_file"]) == (
        "/etc/keys/mirror.asc",
        "/etc/apt/keyrings/ppdeploy-nvidia.asc",
    )
    assert driver_slice(spec, plan(bare()), bare())["key_source"] == ""
