"""What is done about a node's NVIDIA driver, on each system and in each state that a host may be found in."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ppdeploy.facts import (
    DkmsModule,
    GpuProcess,
    Kernel,
    NodeFacts,
    NvidiaDriver,
    Problem,
    VendorImage,
)
from ppdeploy.plan.driver import (
    BLACKLIST,
    PREFERENCES,
    REPOSITORY,
    SOURCES,
    driver_files,
    driver_source,
    driver_texts,
    plan_driver,
)
from ppdeploy.plan.driver_packages import bundle_packages
from ppdeploy.plan.driver_systems import is_outdated, is_unknown, platform_of
from ppdeploy.spec import BundledDriver, PipelineVars, Wheelhouse
from tests.factories import make_facts, make_gpu, make_package
from tests.factories_checks import installed
from tests.factories_driver import OURS, SYSTEMS, bare, card, plan, working

# ---- what is installed, on each system -------------------------------------------------------------------------------

GOLDEN: dict[str, tuple[int, str, tuple[str, ...], tuple[str, ...]]] = {
    "debian12": (
        580, "",
        ("linux-headers-6.1.0-41-amd64", "linux-headers-amd64", "nvidia-open"),
        (BLACKLIST, PREFERENCES),
    ),
    "debian13": (
        590, "",
        ("linux-headers-6.12.57+deb13-amd64", "linux-headers-amd64", "nvidia-open"),
        (BLACKLIST, PREFERENCES),
    ),
    "ubuntu2204": (
        580, "",
        ("linux-headers-6.8.0-90-generic", "linux-headers-generic", "nvidia-open"),
        (BLACKLIST, PREFERENCES),
    ),
    "ubuntu2404": (
        580, "",
        ("linux-headers-6.8.0-90-generic", "linux-headers-generic", "nvidia-open"),
        (BLACKLIST, PREFERENCES),
    ),
    "ubuntu2604": (
        595, "",
        ("linux-headers-7.0.0-30-generic", "linux-headers-generic", "nvidia-open"),
        (BLACKLIST, PREFERENCES),
    ),
    "rhel9": (
        580, "nvidia-driver:580-open",
        ("kernel-devel-5.14.0-687.51.1.el9_8.x86_64", "kernel-devel-matched", "kernel-headers", "nvidia-open"),
        (BLACKLIST, REPOSITORY),
    ),
    "rocky9": (
        580, "nvidia-driver:580-open",
        ("kernel-devel-5.14.0-611.5.1.el9_7.x86_64", "kernel-devel-matched", "kernel-headers", "nvidia-open"),
        (BLACKLIST, REPOSITORY),
    ),
    "almalinux10": (
        580, "",
        ("kernel-devel-6.12.0-124.8.1.el10_1.x86_64", "kernel-devel-matched", "kernel-headers", "nvidia-open-580.*"),
        (BLACKLIST, REPOSITORY),
    ),
    "rhel10": (
        580, "",
        ("kernel-devel-6.12.0-124.8.1.el10_1.x86_64", "kernel-devel-matched", "kernel-headers", "nvidia-open-580.*"),
        (BLACKLIST, REPOSITORY),
    ),
    "fedora43": (
        590, "",
        ("kernel-devel-6.17.8-300.fc43.x86_64", "kernel-devel-matched", "kernel-headers", "nvidia-open-590.*"),
        (BLACKLIST, REPOSITORY),
    ),
    "fedora44": (
        610, "",
        ("kernel-devel-6.19.10-300.fc44.x86_64", "kernel-devel-matched", "kernel-headers", "nvidia-open-610.*"),
        (BLACKLIST, REPOSITORY),
    ),
}  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_bare_machine_gets_the_open_driver_of_nvidias_repository(system: str) -> None:
    found = plan(bare(system))
    branch, stream, packages, files = GOLDEN[system]
    assert (found.action, found.source, found.branch, found.stream) == ("install", "nvidia", branch, stream)
    assert found.packages == packages
    assert tuple(file.path for file in driver_files(found)) == files
    assert (found.cards, found.reboot, found.reboot_reason) == (1, True, "nouveau has the card")
    platform = {"rocky9": "rhel9", "almalinux10": "rhel10"}.get(system, system)
    assert found.repository == f"https://developer.download.nvidia.com/compute/cuda/repos/{platform}/x86_64"
    if found.manager == "apt":
        assert found.keyring is not None
        assert found.keyring.url == f"{found.repository}/cuda-keyring_1.1-1_all.deb"
        assert len(found.keyring.sha256) == 64
    else:
        assert found.keyring is None
        assert found.key.startswith(found.repository)


def test_ubuntu_has_drivers_itself_whose_modules_canonical_signed() -> None:
    facts = bare("ubuntu2404", secure_boot=True, packages=(make_package("linux-image-generic-hwe-24.04", "6.14"),))
    found = plan(facts, nvidia_driver="distribution")
    assert found.action == "install"
    assert found.packages == (
        "linux-modules-nvidia-580-server-open-6.8.0-90-generic",
        "linux-modules-nvidia-580-server-open-generic-hwe-24.04",
        "nvidia-headless-no-dkms-580-server-open",
        "nvidia-utils-580-server",
        "nvidia-compute-utils-580-server",
    )
    assert found.keyring is None
    assert found.repository == ""
    assert [file.path for file in driver_files(found)] == [BLACKLIST]
    # A newer kernel would come without its module, so it must not come by itself.
    assert "linux-" in found.held
    assert r"generic\-hwe\-24\.04" in found.held


def test_ubuntu_itself_has_every_branch_and_nvidias_repository_has_not() -> None:
    assert plan(bare("ubuntu2604"), nvidia_driver="distribution").branch == 580
    refused = plan(bare("ubuntu2604"), nvidia_branch=580)
    assert refused.reason == "NVIDIA has no branch 580 for Ubuntu 26.04 LTS, whose oldest is 595"
    assert refused.remedy == "set ppdeploy_nvidia_branch: 595 or remove it"


def test_a_branch_that_is_named_is_the_one_that_comes() -> None:
    assert plan(bare("rhel9"), nvidia_branch=595).stream == "nvidia-driver:595-open"
    assert plan(bare("rhel10"), nvidia_branch=610).packages[-1] == "nvidia-open-610.*"
    assert plan(bare("debian12"), nvidia_branch=610).branch == 610


def test_a_mirror_has_its_own_address_and_key() -> None:
    wants: dict[str, Any] = {
        "nvidia_repository": "http://mirror.example/cuda/",
        "nvidia_repository_key": "./mirror.asc",
    }
    found = plan(bare("debian12"), **wants)
    assert found.repository == "http://mirror.example/cuda/debian12/x86_64"
    assert (found.keyring, found.key) == (None, "/etc/apt/keyrings/ppdeploy-nvidia.asc")
    assert [file.path for file in driver_files(found)] == [BLACKLIST, PREFERENCES, SOURCES]
    assert plan(bare("rhel9"), **wants).key == "/etc/pki/rpm-gpg/RPM-GPG-KEY-ppdeploy-nvidia"


def test_headers_come_for_the_kernel_that_runs_and_for_the_one_that_boots_next() -> None:
    found = plan(bare("debian12", loaded=(), next_kernel="6.1.0-42-amd64"))
    assert found.packages[:2] == ("linux-headers-6.1.0-41-amd64", "linux-headers-6.1.0-42-amd64")
    assert found.reboot_reason == "kernel 6.1.0-42-amd64 boots next, and 6.1.0-41-amd64 runs"


def test_where_no_module_is_loaded_and_no_kernel_waits_nothing_is_rebooted() -> None:
    found = plan(bare(loaded=()), allow_reboot=False)
    assert (found.action, found.reboot) == ("install", False)


# ---- what is left alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wants", [{}, {"nvidia_driver": "none"}, {"nvidia_branch": 580}, {"nvidia_driver": "distribution"}]
)
@pytest.mark.parametrize("version", ["580.95.05", "610.57.04", "595.71.05"])
def test_a_driver_that_works_and_is_new_enough_is_left_alone(wants: dict[str, Any], version: str) -> None:
    found = plan(working(version=version), allow_reboot=False, **wants)
    assert (found.action, found.ours, found.version) == ("keep", False, version)
    assert found.reason == f"driver {version} works and is new enough"
    assert not found.pending
    assert driver_files(found) == ()
    assert list(driver_texts(found)) == []


@pytest.mark.parametrize("system", ["rhel9", "debian13", "fedora44"])
def test_so_it_is_on_any_system_even_one_that_nothing_is_known_of(system: str) -> None:
    assert plan(working(system)).action == "keep"
    facts = working(system)
    arch = facts.model_copy(update={"os": facts.os.model_copy(update={"id": "arch", "version_id": None})})
    assert plan(arch).action == "keep"


def test_what_we_installed_stays_ours_and_asks_nothing() -> None:
    files = {BLACKLIST: OURS[BLACKLIST], PREFERENCES: OURS[BLACKLIST], SOURCES: None, REPOSITORY: None}
    held = tuple(make_package(name, held=True) for name in ("nvidia-open", "libcuda1", "cuda-keyring"))
    found = plan(working(files=files, packages=held))
    assert (found.action, found.ours, found.source) == ("keep", True, "nvidia")
    assert [file.path for file in driver_files(found)] == [BLACKLIST, PREFERENCES]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"held": ()}, "libcuda1 is not held, so an upgrade could part it from the loaded module"),
        ({"files": (BLACKLIST,)}, f"{PREFERENCES} is missing, which keeps the driver as it is"),
    ],
)
def test_what_keeps_it_so_is_brought_back_without_a_reboot(change: dict[str, Any], reason: str) -> None:
    files = dict.fromkeys(change.get("files", (BLACKLIST, PREFERENCES)), OURS[BLACKLIST])
    held = change.get("held", ("libcuda1", "nvidia-open"))
    packages = tuple(
        make_package(name, held=name in held) for name in ("libcuda1", "nvidia-open", "nvidia-container-toolkit")
    )
    found = plan(working(files=files, packages=packages), allow_reboot=False)
    assert (found.action, found.reason, found.reboot, found.packages) == ("settle", reason, False, ())
    assert found.pending
    assert found.held
    assert list(driver_texts(found)) == [f"settle: {reason}"]


def test_cpu_needs_none() -> None:
    found = plan(bare(), device="cpu")
    assert (found.action, found.reason, found.pending) == ("none", "the pipeline runs on cpu", False)


@pytest.mark.parametrize(
    ("vendor", "version", "action", "told"),
    [
        (
            VendorImage(kind="dgx", name="NVIDIA DGX H100", version="7.2.3"),
            "580.95.05",
            "keep",
            "brings driver 580.95.05",
        ),
        (
            VendorImage(kind="dgx-spark", name="NVIDIA DGX Spark", version="7.5.0"),
            "580.95.05",
            "keep",
            "DGX Spark 7.5.0",
        ),
        (VendorImage(kind="gb10", name="GB10", version=None), "580.95.05", "keep", "GB10 brings driver 580"),
        (VendorImage(kind="dgx", name="NVIDIA DGX A100", version="6.3"), "550.90.07", "blocked", "apt full-upgrade"),
        (VendorImage(kind="jetson", name="Jetson Linux", version="36.4"), "540.4.0", "blocked", "JetPack release"),
    ],
)
def test_the_driver_of_a_vendors_image_is_kept_and_its_version_checked(
    vendor: VendorImage, version: str, action: str, told: str
) -> None:
    found = plan(working("ubuntu2404", version, vendor=vendor))
    assert found.action == action
    assert told in f"{found.reason}: {found.remedy}"
    silent = plan(bare("ubuntu2404", vendor=vendor))
    assert silent.action == "blocked"
    assert silent.reason.endswith("brings its own driver, and no GPU answers")


# ---- what is refused, before any host is touched ---------------------------------------------------------------------

RUNNING = {"chat": installed(active="active")}
OLD = {"version": "535.261.03"}


@pytest.mark.parametrize(
    ("facts", "wants", "reason", "remedy"),
    [
        (bare("rhel9", os={"version_id": "8.10", "pretty_name": "Red Hat Enterprise Linux 8.10 (Ootpa)"}), {},
         "Linux 8.10 (Ootpa) is too old: its Python 3.6 and systemd 239", "install release 9 or 10"),
        (bare(os={"id": "opensuse-leap", "version_id": "15.6", "pretty_name": "openSUSE Leap 15.6"}), {},
         "ppdeploy does not know how openSUSE Leap 15.6 gets one", "install driver 580 or newer yourself"),
        (bare("ubuntu2404", os={"version_id": "25.10", "pretty_name": "Ubuntu 25.10"}), {},
         "does not know how Ubuntu 25.10 gets one", "Ubuntu 22.04, 24.04 and 26.04"),
        (bare(os={"machine": "aarch64"}), {}, "on x86_64 alone, not on aarch64", "as the machine's vendor says"),
        (bare(cards=[card("0x1b06")]), {}, "(0x1b06) is older than Turing", "Turing generation"),
        (bare(cards=[card("0x1db6")]), {}, "(0x1db6) is older than Turing", "Turing generation"),
        (bare(cards=[card("0x3300")]), {}, "of a generation after Blackwell", "set ppdeploy_nvidia_branch"),
        (bare("debian12"), {"nvidia_driver": "distribution"}, "has driver 535 itself, which is older than 580",
         "set ppdeploy_nvidia_driver: nvidia"),
        (bare("rhel10"), {"nvidia_driver": "distribution"}, "has no NVIDIA driver of its own",
         "set ppdeploy_nvidia_driver: nvidia"),
        (bare(), {"nvidia_driver": "none"}, "there is no NVIDIA driver, and ppdeploy_nvidia_driver is none",
         "install driver 580 or newer yourself"),
        (working(**OLD), {"nvidia_driver": "none"}, "driver 535.261.03 is older than 580, and", "yourself"),
        (bare(), {"wheelhouse": "/srv/bundle"}, "with ppdeploy_wheelhouse no archive is asked for one, nor the bundle",
         "set ppdeploy_system_packages: bundle, with a bundle made by `ppdeploy bundle --nvidia-driver nvidia`, or"),
        (bare(), {"wheelhouse": "/srv/bundle"}, "no archive is asked for one",
         "set ppdeploy_nvidia_repository to a mirror within the site"),
        (bare(), {"wheelhouse": "/srv/bundle", "system_packages": "bundle"}, "the bundle in ppdeploy_wheelhouse has",
         "or newer yourself"),
        (bare(components=("main",)), {}, "Debian's component contrib is off", "add `contrib` behind `main`"),
        (bare("rhel9", packages=()), {}, "dkms, which builds its module, is in EPEL",
         "dnf install https://dl.fedoraproject.org/pub/epel/epel-release-latest-9.noarch.rpm"),
        (bare(runfile=True), {}, "NVIDIA's own installer (a .run file)", "run `nvidia-uninstall`"),
        (working("ubuntu2404", packages=(make_package("nvidia-driver-535", "535"),), **OLD), {},
         "its packages are of the distribution, which do not mix with those of NVIDIA's repository",
         "run `apt-get purge '*nvidia*'` on the host, then apply, or set ppdeploy_nvidia_driver: distribution"),
        (working(packages=(make_package("nvidia-driver", "535"),), **OLD), {}, "its packages are of the distribution",
         "run `apt-get purge '*nvidia*'` on the host, then apply"),
        (bare(broken=(make_package("foo", "1.2", "half-configured"),)), {},
         "foo 1.2 is half-configured, so that nothing can be installed", "dpkg --configure -a"),
        (bare(secure_boot=True), {}, "Secure Boot is on: a module that is built on the host loads only once",
         "install dkms and mokutil and run `dkms generate_mok`, then run `mokutil --import /var/lib/dkms/mok.pub`"),
        (bare("ubuntu2404", secure_boot=True, signing_certificate="/var/lib/shim-signed/mok/MOK.der"), {},
         "Secure Boot is on", "on the host, run `mokutil --import /var/lib/shim-signed/mok/MOK.der` with a password"),
        (bare("ubuntu2404", secure_boot=True), {}, "Secure Boot is on", "or set ppdeploy_nvidia_driver: distribution"),
        (bare("rhel9", secure_boot=True, signing_enrolled=False), {}, "Secure Boot is on", "choose Enroll MOK"),
        (bare(pipelines=RUNNING), {}, "a rank of pipeline chat runs", "run `ppdeploy stop`, then `ppdeploy apply`"),
        (working(gpus=(make_gpu(0, driver="535.1", processes=[
            GpuProcess(pid=7, name="train", memory_mib=1, unit="job.service")]),), **OLD), {},
         "train (pid 7, job.service) computes on GPU 0", "stop it"),
        (bare(), {"allow_reboot": False}, "to install one takes a reboot (nouveau has the card)",
         "set ppdeploy_allow_reboot: true"),
        (working(**OLD), {"allow_reboot": False}, "to install one takes a reboot (the old module is loaded)",
         "set ppdeploy_allow_reboot: true, or reboot the host yourself"),
        (bare(cards=[]), {}, "there is no NVIDIA card on its PCI bus", "put one in, or set ppdeploy_device: cpu"),
        (bare(cards=[card(vendor="amd", driver="amdgpu")]), {}, "there is no ROCm", "use a host with NVIDIA GPUs"),
        (bare(cards=[card(driver="vfio-pci")]), {}, "is given to virtual machines (vfio-pci)", "give it back"),
        (make_facts(pci_accelerators=(card(),)), {}, "the facts do not say how the driver is installed", "anew"),
    ],
)  # fmt: skip
def test_it_is_refused_in_a_sentence(facts: NodeFacts, wants: dict[str, Any], reason: str, remedy: str) -> None:
    found = plan(facts, **wants)
    assert found.action == "blocked", found
    assert reason in found.reason
    assert remedy in found.remedy
    assert (found.packages, found.reboot, driver_files(found)) == ((), False, ())
    assert list(driver_texts(found)) == [f"blocked: {found.reason}: {found.remedy}"]


def test_nothing_is_refused_once_it_is_put_right() -> None:
    assert plan(bare(secure_boot=True, signing_certificate="/var/lib/dkms/mok.pub", signing_enrolled=True)).pending
    assert plan(bare("rhel9", packages=(make_package("dkms"),))).pending
    assert plan(bare("fedora44", packages=())).pending
    assert plan(bare(), wheelhouse="/srv/bundle", system_packages="archives").pending
    mirror: dict[str, Any] = {
        "nvidia_repository": "https://mirror.example/cuda",
        "nvidia_repository_key": "/srv/key.asc",
    }
    assert plan(bare(), wheelhouse="/srv/bundle", **mirror).pending
    assert plan(bare(cards=[card("0x3300")]), nvidia_branch=630).branch == 630
    assert plan(bare(cards=[card(), card(driver="vfio-pci")])).cards == 1


# ---- from a bundle ---------------------------------------------------------------------------------------------------

SITE: dict[str, Any] = {"wheelhouse": "/srv/bundle", "system_packages": "bundle"}


def bundled(system: str = "debian12", **changes: Any) -> Wheelhouse:
    """Return what a bundle for a system says, made as `ppdeploy bundle` makes it for the kernel that runs there."""
    host = bare(system).os
    values: dict[str, Any] = {
        "system": host.release,
        "machine": "x86_64",
        "manager": host.package_manager,
        "source": "nvidia",
        "branch": plan(bare(system)).branch,
        "kernels": (host.kernel,),
        "names": (),
        **changes,
    }
    platform = platform_of(host)
    assert platform is not None
    names = tuple(bundle_packages(platform, values["source"], values["branch"], values["kernels"]))
    return Wheelhouse(driver=BundledDriver(**{**values, "names": names + values["names"]}))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_site_with_a_bundle_takes_the_driver_from_it_alone(system: str) -> None:
    # Neither what a repository needs nor where one is has to do with it.
    facts = bare(system, components=("main",))
    assert facts.driver is not None
    alone = tuple(one for one in facts.driver.packages if one.name != "epel-release")
    found = plan(bare(system, components=("main",), packages=alone), bundle=bundled(system), **SITE)
    assert (found.action, found.from_bundle, found.source) == ("install", True, "nvidia"), found
    assert (found.repository, found.keyring, found.key, found.mirror, found.stream) == ("", None, "", False, "")
    kernel = SYSTEMS[system][3]
    if found.manager == "apt":
        assert found.packages == (f"linux-headers-{kernel}", "nvidia-open")
    else:
        headers = (f"kernel-devel-{kernel}", f"kernel-devel-matched-{kernel}", "kernel-headers")
        assert found.packages == (*headers, f"nvidia-open-{found.branch}.*")
    files = [BLACKLIST, PREFERENCES] if found.manager == "apt" else [BLACKLIST]
    assert [file.path for file in driver_files(found)] == files
    text = next(driver_texts(found))
    assert text.endswith(f"(branch {found.branch}) from the bundle: there is no NVIDIA driver")


def test_the_headers_of_kernels_to_come_are_installed_where_the_bundle_has_them() -> None:
    both = bundled(names=("linux-headers-amd64", "linux-headers-cloud-amd64"))
    assert plan(bare(), bundle=both, **SITE).packages[-1] == "linux-headers-amd64"


def test_ubuntus_own_come_without_what_brings_another_kernel() -> None:
    held = bundled("ubuntu2404", source="distribution", branch=580)
    found = plan(bare("ubuntu2404", secure_boot=True), bundle=held, nvidia_driver="distribution", **SITE)
    assert found.packages == (
        "linux-modules-nvidia-580-server-open-6.8.0-90-generic",
        "nvidia-headless-no-dkms-580-server-open",
        "nvidia-utils-580-server",
        "nvidia-compute-utils-580-server",
    )
    refused = plan(bare("ubuntu2404"), bundle=bundled("ubuntu2404"), nvidia_driver="distribution", **SITE)
    assert "where the node needs branch 580 of the distribution for ubuntu 24.04" in refused.reason
    assert "--nvidia-driver distribution --nvidia-branch 580" in refused.remedy
    assert "nvidia_repository" not in refused.remedy


@pytest.mark.parametrize(
    ("held", "facts", "wants", "has", "command"),
    [
        (bundled(), bare(next_kernel="6.1.0-42-amd64"), {}, "has branch 580 of NVIDIA's repository for debian 12",
         "--nvidia-branch 580 --kernel 6.1.0-41-amd64 --kernel 6.1.0-42-amd64"),
        # Kernels of other nodes stay in it.
        (bundled(kernels=("6.1.0-40-amd64",)), bare(), {}, "kernel 6.1.0-40-amd64, where the node needs",
         "--kernel 6.1.0-40-amd64 --kernel 6.1.0-41-amd64"),
        (bundled(branch=590), bare(), {}, "has branch 590", "--nvidia-branch 580 --kernel 6.1.0-41-amd64`"),
        (bundled(), bare(), {"nvidia_branch": 595}, "has branch 580", "--nvidia-branch 595 --kernel"),
        (bundled("debian13"), bare(), {}, "has branch 590 of NVIDIA's repository for debian 13", "--nvidia-branch 580"),
        (bundled("rocky9"), bare("rhel9"), {}, "for rocky 9 on x86_64", "--kernel 5.14.0-687.51.1.el9_8.x86_64`"),
        (Wheelhouse(problem="the bundle folder does not exist: /srv/bundle"), bare(), {},
         "cannot be read (the bundle folder does not exist: /srv/bundle), where", "ppdeploy bundle --out /srv/bundle"),
    ],
)  # fmt: skip
def test_a_bundle_for_other_nodes_is_refused_with_the_command_that_makes_the_right_one(
    held: Wheelhouse, facts: NodeFacts, wants: dict[str, Any], has: str, command: str
) -> None:
    found = plan(facts, bundle=held, **SITE, **wants)
    assert found.action == "blocked"
    assert has in found.reason
    assert command in found.remedy


def test_one_command_makes_the_bundle_for_all_nodes_that_it_has_none_for() -> None:
    others = [
        bare(),
        bare(os={"kernel": "6.1.0-42-amd64"}, next_kernel="6.1.0-43-amd64"),
        # Of another release, of a driver that works, and without a card.
        bare("debian13"),
        working().model_copy(update={"os": working().os.model_copy(update={"kernel": "6.1.0-44-amd64"})}),
        bare(os={"kernel": "6.1.0-45-amd64"}, cards=[]),
    ]
    held = bundled(kernels=("6.1.0-40-amd64",))
    wants = PipelineVars(model="./tiny", allow_reboot=True, **SITE)
    told = [plan_driver(one, wants, "chat", held, others) for one in others[:2]]
    kernels = " ".join(f"--kernel 6.1.0-{number}-amd64" for number in (40, 41, 42, 43))
    command = f"ppdeploy bundle --out /srv/bundle --nvidia-driver nvidia --nvidia-branch 580 {kernels}"
    assert [re.findall("`(.*)`", one.remedy) for one in told] == [[command]] * 2
    assert [one.reason.rpartition(", ")[2] for one in told] == ["kernel 6.1.0-41-amd64", "6.1.0-43-amd64"]


def test_what_a_bundle_without_one_lacks_is_said_whole() -> None:
    found = plan(bare(), **SITE)
    assert found.reason == (
        "there is no NVIDIA driver, and the bundle in ppdeploy_wheelhouse has none, where the node needs branch 580 of "
        "NVIDIA's repository for debian 12 on x86_64, kernel 6.1.0-41-amd64"
    )
    assert found.remedy == (
        "run `ppdeploy bundle --out /srv/bundle --nvidia-driver nvidia --nvidia-branch 580 --kernel 6.1.0-41-amd64` on "
        "a machine with internet and Debian GNU/Linux 12 (bookworm) and carry the bundle here, or install driver 580 "
        "or newer yourself, or set ppdeploy_nvidia_repository to a mirror within the site"
    )


def test_what_an_interrupted_installation_left_is_ended_with_the_bundle() -> None:
    # Without archives nothing else could end it.
    left = (make_package("gcc-12", state="unpacked"), make_package("nvidia-open", state="half-configured"))
    found = plan(bare(packages=(), broken=left), bundle=bundled(), **SITE)
    assert (found.action, found.from_bundle, found.finish) == ("install", True, False), found
    assert plan(bare(packages=(), broken=left)).action == "blocked"


def test_a_bundle_for_several_kernels_serves_each() -> None:
    kernels = ("6.1.0-40-amd64", "6.1.0-41-amd64", "6.1.0-42-amd64")
    found = plan(bare(next_kernel="6.1.0-42-amd64"), bundle=bundled(kernels=kernels), **SITE)
    assert found.packages == ("linux-headers-6.1.0-41-amd64", "linux-headers-6.1.0-42-amd64", "nvidia-open")


def test_a_mirror_that_is_named_and_archives_come_before_the_bundle() -> None:
    mirror: dict[str, Any] = {
        "nvidia_repository": "https://mirror.example/cuda",
        "nvidia_repository_key": "/srv/key.asc",
    }
    assert not plan(bare(), bundle=bundled(), **SITE, **mirror).from_bundle
    assert not plan(bare(), bundle=bundled(), **{**SITE, "system_packages": "archives"}).from_bundle
    # A mirror is of NVIDIA's repository alone.
    own = bundled("ubuntu2404", source="distribution", branch=580)
    assert plan(bare("ubuntu2404"), bundle=own, nvidia_driver="distribution", **SITE, **mirror).from_bundle


@pytest.mark.parametrize("system", ["debian12", "rocky9"])
def test_what_came_from_a_bundle_stays_as_it_is_whatever_the_bundle_has_later(system: str) -> None:
    written = [file.path for file in driver_files(plan(bare(system), bundle=bundled(system), **SITE))]
    files = dict.fromkeys(written, OURS[BLACKLIST])
    packages = tuple(make_package(name, held=True) for name in ("nvidia-open", "libcuda1"))
    facts = working(system, version=f"{plan(bare(system)).branch}.95.05", files=files, packages=packages)
    found = plan(facts, bundle=Wheelhouse(), **SITE)
    assert (found.action, found.ours, found.from_bundle) == ("keep", True, True)
    assert [file.path for file in driver_files(found)] == written


# ---- what is found half done -----------------------------------------------------------------------------------------


def test_an_older_driver_of_the_same_source_is_upgraded_with_a_reboot() -> None:
    found = plan(working(version="570.86.15"))
    assert (found.action, found.version, found.branch) == ("install", "570.86.15", 580)
    assert (found.reboot, found.reboot_reason) == (True, "the old module is loaded")
    (first, second) = driver_texts(found)
    assert first == (
        "install linux-headers-6.1.0-41-amd64, linux-headers-amd64, nvidia-open (branch 580) from NVIDIA's repository: "
        "driver 570.86.15 is older than 580"
    )
    assert second == "reboot: the old module is loaded"


def test_a_branch_that_is_asked_for_upgrades_an_older_one() -> None:
    found = plan(working(version="580.95.05"), nvidia_branch=595)
    assert (found.action, found.branch) == ("install", 595)
    assert found.reason == "driver 580.95.05 is older than branch 595, which ppdeploy_nvidia_branch asks for"


@pytest.mark.parametrize("state", ["half-installed", "unpacked", "half-configured"])
def test_a_half_installed_driver_is_finished_first(state: str) -> None:
    found = plan(bare(broken=(make_package("nvidia-open", state=state),)))
    assert (found.action, found.finish) == ("install", True)
    assert found.reason == f"nvidia-open 580.95.05-1 is {state}: its installation did not end"


KERNEL = SYSTEMS["debian12"][3]
THERE: dict[str, Any] = {
    "library_version": "580.95.05",
    "packages": (make_package("nvidia-open"), make_package("linux-image-amd64", "6")),
}
BUILT = (Kernel(release=KERNEL, bootable=True, nvidia_module=True, headers=True),)


def test_an_installed_driver_that_waits_for_a_reboot_gets_only_that() -> None:
    found = plan(bare(kernels=BUILT, **THERE))
    assert (found.action, found.reboot, found.packages) == ("reboot", True, ())
    assert found.reason == "driver 580.95.05 is installed and nouveau is loaded"
    assert list(driver_texts(found)) == [f"reboot: {found.reason}"]


def test_so_does_one_whose_older_module_is_loaded() -> None:
    told = Problem(fact="gpus", reason="nvidia-smi failed with exit status 18: Driver/library version mismatch")
    old = NvidiaDriver(version=None, cuda_version=None, module_version="580.82.07")
    found = plan(bare(loaded=("nvidia",), problems=(told,), nvidia_driver=old, kernels=BUILT, **THERE))
    assert (found.action, found.reason) == ("reboot", "driver 580.95.05 is installed and module 580.82.07 is loaded")
    refused = plan(bare(loaded=("nvidia",), problems=(told,), nvidia_driver=old, **THERE), allow_reboot=False)
    assert refused.reason == f"{found.reason}: it takes a reboot"
    running = plan(bare(loaded=("nvidia",), problems=(told,), nvidia_driver=old, pipelines=RUNNING, **THERE))
    assert running.action == "blocked"
    assert "a rank of pipeline chat runs" in running.reason


def test_a_module_that_is_built_for_the_next_kernel_waits_for_it() -> None:
    kernels = (
        Kernel(release=KERNEL, bootable=True, nvidia_module=False),
        Kernel(release="6.1.0-42-amd64", bootable=True, nvidia_module=True),
    )
    found = plan(bare(loaded=(), kernels=kernels, next_kernel="6.1.0-42-amd64", **THERE))
    assert found.action == "reboot"
    assert found.reason == "driver 580.95.05 is built for 6.1.0-42-amd64, which boots next"


def test_a_module_that_is_only_not_loaded_is_loaded() -> None:
    found = plan(bare(loaded=(), kernels=BUILT, **THERE), allow_reboot=False)
    assert (found.action, found.reboot, found.packages, found.pending) == ("load", False, (), True)


def test_a_module_that_secure_boot_keeps_out_is_not_left_in_silence() -> None:
    found = plan(bare(loaded=(), kernels=BUILT, secure_boot=True, **THERE))
    assert found.action == "blocked"
    assert "the firmware does not know the key that NVIDIA's module is signed with" in found.reason
    assert "mokutil --import /var/lib/dkms/mok.pub" in found.remedy


def test_a_card_that_does_not_answer_a_loaded_driver_is_no_matter_of_packages() -> None:
    told = Problem(fact="gpus", reason="nvidia-smi failed with exit status 6: No devices were found")
    module = NvidiaDriver(version=None, cuda_version=None, module_version="580.95.05")
    found = plan(bare(loaded=("nvidia",), problems=(told,), nvidia_driver=module, kernels=BUILT, **THERE))
    assert found.action == "blocked"
    assert found.reason.startswith("driver 580.95.05 is loaded and no GPU answers (nvidia-smi failed")
    assert "journalctl -k" in found.remedy


def test_a_driver_without_a_module_for_the_kernel_gets_headers_and_is_built() -> None:
    dkms = (DkmsModule(name="nvidia", version="580.95.05", kernel="6.1.0-40-amd64", state="installed"),)
    kernels = (Kernel(release=KERNEL, bootable=True, nvidia_module=False, headers=False),)
    found = plan(bare(loaded=(), kernels=kernels, dkms=dkms, **THERE))
    assert found.action == "install"
    assert found.reason == f"driver 580.95.05 has no module for kernel {KERNEL}"
    assert found.packages[0] == f"linux-headers-{KERNEL}"
    assert found.rebuild == (KERNEL,)


# ---- cards and packages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "name"),
    [("0x1e04", "RTX 2080 Ti"), ("0x1eb8", "T4"), ("0x20b0", "A100"), ("0x2204", "RTX 3090"), ("0x2330", "H100"),
     ("0x2684", "RTX 4090"), ("0x2901", "B200"), ("0x2b85", "RTX 5090"), ("0x2e12", "GB10"), ("0x31c2", "GB300")],
)  # fmt: skip
def test_every_generation_from_turing_to_blackwell_is_known(device: str, name: str) -> None:
    assert not is_outdated(card(device)), name
    assert not is_unknown(card(device)), name


@pytest.mark.parametrize("device", ["0x1db6", "0x1b06", "0x15f8", "0x13c2", "0x1d81"])
def test_older_ones_are_told(device: str) -> None:
    assert is_outdated(card(device))
    # A host may well have one for its screen.
    assert plan(bare(cards=[card(device), card()])).cards == 1


def test_a_host_that_does_not_say_what_its_card_is_is_not_judged() -> None:
    assert not is_outdated(card(""))
    assert not is_unknown(card(""))


@pytest.mark.parametrize(
    ("names", "written", "source"),
    [
        ((), (), None),
        (("nvidia-container-toolkit", "linux-image-amd64", "dkms"), (), None),
        (("nvidia-open", "libcuda1"), (), "nvidia"),
        (("nvidia-driver-580-open", "cuda-keyring"), (), "nvidia"),
        (("nvidia-driver-580-open=580.159.03-0ubuntu0.24.04.1", "cuda-keyring"), (), "distribution"),
        (("nvidia-driver-580-open=580.95.05-0ubuntu1", "cuda-keyring"), (), "nvidia"),
        (("nvidia-driver-580-server-open",), (), "distribution"),
        (("nvidia-driver",), (REPOSITORY,), "nvidia"),
        (("nvidia-driver", "firmware-nvidia-gsp"), (), "distribution"),
    ],
)
def test_whose_packages_they_are(names: tuple[str, ...], written: tuple[str, ...], source: str | None) -> None:
    packages = [name.partition("=") for name in names]
    facts = bare(packages=tuple(make_package(name, version or "1") for name, _, version in packages))
    assert driver_source(facts.driver, frozenset(written)) == source
