"""The plan's page in a real browser: on a phone and on a desk, light and dark.

Screenshots go into PPDEPLOY_SCREENSHOTS, where it names a folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdeploy.plan_page import plan_page
from tests.browser.chromium import Browser, running
from tests.golden.plans.cases import CASES, plan_of
from tests.unit.test_plan_page import hostile

PAGES = (
    "qwen3-32b-fp8-2x-4090-1g",
    "qwen3-32b-2x-4090-1g",
    "deepseek-v3-2x-8-h100",
    "qwen3.5-27b-2x-2-4090",
    "hostile",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every page as a file."""
    made = tmp_path_factory.mktemp("pages")
    for name in PAGES:
        plan = hostile() if name == "hostile" else plan_of(CASES[name], curves=True)
        (made / f"{name}.html").write_text(plan_page(plan))
    return made


def brightness(browser: Browser, what: str) -> float:
    """Return how bright a computed colour of the body is, 0 to 255."""
    text = str(browser.evaluate(f"getComputedStyle(document.body).{what}"))
    return sum(map(float, text[text.index("(") + 1 : -1].split(",")[:3])) / 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", PAGES)
def test_the_page_fits_the_window_and_complains_of_nothing(
    browser: Browser, folder: Path, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    page = folder / f"{name}.html"
    browser.open(page, width=width, dark=dark)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    back, text = brightness(browser, "backgroundColor"), brightness(browser, "color")
    assert (back < 60 and text > 180) if dark else (back > 200 and text < 80)
    # Text in drawings is scaled with them: it must not become too small to read on a phone.
    small = "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height), 99)"
    assert browser.evaluate(small) >= 9
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    shots = Path(os.environ.get("PPDEPLOY_SCREENSHOTS") or tmp_path)
    target = shots / f"{name}-{width}-{'dark' if dark else 'light'}.png"
    browser.screenshot(target)
    assert target.read_bytes().startswith(b"\x89PNG")
    assert target.stat().st_size > 10_000


def test_a_page_that_is_too_wide_or_throws_is_noticed(browser: Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><div style='width:2000px'>wide</div><script>throw new Error('x')</script>")
    browser.open(bad, width=1200, dark=False)
    assert browser.evaluate("document.documentElement.scrollWidth") > 1200
    assert browser.errors() != []


def test_a_hostile_name_is_shown_as_text(browser: Browser, folder: Path) -> None:
    browser.open(folder / "hostile.html", width=360, dark=False)
    assert browser.evaluate("document.querySelectorAll('script').length") == 0
    assert "<script>alert('x')</script>" in str(browser.evaluate("document.body.innerText"))
