#!/usr/bin/env python3
"""Write docs/plan.schema.json: the form of `ppdeploy plan --json`, from the types of the plan.

    python3 scripts/plan_schema.py

A test fails while the file says something else than the types.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppdeploy.plan.types import PLAN_SCHEMA, Plan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "plan.schema.json"


def schema_text() -> str:
    """Return the schema as it lies in docs/."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$comment": f"Made by scripts/plan_schema.py from ppdeploy/plan/types.py; plan_schema {PLAN_SCHEMA}.",
        **Plan.model_json_schema(mode="serialization"),
    }
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PAGE.write_text(schema_text(), encoding="utf-8")
