"""A Chromium without a window, driven over its DevTools pipe: what `check_view.py` looks at pages with.

Browser(path) ──open(url)──► evaluate, press, picture; what the page has asked for and complained of
"""

from __future__ import annotations

import base64
import json
import os
import select
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH = 1280
HEIGHT = 800
KEYS = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
KEYS |= {"ArrowDown": 40, "PageDown": 34}
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"


class Browser:
    """One browser with one page; a context manager that ends it."""

    def __init__(self, path: str, patience: float = 60.0) -> None:
        self.requests: list[str] = []
        """Addresses that the page has asked for."""
        self.complaints: list[str] = []
        """Errors and warnings of its console, uncaught errors, and what its policy has blocked."""
        self._patience = patience
        self._number = 0
        self._buffer = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = [
            "--headless=new",
            "--no-sandbox",  # it may be run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}",
            f"--window-size={WIDTH},{HEIGHT}",
        ]
        line = f"exec {shlex.join([path, *flags, 'about:blank'])} 3<&{theirs_in} 4>&{theirs_out}"
        self._process = subprocess.Popen(
            ["bash", "-c", line],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    @property
    def version(self) -> str:
        """Name and version of the browser."""
        session, self._session = self._session, None
        try:
            return str(self.call("Browser.getVersion")["product"])
        finally:
            self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command of the DevTools protocol. RuntimeError where it is refused."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self._patience
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        kind = event.get("method")
        if kind == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif kind == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif kind == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])
        elif kind == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(about["args"]))

    def open(self, url: str, *, dark: bool = False) -> None:
        """Load a page in the light or the dark scheme, and wait until it is drawn."""
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && typeof PAGES === 'object'")
        self.settle()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, waiting for a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true. TimeoutError where it does not become so."""
        until = time.monotonic() + self._patience
        while not self.evaluate(expression):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until what was changed is drawn."""
        self.evaluate(DRAWN)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key where the focus is, as a keyboard does."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 * shift}
        if key == "Enter":
            event["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def busy(self, expression: str, until: str = "true") -> float:
        """Return the seconds of processor time of the main thread, from an expression until something is true
        and drawn.
        """
        self.settle()
        before = self.task_seconds()
        self.evaluate(expression)
        self.wait_for(until)
        self.settle()
        return self.task_seconds() - before

    def task_seconds(self) -> float:
        """Return the seconds of processor time that the main thread has worked."""
        metrics = {one["name"]: one["value"] for one in self.call("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"])

    def picture(self, path: Path, colours: int = 128) -> None:
        """Save what is seen as a PNG of few colours."""
        from io import BytesIO

        from PIL import Image

        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        small = Image.open(BytesIO(data)).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
        path.parent.mkdir(parents=True, exist_ok=True)
        small.save(path, optimize=True)
