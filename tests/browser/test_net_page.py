"""The page of `ppdeploy net` in a real browser: on a phone and on a desk, light and dark.

Screenshots go into PPDEPLOY_SCREENSHOTS, where it names a folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppdeploy.net import NetReport, judge
from ppdeploy.net_page import net_page
from tests.browser.chromium import Browser, running
from tests.factories_plan import make_source
from tests.unit.net_views import judged, pair, planned, report, run, seen, sizes
from tests.unit.test_plan_page import HOSTILE


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running(tmp_path_factory.mktemp("profile")) as found:
        yield found


def eight() -> NetReport:
    """Eight nodes of which one is slow one way, and one has vanished."""
    pairs = [pair(f"node{n}", trip=0.0001 * n) for n in range(2, 8)]
    pairs[1] = pair("node3", in_one=run(94.0, 20123), in_many=run(95.0))
    noted = seen(pairs, [*sizes("node1", "node2"), *sizes("node2", "node1")])
    one = judge(planned(8, source=make_source(layers=8)), noted, ("node8",), 4)
    told = "At 953 Mbit/s your network adds 168 ms to the first token of a prompt of 1,024 tokens."
    return report(one.model_copy(update={"sentence": told}))


def hostile() -> NetReport:
    one = judged()
    ways = tuple(way.model_copy(update={"reason": HOSTILE * 3}) for way in one.ways)
    return report(one.model_copy(update={"pipeline": HOSTILE, "ways": ways, "sentence": HOSTILE * 5}))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("name", ["eight", "hostile"])
def test_the_page_fits_the_window_and_complains_of_nothing(
    browser: Browser, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    page = tmp_path / f"net-{name}.html"
    page.write_text(net_page(eight() if name == "eight" else hostile()))
    browser.open(page, width=width, dark=dark)
    # A table that is wider than a phone scrolls in its own box.
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    colour = "getComputedStyle(document.querySelector('.heat td.ready')).backgroundColor"
    assert browser.evaluate(colour) not in ("rgba(0, 0, 0, 0)", "transparent")
    assert browser.errors() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    target = (
        Path(os.environ.get("PPDEPLOY_SCREENSHOTS") or tmp_path)
        / f"net-{name}-{width}-{'dark' if dark else 'light'}.png"
    )
    browser.screenshot(target)
    assert target.stat().st_size > 10_000


def test_the_heat_tells_slow_from_ready(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "net.html"
    page.write_text(net_page(eight()))
    browser.open(page, width=1200, dark=False)
    colours = "new Set([...document.querySelectorAll('.heat td[style]')].map(c => getComputedStyle(c).backgroundColor))"
    assert browser.evaluate(f"{colours}.size") >= 4
