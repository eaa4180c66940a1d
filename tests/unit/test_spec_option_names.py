"""A name that vLLM does not have is refused with what is meant, before any host is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppdeploy import locks
from ppdeploy.errors import InputError
from ppdeploy.plan.command import REPEATED, extra_arguments
from ppdeploy.plan.support import UNCOUNTED_OPTIONS
from ppdeploy.spec import Spec, spec_from_values
from ppdeploy.spec.option_names import refused_options
from ppdeploy.spec.option_values import CHOICES, FLAGS, MAPS, NUMBERS, WORDS
from ppdeploy.spec.passthrough import OWNED_FLAGS, SHORT_FORMS, check_vllm_args
from ppdeploy.spec.problems import RefusedItemsError
from ppdeploy.spec.serve_options import FOLDER, PREFIXES, ServeOptions, all_tables, flags, serve_options, tables

GPU = tables("cuda")["0.33.0"]
CPU = tables("cpu")["0.32.0"]
DRAFT = {"name": "draft", "model": "/srv/models/draft", "port": 8100, "gpu_share": 0.2}

#: Of the program `vllm` itself, or of no version that there is a table for.
NOT_OF_SERVE = {"version", "model-tag"}


def spec(args: dict[str, Any] | None = None, **more: Any) -> Spec:
    own = {"ppdeploy_model": "Qwen/Qwen3-32B", "ppdeploy_vllm_args": args or {}}
    own |= {f"ppdeploy_{name}": value for name, value in more.items()}
    return spec_from_values(
        {"chat": ["a", "b"]},
        {"a": own, "b": own},
        inventory_dir=Path("cluster"),
        locate=lambda name: f"hosts.yml ({name})",
    )


def refusal(args: dict[str, Any] | None = None, **more: Any) -> str:
    with pytest.raises(InputError) as error:
        spec(args, **more)
    return str(error.value)


# ---- what a person sees


def test_a_misspelt_name_is_refused_with_the_nearest_and_where_it_stands() -> None:
    assert refusal({"max-num-seq": 64}) == (
        'ppdeploy_vllm_args has the option "max-num-seq", which vLLM 0.33.0 does not have (pipeline chat, '
        "hosts.yml (ppdeploy_vllm_args)): did you mean max-num-seqs? Write the whole name, or remove it"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("enable-prefix-cachng", "enable-prefix-caching"),
        ("enable_prefix_cachng", "enable-prefix-caching"),
        ("no-enable-prefix-cachng", "enable-prefix-caching: false"),
        ("no-enable-prefix-cach", "enable-prefix-caching: false"),
        ("disable-fastapi-doc", "disable-fastapi-docs"),
        ("disable-log-reqests", "enable-log-requests: false"),
        ("max-num-batch", "max-num-batched-tokens"),
        ("max_num_batch", "max-num-batched-tokens"),
        ("tool-call-parsr", "tool-call-parser"),
        ("num-seqs", "max-num-seqs"),
        ("quanti", "quantization or quantization-config"),
        ("prefix-caching", "prefix-caching-hash-algo or enable-prefix-caching"),
        ("mm-", None),
    ],
)
def test_what_is_meant_by_a_name(name: str, meant: str | None) -> None:
    said = refusal({name: 1})
    if meant is None:
        assert "write a long name in small letters" in said
    else:
        assert said.endswith(f"did you mean {meant}? Write the whole name, or remove it")


def test_a_beginning_of_many_names_lists_a_few() -> None:
    said = refusal({"mm": 1})
    begun = [name for name in GPU.kinds if name.startswith("mm")]
    assert len(begun) > 5
    assert f"or {len(begun) - 4} more? Write the whole name" in said


@pytest.mark.parametrize(
    "name", ["max-model-lenn", "gpu-memory-utilisation", "tensor-paralel-size", "servd-model-name"]
)
def test_a_misspelt_name_of_what_ppdeploy_sets_leads_to_its_variable(name: str) -> None:
    said = refusal({name: 1})
    assert "did you mean " in said
    owned = said.split("did you mean ")[1].split("?")[0]
    assert said.endswith(f"? Then {OWNED_FLAGS[owned]}")


def test_a_name_that_is_like_none_is_refused_with_where_the_names_are() -> None:
    assert refusal({"foo": 1}).endswith("remove it, or write a name that `vllm serve --help=all` of 0.33.0 lists")


def test_a_name_of_another_version_is_told_as_such() -> None:
    assert spec({"monokernel": True}).pipelines[0].vars.vllm_args == {"monokernel": True}
    assert 'has the option "monokernel", which vLLM 0.32.0 does not have, and 0.33.0 has (' in refusal(
        {"monokernel": True}, device="cpu"
    )
    # The opposite spelling came with 0.33.0, where it is one more name for what the plan looks for.
    assert "which vLLM 0.32.0 does not have, and 0.33.0 has" in refusal({"disable-prefix-caching": True}, device="cpu")
    assert refusal({"disable-prefix-caching": True}).endswith("write enable-prefix-caching: false instead")


@pytest.mark.parametrize(
    ("args", "write"),
    [
        ({"no-numa-bind": True}, "write numa-bind: false instead"),
        ({"no-numa-bind": False}, "write numa-bind: true instead"),
        ({"no-numa-bind": "x"}, "write numa-bind: true or numa-bind: false instead"),
        ({"enable-fastapi-docs": True}, "write disable-fastapi-docs: false instead"),
        ({"no-seed": True}, "remove it: seed has no form that turns it off"),
        ({"numa-bind": 1}, "write numa-bind: true or numa-bind: false"),
        ({"disable-log-stats": False}, "write disable-log-stats: true, or remove it"),
        ({"seed": True}, "write what it is to be, or remove seed"),
        ({"logits-processors": False}, "write what it is to be, or remove logits-processors"),
        ({"seed": [1, 2]}, "write one value; a list that is JSON is written as text, in quotes"),
    ],
)
def test_a_form_that_the_option_does_not_have_is_refused(args: dict[str, Any], write: str) -> None:
    assert refusal(args).endswith(f": {write}")


def test_forms_that_the_options_have_pass() -> None:
    args: dict[str, Any] = {
        "numa-bind": False,
        "disable-log-stats": True,
        "seed": 1,
        "allowed-origins": '["*"]',
        "logits-processors": ["a:B", "c:D"],
        "middleware": ["e.F", "g.H"],
        "kv-transfer-config": {"a": 1},
    }
    assert spec(args).pipelines[0].vars.vllm_args == args
    words = extra_arguments(args)
    assert words[words.index("--logits-processors") :][:3] == ("--logits-processors", "a:B", "c:D")
    assert words[words.index("--middleware") :][:4] == ("--middleware", "e.F", "--middleware", "g.H")


def test_text_of_a_template_is_the_truth_value_of_any_flag() -> None:
    assert spec({"numa-bind": "True", "disable-log-stats": "true"}).pipelines[0].vars.vllm_args == {
        "numa-bind": True,
        "disable-log-stats": True,
    }


def test_a_sidecar_has_the_options_of_the_same_vllm() -> None:
    said = refusal(sidecars=[{**DRAFT, "vllm_args": {"max-num-seq": 8, "seed": 1}}])
    assert said == (
        'ppdeploy_sidecars: vllm_args of sidecar draft has the option "max-num-seq", which vLLM 0.33.0 does not have '
        "(hosts a, b, hosts.yml (ppdeploy_sidecars)): did you mean max-num-seqs? Write the whole name, or remove it"
    )
    passed = spec(sidecars=[{**DRAFT, "vllm_args": {"max-num-seqs": 8}}])
    assert passed.pipelines[0].hosts[0].vars.sidecars[0].vllm_args == {"max-num-seqs": 8}


def test_all_wrong_names_are_told_at_once() -> None:
    said = refusal({"max-num-seq": 8, "foo": 1, "seed": True}, sidecars=[{**DRAFT, "vllm_args": {"bar": 1}}])
    assert said.count("\n") == 3


def test_names_of_a_version_without_a_table_are_left_to_vllm() -> None:
    args = {"option-of-the-future": "x", "numa-bind": 3}
    taken = spec(args, vllm_version="0.34.0", allow_untested_version=True)
    assert taken.pipelines[0].vars.vllm_args == args


@pytest.mark.parametrize("variable", ["ppdeploy_vllm_version", "ppdeploy_device"])
def test_nothing_is_judged_while_the_version_is_not_rendered(variable: str) -> None:
    own = {"a": {"ppdeploy_model": "gpt2", "ppdeploy_vllm_args": {"foo": 1}}}
    taken = spec_from_values({"chat": ["a"]}, own, inventory_dir=Path("c"), pending={"a": {variable}})
    assert taken.pipelines[0].vars.vllm_args == {"foo": 1}


# ---- what the tables are


@pytest.mark.parametrize("device", PREFIXES)
def test_each_tested_version_has_a_table_and_the_default_is_the_default(device: locks.Device) -> None:
    assert set(tables(device)) == set(locks.TESTED[device])
    default = serve_options(device, None)
    assert default is not None
    assert default.version == locks.default_version(device)
    assert {FOLDER / f"{PREFIXES[one]}{version}.txt" for one in PREFIXES for version in tables(one)} == set(
        FOLDER.iterdir()
    )
    assert {one: prefix.removesuffix("-") for one, prefix in PREFIXES.items()} == locks.DISTRIBUTIONS


@pytest.mark.parametrize("device", PREFIXES)
def test_each_table_was_read_from_the_wheel_that_nodes_install(device: locks.Device) -> None:
    for version, table in tables(device).items():
        mine = [lock for lock in locks.available() if (lock.device, lock.vllm_version) == (device, version)]
        wheels = [wheel for lock in mine for wheel in lock.wheels if wheel.project == locks.DISTRIBUTIONS[device]]
        assert table.wheel in {wheel.sha256 for wheel in wheels}, "make the table anew: scripts/vllm_options.py"


@pytest.mark.parametrize("table", all_tables(), ids=lambda table: table.version)
def test_a_table_has_each_name_once_and_in_order(table: ServeOptions) -> None:
    (file,) = [file for file in FOLDER.iterdir() if file.stem.endswith(f"-{table.version}")]
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(lines)
    assert len(table.kinds) == len(lines) > 300
    assert not set(table.kinds) & set(table.negative)
    assert set(table.short.values()) <= set(table.kinds)


@pytest.mark.parametrize("table", all_tables(), ids=lambda table: table.version)
def test_what_the_plan_reads_is_there_in_the_form_that_it_reads(table: ServeOptions) -> None:
    kinds = table.kinds
    assert {name for name in kinds if kinds[name] in ("flag", "pair")} >= FLAGS
    assert NUMBERS | WORDS | MAPS | set(CHOICES) <= {name for name in kinds if kinds[name] == "value"}
    assert set(kinds) >= UNCOUNTED_OPTIONS
    assert {name for name in kinds if kinds[name] == "repeated"} == REPEATED
    assert flags() >= {name for name in kinds if kinds[name] in ("flag", "pair", "switch")}


@pytest.mark.parametrize("table", all_tables(), ids=lambda table: table.version)
def test_what_ppdeploy_owns_and_every_short_form_is_there(table: ServeOptions) -> None:
    assert set(OWNED_FLAGS) - set(table.kinds) == NOT_OF_SERVE
    ours = {form: name for form, name in SHORT_FORMS.items() if name not in NOT_OF_SERVE}
    # vLLM takes it itself, before its parser does (utils/argparse_utils.py, `-O3`).
    assert table.short == {form: name for form, name in ours.items() if form != "O"}
    assert table.kinds[ours["O"]] == "value"


@pytest.mark.parametrize("table", all_tables(), ids=lambda table: table.version)
def test_every_option_either_passes_or_is_owned(table: ServeOptions) -> None:
    """None is taken for a secret, or for the beginning of another that is owned."""
    for name, kind in table.kinds.items():
        value: Any = kind in ("flag", "pair", "switch") or "x"
        value = 64 if name in NUMBERS else {"a": 1} if name in MAPS else CHOICES.get(name, [value])[0]
        if name in OWNED_FLAGS:
            with pytest.raises(RefusedItemsError) as error:
                check_vllm_args({name: value})
            assert error.value.items == ((f'sets "{name}"', OWNED_FLAGS[name]),)
        else:
            assert refused_options(check_vllm_args({name: value}), table) == []


def test_the_tables_differ_where_the_versions_do() -> None:
    assert set(GPU.kinds) - set(CPU.kinds) == {
        *("monokernel", "reasoning-effort-map", "sleep-mode-backend", "watchdog-config"),
    }
    assert set(CPU.kinds) <= set(GPU.kinds)
    assert GPU.negative["disable-prefix-caching"] == "enable-prefix-caching"
    assert "disable-prefix-caching" not in CPU.negative


def test_a_dotted_name_leads_to_the_option_that_it_names_and_to_no_other() -> None:
    newest = all_tables()[0]
    for name in set(newest.kinds) - set(OWNED_FLAGS):
        with pytest.raises(RefusedItemsError) as error:
            check_vllm_args({f"{name}.x": 1})
        ((_, remedy),) = error.value.items
        assert remedy == f"write a map below {name} instead"
