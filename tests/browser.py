"""A headless Chromium for tests, driven through chromedriver with plain requests of the W3C WebDriver protocol."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.kafka_jobs import wait_until

#: A name that the browser takes for 127.0.0.1. It is no loopback address to it.
NAME = "page.example"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
TAB, ENTER = "\ue004", "\ue007"


def is_installed() -> bool:
    """Return whether this machine has a browser and its driver (Debian: ``chromium`` and ``chromium-driver``)."""
    return (
        shutil.which("chromedriver") is not None
        and (shutil.which("chromium") or shutil.which("google-chrome")) is not None
    )


class Browser:
    """One browser window."""

    def __init__(self, address: str, session: str) -> None:
        self._address, self._session = address, f"/session/{session}"

    def open(self, address: str) -> None:
        """Load a page."""
        self._ask("POST", "/url", {"url": address})

    def script(self, body: str, *arguments: object) -> Any:
        """Run JavaScript from the test and return its result. The page itself contains no JavaScript."""
        return self._ask("POST", "/execute/sync", {"script": body, "args": list(arguments)})

    def keys(self, text: str) -> None:
        """Type text into the element that has the focus."""
        typed = [{"type": kind, "value": one} for one in text for kind in ("keyDown", "keyUp")]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": typed}]})

    def click(self, css: str) -> None:
        """Click the first element that matches a CSS selector."""
        found = self._ask("POST", "/element", {"using": "css selector", "value": css})
        self._ask("POST", f"/element/{found[_ELEMENT]}/click", {})

    def text(self) -> str:
        """Return the text that a person sees."""
        return str(self.script("return document.body.innerText"))

    def log(self) -> list[str]:
        """Return the browser's complaints since the last call, such as errors and blocked content."""
        return [entry["message"] for entry in self._ask("POST", "/se/log", {"type": "browser"})]

    def device(self, width: int, height: int, *, dark: bool = False) -> None:
        """Emulate a device's window size and its light or dark preference."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        preference = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._devtools("Emulation.setEmulatedMedia", {"features": preference})

    def screenshot(self) -> bytes:
        """Return the window as a PNG image."""
        return base64.b64decode(self._ask("GET", "/screenshot"))

    def _devtools(self, command: str, parameters: dict[str, object]) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        return _ask(self._address, method, self._session + path, body)


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser for the duration of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _is_ready(address))
        switches = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        switches.append(f"--host-resolver-rules=MAP {NAME} 127.0.0.1")
        wanted = {"goog:chromeOptions": {"args": switches}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _ask(address, "POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            _ask(address, "DELETE", f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait()


def _is_ready(address: str) -> bool:
    try:
        return bool(_ask(address, "GET", "/status")["ready"])
    except OSError:
        return False


def _ask(address: str, method: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
