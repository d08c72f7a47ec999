"""A Chromium without a window, which opens a page and returns it as PNG once nothing on it moves any more."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import connect
from websockets.sync.connection import Connection

WIDTH, HEIGHT = 1440, 900
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_SECONDS = 60.0
PAGE_SECONDS = 90.0
CLOSE_SECONDS = 10.0
STILL_SECONDS = 6.0  # a canvas has no words to wait for: it is drawn, and moves into place, after the text


class BrowserError(Exception):
    """A picture was not taken; the message says which, and why."""


class Browser:
    """One page of a running browser, driven over the DevTools protocol; `start` makes one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    @classmethod
    @contextlib.contextmanager
    def start(cls, program: str) -> Iterator[Self]:
        """Start the program with a profile of its own, and end it with the context."""
        with tempfile.TemporaryDirectory(prefix="screenshots-", ignore_cleanup_errors=True) as profile:
            arguments = [
                "--headless",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the UI reports to its makers
                "--no-proxy-server",
                "--no-first-run",
                "--no-sandbox",  # containers lack what it needs, and only pages of our own server are opened
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--force-color-profile=srgb",
            ]
            process = subprocess.Popen(
                [program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                address = wait_for_address(Path(profile) / "DevToolsActivePort", process)
                with connect(address, proxy=None, max_size=None) as connection:
                    yield cls(connection)
                    connection.send(json.dumps({"id": 0, "method": "Browser.close"}))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CLOSE_SECONDS)
            finally:
                process.kill()
                process.wait()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        order = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            order["sessionId"] = self._session
        self._connection.send(json.dumps(order))
        while True:
            answer = json.loads(self._connection.recv(PAGE_SECONDS))
            if answer.get("id") != number:  # an event
                continue
            if "error" in answer:
                raise BrowserError(f"`{method}`: {answer['error']['message']}")
            return answer["result"]

    def evaluate(self, script: str) -> Any:
        """Return the value of a script on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"`{script}`: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    def read_text(self) -> str:
        """Return the words on the page."""
        return self.evaluate("document.body ? document.body.innerText : ''")

    def take(self) -> bytes:
        """Return the page as PNG, as it is now."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def show(self, url: str, *, expected: tuple[str, ...], action: str = "", height: int = HEIGHT) -> bytes:
        """Open a page and return it as PNG once it is complete and still.

        Args:
            url: Of the page.
            expected: Words that show that it is complete.
            action: Script that is run on the page again and again until then.
            height: Of the window, in pixels.

        Raises:
            BrowserError: If that takes longer than `PAGE_SECONDS`.
        """
        size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + PAGE_SECONDS
        while missing := [word for word in expected if word not in self.read_text()]:
            if time.monotonic() > deadline:
                raise BrowserError(f"{url} does not show {missing}, but:\n{self.read_text()}")
            self.evaluate(action)
            time.sleep(0.5)
        before, since = b"", time.monotonic()
        while time.monotonic() - since < STILL_SECONDS:
            if time.monotonic() > deadline:
                raise BrowserError(f"{url} does not come to rest within {PAGE_SECONDS:g} s.")
            self.evaluate(action)
            time.sleep(0.5)
            if (now := self.take()) != before:
                before, since = now, time.monotonic()
        return before


def find_program(given: str | None) -> str:
    """Return the program of a browser: the one that is named, or the first on PATH."""
    names = [given] if given else PROGRAMS
    if (program := next(filter(None, map(shutil.which, names)), None)) is None:
        raise BrowserError(f"`{'`, `'.join(names)}`: not on PATH. Install one, or name it with `--browser`.")
    return program


def wait_for_address(file: Path, process: subprocess.Popen[bytes]) -> str:
    """Return the address of the protocol, which the browser writes into its profile."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if len(lines := file.read_text().splitlines()) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.1)
    how = "does not answer" if process.poll() is None else f"ended with exit code {process.returncode}"
    raise BrowserError(f"`{process.args}` {how}. Run it in a shell to see why.")
