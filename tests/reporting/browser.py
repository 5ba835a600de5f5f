"""A chromium without a window, spoken to over a pipe: enough of the DevTools protocol to look at one page.

Messages are JSON ended by a zero byte: the browser reads them from its file descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT = 120.0  # seconds; a loaded machine may take long to start a browser


def find_browser() -> str | None:
    """The program to start, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


# Gives two descriptors the numbers that the browser wants, by way of higher ones: either may be 3 or 4 itself.
_AS_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page in one browser; use as a context."""

    def __init__(self, program: str, profile: Path) -> None:
        reads, self.writing = os.pipe()
        self.reading, writes = os.pipe()
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", _AS_3_AND_4, str(reads), str(writes), program, *options],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (reads, writes):
            os.close(end)
        self.number, self.left, self.events = 0, b"", []
        target = self.call("Target.createTarget", url="about:blank", session=False)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True, session=False)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.writing)
        os.close(self.reading)

    def call(self, method: str, *, session: bool = True, **parameters: Any) -> dict[str, Any]:
        """Ask and wait for the answer; what else the browser says meanwhile is kept in ``events``."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = self.session
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        while (heard := self._next(method)).get("id") != self.number:
            self.events.append(heard)
        assert "error" not in heard, f"{method}: {heard['error']}"
        return heard["result"]

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Show a file in a window of this size and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next("loading"))

    def value(self, script: str) -> Any:
        """What an expression is in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """What the page has said on the console, and what it has asked for beside itself."""
        self.value("new Promise(done => setTimeout(done, 50))")
        found = []
        for event in self.events:
            method, said = event.get("method"), event.get("params", {})
            if method == "Log.entryAdded":
                found.append(said["entry"]["text"])
            elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                found.append(json.dumps(said)[:300])
            elif method == "Network.requestWillBeSent" and not said["request"]["url"].startswith(("file:", "data:")):
                found.append(f"asked for {said['request']['url']}")
        return found

    def pdf(self, path: Path) -> None:
        """The page as it would be printed on A4."""
        printed = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=False)
        path.write_bytes(base64.b64decode(printed["data"]))

    def _next(self, what: str) -> dict[str, Any]:
        until = time.monotonic() + WAIT
        while b"\0" not in self.left:
            assert self.process.poll() is None, f"the browser ended during {what}"
            ready, _, _ = select.select([self.reading], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"no answer from the browser within {WAIT:g} s: {what}"
            self.left += os.read(self.reading, 1 << 16)
        message, _, self.left = self.left.partition(b"\0")
        return json.loads(message)
