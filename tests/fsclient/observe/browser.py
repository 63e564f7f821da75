"""Headless Chromium, driven through its debugging pipe: no port, and no library."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
NEEDED = "needs chromium: apt-get install chromium"
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--no-first-run", "--remote-debugging-pipe",
)  # fmt: skip
_ABOVE = 10  # descriptors that bash may not give another meaning


class Page:
    """One tab."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = answers
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session = ""
        self.errors: list[str] = []
        found = self.ask("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in found if each["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **words: Any) -> Any:
        """Send a command; its result. Errors of the page that come meanwhile are noted."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": words}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def _next(self) -> Any:
        while b"\0" not in self._buffer:
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: Any) -> None:
        words = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(words["exceptionDetails"]))
        elif event.get("method") == "Runtime.consoleAPICalled" and words["type"] == "error":
            self.errors.append(json.dumps(words["args"]))
        elif event.get("method") == "Log.entryAdded" and words["entry"]["level"] == "error":
            self.errors.append(json.dumps(words["entry"]))

    def open(self, url: str, width: int, height: int) -> None:
        """Load a page as a phone of that size shows it."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2, mobile=True,
        )  # fmt: skip
        self.ask("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        done = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def save_png(self, path: Path) -> None:
        """All of the page as it is now."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """A browser of its own, with its files in `profile`."""
    assert CHROMIUM is not None
    pipes = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for end in _two_pipes()]
    theirs_in, commands, answers, theirs_out = pipes
    words = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    try:
        with subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs_in, theirs_out),
        ) as running:
            for end in (theirs_in, theirs_out):
                os.close(end)
            pipes = [commands, answers]
            try:
                page = Page(commands, answers)
                yield page
            finally:
                running.kill()
    finally:
        for end in pipes:
            os.close(end)


def _two_pipes() -> Iterator[int]:
    """Both ends of two pipes, each closed once it has been copied."""
    for _ in range(2):
        for end in os.pipe():
            yield end
            os.close(end)
