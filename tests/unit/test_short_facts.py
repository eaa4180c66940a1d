"""Facts written by hand: what they become, what they are called, and how they are refused."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.errors import InputError
from ppdeploy.facts import Tunnelling, load_facts, save_facts
from ppdeploy.plan.environment import OF_TUNNELS
from ppdeploy.plan.gpus import GPUS, MIB
from ppdeploy.short_facts import FIELDS, ShortFacts, expand, make_gpu, rate_mbit, read_facts
from ppdeploy.spec import Spec
from tests.factories import make_cluster
from tests.factories_plan import make_pipeline_spec, make_spec


def spec(**wants: Any) -> Spec:
    return make_spec(make_pipeline_spec(["node1", "node2"], **wants))


def read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "facts.yml"
    file.write_text(text)
    read_facts(file, spec())


def test_a_few_words_become_facts(tmp_path: Path) -> None:
    file = tmp_path / "facts.yml"
    file.write_text('node1: {gpus: ["RTX 4090", "RTX 4090"], fabric: 2.5g, memory_gib: 128}\nnode2: {gpus: [L4]}\n')
    facts, assumed = read_facts(file, spec())
    assert assumed == ("node1", "node2")
    assert [gpu.memory_total_mib for gpu in facts["node1"].gpus] == [24564, 24564]
    assert facts["node1"].gpus[0].compute_capability == "8.9"
    assert facts["node1"].nics[0].speed_mbit == 2500
    assert facts["node2"].nics[0].speed_mbit == 1000
    assert facts["node1"].memory.total_bytes == 128 * 2**30


def test_a_saved_file_is_read_as_it_is(tmp_path: Path) -> None:
    saved = make_cluster(2)
    save_facts(tmp_path / "facts.json", saved)
    assert read_facts(tmp_path / "facts.json", spec()) == (saved, ())


def test_assumed_hosts_have_what_a_tunnel_takes() -> None:
    (made,) = expand({"node1": ShortFacts(gpus=("H100",))}, spec()).values()
    assert {one.value for kind in OF_TUNNELS.values() for one in kind} <= set(made.tools)


def test_expanded_facts_can_be_saved_and_read(tmp_path: Path) -> None:
    made = expand({"node1": ShortFacts(gpus=("H100",))}, spec())
    save_facts(tmp_path / "facts.json", made)
    assert load_facts(tmp_path / "facts.json") == made


@pytest.mark.parametrize(
    ("text", "name", "mib"),
    [
        ("RTX 4090", "GeForce RTX 4090", 24564),
        ("RTX 4090 24 GiB", "GeForce RTX 4090", 24564),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090", 24564),
        ("RTX 4060 Ti 16GB", "GeForce RTX 4060 Ti", 16380),
        ("A100 40 GiB", "A100-SXM4-40GB", 40960),
        ("A100", "A100-SXM4-80GB", 81920),
        ("A100 80GB PCIe", "A100 80GB PCIe", 81920),
        ("L40S 48 GiB", "L40S", 46068),
        ("DGX Spark", "GB10", 122502),
        ("RTX 4090 48 GiB", "GeForce RTX 4090", 49152),
        ("MadeUp 9000 32 GiB", "MadeUp 9000", 32768),
    ],
)
def test_gpus_are_known_by_the_names_that_people_use(text: str, name: str, mib: int) -> None:
    gpu = make_gpu(0, text, "test")
    assert (gpu.name, gpu.memory_total_mib) == (name, mib)


@pytest.mark.parametrize(
    ("text", "near"), [("RTX 4O90", "RTX 4090"), ("rtx4090", "RTX 4090"), ("H10O", None), ("Foo 9000", None)]
)
def test_a_misspelt_gpu_is_told_with_the_card_that_was_meant(text: str, near: str | None) -> None:
    with pytest.raises(InputError) as caught:
        make_gpu(0, text, "test")
    assert (caught.value.remedy or "").startswith(f"write {near}; or" if near else "write its memory")


def test_an_encrypted_fabric_can_be_planned_from_a_few_words() -> None:
    made = expand({"node1": ShortFacts(gpus=("H100",))}, spec())
    assert made["node1"].tunnel == Tunnelling(kernel=True, tun=True, public_key=None)


def test_every_gpu_of_the_table_can_be_named() -> None:
    for row in GPUS:
        gpu = make_gpu(0, f"{row.name} {row.memory_bytes / MIB / 1024:.2f} GiB", "test")
        assert gpu.memory_total_mib * MIB == row.memory_bytes, row.name


def test_addresses_follow_the_inventory() -> None:
    made = expand({"node1": ShortFacts(), "node2": ShortFacts()}, spec(fabric_subnet="192.0.2.0/24"))
    assert [made[host].nics[0].addresses[0].address for host in made] == ["192.0.2.1", "192.0.2.2"]
    with pytest.raises(InputError, match="more hosts than addresses"):
        expand({f"node{n}": ShortFacts() for n in range(4)}, spec(fabric_subnet="192.0.2.0/30"))


@pytest.mark.parametrize(
    ("text", "mbit"), [("1g", 1000), ("2.5G", 2500), ("10 Gbit/s", 10000), ("25gbe", 25000), ("100m", 100)]
)
def test_rates_are_read(text: str, mbit: int) -> None:
    assert rate_mbit(text, "test") == mbit


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "",
        "[]",
        "node1: 5",
        "node1: {gpu: [L4]}",
        "node1: {gpus: L4}",
        "node1: {gpus: [nothing]}",
        "node1: {fabric: fast}",
        "node1: {memory_gib: -1}",
        "node1: {memory_gib: .nan}",
        "node1: [",
        "\x00",
    ],
)
def test_what_is_no_facts_file_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert caught.value.where
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("node1: 5", "what is said of the host is 5, not a map"),
        ("node1:", "what is said of the host is null, not a map"),
        ("node1: {gpus: L4}", 'gpus is "L4", not a list of names'),
        ("node1: {gpu: [L4]}", '"gpu" is none of the fields gpus, fabric, memory_gib, cores, machine'),
        ("node1: {memory_gib: lots}", 'memory_gib is "lots", not a number above 0'),
        ("node1: {machine: arm}", 'machine is "arm", not x86_64 or aarch64'),
        ("node1: {cores: 0}", "cores is 0, not a whole number from 1"),
        ("node1: {}\nnode2: [", "the facts file is neither YAML nor JSON (line 2)"),
        ("[1, 2]", "the facts file holds no hosts by name"),
    ],
)
def test_what_is_wrong_is_said_in_words_that_its_writer_used(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert caught.value.what == what


def test_every_field_is_described() -> None:
    assert set(FIELDS) == set(ShortFacts.model_fields)


@pytest.mark.parametrize("size", ["0", "0.1", "100000000000"])
def test_memory_that_no_gpu_has_is_refused(size: str) -> None:
    with pytest.raises(InputError) as caught:
        make_gpu(0, f"MadeUp {size} GiB", "test")
    assert caught.value.what == f"the GPU 'MadeUp {size} GiB' has {size} GiB of memory"
    assert caught.value.remedy == "write what it has, as in 'MadeUp 24 GiB'"


@settings(max_examples=100)
@given(st.text(max_size=30))
def test_no_name_of_a_gpu_is_a_traceback(text: str) -> None:
    with suppress(InputError):
        assert make_gpu(0, text, "test").memory_total_mib > 0
