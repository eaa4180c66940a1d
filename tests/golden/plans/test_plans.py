"""The plans of real models on clusters that people have, as they were read by hand (REVIEW.md)."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.golden.plans.cases import CASES, FOLDER, kept, plan_of


def same_but_for_rounding(found: Any, wanted: Any) -> bool:
    """Compare data; floating point numbers may differ in their last digits between machines."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same_but_for_rounding(found[key], wanted[key]) for key in found)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same_but_for_rounding, found, wanted))
    if isinstance(found, float) and isinstance(wanted, float):
        return found == pytest.approx(wanted, rel=2e-3)
    return bool(found == wanted)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_one_that_was_reviewed(name: str) -> None:
    found = json.loads(json.dumps(kept(plan_of(CASES[name]).pipelines[0])))
    wanted = json.loads((FOLDER / f"{name}.json").read_text())
    for part, value in wanted.items():
        assert same_but_for_rounding(found[part], value), f"{part}: {found[part]} instead of {value}"


def test_every_plan_has_a_line_of_review_and_no_other_is_kept() -> None:
    review = (FOLDER / "REVIEW.md").read_text()
    assert [name for name in CASES if f"| {name} |" not in review] == []
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)


def test_plans_claim_to_fit_only_what_their_memory_holds() -> None:
    for name in CASES:
        data = json.loads((FOLDER / f"{name}.json").read_text())
        assert data["capacity"]["fits"] == all(row["shortfall_bytes"] == 0 for row in data["memory"]), name
        for row in data["memory"]:
            parts = ("others", "runtime", "weight", "activation", "graph", "kv_used", "free")
            assert sum(row[f"{part}_bytes"] for part in parts) == row["memory_bytes"], name
        assert bool(data["outlook"]["speeds"]) == data["capacity"]["fits"], name


def test_a_plan_of_two_nodes_with_its_speed_takes_less_than_half_a_second() -> None:
    case = CASES["qwen3-32b-fp8-2x-4090-1g"]
    plan_of(case)
    start = time.process_time()
    plan_of(case)
    assert time.process_time() - start < 0.5
