"""A headless Chromium, driven over its own debugging pipe: JSON messages that end in a zero byte, on two descriptors.

https://chromedevtools.github.io/devtools-protocol/ describes the messages. No port is opened and no driver is needed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 60.0
"""Seconds that an answer may take; a start on a busy machine takes several."""

FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


@dataclass
class Browser:
    """One page of a running browser."""

    process: subprocess.Popen[bytes]
    to_browser: int
    from_browser: int
    session: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What the page told without being asked, in order."""
    _last: int = 0
    _rest: bytes = b""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; AssertionError when the browser refuses it."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result = answer["result"]
                assert isinstance(result, dict)
                return result
            self.events.append(answer)

    def wait(self, method: str) -> None:
        """Wait until the page tells an event, if it has not yet."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Open a file in a window of a width in CSS pixels, in the light or the dark scheme."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("Page.loadEventFired")

    def screenshot(self, target: Path) -> None:
        """Write the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(shot["data"]))

    def errors(self) -> list[str]:
        """Return what the page wrote to its console, threw, or could not load."""
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")
        return [json.dumps(event) for event in self.events if event.get("method") in bad]

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [str(event["params"]["request"]["url"]) for event in sent]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.from_browser], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"the browser said nothing for {PATIENCE:.0f} s"
            more = os.read(self.from_browser, 1 << 20)
            assert more, "the browser ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found = json.loads(message)
        assert isinstance(found, dict)
        return found


def find_chromium() -> str:
    """Return the browser; AssertionError when there is none, for a test that is skipped proves nothing."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "no Chromium is installed: run scripts/bootstrap.sh browser"
    return found


@contextmanager
def running(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile and one blank page; end it at the end."""
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    # Root may not use Chromium's own sandbox.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    # The browser takes commands on descriptor 3 and answers on 4.
    redirect = f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}'
    process = subprocess.Popen(
        ["bash", "-c", redirect, find_chromium(), *FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(command_read, answer_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_read)
    os.close(answer_write)
    browser = Browser(process, command_write, answer_read)
    try:
        targets = browser.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        browser.session = browser.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.call(f"{domain}.enable")
        yield browser
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(command_write)
        os.close(answer_read)
