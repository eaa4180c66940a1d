"""The page of variables and the first inventory are what the schema makes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdeploy.errors import InputError
from ppdeploy.spec import load_inventory
from ppdeploy.spec.docs import check_docs, variables_markdown
from ppdeploy.spec.example import EXAMPLE_HOSTS, example_text
from ppdeploy.spec.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[2]


def chat(text: str, pipeline: str = "chat") -> dict[str, Any]:
    group = yaml.safe_load(text)["all"]["children"]["vllm"]["children"][pipeline]
    assert isinstance(group, dict)
    return group


def test_the_page_of_variables_is_made_from_the_schema() -> None:
    check_docs(ROOT / "docs/variables.md")


def test_a_page_that_differs_is_told(tmp_path: Path) -> None:
    page = tmp_path / "variables.md"
    with pytest.raises(InputError, match=r"run `ppdeploy docs-variables > "):
        check_docs(page)
    page.write_text(variables_markdown().replace("8000", "8001", 1))
    with pytest.raises(InputError, match="not the one that the schema makes"):
        check_docs(page)
    page.write_text(variables_markdown())
    check_docs(page)


def test_every_variable_has_its_row_with_unit_and_default() -> None:
    for variable in VARIABLES.values():
        cells = next(
            re.split(r"(?<!\\) \| ", line.strip("| "))
            for line in variables_markdown().splitlines()
            if line.startswith(f"| `{variable.name}` ")
        )
        assert len(cells) == 5, variable.name
        assert cells[3].strip() == variable.unit
        assert cells[4], variable.name


def test_no_table_of_the_page_is_broken() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", variables_markdown(), re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


def test_the_example_is_what_init_writes() -> None:
    text = (ROOT / "inventory/example/hosts.yml").read_text()
    assert text == example_text()
    marked = [line for line in text.splitlines() if re.search(r"# <-- \d$", line)]
    assert len(marked) == 3
    assert "Three lines are yours to edit" in text


def test_init_writes_an_inventory_that_loads(tmp_path: Path) -> None:
    hosts = ["head=admin@198.18.0.11:2222", "198.18.0.12"]
    text = example_text(
        hosts, "./models: big", user="me", variables={"ppdeploy_device": "cpu", "ppdeploy_env": {"A": 1}}
    )
    assert "<--" not in text
    (tmp_path / "hosts.yml").write_text(text)
    loaded = load_inventory(tmp_path)
    pipeline = loaded.spec().pipelines[0]
    assert [(host.name, host.address) for host in pipeline.hosts] == [("head", "198.18.0.11"), ("gpu-2", "198.18.0.12")]
    assert loaded.ssh_ports == {"head": 2222}
    assert (pipeline.vars.model, pipeline.vars.device, pipeline.vars.env) == ("./models: big", "cpu", {"A": "1"})
    assert chat(text)["vars"]["ansible_user"] == "me"
    assert chat(text)["hosts"]["head"]["ansible_user"] == "admin"


def test_what_the_example_comments_out_is_right_too(tmp_path: Path) -> None:
    text = example_text(["198.18.0.11", "198.18.0.12"])
    text = re.sub(r"^( +)# (ppdeploy_\w+: |ansible_user: )", r"\1\2", text, flags=re.MULTILINE)
    (tmp_path / "hosts.yml").write_text(text)
    vars_ = load_inventory(tmp_path).spec().pipelines[0].vars
    assert (str(vars_.fabric_subnet), vars_.max_model_len, vars_.vllm_args) == (
        "198.51.100.0/24",
        16384,
        {"max-num-seqs": 64},
    )


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_pipeline_has_as_many_hosts_as_are_named(count: int) -> None:
    hosts = [f"198.18.0.{10 + number}" for number in range(count)]
    assert list(chat(example_text(hosts))["hosts"]) == [f"gpu-{number + 1}" for number in range(count)]


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ([], "no host is named"),
        (["198.18.0.11", "198.18.0.11"], "two hosts have one address, 198.18.0.11"),
        (["a=198.18.0.11", "a=198.18.0.12"], "two hosts have one name, a"),
        (["198.18.0.256"], "is no IP address"),
        (["a b"], "names no host"),
        (["198.18.0.11:99999"], "is no port"),
        (["[2001:db8::1"], "names no host"),
        (["-o x"], "names no host"),
        (["a\nb"], "names no host"),
        ([""], "names no host"),
    ],
)
def test_a_host_that_cannot_be_one_is_told(hosts: list[str], reason: str) -> None:
    with pytest.raises(InputError, match=re.escape(reason)):
        example_text(hosts)


def test_a_model_or_pipeline_or_variable_that_cannot_be_one_is_told() -> None:
    for model in ("", " ", "a\nb"):
        with pytest.raises(InputError, match="the model has no usable name"):
            example_text(model=model)
    for pipeline in ("vllm", "My Pipeline"):
        with pytest.raises(InputError, match="is no name for a pipeline"):
            example_text(pipeline=pipeline)
    with pytest.raises(InputError, match='the variable "ppdeploy_x" is not known'):
        example_text(variables={"ppdeploy_x": 1})


@settings(max_examples=150)
@given(
    hosts=st.lists(st.text("a1.:@=[]-\n ", max_size=8), max_size=3) | st.just(list(EXAMPLE_HOSTS)),
    model=st.text(st.characters(), min_size=1, max_size=20) | st.text("a: #'\"{}-?!&*|>%@`~yes012", max_size=8),
    user=st.none() | st.text("a: #'\"{}-", max_size=6),
)
def test_whatever_is_written_reads_back_as_it_was(hosts: list[str], model: str, user: str | None) -> None:
    try:
        text = example_text(hosts, model, user=user)
    except InputError:
        return
    group = chat(text)
    assert group["vars"]["ppdeploy_model"] == model
    assert group["vars"].get("ansible_user", "") == (user or "")
    assert len(group["hosts"]) == len(hosts)
    for written in group["hosts"].values():
        assert isinstance(written["ansible_host"], str)
