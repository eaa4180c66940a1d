"""Options of `vllm serve` that the plan reads: a value it would misread is refused with what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppdeploy.errors import InputError
from ppdeploy.spec import spec_from_values
from ppdeploy.spec.option_values import CHOICES, FLAGS, MAPS, NUMBERS, check_option_value


def refusal(name: str, value: Any) -> str:
    own = {"ppdeploy_model": "Qwen/Qwen3-32B", "ppdeploy_vllm_args": {name: value}}
    with pytest.raises(InputError) as error:
        spec_from_values({"chat": ["a"]}, {"a": own}, inventory_dir=Path("cluster"))
    return str(error.value)


@pytest.mark.parametrize("name", sorted(NUMBERS))
@pytest.mark.parametrize("value", ["8k", "", "0", "-1", "६४", "9" * 30, 0, -1, 2.5, True, [1], 2**40])
def test_a_number_is_a_whole_one(name: str, value: Any) -> None:
    assert "which is no whole number from 1" in refusal(name, value)
    assert refusal(name, value).endswith(f"write a number such as {name}: 64")


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_a_flag_is_true_or_false_under_its_own_name(name: str) -> None:
    assert check_option_value(name, True) is None
    assert check_option_value(name, False) is None
    assert f"write {name}: true or {name}: false" in refusal(name, "no")
    # The plan looks for the flag, not for its opposite.
    assert refusal(f"no-{name}", True).endswith(f"write {name}: false instead")


@pytest.mark.parametrize("name", sorted(MAPS))
@pytest.mark.parametrize("value", ['{"num_hidden_layers": 4}', [1], "x", 5])
def test_a_map_is_written_as_one(name: str, value: Any) -> None:
    assert refusal(name, value).endswith(f"write a map below {name}, not JSON text")
    assert check_option_value(name, {"num_hidden_layers": 4}) is None


@pytest.mark.parametrize("name", sorted(CHOICES))
def test_a_number_format_is_one_that_vllm_has(name: str) -> None:
    assert all(check_option_value(name, word) is None for word in CHOICES[name])
    for value in ("foo", "fp9", 5, True, ["float16"], {"a": 1}):
        assert "write one of auto, " in refusal(name, value)


def test_text_of_a_template_is_the_number_or_the_truth_value_that_it_means() -> None:
    values = {"max_num_seqs": "64", "enforce-eager": "True", "enable-prefix-caching": "false", "max-logprobs": "5"}
    own = {"ppdeploy_model": "Qwen/Qwen3-32B", "ppdeploy_vllm_args": values}
    spec = spec_from_values({"chat": ["a"]}, {"a": own}, inventory_dir=Path("cluster"))
    assert spec.pipelines[0].vars.vllm_args == {
        "max-num-seqs": 64,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "max-logprobs": "5",
    }


def test_a_quantisation_is_a_word() -> None:
    assert check_option_value("quantization", "fp8") is None
    assert "which is no word" in refusal("quantization", {"weights": "fp8"})


def test_what_the_plan_does_not_read_may_be_anything() -> None:
    assert check_option_value("max-logprobs", "x") is None
    assert check_option_value("max-num-seqs", None) is None
