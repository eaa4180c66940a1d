"""Write docs/checks.md anew from the list of checks; tests/unit/test_check_report.py compares them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ppdeploy.check_report import checks_markdown
from ppdeploy.plan.checks import catalogue

PAGE = Path(__file__).resolve().parents[1] / "docs" / "checks.md"

if __name__ == "__main__":
    PAGE.write_text(checks_markdown(catalogue()), encoding="utf-8")
