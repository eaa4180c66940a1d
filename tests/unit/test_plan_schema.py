"""docs/plan.schema.json is what the types of the plan say, and a plan has the form that it describes."""

from __future__ import annotations

import json
from typing import Any

from ppdeploy.plan import Plan
from ppdeploy.plan.types import PLAN_SCHEMA
from scripts.plan_schema import PAGE, schema_text
from tests.factories_plan import make_complete_plan


def test_the_schema_in_docs_is_up_to_date() -> None:
    assert PAGE.read_text() == schema_text(), "run python3 scripts/plan_schema.py"


def test_the_version_is_the_plans_own() -> None:
    schema = json.loads(PAGE.read_text())
    assert schema["properties"]["plan_schema"]["default"] == PLAN_SCHEMA
    assert make_complete_plan().model_dump(mode="json")["plan_schema"] == PLAN_SCHEMA


def missing(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> list[str]:
    """Return the paths in a document that the schema does not describe, or that it requires and are absent."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in schema and value is not None:
        schema = next(one for one in schema["anyOf"] if one.get("type") != "null")
        return missing(value, schema, root, path)
    if isinstance(value, dict) and "properties" in schema:
        found = [f"{path}.{key}" for key in value if key not in schema["properties"]]
        found += [f"{path}.{key}" for key in schema.get("required", ()) if key not in value]
        for key in value.keys() & schema["properties"].keys():
            found += missing(value[key], schema["properties"][key], root, f"{path}.{key}")
        return found
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [one for item in value for one in missing(item, schema["items"], root, f"{path}[]")]
    return []


def test_a_plan_has_exactly_the_fields_of_the_schema() -> None:
    schema = json.loads(PAGE.read_text())
    document = make_complete_plan().model_dump(mode="json")
    assert missing(document, schema, schema) == []
    assert missing({**document, "more": 1}, schema, schema) == [".more"]
    del document["pipelines"][0]["outlook"]["links"]
    assert missing(document, schema, schema) == [".pipelines[].outlook.links"]


def test_a_plan_comes_back_from_its_json() -> None:
    plan = make_complete_plan()
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
