"""Headless Chromium over its DevTools pipe: opens a page, reports its console and requests, runs scripts in it."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


class Chromium:
    """One browser, one page. `complaints`: what the page wrote to its console. `requests`: the URLs it asked for."""

    def __init__(self) -> None:
        assert EXECUTABLE is not None
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        browser_reads, self._commands = os.pipe()
        answers, browser_writes = os.pipe()
        self._answers = os.fdopen(answers, "rb")
        # Chromium reads commands from descriptor 3 and answers on 4; a shell puts them there.
        script = f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}'
        self._browser = subprocess.Popen(
            ["bash", "-c", script, "bash", EXECUTABLE, *_OPTIONS, f"--user-data-dir={self._home.name}", "about:blank"],
            pass_fds=(browser_reads, browser_writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_reads)
        os.close(browser_writes)
        self._last, self._session = 0, ""
        self._events: list[dict[str, Any]] = []
        page = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._commands)
        self._answers.close()
        self._browser.kill()
        self._browser.wait()
        self._home.cleanup()

    @property
    def complaints(self) -> list[str]:
        return [json.dumps(event["params"]) for event in self._events if event["method"] in _COMPLAINTS]

    @property
    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self._events if e["method"] == "Network.requestWillBeSent"]

    def open(self, file: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a local file and wait until it is drawn."""
        self._events.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=file.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read()
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def move_mouse(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path) -> None:
        """Of the whole page, for a person to look at."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        command = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]

    def _read(self) -> dict[str, Any]:
        """The next message; events are kept."""
        received = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            received += byte
        message: dict[str, Any] = json.loads(received)
        if "method" in message:
            self._events.append(message)
        return message
