"""Facts as the package reads them: saved and loaded unchanged, and nonsense named with its host and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ppdeploy.errors import InputError
from ppdeploy.facts import Clock, NodeFacts, load_facts, save_facts
from tests.factories import make_cluster, make_facts, make_gpu, make_nic


def returned(facts: NodeFacts) -> dict[str, Any]:
    """What Ansible registers when the module returns these facts."""
    return {"changed": False, "failed": False, "facts": facts.model_dump(mode="json")}


def test_saved_facts_come_back_equal(tmp_path: Path) -> None:
    facts = make_cluster(3, gpus=2, loopback_name=True)
    file = tmp_path / "facts.json"
    save_facts(file, facts)
    assert load_facts(file) == facts


def test_saving_leaves_no_other_file(tmp_path: Path) -> None:
    save_facts(tmp_path / "facts.json", make_cluster(1))
    save_facts(tmp_path / "facts.json", make_cluster(2))
    assert [p.name for p in tmp_path.iterdir()] == ["facts.json"]


def test_saving_where_no_folder_is_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"facts cannot be written.*absent/facts.json"):
        save_facts(tmp_path / "absent" / "facts.json", make_cluster(1))


def test_a_task_result_and_its_facts_alone_read_the_same() -> None:
    facts = make_facts(gpus=1)
    assert NodeFacts.from_module("node1", returned(facts)) == facts
    assert NodeFacts.from_module("node1", returned(facts)["facts"]) == facts


def test_facts_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_facts().memory.total_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (
            {"failed": True, "msg": "python3 not found"},
            r"no facts were read: python3 not found \(host node7\)",
        ),
        ({"unreachable": True, "msg": "no route to host"}, r"no route to host \(host node7\)"),
        ({"skipped": True}, r"the task was skipped \(host node7\)"),
        ({"changed": False}, r"schema_version: Field required, and \d+ more \(host node7\)"),
        ({"facts": "none"}, r"the whole: Input should be an object \(host node7\)"),
        ({"facts": {1, 2}}, r"not plain data.*\(host node7\)"),
        (["facts"], r"not a mapping \(host node7\)"),
    ],
)
def test_nonsense_is_refused_with_the_hosts_name(result: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        NodeFacts.from_module("node7", result)
    assert caught.value.exit_code == 2
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("gpus", "two", "gpus: Input should be a valid array"),
        ("elapsed_s", "fast", "elapsed_s: Input should be a valid number"),
        ("nics", [{"name": "eth0"}], r"nics.0.index: Field required"),
        ("schema_version", 2, "schema_version: Input should be 1"),
        ("surprise", 1, "surprise: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, said: str) -> None:
    result = returned(make_facts())
    result["facts"][field] = value
    with pytest.raises(InputError, match=said):
        NodeFacts.from_module("node7", result)


def test_a_number_is_not_taken_from_a_text() -> None:
    result = returned(make_facts(gpus=1))
    result["facts"]["gpus"][0]["memory_total_mib"] = "24564"
    with pytest.raises(InputError, match=r"gpus.0.memory_total_mib"):
        NodeFacts.from_module("node7", result)


def test_what_the_node_could_not_read_is_told_in_its_own_words() -> None:
    result = returned(make_facts())
    result["facts"]["memory"] = None
    result["facts"]["problems"] = [{"fact": "memory", "reason": "/proc/meminfo: Permission denied"}]
    with pytest.raises(InputError, match=r"memory cannot be read there: /proc/meminfo: Permission denied"):
        NodeFacts.from_module("node7", result)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a facts file"),
        ('{"hosts": {}}', "not a facts file"),
        ('{"kind": "ppdeploy-facts", "schema_version": 1, "hosts": []}', "not a facts file"),
        (
            '{"kind": "ppdeploy-facts", "schema_version": 99, "hosts": {}}',
            "version 99, this ppdeploy reads 1",
        ),
        (
            '{"kind": "ppdeploy-facts", "schema_version": 1, "hosts": {"node7": {}}}',
            r"\(.*facts.json, host node7\)",
        ),
    ],
)
def test_a_file_that_holds_no_facts_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "facts.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said) as caught:
        load_facts(file)
    assert str(file) in str(caught.value)


def test_an_absent_file_and_one_of_other_bytes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"No such file.*absent\.json"):
        load_facts(tmp_path / "absent.json")
    (tmp_path / "latin.json").write_bytes(b'{"kind": "\xe9"}')
    with pytest.raises(InputError, match=r"not JSON.*latin\.json"):
        load_facts(tmp_path / "latin.json")


def test_nics_are_found_by_name_and_address() -> None:
    facts = make_facts(number=4)
    assert facts.nic("eno1") is facts.nic_with("192.0.2.14")
    assert facts.nic_with("198.51.100.14") is facts.nic("enp1s0")
    assert facts.nic("eth9") is None
    assert facts.nic_with("198.51.100.1") is None


def test_the_problem_of_a_fact_covers_its_parts() -> None:
    facts = make_facts(gpus=0)
    assert facts.problem("gpus") == "nvidia-smi is not installed"
    assert facts.problem("gpu") is None
    assert make_facts(gpus=1).problem("gpus") is None


def test_the_loopback_trap_is_seen() -> None:
    assert make_facts(loopback_name=True).identity.resolves_to_loopback
    assert not make_facts().identity.resolves_to_loopback


@pytest.mark.parametrize(
    ("operstate", "carrier", "up"),
    [
        ("up", True, True),
        ("down", None, False),
        ("unknown", True, True),
        ("unknown", None, True),
        ("unknown", False, False),
    ],
)
def test_a_nic_that_never_says_up_counts_by_its_carrier(operstate: str, carrier: bool | None, up: bool) -> None:
    assert make_nic(operstate=operstate, carrier=carrier).up is up


def test_an_address_knows_its_network() -> None:
    address = make_nic("enp1s0", "198.51.100.11/24").addresses[0]
    assert str(address.interface.network) == "198.51.100.0/24"


def test_factories_keep_to_what_they_are_told() -> None:
    facts = make_facts("big", gpus=[make_gpu(0, "H200"), make_gpu(1, "T4")], disks={"/opt/ppdeploy": 1.5})
    assert [g.memory_total_mib for g in facts.gpus] == [143771, 15360]
    assert facts.disks[0].free_bytes == 3 * 1024**3 // 2
    saved = json.loads(json.dumps(returned(facts)))
    assert NodeFacts.from_module("big", saved) == facts


@pytest.mark.parametrize(
    ("node_time", "surely_wrong"), [(1000.0, False), (1002.9, False), (999.5, True), (1003.5, True)]
)
def test_a_clock_is_wrong_when_it_lies_outside_the_call(node_time: float, surely_wrong: bool) -> None:
    clock = Clock(node_time=node_time, controller_time=1000.0, offset_s=node_time - 1000.0)
    bounds = clock.offset_bounds(received=1003.0)
    assert bounds is not None
    assert bounds == pytest.approx((node_time - 1003.0, node_time - 1000.0))
    assert (not bounds[0] <= 0 <= bounds[1]) is surely_wrong


def test_no_controller_time_gives_no_bounds() -> None:
    assert Clock(node_time=1.0, controller_time=None, offset_s=None).offset_bounds(2.0) is None
