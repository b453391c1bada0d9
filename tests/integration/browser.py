"""A real Chromium, driven by chromedriver over the few WebDriver calls that the tests need."""

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HOW_TO_GET_IT = "chromium and chromedriver are not on PATH (on Debian, as root: ops/dev/ensure-chromium.sh)"
DEADLINE_S = 60.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
    # Without these options the browser contacts its maker's servers at every start.
    *("--disable-background-networking", "--disable-component-update", "--disable-quic"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1"),
)


def require_browser() -> tuple[str, str]:
    """Return the paths of chromium and its driver. Without them the test is skipped, and under ``CI=true`` it
    fails.
    """
    found = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if None in found:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(HOW_TO_GET_IT)
    return found  # type: ignore[return-value]


class Browser:
    """One window of a browser whose profile and log lie in ``folder``."""

    def __init__(self, folder: Path) -> None:
        chromium, driver = require_browser()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "chromedriver.log").open("wb") as log:
            self._driver = subprocess.Popen(
                [driver, "--port=0"], stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        try:
            self._url = f"http://127.0.0.1:{self._port()}"
            options = {"binary": chromium, "args": [*_SWITCHES, f"--user-data-dir={folder / 'profile'}"]}
            wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
            self._session = self._ask("POST", "/session", wanted)["sessionId"]
        except BaseException:
            self._driver.kill()
            self._driver.wait()
            raise

    def _port(self) -> int:
        assert self._driver.stdout is not None
        said = []
        for line in self._driver.stdout:
            if b"started successfully on port" in line:
                return int(line.rstrip(b".\n").rpartition(b" ")[2])
            said.append(line)
        raise AssertionError(f"chromedriver ended with {self._driver.wait()}: {b''.join(said)[-2000:]!r}")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", f"/session/{self._session}")
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=20)
            assert self._driver.stdout is not None
            self._driver.stdout.close()

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        request.method = method
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.loads(answer.read())["value"]

    def _do(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        return self._ask(method, f"/session/{self._session}/{path}", body)

    def forget(self) -> None:
        """Continue in a new window without what pages have stored, for the next test."""
        self._devtools("Network.clearBrowserCookies", {})
        if self.run("return location.protocol").startswith("http"):
            self.run("localStorage.clear()")
        new = self._do("window/new", {"type": "tab"})["handle"]
        self._do("window", method="DELETE")
        self._do("window", {"handle": new})
        self.console()

    def open(self, url: str) -> None:
        self._do("url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """Run a function body in the page, and return its value."""
        return self._do("execute/sync", {"script": script, "args": list(arguments)})

    def text(self, css: str) -> str:
        return self.run("const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", css)

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll until true; fails with the page's text."""
        end = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            assert time.monotonic() < end, f"waited for {what}; the page says:\n{self.text('body')[:3000]}"
            time.sleep(0.05)
        return value

    def _find(self, css: str) -> str:
        return self._do("element", {"using": "css selector", "value": css})[_ELEMENT]

    def click(self, css: str) -> None:
        self._do(f"element/{self._find(css)}/click")

    def type(self, css: str, text: str) -> None:
        self._do(f"element/{self._find(css)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Send keys to the element with the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._do("actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def press_down(self, css: str) -> None:
        """Press the pointer's button on an element, and hold it until ``let_go``."""
        target = {_ELEMENT: self._find(css)}
        move = {"type": "pointerMove", "duration": 0, "origin": target, "x": 0, "y": 0}
        self._point([move, {"type": "pointerDown", "button": 0}])

    def let_go(self) -> None:
        self._point([{"type": "pointerUp", "button": 0}])

    def _point(self, actions: list[dict[str, Any]]) -> None:
        mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._do("actions", {"actions": [mouse]})

    def console(self) -> list[str]:
        """Return the errors that the page's script or its policy caused since the last call."""
        return [e["message"] for e in self._do("se/log", {"type": "browser"}) if e["level"] == "SEVERE"]

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._do("screenshot", method="GET")))

    def _devtools(self, command: str, parameters: dict[str, Any]) -> None:
        self._do("goog/cdp/execute", {"cmd": command, "params": parameters})
